"""When the tokens of a durable request are stored, how many bytes that takes, and how it goes on."""

from __future__ import annotations

import dataclasses
import json

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.text_models import write_sentencepiece_gguf

from services.detokenizer.core import DetokenizerCore
from services.detokenizer.durable.savepoints import (
    EACH_US,
    GROWN,
    GROWTH,
    MOST_A_TURN,
    MOST_SCORES,
    TOKENS_A_SECOND,
    Savepoint,
    Savepoints,
)
from services.detokenizer.failover import WAIT_TURNS
from services.detokenizer.response import Command, Publish, SendTo
from shared import codec
from shared.errors import WireError
from shared.messages import (
    MOVED,
    Accepted,
    Close,
    Message,
    Open,
    Rejected,
    StopFound,
    Tokenized,
    Tokens,
    floats,
    ints,
)
from shared.savepoints import body_hash, is_of, pack, unpack
from shared.vocab.files import ModelFiles
from shared.vocab.vocabulary import Vocabulary, load_vocabulary

A, B = "scheduler.a", "scheduler.b"
BODY = b'{"prompt":"x","durable":"tokens"}'
ASKED = Tokenized(
    request="r", attempt=1, tenant="t", model="m", inbox="_INBOX.t.headrace-keeper.r", max_tokens=40_000,
    timeout_us=10**12, finish_detached=True, tokens=ints([11, 12, 13]), savepoints=body_hash(BODY),
    format="completion", parent_span="00",
)  # fmt: skip


