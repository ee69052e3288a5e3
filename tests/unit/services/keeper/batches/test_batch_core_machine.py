"""One batch against a model of the queue, the store and the fleet: keepers die, or two hold it at a time.

`HYPOTHESIS_PROFILE=soak` runs many more.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from services.keeper.batches.batch_core import (
    CLOSE_US,
    FIRST_WINDOW,
    LOOK_AHEAD,
    MOST_IN_FLIGHT,
    AskLine,
    BatchCommand,
    BatchCore,
    BatchEvent,
    BatchTick,
    CallFailed,
    CancelAsked,
    CancelLine,
    Checked,
    CheckFile,
    EndStored,
    LineAnswered,
    LinesRead,
    LineStored,
    OpenBatch,
    Opened,
    Over,
    ReadLines,
    SaveState,
    StoreEnd,
    StoreLine,
    Window,
    WriteFiles,
    Written,
    error_entry,
)
from services.keeper.core import ASK_AGAIN_US, PROGRESS_US, RETRY_US, Ack, Nak, Progress
from services.keeper.records import Body
from shared.errors import (
    BadRequest,
    Cancelled,
    DuplicateRequest,
    HeadraceError,
    Overloaded,
    Unavailable,
    UnknownModel,
)
from shared.nats.object_store import DamagedFile, UnknownFile

DAY_S = 86_400
LINES = 12  # more than the first window, which has room for 8
TEXTS = {
    number: json.dumps(
        {
            "custom_id": f"c{number}",
            "url": "/v1/completions",
            "body": {"prompt": ["a", "b"] if number == 3 else "abc"[-number % 3], "request_id": "mine"},
        }
    ).encode()
    for number in range(1, LINES + 1)
}
NATIVE: Body = {
    "created": 1,
    "choices": [{"index": 0, "text": "x", "logprobs": None, "finish_reason": "stop"}],
    "usage": {
        "prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2,
        "prompt_tokens_details": {"cached_tokens": 0},
    },
}  # fmt: skip
AGAIN: list[HeadraceError] = [
    Overloaded("full"), Unavailable("away"), UnknownModel("?"), DuplicateRequest("runs"),
]  # fmt: skip


def job() -> Body:
    return {
        "id": "batch_1", "status": "validating", "created_at": 0, "expires_at": DAY_S, "errors": None,
        "output_file_id": None, "error_file_id": None,
        "request_counts": {"total": 0, "completed": 0, "failed": 0},
    }  # fmt: skip


class Batch(RuleBasedStateMachine):
    """Keepers, one or two of which hold the batch, and a store and a fleet that are right by construction."""

    @initialize()
    def begin(self) -> None:
        self.now_us = self.count = 0
        self.acked = False
        self.end: Body | None = None
        self.state: Body | None = None
        self.records: dict[int, tuple[bool, bytes]] = {}
        self.files: dict[str, list[int]] = {}  # lines by name
        self.cancelled = False
        self.cores: list[BatchCore] = []
        self.calls: list[tuple[BatchCore, Any]] = []
        self.asked: list[tuple[BatchCore, str]] = []
        self.unread: dict[int, list[int]] = {}  # by core
        self.delivered()

    def feed(self, core: BatchCore, event: BatchEvent) -> None:
        self.obey(core, core.handle(event, self.now_us, self.now_us))

    def obey(self, core: BatchCore, commands: list[BatchCommand]) -> None:
        for command in commands:
            match command:
                case Ack():
                    assert self.end is not None, "acked without a record of the end"
                    self.acked = True
                case AskLine(body):
                    assert body["request_id"].startswith("batch_1.")
                    assert "seed" in body
                    self.asked.append((core, body["request_id"]))
                case StoreLine() | OpenBatch() | CheckFile() | ReadLines() | WriteFiles() | StoreEnd():
                    self.calls.append((core, command))
                case SaveState(batch):
                    self.state = dict(batch)
                case Over(_, files):
                    for name in files:
                        del self.files[name]
                    assert self.end is not None
                case Progress() | CancelLine() | Nak():
                    pass

    @precondition(lambda self: not self.acked and len(self.cores) < 2)
    @rule()
    def delivered(self) -> None:
        """To the first keeper, to the next one after a death, or to another while the first is late."""
        self.count += 1
        core = BatchCore(job(), f"ack{self.count}", 1_000_000)
        self.cores.append(core)
        self.obey(core, core.begin(self.now_us))

    @precondition(lambda self: self.cores)
    @rule(data=st.data())
    def keeper_dies(self, data: st.DataObject) -> None:
        core = self.cores.pop(data.draw(st.integers(0, len(self.cores) - 1)))
        self.calls = [(c, call) for c, call in self.calls if c is not core]
        self.asked = [(c, request) for c, request in self.asked if c is not core]

    def result(self, core: BatchCore, command: Any) -> BatchEvent:
        match command:
            case OpenBatch():
                ok = [n for n, (good, _) in self.records.items() if good]
                failed = [n for n, (good, _) in self.records.items() if not good]
                return Opened(self.end is not None, self.state, ok, failed)
            case CheckFile():
                return Checked(LINES, "m")
            case ReadLines(most):
                left = self.unread.setdefault(
                    id(core), [n for n in TEXTS if n not in core.ok and n not in core.failed]
                )
                now, self.unread[id(core)] = left[:most], left[most:]
                return LinesRead(tuple((n, TEXTS[n]) for n in now), end=not left[most:])
            case WriteFiles():
                name = f"f{len(self.files)}.{id(core)}"
                self.files[name] = sorted(self.records)
                completed = sum(good for good, _ in self.records.values())
                return Written(name, None, completed, len(self.records) - completed)
            case StoreEnd(batch):
                new = self.end is None
                self.end = self.end or dict(batch)
                return EndStored(new)
            case _:
                assert isinstance(command, StoreLine)
                new = command.number not in self.records
                self.records.setdefault(command.number, (command.ok, command.data))
                return LineStored(command.number, new)

    @precondition(lambda self: self.calls)
    @rule(data=st.data(), how=st.sampled_from(["yes", "yes", "no", "lost answer"]))
    def store_answers(self, data: st.DataObject, how: str) -> None:
        core, command = self.calls.pop(data.draw(st.integers(0, len(self.calls) - 1)))
        read = isinstance(command, ReadLines)  # of the keeper's own: nothing is lost on a way
        event = self.result(core, command) if how == "yes" or (how == "lost answer" and not read) else None
        if how != "yes" and isinstance(command, StoreLine):
            event = LineStored(command.number, None)
        elif how != "yes":
            event = CallFailed(Unavailable("away"))
        assert event is not None
        self.feed(core, event)

    @precondition(lambda self: self.asked)
    @rule(data=st.data(), outcome=st.sampled_from([None, None, *AGAIN, BadRequest("long"), Cancelled("c")]))
    def fleet_answers(self, data: st.DataObject, outcome: HeadraceError | None) -> None:
        """Perhaps twice: a request is asked again while it runs."""
        core, request = data.draw(st.sampled_from(self.asked))
        self.feed(core, LineAnswered(request, dict(NATIVE) if outcome is None else outcome))

    @rule(delay_us=st.sampled_from([1, RETRY_US, PROGRESS_US, ASK_AGAIN_US]))
    def time_passes(self, delay_us: int) -> None:
        self.now_us += delay_us
        for core in self.cores:
            self.feed(core, BatchTick())
            if self.cancelled:
                self.feed(core, CancelAsked())
            if self.end is not None:
                self.feed(core, Opened(ended=True))

    @rule()
    def connection_is_cut(self) -> None:
        for core in self.cores:
            core.on_reconnected(self.now_us)

    @precondition(lambda self: self.count > 3)
    @rule()
    def client_cancels(self) -> None:
        self.cancelled = True

    @invariant()
    def windows_hold(self) -> None:
        for core in self.cores:
            assert core.in_flight <= LINES
            assert 1 <= core.window.size <= MOST_IN_FLIGHT

    @precondition(lambda self: not self.acked)
    @rule()
    def all_goes_well(self) -> None:
        """From any state: a keeper, a store and a fleet that answer take the batch to its end."""
        if not self.cores:
            self.delivered()
        for _ in range(60):
            self.time_passes(RETRY_US)
            while self.calls:
                core, command = self.calls.pop()
                self.feed(core, self.result(core, command))
            for core, request in self.asked[-4 * LINES :]:
                self.feed(core, LineAnswered(request, dict(NATIVE)))
            if self.acked and not self.calls:
                break
        assert self.acked
        assert self.end is not None
        if not self.cancelled:
            assert self.end["status"] == "completed"
        counts = self.end["request_counts"]
        kept = self.files[self.end["output_file_id"]]
        assert counts["completed"] + counts["failed"] == len(kept) <= len(self.records)
        if self.end["status"] == "completed":
            assert kept == [*TEXTS]
            assert counts["total"] == LINES
        for number, (_, data) in self.records.items():
            assert json.loads(data)["custom_id"] == f"c{number}"


TestBatch = Batch.TestCase


def running(lines: int = 40) -> tuple[BatchCore, list[str]]:
    """A batch that has been opened, checked and read; the requests that it has sent."""
    core = BatchCore(job(), "ack", 1_000_000)
    assert core.begin(0) == [OpenBatch()]
    assert core.handle(Opened(False), 0, 0) == [CheckFile()]
    commands = core.handle(Checked(lines, "m"), 0, 0)
    assert isinstance(commands[-1], ReadLines)
    read = tuple((n, TEXTS[1].replace(b"c1", b"c%d" % n)) for n in range(1, lines + 1))
    return core, requests(core.handle(LinesRead(read, end=True), 0, 0))


def requests(commands: list[BatchCommand]) -> list[str]:
    return [command.body["request_id"] for command in commands if isinstance(command, AskLine)]


def test_a_wrong_file_fails_without_a_request() -> None:
    core = BatchCore(job(), "ack", 1_000_000)
    core.begin(0)
    core.handle(Opened(False), 0, 0)
    wrong = error_entry("invalid_request", "line 7: no", 7)
    (end,) = core.handle(Checked(9, "m", (wrong,)), 0, 5_000_000)
    assert isinstance(end, StoreEnd)
    assert (end.batch["status"], end.batch["failed_at"], end.batch["errors"]["data"]) == (
        "failed",
        5,
        [wrong],
    )
    assert core.handle(EndStored(True), 0, 0) == [Over("failed"), Ack("ack")]


def test_a_file_that_is_gone_or_damaged_fails_the_batch_and_another_error_does_not() -> None:
    for error in (UnknownFile("deleted"), DamagedFile("damaged")):
        core = BatchCore(job(), "ack", 1_000_000)
        core.begin(0)
        core.handle(Opened(False), 0, 0)
        (end,) = core.handle(CallFailed(error), 0, 0)
        assert isinstance(end, StoreEnd)
        assert end.batch["errors"]["data"][0]["message"] == error.message
    core = BatchCore(job(), "ack", 1_000_000)
    core.begin(0)
    core.handle(Opened(False), 0, 0)
    assert core.handle(CallFailed(Unavailable("away")), 0, 0) == []
    assert core.handle(BatchTick(), RETRY_US - 1, 0) == []
    assert core.handle(BatchTick(), RETRY_US, 0) == [CheckFile()]


def test_the_window_doubles_halves_once_a_round_and_then_grows_by_a_line() -> None:
    core, first = running(400)
    assert len(first) == FIRST_WINDOW
    second = []
    for request in first:
        second += requests(core.handle(LineAnswered(request, dict(NATIVE)), 1, 1))
        second += requests(core.handle(LineStored(int(request.split(".")[1]), True), 1, 1))
    assert core.in_flight == len(second) == 2 * FIRST_WINDOW
    for request in second[:4]:
        assert core.handle(LineAnswered(request, Overloaded("full")), 2, 2) == []
    assert core.window.size == FIRST_WINDOW, "four refusals of one round halve it once"
    before = core.window.size
    for request in second[4:12]:
        core.handle(LineAnswered(request, dict(NATIVE)), 3, 3)
    assert before + 0.9 < core.window.size <= before + 1
    window = Window()
    for _ in range(9):
        window.cut(window.cut_us + 1, window.cut_us + 1)
    assert window.size == 1


def test_refused_lines_come_back_no_faster_than_the_window_allows() -> None:
    core, first = running()
    for request in first:
        core.handle(LineAnswered(request, Overloaded("full", retry_after_ms=3_000)), 1, 1)
    assert requests(core.handle(BatchTick(), 2_999_999, 1)) == []
    again = requests(core.handle(BatchTick(), 3_000_001, 1))
    assert again == first[:4]
    assert core.window.size == 4


def test_expired_batch_ends_with_its_finished_lines() -> None:
    core, first = running()
    assert isinstance(core.handle(LineAnswered(first[0], dict(NATIVE)), 1, 1)[0], StoreLine)
    core.handle(LineStored(1, True), 1, 1)
    day_us = DAY_S * 1_000_000
    assert not [c for c in core.handle(BatchTick(), day_us - 1, 0) if isinstance(c, CancelLine)]
    commands = core.handle(BatchTick(), day_us, 7_000_000)
    cancelled = [command.request for command in commands if isinstance(command, CancelLine)]
    assert len(cancelled) == core.in_flight
    for request in cancelled:
        commands = core.handle(LineAnswered(request, Cancelled("c")), day_us, 7_000_000)
    assert WriteFiles(unfinished=True) in commands
    (end,) = core.handle(Written("out", "errors", 1, 39), day_us, 7_000_000)
    assert isinstance(end, StoreEnd)
    assert (end.batch["status"], end.batch["expired_at"]) == ("expired", 7)
    assert end.batch["request_counts"] == {"total": 40, "completed": 1, "failed": 39}


@pytest.mark.parametrize("wall_s", [2, -2, 600, -600, 2 * DAY_S, -2 * DAY_S])
def test_a_clock_that_is_set_ends_no_batch(wall_s: int) -> None:
    core, first = running()
    for at_us in (1, 2_000_000):
        found = core.handle(BatchTick(), at_us, (10 * DAY_S + wall_s) * 1_000_000)
        assert not [each for each in found if isinstance(each, CancelLine)]
    assert core.in_flight == len(first)


def test_next_keeper_continues_the_age_of_a_batch_from_the_notes() -> None:
    """A keeper notes it each minute, also while no line ends."""
    core, _ = running()
    (saved,) = [c for c in core.handle(BatchTick(), 7_200_000_000, 0) if isinstance(c, SaveState)]
    again = BatchCore(dict(core.batch), "ack2", 1 << 20)
    again.begin(50_000_000)
    again.handle(Opened(False, saved.batch), 50_000_000, 0)
    again.handle(LinesRead(((1, TEXTS[1]),), end=True), 50_000_000, 0)
    rest_us = (DAY_S - 7_200) * 1_000_000
    assert again.handle(BatchTick(), 50_000_000 + rest_us - 1, 0)[-1] != CancelLine("batch_1.1")
    assert CancelLine("batch_1.1") in again.handle(BatchTick(), 50_000_000 + rest_us, 0)


def test_a_cancelled_batch_does_not_wait_for_lines_that_never_end() -> None:
    core, _ = running()
    assert CancelLine("batch_1.1") in core.handle(CancelAsked(), 0, 0)
    assert core.handle(BatchTick(), CLOSE_US - 1, 0) == [Progress("ack")]
    assert WriteFiles(unfinished=False) in core.handle(BatchTick(), CLOSE_US, 0)


def test_an_end_that_another_keeper_has_stored_is_acked_and_the_files_go() -> None:
    core, first = running(1)
    core.handle(LineAnswered(first[0], dict(NATIVE)), 0, 0)
    core.handle(LineStored(1, False), 0, 0)
    core.handle(Written("out", None, 1, 0), 0, 0)
    assert core.handle(EndStored(False), 0, 0) == [Over("", ("out",)), Ack("ack")]


def test_an_answer_over_the_limit_of_a_message_is_an_error_of_its_line() -> None:
    core, first = running(1)
    long = {**NATIVE, "choices": [{**NATIVE["choices"][0], "text": "x" * 1_000_000}]}
    (store,) = core.handle(LineAnswered(first[0], long), 0, 0)
    assert isinstance(store, StoreLine)
    assert (store.ok, json.loads(store.data)["response"]["status_code"]) == (False, 413)


def test_a_batch_that_is_given_back_is_delivered_at_once() -> None:
    core, first = running()
    assert core.give_back() == [Nak("ack", 0)]
    assert core.handle(LineAnswered(first[0], dict(NATIVE)), 0, 0) == []


def test_lines_with_one_beginning_follow_each_other_within_the_look_ahead() -> None:
    """Three beginnings in turn over more than two parts of the file; `"messages":` in a custom_id is none."""
    texts = {
        number: json.dumps(
            {
                "custom_id": f'"messages":{number}',
                "url": "/v1/completions",
                "body": {"prompt": f"{'xyz'[number % 3]}{number}"},
            }
        ).encode()
        for number in range(1, 2 * LOOK_AHEAD + 10)
    }

    def sent(done: Collection[int], most: int) -> list[int]:
        """The lines that a keeper sends, in their order, until it has stored `most` records."""
        core = BatchCore(job() | {"status": "in_progress", "_model": "m"}, "ack", 1_000_000)
        core.begin(0)
        left = [number for number in texts if number not in done]
        commands = core.handle(Opened(False, core.batch, done), 0, 0)
        order = list[int]()
        while commands and len(order) < most:
            command = commands.pop(0)
            if isinstance(command, ReadLines):
                now, left = left[: command.most], left[command.most :]
                lines = tuple((number, texts[number]) for number in now)
                commands += core.handle(LinesRead(lines, end=not left), 0, 0)
            elif isinstance(command, AskLine):
                order.append(int(command.body["request_id"].rpartition(".")[2]))
                commands += core.handle(LineAnswered(command.body["request_id"], dict(NATIVE)), 0, 0)
            elif isinstance(command, StoreLine):
                commands += core.handle(LineStored(command.number, True), 0, 0)
        return order

    order = sent((), len(texts))
    assert sorted(order) == [*texts]
    parts = [number // LOOK_AHEAD for number in order]
    assert parts == sorted(parts), "no line is overtaken by one of a later part"
    begins = ["xyz"[number % 3] for number in order]
    changes = sum(a != b for a, b in pairwise(begins))
    assert changes < 3 * 3 + FIRST_WINDOW, "of 2,057 in the order of the file"
    first = sent((), 700)
    assert sorted(first + sent(first, len(texts))) == [*texts], "the next keeper sends the others"
