"""`Client.follow` against scripted services, over both buses: what a reader gets, and what it asks for."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from hashlib import sha256
from typing import Any

import pytest

from shared.client import client as client_module
from shared.client import follow
from shared.client.client import Client
from shared.errors import (
    BadRequest,
    EngineError,
    HeadraceError,
    Moved,
    Overloaded,
    Unavailable,
    UnknownRequest,
)
from shared.nats import subjects
from shared.nats.interface import Bus, Delivery
from shared.replies import end_headers, error_reply

Connect = Callable[[], Awaitable[Bus]]
Body = dict[str, Any]


def accepted(attempt: int = 1) -> Body:
    return {"type": "accepted", "attempt": attempt, "frame": 0}


def delta(frame: int, at: int, text: str, attempt: int = 1) -> Body:
    choice = {"index": 0, "first": 0, "count": 1, "at": at, "text": text, "finish_reason": None}
    return {"type": "delta", "attempt": attempt, "frame": frame, "choices": [choice]}


def done(frame: int, attempt: int = 1) -> Body:
    return {"type": "done", "attempt": attempt, "frame": frame, "choices": []}


def refusal(error: HeadraceError) -> Body:
    body: Body = json.loads(error_reply(error, "", ""))
    return body


def failed(frame: int, error: HeadraceError, attempt: int = 1) -> Body:
    return {**refusal(error), "attempt": attempt, "frame": frame}


class Fleet:
    """A keeper, if `states` are given, and detokenizers. Each attach gets the next frames of the script."""

    def __init__(self, bus: Bus, tenant: str) -> None:
        self.bus, self.tenant = bus, tenant
        self.script: list[list[Body]] = []
        self.states: list[Body] = []  # the last one stays
        self.asked: list[Body] = []
        self.inboxes: list[str] = []
        self.left: asyncio.Queue[str] = asyncio.Queue()
        self.cancelled: list[str] = []

    async def listen(self, *, keeper: bool) -> None:
        await self.bus.subscribe(subjects.attach(self.tenant, "r"), self._on_attach)
        await self.bus.subscribe(
            subjects.cancel(self.tenant, "r"), lambda d: self.cancelled.append(d.subject)
        )
        if keeper:
            await self.bus.subscribe(subjects.result(self.tenant, "r"), self._on_result)
        await self.bus.flush()

    def _on_attach(self, delivery: Delivery) -> None:
        body = json.loads(delivery.data)
        if body.get("leave"):
            self.left.put_nowait(delivery.reply)
            return
        self.asked.append(body)
        self.inboxes.append(delivery.reply)
        if self.script:
            self.send(delivery.reply, self.script.pop(0), f"_R.d.{len(self.inboxes)}")

    def send(self, inbox: str, frames: list[Body], sender: str) -> None:
        for frame in frames:
            ended = end_headers() if frame["type"] in ("done", "error") else None
            self.bus.publish(inbox, json.dumps(frame).encode(), reply=sender, headers=ended)

    def _on_result(self, delivery: Delivery) -> None:
        state = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        self.bus.publish(delivery.reply, json.dumps(state).encode())


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silences end in no time."""
    monkeypatch.setattr(client_module, "SILENCE_S", 0.05)
    monkeypatch.setattr(follow, "UNKNOWN_S", 0.05)
    monkeypatch.setattr(follow, "NO_KEEPER_S", 0.05)
    monkeypatch.setattr(follow, "RESUME_S", 0.1)


@pytest.fixture
async def fleet(connect: Connect, fleet: str) -> AsyncIterator[Fleet]:
    scripted = Fleet(await connect(), fleet)
    await scripted.listen(keeper=False)
    yield scripted
    assert scripted.cancelled == [], "a reader is no owner"


@pytest.fixture
async def durable(connect: Connect, fleet: Fleet) -> Fleet:
    await fleet.bus.subscribe(subjects.result(fleet.tenant, "r"), fleet._on_result)
    await fleet.bus.flush()
    return fleet


@pytest.fixture
async def client(connect: Connect, fleet: Fleet) -> Client:
    return await Client.open(await connect(), fleet.tenant)


def state(status: str, **more: Any) -> Body:
    return {"id": "r", "status": status, **more}


