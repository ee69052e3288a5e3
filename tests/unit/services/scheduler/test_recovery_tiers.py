"""The scheduler's use of executors' reports about arenas and copies: which tier it uses, what is over."""

from __future__ import annotations

from support.scheduler.fake_tier import FakeTier
from support.scheduler.world import World

from services.scheduler.kv_tiers import store
from services.scheduler.state.requests import Arrived, OffloadLost, OffloadReady, PeerLost, PeerReady
from shared.messages import ArenaReleased

PROMPT = list(range(3, 24))  # five blocks of four, and one token


def fresh() -> World:
    world = World(now_us=1_000)
    world.add_engine()
    world.add_tier(FakeTier(capacity=64))
    return world


def maps(world: World, generation: int) -> None:
    """A beat of the executor."""
    world.handle(PeerReady("executor", "e1", 1, generation))


def serve(world: World, request: str, *prompt: int) -> None:
    """One request, and the quiet after it in which its blocks are stored."""
    world.ask(request, list(prompt) or PROMPT, 2)
    world.run()
    world.tick(store.IDLE_US)
    world.run()
    world.assert_answers(request)


def test_tier_is_not_used_before_the_executor_maps_its_arena() -> None:
    world = fresh()
    world.engines["e1"].arena = None
    maps(world, 0)
    serve(world, "first")
    assert world.tier.counts == {}
    world.map_arena()
    maps(world, world.tier.arena.generation)
    serve(world, "second")
    assert len(world.tier.l1) == 5
    assert world.scheduler.state.counters.tier_backoffs == 0


def test_old_arena_is_waited_out_after_a_restart_of_the_tier() -> None:
    world = fresh()
    maps(world, world.tier.arena.generation)
    serve(world, "first")
    old = dict(world.tier.counts)
    world.restart_tier(mapped=False)
    serve(world, "second", *range(100, 121))
    assert world.tier.counts == old, "it is asked, and its arena cannot be copied to"
    world.map_arena()
    maps(world, world.tier.arena.generation)
    serve(world, "third")
    assert world.tier.counts["KvCommit"] > old["KvCommit"]
    assert world.scheduler.state.counters.tier_backoffs == 0


def test_executor_that_does_not_report_its_arena_is_tried() -> None:
    world = fresh()
    maps(world, 0)
    world.handle(PeerLost("executor", "e1"))
    world.add_engine(epoch=2)
    world.map_arena()
    serve(world, "first")
    assert len(world.tier.l1) == 5


def owner(world: World) -> str:
    tier = world.scheduler.state.tiers.by_host.get("h")
    return "" if tier is None else tier.actor


def test_tier_whose_clock_went_back_serves_when_the_one_before_is_missed() -> None:
    """Its first beat comes before that, and no later one is news."""
    world = fresh()
    epoch = world.tier.arena.generation
    world.handle(OffloadReady("k2", epoch - 3_600_000_000, "h", 7, ("l1",)))
    assert owner(world) == "k1"
    world.handle(OffloadLost("k1"))
    assert owner(world) == "k2"
    assert world.scheduler.state.executors["e1"].pool.write_back
    world.handle(OffloadLost("k2"))
    assert (owner(world), world.scheduler.state.tiers.standby) == ("", {})


def test_latest_living_tier_of_several_on_a_host_serves() -> None:
    world = fresh()
    epoch = world.tier.arena.generation
    for at, name in ((1, "k2"), (3, "k4"), (2, "k3")):
        world.handle(OffloadReady(name, epoch + at, "h", at, ("l1",)))
    world.handle(OffloadReady("x", epoch + 9, "elsewhere", 9, ("l1",)))
    order = [owner(world)]
    for gone in ("k2", "k4", "k3", "k1"):
        world.handle(OffloadLost(gone))
        order.append(owner(world))
    assert order == ["k4", "k4", "k3", "k1", ""]


def test_an_arena_that_is_released_is_reported_to_its_owner_alone() -> None:
    world = fresh()
    generation = world.tier.arena.generation
    for source, executor, of in (
        ("executor.e1", "e1", generation),
        ("executor.e1", "e1", generation + 1),  # of a kv_offload that is gone
        ("executor.e2", "e1", generation),  # reports for another
    ):
        world.handle(Arrived(source, ArenaReleased(executor=executor, arena_generation=of)))
    assert world.tier.counts == {"ArenaReleased": 1}
