"""Which executor gets a request: predicted times, and the policy `ttft` on them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.scheduler.known_costs import Known
from support.scheduler.world import World

from services.scheduler import admission
from services.scheduler.state import policies
from services.scheduler.state.policies import HARM_PM, RoutingOption
from services.scheduler.state.state import Executor, Limits
from shared.step_model import StepModel

LOOP_US, TOKEN_US, WEIGHTS_US = 700, 100, 300
NOTHING = (0, 0)  # in a tier


def fleet(*times: int, **facts: int) -> World:
    """Executors e1, e2, ... that take so many times as long as the first."""
    world = World(Limits(window=1))
    for number, slower in enumerate(times, 1):
        sizes = {"blocks": 64, "slots": 8, "max_step_tokens": 256, "max_context": 256} | facts
        world.add_engine(f"e{number}", **sizes)
        model = StepModel(weights_us=WEIGHTS_US * slower, token_ns=TOKEN_US * 1_000 * slower)
        executor = executor_of(world, number)
        executor.cost_model = Known(model, LOOP_US)
        executor.chunk_tokens = 16
    return world


def executor_of(world: World, number: int) -> Executor:
    return world.scheduler.state.executors[f"e{number}"]


def homes(world: World) -> list[str]:
    """Where each request runs or ran, in order of arrival."""
    return [s.last_executor for s in world.scheduler.state.sequences.values()]


def test_forecast_equals_one_by_hand() -> None:
    """A prompt beside one decode takes 100 us a token; 300 us of the step are those of the decode alone,
    0.3 % of the 100 ms that class standard may take between tokens."""
    world = fleet(1, slots=1)
    world.ask("runs", [5] * 4, 40)
    world.ask("waits", [6] * 32, 8)
    executor, state = executor_of(world, 1), world.scheduler.state
    group = state.waiting.first(executor.hello.model)
    assert group is not None
    loop_us = executor.cost_model.loop_us

    def forecast(held_blocks: int = 0, load: tuple[int, int] = NOTHING) -> tuple[int, int, int]:
        return admission.forecast(state, executor, group, held_blocks, load)

    def left_us(predicted_us: int) -> int:
        """How long the step that runs still takes."""
        began_us = max(executor.in_flight[0].planned_us, executor.pace.last_us)
        return began_us + predicted_us - state.now_us

    assert forecast() == (left_us(400) + 3_300 + loop_us, 3_000, 3)
    world.deliver()
    loop_us = executor.cost_model.loop_us
    assert forecast() == (left_us(300) + 3_300 + loop_us, 3_000, 3)
    assert forecast(4) == (left_us(300) + 1_700 + loop_us, 1_400, 3)
    state.limits = replace(state.limits, step_tokens=16)
    assert forecast() == (left_us(300) + 2 * 1_700 + loop_us, 2 * 1_400, 3)
    slow, fast, faster = (4, 9_000), (4, 1_000), (4, 100)  # half of the prompt, from a tier
    assert forecast(load=slow) == (left_us(300) + 2 * 1_700 + loop_us, 2 * 1_400, 3)
    assert forecast(load=fast) == (1_000 + 1_700 + loop_us, 1_400, 3)
    until_us = left_us(300)  # later than the load
    assert forecast(load=faster) == (until_us + 1_700 + loop_us, 1_400, 3)
    state.now_us += 200
    assert left_us(300) <= 100
    assert forecast(4) == (left_us(300) + 1_700 + loop_us, 1_400, 3)
    state.now_us += 10_000  # late: it may end at any time
    assert forecast(4) == (1_700 + loop_us, 1_400, 3)
    executor.cost_model.seen = 0
    assert forecast() == (0, 0, 0)


def test_prompts_that_are_already_there_come_first() -> None:
    world = fleet(1, 1)
    world.ask("long", [5] * 200, 8)
    world.ask("short", [6] * 10, 8)
    world.ask("other", [7] * 10, 8)
    assert homes(world)[0] != homes(world)[1] == homes(world)[2]
    world.run()
    for name in ("long", "short", "other"):
        world.assert_answers(name)


def test_a_faster_executor_gets_more_prompts() -> None:
    world = fleet(4, 1)
    for number in range(10):
        world.ask(f"r{number}", [5, number] + [6] * 30, 2)
    assert homes(world).count("e2") >= 7


@pytest.mark.parametrize(("before", "there"), [(0, True), (20, True), (200, False)])
def test_a_cached_prompt_goes_where_it_is_unless_that_takes_longer(before: int, there: bool) -> None:
    """64 cached tokens are worth 6.4 ms: 20 tokens before it do not outweigh them, 200 do."""
    world = fleet(1, 1)
    world.ask("first", [5] * 65, 2)
    world.run()
    (home,) = (name for name, e in world.scheduler.state.executors.items() if e.pool.cached_blocks)
    if before:
        state = world.scheduler.state
        other = next(e for e in state.executors.values() if e.hello.executor != home)
        world.check_every = 0
        other.draining = True
        world.ask("before", [6] * before, 2)
        other.draining = False
    world.ask("again", [5] * 65, 2)
    assert (homes(world)[-1] == home) == there


def test_prompts_one_after_the_other_do_not_evict_each_other() -> None:
    """Nothing runs and nothing is cached of them: each goes where most blocks are without content."""
    world = fleet(1, 1, 1)
    seen = []
    for number in range(6):
        world.ask(f"r{number}", [number] * 30, 2)
        seen += homes(world)
        world.run()
    assert sorted(seen) == ["e1", "e1", "e2", "e2", "e3", "e3"]


def test_an_executor_without_a_prediction_gets_its_share() -> None:
    world = fleet(1, 1)
    executor_of(world, 2).cost_model.seen = 0
    for number in range(6):
        world.ask(f"r{number}", [number] * 30, 2)
    assert sorted(homes(world)) == ["e1"] * 3 + ["e2"] * 3


def option(source: str, **more: int) -> RoutingOption:
    return RoutingOption(source, 0, 9, 1)._replace(**more)


def test_the_delay_of_others_counts_by_the_square_of_their_pace() -> None:
    for tbt_pm, part_us in ((1_000, 10 * HARM_PM), (500, 10 * HARM_PM // 4), (100, HARM_PM // 10)):
        fast = option("fast", ttft_us=1_000, harm_us=10_000, tbt_pm=tbt_pm)
        kind = option("kind", ttft_us=1_000 + part_us - 1)
        slow = option("slow", ttft_us=1_000 + part_us + 1)
        assert policies.ttft([fast, kind]) is kind
        assert policies.ttft([fast, slow]) is fast


def test_only_a_policy_that_wants_forecasts_gets_them(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(admission, "forecast", lambda *given: seen.append(given) or (1, 1, 1))
    for name, count in (("room", 0), ("ttft", 2)):
        world = World(Limits(policy=policies.parse(f"routing={name}")))
        world.add_engine("e1")
        world.add_engine("e2")
        world.ask("a", [5], 2)
        assert len(seen) == count
