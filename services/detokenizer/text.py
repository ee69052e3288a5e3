"""A `SequenceStream` is the text of one sequence: ids in by token index, text out with the covered indices.

Text is sent in whole characters (`TextDecoder`), without a possible start of a stop string (`StopFinder`). A
stop string counts in the content of an answer, not in its reasoning and its calls (`ContentStops`).
Log probabilities have the two shapes of the OpenAI API, chat and completion (`LogprobShape`).
"""

from __future__ import annotations

import codecs
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from shared.answer_formats.formats import chosen, markers_of
from shared.answer_formats.parser import AnswerParser, called_functions, can_reason, reasoning_tokens
from shared.codec import MAX_CALL_CHARS, MAX_CALLS
from shared.errors import EngineError
from shared.messages import Open, PromptTokens, Tokens
from shared.vocab.vocabulary import Vocabulary


class TokenGap(EngineError):
    """Tokens of a sequence are missing: its text cannot continue."""


@dataclass(slots=True)
class Delta:
    """Unsent text of `count` tokens from token index `first` on. Unfinished characters and possible stop
    strings are held back, so that `count` tokens may have no text."""

    first: int
    count: int
    text: str
    logprobs: dict[str, Any] | None = field(default=None)


@dataclass(slots=True)
class Mark:
    """How far a second reader has read the undrained text of a sequence. It is not sent `skip` characters."""

    skip: int = 0
    pieces: int = 0
    tokens: int = 0
    scores: int = 0
    shape: LogprobShape | None = None


@dataclass(frozen=True, slots=True)
class Score:
    """The natural log probability of one generated token, and its likeliest alternatives."""

    token: int
    logprob: float
    alternatives: tuple[tuple[int, float], ...] = ()  # (token, logprob), likeliest first


