"""One request as the detokenizer sees it: its choices, and when they are all closed its end."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from services.detokenizer import frames
from services.detokenizer.frames import FrameMaker
from services.detokenizer.stream import SequenceStream
from shared.errors import HeadraceError
from shared.messages import Close, Open, Timings
from shared.replies import error_reply
from shared.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True)
class Closed:
    """A choice at its end."""

    tokens: int
    reason: str
    message: Close


class RequestText:
    """The reply of one request. `number` names it on this shard (see subjects.gone)."""

    __slots__ = ("_closed", "_frames", "choices", "number", "opened", "trace")

    def __init__(self, opened: Open, number: int, trace: str) -> None:
        self.opened = opened
        self.number = number
        self.trace = trace
        self.choices: dict[int, SequenceStream] = {}  # by index
        self._closed: dict[int, Closed] = {}
        self._frames = FrameMaker(opened)

    def add(self, opened: Open, vocabulary: Vocabulary) -> SequenceStream:
        """A choice of this request begins."""
        stream = self.choices[opened.choice] = SequenceStream(opened, vocabulary)
        return stream

    @property
    def seqs(self) -> array[int]:
        """The sequences of this request, in the order of its choices."""
        return array("i", (self.choices[i].seq for i in sorted(self.choices)))

    def accepted(self) -> bytes:
        """The first frame."""
        return self._frames.accepted()

    def delta(self) -> bytes:
        """A frame with all text not sent yet; empty when there is none."""
        waiting = [(i, s.drain()) for i, s in self.choices.items() if s.waiting]
        return self._frames.delta(waiting) if waiting else b""

    def close(self, stream: SequenceStream, message: Close) -> int:
        """End one choice; its true number of tokens. Raises TokenGap."""
        tokens = stream.close(message.final, message.reason)
        self._closed[stream.choice] = Closed(tokens, stream.reason, message)
        return tokens

    @property
    def complete(self) -> bool:
        """True when every choice is closed."""
        return len(self._closed) == self.opened.choices

    def end(self) -> bytes:
        """The last frame of a stream, or the one reply."""
        facts = self._facts()
        if not self.opened.stream:
            whole = [(self.choices[i].drain(), self._closed[i].reason) for i in sorted(self._closed)]
            return frames.answer(self.opened, whole, facts)
        choices: list[dict[str, Any]] = [
            {"index": i, "tokens": closed.tokens, "finish_reason": closed.reason}
            for i, closed in sorted(self._closed.items())
        ]
        return self._frames.done(choices, facts)

    def failure(self, error: HeadraceError) -> bytes:
        """The last frame, or the one reply, of a request that fails."""
        if self.opened.stream:
            return self._frames.error(error, self.trace)
        return error_reply(error, self.opened.request, self.trace)

    def _facts(self) -> dict[str, Any]:
        closed = self._closed.values()
        prompt = self.opened.prompt_tokens
        completion = sum(c.tokens for c in closed)
        # The choices share one prompt: what the most fortunate of them found in the cache was
        # computed by another one.
        cached = min(c.message.usage.cached_tokens for c in closed)
        timings = slowest(c.message.timings for c in closed)
        longest = max(c.tokens for c in closed)
        facts: dict[str, Any] = {"timings": frames.timings_body(timings, prompt, longest)}
        if self.opened.include_usage:
            facts["usage"] = frames.usage_body(prompt, completion, cached)
        return facts


def slowest(timings: Iterable[Timings]) -> Timings:
    """The timings of the choice that took longest."""
    return max(timings, key=lambda t: t.queue_us + t.prefill_us + t.decode_us)
