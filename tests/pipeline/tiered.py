"""A pipeline of the real actors with tiers below its engine, which a test can look into."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from forced_pauses import Forced
from pipeline import Pipeline
from recording import Recording
from token_tap import Tap
from torch import Tensor

from services.executor.actor import ExecutorActor
from services.executor.engines import engine_builder
from services.kv_offload import lookups, opening
from services.kv_offload.actor import KvOffloadActor
from services.kv_offload.plain_store import MemoryRemote
from services.launcher.client import Client
from services.scheduler.actor import SchedulerActor
from services.scheduler.meter import Meter
from services.scheduler.tiers import asking, loading, storing
from services.scheduler.tiers.worth import Recompute
from shared.actor import Actor
from shared.config import load
from shared.memory_bus import MemoryBroker, MemoryBus

COPY_ALL = "tier=forced_pauses:copy_all"
PATIENCE_US = 30_000_000
_FLEETS = itertools.count()


def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a tier holds is brought, however slow this machine is just now: computing again is dear, and
    answers may take long. These are matters of cost; the tests are about bytes."""
    monkeypatch.setattr(Recompute, "tokens_us", lambda self, start, tokens: 10**9 if tokens else 0)
    monkeypatch.setattr(loading, "MOST_DEADLINE_US", PATIENCE_US)
    monkeypatch.setattr(asking, "WAIT_US", PATIENCE_US)
    monkeypatch.setattr(asking, "STALE_US", PATIENCE_US)
    monkeypatch.setattr(lookups, "LOOKUP_US", PATIENCE_US)
    for module in (asking, loading, storing):
        monkeypatch.setattr(module, "ANSWER_US", PATIENCE_US)
    for module in (loading, storing):
        monkeypatch.setattr(module, "LEASE_US", 2 * PATIENCE_US)


class Values(MemoryRemote):
    """An L2 that outlives those who use it."""

    def close(self) -> None:
        """Others may still be connected."""

    @property
    def values(self) -> dict[str, bytes]:
        return self._values


@dataclass(frozen=True)
class Answer:
    """Ids and logits of a request, and how many of its tokens came from a cache when it began."""

    ids: list[int]
    logits: dict[int, list[Tensor]]  # by position
    cached_tokens: int


@dataclass
class Tiered(Pipeline):
    """Start with `await Tiered.up(folder, …)`; `forced` pauses and evicts."""

    remote: Values | None = None
    stored: dict[bytes, bytes] = field(default_factory=dict)  # see Forced
    tap: Tap = field(default_factory=Tap)
    forced: Forced = field(init=False)
    engine: Recording = field(init=False)
    _names: itertools.count[int] = field(default_factory=itertools.count)

    @classmethod
    async def up(cls, model: Path, remote: Values | None = None, **settings: Any) -> Tiered:
        """The five actors, with the arena mapped."""
        broker = MemoryBroker()

        async def connect() -> MemoryBus:
            return broker.connect()

        usual = {"backend": "torch", "dtype": "f32", "l1": "64", "l1_store": "plain", "policy": COPY_ALL}
        flags = {"fleet": f"tiered{next(_FLEETS)}", "model": str(model), **usual, **settings}
        pipeline = cls(connect, load(flags=flags).settings, remote=remote)
        await pipeline.begin()
        await (await connect()).subscribe(
            f"hr.{pipeline.settings.fleet}.detokenizer.*.in.*", pipeline.tap.take
        )
        scheduler = pipeline.runtimes["scheduler-1"].actor
        assert isinstance(scheduler, SchedulerActor)
        pipeline.forced = Forced(scheduler, pipeline.engine, stored=pipeline.stored)
        await pipeline.mapped()
        return pipeline

    def build(self, kind: str) -> Actor:
        if kind == "executor":
            make = engine_builder(self.settings)

            def recorded() -> Recording:
                self.engine = Recording(make())  # type: ignore[arg-type]  # of torch
                return self.engine

            return ExecutorActor(recorded, self.settings.host_id)  # type: ignore[arg-type]  # by __getattr__
        if kind == "kv_offload":
            settings, remote = self.settings, self.remote
            plan = opening.plan(settings.l1, settings.l1_store, settings.fleet, settings.host_id)
            return KvOffloadActor(plan, None if remote is None else lambda: remote)
        return super().build(kind)

    @property
    def meter(self) -> Meter:
        return self.forced.state.meter

    async def mapped(self) -> None:
        """The scheduler knows the tier, and the engine maps its arena."""
        tiers = self.forced.state.tiers.by_host
        await self.until(
            lambda: any(t.generation == self.status("executor")["arena_generation"] for t in tiers.values())
        )

    async def ask(
        self, prompt: list[int], tokens: int, *, tenant: str = "one", request: str = "", **body: Any
    ) -> Answer:
        """Greedy ids after a prompt of ids. Another tenant shares no cache."""
        request = request or f"r{next(self._names)}"
        asked = {"model": self.settings.model_name, "prompt": prompt, "max_tokens": tokens,
                 "temperature": 0, "ignore_eos": True, "request_id": request, **body}  # fmt: skip
        client = await Client.open(await self.connect(), tenant)
        reply = await client.complete(asked)
        seq = next(seq for seq, name in self.tap.names.items() if name == (request, 0))
        cached = reply["usage"]["prompt_tokens_details"]["cached_tokens"]
        return Answer(self.tap.ids[request, 0], dict(self.engine.logits.pop(seq)), cached)

    async def stored_all(self) -> None:
        """Whatever the device holds for nobody is in L1, too."""
        executor = self.forced.executor()
        assert executor is not None
        ledger, jobs = executor.ledger, self.forced.state.tiers.jobs
        await self.until(lambda: not ledger.dirty_blocks and not ledger.fenced_blocks and not jobs)

    async def restart_kv_offload(self) -> None:
        """L1 is empty then; L2 is what it was."""
        await self.runtimes.pop("kv_offload-1").finish(5)
        await self.until(lambda: not self.forced.state.tiers.by_host)
        await self.add("kv_offload", "kv_offload-1")
        await self.mapped()


def differ(one: Answer, other: Answer) -> float:
    """The largest difference of two logits at the same position. Both have the same ids."""
    assert one.ids == other.ids
    assert one.logits.keys() == other.logits.keys()
    rows = [(a, b) for at in one.logits for a in one.logits[at] for b in other.logits[at]]
    assert rows
    return max(float((a - b).abs().max()) for a, b in rows)
