"""The requests of one tokenizer before its core: as they are read, by tenant, and on a thread if long.

broker ──▶ Arrivals ──▶ owned, claimed to the others ──▶ TenantQueue ──▶ core
                                                     long ──▶ BackgroundEncoder ──▶ core
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import hashlib
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

from services.tokenizer.prepare import Cancels, Prepared, ServedModel, Submission, prepared
from shared.clock import Clock, SystemClock
from shared.errors import Overloaded
from shared.fair_share import Turns, has_no_room
from shared.messages import ATTEMPTS
from shared.nats.interface import Delivery

RETRY_AFTER_MS = 1_000
MAX_WAITING_BYTES = 64 * 1024 * 1024
MAX_WAITING = 8_192  # requests: a burst of 5,000 finds room
CROWDED_S = 0.001  # until the next check whether a scheduler has answered
TENANT = 3  # index of the tenant in a request's subject


def tenant_token(delivery: Delivery) -> str:
    """The tenant of a request, escaped; works for any subject, valid or not."""
    return delivery.subject.split(".", TENANT + 1)[TENANT]


class Arrival(NamedTuple):
    """A request from the broker."""

    delivery: Delivery
    received_us: int
    copied: bool  # a copy for all tokenizers, in case the owner dies


class Arrivals:
    """Requests read from the socket and not yet handled: tenants take turns, copies come last.

    Reading a request takes 5 µs, handling it 25. A tenant waits only while another one's burst is read.
    """

    def __init__(self, see: Callable[[Arrival], None], now_us: Callable[[], int]) -> None:
        self._see = see
        self._now_us = now_us
        self._unseen: Turns[Arrival] = Turns()
        self._copies: deque[Arrival] = deque()
        self._turn_used = False  # a request was handled in this turn of the event loop
        self._idle = asyncio.Event()
        self._idle.set()

    def on_request(self, delivery: Delivery) -> None:
        """Queue a request that this tokenizer will own. Above MAX_WAITING it is handled at once, and the
        tenant queue refuses it."""
        arrival = Arrival(delivery, self._now_us(), False)
        if self._turn_used and len(self._unseen) < MAX_WAITING:
            self._unseen.put(tenant_token(delivery), arrival)
            return
        self._turn_used = True
        self._begin()
        self._see(arrival)

    def on_copy(self, delivery: Delivery) -> None:
        """Queue a copy. Above MAX_COPIES the oldest one is handled at once."""
        self._copies.append(Arrival(delivery, self._now_us(), True))
        if len(self._copies) > MAX_COPIES:
            self._see(self._copies.popleft())
        self._begin()

    async def drain(self) -> None:
        """Return when all have been handled."""
        await self._idle.wait()

    def __len__(self) -> int:
        """Requests, without copies."""
        return len(self._unseen)

    def _begin(self) -> None:
        if self._idle.is_set():
            self._idle.clear()
            asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        self._turn_used = bool(self._unseen)
        if not (self._unseen or self._copies):
            self._idle.set()
            return
        asyncio.get_running_loop().call_soon(self._next)
        self._see(self._unseen.pop() if self._unseen else self._copies.popleft())


class TenantQueue:
    """The requests that one tokenizer owns and has not prepared.

    Each turn of the event loop takes one, and tenants take turns: heartbeats, cancels and answers are handled
    in between. A tenant is skipped while `over_share` is true for it.
    """

    def __init__(
        self, take: Callable[[PendingRequest], None], over_share: Callable[[str], bool] = lambda tenant: False
    ) -> None:
        self._take = take
        self._over_share = over_share
        self._waiting: Turns[PendingRequest] = Turns()
        self._empty = asyncio.Event()
        self._empty.set()

    def put(self, pending: PendingRequest) -> None:
        """Queue a request. Raises Overloaded when the queue is full for its tenant (see has_no_room)."""
        tenant = tenant_token(pending.delivery)
        own, tenants = self._waiting.count_of(tenant), self._waiting.tenants
        if has_no_room(own, 1, len(self._waiting), MAX_WAITING, tenants):
            raise Overloaded(
                f"{len(self._waiting)} requests wait for this tokenizer, {own} of them yours: "
                "try again later",
                retry_after_ms=RETRY_AFTER_MS,
            )
        if not self._empty.is_set() or self._over_share(tenant):
            if self._empty.is_set():
                self._empty.clear()
                asyncio.get_running_loop().call_soon(self._next)
            self._waiting.put(tenant, pending)
            return
        self._empty.clear()
        asyncio.get_running_loop().call_soon(self._next)
        self._take(pending)

    async def drain(self) -> None:
        """Return when all have had their turn."""
        await self._empty.wait()

    def __len__(self) -> int:
        return len(self._waiting)

    def _next(self) -> None:
        if not self._waiting:
            self._empty.set()
            return
        try:
            taken = self._waiting.pop(self._over_share)
        except KeyError:
            asyncio.get_running_loop().call_later(CROWDED_S, self._next)
            return
        asyncio.get_running_loop().call_soon(self._next)
        self._take(taken)


class BackgroundEncoder:
    """Prepares the long requests of one tokenizer on a thread; calls `done` on the event loop with each.

    A megabyte of text takes one to three seconds to tokenize, long enough to be declared dead. The tokenizer
    library releases the GIL and uses all cores, so one thread is enough; tenants take turns.
    """

    def __init__(
        self,
        model: ServedModel,
        done: Callable[[Prepared], None],
        clock: Clock | None = None,
        cancels: Cancels | None = None,
    ) -> None:
        self._model = model
        self._cancels = cancels
        self._clock = clock or SystemClock()
        self._done = done
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="long-requests")
        self._queue: Turns[Submission] = Turns()
        self._bytes: Counter[str] = Counter()  # by tenant, of those not done yet
        self._working: asyncio.Task[None] | None = None

    @property
    def waiting(self) -> int:
        """Requests not done yet; 0 when idle."""
        return len(self._queue) + (self._working is not None)

    def put(self, submission: Submission) -> None:
        """Queue a request. Raises Overloaded when the queue is full for its tenant (see has_no_room)."""
        own, size = self._bytes[submission.tenant], len(submission.body)
        if has_no_room(own, size, self._bytes.total(), MAX_WAITING_BYTES, len(self._bytes)):
            raise Overloaded(
                f"{own} bytes of your long requests wait for this tokenizer: try again later",
                retry_after_ms=RETRY_AFTER_MS,
            )
        self._bytes[submission.tenant] += size
        self._queue.put(submission.tenant, submission)
        if self._working is None:
            self._working = asyncio.get_running_loop().create_task(self._work(self._queue.pop()))

    async def drain(self) -> None:
        """Return when nothing waits."""
        while self._working is not None:
            await self._working
        self._thread.shutdown(wait=False)

    async def _work(self, submission: Submission) -> None:
        """Prepare a request on the thread, then start on the next one."""
        loop = asyncio.get_running_loop()
        try:
            result = await loop.run_in_executor(self._thread, self._prepare, submission)
        finally:
            self._bytes[submission.tenant] -= len(submission.body)
            self._bytes += Counter()  # drops the zeros
            self._working = loop.create_task(self._work(self._queue.pop())) if self._queue else None
        self._done(result)

    def _prepare(self, submission: Submission) -> Prepared:
        """`prepared`, without garbage collection: with it 8 MB of empty lists take 2.2 s instead of 0.6, and
        no other thread runs meanwhile."""
        clock = self._clock
        handled = dataclasses.replace(submission, handled_wall_us=clock.wall_us(), handled_us=clock.now_us())
        gc.disable()
        try:
            return prepared(handled, self._model, self._cancels)
        finally:
            gc.enable()


STANDS_BY = "stands_by"  # in the load of a heartbeat: this tokenizer sends Claims
UNSURE = "unsure"  # in the headers of a copy, with its alias; never sent
MAX_COPIES, MAX_COPY_BYTES = 8_192, 64 * 1024 * 1024  # then the oldest are dropped: they are likely done
HASHED_BYTES = 16_384  # of a body


@dataclass(slots=True)
class PendingRequest:
    """A request as it arrived, and its owner."""

    delivery: Delivery
    key: int
    received_us: int
    received_wall_us: int
    request_id: str = ""  # drawn by the owner, for a request without one
    owner: str = ""  # `tokenizer.id`; empty: not claimed
    owners: int = 0  # number of owners so far
    since_us: int = 0  # silence counts from here
    unsure: str = ""  # the alias that it was sent to: if that has changed, another model may have it

    @property
    def attempt(self) -> int:
        """The first attempt number of the next owner."""
        return 1 + ATTEMPTS * self.owners


def key_of(delivery: Delivery) -> int:
    """The key of a request: a hash of its subject, its inbox, its size and the start of its body."""
    head = f"{delivery.subject} {delivery.reply} {len(delivery.data)} ".encode()
    digest = hashlib.blake2b(head + delivery.data[:HASHED_BYTES], digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
