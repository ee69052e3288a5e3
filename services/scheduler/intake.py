"""The door: requests come in here, or are told why not. Cancel and detach live here too."""

from __future__ import annotations

from services.scheduler import closing
from services.scheduler.records import Request, Sequence
from services.scheduler.state import Executor, State, Unit
from shared.blocks import blocks_for, choice_seed, rendezvous
from shared.messages import Accepted, Cancel, Detached, Open, Rejected, Tokenized

TOMBSTONE_US = 60_000_000
MAX_TOMBSTONES = 10_000  # then the oldest go: anybody may cancel what never was
REFUSED_US = 10_000_000  # longer than a tokenizer asks
MAX_REFUSED = 10_000
RETRY_AFTER_MS = 1_000


def take(state: State, source: str, asked: Tokenized, trace: str, transit_us: int = 0) -> None:
    """Accept a request and open its text at a detokenizer, or refuse it."""
    key = (asked.tenant, asked.request)
    if _known(state, asked):
        _accept(state, source, asked)
        return
    rejected = _refused(state, asked)
    if rejected is not None:
        state.send(source, rejected, trace)
        return
    request = Request(
        asked=asked,
        trace=trace,
        tokenizer=source,
        arrival_us=state.now_us,
        deadline_us=state.now_us + asked.timeout_us,
        transit_us=transit_us,
    )
    request.sequences = [_new_sequence(state, request, choice) for choice in range(asked.n)]
    state.requests[key] = request
    state.wake(request.deadline_us)
    state.waiting.append(Unit(list(request.sequences)))  # arrival order: never before another
    _accept(state, source, asked)
    assign_shard(state, request)


def assign_shard(state: State, request: Request) -> None:
    """Choose the request's detokenizer, if one is alive, and open its sequences there."""
    request.shard = rendezvous(request.asked.request, state.detokenizers) if state.detokenizers else ""
    if request.shard:
        open_at_shard(state, request)


def open_at_shard(state: State, request: Request) -> None:
    """Open the sequences of a request at its detokenizer."""
    for sequence in request.sequences:
        state.send(f"detokenizer.{request.shard}", open_message(sequence), request.trace)


def open_message(sequence: Sequence) -> Open:
    """The Open of a sequence with everything generated so far."""
    request, asked = sequence.request, sequence.request.asked
    kept = min(sequence.generated, sequence.final) if not sequence.live else sequence.generated
    return Open(
        seq=sequence.seq,
        request=asked.request,
        attempt=request.attempt,
        tenant=asked.tenant,
        model=asked.model,
        inbox=asked.inbox,
        choice=sequence.choice,
        choices=asked.n,
        stream=asked.stream,
        format=asked.format,
        stop=asked.stop,
        include_stop=asked.include_stop,
        logprobs=asked.logprobs,
        received_wall_us=asked.received_wall_us,
        prompt_tokens=sequence.prompt_tokens,
        tokens=sequence.tokens[sequence.prompt_tokens : sequence.prompt_tokens + kept],
        include_usage=asked.include_usage,
        parent_span=asked.parent_span,
    )


def _refused(state: State, asked: Tokenized) -> Rejected | None:
    """The refusal, or None to accept. A resend of what was refused is refused again, whatever has become
    free since: its client has been told."""
    submission = (asked.tenant, asked.request, asked.received_wall_us)
    if submission in state.refused:
        return state.refused[submission][1]
    refusal = _refusal(state, asked)
    if refusal is None:
        return None
    code, message, retry_after_ms = refusal
    rejected = Rejected(
        tenant=asked.tenant,
        request=asked.request,
        attempt=asked.attempt,
        code=code,
        message=message,
        retry_after_ms=retry_after_ms,
    )
    if len(state.refused) >= MAX_REFUSED:
        del state.refused[next(iter(state.refused))]
    state.refused[submission] = (state.now_us + REFUSED_US, rejected)
    state.wake(state.now_us + REFUSED_US)
    return rejected


def cancel(state: State, message: Cancel) -> None:
    """Stop a request; an unknown one leaves a tombstone, since a cancel may overtake it. One that has
    ended leaves none: its id may be used again."""
    key = (message.tenant, message.request)
    request = state.requests.get(key)
    if request is not None:
        closing.fail(state, request, 499, "cancelled by the client")
    elif key not in state.recent.traces:
        if len(state.tombstones) >= MAX_TOMBSTONES:
            del state.tombstones[next(iter(state.tombstones))]
        state.tombstones[key] = state.now_us + TOMBSTONE_US
        state.wake(state.tombstones[key])


