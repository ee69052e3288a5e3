"""The threads that call L2: a value is whole or absent, and one that hangs delays no other."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest
from support.kv_offload.memory_remote import MemoryRemote

from services.kv_offload.backends.interface import RefusedWrite, Remote, RemoteError
from services.kv_offload.events import L2Command, L2Delete, L2Ended, L2Get, L2Has, L2Probe, L2Put, Name
from services.kv_offload.l2 import worker
from services.kv_offload.l2.worker import CANARY, HEADER_BYTES, SIZE_KEY, STUCK, L2Job, L2Pool, value_size
from shared.errors import EngineError

PRINT = "00112233445566778899aabbccddeeff"
NAMES: list[Name] = [(PRINT, bytes([i + 1]) * 32) for i in range(4)]
SIZE = 600
ARENA = {bytes([i]): bytearray(bytes([i + 65]) * SIZE) for i in range(4)}


def view(slot: bytes) -> memoryview:
    return memoryview(ARENA[slot])


def scratch(size_bytes: int) -> memoryview:
    return memoryview(bytearray(size_bytes))


def run(remote: Remote, command: L2Command) -> L2Job:
    errand = L2Job(command, view)
    errand.run(lambda: remote, scratch)
    return errand


def put(number: int, call: int = 1, *, announce: bool = False) -> L2Put:
    return L2Put(call, NAMES[number], bytes([number]), SIZE, 9, announce)


def get(number: int, call: int = 2) -> L2Get:
    return L2Get(call, NAMES[number], SIZE)


def stored(*numbers: int) -> MemoryRemote:
    remote = MemoryRemote()
    for number in numbers:
        assert run(remote, put(number, announce=True)).ended == L2Ended(1)
    return remote


def raw(remote: MemoryRemote, name: Name, size_bytes: int = HEADER_BYTES + SIZE) -> bytearray:
    value = bytearray(size_bytes)
    assert remote.get(worker.remote_name(name), memoryview(value))
    return value


def overwrite(remote: MemoryRemote, name: Name, value: bytes | bytearray) -> None:
    remote.put(worker.remote_name(name), memoryview(value))


def test_a_value_comes_back_as_it_went() -> None:
    errand = run(stored(0), get(0))
    assert errand.ended == L2Ended(2, value_bytes=SIZE, valid_tokens=9)
    assert bytes(errand.payload) == ARENA[b"\0"]


def test_l2_worker_reports_present_keys_and_their_length() -> None:
    remote = stored(1)
    keys = tuple(key for _, key in NAMES[:2])
    assert run(remote, L2Has(3, PRINT, keys)).ended == L2Ended(3, present=(False, True))
    assert run(remote, L2Has(3, PRINT, keys, want_size=True)).ended == L2Ended(
        3, present=(False, True), value_bytes=SIZE
    )
    assert value_size(remote, "f" * 32) == 0
    run(remote, L2Delete(4, NAMES[1]))
    assert run(remote, L2Has(3, PRINT, keys)).ended == L2Ended(3, present=(False, False))
    assert run(remote, get(1)).ended == L2Ended(2, "absent")


def test_a_length_that_is_not_to_be_believed_is_none() -> None:
    remote = stored(1)
    size = raw(remote, (PRINT, SIZE_KEY), HEADER_BYTES + 8)
    size[-1] ^= 1
    overwrite(remote, (PRINT, SIZE_KEY), size)
    assert value_size(remote, PRINT) == 0
    overwrite(remote, (PRINT, SIZE_KEY), size[:-1])
    assert value_size(remote, PRINT) == 0


@pytest.mark.parametrize("at", [0, 5, 8, 45, 72, 80, 90, 100, HEADER_BYTES, HEADER_BYTES + SIZE - 1])
def test_a_flipped_byte_is_damage(at: int) -> None:
    remote = stored(0)
    value = raw(remote, NAMES[0])
    value[at] ^= 0x10
    overwrite(remote, NAMES[0], value)
    assert run(remote, get(0)).ended == L2Ended(2, "corrupt")


def test_a_value_cut_short_or_swapped_or_of_another_layout_is_damage() -> None:
    remote = stored(0, 1, 2)
    first, second = raw(remote, NAMES[0]), raw(remote, NAMES[1])
    overwrite(remote, NAMES[0], second)
    overwrite(remote, NAMES[1], first)
    overwrite(remote, NAMES[2], raw(remote, NAMES[2])[:-1])
    foreign = ("f" * 32, NAMES[3][1])
    overwrite(remote, NAMES[3], worker.build(foreign, 9, ARENA[b"\3"]) + ARENA[b"\3"])
    assert [run(remote, get(n)).ended for n in range(4)] == [L2Ended(2, "corrupt")] * 4


def test_a_put_that_was_given_up_while_it_copied_is_not_sent() -> None:
    remote, errand = MemoryRemote(), L2Job(put(0), view)
    errand.abandon()
    errand.run(lambda: remote, scratch)
    assert errand.ended == L2Ended(1, "failed")
    assert remote.has([worker.remote_name(NAMES[0])]) == [False]


class Broken(MemoryRemote):
    """Fails, or forgets what was put."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__()
        self.error = error

    def put(self, name: str, value: memoryview) -> None:
        if self.error is not None:
            raise self.error


