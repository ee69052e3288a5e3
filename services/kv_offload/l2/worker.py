"""Threads talk to L2, each over a connection and with scratch memory of its own.

    loop: run(command) ──▶ worker: job ──▶ loop: done(job), then the worker is free again

A call that hangs costs its thread and nothing else: the core gives the call up at its deadline, the pool
starts another thread when it needs one, and with STUCK threads hanging `check` says that the process must
be replaced: there is no way to end a thread, and a new process costs L1 its contents, no request its answer.

A value in L2 has a header, by which its reader can tell that it is whole, and the one that was asked for:

    at   bytes  field (numbers little-endian)
     0       4  magic "HRKV"
     4       2  version
     6       2  length of the header
     8      32  fingerprint of the KV layout, hex, padded with zeros
    40      32  key of the block
    72       8  length of the payload
    80       4  valid tokens
    84      12  zeros
    96      32  blake3 of the 96 bytes before and the payload

The store neither checks nor signs values, so every field is compared on promotion: a flipped byte, a
shortened value, one swapped with another's, or one of another layout is deleted, counted, and a miss.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import struct
import threading
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue

from blake3 import blake3

from services.kv_offload.backends.interface import DamagedValue, RefusedWrite, Remote, RemoteError
from services.kv_offload.events import L2Command, L2Delete, L2Ended, L2Get, L2Has, L2Probe, L2Put, Name
from shared.errors import EngineError

log = logging.getLogger("headrace.kv_offload")

STUCK = 16
GREETING = 0  # the call of the first canary; the core counts from 1
GREET_S = 2.0  # for it: an L2 that is slower is met by the breaker
CLOSE_S = 2.0  # for threads to end; they are daemons, and none is waited for longer

MAGIC = b"HRKV"
VERSION = 1
HEADER_BYTES = 128
_FIELDS = struct.Struct("<4sHH32s32sQI12x")
_DIGEST_BYTES = 32

SIZE_KEY = bytes(32)  # under it lies how long the values of a fingerprint are
CANARY = ("0" * 32, b"\xff" * 32)
CANARY_PAYLOAD = bytes(range(256))
_SIZE_BYTES = 8

Buffer = bytes | bytearray | memoryview


class _Worker:
    """One thread."""

    def __init__(self, pool: L2Pool, number: int) -> None:
        self.jobs: SimpleQueue[L2Job | None] = SimpleQueue()
        self.generation = 0
        self._pool = pool
        self._remote: Remote | None = None
        self._scratch = bytearray()
        self.thread = threading.Thread(target=self._work, name=f"l2-{number}", daemon=True)
        self.thread.start()

    def _work(self) -> None:
        while (job := self.jobs.get()) is not None:
            problem: BaseException | None = None
            try:
                job.run(partial(self._connected, isinstance(job.command, L2Probe)), self._take)
            except Exception as error:  # noqa: BLE001 - reported on the loop: the actor fails of it
                problem = error
            self._pool.finish(self, job, problem)
        if self._remote is not None:
            self._remote.close()

    def _connected(self, anew: bool) -> Remote:
        if self._remote is not None and (anew or self.generation != self._pool.generation):
            self._remote.close()
            self._remote = None
        if self._remote is None:
            self._remote = self._pool.open_remote()
            self.generation = self._pool.generation
        return self._remote

    def _take(self, size_bytes: int) -> memoryview:
        """Scratch, the same again and again: the job before is settled."""
        if len(self._scratch) < size_bytes:
            self._scratch = bytearray(size_bytes)
        return memoryview(self._scratch)[:size_bytes]


class L2Pool:
    """Runs commands beside the loop. All methods but `finish` are called on the loop."""

    def __init__(
        self,
        open_remote: Callable[[], Remote],
        view: Callable[[bytes], memoryview],
        done: Callable[[L2Job], None],
    ) -> None:
        self.open_remote = open_remote
        self.generation = 0  # of connections: a canary that works makes all others be opened anew
        self._view = view
        self._done = done
        self._loop = asyncio.get_running_loop()
        self._workers: list[_Worker] = []
        self._idle: list[_Worker] = []
        self._running: dict[int, L2Job] = {}
        self._abandoned: set[int] = set()
        self._problem: BaseException | None = None
        self.why = ""  # the last call failed
        self._greeted = asyncio.Event()

    async def greet(self) -> None:
        """Open the connection that the first call finds, by way of a canary: a lookup has 10 ms, and a
        connection takes longer. Within GREET_S, whatever L2 does."""
        self.run(L2Probe(GREETING))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._greeted.wait(), GREET_S)

    def run(self, command: L2Command) -> None:
        """Begin it; `done` is called with the job when it has ended, unless it was abandoned."""
        job = self._running[command.call] = L2Job(command, self._view)
        if not self._idle:
            self._idle.append(_Worker(self, len(self._workers)))
            self._workers += self._idle
        self._idle.pop().jobs.put(job)

    def abandon(self, call: int) -> None:
        """The call took too long."""
        self._running[call].abandon()
        self._abandoned.add(call)

    @property
    def stuck(self) -> int:
        """Threads in a call that was given up, or in a canary, which hangs or is about to end."""
        canaries = sum(isinstance(job.command, L2Probe) for job in self._running.values())
        return len(self._abandoned) + canaries

    def check(self) -> None:
        """Raises EngineError when so many threads hang that only a new process helps, and whatever a worker
        failed of."""
        if self._problem is not None:
            raise self._problem
        if self.stuck > STUCK:
            raise EngineError(f"{self.stuck} calls to L2 never returned: this process must be replaced")

    def close(self) -> None:
        """End the threads that do not hang."""
        for worker in self._workers:
            worker.jobs.put(None)
        for worker in self._idle:
            worker.thread.join(CLOSE_S)

    def finish(self, worker: _Worker, job: L2Job, problem: BaseException | None) -> None:
        """On the worker's thread: the job has ended."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is there to hear it
            self._loop.call_soon_threadsafe(self._finish, worker, job, problem)

    def _finish(self, worker: _Worker, job: L2Job, problem: BaseException | None) -> None:
        call = job.command.call
        del self._running[call]
        self._problem = self._problem or problem
        if job.why and not self.why:
            log.warning("L2: %s", job.why)
        if job.ended is not None:
            self.why = job.why
        if call in self._abandoned:
            self._abandoned.remove(call)
        elif problem is None:
            works = job.ended is not None and job.ended.status == "ok"
            if isinstance(job.command, L2Probe) and works:
                self.generation += 1
                worker.generation = self.generation
            self._done(job)
        if call == GREETING:
            self._greeted.set()
        self._idle.append(worker)


