"""Drafts of the scheduler: every invariant under any acceptance, replays, and how many drafts pay."""

from __future__ import annotations

import os
import random
from itertools import accumulate, pairwise
from typing import Any

import pytest
from support.executor.paged_engine import STOP_ID, expected_tokens
from support.scheduler.world import World

from loadtest.draft_prices import Played
from services.scheduler.reports.event_log import state_hash
from services.scheduler.state.counters import StepSpan, step_spans
from services.scheduler.state.requests import Arrived
from services.scheduler.state.state import AUTO, DraftPace, Executor, Limits
from shared.kv_blocks import choice_seed
from shared.messages import AT_DEVICE, FROM_DEVICE, StepPlan, StopFound, Tokens, ints

EVENTS = int(os.environ.get("HEADRACE_DRAFT_EVENTS", "1500"))


def busy_world(limits: Limits, events: int, seed: int = 1, **facts: int) -> World:
    """Requests of many kinds that come while others run, on an engine with drafts."""
    world, dice, asked = World(limits, took_us=2_000), random.Random(seed), 0
    world.add_engine(**{"blocks": 60, "slots": 6, "max_context": 128, "max_drafts": 7, **facts})
    while world.events < events:
        if dice.random() < 0.3 and len(world.scheduler.state.requests) < 12:
            asked += 1
            prompt = [token for _ in range(dice.randint(1, 4)) for token in dice.choice(((7, 7, 7), (8, 9)))]
            stops, n = dice.random() < 0.4, dice.choice((1, 1, 2))
            processors = ('{"name":"x"}',) if dice.random() < 0.2 else ()
            world.ask(
                f"r{asked}", prompt, dice.randint(1, 60), seed=asked, stops=stops, n=n, processors=processors
            )
        world.deliver()
    world.run()
    return world


def check_answers(world: World) -> None:
    for reader in world.readers.values():
        asked = world.asked[reader.opened.request]
        seed, stops = choice_seed(asked.seed, reader.opened.choice), STOP_ID in asked.stop_ids
        assert reader.tokens == expected_tokens([*asked.tokens], seed, asked.max_tokens, stops)


WORLDS: dict[str, dict[str, Any]] = {
    "run ahead": {"overlap": "run_ahead", "window": 2},
    "deep window": {"overlap": "run_ahead", "window": 4},
    "single": {"overlap": "single"},
    "two batches": {"overlap": "two_batch"},
    "auto": {"speculate": AUTO},
}


@pytest.mark.parametrize("how", WORLDS)
def test_drafts_change_no_token_over_many_events(how: str) -> None:
    world = busy_world(Limits(**{"speculate": 7, **WORLDS[how]}), EVENTS)
    check_answers(world)
    engine = world.engines["e1"]
    assert engine.drafted > engine.accepted > EVENTS // 100
    counters = world.scheduler.state.counters
    assert (
        0.97 * engine.drafted < counters.draft_tokens <= engine.drafted
    )  # some are of choices that have ended
    assert 0.97 * engine.accepted < counters.accepted_tokens <= engine.accepted
    world.assert_idle()


def test_replay_of_events_with_drafts_finds_the_same_state() -> None:
    first, again = (busy_world(Limits(speculate=AUTO), 600, seed=3) for _ in range(2))
    assert first.engines["e1"].accepted > 0
    assert state_hash(first.scheduler.state) == state_hash(again.scheduler.state)


def test_plans_without_drafts_are_as_before() -> None:
    """K = 0 is today's step: no row is AT_DEVICE, and no column differs."""
    plain = busy_world(Limits(speculate=7), 400, max_drafts=0)
    off = busy_world(Limits(speculate=0), 400)
    assert plain.plans == off.plans
    assert not any(AT_DEVICE in plan.from_device for plan in plain.plans)


def test_rows_are_placed_by_the_device_while_drafts_are_in_flight() -> None:
    world = World(Limits(speculate=3, overlap="run_ahead", window=3))
    world.add_engine(max_drafts=7, max_context=128, blocks=60)
    world.ask("r", [5, 6, 7], 40)
    world.deliver()
    first, second = world.plans[1:3]
    assert (first.from_device[0], first.counts[0], first.starts[0]) == (AT_DEVICE, 4, 3)
    assert (second.from_device[0], second.counts[0], second.starts[0]) == (AT_DEVICE, 4, 7)
    (sequence,) = world.scheduler.state.executors["e1"].running
    assert (sequence.computed, sequence.drafting.in_flight) == (15, 9)
    world.run()
    check_answers(world)


