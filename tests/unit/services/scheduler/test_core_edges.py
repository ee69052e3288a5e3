"""The scheduler's core where things go wrong: failures, disappearances, deadlines, odd orders."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.executor.paged_engine import STOP_ID, expected_tokens
from support.scheduler.world import World, any_limits

from services.scheduler import load_shedding
from services.scheduler.load_shedding import REFUSED_US
from services.scheduler.state.policies import Policy
from services.scheduler.state.requests import Arrived, PeerDraining, PeerLost, PeerReady, StreamLost, Ticked
from services.scheduler.state.state import Limits
from shared.kv_blocks import choice_seed
from shared.messages import Cancel, Detached, Ended, Open, StepResult, StopFound, Tokens, floats, ints


def fail_step(world: World, name: str = "e1") -> None:
    """The engine's oldest step failed instead of giving its result."""
    lost = world.results[name].popleft()
    nothing = {"ids": ints([-1] * len(lost.ids)), "done": ints([0] * len(lost.ids))}
    failed = StepResult(exec_epoch=lost.exec_epoch, step=lost.step, error="RuntimeError: boom", **nothing)
    world.handle(Arrived(f"executor.{name}", failed))


def test_a_failed_step_spares_what_was_opened_after_it() -> None:
    world = World()
    world.add_engine()
    world.ask("a", [5, 6], 9)  # steps 1 and 2 are in flight
    fail_step(world)
    world.ask("b", [5, 7], 9)  # opened after step 2
    fail_step(world)
    closed = world.readers_of("a")[0].closed
    assert closed is not None
    assert closed.code == 500
    world.run()
    world.assert_answers("b")
    world.assert_idle()


def test_failed_step_spares_sequences_outside_it() -> None:
    """The other micro-batch, for one: the engine failed of none of it, and its tokens are of good steps."""
    world = World(Limits(overlap="two_batch"))
    world.add_engine(stages=2)
    world.ask("a", [5, 6], 9)
    world.ask("b", [5, 7], 9)
    for _ in range(4):
        world.deliver()
    (executor,) = world.scheduler.state.executors.values()
    ((failing, _),) = executor.in_flight[0].rows
    assert len(executor.in_flight) == len(executor.running) == 2
    assert all(s.opened_after < executor.in_flight[0].step for s in executor.running)
    fail_step(world)
    spared = {"a": "b", "b": "a"}[failing.request.tokenized.request]
    closed = world.readers_of(failing.request.tokenized.request)[0].closed
    assert closed is not None
    assert closed.code == 500
    world.run()
    world.assert_answers(spared)
    world.assert_idle()


def test_request_that_only_a_lost_executor_could_hold_delays_no_other() -> None:
    world = World()
    world.add_engine("big")
    world.add_engine("little", blocks=4)
    world.ask("large", list(range(20)), 12)
    world.crash("big")
    world.ask("small", [5], 3)
    world.run()
    world.assert_answers("small")
    assert [group.sequences[0].request.tokenized.request for group in world.scheduler.state.waiting] == [
        "large"
    ]
    world.add_engine("big", epoch=2)
    world.run()
    world.assert_answers("large")
    world.assert_idle()


def test_a_draining_executor_finishes_what_it_has_and_gets_nothing_new() -> None:
    world = World()
    world.add_engine("e1")
    world.ask("old", [5, 6], 9)
    world.handle(PeerDraining("executor", "e1"))
    world.handle(PeerDraining("executor", "unknown"))
    world.ask("refused", [5, 7], 3)
    assert [r.code for r in world.rejected] == [503]
    world.add_engine("e2")
    world.ask("new", [5, 8], 9)
    assert [s.request.tokenized.request for s in world.scheduler.state.executors["e1"].running] == ["old"]
    assert [s.request.tokenized.request for s in world.scheduler.state.executors["e2"].running] == ["new"]
    world.run()
    world.assert_answers("old")
    world.assert_answers("new")
    world.assert_idle()


