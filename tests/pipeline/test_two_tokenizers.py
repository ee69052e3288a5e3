"""A tokenizer that dies or hangs costs no request where there are two."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from support import virtual_loop
from support.executor import paged_engine
from support.memory_bus import MemoryBus
from support.pipeline.bad_network import Hang
from support.pipeline.virtual_fleet import VirtualFleet
from support.text_models import served

from services.tokenizer.prepare import ServedModel
from services.tokenizer.standby import SILENT_US, TURN_US, UNOWNED_US
from shared.client.client import Client
from shared.nats import subjects
from shared.nats.interface import Bus, Delivery

BODY: dict[str, Any] = {"model": "tiny", "prompt": "Hello", "max_tokens": 6, "seed": 7, "ignore_eos": True}
REQUESTS = 24
KINDS = ("kv_offload", "scheduler", "detokenizer", "executor", "tokenizer", "tokenizer")


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ServedModel:
    found = served(tmp_path)
    monkeypatch.setattr(paged_engine, "VOCAB", found.vocabulary.size)
    return found


class House:
    """Two tokenizers, one of each other kind, and a client."""

    def __init__(self, fleet: VirtualFleet, tokenizers: list[str], client: Client) -> None:
        self.fleet = fleet
        self.tokenizers = tokenizers
        self.client = client

    def actor(self, name: str) -> Any:
        return self.fleet.runtimes[name].actor

    def status(self, what: str) -> list[int]:
        return [self.actor(name).status()[what] for name in self.tokenizers if name in self.fleet.runtimes]

    def hang_of(self, name: str) -> Hang:
        actor, bus = self.actor(name), self.fleet.runtimes[name].bus
        assert isinstance(bus, MemoryBus)
        hang = Hang(bus)
        (standby,) = actor._standby
        standby._share_claims = hang.stops(standby._share_claims)
        actor._tenant_queue._next = hang._later(actor._tenant_queue._next)
        return hang

    async def answers(self, bodies: list[dict[str, Any]]) -> list[str]:
        replies = await asyncio.gather(*(self.client.complete(body) for body in bodies))
        return [reply["choices"][0]["text"] for reply in replies]


def run(model: ServedModel, test: Callable[[House], Awaitable[None]]) -> None:
    """In a house in which nothing is left at the end."""

    async def live() -> None:
        fleet = VirtualFleet(model, beat_s=1)
        names = [await fleet.add(kind) for kind in KINDS]
        client = await Client.open(fleet.broker.connect())
        await asyncio.sleep(3)
        house = House(fleet, names[-2:], client)
        await test(house)
        await asyncio.sleep(3)
        assert house.status("copies") == house.status("pending") == [0] * len(house.status("pending"))
        await fleet.stop()

    virtual_loop.run(live())


def test_each_request_is_prepared_once(model: ServedModel) -> None:
    async def test(house: House) -> None:
        await house.answers([BODY] * REQUESTS)
        assert house.status("requests") == [REQUESTS // 2] * 2
        await asyncio.sleep(2 * SILENT_US / 1e6)
        assert house.status("taken_over") == [0, 0]

    run(model, test)


@pytest.mark.parametrize("fault", ["die", "hang"])
def test_a_tokenizer_that_dies_or_hangs_costs_no_request(model: ServedModel, fault: str) -> None:
    async def test(house: House) -> None:
        bodies = [{**BODY, "prompt": f"Hello {i}"} for i in range(REQUESTS)]
        expected = await house.answers(bodies)
        await asyncio.sleep(1)
        hang, began_s = house.hang_of(house.tokenizers[0]), asyncio.get_running_loop().time()
        hang.hang()
        asking = asyncio.create_task(house.answers(bodies))
        await asyncio.sleep(0.01)
        if fault == "die":
            await hang.die()
            await house.fleet.kill(house.tokenizers[0])
        assert await asking == expected
        took_us = 1e6 * (asyncio.get_running_loop().time() - began_s)
        assert SILENT_US <= took_us < SILENT_US + 3 * TURN_US
        assert house.status("taken_over")[-1] == REQUESTS // 2
        hang.wake()
        assert await house.answers(bodies) == expected

    run(model, test)


def test_one_that_dies_with_requests_that_wait_for_a_scheduler_costs_none(model: ServedModel) -> None:
    async def test(house: House) -> None:
        (scheduler,) = [name for name in house.fleet.runtimes if name.startswith("scheduler")]
        await house.fleet.kill(scheduler)
        asking = asyncio.create_task(house.answers([BODY] * REQUESTS))
        await asyncio.sleep(4)
        assert house.status("pending") == [REQUESTS // 2] * 2
        assert house.status("taken_over") == [0, 0], "an owner that waits announces it"
        await house.fleet.kill(house.tokenizers[0])
        await house.fleet.add("scheduler")
        assert len(set(await asking)) == 1

    run(model, test)


class Reader:
    """A client that asks in its own words, and writes down all that comes."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.inbox = bus.new_inbox()
        self.came: list[Delivery] = []

    async def ask(self, *bodies: dict[str, Any]) -> None:
        await self.bus.subscribe(f"{self.inbox}.*", self.came.append)
        for i, body in enumerate(bodies):
            data = json.dumps(body).encode()
            self.bus.publish(subjects.generate("public", "tiny"), data, reply=f"{self.inbox}.{i}")

    def ends(self) -> Counter[str]:
        """The last messages that came, by inbox."""
        return Counter(d.subject for d in self.came if "Headrace-End" in d.headers)


