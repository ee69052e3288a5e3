"""The scheduler's core on engines that check every block."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.executor.paged_engine import expected_tokens
from support.scheduler.world import RESERVE, World, any_limits

from services.scheduler.load_shedding import OVERTAKE_US
from services.scheduler.state.requests import (
    Arrived,
    DrainRequested,
    PeerDraining,
    PeerLost,
    PeerReady,
    StreamLost,
)
from services.scheduler.state.state import Limits
from shared.kv_blocks import choice_seed
from shared.messages import ATTEMPTS, Cancel, Detached, Ended, StepResult, StopFound, ints


@pytest.mark.parametrize("window", [1, 2, 4])
@pytest.mark.parametrize("step_tokens", [1, 5, 64])
def test_tokens_do_not_depend_on_window_or_chunks(window: int, step_tokens: int) -> None:
    world = World(Limits(window=window, step_tokens=step_tokens))
    world.add_engine()
    for i in range(6):
        world.ask(f"r{i}", list(range(10, 13 + 3 * i)), 9, seed=i, stops=i % 2 == 0)
    world.run()
    for i in range(6):
        world.assert_answers(f"r{i}")
    world.assert_idle()


def test_the_window_is_kept_full_and_never_exceeded() -> None:
    world = World(Limits(window=2))
    world.add_engine()
    world.ask("a", [5, 6, 7], 10)
    assert [plan.step for plan in world.plans] == [1, 2]
    world.deliver()
    assert [plan.step for plan in world.plans] == [1, 2, 3]
    first, second, third = world.plans
    assert list(first.from_device) == [0]
    assert (list(second.from_device), list(second.starts), list(second.counts)) == ([1], [3], [1])
    assert list(third.starts) == [4]
    assert (first.mode, World(Limits(window=1)).limits.window) == ("run_ahead", 1)


def test_plan_ends_at_the_length_of_a_sequence() -> None:
    world = World(Limits(window=4, overlap="run_ahead"))
    world.add_engine()
    world.ask("a", [5, 6, 7], 3)
    assert [list(plan.starts) for plan in world.plans] == [[0], [3], [4]]
    world.run()
    world.assert_answers("a")


@pytest.mark.parametrize("prompt_length", [3, 4, 8, 9])
def test_a_fork_shares_full_blocks_and_copies_the_tail(prompt_length: int) -> None:
    world = World()
    world.add_engine()
    world.ask("a", list(range(20, 20 + prompt_length)), 7, n=3, seed=4)
    pool = world.scheduler.state.executors["e1"].pool
    world.run()
    world.assert_answers("a")
    texts = {tuple(reader.tokens) for reader in world.readers_of("a")}
    assert len(texts) == 3
    copies = [len(plan.copy_from) for plan in world.plans]
    assert sum(copies) == (0 if prompt_length % 4 == 0 else 2)
    prefills = [plan for plan in world.plans if 0 in plan.from_device]
    assert sum(sum(plan.counts) for plan in prefills) == prompt_length  # computed once, not thrice
    assert pool.free_blocks == pool.blocks
    world.assert_idle()


def test_decodes_come_before_chunks_and_the_budget_bounds_chunks() -> None:
    world = World(Limits(window=1, step_tokens=6))
    world.add_engine()
    world.ask("a", [5, 6, 7], 20)
    world.deliver()
    world.ask("b", list(range(30, 50)), 4)
    world.deliver()
    plan = world.plans[-1]
    assert (list(plan.counts), list(plan.from_device)) == ([1, 5], [1, 0])
    assert list(plan.sample_rows) == [0]  # a chunk that is not the last samples nothing
    world.run()
    world.assert_answers("a")
    world.assert_answers("b")


def test_reserve_admission_keeps_the_order_and_never_runs_out() -> None:
    world = World(RESERVE)
    world.add_engine(blocks=8, slots=4)
    world.ask("big", list(range(20)), 12)  # 8 blocks: all there are
    world.ask("small", [5], 3)
    world.ask("third", [6], 3)
    assert [r.opened.request for r in world.readers.values()] == ["big", "small", "third"]
    assert len(world.scheduler.state.waiting) == 2
    world.run()
    for request in ("big", "small", "third"):
        world.assert_answers(request)
    world.assert_idle()


def test_refusals_are_typed() -> None:
    world = World(Limits(max_waiting=1))
    world.ask("early", [5], 3)
    world.add_engine(blocks=8, slots=1, max_context=30)
    world.ask("long", list(range(25)), 6)
    world.ask("wide", [5], 3, n=2)
    world.ask("runs", [5], 20)
    world.ask("waits", [5], 3)
    world.ask("full", [5], 3)
    world.handle(Arrived("tokenizer.t2", world.asked["waits"]))  # a resend
    assert [(r.request, r.code) for r in world.rejected] == [
        ("early", 503),
        ("long", 400),
        ("wide", 400),
        ("full", 429),
    ]
    assert world.accepted == ["runs", "waits", "waits"]
    assert "never fit" in world.rejected[1].message
    assert world.rejected[3].retry_after_ms == 1000


def test_the_same_id_from_another_client_is_a_conflict() -> None:
    import dataclasses

    world = World()
    world.add_engine()
    world.ask("a", [5], 9)
    world.handle(Arrived("tokenizer.t1", dataclasses.replace(world.asked["a"], inbox="another")))
    assert [(r.code, r.request) for r in world.rejected] == [(409, "a")]


def test_request_is_refused_without_a_detokenizer() -> None:
    world = World(shards=())
    world.add_engine()
    world.ask("a", [5], 3)
    assert [r.code for r in world.rejected] == [503]
    assert world.scheduler.state.counters.rejected == {}, "its tokenizer asks again"


def test_a_late_resend_of_an_ended_request_is_not_run_again() -> None:
    world = World()
    world.add_engine()
    world.ask("a", [5], 3)
    world.run()
    world.handle(Arrived("tokenizer.t1", world.asked["a"]))
    assert world.accepted == ["a", "a"]
    world.assert_idle()


_CLOCKS_S = [0, 2, -2, 600, -600, 172_800, -172_800]  # of the second tokenizer, against the first one's


@pytest.mark.parametrize("clock_s", _CLOCKS_S)
@pytest.mark.parametrize("attempt", [1, 1 + ATTEMPTS], ids=["sent again", "taken over"])
@pytest.mark.parametrize("after_us", [-1_000, 200, OVERTAKE_US + 100, 1_000_000])
def test_a_request_that_came_after_its_like_had_ended_is_run_again(
    after_us: int, attempt: int, clock_s: int
) -> None:
    """Its client has lost the answer, and asks again. A tokenizer that takes it over has seen it before."""
    world = World()
    world.add_engine()
    world.ask("a", [5], 3, received_wall_us=5_000_000)
    world.run()
    world.tick(1_000_000)
    (ended,) = world.scheduler.state.ended.by_key.values()
    again = dataclasses.replace(
        world.asked["a"],
        attempt=attempt,
        received_wall_us=6_000_000 + clock_s * 1_000_000,
        waited_us=world.now_us - ended.ended_us - after_us,
    )
    world.handle(Arrived("tokenizer.t2", again))
    assert world.accepted == ["a", "a"]
    world.run()
    is_new = after_us > (OVERTAKE_US if attempt > 1 else 0)
    assert len(world.readers_of("a")) == (2 if is_new else 1)
    world.assert_idle()


def test_a_resend_of_a_tokenizer_that_was_long_on_its_way_is_not_run_again() -> None:
    """The stamp names the submission, so the time of its message does not count."""
    world = World()
    world.add_engine()
    world.ask("a", [5], 3, received_wall_us=5_000_000)
    world.run()
    world.tick(60_000_000)
    world.handle(Arrived("tokenizer.t1", dataclasses.replace(world.asked["a"], attempt=2, waited_us=5_000)))
    world.run()
    assert (world.accepted, len(world.readers_of("a"))) == (["a", "a"], 1)
    world.assert_idle()


def test_cancel_frees_everything_even_with_steps_in_flight() -> None:
    world = World()
    world.add_engine()
    world.ask("a", [5, 6, 7], 20, n=2)
    world.ask("b", [5, 6, 7], 5)
    world.handle(Arrived("client", Cancel(tenant="public", request="a")))
    closes = [reader.closed for reader in world.readers_of("a")]
    assert [(c.reason, c.code) for c in closes if c] == [("error", 499)] * 2
    world.run()
    world.assert_answers("b")
    world.assert_idle()


def test_a_cancel_may_overtake_its_request() -> None:
    world = World()
    world.add_engine()
    world.handle(Arrived("client", Cancel(tenant="public", request="a")))
    world.ask("a", [5], 3)
    assert [(r.request, r.code) for r in world.rejected] == [("a", 499)]
    world.tick(61_000_000)
    world.ask("a", [5], 3)
    world.run()
    world.assert_answers("a")


def test_a_cancelled_request_that_waits_never_runs() -> None:
    world = World()
    world.add_engine(blocks=8)
    world.ask("big", list(range(20)), 12)
    world.ask("small", [5], 3)
    world.handle(Arrived("client", Cancel(tenant="public", request="small")))
    world.run()
    assert world.readers_of("small")[0].tokens == []
    world.assert_idle()


def test_a_deadline_ends_a_request_with_408() -> None:
    world = World()
    world.add_engine()
    world.ask("a", [5], 30, timeout_us=5_000)
    world.tick(4_000)
    assert world.readers_of("a")[0].closed is None
    world.tick(2_000)
    closed = world.readers_of("a")[0].closed
    assert closed is not None
    assert (closed.reason, closed.code) == ("error", 408)
    world.run()
    world.assert_idle()


def test_detach_stops_the_work_unless_it_is_to_be_finished() -> None:
    world = World()
    world.add_engine()
    world.ask("a", [5], 9)
    world.ask("b", [6], 9, finish_detached=True)
    seqs = ints(reader.opened.seq for reader in world.readers.values())
    world.handle(Arrived("detokenizer.d1", Detached(seqs=seqs)))
    world.run()
    closed = world.readers_of("a")[0].closed
    assert closed is not None
    assert closed.code == 499
    world.assert_answers("b")
    world.assert_idle()


def test_stop_found_cuts_at_its_index_after_later_tokens() -> None:
    world = World()
    world.add_engine()
    world.ask("a", [5], 20)
    for _ in range(6):
        world.deliver()
    reader = world.readers_of("a")[0]
    world.handle(Arrived("detokenizer.d1", StopFound(seq=reader.opened.seq, index=4)))
    assert reader.closed is not None
    assert (reader.closed.final, reader.closed.reason) == (4, "stop")
    world.handle(Arrived("detokenizer.d1", StopFound(seq=reader.opened.seq, index=2)))
    world.run()
    world.assert_idle()


def test_the_record_waits_for_ended_as_long_as_its_request_may_run() -> None:
    """Its detokenizer lives, but may still miss the messages before the Close."""
    world = World(auto_end=False)
    world.add_engine()
    world.ask("a", [5], 3)
    world.ask("b", [5], 3, timeout_us=60_000_000)
    world.run()
    seq = world.readers_of("a")[0].opened.seq
    world.handle(Arrived("detokenizer.d1", Ended(seq=seq, index=2, reason="stop")))
    assert [s.request.tokenized.request for s in world.scheduler.state.sequences.values()] == ["b"]
    trace = world.scheduler.state.ended.find(lambda key: key[1] == "a")
    assert trace is not None
    assert (trace.facts.choices[0].tokens, trace.facts.choices[0].reason) == (2, "stop")
    (reader,) = world.readers_of("b")
    for _ in range(11):
        reader.closed = None
        world.tick(4_900_000)
        assert reader.closed is None
        world.tick(200_000)
        assert reader.closed is not None
    world.tick(5_000_000)
    world.assert_idle()


def test_a_detokenizer_with_lost_messages_gets_its_requests_again() -> None:
    """One that asked for them may be among the lost messages."""
    world = World()
    world.add_engine()
    world.ask("a", [5], 20)
    for _ in range(6):
        world.deliver()
    world.handle(StreamLost("detokenizer.d1"))
    assert world.readers_of("a")[0].opened.attempt == 2
    world.run()
    world.assert_answers("a")
    world.assert_idle()


@pytest.mark.parametrize("delivered", range(0, 9, 2))
def test_a_dead_executor_loses_no_token(delivered: int) -> None:
    world = World()
    world.add_engine("e1")
    world.ask("a", list(range(10, 19)), 9, n=2)
    world.ask("b", [5], 9, stops=True)
    for _ in range(delivered):
        world.deliver("e1")
    world.crash("e1")
    world.add_engine("e2")
    world.run()
    world.assert_answers("a")
    world.assert_answers("b")
    world.assert_idle()


def test_a_restarted_executor_is_a_new_incarnation() -> None:
    world = World()
    world.add_engine("e1", epoch=1)
    world.ask("a", [5, 6], 9)
    world.deliver()
    stale = world.results["e1"][0]
    world.add_engine("e1", epoch=2)
    world.handle(Arrived("executor.e1", stale))  # of the former incarnation: ignored
    world.run()
    world.assert_answers("a")
    world.assert_idle()


def test_lost_results_reset_the_executor() -> None:
    world = World()
    world.add_engine("e1", epoch=1)
    world.ask("a", [5, 6], 9)
    world.deliver()
    world.handle(StreamLost("executor.e1"))
    assert world.resets == ["e1"]
    world.add_engine("e1", epoch=2)
    world.run()
    world.assert_answers("a")


def test_an_executor_given_up_and_back_is_reset() -> None:
    world = World()
    world.add_engine("e1", epoch=1)
    world.ask("a", [5, 6], 9)
    late = world.results["e1"][0]
    world.handle(PeerLost("executor", "e1"))
    world.handle(Arrived("executor.e1", late))
    world.handle(PeerReady("executor", "e1", 1))
    assert world.resets == ["e1", "e1"]
    world.add_engine("e1", epoch=2)
    world.run()
    world.assert_answers("a")


def test_duplicate_results_are_dropped() -> None:
    world = World()
    world.add_engine()
    world.ask("a", [5, 6], 9)
    again = world.results["e1"][0]
    world.deliver()
    world.handle(Arrived("executor.e1", again))
    world.run()
    world.assert_answers("a")


def test_a_failed_step_is_a_typed_error_of_its_requests() -> None:
    world = World()
    world.add_engine()
    world.ask("a", [5, 6], 9)
    world.results["e1"].popleft()
    failed = StepResult(exec_epoch=1, step=1, ids=ints([-1]), done=ints([0]), error="RuntimeError: boom")
    world.handle(Arrived("executor.e1", failed))
    closed = world.readers_of("a")[0].closed
    assert closed is not None
    assert closed.code == 500
    assert "boom" in closed.message
    world.run()
    world.assert_idle()


def test_another_detokenizer_takes_over_with_all_tokens() -> None:
    world = World(shards=("d1", "d2"))
    world.add_engine()
    for i in range(4):
        world.ask(f"r{i}", [5, i], 9)
    for _ in range(3):
        world.deliver()
    owners = {r.tokenized.request: r.shard for r in world.scheduler.state.requests.values()}
    assert set(owners.values()) == {"d1", "d2"}
    world.handle(PeerLost("detokenizer", "d1"))
    for request, shard in owners.items():
        assert world.readers_of(request)[0].opened.attempt == (2 if shard == "d1" else 1)
    world.run()
    for i in range(4):
        world.assert_answers(f"r{i}")


def test_orphans_wait_for_the_next_detokenizer() -> None:
    world = World(auto_end=False)
    world.add_engine()
    world.ask("a", [5], 6)
    world.deliver()
    world.handle(PeerLost("detokenizer", "d1"))
    world.run()
    world.handle(PeerReady("detokenizer", "d3", 7))
    reader = world.readers_of("a")[0]
    assert reader.tokens == expected_tokens([5], choice_seed(0, 0), 6, False)
    assert reader.closed is not None


def test_a_restarted_detokenizer_gets_its_own_back() -> None:
    world = World()
    world.add_engine()
    world.ask("a", [5], 6)
    world.deliver()
    world.handle(PeerReady("detokenizer", "d1", 2))
    assert world.readers_of("a")[0].opened.attempt == 2
    world.run()
    world.assert_answers("a")


def test_returning_detokenizer_gets_the_list_of_requests_it_no_longer_owns() -> None:
    world = World(shards=("d1",))
    world.add_engine()
    world.ask("a", [5], 6)
    seq = world.readers_of("a")[0].opened.seq
    world.handle(PeerReady("detokenizer", "d2", 1))
    world.handle(PeerLost("detokenizer", "d1"))
    before = len(world.moved)
    world.handle(PeerReady("detokenizer", "d1", 1))
    assert (before, world.moved) == (0, [("detokenizer.d1", seq)])
    world.run()
    world.assert_answers("a")


def test_tables_of_a_long_fork_travel_in_several_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.scheduler.step_planner.MAX_TABLE_ENTRIES", 6)
    world = World()
    world.add_engine(blocks=64, slots=6)
    world.ask("a", list(range(20)), 6, n=4)
    world.run()
    world.assert_answers("a")
    assert max(len(plan.table_blocks) for plan in world.plans) <= 6 + 3  # a block for each other decode
    world.assert_idle()


def test_a_draining_detokenizer_gets_nothing_new() -> None:
    world = World(shards=("d1", "d2"))
    world.add_engine()
    world.handle(PeerDraining("detokenizer", "d1"))
    for i in range(6):
        world.ask(f"r{i}", [5, i], 3)
    assert {r.shard for r in world.scheduler.state.requests.values()} == {"d2"}


def test_draining_refuses_and_finishes() -> None:
    world = World()
    world.add_engine()
    world.ask("a", [5], 6)
    world.handle(DrainRequested())
    world.ask("b", [5], 6)
    assert [(r.request, r.code) for r in world.rejected] == [("b", 503)]
    world.run()
    world.assert_answers("a")
    world.assert_idle()


def test_two_executors_share_the_load() -> None:
    world = World()
    world.add_engine("e1")
    world.add_engine("e2")
    for i in range(6):
        world.ask(f"r{i}", [5, i], 9)
    placed = [s.executor for s in world.scheduler.state.sequences.values()]
    assert (placed.count("e1"), placed.count("e2")) == (3, 3)
    world.run()
    for i in range(6):
        world.assert_answers(f"r{i}")
    world.assert_idle()


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_any_history_ends_with_the_right_tokens(data: st.DataObject) -> None:
    """Requests, forks, results, cancels, crashes and shard changes in any order: what is not
    cancelled gets exactly its tokens, and at the end every block and slot is free."""
    world = World(any_limits(data), shards=("d1", "d2"))
    world.add_engine("e1")
    epoch, cancelled = 1, set()
    for step in range(data.draw(st.integers(5, 40))):
        action = data.draw(st.sampled_from(["ask", "ask", "deliver", "deliver", "cancel", "crash", "shard"]))
        if action == "ask":
            prompt = data.draw(st.lists(st.integers(3, 900), min_size=1, max_size=20))
            n, stops = data.draw(st.integers(1, 3)), data.draw(st.booleans())
            world.ask(f"r{step}", prompt, data.draw(st.integers(1, 12)), n=n, seed=step, stops=stops)
        elif action == "deliver":
            world.deliver("e1")
        elif action == "cancel" and world.asked:
            request = data.draw(st.sampled_from(sorted(world.asked)))
            cancelled.add(request)
            world.handle(Arrived("client", Cancel(tenant="public", request=request)))
        elif action == "crash":
            epoch += 1
            world.add_engine("e1", epoch=epoch)
        elif action == "shard":
            epoch += 1
            world.handle(PeerReady("detokenizer", data.draw(st.sampled_from(["d1", "d2"])), epoch))
    world.run()
    for request in world.asked:
        if request not in cancelled:
            world.assert_answers(request)
    world.assert_idle()
