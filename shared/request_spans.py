"""The spans of one request, from the stamps and durations that its messages carry. Pure.

    chat smollm2 ─────────────────────────────────────────────────────────────────────
      received ─ tokenize ── transit ─ queue ──── prefill ─────────── decode ────── detokenize ─ send
                                                    prefill wait ─      (first token ── on its way to
                                                      prefill chunk 1 ──   the client, under decode)
                                                        prefill chunk 2 ───

Each boundary is the stamp of the process that crosses it; stages of the scheduler are durations of its
monotonic clock, laid end to end from the arrival of the request there. A pause is a span from the decision
to the one that takes the sequence up again, a restore one from asking a tier for blocks to having them, or to
going on without. With several choices each has a span of its own around its prefill and decode.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from shared import conventions as c
from shared import subjects
from shared.errors import HeadraceError
from shared.messages import Chunk, Close, Decision, Timings
from shared.spans import ROOT, SpanEvent, SpanRecord, Value, gaps

LEAVES = ("pause", "requeue")  # decisions that take a sequence off its executor
RESTORE = "restore"  # the decision at the end of one, with its `took_us`


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One choice at its end: `tokens` and `reason` are the detokenizer's last word."""

    index: int
    tokens: int
    reason: str
    close: Close


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """Wall stamps of the detokenizer; 0 = has not happened."""

    opened_us: int = 0
    first_us: int = 0  # the first text was sent, or joined an answer that is not streamed
    built_us: int = 0  # the last frame was built
    sent_us: int = 0  # it has left the process


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFacts:
    """Everything its spans are made of."""

    request: str
    tenant: str
    model: str
    format: str  # as Open.format
    inbox: str
    received_wall_us: int
    detokenizer: str  # kind.id
    choices: tuple[Choice, ...] = ()
    reply: Reply = Reply()
    error: HeadraceError | None = None


@dataclass(frozen=True, slots=True)
class _Times:
    """The boundaries of one choice, wall-clock µs."""

    received: int
    handled: int
    sent: int
    arrived: int
    admitted: int
    first: int  # 0: no token
    closed: int

    @classmethod
    def of(cls, choice: Choice) -> _Times:
        t: Timings = choice.close.timings
        handled = t.received_wall_us + t.received_us
        sent = handled + t.tokenize_us
        arrived = sent + t.transit_us
        closed = arrived + t.live_us
        admitted = arrived + t.queue_us if choice.close.executor else closed
        first = admitted + t.prefill_us if choice.close.final else 0
        return cls(t.received_wall_us, handled, sent, arrived, admitted, first, max(closed, first))


def request_spans(facts: RequestFacts) -> list[SpanRecord]:
    """The spans of a request that has reached a detokenizer, its root first."""
    if not facts.choices:  # it ended without a word of its scheduler
        return _orphan(facts)
    times = [_Times.of(choice) for choice in facts.choices]
    closed = max(t.closed for t in times)
    built, sent = max(facts.reply.built_us, closed), max(facts.reply.sent_us, facts.reply.built_us, closed)
    spans = [_root(facts, times[0], sent), *_intake(facts, times[0])]
    for choice, at in zip(facts.choices, times, strict=True):
        parent = ROOT
        if len(facts.choices) > 1 and at.admitted < at.closed:
            parent = len(spans)
            spans.append(SpanRecord(f"choice {choice.index}", at.admitted, at.closed, ROOT, _whose(choice)))
        _add_stages(spans, choice, at, parent)
        _add_decisions(spans[parent], choice, at)
    first_us = min((t.first for t in times if t.first), default=0)
    if first_us and facts.reply.first_us:
        end = max(facts.reply.first_us, first_us)
        spans.append(_stage("first token", first_us, end, facts.detokenizer))
    if facts.reply.built_us:
        spans.append(_stage("detokenize", closed, built, facts.detokenizer))
    if facts.reply.sent_us:
        spans.append(_send(facts, built, sent))
    return spans