class SequenceStream:
    """One choice of one request, from Open to Close."""

    __slots__ = (
        "_decoder", "_finder", "_format", "_least", "_pieces", "_scores", "_sent", "_shape",
        "choice", "ended", "ids", "reason", "seq", "stop", "stop_index", "stop_reported", "taken",
    )  # fmt: skip

    def __init__(self, opened: Open, vocabulary: Vocabulary) -> None:
        self.seq = opened.seq  # at its scheduler; -1: the new scheduler has not opened it yet
        self.choice = opened.choice
        self.taken = 0  # tokens read, up to the last token of a stop string
        self.ids = array("i")  # these tokens, for another scheduler if this one dies
        self.stop_index: int | None = None
        self.stop_reported = False  # to its scheduler
        self.ended = False
        self.reason = ""
        self.stop = ""  # the stop string that ended it
        self._sent = 0
        self._pieces: list[str] = []
        self._format = opened.answer_format
        silent = () if opened.include_stop else opened.stop_ids
        self._decoder = TextDecoder(
            vocabulary, frozenset(silent), opened.format == "completion", markers_of(opened.answer_format)
        )
        # None when not asked for
        self._shape = LogprobShape(vocabulary, opened.format == "chat") if opened.logprobs else None
        self._scores: list[Score] = []
        self._finder = _finder_of(opened) if opened.stop else None
        self._least = opened.min_tokens

    def add_tokens(self, first: int, ids: array[int], scores: Sequence[Score] = ()) -> bool:
        """Read tokens from index `first` on. True if they complete a stop string, and again when a new
        scheduler reaches it. Duplicate tokens and tokens after a stop string are dropped. `scores` are for
        these ids, or empty. Raises TokenGap."""
        if self.stop_index is not None or self.ended:
            late = self.stop_index is not None and not (self.ended or self.stop_reported)
            self.stop_reported |= late and first + len(ids) >= self.taken
            return late and self.stop_reported
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
        self.stop_reported = self.stop_index is not None
        return self.stop_reported

    def hand_over(self) -> None:
        """Another scheduler resumes the sequence; its Open brings the new number."""
        self.seq, self.stop_reported = -1, False

    def _take_watching(self, finder: StopFinder | ContentStops, ids: array[int]) -> None:
        """Read token by token, to find the index of the token that completes a stop string, or that decides
        that it is content. A stop string begins after `min_tokens` tokens."""
        for i in range(len(ids)):
            self.taken += 1
            text = self._decoder.feed(ids[i : i + 1])
            text, found = finder.feed(text) if self.taken > self._least else (finder.skip(text), False)
            if text:
                self._pieces.append(text)
            if found:
                self.stop_index = self.taken
                return

    @property
    def has_text(self) -> bool:
        """True if there is text to send."""
        return bool(self._pieces)

    def drain(self) -> Delta:
        """The text since the last drain."""
        delta = Delta(self._sent, self.taken - self._sent, "".join(self._pieces))
        if self._shape is not None:
            delta.logprobs, self._scores = self._shape.body(self._scores), []
        self._sent = self.taken
        self._pieces.clear()
        return delta

    @property
    def unsent(self) -> str:
        """The text that `drain` would return."""
        return "".join(self._pieces)

    @property
    def scores(self) -> Sequence[Score]:
        """The log probabilities that `drain` would return: of an answer without a stream, all."""
        return self._scores

    def since(self, mark: Mark) -> Delta | None:
        """The text after `mark`, which moves to its end; None if there is none. Nothing is drained."""
        text = "".join(self._pieces[mark.pieces :])[mark.skip :]
        if not text:
            return None
        delta = Delta(mark.tokens, self.taken - mark.tokens, text)
        if self._shape is not None:
            mark.shape = mark.shape or self._shape.anew()
            delta.logprobs = mark.shape.body(self._scores[mark.scores :])
        mark.skip, mark.pieces = 0, len(self._pieces)
        mark.tokens, mark.scores = self.taken, len(self._scores)
        return delta

    def close(self, final: int, reason: str) -> int:
        """End the text at `final` tokens or at the stop string, the earlier of both. Returns the true number
        of tokens and sets the true `reason`. Raises TokenGap."""
        if final > self.taken and self.stop_index is None:
            raise TokenGap(f"tokens {self.taken} to {final - 1} of the answer were lost; send it again")
        self.ended = True
        if self.stop_index is not None and self.stop_index <= final:
            self.reason = "stop"
            self.stop = self._finder.found if self._finder is not None else ""
            return self.stop_index
        self.reason = reason
        if self.stop_index is None and (stop := self._finish_text()):
            self.reason, self.stop = "stop", stop
        return final

    def reasoning_tokens(self, final: int) -> int | None:
        """How many of the first `final` tokens are reasoning; None if the model's answers have none."""
        return reasoning_tokens(self._format, self.ids[:final], self._decoder.table)

    def calls(self, final: int) -> tuple[str, ...]:
        """The functions that the answer of `final` tokens calls, as many and as much of each as Ended has.
        Half of a surrogate pair, which a model can write as an escape and no message holds, becomes `?`."""
        names = called_functions(self._format, self.ids[:final], self._decoder.table)
        cut = [name[:MAX_CALL_CHARS] for name in names[:MAX_CALLS]]
        return tuple(name.encode("utf-8", "replace").decode() for name in cut)

    def _finish_text(self) -> str:
        """Add the held text. Returns a stop string in it: some text is content only by the end after it."""
        rest = self._decoder.finish()
        if self._finder is not None:
            shown, found = self._finder.feed(rest)
            rest = shown if found else shown + self._finder.finish()
        if rest:
            self._pieces.append(rest)
        return self._finder.found if self._finder is not None else ""


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


