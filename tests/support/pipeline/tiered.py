"""A pipeline of the real actors with tiers below its engine, which a test can look into."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from support.kv_offload.memory_remote import MemoryRemote
from support.memory_bus import MemoryBroker, MemoryBus
from support.pipeline.five_actors import Pipeline
from support.pipeline.forced_pauses import Forced
from support.recording import Recording
from support.token_tap import Tap
from torch import Tensor

from services.executor.actor import ExecutorActor
from services.executor.build import engine_builder
from services.kv_offload import jobs
from services.kv_offload.actor import KvOffloadActor
from services.kv_offload.backends import arena
from services.scheduler.actor import SchedulerActor
from services.scheduler.kv_tiers import load as tier_load
from services.scheduler.kv_tiers import lookups, store
from services.scheduler.preemption import RecomputeCost
from services.scheduler.state import transfers
from services.scheduler.state.counters import Counters
from shared.actor.runtime import Actor
from shared.client.client import Client
from shared.config import load
from shared.vocab.files import served_name

COPY_ALL = "tier=support.pipeline.forced_pauses:copy_all"
PATIENCE_US = 30_000_000
Digests = dict[bytes, tuple[bytes, ...]]  # see Forced.stored
_FLEETS = itertools.count()


def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that a tier holds is brought, however slow this machine is just now: computing again is dear, and
    answers may take long. These are matters of cost; the tests are about bytes."""
    monkeypatch.setattr(RecomputeCost, "tokens_us", lambda self, start, tokens: 10**9 if tokens else 0)
    monkeypatch.setattr(tier_load, "MOST_DEADLINE_US", PATIENCE_US)
    monkeypatch.setattr(lookups, "WAIT_US", PATIENCE_US)
    monkeypatch.setattr(lookups, "STALE_US", PATIENCE_US)
    monkeypatch.setattr(lookups, "FEW_BLOCKS", 0)
    monkeypatch.setattr(jobs, "LOOKUP_US", PATIENCE_US)
    for module in (transfers, store):
        monkeypatch.setattr(module, "ANSWER_US", PATIENCE_US)
    for module in (tier_load, store):
        monkeypatch.setattr(module, "LEASE_US", 2 * PATIENCE_US)


class Values(MemoryRemote):
    """An L2 that outlives its users."""

    def close(self) -> None:
        """Others may still be connected."""

    @property
    def values(self) -> dict[str, bytes]:
        return self._values


@dataclass(frozen=True)
class Answer:
    """Ids and logits of a request, and how many of its tokens came from a cache when it began."""

    ids: list[int]
    logits: dict[int, list[Tensor]]  # by position; those of a pipeline are in another process
    cached_tokens: int


@dataclass
class Tiered(Pipeline):
    """Start with `await Tiered.up(folder, …)`; `forced` pauses and evicts."""

    remote: Values | None = None
    tap: Tap = field(default_factory=Tap)
    forced: Forced = field(init=False)
    engine: Recording = field(init=False)
    _names: itertools.count[int] = field(default_factory=itertools.count)

    @classmethod
    @asynccontextmanager
    async def up(
        cls,
        model: Path | str,
        remote: Values | None = None,
        *,
        stored: Digests | None = None,
        **settings: Any,
    ) -> AsyncIterator[Tiered]:
        """The five actors, with the arena mapped. What lies in `remote` has these digests."""
        broker = MemoryBroker()

        async def connect() -> MemoryBus:
            return broker.connect()

        usual = {"backend": "torch", "dtype": "f32", "l1": "64", "policy": COPY_ALL, "speculate": "off"}
        flags = {"fleet": f"tiered{next(_FLEETS)}", "model": str(model), **usual, **settings}
        pipeline = cls(connect, load(flags=flags).settings, remote=remote)
        try:
            await pipeline.begin()
            await pipeline._watch(stored)
            yield pipeline
            await pipeline.assert_idle()
        finally:
            await pipeline.stop()

    async def _watch(self, stored: Digests | None) -> None:
        await (await self.connect()).subscribe(f"hr.{self.settings.fleet}.detokenizer.*.in.*", self.tap.take)
        scheduler = self.runtimes["scheduler-1"].actor
        assert isinstance(scheduler, SchedulerActor)
        self.forced = Forced(scheduler, self.engine, stored={} if stored is None else stored)
        if self.settings.l1 != "off":
            await self.mapped()

    def build(self, kind: str) -> Actor:
        if kind == "executor":
            make = engine_builder(self.settings)

            def recorded() -> Recording:
                self.engine = Recording(make())
                return self.engine

            return ExecutorActor(recorded, self.settings.host_id)
        if kind == "kv_offload":
            settings, remote = self.settings, self.remote
            plan = arena.plan(settings.l1, settings.fleet, settings.host_id)
            return KvOffloadActor(plan, None if remote is None else lambda: remote)
        return super().build(kind)

    @property
    def meter(self) -> Counters:
        return self.forced.state.counters

    async def mapped(self) -> None:
        """The scheduler knows the tier, and that the engine maps its arena."""
        tiers = self.forced.state.tiers
        await self.until(
            lambda: any(tier.generation in tiers.mapped.values() for tier in tiers.by_host.values())
        )

    async def ask(self, prompt: list[int] | str, tokens: int, *, tenant: str = "one") -> Answer:
        """Greedy ids after a prompt of ids, or a question in a chat. Another tenant shares no cache."""
        request = f"r{next(self._names)}"
        asked = {
            "model": self.settings.model_name or served_name(self.settings.model),
            "request_id": request,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            **_asking(prompt),
        }
        client = await Client.open(await self.connect(), tenant)
        reply = await client.complete(asked)
        assert self.forced.wrong == 0, "other bytes came up than went down"
        seq = next(seq for seq, name in self.tap.names.items() if name == (request, 0))
        cached = reply["usage"]["prompt_tokens_details"]["cached_tokens"]
        return Answer(self.tap.ids[request, 0], dict(self.engine.logits.pop(seq, {})), cached)

    async def stored_all(self) -> None:
        """All that the device holds unowned is in L1, too."""
        await self.until(self.forced.look)

    async def replace_executor(self, **settings: Any) -> None:
        """Another executor on this host, with other settings."""
        await self.runtimes.pop("executor-1").finish(5)
        await self.until(lambda: not self.forced.state.executors)
        self.settings = self.settings.model_copy(update=settings)
        await self.add("executor", "executor-1")
        await self.until(lambda: bool(self.forced.state.executors))
        self.forced.engine = self.engine
        await self.mapped()

    async def restart_kv_offload(self) -> None:
        """L1 is empty then; L2 is what it was."""
        await self.runtimes.pop("kv_offload-1").finish(5)
        await self.until(lambda: not self.forced.state.tiers.by_host)
        await self.add("kv_offload", "kv_offload-1")
        await self.mapped()


def _asking(prompt: list[int] | str) -> dict[str, Any]:
    if isinstance(prompt, str):
        return {"messages": [{"role": "user", "content": prompt}]}
    return {"prompt": prompt}


def differ(one: Answer, other: Answer) -> float:
    """The largest difference of two logits at the same position. Both have the same ids."""
    assert one.ids == other.ids
    assert one.logits.keys() == other.logits.keys()
    rows = [(a, b) for at in one.logits for a in one.logits[at] for b in other.logits[at]]
    assert rows
    return max(float((a - b).abs().max()) for a, b in rows)
