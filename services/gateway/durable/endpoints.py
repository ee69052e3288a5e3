"""The endpoints of durable requests. Each finds the keeper's state of its id, then answers from it.

POST with `background`, or `Prefer: respond-async`      the response `queued`, or 202 and `Location`
GET  /v1/responses/{id}, /v1/chat/completions/{id}      JSON, or a stream from the place of its reader on
POST /v1/responses/{id}/cancel                          the response
DELETE /v1/responses/{id}                               it is gone

The chunks of a durable chat or completion, with ids from which a reader goes on (`Last-Event-ID`). Pure.

    id: <attempt>.<number>[,<number>…]        the last number of each choice, in the order of the choices

The number of a chunk depends on the text of its choice alone: a chunk of text counts its characters and has
the number of the last one, any other chunk counts one. The usage counts as a chunk of the first choice.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, ClassVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from services.gateway.durable.store import COMPLETED, ENDED, Pause, Store, call_of
from services.gateway.errors import Gone
from services.gateway.exchange import ExchangeCounters, answer, exchange_of
from services.gateway.openai_response import EVENTS, PING, ChunkBuilder, Chunks, EventStream, changed
from services.gateway.responses.events import START, Place, ResponseEvents, place_of
from shared.api import REQUEST_ID
from shared.client.client import Client, error_of
from shared.clock import Clock
from shared.errors import BadRequest, UnknownRequest
from shared.openai.call import Body, Call, Kept
from shared.openai.responses import output
from shared.openai.responses.request import PATH
from shared.openai.whole_answer import answer as openai_answer

CHATS, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
PREFIXES = {CHATS: "chatcmpl_", COMPLETIONS: "cmpl_"}  # of the ids that the gateway draws
LATER = {"Retry-After": "1"}
_PREFERS = re.compile(r"(?:^|,)\s*respond-async\s*(?:;|,|$)", re.IGNORECASE)
_EVENT_ID = re.compile(r"([0-9]{1,7})\.([0-9]{1,10})")
_NUMBER = re.compile(r"[0-9]{1,16}")
_YES_OR_NO = {"true": True, "false": False}

Echo = Callable[[Call, Client], Awaitable[tuple[str, ...]]]


def prefers_async(request: Request) -> bool:
    """Whether the client wants its answer later (RFC 7240)."""
    return any(_PREFERS.search(value) for value in request.headers.getlist("prefer"))


@dataclass(frozen=True, slots=True)
class Durable:
    """The endpoints, with what they share with the others."""

    client_of: Callable[[Request], Awaitable[Client]]
    enter: Callable[[Request], None]
    echoed: Echo
    counters: ExchangeCounters
    clock: Clock
    pause: Pause
    ping_s: float

    def routes(self) -> list[Route]:
        """The paths with an id."""
        return [
            Route(f"{PATH}/{{id}}", self.response, methods=["GET", "DELETE"]),
            Route(f"{PATH}/{{id}}/cancel", self.cancel, methods=["POST"]),
            Route(f"{CHATS}/{{id}}", self.completion, methods=["GET"]),
            Route(f"{COMPLETIONS}/{{id}}", self.completion, methods=["GET"]),
        ]

    # ---- POST -----------------------------------------------------------------------------------

    async def later(self, call: Call, client: Client, path: str) -> Response:
        """Have a chat or a completion answered later."""
        if call.stream:
            raise BadRequest(
                "`stream: true` and `Prefer: respond-async` exclude each other: leave `stream` out, and GET "
                "the answer with `Accept: text/event-stream`",
                param="stream",
            )
        if len(call.bodies) > 1:
            raise BadRequest("`prompt`: with `Prefer: respond-async` one prompt is expected", param="prompt")
        keep = Kept({"path": path, "chat": call.chat, "echo": call.echo})
        stored = await Store(client).submit(call.keeping(keep))
        return _accepted(path, stored["id"], stored["status"], {"Preference-Applied": "respond-async"})

    async def background(self, call: Call, client: Client, request: Request) -> Response:
        """Have a response made in the background."""
        store, stored = Store(client), await Store(client).submit(call)
        call = call.of_model(stored.get("model", call.model))
        if call.stream:
            frames = store.frames(call.request_id, waits=True, fails=True)
            return self._stream(request, frames, ResponseEvents(call, stored=True))
        return answer(output.response(call, stored["status"]))

    async def continued(self, fields: Body, client: Client) -> Body:
        """The fields of a response with the conversation of `previous_response_id` before its own messages.
        Raises UnknownRequest, Gone, BadRequest."""
        repeated = fields["keep"]["response"]
        if (previous := repeated["previous_response_id"]) is None:
            return fields
        try:
            state = await Store(client).state(previous, PATH, self._now_s())
        except (UnknownRequest, Gone) as error:
            why = f"`previous_response_id`: {error.message}"
            raise type(error)(why, param="previous_response_id") from None
        if state["status"] != COMPLETED:
            why = f"`previous_response_id`: {previous} has no answer, its status is {state['status']}"
            raise BadRequest(why, param="previous_response_id")
        call, own = call_of(state), fields["messages"]
        before, said = call.bodies[0]["messages"], output.said(call, state["answer"])
        if call.keep["response"].get("instructions"):
            before = before[1:]
        system = 1 if repeated["instructions"] else 0
        return {**fields, "messages": [*own[:system], *before, said, *own[system:]]}

    def keeping(
        self, frames: AsyncGenerator[Body], events: ResponseEvents, call: Call, client: Client
    ) -> AsyncGenerator[Body]:
        """The frames of a plain stream, whose response is kept before its end is sent."""

        async def kept() -> AsyncGenerator[Body]:
            async with aclosing(frames) as each:
                async for frame in each:
                    if frame["type"] == "done":
                        await Store(client).keep(call, events.native(frame), self.pause)
                    yield frame

        return kept()

    # ---- GET ------------------------------------------------------------------------------------

    async def response(self, request: Request) -> Response:
        """`GET /v1/responses/{id}`, and `DELETE`."""
        if request.method == "DELETE":
            return await self._delete(request)
        store, state = await self._found(request, PATH)
        call, after = call_of(state), _place(request)
        streams = request.query_params.get("stream", "true" if _wants_events(request) else "false")
        if streams not in _YES_OR_NO:
            raise BadRequest("`stream`: true or false is expected", param="stream")
        if not _YES_OR_NO[streams]:
            return answer(output.of_state(call, state))
        frames = store.frames(call.request_id, after, waits=after == START, fails=True)
        return self._stream(request, frames, ResponseEvents(call, (), after, stored=True))

    async def _delete(self, request: Request) -> Response:
        name = _id(request)
        await Store(await self.client_of(request)).delete(name, PATH, self._now_s())
        return answer({"id": name, "object": "response", "deleted": True})

    async def cancel(self, request: Request) -> Response:
        """`POST /v1/responses/{id}/cancel`."""
        store = Store(await self.client_of(request))
        state = await store.cancel(_id(request), PATH, self._now_s())
        return answer(output.of_state(call_of(state), state))

    async def completion(self, request: Request) -> Response:
        """`GET /v1/chat/completions/{id}` and `GET /v1/completions/{id}`."""
        path = request.url.path.rpartition("/")[0]
        store, state = await self._found(request, path)
        call = call_of(state)
        echoed = await self.echoed(call, store.client) if call.echo else ()
        if _wants_events(request):
            last = read_last_id(request.headers.get("last-event-id", ""))
            frames = store.frames(call.request_id, (last.attempt, max(last.numbers, default=-1)))
            return self._stream(request, frames, NumberedChunks(call, echoed, last))
        if state["status"] not in ENDED:
            return _accepted(path, call.request_id, state["status"])
        if state["status"] != COMPLETED:
            raise error_of(state)
        return answer(openai_answer(call, [state["answer"]], echoed))

    # ---- internals ------------------------------------------------------------------------------

    async def _found(self, request: Request, path: str) -> tuple[Store, Body]:
        self.enter(request)
        store = Store(await self.client_of(request))
        return store, await store.state(_id(request), path, self._now_s())

    def _stream(self, request: Request, frames: AsyncGenerator[Body], chunks: Chunks) -> EventStream:
        return EventStream(frames, chunks, exchange_of(request), self.counters, self.clock, self.ping_s)

    def _now_s(self) -> float:
        return self.clock.wall_us() / 1e6


def _id(request: Request) -> str:
    """The id in the path. Raises UnknownRequest."""
    given = str(request.path_params["id"])
    if not re.fullmatch(REQUEST_ID, given):
        raise UnknownRequest(f"{given!r:.140} is no id of a request", param="id")
    return given


def _accepted(
    path: str, request_id: str, status: str, more: Mapping[str, str] = MappingProxyType({})
) -> Response:
    kind = "chat.completion" if path == CHATS else "text_completion"
    body: dict[str, Any] = {"id": request_id, "object": kind, "status": status}
    return answer(body, 202, {**LATER, **more, "Location": f"{path}/{request_id}"})


def _wants_events(request: Request) -> bool:
    return "text/event-stream" in request.headers.get("accept", "")


def _place(request: Request) -> Place:
    """What the reader of a response has: by `Last-Event-ID`, which a browser sends when it comes back to the
    same URL, else by `starting_after`. Raises BadRequest."""
    if last := request.headers.get("last-event-id", ""):
        if (found := _EVENT_ID.fullmatch(last)) is None:
            raise BadRequest(f"`Last-Event-ID`: an id of this stream is expected, not {last!r:.80}")
        return Place(int(found[1]), int(found[2]))
    given = request.query_params.get("starting_after")
    if given is None:
        return START
    if not _NUMBER.fullmatch(given):
        raise BadRequest(
            "`starting_after`: the `sequence_number` of an event is expected", param="starting_after"
        )
    return place_of(int(given))


_CHUNK_NUMBER = "(?:-1|[0-9]{1,12})"
_ID = re.compile(rf"([0-9]{{1,12}})\.({_CHUNK_NUMBER}(?:,{_CHUNK_NUMBER}){{0,127}})")
_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


@dataclass(frozen=True, slots=True)
class LastId:
    """The place that an id stands for: the attempt, and the number of each choice. None: the start."""

    attempt: int = 0
    numbers: tuple[int, ...] = ()

    def of(self, choice: int) -> int:
        """The number of a choice, -1 for none."""
        return self.numbers[choice] if choice < len(self.numbers) else -1


def read_last_id(text: str) -> LastId:
    """The place in a `Last-Event-ID`. Raises BadRequest."""
    if not text:
        return LastId()
    found = _ID.fullmatch(text)
    if found is None:
        raise BadRequest(f"`Last-Event-ID`: an id of this stream is expected, not {text!r:.80}")
    return LastId(int(found[1]), tuple(map(int, found[2].split(","))))


class NumberedChunks:
    """The chunks of one stream after a place."""

    media_type: ClassVar = EVENTS
    ping: ClassVar = PING

    def __init__(self, call: Call, echoed: Sequence[str] = (), last: LastId | None = None) -> None:
        self._chunks = ChunkBuilder(replace(call, include_usage=True), echoed)
        self._last = last or LastId()
        self._after = [-1] * call.n
        self._numbers = [-1] * call.n
        self._opening = 0 if call.chat else -1  # the number of a choice without text
        self._waiting: dict[int, Body] = {}  # log probabilities of a choice, without text so far
        self._attempt = 0

    def take(self, prompt: int, frame: Body) -> list[str]:
        """The chunks for a frame of the native stream. Raises EngineError."""
        if frame["type"] == "accepted":
            self._begin(int(frame["attempt"]))
        chunks = [json.loads(chunk) for chunk in self._chunks.take(prompt, frame)]
        return [event for chunk in chunks for event in self._numbered(chunk)]

    def write(self, chunks: Sequence[str]) -> bytes:
        """Chunks are whole."""
        return "".join(chunks).encode("utf-8", "replace")

    def end(self, error: Body | None) -> bytes:
        """`[DONE]`, or the error, without an id: a reader may come back."""
        return self._chunks.end(error)

    def _begin(self, attempt: int) -> None:
        if self._attempt and any(n < a for n, a in zip(self._numbers, self._after, strict=True)):
            raise changed()  # the reader has text that was not compared with the text which starts over
        first = not self._attempt
        self._attempt = attempt
        textless = max(self._last.numbers, default=-1) <= self._opening
        if first and (self._last.attempt == attempt or textless):
            self._after = [self._last.of(choice) for choice in range(len(self._after))]

    def _numbered(self, chunk: Body) -> Iterator[str]:
        choice = chunk["choices"][0]["index"] if chunk["choices"] else 0
        holder, name = _text_of(chunk)
        text = holder.get(name)
        if chunk["choices"] and (waiting := self._waiting.pop(choice, None)):
            chunk["choices"][0]["logprobs"] = _joined(waiting, chunk["choices"][0]["logprobs"])
        if text == "" and "role" not in holder:
            self._waiting[choice] = chunk["choices"][0]["logprobs"]
            return
        self._numbers[choice] += len(text) if text else 1
        wanted = self._numbers[choice] - self._after[choice]
        if wanted <= 0:
            return
        if text and wanted < len(text):
            for key in {name, "reasoning"} & holder.keys():
                holder[key] = text[-wanted:]
        place = ",".join(map(str, self._numbers))
        yield f"id: {self._attempt}.{place}\ndata: {_json(chunk)}\n\n"


def _joined(one: Body, other: Body | None) -> Body:
    """Log probabilities in a row: each field is a list, or null."""
    return {name: (one[name] or []) + ((other or {}).get(name) or []) for name in one}


def _text_of(chunk: Body) -> tuple[Body, str]:
    """Where the text of a chunk is: an object and a name in it, which it may lack."""
    if not chunk["choices"]:
        return {}, ""
    (choice,) = chunk["choices"]
    if choice["finish_reason"] is not None:
        return {}, ""
    if "text" in choice:
        return choice, "text"
    delta = choice["delta"]
    if calls := delta.get("tool_calls"):
        return ({}, "") if "id" in calls[0] else (calls[0]["function"], "arguments")
    return delta, "reasoning_content" if "reasoning_content" in delta else "content"
