"""How many prompt tokens a step takes: hand-computed from a cost that is known exactly."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.scheduler.known_costs import Known
from support.scheduler.world import World

from services.scheduler.state.policies import StepShare
from services.scheduler.state.requests import parse
from services.scheduler.state.state import Limits
from services.scheduler.step_planner import COLD_TOKENS, StepColumns, chunk_budget
from shared.step_model import StepModel, StepShape

PER_TOKEN = StepModel(weights_us=0, token_ns=100_000)  # 100 us a token
SLOW = StepModel(weights_us=0, token_ns=1_000_000)


CLASSES = "interactive=0/100/0,standard=0/100/0,batch=0/100/0"


def budget(
    decodes: int,
    share: str = "budget",
    model: StepModel = PER_TOKEN,
    classes: tuple[str, str] = ("interactive", "interactive"),
    **more: int,
) -> int:
    """The chunk budget beside so many decodes: 100 ms between tokens. Very much waits, unless `each` states
    how long a prompt is. `classes` of the decodes and of the prompts."""
    world = World(Limits(step_tokens=more.get("step_tokens", 4_096), classes=parse(CLASSES)))
    world.add_engine(slots=256, blocks=2_048, max_step_tokens=4_096, block_tokens=16, max_context=4_096)
    (executor,) = world.scheduler.state.executors.values()
    waiting = more.get("waiting", 1)
    for i in range(decodes + waiting):
        world.ask(f"r{i}", [5] * 40, 3, slo_class=classes[i >= decodes])
    running = list(executor.running)
    executor.cost_model = Known(model, 0)
    executor.cost_model.seen = more.get("seen", 1_000)
    columns = StepColumns("run_ahead", more.get("micro_batch"))
    for s in running[:decodes]:
        columns.slots.append(s.slot)
        columns.starts.append(0)
        columns.counts.append(1)
        columns.sampled.append((s, s.placement))
        s.computed = s.opened_length
    for s in running[-waiting:]:
        s.computed, s.opened_length = 0, more.get("each", 10**6)
    columns.shape = StepShape(decodes, decodes, decodes, decodes)
    prompts = [(0, more.get("each", 10**6))] * waiting
    return chunk_budget(world.scheduler.state, executor, columns, prompts, StepShare(True, share))  # type: ignore[arg-type]  # a literal


def test_the_most_that_keeps_the_time_between_tokens() -> None:
    # 100 ms hold 1,000 tokens: 936 beside 64 decodes, 928 in blocks of 16; with them 992, in tiles of 64: 960
    assert budget(64) == 960 - 64


def test_budget_is_half_where_steps_alternate() -> None:
    # 50 ms hold 500 tokens: 436 beside 64 decodes, in blocks 432; 496 in tiles: 448
    assert budget(64, micro_batch=0) == 448 - 64


def test_a_tile_may_end_within_a_block() -> None:
    # 452 beside 60 decodes fill a step of 512, 448 in blocks would leave a tile of 64 unused
    assert budget(60, step_tokens=512) == 512 - 60


def test_a_tile_that_would_break_the_promise_is_left_out() -> None:
    # 50 ms hold 500 tokens: 432 beside 68 decodes, in tiles 448; 444 would fill 512, and take 51.2 ms
    assert budget(68, micro_batch=0) == 448 - 68


def test_prompts_go_on_beside_decodes_that_alone_take_longer() -> None:
    # 200 decodes take 200 ms where 100 were promised, a prompt of 40 tokens waits: 200 + 100 + 200 * 0.04 ms
    assert budget(200, model=SLOW, each=40) == 104
    assert budget(200, step_tokens=201) == 48  # a quarter, though the step is full of decodes


def test_a_promise_that_decodes_nearly_break_is_no_reason_to_starve_prompts() -> None:
    # 90 decodes leave 10 ms of 100; they are given 45, and 3.6 for the 40 tokens that wait
    assert budget(90, model=SLOW, each=40) == 48


def test_prompts_get_more_time_the_more_of_them_wait() -> None:
    # 1,000 tokens take a second: 90 + 45 + 90 ms, so 135 tokens, and with 102 a tile of 64 is full
    assert budget(90, model=SLOW, waiting=25, each=40) == 192 - 90


def test_a_cold_start_is_careful() -> None:
    assert budget(8, seen=0) == COLD_TOKENS


@pytest.mark.parametrize(
    ("share", "tokens"), [("whole", lambda decodes: 4_096 - decodes), ("block", lambda decodes: 16)]
)
def test_shares_of_the_policy_change_the_budget(share: str, tokens: Callable[[int], int]) -> None:
    assert budget(8, share) == tokens(8)


def test_prompt_alone_may_take_half_a_second() -> None:
    # 5,000 tokens fit in 500 ms: the step's own limit counts, 4,096
    assert budget(0) == 4_096


def test_step_takes_twice_as_long_as_decodes_while_little_waits() -> None:
    # 64 decodes take 6.4 ms, and with a prompt 12.8: a tile of 64 beside them
    assert budget(64, each=64) == 128 - 64


def test_the_more_waits_the_longer_a_step_may_take() -> None:
    # 2,000 tokens take 200 ms: 6.4 + 200 / 4 ms hold 564 tokens, in tiles 512
    assert budget(64, each=2_000) == 512 - 64


def test_waiting_prompts_come_in_steps_of_one_length() -> None:
    # 192 decodes leave 192 tokens of 38.4 ms; 200 take two steps: of 100, so in tiles 320 and not 384 and 256
    assert budget(192, each=200) == 320 - 192
    assert budget(192, each=192) == 384 - 192


def test_prompts_that_take_longer_than_the_bound_stretch_it() -> None:
    # 250 ms hold 2,500 tokens, in tiles 2,496; 990 take less than the bound: 6.4 + 99 / 4 ms, so 256
    assert budget(64, classes=("standard", "standard")) == 2_496 - 64
    assert budget(64, classes=("standard", "standard"), each=990) == 256 - 64


@pytest.mark.parametrize("classes", [("interactive", "standard"), ("standard", "batch")])
def test_no_prompt_of_a_lower_class_stretches_it(classes: tuple[str, str]) -> None:
    assert budget(64, classes=classes) == 960 - 64


def test_many_short_prompts_take_less_than_a_long_one() -> None:
    # 40 tokens take 4 ms and their pairs 8: 75.8 ms hold six such prompts and a part, in tiles 256
    pairs = StepModel(weights_us=0, token_ns=100_000, pair_ps=10_000_000)
    assert budget(8, model=pairs, waiting=25, each=40) == 256 - 8
    assert budget(8, model=pairs, each=1_000) == 128 - 8  # 100 ms hold 131 tokens of one