def record(*texts: str, **more: Any) -> Body:
    choices = [
        {"index": i, "text": text, "logprobs": None, "finish_reason": "stop"} for i, text in enumerate(texts)
    ]
    usage = {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
    answer = {
        "id": "r",
        "created": 5,
        "model": "m",
        "choices": choices,
        "usage": usage,
        "timings": {},
        **more,
    }
    return state("completed", answer=answer)


async def read(client: Client, start: dict[int, str] | None = None) -> list[tuple[Any, ...]]:
    """Type, attempt, number of each frame, with place and text of a delta."""
    got: list[tuple[Any, ...]] = []
    async for frame in client.follow("r", start):
        found: tuple[Any, ...] = (frame["type"], frame["attempt"], frame["frame"])
        for choice in frame["choices"] if frame["type"] == "delta" else ():
            found = (*found, choice["at"], choice["text"])
        got.append(found)
    return got


def has(text: str, attempt: int = 1) -> Body:
    digest = sha256(text.encode()).hexdigest()[:16]
    return {"choices": {"0": {"chars": len(text), "hash": digest}}, "attempt": attempt}


NOTHING: Body = {"choices": {}, "attempt": 0}
WHOLE = [("accepted", 1, 0), ("delta", 1, 1, 0, "ri"), ("delta", 1, 2, 2, "vér"), ("done", 1, 3)]


async def test_a_running_request_is_read_to_its_end(client: Client, fleet: Fleet) -> None:
    fleet.script = [[accepted(), delta(1, 0, "ri"), delta(2, 2, "vér"), done(3)]]
    assert await read(client) == WHOLE
    assert fleet.asked == [NOTHING]
    assert (client.waiting, fleet.left.empty()) == (0, True)


async def test_silence_makes_the_follower_attach_for_the_rest(client: Client, fleet: Fleet) -> None:
    fleet.script = [[accepted(), delta(1, 0, "ri")], [accepted(), delta(1, 2, "vér"), done(2)]]
    assert await read(client) == WHOLE
    assert fleet.asked == [NOTHING, has("ri")]


async def test_missing_frame_makes_the_follower_attach_for_the_rest(client: Client, fleet: Fleet) -> None:
    fleet.script = [
        [accepted(), delta(1, 0, "ri"), delta(3, 3, "r"), done(4)],
        [accepted(), delta(1, 2, "vér"), done(2)],
    ]
    assert await read(client) == WHOLE
    assert fleet.asked == [NOTHING, has("ri")]


async def test_text_that_does_not_join_makes_the_follower_attach_again(client: Client, fleet: Fleet) -> None:
    fleet.script = [
        [accepted(), delta(1, 0, "ri"), delta(2, 3, "r")], [accepted(), delta(1, 2, "vér"), done(2)],
    ]  # fmt: skip
    assert await read(client) == WHOLE


async def test_a_text_that_starts_over_has_a_higher_attempt(client: Client, fleet: Fleet) -> None:
    fleet.script = [[accepted(), delta(1, 0, "ri")], [accepted(2), delta(1, 0, "rain", 2), done(2, 2)]]
    assert await read(client) == [*WHOLE[:2], ("accepted", 2, 0), ("delta", 2, 1, 0, "rain"), ("done", 2, 2)]


async def test_a_stream_that_starts_over_by_itself_is_followed(client: Client, fleet: Fleet) -> None:
    """As after an outage of the broker."""
    fleet.script = [
        [accepted(), delta(1, 0, "ri"), accepted(2), delta(1, 0, "rain", 2), done(2, 2)],
    ]  # fmt: skip
    assert await read(client) == [*WHOLE[:2], ("accepted", 2, 0), ("delta", 2, 1, 0, "rain"), ("done", 2, 2)]
    assert len(fleet.asked) == 1


async def test_a_reader_that_has_a_part_gets_the_rest(client: Client, fleet: Fleet) -> None:
    fleet.script = [[accepted(), delta(1, 2, "vér"), done(2)]]
    assert await read(client, {0: "ri"}) == [("accepted", 1, 0), ("delta", 1, 1, 2, "vér"), ("done", 1, 2)]
    assert fleet.asked == [has("ri")]


async def test_a_reader_that_has_another_text_sees_it(client: Client, fleet: Fleet) -> None:
    fleet.script = [[accepted(2), delta(1, 0, "rain", 2), done(2, 2)]]
    assert await read(client, {0: "ri"}) == [("accepted", 2, 0), ("delta", 2, 1, 0, "rain"), ("done", 2, 2)]


async def test_frames_of_a_second_detokenizer_are_dropped(client: Client, fleet: Fleet) -> None:
    reader = asyncio.create_task(read(client))
    while not fleet.inboxes:
        await asyncio.sleep(0)
    inbox = fleet.inboxes[0]
    fleet.send(inbox, [accepted(), delta(1, 0, "ri")], "_R.a.1")
    fleet.send(inbox, [accepted(), delta(1, 0, "XX"), delta(2, 2, "XX"), done(3)], "_R.b.1")
    fleet.send(inbox, [failed(2, EngineError("of the other one"))], "_R.b.1")
    fleet.send(inbox, [delta(2, 2, "vér"), done(3)], "_R.a.1")
    assert await reader == WHOLE


async def test_another_reader_ends_this_one(client: Client, fleet: Fleet) -> None:
    fleet.script = [[accepted(), delta(1, 0, "ri"), failed(2, Moved("another reader"))]]
    with pytest.raises(Moved, match="another reader"):
        await read(client)
    assert len(fleet.asked) == 1


async def test_followers_own_next_attach_does_not_count_as_a_move(client: Client, fleet: Fleet) -> None:
    """The detokenizer reports `moved` in the inbox of the attach before."""
    frames = client.follow("r")
    fleet.script = [[accepted(), delta(1, 0, "ri")]]
    assert [(await anext(frames))["frame"] for _ in range(2)] == [0, 1]
    rest = asyncio.ensure_future(anext(frames))
    while len(fleet.inboxes) < 2:
        await asyncio.sleep(0)
    fleet.send(fleet.inboxes[0], [failed(2, Moved("another reader"))], "_R.d.1")
    fleet.send(fleet.inboxes[1], [accepted(), delta(1, 2, "vér"), done(2)], "_R.d.2")
    assert (await rest)["choices"][0]["text"] == "vér"
    assert [frame["type"] async for frame in frames] == ["done"]


async def test_the_error_of_the_request_is_raised(client: Client, fleet: Fleet) -> None:
    fleet.script = [[accepted(), failed(1, Overloaded("the queue is full"))]]
    with pytest.raises(Overloaded, match="the queue is full"):
        await read(client)
    assert fleet.left.empty(), "it has ended"


async def test_a_backlog_is_no_end(client: Client, fleet: Fleet) -> None:
    whole = [accepted(), delta(1, 0, "ri"), delta(2, 2, "vér"), done(3)]
    fleet.script = [[refusal(Overloaded("a backlog"))], [refusal(Overloaded("a backlog"))], whole]
    assert await read(client) == WHOLE


async def test_a_refused_attach_is_an_error(client: Client, fleet: Fleet) -> None:
    fleet.script = [[refusal(BadRequest("no such form"))]]
    with pytest.raises(BadRequest):
        await read(client)


async def test_a_reader_that_leaves_reports_it(client: Client, fleet: Fleet) -> None:
    fleet.script = [[accepted(), delta(1, 0, "ri")]]
    frames = client.follow("r")
    await anext(frames)
    await frames.aclose()
    assert await asyncio.wait_for(fleet.left.get(), 5) == fleet.inboxes[0]
    assert client.waiting == 0


async def test_a_slow_reader_gets_the_rest_at_once(
    client: Client, fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet.script = [[accepted(), delta(1, 0, "ri")], [accepted(), delta(1, 2, "vér"), done(2)]]
    frames = client.follow("r")
    got = [await anext(frames) for _ in range(2)]
    monkeypatch.setattr(client_module, "MAX_UNREAD_BYTES", 10)
    fleet.send(fleet.inboxes[0], [delta(2, 2, "v"), delta(3, 3, "é"), delta(4, 4, "r")], "_R.d.1")
    await fleet.bus.flush()
    await client.bus.flush()
    monkeypatch.undo()
    got += [frame async for frame in frames]
    assert [(frame["type"], frame["frame"]) for frame in got] == [
        ("accepted", 0), ("delta", 1), ("delta", 2), ("done", 3),
    ]  # fmt: skip
    assert fleet.asked == [NOTHING, has("ri")]


async def test_an_unknown_request_is_an_error(client: Client, fleet: Fleet) -> None:
    with pytest.raises(UnknownRequest, match="no request 'r' of this tenant is known"):
        await read(client)
    assert len(fleet.asked) >= follow.FEW_TRIES
    assert client.waiting == 0


async def test_an_unknown_durable_request_is_an_error(client: Client, durable: Fleet) -> None:
    durable.states = [refusal(UnknownRequest("no durable request"))]
    with pytest.raises(UnknownRequest, match="no record of it is kept"):
        await read(client)


async def test_a_keeper_without_a_store_is_the_reason(client: Client, durable: Fleet) -> None:
    durable.states = [refusal(Unavailable("has no JetStream"))]
    with pytest.raises(Unavailable, match="has no JetStream"):
        await read(client)


async def test_a_request_that_waits_is_waited_for(client: Client, durable: Fleet) -> None:
    durable.states = [state("queued")] * 12 + [record("rivér")]
    assert await read(client) == [("accepted", 1, 0), ("delta", 1, 1, 0, "rivér"), ("done", 1, 2)]
    assert durable.asked == [NOTHING] * 12


async def test_an_end_that_was_missed_is_in_the_record(client: Client, durable: Fleet) -> None:
    durable.script = [[accepted(), delta(1, 0, "ri")]]
    durable.states = [state("running"), state("running"), record("rivér")]
    assert await read(client) == WHOLE


async def test_a_record_of_another_text_starts_over(client: Client, durable: Fleet) -> None:
    durable.script = [[accepted(), delta(1, 0, "ri")]]
    durable.states = [state("running"), record("rain")]
    assert await read(client) == [*WHOLE[:2], ("accepted", 2, 0), ("delta", 2, 1, 0, "rain"), ("done", 2, 2)]


@pytest.mark.parametrize("start", [{0: "rivér and more"}, {0: "ra"}, {1: "x"}])
async def test_a_record_that_does_not_fit_the_start(
    client: Client, durable: Fleet, start: dict[int, str]
) -> None:
    durable.states = [record("rivér")]
    assert await read(client, start) == [("accepted", 2, 0), ("delta", 2, 1, 0, "rivér"), ("done", 2, 2)]


async def test_the_frames_of_a_record(client: Client, durable: Fleet) -> None:
    durable.states = [record("rivér", "mill")]
    first, text, last = [frame async for frame in client.follow("r", {0: "ri", 1: "mill"})]
    assert first == {
        "type": "accepted", "request_id": "r", "attempt": 1, "frame": 0, "model": "m", "created": 5,
        "prompt_tokens": 3,
    }  # fmt: skip
    assert text["choices"] == [{"index": 0, "at": 2, "text": "vér", "finish_reason": None}]
    assert last == {
        "type": "done", "request_id": "r", "attempt": 1, "frame": 2, "model": "m", "created": 5,
        "choices": [{"index": 0, "finish_reason": "stop"}, {"index": 1, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}, "timings": {},
    }  # fmt: skip


async def test_a_record_of_a_chat_has_its_shape(client: Client, durable: Fleet) -> None:
    scores = {"content": [{"token": "a", "logprob": -1.0}]}
    message = {"role": "assistant", "content": "river"}
    choice = {"index": 0, "message": message, "logprobs": scores, "finish_reason": "length"}
    durable.states = [record(choices=[choice], answer_format="hermes")]
    first, text, last = [frame async for frame in client.follow("r")]
    assert first["answer_format"] == "hermes"
    assert text["choices"] == [
        {"index": 0, "first": 0, "count": 4, "at": 0, "delta": message, "logprobs": scores,
         "finish_reason": None}
    ]  # fmt: skip
    assert last["choices"] == [{"index": 0, "tokens": 4, "finish_reason": "length"}]


async def test_a_failed_record_is_its_error(client: Client, durable: Fleet) -> None:
    durable.states = [state("failed", **refusal(EngineError("the engine broke")))]
    with pytest.raises(EngineError, match="the engine broke"):
        await read(client)
    assert durable.asked == []