@pytest.fixture(scope="module")
def letters(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    """Tokens 3 to 258 are the bytes 0 to 255."""
    path = write_sentencepiece_gguf(tmp_path_factory.mktemp("savepoints") / "l.gguf", {})
    return load_vocabulary(ModelFiles("l", path))


class Core(DetokenizerCore):
    """With its savepoints, as the shell has them."""

    def __init__(self, letters: Vocabulary) -> None:
        super().__init__(letters)
        self.savepoints = Savepoints(self.table)


@pytest.fixture
def core(letters: Vocabulary) -> Core:
    return Core(letters)


def ids(text: str) -> list[int]:
    return [3 + byte for byte in text.encode()]


def opened(asked: Tokenized, seq: int, choice: int, tokens: list[int] | None = None) -> Open:
    return Open(
        seq=seq, request=asked.request, attempt=asked.attempt, tenant=asked.tenant, model=asked.model,
        inbox=asked.inbox, choice=choice, choices=asked.n, format=asked.format, stop=asked.stop,
        logprobs=asked.logprobs, prompt_tokens=3, tokens=ints(tokens or []),
    )  # fmt: skip


def step(seq: int, first: int, tokens: list[int], scored: bool = False) -> Tokens:
    """With two alternatives a token, if `scored`."""
    values = [-0.5 - token / 7 for token in tokens] if scored else []
    return Tokens(
        executor="e", step=1, seqs=ints([seq]), first=ints([first]), counts=ints([len(tokens)]),
        ids=ints(tokens), logprobs=floats(values), top_counts=ints([2] * len(values)),
        top_ids=ints(t for token in tokens for t in (token, 5) if scored),
        top_logprobs=floats(v for value in values for v in (value, -9)),
    )  # fmt: skip


def give(core: Core, scheduler: str, *messages: Message, now_us: int = 0) -> list[Command]:
    return [c for message in messages for c in core.handle(scheduler, message, "trace", 10**15, now_us)]


def begin(core: Core, asked: Tokenized = ASKED, seq: int = 5) -> None:
    give(core, A, *(opened(asked, seq + i, i) for i in range(asked.n)), asked)


def sizes(core: Core, steps: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Tokens and bytes of each savepoint, for steps of (time passed, tokens) with a turn after each."""
    begin(core)
    found, taken, now_us = list[tuple[int, int]](), 0, 0
    for passed_us, count in steps:
        now_us += passed_us
        give(core, A, step(5, taken, ids("x" * count)), now_us=now_us)
        taken += count
        for each in core.savepoints.take_due(now_us):
            found.append((unpack(each.data)[0].generated[0], len(each.data)))
    return found


def test_the_first_ones_come_after_some_tokens_or_a_second(core: Core) -> None:
    begin(core)
    turn = core.savepoints.take_due
    assert turn(0) == turn(EACH_US) == []  # no token
    give(core, A, step(5, 0, ids("x" * (GROWN - 1))), now_us=1)
    assert turn(EACH_US - 1) == []
    give(core, A, step(5, GROWN - 1, ids("y")), now_us=2)
    (first,) = turn(EACH_US - 1)
    assert isinstance(first, Savepoint)
    assert first.subject == "headrace.store.state.t.r"
    give(core, A, step(5, GROWN, ids("z")), now_us=3)
    assert turn(2 * EACH_US - 2) == []
    (second,) = turn(2 * EACH_US - 1)
    assert turn(9 * EACH_US) == []  # nothing is new
    resumed, scores = unpack(second.data)
    assert (list(resumed.generated), resumed.reasons, scores) == ([GROWN + 1], ("",), None)
    assert list(resumed.tokens) == [11, 12, 13, *ids("x" * (GROWN - 1) + "yz")]


def test_a_long_answer_does_not_cost_a_square_of_its_tokens(core: Core) -> None:
    """32,768 tokens at 1,000 a second, in steps of a turn: a record each 64 tokens would be 33.6 MB."""
    stored = sum(size for _, size in sizes(core, [(100_000, 100)] * 328))
    assert stored < 1_600_000
    slow = Core(core._table._vocabulary)
    per_second = sizes(slow, [(100_000, 5)] * 6_554)  # at 50 a second
    assert sum(size for _, size in per_second) / 656 < 16_384 + 200


@given(steps=st.lists(st.tuples(st.integers(1_000, 3_000_000), st.integers(1, 900)), min_size=1, max_size=60))
def test_the_size_is_bounded_at_any_speed(letters: Vocabulary, steps: list[tuple[int, int]]) -> None:
    stored = sum(tokens + 3 for tokens, _ in sizes(Core(letters), steps))
    passed_s, tokens = sum(us for us, _ in steps) / 1e6, sum(count for _, count in steps)
    assert stored <= GROWTH * tokens + TOKENS_A_SECOND * passed_s + GROWTH


def test_a_turn_has_a_bounded_number_and_the_longest_wait_comes_first(core: Core) -> None:
    many = MOST_A_TURN + 5
    for number in range(many):
        begin(core, dataclasses.replace(ASKED, request=f"r{number}"), seq=number)
        give(core, A, step(number, 0, ids("x" * GROWN)))
    first, second = core.savepoints.take_due(1), core.savepoints.take_due(2)
    assert (len(first), len(second), core.savepoints.take_due(3)) == (MOST_A_TURN, 5, [])
    assert len({each.subject for each in first + second}) == many


@pytest.mark.parametrize("why", ["not asked for", "cancelled", "torn", "ended", "scores are missing"])
def test_request_has_no_savepoints_in_these_cases(core: Core, why: str) -> None:
    asked = dataclasses.replace(
        ASKED, savepoints="" if why == "not asked for" else ASKED.savepoints, logprobs=2 * (why[:2] == "sc")
    )
    begin(core, asked)
    assert core.savepoints.is_active == (why != "not asked for")
    give(core, A, step(5, 0, ids("x" * GROWN)))
    if why == "cancelled":
        core.failover.on_cancelled("t", "r")
    if why == "torn":
        core.on_stream_lost(A)
    if why == "ended":
        give(core, A, Close(seq=5, final=GROWN, reason="length"))
    assert core.savepoints.take_due(EACH_US) == []
    assert core.savepoints.is_active == (why not in ("not asked for", "ended"))


def test_log_probabilities_are_stored_up_to_a_number(core: Core) -> None:
    begin(core, dataclasses.replace(ASKED, logprobs=3))
    give(core, A, step(5, 0, [40, 41, 42], scored=True))
    (first,) = core.savepoints.take_due(EACH_US)
    _, scores = unpack(first.data)
    assert scores is not None
    assert (list(scores.ids), list(scores.top_counts)) == ([40, 41, 42], [2, 2, 2])
    give(core, A, step(5, 3, [40] * (MOST_SCORES // 3), scored=True))
    assert core.savepoints.take_due(9 * EACH_US) == []


# ---- how a request goes on -------------------------------------------------------------------------


def last(core: Core, now_us: int = EACH_US) -> bytes:
    (each,) = core.savepoints.take_due(now_us)
    return each.data


def resume(core: Core, data: bytes, now_us: int = 0) -> list[Command]:
    tokenized, scores = unpack(data)
    return core.resume(tokenized, scores, 10**15, now_us)


def sent(commands: list[Command]) -> list[tuple[str, Message]]:
    return [(c.scheduler, c.message) for c in commands if isinstance(c, SendTo)]


def answer(commands: list[Command]) -> dict[str, object]:
    (frame,) = [json.loads(c.data) for c in commands if isinstance(c, Publish)]
    return frame if isinstance(frame, dict) else {}


ENDS = {"n": 2, "stop": ("end",), "logprobs": 3}


def test_a_resumed_answer_equals_one_that_was_never_interrupted(letters: Vocabulary) -> None:
    """Two choices with log probabilities: one has met its stop string, the other is in the middle of one."""
    asked = dataclasses.replace(ASKED, **ENDS)
    first, second = ids("all endx"), ids("an e")
    rest = ids("nt and then end")
    closes = [
        Close(seq=8, final=len(first), reason="stop"),
        Close(seq=9, final=len(second) + len(rest), reason="length"),
    ]

    def undisturbed() -> dict[str, object]:
        core = Core(letters)
        begin(core, asked, seq=8)
        give(core, A, step(8, 0, first, scored=True), step(9, 0, second + rest, scored=True))
        return answer(give(core, A, *closes))

    before = Core(letters)
    begin(before, asked)
    give(before, A, step(5, 0, first, scored=True), step(6, 0, second, scored=True))
    data = last(before)

    core = Core(letters)
    assert resume(core, data) == []
    ((scheduler, message),) = sent(core.failover.advance(["b"], 0))
    assert isinstance(message, Tokenized)
    assert (scheduler, message.attempt, list(message.generated)) == (B, 1, [7, 4])
    assert message.reasons == ("stop", "")
    assert message.savepoints == ASKED.savepoints
    assert message.age_us == EACH_US
    give(core, B, Accepted(tenant="t", request="r", attempt=1))
    found = give(core, B, opened(asked, 8, 0, first[:7]), opened(asked, 9, 1, second))
    assert sent(found) == [(B, StopFound(seq=8, index=7))]
    give(core, B, step(9, len(second), rest, scored=True))
    assert answer(give(core, B, *closes)) == undisturbed()
    assert core.is_idle


def test_a_request_that_runs_is_not_disturbed(core: Core, letters: Vocabulary) -> None:
    """Its scheduler reports that it runs: at any attempt of the savepoint, it is not newer than a request
    that has started over."""
    begin(core, dataclasses.replace(ASKED, attempt=3))
    give(core, A, step(5, 0, ids("abc")))
    data = last(core)
    assert unpack(data)[0].attempt == 3
    assert resume(core, data) == []
    assert core.failover.advance(["a"], 0) == []
    other = Core(letters)
    resume(other, data)
    ((_, message),) = sent(other.failover.advance(["a"], 0))
    assert isinstance(message, Tokenized)
    assert message.attempt == 1
    moved = Rejected(tenant="t", request="r", attempt=1, code=MOVED, message="")
    assert give(other, A, moved) == []
    assert other.is_idle
    assert resume(other, data) == []
    assert not other.is_idle


def test_one_that_no_scheduler_takes_gets_a_503_and_may_come_again(letters: Vocabulary) -> None:
    before, core = Core(letters), Core(letters)
    begin(before)
    give(before, A, step(5, 0, ids("abc")))
    data = last(before)
    for _ in range(2):
        assert resume(core, data) == resume(core, data) == []
        out = [command for _ in range(WAIT_TURNS) for command in core.failover.advance([], 0)]
        error = answer(out)["error"]
        assert isinstance(error, dict)
        assert (error["code"], sent(out)) == (503, [])
        assert core.is_idle


def test_a_kind_of_executors_with_other_weights_starts_over(letters: Vocabulary) -> None:
    """Its scheduler opens it as a new attempt: the text so far is dropped."""
    before, core = Core(letters), Core(letters)
    begin(before)
    give(before, A, step(5, 0, ids("abc")))
    resume(core, last(before))
    core.failover.advance(["b"], 0)
    again = dataclasses.replace(ASKED, attempt=2)
    give(core, B, opened(again, 8, 0), again, step(8, 0, ids("xy")))
    end = answer(give(core, B, Close(seq=8, final=2, reason="length")))
    assert isinstance(end["choices"], list)
    assert end["choices"][0]["text"] == "xy"


def test_a_resumed_request_that_is_cancelled_ends(letters: Vocabulary) -> None:
    before, core = Core(letters), Core(letters)
    begin(before)
    give(before, A, step(5, 0, ids("abc")))
    resume(core, last(before))
    core.failover.on_cancelled("t", "r")
    error = answer(core.failover.advance(["b"], 0))["error"]
    assert isinstance(error, dict)
    assert error["code"] == 499
    assert core.is_idle


def test_a_savepoint_is_of_one_body(core: Core) -> None:
    begin(core)
    give(core, A, step(5, 0, ids("abc")))
    data = last(core)
    assert is_of(data, BODY)
    assert not is_of(data, BODY + b" ")
    assert not is_of(b"2" + data[1:], BODY)
    assert not is_of(b"", BODY)


def test_damaged_savepoint_is_an_error(core: Core) -> None:
    asked = dataclasses.replace(ASKED, logprobs=3)
    begin(core, asked)
    give(core, A, step(5, 0, [40, 41], scored=True))
    data = last(core)
    head, _, rest = data.partition(b"\n")
    tokenized, scores = unpack(data)
    assert scores is not None
    request = codec.to_row(tokenized)
    bad = [
        b"", head, data[:-1], head + b"\n\x90", head + b"\n" + msgpack.packb([request, 7]),
        head + b"\n" + msgpack.packb([request, None]), head + b"\n" + msgpack.packb([["Unknown"], None]),
        head + b"\n" + msgpack.packb([codec.to_row(scores), None]), rest,
        pack(dataclasses.replace(tokenized, generated=ints([9])), scores),
        pack(dataclasses.replace(tokenized, generated=ints(), reasons=()), scores),
        pack(tokenized, dataclasses.replace(scores, ids=ints([40, 42]))),
        pack(tokenized, dataclasses.replace(scores, top_counts=ints([1, 2]))),
    ]  # fmt: skip
    for each in bad:
        with pytest.raises(WireError):
            unpack(each)
