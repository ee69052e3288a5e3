"""The tokenizer's core on a fake clock: no inbox is lost."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from support.text_models import served

from services.tokenizer.core import (
    ASK_AGAIN_US,
    CATCH_UP_US,
    GRACE_US,
    MOST_ASKED,
    RESEND_US,
    WAIT_US,
    Command,
    Fail,
    Loads,
    RequestDone,
    Schedulers,
    Send,
    Tick,
    TokenizerCore,
)
from services.tokenizer.prepare import ServedModel, Submission, prepared
from shared.actor.membership import MIN_DETECTION_US as GIVE_UP_US
from shared.errors import BadRequest
from shared.kv_blocks import rendezvous
from shared.messages import Accepted, Cancel, Rejected, Tokenized


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    return served(tmp_path_factory.mktemp("core"))


@pytest.fixture
def core(model: ServedModel) -> TokenizerCore:
    core = TokenizerCore(model)
    core.handle(Schedulers(("s1", "s2")), 0)
    core.handle(Accepted(tenant="t", request="earlier", attempt=1), 0)  # the start is over
    return core


def submission(request: str = "r1", tenant: str = "t", **fields: Any) -> Submission:
    body = {"prompt": "Hello", "request_id": request, **fields}
    return Submission(tenant, f"inbox.{request}", json.dumps(body).encode(), "fresh", 7, 1, "trace")


def key_of(submitted: Submission, model: ServedModel) -> str:
    outcome = prepared(submitted, model).outcome
    assert isinstance(outcome, Tokenized)
    return outcome.routing_key


def sent(commands: list[Command]) -> Tokenized:
    (command,) = commands
    assert isinstance(command, Send)
    assert isinstance(command.message, Tokenized)
    return command.message


def failure(commands: list[Command]) -> tuple[str, str, int, str]:
    fail = commands[0]
    assert isinstance(fail, Fail)
    return fail.inbox, fail.request, fail.error.code, fail.error.message


def test_a_request_goes_to_one_scheduler_with_its_trace(core: TokenizerCore, model: ServedModel) -> None:
    (command,) = core.handle(submission(), 0)
    assert isinstance(command, Send)
    assert (command.scheduler, command.trace) == (
        rendezvous(key_of(submission(), model), ("s1", "s2")),
        "trace",
    )
    assert core.pending == 1
    assert core.handle(Accepted(tenant="t", request="r1", attempt=1), 5) == []
    assert core.pending == 0
    assert core.prompt_tokens == len(sent([command]).tokens)


def test_a_bad_request_is_answered_under_its_id(core: TokenizerCore) -> None:
    assert failure(core.handle(submission(temperature=9), 0))[1:3] == ("r1", 400)
    broken = dataclasses.replace(submission(), body=b"{")
    assert failure(core.handle(broken, 0))[1:3] == ("fresh", 400)
    assert (core.pending, core.failed, core.requests) == (0, 2, 2)


def test_an_error_holds_nothing_of_the_request(model: ServedModel) -> None:
    """A traceback would keep the body, of many megabytes perhaps, until the collector runs."""
    for body in (b"nonsense", b'{"prompt": ""}', b'{"prompt": "x", "n": "y"}', rb'{"prompt": "\ud800"}'):
        error = prepared(Submission("t", "inbox", body, "fresh", 7, 1, ""), model).outcome
        assert isinstance(error, BadRequest)
        assert (error.__traceback__, error.__cause__, error.__context__) == (None, None, None)


def test_answer_is_503_without_a_scheduler(model: ServedModel) -> None:
    core = TokenizerCore(model)
    inbox, _, code, message = failure(core.handle(submission(), 0))
    assert (inbox, code, core.unavailable) == ("inbox.r1", 503, 1)
    assert message.startswith("no scheduler answers for model 'tiny'")


def test_an_id_in_use_is_409_for_the_same_tenant_only(core: TokenizerCore) -> None:
    core.handle(submission(), 0)
    other = dataclasses.replace(submission(), inbox="another")
    assert failure(core.handle(other, 1))[2] == 409
    assert sent(core.handle(submission(tenant="other"), 1)).tenant == "other"
    core.handle(Accepted(tenant="t", request="r1", attempt=1), 2)
    assert sent(core.handle(submission(), 3)).request == "r1"


def test_silence_is_followed_by_a_second_attempt_then_503_and_a_cancel(core: TokenizerCore) -> None:
    first = sent(core.handle(submission(), 0))
    assert core.handle(Tick(), RESEND_US - 1) == []
    again = sent(core.handle(Tick(), RESEND_US))
    assert again == dataclasses.replace(first, timeout_us=60_000_000 - RESEND_US, waited_us=RESEND_US)
    assert core.handle(Tick(), RESEND_US + GIVE_UP_US - 1) == []
    assert sent(core.handle(Tick(), RESEND_US + GIVE_UP_US)).attempt == 1, "both may be lost with others"
    assert core.handle(Tick(), RESEND_US + 2 * GIVE_UP_US - 1) == []
    commands = core.handle(Tick(), WAIT_US)
    assert failure(commands)[2] == 503
    scheduler = rendezvous(first.routing_key, ("s1", "s2"))
    (_, _, code, why) = failure(commands)
    assert commands[1] == Send(
        scheduler, Cancel(tenant="t", request="r1", code=code, message=why), "trace"
    ), "should the scheduler have it after all, its client gets the same"
    assert core.pending == 0
    assert core.handle(Accepted(tenant="t", request="r1", attempt=1), WAIT_US + 1) == []


def test_request_sent_again_before_an_answer_waits_with_the_first(core: TokenizerCore) -> None:
    """From the same inbox: its client was not sure, or two tokenizers have it."""
    one, two = (dataclasses.replace(submission(), key=key) for key in (5, 6))
    assert sent(core.handle(one, 0)).attempt == 1
    assert core.handle(two, 1) == [RequestDone(6)]
    assert core.handle(Accepted(tenant="t", request="r1", attempt=1), 2) == [RequestDone(5)]
    assert core.pending == 0


def test_tokenizer_that_is_cut_off_gives_no_request_up(core: TokenizerCore) -> None:
    """The schedulers may have answered."""
    core.handle(submission(timeout_s=100), 0)
    for now_us in range(1_000_000, 60_000_000, 1_000_000):
        assert core.handle(Tick(cut_off=True), now_us) == []
    (again,) = core.handle(Tick(), 60_000_000)
    assert isinstance(again, Send)
    assert core.handle(Tick(), 60_000_000 + GIVE_UP_US - 1) == []
    assert failure(core.handle(Tick(), 59_000_000 + WAIT_US))[2] == 503


def test_time_limit_of_a_request_counts_once_its_answer_could_be_received(core: TokenizerCore) -> None:
    """A stopped tokenizer finds out by its timers before it reads that the request was answered long ago."""
    core.handle(submission(timeout_s=10), 70_000_000)
    assert core.handle(Tick(cut_off=True), 80_000_000) == []
    assert core.handle(Tick(), 80_000_000 + CATCH_UP_US - 1) == []
    assert failure(core.handle(Tick(), 80_000_000 + CATCH_UP_US))[2] == 408
    core.handle(submission(timeout_s=10), 90_000_000)
    core.handle(Tick(cut_off=True), 95_000_000)
    assert failure(core.handle(Tick(), 100_000_000))[2] == 408


def test_a_tenant_crowds_a_scheduler_that_answers(core: TokenizerCore) -> None:
    for i in range(MOST_ASKED):
        assert not core.is_over_share("t", 10)
        core.handle(submission(f"r{i}"), 10)
    assert core.is_over_share("t", 10)
    assert not core.is_over_share("other", 10)
    assert not core.is_over_share("t", 10 + RESEND_US), "one that is silent has nothing to do with it"


def test_a_tenant_crowds_a_scheduler_no_more_when_one_is_answered_or_given_up(core: TokenizerCore) -> None:
    for i in range(MOST_ASKED):
        core.handle(submission(f"r{i}"), 10)
    assert core.is_over_share("t", 20)
    core.handle(Accepted(tenant="t", request="r0", attempt=1), 20)
    assert not core.is_over_share("t", 20)
    core.handle(submission("again"), 20)
    assert core.is_over_share("t", 20)
    core.handle(Cancel(tenant="t", request="r1"), 20)
    assert not core.is_over_share("t", 20)
    core.handle(submission("more"), 20)
    core.handle(Schedulers(()), 20)
    assert not core.is_over_share("t", 20), "all wait"
    core.handle(Schedulers(("s1",)), 20)
    assert core.is_over_share("t", 20)


def test_a_look_whether_a_tenant_crowds_costs_the_same_beside_any_number_of_requests(
    core: TokenizerCore,
) -> None:
    for i in range(200):
        core.handle(dataclasses.replace(submission(f"r{i}"), tenant=f"t{i}"), 10)
    core._pending = None  # type: ignore[assignment]  # no code looks at them all
    assert not core.is_over_share("t0", 20)


def waited(received_us: int, handled_us: int, **fields: Any) -> Submission:
    return dataclasses.replace(submission(**fields), received_us=received_us, handled_us=handled_us)


def test_the_time_in_our_own_queue_is_of_the_limit(core: TokenizerCore) -> None:
    """Seen at 1 s, taken up 3 s later."""
    asked = sent(core.handle(waited(1_000_000, 4_000_000, timeout_s=5), 4_000_000))
    assert (asked.timeout_us, asked.waited_us) == (2_000_000, 3_000_000)
    assert core.handle(Tick(), 4_900_000) == []
    assert failure(core.handle(Tick(), 6_000_000))[2] == 408


def test_request_that_waited_longer_than_its_limit_is_408_unread(
    core: TokenizerCore, model: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = waited(1_000_000, 91_000_000, timeout_s=5)
    with monkeypatch.context() as patched:
        patched.setattr(type(model.vocabulary), "encode", None)  # no thread works for it any more
        assert failure(core.handle(late, 91_000_000))[2] == 408
    long = prepared(waited(1_000_000, 2_000_000, timeout_s=5), model)  # beside the loop, for 4 s
    assert failure(core.handle(long, 6_000_000))[2] == 408
    assert core.pending == 0


def test_silence_counts_from_the_question(core: TokenizerCore) -> None:
    core.handle(waited(1_000_000, 21_000_000), 21_000_000)
    assert sent(core.handle(Tick(), 21_000_000 + RESEND_US)).waited_us == 20_000_000 + RESEND_US
    assert isinstance(core.handle(Tick(), 21_000_000 + WAIT_US - 1)[0], Send)
    assert failure(core.handle(Tick(), 21_000_000 + WAIT_US))[2] == 503


def test_a_cancel_finds_its_request_in_our_own_queue(
    core: TokenizerCore, model: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert core.handle(Cancel(tenant="t", request="r1"), 2_000_000) == []
    queued = waited(1_000_000, 3_000_000)
    under_way = prepared(queued, model)  # it was being prepared when the cancel came
    assert failure(core.handle(under_way, 3_000_000))[2] == 499
    with monkeypatch.context() as patched:
        patched.setattr(type(model.vocabulary), "encode", None)
        assert failure(core.handle(queued, 3_000_000))[2] == 499
    assert sent(core.handle(waited(1_000_000, 3_000_000, tenant="other"), 3_000_000)).request == "r1"
    assert sent(core.handle(waited(2_500_000, 3_000_000), 3_000_000)).request == "r1", "it is a new one"


def test_only_so_many_cancels_are_kept(core: TokenizerCore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.tokenizer.prepare.MAX_CANCELS", 3)
    for i in (0, 1, 2, 0, 3):
        core.handle(Cancel(tenant="t", request=f"r{i}"), 1_000 + i)
    assert len(core.cancels) == 3
    assert [core.cancels.has_cancelled("t", f"r{i}", 1) for i in range(4)] == [True, False, True, True]


def test_a_time_limit_shorter_than_that_is_408(core: TokenizerCore) -> None:
    core.handle(submission(timeout_s=0.5), 0)
    assert failure(core.handle(Tick(), 500_000))[2] == 408


def test_a_vanished_scheduler_is_replaced_as_a_new_attempt(core: TokenizerCore) -> None:
    first = sent(core.handle(submission(), 0))
    chosen = rendezvous(first.routing_key, ("s1", "s2"))
    other = "s1" if chosen == "s2" else "s2"
    assert core.handle(Schedulers(()), 10) == []
    (command,) = core.handle(Schedulers((other,)), 20)
    assert isinstance(command, Send)
    assert command.scheduler == other
    assert sent([command]).attempt == 2
    core.handle(Accepted(tenant="t", request="r1", attempt=1), 30)  # of the vanished one, late
    assert core.pending == 1
    core.handle(Accepted(tenant="t", request="r1", attempt=2), 40)
    assert core.pending == 0


def test_requests_wait_for_the_next_scheduler_after_a_death(core: TokenizerCore) -> None:
    core.handle(submission(), 0)
    assert core.handle(Schedulers((), died=True), 10) == []
    assert core.handle(submission("r2"), 20) == []
    assert core.handle(Tick(), WAIT_US) == []  # far over GIVE_UP_US
    commands = core.handle(Schedulers(("s3",)), WAIT_US + 5)
    assert [c.scheduler for c in commands if isinstance(c, Send)] == ["s3", "s3"]
    attempts = {c.message.request: c.message.attempt for c in commands if isinstance(c.message, Tokenized)}
    assert attempts == {"r1": 2, "r2": 1}  # no scheduler had r2


def test_waiting_request_is_given_up_in_the_end(core: TokenizerCore) -> None:
    core.handle(Schedulers((), died=True), 10)
    core.handle(submission(), 20)
    (fail,) = core.handle(Tick(), 10 + WAIT_US)  # and no Cancel: no scheduler has it
    assert failure([fail])[2] == 503
    assert failure(core.handle(submission("r2"), 11 + WAIT_US))[2] == 503


def test_nor_longer_than_their_own_limit(core: TokenizerCore) -> None:
    core.handle(Schedulers((), died=True), 10)
    core.handle(submission(timeout_s=2), 20)
    assert core.handle(Tick(), 2_000_019) == []
    assert failure(core.handle(Tick(), 2_000_020))[2] == 408


def test_one_that_leaves_of_its_own_accord_is_not_waited_for(core: TokenizerCore) -> None:
    core.handle(Schedulers(()), 10)
    assert failure(core.handle(submission(), 20))[2] == 503


def test_new_scheduler_that_cannot_serve_yet_is_tried_again(core: TokenizerCore) -> None:
    """Its executors have not sent hello."""
    core.handle(Schedulers((), died=True), 0)
    core.handle(Schedulers(("s3",)), 0)
    assert sent(core.handle(submission(), 10)).attempt == 1
    refused = Rejected(tenant="t", request="r1", attempt=1, code=503, message="no executor is ready")
    assert core.handle(refused, 20) == []
    assert core.handle(Tick(), 20 + ASK_AGAIN_US - 1) == []
    assert sent(core.handle(Tick(), 20 + ASK_AGAIN_US)).attempt == 2
    late = dataclasses.replace(refused, attempt=2)
    (fail,) = core.handle(late, WAIT_US)
    assert failure([fail])[3] == "no executor is ready"


def test_a_new_one_beside_others_may_stand_for_a_dead_one_that_is_not_missed_yet(
    core: TokenizerCore, model: ServedModel
) -> None:
    """Its executors are still with that one."""
    core.handle(Schedulers(("s1", "s2", "s3")), 0)
    every = (submission(f"r{i}", prompt_cache_key=str(i)) for i in range(99))
    asked_s3 = next(s for s in every if rendezvous(key_of(s, model), ("s1", "s2", "s3")) == "s3")
    first = sent(core.handle(asked_s3, 10))
    name = first.request
    refused = Rejected(tenant="t", request=name, attempt=1, code=503, message="no executor is ready")
    (again,) = core.handle(refused, 20)
    assert isinstance(again, Send)
    assert again.scheduler == rendezvous(first.routing_key, ("s1", "s2"))  # not the one that has just refused


def unavailable(attempt: int) -> Rejected:
    return Rejected(tenant="t", request="r1", attempt=attempt, code=503, message="no executor is ready")


def asked(commands: list[Command]) -> tuple[str, int]:
    (command,) = commands
    assert isinstance(command, Send)
    return command.scheduler, sent(commands).attempt


def test_another_scheduler_is_tried_at_once_where_one_cannot_serve(core: TokenizerCore) -> None:
    first, _ = asked(core.handle(submission(), 0))
    other = "s1" if first == "s2" else "s2"
    assert asked(core.handle(unavailable(1), 5)) == (other, 2)
    core.handle(Accepted(tenant="t", request="r1", attempt=2), 9)
    assert core.pending == 0


def test_schedulers_are_tried_again_for_a_moment_when_all_have_refused(core: TokenizerCore) -> None:
    """A scheduler may miss its executor before this tokenizer does: the next heartbeat shows that one has
    died."""
    first, _ = asked(core.handle(submission(), 0))
    other, _ = asked(core.handle(unavailable(1), 5))
    assert core.handle(unavailable(2), 10) == []
    assert core.handle(Tick(), 10 + ASK_AGAIN_US - 1) == []
    assert asked(core.handle(Tick(), 10 + ASK_AGAIN_US)) == (first, 3)
    assert asked(core.handle(unavailable(3), 20 + ASK_AGAIN_US)) == (other, 4)
    (fail,) = core.handle(unavailable(4), GRACE_US)
    assert failure([fail])[2:] == (503, "no executor is ready")


def test_a_request_waits_while_an_executor_loads_its_model(core: TokenizerCore) -> None:
    core.handle(Schedulers(("s1",)), 0)
    core.handle(submission(), 0)
    for second in range(12):
        core.handle(Loads({}, loading=True), second * 1_000_000)
        assert core.handle(unavailable(second + 1), second * 1_000_000) == []
        assert asked(core.handle(Tick(), second * 1_000_000 + ASK_AGAIN_US)) == ("s1", second + 2)
    core.handle(Loads({}), 12_000_000)  # it is ready, and its scheduler has not noticed yet
    assert core.handle(unavailable(13), 12_000_000) == []
    assert asked(core.handle(Schedulers(("s1",)), 12_000_001)) == ("s1", 14)
    core.handle(Loads({}, loading=True), WAIT_US - 1)
    assert (core.failed, core.unavailable) == (0, 0)
    (fail,) = core.handle(unavailable(14), WAIT_US)
    assert failure([fail])[2:] == (503, "no executor is ready")
    assert (core.failed, core.unavailable) == (1, 1)


def test_a_request_waits_for_a_scheduler_while_an_executor_loads(model: ServedModel) -> None:
    core = TokenizerCore(model)
    core.handle(Loads({}, loading=True), 0)
    assert core.handle(submission(), 1) == []
    assert asked(core.handle(Schedulers(("s1",)), 2)) == ("s1", 1)


def test_request_waits_for_a_scheduler_and_its_executor_after_a_start(model: ServedModel) -> None:
    core = TokenizerCore(model)
    core.handle(Schedulers(()), 0)
    assert core.handle(submission(), GIVE_UP_US) == []
    assert core.handle(Tick(), WAIT_US - 2) == []
    assert asked(core.handle(Schedulers(("s1",)), WAIT_US - 2)) == ("s1", 1)
    assert core.handle(unavailable(1), WAIT_US - 1) == []
    (fail,) = core.handle(Tick(), WAIT_US)
    assert failure([fail])[2:] == (503, "no executor is ready")
    core.handle(Schedulers(()), WAIT_US)
    assert failure(core.handle(submission(), WAIT_US))[2] == 503


def test_request_stays_at_its_scheduler_while_that_one_lives(core: TokenizerCore) -> None:
    """An executor has gone from one scheduler to another; the first answers what it has received."""
    first, _ = asked(core.handle(submission(), 0))
    other = "s1" if first == "s2" else "s2"
    assert core.handle(Schedulers((other,), idle=(first,)), 5) == []
    assert asked(core.handle(submission("r2"), 6))[0] == other
    assert asked(core.handle(Schedulers((other,)), 7)) == (other, 2)


def test_silent_scheduler_that_got_the_request_twice_gets_a_cancel(core: TokenizerCore) -> None:
    core.handle(Schedulers(("s3",), died=True), 0)
    core.handle(submission(), 10)
    core.handle(unavailable(1), 20)
    assert asked(core.handle(Tick(), 20 + ASK_AGAIN_US)) == ("s3", 2)
    fail, cancelled = core.handle(Tick(), WAIT_US)
    assert failure([fail])[2] == 503
    assert isinstance(cancelled, Send)
    error = {"code": 503, "message": "no executor is ready"}
    assert (cancelled.scheduler, cancelled.message) == ("s3", Cancel(tenant="t", request="r1", **error))


def test_scheduler_that_has_refused_gets_no_cancel(core: TokenizerCore) -> None:
    """It holds nothing, and would refuse the client's next try."""
    core.handle(Schedulers(("s3",), died=True), 0)
    core.handle(submission(), 10)
    refused = Rejected(tenant="t", request="r1", attempt=1, code=503, message="no executor is ready")
    core.handle(refused, WAIT_US - 100)
    (fail,) = core.handle(Tick(), WAIT_US)
    assert failure([fail])[2:] == (503, "no executor is ready")


