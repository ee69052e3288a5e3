"""Two models of one machine share memory for one: the agent of `headrace up`, on a clock by hand."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest
from support.memory_bus import MemoryBroker
from support.pipeline.five_actors import Pipeline
from support.virtual_loop import FakeClock

from services.launcher.commands import model as command
from services.launcher.host_agent import CHANGE_US, LEAST_AWAKE_US, HostAgent
from services.scheduler.executors import sleep
from shared.errors import BadRequest, Unavailable, UnknownModel
from shared.nats.interface import Bus

BODY: dict[str, Any] = {"prompt": "Hello", "max_tokens": 20, "ignore_eos": True, "seed": 1}
ONE, TWO = "smollm2-135m-instruct", "other"


@dataclass
class Processes:
    """The executor of one model, in this event loop."""

    pipeline: Pipeline
    least_mib: int = 100
    restarts: int = 0
    is_ending: bool = False
    on: bool = True
    events: list[str] = field(default_factory=list)
    tasks: list[asyncio.Task[Any]] = field(default_factory=list)

    @property
    def is_running(self) -> bool:
        return self.is_ending or self.on

    def start(self) -> None:
        self.events.append("start")
        self.on = True
        self.tasks.append(asyncio.create_task(self.pipeline.add("executor", "executor-1")))

    def stop(self) -> None:
        self.events.append("stop")
        self.on, self.is_ending = False, True
        self.tasks.append(asyncio.create_task(self._finish()))

    async def _finish(self) -> None:
        await self.pipeline.runtimes.pop("executor-1").finish(5)
        self.is_ending = False


@dataclass
class Host:
    one: Pipeline
    two: Pipeline
    bus: Bus
    clock: FakeClock = field(default_factory=FakeClock)
    lines: list[str] = field(default_factory=list)

    @classmethod
    async def up(cls, awake_gib: float = 6) -> Host:
        """Each of the two needs 4 GiB."""
        broker = MemoryBroker()

        async def connect() -> Any:
            return broker.connect()

        flags = {"awake_gib": awake_gib, "sim": "step=200"}
        one = await Pipeline.start(connect, "shared", **flags)
        other = one.settings.model_copy(update={"model_name": TWO})
        two = Pipeline(connect, other, suffix="b")
        await two.begin()
        host = cls(one, two, await connect())
        names, mib = {ONE: Processes(one), TWO: Processes(two)}, int(awake_gib * 1024)
        here = one.settings.host_id
        host.agent = HostAgent(host.bus, "shared", here, names, mib, host.clock, host.lines.append)
        host.serving = asyncio.create_task(host.agent.run())
        await host.until(lambda: len(host.agent.peers.sources()) == 10)
        return host

    agent: HostAgent = field(init=False)
    serving: asyncio.Task[None] = field(init=False)

    async def until(self, true: Any) -> None:
        await self.one.until(true)

    async def turn(self, times: int = 1) -> None:
        for _ in range(times):
            await self.agent.apply_rule()

    async def later(self, by_us: int) -> None:
        """Let time go on, and receive the heartbeats of then."""
        self.clock.advance(by_us)
        now_us, peers = self.clock.now_us(), self.agent.peers
        seen = lambda: [peers.get(source) for source in peers.sources()]  # noqa: E731
        await self.until(lambda: all(peer and peer.last_seen_us == now_us for peer in seen()))

    def states(self) -> list[str]:
        now_us = self.clock.now_us()
        return [self.agent._now(name, now_us).state for name in (ONE, TWO)]

    async def until_states(self, *wanted: str) -> None:
        await self.until(lambda: self.states() == [*wanted])

    async def until_work(self, model: str) -> None:
        await self.until(lambda: self.agent._now(model, self.clock.now_us()).work > 0)

    async def down(self) -> None:
        self.serving.cancel()
        await self.one.stop()
        await self.two.stop()


def ask(pipeline: Pipeline, model: str) -> asyncio.Task[dict[str, Any]]:
    return asyncio.create_task(pipeline.client.complete({**BODY, "model": model}, timeout_s=60))


async def test_the_busier_model_wakes_after_the_least_time_of_the_other() -> None:
    host = await Host.up()
    first = [(await ask(host.one, ONE))["choices"][0]["text"]]
    assert host.states() == ["loaded", "loaded"]
    await host.turn()
    await host.until_states("loaded", "asleep")
    assert host.lines == [f"{TWO} goes to sleep: others need its memory"]
    waits = ask(host.two, TWO)
    await host.until_work(TWO)
    await host.later(LEAST_AWAKE_US - 1_000_000)
    await host.turn(3)
    assert host.states() == ["loaded", "asleep"], "it has been awake for a short time only"
    await host.later(1_000_000)
    await host.turn()
    await host.until_states("asleep", "asleep")
    await host.turn()
    assert (await waits)["usage"]["completion_tokens"] == 20
    await host.until_states("asleep", "loaded")
    back = ask(host.one, ONE)
    await host.until_work(ONE)
    await host.turn(3)
    assert host.states() == ["asleep", "loaded"]
    await host.later(LEAST_AWAKE_US)
    await host.turn()
    await host.until_states("asleep", "asleep")
    await host.turn()
    assert [(await back)["choices"][0]["text"]] == first
    await host.down()


async def test_long_answers_give_way_and_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sleep, "DRAIN_US", 100_000)
    host = await Host.up()
    await host.turn()
    await host.until_states("loaded", "asleep")
    body = {**BODY, "model": ONE, "max_tokens": 3_000, "slo_class": "batch"}
    long = asyncio.create_task(host.one.client.complete(body, timeout_s=60))
    await host.until_work(ONE)
    urgent = [
        asyncio.create_task(
            host.two.client.complete({**BODY, "model": TWO, "slo_class": "interactive"}, timeout_s=60)
        )
        for _ in range(3)
    ]
    await host.until_work(TWO)
    await host.later(LEAST_AWAKE_US)
    await host.until(lambda: host.agent._now(TWO, 0).work > host.agent._now(ONE, 0).work)
    await host.turn()
    await host.until_states("asleep", "asleep")
    await host.turn()
    for answer in urgent:
        assert (await answer)["usage"]["completion_tokens"] == 20
    await host.until_states("asleep", "loaded")
    await host.turn()
    await host.later(LEAST_AWAKE_US)
    await host.until(lambda: host.agent._now(TWO, 0).work == 0)
    await host.turn()
    await host.until_states("asleep", "asleep")
    await host.turn()
    assert (await long)["usage"]["completion_tokens"] == 3_000
    await host.down()


async def test_unload_and_load_at_run_time() -> None:
    host = await Host.up(awake_gib=16)
    agent = host.agent
    assert agent.unload(TWO) == "changing"
    with pytest.raises(Unavailable, match="still being unloaded"):
        agent.load(TWO)
    await host.until_states("loaded", "unloaded")
    answers = await command._ask_hosts(host.bus, TWO, "unload")
    assert [answer["state"] for answer in answers] == ["unloaded"]
    waits = ask(host.two, TWO)
    await host.until(lambda: host.two.status("scheduler")["awaiting_executor"] == 1)
    await host.turn(3)
    assert host.states() == ["loaded", "unloaded"], "an operator has unloaded it"
    (answer,) = await command._ask_hosts(host.bus, TWO, "load")
    assert answer == {"host": host.one.settings.host_id, "model": TWO, "state": "changing"}
    assert (await waits)["usage"]["completion_tokens"] == 20
    await host.until_states("loaded", "loaded")
    (answer,) = await command._ask_hosts(host.bus, TWO, "explode")
    assert "neither" in answer["error"]["message"]
    assert await command._ask_hosts(host.bus, "strange", "load") == []
    with pytest.raises(UnknownModel, match="it has smollm2-135m-instruct, other"):
        agent.load("strange")
    await host.down()


async def test_one_that_does_not_fit_is_refused_with_its_need() -> None:
    host = await Host.up(awake_gib=3)
    await host.turn()
    await host.until_states("unloaded", "unloaded")
    assert f"{ONE} is unloaded: {ONE} needs 4.0 GiB awake, and the models here share 3.0" in host.lines[0]
    with pytest.raises(BadRequest, match=r"needs 4\.0 GiB awake"):
        host.agent.load(ONE)
    await host.down()


async def test_one_that_dies_while_it_loads_is_given_up() -> None:
    host = await Host.up()
    await host.turn()
    await host.until_states("loaded", "asleep")
    processes = host.agent.processes[TWO]
    assert isinstance(processes, Processes)
    host.agent.unload(TWO)
    await host.until_states("loaded", "unloaded")
    host.agent._models[TWO].held = False
    processes.restarts += 2
    await host.turn()
    assert "its executor has ended each time while it loaded" in host.lines[-1]
    assert host.agent._now(TWO, CHANGE_US).work == 0
    processes.tasks.clear()
    await host.down()
