"""What an edge forwards, against a model of the centre: calls get lost there or on the way back, the centre
loses its store, requests are cancelled here. `HYPOTHESIS_PROFILE=soak` runs many more."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from services.keeper.core import EXPIRED, KEPT_S, Away, Key
from services.keeper.forwarding import (
    CANCEL,
    LAST_LOOK_US,
    MOST_CALLS,
    MOST_HERE,
    RESULT,
    RETRY_US,
    SUBMIT,
    Asked,
    Call,
    Called,
    CancelledHere,
    Done,
    ForwardCommand,
    ForwardCore,
    ForwardEvent,
    Later,
    TakenThere,
)
from services.keeper.records import CANCELLED, COMPLETED, FAILED, RUNNING, Body, Work
from shared.errors import (
    BadRequest,
    Cancelled,
    DeadlineExceeded,
    DuplicateRequest,
    EngineError,
    HeadraceError,
    Overloaded,
    Unavailable,
    UnknownModel,
    error_body,
)
from shared.nats.interface import NoResponders, RequestTimeout

KEYS = [("a", "1"), ("a", "2"), ("b", "1")]
ANSWER = {"choices": []}


def work(key: Key, submitted_us: int = 0) -> Work:
    return Work(*key, "m", {"prompt": "Hi"}, "digest", submitted_us)


class Edge(RuleBasedStateMachine):
    """One core and one centre."""

    @initialize()
    def begin(self) -> None:
        self.core, self.now_us = ForwardCore(), 0
        self.there: dict[Key, str] = {}  # the states of requests at the centre
        self.calls: list[Call] = []
        self.open: set[Key] = set()  # asked, without an answer
        self.cancelled: set[Key] = set()  # here

    def feed(self, event: ForwardEvent) -> None:
        for command in self.core.handle(event, self.now_us):
            match command:
                case Call(key, verb, sent):
                    assert key not in {call.key for call in self.calls}, "one call at a time"
                    assert (sent is not None) == (verb == SUBMIT)
                    assert verb == CANCEL or key not in self.cancelled
                    self.calls.append(command)
                case Done(key, outcome):
                    assert key in self.open
                    self.open.remove(key)
                    if outcome == ANSWER:
                        assert self.there[key] == COMPLETED
                    elif isinstance(outcome, Cancelled):
                        assert key in self.cancelled or self.there[key] == CANCELLED
                    else:
                        assert isinstance(outcome, Unavailable)
                case Away(key):
                    assert key in self.open
        assert len(self.calls) <= MOST_CALLS

    def centre(self, call: Call) -> Body | HeadraceError:
        """Carry out a call."""
        key = call.key
        if call.verb == SUBMIT:
            return {"status": self.there.setdefault(key, RUNNING)}
        if key not in self.there:
            return UnknownModel("404")
        if call.verb == CANCEL and self.there[key] == RUNNING:
            self.there[key] = CANCELLED
        state = self.there[key]
        error = error_body(Cancelled("there")) if state == CANCELLED else {}
        return {"status": state, **error, **({"answer": ANSWER} if state == COMPLETED else {})}

    @rule(key=st.sampled_from(KEYS))
    def ask(self, key: Key) -> None:
        """Also again: the core of the keeper asks until it has an answer."""
        if key not in self.cancelled:
            self.open.add(key)
            self.feed(Asked(work(key)))

    @precondition(lambda self: self.calls)
    @rule(data=st.data(), fate=st.sampled_from(["returns", "no link", "lost on the way back"]))
    def call_ends(self, data: Any, fate: str) -> None:
        call = self.calls.pop(data.draw(st.integers(0, len(self.calls) - 1)))
        if fate == "no link":
            outcome: Body | HeadraceError = NoResponders("?")
        else:
            outcome = self.centre(call)
            outcome = RequestTimeout("?") if fate == "lost on the way back" else outcome
        self.feed(Called(call.key, call.verb, outcome))

    @rule(key=st.sampled_from(KEYS))
    def cancel(self, key: Key) -> None:
        """The news may come twice."""
        if key in self.open | self.cancelled:
            self.cancelled.add(key)
            self.feed(CancelledHere(key))
            assert key not in self.open, "the record is there already"

    @precondition(lambda self: RUNNING in self.there.values())
    @rule(data=st.data())
    def ends_there(self, data: Any) -> None:
        key = data.draw(st.sampled_from([key for key, state in self.there.items() if state == RUNNING]))
        self.there[key] = COMPLETED

    @rule()
    def the_centre_loses_its_store(self) -> None:
        self.there.clear()

    @rule(us=st.sampled_from([100_000, RETRY_US, LAST_LOOK_US]))
    def time_passes(self, us: int) -> None:
        self.now_us += us
        self.feed(Later())

    def teardown(self) -> None:
        """With a link, a centre that ends everything and a keeper that asks again, all requests end, and
        nothing that was cancelled here still runs there."""
        if not hasattr(self, "core"):
            return
        for _ in range(20):
            for key in KEYS:
                if key in self.open:
                    self.feed(Asked(work(key)))
            while self.calls:
                call = self.calls.pop()
                self.feed(Called(call.key, call.verb, self.centre(call)))
            for key, state in self.there.items():
                if state == RUNNING and key not in self.cancelled:
                    self.there[key] = COMPLETED
            self.now_us += LAST_LOOK_US
            self.feed(Later())
        assert not self.open
        assert not len(self.core)
        assert [key for key in self.cancelled if self.there.get(key) == RUNNING] == []


TestEdge = Edge.TestCase


def ask(core: ForwardCore, *keys: Key, now_us: int = 0) -> list[ForwardCommand]:
    return [command for key in keys for command in core.handle(Asked(work(key)), now_us)]


@pytest.mark.parametrize(
    ("refusal", "answer"),
    [
        (BadRequest("wrong"), BadRequest),
        (DuplicateRequest("taken"), TakenThere),
        (Overloaded("full"), Overloaded),
        (Unavailable("no tokenizer"), Unavailable),
    ],
)
def test_a_refused_submit_is_answered_with_its_error(
    refusal: HeadraceError, answer: type[HeadraceError]
) -> None:
    core, (key, *_) = ForwardCore(), KEYS
    assert ask(core, key) == [Call(key, SUBMIT, work(key))]
    (done,) = core.handle(Called(key, SUBMIT, refusal), 0)
    assert isinstance(done, Done)
    assert (type(done.outcome), done.outcome.code) == (answer, refusal.code)  # type: ignore[union-attr]
    assert len(core) == 0


@pytest.mark.parametrize(
    ("error", "kind"), [(EngineError("killed"), EngineError), (Unavailable("was away"), EngineError)]
)
def test_an_error_in_a_record_there_is_final(error: HeadraceError, kind: type[HeadraceError]) -> None:
    core, (key, *_) = ForwardCore(), KEYS
    ask(core, key)
    assert core.handle(Called(key, SUBMIT, {"status": "queued"}), 0) == [Away(key)]
    assert core.is_there(key)
    assert core.handle(Later(), RETRY_US) == [Call(key, RESULT)]
    record = {"status": FAILED, **error_body(error)}
    (done,) = core.handle(Called(key, RESULT, record), RETRY_US)
    assert isinstance(done, Done)
    assert type(done.outcome) is kind


def test_one_call_looks_whether_the_link_is_back_and_then_all_go() -> None:
    core, keys = ForwardCore(), [("t", f"{number}") for number in range(MOST_HERE)]
    assert len(ask(core, *keys)) == MOST_CALLS
    for key in keys:  # all but one are due a little later
        at_us = 0 if key == keys[0] else RETRY_US // 2
        assert core.handle(Called(key, SUBMIT, NoResponders("?")), at_us) == []
    (refused,) = ask(core, ("t", "one more"))
    assert isinstance(refused, Done)
    assert isinstance(refused.outcome, Unavailable), "the queue keeps it"
    gone, late = keys.pop(), ("t", "one more")
    cancelled, cancel = core.handle(CancelledHere(gone), 0)
    assert (type(cancelled), cancel) == (Done, Call(gone, CANCEL))
    assert ask(core, late) == [], "there is room, and one call at a time"
    late_call = Call(late, SUBMIT, work(late))
    assert core.handle(Called(gone, CANCEL, NoResponders("?")), 0) == [late_call]
    assert core.handle(Called(late, SUBMIT, NoResponders("?")), 0) == []
    (probe,) = core.handle(Later(), RETRY_US)
    assert isinstance(probe, Call)
    away, *others = core.handle(Called(probe.key, SUBMIT, {"status": "queued"}), RETRY_US)
    assert (probe.key, away) == (keys[0], Away(keys[0]))
    assert len(others) == MOST_HERE, "one of them is the cancel"


def test_refused_requests_leave_their_places_in_memory() -> None:
    core, keys = ForwardCore(), [("t", f"{number}") for number in range(MOST_HERE)]
    ask(core, *keys)
    for key in keys:
        core.handle(Called(key, SUBMIT, BadRequest("wrong")), 0)
    ask(core, ("t", "waits"))
    core.handle(Called(("t", "waits"), SUBMIT, NoResponders("?")), 0)
    assert not [each for each in ask(core, ("t", "too")) if isinstance(each, Done)]
    assert len(core) == 2


def test_looks_become_rare() -> None:
    core, (key, *_), now_us, looks = ForwardCore(), KEYS, 0, []
    ask(core, key)
    core.handle(Called(key, SUBMIT, {"status": "queued"}), 0)
    while now_us < 600_000_000:
        now_us += 50_000
        for _ in core.handle(Later(), now_us):
            looks.append(now_us)
            core.handle(Called(key, RESULT, {"status": RUNNING}), now_us)
    gaps = [after - before for before, after in itertools.pairwise(looks)]
    assert gaps[0] <= 300_000
    assert LAST_LOOK_US <= gaps[-1] <= LAST_LOOK_US + 50_000
    assert all(gap <= before // 4 + 300_000 for before, gap in zip(looks, gaps, strict=False))


def test_a_request_waits_for_the_link_for_a_day_and_for_its_answer_for_two() -> None:
    day_us = KEPT_S * 1_000_000
    core, (here, there, _) = ForwardCore(), KEYS
    ask(core, here, there)
    core.handle(Called(there, SUBMIT, {"status": "queued"}), 0)
    core.handle(Called(here, SUBMIT, NoResponders("?")), 0)
    for key, kept_us in ((here, day_us), (there, 2 * day_us)):
        assert not [c for c in core.handle(Asked(work(key), kept_us), 0) if isinstance(c, Done)]
        (done,) = [c for c in core.handle(Asked(work(key), kept_us + 1), 0) if isinstance(c, Done)]
        assert isinstance(done.outcome, DeadlineExceeded)
        assert done.outcome.message == EXPIRED
