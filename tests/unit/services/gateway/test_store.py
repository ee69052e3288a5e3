"""What a keeper has, as HTTP shows it: errors, and the attempts of frames."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import pytest

from services.gateway.exchange import Gone, NoKeeper, StoreAway
from services.gateway.store import Pause, Store, call_of
from shared.errors import (
    BadRequest,
    EngineError,
    HeadraceError,
    Overloaded,
    Unavailable,
    UnknownModel,
    UnknownRequest,
    error_body,
)
from shared.nats.interface import NoResponders
from shared.openai.call import drawn_at, read_call, timed_id

PATH = "/v1/responses"
DRAWN_S = 1_795_000_000
ID = timed_id("resp_", DRAWN_S)
CALL = read_call({"model": "m", "messages": [], "stream": True}, chat=True, request_id=ID)


class Keeper:
    """The client of a tenant, with a keeper that answers `answer`."""

    tenant = "acme"

    def __init__(self, answer: Any = None, frames: Sequence[Any] = ()) -> None:
        self.answer, self.frames = answer, frames
        self.asked: list[Any] = []

    async def request(self, subject: str, body: Any = None) -> Any:
        self.asked.append((subject, body))
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    async def state(self, request_id: str) -> Any:
        return await self.request(request_id)

    async def follow(self, request_id: str, *, quiet: bool) -> AsyncGenerator[Any]:
        for frame in self.frames:
            if isinstance(frame, Exception):
                raise frame
            yield frame


def store(*given: Any, **more: Any) -> Store:
    keeper: Any = Keeper(*given, **more)
    return Store(keeper)


def test_an_id_has_its_time() -> None:
    assert drawn_at(ID) == DRAWN_S
    for other in ("resp_", "r", ID + "0", ID.replace("resp_", ""), ID.upper()):
        assert drawn_at(other) is None


@pytest.mark.parametrize(
    ("answer", "age_s", "error"),
    [
        (UnknownModel("x"), 60, UnknownRequest),
        (UnknownRequest("x"), 86_500, Gone),
        (NoResponders("x"), 86_500, UnknownRequest),
        (Unavailable("JetStream is off"), 0, StoreAway),
        ({"status": "queued"}, 0, UnknownRequest),  # sent over NATS
        ({"status": "queued", "keep": {"path": "/v1/completions"}}, 0, UnknownRequest),
    ],
)
async def test_missing_request_is_an_error(answer: Any, age_s: int, error: type[HeadraceError]) -> None:
    with pytest.raises(error):
        await store(answer).state(ID, PATH, DRAWN_S + age_s)


async def test_an_id_of_another_form_is_never_too_old() -> None:
    with pytest.raises(UnknownRequest):
        await store(UnknownModel("x")).state("mine", PATH, 2 * DRAWN_S)


@pytest.mark.parametrize(
    ("answer", "error"),
    [(NoResponders("x"), NoKeeper), (Unavailable("full"), StoreAway), (Overloaded("x"), Overloaded)],
)
async def test_submit_raises_its_errors(answer: HeadraceError, error: type[HeadraceError]) -> None:
    with pytest.raises(error):
        await store(answer).submit(CALL)


async def test_a_stored_request_is_no_stream_and_has_what_its_answer_needs() -> None:
    keeper: Any = Keeper({"id": ID, "status": "queued"})
    await Store(keeper).submit(CALL)
    await Store(keeper).keep_response(CALL, {"choices": []}, Pause())
    (_, sent), (subject, kept) = keeper.asked
    assert "stream" not in sent
    assert sent["keep"] == {}
    assert subject == f"headrace.v1.keep.acme.{ID}"
    assert (kept["model"], kept["answer"], "stream" in kept["request"]) == ("m", {"choices": []}, False)


@pytest.mark.parametrize("error", [NoResponders("x"), Unavailable("x"), EngineError("x")])
async def test_a_response_that_cannot_be_kept_is_answered(error: HeadraceError) -> None:
    await store(error).keep_response(CALL, {}, Pause())


async def test_a_store_that_does_not_answer_is_not_waited_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for a gateway whose credentials are older than the verb: the server drops its request."""
    monkeypatch.setattr("services.gateway.store.KEEP_S", 0.01)
    asked, pause = list[str](), Pause()

    async def silent(subject: str, body: Any) -> None:
        asked.append(subject)
        await asyncio.Event().wait()

    keeper: Any = Keeper()
    monkeypatch.setattr(keeper, "request", silent)
    for _ in range(3):
        await Store(keeper).keep_response(CALL, {}, pause)
    assert len(asked) == 1
    pause.until_s = 0.0
    await Store(keeper).keep_response(CALL, {}, pause)
    assert len(asked) == 2