def test_hello_in_another_actors_name_is_ignored() -> None:
    world = World()
    world.add_engine("e1")
    hello = dataclasses.replace(world.scheduler.state.executors["e1"].hello, exec_epoch=9)
    world.handle(Arrived("executor.e2", hello))
    assert world.scheduler.state.executors["e1"].epoch == 1


def test_waiting_tokens_are_counted_for_every_choice() -> None:
    world = World(limits=Limits(max_waiting_tokens=20, policy=Policy(reservation="reserve")))
    world.add_engine(blocks=8)
    world.ask("running", [5] * 8, 24)
    world.ask("first", [5] * 4, 20)  # an empty queue takes any
    world.ask("choices", [5] * 10, 2, n=2)
    world.ask("one", [5] * 10, 2)
    assert [(r.code, r.request) for r in world.rejected] == [(429, "choices")]


def test_a_resend_of_what_was_refused_is_refused_again() -> None:
    world = World()
    world.ask("a", [5, 6], 3, received_wall_us=7)
    world.add_engine()
    again = Arrived("tokenizer.t1", world.asked["a"])
    world.handle(again)
    assert [(r.code, r.request) for r in world.rejected] == [(503, "a")] * 2
    world.ask("a", [5, 6], 3, received_wall_us=8)  # the client itself asks again
    world.run()
    world.assert_answers("a")
    world.ask("bad", [5] * 99, 3)
    world.tick(REFUSED_US)
    world.handle(Ticked())
    assert world.scheduler.state.refused == {}
    assert not world.scheduler.state.refused


def test_only_the_latest_refusals_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_shedding, "MAX_REFUSED", 2)
    world = World()
    for name in ("a", "b", "c"):
        world.ask(name, [5], 3)
    assert [key[1] for key in world.scheduler.state.refused] == ["b", "c"]


def test_the_one_that_reads_a_sequence_alone_can_detach_it() -> None:
    world = World(shards=("d1", "d2"))
    world.add_engine()
    world.ask("a", [5, 6], 9)
    (reader,) = world.readers_of("a")
    owner = world.scheduler.state.requests["public", "a"].shard
    other = "d2" if owner == "d1" else "d1"
    world.handle(Arrived(f"detokenizer.{other}", Detached(seqs=ints([reader.opened.seq]))))
    world.run()
    world.assert_answers("a")


def test_the_order_holds_on_executors_that_could_hold_the_first() -> None:
    world = World(Limits(policy=Policy(reservation="reserve")))
    world.add_engine("e1", blocks=8)
    world.ask("runs", [5], 20)
    world.ask("first", list(range(20)), 12)  # all 8 blocks: waits
    world.ask("second", [5], 3)  # would fit
    assert len(world.scheduler.state.waiting) == 2
    world.run()
    steps = {r: world.readers_of(r)[0].opened.seq for r in ("runs", "first", "second")}
    assert sorted(steps, key=lambda request: steps[request]) == ["runs", "first", "second"]
    for request in steps:
        world.assert_answers(request)


def test_an_id_may_be_used_again_although_its_end_was_cancelled() -> None:
    world = World()
    world.add_engine()
    world.ask("a", [5], 3)
    world.run()
    world.handle(Arrived("client", Cancel(tenant="public", request="a")))
    world.handle(Arrived("tokenizer.t1", dataclasses.replace(world.asked["a"], inbox="another")))
    world.run()
    assert world.rejected == []
    assert [reader.tokens for reader in world.readers_of("a")] == [
        expected_tokens([5], choice_seed(0, 0), 3, False)
    ] * 2


def test_cancels_of_nothing_take_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.scheduler.lifecycle.MAX_TOMBSTONES", 3)
    world = World()
    world.add_engine()
    for i in range(5):
        world.handle(Arrived("client", Cancel(tenant="public", request=f"r{i}")))
    for i in range(5):
        world.ask(f"r{i}", [5], 3)
    assert [(r.request, r.code) for r in world.rejected] == [("r2", 499), ("r3", 499), ("r4", 499)]


