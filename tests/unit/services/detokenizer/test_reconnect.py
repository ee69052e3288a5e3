"""After the broker was away: a reader that comes back at any time ends up with the whole text, once."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.text_models import write_sentencepiece_gguf

from services.detokenizer.core import DetokenizerCore
from services.detokenizer.reconnect import TURNS
from services.detokenizer.response import MAX_SENT, Command, Publish, SendTo
from shared.client.client import FrameOrder
from shared.messages import Close, Detached, Message, Open, Tokens, floats, ints
from shared.vocab.files import ModelFiles
from shared.vocab.vocabulary import Vocabulary, load_vocabulary

SCHEDULER = "scheduler.a"


@pytest.fixture(scope="module")
def letters(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    """Tokens 3 to 258 are the bytes 0 to 255."""
    path = write_sentencepiece_gguf(tmp_path_factory.mktemp("replay") / "l.gguf", {})
    return load_vocabulary(ModelFiles("l", path))


@dataclass
class Line:
    """A detokenizer, a broker that may lose frames, and a reader that may not listen."""

    core: DetokenizerCore
    stream: bool = True
    listens: bool = True
    loses: bool = False  # the broker is about to die: what it takes now is lost, silently
    order: FrameOrder = field(default_factory=FrameOrder)
    text: str = ""
    scores: list[float] = field(default_factory=list)
    ends: list[dict[str, Any]] = field(default_factory=list)
    replies: list[Message] = field(default_factory=list)
    sent: int = 0  # tokens

    def deliver(self, *messages: Message) -> None:
        for message in messages:
            self.carry(self.core.handle(SCHEDULER, message))

    def open(self, **more: Any) -> None:
        fields = {"request": "r", "attempt": 1, "tenant": "t", "model": "m", "inbox": "in"}
        self.deliver(Open(seq=7, stream=self.stream, **{**fields, **more}))

    def tokens(self, text: str) -> None:
        ids = ints(3 + byte for byte in text.encode())
        scores = floats(-byte for byte in text.encode())
        counts, first = ints([len(ids)]), ints([self.sent])
        self.deliver(
            Tokens(executor="e", step=1, seqs=ints([7]), first=first, counts=counts, ids=ids, logprobs=scores)
        )
        self.sent += len(ids)

    def flush(self) -> None:
        self.carry(self.core.flush())

    def turn(self) -> None:
        self.carry(self.core.advance_reconnect())

    def close(self) -> None:
        self.deliver(Close(seq=7, final=self.sent, reason="length"))

    def cut(self) -> None:
        self.core.reconnect.on_broker_lost()

    def mend(self) -> None:
        self.loses = False
        self.core.reconnect.on_broker_back(self.core.streams)

    def carry(self, commands: list[Command]) -> None:
        absent = []
        for command in commands:
            if isinstance(command, SendTo):
                self.replies.append(command.message)
            elif isinstance(command, Publish) and not self.loses:
                if self.listens:
                    self.read(json.loads(command.data))
                else:
                    absent.append(command.number)
        for number in absent:  # the server's 503 comes later
            self.carry(self.core.on_client_gone(number))

    def read(self, frame: dict[str, Any]) -> None:
        if self.ends:
            return  # a reader has left its inbox after the end
        if not self.stream:
            self.ends.append(frame)
            return
        assert self.order.accept(frame), self.order.gap
        if frame["type"] == "accepted":
            self.text, self.scores = "", []
        elif frame["type"] == "delta":
            (choice,) = frame["choices"]
            self.text += choice["delta"]["content"]
            self.scores += [s["logprob"] for s in (choice.get("logprobs") or {}).get("content", [])]
        else:
            self.ends.append(frame)


def line(letters: Vocabulary, stream: bool = True) -> Line:
    return Line(DetokenizerCore(letters), stream)


def test_a_stream_is_begun_again_with_all_its_text(letters: Vocabulary) -> None:
    at = line(letters)
    at.open()
    at.tokens("river ")
    at.flush()
    at.loses = True
    at.tokens("mill ")
    at.flush()
    at.cut()
    at.mend()
    at.tokens("wheel ")
    at.flush()
    assert at.text == "river ", "nothing is sent before the reader is known to listen"
    at.turn()
    assert at.text == ""  # a new attempt
    at.turn()
    assert at.text == "river mill wheel "
    at.tokens("lock")
    at.flush()
    at.close()
    assert (at.text, at.ends[0]["type"], at.order.attempt) == ("river mill wheel lock", "done", 2)
    at.turn()
    assert at.core.is_idle
    assert at.core.status()["frames"] == 7  # accepted, two deltas; accepted, two deltas, done: none twice


@pytest.mark.parametrize("late", [0, 1, 5, TURNS - 2])
def test_a_reader_that_comes_back_late_gets_everything(letters: Vocabulary, late: int) -> None:
    at = line(letters)
    at.open(logprobs=1)
    at.tokens("ab")
    at.flush()
    at.cut()
    at.listens = False
    at.mend()
    for _ in range(late):
        at.turn()
    assert at.replies == []
    at.tokens("c")
    at.close()
    at.listens = True
    for _ in range(TURNS):
        at.turn()
    assert (at.text, len(at.ends)) == ("abc", 1)
    assert at.scores == [-97, -98, -99]
    assert at.core.is_idle


@pytest.mark.parametrize("stream", [True, False])
def test_an_end_lost_with_the_broker_is_sent_again(letters: Vocabulary, stream: bool) -> None:
    at = line(letters, stream)
    at.open()
    at.tokens("done")
    at.flush()
    at.loses = True
    at.close()
    assert at.ends == []
    at.cut()
    at.core.reconnect.age()
    at.core.reconnect.age()  # a long outage does not count
    at.listens = False
    at.mend()
    for _ in range(3):
        at.turn()
    at.listens = True
    at.turn()
    at.turn()
    (end,) = at.ends
    assert at.text == "done" if stream else end["choices"][0]["message"]["content"] == "done"


def test_an_answer_that_ends_before_its_reader_is_back_waits_for_it(letters: Vocabulary) -> None:
    at = line(letters, stream=False)
    at.open()
    at.tokens("late")
    at.cut()
    at.mend()
    at.listens = False
    at.close()
    at.turn()
    at.turn()
    at.listens = True
    at.turn()
    assert at.ends[0]["choices"][0]["message"]["content"] == "late"
    assert not at.core.is_idle, "one turn without a 503 makes sure"
    at.turn()
    assert at.core.is_idle


def test_stream_that_ended_long_ago_is_forgotten(letters: Vocabulary) -> None:
    at = line(letters)
    at.open()
    at.tokens("x")
    at.close()
    at.core.reconnect.age()
    at.core.reconnect.age()
    at.cut()
    at.mend()
    assert len(at.core.reconnect) == 0


def test_a_reader_that_stays_away_has_gone(letters: Vocabulary) -> None:
    at = line(letters)
    at.open()
    at.tokens("x")
    at.flush()
    at.cut()
    at.listens = False
    at.mend()
    for _ in range(TURNS - 1):
        at.turn()
    assert at.replies == []
    at.turn()
    assert at.replies == [Detached(seqs=ints([7]))]
    assert not at.core.reconnect.is_active


def test_failure_is_sent_again_as_well(letters: Vocabulary) -> None:
    at = line(letters)
    at.open()
    at.tokens("part")
    at.flush()
    at.loses = True
    at.carry(at.core.failover.on_lost(SCHEDULER, "the scheduler has gone"))
    at.cut()
    at.mend()
    at.turn()
    at.turn()
    assert (at.text, at.ends[0]["error"]["code"]) == ("part", 503)


def test_text_that_the_replay_has_sent_leaves_no_empty_frame(letters: Vocabulary) -> None:
    at = line(letters)
    at.open()
    at.cut()
    at.mend()
    at.turn()
    at.tokens("ab")
    at.turn()
    at.flush()
    at.close()
    assert (at.text, len(at.ends)) == ("ab", 1)


def test_long_stream_is_kept_as_its_text(letters: Vocabulary) -> None:
    at = line(letters)
    at.open()
    for _ in range(2 * MAX_SENT):
        at.tokens("ab")
        at.flush()
    (request,) = at.core.streams
    assert len(request._sent) <= MAX_SENT
    at.cut()
    at.mend()
    at.turn()
    at.turn()
    assert at.text == "ab" * (2 * MAX_SENT)


WORDS = st.lists(st.text(alphabet="abcé", min_size=1, max_size=3), max_size=4)


@given(WORDS, WORDS, WORDS, WORDS, st.integers(0, 4), st.integers(0, TURNS - 3), st.booleans())
def test_any_order_of_events_gives_the_text_once(
    letters: Vocabulary,
    before: list[str],
    lost: list[str],
    away: list[str],
    back: list[str],
    ends: int,
    late: int,
    stream: bool,
) -> None:
    at = line(letters, stream)
    at.open()
    sent = ""
    for phase, words in enumerate((before, lost, away, back)):
        if phase == 1:
            at.loses = True
        if phase == 2:
            at.cut()
            at.listens = False
            at.mend()
        if phase == 3:
            for _ in range(late):
                at.turn()
            at.listens = True
            at.turn()
        for word in words if phase < ends or ends == 4 else []:
            at.tokens(word)
            at.flush()
            sent += word
        if phase == ends or (phase == 3 and ends == 4):
            at.close()
    for _ in range(TURNS):
        at.turn()
    (end,) = at.ends
    assert (at.text if stream else end["choices"][0]["message"]["content"]) == sent
    assert at.core.is_idle


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("turns_before", [0, 1, 2])
def test_a_broker_that_dies_again_loses_no_end(letters: Vocabulary, stream: bool, turns_before: int) -> None:
    """Back for a moment, away for longer than readers have, back: nothing counts while it is away."""
    at = line(letters, stream)
    at.open()
    at.tokens("done")
    at.loses = True
    at.close()
    at.cut()
    at.listens = False
    at.mend()
    for _ in range(turns_before):
        at.turn()
    at.core.reconnect.age()
    at.core.reconnect.age()
    at.loses = True  # no 503 comes from a server that is away
    at.cut()
    for _ in range(2 * TURNS):
        at.turn()
        at.core.reconnect.age()
    at.mend()
    for _ in range(TURNS // 2):
        at.turn()
    at.listens = True
    for _ in range(TURNS // 2):
        at.turn()
    (end,) = at.ends
    assert at.text == "done" if stream else end["choices"][0]["message"]["content"] == "done"
    assert at.core.is_idle


def test_the_end_itself_is_seen_to_arrive(letters: Vocabulary) -> None:
    """A reader that received the new attempt and was cut off before the text."""
    at = line(letters)
    at.open()
    at.tokens("done")
    at.loses = True
    at.close()
    at.cut()
    at.mend()
    at.turn()
    at.listens = False
    at.turn()
    at.listens = True
    for _ in range(4):
        at.turn()
    assert (at.text, len(at.ends)) == ("done", 1)
    assert at.core.is_idle


def test_another_detokenizer_continues_after_any_number_of_new_attempts(letters: Vocabulary) -> None:
    first = line(letters)
    first.open()
    first.tokens("ab")
    first.flush()
    for _ in range(3):
        first.cut()
        first.mend()
        for _ in range(TURNS):
            first.turn()
    second = Line(DetokenizerCore(letters), order=first.order)
    second.open(attempt=2, tokens=ints(3 + byte for byte in b"ab"))
    second.flush()
    second.sent = 2
    second.close()
    assert (second.text, [end["type"] for end in second.ends]) == ("ab", ["done"])


def test_a_503_that_comes_before_the_news_of_the_return_is_no_departure(letters: Vocabulary) -> None:
    """What waited for the broker leaves first, and no reader listens yet."""
    at = line(letters)
    at.open()
    at.tokens("ab")
    at.cut()
    (request,) = at.core.streams
    assert at.core.on_client_gone(request.number) == []
    at.mend()
    at.turn()
    at.turn()
    at.close()
    assert (at.text, len(at.ends)) == ("ab", 1)


def test_moved_stream_is_not_replayed(letters: Vocabulary) -> None:
    at = line(letters)
    at.open()
    at.cut()
    at.mend()
    at.deliver(Close(seq=7, final=0, reason="moved"))
    assert at.core.advance_reconnect() == []
    assert at.core.is_idle


def test_a_detokenizer_with_an_end_to_repeat_is_not_idle(letters: Vocabulary) -> None:
    at = line(letters)
    at.open()
    at.cut()
    at.close()
    assert not at.core.is_idle
    at.mend()
    for _ in range(3):
        at.turn()
    assert (len(at.ends), at.core.is_idle) == (1, True)
