"""The page at `/`: its files are open and need nothing from elsewhere; its data need the key."""

from __future__ import annotations

import asyncio
import json
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
    await ended(http, name, found)
    return found


async def ended(http: httpx.AsyncClient, name: str, request: str) -> dict[str, Any]:
    """The line of a request in the list, once it has ended."""
    async with asyncio.timeout(60):
        while (line := (await seen(http, name)).get(request, {"running": True})).get("running"):
            await asyncio.sleep(0.01)
    return line


async def seen(http: httpx.AsyncClient, name: str) -> dict[str, dict[str, Any]]:
    """The last requests by id."""
    listed = (await http.get("/requests", headers=key(name))).json()["requests"]
    return {line["request_id"]: line for line in listed}


async def files_of(http: httpx.AsyncClient, path: str) -> dict[str, httpx.Response]:
    """A page and all that it needs: what it names, and what its modules import."""
    found: dict[str, httpx.Response] = {}
    wanted = [path]
    while wanted:
        if (name := wanted.pop()) not in found:
            found[name] = await http.get(name)
            wanted += re.findall(r'(?:src|href)="(/page/[^"]+)"', found[name].text)
            wanted += [f"/page/{each}" for each in re.findall(r'from "\./([^"]+)"', found[name].text)]
    return found


@pytest.mark.parametrize(
    ("path", "scripts"),
    [
        ("/docs", "docs"),
        ("/", "page api chat chats dom fleet markdown marked requests"),
    ],
)
async def test_page_files_need_no_key_and_come_from_the_gateway_alone(
    http: httpx.AsyncClient, path: str, scripts: str
) -> None:
    files = await files_of(http, path)
    html = files.pop(path)
    assert (html.status_code, html.headers["content-type"]) == (200, "text/html; charset=utf-8")
    policy = html.headers["content-security-policy"]
    assert "default-src 'none'; script-src 'self'; style-src 'self';" in policy
    assert not re.search(r"<script(?! (type=\"module\" )?src=)|<style|\son\w+=|style=", html.text)
    assert {*files} == {"/page/page.css", *(f"/page/{name}.js" for name in scripts.split())}
    for name, answer in files.items():
        assert (answer.status_code, answer.headers["x-content-type-options"]) == (200, "nosniff")
        if name == "/page/marked.js":
            assert answer.text.startswith("/**\n * marked v18.2.1 - a markdown parser\n")
            continue
        assert not re.search(r"https?://(?!www\.w3\.org)", html.text + answer.text), "nothing from elsewhere"
        markup = r"innerHTML|outerHTML|insertAdjacentHTML|DOMParser|parseFromString|createContextualFragment"
        assert not re.search(rf"{markup}|document\.write|eval\(|new Function|setAttribute", answer.text)
    for name in ("/page/../app.py", "/page/app.py", "/page/LICENSE", "/page/marked/marked.js"):
        assert (await http.get(name)).status_code == 404


async def test_a_tenant_sees_its_own_requests_and_the_operator_all(http: httpx.AsyncClient) -> None:
    mine, theirs = await ask(http, "one"), await ask(http, "two")
    acme, bob, operator = [await seen(http, name) for name in ("one", "two", "three")]
    assert mine in acme
    assert theirs not in acme
    assert set(bob) == {theirs}
    assert {mine, theirs} <= set(operator)
    line = acme[mine]
    assert (line["tenant"], line["status"], line["completion_tokens"]) == ("acme", 200, 3)
    assert "body" not in line
    trace = await http.get(f"/requests/{mine}", headers=key("one"))
    assert trace.json()["spans"][0]["attributes"]["request.id"] == mine
    assert (await http.get(f"/requests/{theirs}", headers=key("three"))).status_code == 200
    for path in (f"/requests/{theirs}", "/requests/none"):
        refused = await http.get(path, headers=key("one"))
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "not_found")


async def test_a_request_that_runs_is_in_the_list_of_its_tenant(http: httpx.AsyncClient) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "stream": True}
    body |= {"max_tokens": 4_000, "ignore_eos": True}
    async with http.stream("POST", "/v1/chat/completions", json=body, headers=key("one")) as answer:
        chunk = await anext(answer.aiter_lines())
        wanted = str(json.loads(chunk.removeprefix("data: "))["id"])
        line = (await seen(http, "one"))[wanted]
        assert (line["running"], line["tenant"], line["status"]) == (True, "acme", 200)
        assert 0 < line["first_chunk_ms"] <= line["duration_ms"]
        assert wanted in await seen(http, "three")
        assert wanted not in await seen(http, "two")
    gone = await ended(http, "one", wanted)
    assert (gone["error"], gone["message"]) == ("cancelled", "the client went away")


@pytest.mark.parametrize(
    ("sent", "status", "sentence"),
    [
        (b'{"messages": 1}', 400, "`messages`: Input should be a valid list"),
        (b"{", 400, "JSON"),
        (b"[]", 422, "object"),
        (b'{"model": "other", "messages": []}', 404, "no service serves model 'other'"),
    ],
)
async def test_a_refused_request_is_in_the_list_with_its_sentence(
    http: httpx.AsyncClient, sent: bytes, status: int, sentence: str
) -> None:
    headers = {**key("one"), "content-type": "application/json"}
    refused = await http.post("/v1/chat/completions", content=sent, headers=headers)
    reason = refused.json()["error"]["message"]
    line = await ended(http, "one", refused.headers["x-request-id"])
    assert sentence in reason
    assert (line["status"], line["message"]) == (status, reason)
    assert line["message"] not in {each.get("message") for each in (await seen(http, "two")).values()}


async def test_a_request_without_a_key_is_in_no_list(http: httpx.AsyncClient) -> None:
    before = await seen(http, "three")
    assert (await http.post("/v1/chat/completions", json={"messages": []})).status_code == 401
    assert (await http.get("/v1/models", headers=key("one"))).status_code == 200
    assert await seen(http, "three") == before


async def test_page_data_need_the_key(http: httpx.AsyncClient) -> None:
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


async def test_page_shows_everything_without_keys(pipeline: Pipeline) -> None:
    url = await add_gateway(pipeline, "open")
    await healthy(pipeline, "open")
    async with httpx.AsyncClient(base_url=url, timeout=120) as http:
        asked = await ask(http, "any")
        assert asked in await seen(http, "any")
        assert len((await http.get("/fleet")).json()["services"]) >= 6
    await remove_gateway(pipeline, "open")
