"""An executor whose cache is full of ended sequences' blocks, beside one that has room. It keeps such blocks
until they are needed, and a group that could start there is a need."""

from __future__ import annotations

from support.scheduler.fake_tier import FakeTier
from support.scheduler.known_costs import Known
from support.scheduler.world import World

from services.scheduler.state.reuse import Reused
from services.scheduler.state.state import Executor
from shared.step_model import StepModel

BLOCKS, BLOCK_TOKENS, ENDED, PROMPT = 32, 4, 7, 13
LONG = 24  # tokens of a prompt: more blocks than a full cache keeps free


def full_and_fresh() -> World:
    """e1 has no room but for a short prompt, and e2 has nothing. Nothing runs."""
    world = World()
    world.add_engine("e1", blocks=BLOCKS, block_tokens=BLOCK_TOKENS)
    world.add_tier(FakeTier(capacity=4 * BLOCKS))
    for number in range(ENDED):
        world.ask(f"ended{number}", [number + 3] * PROMPT, 4)
        world.run()
    world.add_engine("e2", epoch=2, blocks=BLOCKS, block_tokens=BLOCK_TOKENS)
    full = executor_of(world, "e1")
    assert full.pool.unreserved_blocks < LONG // BLOCK_TOKENS < full.pool.dirty_blocks
    return world


def executor_of(world: World, name: str) -> Executor:
    return world.scheduler.state.executors[name]


def asked(world: World, name: str, prompt: list[int], answer: int = 8) -> str:
    """Ask, and return where the request starts once the tier has answered."""
    world.ask(name, prompt, answer)
    (request,) = (r for r in world.scheduler.state.requests.values() if r.tokenized.request == name)
    (sequence,) = request.sequences
    while not sequence.executor:
        assert world.deliver_tier(), "it waits for more than the tier"
    return sequence.executor


def test_tenant_gets_its_share_of_the_executors() -> None:
    world = full_and_fresh()
    homes = [asked(world, f"r{number}", [number + 20] * LONG) for number in range(4)]
    assert homes == ["e1", "e2", "e1", "e2"]
    world.finish()


def test_group_gets_the_next_executor_where_the_blocks_are_copied_first() -> None:
    """Blocks that are likely to be used again are copied to L1; the group does not wait for that."""
    world = full_and_fresh()
    executor_of(world, "e1").cost_model = Known(StepModel(weights_us=300, token_ns=100_000), 700)
    world.scheduler.state.reuse.tenants["public"] = Reused(1, 1)
    assert asked(world, "first", [20] * LONG, 16) == "e2"
    for _ in range(6):
        world.deliver_tier()
        world.deliver_copy("e1")
    assert executor_of(world, "e1").pool.unreserved_blocks >= LONG // BLOCK_TOKENS
    assert asked(world, "second", [21] * LONG, 16) == "e1"
    counters = world.scheduler.state.counters
    assert counters.stored_blocks >= LONG // BLOCK_TOKENS - 4
    assert counters.dropped_blocks == 0
    world.finish()


def test_executor_keeps_its_blocks_while_another_is_the_better_one() -> None:
    world = full_and_fresh()
    busy = asked(world, "short", [20] * 4)
    assert busy == "e1", "if equal the first one, and it has room for this one"
    dirty = executor_of(world, "e1").pool.dirty_blocks
    assert asked(world, "long", [21] * LONG) == "e2"
    assert executor_of(world, "e1").pool.dirty_blocks == dirty
    assert executor_of(world, "e1").awaited_blocks == 0
    world.finish()


def test_a_prompt_finds_its_prefix_there() -> None:
    """Also the blocks that would be dropped first."""
    for number in (0, ENDED - 1):
        world = full_and_fresh()
        hits = world.scheduler.state.counters.prefix_hit_tokens
        assert asked(world, "again", [number + 3] * PROMPT + [30] * LONG) == "e1"
        assert world.scheduler.state.counters.prefix_hit_tokens - hits == 12
        world.finish()


def test_awaited_blocks_of_an_executor_end_with_the_next_start() -> None:
    world = full_and_fresh()
    full = executor_of(world, "e1")
    full.awaited_blocks = LONG // BLOCK_TOKENS
    assert asked(world, "r", [20] * LONG) == "e1"
    assert full.awaited_blocks == 0
    world.finish()
