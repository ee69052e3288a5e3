"""Responses and durable requests over HTTP, with the unmodified client, on a fleet with a keeper."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI
from support.running_up import StartUp, Up, running_up, wait_until_gone

from loadtest import faults
from services.gateway.store import KEPT_S
from services.keeper import core
from services.launcher.commands import auth
from services.launcher.commands.auth import Plan

MODEL = "smollm2-135m-instruct"
MORE: Any = {"extra_body": {"seed": 5, "ignore_eos": True}}
ASKED: Any = {"model": MODEL, "input": "What is NATS?", "max_output_tokens": 100, **MORE}
CHAT: Any = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "What is NATS?"}],
    "max_tokens": 60,
    "seed": 5,
    "ignore_eos": True,
}
LATER = {"Prefer": "respond-async"}
EVENTS = {"Accept": "text/event-stream"}
LIMIT_S = 180  # a guard against hanging


def keeping(up: Up, key: str = "any") -> Up:
    """The fleet, once its keeper is there: it starts after the model answers."""
    until, head = time.monotonic() + LIMIT_S, {"Authorization": f"Bearer {key}"}
    while "of yours" not in httpx.get(f"{up.http_url}/responses/x", headers=head).text:
        assert time.monotonic() < until
        time.sleep(0.05)
    return up


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    with running_up(
        tmp_path_factory.mktemp("responses"), "--durable", HEADRACE_HTTP="127.0.0.1:0",
        HEADRACE_SIM="step=5000",
    ) as running:  # fmt: skip
        yield keeping(running)


@pytest.fixture
def client(up: Up) -> Iterator[OpenAI]:
    with OpenAI(base_url=up.http_url, api_key="any", max_retries=0, timeout=LIMIT_S) as client:
        yield client


@pytest.fixture
def http(up: Up) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=up.http_url.removesuffix("/v1"), timeout=LIMIT_S) as client:
        yield client


def ended(client: OpenAI, response: Any) -> Any:
    """The response at its end."""
    until = time.monotonic() + LIMIT_S
    while response.status in ("queued", "in_progress"):
        assert time.monotonic() < until
        time.sleep(0.05)
        response = client.responses.retrieve(response.id)
    return response


def text_of(events: list[Any]) -> str:
    return "".join(e.delta for e in events if e.type == "response.output_text.delta")


def test_a_response_is_kept_and_continued(client: OpenAI) -> None:
    first = client.responses.create(**ASKED, metadata={"a": "b"}, instructions="Be brief.")
    again = client.responses.retrieve(first.id)
    assert again.to_dict() == first.to_dict()
    chain = {**ASKED, "max_output_tokens": 5}
    second = client.responses.create(**{**chain, "input": "And?", "previous_response_id": first.id})
    assert second.previous_response_id == first.id
    third = client.responses.create(**{**chain, "input": "And?", "previous_response_id": second.id})
    chat: Any = [
        {"role": "user", "content": "What is NATS?"},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "And?"},
        {"role": "assistant", "content": second.output_text},
        {"role": "user", "content": "And?"},
    ]
    whole = client.responses.create(**{**chain, "input": chat})
    assert third.output_text == whole.output_text
    assert third.usage
    assert whole.usage
    assert third.usage.input_tokens == whole.usage.input_tokens
    events = list(client.responses.create(**ASKED, stream=True))
    streamed = events[-1].response  # type: ignore[union-attr]  # the last one has it
    assert client.responses.retrieve(streamed.id).output_text == streamed.output_text
    rest = list(client.responses.retrieve(streamed.id, stream=True, starting_after=events[6].sequence_number))
    assert text_of(events[:7] + rest) == streamed.output_text
    off = client.responses.create(**chain, store=False)
    with pytest.raises(openai.NotFoundError, match="there is no resp_"):
        client.responses.retrieve(off.id)
    with pytest.raises(openai.NotFoundError) as caught:
        client.responses.create(**chain, previous_response_id=off.id)
    assert caught.value.param == "previous_response_id"


def test_background_response_gives_the_plain_answer(client: OpenAI) -> None:
    plain = client.responses.create(**ASKED)
    response = client.responses.create(**ASKED, background=True, metadata={"a": "b"})
    assert (response.status, response.background, response.output) == ("queued", True, [])
    got = ended(client, response)
    assert (got.status, got.output_text) == ("incomplete", plain.output_text)  # by max_output_tokens
    assert (got.metadata, got.usage.output_tokens) == ({"a": "b"}, 100)
    with pytest.raises(openai.BadRequestError) as wrong:
        client.responses.create(**{**ASKED, "extra_body": {"stop": [""]}}, background=True)
    assert wrong.value.param == "stop"
    with pytest.raises(openai.NotFoundError):
        client.responses.create(**{**ASKED, "model": "gpt-9"}, background=True)


def test_a_stream_is_taken_up_by_number_again_and_again(client: OpenAI) -> None:
    plain = client.responses.create(**{**ASKED, "max_output_tokens": 240})
    asked = {**ASKED, "max_output_tokens": 240, "background": True}
    with client.responses.create(**asked, stream=True) as stream:
        had = [event for event, _ in zip(stream, range(12), strict=False)]
    assert [e.type.removeprefix("response.") for e in had[:3]] == ["created", "queued", "in_progress"]
    response_id = had[0].response.id  # type: ignore[union-attr]
    while had[-1].type != "response.incomplete":
        client.responses.retrieve(response_id, stream=True, starting_after=had[-1].sequence_number).close()
        with client.responses.retrieve(
            response_id, stream=True, starting_after=had[-1].sequence_number
        ) as stream:
            had += [event for event, _ in zip(stream, range(60), strict=False)]
    numbers = [event.sequence_number for event in had]
    assert numbers == sorted({*numbers})
    assert text_of(had) == had[-1].response.output_text == plain.output_text
    assert list(client.responses.retrieve(response_id, stream=True, starting_after=numbers[-1])) == []
    helper = client.responses.stream(response_id=response_id)
    with helper as whole:
        assert text_of(list(whole)) == plain.output_text


def sse(text: str) -> list[dict[str, str]]:
    """The events that have an id."""
    found = [dict(line.split(": ", 1) for line in e.splitlines() if ": " in line) for e in text.split("\n\n")]
    return [event for event in found if "id" in event]


def read_some(http: httpx.Client, url: str, last: str, most: int) -> list[dict[str, str]]:
    """Up to `most` events after `last`, as an EventSource reads that loses its connection."""
    headers, text = {**EVENTS, **({"Last-Event-ID": last} if last else {})}, ""
    with http.stream("GET", url, headers=headers) as response:
        if response.status_code == 204:
            return []
        assert response.status_code == 200, response.read()
        for piece in response.iter_text():
            text += piece
            if text.count("\n\n") > most:
                break
    return sse(text.rpartition("\n\n")[0])[:most]


@pytest.mark.parametrize("api", ["responses", "chat/completions"])
def test_an_event_source_goes_on_by_its_last_id(http: httpx.Client, api: str) -> None:
    """Also twice in a row, the second time before any event came; at the end it is not to come again."""
    if api == "responses":
        asked = {"input": "What is NATS?", "background": True, "max_output_tokens": 200, **MORE["extra_body"]}
        url = f"/v1/responses/{http.post('/v1/responses', json=asked).json()['id']}"
    else:
        posted = http.post("/v1/chat/completions", json={**CHAT, "max_tokens": 200}, headers=LATER)
        url = posted.headers["location"]
    had: list[dict[str, str]] = []
    while new := read_some(http, url, had[-1]["id"] if had else "", 25):
        had += new
        with http.stream("GET", url, headers={**EVENTS, "Last-Event-ID": had[-1]["id"]}):
            pass  # cut off before the first event
    ids = [event["id"] for event in had]
    assert len({*ids}) == len(ids)
    whole = sse(http.get(url, headers=EVENTS).text)
    assert whole[-1]["id"] == ids[-1]

    def text(events: list[dict[str, str]]) -> str:
        found = ""
        for event in events:
            data = httpx.Response(200, text=event["data"]).json()
            if data.get("type") == "response.output_text.delta":
                found += data["delta"]
            for choice in data.get("choices", ()):
                found += choice["delta"].get("content") or ""
        return found

    assert text(had) == text(whole) != ""
    assert http.get(url, headers={**EVENTS, "Last-Event-ID": ids[-1]}).status_code == 204
    assert http.get(url, headers={**EVENTS, "Last-Event-ID": "x"}).status_code == 400


@pytest.mark.parametrize("background", [False, True])
def test_a_stream_goes_on_when_a_detokenizer_dies(up: Up, client: OpenAI, background: bool) -> None:
    asked = {**ASKED, "max_output_tokens": 300}
    plain = client.responses.create(**asked)
    events = []
    with client.responses.stream(**asked, background=background) as stream:
        for number, event in enumerate(stream):
            events.append(event)
            if number == 30:
                os.kill(up.child("detokenizer"), signal.SIGKILL)
    assert text_of(events) == plain.output_text
    numbers = [event.sequence_number for event in events]
    assert numbers == sorted({*numbers})
    assert [e.type for e in events].count("response.created") == 1
    rest = client.responses.retrieve(events[0].response.id, stream=True, starting_after=numbers[20])  # type: ignore[union-attr]
    again = list(rest)
    if again[0].type != "response.created":
        again = [*events[:21], *again]
    assert text_of(again) == plain.output_text  # type: ignore[arg-type]


def test_a_running_response_is_cancelled(client: OpenAI) -> None:
    endless = {**ASKED, "max_output_tokens": 4000}
    response = client.responses.create(**endless, background=True)
    stream = client.responses.create(**endless, background=True, stream=True)
    events = iter(stream)
    other = next(e.response.id for e in events if e.type == "response.created")
    next(e for e in events if e.type == "response.output_text.delta")
    for name in (response.id, other):
        assert client.responses.cancel(name).status == "cancelled"
        assert client.responses.cancel(name).status == "cancelled"
        assert client.responses.retrieve(name).status == "cancelled"
    last = list(events)[-1]
    assert (last.type, last.response.status) == ("response.failed", "cancelled")  # type: ignore[union-attr]
    (*_, late) = client.responses.retrieve(other, stream=True)
    assert (late.type, late.response.status) == ("response.failed", "cancelled")  # type: ignore[union-attr]


def test_a_deleted_response_is_gone(client: OpenAI, http: httpx.Client) -> None:
    """One that was kept, and one that runs."""
    kept = client.responses.create(**{**ASKED, "max_output_tokens": 2})
    runs = client.responses.create(**{**ASKED, "max_output_tokens": 4000}, background=True)
    for response in (kept, runs):
        deleted = http.delete(f"/v1/responses/{response.id}")
        assert deleted.json() == {"id": response.id, "object": "response", "deleted": True}
        assert http.delete(f"/v1/responses/{response.id}").status_code == 404
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(response.id)
        with pytest.raises(openai.NotFoundError):
            client.responses.create(**ASKED, previous_response_id=response.id)


def test_missing_response_is_an_error(client: OpenAI, http: httpx.Client) -> None:
    assert KEPT_S == core.KEPT_S
    for name, status in (("resp_x", 404), ("resp_00000001" + "0" * 24, 410), ("a b", 404)):
        for call in (client.responses.retrieve, client.responses.cancel, client.responses.delete):
            with pytest.raises(openai.APIStatusError) as missing:
                call(name)
            assert missing.value.status_code == status
        assert http.get(f"/v1/chat/completions/{name}").status_code == status
    kept = client.responses.create(**{**ASKED, "max_output_tokens": 2})
    assert http.get(f"/v1/chat/completions/{kept.id}").status_code == 404
    assert http.get(f"/v1/responses/{kept.id}?stream=maybe").status_code == 400
    assert http.get(f"/v1/responses/{kept.id}?stream=true&starting_after=-1").status_code == 400
    assert http.put(f"/v1/responses/{kept.id}").status_code == 405


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_202_and_the_answer_later(http: httpx.Client, path: str) -> None:
    asked = dict(CHAT)
    if path == "/v1/completions":
        asked |= {"prompt": str(asked.pop("messages")), "echo": True}
    plain = http.post(path, json=asked).json()
    posted = http.post(path, json=asked, headers={"Prefer": "wait=1, respond-async"})
    assert posted.status_code == 202
    body, url = posted.json(), posted.headers["location"]
    assert (url, body["status"], body["object"]) == (f"{path}/{body['id']}", "queued", plain["object"])
    assert posted.headers["x-request-id"] == body["id"]
    assert posted.headers["preference-applied"] == "respond-async"
    until = time.monotonic() + LIMIT_S
    while (got := http.get(url)).status_code == 202:
        assert got.headers["retry-after"] == "1"
        assert time.monotonic() < until
        time.sleep(0.05)
    assert (got.status_code, got.json()["choices"]) == (200, plain["choices"])
    assert got.json()["usage"]["completion_tokens"] == plain["usage"]["completion_tokens"]
    streamed = http.get(url, headers=EVENTS)
    assert streamed.text.endswith("data: [DONE]\n\n")
    refused = http.post(path, json={**asked, "stream": True}, headers=LATER)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "stream")
    named = {**asked, "request_id": f"mine-{plain['object']}"}
    for _ in range(2):
        again = http.post(path, json=named, headers=LATER)
        assert (again.status_code, again.json()["id"]) == (202, named["request_id"])
    assert http.post(path, json={**named, "seed": 6}, headers=LATER).status_code == 409
    wrong = http.post(path, json={**asked, "temperature": 5}, headers=LATER)
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "temperature")


def test_an_error_has_its_status_later(http: httpx.Client) -> None:
    posted = http.post("/v1/chat/completions", json={**CHAT, "timeout_s": 0.001}, headers=LATER)
    url, until = posted.headers["location"], time.monotonic() + LIMIT_S
    while (got := http.get(url)).status_code == 202:
        assert time.monotonic() < until
        time.sleep(0.05)
    assert (got.status_code, got.json()["error"]["code"]) == (504, "timeout")
    assert http.get(url, headers=EVENTS).status_code == 504


def test_tenant_has_only_its_own_responses_under_credentials(start_up: StartUp, tmp_path: Path) -> None:
    users = tmp_path / "users"
    auth.generate(users, Plan("nats://nats:4222", "default", ("acme", "bob")), print)
    up = start_up("--durable", "--auth", str(users), HEADRACE_HTTP="127.0.0.1:0")
    keys = {name: (users / "tenants" / name / "api_key").read_text().strip() for name in ("acme", "bob")}
    acme, bob = [
        OpenAI(base_url=up.http_url, api_key=keys[name], max_retries=0, timeout=LIMIT_S) for name in keys
    ]
    keeping(up, keys["acme"])
    kept = acme.responses.create(**ASKED)
    background = acme.responses.create(**ASKED, background=True)
    assert ended(acme, background).output_text == kept.output_text
    again = list(acme.responses.retrieve(background.id, stream=True))
    assert text_of(again) == kept.output_text
    for name in (kept.id, background.id):
        assert acme.responses.retrieve(name).id == name
        for call in (bob.responses.retrieve, bob.responses.cancel):
            with pytest.raises(openai.NotFoundError):
                call(name)
        with pytest.raises(openai.NotFoundError):
            bob.responses.retrieve(name, stream=True)
        with pytest.raises(openai.NotFoundError):
            bob.responses.create(**ASKED, previous_response_id=name)
    assert "ermissions" not in up.log.read_text()


def test_a_stream_starts_over_after_the_loss_of_every_process(start_up: StartUp, tmp_path: Path) -> None:
    """The text is computed again: a reader that comes back has all of it, under a higher attempt."""
    state = {"XDG_STATE_HOME": str(tmp_path), "HEADRACE_HTTP": "127.0.0.1:0", "HEADRACE_SIM": "step=10000"}
    first = keeping(start_up("--durable", **state))
    asked: Any = {**ASKED, "max_output_tokens": 300, "background": True}
    with OpenAI(base_url=first.http_url, api_key="any", max_retries=0, timeout=LIMIT_S) as client:
        stream = client.responses.create(**asked, stream=True)
        had = [event for event, _ in zip(stream, range(20), strict=False)]
        pids = first.children()
        faults.kill_all(first.process.pid)
        first.process.wait()
        wait_until_gone(pids)
    response_id, last = had[0].response.id, had[-1].sequence_number  # type: ignore[union-attr]
    second = keeping(start_up("--durable", **state))
    with OpenAI(base_url=second.http_url, api_key="any", max_retries=0, timeout=LIMIT_S) as client:
        events = list(client.responses.retrieve(response_id, stream=True, starting_after=last))
        plain = client.responses.create(**{**asked, "background": False})
        stored = client.responses.retrieve(response_id)
    assert events[0].type == "response.created"
    assert last < events[0].sequence_number
    assert events[0].sequence_number >> 32 > 0
    assert text_of(events) == stored.output_text == plain.output_text
    assert plain.output_text.startswith(text_of(had))


def test_responses_work_and_are_not_kept_without_a_keeper(tmp_path: Path) -> None:
    with (
        running_up(tmp_path, HEADRACE_HTTP="127.0.0.1:0") as up,
        OpenAI(base_url=up.http_url, api_key="any", max_retries=0, timeout=LIMIT_S) as client,
    ):
        response = client.responses.create(**ASKED)
        assert list(client.responses.create(**ASKED, stream=True))[-1].type == "response.incomplete"
        with pytest.raises(openai.NotFoundError, match="no keeper runs, so nothing is kept"):
            client.responses.retrieve(response.id)
        with pytest.raises(openai.NotFoundError, match="no keeper runs"):
            client.responses.create(**ASKED, previous_response_id=response.id)
        with pytest.raises(openai.InternalServerError, match="no keeper runs") as away:
            client.responses.create(**ASKED, background=True)
        assert away.value.status_code == 503
        health = httpx.get(up.http_url.replace("/v1", "/health"))
        assert health.status_code == 200
