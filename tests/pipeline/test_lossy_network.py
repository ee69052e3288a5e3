"""A network that loses, doubles and reorders the messages of one service costs no answer."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from support import virtual_loop
from support.executor import paged_engine
from support.memory_bus import MemoryBroker, MemoryBus
from support.pipeline import virtual_fleet
from support.pipeline.bad_network import Hang, LossyBroker
from support.pipeline.virtual_fleet import VirtualFleet
from support.text_models import served

from shared.client.client import Client
from shared.nats.interface import BusFault, Delivery
from shared.replies import to_json

KINDS = ("kv_offload", "scheduler", "detokenizer", "executor", "tokenizer")
REQUESTS = 75  # three at a time


async def answers(
    fleet: VirtualFleet, client: Client, timeout_s: float = 60, requests: int = REQUESTS
) -> list[str]:
    """Plain requests and streams in turn."""

    async def ask(number: int) -> str:
        body: dict[str, Any] = {
            "model": "tiny",
            "prompt": f"Hello {number}",
            "max_tokens": 20,
            "ignore_eos": True,
        }
        body |= {"seed": number, "timeout_s": timeout_s}
        async with turns:
            if number % 2:
                return str((await client.complete(body))["choices"][0]["text"])
            text, attempt = "", 0
            async for frame in client.stream(body):
                text, attempt = text if frame["attempt"] == attempt else "", frame["attempt"]
                if frame["type"] == "delta":
                    text += "".join(choice["text"] for choice in frame["choices"])
            return text

    turns = asyncio.Semaphore(3)
    return await asyncio.gather(*(ask(number) for number in range(requests)))


@pytest.mark.parametrize(
    ("victim", "share"),
    [("detokenizer", 0.2), ("scheduler", 0.2), ("scheduler", 0.05), ("executor", 0.2), ("tokenizer", 0.2)],
)
def test_a_lossy_network_costs_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, victim: str, share: float
) -> None:
    model = served(tmp_path)
    monkeypatch.setattr(paged_engine, "VOCAB", model.vocabulary.size)

    async def live() -> None:
        broker = LossyBroker(victim=victim, dice=random.Random(7))
        fleet = VirtualFleet(model, 1, broker)
        for kind in KINDS:
            await fleet.add(kind)
        client = await Client.open(fleet.broker.connect())
        await asyncio.sleep(3)
        expected = await answers(fleet, client)
        broker.share = share
        assert await answers(fleet, client) == expected
        assert broker.harmed > REQUESTS * share
        broker.share = 0
        await fleet.stop()

    virtual_loop.run(live())


@dataclass
class DeafTo(MemoryBroker):
    """Loses all messages of some kinds: (kind of the receiver, class of the message)."""

    kinds: set[tuple[str, str]] = field(default_factory=set)

    def put(self, delivery: Delivery) -> None:
        _, _, kind, _, inward, what, *_ = [*delivery.subject.split("."), *[""] * 5]
        if inward != "in" or (kind, what) not in self.kinds:
            super().put(delivery)


def test_hole_costs_a_stream_one_new_attempt_beside_a_request_without_a_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = served(tmp_path)
    monkeypatch.setattr(paged_engine, "VOCAB", model.vocabulary.size)
    monkeypatch.setattr(virtual_fleet, "STEP_S", 0.4)
    body = {"model": "tiny", "prompt": "Hello", "max_tokens": 60, "ignore_eos": True, "seed": 1}

    async def live() -> None:
        broker = DeafTo()
        fleet = VirtualFleet(model, 1, broker)
        names = {kind: await fleet.add(kind) for kind in KINDS}
        reader, leaver = [await Client.open(broker.connect()) for _ in range(2)]
        await asyncio.sleep(3)

        async def attempts() -> list[int]:
            return [frame["attempt"] async for frame in reader.stream(body)]

        reading = asyncio.create_task(attempts())
        left = asyncio.create_task(anext(leaver.stream({**body, "max_tokens": 90, "finish_detached": True})))
        await left
        await leaver.bus.drain()
        await asyncio.sleep(2)
        broker.kinds = {("detokenizer", "Tokens"), ("scheduler", "Resend")}
        await asyncio.sleep(0.5)
        broker.kinds = {("scheduler", "Resend")}
        await asyncio.sleep(5)
        broker.kinds = set()
        seen = await reading
        assert len(set(seen)) == 2
        await asyncio.sleep(30)
        assert fleet.runtimes[names["detokenizer"]].actor.status()["requests"] == 0
        await fleet.stop()

    virtual_loop.run(live())


def test_a_hole_that_is_open_longer_than_a_closed_request_is_kept_costs_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The detokenizer lives: its scheduler keeps the request until it has confirmed the end."""
    model = served(tmp_path)
    monkeypatch.setattr(paged_engine, "VOCAB", model.vocabulary.size)
    body = {"model": "tiny", "prompt": "Hello", "max_tokens": 60, "ignore_eos": True, "seed": 1}

    async def live() -> None:
        broker = DeafTo()
        fleet = VirtualFleet(model, 1, broker)
        for kind in KINDS:
            await fleet.add(kind)
        client = await Client.open(broker.connect())
        await asyncio.sleep(3)
        asking = asyncio.create_task(client.complete(body))
        await asyncio.sleep(0.05)
        broker.kinds = {("detokenizer", "Tokens"), ("scheduler", "Resend")}
        await asyncio.sleep(12)
        broker.kinds = set()
        assert (await asking)["usage"]["completion_tokens"] == 60
        await fleet.stop()

    virtual_loop.run(live())


