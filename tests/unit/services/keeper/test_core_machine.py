"""The keeper's core against a model of the work queue, the store and the services.

Deliveries come again, keepers die at any point, the store and the services are away for a while.
`HYPOTHESIS_PROFILE=soak` runs many more.
"""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from services.keeper.core import (
    ASK_AGAIN_US,
    KEPT_S,
    LAST_DELAY_US,
    MOST_AWAY,
    PROGRESS_US,
    RETRY_US,
    WINDOW,
    Ack,
    Announce,
    Answered,
    Ask,
    Away,
    Command,
    Delivered,
    Drop,
    Event,
    KeeperCore,
    Key,
    LookedUp,
    LookUp,
    Nak,
    Progress,
    Store,
    Stored,
    Tick,
)
from services.keeper.records import CANCELLED, COMPLETED, FAILED, Body, Work
from shared.bodies import encode
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
)
from shared.savepoints import body_hash

KEYS = [("a", "1"), ("a", "2"), ("b", "1")]  # two tenants may use one id
AGAIN = [
    Overloaded("full", retry_after_ms=20_000),
    Unavailable("away"),
    DuplicateRequest("runs"),
    UnknownModel("?"),
]
LAST = [BadRequest("wrong"), EngineError("killed three executors"), Cancelled("by the client")]


def work(key: Key, submitted_us: int = 0) -> Work:
    """The requests of tenant b have savepoints."""
    more = {"durable": "tokens"} if key[0] == "b" else {}
    webhook = "https://a.example" if key == KEYS[1] else ""
    return Work(*key, "m", {"prompt": key[1], "seed": 7, **more}, "digest", submitted_us, webhook=webhook)


def savepoint(key: Key) -> bytes:
    return f"1 {body_hash(encode(work(key).body))}\ntokens".encode()


