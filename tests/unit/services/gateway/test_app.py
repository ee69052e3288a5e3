"""What the pages that need no key say."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from support.memory_bus import MemoryBroker
from support.virtual_loop import FakeClock

from services.gateway.app import MET_503, Endpoints, Keys, build_app
from services.gateway.fleet import Fleet
from services.gateway.native_call import Health, TenantConnections
from services.gateway.page import Page
from shared.actor.mailbox import Mailbox
from shared.client import Client
from shared.errors import Unavailable

SECRET = "request r-1 of acme has met the death of its third scheduler"


class Away:
    """A native client whose every question fails."""

    tenant = "acme"

    def as_tenant(self, _: str) -> Away:
        return self

    async def request(self, *_: Any) -> None:
        raise Unavailable(SECRET)


@pytest.mark.parametrize(("keys", "told"), [("acme one\n", MET_503), ("", SECRET)])
async def test_health_quotes_nobodys_request_where_there_are_keys(
    tmp_path: Path, keys: str, told: str
) -> None:
    path = tmp_path / "keys"
    path.write_text(keys)
    client = cast(Client, Away())
    mailbox = Mailbox(MemoryBroker().connect(), FakeClock(), "f", "gateway.g", 1)
    fleet, read = Fleet(mailbox, lambda: ()), Keys(str(path) if keys else "")
    connections = TenantConnections(client, apart=False)
    desk = Endpoints(connections, read, Health(client), fleet, Page(fleet, read), timeout_s=1)
    transport = httpx.ASGITransport(build_app(desk))
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
        asked = await http.get("/v1/models", headers={"authorization": "Bearer one"})
        assert (asked.status_code, asked.json()["error"]["message"]) == (503, SECRET)
        health = await http.get("/health")
        assert (health.status_code, health.json()["reason"]) == (503, told)
