"""The scheduler's shell on the memory bus: public subjects, ticks, restarts of peers, drain."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.actor_fleet import Fleet, Hand, watched_fleet

from services.scheduler.actor import SchedulerActor, build
from services.scheduler.state.state import Limits
from shared.actor.runtime import HeartbeatPayload, Runtime
from shared.config import Settings
from shared.errors import SetupError
from shared.messages import (
    Accepted,
    Close,
    Ended,
    ExecHello,
    Open,
    Rejected,
    StepPlan,
    StepResult,
    Tokenized,
    ints,
)
from shared.nats import subjects


@dataclass
class House:
    fleet: Fleet
    actor: SchedulerActor
    runtime: Runtime
    tokenizer: Hand
    executor: Hand
    detokenizer: Hand

    async def ask(self, request: str, **more: object) -> None:
        fields = {"timeout_us": 10**9, "max_tokens": 1, "tokens": ints([5, 6]), **more}
        asked = Tokenized(request=request, attempt=1, tenant="t", model="m", inbox=f"in.{request}", **fields)
        self.tokenizer.mailbox.send("scheduler.s", asked)
        await self.fleet.broker.settle()

    async def step(self, token: int = 7) -> None:
        """Answer the last plan."""
        plan = self.executor.of(StepPlan)[-1]
        ids, done = ints([token] * len(plan.sample_slots)), ints([0] * len(plan.sample_slots))
        self.executor.mailbox.send(
            "scheduler.s", StepResult(exec_epoch=1, step=plan.step, ids=ids, done=done)
        )
        await self.fleet.broker.settle()

    async def end(self) -> None:
        """Confirm for every Close that it has gone out."""
        for close in self.detokenizer.of(Close):
            ended = Ended(seq=close.seq, index=close.final, reason=close.reason)
            self.detokenizer.mailbox.send("scheduler.s", ended)
        await self.fleet.broker.settle()


@pytest.fixture
async def house() -> AsyncIterator[House]:
    async with watched_fleet() as fleet:
        actor = SchedulerActor(Limits(), "m")
        runtime = await fleet.started(actor, "s")
        hands = [Hand(kind) for kind in ("tokenizer", "executor", "detokenizer")]
        for hand in hands:
            await fleet.started(hand, hand.kind[0])
        hello = ExecHello(
            executor="e", exec_epoch=1, host_id="h", model="m", fingerprint="f", vocab_digest="v", vocab=9,
            blocks=8, block_tokens=4, slots=2, max_step_tokens=64, max_context=32,
        )  # fmt: skip
        hands[1].mailbox.send("scheduler.s", hello)
        await fleet.broker.settle()
        yield House(fleet, actor, runtime, *hands)
        await runtime.finish(0)  # what a test leaves running is not waited for


async def test_a_request_passes_through(house: House) -> None:
    wall_us = house.fleet.clock.wall_us()
    await house.ask("r", received_wall_us=wall_us - 300, sent_wall_us=wall_us - 200)
    assert house.tokenizer.of(Accepted) == [Accepted(tenant="t", request="r", attempt=1)]
    assert [o.prompt_tokens for o in house.detokenizer.of(Open)] == [2]
    assert house.actor.heartbeat_payload().load == (("requests", 1), ("running", 1), ("waiting", 0))
    assert house.actor.status()["scale_wanted"] == {"rows": 1, "prompt_tokens": 0, "blocks": 1}
    await house.step()
    (close,) = house.detokenizer.of(Close)
    assert (close.final, close.reason) == (1, "length")
    assert (close.timings.tokenize_us, close.timings.transit_us) == (100, 200)
    await house.end()
    status = house.actor.status()
    assert (status["requests"], status["running"], status["closing"]) == (0, 0, 0)


async def test_a_cancel_on_the_public_subject_stops_a_request(house: House) -> None:
    await house.ask("my request/1", max_tokens=9)
    house.fleet.outside.publish("headrace.v1.cancel.t.=ZZ", b"")  # no name: ignored
    house.fleet.outside.publish(subjects.cancel("t", "my request/1"), b"")
    await house.fleet.broker.settle()
    (close,) = house.detokenizer.of(Close)
    assert (close.code, close.message) == (499, "cancelled by the client")


async def test_the_trace_of_a_request_before_during_and_after(house: House) -> None:
    async def ask() -> dict[str, Any]:
        return await house.fleet.ask(subjects.trace("r"))

    def stages(trace: dict[str, Any]) -> list[str]:
        return [span["name"] for span in trace["spans"][1:]]

    assert await ask() == {"request_id": "r", "state": "unknown"}
    await house.ask("r", received_wall_us=1_000)
    running = await ask()
    assert (running["state"], running["choices"][0]["reason"]) == ("running", "running")
    until_now = ["received", "tokenize", "transit", "queue", "prefill", "prefill chunk 1"]
    assert stages(running) == until_now
    await house.step()
    await house.end()
    ended = await ask()
    (choice,) = ended["choices"]
    assert (ended["state"], choice["tokens"], choice["reason"]) == ("ended", 1, "length")
    assert stages(ended) == [*until_now, "decode"]  # this detokenizer reports no stages of its own
    assert [event["name"] for event in ended["spans"][0]["events"]] == ["admit"]
    house.fleet.outside.publish(subjects.trace("r"), b"")  # no service to answer
    assert (await house.fleet.ask("headrace.v1.trace.=ZZ"))["state"] == "unknown"


async def test_ticks_end_a_request_at_its_deadline(house: House) -> None:
    await house.ask("r", max_tokens=9, timeout_us=2_000_000)
    house.fleet.clock.advance(2_000_000)
    close = await house.detokenizer.until(Close)
    assert (close.code, close.message[:23]) == (408, "not done within its 2 s")


async def test_drain_waits_for_what_runs_and_refuses_the_rest(house: House) -> None:
    await house.ask("r")
    draining = asyncio.create_task(house.runtime.finish(10))
    while not house.actor._core.state.draining:
        await asyncio.sleep(0)
    await house.ask("late")
    assert [(r.request, r.code) for r in house.tokenizer.of(Rejected)] == [("late", 503)]
    await house.step()
    assert not draining.done()
    await house.end()
    await draining
    assert house.runtime.state == "stopped"


async def test_clients_left_when_the_time_to_drain_is_over_get_an_error(house: House) -> None:
    await house.ask("runs", max_tokens=9)
    await house.step()
    await house.ask("waits")
    hurried = asyncio.Event()
    finishing = asyncio.create_task(house.runtime.finish(60, hurried))
    await house.fleet.broker.settle()
    assert not finishing.done()
    hurried.set()
    await finishing
    closed = house.detokenizer.of(Close)
    assert [(close.code, close.retry_after_ms) for close in closed] == [(503, 1_000)] * 2
    assert house.runtime.state == "stopped"


async def test_drain_sees_a_request_that_came_between_two_ticks(house: House) -> None:
    await house.ask("first")
    await house.step()
    await house.end()
    assert house.actor.status()["requests"] == 0
    await house.ask("second")  # the tick task of the first still sleeps
    draining = asyncio.create_task(house.actor.drain())
    await house.fleet.broker.settle()
    assert not draining.done()
    await house.step()
    await house.end()
    await draining


async def test_a_tick_that_fails_fails_the_actor(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = asyncio.Event()

    def broken(state: object) -> None:
        failed.set()
        raise RuntimeError("broken tick")

    monkeypatch.setattr("services.scheduler.core.lifecycle.expire", broken)
    await house.ask("r")
    async with asyncio.timeout(60):
        await failed.wait()
    await house.fleet.broker.settle()
    with pytest.raises(RuntimeError, match="broken tick"):
        house.actor.upkeep()


async def test_a_cancel_that_fails_fails_the_actor(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of it is done: nothing that it decides from now on could be trusted."""

    def broken(*args: object) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr("services.scheduler.lifecycle.on_cancel", broken)
    house.fleet.outside.publish(subjects.cancel("t", "one"), b"")
    async with asyncio.timeout(60):
        assert str(await house.runtime.failed()) == "broken"


