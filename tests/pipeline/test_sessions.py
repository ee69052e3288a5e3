"""Hints and verbs of sessions over HTTP and NATS, through all services."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio
from support.memory_bus import MemoryBroker
from support.pipeline.five_actors import Pipeline
from support.pipeline.gateway_side import MODEL, add_gateway, healthy, remove_gateway

from services.scheduler.actor import SchedulerActor
from services.scheduler.state.requests import Request
from shared.nats import subjects
from shared.session_hints import name_of

LONG = "Read the file and count its lines. " * 40
CHAT: dict[str, Any] = {"model": MODEL, "max_tokens": 4, "messages": [{"role": "user", "content": LONG}]}
RESPONSE: dict[str, Any] = {"model": MODEL, "max_output_tokens": 4, "input": LONG}
TTL = "`ttl_s`: seconds over 0, to 86400, are expected"

pytestmark = pytest.mark.asyncio(loop_scope="module")
whole_file = pytest_asyncio.fixture(scope="module", loop_scope="module")
each_test = pytest_asyncio.fixture(loop_scope="module")


@whole_file
async def pipeline() -> AsyncIterator[Pipeline]:
    broker = MemoryBroker()

    async def connect() -> Any:
        return broker.connect()

    running = await Pipeline.start(connect, "sessions")
    yield running
    await running.stop()


@whole_file
async def url(pipeline: Pipeline, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[str]:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("acme key-acme\nbob key-bob\n")
    url = await add_gateway(pipeline, keys=keys)
    await healthy(pipeline)
    yield url
    await remove_gateway(pipeline)


class Tenant(httpx.AsyncClient):
    """A client with the key of a tenant, and what it sees."""

    async def chat(
        self, messages: list[Any] | None = None, headers: Any = None, **more: Any
    ) -> dict[str, Any]:
        body = {**CHAT, **({"messages": messages} if messages else {}), **more}
        answer = await self.post("/v1/chat/completions", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    async def names(self) -> set[str]:
        return {row["session"] for row in (await self.get("/v1/sessions")).json()["data"]}

    async def clear(self) -> None:
        for name in await self.names():
            await self.delete(f"/v1/sessions/{name}")


@each_test
async def acme(url: str) -> AsyncIterator[Tenant]:
    async with Tenant(base_url=url, headers={"Authorization": "Bearer key-acme"}, timeout=60) as client:
        yield client
        await client.clear()


@each_test
async def bob(url: str) -> AsyncIterator[Tenant]:
    async with Tenant(base_url=url, headers={"Authorization": "Bearer key-bob"}, timeout=60) as client:
        yield client
        await client.clear()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/completions", {"model": MODEL, "max_tokens": 4, "prompt": LONG}),
        ("/v1/responses", {**RESPONSE, "store": False}),
        ("/v1/messages", CHAT),
        (
            "/api/chat",
            {"model": MODEL, "messages": CHAT["messages"], "stream": False, "options": {"num_predict": 4}},
        ),
    ],
)
async def test_every_dialect_takes_the_session_of_a_header(
    acme: Tenant, path: str, body: dict[str, Any]
) -> None:
    given = {"X-Dynamo-Session-ID": "of a header"}
    assert (await acme.post(path, json=body, headers=given)).status_code == 200
    assert await acme.names() == {name_of("acme", "of a header")}
    if path != "/api/chat":
        assert (await acme.post(path, json={**body, "session_id": "of a body"})).status_code == 200
        assert await acme.names() == {name_of("acme", "of a header"), name_of("acme", "of a body")}


@pytest.mark.parametrize(
    ("body", "headers", "param"),
    [
        ('"nvext": []', {}, "nvext"),
        ('"nvext": {"agent_hints": {"osl": "many"}}', {}, "nvext.agent_hints.osl"),
        ('"nvext": {"agent_hints": {"priority": 1e400}}', {}, "nvext.agent_hints.priority"),
        ('"prompt_cache_retention": "1e12s"', {}, "prompt_cache_retention"),
        (f'"session_id": "{"i" * 257}"', {}, "session_id"),
        ('"session_id": "\\u0007"', {}, "session_id"),
        ('"session_id": "a", "parent_session_id": "a"', {}, "parent_session_id"),
        ('"session_id": "a"', {"X-Dynamo-Session-ID": "b"}, "session_id"),
        ('"n": 1', {"X-Dynamo-Session-ID": "i" * 257}, "X-Dynamo-Session-ID"),
        ('"n": 1', {"X-Dynamo-Session-ID": "a", "X-Dynamo-Parent-Session-ID": "a"}, "parent_session_id"),
    ],
)
async def test_a_damaged_hint_is_a_400_that_names_it_and_begins_nothing(
    acme: Tenant, pipeline: Pipeline, body: str, headers: dict[str, str], param: str
) -> None:
    text = json.dumps(CHAT)[:-1] + f", {body}}}"
    sent = {"Content-Type": "application/json", **headers}
    answer = await acme.post("/v1/chat/completions", content=text, headers=sent)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert error["message"].startswith(f"`{param}`: ")
    assert len(error["message"]) < 200
    assert await acme.names() == set()
    assert pipeline.status("scheduler")["requests"] == 0


async def test_a_damaged_header_of_an_agent_is_served_and_counted(acme: Tenant, pipeline: Pipeline) -> None:
    await acme.chat(headers={"X-Session-Id": "i" * 257})
    assert name_of("acme", "i" * 257) not in await acme.names()
    (hints,) = [
        point
        for point in pipeline.runtimes["gateway-1"].actor.metrics
        if point.name == "headrace.gateway.hints" and dict(point.attributes)["fate"] == "malformed"
    ]
    assert dict(hints.attributes)["name"] == "X-Session-Id"


async def test_prompts_that_extend_each_other_are_a_session_without_any_hint(acme: Tenant) -> None:
    messages, shares = [*CHAT["messages"]], []
    for turn in range(3):
        answer = await acme.chat(messages)
        usage = answer["usage"]
        shares.append(usage["prompt_tokens_details"]["cached_tokens"] / usage["prompt_tokens"])
        messages += [answer["choices"][0]["message"], {"role": "user", "content": f"And line {turn}?"}]
    (row,) = (await acme.get("/v1/sessions")).json()["data"]
    assert (row["state"], row["tokens"]) == ("idle", row["device"])
    assert min(shares[1:]) > 0.9
    again = (await acme.get(f"/v1/sessions/{row['session']}")).json()
    assert (again["session"], again["tokens"]) == (row["session"], row["tokens"])


async def test_verbs_may_be_repeated_and_end_with_a_404(acme: Tenant) -> None:
    await acme.chat(session_id="a/b c")
    path = "/v1/sessions/a%2Fb%20c"
    kept = [await acme.post(f"{path}/keep", json={"ttl_s": 600}) for _ in range(2)]
    assert [answer.status_code for answer in kept] == [200, 200]
    assert {answer.json()["id"] for answer in kept} == {"a/b c"}
    assert {answer.json()["will"] for answer in kept} == {"keep"}
    assert 599 < kept[1].json()["kept_s"] <= 600
    up = [(await acme.post(f"{path}/prefetch")).json() for _ in range(2)]
    assert {(answer["state"], answer["device"]) for answer in up} == {("idle", kept[0].json()["tokens"])}
    assert {answer["will"] for answer in up} == {"nothing"}, "its blocks are on the device already"
    assert all(answer["why"] for answer in up)
    released = (await acme.delete(path)).json()
    assert (released["will"], released["id"]) == ("release", "a/b c")
    for gone in (await acme.get(path), await acme.delete(path), await acme.post(f"{path}/prefetch")):
        assert (gone.status_code, gone.json()["error"]["param"]) == (404, "id")
        assert gone.json()["error"]["message"] == "there is no session 'a/b c' of yours now"


async def test_close_session_is_a_release_in_the_shape_of_sglang(acme: Tenant) -> None:
    await acme.chat(session_id="a")
    assert (await acme.post("/close_session", json={"session_id": "a"})).json()["will"] == "release"
    assert (await acme.post("/close_session", json={"session_id": "a"})).status_code == 404
    for wrong in ({}, {"session_id": 7}, {"session_id": "i" * 257}):
        refused = await acme.post("/close_session", json=wrong)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "session_id")


async def test_a_session_is_released_with_its_children(acme: Tenant) -> None:
    await acme.chat(session_id="top")
    await acme.chat(session_id="child", parent_session_id="top")
    await acme.chat(session_id="grandchild", parent_session_id="child", root_session_id="top")
    await acme.chat(session_id="other")
    assert (await acme.delete("/v1/sessions/top?tree=true")).status_code == 200
    assert await acme.names() == {name_of("acme", "other")}
    wrong = await acme.delete("/v1/sessions/other?tree=perhaps")
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "tree")


async def test_a_final_request_ends_its_session(acme: Tenant) -> None:
    await acme.chat(session_id="a")
    await acme.chat(headers={"X-Dynamo-Session-ID": "a", "X-Dynamo-Session-Final": "true"})
    assert await acme.names() == set()


@pytest.mark.parametrize("body", [{}, {"ttl_s": -1}, {"ttl_s": 1e12}, b'{"ttl_s": NaN}', b'{"ttl_s": 1e400}'])
async def test_a_time_that_is_none_keeps_nothing(acme: Tenant, body: Any) -> None:
    await acme.chat(session_id="a")
    content = body if isinstance(body, bytes) else json.dumps(body)
    given = {"Content-Type": "application/json"}
    answer = await acme.post("/v1/sessions/a/keep", content=content, headers=given)
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, TTL)
    assert "kept_s" not in (await acme.get("/v1/sessions/a")).json()


async def test_no_verb_reaches_the_session_of_another_tenant(acme: Tenant, bob: Tenant) -> None:
    await acme.chat(session_id="a")
    name = name_of("acme", "a")
    for path in ("/v1/sessions/a", f"/v1/sessions/{name}"):
        for answer in (
            await bob.get(path), await bob.delete(path), await bob.post(f"{path}/prefetch"),
            await bob.post(f"{path}/keep", json={"ttl_s": 60}),
        ):  # fmt: skip
            assert answer.status_code == 404
    assert (await bob.post("/close_session", json={"session_id": "a"})).status_code == 404
    assert await bob.names() == set()
    assert await acme.names() == {name}
    await bob.chat(session_id="a")
    assert await bob.names() == {name_of("bob", "a")}


def running(pipeline: Pipeline) -> list[Request]:
    (actor,) = [r.actor for r in pipeline.runtimes.values() if isinstance(r.actor, SchedulerActor)]
    return [*actor._core.state.requests.values()]


async def test_a_session_that_is_released_while_it_runs_ends_with_its_request(
    acme: Tenant, pipeline: Pipeline
) -> None:
    body = {**CHAT, "session_id": "a", "max_tokens": 600, "ignore_eos": True}
    stream = pipeline.client.as_tenant("acme").stream(body)
    frames = [await anext(stream), await anext(stream)]
    released = await acme.delete("/v1/sessions/a")
    assert (released.json()["state"], released.json()["will"]) == ("running", "release")
    assert len(running(pipeline)) == 1
    frames += [frame async for frame in stream]
    assert frames[-1]["usage"]["completion_tokens"] == 600
    await pipeline.until(lambda: not running(pipeline))
    assert (await acme.get("/v1/sessions/a")).status_code == 404


async def test_verbs_are_the_same_over_nats(acme: Tenant, pipeline: Pipeline) -> None:
    await acme.chat(session_id="a")
    client = pipeline.client.as_tenant("acme")
    state = await client.request(subjects.session("acme", "a"), {"do": "state"})
    assert (state["id"], state["session"], state["state"]) == ("a", name_of("acme", "a"), "idle")
    listed = await client.request(subjects.sessions("acme"))
    assert [row["session"] for row in listed["data"]] == [name_of("acme", "a")]
    every = await pipeline.client.request(subjects.SESSIONS)
    assert (every["fleet"], every["summary"]["idle"]) == ("sessions", 1)
    assert pipeline.status("scheduler")["sessions"] == 1
    unknown = await client.request(subjects.session("acme", "b"), {"do": "release"})
    assert unknown["state"] == "unknown"


async def test_each_of_many_verbs_has_one_answer_beside_a_stream(acme: Tenant, pipeline: Pipeline) -> None:
    client, verbs = pipeline.client.as_tenant("acme"), ({"do": "prefetch"}, {"do": "keep", "ttl_s": 60})
    await acme.chat(session_id="a")
    stream = client.stream({**CHAT, "max_tokens": 200, "ignore_eos": True, "request_id": "beside"})
    read = asyncio.ensure_future(_texts(stream))
    subject = subjects.session("acme", "a")
    answers = await asyncio.gather(*(client.request(subject, verbs[n % 2]) for n in range(400)))
    assert {answer["session"] for answer in answers} == {name_of("acme", "a")}
    assert len(answers) == 400
    assert sum(await read) == 200
    assert pipeline.status("scheduler")["sessions"] == 1


async def _texts(stream: AsyncIterator[dict[str, Any]]) -> list[int]:
    """The tokens of each frame."""
    return [frame["choices"][0]["count"] async for frame in stream if frame["type"] == "delta"]
