"""Which consumers are pulled, and what a look at all of them counts."""

from __future__ import annotations

import asyncio
from collections import Counter
from unittest.mock import AsyncMock

import pytest

from services.keeper import queues
from services.keeper.queues import TenantQueues


def on(streams: AsyncMock) -> TenantQueues:
    return TenantQueues(streams, lambda _: None, lambda *_: 8)


async def test_a_query_does_not_forget_messages_stored_meanwhile() -> None:
    """The server does not count it yet."""
    streams = AsyncMock()
    found = on(streams)

    async def consumers(_: str) -> list[dict[str, object]]:
        found.on_stored("a")
        return []

    streams.consumers = consumers
    await found._look()
    assert found.queued == 1


async def test_requests_that_a_pull_has_not_brought_are_pulled_without_another_query(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The server has stored both; the consumer knows of one when the first pull comes."""
    streams, pulled, both = AsyncMock(), list[tuple[str, int]](), asyncio.Event()
    streams.consumers.return_value = streams.subjects_like.return_value = []
    found = on(streams)

    class Pulls:
        """Each pull brings one message."""

        stored: Counter[str]

        @classmethod
        async def open(cls, _: object, __: object, stored: Counter[str]) -> Pulls:
            pulls = cls()
            pulls.stored = stored
            return pulls

        async def pull(self, _: str, consumer: str, most: int) -> int:
            pulled.append((consumer, most))
            self.stored[consumer] -= 1
            if len(pulled) == 2:
                both.set()
            return 1

        async def close(self) -> None:
            pass

    monkeypatch.setattr(queues, "Puller", Pulls)
    monkeypatch.setattr(queues, "CONSUMERS_POLL_S", 3_600.0)
    for _ in range(2):
        found.on_stored("a")
    running = asyncio.create_task(found.run())
    await asyncio.wait_for(both.wait(), 60)
    running.cancel()
    assert pulled == [("tenant-a", 8)] * 2
