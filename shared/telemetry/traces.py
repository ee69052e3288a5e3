"""Builds the spans of a request as plain data, and reads and writes traceparents. Pure.

A list of spans is one tree: the first is its root, `parent` is an index into the list. Times are wall-clock
microseconds. The spans of one request come from the stamps and durations in its messages:

    chat smollm2 ─────────────────────────────────────────────────────────────────────
      received ─ tokenize ── transit ─ queue ──── prefill ─────────── decode ────── detokenize ─ send
                                                    prefill wait ─      (first token ── on its way to
                                                      prefill chunk 1 ──   the client, under decode)
                                                        prefill chunk 2 ───

Each boundary is a stamp of the process that crosses it; the scheduler's stages are durations of its monotonic
clock, in sequence from the arrival of the request there. A preemption is a span from its decision to the one
that resumes the sequence. A restore is a span from the request for blocks of a tier to their arrival, or to
the decision to go on without them. With several choices each has a span around its prefill and decode.

Spans of several processes join into one trace by W3C Trace Context 1. A trace is a string, the `traceparent`,
carried in a NATS header at the edges and in the envelope inside; an empty string means not traced.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shared.errors import HeadraceError
from shared.messages import Chunk, Close, Decision, Timings
from shared.nats import subjects

Value = str | int | float | bool | Sequence[str]
Attributes = Mapping[str, Value]
ROOT = 0

LEAVING_DECISIONS = ("preempt", "requeue", "move")  # decisions that take a sequence off its executor
RESTORE_DECISION = "restore"  # the decision at the end of one, with its `took_us`
LOAD_DECISION = "load adapter"  # likewise
SESSION_DECISION = "session"  # its reason begins with the name of the session
ADMIT_DECISION = "admit"

HEADER = "traceparent"
SAMPLED = 1  # bit of the flags
NO_PARENT = "0" * 16  # span id for "no parent"
MAX_CHARS = 256  # of a traceparent, which is in every message of the request; version 00 has 55

_SPAN_ID = re.compile(r"[0-9a-f]{16}")
_FORM = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")

# The names on spans: OpenTelemetry's semantic conventions for generative AI, messaging (both in development),
# errors and resources, and our own. They are not imported: the package is large, and marks names as
# deprecated when they move.

# generative AI
GEN_AI_OPERATION = "gen_ai.operation.name"
GEN_AI_PROVIDER = "gen_ai.provider.name"
GEN_AI_REQUEST_MODEL = "gen_ai.request.model"
GEN_AI_REQUEST_CHOICES = "gen_ai.request.choice.count"
GEN_AI_RESPONSE_MODEL = "gen_ai.response.model"
GEN_AI_RESPONSE_ID = "gen_ai.response.id"
GEN_AI_FINISH_REASONS = "gen_ai.response.finish_reasons"
GEN_AI_FIRST_CHUNK_S = "gen_ai.response.time_to_first_chunk"
GEN_AI_INPUT_TOKENS = "gen_ai.usage.input_tokens"
GEN_AI_OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
GEN_AI_CACHED_TOKENS = "gen_ai.usage.cache_read.input_tokens"
OPERATIONS = {  # Open.format -> gen_ai.operation.name
    "chat": "chat", "completion": "text_completion", "embedding": "embeddings",
    "embedding_base64": "embeddings",
}  # fmt: skip
PROVIDER = "headrace"

# messaging
MESSAGING_SYSTEM = "messaging.system"
MESSAGING_DESTINATION = "messaging.destination.name"
MESSAGING_TEMPLATE = "messaging.destination.template"
MESSAGING_TEMPORARY = "messaging.destination.temporary"
MESSAGING_OPERATION = "messaging.operation.name"
MESSAGING_OPERATION_TYPE = "messaging.operation.type"
MESSAGING_GROUP = "messaging.consumer.group.name"
MESSAGING_MESSAGE_ID = "messaging.message.id"
NATS = "nats"
GENERATE_TEMPLATE = "headrace.v1.generate.{tenant}.{model}"

# HTTP
HTTP_METHOD = "http.request.method"
HTTP_ROUTE = "http.route"
HTTP_STATUS = "http.response.status_code"

# errors and resources
ERROR_TYPE = "error.type"
SERVICE_NAME = "service.name"
SERVICE_INSTANCE = "service.instance.id"

# our own: also on spans, since not every viewer shows resources and links
COMPONENT = "component"  # the service that spends the time
REQUEST_ID = "request.id"
TENANT = "tenant"
BATCH_ID = "batch.id"  # <executor>:<step>, the same on a step and on the chunks in it
EXECUTOR = "executor"
CHOICE = "choice"
STEP = "step"
STEPS = "steps"
TOKENS = "tokens"
TOKENS_PER_SECOND = "tokens_per_second"
ROWS = "rows"
PREFILL_TOKENS = "prefill_tokens"
DRAFTS = "drafts"
ACCEPTED = "accepted"
OVERLAP_MODE = "overlap.mode"
OVERLAP_COMM = "overlap.comm"
MICRO_BATCH = "micro_batch"
FORWARD_US = "forward_us"
SAMPLE_US = "sample_us"
WAIT_US = "wait_us"
WHY = "why"
SESSION = "session"
RESUMED = "resumed"  # where most of the prompt's blocks came from: device, L1, L2 or recomputed


@dataclass(frozen=True, slots=True)
class SpanEvent:
    """A moment on a span."""

    name: str
    at_us: int
    attributes: Attributes = field(default_factory=dict)


@dataclass(slots=True)
class SpanData:
    """One span of a list. `error` is empty for a success."""

    name: str
    start_us: int
    end_us: int
    parent: int | None = ROOT  # None: the root
    attributes: dict[str, Value] = field(default_factory=dict)
    events: list[SpanEvent] = field(default_factory=list)
    links: tuple[str, ...] = ()  # traceparents
    kind: str = "internal"  # internal, server, client, producer, consumer
    error: str = ""

    @property
    def took_us(self) -> int:
        return self.end_us - self.start_us


def leaves(spans: Sequence[SpanData]) -> list[SpanData]:
    """The spans without children."""
    parents = {span.parent for span in spans}
    return [span for i, span in enumerate(spans) if i not in parents]


def covered_us(intervals: Iterable[tuple[int, int]]) -> int:
    """Length of the union of (start, end) intervals."""
    total, reached = 0, -(2**63)
    for start, end in sorted(intervals):
        if end > max(start, reached):
            total += end - max(start, reached)
            reached = end
    return total


def gaps(intervals: Iterable[tuple[int, int]], start: int, end: int) -> list[tuple[int, int]]:
    """The parts of [start, end] that no interval covers."""
    found, reached = [], start
    for begin, stop in sorted(intervals):
        if min(begin, end) > reached:
            found.append((reached, min(begin, end)))
        reached = max(reached, stop)
    if reached < end:
        found.append((reached, end))
    return found


def to_body(spans: Sequence[SpanData]) -> list[dict[str, Any]]:
    """The spans as JSON, for `headrace.v1.trace`."""
    return [
        {
            "name": span.name,
            "start_us": span.start_us,
            "end_us": span.end_us,
            "parent": span.parent,
            "attributes": span.attributes,
            "events": [
                {"name": e.name, "at_us": e.at_us, "attributes": dict(e.attributes)} for e in span.events
            ],
            "error": span.error,
        }
        for span in spans
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One choice at its end: the detokenizer's final `tokens` and `reason`."""

    index: int
    tokens: int
    reason: str
    close: Close


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """Wall stamps of the detokenizer; 0 = not yet."""

    opened_us: int = 0
    first_us: int = 0  # the first text was sent, or added to a plain answer
    built_us: int = 0  # the last frame was built
    sent_us: int = 0  # the last frame left the process


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFacts:
    """The data for the spans of a request."""

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


