"""Open and closed loop. Both record every request; an answer never moves an intended time.

open    conversations start at their times, independent of answers. With `clients` at most so many are in
        flight; a request that waits for a free client keeps its intended time
closed  so many clients, each starts its next conversation when its last has ended. The load is never more
        than the server takes: the figures show a full server, not what its users see
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from loadtest.bench.asked import Conversation, Options, body_of
from loadtest.bench.pacer import Pacer
from loadtest.bench.record import Record

LEAD_US = 20_000  # between starting an open loop and its time 0
AHEAD_US = 5_000  # a request is made so long before its time: of many tokens that takes a millisecond


class Transport(Protocol):
    """A way to send a request."""

    async def send(self, body: dict[str, object], record: Record) -> None:
        """Send, read to the end, and stamp the record; what fails is its error, and nothing is raised."""


@dataclass
class Drive:
    """One run. `ended` gets every record."""

    transport: Transport
    pacer: Pacer
    options: Options = field(default_factory=Options)
    ended: Callable[[Record], None] = lambda _: None
    records: list[Record] = field(default_factory=list)
    started_us: int = 0

    async def open(
        self, conversations: Sequence[Conversation], times_us: Sequence[int], clients: int = 0
    ) -> None:
        """Begin each at its time after the start."""
        self.started_us = self.pacer.now_us() + LEAD_US
        places: contextlib.AbstractAsyncContextManager[None] = (
            asyncio.Semaphore(clients) if clients else contextlib.nullcontext()
        )

        async def placed(conversation: Conversation, at_us: int) -> None:
            async with places:
                await self._converse(conversation, at_us)

        async with asyncio.TaskGroup() as tasks:
            for conversation, time_us in zip(conversations, times_us, strict=True):
                at_us = self.started_us + time_us
                await self.pacer.about(at_us - AHEAD_US)
                tasks.create_task(placed(conversation, at_us))

    async def closed(self, conversations: Sequence[Conversation], clients: int) -> None:
        """Begin the first `clients` at once, each of the others when one has ended."""
        self.started_us = self.pacer.now_us()
        queue = iter(conversations)

        async def client(queue: Iterator[Conversation]) -> None:
            for conversation in queue:
                await self._converse(conversation, self.pacer.now_us())

        async with asyncio.TaskGroup() as tasks:
            for _ in range(min(clients, len(conversations))):
                tasks.create_task(client(queue))

    async def _converse(self, conversation: Conversation, at_us: int) -> None:
        messages = [{"role": "system", "content": conversation.system}] if conversation.system else []
        for turn in conversation.turns:
            record = Record(turn.kind, at_us, repeated_tokens=turn.repeated_tokens)
            self.records.append(record)
            body = body_of(turn, messages, self.options)
            await self.pacer.until(at_us)
            record.sent_us = self.pacer.now_us()
            await self.transport.send(body, record)
            record.end(self.pacer.now_us())
            self.ended(record)
            if record.error:
                return  # what would follow has nothing to follow
            messages.append({"role": "assistant", "content": record.text})
            record.text = ""  # a long run would keep them all
            at_us = record.ended_us + conversation.think_us
