"""The page at `/`: its files are open and need nothing from elsewhere; its data need the key."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio
from support.memory_bus import MemoryBroker
from support.pipeline.five_actors import Pipeline
from support.pipeline.gateway_side import MODEL, add_gateway, healthy, remove_gateway

from services.gateway import page

pytestmark = pytest.mark.asyncio(loop_scope="module")
whole_file = pytest_asyncio.fixture(scope="module", loop_scope="module")
KEYS = "acme one\nbob two\nheadrace-operator three\n"


@whole_file
async def pipeline() -> AsyncIterator[Pipeline]:
    broker = MemoryBroker()

    async def connect() -> Any:
        return broker.connect()

    running = await Pipeline.start(connect, "page")
    yield running
    await running.stop()


@whole_file
async def http(
    pipeline: Pipeline, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[httpx.AsyncClient]:
    keys = tmp_path_factory.mktemp("page") / "keys"
    keys.write_text(KEYS)
    url = await add_gateway(pipeline, "page", keys)
    await healthy(pipeline, "page")
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        yield client
    await remove_gateway(pipeline, "page")


def key(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {name}"}


async def ask(http: httpx.AsyncClient, name: str, **more: Any) -> str:
    """The id of an answered request, when it is in the list: that is after its last byte."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3, **more}
    answer = await http.post("/v1/chat/completions", json=body, headers=key(name))
    assert answer.status_code == 200, answer.text
    found = str(answer.json()["id"])
    async with asyncio.timeout(60):
        while found not in await seen(http, name):
            await asyncio.sleep(0.01)
    return found


async def seen(http: httpx.AsyncClient, name: str) -> dict[str, dict[str, Any]]:
    """The last requests by id."""
    listed = (await http.get("/requests", headers=key(name))).json()["requests"]
    return {line["request_id"]: line for line in listed}


@pytest.mark.parametrize(("path", "script"), [("/", "page.js"), ("/docs", "docs.js")])
async def test_its_files_are_open_and_come_from_here_alone(
    http: httpx.AsyncClient, path: str, script: str
) -> None:
    html = await http.get(path)
    assert (html.status_code, html.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert "default-src 'none'" in html.headers["content-security-policy"]
    names = re.findall(r'(?:src|href)="(/page/[^"]+)"', html.text)
    assert sorted(names) == sorted(["/page/page.css", f"/page/{script}"])
    for name in names:
        answer = await http.get(name)
        assert (answer.status_code, answer.headers["x-content-type-options"]) == (200, "nosniff")
        assert not re.search(r"https?://(?!www\.w3\.org)", html.text + answer.text), "nothing from elsewhere"
        assert "innerHTML" not in answer.text, "a text of a model is no HTML"
    assert (await http.get("/page/../app.py")).status_code == 404
    assert (await http.get("/page/app.py")).status_code == 404


async def test_a_tenant_sees_its_own_requests_and_the_operator_all(http: httpx.AsyncClient) -> None:
    mine, theirs = await ask(http, "one"), await ask(http, "two")
    acme, bob, everyone = [await seen(http, name) for name in ("one", "two", "three")]
    assert mine in acme
    assert theirs not in acme
    assert set(bob) == {theirs}
    assert {mine, theirs} <= set(everyone)
    line = acme[mine]
    assert (line["tenant"], line["status"], line["completion_tokens"]) == ("acme", 200, 3)
    assert "body" not in line
    trace = await http.get(f"/requests/{mine}", headers=key("one"))
    assert trace.json()["spans"][0]["attributes"]["request.id"] == mine
    assert (await http.get(f"/requests/{theirs}", headers=key("three"))).status_code == 200
    for path in (f"/requests/{theirs}", "/requests/none"):
        refused = await http.get(path, headers=key("one"))
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "not_found")


async def test_its_data_need_the_key(http: httpx.AsyncClient) -> None:
    for path in ("/requests", "/requests/x", "/fleet"):
        assert (await http.get(path)).status_code == 401
    assert (await http.get("/fleet", headers=key("one"))).status_code == 403
    for path, status in (("/requests", 200), ("/requests/x", 404), ("/fleet", 200)):
        assert (await http.get(path, headers={"x-api-key": "three"})).status_code == status


async def test_the_operator_sees_every_service(pipeline: Pipeline, http: httpx.AsyncClient) -> None:
    services = (await http.get("/fleet", headers=key("three"))).json()["services"]
    kinds = {service["kind"]: service["state"] for service in services}
    assert kinds == dict.fromkeys(
        ["gateway", "tokenizer", "scheduler", "executor", "kv_offload", "detokenizer"], "ready"
    )
    assert {service["fleet"] for service in services} == {pipeline.settings.fleet}


async def test_the_list_is_bounded(http: httpx.AsyncClient) -> None:
    for _ in range(page.KEPT + 5):
        answer = await http.post("/v1/chat/completions", json={"messages": 1}, headers=key("two"))
        assert answer.status_code == 400
    listed = await seen(http, "two")
    assert len(listed) <= page.KEPT
    assert {line["error"] for line in listed.values()} == {"invalid_request_error"}


async def test_without_keys_everything_is_shown(pipeline: Pipeline) -> None:
    url = await add_gateway(pipeline, "open")
    await healthy(pipeline, "open")
    async with httpx.AsyncClient(base_url=url, timeout=120) as http:
        asked = await ask(http, "any")
        assert asked in await seen(http, "any")
        assert len((await http.get("/fleet")).json()["services"]) >= 6
    await remove_gateway(pipeline, "open")