class L2Job:
    """What a worker thread does for one command, and what came of it: bytes between L1 and L2, with headers
    built and verified.

    A get lands in memory of the worker's own, and only a whole, right value is ever copied on. A put first
    copies the value out of the arena: what is sent cannot change while it is sent.
    """

    def __init__(self, command: L2Command, view: Callable[[bytes], memoryview]) -> None:
        self.command = command
        self.scratch = memoryview(b"")  # get: header and payload, as read
        self.ended: L2Ended | None = None
        self.why = ""  # it failed
        self._value = view(command.slot) if isinstance(command, L2Put) else memoryview(b"")
        self._turn = threading.Lock()
        self._abandoned = False

    @property
    def payload(self) -> memoryview:
        """What a get has read."""
        return self.scratch[HEADER_BYTES:]

    def abandon(self) -> None:
        """Too late: the arena's range may be another's from now on, so a put that is still copying it must
        not be sent."""
        with self._turn:
            self._abandoned = True

    def run(self, connect: Callable[[], Remote], scratch: Callable[[int], memoryview]) -> None:
        """Do it, on a thread; `scratch` gives memory that stays the job's until it is settled."""
        try:
            self.ended = self._run(connect(), scratch)
        except DamagedValue:
            self.ended = L2Ended(self.command.call, "corrupt")
        except RefusedWrite:
            self.ended = L2Ended(self.command.call, "refused")
        except RemoteError as error:
            self.ended, self.why = L2Ended(self.command.call, "failed"), error.message
        finally:
            self._value.release()

    def _run(self, remote: Remote, scratch: Callable[[int], memoryview]) -> L2Ended:
        call = self.command.call
        match self.command:
            case L2Has(fingerprint=fingerprint, keys=keys, want_size=want_size):
                present = remote.has([remote_name((fingerprint, key)) for key in keys])
                size = value_size(remote, fingerprint) if want_size and any(present) else 0
                return L2Ended(call, present=tuple(present), value_bytes=size)
            case L2Get(name=name, value_bytes=value_bytes):
                self.scratch = scratch(HEADER_BYTES + value_bytes)
                return self._get(remote, name, value_bytes)
            case L2Put() as put:
                return self._put(remote, put, scratch(HEADER_BYTES + put.value_bytes))
            case L2Delete(name=name):
                remote.delete(remote_name(name))
            case L2Probe():
                return L2Ended(call, "ok" if canary(remote) else "failed")
        return L2Ended(call)

    def _get(self, remote: Remote, name: Name, value_bytes: int) -> L2Ended:
        call = self.command.call
        if not remote.get(remote_name(name), self.scratch):
            return L2Ended(call, "absent")
        valid_tokens = verify(self.scratch, name)
        if valid_tokens is None:
            return L2Ended(call, "corrupt")
        return L2Ended(call, value_bytes=value_bytes, valid_tokens=valid_tokens)

    def _put(self, remote: Remote, put: L2Put, value: memoryview) -> L2Ended:
        value[HEADER_BYTES:] = self._value
        value[:HEADER_BYTES] = build(put.name, put.valid_tokens, value[HEADER_BYTES:])
        with self._turn:
            if self._abandoned:
                return L2Ended(put.call, "failed")
        if put.announce:
            size = put.value_bytes.to_bytes(_SIZE_BYTES, "little")
            name = (put.name[0], SIZE_KEY)
            remote.put(remote_name(name), memoryview(build(name, 0, size) + size))
        remote.put(remote_name(put.name), value)
        return L2Ended(put.call)


