"""The queue against plain lists: its order, ageing, units set aside, its counters."""

from __future__ import annotations

import random
from array import array
from dataclasses import dataclass, field

import pytest

from services.scheduler.state import waiting_queue
from services.scheduler.state.policies import Policy
from services.scheduler.state.requests import Request, Sequence
from services.scheduler.state.waiting_queue import SequenceGroup, WaitingQueue
from shared.messages import Tokenized, ints

AGE_US = (0, 500, 900)
MODELS = ("m", "n")


def make_unit(number: int, tenant: str, level: int, now_us: int, **more: int) -> SequenceGroup:
    """A unit as intake or a pause makes it."""
    model, tokens = MODELS[more.get("model", 0)], more.get("tokens", 3)
    asked = Tokenized(
        request=f"r{number}", attempt=1, tenant=tenant, model=model, inbox="i", timeout_us=1, max_tokens=1,
        tokens=ints([5] * tokens),
    )  # fmt: skip
    request = Request(asked, "", "t", more.get("arrival_us", now_us), 10**9, level)
    sequences = [
        Sequence(
            seq=number + choice,
            request=request,
            choice=choice,
            seed=0,
            tokens=array("i", [5] * tokens),
            prompt_tokens=tokens,
            max_length=tokens + 1,
            stop_ids=frozenset(),
        )
        for choice in range(more.get("n", 1))
    ]
    group = SequenceGroup(request, sequences, number, resumes=bool(more.get("resumes", 0)))
    for sequence in sequences:
        sequence.group = group.number
    return group


@dataclass
class Plain:
    """The queue as the documents describe it, with a sort at each question."""

    rank: str
    waiting: WaitingQueue
    units: list[tuple[SequenceGroup, int, int]] = field(
        default_factory=list
    )  # unit, level it counts as, since when
    parked: list[SequenceGroup] = field(default_factory=list)
    ages: tuple[int, ...] = AGE_US

    def age(self, now_us: int) -> None:
        aged = []
        for group, level, since_us in self.units:
            moves = self.ages[level] and now_us - since_us >= self.ages[level]
            aged.append((group, level - 1, now_us) if moves else (group, level, since_us))
        self.units = aged

    def first(self, model: str, running: set[str] | None = None) -> SequenceGroup | None:
        here = [(group, level) for group, level, _ in self.units if group.request.tokenized.model == model]
        head, head_level = min(here, key=lambda pair: self._key(*pair), default=(None, 0))
        comes = [(u, at) for u, at in here if running is not None and at < 2 and u.client[0] not in running]
        if comes:
            level = min(at for _, at in comes)
            here = [(u, at) for u, at in comes if at == level]
            fresh = [pair for pair in here if not pair[0].resumes]
            paused = sorted((u.queued_us, u.request.arrival_us, u.number, u) for u, _ in here if u.resumes)
            first = min(fresh, key=lambda pair: self._key(*pair), default=(None, 0))[0]
            if paused and (first is None or first.queued_us > paused[0][0]):
                gave_way = head is not None and head_level < level and head.queued_us <= paused[0][0]
                return head if gave_way else paused[0][3]
            return first
        return head

    def _key(self, group: SequenceGroup, level: int) -> tuple[int, ...]:
        served = self.waiting.served.get((group.request.tokenized.tenant, level))
        rank = (served,) if self.rank == "vtc" and not group.resumes else ()
        return level, not group.resumes, *rank, group.request.arrival_us, group.number

    def ahead(self, model: str, client: tuple[str, int]) -> tuple[int, int]:
        """Units and tokens: all of the higher classes, and of each client of this one as much as `client` has
        itself."""
        first: list[int] = []
        queued: dict[str, list[int]] = {}
        for group, level, _ in self.units:
            if group.request.tokenized.model == model and level <= client[1]:
                tokens = len(group.sequences[0].tokens)
                if level < client[1] or group.resumes:
                    first.append(tokens)
                else:
                    queued.setdefault(group.request.tokenized.tenant, []).append(tokens)
        own = queued.get(client[0], [])
        in_turn = self.rank == "vtc"
        groups = [min(len(of), len(own)) if in_turn else len(of) for of in queued.values()]
        tokens_of = [min(sum(of), sum(own)) if in_turn else sum(of) for of in queued.values()]
        return len(first) + sum(groups), sum(first) + sum(tokens_of)

    def remove(self, group: SequenceGroup) -> None:
        self.units = [entry for entry in self.units if entry[0] is not group]
        self.parked = [other for other in self.parked if other is not group]