def root_attributes(facts: RequestFacts) -> dict[str, Value]:
    """What the root says of any request, answered or refused."""
    attributes: dict[str, Value] = {
        c.REQUEST_ID: facts.request,
        c.TENANT: facts.tenant,
        c.COMPONENT: facts.detokenizer,
        c.GEN_AI_OPERATION: c.OPERATIONS.get(facts.format, facts.format),
        c.GEN_AI_PROVIDER: c.PROVIDER,
        c.GEN_AI_REQUEST_MODEL: facts.model,
        c.MESSAGING_SYSTEM: c.NATS,
        c.MESSAGING_DESTINATION: subjects.generate(facts.tenant, facts.model),
        c.MESSAGING_TEMPLATE: c.GENERATE_TEMPLATE,
        c.MESSAGING_OPERATION: "process",
        c.MESSAGING_OPERATION_TYPE: "process",
        c.MESSAGING_GROUP: "tokenizer",
        c.MESSAGING_MESSAGE_ID: facts.request,
    }
    if facts.error is not None:
        attributes[c.ERROR_TYPE] = facts.error.type
    return attributes


def root_name(facts: RequestFacts) -> str:
    """As the conventions name a span of generative AI."""
    return f"{c.OPERATIONS.get(facts.format, facts.format)} {facts.model}"


def _root(facts: RequestFacts, at: _Times, end_us: int) -> SpanRecord:
    choices, usage = facts.choices, facts.choices[0].close.usage
    attributes = root_attributes(facts)
    attributes |= {
        c.GEN_AI_RESPONSE_MODEL: facts.model,
        c.GEN_AI_RESPONSE_ID: facts.request,
        c.GEN_AI_INPUT_TOKENS: usage.prompt_tokens,
        c.GEN_AI_OUTPUT_TOKENS: sum(choice.tokens for choice in choices),
        c.GEN_AI_CACHED_TOKENS: usage.cached_tokens,
        c.GEN_AI_FINISH_REASONS: [choice.reason for choice in choices],
        c.EXECUTOR: choices[0].close.executor,
    }
    if len(choices) > 1:
        attributes[c.GEN_AI_REQUEST_CHOICES] = len(choices)
    if facts.reply.first_us:
        attributes[c.GEN_AI_FIRST_CHUNK_S] = (facts.reply.first_us - at.received) / 1e6
    error = facts.error.message if facts.error is not None else ""
    return SpanRecord(root_name(facts), at.received, end_us, None, attributes, kind="server", error=error)


def _intake(facts: RequestFacts, at: _Times) -> list[SpanRecord]:
    close = facts.choices[0].close
    tokenize = _stage("tokenize", at.handled, at.sent, "tokenizer")
    tokenize.attributes[c.GEN_AI_INPUT_TOKENS] = close.usage.prompt_tokens
    return [
        received(facts, at.received, at.handled),
        tokenize,
        _stage("transit", at.sent, at.arrived, "scheduler"),
        _stage("queue", at.arrived, at.admitted, "scheduler"),
    ]


def received(facts: RequestFacts, start_us: int, end_us: int) -> SpanRecord:
    """The wait in the tokenizer's mailbox."""
    span = _stage("received", start_us, end_us, "tokenizer", kind="consumer")
    span.attributes |= {
        c.MESSAGING_SYSTEM: c.NATS,
        c.MESSAGING_DESTINATION: subjects.generate(facts.tenant, facts.model),
        c.MESSAGING_OPERATION_TYPE: "receive",
    }
    return span


def _add_stages(spans: list[SpanRecord], choice: Choice, at: _Times, parent: int) -> None:
    close = choice.close
    if not close.executor:
        return
    chunks = [(chunk, *_interval(chunk, at)) for chunk in close.chunks]
    prefilled = at.first or at.closed
    prefill = len(spans)
    spans.append(SpanRecord("prefill", at.admitted, prefilled, parent, _whose(choice)))
    for number, (chunk, start, end) in enumerate(chunks, 1):
        inside = not at.first or start <= at.first
        name = f"prefill chunk {number}" if inside else "recompute chunk"
        attributes = {**_whose(choice), **_batch(chunk)}
        spans.append(SpanRecord(name, start, end, prefill if inside else parent, attributes))
    kept = [*_away(choice, at), *_restores(choice, at)]
    for start, end, decision in kept:
        attributes = {**_whose(choice), c.WHY: decision.why, **dict(decision.numbers)}
        inside = not at.first or start <= at.first
        spans.append(SpanRecord(decision.what, start, end, prefill if inside else parent, attributes))
    if chunks:
        there = [(s, e) for _, s, e in chunks] + [(s, e) for s, e, _ in kept]
        for start, end in gaps(there, at.admitted, prefilled):
            spans.append(SpanRecord("prefill wait", start, end, prefill, _whose(choice)))
    if at.first:
        spans.append(SpanRecord("decode", at.first, at.closed, parent, _decoded(choice)))


