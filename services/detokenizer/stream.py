"""The text of one sequence: ids in by token index, text out with the indices it covers."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from services.detokenizer.logprobs import LogprobShape, Score
from services.detokenizer.text import StopFinder, TextDecoder
from shared.errors import EngineError
from shared.messages import Open
from shared.vocabulary import Vocabulary


class TokenGap(EngineError):
    """Tokens of a sequence never arrived: its text cannot be continued."""


@dataclass(slots=True)
class Delta:
    """Text not sent yet, and the tokens it stands for: `count` from token index `first` on. Text is
    held back to whole characters and past possible stop strings, so `count` tokens may have none."""

    first: int
    count: int
    text: str
    logprobs: dict[str, Any] | None = field(default=None)


def merged(deltas: Sequence[Delta]) -> Delta:
    """Successive deltas of one choice as one."""
    whole = Delta(deltas[0].first, sum(d.count for d in deltas), "".join(d.text for d in deltas))
    if deltas[0].logprobs is not None:
        lists = {name: [*value] for name, value in deltas[0].logprobs.items()}
        for delta in deltas[1:]:
            for name, value in (delta.logprobs or {}).items():
                lists[name] += value
        whole.logprobs = lists
    return whole


class SequenceStream:
    """One choice of one request, from Open to Close."""

    __slots__ = (
        "_decoder", "_finder", "_pieces", "_scores", "_sent", "_shape",
        "choice", "ended", "ids", "reason", "seq", "stop_index", "stop_told", "taken",
    )  # fmt: skip

    def __init__(self, opened: Open, vocabulary: Vocabulary) -> None:
        self.seq = opened.seq  # at its scheduler; -1: a new one has not opened it yet
        self.choice = opened.choice
        self.taken = 0  # tokens read; stays at the stop string's last token once that is found
        self.ids = array("i")  # these tokens: should the scheduler die, nobody else has them
        self.stop_index: int | None = None
        self.stop_told = False  # to its scheduler
        self.ended = False
        self.reason = ""
        self._sent = 0
        self._pieces: list[str] = []
        self._decoder = TextDecoder(vocabulary)
        # None when not asked for
        self._shape = LogprobShape(vocabulary, opened.format == "chat") if opened.logprobs else None
        self._scores: list[Score] = []
        self._finder = StopFinder(opened.stop, opened.include_stop) if opened.stop else None

    def take(self, first: int, ids: array[int], scores: Sequence[Score] = ()) -> bool:
        """Read tokens from index `first` on; True when they complete a stop string, and once more when a new
        scheduler has come so far. Tokens read before, and those behind a stop string, are dropped. `scores`
        are for these ids, or empty. Raises TokenGap."""
        if self.stop_index is not None or self.ended:
            late = self.stop_index is not None and not (self.ended or self.stop_told)
            self.stop_told |= late and first + len(ids) >= self.taken
            return late and self.stop_told
        if first != self.taken:
            if first > self.taken:
                raise TokenGap(f"tokens {self.taken} to {first - 1} of the answer were lost; send it again")
            ids, scores = ids[self.taken - first :], scores[self.taken - first :]
        before = self.taken
        if self._finder is not None:
            self._take_watching(self._finder, ids)
        else:
            self.taken += len(ids)
            if text := self._decoder.feed(ids):
                self._pieces.append(text)
        self.ids += ids[: self.taken - before]
        if self._shape is not None:
            self._scores.extend(scores[: self.taken - before])
        self.stop_told = self.stop_index is not None
        return self.stop_told

    def hand_over(self) -> None:
        """Another scheduler goes on with it, under a number that its Open brings."""
        self.seq, self.stop_told = -1, False

    def _take_watching(self, finder: StopFinder, ids: array[int]) -> None:
        """One by one, since the index of the token that completes a stop string matters."""
        for i in range(len(ids)):
            self.taken += 1
            text, found = finder.feed(self._decoder.feed(ids[i : i + 1]))
            if text:
                self._pieces.append(text)
            if found:
                self.stop_index = self.taken
                return

    @property
    def waiting(self) -> bool:
        """True when there is text to send."""
        return bool(self._pieces)

    def drain(self) -> Delta:
        """The text since the last drain."""
        delta = Delta(self._sent, self.taken - self._sent, "".join(self._pieces))
        if self._shape is not None:
            delta.logprobs, self._scores = self._shape.body(self._scores), []
        self._sent = self.taken
        self._pieces.clear()
        return delta

    def close(self, final: int, reason: str) -> int:
        """End the text at `final` tokens, or earlier at the stop string; the earliest index wins.
        Returns the true number of tokens; `reason` is true then too. Raises TokenGap."""
        if final > self.taken and self.stop_index is None:
            raise TokenGap(f"tokens {self.taken} to {final - 1} of the answer were lost; send it again")
        self.ended = True
        if self.stop_index is not None and self.stop_index <= final:
            self.reason = "stop"
            return self.stop_index
        self.reason = reason
        if self.stop_index is None:
            self._finish_text()
        return final

    def _finish_text(self) -> None:
        rest = self._decoder.finish()
        if self._finder is not None:
            shown, found = self._finder.feed(rest)
            rest = shown if found else shown + self._finder.finish()
        if rest:
            self._pieces.append(rest)