class Keepers(RuleBasedStateMachine):
    """One keeper at a time, on a queue, a store and a fleet that are right by construction."""

    @initialize(waiting=st.sets(st.sampled_from(KEYS), min_size=1))
    def begin(self, waiting: set[Key]) -> None:
        self.now_us = 0
        self.core = KeeperCore()
        self.waiting = set(waiting)  # in the work queue
        self.records: dict[Key, Body] = {}
        self.acks: dict[str, Key] = {}
        self.todo: list[Command] = []  # calls to the store that have not returned
        self.asked: list[Work] = []
        self.announced: list[Key] = []
        self.count = 0

    def feed(self, event: Event) -> None:
        for command in self.core.handle(event, self.now_us, self.now_us):
            match command:
                case LookUp() | Store():
                    self.todo.append(command)
                case Ask(asked, found, run):
                    assert (asked.tenant, asked.id) in self.waiting
                    assert found in (b"", savepoint((asked.tenant, asked.id)))
                    assert not found or asked.has_savepoints
                    assert bool(run) != bool(found), "what goes on is no new run"
                    self.asked.append(asked)
                case Announce(key, status):
                    assert self.records[key]["status"] == status
                    self.announced.append(key)
                case Ack(reply, hook):
                    assert self.acks[reply] in self.records, "acked without a record"
                    assert hook == work(self.acks[reply]).hook
                    self.waiting.discard(self.acks[reply])
                case Nak(reply, delay_us):
                    assert 0 <= delay_us <= 20_000_000
                    assert self.acks[reply] in self.waiting
                case Progress(reply):
                    assert reply in self.acks
                case Drop(key):
                    assert key[0] == "b"

    @rule(key=st.sampled_from(KEYS))
    def delivered(self, key: Key) -> None:
        """The first time, again after a lost ack, or again while it is in flight."""
        if key in self.waiting or key in self.records:
            self.count += 1
            self.acks[f"ack{self.count}"] = key
            before = len(self.asked)
            self.feed(Delivered(work(key), f"ack{self.count}", times=self.count, size=10))
            assert len(self.asked) == before, "asked before the store was looked at"

    @precondition(lambda self: self.todo)
    @rule(data=st.data(), there=st.sampled_from(["yes", "no", "lost answer"]))
    def store_answers(self, data: st.DataObject, there: str) -> None:
        command = self.todo.pop(data.draw(st.integers(0, len(self.todo) - 1)))
        if isinstance(command, LookUp):
            assert command.savepoint == (command.key[0] == "b")
            found = data.draw(st.sampled_from([b"", b"1 other\n", savepoint(command.key)]))
            exists = None if there != "yes" else command.key in self.records
            self.feed(LookedUp(command.key, exists, found if command.savepoint else b""))
            return
        assert isinstance(command, Store)
        new = command.key not in self.records
        if there != "no" and new:
            self.records[command.key] = command.record
        self.feed(Stored(command.key, new if there == "yes" else None))

    @precondition(lambda self: self.asked)
    @rule(data=st.data(), outcome=st.sampled_from([None, *AGAIN, *LAST]), lacking=st.booleans())
    def fleet_answers(self, data: st.DataObject, outcome: HeadraceError | None, *, lacking: bool) -> None:
        """Also late, twice, and to a keeper that has not asked."""
        asked = data.draw(st.sampled_from(self.asked))
        answer = {"text": asked.body["prompt"]}
        lacking &= isinstance(outcome, Unavailable)
        outcome_or_answer = answer if outcome is None else outcome
        self.feed(Answered((asked.tenant, asked.id), outcome_or_answer, size=5, lacking=lacking))

    @rule()
    def the_service_is_there(self) -> None:
        for model in self.core.held_models:
            self.core.release(model)

    @rule(us=st.sampled_from([RETRY_US // 2, RETRY_US, PROGRESS_US, ASK_AGAIN_US]))
    def time_passes(self, us: int) -> None:
        self.now_us += us
        self.feed(Tick())

    @rule(key=st.sampled_from(KEYS))
    def goes_to_the_centre(self, key: Key) -> None:
        self.feed(Away(key))

    @rule()
    def dies(self) -> None:
        self.core = KeeperCore()
        self.todo.clear()

    @rule()
    def stops(self) -> None:
        replies = [command.reply for command in self.core.give_back() if isinstance(command, Nak)]
        assert len(replies) == len({self.acks[reply] for reply in replies})
        assert (len(self.core), self.core.room("a", 1) > 0) == (0, True)
        self.dies()

    @invariant()
    def nothing_is_lost(self) -> None:
        """A request waits or has a record; and a record stays as it was made."""
        if hasattr(self, "records"):
            for record in self.records.values():
                assert ("answer" in record) == (record["status"] == COMPLETED)
                assert ("error" in record) == (record["status"] in (FAILED, CANCELLED))
            assert len(self.core) <= len(KEYS)

    @precondition(lambda self: self.waiting)
    @rule()
    def all_goes_well(self) -> None:
        """From any state: deliveries, a store and a fleet that answer take every request to its record."""
        self.the_service_is_there()
        for key in sorted(self.waiting):
            self.delivered(key)
        for _ in range(4):
            self.now_us += RETRY_US
            self.feed(Tick())
            while self.todo:
                command = self.todo.pop()
                if isinstance(command, LookUp):
                    self.feed(LookedUp(command.key, command.key in self.records))
                elif isinstance(command, Store):
                    new = command.key not in self.records
                    self.records.setdefault(command.key, command.record)
                    self.feed(Stored(command.key, new))
            for asked in self.asked[-len(KEYS) * 2 :]:
                self.feed(Answered((asked.tenant, asked.id), {"text": asked.body["prompt"]}))
        assert self.waiting == set()
        assert len(self.core) == 0
        assert self.core.room("a", 1) == WINDOW


TestKeepers = Keepers.TestCase


def flown(core: KeeperCore, key: Key = KEYS[0], times: int = 1, now_us: int = 0) -> None:
    """A request that has been asked."""
    looks = [LookUp(key, savepoint=key[0] == "b")]
    assert core.handle(Delivered(work(key), "ack", times), now_us, now_us) == looks
    assert core.handle(LookedUp(key, False), now_us, now_us) == [Ask(work(key), run=64 * (times - 1) + 1)]


def test_an_answer_is_stored_announced_and_acked_in_this_order() -> None:
    core, key = KeeperCore(), KEYS[0]
    flown(core)
    assert core.is_running(key)
    (store,) = core.handle(Answered(key, {"text": "x"}), 1, 5_000_000)
    assert isinstance(store, Store)
    assert (store.record["status"], store.record["answer"], store.record["ended_at"]) == (
        COMPLETED,
        {"text": "x"},
        5,
    )
    assert core.handle(Stored(key, True), 2, 2) == [Announce(key, COMPLETED), Ack("ack")]
    assert (len(core), core.stored, core.is_running(key)) == (0, 1, False)


def test_a_second_answer_changes_nothing() -> None:
    core, key = KeeperCore(), KEYS[0]
    flown(core)
    assert len(core.handle(Answered(key, {"text": "x"}), 1, 1)) == 1
    assert core.handle(Answered(key, {"text": "y"}), 1, 1) == []


def test_request_is_not_tried_again_before_its_time() -> None:
    core, key = KeeperCore(), KEYS[0]
    flown(core)
    core.handle(Tick(), 0, 0)
    assert core.handle(Tick(), PROGRESS_US - 1, 0) == []
    again = core.handle(Tick(), ASK_AGAIN_US, 0)
    assert again == [Ask(work(key), run=2), Progress("ack")]
    core.handle(Answered(key, {"text": "x"}), ASK_AGAIN_US, 0)
    assert core.handle(Tick(), ASK_AGAIN_US + RETRY_US - 1, 0) == []
    assert isinstance(core.handle(Tick(), ASK_AGAIN_US + RETRY_US, 0)[0], Store)


def test_requests_are_soon_pulled_again_after_a_cut_of_the_connection() -> None:
    core = KeeperCore()
    flown(core)
    core.handle(Tick(), 0, 0)
    core.on_reconnected(5)
    assert core.handle(Tick(), 5, 0) == []
    assert core.handle(Tick(), 5 + RETRY_US, 0) == [Ask(work(KEYS[0]), run=2)]


def test_a_delivery_of_a_request_with_a_record_is_acked_and_nothing_else() -> None:
    core, key = KeeperCore(), KEYS[0]
    core.handle(Delivered(work(key), "ack"), 0, 0)
    assert core.handle(LookedUp(key, True), 0, 0) == [Ack("ack")]


def test_a_second_delivery_of_a_request_in_flight_takes_over_the_ack() -> None:
    core, key = KeeperCore(), KEYS[0]
    flown(core)
    assert core.handle(Delivered(work(key), "second", 2), 1, 1) == []
    core.handle(Answered(key, {"text": "x"}), 1, 1)
    assert core.handle(Stored(key, False), 2, 2) == [Ack("second")]


def test_a_refused_request_waits_longer_at_each_delivery_but_not_for_ever() -> None:
    delays = []
    for times in (1, 2, 3, 40):
        core = KeeperCore()
        flown(core, times=times)
        (nak,) = core.handle(Answered(KEYS[0], Unavailable("away")), 1, 1)
        assert isinstance(nak, Nak)
        delays.append(nak.delay_us)
    assert delays == [1_000_000, 2_000_000, 4_000_000, 15_000_000]


LACKING = Unavailable("no executor")


def held(core: KeeperCore, name: str, now_us: int, model: str = "m") -> list[Command]:
    """What follows when a request of a model that may be held back is delivered for the third time."""
    one = Work("a", name, model, {"prompt": name}, "digest", 0)
    core.handle(Delivered(one, f"ack {name}", 3), now_us, now_us)
    return core.handle(LookedUp(("a", name), False), now_us, now_us)


def test_requests_of_a_model_that_lacks_a_service_are_not_pulled() -> None:
    core = KeeperCore()
    flown(core)
    core.handle(Answered(KEYS[0], LACKING, lacking=True), 0, 0)
    assert core.held_models == ["m"]
    assert held(core, "x", 1) == [Nak("ack x", 4_000_000)]
    assert held(core, "y", 1) == [Nak("ack y", 4_010_000)], "one after the other"
    assert isinstance(held(core, "z", 1, "other")[0], Ask), "the other models go on"
    assert core.refused == 1, "those held back were not refused"


def test_a_cancelled_request_of_a_model_held_back_is_acked() -> None:
    core, key = KeeperCore(), ("a", "x")
    flown(core)
    core.handle(Answered(KEYS[0], LACKING, lacking=True), 0, 0)
    core.handle(Delivered(Work(*key, "m", {}, "digest", 0), "ack"), 1, 1)
    assert core.handle(LookedUp(key, True), 1, 1) == [Ack("ack")]


def test_one_request_in_a_while_is_pulled_in_case_heartbeats_do_not_come() -> None:
    core = KeeperCore()
    flown(core)
    core.handle(Answered(KEYS[0], LACKING, lacking=True), 0, 0)
    assert isinstance(held(core, "x", LAST_DELAY_US - 1)[0], Nak)
    assert isinstance(held(core, "y", LAST_DELAY_US)[0], Ask)
    assert isinstance(held(core, "z", LAST_DELAY_US)[0], Nak)
    core.handle(Answered(("a", "y"), {"text": "x"}), LAST_DELAY_US + 1, 0)
    assert core.held_models == [], "it was answered"
    assert isinstance(held(core, "x", LAST_DELAY_US + 2)[0], Ask)


def test_a_model_is_released_when_its_services_are_there() -> None:
    core = KeeperCore()
    flown(core)
    core.handle(Answered(KEYS[0], LACKING, lacking=True), 0, 0)
    core.release("m")
    core.release("never held")
    assert isinstance(held(core, "x", 1)[0], Ask)


DAY_US = KEPT_S * 1_000_000
MANY = KEPT_S * 1_000_000 // LAST_DELAY_US + 2  # deliveries of a day and more
_CLOCKS_US = [s * 1_000_000 for s in (0, 2, -2, 600, -600, 172_800, -172_800)]


def late(core: KeeperCore, key: Key, times: int, now_us: int, wall_us: int, stored_us: int = 0) -> bool:
    """Whether the next delivery of a request ends it because its day is over; else no service takes it."""
    core.handle(Delivered(work(key), f"ack{times}", times, stored_us=stored_us), now_us, wall_us)
    (command,) = core.handle(LookedUp(key, False), now_us, wall_us)
    if isinstance(command, Store):
        assert (command.record["status"], command.record["error"]["code"]) == (FAILED, 408)
        return True
    (nak,) = core.handle(Answered(key, Unavailable("away")), now_us, wall_us)
    assert isinstance(nak, Nak)
    return False


def test_deliveries_alone_never_fail_a_request() -> None:
    """Whole fleets are killed again and again: no count of deliveries ends a request."""
    for times in (*range(1, 50), MANY):
        assert not late(KeeperCore(), KEYS[0], times, 0, 0)


@pytest.mark.parametrize("clock_us", _CLOCKS_US)
def test_a_request_that_waits_for_more_than_a_day_gets_a_record_with_the_reason(clock_us: int) -> None:
    """At any wall clock of the keeper, also if it is set in the middle."""
    core, key = KeeperCore(), KEYS[0]
    assert not late(core, key, 1, 0, clock_us)
    assert not late(core, key, 2, DAY_US, DAY_US - clock_us)
    assert late(core, key, 3, DAY_US + 1, DAY_US + 1 + clock_us)


@pytest.mark.parametrize("clock_us", _CLOCKS_US)
def test_a_clock_that_is_set_fails_no_request_that_waits(clock_us: int) -> None:
    """That of the store or of the keeper, before or after the request has come; also for the next keeper."""
    for first_us in (0, clock_us):
        core, stored_us = KeeperCore(), max(first_us, 0)
        for number, at_us in enumerate((0, 15_000_000, 30_000_000), 1):
            assert not late(core, KEYS[0], number, at_us, clock_us, stored_us)
            stored_us = max(clock_us, 0) + at_us
        assert not late(KeeperCore(), KEYS[0], 4, 0, clock_us, stored_us)


@pytest.mark.parametrize(
    ("times", "stored_us", "over"),
    [(MANY, DAY_US + 1, True), (MANY, DAY_US - 1, False), (2, 3 * DAY_US, False), (MANY, 0, False)],
    ids=["both say so", "not stored for so long", "no keeper was there", "the clock was set back"],
)
def test_the_next_keeper_ends_a_request_that_has_waited_for_a_day(
    times: int, stored_us: int, *, over: bool
) -> None:
    assert late(KeeperCore(), KEYS[0], times, 0, 0, stored_us) is over


def test_notes_about_waiting_requests_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.keeper.core.MAX_SINCE", 2)
    core = KeeperCore()
    for number, key in enumerate(KEYS[:3]):
        late(core, key, 1, number, 0)
    assert [core.age_us(key, 10) for key in KEYS[:3]] == [0, 9, 8]


def test_the_window_is_bounded_by_requests_and_by_bytes() -> None:
    core = KeeperCore()
    assert core.room("a", 1) == WINDOW
    core.handle(Delivered(work(KEYS[0]), "ack", size=1), 0, 0)
    assert core.room("a", 1) == core.room("b", 1) == WINDOW - 1
    assert (core.room("a", 2), core.room("b", 2)) == (WINDOW // 2 - 1, WINDOW // 2)
    assert (core.room("a", 9 * WINDOW), core.room("b", 9 * WINDOW)) == (0, 1)
    core.handle(Delivered(work(KEYS[1]), "ack", size=1 << 30), 0, 0)
    assert core.room("a", 1) == core.room("b", 1) == 0


def test_forwarded_requests_leave_the_window_up_to_a_bound() -> None:
    core = KeeperCore()
    for number in range(MOST_AWAY + WINDOW):
        key = ("a", f"{number}")
        assert core.room("a", 2) > 0
        core.handle(Delivered(work(key), "ack", size=1), 0, 0)
        core.handle(Away(key), 0, 0)
        core.handle(Away(key), 0, 0)
        if number < MOST_AWAY:
            assert (core.room("a", 1), core.room("b", 1)) == (WINDOW, WINDOW)
        elif core.room("a", 2) == 0:
            assert core.room("b", 2) == WINDOW // 2
            break
    assert number == MOST_AWAY + WINDOW // 2 - 1
    core.give_back()
    assert core.room("a", 1) == WINDOW


def test_all_requests_in_flight_report_progress_in_time() -> None:
    core = KeeperCore()
    for key in KEYS:
        flown(core, key)
    core.handle(Tick(), 1, 1)
    assert core.handle(Tick(), PROGRESS_US, 0) == []
    assert core.handle(Tick(), 1 + PROGRESS_US, 0) == [Progress("ack")] * 3


def test_every_run_has_a_number_of_its_own_in_the_order_of_the_runs() -> None:
    """A delivery to any keeper is a run, and so is each try within one. No clock is read."""
    numbers = list[int]()
    for times in (1, 2, 5_760):
        core, now_us = KeeperCore(), 0
        flown(core, times=times)
        numbers.append(64 * (times - 1) + 1)
        for _ in range(63):
            now_us += ASK_AGAIN_US
            numbers += [c.run for c in core.handle(Tick(), now_us, -now_us) if isinstance(c, Ask)]
    assert numbers == sorted(set(numbers))
    assert (numbers[:3], len(numbers), numbers[-1]) == ([1, 2, 3], 3 * 64, 64 * 5_760)


def test_runs_keep_their_order_when_a_consumer_that_was_made_again_counts_from_one() -> None:
    core = KeeperCore()
    flown(core, times=3)
    core.handle(Delivered(work(KEYS[0]), "new", times=1, size=10), 1, 1)
    assert core.handle(Tick(), ASK_AGAIN_US, 0) == [Ask(work(KEYS[0]), run=2 * 64 + 2), Progress("new")]


# ---- savepoints ------------------------------------------------------------------------------------

LONG = KEYS[2]


def looked_up(found: bytes) -> tuple[KeeperCore, list[Command]]:
    core = KeeperCore()
    assert core.handle(Delivered(work(LONG), "ack"), 0, 0) == [LookUp(LONG, savepoint=True)]
    return core, core.handle(LookedUp(LONG, False, found), 0, 0)


def test_a_request_goes_on_after_its_savepoint() -> None:
    assert looked_up(savepoint(LONG))[1] == [Ask(work(LONG), savepoint(LONG))]
    assert looked_up(b"")[1] == [Ask(work(LONG), run=1)]


def test_a_savepoint_of_another_body_or_version_is_dropped() -> None:
    for found in (savepoint(KEYS[0]), b"2" + savepoint(LONG)[1:], b"garbage"):
        assert looked_up(found)[1] == [Drop(LONG), Ask(work(LONG), run=1)]


def test_one_with_a_record_is_acked_and_its_savepoint_dropped() -> None:
    core = KeeperCore()
    core.handle(Delivered(work(LONG), "ack"), 0, 0)
    assert core.handle(LookedUp(LONG, True, savepoint(LONG)), 0, 0) == [Ack("ack"), Drop(LONG)]
    core, _ = looked_up(savepoint(LONG))
    core.handle(Answered(LONG, {"text": "x"}), 1, 1)
    assert core.handle(Stored(LONG, True), 2, 2) == [Announce(LONG, COMPLETED), Ack("ack"), Drop(LONG)]


def test_an_error_after_a_savepoint_is_not_the_last_word() -> None:
    """It starts over, once: the error may be of the savepoint. The next one is of the request."""
    core, _ = looked_up(savepoint(LONG))
    assert core.handle(Answered(LONG, BadRequest("unreadable")), 1, 1) == [Drop(LONG), Ask(work(LONG), run=2)]
    core.handle(Tick(), 1, 1)
    assert core.handle(Tick(), 1 + ASK_AGAIN_US, 1)[0] == LookUp(LONG, savepoint=True)
    assert core.handle(LookedUp(LONG, False, savepoint(LONG)), 2, 2) == [Ask(work(LONG), run=3)]
    (store,) = core.handle(Answered(LONG, EngineError("killed three executors")), 3, 3)
    assert isinstance(store, Store)
    assert store.record["status"] == FAILED


def test_a_cancel_a_time_limit_and_a_fleet_that_is_not_ready_are_not_its_fault() -> None:
    for outcome in (Cancelled("by the client"), DeadlineExceeded("late")):
        core, _ = looked_up(savepoint(LONG))
        (store,) = core.handle(Answered(LONG, outcome), 1, 1)
        assert isinstance(store, Store)
    for outcome in AGAIN:
        core, _ = looked_up(savepoint(LONG))
        (nak,) = core.handle(Answered(LONG, outcome), 1, 1)
        assert isinstance(nak, Nak)


def test_newest_savepoint_is_read_before_the_request_is_submitted_again() -> None:
    """The fleet may have died while this keeper lived."""
    core, asked = looked_up(b"")
    assert asked == [Ask(work(LONG), run=1)]
    core.handle(Tick(), 0, 0)
    assert core.handle(Tick(), ASK_AGAIN_US, 0)[0] == LookUp(LONG, savepoint=True)
    again = core.handle(LookedUp(LONG, False, savepoint(LONG)), ASK_AGAIN_US, 0)
    assert again == [Ask(work(LONG), savepoint(LONG))]