def _away(choice: Choice, at: _Times) -> Iterator[tuple[int, int, Decision]]:
    """When it was off its executor, paused or requeued: until the next decision took it up again."""
    left: Decision | None = None
    for decision in choice.close.decisions:
        if decision.what in LEAVES:
            left = left or decision
        elif left is not None:
            yield at.arrived + left.at_us, at.arrived + decision.at_us, left
            left = None
    if left is not None:
        yield at.arrived + left.at_us, max(at.closed, at.arrived + left.at_us), left


def _restores(choice: Choice, at: _Times) -> Iterator[tuple[int, int, Decision]]:
    """When blocks were on their way from a tier; the sequence is in no step then."""
    for decision in choice.close.decisions:
        if decision.what == RESTORE:
            end = at.arrived + decision.at_us
            yield max(end - dict(decision.numbers).get("took_us", 0), at.admitted), end, decision


def _interval(chunk: Chunk, at: _Times) -> tuple[int, int]:
    """When a chunk ran; one whose step was never answered lasted until the end."""
    start = at.arrived + chunk.at_us
    return start, start + chunk.took_us if chunk.took_us else max(at.closed, start)


def _batch(chunk: Chunk) -> dict[str, Value]:
    batch = c.batch_id(chunk.executor, chunk.step)
    return {c.TOKENS: chunk.tokens, c.STEP: chunk.step, c.BATCH_ID: batch, c.EXECUTOR: chunk.executor}


def _decoded(choice: Choice) -> dict[str, Value]:
    timings, tokens = choice.close.timings, choice.tokens
    attributes = {**_whose(choice), c.TOKENS: tokens, c.STEPS: timings.steps}
    if timings.decode_us and tokens > 1:  # the first token came out of the prefill
        attributes[c.TOKENS_PER_SECOND] = round((tokens - 1) * 1e6 / timings.decode_us, 1)
    return attributes


def _add_decisions(span: SpanRecord, choice: Choice, at: _Times) -> None:
    for decision in choice.close.decisions:
        attributes: dict[str, Value] = {c.WHY: decision.why, c.CHOICE: choice.index, **dict(decision.numbers)}
        span.events.append(SpanEvent(decision.what, at.arrived + decision.at_us, attributes))


def _send(facts: RequestFacts, start_us: int, end_us: int) -> SpanRecord:
    span = _stage("send", start_us, end_us, facts.detokenizer, kind="producer")
    span.attributes |= {
        c.MESSAGING_SYSTEM: c.NATS,
        c.MESSAGING_DESTINATION: facts.inbox,
        c.MESSAGING_TEMPORARY: True,
        c.MESSAGING_OPERATION_TYPE: "send",
    }
    return span


def _orphan(facts: RequestFacts) -> list[SpanRecord]:
    reply, error = facts.reply, facts.error
    opened = max(reply.opened_us, facts.received_wall_us)
    built = max(reply.built_us, opened)
    sent = max(reply.sent_us, built)
    text = error.message if error is not None else ""
    attributes = root_attributes(facts)
    root = SpanRecord(
        root_name(facts), facts.received_wall_us, sent, None, attributes, kind="server", error=text
    )
    intake = _stage("before the detokenizer", facts.received_wall_us, opened, "scheduler")
    answering = _stage("until its scheduler was lost", opened, built, facts.detokenizer)
    return [root, intake, answering, _send(facts, built, sent)]


def _whose(choice: Choice) -> dict[str, Value]:
    return {c.COMPONENT: f"executor.{choice.close.executor}", c.CHOICE: choice.index}


def _stage(name: str, start_us: int, end_us: int, component: str, kind: str = "internal") -> SpanRecord:
    return SpanRecord(name, start_us, end_us, ROOT, {c.COMPONENT: component}, kind=kind)
