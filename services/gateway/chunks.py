"""The frames of native streams as the chunks of one OpenAI stream. Pure.

    accepted          nothing: the first chunk waits for the first word, so that a refusal has its status
    delta             a chunk for each choice; before the first one with the role, or the echoed prompt
    done              calls of functions, which are whole now; a chunk for each choice with its
                      `finish_reason`; after the last prompt the usage

A native stream may start over (its detokenizer or the broker died): all text comes again. What was sent
cannot be taken back, so the repeated part is left out, if it is the same by its checksum.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from zlib import crc32

from services.gateway.calls import Call
from services.gateway.shapes import total
from services.gateway.tools import ToolText
from shared.errors import EngineError

Body = dict[str, Any]


@dataclass(slots=True)
class _Sent:
    """What the reader has of one choice: how much, and a checksum. To keep the texts of a thousand streams
    would look like a leak for as long as they last."""

    chars: int = 0
    checksum: int = 0
    again: int = 0  # characters of the present attempt that were seen, and their checksum
    again_checksum: int = 0
    tokens: int = 0  # whose log probabilities were sent
    tools: ToolText | None = None  # of a request that may call functions

    def begin_again(self) -> None:
        self.again = self.again_checksum = 0

    @property
    def behind(self) -> bool:
        """True while what comes has been sent before."""
        return self.again < self.chars

    def fresh(self, piece: str) -> str:
        """The part of `piece` that was not sent before. Raises EngineError when the part that was is not the
        same."""
        if self.behind:
            known = piece[: self.chars - self.again]
            self.again += len(known)
            self.again_checksum = _checksum(known, self.again_checksum)
            if not self.behind and self.again_checksum != self.checksum:
                raise _changed()
            piece = piece[len(known) :]
        if piece:
            self.again = self.chars = self.chars + len(piece)
            self.again_checksum = self.checksum = _checksum(piece, self.checksum)
        return piece


def _checksum(text: str, before: int) -> int:
    return crc32(text.encode("utf-8", "surrogatepass"), before)


class ChunkMaker:
    """The chunks of one HTTP stream."""

    def __init__(self, call: Call, echoed: tuple[str, ...] = ()) -> None:
        self._call = call
        self._echoed = echoed
        self._sent: dict[int, _Sent] = {}  # by index of the choice in the whole answer
        self._usages: list[Body] = []
        self._head: Body = {}
        self._tail: Body = {"usage": None} if call.include_usage else {}

    def take(self, prompt: int, frame: Body) -> list[Body]:
        """The chunks that a frame of the stream of one prompt becomes. Raises EngineError when a stream
        that started over differs from what was sent."""
        kind = frame["type"]
        indexes = range(prompt * self._call.n, (prompt + 1) * self._call.n)
        if kind == "accepted":
            self._head = self._head or self._begin(frame)
            for index in indexes:
                if index in self._sent:
                    self._sent[index].begin_again()
            return []
        chunks: list[Body] = []
        if indexes[0] not in self._sent:
            chunks = [chunk for index in indexes for chunk in self._first(index, prompt)]
        for choice in frame["choices"]:
            index = indexes[0] + choice["index"]
            chunks += self._last(index, choice) if kind == "done" else self._delta(index, choice)
        if kind == "done":
            chunks += self._end(frame)
        return chunks

    def _begin(self, frame: Body) -> Body:
        return {
            "id": self._call.request_id,
            "object": "chat.completion.chunk" if self._call.chat else "text_completion",
            "created": frame["created"],
            "model": frame["model"],
        }

    def _chunk(self, index: int, content: Body, logprobs: Body | None, reason: str | None) -> Body:
        choice = {"index": index, **content, "logprobs": logprobs, "finish_reason": reason}
        return {**self._head, "choices": [choice], **self._tail}

    def _first(self, index: int, prompt: int) -> list[Body]:
        sent = self._sent[index] = _Sent()
        if self._call.tools:
            sent.tools = ToolText(self._call.tools, f"{self._call.request_id}_{index}")
        if self._call.chat:
            return [self._chunk(index, {"delta": {"role": "assistant", "content": ""}}, None, None)]
        return [self._chunk(index, {"text": self._echoed[prompt]}, None, None)] if self._echoed else []

    def _delta(self, index: int, choice: Body) -> list[Body]:
        sent = self._sent[index]
        text = sent.fresh(choice["delta"]["content"] if self._call.chat else choice["text"])
        if sent.tools is not None:
            text = sent.tools.feed(text)
        logprobs = choice.get("logprobs")
        if logprobs is not None:
            end = choice["first"] + choice["count"]
            logprobs = _unsent(logprobs, end, sent.tokens)
            sent.tokens = max(end, sent.tokens)
        if not text and logprobs is None:
            return []
        content: Body = {"delta": {"content": text}} if self._call.chat else {"text": text}
        return [self._chunk(index, content, logprobs, None)]

    def _last(self, index: int, choice: Body) -> list[Body]:
        sent, reason = self._sent[index], choice["finish_reason"]
        if sent.behind:
            raise _changed()
        chunks: list[Body] = []
        if sent.tools is not None:
            rest, calls = sent.tools.finish()
            if rest:
                chunks.append(self._chunk(index, {"delta": {"content": rest}}, None, None))
            if calls:
                reason = "tool_calls"
                numbered = [{"index": i, **call} for i, call in enumerate(calls)]
                chunks.append(self._chunk(index, {"delta": {"tool_calls": numbered}}, None, None))
        content: Body = {"delta": {}} if self._call.chat else {"text": ""}
        return [*chunks, self._chunk(index, content, None, reason)]

    def _end(self, frame: Body) -> list[Body]:
        if not self._call.include_usage:
            return []
        self._usages.append(frame["usage"])
        if len(self._usages) < len(self._call.bodies):
            return []
        last = {**self._head, "choices": [], "usage": total(self._usages)}
        return [{**last, "timings": frame["timings"]} if len(self._usages) == 1 else last]


def _unsent(logprobs: Body, end: int, sent: int) -> Body | None:
    """The entries of the tokens from `sent` on; the last entry is of token `end - 1`."""
    keep = max(end - sent, 0)
    cut = {name: entries[-keep:] if keep else [] for name, entries in logprobs.items()}
    return cut if any(cut.values()) else None


def _changed() -> EngineError:
    return EngineError("a service died and the answer was not the same again: send the request once more")