def test_other_refusals_are_final_also_then(core: TokenizerCore) -> None:
    core.handle(Schedulers((), died=True), 0)
    core.handle(Schedulers(("s3",)), 0)
    core.handle(submission(), 10)
    refused = Rejected(tenant="t", request="r1", attempt=1, code=400, message="too long")
    assert failure(core.handle(refused, 20))[2] == 400


def test_a_rejection_reaches_the_client(core: TokenizerCore) -> None:
    core.handle(submission(), 0)
    answer = Rejected(tenant="t", request="r1", attempt=1, code=429, message="full", retry_after_ms=250)
    (fail,) = core.handle(answer, 1)
    assert isinstance(fail, Fail)
    assert (fail.error.code, fail.error.message, fail.error.retry_after_ms) == (429, "full", 250)
    assert core.handle(answer, 2) == []


def test_a_cancel_of_a_pending_request_is_499(core: TokenizerCore) -> None:
    core.handle(submission(), 0)
    assert core.handle(Cancel(tenant="other", request="r1"), 1) == []
    assert failure(core.handle(Cancel(tenant="t", request="r1"), 1))[2] == 499
    assert core.handle(Cancel(tenant="t", request="r1"), 1) == []


class Intake(RuleBasedStateMachine):
    """Every request gets exactly one of: a scheduler's acceptance, or an error on its inbox."""

    model: ServedModel

    @initialize()
    def begin(self) -> None:
        self.core = TokenizerCore(self.model)
        self.now_us = 0
        self.waiting: dict[str, int] = {}  # request -> attempt last sent
        self.count = 0

    def apply(self, commands: list[Command]) -> None:
        for command in commands:
            if isinstance(command, Fail):
                if command.error.code != 409:
                    self.waiting.pop(command.request)
            elif isinstance(command.message, Tokenized):
                assert command.scheduler in self.live
                assert command.message.request in self.waiting
                self.waiting[command.message.request] = command.message.attempt

    live: tuple[str, ...] = ()

    @rule(live=st.sets(st.sampled_from(["s1", "s2", "s3"])), died=st.booleans())
    def schedulers(self, live: set[str], died: bool) -> None:
        self.live = tuple(sorted(live))
        self.apply(self.core.handle(Schedulers(self.live, died), self.now_us))

    @rule()
    def request(self) -> None:
        self.count += 1
        self.waiting[f"r{self.count}"] = 0
        self.apply(self.core.handle(submission(f"r{self.count}"), self.now_us))

    @rule(by=st.sampled_from([1000, ASK_AGAIN_US, RESEND_US, GIVE_UP_US, WAIT_US]))
    def pass_time(self, by: int) -> None:
        self.now_us += by
        self.apply(
            [
                c
                for c in self.core.handle(Tick(), self.now_us)
                if isinstance(c, Fail) or c.scheduler in self.live
            ]
        )

    @rule(
        pick=st.integers(0, 99),
        attempt=st.integers(0, 1),
        accept=st.booleans(),
        code=st.sampled_from([429, 503]),
    )
    def answer(self, pick: int, attempt: int, accept: bool, code: int) -> None:
        asked = sorted(name for name, tried in self.waiting.items() if tried)
        if not asked:
            return
        name = asked[pick % len(asked)]
        tried = self.waiting[name] - attempt
        if accept:
            self.core.handle(Accepted(tenant="t", request=name, attempt=tried), self.now_us)
            if attempt == 0:
                del self.waiting[name]
        else:
            rejected = Rejected(tenant="t", request=name, attempt=tried, code=code, message="full")
            self.apply(self.core.handle(rejected, self.now_us))

    @rule(pick=st.integers(0, 99))
    def cancel(self, pick: int) -> None:
        if self.waiting:
            name = sorted(self.waiting)[pick % len(self.waiting)]
            self.apply(self.core.handle(Cancel(tenant="t", request=name), self.now_us))

    @invariant()
    def none_is_forgotten(self) -> None:
        if hasattr(self, "core"):
            assert self.core.pending == len(self.waiting)


def test_no_request_is_forgotten(model: ServedModel) -> None:
    from hypothesis.stateful import run_state_machine_as_test

    machine = type("IntakeOfTiny", (Intake,), {"model": model})
    run_state_machine_as_test(machine, settings=settings(max_examples=60, deadline=None))