class TextDecoder:
    """The incremental form of `Vocabulary.decode`: the concatenated pieces equal its result. The ids in
    `silent` end a sequence and have no text. Text that continues a prompt (`goes_on`) keeps its leading
    space. Control tokens among `markers` have their name as text."""

    __slots__ = ("_rest", "_silent", "_strip", "table")

    def __init__(
        self,
        vocabulary: Vocabulary,
        silent: frozenset[int] = frozenset(),
        goes_on: bool = False,
        markers: frozenset[str] = frozenset(),
    ) -> None:
        self.table = vocabulary.bytes_with(markers)
        self._silent = silent
        self._rest = b""  # the first bytes of a character
        self._strip = vocabulary.must_strip_space and not goes_on

    def feed(self, ids: array[int]) -> str:
        """The text that `ids` complete. Ids outside the vocabulary, possible with a padded output layer, have
        no text."""
        if ids and ids[-1] in self._silent:
            ids = ids[:-1]
        try:
            data = b"".join([self.table[i] for i in ids])
        except IndexError:
            size = len(self.table)
            data = b"".join([self.table[i] for i in ids if i < size])
        if self._strip and data:
            self._strip = False
            data = data.removeprefix(b" ")
        if not self._rest and data.isascii():
            return data.decode("ascii")
        data = self._rest + data
        text, used = codecs.utf_8_decode(data, "replace", False)
        self._rest = data[used:]
        return text

    def finish(self) -> str:
        """The replacement text for an unfinished character at the end."""
        text, self._rest = self._rest.decode("utf-8", "replace"), b""
        return text


class StopFinder:
    """Finds the first complete stop string, across token borders.

    It holds back the longest suffix of the text that may become a stop string, and no more.
    """

    __slots__ = ("_begins", "_held", "_include", "_stops", "found")

    def __init__(self, stops: tuple[str, ...], include: bool) -> None:
        self._stops = stops
        self._begins = frozenset(stop[0] for stop in stops)
        self._include = include
        self._held = ""
        self.found = ""  # the stop string that is complete

    def feed(self, piece: str) -> tuple[str, bool]:
        """Returns (text to send, whether a stop string is complete). Do not call it after a stop string."""
        if not self._held and self._begins.isdisjoint(piece):
            return piece, False
        text = self._held + piece
        ends = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if ends:
            end, start = min(ends)
            self._held, self.found = "", text[start:end]
            return text[: end if self._include else start], True
        cut = min((self._may_begin(stop, text) for stop in self._stops), default=len(text))
        self._held = text[cut:]
        return text[:cut], False

    def skip(self, piece: str) -> str:
        """Pass text over before the first `feed`. Returns the text to send."""
        return piece

    def finish(self) -> str:
        """The held text, at the end of the sequence."""
        text, self._held = self._held, ""
        return text

    @staticmethod
    def _may_begin(stop: str, text: str) -> int:
        """The index of the longest suffix of `text` that is a prefix of `stop`, else the length of `text`."""
        at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
        while at >= 0:
            if stop.startswith(text[at:]):
                return at
            at = text.find(stop[0], at + 1)
        return len(text)


class ContentStops:
    """Finds the first complete stop string in the content of an answer that may have reasoning or calls.

    It holds back what the parser may still take for content, and in content what a StopFinder holds back.
    """

    __slots__ = ("_calls", "_end", "_finder", "_only", "_parser", "_sent", "_shown", "_skipped", "_text")

    def __init__(self, finder: StopFinder, parser: AnswerParser, *, calls: bool) -> None:
        """`calls`: content may end. Without calls it has reasoning before it alone."""
        self._finder = finder
        self._parser = parser
        self._calls = calls
        self._only = False  # the rest of the answer is content
        self._text = ""  # not sent yet
        # Places in the answer, in characters:
        self._sent = 0  # of `_text`
        self._end = 0  # of the content that was searched
        self._shown = 0  # up to there it has no start of a stop string
        self._skipped = 0  # stop strings begin there, or later

    @property
    def found(self) -> str:
        """The stop string that is complete."""
        return self._finder.found

    def feed(self, piece: str) -> tuple[str, bool]:
        """As StopFinder.feed."""
        return self._finder.feed(piece) if self._only else self._advance(piece, last=False)

    def skip(self, piece: str) -> str:
        """As StopFinder.skip."""
        if self._only:
            return piece
        self._skipped += len(piece)
        return self._advance(piece, last=False)[0]

    def finish(self) -> str:
        """The held text, at the end of the sequence, up to a stop string that is complete."""
        return self._finder.finish() if self._only else self._advance("", last=True)[0]

    def _advance(self, piece: str, *, last: bool) -> tuple[str, bool]:
        self._text += piece
        self._parser.feed(piece, last=last)
        for begin, end in self._parser.content():
            start = max(begin, self._skipped)
            if start != self._end:  # a stop string lies within one piece of content
                self._finder.finish()
                self._shown = start
            self._end = max(end, start)
            text, found = self._finder.feed(self._text[start - self._sent : end - self._sent])
            self._shown += len(text)
            if found:
                return self._cut(self._shown), True
        decided = self._parser.decided
        self._only = not self._calls and 0 < decided == self._end
        return self._cut(decided if last or decided != self._end else self._shown), False

    def _cut(self, place: int) -> str:
        """The text up to a place."""
        text, self._text = self._text[: place - self._sent], self._text[place - self._sent :]
        self._sent = place
        return text


