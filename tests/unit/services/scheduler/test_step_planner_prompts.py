"""Among prompts those that have begun go first; one that starts on cached blocks has not begun by that."""

from __future__ import annotations

from support.scheduler.world import World

from services.scheduler.state.state import Limits


def test_prompts_with_a_cached_prefix_do_not_overtake_one_without_for_ever() -> None:
    """Two blocks of prompt a step. Each step another request comes whose prefix is cached and that needs both
    blocks; the long prompt was there before all but the first of them."""
    world = World(Limits(overlap="single", step_tokens=8))
    world.add_engine(blocks=200, slots=8)
    cached = list(range(10, 26))
    world.ask("warm", [*cached, 1], 1)
    world.run()
    world.ask("h", [*cached, *range(100, 108)], 1)
    world.ask("long", list(range(200, 240)), 1)
    for i in range(40):
        world.ask(f"h{i}", [*cached, *range(300 + 8 * i, 308 + 8 * i)], 1)
        world.deliver()
        if world.readers_of("long")[0].tokens:
            break
    assert len(world.readers_of("long")[0].tokens) == 1
