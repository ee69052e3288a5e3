"""The chunks of a durable chat or completion, with ids from which a reader goes on (`Last-Event-ID`). Pure.

    id: <attempt>.<number>[,<number>…]        the last number of each choice, in the order of the choices

The number of a chunk depends on the text of its choice alone: a chunk of text counts its characters and has
the number of the last one, any other chunk counts one. The usage counts as a chunk of the first choice.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from services.gateway.openai_response import EVENTS, PING, ChunkBuilder, changed
from shared.errors import BadRequest
from shared.openai.call import Call

Body = dict[str, Any]

_NUMBER = "(?:-1|[0-9]{1,12})"
_ID = re.compile(rf"([0-9]{{1,12}})\.({_NUMBER}(?:,{_NUMBER}){{0,127}})")
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