@pytest.mark.parametrize("limits", [Limits(max_waiting=0), Limits(max_waiting_tokens=4)])
def test_an_empty_queue_takes_any_request(limits: Limits) -> None:
    world = World(limits)
    world.add_engine(slots=1)
    world.ask("a", [5] * 6, 3)
    world.ask("b", [5] * 6, 3)  # waits, for there is one slot
    world.ask("c", [5] * 6, 3)
    assert [(r.request, r.code) for r in world.rejected] == [("c", 429)]
    world.run()
    world.assert_answers("b")


def test_only_the_owner_of_a_sequence_can_end_it() -> None:
    world = World(auto_end=False, shards=("d1", "d2"))
    world.add_engine()
    world.ask("a", [5], 3)
    world.run()
    owner = world.scheduler.state.requests["public", "a"].shard
    other = {"d1": "d2", "d2": "d1"}[owner]
    ended = Ended(seq=world.readers_of("a")[0].opened.seq, index=3, reason="length")
    world.handle(Arrived(f"detokenizer.{other}", ended))
    assert not world.scheduler.is_idle
    world.handle(Arrived(f"detokenizer.{owner}", ended))
    world.assert_idle()


def test_an_end_waits_for_a_detokenizer_as_long_as_its_request() -> None:
    world = World(auto_end=False)
    world.add_engine()
    world.ask("a", [5], 3, timeout_us=60_000_000)
    world.ask("b", [6], 3, timeout_us=10_000_000)
    world.run()
    world.handle(PeerLost("detokenizer", "d1"))
    world.tick(9_000_000)
    assert set(world.scheduler.state.requests) == {("public", "a"), ("public", "b")}
    world.tick(2_000_000)
    assert set(world.scheduler.state.requests) == {("public", "a")}
    world.handle(PeerReady("detokenizer", "d2", 1))
    world.assert_answers("a")
    assert world.readers_of("a")[0].opened.attempt == 2
    world.tick(60_000_000)
    world.assert_idle()


def test_a_draining_detokenizer_that_starts_again_is_not_taken_for_the_old_one() -> None:
    world = World()
    world.add_engine()
    world.ask("a", [5], 9)
    world.deliver()
    world.handle(PeerLost("detokenizer", "d1"))  # the shell's event for every new incarnation
    world.handle(PeerReady("detokenizer", "d1", 2))
    assert world.moved == []
    world.run()
    world.assert_answers("a")


def test_an_executor_that_came_back_is_not_reset_again() -> None:
    world = World()
    world.add_engine("e1", epoch=1)
    world.add_engine("e1", epoch=2)
    world.handle(PeerReady("executor", "e1", 9))
    assert (world.resets, world.scheduler.state.dropped) == ([], {})


def test_tokens_of_many_rows_go_in_several_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.scheduler.results.MAX_IDS", 2)
    world, sizes, read = World(), [], World._read

    def note(self: World, tokens: Tokens) -> None:
        sizes.append(len(tokens.seqs))
        read(self, tokens)

    monkeypatch.setattr(World, "_read", note)
    world.add_engine(slots=5)
    for i in range(5):
        world.ask(f"r{i}", [5, i], 4)
    world.run()
    for i in range(5):
        world.assert_answers(f"r{i}")
    assert max(sizes) == 2
    assert sum(sizes) == 20


def test_logprobs_go_with_their_tokens_to_the_right_shard() -> None:
    world = World(shards=("d1", "d2"))
    world.add_engine()
    for i in range(4):
        world.ask(f"r{i}", [5, i], 9, logprobs=1 + i)
    shards = [world.scheduler.state.requests["public", f"r{i}"].shard for i in range(4)]
    assert set(shards) == {"d1", "d2"}
    for _ in range(2):  # the steps that only the first request was in time for
        world.deliver()
    result = world.results["e1"][0]
    assert len(result.ids) == 4
    scored = dataclasses.replace(
        result,
        logprobs=floats([0.0, -1.0, -2.0, -3.0]),
        top_counts=ints([0, 1, 2, 3]),
        top_ids=ints([10, 20, 21, 30, 31, 32]),
        top_logprobs=floats([-1, -2, -2.5, -3, -3.5, -4]),
    )
    sent = world.scheduler.handle(Arrived("executor.e1", scored), world.now_us)
    tokens_to = {c.to: c.message for c in sent if isinstance(c.message, Tokens)}
    for shard in ("d1", "d2"):
        rows = [i for i in range(4) if shards[i] == shard]
        tokens = tokens_to[f"detokenizer.{shard}"]
        assert isinstance(tokens, Tokens)
        assert list(tokens.ids) == [result.ids[i] for i in rows]
        assert list(tokens.logprobs) == [float(-i) for i in rows]
        assert list(tokens.top_counts) == rows
        assert list(tokens.top_ids) == [10 * i + k for i in rows for k in range(i)]
        assert list(tokens.top_logprobs) == [-i - k / 2 for i in rows for k in range(i)]


