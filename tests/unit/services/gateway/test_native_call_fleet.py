"""The metrics of a fleet on one page: each service is named, and a silent one is missing alone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from support.actor_fleet import INTERVAL_US, Fleet, Recorder, watched_fleet

from services.gateway import native_call as fleet_module
from services.gateway.native_call import KEPT_US
from services.gateway.native_call import Fleet as GatewayFleet
from shared import bodies, codec
from shared.codec import Envelope
from shared.errors import Unavailable
from shared.messages import Heartbeat
from shared.nats import subjects
from shared.nats.interface import Delivery
from shared.telemetry.counters import HistogramPoint, MetricPoint, Metrics
from shared.telemetry.metrics import to_prometheus


class Counting(Recorder):
    """Its one metric counts how often it was collected."""

    collected = 0

    @property
    def metrics(self) -> Metrics:
        self.collected += 1
        histogram = HistogramPoint("took", (0.1,), (1, 2), 3.0, "s", (("route", "x"),))
        return (MetricPoint("collected", self.collected, "1", is_counter=True), histogram)


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    async with watched_fleet() as fleet:
        yield fleet


async def collector(fleet: Fleet) -> GatewayFleet:
    gateway = await fleet.started(Recorder("gateway"), "g")
    return GatewayFleet(gateway.mailbox, lambda: (MetricPoint("own", 1, "1"),))


async def answering(fleet: Fleet, name: str, *states: str) -> list[bytes]:
    """A scheduler that has these states of a session, one an answer; the bodies that it was sent."""
    box = (await fleet.started(Recorder("scheduler"), name)).mailbox
    left, sent = [*states], list[bytes]()

    def answer(asked: Delivery) -> None:
        sent.append(asked.data)
        if left and (state := left.pop(0)) != "silent":
            body = {"scheduler": name, "state": state, "tokens": 0, "device": 0, "l1": 0, "l2": 0}
            refused = {"error": {"code": 400, "message": "`do`: …"}}
            box.bus.publish(asked.reply, bodies.encode(refused if state == "refused" else body))

    await box.bus.subscribe(subjects.SESSION_ALL, answer)
    return sent


@pytest.mark.parametrize(
    ("one", "other", "last"),
    [
        ("unknown", "idle", "idle"),
        ("idle", "unknown", "idle"),
        ("unknown", "unknown", "unknown"),
        ("refused", "silent", "refused"),
        ("idle", "silent", "idle"),
    ],
)
async def test_a_verb_has_the_answer_of_the_scheduler_with_the_session(
    fleet: Fleet, one: str, other: str, last: str
) -> None:
    sent = [*await answering(fleet, "s1", one), await answering(fleet, "s2", other)]
    gateway = await collector(fleet)
    found = await asked(gateway)
    assert found[-1].get("state", "refused") == last
    assert json.loads(sent[-1][0]) == {"do": "state"}


async def asked(gateway: GatewayFleet) -> list[dict[str, Any]]:
    subject = subjects.session("acme", "run 1")
    return await gateway.ask_schedulers(
        subject, "acme", bodies.SessionState, {"do": "state"}, enough=lambda body: body["state"] != "unknown"
    )


async def test_a_verb_fails_where_a_scheduler_that_may_have_the_session_is_silent(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_module, "SERVICES_S", 0.05)
    await answering(fleet, "s1", "unknown", "unknown")
    await answering(fleet, "s2", "silent")
    gateway = await collector(fleet)
    with pytest.raises(Unavailable, match=r"scheduler\.s2 does not answer: see `headrace status`"):
        await asked(gateway)


async def test_a_verb_without_any_scheduler_fails(fleet: Fleet) -> None:
    with pytest.raises(Unavailable, match="no scheduler runs: see `headrace status`"):
        await asked(await collector(fleet))


def lines(metrics: Metrics, *wanted: str) -> list[str]:
    page = to_prometheus(metrics).decode().splitlines()
    return [line for line in page if line.startswith(wanted)]


async def test_each_service_is_on_the_page_with_its_name(fleet: Fleet) -> None:
    await fleet.started(Counting("scheduler"), "s")
    await fleet.started(Counting("executor"), "e")
    found = await (await collector(fleet)).metrics()
    assert lines(found, "headrace_up", "collected_total", "took_seconds_count") == [
        'headrace_up{instance="e",service="executor"} 1.0',
        'headrace_up{instance="g",service="gateway"} 1.0',
        'headrace_up{instance="s",service="scheduler"} 1.0',
        'collected_total{instance="e",service="executor"} 1.0',
        'collected_total{instance="s",service="scheduler"} 1.0',
        'took_seconds_count{instance="e",route="x",service="executor"} 3.0',
        'took_seconds_count{instance="s",route="x",service="scheduler"} 3.0',
    ]


async def test_a_silent_service_is_down_and_a_damaged_answer_is_dropped(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fleet_module, "SERVICES_S", 0.05)
    await fleet.started(Counting("scheduler"), "s")
    metrics = await collector(fleet)
    silent = Heartbeat(kind="executor", actor="e", host_id="h", state="ready", interval_us=INTERVAL_US)
    beat = subjects.heartbeat("f", "executor", "e")
    fleet.outside.publish(beat, codec.encode(Envelope("executor.e", 1, 0, silent)))
    await fleet.broker.settle()

    def damaged(asked: Delivery) -> None:
        fleet.outside.publish(asked.reply, b'["executor.e", [{"name": 3}]]')

    await fleet.outside.subscribe(subjects.metrics("f"), damaged)
    assert lines(await metrics.metrics(), "headrace_up", "collected") == [
        'headrace_up{instance="e",service="executor"} 0.0',
        'headrace_up{instance="g",service="gateway"} 1.0',
        'headrace_up{instance="s",service="scheduler"} 1.0',
        'collected_total{instance="s",service="scheduler"} 1.0',
    ]
    assert "damaged metrics" in caplog.text


async def test_many_requests_for_the_page_cost_one_collection(fleet: Fleet) -> None:
    actor = Counting("scheduler")
    await fleet.started(actor, "s")
    metrics = await collector(fleet)
    await asyncio.gather(*(metrics.metrics() for _ in range(20)))
    await metrics.metrics()
    assert actor.collected == 1
    fleet.clock.advance(KEPT_US + 1)
    await metrics.metrics()
    assert actor.collected == 2


async def test_metrics_page_has_the_gateways_own_metrics_without_a_broker(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_module, "SERVICES_S", 0.05)
    metrics = await collector(fleet)
    fleet.broker.drop(subjects.metrics("f"))
    assert lines(await metrics.metrics(), "headrace_up", "own") == [
        'headrace_up{instance="g",service="gateway"} 1.0',
        'own{instance="g",service="gateway"} 1.0',
    ]