def value_size(remote: Remote, fingerprint: str) -> int:
    """How long the values of this fingerprint are, 0 where L2 does not know or is not to be believed."""
    name, value = (fingerprint, SIZE_KEY), bytearray(HEADER_BYTES + _SIZE_BYTES)
    try:
        found = remote.get(remote_name(name), memoryview(value))
    except DamagedValue:
        return 0
    if not found or verify(value, name) is None:
        return 0
    return int.from_bytes(value[HEADER_BYTES:], "little")


def canary(remote: Remote) -> bool:
    """Whether what is put can be had again; of a store that is full, whether it answers."""
    name = remote_name(CANARY)
    value = build(CANARY, 0, CANARY_PAYLOAD) + CANARY_PAYLOAD
    back = bytearray(len(value))
    try:
        remote.put(name, memoryview(value))
    except RefusedWrite:
        return True  # it has said what it holds
    return bool(remote.get(name, memoryview(back))) and bytes(back) == value


def build(name: Name, valid_tokens: int, payload: Buffer) -> bytes:
    """The header (128 bytes) of `payload`. 0.2 ms for each MiB."""
    fields = _FIELDS.pack(*_wanted(name, len(payload)), valid_tokens)
    return fields + _digest(fields, payload)


def verify(value: Buffer, name: Name) -> int | None:
    """Valid tokens of a whole value (header and payload), None where it is not the value of `name`."""
    view = memoryview(value)
    fields, payload = bytes(view[: _FIELDS.size]), view[HEADER_BYTES:]
    if len(view) < HEADER_BYTES:
        return None
    *found, valid_tokens = _FIELDS.unpack(fields)
    if tuple(found) != _wanted(name, len(payload)):
        return None
    if bytes(view[_FIELDS.size : HEADER_BYTES]) != _digest(fields, payload):
        return None
    return int(valid_tokens)


def remote_name(name: Name) -> str:
    """The value's name in L2."""
    return f"hr1:{name[0]}:{name[1].hex()}"


def _wanted(name: Name, payload_bytes: int) -> tuple[bytes, int, int, bytes, bytes, int]:
    fingerprint = name[0].encode()[:32].ljust(32, b"\0")
    return MAGIC, VERSION, HEADER_BYTES, fingerprint, name[1], payload_bytes


def _digest(fields: bytes, payload: Buffer) -> bytes:
    hasher = blake3(fields)
    hasher.update(payload)
    return hasher.digest(_DIGEST_BYTES)
