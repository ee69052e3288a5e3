"""The spans of a request against tables worked out by hand: every boundary to the microsecond."""

from __future__ import annotations

from typing import Any

import pytest

from shared.errors import DeadlineExceeded, Unavailable
from shared.messages import Chunk, Close, Decision, Timings, Usage
from shared.telemetry.traces import (
    Choice,
    Reply,
    RequestFacts,
    SpanData,
    covered_us,
    gaps,
    leaves,
    request_spans,
)

FACTS: dict[str, Any] = {
    "request": "r", "tenant": "t", "model": "m", "format": "chat", "inbox": "_INBOX.x",
    "received_wall_us": 1_000, "detokenizer": "detokenizer.d",
}  # fmt: skip


def chunk(at_us: int, took_us: int, tokens: int, step: int) -> Chunk:
    return Chunk(at_us=at_us, took_us=took_us, tokens=tokens, step=step, executor="e")


def close(final: int = 3, **more: Any) -> Close:
    """Received 1000, handled 1010, sent 1110, arrived 1160, admitted 1260, first token 2260, last 4260,
    closed 4300."""
    timings = Timings(
        received_wall_us=1_000, received_us=10, tokenize_us=100, transit_us=50, queue_us=100,
        prefill_us=1_000, decode_us=2_000, prefill_chunks=2, steps=5, live_us=3_140,
    )  # fmt: skip
    fields: dict[str, Any] = {
        "usage": Usage(prompt_tokens=300, completion_tokens=final, cached_tokens=4),
        "timings": timings,
        "executor": "e",
        "chunks": (chunk(150, 400, 256, 7), chunk(400, 700, 44, 8)),
        "decisions": (Decision(at_us=100, what="admit", why="room", numbers=(("blocks", 19),)),),
    }
    return Close(seq=1, final=final, reason="stop", **{**fields, **more})


def _restored(tokens: int, **more: int) -> Decision:
    """Blocks came up from a tier."""
    return Decision(at_us=150, what="restore", why="it came", numbers=(("tokens", tokens), *more.items()))


def table(spans: list[SpanData]) -> list[tuple[str, int, int, int | None]]:
    return [(s.name, s.start_us, s.end_us, s.parent) for s in spans]


def spans_of(*choices: Choice, **more: Any) -> list[SpanData]:
    reply = Reply(opened_us=1_200, first_us=2_300, built_us=4_400, sent_us=4_450)
    return request_spans(RequestFacts(choices=choices, **{**FACTS, "reply": reply, **more}))


def test_every_stage_of_an_answered_request() -> None:
    spans = spans_of(Choice(index=0, tokens=3, reason="stop", close=close()))
    assert table(spans) == [
        ("chat m", 1_000, 4_450, None),
        ("received", 1_000, 1_010, 0),
        ("tokenize", 1_010, 1_110, 0),
        ("transit", 1_110, 1_160, 0),
        ("queue", 1_160, 1_260, 0),
        ("prefill", 1_260, 2_260, 0),
        ("prefill chunk 1", 1_310, 1_710, 5),
        ("prefill chunk 2", 1_560, 2_260, 5),
        ("prefill wait", 1_260, 1_310, 5),
        ("decode", 2_260, 4_300, 0),
        ("first token", 2_260, 2_300, 0),
        ("detokenize", 4_300, 4_400, 0),
        ("send", 4_400, 4_450, 0),
    ]
    assert covered_us((s.start_us, s.end_us) for s in leaves(spans)) == 4_450 - 1_000


def test_spans_have_the_facts_of_the_request() -> None:
    spans = spans_of(Choice(index=0, tokens=3, reason="stop", close=close()))
    root, by_name = spans[0], {s.name: s for s in spans}
    assert root.attributes == {
        "request.id": "r",
        "tenant": "t",
        "component": "detokenizer.d",
        "executor": "e",
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "headrace",
        "gen_ai.request.model": "m",
        "gen_ai.response.model": "m",
        "gen_ai.response.id": "r",
        "gen_ai.response.finish_reasons": ["stop"],
        "gen_ai.response.time_to_first_chunk": 0.0013,
        "gen_ai.usage.input_tokens": 300,
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.usage.cache_read.input_tokens": 4,
        "messaging.system": "nats",
        "messaging.destination.name": "headrace.v1.generate.t.m",
        "messaging.destination.template": "headrace.v1.generate.{tenant}.{model}",
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.consumer.group.name": "tokenizer",
        "messaging.message.id": "r",
    }
    assert (root.kind, root.error) == ("server", "")
    (admit,) = root.events
    assert (admit.name, admit.at_us) == ("admit", 1_260)
    assert admit.attributes == {"why": "room", "choice": 0, "blocks": 19}
    second = {
        "component": "executor.e",
        "choice": 0,
        "tokens": 44,
        "step": 8,
        "batch.id": "e:8",
        "executor": "e",
    }
    assert by_name["prefill chunk 2"].attributes == second
    assert by_name["decode"].attributes["tokens_per_second"] == 1_000.0  # two tokens in 2 ms
    assert by_name["send"].attributes["messaging.destination.name"] == "_INBOX.x"