def request_spans(facts: RequestFacts) -> list[SpanData]:
    """The spans of a request that has reached a detokenizer, its root first."""
    if not facts.choices:  # it ended without a Close of its scheduler
        return _failed_over(facts)
    times = [_Times.of(choice) for choice in facts.choices]
    closed = max(t.closed for t in times)
    built, sent = max(facts.reply.built_us, closed), max(facts.reply.sent_us, facts.reply.built_us, closed)
    spans = [_root(facts, times[0], sent), *_tokenizer_spans(facts, times[0])]
    for choice, at in zip(facts.choices, times, strict=True):
        parent = ROOT
        if len(facts.choices) > 1 and at.admitted < at.closed:
            parent = len(spans)
            spans.append(
                SpanData(f"choice {choice.index}", at.admitted, at.closed, ROOT, _choice_attributes(choice))
            )
        _add_adapter_loads(spans, choice, at)
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
    """The attributes of the root span of any request, answered or refused."""
    attributes: dict[str, Value] = {
        REQUEST_ID: facts.request,
        TENANT: facts.tenant,
        COMPONENT: facts.detokenizer,
        GEN_AI_OPERATION: OPERATIONS.get(facts.format, facts.format),
        GEN_AI_PROVIDER: PROVIDER,
        GEN_AI_REQUEST_MODEL: facts.model,
        MESSAGING_SYSTEM: NATS,
        MESSAGING_DESTINATION: subjects.generate(facts.tenant, facts.model),
        MESSAGING_TEMPLATE: GENERATE_TEMPLATE,
        MESSAGING_OPERATION: "process",
        MESSAGING_OPERATION_TYPE: "process",
        MESSAGING_GROUP: "tokenizer",
        MESSAGING_MESSAGE_ID: facts.request,
    }
    if facts.error is not None:
        attributes[ERROR_TYPE] = facts.error.type
    return attributes


