"""Threads that call L2, each with its own connection and scratch memory.

    loop: run(command) ──▶ worker: job ──▶ loop: done(job), then the worker is free again

A call that hangs blocks only its thread: the core abandons the call at its deadline, and the pool starts
another thread. With more than STUCK hanging threads `check` fails the process, since a thread cannot be
ended: a new process loses the content of L1, but no answers.

A value in L2 has a header, so that a reader can verify it:

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

The store does not verify values, so every field is compared after a get: a value with a flipped byte, of
wrong length, of another key or another layout is deleted, counted, and a miss.
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

from services.kv_offload import events
from services.kv_offload.backends.interface import DamagedValue, RefusedWrite, Remote, RemoteError
from shared.errors import EngineError

log = logging.getLogger("headrace.kv_offload")

STUCK = 16
GREETING = 0  # the call of the first canary; the core counts from 1
GREET_S = 2.0  # timeout of the first canary; the breaker handles a slower L2
CLOSE_S = 2.0  # most time to wait for the end of a thread; threads are daemons

MAGIC = b"HRKV"
VERSION = 1
HEADER_BYTES = 128
_FIELDS = struct.Struct("<4sHH32s32sQI12x")
_DIGEST_BYTES = 32

SIZE_KEY = bytes(32)  # key of the length of a fingerprint's values
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
                job.run(partial(self._connected, isinstance(job.command, events.L2Probe)), self._scratch_of)
            except Exception as error:  # noqa: BLE001 - raised on the loop: the actor fails
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

    def _scratch_of(self, size_bytes: int) -> memoryview:
        """Scratch memory. Used again by each job, since the job before has ended."""
        if len(self._scratch) < size_bytes:
            self._scratch = bytearray(size_bytes)
        return memoryview(self._scratch)[:size_bytes]


class L2Pool:
    """Runs commands on threads. All methods except `finish` are called on the loop."""

    def __init__(
        self,
        open_remote: Callable[[], Remote],
        view: Callable[[bytes], memoryview],
        done: Callable[[L2Job], None],
    ) -> None:
        self.open_remote = open_remote
        self.generation = 0  # of connections: a failed call, and a canary that works, replace all others
        self._view = view
        self._done = done
        self._loop = asyncio.get_running_loop()
        self._workers: list[_Worker] = []
        self._idle: list[_Worker] = []
        self._running: dict[int, L2Job] = {}
        self._abandoned: set[int] = set()
        self._problem: BaseException | None = None
        self.why = ""  # error of the last call, if it failed
        self.refusal = ""  # why the last put was refused, if it was
        self._logged = ""  # the last refusal in the log: puts of a full store succeed now and then
        self._greeted = asyncio.Event()

    async def greet(self) -> None:
        """Open the first connection with a canary: a lookup has 10 ms, and connecting takes longer. Returns
        within GREET_S."""
        self.run(events.L2Probe(GREETING))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GREET_S):
                await self._greeted.wait()

    def run(self, command: events.L2Command) -> None:
        """Start a command. At its end `done` is called with the job, unless it was abandoned."""
        job = self._running[command.call] = L2Job(command, self._view)
        if not self._idle:
            self._idle.append(_Worker(self, len(self._workers)))
            self._workers += self._idle
        self._idle.pop().jobs.put(job)

    def abandon(self, call: int) -> None:
        """A call has timed out: ignore its result."""
        self.generation += 1
        self._running[call].abandon()
        self._abandoned.add(call)

    @property
    def stuck(self) -> int:
        """Threads in an abandoned call or in a canary, which may hang."""
        canaries = sum(isinstance(job.command, events.L2Probe) for job in self._running.values())
        return len(self._abandoned) + canaries

    def check(self) -> None:
        """Raises EngineError if more than STUCK threads hang, and any exception of a worker."""
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
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._finish, worker, job, problem)

    def _finish(self, worker: _Worker, job: L2Job, problem: BaseException | None) -> None:
        call = job.command.call
        del self._running[call]
        self._problem = self._problem or problem
        if job.why and not self.why:
            log.warning("L2: %s", job.why)
        if job.why and call not in self._abandoned:
            self.generation += 1  # the connections of other workers may be as old
        if job.ended is not None:
            self.why = job.why
            if isinstance(job.command, events.L2Put) and not job.why:
                if job.refusal not in ("", self._logged):
                    log.warning("L2: %s", job.refusal)
                    self._logged = job.refusal
                self.refusal = job.refusal
        if call in self._abandoned:
            self._abandoned.remove(call)
        elif problem is None:
            works = job.ended is not None and job.ended.status == "ok"
            if isinstance(job.command, events.L2Probe) and works:
                self.generation += 1
                worker.generation = self.generation
            self._done(job)
        if call == GREETING:
            self._greeted.set()
        self._idle.append(worker)


class L2Job:
    """One command on a worker thread, and its result. Builds and verifies headers.

    A get reads into scratch memory, and only a verified value is copied to L1. A put first copies the value
    out of the arena, so that it cannot change while it is sent.
    """

    def __init__(self, command: events.L2Command, view: Callable[[bytes], memoryview]) -> None:
        self.command = command
        self.scratch = memoryview(b"")  # get: header and payload, as read
        self.ended: events.L2Ended | None = None
        self.why = ""  # the error, if it failed
        self.refusal = ""  # the error, if a put was refused
        self._value = view(command.slot) if isinstance(command, events.L2Put) else memoryview(b"")
        self._turn = threading.Lock()
        self._abandoned = False

    @property
    def payload(self) -> memoryview:
        """The payload that a get has read."""
        return self.scratch[HEADER_BYTES:]

    def abandon(self) -> None:
        """The call timed out. The arena's range may be used again from now on, so a put that is still copying
        it must not be sent."""
        with self._turn:
            self._abandoned = True

    def run(self, connect: Callable[[], Remote], scratch: Callable[[int], memoryview]) -> None:
        """Run the command, on a worker thread; `scratch` returns memory for this job."""
        try:
            self.ended = self._run(connect(), scratch)
        except DamagedValue:
            self.ended = events.L2Ended(self.command.call, "corrupt")
        except RefusedWrite as error:
            self.ended, self.refusal = events.L2Ended(self.command.call, "refused"), error.message
        except RemoteError as error:
            self.ended, self.why = events.L2Ended(self.command.call, "failed"), error.message
        finally:
            self._value.release()

    def _run(self, remote: Remote, scratch: Callable[[int], memoryview]) -> events.L2Ended:
        call = self.command.call
        match self.command:
            case events.L2Has(fingerprint=fingerprint, keys=keys, want_size=want_size):
                present = remote.has([remote_name((fingerprint, key)) for key in keys])
                size = value_size(remote, fingerprint) if want_size and any(present) else 0
                return events.L2Ended(call, present=tuple(present), value_bytes=size)
            case events.L2Get(name=name, value_bytes=value_bytes):
                self.scratch = scratch(HEADER_BYTES + value_bytes)
                return self._get(remote, name, value_bytes)
            case events.L2Put() as put:
                return self._put(remote, put, scratch(HEADER_BYTES + put.value_bytes))
            case events.L2Delete(name=name):
                remote.delete(remote_name(name))
            case events.L2Probe():
                return events.L2Ended(call, "ok" if can_read_back(remote) else "failed")
        return events.L2Ended(call)

    def _get(self, remote: Remote, name: events.Name, value_bytes: int) -> events.L2Ended:
        call = self.command.call
        if not remote.get(remote_name(name), self.scratch):
            return events.L2Ended(call, "absent")
        valid_tokens = verify(self.scratch, name)
        if valid_tokens is None:
            return events.L2Ended(call, "corrupt")
        return events.L2Ended(call, value_bytes=value_bytes, valid_tokens=valid_tokens)

    def _put(self, remote: Remote, put: events.L2Put, value: memoryview) -> events.L2Ended:
        value[HEADER_BYTES:] = self._value
        value[:HEADER_BYTES] = build(put.name, put.valid_tokens, value[HEADER_BYTES:])
        with self._turn:
            if self._abandoned:
                return events.L2Ended(put.call, "failed")
        if put.announce:
            size = put.value_bytes.to_bytes(_SIZE_BYTES, "little")
            name = (put.name[0], SIZE_KEY)
            remote.put(remote_name(name), memoryview(build(name, 0, size) + size))
        remote.put(remote_name(put.name), value)
        return events.L2Ended(put.call)


def value_size(remote: Remote, fingerprint: str) -> int:
    """The length of this fingerprint's values; 0 if L2 does not have it, or it fails verification."""
    name, value = (fingerprint, SIZE_KEY), bytearray(HEADER_BYTES + _SIZE_BYTES)
    try:
        found = remote.get(remote_name(name), memoryview(value))
    except DamagedValue:
        return 0
    if not found or verify(value, name) is None:
        return 0
    return int.from_bytes(value[HEADER_BYTES:], "little")