def _finder_of(opened: Open) -> StopFinder | ContentStops:
    finder = StopFinder(opened.stop, opened.include_stop)
    form, thinking = chosen(opened.answer_format)
    if form is None or not (opened.most_calls or can_reason(form)):
        return finder
    tools: dict[str, Any] | None = {} if opened.most_calls else None
    parser = AnswerParser(form, thinking=thinking, tools=tools, parallel=opened.most_calls > 1)
    return ContentStops(finder, parser, calls=tools is not None or form.think is None)


@dataclass(slots=True)
class ScoreReader:
    """Walks the logprob columns of one Tokens message, row by row."""

    step: Tokens | PromptTokens
    _at: int = field(default=0)  # in ids
    _top: int = field(default=0)  # in top_ids

    def next_row(self, count: int) -> list[Score]:
        """The scores of the next `count` ids; empty if the columns are."""
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
    """Builds the `logprobs` object of one choice, piece by piece.

    After a failover from another detokenizer, earlier tokens have no probabilities here: the lists start with
    the first token of the new attempt that has one.
    """

    __slots__ = ("_chat", "_offset", "_vocabulary")

    def __init__(self, vocabulary: Vocabulary, chat: bool) -> None:
        self._vocabulary = vocabulary
        self._chat = chat
        self._offset = 0  # characters, of the token texts so far

    def anew(self) -> LogprobShape:
        """The same shape for a reader that has nothing yet."""
        return LogprobShape(self._vocabulary, self._chat)

    def prompt(self, scores: Sequence[Score], ranks: Sequence[int]) -> list[dict[str, Any]]:
        """The log probabilities of a prompt in vLLM's form: by token id, the token itself first. The first
        token follows none and has null."""
        entries = []
        for score, rank in zip(scores, ranks, strict=True):
            entry = {str(score.token): self._ranked(score.token, score.logprob, rank)}
            for nth, (token, value) in enumerate(score.alternatives):
                entry.setdefault(str(token), self._ranked(token, value, nth + 1))
            entries.append(entry)
        return entries

    def _ranked(self, token: int, value: float, rank: int) -> dict[str, Any]:
        text = self._vocabulary.token_text(token)
        return {"logprob": _rounded(value) if rank else None, "rank": rank or None, "decoded_token": text}

    def body(self, scores: list[Score]) -> dict[str, Any]:
        """`logprobs` of the tokens that follow those of the previous call."""
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
            "top_logprobs": [self._tops(score) for score in scores],
            "text_offset": offsets,
        }

    def _tops(self, score: Score) -> dict[str, float]:
        """The alternatives by text: of those with one text, parts of characters, the most probable."""
        found: dict[str, float] = {}
        for token, value in score.alternatives:
            found.setdefault(self._vocabulary.token_text(token), _rounded(value))
        return found

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
