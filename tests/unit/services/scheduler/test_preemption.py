"""Which sequences are paused, when and why; and what must not wait for want of another event."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from support.scheduler.world import World

from loadtest import policies
from services.scheduler import admission, headroom, preemption
from services.scheduler.headroom import headroom_blocks
from services.scheduler.state import requests
from services.scheduler.state.policies import Policy
from services.scheduler.state.requests import PIN_AFTER_PREEMPTIONS, Arrived, PeerDraining, Sequence, Ticked
from services.scheduler.state.state import Executor, Limits, State
from services.scheduler.state.waiting_queue import SequenceGroup, WaitingQueue
from shared.messages import Cancel

NEVER = requests.parse("interactive=0/50/0,standard=0/50/0,batch=0/50/0")
OURS = "loadtest.policies:"
KV = ("on_demand", "reserve", f"{OURS}greedy", f"{OURS}by_chunk")


def pauses(world: World, request: str) -> int:
    return sum(s.turn.preemptions for s in world.scheduler.state.requests["public", request].sequences)


def test_the_latest_of_the_lowest_class_is_paused() -> None:
    world = World(Limits(classes=NEVER))
    world.add_engine(blocks=9, slots=3)
    world.ask("batch", [5, 6], 20, slo_class="batch")
    world.ask("late", [5, 7], 20, slo_class="standard")
    world.ask("early", [5, 8], 20, slo_class="interactive")
    counts = {"batch": 0, "late": 0, "early": 0}
    for _ in range(200):
        for name in counts:
            if ("public", name) in world.scheduler.state.requests:
                counts[name] = max(counts[name], pauses(world, name))
        world.deliver()
    assert counts["early"] == 0
    assert 0 < counts["batch"] <= PIN_AFTER_PREEMPTIONS
    for name in counts:
        world.assert_answers(name)
    world.assert_idle()


def test_a_higher_class_takes_the_place_of_lower_ones() -> None:
    world = World(Limits(classes=NEVER, policy=Policy(reservation="reserve")))
    world.add_engine(blocks=8, slots=2)
    world.ask("batch", [5] * 4, 12, slo_class="batch")
    world.ask("standard", [6] * 4, 12)
    world.ask("now", [7] * 4, 12, slo_class="interactive")
    assert (pauses(world, "batch"), pauses(world, "standard")) == (1, 0)
    decision = next(s for s in world.scheduler.state.sequences.values() if s.turn.preemptions).decisions[-1]
    assert decision.what == "preempt"
    assert "class interactive needs room; latest of 2: seq 1 (batch" in decision.why
    world.ask("another", [8] * 4, 12, slo_class="standard")
    assert (pauses(world, "standard"), pauses(world, "now")) == (0, 0), (
        "no sequence for one of the same class"
    )
    world.run()
    for name in ("batch", "standard", "now", "another"):
        world.assert_answers(name)


@pytest.mark.parametrize("overlap", ["single", "run_ahead", "two_batch"])
def test_sequence_that_takes_a_place_with_no_step_in_flight_starts_at_once(overlap: str) -> None:
    """Found by the machine: the result that let a higher class pause the only one that ran was the last
    event; nothing was in flight, so nothing came that would have started a sequence."""
    world = World(Limits(classes=NEVER, policy=Policy(reservation="reserve"), overlap=overlap))
    world.add_engine(blocks=8, slots=3)
    world.ask("first", [4] * 4, 2, slo_class="interactive")  # 2 blocks
    world.ask("batch", [5] * 4, 20, slo_class="batch")  # 6 blocks
    world.ask("large", [6] * 4, 28, slo_class="interactive")  # all 8: it needs both to go
    world.run()
    for name in ("first", "batch", "large"):
        world.assert_answers(name)
    world.assert_idle()


def test_sequence_whose_last_token_is_in_flight_needs_no_block() -> None:
    """Its KV ends at a block boundary: the token after it is the last, and is never computed."""
    world = World(Limits(classes=NEVER, window=4, overlap="run_ahead"))
    world.add_engine()
    world.ask("ends", [6] * 5, 4)
    (executor,) = world.scheduler.state.executors.values()
    assert [(s.computed, len(s.table), s.planned_length) for s in executor.running] == [(8, 2, 9)]
    assert headroom.rows_without_block(executor) == []
    world.run()
    world.assert_answers("ends")


def test_request_that_only_a_draining_executor_could_hold_delays_no_other() -> None:
    world = World(Limits(classes=NEVER, policy=Policy(reservation="reserve", routing="room")))
    world.add_engine("large", blocks=16, slots=1)
    world.add_engine("little", blocks=4, slots=1)
    world.ask("runs", [5] * 20, 20)
    world.ask("large", [6] * 20, 20)
    world.handle(PeerDraining("executor", "large"))
    world.ask("small", [7], 3)
    assert [s.request.tokenized.request for s in world.scheduler.state.executors["little"].running] == [
        "small"
    ]


def test_new_incarnation_with_the_same_numbers_takes_the_waiting_request() -> None:
    """Admission remembers what it saw when the first had to wait; an executor that has done nothing yet
    looks the same before and after its restart."""
    world = World(Limits(classes=NEVER))
    world.add_engine("e1")
    world.add_engine("e2")
    world.handle(PeerDraining("executor", "e1"))
    world.ask("a", [5], 3)
    world.crash("e2")
    world.handle(Ticked())
    world.add_engine("e1", epoch=2)
    world.run()
    world.assert_answers("a")


def three_at_once(policy: Policy) -> tuple[World, int, int]:
    """Three prompts of 12 tokens that want 5 blocks each of 12: the most pauses of one, and the most blocks
    that admission kept free beyond what the next step lacked."""
    world = World(Limits(classes=NEVER, policy=policy))
    world.add_engine(blocks=12, slots=3)
    state, most, spare = world.scheduler.state, 0, 0
    (executor,) = state.executors.values()
    executor.headroom_pm = 1_000
    asked = ("a", "b", "c")
    for number, name in enumerate(asked):
        world.ask(name, [number + 5] * 12, 8)
    while world.deliver():
        most = max([most, *(s.turn.preemptions for s in state.sequences.values())])
        spare = max(spare, headroom_blocks(state, executor) - len(headroom.rows_without_block(executor)))
        assert policy.reservation == "on_demand" or not any(
            s.turn.pinned or s.turn.protected_until_us for s in state.sequences.values()
        )
        executor.pool.check()
    for name in asked:
        world.assert_answers(name)
    world.assert_idle()
    return world, most, spare


def test_greedy_admission_keeps_nothing_free_and_spares_no_sequence() -> None:
    _, pauses_most, spare = three_at_once(Policy(reservation="on_demand", tier=f"{OURS}recompute"))
    assert (pauses_most, spare > 0) == (0, True)
    _, pauses_most, spare = three_at_once(Policy(reservation=f"{OURS}greedy", tier=f"{OURS}recompute"))
    assert (pauses_most > 0, spare) == (True, 0)


def test_admission_by_the_chunk_pauses_within_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policies, "CHUNK_TOKENS", 4)
    _, pauses_most, spare = three_at_once(Policy(reservation=f"{OURS}by_chunk", tier=f"{OURS}recompute"))
    assert (pauses_most > 0, spare) == (True, 0)


@pytest.mark.parametrize(("tier", "again"), [(f"{OURS}recompute", False), (f"{OURS}forget", True)])
def test_blocks_of_a_paused_sequence_are_forgotten_under_the_forget_policy(tier: str, again: bool) -> None:
    world, _, _ = three_at_once(Policy(reservation=f"{OURS}greedy", tier=tier))
    hits = [
        dict(decision.numbers)["hit_tokens"]
        for trace in world.scheduler.state.ended.by_key.values()
        for choice in trace.facts.choices
        if choice.close is not None
        for decision in choice.close.decisions
        if decision.what == "resume"
    ]
    assert hits
    assert all(tokens == 0 for tokens in hits) is again


@pytest.mark.parametrize("kv", [f"{OURS}greedy", "on_demand"])
def test_no_sequence_starts_on_a_place_that_a_row_of_the_next_step_needs(
    kv: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, found = admission._start, list[int]()

    def watched(state: State, offer: admission.Offer, group: SequenceGroup) -> None:
        pool, short = offer.executor.pool, headroom.rows_without_block(offer.executor)
        start(state, offer, group)
        assert len(short) <= pool.unreserved_blocks
        found.append(len(short))

    monkeypatch.setattr(admission, "_start", watched)
    world = World(Limits(classes=NEVER, policy=Policy(reservation=kv, tier=f"{OURS}recompute")))
    world.add_engine(blocks=24, slots=8)
    (executor,) = world.scheduler.state.executors.values()
    for number in range(12):
        world.ask(f"r{number}", [number + 5] * (5 + number % 4), 12 + number % 5)
    executor.headroom_pm = 0
    while world.deliver():
        executor.headroom_pm = 0
    for number in range(12):
        world.assert_answers(f"r{number}")
    assert len(found) > 12, "no client came back"
    assert any(found), "no row needed a place when another started"


class EndlessError(Exception):
    """Within one event one sequence is paused again and again."""


def count_pauses(monkeypatch: pytest.MonkeyPatch, world: World) -> Counter[tuple[int, int]]:
    """Count the pauses of each sequence within each event, from now on."""
    pause, counts = preemption.preempt, Counter[tuple[int, int]]()

    def counted(
        state: State, executor: Executor, victim: Sequence, why: str, candidates: list[Sequence]
    ) -> None:
        counts[world.events, victim.seq] += 1
        if max(counts.values()) > 10:
            raise EndlessError
        pause(state, executor, victim, why, candidates)

    monkeypatch.setattr(preemption, "preempt", counted)
    return counts


@pytest.mark.parametrize("kv", KV)
@pytest.mark.parametrize("overlap", ["single", "run_ahead"])
def test_paused_sequence_does_not_take_its_place_back_from_the_one_it_was_paused_for(
    kv: str, overlap: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of its tenant runs then: so it came first, was paused again for the same one, and so on."""
    world = World(Limits(classes=NEVER, overlap=overlap, policy=Policy(reservation=kv)))
    counts = count_pauses(monkeypatch, world)
    world.add_engine(slots=2, blocks=64)
    world.ask("c1", [4] * 4, 56, tenant="c", slo_class="interactive")
    world.ask("b", [5] * 4, 40, tenant="b")
    for _ in range(4):
        world.deliver()
    world.ask("c2", [6] * 4, 10, tenant="c", slo_class="interactive")
    for _ in range(14):
        world.deliver()
    assert len(world.readers_of("c2")[0].tokens) == 10
    assert sum(counts.values()) == 1
    world.run()
    for name in ("c1", "b", "c2"):
        world.assert_answers(name)


