"""Chats and completions that are answered later: POST with `Prefer: respond-async`, GET by id.

POST /v1/chat/completions, /v1/completions           202 and `Location`, without that preference as ever
GET  /v1/chat/completions/{id}, …                    JSON, or a stream from the place of its reader on

The chunks of such a chat or completion have ids from which a reader goes on (`Last-Event-ID`). Pure.

    id: <attempt>.<number>[,<number>…]        the last number of each choice, in the order of the choices

The number of a chunk depends on the text of its choice alone: a chunk of text counts its characters and has
the number of the last one, any other chunk counts one. The usage counts as a chunk of the first choice.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from services.gateway import openapi as doc
from services.gateway.endpoints import Endpoints
from services.gateway.exchange import answer
from services.gateway.openai_response import OPENAI, ChunkBuilder, Chunks, changed, to_text
from services.gateway.store import COMPLETED, ENDED, Store, call_of, found, may_send_events
from shared.client.client import Client, error_of
from shared.errors import BadRequest
from shared.openai.call import Body, Call, Kept
from shared.openai.call import answer as openai_answer

CHATS, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
PREFIXES = {CHATS: "chatcmpl_", COMPLETIONS: "cmpl_"}  # of the ids that the gateway draws
LATER = {"Retry-After": "1"}
_PREFERS = re.compile(r"(?:^|,)\s*respond-async\s*(?:;|,|$)", re.IGNORECASE)


def is_async(request: Request) -> bool:
    """Whether the client wants its answer later (RFC 7240)."""
    return any(_PREFERS.search(value) for value in request.headers.getlist("prefer"))


async def ask(endpoints: Endpoints, request: Request, *, chat: bool) -> Response:
    """A chat or a completion, now or later."""
    if not is_async(request):
        return await endpoints.generate(request, chat=chat)
    path = request.url.path
    fields, client = await endpoints.asked(request, OPENAI, PREFIXES[path])
    return await submitted(endpoints.call_of(request, fields, OPENAI, chat=chat), client, path)


async def completion(endpoints: Endpoints, request: Request) -> Response:
    """The answer, if it is there, or a stream."""
    path = request.url.path.rpartition("/")[0]
    store, state = await found(endpoints, request, path)
    call = call_of(state)
    echoed = await endpoints.echoed(call, store.client) if call.echo else ()
    if may_send_events(request):
        last = read_last_id(request.headers.get("last-event-id", ""))
        frames = store.frames(call.request_id, (last.attempt, max(last.numbers, default=-1)))
        return endpoints.stream(request, frames, NumberedChunks(call, echoed, last))
    if state["status"] not in ENDED:
        return _accepted(path, call.request_id, state["status"])
    if state["status"] != COMPLETED:
        raise error_of(state)
    return answer(openai_answer(call, [state["answer"]], echoed))


async def submitted(call: Call, client: Client, path: str) -> Response:
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


def _accepted(
    path: str, request_id: str, status: str, more: Mapping[str, str] = MappingProxyType({})
) -> Response:
    kind = "chat.completion" if path == CHATS else "text_completion"
    body: dict[str, Any] = {"id": request_id, "object": kind, "status": status}
    return answer(body, 202, {**LATER, **more, "Location": f"{path}/{request_id}"})


_CHUNK_NUMBER = "(?:-1|[0-9]{1,12})"
_ID = re.compile(rf"([0-9]{{1,12}})\.({_CHUNK_NUMBER}(?:,{_CHUNK_NUMBER}){{0,127}})")


@dataclass(frozen=True, slots=True)
class LastId:
    """The place that an id stands for: the attempt, and the number of each choice. None: the start."""

    attempt: int = 0
    numbers: tuple[int, ...] = ()

    def number_of(self, choice: int) -> int:
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


class NumberedChunks(Chunks):
    """The chunks of one stream after a place."""

    def __init__(self, call: Call, echoed: Sequence[str] = (), last: LastId | None = None) -> None:
        self._chunks = ChunkBuilder(replace(call, include_usage=True), echoed)
        self._last = last or LastId()
        self._after = [-1] * call.n
        self._numbers = [-1] * call.n
        self._opening = 0 if call.chat else -1  # the number of a choice without text
        self._waiting: dict[int, Body] = {}  # log probabilities of a choice, without text so far
        self._attempt = 0

    def convert(self, prompt: int, frame: Body) -> list[str]:
        """The chunks for a frame of the native stream. Raises EngineError."""
        if frame["type"] == "accepted":
            self._begin(int(frame["attempt"]))
        chunks = [json.loads(chunk) for chunk in self._chunks.convert(prompt, frame)]
        return [event for chunk in chunks for event in self._numbered(chunk)]

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
            self._after = [self._last.number_of(choice) for choice in range(len(self._after))]

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
        yield f"id: {self._attempt}.{place}\ndata: {to_text(chunk)}\n\n"


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


_PREFER: doc.Json = {
    "name": "Prefer",
    "in": "header",
    "schema": doc.TEXT,
    "description": "`respond-async`: answer 202 at once, and keep the request until it is answered; "
    "the body may then have `webhook`, a URL that gets a signed event at its end",
}


def _later(post: doc.Json) -> doc.Json:
    """A request that may be answered later."""
    responses = {**post["responses"], "202": doc.body_of("Accepted", "`Location` will have the answer")}
    return {**post, "parameters": [_PREFER], "responses": responses}


def build() -> doc.Part:
    """Chats and completions that are answered later."""
    chat = doc.stored("Chat", "the answer to a durable chat", failing=True)
    completed = doc.stored("Completion", "the answer to a durable completion", failing=True)
    lines = (
        doc.Operation("POST", CHATS, partial(ask, chat=True), _later(doc.CHAT)),
        doc.Operation("GET", f"{CHATS}/{{id}}", completion, chat),
        doc.Operation("POST", COMPLETIONS, partial(ask, chat=False), _later(doc.COMPLETION)),
        doc.Operation("GET", f"{COMPLETIONS}/{{id}}", completion, completed),
    )
    kinds = doc.one_of("chat.completion", "text_completion")
    return doc.Part(lines, {"Accepted": doc.object_of(id=doc.TEXT, object=kinds, status=doc.TEXT)})
