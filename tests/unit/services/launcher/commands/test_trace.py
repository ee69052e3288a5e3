"""`headrace trace`: which answer wins, the waterfall to the character, the timeline to the microsecond."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.memory_bus import MemoryBroker, MemoryBus

from services.launcher.commands.trace import draw_trace, find, timeline
from shared.errors import BadRequest, Unavailable, UnknownRequest
from shared.nats import subjects
from shared.nats.interface import Delivery

UNKNOWN = {"request_id": "r", "state": "unknown"}


def span(name: str, start: int, end: int, parent: int | None = 0, **more: Any) -> dict[str, Any]:
    fields = {"attributes": {}, "events": [], "error": "", **more}
    return {"name": name, "start_us": start, "end_us": end, "parent": parent, **fields}


BODY: dict[str, Any] = {
    "request_id": "r",
    "state": "ended",
    "tenant": "t",
    "model": "m",
    "trace_id": "ab" * 16,
    "detokenizer": "detokenizer.d",
    "choices": [
        {"choice": 0, "reason": "stop", "tokens": 3, "prompt_tokens": 300, "cached_tokens": 0,
         "executor": "e"},
    ],
    "spans": [
        span("chat m", 1_000, 21_000, None, attributes={"gen_ai.response.time_to_first_chunk": 0.0051}),
        span("queue", 1_000, 1_100),
        span("prefill", 1_100, 6_000, events=[
            {"name": "admit", "at_us": 1_100, "attributes": {"why": "room", "choice": 0, "blocks": 19}}
        ]),
        span("decode", 6_000, 21_000, attributes={"tokens": 3, "tokens_per_second": 133.3}),
        span("prefill chunk 1", 2_000, 6_000, 2, attributes={"tokens": 300, "step": 7}),
    ],
    "window": 2,
    "steps": {"e": {
        "step": [7, 8], "planned_us": [2_000, 2_100], "start_us": [2_200, 5_900], "end_us": [5_900, 9_000],
        "result_us": [6_000, 9_100], "forward_us": [3_000, 2_500], "sample_us": [700, 600],
        "wait_us": [200, 0], "rows": [1, 1], "tokens": [300, 1], "prefill_tokens": [300, 0],
        "micro_batch": [0, 1],
    }},
}  # fmt: skip


def test_waterfall_is_drawn() -> None:
    # 75 columns less the widest label (17) and 40 for figures are under the least bar, 20: 1 ms a column
    assert draw_trace(BODY, 75) == [
        "r  chat m  tenant t  ended: stop",
        f"  executor e, detokenizer d, trace {'ab' * 16}",
        "  prompt 300 tokens (0 cached), answer 3 tokens, first text after 5.1 ms, 20.0 ms in all",
        "",
        "queue             ▏                        0.1 ms",
        "prefill           █████                    4.9 ms",
        "  prefill chunk 1  ████                    4.0 ms  300 tokens, step 7",
        "decode                 ███████████████    15.0 ms  3 tokens, 133.3 tokens/s",
        "",
        "decisions",
        "      0.1 ms  admit: room (blocks 19)",
    ]


def test_failed_request_shows_the_reason() -> None:
    body = {**BODY, "spans": [{**BODY["spans"][0], "error": "too late"}]}
    assert draw_trace(body, 80)[3] == "  too late"


def test_the_timeline_has_a_row_for_each_step_in_flight() -> None:
    events = timeline(BODY)["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert [names[2, tid] for tid in (0, 1, 99)] == ["in flight 0", "in flight 1", "waiting for a plan"]
    slices = [(e["tid"], e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X" and e["pid"] == 2]
    assert slices == [
        (1, "queued", 1_000, 200),
        (1, "forward 7", 1_200, 3_000),
        (1, "sample 7", 4_200, 700),
        (1, "returned", 4_900, 100),
        (99, "wait", 1_000, 200),
        (0, "queued", 1_100, 3_800),
        (0, "forward 8", 4_900, 2_500),
        (0, "sample 8", 7_400, 600),
        (0, "returned", 8_000, 100),
    ]
    request = [(e["tid"], e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X" and e["pid"] == 1]
    assert request == [
        (0, "chat m", 0, 20_000),
        (1, "queue", 0, 100),
        (1, "prefill", 100, 4_900),
        (2, "prefill chunk 1", 1_000, 4_000),
        (1, "decode", 5_000, 15_000),
    ]
    assert [(e["name"], e["ts"]) for e in events if e["ph"] == "i"] == [("admit", 100)]
    json.dumps(events)


def test_the_timeline_has_the_micro_batches_of_a_step() -> None:
    steps = {**BODY["steps"]["e"], "segments": [[0, 0, 500, 2, 500, 400, 1, 500, 600], []]}
    events = timeline({**BODY, "steps": {"e": steps}})["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] == 2}
    halves = [e for e in events if 90 <= e["tid"] < 94 and e["ph"] == "X"]
    slices = [(e["tid"], e["name"], e["ts"], e["dur"]) for e in halves]
    assert slices == [
        (90, "compute A", 1_200, 500), (92, "comm A", 1_700, 400), (91, "compute B", 1_700, 600)
    ]  # fmt: skip
    assert [names[tid] for tid in range(90, 94)] == ["compute A", "compute B", "comm A", "comm B"]


async def scheduler(broker: MemoryBroker, body: dict[str, Any]) -> list[bytes]:
    """Answers every question about a trace with `body`; what it was asked."""
    bus, asked = broker.connect(), list[bytes]()

    def answer(delivery: Delivery) -> None:
        asked.append(delivery.data)
        bus.publish(delivery.reply, json.dumps(body).encode())

    await bus.subscribe(subjects.TRACE_ALL, answer)
    return asked


@pytest.fixture
def client() -> MemoryBus:
    return MemoryBroker().connect()


@pytest.mark.parametrize("order", [[UNKNOWN, BODY], [BODY, UNKNOWN]])
async def test_answer_of_a_scheduler_with_the_trace_wins(
    client: MemoryBus, order: list[dict[str, Any]]
) -> None:
    asked = [await scheduler(client._broker, body) for body in order]
    assert await find(client, "r", steps=True) == BODY
    assert asked == [[b"steps"], [b"steps"]]
    assert await find(client, "r") == BODY
    assert asked[0][-1] == b""


async def test_unknown_request_is_an_error(client: MemoryBus) -> None:
    await scheduler(client._broker, UNKNOWN)
    with pytest.raises(UnknownRequest, match="no request 'r' is running or among the last 1000"):
        await find(client, "r", wait_s=0.05)


async def test_absent_or_silent_fleet_is_an_error(client: MemoryBus) -> None:
    with pytest.raises(Unavailable, match="start one with `headrace up`"):
        await find(client, "r")
    await client._broker.connect().subscribe(subjects.TRACE_ALL, lambda _: None)
    with pytest.raises(Unavailable, match="no scheduler answers"):
        await find(client, "r", wait_s=0.05)


@pytest.mark.parametrize("request_id", ["", "x" * 129])
async def test_invalid_id_is_refused(client: MemoryBus, request_id: str) -> None:
    with pytest.raises(BadRequest, match="1 to 128 characters"):
        await find(client, request_id)