def test_a_request_without_speculation_has_no_drafts_beside_one_with_them() -> None:
    world = World(Limits(speculate=3))
    world.add_engine(max_drafts=7, max_context=128, blocks=60)
    world.ask("with", [5, 6, 7], 30)
    world.ask("without", [5, 6, 8], 30, speculate=False)
    world.run()
    check_answers(world)
    slots = {reader.opened.request: reader for reader in world.readers.values()}
    assert set(slots) == {"with", "without"}
    placed = [set(plan.from_device) for plan in world.plans if len(plan.slots) == 2]
    assert {FROM_DEVICE, AT_DEVICE} in placed


def test_tokens_of_a_row_are_one_entry() -> None:
    sent: list[Tokens] = []
    world = World(Limits(speculate=7))
    world.add_engine(max_drafts=7, max_context=128, blocks=60)
    read = world._read
    world._read = lambda tokens: (sent.append(tokens), read(tokens))[1]  # type: ignore[method-assign]  # a tap
    world.ask("r", [5, 6, 7], 60)
    world.run()
    assert max(tokens.counts[0] for tokens in sent) > 2
    assert all(len(tokens.seqs) == 1 for tokens in sent)
    assert [tokens.first[0] for tokens in sent] == [0, *accumulate(tokens.counts[0] for tokens in sent)][:-1]


def test_drafts_beyond_a_stop_string_are_no_accepted_ones_of_the_answer() -> None:
    world = World(Limits(speculate=7))
    world.add_engine(max_drafts=7, max_context=128, blocks=60)
    world.ask("r", [5, 6, 7], 60, prediction=ints([8, 9]))
    (sequence,) = world.scheduler.state.sequences.values()
    while sequence.drafting.accepted < 6:
        world.deliver()
    found = sequence.drafting.accepted + sequence.drafting.rejected
    world.handle(Arrived("detokenizer.d1", StopFound(seq=sequence.seq, index=4)))
    assert sequence.close is not None
    assert sequence.close.accepted_drafts == 3
    assert sequence.close.rejected_drafts == found - 3
    world.run()


# ---- how many ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("model", "rows", "kept"), [
    ("tiles graphs", 32, 50), ("tiles graphs", 64, 90), ("h200-8b graphs", 8, 70),
    ("h200-8b", 8, 50), ("smollm2-cpu", 1, 90), ("smollm2-cpu", 32, 50),
])  # fmt: skip
def test_auto_is_within_3_percent_of_the_best_number(model: str, rows: int, kept: int) -> None:
    """Measured steps win over the fit. `loadtest.draft_prices` has all points."""
    assert Played(model, rows, kept / 100).run(150) >= 0.97


def test_drafts_that_are_refused_are_tried_again_after_64_steps() -> None:
    world = World(Limits(speculate=AUTO, overlap="single"), took_us=5_000)
    world.add_engine(max_drafts=7, max_context=1_000, blocks=300)
    engine = world.engines["e1"]
    engine._drafts = lambda slot, most: [999] * most  # type: ignore[method-assign]  # always wrong
    world.ask("r", [5, 6, 7], 600)
    world.run()
    check_answers(world)
    with_drafts = [
        plan.step for plan in world.plans if max(plan.counts) > 1 and AT_DEVICE in plan.from_device
    ]
    late = [step for step in with_drafts if step > 200]
    assert all(b - a >= 64 for a, b in pairwise(late))
    assert 3 <= len(late) <= 8


def test_first_request_has_drafts_from_its_second_decode_on() -> None:
    """The first one shows what a step without drafts takes."""
    for facts in ({}, {"max_draft_rows": 8}):
        world = World(Limits(speculate=AUTO), took_us=5_000)
        world.add_engine(max_drafts=7, max_context=128, blocks=60, **facts)
        world.ask("r", [5, 6, 7], 40)
        world.run()
        check_answers(world)
        assert [max(plan.counts) > 1 for plan in world.plans[1:3]] == [False, True]