@pytest.mark.parametrize("tokenizers", [1, 2])
def test_a_broker_that_is_away_for_a_minute_costs_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizers: int
) -> None:
    """What was published just before and meanwhile arrives when it is back. No request is given up for it."""
    model = served(tmp_path)
    monkeypatch.setattr(paged_engine, "VOCAB", model.vocabulary.size)

    async def live() -> None:
        fleet = VirtualFleet(model, 1)
        for kind in (*KINDS, *["tokenizer"] * (tokenizers - 1)):
            await fleet.add(kind)
        bus = fleet.broker.connect()
        client = await Client.open(bus)
        await asyncio.sleep(3)
        expected = await answers(fleet, client)
        buses = [bus, *(runtime.bus for runtime in fleet.runtimes.values())]
        hangs = [Hang(each) for each in buses if isinstance(each, MemoryBus)]
        for moment_s in (0.0, 0.003, 0.01, 0.05):
            asking = asyncio.create_task(answers(fleet, client, timeout_s=200))
            await asyncio.sleep(moment_s)
            for hang, each in zip(hangs, buses, strict=True):
                hang.hang()
                each.report(BusFault("disconnected", ""))
            await asyncio.sleep(60)
            for hang, each in zip(hangs, buses, strict=True):
                hang.wake()
                each.report(BusFault("reconnected", ""))
            assert await asking == expected
        await fleet.stop()

    virtual_loop.run(live())


@pytest.mark.parametrize("cut_s", [2, 8])
def test_a_client_that_was_cut_off_gets_each_answer_that_it_has_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut_s: int
) -> None:
    """It sends again what has brought nothing: what runs is not computed twice, what has ended is."""
    model = served(tmp_path)
    monkeypatch.setattr(paged_engine, "VOCAB", model.vocabulary.size)
    monkeypatch.setattr(virtual_fleet, "STEP_S", 0.05)

    async def live() -> None:
        fleet = VirtualFleet(model, 1)
        for kind in (*KINDS, "tokenizer"):
            await fleet.add(kind)
        bus = fleet.broker.connect()
        client = await Client.open(bus)
        await asyncio.sleep(3)
        body = {"model": "tiny", "prompt": "Hello", "ignore_eos": True, "seed": 1}

        async def answer(tokens: int) -> int:
            reply = await client.complete({**body, "max_tokens": tokens}, timeout_s=60)
            return int(reply["usage"]["completion_tokens"])

        asking = [asyncio.create_task(answer(tokens)) for tokens in (20, 21, 22, 23, 90, 91)]
        await asyncio.sleep(0.3)
        mine = list(bus._mine)
        for subscription in mine:
            fleet.broker.subscriptions.remove(subscription)
        bus.report(BusFault("disconnected", "cut"))
        await asyncio.sleep(cut_s)
        fleet.broker.subscriptions += mine
        bus.report(BusFault("reconnected", "back"))
        assert await asyncio.gather(*asking) == [20, 21, 22, 23, 90, 91]
        await fleet.stop()

    virtual_loop.run(live())


@pytest.mark.parametrize("wall_s", [2, -2, 600, -600, 172_800, -172_800])
@pytest.mark.parametrize("stepped", [False, True], ids=["set apart", "stepped in the middle"])
def test_lost_answer_is_computed_again_at_any_difference_of_the_wall_clocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wall_s: int, *, stepped: bool
) -> None:
    """One tokenizer's wall clock differs from those of the other processes. A client that has lost answers
    sends each request again after its end, and the other tokenizer gets it."""
    model = served(tmp_path)
    monkeypatch.setattr(paged_engine, "VOCAB", model.vocabulary.size)

    async def live() -> None:
        fleet = VirtualFleet(model, 1)
        names = [await fleet.add(kind) for kind in (*KINDS, "tokenizer")]
        bus, got = fleet.broker.connect(), list[str]()
        await bus.subscribe("inbox.*", lambda delivery: got.append(delivery.subject))
        await asyncio.sleep(3)

        async def send_all() -> None:
            for number in range(15):  # an odd number: sent again, each one goes to the other tokenizer
                body = {"prompt": "Hello", "max_tokens": 4, "ignore_eos": True, "request_id": f"r{number}"}
                bus.publish("headrace.v1.generate.public.tiny", to_json(body), reply=f"inbox.r{number}")
                await asyncio.sleep(0.01)
            await asyncio.sleep(1)

        clock = fleet.clocks[names[-1]]
        clock.offset_us += 0 if stepped else wall_s * 1_000_000
        await send_all()
        assert sorted(got) == sorted(f"inbox.r{number}" for number in range(15))
        clock.offset_us += wall_s * 1_000_000 if stepped else 0
        await send_all()
        silent = 30 - len(got)
        assert silent == 0, f"{silent} of 15 requests that were sent again have no answer"
        await fleet.stop()

    virtual_loop.run(live())


@pytest.mark.parametrize("victim", KINDS)
def test_a_service_that_starts_again_after_its_clock_went_back_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, victim: str
) -> None:
    """Its epoch is lower than that of the one before, and than those of all others."""
    model = served(tmp_path)
    monkeypatch.setattr(paged_engine, "VOCAB", model.vocabulary.size)

    async def live() -> None:
        fleet = VirtualFleet(model, 1)
        names = {kind: await fleet.add(kind) for kind in KINDS}
        client = await Client.open(fleet.broker.connect())
        await asyncio.sleep(3)
        right = await answers(fleet, client, requests=9)
        await fleet.kill(names[victim])
        await fleet.add(victim, wall_s=-172_800)
        await asyncio.sleep(8)
        began_s = asyncio.get_running_loop().time()
        assert await answers(fleet, client, requests=9) == right
        assert asyncio.get_running_loop().time() - began_s < 30
        await fleet.stop()

    virtual_loop.run(live())
