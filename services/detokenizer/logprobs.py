"""Log probabilities in the two shapes of the OpenAI API: chat and completion.

After a detokenizer has died, the tokens it had shown are known here without them: the lists then
begin with the first token of the new attempt that came with its probability.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from shared.messages import Tokens
from shared.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True)
class Score:
    """The natural log probability of one generated token, and its likeliest alternatives."""

    token: int
    logprob: float
    alternatives: tuple[tuple[int, float], ...] = ()  # (token, logprob), likeliest first


@dataclass(slots=True)
class ScoreReader:
    """Walks the logprob columns of one Tokens message, row by row."""

    step: Tokens
    _at: int = field(default=0)  # in ids
    _top: int = field(default=0)  # in top_ids

    def next_row(self, count: int) -> list[Score]:
        """The scores of the next `count` ids; none when the columns are empty."""
        step, scores = self.step, []
        for at in range(self._at, self._at + count):
            tops = step.top_counts[at] if step.top_counts else 0
            found = zip(
                step.top_ids[self._top : self._top + tops],
                step.top_logprobs[self._top : self._top + tops],
                strict=True,
            )
            if step.logprobs:
                scores.append(Score(step.ids[at], step.logprobs[at], tuple(found)))
            self._top += tops
        self._at += count
        return scores


class LogprobShape:
    """Builds the `logprobs` object of one choice, piece by piece."""

    __slots__ = ("_chat", "_offset", "_vocabulary")

    def __init__(self, vocabulary: Vocabulary, chat: bool) -> None:
        self._vocabulary = vocabulary
        self._chat = chat
        self._offset = 0  # characters, of the token texts so far

    def body(self, scores: list[Score]) -> dict[str, Any]:
        """`logprobs` of the given tokens, which follow those of the call before."""
        if self._chat:
            return {"content": [self._chat_entry(score) for score in scores]}
        texts = [self._vocabulary.token_text(score.token) for score in scores]
        offsets = []
        for text in texts:
            offsets.append(self._offset)
            self._offset += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [_rounded(score.logprob) for score in scores],
            "top_logprobs": [
                {self._vocabulary.token_text(token): _rounded(value) for token, value in score.alternatives}
                for score in scores
            ],
            "text_offset": offsets,
        }

    def _chat_entry(self, score: Score) -> dict[str, Any]:
        tops = [self._named(token, value) for token, value in score.alternatives]
        return {**self._named(score.token, score.logprob), "top_logprobs": tops}

    def _named(self, token: int, value: float) -> dict[str, Any]:
        text = self._vocabulary.token_text(token)
        data = self._vocabulary.token_bytes[token] if token < self._vocabulary.size else b""
        return {"token": text, "logprob": _rounded(value), "bytes": list(data or text.encode())}


def _rounded(value: float) -> float:
    """float32 has no more digits."""
    return round(value, 6)