def test_rows_without_a_found_draft_take_turns() -> None:
    world = World(Limits(speculate=AUTO, overlap="single"), took_us=5_000)
    world.add_engine(max_drafts=7, max_context=128, blocks=400, slots=12)
    engine, found = world.engines["e1"], list[int]()
    engine._drafts = lambda slot, most: found * min(most, 1)  # type: ignore[method-assign]  # none
    for at in range(12):
        world.ask(f"r{at}", [5, 6, at], 100)

    def asked(plan: StepPlan) -> set[int]:
        return {slot for slot, count in zip(plan.slots, plan.counts, strict=True) if count > 1}

    while world.plans[-1].step < 60:
        world.deliver()
    in_turn = [asked(plan) for plan in world.plans[-6:]]
    assert [len(slots) for slots in in_turn] == [2] * 6
    assert set[int]().union(*in_turn) == set(range(12))
    found.append(999)
    world.deliver()
    world.deliver()
    assert asked(world.plans[-2]) < asked(world.plans[-1])  # a row that finds one is asked again at once
    world.run()
    check_answers(world)


def test_sequences_that_have_left_are_not_kept_for_their_drafts() -> None:
    world = World(Limits(speculate=AUTO), check_every=0)
    world.add_engine(max_drafts=7, max_context=128, blocks=1_000, slots=40)
    world.engines["e1"]._drafts = lambda slot, most: []  # type: ignore[method-assign]  # none
    pace, kept = world.scheduler.state.executors["e1"].drafting, list[int]()
    for at in range(100):  # a prompt comes with each step, so that no row is asked
        world.ask(f"r{at}", [5, 6, at], 5)
        world.deliver()
        kept.append(len(pace.asked) + len(pace.in_turn))
    world.run()
    assert 1 < max(kept) <= 10


def test_rows_of_recorded_steps_try_drafts_together() -> None:
    """Each step with a draft takes as long as one with a draft in each row."""
    world = World(Limits(speculate=AUTO, overlap="single"), took_us=5_000)
    world.add_engine(max_drafts=7, max_draft_rows=8, max_context=1_000, blocks=300)
    engine = world.engines["e1"]
    engine._drafts = lambda slot, most: [999] * most  # type: ignore[method-assign]  # always wrong
    for name in "abc":
        world.ask(name, [5, 6, ord(name)], 600)
    world.run()
    check_answers(world)
    plans = [plan for plan in world.plans if plan.step > 200 and len(plan.slots) == 3]
    trying = {plan.step % 64 for plan in plans if AT_DEVICE in plan.from_device}
    assert trying == {0, 1}
    assert all(set(plan.counts) == {2} for plan in plans if AT_DEVICE in plan.from_device)


def test_executor_type_has_graphs_if_it_bounds_the_rows_with_drafts() -> None:
    world = World(Limits())
    world.add_engine("e1", max_drafts=7)
    world.add_engine("e2", max_drafts=7, max_draft_rows=64)
    executors: dict[str, Executor] = world.scheduler.state.executors
    assert (executors["e1"].has_graphs, executors["e2"].has_graphs) == (False, True)


def test_drafts_of_a_new_sequence_begin_with_what_its_executor_has_learned() -> None:
    pace = DraftPace()
    for _ in range(400):
        pace.learn(3, 3, refused=False)
    assert pace.kept_ppm > 990_000
    for _ in range(300):
        pace.learn(1, 0, refused=True)
    assert pace.kept_ppm < 15_000
    world = World(Limits(speculate=AUTO, overlap="single"), took_us=5_000)
    world.add_engine(max_drafts=7, max_context=500, blocks=300)
    world.ask("first", [5, 6, 7], 60)
    world.run()
    executor = world.scheduler.state.executors["e1"]
    executor.drafting.kept_ppm = 970_000
    before = len(world.plans)
    world.ask("second", [5, 6, 8], 60)
    world.run()
    assert max(world.plans[before + 1].counts) == 8
    executor.drafting.kept_ppm, before = 0, len(world.plans)
    world.ask("third", [5, 6, 9], 60)
    world.run()
    assert max(world.plans[before + 1].counts) == 1
    before = len(world.plans)
    world.ask("predicted", [5, 6, 10], 60, prediction=ints([5]))
    world.run()
    assert max(world.plans[before + 1].counts) > 3
    check_answers(world)


def test_step_spans_have_the_drafts_of_their_steps() -> None:
    world = busy_world(Limits(speculate=7), 100)
    records = world.scheduler.state.step_log.ring
    assert sum(step.drafts for step in records) == world.engines["e1"].drafted
    assert sum(step.accepted for step in records) == world.engines["e1"].accepted
    spans = [step_spans(StepSpan(step, 1, ())) for step in records]
    shown = [span.attributes for (span, *_) in spans if "drafts" in span.attributes]
    assert len(shown) == sum(step.drafts > 0 for step in records) > 10
