"""The messages of a long request fit the wire, and delay no other."""

from __future__ import annotations

import pytest
from support.scheduler.world import World

from services.scheduler.state.state import Limits
from shared.codec import MAX_MESSAGE_BYTES, Assembler, Envelope, decode, encode_all
from shared.messages import Message, StepPlan


def travelled(message: Message) -> Message | None:
    """The message as its receiver gets it."""
    assembler, whole = Assembler(), None
    for data in encode_all(Envelope("scheduler.s", 1, 1, message)):
        assert whole is None
        assert len(data) <= MAX_MESSAGE_BYTES
        whole = assembler.add(decode(data).message)
    return whole


def test_the_table_of_a_long_prefix_hit_reaches_the_executor() -> None:
    world = World(Limits(step_tokens=20_000))
    world.add_engine(blocks=40_000, block_tokens=1, slots=2, max_step_tokens=20_000, max_context=20_000)
    prompt = [7] * 17_000
    world.ask("first", prompt, 2)
    world.run()
    world.ask("again", prompt, 2)
    world.run()
    longest = max(world.plans[-3:], key=lambda plan: len(plan.table_blocks))
    assert len(longest.table_blocks) * 4 > MAX_MESSAGE_BYTES
    assert travelled(longest) == longest
    world.assert_answers("again")


@pytest.mark.parametrize("window", [1, 2])
def test_a_long_table_does_not_wait_for_a_step_in_which_no_decode_grows(
    monkeypatch: pytest.MonkeyPatch, window: int
) -> None:
    monkeypatch.setattr("services.scheduler.step_planner.MAX_TABLE_ENTRIES", 8)
    world = World(Limits(window=window))
    world.add_engine(blocks=64, block_tokens=1, slots=3, max_context=40)
    world.ask("before", [7] * 21, 2)
    world.run()
    world.ask("decodes", [9], 30)  # takes a block each step
    world.deliver()
    world.ask("long", [7] * 20 + [5], 2)
    rows_before = len(world.plans)
    for _ in range(5):
        world.deliver()
    assert any(_has_chunk(plan, at_least=20) for plan in world.plans[rows_before:])
    world.run()
    for name in world.asked:
        world.assert_answers(name)


def _has_chunk(plan: StepPlan, at_least: int) -> bool:
    """Whether a row of the prompt that begins after so many cached tokens is in the plan."""
    chunks = zip(plan.starts, plan.from_device, strict=True)
    return any(not fed and start >= at_least for start, fed in chunks)