def any_history(world: World, dice: random.Random) -> list[str]:
    """Requests of three tenants and all classes among results; then results until nothing comes."""
    for i in range(dice.randint(1, 2)):
        world.add_engine(f"e{i}", slots=dice.randint(1, 4), blocks=dice.randint(12, 30))
    for i in range(dice.randint(4, 20)):
        prompt = [dice.randrange(5, 900) for _ in range(dice.choice([1, 4, 9, 20]))]
        world.ask(
            f"r{i}", prompt, dice.randint(1, 24), tenant=dice.choice("aabc"), n=dice.choice((1, 1, 2)),
            slo_class=dice.choice(requests.CLASS_NAMES),
        )  # fmt: skip
        for _ in range(dice.randint(0, 3)):
            world.deliver(dice.choice(list(world.engines)))
    world.run()
    return list(world.accepted)


@pytest.mark.parametrize("any_order", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_no_sequence_is_paused_twice_within_one_event(
    seed: int, any_order: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even where the queue has no order at all."""
    dice = random.Random(seed)

    def any_group(waiting: WaitingQueue, model: str, running: object = None) -> SequenceGroup | None:
        groups = [group for group in waiting if not group.parked]
        return dice.choice(groups) if groups else None

    limits = Limits(
        classes=NEVER, window=dice.randint(1, 3), step_tokens=dice.choice((4, 16, 64)),
        overlap=dice.choice(("single", "run_ahead", "two_batch")),
        policy=Policy(reservation=KV[seed % len(KV)]),
    )  # fmt: skip
    world = World(limits)
    if any_order:
        monkeypatch.setattr(WaitingQueue, "first", any_group)
    counts = count_pauses(monkeypatch, world)
    asked = any_history(world, dice)
    assert max(counts.values(), default=1) == 1
    for name in asked:
        world.assert_answers(name)
    world.assert_idle()


def paused(world: World) -> dict[str, int]:
    """Pauses so far of the present sequences."""
    sequences = world.scheduler.state.sequences.values()
    return {s.request.tokenized.request: s.turn.preemptions for s in sequences if s.turn.preemptions}


def test_one_place_is_taken_on_one_executor() -> None:
    """Not on each, while the first is on its way."""
    world = World(Limits(classes=NEVER, window=2))
    for i in range(4):
        world.add_engine(f"e{i}", slots=2, blocks=64)
    for slo_class in ("batch", "interactive"):
        for i in range(4):
            world.ask(f"{slo_class}{i}", [7 + i] * 4, 40, slo_class=slo_class)
    world.ask("new", [99] * 4, 4, slo_class="interactive")
    assert sum(paused(world).values()) == 1
    for _ in range(5):
        for name in world.engines:
            world.deliver(name)
    assert world.readers_of("new")[0].tokens
    assert sum(paused(world).values()) == 1
    world.run()
    for name in world.accepted:
        world.assert_answers(name)


def test_a_newcomer_takes_one_place_on_one_executor() -> None:
    world = World(Limits(classes=NEVER, window=2))
    for i in range(4):
        world.add_engine(f"e{i}", slots=2, blocks=64)
    for i in range(12):
        world.ask(f"a{i}", [7 + i] * 4, 40, tenant="a")
    world.ask("new", [99] * 4, 4, tenant="b")
    assert sum(paused(world).values()) == 1
    world.run()
    for name in world.accepted:
        world.assert_answers(name)


def test_group_with_room_on_its_way_elsewhere_takes_no_place() -> None:
    """The second executor has the place as soon as its steps are back; on the first it would be taken from
    one of class batch."""
    world = World(Limits(classes=NEVER, window=2))
    for i in range(2):
        world.add_engine(f"e{i}", slots=1, blocks=64)
    world.ask("batch", [7] * 4, 40, slo_class="batch")
    world.ask("ends", [8] * 4, 40, slo_class="batch")
    world.handle(Arrived("client", Cancel(tenant="public", request="ends")))
    world.ask("new", [99] * 4, 4, slo_class="interactive")
    assert len(world.scheduler.state.waiting) == 1, "its slot is free already"
    assert paused(world) == {}
    world.run()
    for name in ("batch", "new"):
        world.assert_answers(name)


def test_no_sequence_is_paused_for_blocks_that_would_not_come_free() -> None:
    """All of one prefix, which one of a higher class holds, too: what the others hold alone is too little."""
    world = World(Limits(classes=NEVER, window=1))
    world.add_engine(slots=8, blocks=30, max_context=100)
    prefix = list(range(100, 148))  # 12 blocks
    world.ask("first", [*prefix, 5], 50, slo_class="interactive")
    for _ in range(3):
        world.deliver()
    for i in range(4):
        world.ask(f"s{i}", [*prefix, 10 + i], 12)
    for _ in range(4):
        world.deliver()
    world.ask("large", [9] * 80, 5, slo_class="interactive")  # 21 blocks, and the first keeps 14
    for _ in range(3):
        world.deliver()
    assert paused(world) == {}
    world.run()
    for name in world.accepted:
        world.assert_answers(name)


def newcomers(world: World, until: str, prompt: int = 4, tokens: int = 3) -> list[int]:
    """One request of tenant b after the other until one of tenant a has its answer: the steps that each of
    them waited for its first token."""
    waits: list[int] = []
    while world.readers_of(until)[0].closed is None:
        name = f"b{len(waits)}"
        world.ask(name, [99, *range(len(waits) + 5, len(waits) + 5 + prompt)], tokens, tenant="b")
        steps = 0
        while world.readers_of(name)[0].closed is None:
            steps += not world.readers_of(name)[0].tokens
            assert world.deliver(), "nothing runs"
        waits.append(steps)
        for _ in range(3):
            world.deliver()
        assert len(waits) < 400, f"{until} never ends"
    return waits


@pytest.mark.parametrize("kv", ["on_demand", f"{OURS}greedy"])
def test_a_newcomer_gets_a_place_however_often_it_comes(kv: str) -> None:
    """Pauses for a tenant of which nothing runs pin no sequence that goes on in between."""
    world = World(Limits(classes=NEVER, window=2, policy=Policy(reservation=kv)))
    world.add_engine(slots=4, blocks=4_000, max_context=800)
    for i in range(8):
        world.ask(f"a{i}", [7 + i] * 4, 300, tenant="a")
    waits = newcomers(world, "a3")
    assert len(waits) > 20
    assert max(waits) <= 5
    world.run()
    for name in world.accepted:
        world.assert_answers(name)
    world.assert_idle()


@pytest.mark.parametrize("tier", ["tiered", f"{OURS}forget"])
def test_sequence_paused_for_newcomers_again_and_again_still_ends(tier: str) -> None:
    """It has more than an equal part of the blocks, and computes four tokens a step: with `forget` it is
    paused before it is through with what it has lost, and after three times for nothing it stays."""
    world = World(Limits(classes=NEVER, window=1, step_tokens=4, policy=Policy(tier=tier)))
    world.add_engine(slots=1, blocks=30, max_context=120, max_step_tokens=8)
    world.ask("long", [7] * 60, 30, tenant="a")
    for _ in range(16):
        world.deliver()
    assert newcomers(world, "long", prompt=12)[:3] == [5, 5, 5]
    world.run()
    for name in world.accepted:
        world.assert_answers(name)
    world.assert_idle()


def test_sequences_that_had_their_turn_give_way_to_newcomers_first() -> None:
    """A paused sequence runs for as long as it had waited before it is paused again: so each of them goes on,
    where the latest would be paused each time."""
    world = World(Limits(classes=NEVER, window=1))
    world.add_engine(slots=3, blocks=4_000, max_context=800)
    for i in range(3):
        world.ask(f"a{i}", [7 + i] * 4, 700, tenant="a")
    for _ in range(4):
        world.deliver()
    for i in range(9):
        world.ask(f"b{i}", [99, i], 6, tenant="b")
        while world.readers_of(f"b{i}")[0].closed is None:
            assert world.deliver()
        world.deliver()
    by_name = {s.request.tokenized.request: s for s in world.scheduler.state.sequences.values()}
    assert [by_name[f"a{i}"].turn.preemptions for i in range(3)] == [1, 4, 4]
    assert [s.turn.preemptions - s.turn.ceded for s in by_name.values()] == [0, 0, 0]


def test_a_pause_within_its_turn_counts() -> None:
    """The only one that can be paused, and it never runs for as long as it waited: then it stays."""
    world = World(Limits(classes=NEVER, window=1))
    world.add_engine(slots=1, blocks=30, max_context=120)
    world.ask("large", [7] * 60, 40, tenant="a")
    for _ in range(3):
        world.deliver()
    newcomers(world, "large", tokens=6)
    close = world.readers_of("large")[0].closed
    assert close is not None
    assert sum(d.what == "preempt" for d in close.decisions) == 1 + PIN_AFTER_PREEMPTIONS
