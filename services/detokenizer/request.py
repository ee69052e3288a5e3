"""One request as the detokenizer sees it: its choices, and when they are all closed its end."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from services.detokenizer import frames
from services.detokenizer.frames import FrameMaker
from services.detokenizer.stream import Delta, SequenceStream, merged
from shared.errors import HeadraceError
from shared.messages import Close, Open, Timings, Tokenized
from shared.replies import error_reply
from shared.vocabulary import Vocabulary

MAX_SENT = 256  # pieces kept for a reader that missed them; then they become one: 200 bytes a piece add up


@dataclass(frozen=True, slots=True)
class Closed:
    """A choice at its end."""

    tokens: int
    reason: str
    message: Close


class RequestText:
    """The reply of one request. `number` names it on this shard (see subjects.gone)."""

    __slots__ = (
        "_frames", "_reply", "_sent", "choices", "closed", "deaths", "ended", "error", "first_us", "kept",
        "number", "opened", "opened_us", "trace", "unwanted",
    )  # fmt: skip

    def __init__(self, opened: Open, number: int, trace: str) -> None:
        self.opened = opened
        self.number = number
        self.trace = trace
        self.kept: Tokenized | None = None  # as it was asked: for another scheduler
        self.deaths = 0  # of schedulers that had it, and others went on
        self.unwanted: HeadraceError | None = None  # why nobody should go on with it
        self.choices: dict[int, SequenceStream] = {}  # by index
        self.closed: dict[int, Closed] = {}
        self._frames = FrameMaker(opened)
        self._sent: list[tuple[int, Delta]] = []  # by choice: for a reader that missed it
        self._reply = b""  # of a plain request, as sent
        self.ended = False
        self.error: HeadraceError | None = None
        self.opened_us = 0  # wall stamps, for its spans
        self.first_us = 0  # the first text was sent, or joined an answer that is not streamed

    def add(self, opened: Open, vocabulary: Vocabulary) -> SequenceStream:
        """A choice of this request begins."""
        stream = self.choices[opened.choice] = SequenceStream(opened, vocabulary)
        return stream

    @property
    def seqs(self) -> array[int]:
        """The sequences of this request at its scheduler, in the order of its choices."""
        return array("i", (s.seq for _, s in sorted(self.choices.items()) if s.seq >= 0))

    def accepted(self) -> bytes:
        """The first frame."""
        return self._frames.accepted()

    def delta(self) -> bytes:
        """A frame with all text not sent yet; empty when there is none."""
        waiting = [(i, s.drain()) for i, s in self.choices.items() if s.waiting]
        self._sent += waiting
        if len(self._sent) > MAX_SENT:
            self._sent = self._sent_whole()
        return self._frames.delta(waiting) if waiting else b""

    def start_over(self) -> bytes:
        """The first frame of a new attempt of this stream."""
        self._frames.start_over()
        return self._frames.accepted()

    def all_text(self) -> bytes:
        """The frame that follows `accepted`, with the whole text so far; empty when there is none."""
        self._frames.rewind()
        self._sent += [(i, s.drain()) for i, s in self.choices.items() if s.waiting]
        whole = self._sent = self._sent_whole()
        return self._frames.delta(whole) if whole else b""

    def _sent_whole(self) -> list[tuple[int, Delta]]:
        """What was sent, one piece for each choice."""
        texts: dict[int, list[Delta]] = {}
        for i, delta in self._sent:
            texts.setdefault(i, []).append(delta)
        return [(i, merged(deltas)) for i, deltas in sorted(texts.items())]

    def last_again(self) -> bytes:
        """The last message once more, after `end` or `failure`."""
        if not self.opened.stream:
            return self._reply
        return self._frames.error(self.error, self.trace) if self.error is not None else self.end()

    def close(self, stream: SequenceStream, message: Close) -> int:
        """End one choice; its true number of tokens. Raises TokenGap."""
        tokens = stream.close(message.final, message.reason)
        self.closed[stream.choice] = Closed(tokens, stream.reason, message)
        return tokens

    def broken(self, stream: SequenceStream, message: Close) -> None:
        """One choice has failed, and the request with it."""
        self.closed[stream.choice] = Closed(message.final, message.reason, message)

    @property
    def complete(self) -> bool:
        """True when every choice is closed."""
        return len(self.closed) == self.opened.choices

    def end(self) -> bytes:
        """The last frame of a stream, or the one reply."""
        facts = self._facts()
        self.ended = True
        if not self.opened.stream:
            whole = [(self.choices[i].drain(), self.closed[i].reason) for i in sorted(self.closed)]
            self._reply = frames.answer(self.opened, whole, facts)
            return self._reply
        choices: list[dict[str, Any]] = [
            {"index": i, "tokens": closed.tokens, "finish_reason": closed.reason}
            for i, closed in sorted(self.closed.items())
        ]
        return self._frames.done(choices, facts)

    def failure(self, error: HeadraceError) -> bytes:
        """The last frame, or the one reply, of a request that fails."""
        self.ended, self.error = True, error
        if self.opened.stream:
            return self._frames.error(error, self.trace)
        self._reply = error_reply(error, self.opened.request, self.trace)
        return self._reply

    def _facts(self) -> dict[str, Any]:
        closed = self.closed.values()
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