def test_another_detokenizer_gets_all_tokens_with_their_log_probabilities(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("services.scheduler.state.requests.MAX_IDS", 2)
    world = World(shards=("d1", "d2"))
    world.add_engine()
    world.ask("a", [5], 9, logprobs=3)
    shard, scores = world.scheduler.state.requests["public", "a"].shard, []
    while len(scores) < 5:
        result = world.results["e1"].popleft()
        if result.ids:
            tops = len(scores) % 3
            result = dataclasses.replace(
                result,
                logprobs=floats([-len(scores)]),
                top_counts=ints([tops]),
                top_ids=ints(range(tops)),
                top_logprobs=floats([-k / 2 for k in range(tops)]),
            )
            scores += result.ids
        world.handle(Arrived("executor.e1", result))
    sent = world.scheduler.handle(PeerLost("detokenizer", shard), world.now_us)
    (opened,) = [c.message for c in sent if isinstance(c.message, Open)]
    assert not opened.tokens
    pieces = [c.message for c in sent if isinstance(c.message, Tokens)]
    assert [(list(p.first), list(p.counts)) for p in pieces] == [([0], [2]), ([2], [2]), ([4], [1])]
    assert [i for p in pieces for i in p.ids] == scores
    assert [v for p in pieces for v in p.logprobs] == [0, -1, -2, -3, -4]
    assert [v for p in pieces for v in p.top_counts] == [0, 1, 2, 0, 1]
    assert [list(p.top_ids) for p in pieces] == [[0], [0, 1], [0]]
    assert [list(p.top_logprobs) for p in pieces] == [[0], [0, -0.5], [0]]


def test_many_late_requests_end_in_one_tick() -> None:
    world = World()
    world.add_engine(slots=1)
    for i in range(50):
        world.ask(f"r{i}", [5], 9, timeout_us=1_000_000)
    world.tick(1_000_000)
    assert [r.closed.code for r in world.readers.values() if r.closed] == [408] * 50
    world.run()
    world.assert_idle()


ACTIONS = [
    "ask", "ask", "ask", "deliver", "deliver", "deliver", "stop", "detach", "fail", "crash", "reset",
    "lose shard", "add shard", "tick",
]  # fmt: skip


def act(world: World, data: st.DataObject, step: int) -> None:
    """One thing that may happen at any time."""
    action = data.draw(st.sampled_from(ACTIONS))
    engine, shard = data.draw(st.sampled_from(["e1", "e2"])), data.draw(st.sampled_from(["d1", "d2"]))
    if action == "ask":
        prompt = data.draw(st.lists(st.integers(3, 900), min_size=1, max_size=20))
        more = {"n": data.draw(st.integers(1, 3)), "stops": data.draw(st.booleans())}
        more["timeout_us"] = data.draw(st.sampled_from([2_000, 10**7]))
        world.ask(f"r{step}", prompt, data.draw(st.integers(1, 12)), seed=step, **more)
    elif action == "deliver" and engine in world.engines:
        world.deliver(engine)
    elif action in ("stop", "detach") and world.readers:
        reader = world.readers[data.draw(st.sampled_from(sorted(world.readers)))]
        at = data.draw(st.integers(0, 12))
        found = StopFound(seq=reader.opened.seq, index=at)
        detached = Detached(seqs=ints([reader.opened.seq]))
        world.handle(Arrived(f"detokenizer.{shard}", found if action == "stop" else detached))
    elif action == "fail" and world.results.get(engine):
        fail_step(world, engine)
    elif action == "crash" and engine in world.engines:
        world.crash(engine)
        if data.draw(st.booleans()):
            world.add_engine(engine, epoch=step + 2, blocks=data.draw(st.sampled_from([8, 32])))
    elif action == "reset" and engine in world.engines:
        world.handle(StreamLost(f"executor.{engine}"))
        world.add_engine(engine, epoch=step + 2)
    elif action == "lose shard":
        world.handle(PeerLost("detokenizer", shard))
    elif action == "add shard":
        world.handle(PeerReady("detokenizer", shard, step + 2))
    elif action == "tick":
        world.tick(data.draw(st.sampled_from([10, 1_500])))


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_every_request_ends_and_no_token_is_wrong_after_any_events(data: st.DataObject) -> None:
    world = World(any_limits(data), shards=("d1", "d2"))
    world.add_engine("e1", slots=data.draw(st.integers(1, 6)), blocks=data.draw(st.integers(12, 40)))
    for step in range(data.draw(st.integers(5, 50))):
        act(world, data, step)
    for engine in ("e1", "e2"):
        if engine not in world.engines:
            world.add_engine(engine, epoch=99)
    world.handle(PeerReady("detokenizer", "d1", 99))
    world.run()
    world.assert_idle()
    for reader in world.readers.values():
        asked, closed = world.asked[reader.opened.request], reader.closed
        assert closed is not None
        seed, stops = choice_seed(asked.seed, reader.opened.choice), STOP_ID in asked.stop_ids
        want = expected_tokens(list(asked.tokens), seed, asked.max_tokens, stops)
        assert reader.tokens == want[: len(reader.tokens)]
        assert len(reader.tokens) >= closed.final
        if closed.reason == "length":
            assert reader.tokens == want


def test_an_empty_prompt_is_refused_here_too() -> None:
    world = World()
    world.add_engine()
    world.ask("a", [], 3)
    assert [(r.code, r.message) for r in world.rejected] == [
        (400, "the prompt is empty: send at least one token")
    ]
    world.assert_idle()


@pytest.mark.parametrize("rows", [0, 2])
@pytest.mark.parametrize("later", [0, 1])
def test_a_result_that_does_not_fit_its_plan_resets_the_executor(rows: int, later: int) -> None:
    """Its step would be in flight for ever, or its tokens go to the wrong sequences."""
    world = World()
    world.add_engine()
    world.ask("a", [5, 6, 7], 6)
    world.deliver()
    right = world.results["e1"].popleft()
    wrong = dataclasses.replace(right, step=right.step + later, ids=ints([9] * rows), done=ints([0] * rows))
    world.handle(Arrived("executor.e1", wrong))
    assert world.resets == ["e1"]
    world.add_engine(epoch=2)
    world.run()
    world.assert_answers("a")
    world.assert_idle()


def test_request_unknown_to_a_detokenizer_is_opened_again() -> None:
    """Messages to it were lost. It may still wait for the Close of one that it had failed."""
    world = World(auto_end=False)
    world.add_engine()
    for name in ("known", "running", "over"):
        world.ask(name, [5], 3 if name == "over" else 9)
    for _ in range(4):
        world.deliver()
    (known,) = [reader.opened.seq for reader in world.readers_of("known")]
    world.handle(Arrived("detokenizer.d1", Detached(seqs=ints([known]))))
    world.handle(Arrived("detokenizer.d2", Detached(seqs=ints())))
    attempts = {reader.opened.request: reader.opened.attempt for reader in world.readers.values()}
    assert attempts == {"known": 1, "running": 1, "over": 1}, "that one has none of them"
    world.handle(Arrived("detokenizer.d1", Detached(seqs=ints())))
    attempts = {reader.opened.request: reader.opened.attempt for reader in world.readers.values()}
    assert attempts == {"known": 2, "running": 2, "over": 2}
    world.run()
    world.assert_answers("running")
    world.assert_answers("over")