def can_read_back(remote: Remote) -> bool:
    """Whether a put value can be read back; for a full store, whether it answers."""
    name = remote_name(CANARY)
    value = build(CANARY, 0, CANARY_PAYLOAD) + CANARY_PAYLOAD
    back = bytearray(len(value))
    try:
        remote.put(name, memoryview(value))
    except RefusedWrite:
        return True  # full, but it answers
    return bool(remote.get(name, memoryview(back))) and bytes(back) == value


def build(name: events.Name, valid_tokens: int, payload: Buffer) -> bytes:
    """The header of `payload`, 128 bytes. 0.2 ms a MiB."""
    fields = _FIELDS.pack(*_wanted(name, len(payload)), valid_tokens)
    return fields + _digest(fields, payload)


def verify(value: Buffer, name: events.Name) -> int | None:
    """The valid tokens of a value (header and payload); None if it is not the value of `name`."""
    view = memoryview(value)
    return verify_payload(view[:HEADER_BYTES], view[HEADER_BYTES:], name)


def verify_payload(header: Buffer, payload: Buffer, name: events.Name) -> int | None:
    """As `verify`, of a header and a payload that lie apart."""
    if len(header) != HEADER_BYTES:
        return None
    fields = bytes(header[: _FIELDS.size])
    *found, valid_tokens = _FIELDS.unpack(fields)
    if tuple(found) != _wanted(name, len(payload)):
        return None
    if bytes(header[_FIELDS.size :]) != _digest(fields, payload):
        return None
    return int(valid_tokens)


def remote_name(name: events.Name) -> str:
    """The value's name in L2."""
    return f"hr1:{name[0]}:{name[1].hex()}"


def _wanted(name: events.Name, payload_bytes: int) -> tuple[bytes, int, int, bytes, bytes, int]:
    fingerprint = name[0].encode()[:32].ljust(32, b"\0")
    return MAGIC, VERSION, HEADER_BYTES, fingerprint, name[1], payload_bytes


def _digest(fields: bytes, payload: Buffer) -> bytes:
    hasher = blake3(fields)
    hasher.update(payload)
    return hasher.digest(_DIGEST_BYTES)