def test_l2_worker_reports_a_failure_and_a_lost_canary_is_one() -> None:
    assert run(Broken(RemoteError("no")), put(0)).ended == L2Ended(1, "failed")
    assert run(Broken(), L2Probe(5)).ended == L2Ended(5, "failed")
    remote = MemoryRemote()
    assert run(remote, L2Probe(5)).ended == L2Ended(5)
    assert remote.has([worker.remote_name(CANARY)]) == [True]


# ---- threads ------------------------------------------------------------------------------------


class Gate(MemoryRemote):
    """Answers `has` when the test lets it."""

    def __init__(self) -> None:
        super().__init__()
        self.open = threading.Event()
        self.closed = False

    def has(self, names: list[str]) -> list[bool]:
        self.open.wait()
        return super().has(names)

    def close(self) -> None:
        self.closed = True


class Harness:
    """A lane, the remotes it opened, and what has ended."""

    def __init__(self, make: Callable[[], Remote]) -> None:
        self.remotes: list[Remote] = []
        self.done: asyncio.Queue[L2Job] = asyncio.Queue()
        self._make = make
        self.lane = L2Pool(self._open, view, self.done.put_nowait)

    def _open(self) -> Remote:
        self.remotes.append(self._make())
        return self.remotes[-1]

    async def run(self, command: L2Command) -> L2Job:
        self.lane.run(command)
        return await self.done.get()


def has(call: int) -> L2Has:
    return L2Has(call, PRINT, (bytes(32),))


async def test_one_thread_does_one_thing_after_another() -> None:
    house = Harness(MemoryRemote)
    for call in range(5):
        assert (await house.run(put(0, call))).ended == L2Ended(call)
    errand = await house.run(get(0, 9))
    assert bytes(errand.payload) == ARENA[b"\0"]
    assert len(house.remotes) == 1
    assert house.lane.stuck == 0
    house.lane.close()


async def test_a_call_that_hangs_costs_its_thread_and_nothing_else() -> None:
    gate = Gate()
    house = Harness(lambda: gate)
    for call in range(STUCK):
        house.lane.run(has(call))
        house.lane.abandon(call)
    assert (await house.run(put(0, 100))).ended == L2Ended(100)
    house.lane.check()
    house.lane.run(has(200))
    house.lane.abandon(200)
    with pytest.raises(EngineError, match="17 calls to L2 never returned"):
        house.lane.check()
    gate.open.set()
    while house.lane.stuck:
        await asyncio.sleep(0)
    assert house.done.empty(), "what was given up is void"
    house.lane.check()
    house.lane.close()


async def test_a_canary_goes_out_on_new_connections_and_then_all_do() -> None:
    house = Harness(Gate)
    await house.run(put(0, 1))
    assert (await house.run(L2Probe(2))).ended == L2Ended(2)
    assert [remote.closed for remote in house.remotes] == [True, False]  # type: ignore[attr-defined]  # gates
    await house.run(put(0, 3))
    assert len(house.remotes) == 2, "the canary's own is new already"
    house.lane.generation += 1
    await house.run(put(0, 4))
    assert [remote.closed for remote in house.remotes] == [True, True, False]  # type: ignore[attr-defined]  # gates
    house.lane.close()
    assert house.remotes[-1].closed  # type: ignore[attr-defined]  # a gate


class Fails(Gate):
    """Fails to delete."""

    def delete(self, name: str) -> None:
        raise RemoteError("the connection was cut")


@pytest.mark.parametrize("late", [False, True])
async def test_a_call_that_fails_on_one_connection_is_no_three_failures_on_three(late: bool) -> None:
    """A balancer ends the idle connections of all workers: the others connect again before they fail, too."""
    house = Harness(Fails)
    for call in range(3):
        house.lane.run(has(call))
    while len(house.remotes) < 3:
        await asyncio.sleep(0)
    for gate in house.remotes:
        gate.open.set()  # type: ignore[attr-defined]  # gates
    for _ in range(3):
        await house.done.get()
    house.lane.run(L2Delete(3, NAMES[0]))
    if late:
        house.lane.abandon(3)
        while house.lane.stuck:
            await asyncio.sleep(0)
    else:
        assert (await house.done.get()).why == "the connection was cut"
    for call in range(4, 7):
        house.lane.run(put(0, call))
    for _ in range(3):
        await house.done.get()
    assert sorted(gate.closed for gate in house.remotes) == [False] * 3 + [True] * 3  # type: ignore[attr-defined]
    house.lane.close()


async def test_a_refusal_holds_until_a_put_and_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    remote = Broken(RefusedWrite("full"))
    house = Harness(lambda: remote)
    for call in range(4):
        remote.error = None if call == 2 else RefusedWrite("full")
        await house.run(put(0, call))
        assert house.lane.refusal == ("" if call == 2 else "full")
    assert caplog.messages == ["L2: full"]
    house.lane.close()


async def test_a_worker_that_fails_of_something_else_fails_the_actor() -> None:
    house = Harness(lambda: Broken(ZeroDivisionError("a mistake of ours")))
    house.lane.run(put(0, 1))
    with pytest.raises(ZeroDivisionError):
        while True:
            await asyncio.sleep(0)
            house.lane.check()
    house.lane.close()
