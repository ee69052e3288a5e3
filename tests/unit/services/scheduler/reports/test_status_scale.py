"""How many executors the scheduler wants, against counts by hand."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.scheduler.known_costs import Known
from support.scheduler.world import World

from services.scheduler.reports import status
from services.scheduler.state.requests import PeerDraining, PeerLost, SleepSet
from services.scheduler.state.state import Executor
from shared.step_model import StepModel

NOTHING = {"rows": 0, "prompt_tokens": 0, "blocks": 0}
MS = StepModel(weights_us=0, token_ns=0, row_ns=1_000_000)  # a row takes a millisecond
TOKEN_MS = StepModel(weights_us=0, token_ns=1_000_000)  # a token does


def world(engines: int = 1, model: StepModel | None = None, **facts: int) -> World:
    made = World()
    for number in range(engines):
        made.add_engine(f"e{number}", **{"slots": 8, "blocks": 1_000, "max_context": 4_000, **facts})
    for executor in executors(made):
        if model is not None:
            executor.cost_model = Known(model, 0)
    return made


def executors(made: World) -> list[Executor]:
    return [*made.scheduler.state.executors.values()]


def ask(made: World, count: int, prompt: int = 4, max_tokens: int = 4, **more: object) -> None:
    for number in range(count):
        made.ask(f"r{number}", [number + 3] + [5] * (prompt - 1), max_tokens, **more)


def terms(made: World) -> status.Terms:
    return status.executors_wanted(made.scheduler.state)


def test_no_executor_is_wanted_without_a_request() -> None:
    assert terms(World()) == terms(world(2)) == NOTHING
    made = world()
    ask(made, 3)
    made.run()
    assert terms(made) == NOTHING


def test_no_more_executors_are_wanted_than_there_are_while_some_sleep() -> None:
    made = world(2)
    made.handle(SleepSet(True, ("e1",)))
    ask(made, 1)
    assert terms(made) == {"rows": 1, "prompt_tokens": 0, "blocks": 1}
    made.run()
    assert [*made.scheduler.state.asleep] == ["e1"]
    ask(made, 24)
    assert terms(made)["rows"] == 2, "three without the one that sleeps"
    made.handle(PeerLost("executor", "e1", died=False))
    assert terms(made)["rows"] == 3


def test_one_executor_is_wanted_for_the_first_request_and_for_what_waits_without_any() -> None:
    made = world()
    ask(made, 1)
    assert terms(made)["rows"] == 1
    ask(made, 12)
    made.crash("e0")
    assert terms(made) == {"rows": 1, "prompt_tokens": 0, "blocks": 0}
    made.add_engine("e1", slots=8, blocks=1_000, max_context=4_000)
    assert terms(made)["rows"] == 2
    made.handle(PeerDraining("executor", "e1"))
    assert terms(made)["rows"] == min(len(made.scheduler.state.waiting), 1)


@pytest.mark.parametrize(("rows", "slots", "wanted"), [(8, 8, 1), (9, 8, 2), (17, 8, 3), (17, 32, 1)])
def test_rows_by_slots_while_the_cost_of_a_step_is_not_known(rows: int, slots: int, wanted: int) -> None:
    made = world(slots=slots)
    ask(made, rows)
    assert terms(made)["rows"] == wanted


@pytest.mark.parametrize(
    ("slo_class", "rows", "wanted"),
    [
        ("interactive", 50, 1),
        ("interactive", 51, 2),
        ("standard", 100, 1),
        ("standard", 101, 2),
        ("batch", 101, 1),
    ],
)
def test_rows_by_the_time_between_tokens_of_their_class(slo_class: str, rows: int, wanted: int) -> None:
    made = world(model=MS, slots=200)
    ask(made, rows, slo_class=slo_class)
    assert terms(made)["rows"] == wanted


def test_more_executors_are_not_wanted_where_one_row_is_too_slow() -> None:
    made = world(model=StepModel(weights_us=60_000, token_ns=0))
    ask(made, 8, slo_class="interactive")
    assert terms(made)["rows"] == 1


def test_scale_divides_waiting_prompts_by_half_the_ttft_limit_of_their_class() -> None:
    """256 prompt tokens take 256 ms beside no decode: 1,000 a second, so 30,000 in half of 60 s."""
    made = world(model=TOKEN_MS, slots=1, blocks=20_000, max_context=40_000)
    ask(made, 1, prompt=1_000, max_tokens=2)
    for number, prompt in enumerate([30_000, 27_000]):
        made.ask(f"s{number}", [7] * prompt, 2)
    assert 50_000 <= made.scheduler.state.waiting.queued_tokens <= 60_000
    assert terms(made)["prompt_tokens"] == 2
    ahead = world(model=TOKEN_MS, slots=1, blocks=20_000, max_context=40_000)
    ask(ahead, 1, prompt=1_000, max_tokens=2)
    ahead.ask("b", [7] * 30_000, 2, slo_class="batch")
    assert terms(ahead)["prompt_tokens"] == 1, "a class without a limit waits"


@pytest.mark.parametrize("count", range(1, 16))
def test_blocks_of_what_runs_and_waits(count: int) -> None:
    made = world(blocks=64, slots=64)
    made.scheduler.state.mean_output_tokens = 4
    ask(made, count, prompt=40)
    held = sum(e.pool.held_blocks for e in executors(made))
    waiting = sum(len(group.sequences) for group in made.scheduler.state.waiting)
    assert held
    assert terms(made)["blocks"] == -(-(held + 11 * waiting) // 64)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 40),
    row_ns=st.integers(1, 60_000_000),
    engines=st.integers(1, 3),
    slots=st.integers(1, 24),
)
def test_no_executor_gets_more_rows_than_it_keeps_in_time(
    rows: int, row_ns: int, engines: int, slots: int
) -> None:
    made = world(engines, StepModel(weights_us=1_000, token_ns=0, row_ns=row_ns), slots=slots)
    ask(made, rows)
    live = len(made.scheduler.state.sequences)  # the queue refuses what it predicts to be late
    fits = [n for n in range(1, slots + 1) if 1_000 + n * row_ns // 1_000 <= 100_000]
    assert terms(made)["rows"] == -(-live // (max(fits) if fits else slots))
