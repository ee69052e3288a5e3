"""The events of one stream of the Responses API, from native frames. Pure.

    id: <attempt>.<number>                     the number within the attempt
    event: response.output_text.delta
    data: {…, "sequence_number": (attempt - 1) * 2^32 + number}

A stream may start after a number, which its reader has already. A native stream may start over, as a new
attempt: as long as its text repeats the sent text, nothing is sent; after that it goes on with the numbers
of the new attempt. A text that differs ends a plain stream with an error, since clients take a second
`response.created` for an error; a stored response starts over for its reader, with higher numbers.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

from services.gateway.openai_response import EVENTS, PING, Api, changed, idle_fields
from shared.openai.call import Call
from shared.openai.responses.output import Event, Output, ended, failure_of, output_of, response, whole
from shared.openai.responses.request import ResponseRequest, left_out, read

Body = dict[str, Any]

ATTEMPT_BITS = 32  # of a sequence number; the whole stays below 2^53 for two million attempts
_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


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


class ResponseEvents:
    """The events of one stream."""

    media_type: ClassVar = EVENTS
    ping: ClassVar = PING

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

    def take(self, prompt: int, frame: Body) -> list[str]:
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

    def write(self, chunks: Sequence[str]) -> bytes:
        """Events are whole."""
        return "".join(chunks).encode("utf-8", "replace")

    def end(self, error: Body | None) -> bytes:
        """For an error of a stored response, which goes on without this stream, an event `error`; for any
        other one `response.failed`."""
        if error is None:
            return b""
        fields = error["error"]
        if self._stored:
            place = Place(self._attempt, max(self._number, self._after, 0))
            said = {name: fields[name] for name in ("code", "message", "param")}
            said = {"type": "error", **said, "sequence_number": place.sequence_number}
            return f"event: error\ndata: {_json(said)}\n\n".encode("utf-8", "replace")
        failure = {"code": "server_error", "message": fields["message"]}
        return self.write([*self._held, *self._written(self._failing("failed", failure))])

    # ---- attempts --------------------------------------------------------------------------------

    def _begin(self, frame: Body) -> None:
        """A new attempt, or the first one of this stream."""
        attempt, first = int(frame["attempt"]), not self.text and self._number < 0
        if first:
            same = self._asked.attempt == attempt or self._asked.number <= 1 + self._background  # no text yet
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

    def _start_over(self, finish: Iterable[Event] = ()) -> list[str]:
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
        waits = response(self._call, "queued" if self._background else "in_progress")
        yield output.event("created", response=waits)
        if self._background:
            yield output.event("queued", response=waits)

    def _opening(self) -> Iterator[Event]:
        assert self._output is not None
        yield from self._waits(self._output)
        yield self._output.event("in_progress", response=response(self._call, "in_progress"))

    @property
    def _background(self) -> bool:
        return bool(self._call.keep["response"].get("background"))

    def _written(self, events: Iterable[Event]) -> Iterator[str]:
        """What of the events is not sent yet."""
        for event in events:
            self._number = event.number
            if (rest := event.after(self._after)) is not None:
                yield self._sse(rest)

    def _sse(self, event: Event) -> str:
        place = Place(self._attempt, event.number)
        data = _json({"type": event.type, "sequence_number": place.sequence_number, **event.fields})
        return f"id: {place.attempt}.{place.number}\nevent: {event.type}\ndata: {data}\n\n"


def ignored(fields: Body) -> list[str]:
    """The fields and tools of a valid request that change nothing."""
    return idle_fields(fields, ResponseRequest) + left_out(fields)


RESPONSES = Api(whole, ResponseEvents, read=read, prefix="resp_", ignored=ignored)
