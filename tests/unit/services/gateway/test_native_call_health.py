"""`/health` of several models: one that is served is enough."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from support.memory_bus import MemoryBroker

from services.gateway import native_call
from services.gateway.native_call import Health
from shared.actor.membership import NEEDED, Peers
from shared.client.client import Client
from shared.errors import Unavailable
from shared.messages import Heartbeat

BEAT = Heartbeat(kind="", actor="x", host_id="h", state="ready")


class Served:
    """Peers of the models a, b and c, and which of them answers a probe."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answering: set[str] = set()
        self.probed: list[str] = []
        self.peers = Peers()
        self.health = Health(Client(MemoryBroker().connect()))
        monkeypatch.setattr(native_call, "probe", self._probe)
        for kind in NEEDED:
            for model in "abc":
                self.beat(kind, model)

    def beat(self, kind: str, model: str, state: str = "ready", **load: int) -> None:
        heartbeat = replace(BEAT, kind=kind, actor=f"{kind}-{model}", model=model, state=state)
        heartbeat = replace(heartbeat, load=tuple(load.items()))
        self.peers.update(1, heartbeat, 0)

    async def beats(self, count: int = 1) -> str:
        """Look so often; the status then."""
        for _ in range(count):
            self.health.check(self.peers)
            for _ in range(4):
                await asyncio.sleep(0)
        return self.health.why

    async def _probe(self, client: Client, model: str) -> None:
        self.probed.append(model)
        if model not in self.answering:
            raise Unavailable("no answer")


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Served:
    return Served(monkeypatch)


async def test_one_model_that_answers_is_enough(served: Served) -> None:
    assert await served.beats(3) == "a request to c failed: no answer"
    assert served.probed == ["a", "b", "c"], "each in turn"
    served.answering = {"b"}
    assert await served.beats(3) == ""
    served.health.doubt("no executor", "c")
    assert await served.beats() == "", "another one's 503 is not b's"
    served.health.doubt("no executor", "b")
    assert served.health.why == "no executor"


async def test_a_drain_ends_a_probe_that_is_under_way_and_begins_none(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(client: Client, model: str) -> None:
        served.probed.append(model)
        await asyncio.Event().wait()

    monkeypatch.setattr(native_call, "probe", never)
    assert await served.beats() == "starting"
    served.health.stop()
    assert await served.beats(2) == "draining"
    assert served.probed == ["a"]


async def test_a_kind_that_one_model_lacks_is_not_missing_for_another(served: Served) -> None:
    served.answering = {"a", "b", "c"}
    assert await served.beats(3) == ""
    for model in "ab":
        served.beat("executor", model, "draining")
    assert await served.beats() == ""
    served.beat("executor", "c", "draining")
    assert await served.beats() == "waiting for: executor"
    served.beat("executor", "a")
    served.answering = set()
    assert await served.beats() == "a request to a failed: no answer", "it has to be proven again"


async def test_a_model_that_starts_cold_is_healthy_without_an_executor(served: Served) -> None:
    """It is not probed until it has one; then a real request is the proof, as always."""
    for model in "abc":
        served.beat("executor", model, "draining")
    assert await served.beats() == "waiting for: executor"
    served.beat("scheduler", "b", cold_start_wait_us=1)
    assert await served.beats(2) == ""
    served.health.doubt("no executor", "b")
    assert served.health.why == "", "the next request would wait, too"
    served.health.doubt("the nats-server was away")
    assert served.health.why == "the nats-server was away"
    assert (await served.beats(), served.probed) == ("", [])
    served.beat("executor", "b")
    assert await served.beats(2) == "a request to b failed: no answer"
    served.answering = {"b"}
    assert await served.beats() == ""
    served.beat("executor", "b", "draining")
    served.beat("detokenizer", "b", "draining")
    assert await served.beats() == "waiting for: executor", "a and c lack no more than that"
