"""`Savepoints` decides when a durable request's tokens are stored, so that it goes on after the loss of
everything. Pure; the actor asks every SAVEPOINT_S while there are such requests, so a token costs nothing.

    open ──GROWN tokens, or EACH_US──▶ savepoint: the message for another scheduler, with all tokens so far

A savepoint has all tokens, so its size grows with the answer. The next one is due when the tokens have grown
by 1/GROWTH, or after a time that is longer for a long text. So the savepoints of an answer have together at
most GROWTH times its tokens, and TOKENS_A_SECOND more for each second.
"""

from __future__ import annotations

from dataclasses import dataclass

from services.detokenizer.failover import resumption
from services.detokenizer.response import OpenRequests, ResponseText
from shared import savepoints
from shared.messages import Tokenized, Tokens, floats, ints
from shared.nats import subjects

SAVEPOINT_S = 0.1
GROWN, GROWTH = 64, 8  # new tokens: at least GROWN, and 1/GROWTH of all tokens with the prompt
EACH_US = 1_000_000
TOKENS_A_SECOND = 4_096  # 16 kB a second for a request
MOST_A_TURN = 64  # savepoints, of some 50 µs each
MOST_SCORES = 16_384  # log probabilities of a savepoint, packed in 5 ms; a longer answer keeps its last one


@dataclass(frozen=True, slots=True)
class Savepoint:
    """Store these bytes under the subject, without waiting."""

    subject: str
    data: bytes


class Savepoints:
    """The last savepoint of each open request that has some."""

    def __init__(self, table: OpenRequests) -> None:
        self._table = table
        self._last: dict[int, tuple[int, int]] = {}  # tokens and time, by number of the request

    @property
    def is_active(self) -> bool:
        """True while `take_due` may have work."""
        return bool(self._table.savepointed)

    def take_due(self, now_us: int) -> list[Savepoint]:
        """The savepoints that are due, those first that have waited longest."""
        last, self._last, due = self._last, {}, []
        for number, request in self._table.savepointed.items():
            before, at_us = self._last[number] = last.get(number, (0, request.since_us))
            tokens = sum(len(stream.ids) for stream in request.choices.values())
            prompt = request.opened.prompt_tokens
            if is_due(tokens - before, prompt + tokens, now_us - at_us) and _is_whole(request):
                due.append((at_us, number, tokens, request))
        found = []
        for _, number, tokens, request in sorted(due, key=lambda each: each[:2])[:MOST_A_TURN]:
            self._last[number] = tokens, now_us
            found.append(_savepoint(request, now_us))
        return found


def is_due(new: int, tokens: int, passed_us: int) -> bool:
    """Whether a request with `tokens`, of which `new` are in no savepoint, needs one after this time."""
    if new <= 0:
        return False
    return new >= max(GROWN, tokens // GROWTH) or passed_us * TOKENS_A_SECOND >= EACH_US * max(
        tokens, TOKENS_A_SECOND
    )


def _is_whole(request: ResponseText) -> bool:
    """Whether everything about the text so far is known here, and wanted."""
    if request.torn or request.unwanted is not None:
        return False
    streams = request.choices.values()
    if not request.opened.logprobs:
        return True
    most = MOST_SCORES // request.opened.logprobs
    return all(len(s.scores) == len(s.ids) for s in streams) and sum(len(s.ids) for s in streams) <= most


def _savepoint(request: ResponseText, now_us: int) -> Savepoint:
    resumed = resumption(request, now_us)
    scores = _scores(request, resumed) if resumed.logprobs else None
    subject = subjects.state(resumed.tenant, resumed.request)
    return Savepoint(subject, savepoints.pack(resumed, scores))


def _scores(request: ResponseText, resumed: Tokenized) -> Tokens:
    """The log probabilities of all generated tokens; a sequence is named by its choice."""
    rows = [
        score
        for choice, count in enumerate(resumed.generated)
        if count
        for score in request.choices[choice].scores[:count]
    ]
    pairs = [pair for score in rows for pair in score.alternatives]
    return Tokens(
        executor="",
        step=0,
        seqs=ints(range(resumed.n)),
        first=ints([0] * resumed.n),
        counts=resumed.generated,
        ids=ints(score.token for score in rows),
        logprobs=floats(score.logprob for score in rows),
        top_counts=ints(len(score.alternatives) for score in rows),
        top_ids=ints(token for token, _ in pairs),
        top_logprobs=floats(value for _, value in pairs),
    )