def root_name(facts: RequestFacts) -> str:
    """The name of a generative AI span in the semantic conventions."""
    return f"{OPERATIONS.get(facts.format, facts.format)} {facts.model}"


def _root(facts: RequestFacts, at: _Times, end_us: int) -> SpanData:
    choices, usage = facts.choices, facts.choices[0].close.usage
    attributes = root_attributes(facts)
    attributes |= {
        GEN_AI_RESPONSE_MODEL: facts.model,
        GEN_AI_RESPONSE_ID: facts.request,
        GEN_AI_INPUT_TOKENS: usage.prompt_tokens,
        GEN_AI_OUTPUT_TOKENS: sum(choice.tokens for choice in choices),
        GEN_AI_CACHED_TOKENS: usage.cached_tokens,
        GEN_AI_FINISH_REASONS: [choice.reason for choice in choices],
        EXECUTOR: choices[0].close.executor,
    }
    attributes |= _session(choices[0].close)
    if len(choices) > 1:
        attributes[GEN_AI_REQUEST_CHOICES] = len(choices)
    if facts.reply.first_us:
        attributes[GEN_AI_FIRST_CHUNK_S] = (facts.reply.first_us - at.received) / 1e6
    error = facts.error.message if facts.error is not None else ""
    return SpanData(root_name(facts), at.received, end_us, None, attributes, kind="server", error=error)


def _session(close: Close) -> dict[str, Value]:
    """The session that a request continues, and where the blocks of its prompt came from, in tokens."""
    name = next((d.why.partition(" ")[0] for d in close.decisions if d.what == SESSION_DECISION), "")
    if not name:
        return {}
    found = [dict(d.numbers) for d in close.decisions if d.what in (ADMIT_DECISION, RESTORE_DECISION)]
    usage, device = close.usage, found[0].get("hit_tokens", 0) if found else 0
    l2 = sum(numbers.get("l2_tokens", 0) for numbers in found)
    tokens = {
        "device": min(device, usage.cached_tokens),
        "L1": max(usage.cached_tokens - device - l2, 0),
        "L2": min(l2, usage.cached_tokens),
        "recomputed": usage.prompt_tokens - usage.cached_tokens,
    }
    parts = {f"{RESUMED}.{where.lower()}_tokens": count for where, count in tokens.items()}
    return {SESSION: name, RESUMED: max(tokens, key=lambda where: tokens[where]), **parts}


