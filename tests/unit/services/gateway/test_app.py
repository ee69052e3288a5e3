"""The contents of the pages that need no key."""

from __future__ import annotations

import ast
import gc
import re
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from starlette.types import ASGIApp, Message, Scope
from support.memory_bus import MemoryBroker
from support.virtual_loop import FakeClock

from services.gateway import app
from services.gateway.app import MET_503, _route, build_app
from services.gateway.endpoints import Endpoints
from services.gateway.native_call import Fleet, Health, TenantConnections
from services.gateway.visitors import Keys
from shared.actor.mailbox import Mailbox
from shared.client.client import Client
from shared.errors import Unavailable

SECRET = "request r-1 of acme has met the death of its third scheduler"


SCOPES = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
DIALECT = re.compile("ollama|anthropic|/api/|/v1/(responses|messages)", re.IGNORECASE)


class Away:
    """A native client whose every question fails."""

    tenant = "acme"

    def as_tenant(self, _: str) -> Away:
        return self

    async def request(self, *_: Any) -> None:
        raise Unavailable(SECRET)


def away(keys: str = "", origins: Sequence[str] = ()) -> ASGIApp:
    """A gateway whose services are away."""
    client = cast(Client, Away())
    mailbox = Mailbox(MemoryBroker().connect(), FakeClock(), "f", "gateway.g", 1)
    fleet, read = Fleet(mailbox, lambda: ()), Keys(keys)
    connections = TenantConnections(client, apart=False)
    desk = Endpoints(connections, read, Health(client), fleet, timeout_s=1)
    return build_app(desk, origins)


def opened(keys: str = "", origins: Sequence[str] = ()) -> httpx.AsyncClient:
    """A client of that gateway."""
    return httpx.AsyncClient(transport=httpx.ASGITransport(away(keys, origins)), base_url="http://gateway")


@pytest.mark.parametrize(("keys", "reason"), [("acme one\n", MET_503), ("", SECRET)])
async def test_health_quotes_no_request_where_there_are_keys(tmp_path: Path, keys: str, reason: str) -> None:
    path = tmp_path / "keys"
    path.write_text(keys)
    async with opened(str(path) if keys else "") as http:
        asked = await http.get("/v1/models", headers={"authorization": "Bearer one"})
        assert (asked.status_code, asked.json()["error"]["message"]) == (503, SECRET)
        health = await http.get("/health")
        assert (health.status_code, health.json()["reason"]) == (503, reason)


@pytest.mark.parametrize(
    ("origins", "allowed"), [((), None), (["http://a"], "http://a"), (["http://b"], None), (["*"], "*")]
)
async def test_pages_of_other_origins_are_admitted_by_the_setting(
    origins: Sequence[str], allowed: str | None
) -> None:
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


@pytest.mark.parametrize(
    ("verb", "path", "allowed"),
    [
        ("PUT", "/v1/files", {"POST", "GET", "HEAD"}),
        ("PUT", "/v1/responses/resp_1", {"GET", "HEAD", "DELETE"}),
        ("DELETE", "/v1/chat/completions", {"POST"}),
        ("POST", "/v1/models/a/b", {"GET", "HEAD"}),
        ("POST", "/requests/r", {"GET", "HEAD"}),
    ],
)
async def test_a_405_names_every_verb_of_its_path(verb: str, path: str, allowed: set[str]) -> None:
    async with opened() as http:
        answer = await http.request(verb, path)
        assert answer.status_code == 405
        assert {*answer.headers["allow"].split(", ")} == allowed


@pytest.mark.parametrize(
    ("path", "shape"),
    [
        ("/v1/models", {"error": dict}),
        ("/api/tags", {"error": str}),
        ("/v1/messages", {"type": str, "error": dict}),
    ],
)
async def test_an_error_has_the_shape_of_its_api_before_its_handler_runs(
    tmp_path: Path, path: str, shape: dict[str, type]
) -> None:
    (keys := tmp_path / "keys").write_text("acme one\n")
    async with opened(str(keys)) as http:
        answer = await http.request("POST" if "messages" in path else "GET", path, json={})
        assert answer.status_code == 401
        assert {name: type(answer.json()[name]) for name in shape} == shape


def test_gateway_names_no_dialect_outside_its_module() -> None:
    """Neither by its name nor by its paths."""
    found = []
    for path in Path(app.__file__).parent.glob("*.py"):
        tree = ast.parse(path.read_text())
        texts = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
        docs = [ast.get_docstring(node, clean=False) for node in ast.walk(tree) if isinstance(node, SCOPES)]
        found += [
            (path.name, text)
            for text in texts
            if isinstance(text, str) and text not in (*docs, *app.PARTS) and DIALECT.search(text)
        ]
    assert found == []


@pytest.mark.parametrize(
    ("path", "route"),
    [
        ("/v1/models/a/b", "/v1/models/{model}"),
        ("/v1/models/", "/v1/models/{model}"),
        ("/v1/files/f/content", "/v1/files/{id}/content"),
        ("/v1/files/f/g", "other"),
        ("/requests/r", "other"),
        ("/health", "/health"),
    ],
)
def test_the_route_of_a_path_is_that_of_the_document(path: str, route: str) -> None:
    assert _route(path) == route


class Served:
    """A request as a server holds it: with the scope, and the `send` that belongs to it."""

    def __init__(self, path: str) -> None:
        head = {"type": "http", "method": "GET", "path": path, "headers": [], "query_string": b""}
        self.scope: Scope = head
        self.status = 0

    async def receive(self) -> Message:
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        self.status = message.get("status", self.status)


@pytest.mark.parametrize(("path", "status"), [("/docs", 200), ("/v1/models", 503)])
async def test_a_request_leaves_memory_at_its_end_without_a_collection(path: str, status: int) -> None:
    served_by = away()
    gc.collect()
    gc.disable()
    try:
        served = Served(path)
        await served_by(served.scope, served.receive, served.send)
        assert served.status == status
        left = weakref.ref(served)
        del served
        assert left() is None
    finally:
        gc.enable()