def compare(waiting: WaitingQueue, plain: Plain) -> None:
    all_groups = [group for group, _, _ in plain.units] + plain.parked
    assert {group.number for group in waiting} == {group.number for group in all_groups}
    assert len(waiting) == len(all_groups)
    assert waiting.queued_tokens == sum(len(s.tokens) for group in all_groups for s in group.sequences)
    held: dict[str, list[int]] = {}
    for group in all_groups:
        groups, tokens = held.setdefault(group.client[0], [0, 0])
        held[group.client[0]] = [groups + 1, tokens + sum(len(s.tokens) for s in group.sequences)]
    assert {tenant: [h.groups, h.tokens] for tenant, h in waiting.tenants.items()} == held
    for model in MODELS:
        assert waiting.first(model) is plain.first(model)
        for running in (set(), {"a"}, {"a", "b"}, set("abcd")):
            assert waiting.first(model, running) is plain.first(model, running)
        for client in (("a", 0), ("b", 1), ("c", 2), ("unseen", 1)):
            assert waiting.ahead(model, client) == plain.ahead(model, client)


@pytest.mark.parametrize("rank", ["vtc", "fcfs"])
@pytest.mark.parametrize("seed", range(4))
def test_the_order_is_that_of_a_sort(rank: str, seed: int) -> None:
    dice, now_us = random.Random(seed), 0
    ages = AGE_US if seed % 2 else (0, 0, 0)  # none where units are set aside: that begins anew or does not
    waiting = WaitingQueue(Policy(order=rank), ages)
    plain = Plain(rank, waiting, ages=ages)
    for number in range(1, 1_500, 3):
        now_us += dice.choice((0, 1, 40))
        waiting.promote_aged(now_us)
        plain.age(now_us)
        what = dice.random()
        all_groups = [group for group, _, _ in plain.units] + plain.parked
        if what < 0.45 or not all_groups:
            resumes = dice.random() < 0.15
            group = make_unit(
                number, dice.choice("abcd"), dice.randrange(3), now_us, tokens=dice.randint(1, 9),
                n=1 if resumes else dice.randint(1, 3), resumes=resumes, model=dice.random() < 0.2,
                arrival_us=now_us - dice.randint(0, 900) * resumes,
            )  # fmt: skip
            waiting.add(group, now_us)
            plain.units.append((group, group.request.level, now_us))
        elif what < 0.75 and plain.units:  # the first is admitted, and its client served
            first = waiting.first(dice.choice(MODELS))
            if first is not None:
                waiting.remove(first)
                plain.remove(first)
                waiting.served.charge_input(first.client, dice.randint(0, 50))
        elif what < 0.78:
            group = dice.choice(all_groups)
            if len(group.sequences) > 1 and not group.parked:  # of wide ones some choices start
                names = [s.seq for s in group.sequences]
                begins = waiting.split(group, dice.randrange(1, len(names)))
                assert [s.seq for s in (*begins.sequences, *group.sequences)] == names
                assert (group.number, {s.group for s in group.sequences}) == (
                    group.sequences[0].seq,
                    {group.number},
                )
        elif what < 0.85:
            group = dice.choice(all_groups)
            if len(group.sequences) == 1:
                plain.remove(group)
            waiting.drop(group.sequences[0])
        elif what < 0.9:
            for tenant in "abcd":
                waiting.served.charge_output((tenant, dice.randrange(3)), dice.randint(0, 40))
        elif what < 0.96 and plain.units and not any(ages):
            group, _, _ = dice.choice(plain.units)
            waiting.park(group)
            plain.remove(group)
            plain.parked.append(group)
        else:
            waiting.unpark(now_us)
            back = [(group, group.request.level, now_us) for group in plain.parked]
            plain.units, plain.parked = plain.units + back, []
        compare(waiting, plain)


def test_candidates_after_the_first_group_are_found() -> None:
    waiting = WaitingQueue(Policy(), AGE_US)
    for number, (tenant, level) in enumerate([("a", 1), ("a", 1), ("b", 1), ("a", 0), ("b", 1)], 1):
        waiting.add(make_unit(number, tenant, level, number), number)
    waiting.add(make_unit(6, "c", 1, 6, resumes=1), 6)
    first = waiting.first("m")
    assert first is not None
    assert [group.number for group in (first, *waiting.candidates_after("m", first, any_group))] == [
        4,
        6,
        1,
        3,
        2,
        5,
    ]


def test_only_so_many_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting_queue, "MAX_CANDIDATES", 3)
    waiting = WaitingQueue(Policy(), AGE_US)
    for number in range(1, 10):
        waiting.add(make_unit(number, "abc"[number % 3], number % 2, number), number)
    first = waiting.first("m")
    assert first is not None
    assert len(waiting.candidates_after("m", first, any_group)) == 3
    assert [
        group.number for group in waiting.candidates_after("m", first, lambda group: group.number == 9)
    ] == [9]


def any_group(group: SequenceGroup) -> bool:
    return True


def test_a_unit_that_waits_rises_one_class_at_a_time() -> None:
    waiting = WaitingQueue(Policy(), AGE_US)
    group = make_unit(1, "a", 2, 0)
    waiting.add(group, 0)
    levels = []
    for now_us in (899, 900, 1_399, 1_400, 10_000):
        waiting.promote_aged(now_us)
        assert group.queue is not None
        levels.append((group.queue.level, group.client))
    assert levels == [(2, ("a", 2)), (1, ("a", 1)), (1, ("a", 1)), (0, ("a", 0)), (0, ("a", 0))]
    assert group.request.level == 2