def _tokenizer_spans(facts: RequestFacts, at: _Times) -> list[SpanData]:
    close = facts.choices[0].close
    tokenize = _stage("tokenize", at.handled, at.sent, "tokenizer")
    tokenize.attributes[GEN_AI_INPUT_TOKENS] = close.usage.prompt_tokens
    return [
        received(facts, at.received, at.handled),
        tokenize,
        _stage("transit", at.sent, at.arrived, "scheduler"),
        _stage("queue", at.arrived, at.admitted, "scheduler"),
    ]


def received(facts: RequestFacts, start_us: int, end_us: int) -> SpanData:
    """The wait in the tokenizer's mailbox."""
    span = _stage("received", start_us, end_us, "tokenizer", kind="consumer")
    span.attributes |= {
        MESSAGING_SYSTEM: NATS,
        MESSAGING_DESTINATION: subjects.generate(facts.tenant, facts.model),
        MESSAGING_OPERATION_TYPE: "receive",
    }
    return span


def _add_adapter_loads(spans: list[SpanData], choice: Choice, at: _Times) -> None:
    """The loads of its adapter, within the wait for admission."""
    queue = next(i for i, span in enumerate(spans) if span.name == "queue")
    for decision in choice.close.decisions:
        if decision.what == LOAD_DECISION:
            end, numbers = at.arrived + decision.at_us, dict(decision.numbers)
            start = max(end - numbers.get("took_us", 0), at.arrived)
            attributes = {**_choice_attributes(choice), WHY: decision.why, **numbers}
            spans.append(SpanData(LOAD_DECISION, start, end, queue, attributes))


def _add_stages(spans: list[SpanData], choice: Choice, at: _Times, parent: int) -> None:
    close = choice.close
    if not close.executor:
        return
    chunks = [(chunk, *_interval(chunk, at)) for chunk in close.chunks]
    prefilled = at.first or at.closed
    prefill = len(spans)
    spans.append(SpanData("prefill", at.admitted, prefilled, parent, _choice_attributes(choice)))
    for number, (chunk, start, end) in enumerate(chunks, 1):
        inside = not at.first or start <= at.first
        name = f"prefill chunk {number}" if inside else "recompute chunk"
        attributes = {**_choice_attributes(choice), **_batch(chunk)}
        spans.append(SpanData(name, start, end, prefill if inside else parent, attributes))
    kept = [*_preempted_spans(choice, at), *_restores(choice, at)]
    for start, end, decision in kept:
        attributes = {**_choice_attributes(choice), WHY: decision.why, **dict(decision.numbers)}
        inside = not at.first or start <= at.first
        spans.append(SpanData(decision.what, start, end, prefill if inside else parent, attributes))
    if chunks:
        there = [(s, e) for _, s, e in chunks] + [(s, e) for s, e, _ in kept]
        for start, end in gaps(there, at.admitted, prefilled):
            spans.append(SpanData("prefill wait", start, end, prefill, _choice_attributes(choice)))
    if at.first:
        spans.append(SpanData("decode", at.first, at.closed, parent, _decoded(choice)))


def _preempted_spans(choice: Choice, at: _Times) -> Iterator[tuple[int, int, Decision]]:
    """The times off its executor, preempted or requeued, until the next decision."""
    left: Decision | None = None
    for decision in choice.close.decisions:
        if decision.what in LEAVING_DECISIONS:
            left = left or decision
        elif left is not None:
            yield at.arrived + left.at_us, at.arrived + decision.at_us, left
            left = None
    if left is not None:
        yield at.arrived + left.at_us, max(at.closed, at.arrived + left.at_us), left


def _restores(choice: Choice, at: _Times) -> Iterator[tuple[int, int, Decision]]:
    """The times of restores from a tier; the sequence is in no step then."""
    for decision in choice.close.decisions:
        if decision.what == RESTORE_DECISION:
            end = at.arrived + decision.at_us
            yield max(end - dict(decision.numbers).get("took_us", 0), at.admitted), end, decision


def _interval(chunk: Chunk, at: _Times) -> tuple[int, int]:
    """The time of a chunk; without a result of its step it lasts until the end."""
    start = at.arrived + chunk.at_us
    return start, start + chunk.took_us if chunk.took_us else max(at.closed, start)