async def test_a_detokenizer_that_restarts_while_it_drains_gets_its_requests_back(house: House) -> None:
    await house.ask("r")
    old = house.fleet.runtimes[-1]
    old.state = "draining"
    old.send_heartbeat()
    await house.fleet.broker.settle()
    assert house.actor.status()["detokenizers"] == []
    house.detokenizer.mailbox.epoch += 1  # the next incarnation, under the same name
    old.mailbox.epoch = house.detokenizer.mailbox.epoch
    old.state = "ready"
    old.send_heartbeat()
    await house.fleet.broker.settle()
    assert [o.attempt for o in house.detokenizer.of(Open)] == [1, 2]


async def test_lost_peers_are_reported_to_the_core(house: House) -> None:
    await house.ask("r", max_tokens=9)
    house.actor.on_stream_lost("executor.e")
    assert house.actor.status()["executors"] == {}
    peer = house.runtime.mailbox.peers.get("detokenizer.d")
    assert peer is not None
    house.actor.on_peer_gone(peer)
    assert house.actor.status()["detokenizers"] == []
    assert house.actor.status()["waiting"] == 1


class Other(Hand):
    """An actor of another model, or one that belongs to another scheduler."""

    def __init__(self, kind: str, model: str = "m", scheduler: str = "") -> None:
        super().__init__(kind)
        self._facts = HeartbeatPayload(model=model, scheduler=scheduler)

    def heartbeat_payload(self) -> HeartbeatPayload:
        return self._facts