@pytest.mark.parametrize("named", ["no", "yes", "in its prompt", "null"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_tokenizer_that_hangs_and_comes_back_doubles_no_answer(
    model: ServedModel, stream: bool, named: str
) -> None:
    """Nor where the requests have no id. It hangs as soon as a scheduler has the first one."""

    async def test(house: House) -> None:
        reader, hung = Reader(house.fleet.broker.connect()), list[Hang]()
        for name in house.tokenizers:
            core, hang = house.actor(name), house.hang_of(name)

            def stop_after(*args: Any, hang: Hang = hang, send: Any = core._send) -> None:
                send(*args)
                if not hung:
                    hung.append(hang)
                    hang.hang()

            core._send = stop_after
        body = {**BODY, "stream": stream, "temperature": 1}
        for name, value in (("in its prompt", {"prompt": "request_id"}), ("null", {"request_id": None})):
            body |= value if named == name else {}
        await reader.ask(*({**body, "request_id": f"r{i}"} if named == "yes" else body for i in range(8)))
        await asyncio.sleep(3)
        assert len(reader.ends()) == 8
        hung[0].wake()
        await asyncio.sleep(3)
        assert set(reader.ends().values()) == {1}
        accepted = [json.loads(d.data)["request_id"] for d in reader.came if b'"accepted"' in d.data]
        assert len(set(accepted)) == len(accepted) == (8 if stream else 0)

    run(model, test)


@pytest.mark.parametrize("late", [False, True])
def test_request_that_waits_unread_at_a_busy_tokenizer_is_answered_once(
    model: ServedModel, late: bool
) -> None:
    """Nor is it taken over, unless it waits there for UNOWNED_US. Every fourth is refused."""

    async def test(house: House) -> None:
        reader = Reader(house.fleet.broker.connect())
        arrivals, loop = house.actor(house.tokenizers[0])._arrivals, asyncio.get_running_loop()
        sees, busy_s = arrivals._next, (2 if late else 0.7) * UNOWNED_US / 1e6 / REQUESTS
        arrivals._next = lambda: loop.call_later(busy_s, sees)
        await reader.ask(*({**BODY, "temperature": -1 if i % 8 > 5 else 1} for i in range(2 * REQUESTS)))
        await asyncio.sleep(3 * UNOWNED_US / 1e6)
        assert sum(house.status("requests")) >= 2 * REQUESTS
        assert set(reader.ends().values()) == {1}
        assert len(reader.ends()) == 2 * REQUESTS
        assert (house.status("taken_over")[1] > 0) is late

    run(model, test)


@pytest.mark.parametrize("leaves", [False, True])
def test_one_that_leaves_takes_over_nothing_of_one_that_stays(model: ServedModel, leaves: bool) -> None:
    """It receives the others' messages until it has gone. No scheduler comes, and each client gets one
    error."""

    async def test(house: House) -> None:
        reader = Reader(house.fleet.broker.connect())
        (scheduler,) = [name for name in house.fleet.runtimes if name.startswith("scheduler")]
        await house.fleet.kill(scheduler)
        await reader.ask(*({**BODY, "request_id": f"r{i}"} for i in range(REQUESTS)))
        await asyncio.sleep(1)
        left = house.fleet.runtimes[house.tokenizers[1]]
        leaving = asyncio.create_task(left.finish(60)) if leaves else None
        await asyncio.sleep(60)
        assert reader.ends() == {f"{reader.inbox}.{i}": 1 for i in range(REQUESTS)}
        assert house.status("taken_over") == [0, 0]
        if leaving is not None:
            await leaving
            del house.fleet.runtimes[house.tokenizers[1]]

    run(model, test)


def test_the_same_body_twice_at_one_inbox_is_two_requests(model: ServedModel) -> None:
    async def test(house: House) -> None:
        reader = Reader(house.fleet.broker.connect())
        await reader.bus.subscribe(reader.inbox, reader.came.append)
        for _ in range(2):
            data = json.dumps(BODY).encode()
            reader.bus.publish(subjects.generate("public", "tiny"), data, reply=reader.inbox)
        await asyncio.sleep(3)
        assert reader.ends() == {reader.inbox: 2}

    run(model, test)


def test_one_that_leaves_gives_its_requests_no_pause(model: ServedModel) -> None:
    async def test(house: House) -> None:
        asking = asyncio.create_task(house.answers([BODY] * REQUESTS))
        await asyncio.sleep(0)
        await house.fleet.runtimes.pop(house.tokenizers[0]).finish(5)
        assert len(set(await asking)) == 1
        assert house.status("taken_over") == [0]

    run(model, test)


def test_a_bad_request_is_refused_once(model: ServedModel) -> None:
    async def test(house: House) -> None:
        reader = Reader(house.fleet.broker.connect())
        await reader.ask(*[{**BODY, "temperature": -1}] * 8)
        await asyncio.sleep(3)
        assert sorted(reader.ends().values()) == [1] * 8
        assert house.status("taken_over") == [0, 0]

    run(model, test)


def test_tokenizers_of_two_fleets_take_over_none_of_each_other(model: ServedModel) -> None:
    """The scheduler of the other one might have it, and would not be asked."""

    async def test(house: House) -> None:
        first, second = house.tokenizers
        house.actor(first)._queries._fleets["other"] = house.actor(first)._mailbox.peers
        hang = house.hang_of(second)
        hang.hang()
        asking = asyncio.create_task(house.answers([BODY] * 8))
        await asyncio.sleep(4)
        assert house.status("taken_over")[0] == 0
        hang.wake()
        assert len(set(await asking)) == 1

    run(model, test)
