"""Where halves begin to pay: measured on an engine whose steps take the times of the test."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from support.executor.engine_pair import small_engine

from services.executor.engine import Pending, StepOutput
from services.executor.parallel.ranks import Solo
from services.executor.parallel.step_split import LEAST, NEVER, PROMPT, sizes, two_stream_tokens
from shared.messages import SlotOpen, StepPlan, ints

INFO = replace(
    small_engine("sim", None, {}).info,  # type: ignore[arg-type]  # the simulator reads no folder
    blocks=1_000, block_tokens=16, slots=8, max_step_tokens=8_192, max_context=4_096, vocab=1_000,
)  # fmt: skip


@dataclass
class Engine:
    """Takes 1 us a token; halves 4 % less, and 50 us more. The first step of each kind takes a second."""

    info: Any = INFO
    now_us: int = 0
    plans: list[StepPlan] = field(default_factory=list)
    opened: dict[int, SlotOpen] = field(default_factory=dict)
    seen: set[tuple[int, bool]] = field(default_factory=set)
    prepared: list[int] = field(default_factory=list)

    def open_slot(self, opened: SlotOpen) -> None:
        self.opened[opened.slot] = opened

    def forward(self, plan: StepPlan) -> Pending:
        self.plans.append(plan)
        tokens = sum(plan.counts)
        kind = (tokens, plan.two_stream)
        self.now_us += 1_000_000 * (kind not in self.seen)
        self.seen.add(kind)
        self.now_us += tokens if not plan.two_stream else 96 * tokens // 100 + 50
        return Pending(plan=plan)

    def sample(self, pending: Pending) -> StepOutput:
        return StepOutput(ids=ints(), done=ints())

    def now_ns(self) -> int:
        return 1_000 * self.now_us


class Slower(Solo):
    """With a rank whose halves of up to so many tokens take twice as long."""

    def __init__(self, until: int) -> None:
        self.until = until

    def exchange(self, mine: Any) -> list[Any]:
        one, two = mine
        return [mine, (one, two * (1 + (one <= 1_000 * self.until)))]  # 1 us a token


def measured(engine: Engine, ranks: Solo | None = None) -> int:
    backend: Any = engine
    return two_stream_tokens(backend, ranks or Solo(), engine.prepared.append, engine.now_ns)


def test_split_threshold_is_where_micro_batches_took_less_by_two_per_cent() -> None:
    engine = Engine()
    assert measured(engine) == 4_096  # 2,048: 2,016 of 2,048 us, 1.6 % less
    assert engine.prepared == [8_192, 4_096, 2_048]  # and no further
    assert {sum(plan.counts) for plan in engine.plans} == {2_048, 4_096, 8_192}
    for plain, halved in zip(engine.plans[::2], engine.plans[1::2], strict=True):
        assert (plain.two_stream, halved) == (False, replace(plain, two_stream=True))  # in turn


def test_the_slowest_rank_counts() -> None:
    assert measured(Engine(), Slower(4_096)) == 8_192
    assert measured(Engine(), Slower(8_192)) == NEVER


def test_the_steps_are_prompts_with_blocks_of_their_own() -> None:
    engine = Engine()
    measured(engine)
    largest = engine.plans[0]
    assert list(largest.counts) == [PROMPT] * 4
    assert sorted(largest.table_blocks) == list(range(4 * PROMPT // 16))
    for slot, count in zip(largest.slots, largest.counts, strict=True):
        tokens = engine.opened[slot].tokens
        assert len(tokens) == count
        assert len(set(tokens)) == 1_000  # a router would send equal ones to the same experts


@pytest.mark.parametrize(
    ("facts", "wanted"),
    [
        ({}, [1_024, 2_048, 4_096, 8_192]),
        ({"max_step_tokens": LEAST - 1}, []),
        ({"max_step_tokens": 5_000}, [1_024, 2_048, 4_096]),
        ({"blocks": 200}, [1_024, 2_048]),
        ({"slots": 1}, [1_024, 2_048]),
        ({"max_context": 601}, [1_024, 2_048, 4_096]),  # seven prompts of 600
    ],
)
def test_unsupported_split_is_not_measured(facts: dict[str, int], wanted: list[int]) -> None:
    assert sizes(replace(INFO, **facts)) == wanted


def test_split_without_measurements_is_never_made() -> None:
    assert measured(Engine(info=replace(INFO, max_step_tokens=512))) == NEVER
