"""`TenantQueues` pulls the durable requests of all tenants in turn, from a consumer for each tenant.

    a submit, or a look at all consumers ──▶ tenants with work ──one pull each, in turn──▶ core

One consumer for all would be first in, first out: a tenant with 50,000 requests would make the others wait
for hours. The filters of a work queue must not overlap, so each tenant's consumer has its own subjects.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import datetime
from hashlib import sha256
from typing import Any

from services.keeper.core import KEPT_S
from shared.errors import Overloaded, Unavailable
from shared.fair_share import is_over_share
from shared.nats import subjects
from shared.nats.interface import Delivery
from shared.nats.jetstream import FULL_RETRY_MS, JetStream, Puller, UnknownStream, stored_us

log = logging.getLogger("headrace.keeper")

MAX_QUEUED = 100_000  # requests in stream WORK
SHARED_OUT = MAX_QUEUED // 2  # above, a tenant with more than its equal share is refused
ACK_WAIT_S = 10  # then a delivery of a dead keeper comes to another
CONSUMERS_POLL_S = (
    2.0  # between looks at all consumers: for work that other keepers stored, or that comes again
)
PULL = 32  # requests of a pull
UNUSED_S = 2 * KEPT_S  # without a pull a consumer goes, since clients may invent tenants; requests stay
MAX_NAME_CHARS = 200  # a consumer's name is one of a folder, too
EARLIER = "keeper"  # the consumer of all tenants, of an earlier version
_CONFIG = {
    "ack_policy": "explicit",
    "ack_wait": ACK_WAIT_S * 1_000_000_000,
    "max_deliver": -1,  # whole fleets may be killed any number of times
    "max_ack_pending": MAX_QUEUED,  # requests of a model without an executor do not hold up the others
    "inactive_threshold": UNUSED_S * 1_000_000_000,
}


class TenantQueues:
    """The consumers, and whose work is pulled next."""

    def __init__(
        self, streams: JetStream, deliver: Callable[[Delivery], None], room: Callable[[str, int], int]
    ) -> None:
        """`room`: how many requests of a tenant may be delivered now, while so many tenants have work."""
        self._streams, self._deliver, self._room = streams, deliver, room
        self._known: set[str] = set()  # tenants with a consumer, as of the last look and since
        self._adopted = False
        self._turns: dict[str, None] = {}  # tenants that may have work, the next one first
        self.taker = ""  # another reader of the stream, as of the last look
        self._held = Counter[str]()  # messages in the stream, by tenant, at the last look and since
        self._stored = Counter[str]()  # those of this keeper that no pull has brought, by consumer
        self._wake = asyncio.Event()
        self._server_us = 0  # wall clock of the nats-server minus the monotonic one here; 0: not known

    def age_us(self, reply: str) -> int:
        """How long a delivered message has been stored, by the clock of the nats-server, as of the last look;
        0 if that is not known."""
        now_us = self._now_us()
        return max(now_us + self._server_us - stored_us(reply), 0) if self._server_us else 0

    @staticmethod
    def _now_us() -> int:
        return round(asyncio.get_running_loop().time() * 1e6)

    @property
    def queued(self) -> int:
        """Messages in the stream, of requests and batches that have not ended, as of the last look."""
        return self._held.total()

    def has_room(self) -> None:
        """There is room again."""
        self._wake.set()

    async def before(self, tenant: str) -> None:
        """Prepare the storing of a request. Raises Overloaded for a tenant with more than its share of the
        stream, Unavailable."""
        if self.taker:
            why = f"{self.taker} takes durable requests out of {subjects.WORK_STREAM}"
            raise Unavailable(f"{why}: the operator must delete it", retry_after_ms=FULL_RETRY_MS)
        held = self._held.total() + 1
        if is_over_share(self._held[tenant] + 1, held, SHARED_OUT, len(+self._held)):
            wait = f"{held - 1:,} durable requests wait, {self._held[tenant]:,} of them yours"
            raise Overloaded(f"{wait}: submit more when some have ended", retry_after_ms=FULL_RETRY_MS)
        if tenant not in self._known:
            try:
                await self._make(tenant)
            except UnknownStream:
                why = "the streams of durable requests are not made yet: try again"
                raise Unavailable(why, retry_after_ms=1_000) from None
            except Unavailable:  # while a cluster has no leader for it; the stream holds requests without one
                self._turn(tenant)  # and the pull makes it

    def on_stored(self, tenant: str) -> None:
        """A request of this tenant is in the stream."""
        self._held[tenant] += 1
        self._stored[_name(tenant)] += 1
        self._turn(tenant)

    async def run(self) -> None:
        """Pull until an error. Each pull has an end, so a restart of the server cannot silence the loop.
        Raises Unavailable."""
        await self._look()
        await self._adopt()
        puller = await Puller.open(self._streams.bus, self._deliver, self._stored)
        looks_at = 0.0
        try:
            while True:
                now = asyncio.get_running_loop().time()
                if now >= looks_at:
                    looks_at = now + CONSUMERS_POLL_S
                    await self._look()
                if not await self._pull(puller):
                    self._wake.clear()
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout_at(looks_at):
                            await self._wake.wait()
        finally:
            await puller.close()

    async def _pull(self, puller: Puller) -> bool:
        """Pull for the next tenant that has room; False if there is none."""
        for tenant in self._turns:
            if (room := self._room(tenant, len(self._turns))) > 0:
                break
        else:
            return False
        del self._turns[tenant]
        most = min(room, PULL)
        came = await puller.pull(subjects.WORK_STREAM, _name(tenant), most)
        if came is None:  # the consumer may be gone
            await self._make(tenant)
        elif came == most or self._stored[_name(tenant)]:
            self._turn(tenant)
        return True

    def _turn(self, tenant: str) -> None:
        self._turns.setdefault(tenant)
        self._wake.set()

    async def _look(self) -> None:
        """Take turns with all tenants that have work, and look for readers that are no keepers."""
        held, known, taker = Counter[str](), set[str](), ""
        for consumer in await self._streams.consumers(subjects.WORK_STREAM):
            if "ts" in consumer:  # nats-server from 2.10 on
                at = datetime.fromisoformat(consumer["ts"])
                self._server_us = round(at.timestamp() * 1e6) - self._now_us()
            if consumer["name"] == EARLIER:
                continue
            if (tenant := _tenant_of(consumer)) is None:
                taker = _reader(consumer)
                continue
            known.add(tenant)
            if count := consumer["num_pending"] + consumer["num_ack_pending"]:
                held[tenant] = count
                self._turns.setdefault(tenant)
        for tenant in self._turns:  # the server may not count yet what this keeper has just stored
            held[tenant] = max(held[tenant], self._stored[_name(tenant)])
        if taker != self.taker:
            why = f"refused: {taker} takes them out of {subjects.WORK_STREAM}"
            log.warning("new durable requests are %s", why if taker else "accepted again")
        self._held, self._known, self.taker = held, known, taker

    async def _adopt(self) -> None:
        """Make the consumers that the stored requests need; at first also those that are there, whose
        settings may be of an earlier version. In a cluster each takes a vote, and votes take time."""
        if not self._adopted:
            await self._streams.delete_consumer(subjects.WORK_STREAM, EARLIER)
        stored = await self._streams.subjects_like(subjects.WORK_STREAM, subjects.WORK_ALL)
        tenants = {subjects.untoken(subject.split(".")[3]) for subject in stored}
        for tenant in tenants - self._known if self._adopted else tenants:
            await self._make(tenant)
        self._adopted = True

    async def _make(self, tenant: str) -> None:
        config = {**_CONFIG, "filter_subject": subjects.work_of(tenant)}
        await self._streams.make_consumer(subjects.WORK_STREAM, _name(tenant), config)
        self._known.add(tenant)
        self._turn(tenant)


def _tenant_of(consumer: Mapping[str, Any]) -> str | None:
    """The tenant of a keeper's consumer, None of any other."""
    parts = consumer["config"].get("filter_subject", "").split(".")
    with contextlib.suppress(LookupError, ValueError):
        if consumer["name"] == _name(tenant := subjects.untoken(parts[3])):
            return tenant
    return None


def _reader(consumer: Mapping[str, Any]) -> str:
    """The name of a reader: a mirror or source, which the server names, else the consumer. Both get messages
    that no consumer of a keeper wants yet, and the server then removes them."""
    facts = consumer["config"].get("metadata") or {}
    copy = facts.get("_nats.mirror.stream") or facts.get("_nats.src.stream")
    return f"stream {copy:.200}" if copy else f"consumer {consumer['name']:.200}"


def _name(tenant: str) -> str:
    """The name of a tenant's consumer."""
    name = subjects.token(tenant)
    return f"tenant-{name}" if len(name) <= MAX_NAME_CHARS else sha256(name.encode()).hexdigest()