def detach(state: State, source: str, message: Detached) -> None:
    """Nobody reads these sequences any more: stop them unless they asked to be finished. One that has
    moved to another detokenizer since is read there."""
    for seq in message.seqs:
        sequence = state.sequences.get(seq)
        if sequence is None or source != f"detokenizer.{sequence.request.shard}":
            continue
        sequence.request.detached = True
        if not sequence.request.asked.finish_detached:
            closing.fail(state, sequence.request, 499, "the client has gone")


def _known(state: State, asked: Tokenized) -> bool:
    """True for a resend of what is running or has ended: the same request from the same inbox."""
    key = (asked.tenant, asked.request)
    request = state.requests.get(key)
    if request is not None:
        return request.asked.inbox == asked.inbox
    ended = state.recent.traces.get(key)
    return ended is not None and ended.inbox == asked.inbox


def _accept(state: State, source: str, asked: Tokenized) -> None:
    accepted = Accepted(tenant=asked.tenant, request=asked.request, attempt=asked.attempt)
    state.send(source, accepted)


def _refusal(state: State, asked: Tokenized) -> tuple[int, str, int] | None:
    """(code, message, retry after ms), or None to accept."""
    key = (asked.tenant, asked.request)
    if state.tombstones.pop(key, 0) > state.now_us:
        return 499, "cancelled by the client before it arrived", 0
    if key in state.requests:
        return 409, f"a request with the id {asked.request!r} is running: choose another id", 0
    if state.draining:
        return 503, "the scheduler is draining: send the request again", RETRY_AFTER_MS
    if not asked.tokens:
        return 400, "the prompt is empty: send at least one token", 0
    executors = [e for e in state.executors.values() if e.hello.model == asked.model and not e.draining]
    if not executors:
        return 503, f"no executor of {asked.model!r} is ready: see `headrace status`", RETRY_AFTER_MS
    if not state.detokenizers:
        return 503, "no detokenizer is ready: see `headrace status`", RETRY_AFTER_MS
    if not any(_fits_ever(executor, asked) for executor in executors):
        return 400, _too_large(executors, asked), 0
    if _full(state, asked):
        return 429, f"{len(state.waiting)} requests are waiting: try again later", RETRY_AFTER_MS
    return None


def _full(state: State, asked: Tokenized) -> bool:
    """True when the request may not wait. An empty queue takes any: a retry would not find it emptier."""
    waiting, limits = state.waiting, state.limits
    if not waiting or len(waiting) >= limits.max_waiting:
        return bool(waiting)
    held = sum(len(sequence.tokens) for unit in waiting for sequence in unit.sequences)
    return held + asked.n * len(asked.tokens) > limits.max_waiting_tokens


def _fits_ever(executor: Executor, asked: Tokenized) -> bool:
    hello, length = executor.hello, len(asked.tokens) + asked.max_tokens
    blocks = asked.n * blocks_for(length, hello.block_tokens)
    return length <= hello.max_context and blocks <= hello.blocks and asked.n <= hello.slots


def _too_large(executors: list[Executor], asked: Tokenized) -> str:
    context = max(e.hello.max_context for e in executors)
    tokens = max(e.hello.blocks * e.hello.block_tokens for e in executors)
    return (
        f"{len(asked.tokens)} prompt tokens + {asked.max_tokens} to generate, times {asked.n}, never fit: "
        f"the context is {context} tokens and the KV cache holds {tokens}; ask for fewer max_tokens"
    )


def _new_sequence(state: State, request: Request, choice: int) -> Sequence:
    asked = request.asked
    sequence = Sequence(
        seq=state.next_seq,
        request=request,
        choice=choice,
        seed=choice_seed(asked.seed, choice),
        tokens=asked.tokens[:],
        prompt_tokens=len(asked.tokens),
        max_length=len(asked.tokens) + asked.max_tokens,
        stop_ids=frozenset(asked.stop_ids),
    )
    state.next_seq = state.next_seq % 0x7FFFFFFF + 1
    state.sequences[sequence.seq] = sequence
    return sequence