SESSION = Decision(at_us=0, what="session", why="8d5b by its tip, after shell", numbers=(("idle_us", 90),))
ADMIT = Decision(at_us=100, what="admit", why="room", numbers=(("hit_tokens", 32),))


@pytest.mark.parametrize(
    ("decisions", "cached", "resumed"),
    [
        ((SESSION, ADMIT), 32, ("recomputed", 32, 0, 0, 68)),
        ((SESSION, ADMIT), 0, ("recomputed", 0, 0, 0, 100)),
        ((SESSION, _restored(48)), 48, ("recomputed", 0, 48, 0, 52)),
        ((SESSION, ADMIT, _restored(48)), 80, ("L1", 32, 48, 0, 20)),
        ((SESSION, ADMIT, _restored(64, l2_tokens=48)), 96, ("L2", 32, 16, 48, 4)),
        ((SESSION,), 0, ("recomputed", 0, 0, 0, 100)),
        ((ADMIT, _restored(48)), 80, None),
    ],
)
def test_the_root_names_the_session_and_where_its_blocks_came_from(
    decisions: tuple[Decision, ...], cached: int, resumed: tuple[Any, ...] | None
) -> None:
    usage = Usage(prompt_tokens=100, completion_tokens=3, cached_tokens=cached)
    root, *_ = spans_of(
        Choice(index=0, tokens=3, reason="stop", close=close(decisions=decisions, usage=usage))
    )
    names = ("device_tokens", "l1_tokens", "l2_tokens", "recomputed_tokens")
    keys = ("resumed", *(f"resumed.{name}" for name in names))
    found = {name: each for name, each in root.attributes.items() if name.startswith(("session", "resumed"))}
    assert found == ({} if resumed is None else {"session": "8d5b", **dict(zip(keys, resumed, strict=True))})


def test_choices_share_a_prompt_and_have_a_span_each() -> None:
    follower = close(final=2, chunks=())
    spans = spans_of(
        Choice(index=0, tokens=3, reason="stop", close=close()),
        Choice(index=1, tokens=2, reason="length", close=follower),
    )
    assert table(spans)[5:15] == [
        ("choice 0", 1_260, 4_300, 0),
        ("prefill", 1_260, 2_260, 5),
        ("prefill chunk 1", 1_310, 1_710, 6),
        ("prefill chunk 2", 1_560, 2_260, 6),
        ("prefill wait", 1_260, 1_310, 6),
        ("decode", 2_260, 4_300, 5),
        ("choice 1", 1_260, 4_300, 0),
        ("prefill", 1_260, 2_260, 11),
        ("decode", 2_260, 4_300, 11),
        ("first token", 2_260, 2_300, 0),
    ]
    assert spans[0].attributes["gen_ai.response.finish_reasons"] == ["stop", "length"]
    assert spans[0].attributes["gen_ai.usage.output_tokens"] == 5
    assert [e.attributes["choice"] for s in spans for e in s.events] == [0, 1]


def test_a_request_that_was_never_admitted_waited_all_its_life() -> None:
    timings = Timings(received_wall_us=1_000, received_us=10, tokenize_us=100, transit_us=50, live_us=840)
    late = close(final=0, executor="", chunks=(), decisions=(), timings=timings)
    error = DeadlineExceeded("too late")
    reply = Reply(built_us=2_010, sent_us=2_020)
    spans = spans_of(Choice(index=0, tokens=0, reason="error", close=late), reply=reply, error=error)
    assert table(spans)[3:] == [
        ("transit", 1_110, 1_160, 0),
        ("queue", 1_160, 2_000, 0),
        ("detokenize", 2_000, 2_010, 0),
        ("send", 2_010, 2_020, 0),
    ]
    assert (spans[0].error, spans[0].attributes["error.type"]) == ("too late", "timeout")


def test_a_requeued_sequence_computes_again_beside_its_decode() -> None:
    chunks = (chunk(150, 950, 300, 7), chunk(1_500, 300, 302, 2))
    decisions = (Decision(at_us=1_400, what="requeue", why="the executor is gone"),)
    again = close(chunks=chunks, decisions=decisions)
    spans = spans_of(Choice(index=0, tokens=3, reason="stop", close=again))
    assert ("recompute chunk", 2_660, 2_960, 0) in table(spans)
    assert ("decode", 2_260, 4_300, 0) in table(spans)
    assert [(e.name, e.at_us) for e in spans[0].events] == [("requeue", 2_560)]


