"""The detokenizer when schedulers die: which one it sends requests to, with what, and what readers see of
it."""

from __future__ import annotations

import dataclasses
import json
from typing import Any, cast

import pytest
from support.text_models import write_sentencepiece_gguf

from services.detokenizer.actor import send
from services.detokenizer.core import DetokenizerCore
from services.detokenizer.failover import MOST_DEATHS, WAIT_TURNS
from services.detokenizer.response import Command, Publish, SendTo
from shared.actor.mailbox import Mailbox
from shared.errors import PayloadTooLarge
from shared.kv_blocks import rendezvous
from shared.messages import (
    ATTEMPTS,
    MOVED,
    Accepted,
    Cancel,
    Close,
    Detached,
    Ended,
    Message,
    Open,
    Rejected,
    StopFound,
    Tokenized,
    Tokens,
    ints,
)
from shared.vocab.files import ModelFiles
from shared.vocab.vocabulary import Vocabulary, load_vocabulary

A, B = "scheduler.a", "scheduler.b"
ASKED = Tokenized(
    request="r1",
    attempt=1,
    tenant="t",
    model="tiny",
    inbox="in",
    timeout_us=60_000_000,
    max_tokens=20,
    stream=True,
    seed=7,
    stop=("end",),
    tokens=ints([11, 12, 13]),
)
CANCELLED = [(B, Cancel(tenant="t", request="r1")), (A, Detached(seqs=ints([5]), moved=True))]


