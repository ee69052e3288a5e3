"""The house of the wire test: five fake actors, a client, a tap on every mailbox, a clock by hand."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from support.memory_bus import MemoryBroker
from support.virtual_loop import FakeClock
from support.wire.fake_executor import FakeExecutor
from support.wire.fake_scheduler import FakeScheduler
from support.wire.fakes import Arena, FakeDetokenizer, FakeKv, FakeTokenizer

from shared import codec
from shared.actor.runtime import Actor, Runtime
from shared.messages import Resend, StreamAt, StreamReset, Tokenized, ints
from shared.nats.interface import Delivery

FLEET, INTERVAL_US = "f", 3_600_000_000  # an hour by the fake clock: heartbeats go out by `tick` alone
LETTER = {"tokenizer": "T", "scheduler": "S", "executor": "E", "kv_offload": "K", "detokenizer": "D"}


@dataclass
class Frames:
    """What the client got, by choice."""

    bodies: list[dict[str, Any]]

    def of(self, choice: int) -> list[dict[str, Any]]:
        mine = [body for body in self.bodies if body.get("choice") == choice]
        return [{key: value for key, value in body.items() if key != "choice"} for body in mine]

    def text(self, choice: int) -> str:
        return "".join(b.get("text", "") for b in self.of(choice))


class House:
    """Places the fakes on one broker; `transcript` lists what reached a mailbox, as "S>E StepPlan"."""

    def __init__(self) -> None:
        self.broker, self.clock = MemoryBroker(), FakeClock()
        self.arena: Arena = {}
        self.tokenizer, self.scheduler = FakeTokenizer(), FakeScheduler()
        self.executor, self.kv = FakeExecutor(self.arena), FakeKv()
        self.detokenizer = FakeDetokenizer()
        self.runtimes: dict[str, Runtime] = {}
        self.transcript: list[str] = []
        self.client = self.broker.connect()

    async def start(self) -> None:
        """Every actor ready, hello and welcome sent; the transcript begins after it."""
        await self.client.subscribe(f"hr.{FLEET}.*.*.in.*", self._tap)
        await self.add(self.scheduler, "s0")
        await self.add(self.kv, "host.a")
        await self.add(self.detokenizer, "d0")
        await self.add(self.tokenizer, "t0")
        await self.add(self.executor, "e0")
        self.transcript.clear()

    async def add(self, actor: Actor, actor_id: str) -> Runtime:
        """Start an actor, or a new incarnation of it."""
        self.clock.advance(1000)
        bus = self.broker.connect()
        runtime = Runtime(actor, bus, FLEET, actor_id, "host.a", self.clock, INTERVAL_US)
        self.runtimes[runtime.mailbox.source] = runtime
        await runtime.start()
        await self.broker.settle()
        return runtime

    async def kill(self, source: str) -> None:
        """The process ends without a word."""
        runtime = self.runtimes.pop(source)
        assert runtime._heartbeats is not None
        runtime._heartbeats.cancel()
        await runtime.bus.drain()

    async def tick(self, times: int = 1) -> None:
        """An interval passes: every actor's heartbeat, then every actor's upkeep."""
        for _ in range(times):
            self.clock.advance(INTERVAL_US)
            for runtime in self.runtimes.values():
                runtime.send_heartbeat()
            await self.broker.settle()
            for runtime in self.runtimes.values():
                runtime.upkeep()
            await self.broker.settle()

    async def ask(self, prompt: list[int], request: str = "r1", **options: Any) -> Frames:
        """Submit a request and let everything that follows happen."""
        frames = await self.listen(request)
        self.tokenizer.submit(tokenized(prompt, request, **options))
        await self.broker.settle()
        return frames

    async def listen(self, request: str) -> Frames:
        frames = Frames([])
        await self.client.subscribe(f"inbox.{request}", lambda d: frames.bodies.append(json.loads(d.data)))
        return frames

    async def stop(self) -> None:
        """Drain every actor; none may have failed."""
        for runtime in self.runtimes.values():
            await runtime.finish(1.0)
            assert runtime.failure is None
            assert runtime.mailbox.wire_errors == 0

    def between(self, letter: str) -> list[str]:
        """The part of the transcript that one kind of actor sent or got, without the ends of streams
        that silence announces."""
        lines = [line for line in self.transcript if letter in line.split()[0]]
        return [line for line in lines if "StreamAt" not in line]

    def _tap(self, delivery: Delivery) -> None:
        envelope = codec.decode(delivery.data)
        source, target = envelope.source.split(".")[0], delivery.subject.split(".")[2]
        resent = " again" if delivery.subject.endswith(".Resent") else ""
        name = type(envelope.message).__name__
        match envelope.message:
            case Resend(first_seq=number) | StreamReset(next_seq=number) | StreamAt(last_seq=number):
                name = f"{name} {number}"
        self.transcript.append(f"{LETTER[source]}>{LETTER[target]} {name}{resent}")


def tokenized(prompt: list[int], request: str, **options: Any) -> Tokenized:
    """A request as the tokenizer would send it."""
    options.setdefault("max_tokens", 4)
    options.setdefault("seed", 7)
    return Tokenized(
        request=request,
        attempt=0,
        tenant="public",
        model="m",
        inbox=f"inbox.{request}",
        tokens=ints(prompt),
        **options,
    )
