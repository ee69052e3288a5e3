"""The Responses API over HTTP: its endpoints, and the events of one stream from native frames.

POST /v1/responses                      JSON or a stream; with `background` the response `queued`
GET  /v1/responses/{id}, DELETE         JSON, or a stream from the place of its reader on; it is gone
POST /v1/responses/{id}/cancel          the response

    id: <attempt>.<number>                     the number within the attempt
    event: response.output_text.delta
    data: {…, "sequence_number": (attempt - 1) * 2^32 + number}

A stream may start after a number, which its reader has already. A native stream may start over, as a new
attempt: as long as its text repeats the sent text, nothing is sent; after that it goes on with the numbers
of the new attempt. A text that differs ends a plain stream with an error, since clients take a second
`response.created` for an error; a stored response starts over for its reader, with higher numbers.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from contextlib import aclosing
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from services.gateway import openapi as doc
from services.gateway.endpoints import Endpoints
from services.gateway.exchange import Gone, answer
from services.gateway.openai_response import Api, Chunks, changed, idle_fields, to_text
from services.gateway.store import COMPLETED, Pause, Store, call_of, found, may_send_events, named_id
from shared.client.client import Client
from shared.errors import BadRequest, UnknownRequest
from shared.openai.call import Call
from shared.openai.responses import output
from shared.openai.responses.output import Event, Output, ended, failure_of, output_of, response, whole
from shared.openai.responses.request import PATH, ResponseRequest, left_out, read

Body = dict[str, Any]

PREFIX = "resp_"  # of the ids that the gateway draws
ATTEMPT_BITS = 32  # of a sequence number; the whole stays below 2^53 for two million attempts
_EVENT_ID = re.compile(r"([0-9]{1,7})\.([0-9]{1,10})")
_NUMBER = re.compile(r"[0-9]{1,16}")
_YES_OR_NO = {"true": True, "false": False}


class Place(NamedTuple):
    """A place in a stream: the attempt, from 1 on, and the number of the last event there."""

    attempt: int
    number: int

    @property
    def sequence_number(self) -> int:
        """As one number."""
        return (self.attempt - 1 << ATTEMPT_BITS) + self.number


START = Place(0, -1)  # before the first event of any attempt


def place_of(sequence_number: int) -> Place:
    """The place of a `sequence_number`."""
    return Place((sequence_number >> ATTEMPT_BITS) + 1, sequence_number & (1 << ATTEMPT_BITS) - 1)


class ResponseEvents(Chunks):
    """The events of one stream."""

    def __init__(
        self, call: Call, echoed: Sequence[str] = (), after: Place = START, *, stored: bool = False
    ) -> None:
        """`after`: what the reader has. `stored`: the stream may start over for its reader."""
        self._call = call
        self._stored = stored
        self._attempt = 1
        self._asked = after
        self._after = -1  # nothing up to this number of the current attempt is sent
        self._unproven = -1  # the reader claims to have this number; its text was not compared yet
        self._number = -1  # of the last event of the current attempt
        self._output: Output | None = None
        self._format = ""
        self._held: list[str] = []  # the opening of a plain stream: an error before its text has a status
        self.text: list[str] = []  # of the current attempt
        self._before = ""  # the text of the earlier attempt, as long as this one repeats it
        self._again = 0  # characters that it has repeated

    def native(self, done: Body) -> Body:
        """The native answer of the whole text, as a plain request has it; `done`: the last frame."""
        (ending,) = done["choices"]
        message = {"role": "assistant", "content": "".join(self.text)}
        reason = ending["finish_reason"]
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": reason}
        about = {name: done[name] for name in ("created", "model", "usage")}
        return {**about, "choices": [choice], "answer_format": self._format}

    def convert(self, prompt: int, frame: Body) -> list[str]:
        """The events for a frame of the native stream. Raises EngineError. Streams of stored responses
        have two more frames: `queued`, and `failed` with the error of a record."""
        kind = frame["type"]
        if kind == "queued":
            self._output = output_of(self._call, "")
            return [*self._written(self._waits(self._output))]
        if kind == "accepted":
            self._begin(frame)
            events = [*self._written(self._opening())]
            if self._stored:
                return events
            self._held += events
            return []
        events, self._held = self._held, []
        if kind == "delta":
            (choice,) = frame["choices"]
            entries = (choice.get("logprobs") or {}).get("content") or ()
            return [*events, *self._feed(choice["delta"]["content"], entries)]
        if kind == "failed":
            failure = None if frame["status"] == "cancelled" else failure_of(frame["error"])
            return [*events, *self._written(self._failing(frame["status"], failure))]
        return [*events, *self._finish(frame)]

    def end(self, error: Body | None) -> bytes:
        """For an error of a stored response, which goes on without this stream, an event `error`; for any
        other one `response.failed`."""
        if error is None:
            return b""
        fields = error["error"]
        if self._stored:
            place = Place(self._attempt, max(self._number, self._after, 0))
            error_event = {name: fields[name] for name in ("code", "message", "param")}
            error_event = {"type": "error", **error_event, "sequence_number": place.sequence_number}
            return f"event: error\ndata: {to_text(error_event)}\n\n".encode("utf-8", "replace")
        failure = {"code": "server_error", "message": fields["message"]}
        return self.write([*self._held, *self._written(self._failing("failed", failure))])

    # ---- attempts --------------------------------------------------------------------------------

    def _begin(self, frame: Body) -> None:
        """A new attempt, or the first one of this stream."""
        attempt, first = int(frame["attempt"]), not self.text and self._number < 0
        if first:
            same = self._asked.attempt == attempt or self._asked.number <= 1 + self._is_async  # no text yet
            self._after = self._unproven = self._asked.number if same else -1
        elif self._number < self._unproven:
            self._before, self._after, self._unproven = "", -1, -1
        else:
            self._before = self._before if self._again < len(self._before) else "".join(self.text)
            self._after, self._unproven = max(self._after, self._number), -1
        self._attempt, self._format = attempt, frame.get("answer_format", "")
        self._number, self._again, self.text = -1, 0, []
        self._held.clear()
        self._output = output_of(self._call, self._format)

    def _start_over(self) -> list[str]:
        """Send this attempt from its beginning: its text is another one."""
        if not self._stored:
            raise changed()
        self._before, self._after, self._number, self._unproven = "", -1, -1, -1
        self._output = output_of(self._call, self._format)
        return [*self._written(self._opening()), *self._written(self._output.feed("".join(self.text)))]

    def _feed(self, text: str, entries: Sequence[Body]) -> list[str]:
        self.text.append(text)
        assert self._output is not None
        if self._again < len(self._before):
            known = self._before[self._again : self._again + len(text)]
            if not text.startswith(known):
                return self._start_over()
            self._again += len(known)
        return [*self._written(self._output.feed(text, entries))]

    def _finish(self, frame: Body) -> list[str]:
        (choice,) = frame["choices"]
        over = self._start_over() if self._again < len(self._before) else []
        assert self._output is not None
        events = [*self._output.finish(reason := choice["finish_reason"])]
        done = ended(self._call, self._output.items, reason, frame["usage"])
        events.append(self._output.event(done["status"], response=done))
        return [*over, *self._written(events)]

    def _failing(self, status: str, failure: Body | None) -> Iterator[Event]:
        output = self._output
        if output is None:  # nothing is known of its text: what the reader has stays
            self._attempt, self._after = max(self._asked.attempt, 1), self._asked.number
            output = self._output = output_of(self._call, "")
            yield from self._opening()
        output.skip(self._after)  # it is new to the reader
        whole = response(self._call, status, output.items, error=failure)
        yield output.event("failed", response=whole)

    # ---- events ----------------------------------------------------------------------------------

    def _waits(self, output: Output) -> Iterator[Event]:
        waits = response(self._call, "queued" if self._is_async else "in_progress")
        yield output.event("created", response=waits)
        if self._is_async:
            yield output.event("queued", response=waits)

    def _opening(self) -> Iterator[Event]:
        assert self._output is not None
        yield from self._waits(self._output)
        yield self._output.event("in_progress", response=response(self._call, "in_progress"))

    @property
    def _is_async(self) -> bool:
        return bool(self._call.keep["response"].get("background"))

    def _written(self, events: Iterable[Event]) -> Iterator[str]:
        """What of the events is not sent yet."""
        for event in events:
            self._number = event.number
            if (rest := event.after(self._after)) is not None:
                yield self._sse(rest)

    def _sse(self, event: Event) -> str:
        place = Place(self._attempt, event.number)
        data = to_text({"type": event.type, "sequence_number": place.sequence_number, **event.fields})
        return f"id: {place.attempt}.{place.number}\nevent: {event.type}\ndata: {data}\n\n"


def ignored(fields: Body) -> list[str]:
    """The fields and tools of a valid request that change nothing."""
    return idle_fields(fields, ResponseRequest) + left_out(fields)


RESPONSES = Api(whole, ResponseEvents, read=read, ignored=ignored)


class Responses:
    """The endpoints."""

    def __init__(self, endpoints: Endpoints) -> None:
        self._endpoints, self._pause = endpoints, Pause()

    async def create(self, request: Request) -> Response:
        """`POST /v1/responses`."""
        endpoints = self._endpoints
        fields, client = await endpoints.asked(request, RESPONSES, PREFIX)
        call = endpoints.call_of(request, await self.continued(fields, client), RESPONSES)
        kept = call.keep["response"]
        if kept["background"]:
            return await self.background(call, client, request)
        native, call = endpoints.native(request, client, call)
        if call.stream:
            frames, events = native.frames(call), ResponseEvents(call)
            if kept["store"]:
                frames = self.keeping(frames, events, call, client)
            return endpoints.stream(request, frames, events)
        natives = await endpoints.natives(request, native, call)
        if kept["store"]:
            await Store(client).keep_response(call, natives[0], self._pause)
        return answer(whole(call, natives))

    async def background(self, call: Call, client: Client, request: Request) -> Response:
        """Have a response made in the background."""
        store, stored = Store(client), await Store(client).submit(call)
        call = call.of_model(stored.get("model", call.model))
        if call.stream:
            frames = store.frames(call.request_id, waits=True, fails=True)
            return self._endpoints.stream(request, frames, ResponseEvents(call, stored=True))
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
        before, answered = call.bodies[0]["messages"], output.answer_turn(call, state["answer"])
        if call.keep["response"].get("instructions"):
            before = before[1:]
        system = 1 if repeated["instructions"] else 0
        session = {"session_id": call.bodies[0].get("session_id", previous)}  # the first of the chain
        return {**session, **fields, "messages": [*own[:system], *before, answered, *own[system:]]}

    def keeping(
        self, frames: AsyncGenerator[Body], events: ResponseEvents, call: Call, client: Client
    ) -> AsyncGenerator[Body]:
        """The frames of a plain stream, whose response is kept before its end is sent."""

        async def kept() -> AsyncGenerator[Body]:
            async with aclosing(frames) as each:
                async for frame in each:
                    if frame["type"] == "done":
                        await Store(client).keep_response(call, events.native(frame), self._pause)
                    yield frame

        return kept()

    async def response(self, request: Request) -> Response:
        """`GET /v1/responses/{id}`."""
        store, state = await found(self._endpoints, request, PATH)
        call, after = call_of(state), _place(request)
        streams = request.query_params.get("stream", "true" if may_send_events(request) else "false")
        if streams not in _YES_OR_NO:
            raise BadRequest("`stream`: true or false is expected", param="stream")
        if not _YES_OR_NO[streams]:
            return answer(output.of_state(call, state))
        frames = store.frames(call.request_id, after, waits=after == START, fails=True)
        return self._endpoints.stream(request, frames, ResponseEvents(call, (), after, stored=True))

    async def delete(self, request: Request) -> Response:
        """`DELETE /v1/responses/{id}`."""
        name, store = named_id(request), Store(await self._endpoints.client_of(request))
        await store.delete(name, PATH, self._now_s())
        return answer({"id": name, "object": "response", "deleted": True})

    async def cancel(self, request: Request) -> Response:
        """`POST /v1/responses/{id}/cancel`."""
        store = Store(await self._endpoints.client_of(request))
        state = await store.cancel(named_id(request), PATH, self._now_s())
        return answer(output.of_state(call_of(state), state))

    def _now_s(self) -> float:
        return self._endpoints.clock.wall_us() / 1e6


def _place(request: Request) -> Place:
    """What the reader of a response has: by `Last-Event-ID`, which a browser sends when it comes back to the
    same URL, else by `starting_after`. Raises BadRequest."""
    if last := request.headers.get("last-event-id", ""):
        if (place := _EVENT_ID.fullmatch(last)) is None:
            raise BadRequest(f"`Last-Event-ID`: an id of this stream is expected, not {last!r:.80}")
        return Place(int(place[1]), int(place[2]))
    given = request.query_params.get("starting_after")
    if given is None:
        return START
    if not _NUMBER.fullmatch(given):
        raise BadRequest(
            "`starting_after`: the `sequence_number` of an event is expected", param="starting_after"
        )
    return place_of(int(given))


def _schema() -> doc.Schema:
    listed: doc.Schema = doc.list_of({"type": "object"})
    some: doc.Schema = {"type": "object"}
    yes_or_no: doc.Schema = {"type": "boolean"}
    number: doc.Schema = {"type": "number"}
    usage = doc.object_of(
        **dict.fromkeys(("input_tokens", "output_tokens", "total_tokens"), doc.COUNT),
        input_tokens_details=doc.object_of(cached_tokens=doc.COUNT, cache_write_tokens=doc.COUNT),
        output_tokens_details=doc.object_of(reasoning_tokens=doc.COUNT),
    )
    repeated = {
        **dict.fromkeys(("background", "parallel_tool_calls", "store"), yes_or_no),
        **dict.fromkeys(("instructions", "previous_response_id", "user"), doc.WORD),
        **dict.fromkeys(("metadata", "reasoning", "text"), some),
        **dict.fromkeys(("service_tier", "truncation"), doc.TEXT),
        **dict.fromkeys(("temperature", "top_p"), doc.or_null(number)),
        "max_output_tokens": doc.or_null(doc.COUNT),
        "top_logprobs": doc.COUNT,
        "tool_choice": {"type": ["string", "object"]},
        "tools": listed,
    }
    return doc.object_of(
        "completed_at",
        id=doc.TEXT, object=doc.one_of("response"), created_at=doc.COUNT, completed_at=doc.COUNT,
        status=doc.one_of("queued", "in_progress", "completed", "incomplete", "failed", "cancelled"),
        error=doc.or_null(doc.object_of(code=doc.TEXT, message=doc.TEXT)),
        incomplete_details=doc.or_null(doc.object_of(reason=doc.TEXT)),
        model=doc.TEXT, output=listed, usage=doc.or_null(usage), **repeated,
    )  # fmt: skip


def build() -> doc.Part:
    """The Responses API."""
    made = doc.post(
        "Response", "answer a conversation (Responses API)", (*doc.GENERATING, 410), stream=doc.EVENTS
    )
    gone = doc.get("ResponseDeleted", "delete a response", doc.LOOKING)
    cancelled = doc.get("ResponseAnswer", "cancel a response", doc.LOOKING, operation="cancelresponse")
    stored = doc.stored("Response", "a stored response")
    lines = (
        doc.Operation("POST", PATH, Responses.create, made),
        doc.Operation("GET", f"{PATH}/{{id}}", Responses.response, stored),
        doc.Operation("DELETE", f"{PATH}/{{id}}", Responses.delete, gone),
        doc.Operation("POST", f"{PATH}/{{id}}/cancel", Responses.cancel, cancelled),
    )
    deleted = doc.object_of(id=doc.TEXT, object=doc.one_of("response"), deleted=doc.one_of(True))
    schemas = {"ResponseAnswer": _schema(), "ResponseDeleted": deleted}
    return doc.Part(lines, schemas, [ResponseRequest], Responses)
