"""Executors of one model name that do not compute the same: one kind serves, the others stay out.

A kind is what `ExecHello.model_digest` says: weights, dtype, KV format, deterministic mode. The first
executor of a model decides, or the setting `model_digest` does. Another kind takes over when no executor of
the first is left: each has died or drains. With `accept_mixed` all serve.

In any case a request stays with the kind that has generated tokens of it. Where only others are left it ends
with a typed error: what its client has read cannot be taken back, and other weights would not go on from it.
One without tokens starts over anywhere, from its prompt.
"""

from __future__ import annotations

from services.scheduler.state.requests import Request
from services.scheduler.state.state import Executor, ModelKind, State
from shared.messages import ExecHello

SHOWN = 12  # characters of a digest


def refusal(state: State, hello: ExecHello) -> str:
    """Why an executor stays out; empty: it may join."""
    if state.limits.accept_mixed:
        return ""
    wanted = state.limits.model_digest
    if wanted and hello.model_digest != wanted:
        return (
            f"its model digest is {_shown(hello)}, and {wanted[:SHOWN]} is configured (model_digest): give "
            "it those weights, dtype, KV format and deterministic mode, or change the setting"
        )
    kind = state.model_kinds.get(hello.model)
    if kind is None or kind.digest == hello.model_digest or kind.members <= {hello.executor}:
        return ""
    return (
        f"its model digest is {_shown(hello)}, and {', '.join(sorted(kind.members))} of {hello.model!r} "
        f"has {kind.digest[:SHOWN] or 'none'}: other weights, dtype, KV format or deterministic mode. It "
        "takes over when none of those is left; give it another --model-name, the same model and modes, or "
        "the scheduler --accept-mixed"
    )


def joined(state: State, hello: ExecHello) -> None:
    """An executor serves. The first of a model decides its kind."""
    state.excluded.pop(hello.executor, None)
    kind = state.model_kinds.get(hello.model)
    if kind is None or kind.members <= {hello.executor}:
        kind = state.model_kinds[hello.model] = ModelKind(hello.model_digest)
    if kind.digest == hello.model_digest:
        kind.members.add(hello.executor)


def left(state: State, executor_id: str) -> list[ExecHello]:
    """An executor is gone or drains. Those that stayed out and may join now: a kind as a whole, the one that
    has waited longest."""
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
    """Whether a request may start, or go on, on an executor: of its model, and of its kind where tokens of it
    have been generated."""
    hello = executor.hello
    if hello.model != request.tokenized.model or executor.draining:
        return False
    return hello.model_digest == request.model_digest or not _begun(request)


def stranded(state: State, request: Request) -> str:
    """Why nobody can go on with a request; empty where somebody may, now or when an executor is back."""
    others = [
        e for e in state.executors.values() if e.hello.model == request.tokenized.model and not e.draining
    ]
    if not others or any(serves(executor, request) for executor in others):
        return ""
    return (
        f"the executors that have generated its tokens are gone (model digest "
        f"{request.model_digest[:SHOWN] or 'not given'}), those that are left compute otherwise "
        f"({_shown(others[0].hello)}): send the request again"
    )


def _begun(request: Request) -> bool:
    return any(sequence.generated for sequence in request.sequences)


def _shown(hello: ExecHello) -> str:
    return hello.model_digest[:SHOWN] or "not given"
