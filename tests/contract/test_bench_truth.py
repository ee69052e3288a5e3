"""The load client against a server whose latencies are known, over both transports, on a virtual clock:
what it reports is the truth to the microsecond, with any number in flight.

How near it is on a real clock, between processes, is measured by `python -m support.bench.truth`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from support.bench.known import MODEL, Known, Latency
from support.bench.known_http import serve_http
from support.bench.known_nats import serve_nats
from support.bench.truth import truth_of
from support.memory_bus import MemoryBroker
from support.virtual_loop import LoopClock, run

from loadtest.bench.asked import Options
from loadtest.bench.drive import LEAD_US, Transport
from loadtest.bench.over_http import HttpTransport
from loadtest.bench.over_nats import NatsTransport
from loadtest.bench.pacer import Pacer
from loadtest.bench.run import Asked, Bench, Point, Run
from loadtest.bench.shape import Shape
from shared.client.client import Client

TOKENS = 6
GOALS = {"ttft": 150.0, "tpot": 30.0}  # what every third request of SLOW misses
LATENCY = Latency(first_us=100_000, gap_us=20_000)
SLOW = dataclasses.replace(LATENCY, slow=2.0)


@pytest.fixture(params=["nats", "http"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@asynccontextmanager
async def known(kind: str, latency: Latency, folder: Path) -> AsyncIterator[tuple[Known, Transport]]:
    """A server and the way to it."""
    pacer = Pacer(LoopClock(), early_us=0)
    server = Known(latency, pacer)
    if kind == "nats":
        broker = MemoryBroker()
        await serve_nats(server.answer, broker.connect(), MODEL)
        yield server, NatsTransport(await Client.open(broker.connect()), MODEL, pacer, 600)
    else:
        path = str(folder / "known.sock")
        listening = await serve_http(server.answer, path, MODEL)
        transport = HttpTransport(f"unix:{path}", pacer)
        await transport.find_model()
        yield server, transport
        await transport.close()
        listening.close()


def measured(
    kind: str, folder: Path, point: Point, latency: Latency, asked: Asked
) -> tuple[Run, list[dict[str, Any]]]:
    """What the client reports, and what the server wrote down."""

    async def both() -> tuple[Run, list[dict[str, Any]]]:
        async with known(kind, latency, folder) as (server, transport):
            bench = Bench(transport, asked, Options(), GOALS, Pacer(LoopClock(), early_us=0))
            made = await bench.point(0, point)
            return made, [dataclasses.asdict(each) for each in server.served]

    return run(both())


def shape(requests: int) -> Asked:
    return Asked(shape=Shape(prompts=requests, input_len=10, output_len=TOKENS))


@pytest.mark.parametrize("in_flight", [1, 300])
def test_a_closed_loop_reports_what_the_server_did(kind: str, in_flight: int, tmp_path: Path) -> None:
    asked = shape(2 * in_flight + in_flight // 2)
    made, served = measured(kind, tmp_path, Point(max_concurrency=in_flight), SLOW, asked)
    figures, truth = made["figures"], truth_of(served, GOALS)
    assert figures["completed"] == asked.shape.prompts == len(served)
    assert figures["max_concurrent_requests"] == in_flight
    assert {name: figures[name] for name in truth} == pytest.approx(truth, rel=1e-9)
    assert figures["request_goodput"] * figures["duration"] == pytest.approx(len(served) - len(served[::3]))


@pytest.mark.parametrize("in_flight", [1, 300])
def test_an_open_loop_reports_what_the_server_did(kind: str, in_flight: int, tmp_path: Path) -> None:
    """So many a second that by Little's law so many are in flight."""
    took_s = (100 + (TOKENS - 1) * 20) / 1_000
    point = Point(request_rate=in_flight / took_s)
    made, served = measured(kind, tmp_path, point, LATENCY, shape(2 * in_flight))
    figures, truth = made["figures"], truth_of(served, GOALS)
    assert {name: figures[name] for name in truth if name.endswith("_ms")} == {
        "mean_ttft_ms": pytest.approx(100),
        "median_ttft_ms": 100,
        "mean_itl_ms": 20,
        "median_itl_ms": 20,
    }
    assert (figures["mean_tpot_ms"], figures["p99_e2el_ms"]) == (20, 200)
    assert figures["max_late_ms"] == 0
    first_s = (served[0]["received_us"] - LEAD_US) / 1e6  # the client's time begins before the first arrival
    assert figures["duration"] == pytest.approx(2 * took_s + took_s)
    took_by_server_s = figures["duration"] - first_s
    assert truth["output_throughput"] * took_by_server_s == pytest.approx(
        figures["output_throughput"] * figures["duration"]
    )


