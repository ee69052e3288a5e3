"""Which steps come in two halves: as the executor and the setting decide, and never decodes alone."""

from __future__ import annotations

import pytest
from support.scheduler.world import World

from services.scheduler.state.state import Limits


def decisions(comm: str, since_tokens: int) -> list[tuple[int, bool]]:
    """The steps of a prompt of 20 tokens in chunks of 8, and three decodes: tokens and decision of every
    step."""
    world = World(Limits(overlap="single", comm=comm))
    world.add_engine(max_step_tokens=8, two_stream_tokens=since_tokens)
    world.ask("a", list(range(10, 30)), 4)
    world.run()
    world.assert_answers("a")
    return [(sum(plan.counts), plan.two_stream) for plan in world.plans]


@pytest.mark.parametrize(
    ("comm", "since_tokens", "halved"),
    [
        ("auto", 8, [True, True, False]),
        ("auto", 4, [True, True, True]),
        ("auto", 9, [False, False, False]),
        ("auto", 0, [False, False, False]),  # one rank: no peer
        ("off", 4, [False, False, False]),
        ("two_stream", 1 << 30, [True, True, True]),
        ("two_stream", 0, [False, False, False]),
    ],
)
def test_chunks_come_in_micro_batches_from_the_split_threshold_on(
    comm: str, since_tokens: int, halved: list[bool]
) -> None:
    assert decisions(comm, since_tokens) == [
        *zip((8, 8, 4), halved, strict=True), (1, False), (1, False), (1, False)
    ]  # fmt: skip