def _batch(chunk: Chunk) -> dict[str, Value]:
    batch = batch_id(chunk.executor, chunk.step)
    return {TOKENS: chunk.tokens, STEP: chunk.step, BATCH_ID: batch, EXECUTOR: chunk.executor}


def _decoded(choice: Choice) -> dict[str, Value]:
    timings, tokens = choice.close.timings, choice.tokens
    attributes = {**_choice_attributes(choice), TOKENS: tokens, STEPS: timings.steps}
    if timings.decode_us and tokens > 1:  # the prefill made the first token
        attributes[TOKENS_PER_SECOND] = round((tokens - 1) * 1e6 / timings.decode_us, 1)
    return attributes


def _add_decisions(span: SpanData, choice: Choice, at: _Times) -> None:
    for decision in choice.close.decisions:
        attributes: dict[str, Value] = {WHY: decision.why, CHOICE: choice.index, **dict(decision.numbers)}
        span.events.append(SpanEvent(decision.what, at.arrived + decision.at_us, attributes))


def _send(facts: RequestFacts, start_us: int, end_us: int) -> SpanData:
    span = _stage("send", start_us, end_us, facts.detokenizer, kind="producer")
    span.attributes |= {
        MESSAGING_SYSTEM: NATS,
        MESSAGING_DESTINATION: facts.inbox,
        MESSAGING_TEMPORARY: True,
        MESSAGING_OPERATION_TYPE: "send",
    }
    return span


def _failed_over(facts: RequestFacts) -> list[SpanData]:
    reply, error = facts.reply, facts.error
    opened = max(reply.opened_us, facts.received_wall_us)
    built = max(reply.built_us, opened)
    sent = max(reply.sent_us, built)
    text = error.message if error is not None else ""
    attributes = root_attributes(facts)
    root = SpanData(
        root_name(facts), facts.received_wall_us, sent, None, attributes, kind="server", error=text
    )
    intake = _stage("before the detokenizer", facts.received_wall_us, opened, "scheduler")
    answering = _stage("until its scheduler was lost", opened, built, facts.detokenizer)
    return [root, intake, answering, _send(facts, built, sent)]


def _choice_attributes(choice: Choice) -> dict[str, Value]:
    return {COMPONENT: f"executor.{choice.close.executor}", CHOICE: choice.index}


def _stage(name: str, start_us: int, end_us: int, component: str, kind: str = "internal") -> SpanData:
    return SpanData(name, start_us, end_us, ROOT, {COMPONENT: component}, kind=kind)


def batch_id(executor: str, step: int) -> str:
    """The id of one step of one executor."""
    return f"{executor}:{step}"


def from_headers(headers: Mapping[str, str]) -> str:
    """The traceparent of a message, empty if it is missing or invalid."""
    text = headers.get(HEADER, "")
    return text if len(text) <= MAX_CHARS and is_valid(text) else ""


def is_valid(trace: str) -> bool:
    """True for a traceparent by the specification; later versions may have more fields."""
    match = _FORM.fullmatch(trace)
    if match is None:
        return False
    version, trace_id, span_id, _, rest = match.groups()
    known_form = version != "ff" and not (version == "00" and rest)
    return known_form and set(trace_id) != {"0"} and set(span_id) != {"0"}


def trace_id(trace: str) -> str:
    """The trace id, 32 hex digits; empty if not traced."""
    fields = trace.split("-")
    return fields[1] if len(fields) >= 4 else ""


def span_id(trace: str) -> str:
    """The span id, 16 hex digits; empty if not traced."""
    fields = trace.split("-")
    return fields[2] if len(fields) >= 4 else ""


def is_sampled(trace: str) -> bool:
    """Whether the traceparent has the sampled flag; False for an invalid one."""
    return is_valid(trace) and bool(int(trace.split("-")[3], 16) & SAMPLED)


def span_number(span: str) -> int:
    """A span id as a number; 0 for an invalid one."""
    return int(span, 16) if _SPAN_ID.fullmatch(span) else 0


def make(trace: str, span: str, *, sampled: bool) -> str:
    """The traceparent of a trace id (32 hex digits) and a span id (16)."""
    return f"00-{trace}-{span}-{SAMPLED if sampled else 0:02x}"