@pytest.fixture(scope="module")
def letters(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    """Tokens 3 to 258 are the bytes 0 to 255."""
    path = write_sentencepiece_gguf(tmp_path_factory.mktemp("failover") / "l.gguf", {})
    return load_vocabulary(ModelFiles("l", path))


@pytest.fixture
def core(letters: Vocabulary) -> DetokenizerCore:
    return DetokenizerCore(letters)


def ids(text: str) -> list[int]:
    return [3 + byte for byte in text.encode()]


def tokens(seq: int, first: int, text: str) -> Tokens:
    return Tokens(
        executor="e",
        step=1,
        seqs=ints([seq]),
        first=ints([first]),
        counts=ints([len(text)]),
        ids=ints(ids(text)),
    )


def opens(asked: Tokenized, seq: int, attempt: int = 1) -> list[Message]:
    """The Opens of its choices, numbered from `seq` on; with what has been generated, if it goes on."""
    counts = list(asked.generated) or [0] * asked.n
    at, out = len(asked.tokens) - sum(counts), []
    for choice, count in enumerate(counts):
        out.append(
            Open(
                seq=seq + choice, request=asked.request, attempt=attempt, tenant=asked.tenant,
                model=asked.model, inbox=asked.inbox, choice=choice, choices=asked.n, stream=asked.stream,
                stop=asked.stop,
                tokens=asked.tokens[at : at + count],
            )
        )  # fmt: skip
        at += count
    return [*out]


def give(
    core: DetokenizerCore, scheduler: str, *messages: Message, now_us: int = 1_000, step_us: int = 0
) -> list[Command]:
    """`step_us`: by so much the wall clock was set."""
    wall_us = 10**15 + now_us + step_us
    out: list[Command] = []
    for message in messages:
        out += core.handle(scheduler, message, "trace", wall_us, now_us)
        out += core.flush(wall_us, now_us)
    return out


def begin(core: DetokenizerCore, asked: Tokenized = ASKED, seq: int = 5) -> list[Command]:
    return give(core, A, *opens(asked, seq), asked)


def frames(commands: list[Command]) -> list[dict[str, Any]]:
    return [json.loads(c.data) for c in commands if isinstance(c, Publish)]


def sent_to_schedulers(commands: list[Command]) -> list[tuple[str, Message]]:
    return [(c.scheduler, c.message) for c in commands if isinstance(c, SendTo)]


def resumed(commands: list[Command]) -> Tokenized:
    """The request that another scheduler is asked to go on with."""
    ((_, message),) = sent_to_schedulers(commands)
    assert isinstance(message, Tokenized)
    return message


def text(found: list[dict[str, Any]], choice: int = 0) -> str:
    parts = [c for frame in found if frame["type"] == "delta" for c in frame["choices"]]
    return "".join(part["delta"]["content"] for part in parts if part["index"] == choice)


def test_stream_goes_on_at_another_scheduler_after_its_last_token(core: DetokenizerCore) -> None:
    seen = frames(begin(core)) + frames(give(core, A, tokens(5, 0, "abc"), now_us=51_000))
    assert core.failover.on_lost(A, "the scheduler has gone") == []
    out = core.failover.advance(["b"], 4_001_000)
    assert [(c.scheduler, c.trace) for c in out if isinstance(c, SendTo)] == [(B, "trace")]
    asked = resumed(out)
    assert asked == dataclasses.replace(
        ASKED, tokens=ints([11, 12, 13, *ids("abc")]), generated=ints([3]), reasons=("",), age_us=4_000_000,
        first_us=50_000,
    )  # fmt: skip
    assert core.failover.advance(["b"], 4_251_000) == []  # it has been asked
    out = give(core, B, Accepted(tenant="t", request="r1", attempt=1), *opens(asked, 90))
    assert frames(out) == []  # a reader sees none of it
    assert sent_to_schedulers(out) == [(A, Detached(seqs=ints([5]), moved=True))]  # should it live after all
    out = give(core, B, tokens(90, 3, "de"), Close(seq=90, final=5, reason="length"))
    seen += frames(out)
    assert sent_to_schedulers(out) == [(B, Ended(seq=90, index=5, reason="length"))]
    assert [frame["frame"] for frame in seen] == [*range(len(seen))]
    assert {frame["attempt"] for frame in seen} == {1}
    assert (text(seen), seen[-1]["choices"]) == (
        "abcde",
        [{"index": 0, "tokens": 5, "finish_reason": "length"}],
    )
    assert (core.is_idle, len(core.failover)) == (True, 0)
    assert core.failover.advance(["b"], 5_000_000) == []


def test_choices_that_are_over_stay_so(core: DetokenizerCore) -> None:
    """One is closed, of one the end is known here alone, one goes on, one has no token yet."""
    asked = dataclasses.replace(ASKED, n=4)
    seen = frames(begin(core, asked))
    seen += frames(
        give(
            core, A, tokens(5, 0, "ab"), tokens(6, 0, "xyendmore"), tokens(7, 0, "q"),
            Close(seq=5, final=2, reason="length"),
        )
    )  # fmt: skip
    core.failover.on_lost(A, "gone")
    again = resumed(core.failover.advance(["b"], 0))
    assert (list(again.generated), again.reasons) == ([2, 5, 1, 0], ("length", "stop", "", ""))
    assert list(again.tokens) == [11, 12, 13, *ids("abxyendq")]
    out = give(core, B, *opens(again, 90), Close(seq=90, final=2, reason="length"))
    out += give(core, B, Close(seq=91, final=5, reason="stop"), tokens(92, 1, "r"), tokens(93, 0, "s"))
    out += give(core, B, Close(seq=92, final=2, reason="length"), Close(seq=93, final=1, reason="length"))
    seen += frames(out)
    assert [text(seen, choice) for choice in range(4)] == ["ab", "xy", "qr", "s"]
    assert [c["finish_reason"] for c in seen[-1]["choices"]] == ["length", "stop", "length", "length"]
    assert [m.seq for _, m in sent_to_schedulers(out) if isinstance(m, Ended)] == [90, 91, 92, 93]
    assert core.is_idle


def test_a_scheduler_that_was_only_stopped_has_lost_nothing(core: DetokenizerCore) -> None:
    begin(core)
    core.failover.on_lost(A, "gone")
    assert core.failover.advance([], 0) == []
    assert len(core.failover) == 1
    assert core.failover.advance(["a", "b"], 0) == []
    assert len(core.failover) == 0
    out = give(core, A, tokens(5, 0, "abc"), Close(seq=5, final=3, reason="length"))
    assert text(frames(out)) == "abc"
    assert core.is_idle


def test_new_incarnation_under_the_same_name_gets_the_request(core: DetokenizerCore) -> None:
    begin(core)
    give(core, A, tokens(5, 0, "ab"))
    core.failover.on_lost(A, "restarted", void=True)
    (ask,) = core.failover.advance(["a"], 0)
    assert isinstance(ask, SendTo)
    assert ask.scheduler == A
    out = give(core, A, *opens(resumed([ask]), 700))
    assert sent_to_schedulers(out) == []  # no reader there has the old number
    out = give(core, A, tokens(700, 2, "c"), Close(seq=700, final=3, reason="length"))
    assert text(frames(out)) == "c"
    assert core.is_idle


def test_scheduler_that_cannot_serve_yet_is_tried_again_after_the_others(core: DetokenizerCore) -> None:
    begin(core)
    core.failover.on_lost(A, "the scheduler has gone")
    first = rendezvous("r1", ["b", "c"])
    other = "c" if first == "b" else "b"
    refused = Rejected(tenant="t", request="r1", attempt=1, code=503, message="no executor is ready")
    for ready, expected in ((["b", "c"], first), (["b", "c"], other), ([other], other), ([], None)):
        out = sent_to_schedulers(core.failover.advance(ready, 0))
        assert [to for to, _ in out] == ([f"scheduler.{expected}"] if expected else [])
        assert give(core, f"scheduler.{expected}", refused) == []
    for _ in range(WAIT_TURNS - 5):
        assert core.failover.advance([], 0) == []
    out = core.failover.advance([], 0)
    (frame,) = frames(out)
    assert (frame["error"]["code"], frame["error"]["retryable"]) == (503, True)
    assert frame["error"]["message"] == "the scheduler has gone, and no executor is ready; send it again"
    assert sent_to_schedulers(out) == [(A, Detached(seqs=ints([5]), moved=True))]
    assert core.is_idle


def test_silence_ends_with_a_cancel_and_a_503(core: DetokenizerCore) -> None:
    begin(core)
    core.failover.on_lost(A, "gone")
    core.failover.advance(["b"], 0)
    out: list[Command] = []
    for _ in range(WAIT_TURNS):
        out += core.failover.advance(["b"], 0)
    assert sent_to_schedulers(out) == CANCELLED
    assert frames(out)[0]["error"]["code"] == 503


def test_request_goes_on_when_the_second_scheduler_dies_too(core: DetokenizerCore) -> None:
    begin(core)
    core.failover.on_lost(A, "gone")
    core.failover.advance(["b"], 0)
    core.failover.on_lost(B, "gone")
    (ask,) = core.failover.advance(["c"], 0)
    assert isinstance(ask, SendTo)
    assert ask.scheduler == "scheduler.c"


def test_so_does_the_next_one_after_it_has_taken_over(core: DetokenizerCore) -> None:
    begin(core)
    give(core, A, tokens(5, 0, "ab"))
    core.failover.on_lost(A, "gone")
    asked = resumed(core.failover.advance(["b"], 0))
    give(core, B, *opens(asked, 90), tokens(90, 2, "c"))
    core.failover.on_lost(B, "gone")
    again = resumed(core.failover.advance(["c"], 0))
    assert (list(again.generated), list(again.tokens)) == ([3], [11, 12, 13, *ids("abc")])


@pytest.mark.parametrize("code", [400, 409, 499])
def test_a_refusal_for_good_is_the_clients_answer(core: DetokenizerCore, code: int) -> None:
    begin(core)
    core.failover.on_lost(A, "gone")
    core.failover.advance(["b"], 0)
    out = give(core, B, Rejected(tenant="t", request="r1", attempt=1, code=code, message="never"))
    assert frames(out)[0]["error"]["message"] == "never"
    assert frames(out)[0]["error"]["code"] == code
    assert core.is_idle
    assert len(core.failover) == 0


def test_request_of_another_detokenizer_is_forgotten_silently(core: DetokenizerCore) -> None:
    begin(core)
    core.failover.on_lost(A, "gone")
    core.failover.advance(["b"], 0)
    out = give(core, B, Rejected(tenant="t", request="r1", attempt=1, code=MOVED, message=""))
    assert (frames(out), sent_to_schedulers(out)) == ([], [(A, Detached(seqs=ints([5]), moved=True))])
    assert core.is_idle


def test_unrequested_answers_are_ignored(core: DetokenizerCore) -> None:
    begin(core)
    refused = Rejected(tenant="t", request="r1", attempt=1, code=400, message="never")
    assert give(core, B, refused, Accepted(tenant="t", request="other", attempt=1)) == []
    core.failover.on_lost(A, "gone")
    core.failover.advance(["b"], 0)
    assert give(core, "scheduler.c", refused) == []
    assert not core.is_idle


def test_tokenizers_second_submission_starts_a_new_attempt(core: DetokenizerCore) -> None:
    """It had no word that the dead one accepted the request."""
    seen = frames(begin(core)) + frames(give(core, A, tokens(5, 0, "ab")))
    core.failover.on_lost(A, "gone")
    out = give(core, B, *opens(ASKED, 90, attempt=2), tokens(90, 0, "abc"))
    assert sent_to_schedulers(out) == [(A, Detached(seqs=ints([5]), moved=True))]
    fresh = frames(out)
    assert [frame["type"] for frame in fresh] == ["accepted", "delta"]
    assert fresh[0]["attempt"] > seen[-1]["attempt"]
    assert text(fresh) == "abc"
    assert len(core.failover) == 0


@pytest.mark.parametrize("before", [True, False])
def test_cancel_is_kept_while_the_scheduler_is_dead(core: DetokenizerCore, before: bool) -> None:
    """It came while the scheduler was dead, before that was noticed or after."""
    begin(core)
    core.failover.on_cancelled("t", "another")
    if before:
        core.failover.on_cancelled("t", "r1")
        out = core.failover.on_lost(A, "gone")
    else:
        core.failover.on_lost(A, "gone")
        core.failover.advance(["b"], 0)
        core.failover.on_cancelled("t", "r1")
        out = core.failover.advance(["b"], 0)
    assert frames(out)[0]["error"]["code"] == 499
    expected = [(A, Detached(seqs=ints([5])))] if before else CANCELLED
    assert sent_to_schedulers(out) == expected
    assert core.is_idle


@pytest.mark.parametrize("finish_detached", [True, False])
def test_a_reader_that_has_gone_needs_no_other_scheduler(
    core: DetokenizerCore, finish_detached: bool
) -> None:
    out = begin(core, dataclasses.replace(ASKED, finish_detached=finish_detached))
    number = next(c.number for c in out if isinstance(c, Publish))
    core.on_client_gone(number)
    core.failover.on_lost(A, "gone")
    assert len(core.failover) == (1 if finish_detached else 0)
    assert core.is_idle is not finish_detached


def test_an_answer_of_the_one_thought_dead_is_the_only_one(core: DetokenizerCore) -> None:
    """It comes back after another got the request, and is faster."""
    begin(core)
    core.failover.on_lost(A, "gone")
    asked = resumed(core.failover.advance(["b"], 0))
    out = give(core, A, tokens(5, 0, "abc"), Close(seq=5, final=3, reason="length"))
    assert frames(out)[-1]["type"] == "done"
    assert give(core, B, *opens(asked, 90), tokens(90, 0, "ab")) == []
    assert sent_to_schedulers(core.failover.advance(["a", "b"], 0)) == [(B, Cancel(tenant="t", request="r1"))]
    assert give(core, B, Close(seq=90, final=2, reason="error", code=499)) == [
        SendTo(B, Ended(seq=90, index=2, reason="error"))
    ]
    assert core.is_idle


def test_text_that_waits_to_be_sent_is_not_lost_on_the_way(core: DetokenizerCore) -> None:
    begin(core)
    core.failover.on_lost(A, "gone")
    asked = resumed(core.failover.advance(["b"], 0))
    core.handle(A, tokens(5, 0, "ab"), "", 0)  # late, and no flush
    core.handle(B, opens(asked, 90)[0], "", 0)
    assert text(frames(core.flush(0))) == "ab"


def test_request_whose_options_leave_no_room_is_refused_rather_than_fatal() -> None:
    class FullPort:
        def send(self, to: str, message: Message, trace: str) -> None:
            raise PayloadTooLarge("too long")

    mailbox = cast("Mailbox", FullPort())
    expected = Rejected(tenant="t", request="r1", attempt=1, code=413, message="too long")
    assert send(mailbox, SendTo(B, ASKED)) == expected
    with pytest.raises(PayloadTooLarge):
        send(mailbox, SendTo(B, Ended(seq=1, index=1, reason="stop")))


def test_a_plain_request_that_goes_on_has_one_reply(core: DetokenizerCore) -> None:
    begin(core, dataclasses.replace(ASKED, stream=False))
    give(core, A, tokens(5, 0, "ab"))
    core.failover.on_lost(A, "gone")
    asked = resumed(core.failover.advance(["b"], 0))
    out = give(core, B, *opens(asked, 90), tokens(90, 2, "c"), Close(seq=90, final=3, reason="length"))
    (reply,) = frames(out)
    assert reply["choices"][0]["message"]["content"] == "abc"


def test_one_that_was_given_up_and_has_only_been_slow_gets_no_reader(core: DetokenizerCore) -> None:
    """B is asked and does not answer; C goes on; B comes back and reads what it was asked."""
    begin(core)
    give(core, A, tokens(5, 0, "ab"))
    core.failover.on_lost(A, "gone")
    asked = resumed(core.failover.advance(["b"], 0))
    core.failover.on_lost(B, "gone")
    again = resumed(core.failover.advance(["c"], 0))
    give(core, "scheduler.c", *opens(again, 70), tokens(70, 2, "c"))
    out = give(core, B, Accepted(tenant="t", request="r1", attempt=1), *opens(asked, 90), tokens(90, 2, "c"))
    assert (frames(out), sent_to_schedulers(out)) == ([], [(B, Detached(seqs=ints([90]), moved=True))])
    out = give(core, "scheduler.c", tokens(70, 3, "d"), Close(seq=70, final=4, reason="length"))
    assert text(frames(out)) == "d"
    assert core.is_idle


@pytest.mark.parametrize("late", [False, True])
def test_last_frame_to_a_client_is_followed_by_nothing(core: DetokenizerCore, late: bool) -> None:
    """B got the request, and opens it after its client got the error."""
    begin(core)
    core.failover.on_lost(A, "gone")
    asked = resumed(core.failover.advance(["b"], 0))
    core.failover.on_cancelled("t", "r1")
    assert frames(core.failover.advance(["b"], 0))[0]["error"]["code"] == 499
    assert (len(core.failover), core.failover.is_active) == (0, True)
    if late:
        for _ in range(WAIT_TURNS - 1):
            assert core.failover.advance(["b"], 0) == []
    out = give(core, B, Accepted(tenant="t", request="r1", attempt=1), *opens(asked, 90))
    out += give(core, B, Close(seq=90, final=0, reason="error", code=499))
    assert (frames(out), sent_to_schedulers(out)) == ([], [(B, Ended(seq=90, index=0, reason="error"))])
    again = dataclasses.replace(asked, inbox="another")  # the id is used once more
    assert [f["type"] for f in frames(give(core, B, *opens(again, 95)))] == ["accepted"]
    core.failover.advance(["b"], 0)
    assert core.failover.is_active is not late


def test_a_refusal_after_the_last_word_ends_the_wait(core: DetokenizerCore) -> None:
    begin(core)
    core.failover.on_lost(A, "gone")
    core.failover.advance(["b"], 0)
    core.failover.on_cancelled("t", "r1")
    core.failover.advance(["b"], 0)
    assert give(core, B, Rejected(tenant="t", request="r1", attempt=1, code=503, message="not yet")) == []
    assert not core.failover.is_active


def test_an_id_used_again_right_after_its_answer(core: DetokenizerCore) -> None:
    """Its first request was taken for an orphan, and then answered after all."""
    begin(core)
    core.failover.on_lost(A, "gone")
    core.failover.advance([], 0)
    give(core, A, tokens(5, 0, "abc"), Close(seq=5, final=3, reason="length"))
    again = dataclasses.replace(ASKED, inbox="in2")
    out = give(core, A, *opens(again, 6), again, tokens(6, 0, "x"), Close(seq=6, final=1, reason="length"))
    assert [f["type"] for f in frames(out)] == ["accepted", "delta", "done"]


def test_one_that_is_moved_away_and_opened_here_again(core: DetokenizerCore) -> None:
    """This shard had been stopped, and the scheduler after it; both are back."""
    begin(core)
    core.failover.on_lost(A, "gone")
    out = give(core, A, Close(seq=5, final=0, reason="moved"), *opens(ASKED, 5, attempt=2), ASKED)
    out += give(core, A, tokens(5, 0, "x"), Close(seq=5, final=1, reason="length"))
    assert [f["type"] for f in frames(out)] == ["accepted", "delta", "done"]


def test_one_of_two_requests_with_one_id_gets_an_error_at_once_without_a_scheduler(
    core: DetokenizerCore,
) -> None:
    begin(core)
    core.failover.on_lost(A, "gone")
    again = dataclasses.replace(ASKED, inbox="in2")
    give(core, B, *opens(again, 90), again)
    out = core.failover.on_lost(B, "gone")
    assert [(c.inbox, json.loads(c.data)["error"]["code"]) for c in out if isinstance(c, Publish)] == [
        ("in2", 503)
    ]
    assert core.status()["requests"] == 1


def test_stop_string_found_during_failover_is_sent_to_the_new_scheduler(core: DetokenizerCore) -> None:
    """Late tokens of the dead one complete it, after the request for the rest has left."""
    begin(core)
    give(core, A, tokens(5, 0, "ab"))
    core.failover.on_lost(A, "gone")
    asked = resumed(core.failover.advance(["b"], 0))
    assert sent_to_schedulers(give(core, A, tokens(5, 2, "end"))) == [(A, StopFound(seq=5, index=5))]
    assert sent_to_schedulers(give(core, B, *opens(asked, 90)))[1:] == []
    assert sent_to_schedulers(give(core, B, tokens(90, 2, "en"))) == []  # it would not know that index
    assert sent_to_schedulers(give(core, B, tokens(90, 4, "d"), tokens(90, 5, "z"))) == [
        (B, StopFound(seq=90, index=5))
    ]
    out = give(core, B, Close(seq=90, final=5, reason="stop"))
    assert frames(out)[-1]["choices"] == [
        {"index": 0, "tokens": 5, "finish_reason": "stop", "stop_reason": "end"}
    ]


def test_the_age_counts_from_the_first_scheduler(core: DetokenizerCore) -> None:
    """It was opened here 49 s after that, when its first detokenizer had died."""
    kept = dataclasses.replace(ASKED, age_us=49_000_000, first_us=200_000)
    give(core, A, *opens(ASKED, 5, attempt=2), kept, tokens(5, 0, "ab"), now_us=50_000_000)
    core.failover.on_lost(A, "gone")
    asked = resumed(core.failover.advance(["b"], 54_000_000))
    assert (asked.age_us, asked.first_us) == (53_000_000, 200_000)


@pytest.mark.parametrize("step_us", [3_600_000_000, -3_600_000_000])
def test_the_age_is_not_of_the_wall_clock(core: DetokenizerCore, step_us: int) -> None:
    """It is set by an hour between the opening and the first text."""
    give(core, A, *opens(ASKED, 5), ASKED, now_us=1_000)
    give(core, A, tokens(5, 0, "ab"), now_us=51_000, step_us=step_us)
    core.failover.on_lost(A, "gone")
    asked = resumed(core.failover.advance(["b"], 4_001_000))
    assert (asked.age_us, asked.first_us, asked.timeout_us) == (4_000_000, 50_000, ASKED.timeout_us)


def test_a_request_that_schedulers_die_of_is_not_handed_on_for_ever(core: DetokenizerCore) -> None:
    begin(core)
    last = A
    for death in range(MOST_DEATHS):
        core.failover.on_lost(last, "the scheduler has gone")
        asked, last = resumed(core.failover.advance([f"s{death}"], 0)), f"scheduler.s{death}"
        give(core, last, *opens(asked, 1_000 * (death + 1)))
    (frame,) = frames(core.failover.on_lost(last, "the scheduler has gone"))
    assert frame["error"]["message"] == "the scheduler has gone, the 4th with this request; send it again"
    assert core.is_idle


def test_a_scheduler_may_be_stopped_any_number_of_times(core: DetokenizerCore) -> None:
    begin(core)
    for _ in range(2 * MOST_DEATHS):
        assert core.failover.on_lost(A, "gone") == []
        assert core.failover.advance(["a"], 0) == []
    assert not core.failover.is_active


def test_an_id_used_again_after_its_request_was_given_up_is_an_orphan_of_its_own(
    core: DetokenizerCore,
) -> None:
    begin(core)
    core.failover.on_lost(A, "gone")
    core.failover.advance(["b"], 0)
    core.failover.on_cancelled("t", "r1")
    core.failover.advance(["b"], 0)  # B may still answer for the first one
    again = dataclasses.replace(ASKED, inbox="in2")
    give(core, A, *opens(again, 6), again, tokens(6, 0, "x"))
    late = Rejected(tenant="t", request="r1", attempt=1, code=400, message="of the first one")
    assert give(core, B, late) == []
    assert core.failover.on_lost(A, "gone") == []
    asked = resumed(core.failover.advance(["c"], 0))
    assert (asked.inbox, list(asked.generated)) == ("in2", [1])


@pytest.mark.parametrize("how", ["cancelled before", "its reader leaves", "no scheduler goes on"])
def test_scheduler_of_an_adopted_request_gets_its_end_by_name(core: DetokenizerCore, how: str) -> None:
    """Its sequences are not known here, and a word without them would mean that messages were lost."""
    core.handle(A, dataclasses.replace(ASKED, shard="d2"), "", 1, 1)
    if how == "cancelled before":
        core.backups.on_cancelled("t", "r1")
    out = core.on_lost(A, "gone", lambda source: False) + core.on_lost(
        "detokenizer.d2", "gone", lambda source: False
    )
    if how == "its reader leaves":
        out += core.on_client_gone(1)
    for _ in range(WAIT_TURNS):
        out += core.failover.advance([], 2)
    assert {(to, str(message)) for to, message in sent_to_schedulers(out)} == {
        (A, str(Cancel(tenant="t", request="r1", code=MOVED)))
    }
    assert core.is_idle


@pytest.mark.parametrize("attempt", [1, 1 + ATTEMPTS], ids=["sent again", "taken over by another tokenizer"])
def test_a_request_that_two_schedulers_got_runs_at_the_first_one(core: DetokenizerCore, attempt: int) -> None:
    """The load had changed between the two choices. After the death of the first it goes on at the other."""
    begin(core)
    give(core, A, tokens(5, 0, "ab"))
    out = give(core, B, *opens(ASKED, 90, attempt), tokens(90, 0, "ab"))
    assert (frames(out), sent_to_schedulers(out)) == ([], [(B, Detached(seqs=ints([90]), moved=True))])
    core.failover.on_lost(A, "gone")
    give(core, B, *opens(resumed(core.failover.advance(["b"], 0)), 91))
    out = give(core, B, tokens(91, 2, "c"), Close(seq=91, final=3, reason="length"))
    assert text(frames(out)) == "c"
    assert core.is_idle


def test_another_attempt_of_the_same_tokenizer_has_a_reason(core: DetokenizerCore) -> None:
    """It has missed the first scheduler before this detokenizer did."""
    begin(core)
    assert sent_to_schedulers(give(core, B, *opens(ASKED, 90, attempt=2))) == []


def test_an_id_in_use_at_another_scheduler_is_409(core: DetokenizerCore) -> None:
    """For each choice; the one in use goes on."""
    begin(core)
    other = dataclasses.replace(ASKED, inbox="other", n=2)
    out = sent_to_schedulers(give(core, B, *opens(other, 90), other))
    assert [to for to, _ in out] == [B, B]
    cancel = out[0][1]
    assert isinstance(cancel, Cancel)
    assert (cancel.tenant, cancel.request, cancel.code) == ("t", "r1", 409)
    out = give(
        core,
        B,
        *(Close(seq=seq, final=0, reason="error", code=409, message=cancel.message) for seq in (90, 91)),
    )
    assert {command.inbox for command in out if isinstance(command, Publish)} == {"other"}
    assert frames(out)[0]["error"]["code"] == 409
    out = give(core, A, tokens(5, 0, "abc"), Close(seq=5, final=3, reason="length"))
    assert text(frames(out)) == "abc"
    assert core.is_idle


def test_a_request_goes_where_the_tokenizer_would_send_the_next_turn_of_its_chat(
    core: DetokenizerCore,
) -> None:
    names = [f"s{i}" for i in range(9)]
    asked = dataclasses.replace(ASKED, routing_key="a chat")
    begin(core, asked)
    core.failover.on_lost(A, "gone")
    ((to, _),) = sent_to_schedulers(core.failover.advance(names, 0))
    assert to == f"scheduler.{rendezvous('a chat', names)}" != f"scheduler.{rendezvous('r1', names)}"
