"""Turns native answers and frames into answers and streams of the exact shapes of the OpenAI API.

`answer` of shared/openai/call.py builds one JSON answer. ChunkBuilder turns the frames of native streams into
the chunks of one OpenAI stream, as JSON, which EventStream sends; all but EventStream is pure:

    accepted          no chunk: the response starts with the first text, so that an error has its status
    delta             a chunk for each choice; before the first one a chunk with the role or echoed prompt;
                      reasoning and calls of functions are chunks of their own
    done              a chunk for each choice with its `finish_reason`; at the end the usage

A native stream may start over, if its detokenizer or the broker has died: all text arrives again. The
repeated part is left out if its checksum matches the sent text, else the stream ends with an error.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from json.encoder import encode_basestring as quote
from typing import Any, ClassVar, Protocol, TypeVar
from zlib import crc32

from pydantic import BaseModel, ValidationError
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from services.gateway.connection import chunk_writer
from services.gateway.exchange import Exchange, ExchangeCounters, refusal
from services.gateway.native_call import PROMPT, unless_gone
from shared.api import NO_EFFECT, bad_field
from shared.client.client import ACCEPTED_S, QUIET
from shared.clock import Clock
from shared.errors import EngineError, HeadraceError
from shared.openai.answer_parts import AnswerReader, reader_of
from shared.openai.call import (
    Call,
    answer,
    as_in_vllm,
    of_prompt,
    placed_after,
    read_call,
    read_vectors_call,
    stop_reason,
    total,
    vectors,
)

Body = dict[str, Any]
M = TypeVar("M", bound=BaseModel)

_HEADERS = [
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would buffer a page
]
EVENTS = b"text/event-stream; charset=utf-8"
# A comment. Without a blank line, at which some clients dispatch an event without data if an id came before.
PING = b": ping\n"
DONE = b"data: [DONE]\n\n"
BODY_SEND = "headrace.send"  # in the scope: the server's own `send`, for bodies, past the edge
_MARK = "\0"
to_text = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


@dataclass(slots=True)
class _Sent:
    """The length and a checksum of the sent text of one choice: the texts themselves would take memory."""

    chars: int = 0
    checksum: int = 0
    again: int = 0  # characters of the current attempt so far, and their checksum
    again_checksum: int = 0
    tokens: int = 0  # with sent log probabilities
    around: tuple[str, str] = ("", "")  # JSON of a chunk with only text, before and after the text
    reader: AnswerReader | None = None  # None: the text is the content
    before: int = 0  # characters of the prompt's tokens, for the places of the answer's

    def begin_again(self) -> None:
        self.again = self.again_checksum = 0

    @property
    def is_repeating(self) -> bool:
        """True while the current attempt repeats sent text."""
        return self.again < self.chars

    def fresh(self, piece: str) -> str:
        """The part of `piece` that was not sent before. Raises EngineError if the repeated text differs."""
        if self.again < self.chars:
            known = piece[: self.chars - self.again]
            self.again += len(known)
            self.again_checksum = _checksum(known, self.again_checksum)
            if not self.is_repeating and self.again_checksum != self.checksum:
                raise changed()
            piece = piece[len(known) :]
        if piece:
            self.again = self.chars = self.chars + len(piece)
            self.again_checksum = self.checksum = _checksum(piece, self.checksum)
        return piece


def _checksum(text: str, before: int) -> int:
    return crc32(text.encode("utf-8", "surrogatepass"), before)


class Chunks(Protocol):
    """What an HTTP API sends of one stream."""

    media_type: ClassVar[bytes] = EVENTS
    ping: ClassVar[bytes] = PING  # what clients ignore, between chunks

    def convert(self, prompt: int, frame: Body) -> list[str]:
        """The chunks for a frame of the stream of one prompt. Raises EngineError."""

    def write(self, chunks: Sequence[str]) -> bytes:
        """The bytes of one or more chunks, which are whole."""
        return "".join(chunks).encode("utf-8", "replace")

    def end(self, error: Body | None) -> bytes:
        """The last bytes; `error`: the body of the error that ended the stream."""


class ChunkBuilder(Chunks):
    """The chunks of one HTTP stream."""

    def __init__(self, call: Call, echoed: Sequence[str] = ()) -> None:
        self._call = call
        self._echoed = echoed
        self._sent: dict[int, _Sent] = {}  # by index of the choice in the whole answer
        self._usages: list[Body] = []
        self._head: Body = {}
        self._format = ""  # of a chat's answers: shared/answer_formats
        self._tail: Body = {"usage": None} if call.include_usage else {}
        self._prompt_tokens: dict[int, int] = {}  # by prompt

    def convert(self, prompt: int, frame: Body) -> list[str]:
        """The chunks, as JSON, for a frame of the stream of one prompt. Raises EngineError if a stream that
        started over differs from the sent text."""
        kind, first = frame["type"], prompt * self._call.n
        if kind == "accepted":
            self._head = self._head or self._begin(frame)
            self._prompt_tokens[prompt] = frame.get("prompt_tokens", 0)
            self._format = frame.get("answer_format", "")
            for index in range(first, first + self._call.n):
                if index in self._sent:
                    self._sent[index].begin_again()
            return []
        chunks: list[str] = []
        if first not in self._sent:
            indexes = range(first, first + self._call.n)
            self._count(prompt, 0)
            chunks = [to_text(chunk) for index in indexes for chunk in self._first(index, prompt, frame)]
        if kind == "delta":
            for choice in frame["choices"]:
                self._count(prompt, choice["first"] + choice["count"])
                chunks += self._delta(first + choice["index"], choice)
            return chunks
        for choice in frame["choices"]:
            self._count(prompt, choice["tokens"])
            chunks += map(to_text, self._last(first + choice["index"], choice))
        return [*chunks, *map(to_text, self._end(frame))]

    def write(self, chunks: Sequence[str]) -> bytes:
        """The chunks as server-sent events."""
        if len(chunks) == 1:  # almost always
            return f"data: {chunks[0]}\n\n".encode("utf-8", "replace")
        return "".join([f"data: {chunk}\n\n" for chunk in chunks]).encode("utf-8", "replace")

    def end(self, error: Body | None) -> bytes:
        """`[DONE]`, or an event with the error."""
        return DONE if error is None else self.write([to_text(error)])

    def _count(self, prompt: int, tokens: int) -> None:
        """The next chunks belong to a choice with so many tokens: their usage, if each chunk has it."""
        if self._call.continuous_usage:
            before = self._prompt_tokens[prompt]
            counts = {"prompt_tokens": before, "completion_tokens": tokens, "total_tokens": before + tokens}
            self._tail = {"usage": counts}

    def _begin(self, frame: Body) -> Body:
        return {
            "id": self._call.request_id,
            "object": "chat.completion.chunk" if self._call.chat else "text_completion",
            "created": frame["created"],
            "model": self._call.model,
        }

    def _chunk(
        self, index: int, content: Body, logprobs: Body | None, reason: str | None, **more: Any
    ) -> Body:
        choice = {"index": index, **content, "logprobs": logprobs, "finish_reason": reason, **more}
        return {**self._head, "choices": [choice], **self._tail}

    def _first(self, index: int, prompt: int, frame: Body) -> list[Body]:
        sent = self._sent[index] = _Sent()
        sent.around = self._around(index)
        if self._call.chat:
            name = f"{self._call.request_id}_{index}"
            sent.reader = reader_of(self._format, self._call.functions, name)
        scores, logprobs = frame.get("prompt_logprobs", ()), None
        more = {"prompt_logprobs": as_in_vllm(scores)} if self._call.prompt_scores else {}
        if self._call.chat:
            chunk = self._chunk(index, {"delta": {"role": "assistant", "content": ""}}, None, None)
            return [{**chunk, **more}]
        if self._call.echo_scores:
            logprobs = of_prompt(scores, self._call.bodies[0]["prompt_logprobs"])
            sent.before = len("".join(logprobs["tokens"]))
        if not (self._echoed or more):
            return []
        text = self._echoed[prompt] if self._echoed else ""
        return [self._chunk(index, {"text": text}, logprobs, None, **more)]

    def _around(self, index: int) -> tuple[str, str]:
        content: Body = {"delta": {"content": _MARK}} if self._call.chat else {"text": _MARK}
        before, _, after = to_text(self._chunk(index, content, None, None)).rpartition(quote(_MARK))
        return before, after

    def _delta(self, index: int, choice: Body) -> list[str]:
        sent = self._sent[index]
        text = sent.fresh(choice["delta"]["content"] if self._call.chat else choice["text"])
        logprobs = choice.get("logprobs")
        if logprobs is not None:
            end = choice["first"] + choice["count"]
            if sent.before:
                logprobs = placed_after(sent.before, logprobs)
            logprobs = _unsent(logprobs, end, sent.tokens)
            sent.tokens = max(end, sent.tokens)
        if sent.reader is not None:
            return self._read(index, sent.reader.feed(text), logprobs)
        if logprobs is None and not text:
            return []
        if logprobs is None and not self._call.continuous_usage:
            before, after = sent.around
            return [f"{before}{quote(text)}{after}"]
        content: Body = {"delta": {"content": text}} if self._call.chat else {"text": text}
        return [to_text(self._chunk(index, content, logprobs, None))]

    def _read(self, index: int, deltas: list[Body], logprobs: Body | None) -> list[str]:
        """A chunk for each delta; the log probabilities are in the first."""
        if logprobs is not None and not deltas:
            deltas = [{"content": ""}]
        chunks = [self._chunk(index, {"delta": delta}, None, None) for delta in deltas]
        if chunks:
            chunks[0]["choices"][0]["logprobs"] = logprobs
        return [to_text(chunk) for chunk in chunks]

    def _last(self, index: int, choice: Body) -> list[Body]:
        sent, reason = self._sent[index], choice["finish_reason"]
        if sent.is_repeating:
            raise changed()
        chunks: list[Body] = []
        if sent.reader is not None:
            deltas = sent.reader.finish()
            chunks = [self._chunk(index, {"delta": delta}, None, None) for delta in deltas]
            reason = sent.reader.reason(reason)
        content: Body = {"delta": {}} if self._call.chat else {"text": ""}
        return [*chunks, self._chunk(index, content, None, reason, **stop_reason(choice))]

    def _end(self, frame: Body) -> list[Body]:
        if not self._call.include_usage:
            return []
        self._usages.append(frame["usage"])
        if len(self._usages) < len(self._call.bodies):
            return []
        last = {**self._head, "choices": [], "usage": total(self._usages)}
        return [{**last, "timings": frame["timings"]} if len(self._usages) == 1 else last]


def _unsent(logprobs: Body, end: int, sent: int) -> Body | None:
    """The entries of the tokens from `sent` on; the last entry belongs to token `end - 1`."""
    keep = max(end - sent, 0)
    cut = {name: entries[-keep:] if keep else [] for name, entries in logprobs.items()}
    return cut if any(cut.values()) else None


def changed() -> EngineError:
    """The error of a stream whose repeated text differs."""
    return EngineError("a service died and the answer was not the same again: send the request once more")


class EventStream(Response):
    """The response of a streaming request: the chunks of one call, as they arrive.

    The status waits until the request is accepted and, for ACCEPTED_S, for the first chunk: an earlier error
    is a response of its own, a later error ends the stream with a chunk of its own. After `ping_s` without a
    chunk a ping is sent, since proxies and clients end a connection that is silent. A disconnect cancels the
    request. A slow client delays no other: its frames wait in the native client, which ends the request if
    they are too many (shared/client/client.py: UnreadFrames); the kernel ends a connection that reads
    nothing.
    """

    def __init__(
        self,
        frames: AsyncGenerator[Body],
        chunks: Chunks,
        exchange: Exchange,
        counters: ExchangeCounters,
        clock: Clock,
        ping_s: float,
    ) -> None:
        super().__init__()
        self._ping_s = ping_s
        self._frames = frames
        self._chunks = chunks
        self._exchange = exchange
        self._counters = counters
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send everything, until the client disconnects."""
        try:
            await unless_gone(receive, self._serve(scope, receive, send))
        except HeadraceError as error:
            self._exchange.error = error  # the client has gone
            self._exchange.status = self._exchange.status or error.code

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        started, send_body = False, scope.get(BODY_SEND, send)
        write, now, ping_at_s = chunk_writer(send_body), asyncio.get_running_loop().time, math.inf
        try:
            async with aclosing(self._frames) as frames:
                async for frame in frames:
                    quiet = frame["type"] == QUIET
                    chunks = [] if quiet else self._chunks.convert(frame.get(PROMPT, 0), frame)
                    if frame["type"] == "done":
                        self._exchange.usages.append(frame["usage"])
                    elif frame["type"] == "accepted":
                        ping_at_s = min(ping_at_s, now() + ACCEPTED_S)
                    if chunks and not self._exchange.first_us:
                        self._exchange.first_us = self._clock.wall_us()
                    if not started and (chunks or quiet or now() >= ping_at_s):
                        started, ping_at_s = True, now() + self._ping_s
                        headers = [(b"content-type", self._chunks.media_type), *_HEADERS]
                        await send({"type": "http.response.start", "status": 200, "headers": headers})
                    if chunks or now() >= ping_at_s:
                        if not write(body := self._chunks.write(chunks) if chunks else self._chunks.ping):
                            await send_body(_body(body))
                        self._counters.chunks += len(chunks)
                        ping_at_s = now() + self._ping_s
            self._exchange.answered_us = self._clock.wall_us()
            if (
                not started
            ):  # a reader that came back has it all: after a 204 an EventSource does not come again
                await send({"type": "http.response.start", "status": 204, "headers": []})
            await send_body(_body(self._chunks.end(None) if started else b"", last=True))
        except HeadraceError as error:
            self._exchange.error = error
            self._exchange.answered_us = self._clock.wall_us()
            if started:
                last = self._chunks.end(self._exchange.error_body(error, self._exchange.request_id))
                await send_body(_body(last, last=True))
            else:
                await refusal(error, self._exchange)(scope, receive, send)


def _body(data: bytes, *, last: bool = False) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": not last}


@dataclass(frozen=True, slots=True)
class Api:
    """The shapes of one HTTP API: its requests as fields of the OpenAI API, its answers from native ones."""

    answer: Callable[[Call, Sequence[Body], Sequence[str]], Body] = answer
    chunks: Callable[[Call, Sequence[str]], Chunks] = ChunkBuilder
    read: Callable[[Body], Body] = dict  # raises BadRequest
    to_call: Callable[..., Call] = read_call
    ignored: Callable[[Body], Sequence[str]] = lambda fields: ()  # what of a valid request changes nothing
    untyped: str = ""  # the content type of clients that set none; empty: it is JSON's


def valid(kind: type[M], fields: Body) -> M:
    """The fields as `kind` has them. Raises BadRequest."""
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise bad_field(error) from error


def idle_fields(fields: Body, kind: type[BaseModel]) -> list[str]:
    """The names of the fields that change nothing: `kind` does not have them, or describes them so."""
    known = kind.model_fields
    return [
        name for name in fields if name not in known or (known[name].description or "").startswith(NO_EFFECT)
    ]


OPENAI = Api()
EMBEDDINGS = Api(vectors, to_call=read_vectors_call)