def accepted(native: int, run: int, created: int = DRAWN_S) -> dict[str, Any]:
    return {"type": "accepted", "attempt": native, "created": created, "run": run}


async def attempts(frames: Sequence[Any], after: tuple[int, int] = (0, -1)) -> list[int]:
    found = store(frames=frames).frames(ID, after)
    return [frame["attempt"] async for frame in found]


async def test_the_attempt_is_that_of_the_text() -> None:
    """Not of the detokenizer, which counts anew after the loss of everything."""
    first, later = accepted(7, 1), accepted(1, 30)
    assert await attempts([first, {"type": "delta"}]) == [1, 1]
    assert await attempts([later]) == [30]
    assert await attempts([later], (30, 8)) == [30]
    assert await attempts([later], (1, 8)) == [30]  # the text of before is another one
    assert await attempts([later], (31, 8)) == [32]
    assert await attempts([first, accepted(8, 1), accepted(9, 40)]) == [1, 2, 40]
    at_once = {name: value for name, value in first.items() if name != "run"}
    assert await attempts([at_once]) == [1]  # a response that was kept, or of an earlier version


@pytest.mark.parametrize("off_s", [0, 2, -2, 600, -600, 172_800, -172_800])
@pytest.mark.parametrize("then_s", [0, 2, -2, 600, -600, 172_800, -172_800])
async def test_the_clock_of_a_tokenizer_decides_no_attempt(off_s: int, then_s: int) -> None:
    """That of the one which received the first run, and of the one which received the next, 30 s later."""
    first, second = accepted(1, 1, DRAWN_S + off_s), accepted(1, 65, DRAWN_S + 30 + then_s)
    assert await attempts([first]) == [1]
    assert await attempts([first], (1, 8)) == [1], "the reader goes on"
    assert await attempts([second], (1, 8)) == [65], "the reader would go on in another text"
    assert await attempts([second], (65, 8)) == [65]


async def test_a_request_without_an_answer_ends_its_stream() -> None:
    failed = {"status": "failed", **error_body(EngineError("it broke"))}
    found = store(failed, [accepted(1, DRAWN_S), EngineError("it broke")]).frames(ID, waits=True, fails=True)
    queued, _, last = [frame async for frame in found]
    assert queued == {"type": "queued"}
    assert (last["type"], last["status"], last["error"].message) == ("failed", "failed", "it broke")
    running = {"status": "running"}
    with pytest.raises(EngineError, match="cut"):
        _ = [f async for f in store(running, [EngineError("cut")]).frames(ID, fails=True)]
    with pytest.raises(EngineError, match="cut"):
        _ = [f async for f in store(NoResponders("x"), [EngineError("cut")]).frames(ID, fails=True)]


def test_the_call_of_a_stored_request() -> None:
    keep = {"path": "/v1/completions", "chat": False, "echo": True}
    state = {"id": "r", "model": "m", "keep": keep, "request": {"prompt": "x", "n": 2}}
    call = call_of(state)
    assert (call.chat, call.echo, call.n, call.request_id) == (False, True, 2, "r")
    assert call.keep == {**keep, "response": {}}
    with pytest.raises(BadRequest):
        call_of({**state, "request": {}})
    with pytest.raises(BadRequest, match="not from a gateway"):
        call_of({**state, "keep": {**keep, "response": 3}})
