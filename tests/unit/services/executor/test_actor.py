"""The executor's shell on the memory bus: incarnations, which scheduler it obeys, what it drops."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from support.actor_fleet import Fleet, Hand, watched_fleet

from services.executor import actor as executor_actor
from services.executor.actor import STUCK_US, ExecutorActor
from services.executor.build import THREADS_A_CORE, engine_builder
from services.executor.engine import Alarm, Backend, BackendInfo, EngineGone, Pending
from services.executor.sim.engine import SimBackend, SimOptions
from shared.actor.membership import TOKENS
from shared.actor.runtime import HeartbeatPayload, Runtime
from shared.config import Settings
from shared.errors import EngineError, SetupError
from shared.messages import (
    ExecHello,
    ExecRefused,
    ExecReset,
    ExecSleep,
    ExecWake,
    ExecWelcome,
    GrammarFailed,
    GrammarReady,
    KvCopied,
    KvCopy,
    Message,
    SlotClose,
    SlotOpen,
    StepPlan,
    StepResult,
    floats,
    ints,
    longs,
)


class HandScheduler(Hand):
    """A scheduler by hand: it sends the executor the messages of a test."""

    def __init__(self, model: str = "m", requests: int = 0) -> None:
        super().__init__("scheduler")
        self._facts = HeartbeatPayload(model=model, load=(("requests", requests),))

    def heartbeat_payload(self) -> HeartbeatPayload:
        return self._facts

    def deliver(self, *messages: Message) -> None:
        for message in messages:
            self.mailbox.send("executor.e", message)


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    async with watched_fleet() as fleet:
        yield fleet


async def executor(
    fleet: Fleet, build: Callable[[], Backend] = lambda: SimBackend(SimOptions(model="m", timing="step=0"))
) -> tuple[ExecutorActor, Runtime]:
    actor = ExecutorActor(build, "host-7")
    return actor, await fleet.started(actor, "e")


async def welcomed(fleet: Fleet) -> tuple[ExecutorActor, HandScheduler, ExecHello]:
    hand = HandScheduler()
    await fleet.started(hand, "s")
    actor, _ = await executor(fleet)
    hello = await hand.until(ExecHello)
    hand.deliver(ExecWelcome(exec_epoch=hello.exec_epoch))
    return actor, hand, hello


def opened(slot: int = 0) -> SlotOpen:
    return SlotOpen(
        slot=slot, generation=1, seq=1, prompt_tokens=2, max_length=9, tokens=ints([300, 301])
    )  # fmt: skip


def plan(epoch: int, step: int, slot: int = 0, start: int = 0, count: int = 2) -> StepPlan:
    return StepPlan(
        exec_epoch=epoch, step=step, mode="single", micro_batch=0, slots=ints([slot]), starts=ints([start]),
        counts=ints([count]), from_device=ints([int(count == 1)]), sample_rows=ints([0]),
        sample_slots=ints([slot]),
    )  # fmt: skip


@pytest.mark.parametrize("set_s", [2, -2, 600, -600, 172_800, -172_800])
async def test_an_incarnation_is_never_older_than_its_process(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, set_s: int
) -> None:
    """From an older one the scheduler would conclude that another process is back, so that the first died."""

    def build() -> Backend:
        before_us = fleet.clock.wall_us()  # the clock is set while the model is loaded
        monkeypatch.setattr(type(fleet.clock), "wall_us", lambda _: before_us + set_s * 1_000_000)
        return SimBackend(SimOptions(model="m", timing="step=0"))

    hand = HandScheduler()
    await fleet.started(hand, "s")
    _, runtime = await executor(fleet, build)
    assert (await hand.until(ExecHello)).exec_epoch >= runtime.mailbox.epoch


async def test_executor_repeats_its_hello_until_it_is_welcomed(fleet: Fleet) -> None:
    hand = HandScheduler()
    await fleet.started(hand, "s")
    actor, runtime = await executor(fleet)
    first = await hand.until(ExecHello)
    assert (first.executor, first.host_id, first.backend, first.slots) == ("e", "host-7", "sim", 256)
    runtime.upkeep()
    again = await hand.until(ExecHello, 2)
    assert again == first
    hand.deliver(ExecWelcome(exec_epoch=first.exec_epoch - 1))  # of another incarnation
    await fleet.broker.settle()
    runtime.upkeep()
    await hand.until(ExecHello, 3)
    hand.deliver(ExecWelcome(exec_epoch=first.exec_epoch))
    await fleet.broker.settle()
    runtime.upkeep()
    await fleet.broker.settle()
    assert len(hand.of(ExecHello)) == 3
    assert actor.status()["scheduler"] == "scheduler.s"


async def test_executors_process_settles_before_its_hello(fleet: Fleet) -> None:
    """Work comes as soon as the hello is answered, and would wait for the garbage collection."""
    hand, chosen = HandScheduler(), list[object]()
    await fleet.started(hand, "s")
    actor = ExecutorActor(lambda: SimBackend(SimOptions(model="m", timing="step=0")), "host-7")
    runtime = fleet.runtime(actor, "e")
    runtime.settle = lambda: chosen.append(actor.status()["scheduler"])
    await runtime.start()
    await hand.until(ExecHello)
    assert [*chosen, actor.status()["scheduler"]] == ["", "scheduler.s"]


async def test_executor_that_is_kept_out_logs_the_reason_and_repeats_its_hello(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    hand = HandScheduler()
    await fleet.started(hand, "s")
    actor, runtime = await executor(fleet)
    hello = await hand.until(ExecHello)
    assert len(hello.model_digest) == 32
    refused = ExecRefused(exec_epoch=hello.exec_epoch, why="other weights serve")
    for count in (2, 3):
        hand.deliver(refused, plan(hello.exec_epoch, 1))
        await fleet.broker.settle()
        assert actor.status()["kept_out"] == "other weights serve"
        runtime.upkeep()
        await hand.until(ExecHello, count)
    assert caplog.text.count("kept out by scheduler.s: other weights serve") == 1
    assert not hand.of(StepResult)
    hand.deliver(ExecWelcome(exec_epoch=hello.exec_epoch))
    await fleet.broker.settle()
    assert "kept_out" not in actor.status()


class TextActor(Hand):
    """A tokenizer or detokenizer with a digest of its tokens; 0: an earlier version, which sends none."""

    def __init__(self, kind: str, number: int) -> None:
        super().__init__(kind)
        self.number = number

    def heartbeat_payload(self) -> HeartbeatPayload:
        return HeartbeatPayload(model="m", load=((TOKENS, self.number),) if self.number else ())


def with_tokens_digest(digest: str = f"{7:012x}") -> SimBackend:
    class WithTokensDigest(SimBackend):
        @property
        def info(self) -> BackendInfo:
            return dataclasses.replace(super().info, tokens_digest=digest)

    return WithTokensDigest(SimOptions(model="m", timing="step=0"))


@pytest.mark.parametrize("kind", ["tokenizer", "detokenizer"])
async def test_executor_does_not_join_while_its_token_ids_differ_from_the_fleets(
    fleet: Fleet, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    hand, text_actor = HandScheduler(), TextActor(kind, 8)
    await fleet.started(hand, "s")
    text_runtime = await fleet.started(text_actor, "p")
    actor, runtime = await executor(fleet, with_tokens_digest)
    for _ in range(3):
        runtime.upkeep()
        await fleet.broker.settle()
    assert hand.of(ExecHello) == []
    why = f"its tokens are not those of {kind}.p: the files of 'm' are not those with which that one was"
    assert str(actor.status()["kept_out"]).startswith(why)
    assert caplog.text.count("it does not join: its tokens are not those") == 1
    text_actor.number = 7
    text_runtime.send_heartbeat()
    await fleet.broker.settle()
    runtime.upkeep()
    hello = await hand.until(ExecHello)
    hand.deliver(ExecWelcome(exec_epoch=hello.exec_epoch))
    await fleet.broker.settle()
    assert "kept_out" not in actor.status()


async def test_serving_executor_ends_when_the_fleet_has_other_token_ids(fleet: Fleet) -> None:
    hand, text_actor = HandScheduler(), TextActor("detokenizer", 7)
    await fleet.started(hand, "s")
    text_runtime = await fleet.started(text_actor, "p")
    actor, _ = await executor(fleet, with_tokens_digest)
    hand.deliver(ExecWelcome(exec_epoch=(await hand.until(ExecHello)).exec_epoch))
    await fleet.broker.settle()
    actor.upkeep()
    text_actor.number = 8
    text_runtime.send_heartbeat()
    await fleet.broker.settle()
    with pytest.raises(SetupError, match=r"its tokens are not those of detokenizer\.p"):
        actor.upkeep()


@pytest.mark.parametrize(("digest", "number"), [("", 8), (f"{7:012x}", 0), (f"{7:012x}", 7)])
async def test_executor_joins_a_fleet_with_the_same_or_no_vocabulary_digest(
    fleet: Fleet, digest: str, number: int
) -> None:
    hand = HandScheduler()
    await fleet.started(hand, "s")
    await fleet.started(TextActor("tokenizer", number), "p")
    await executor(fleet, lambda: with_tokens_digest(digest))
    await hand.until(ExecHello)


async def test_executor_waits_for_a_scheduler(fleet: Fleet) -> None:
    actor, runtime = await executor(fleet)
    runtime.upkeep()
    assert actor.status()["scheduler"] == ""
    hand = HandScheduler()
    await fleet.started(hand, "s")
    assert (await hand.until(ExecHello)).executor == "e"


@pytest.mark.parametrize("another", [False, True])
async def test_a_draining_scheduler_gets_its_executor_back_if_it_is_the_only_one(
    fleet: Fleet, another: bool
) -> None:
    """Its last requests cannot end without an executor."""
    draining, ready = HandScheduler(), HandScheduler()
    if another:
        await fleet.started(ready, "r")
    leaving = await fleet.started(draining, "d")
    leaving.state = "draining"
    leaving.send_heartbeat()
    actor, runtime = await executor(fleet)
    runtime.upkeep()
    await (ready if another else draining).until(ExecHello)
    await fleet.broker.settle()
    assert actor.status()["scheduler"] == ("scheduler.r" if another else "scheduler.d")
    assert len(draining.of(ExecHello)) == (0 if another else 1)


async def test_executor_joins_only_a_scheduler_of_its_own_model(fleet: Fleet) -> None:
    """Neither at the start, nor later, nor when its own has gone, nor when the other one drains."""
    before, after, own = HandScheduler("other"), HandScheduler("other"), HandScheduler()
    leaving = await fleet.started(before, "a")
    actor, runtime = await executor(fleet)
    await fleet.started(after, "b")
    runtime.upkeep()
    assert actor.status()["scheduler"] == ""
    ours = await fleet.started(own, "s")
    await own.until(ExecHello)
    await ours.finish(0)
    leaving.state = "draining"
    leaving.send_heartbeat()
    await fleet.broker.settle()
    runtime.upkeep()
    assert actor.status()["scheduler"] == ""
    assert before.of(ExecHello) + after.of(ExecHello) == []


class Colleague(Hand):
    """Another executor of the model."""

    def __init__(self, scheduler: str) -> None:
        super().__init__("executor")
        self._facts = HeartbeatPayload(model="m", scheduler=scheduler)

    def heartbeat_payload(self) -> HeartbeatPayload:
        return self._facts


@pytest.mark.parametrize(
    ("requests", "wanted"),
    [((0, 0, 0), "b"), ((0, 2, 0), "b"), ((3, 2, 0), "a"), ((0, 0, 4), "c")],
    ids=[
        "the one that others have chosen",
        "also if that one has requests",
        "one whose requests no executor computes",
        "the last of three, with such requests",
    ],
)
async def test_executor_joins_the_scheduler_of_others_unless_another_has_requests_and_no_executor(
    fleet: Fleet, requests: tuple[int, ...], wanted: str
) -> None:
    for name, count in zip("abc", requests, strict=True):
        await fleet.started(HandScheduler(requests=count), name)
    await fleet.started(Colleague("b"), "e0")
    actor, _ = await executor(fleet)
    assert actor.status()["scheduler"] == f"scheduler.{wanted}"


async def test_executors_heartbeats_name_the_scheduler_that_welcomed_it(fleet: Fleet) -> None:
    hand = HandScheduler()
    ours = await fleet.started(hand, "s")
    actor, _ = await executor(fleet)
    hello = await hand.until(ExecHello)
    assert actor.heartbeat_payload().scheduler == ""
    hand.deliver(ExecWelcome(exec_epoch=hello.exec_epoch))
    await fleet.broker.settle()
    assert actor.heartbeat_payload().scheduler == "s"
    await ours.finish(0)
    fleet.runtimes[1].upkeep()
    assert actor.heartbeat_payload().scheduler == ""


async def test_plans_run_in_order_once_and_only_of_this_incarnation(fleet: Fleet) -> None:
    actor, hand, hello = await welcomed(fleet)
    epoch = hello.exec_epoch
    second = plan(epoch, 2, start=2, count=1)
    hand.deliver(opened(), plan(epoch - 1, 1), plan(epoch, 1), plan(epoch, 1), second)
    await hand.until(StepResult, 2)
    hand.deliver(SlotClose(slot=0, generation=1, last_step=2), opened(5), plan(epoch, 3, slot=5))
    await hand.until(StepResult, 3)
    results = hand.of(StepResult)
    assert [(r.exec_epoch, r.step, r.error) for r in results] == [(epoch, i, "") for i in (1, 2, 3)]
    assert results[0].ids == results[2].ids != results[1].ids
    assert (actor.status()["steps"], actor.status()["open_slots"]) == (3, 1)
    assert actor.heartbeat_payload().load == (
        ("steps", 3),
        ("slots", 1),
        ("context", 131_072),
        ("grammars", 0),
        ("block_tokens", 16),
        ("memory_mib", 4096),
        ("sleeps", 1),
    )


async def test_a_plan_that_skips_a_step_makes_a_new_incarnation(fleet: Fleet) -> None:
    """The scheduler would wait for the steps between for ever."""
    _, hand, hello = await welcomed(fleet)
    hand.deliver(opened(), plan(hello.exec_epoch, 1), plan(hello.exec_epoch, 3, start=2, count=1))
    assert (await hand.until(ExecHello, 2)).exec_epoch > hello.exec_epoch


async def test_a_welcome_of_an_earlier_incarnation_changes_nothing(fleet: Fleet) -> None:
    _, hand, hello = await welcomed(fleet)
    hand.deliver(ExecWelcome(exec_epoch=hello.exec_epoch - 1), opened(), plan(hello.exec_epoch, 1))
    assert (await hand.until(StepResult)).error == ""


async def test_a_reset_is_a_new_incarnation_with_empty_slots(fleet: Fleet) -> None:
    actor, hand, hello = await welcomed(fleet)
    hand.deliver(opened(), ExecReset(exec_epoch=hello.exec_epoch - 1, why="of another incarnation"))
    await fleet.broker.settle()
    assert (actor.status()["open_slots"], len(hand.of(ExecHello))) == (1, 1)
    hand.deliver(ExecReset(exec_epoch=hello.exec_epoch, why="test"))
    fresh = await hand.until(ExecHello, 2)
    assert fresh.exec_epoch > hello.exec_epoch
    assert actor.status()["open_slots"] == 0
    hand.deliver(opened(), plan(fresh.exec_epoch, 1))  # not welcomed yet: dropped
    hand.deliver(ExecWelcome(exec_epoch=fresh.exec_epoch), opened(3), plan(fresh.exec_epoch, 1, slot=3))
    result = await hand.until(StepResult)
    assert (result.exec_epoch, result.error) == (fresh.exec_epoch, "")
    assert len(hand.of(StepResult)) == 1


@pytest.mark.parametrize("there", [True, False])
async def test_a_reset_may_name_another_scheduler(fleet: Fleet, there: bool) -> None:
    """One that has gone meanwhile is not waited for."""
    actor, hand, hello = await welcomed(fleet)
    other = HandScheduler()
    if there:
        await fleet.started(other, "s2")
    hand.deliver(opened(), ExecReset(exec_epoch=hello.exec_epoch, why="test", scheduler="s2"))
    again = await (other.until(ExecHello) if there else hand.until(ExecHello, 2))
    assert again.exec_epoch > hello.exec_epoch
    assert actor.status()["scheduler"] == ("scheduler.s2" if there else "scheduler.s")
    assert actor.status()["open_slots"] == 0
    assert len(hand.of(ExecHello)) == (1 if there else 2)


async def test_a_late_result_of_a_past_incarnation_is_not_sent(fleet: Fleet) -> None:
    actor, hand, hello = await welcomed(fleet)
    late = StepResult(exec_epoch=hello.exec_epoch - 1, step=1, ids=ints(), done=ints())
    actor._on_result(late)
    await fleet.broker.settle()
    assert hand.of(StepResult) == []
    assert actor.status()["steps"] == 0


async def test_another_scheduler_is_not_obeyed(fleet: Fleet) -> None:
    actor, _, hello = await welcomed(fleet)
    foreign = HandScheduler()
    await fleet.started(foreign, "s2")
    foreign.deliver(
        ExecWelcome(exec_epoch=hello.exec_epoch), opened(), ExecReset(exec_epoch=hello.exec_epoch, why="")
    )
    await fleet.broker.settle()
    assert (actor.status()["open_slots"], actor.status()["scheduler"]) == (0, "scheduler.s")
    assert foreign.of(ExecHello) == []


async def test_executor_turns_to_another_scheduler_when_its_own_goes(fleet: Fleet) -> None:
    actor, hand, hello = await welcomed(fleet)
    other = HandScheduler()
    await fleet.started(other, "s2")
    gone = hand.mailbox.peers.get("scheduler.s2")
    assert gone is not None
    runtime = fleet.runtimes[1]
    actor.on_peer_gone(gone)  # not its own: nothing happens
    assert actor.status()["scheduler"] == "scheduler.s"
    await fleet.runtimes[0].finish(0)
    runtime.upkeep()
    assert (await other.until(ExecHello)).exec_epoch > hello.exec_epoch
    assert actor.status()["scheduler"] == "scheduler.s2"


@pytest.mark.parametrize("how", ["restart", "lost"])
async def test_a_restarted_scheduler_or_a_lost_stream_empties_the_slots(fleet: Fleet, how: str) -> None:
    actor, hand, hello = await welcomed(fleet)
    hand.deliver(opened())
    await fleet.broker.settle()
    handler = actor.on_restart if how == "restart" else actor.on_stream_lost
    handler("scheduler.another")
    assert actor.status()["open_slots"] == 1
    handler("scheduler.s")
    assert (await hand.until(ExecHello, 2)).exec_epoch > hello.exec_epoch
    assert actor.status()["open_slots"] == 0


async def test_a_copy_without_an_arena_is_refused(fleet: Fleet) -> None:
    _, hand, _ = await welcomed(fleet)
    hand.deliver(
        KvCopy(
            job=4, to_arena=True, after_step=0, arena_generation=1, blocks=ints([1]), offsets=longs([0]),
            block_bytes=65_536,
        )
    )  # fmt: skip
    assert await hand.until(KvCopied) == KvCopied(job=4, status="no_arena")


async def test_a_failed_step_is_reported_and_counted(fleet: Fleet) -> None:
    actor, hand, hello = await welcomed(fleet)
    hand.deliver(plan(hello.exec_epoch, 1, slot=9))  # never opened
    result = await hand.until(StepResult)
    assert result.error == "EngineError: the plan names slot 9, which is not open"
    assert list(result.ids) == [-1]
    assert actor.status()["failed_steps"] == 1


async def test_impossible_computation_is_the_error_of_its_own_rows(fleet: Fleet) -> None:
    actor, hand, hello = await welcomed(fleet)
    good, bad = opened(0), dataclasses.replace(opened(1), tokens=ints([300, 32_000]))
    for message in (good, bad):
        hand.deliver(message)
    both = dataclasses.replace(
        plan(hello.exec_epoch, 1), slots=ints([0, 1]), starts=ints([0, 0]), counts=ints([2, 2]),
        from_device=ints([0, 0]), sample_rows=ints([0, 1]), sample_slots=ints([0, 1]),
    )  # fmt: skip
    hand.deliver(both)
    result = await hand.until(StepResult)
    why = "refused: prompt: the weights have 32000 tokens, and no token 32000"
    assert (result.error, result.row_errors) == ("", ((1, why),))
    assert result.ids[0] >= 0
    assert (result.ids[1], list(result.done)) == (-1, [0, 2])
    assert actor.status()["failed_steps"] == 0


async def test_an_engine_that_fails_three_steps_in_a_row_fails_the_executor(fleet: Fleet) -> None:
    actor, hand, hello = await welcomed(fleet)
    hand.deliver(*(plan(hello.exec_epoch, step, slot=9) for step in (1, 2)))
    await hand.until(StepResult, 2)
    actor.upkeep()
    hand.deliver(opened(), plan(hello.exec_epoch, 3))  # a good one in between
    hand.deliver(*(plan(hello.exec_epoch, step, slot=9) for step in (4, 5)))
    await hand.until(StepResult, 5)
    actor.upkeep()
    hand.deliver(plan(hello.exec_epoch, 6, slot=9))
    await hand.until(StepResult, 6)
    with pytest.raises(EngineError, match="3 steps in a row"):
        actor.upkeep()


class Stuck(SimBackend):
    """Its first forward pass returns when the test allows it."""

    def __init__(self) -> None:
        super().__init__(SimOptions(model="m", timing="step=0"))
        self.entered, self.released = threading.Event(), threading.Event()

    def forward(self, plan: StepPlan) -> Pending:
        self.entered.set()
        self.released.wait()
        return super().forward(plan)


@pytest.mark.parametrize("handler", ["_on_result", "_on_grammar"])
async def test_an_exception_in_a_report_of_the_device_fails_the_executor(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, handler: str
) -> None:
    """Its scheduler would wait for that step, or that grammar, for ever."""

    def broken(self: ExecutorActor, message: Message) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(ExecutorActor, handler, broken)
    actor, hand, hello = await welcomed(fleet)
    hand.deliver(opened(), plan(hello.exec_epoch, 1))
    actor._grammar_news.report(GrammarReady(slot=0, generation=1, compile_us=1))
    async with asyncio.timeout(60):
        assert str(await fleet.runtimes[-1].failed()) == "broken"


async def test_a_device_call_that_never_returns_fails_the_executor(fleet: Fleet) -> None:
    hand, engine = HandScheduler(), Stuck()
    await fleet.started(hand, "s")
    actor, _ = await executor(fleet, lambda: engine)
    hello = await hand.until(ExecHello)
    hand.deliver(ExecWelcome(exec_epoch=hello.exec_epoch), opened(), plan(hello.exec_epoch, 1))
    await fleet.broker.settle()
    await asyncio.to_thread(engine.entered.wait)
    fleet.clock.advance(STUCK_US)
    actor.upkeep()
    fleet.clock.advance(1)
    with pytest.raises(EngineError, match="has not ended for 120 s: the device is stuck"):
        actor.upkeep()
    engine.released.set()
    await hand.until(StepResult)
    actor.upkeep()


async def test_an_engine_that_is_gone_fails_the_executor_without_an_answer(fleet: Fleet) -> None:
    hand, engine, alarm = HandScheduler(), Stuck(), Alarm()
    await fleet.started(hand, "s")
    actor = ExecutorActor(lambda: engine, "h", alarm)
    await fleet.runtime(actor, "e").start()
    hello = await hand.until(ExecHello)
    hand.deliver(ExecWelcome(exec_epoch=hello.exec_epoch), opened(), plan(hello.exec_epoch, 1))
    await fleet.broker.settle()
    await asyncio.to_thread(engine.entered.wait)
    actor.upkeep()
    alarm.ring("rank 1 is gone")
    alarm.ring("rank 2 is gone")
    with pytest.raises(EngineError, match="rank 1 is gone"):
        actor.upkeep()
    await actor.stop()  # waits for no step
    engine.released.set()


async def test_engine_with_a_changed_file_fails_the_executor_without_an_answer(fleet: Fleet) -> None:
    class Changed(SimBackend):
        def forward(self, plan: StepPlan) -> Pending:
            raise EngineGone("the model's file m.gguf was cut off")

    hand = HandScheduler()
    await fleet.started(hand, "s")
    actor = ExecutorActor(lambda: Changed(SimOptions(model="m")), "h")
    await fleet.runtime(actor, "e").start()
    hello = await hand.until(ExecHello)
    hand.deliver(ExecWelcome(exec_epoch=hello.exec_epoch), opened(), plan(hello.exec_epoch, 1))
    await fleet.broker.settle()
    await asyncio.to_thread(actor._device._thread.join, 60)
    with pytest.raises(EngineGone, match="was cut off"):
        actor.upkeep()
    await fleet.broker.settle()
    assert hand.of(StepResult) == []
    await actor.stop()  # waits for no step


async def test_a_result_with_the_alternatives_of_very_many_rows_is_sent(fleet: Fleet) -> None:
    actor, hand, hello = await welcomed(fleet)
    rows = 2_000
    result = StepResult(
        exec_epoch=hello.exec_epoch,
        step=1,
        ids=ints([3]) * rows,
        done=ints([0]) * rows,
        logprobs=floats([-0.5]) * rows,
        top_counts=ints([20]) * rows,
        top_ids=ints([3] * 20 * rows),
        top_logprobs=floats([-0.5] * 20 * rows),
    )
    actor._on_result(result)
    assert await hand.until(StepResult) == result


async def test_an_engine_that_cannot_be_built_fails_the_start(fleet: Fleet) -> None:
    def broken() -> Backend:
        raise MemoryError("no room for the weights")

    actor = ExecutorActor(broken, "h")
    with pytest.raises(MemoryError, match="no room for the weights"):
        await fleet.runtime(actor, "e").start()
    assert actor.status() == {"loading": True}
    facts = actor.heartbeat_payload()
    assert (facts.model, facts.load) == ("", (("steps", 0), ("slots", 0)))


@pytest.mark.parametrize("flaw", [None, EngineError("no memory")])
async def test_an_engine_that_is_built_after_a_signal_is_dropped(
    fleet: Fleet, flaw: EngineError | None, caplog: pytest.LogCaptureFixture
) -> None:
    loop, begun, signalled = asyncio.get_running_loop(), asyncio.Event(), threading.Event()

    def build() -> Backend:
        loop.call_soon_threadsafe(begun.set)
        signalled.wait()
        if flaw is not None:
            raise flaw
        return SimBackend(SimOptions(model="m", timing="step=0"))

    actor = ExecutorActor(build, "h")
    start = asyncio.create_task(fleet.runtime(actor, "e").start())
    await begun.wait()
    start.cancel()
    await asyncio.wait([start])
    signalled.set()
    await asyncio.to_thread(actor._device.join, 30)
    await asyncio.sleep(0)
    assert not caplog.records


async def test_build_makes_the_simulated_engine_from_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    made: dict[str, Any] = {}
    monkeypatch.setattr(
        executor_actor,
        "engine_builder",
        lambda *given: made.update(zip(("settings", "alarm", "news"), given, strict=True)),
    )
    settings = Settings(host_id="h9")
    actor = executor_actor.build(settings)
    assert actor._host_id == "h9"
    assert made["settings"] is settings
    assert (made["alarm"], made["news"]) == (actor._alarm, actor._grammar_news)


def test_an_executor_of_another_kind_than_the_setting_does_not_start() -> None:
    usual = Settings(backend="sim")
    digest = engine_builder(usual)().info.model_digest
    for fits in ({"model_digest": digest}, {"model_digest": "other", "accept_mixed": True}):
        assert engine_builder(usual.model_copy(update=fits))().info.model_digest == digest
    with pytest.raises(SetupError, match=f"has the model digest {digest}"):
        engine_builder(usual.model_copy(update={"model_digest": "other"}))()


def test_more_threads_than_can_help_are_refused_before_a_model_loads() -> None:
    most = THREADS_A_CORE * (os.cpu_count() or 1)
    for threads, why in ((most + 1, f"has cores for {most} at most"), (most, "there is no model at")):
        settings = Settings(backend="torch", device="cpu", model="./missing.gguf", threads=threads)
        with pytest.raises(SetupError, match=why):
            engine_builder(settings)()


async def test_grammar_reports_of_the_engine_go_to_the_scheduler_while_their_slot_is_open(
    fleet: Fleet,
) -> None:
    actor, hand, hello = await welcomed(fleet)
    hand.deliver(opened(3), plan(hello.exec_epoch, 1, slot=3))
    await hand.until(StepResult)
    ready = GrammarReady(slot=3, generation=1, compile_us=5)
    failed = GrammarFailed(slot=3, generation=1, message="unbalanced")
    news = (ready, failed)
    threading.Thread(target=lambda: [actor._grammar_news.report(each) for each in news]).start()
    assert await hand.until(GrammarFailed) == failed
    assert hand.of(GrammarReady) == [ready]
    hand.deliver(SlotClose(slot=3, generation=1, last_step=1), opened(4), plan(hello.exec_epoch, 2, slot=4))
    await hand.until(StepResult, 2)
    actor._grammar_news.report(ready)
    await fleet.broker.settle()
    assert hand.of(GrammarReady) == [ready]


async def test_next_result_has_the_time_that_publishing_the_last_one_took(fleet: Fleet) -> None:
    late_us = 350
    actor, hand, hello = await welcomed(fleet)
    hand.deliver(opened(), plan(hello.exec_epoch, 1))
    first = await hand.until(StepResult)
    assert first.published_us == 0
    actor._on_result(dataclasses.replace(first, end_wall_us=fleet.clock.wall_us() - late_us))
    hand.deliver(plan(hello.exec_epoch, 2, start=2, count=1))
    await hand.until(StepResult, 3)
    assert [r.published_us for r in hand.of(StepResult)] == [0, 0, late_us]  # the first came twice


class Napping(SimBackend):
    """Reports when it sleeps; wakes when a test lets it."""

    def __init__(self) -> None:
        super().__init__(SimOptions(model="m", timing="step=0"))
        self.naps: list[str] = []
        self.may_wake = threading.Event()
        self.fails = False

    def sleep(self) -> None:
        self.naps.append("sleep")

    def wake(self) -> None:
        self.may_wake.wait(20)
        self.naps.append("wake")
        if self.fails:
            raise MemoryError("14.2 GiB are needed")


async def napping(fleet: Fleet) -> tuple[ExecutorActor, Runtime, HandScheduler, Napping, ExecHello]:
    """An executor that got the command to sleep and has done so."""
    hand, engine = HandScheduler(), Napping()
    await fleet.started(hand, "s")
    actor, runtime = await executor(fleet, lambda: engine)
    first = await hand.until(ExecHello)
    assert not first.asleep
    hand.deliver(ExecWelcome(exec_epoch=first.exec_epoch), ExecSleep(exec_epoch=first.exec_epoch))
    hello = await hand.until(ExecHello, 2)
    assert (hello.asleep, hello.exec_epoch > first.exec_epoch, engine.naps) == (True, True, ["sleep"])
    assert dict(actor.heartbeat_payload().load)["asleep"] == 1
    hand.deliver(ExecWelcome(exec_epoch=hello.exec_epoch))
    return actor, runtime, hand, engine, hello


async def test_executor_sleeps_and_wakes_as_a_new_incarnation(fleet: Fleet) -> None:
    actor, runtime, hand, engine, asleep = await napping(fleet)
    hand.deliver(opened(), plan(asleep.exec_epoch, 1), ExecWake(exec_epoch=asleep.exec_epoch - 1))
    await fleet.broker.settle()
    assert (actor.status()["open_slots"], engine.naps) == (0, ["sleep"]), "a sleeper computes nothing"
    hand.deliver(ExecWake(exec_epoch=asleep.exec_epoch))
    await fleet.broker.settle()
    runtime.upkeep()
    await fleet.broker.settle()
    assert len(hand.of(ExecHello)) == 2, "its hello comes when it is awake"
    engine.may_wake.set()
    hello = await hand.until(ExecHello, 3)
    assert (hello.asleep, hello.exec_epoch > asleep.exec_epoch) == (False, True)
    hand.deliver(ExecWelcome(exec_epoch=hello.exec_epoch), opened(), plan(hello.exec_epoch, 1))
    assert (await hand.until(StepResult)).error == ""
    assert "asleep" not in dict(actor.heartbeat_payload().load)


async def test_sleeping_executor_stays_asleep_after_a_reset(fleet: Fleet) -> None:
    _, _, hand, engine, asleep = await napping(fleet)
    hand.deliver(ExecReset(exec_epoch=asleep.exec_epoch, why="a test"))
    hello = await hand.until(ExecHello, 3)
    assert (hello.asleep, engine.naps) == (True, ["sleep"])


async def test_executor_that_cannot_wake_fails(fleet: Fleet) -> None:
    _, runtime, hand, engine, asleep = await napping(fleet)
    engine.fails = True
    engine.may_wake.set()
    hand.deliver(ExecWake(exec_epoch=asleep.exec_epoch))
    async with asyncio.timeout(60):
        while runtime.failure is None:
            await asyncio.sleep(0.01)
    assert str(runtime.failure) == "the engine did not wake: 14.2 GiB are needed"


async def test_an_engine_that_cannot_sleep_stays_awake(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    info = dataclasses.replace(SimBackend(SimOptions(model="m")).info, sleeps=False)
    monkeypatch.setattr(SimBackend, "info", info)
    _, hand, hello = await welcomed(fleet)
    hand.deliver(ExecSleep(exec_epoch=hello.exec_epoch))
    again = await hand.until(ExecHello, 2)
    assert (again.asleep, again.exec_epoch > hello.exec_epoch) == (False, True)