def test_latencies_include_the_queue_under_overload(kind: str, tmp_path: Path) -> None:
    """Two slots of 200 ms serve 10 requests a second; 40 come. A client that waited for answers, or counted
    from the sending alone, would report 100 ms."""
    latency = dataclasses.replace(LATENCY, slots=2)
    point = Point(request_rate=40, burstiness=math.inf)
    made, _ = measured(kind, tmp_path, point, latency, shape(40))
    # request i comes at 25 * (i + 1) ms; pairs of them begin every 200 ms, the first two at 25 and 50 ms
    begins_ms = [25 + 25 * (i % 2) + 200 * (i // 2) for i in range(40)]
    waits_ms = [begin - 25 * (i + 1) for i, begin in enumerate(begins_ms)]
    assert made["figures"]["mean_ttft_ms"] == pytest.approx(100 + sum(waits_ms) / 40)
    assert made["figures"]["max_ttft_ms"] == pytest.approx(100 + max(waits_ms))
    assert max(waits_ms) == 2_850
    assert made["figures"]["max_late_ms"] == 0


def test_a_place_that_is_waited_for_is_in_the_latency(kind: str, tmp_path: Path) -> None:
    """The same overload with the queue at the client: the server sees two at a time and none that waits,
    the latencies are the same."""
    point = Point(request_rate=40, burstiness=math.inf, max_concurrency=2)
    made, served = measured(kind, tmp_path, point, LATENCY, shape(40))
    assert truth_of(served, GOALS)["mean_ttft_ms"] == pytest.approx(100)
    begins_ms = [25 + 25 * (i % 2) + 200 * (i // 2) for i in range(40)]
    waits_ms = [begin - 25 * (i + 1) for i, begin in enumerate(begins_ms)]
    assert made["figures"]["mean_ttft_ms"] == pytest.approx(100 + sum(waits_ms) / 40)
    assert made["figures"]["max_late_ms"] == pytest.approx(max(waits_ms))


def test_a_closed_loop_hides_the_overload_that_an_open_one_shows(kind: str, tmp_path: Path) -> None:
    latency = dataclasses.replace(LATENCY, slots=2)
    made, _ = measured(kind, tmp_path, Point(max_concurrency=2), latency, shape(40))
    assert made["figures"]["max_ttft_ms"] == pytest.approx(100)


def test_conversation_repeats_earlier_messages_in_each_prompt(kind: str, tmp_path: Path) -> None:
    """Each prompt has the system text, every question and every answer before it."""
    chat = Shape(prompts=3, input_len=5, output_len=TOKENS, prefix_len=7, turns=3, think_s=0.5)
    asked = Asked(workload="chat", shape=chat)
    made, served = measured(kind, tmp_path, Point(max_concurrency=1), LATENCY, asked)
    assert [each["prompt_tokens"] for each in served] == [12, 23, 34] * 3
    columns = made["requests"]
    assert columns["prompt_tokens"] == [12, 23, 34] * 3
    assert columns["kind"] == ["turn 1", "turn 2", "turn 3"] * 3
    gaps_us = [b - a for a, b in zip(columns["ended_us"], columns["intended_us"][1:], strict=False)]
    assert gaps_us == [500_000, 500_000, 0, 500_000, 500_000, 0, 500_000, 500_000]
    assert made["figures"]["cached_tokens"] == 3 * (6 + 11 + 17)
    assert made["figures"]["total_input_tokens"] == 3 * (12 + 23 + 34)
