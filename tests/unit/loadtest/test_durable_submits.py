"""`submit_all` of loadtest/durable.py: refusals that never end."""

from __future__ import annotations

import pytest
from support.memory_bus import MemoryBroker

from loadtest import durable
from shared.client.client import Client
from shared.nats.interface import NoResponders


async def test_submits_that_are_refused_for_too_long_end_with_the_last_refusal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client = await Client.open(MemoryBroker().connect())  # without a keeper
    monkeypatch.setattr(durable, "REFUSED_S", 0)
    with pytest.raises(NoResponders, match="submit") as refused:
        await durable.submit_all(client, [durable.simulated(0)], {})
    assert refused.value.__notes__ == ["0 of 1 requests were stored, not 0"]