async def test_no_text_is_made_with_the_vocabulary_of_another_model(house: House) -> None:
    other = Other("detokenizer", "other")
    await house.fleet.started(other, "a")
    for number in range(16):
        await house.ask(f"r{number}")
    assert house.actor.status()["detokenizers"] == ["d"]
    assert other.received == []


async def test_an_executor_that_has_another_scheduler_now_is_none_of_ours(house: House) -> None:
    """We were stopped for a while: it would ignore every plan. No request is blamed for it."""
    await house.ask("r", max_tokens=9)
    runtime = house.fleet.runtimes[2]
    runtime.actor.heartbeat_payload = lambda: HeartbeatPayload(model="m", scheduler="s2")  # type: ignore[method-assign]
    runtime.send_heartbeat()
    await house.fleet.broker.settle()
    status = house.actor.status()
    assert (status["executors"], status["waiting"]) == ({}, 1)
    (request,) = house.actor._core.state.requests.values()
    assert request.executor_deaths == 0
    await house.ask("late")
    assert [(r.request, r.code) for r in house.tokenizer.of(Rejected)] == [("late", 503)]


def test_build_takes_the_limits_from_the_settings() -> None:
    settings = Settings(window=3, step_tokens=99, max_waiting=7, max_waiting_tokens=8, model_name="named")
    actor = build(settings)
    assert actor._core.state.limits == Limits(window=3, step_tokens=99, max_waiting=7, max_waiting_tokens=8)
    assert actor.heartbeat_payload().model == "named"


async def test_quotas_are_read_from_a_file_that_may_change(tmp_path: Path) -> None:
    path = tmp_path / "quotas"
    path.write_text("t 1 -\n")
    actor = build(Settings(model="m", tenant_quotas=str(path)))
    async with watched_fleet() as fleet:
        runtime = await fleet.started(actor, "s")
        quotas = actor._core.state.quotas
        assert quotas.by_tenant == {"t": (1, 0)}
        path.write_text("t 1\n")
        runtime.upkeep()
        assert quotas.by_tenant == {"t": (1, 0)}, "an invalid file is ignored"
        path.write_text("t 2 30\nu - 5\n")
        runtime.upkeep()
        assert quotas.by_tenant == {"t": (2, 30), "u": (0, 5)}
    with pytest.raises(SetupError, match="tenant_quotas"):
        build(Settings(model="m", tenant_quotas=str(tmp_path / "none")))


async def test_usage_is_in_the_status_and_in_the_metrics(house: House) -> None:
    await house.ask("r")
    await house.step()
    await house.end()
    used = {"requests": 1, "prompt_tokens": 2, "cached_tokens": 0, "completion_tokens": 1}
    assert house.actor.status()["usage"] == {"t": used}
    points = {p.name: (p.value, dict(p.attributes)) for p in house.actor.metrics if ".usage." in p.name}
    whose = {"tenant": "t", "model": "m"}
    assert points == {f"headrace.scheduler.usage.{name}": (count, whose) for name, count in used.items()}
