"""Decides which kind of executor serves a model name; executors of other kinds stay out.

The kind is `ExecHello.model_digest`: weights, dtype, KV format and deterministic mode. The setting
`model_digest`, or else the first executor, decides. Another kind takes over when every executor of the first
has died or drains. With `accept_mixed` all kinds serve.

A request stays with the kind that has generated its tokens: other weights would not continue the text that
its client has read. If that kind is gone it fails with a typed error; a request with checkpoints, which has
one plain answer, starts over when it is taken over. A request without tokens starts anywhere.
"""

from __future__ import annotations

from services.scheduler.state.requests import Request
from services.scheduler.state.state import Executor, ModelKind, State
from shared.messages import ExecHello, Tokenized

SHOWN = 12  # characters of a digest


def refusal(state: State, hello: ExecHello) -> str:
    """Why an executor stays out; empty if it may join."""
    if state.limits.accept_mixed:
        return ""
    wanted = state.limits.model_digest
    if wanted and hello.model_digest != wanted:
        return (
            f"its model digest is {_shown(hello)}, and {wanted[:SHOWN]} is configured (model_digest): "
            f"{_differences(state, hello, wanted)}; or change the setting"
        )
    kind = state.model_kinds.get(hello.model)
    if kind is None or kind.digest == hello.model_digest or kind.members <= {hello.executor}:
        return ""
    return (
        f"its model digest is {_shown(hello)}, and {', '.join(sorted(kind.members))} of {hello.model!r} "
        f"has {kind.digest[:SHOWN] or 'none'}: {_differences(state, hello, kind.digest)}; or start it with "
        "another --model-name, or the scheduler with --accept-mixed. It takes over when none of those is left"
    )


def _differences(state: State, hello: ExecHello, digest: str) -> str:
    """What differs between an executor and those with a model digest, and how to start it instead."""
    known = [*(e.hello for e in state.executors.values()), *(e.hello for e in state.asleep.values())]
    like = (each for each in known if (each.model, each.model_digest) == (hello.model, digest))
    if (theirs := next(like, hello)).flags == hello.flags and theirs.weights == hello.weights:
        return "start it with the same weights, dtype, KV format and deterministic mode"
    found = []
    if theirs.weights != hello.weights:
        shown = f"{hello.weights[:SHOWN]} and theirs {theirs.weights[:SHOWN]}"
        found.append(f"the digest of its weights is {shown}: start it with the same file")
    if other := [flag for flag in hello.flags if flag not in theirs.flags]:
        instead = [flag for flag in theirs.flags if flag not in hello.flags]
        found.append(f"it runs with {' '.join(other)}: start it with {' '.join(instead)}")
    return ", and ".join(found)


def joined(state: State, hello: ExecHello) -> None:
    """Note that an executor serves. The first of a model decides its kind."""
    state.excluded.pop(hello.executor, None)
    kind = state.model_kinds.get(hello.model)
    if kind is None or kind.members <= {hello.executor}:
        kind = state.model_kinds[hello.model] = ModelKind(hello.model_digest)
    if kind.digest == hello.model_digest:
        kind.members.add(hello.executor)


def left(state: State, executor_id: str) -> list[ExecHello]:
    """Note that an executor is gone or drains. Returns the excluded executors that may join now: all of the
    kind that has waited longest."""
    state.excluded.pop(executor_id, None)
    next_ones: list[ExecHello] = []
    for model, kind in list(state.model_kinds.items()):
        kind.members.discard(executor_id)
        if kind.members:
            continue
        del state.model_kinds[model]
        outside = [hello for hello in state.excluded.values() if hello.model == model]
        may = [hello for hello in outside if not refusal(state, hello)]
        next_ones += [hello for hello in may if hello.model_digest == may[0].model_digest]
    return next_ones


def expected(state: State, model: str) -> str:
    """The digest of the kind that serves a model; empty while there is none."""
    kind = state.model_kinds.get(model)
    return kind.digest if kind is not None else ""


def serves(executor: Executor, request: Request) -> bool:
    """Whether a request may start or resume on an executor: the model must match, and the kind if it has
    generated tokens."""
    hello = executor.hello
    if hello.model != request.tokenized.model or executor.draining:
        return False
    return hello.model_digest == request.model_digest or not _begun(request)


def stranded(state: State, request: Request) -> str:
    """Why no executor can continue a request; empty if one can, now or when it is back."""
    others = [
        e for e in state.executors.values() if e.hello.model == request.tokenized.model and not e.draining
    ]
    if not others or any(serves(executor, request) for executor in others):
        return ""
    return (
        f"the executors that generated its tokens are gone (model digest "
        f"{request.model_digest[:SHOWN] or 'not given'}), and the others have another kind "
        f"({_shown(others[0].hello)}): send the request again"
    )


def has_changed(state: State, tokenized: Tokenized) -> bool:
    """Whether executors serve the model, and none of the kind that generated the tokens of a request."""
    serving = [e for e in state.executors.values() if e.hello.model == tokenized.model and not e.draining]
    return bool(serving) and all(e.hello.model_digest != tokenized.model_digest for e in serving)


def _begun(request: Request) -> bool:
    return any(sequence.generated for sequence in request.sequences)


def _shown(hello: ExecHello) -> str:
    return hello.model_digest[:SHOWN] or "not given"
