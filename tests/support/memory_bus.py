"""A broker inside the process: same contract as NATS, and faults on request.

Deliveries run in the order of publication on the event loop. `drop`, `duplicate` and `delay` apply to
the next messages on subjects that match; a delayed message is delivered after the next `by` others.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import count

from shared.nats.interface import (
    NO_RESPONDERS,
    BusFault,
    Delivery,
    FaultHandler,
    Handler,
    NoResponders,
    RequestTimeout,
    check_payload,
)


@dataclass(eq=False)
class _Subscription:
    broker: MemoryBroker
    pattern: tuple[str, ...]
    handler: Handler
    queue: str

    async def cancel(self) -> None:
        if self in self.broker.subscriptions:
            self.broker.subscriptions.remove(self)

    async def drain(self) -> None:
        await self.cancel()  # a message is for this subscription only when it is delivered


@dataclass(eq=False)
class _Fault:
    pattern: tuple[str, ...]
    copies: int  # 0 drops, 2 duplicates
    times: int
    by: int = 0  # delay: number of later messages to let pass


@dataclass(eq=False)
class _Held:
    left: int  # messages that still pass before it
    delivery: Delivery


@dataclass
class MemoryBroker:
    """The broker; `connect()` gives each actor its own bus."""

    max_payload: int = 8 * 1024 * 1024
    subscriptions: list[_Subscription] = field(default_factory=list)
    _found_among: list[_Subscription] = field(default_factory=list)
    _found: dict[str, list[_Subscription]] = field(default_factory=dict)  # by subject
    _queue: deque[Delivery] = field(default_factory=deque)
    _held: list[_Held] = field(default_factory=list)
    _faults: list[_Fault] = field(default_factory=list)
    _pumping: bool = False
    _turns: Counter[str] = field(default_factory=Counter)  # by queue group
    _inboxes: count[int] = field(default_factory=count)

    def connect(self, user: str = "") -> MemoryBus:
        """A new connection. Nothing is forbidden to `user`."""
        return MemoryBus(self, user)

    def drop(self, pattern: str, times: int = 1) -> None:
        """Lose the next `times` messages on `pattern`."""
        self._faults.append(_Fault(tuple(pattern.split(".")), 0, times))

    def duplicate(self, pattern: str, times: int = 1) -> None:
        """Deliver the next `times` messages on `pattern` twice."""
        self._faults.append(_Fault(tuple(pattern.split(".")), 2, times))

    def delay(self, pattern: str, by: int, times: int = 1) -> None:
        """Deliver the next `times` messages on `pattern` after the `by` messages that follow each."""
        self._faults.append(_Fault(tuple(pattern.split(".")), 1, times, by))

    async def settle(self) -> None:
        """Return when every message, and all it led to, is delivered. Releases delayed ones last."""
        while self._queue or self._held:
            if not self._queue:
                self._release(everything=True)
            await asyncio.sleep(0)
        await asyncio.sleep(0)

    def put(self, delivery: Delivery) -> None:
        """Queue a message through the faults."""
        subject = delivery.subject.split(".")
        fault = next((f for f in self._faults if f.times and _matches(f.pattern, subject)), None)
        if fault is None:
            self._queue.append(delivery)
        else:
            fault.times -= 1
            self._queue.extend([delivery] * (0 if fault.by else fault.copies))
        self._release()
        if fault is not None and fault.by:
            self._held.append(_Held(fault.by, delivery))
        self._schedule()

    def next_inbox(self, user: str) -> str:
        """A fresh reply subject."""
        return f"_INBOX.{user or 'memory'}.{next(self._inboxes)}"

    def _pump(self) -> None:
        self._pumping = False
        try:
            for _ in range(len(self._queue)):
                self._deliver(self._queue.popleft())
        finally:  # a handler's exception goes to the loop's handler, the other messages go on
            if self._queue:
                self._schedule()

    def _schedule(self) -> None:
        if not self._pumping:
            self._pumping = True
            asyncio.get_running_loop().call_soon(self._pump)

    def _release(self, everything: bool = False) -> None:
        for held in list(self._held):
            held.left -= 1
            if everything or held.left <= 0:
                self._held.remove(held)
                self._queue.append(held.delivery)
                self._schedule()

    def _deliver(self, delivery: Delivery) -> None:
        found = self._subscribed(delivery.subject)
        if not found and delivery.reply:
            headers = {"Status": NO_RESPONDERS, "Nats-Subject": delivery.subject}
            self._queue.append(Delivery(delivery.reply, b"", "", headers))
        for queue in dict.fromkeys(s.queue for s in found):
            group = [s for s in found if s.queue == queue]
            if queue:
                self._turns[queue] += 1
                group = [group[self._turns[queue] % len(group)]]
            for subscription in group:
                subscription.handler(delivery)

    def _subscribed(self, subject: str) -> list[_Subscription]:
        """Found anew for the first message on a subject since a subscription came or went."""
        if self._found_among != self.subscriptions:
            self._found_among = [*self.subscriptions]
            self._found.clear()
        found = self._found.get(subject)
        if found is None:
            words = subject.split(".")
            found = self._found[subject] = [s for s in self.subscriptions if _matches(s.pattern, words)]
        return found


class MemoryBus:
    """One connection to a MemoryBroker. See shared.nats.interface.Bus."""

    def __init__(self, broker: MemoryBroker, user: str = "") -> None:
        self._broker = broker
        self.user = user
        self._mine: list[_Subscription] = []
        self._fault_handlers: list[FaultHandler] = []

    @property
    def max_payload(self) -> int:
        return self._broker.max_payload

    @property
    def backlog_bytes(self) -> int:
        return 0

    def publish(
        self, subject: str, data: bytes, *, reply: str = "", headers: Mapping[str, str] | None = None
    ) -> None:
        check_payload(subject, data, headers, self.max_payload)
        self._broker.put(Delivery(subject, data, reply, dict(headers or {})))

    async def subscribe(self, pattern: str, handler: Handler, *, queue: str = "") -> _Subscription:
        subscription = _Subscription(self._broker, tuple(pattern.split(".")), handler, queue)
        self._broker.subscriptions.append(subscription)
        self._mine.append(subscription)
        return subscription

    async def request(
        self, subject: str, data: bytes, *, timeout_us: int, headers: Mapping[str, str] | None = None
    ) -> Delivery:
        answer: asyncio.Future[Delivery] = asyncio.get_running_loop().create_future()
        inbox = self.new_inbox()
        subscription = await self.subscribe(inbox, lambda d: None if answer.done() else answer.set_result(d))
        try:
            self.publish(subject, data, reply=inbox, headers=headers)
            delivery = await asyncio.wait_for(answer, timeout_us / 1e6)
        except TimeoutError:
            raise RequestTimeout(f"no answer on {subject} within {timeout_us / 1e6:g} s") from None
        finally:
            await subscription.cancel()
            self._mine.remove(subscription)
        if delivery.has_no_responders:
            raise NoResponders(f"nothing listens to {subject}")
        return delivery

    async def another(self, suffix: str, timeout_s: float, turn_messages: int = 1) -> MemoryBus:
        return self._broker.connect(self.user)

    def new_inbox(self) -> str:
        return self._broker.next_inbox(self.user)

    def on_fault(self, handler: FaultHandler) -> None:
        self._fault_handlers.append(handler)

    def report(self, fault: BusFault) -> None:
        """Make this connection report a fault, as a test's stand-in for the network's."""
        for handler in self._fault_handlers:
            handler(fault)

    async def flush(self) -> None:
        await self._broker.settle()

    async def drain(self) -> None:
        await self._broker.settle()
        for subscription in self._mine:
            await subscription.cancel()
        self._mine.clear()


def _matches(pattern: tuple[str, ...], subject: list[str]) -> bool:
    for i, want in enumerate(pattern):
        if want == ">":
            return len(subject) > i
        if i >= len(subject) or want not in ("*", subject[i]):
            return False
    return len(pattern) == len(subject)