def test_rising_client_does_not_spoil_the_counters_of_its_own_class() -> None:
    """Counters of two classes do not depend on each other."""
    waiting = WaitingQueue(Policy(), AGE_US)
    waiting.add(make_unit(1, "busy", 0, 0), 0)
    waiting.served.charge_input(("busy", 0), 1_000_000)
    waiting.add(make_unit(2, "old", 1, 0), 0)
    waiting.add(make_unit(3, "other", 1, 400), 400)
    waiting.promote_aged(500)
    assert waiting.served.get(("old", 0)) == 1_000_000
    assert waiting.served.get(("old", 1)) == 0
    waiting.add(make_unit(4, "new", 1, 600), 600)
    assert waiting.served.get(("new", 1)) == 0


def test_paused_group_sets_no_counter() -> None:
    waiting = WaitingQueue(Policy(), AGE_US)
    waiting.served.charge_input(("heavy", 0), 1_000)
    waiting.add(make_unit(1, "heavy", 0, 0, resumes=1), 0)
    waiting.add(make_unit(2, "light", 0, 1), 1)
    assert waiting.served.get(("light", 0)) == 0


def test_client_that_comes_to_an_empty_queue_gets_no_credit_either() -> None:
    """The last to leave it was served: Sheng et al., algorithm 2, line 9."""
    waiting = WaitingQueue(Policy(), AGE_US)
    group = make_unit(1, "heavy", 0, 0)
    waiting.add(group, 0)
    waiting.remove(group)
    waiting.served.charge_input(("heavy", 0), 1_000)
    waiting.add(make_unit(2, "light", 0, 1), 1)
    assert waiting.served.get(("light", 0)) == 1_000


def test_clients_that_come_and_go_leave_nothing() -> None:
    waiting = WaitingQueue(Policy(), AGE_US)
    waiting.add(make_unit(1, "first", 0, 0), 0)
    for number in range(2, 2_000):
        group = make_unit(number, f"c{number % 50}", 0, number)
        waiting.add(group, number)
        waiting.remove(group)
    (queue,) = waiting.queues.values()
    assert len(queue.heads) < 200
    first = waiting.first("m")
    assert first is not None
    assert first.number == 1


def test_paused_group_comes_after_a_higher_class_group_that_waited_before() -> None:
    """Nothing runs of its tenant, so it would come first, and be paused again for the same one."""
    waiting = WaitingQueue(Policy(), AGE_US)
    waiting.add(make_unit(1, "c", 0, 10), 10)
    waiting.add(make_unit(2, "b", 1, 5, resumes=1), 20)
    waiting.add(make_unit(3, "d", 1, 30), 30)
    found = []
    while (group := waiting.first("m", {"c"})) is not None:
        found.append(group.number)
        waiting.remove(group)
    assert found == [1, 2, 3]


def test_paused_group_comes_before_higher_class_groups_that_came_later() -> None:
    waiting = WaitingQueue(Policy(), AGE_US)
    waiting.add(make_unit(1, "c", 0, 30), 30)
    waiting.add(make_unit(2, "b", 1, 5, resumes=1), 20)
    first = waiting.first("m", {"c"})
    assert first is not None
    assert first.number == 2


class Looked(set[str]):
    """Counts how often a client is looked up."""

    times = 0

    def __contains__(self, tenant: object) -> bool:
        self.times += 1
        return super().__contains__(tenant)


def test_the_first_of_a_tenant_that_does_not_run_is_found_however_many_wait_or_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those that run would come first by their counters. Neither they nor the others are looked through: a
    rank is asked for as often, and whether a client runs once of each that does."""
    of, ranked = waiting_queue.VirtualTokenCounter.get, list[waiting_queue.Client]()

    def counted(served: waiting_queue.VirtualTokenCounter, client: waiting_queue.Client) -> int:
        ranked.append(client)
        return of(served, client)

    monkeypatch.setattr(waiting_queue.VirtualTokenCounter, "get", counted)
    looks, ranks = [], []
    for idle, busy in ((10, 4), (2_000, 4), (2_000, 200)):
        waiting = WaitingQueue(Policy(), AGE_US)
        names = [*(f"t{i}" for i in range(idle)), *(f"r{i}" for i in range(busy))]
        for number, tenant in enumerate(names, 1):
            waiting.add(make_unit(number, tenant, 1, number), number)
        for tenant in names[:idle]:
            waiting.served.charge_input((tenant, 1), 10**6)
        running = Looked(names[idle:])
        waiting.first("m", running)  # entries of the heaps are lower bounds: this brings them up to date
        ranked.clear()
        running.times = 0
        first = waiting.first("m", running)
        assert first is not None
        assert first.client == ("t0", 1)
        looks.append(running.times - busy)
        ranks.append(len(ranked))
        running.clear()
        first = waiting.first("m", running)
        assert first is not None
        assert first.client == ("r0", 1), "nothing of it runs any more"
    assert len(set(looks)) == len(set(ranks)) == 1