def test_a_running_request_ends_now() -> None:
    spans = spans_of(Choice(index=0, tokens=3, reason="running", close=close()), reply=Reply())
    assert table(spans)[0] == ("chat m", 1_000, 4_300, None)
    assert {"first token", "detokenize", "send"}.isdisjoint(s.name for s in spans)


def test_request_whose_scheduler_was_lost_has_the_times_of_the_detokenizer() -> None:
    spans = spans_of(error=Unavailable("the scheduler has gone"))
    assert table(spans) == [
        ("chat m", 1_000, 4_450, None),
        ("before the detokenizer", 1_000, 1_200, 0),
        ("until its scheduler was lost", 1_200, 4_400, 0),
        ("send", 4_400, 4_450, 0),
    ]
    assert spans[0].attributes["error.type"] == "unavailable"


def test_clocks_that_disagree_make_no_negative_span() -> None:
    reply = Reply(opened_us=5, first_us=5, built_us=5, sent_us=5)  # a detokenizer that lags far
    spans = spans_of(Choice(index=0, tokens=3, reason="stop", close=close()), reply=reply)
    assert all(s.end_us >= s.start_us for s in spans)
    orphan = spans_of(reply=reply)
    assert all(s.end_us >= s.start_us for s in orphan)


def test_unions_and_gaps_of_spans_are_right() -> None:
    assert covered_us([(5, 10), (0, 3), (2, 4), (6, 7)]) == 4 + 5
    assert covered_us([]) == 0
    assert gaps([(2, 4), (3, 6), (8, 20)], 0, 10) == [(0, 2), (6, 8)]
    assert gaps([(12, 14)], 0, 10) == [(0, 10)]
    assert gaps([], 3, 3) == []


def test_a_pause_is_a_span_with_its_reason() -> None:
    """Paused within the prompt, from 1460 to 1560, and again in decode until the end at 4300."""
    decisions = (
        Decision(at_us=100, what="admit", why="room"),
        Decision(at_us=300, what="preempt", why="1 row needs a block", numbers=(("preemptions", 1),)),
        Decision(at_us=400, what="resume", why="room", numbers=(("recompute_tokens", 12),)),
        Decision(at_us=2_000, what="requeue", why="the executor is gone"),
    )
    chunks = (chunk(150, 100, 256, 7), chunk(450, 650, 44, 9))
    closed = close(decisions=decisions, chunks=chunks)
    spans = spans_of(Choice(index=0, tokens=3, reason="stop", close=closed))
    assert [row for row in table(spans) if row[0] in ("preempt", "requeue", "prefill wait")] == [
        ("preempt", 1_460, 1_560, 5),
        ("requeue", 3_160, 4_300, 0),
        ("prefill wait", 1_260, 1_310, 5),
        ("prefill wait", 1_410, 1_460, 5),
        ("prefill wait", 1_560, 1_610, 5),
    ]
    (pause,) = [span for span in spans if span.name == "preempt"]
    assert pause.attributes["preemptions"] == 1
    assert pause.attributes["why"] == "1 row needs a block"


def test_a_restore_is_a_span_beside_its_event() -> None:
    """Loads of blocks of the prompt, right after admission, and of those of a paused answer, from 3360 to
    3560."""
    numbers = (("tokens", 256), ("predicted_us", 180), ("took_us", 200), ("recompute_us", 900))
    decisions = (
        Decision(at_us=100, what="admit", why="room"),
        Decision(at_us=300, what="restore", why="256 tokens from k", numbers=numbers),
        Decision(at_us=2_000, what="preempt", why="1 row needs a block"),
        Decision(at_us=2_200, what="resume", why="room"),
        Decision(at_us=2_400, what="restore", why="no answer in time", numbers=(("took_us", 200),)),
    )
    closed = close(decisions=decisions, chunks=(chunk(320, 780, 44, 7),))
    spans = spans_of(Choice(index=0, tokens=3, reason="stop", close=closed))
    assert [row for row in table(spans) if row[0] in ("preempt", "restore", "prefill wait")] == [
        ("preempt", 3_160, 3_360, 0),
        ("restore", 1_260, 1_460, 5),
        ("restore", 3_360, 3_560, 0),
        ("prefill wait", 1_460, 1_480, 5),
    ]
    first, _ = (span for span in spans if span.name == "restore")
    assert first.attributes == {
        "component": "executor.e",
        "choice": 0,
        "why": "256 tokens from k",
        **dict(numbers),
    }
    assert [event.name for event in spans[0].events] == [d.what for d in decisions]
