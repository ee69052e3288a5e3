"""What the pages that need no key say."""

from __future__ import annotations

from collections.abc import Sequence
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


def opened(keys: str = "", origins: Sequence[str] = ()) -> httpx.AsyncClient:
    """A client of a gateway whose services are away."""
    client = cast(Client, Away())
    mailbox = Mailbox(MemoryBroker().connect(), FakeClock(), "f", "gateway.g", 1)
    fleet, read = Fleet(mailbox, lambda: ()), Keys(keys)
    connections = TenantConnections(client, apart=False)
    desk = Endpoints(connections, read, Health(client), fleet, Page(fleet, read), timeout_s=1)
    transport = httpx.ASGITransport(build_app(desk, origins))
    return httpx.AsyncClient(transport=transport, base_url="http://gateway")


@pytest.mark.parametrize(("keys", "told"), [("acme one\n", MET_503), ("", SECRET)])
async def test_health_quotes_nobodys_request_where_there_are_keys(
    tmp_path: Path, keys: str, told: str
) -> None:
    path = tmp_path / "keys"
    path.write_text(keys)
    async with opened(str(path) if keys else "") as http:
        asked = await http.get("/v1/models", headers={"authorization": "Bearer one"})
        assert (asked.status_code, asked.json()["error"]["message"]) == (503, SECRET)
        health = await http.get("/health")
        assert (health.status_code, health.json()["reason"]) == (503, told)


@pytest.mark.parametrize(
    ("origins", "allowed"), [((), None), (["http://a"], "http://a"), (["http://b"], None), (["*"], "*")]
)
async def test_pages_of_other_origins(origins: Sequence[str], allowed: str | None) -> None:
    """With a key in a header a browser asks first, and reads also an error only where it is allowed to."""
    ask = {
        "origin": "http://a",
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization",
    }
    async with opened(origins=origins) as http:
        answers = [
            await http.options("/v1/messages", headers=ask),
            await http.get("/v1/models", headers={"origin": "http://a"}),
        ]
        assert [answer.headers.get("access-control-allow-origin") for answer in answers] == [allowed] * 2
        assert (answers[0].status_code == 200) == (allowed is not None)
        assert answers[1].status_code == 503
