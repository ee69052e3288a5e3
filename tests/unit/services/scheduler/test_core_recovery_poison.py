"""A request that its executors die of ends after MOST_DEATHS, and no other request with it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.scheduler.world import World, any_limits

from services.scheduler.admission import MAX_UNPROVEN, MOST_DEATHS, PROVEN_TOKENS, is_on_trial
from services.scheduler.recovery import MAX_ACQUITTALS
from services.scheduler.state.requests import DrainRequested, PeerDraining, PeerLost, PeerReady, StreamLost
from services.scheduler.state.state import Limits
from shared.messages import StepPlan

POISON = 999


class Deadly:
    """Engines that die of a request: of a step that computes its token at `position`."""

    def __init__(self, limits: Limits, position: int, slots: int = 8) -> None:
        self.world = World(limits)
        self.position = position
        self.slots = slots
        self.deaths = 0
        self._seen = 0
        self._engine()

    def _engine(self) -> None:
        self.name = f"e{self.deaths}"
        self.world.add_engine(self.name, blocks=400, slots=self.slots, max_context=200)

    def run(self) -> None:
        """Until nothing moves any more; `executor_deaths` counts the engines that have died."""
        for _ in range(5_000):
            fresh, self._seen = self.world.plans[self._seen :], len(self.world.plans)
            if any(self._kills(plan) for plan in fresh):
                self.deaths += 1
                assert self.deaths < 20, "it is tried for ever"
                self.world.crash(self.name)
                self._engine()
            elif not self.world.deliver(self.name):
                return
        raise AssertionError("the world does not come to rest")

    def _kills(self, plan: StepPlan) -> bool:
        slots = self.world.engines[self.name].slots
        deadly = {number for number, slot in slots.items() if slot.opened.tokens[0] == POISON}
        rows = zip(plan.slots, plan.starts, plan.counts, strict=True)
        return any(slot in deadly and start <= self.position < start + count for slot, start, count in rows)


@pytest.mark.parametrize("position", [0, 5, 11, 30])
@pytest.mark.parametrize("n", [1, 3])
def test_a_poison_ends_after_four_deaths(position: int, n: int) -> None:
    fleet = Deadly(Limits(), position)
    fleet.world.ask("poison", [POISON] * 6, 40, n=n)
    fleet.run()
    assert fleet.deaths == MOST_DEATHS == 4
    closes = [reader.closed for reader in fleet.world.readers_of("poison")]
    why = "4 executors have died while they computed this request, e3 last: it is not tried again; "
    assert [(close.code, close.message) for close in closes if close] == [(500, f"{why}see their logs")] * n
    fleet.world.assert_idle()


@given(st.data())
def test_bystanders_get_their_answers_beside_a_poison_request(data: st.DataObject) -> None:
    fleet = Deadly(any_limits(data), data.draw(st.integers(0, 30)), slots=data.draw(st.integers(1, 12)))
    before, after = data.draw(st.integers(0, 8)), data.draw(st.integers(0, 8))
    for i in range(before):
        fleet.world.ask(f"b{i}", [7] * 3 + [i], data.draw(st.integers(1, 40)))
    fleet.world.ask("poison", [POISON] * 6, 40)
    for i in range(after):
        fleet.world.ask(f"a{i}", [7] * 3 + [i], data.draw(st.integers(1, 40)))
    fleet.run()
    assert fleet.deaths == MOST_DEATHS
    assert [r.closed.code for r in fleet.world.readers_of("poison") if r.closed] == [500]
    for name in fleet.world.asked:
        if name != "poison":
            fleet.world.assert_answers(name)
    fleet.world.assert_idle()


def test_a_suspect_is_tried_alone_among_suspects_and_beside_few_others() -> None:
    fleet = Deadly(Limits(overlap="single"), position=30, slots=32)
    for i in range(12):
        fleet.world.ask(f"b{i}", [7] * 3 + [i], 60)
    fleet.world.ask("poison", [POISON] * 6, 60)
    most = {"trials": 0, "unproven": 0}

    def look(world: World) -> None:
        for executor in world.scheduler.state.executors.values():
            tried = {id(s.request): s.request for s in executor.running if is_on_trial(s.request)}
            most["trials"] = max(most["trials"], len(tried))
            if tried:
                others = [s for s in executor.running if id(s.request) not in tried]
                unproven = [s for s in others if len(s.tokens) <= s.opened_length + PROVEN_TOKENS]
                most["unproven"] = max(most["unproven"], len(unproven))

    fleet.world.checks.append(look)
    fleet.run()
    assert fleet.deaths == MOST_DEATHS
    assert most["trials"] == 1
    assert most["unproven"] <= MAX_UNPROVEN


def test_two_poisons_end_each_by_its_own_deaths() -> None:
    fleet = Deadly(Limits(), position=8)
    fleet.world.ask("p1", [POISON] * 6, 40)
    fleet.world.ask("by", [7] * 6, 40)
    fleet.world.ask("p2", [POISON] * 7, 40)
    fleet.run()
    assert fleet.deaths == 6  # two together, then each its own two
    codes = [r.closed.code for name in ("p1", "p2") for r in fleet.world.readers_of(name) if r.closed]
    assert codes == [500, 500]
    fleet.world.assert_answers("by")


def deaths_of(world: World) -> list[int]:
    return [request.executor_deaths for request in world.scheduler.state.requests.values()]


def test_planned_end_of_an_executor_is_not_counted_as_a_death() -> None:
    """An executor that gets SIGTERM, and one that starts over because messages were lost."""
    world = World()
    world.add_engine()
    world.ask("a", [5], 30)
    world.deliver()
    world.add_engine(epoch=2)
    world.handle(StreamLost("executor.e1"))
    world.add_engine(epoch=3)
    world.deliver()
    world.handle(PeerDraining("executor", "e1"))
    world.crash("e1")
    assert deaths_of(world) == [0]
    world.add_engine("e2")
    world.crash("e2")
    assert deaths_of(world) == [1]


def test_request_that_waits_while_an_executor_dies_is_no_suspect() -> None:
    world = World()
    world.add_engine(slots=1)
    world.ask("runs", [5], 9)
    world.ask("waits", [6], 9)
    world.handle(PeerLost("executor", "e1"))
    assert deaths_of(world) == [1, 0]
    world.handle(DrainRequested())


def silent(world: World, name: str, starts: int) -> None:
    """An executor counts as dead and comes back, as the same process if `starts` is before its hello."""
    world.handle(PeerLost("executor", name))
    world.handle(PeerReady("executor", name, starts))


def test_an_executor_that_was_only_silent_is_no_death() -> None:
    world = World()
    world.add_engine(epoch=10)
    world.ask("a", [5], 30)
    for silence in range(2, 7):
        world.deliver()
        silent(world, "e1", starts=9)
        assert deaths_of(world) == [0]
        world.add_engine(epoch=10 * silence)
    world.run()
    world.assert_answers("a")


def test_a_new_process_of_a_dead_executor_acquits_no_request() -> None:
    world = World()
    world.add_engine(epoch=10)
    world.ask("a", [5], 60)
    world.deliver()
    silent(world, "e1", starts=11)
    assert deaths_of(world) == [1]


def test_an_executor_that_is_ready_twice_acquits_once() -> None:
    world = World()
    world.add_engine(epoch=10)
    world.ask("a", [5], 60)
    world.crash("e1")
    world.add_engine("e2", epoch=20)
    silent(world, "e2", starts=9)
    world.handle(PeerReady("executor", "e2", 9))
    assert deaths_of(world) == [1]


def test_a_request_that_silences_executors_for_ever_is_ended() -> None:
    world = World()
    world.add_engine(epoch=10)
    world.ask("a", [5], 60)
    for silence in range(MAX_ACQUITTALS + MOST_DEATHS):
        assert not any(reader.closed for reader in world.readers_of("a"))
        silent(world, "e1", starts=9)
        world.add_engine(epoch=10 * (silence + 2))
    assert [reader.closed.code for reader in world.readers_of("a") if reader.closed] == [500]
