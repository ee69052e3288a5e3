"""What a sequence brings that an engine must not see, and the slot that stands in for it."""

from __future__ import annotations

import dataclasses
import math

import pytest

from services.executor.device_thread import checked_slot
from services.executor.engine import (
    engine_of,
    long_steps,
    open_error,
    plan_error,
    sequence_error,
    trial_plan,
    without_host_work,
)
from services.executor.sim.engine import SimBackend, SimOptions
from shared.errors import SetupError
from shared.messages import Sampling, SlotOpen, floats, ints

INFO = dataclasses.replace(SimBackend(SimOptions(vocab=500, slots=4)).info, max_stop_ids=3)
GOOD = SlotOpen(
    slot=3, generation=2, seq=7, prompt_tokens=2, max_length=9, seed=5, tokens=ints([1, 499]), logprobs=3,
    sampling=Sampling(bias_ids=ints([499]), bias_values=floats([-100])), stop_ids=ints([1, 2, 900]),
)  # fmt: skip


@pytest.mark.parametrize(
    ("change", "flaw"),
    [
        ({}, ""),
        ({"tokens": ints([1, 500])}, "prompt: the weights have 500 tokens, and no token 500"),
        (
            {"sampling": Sampling(bias_ids=ints([2, 777]), bias_values=floats([1, 1]))},
            "logit_bias: the weights have 500 tokens, and no token 777",
        ),
        ({"stop_ids": ints([1, 2, 3, 4])}, "stop_token_ids: 4 with the model's own, over 3"),
        ({"sampling": Sampling(temperature=math.inf)}, "its sampling is not finite"),
        ({"sampling": Sampling(frequency_penalty=-1e300)}, "its sampling is not finite"),  # in float32
        ({"sampling": Sampling(repetition_penalty=math.nan)}, "its sampling is not finite"),
        ({"sampling": Sampling(bias_ids=ints([2]), bias_values=floats([math.nan]))}, "not finite"),
    ],
)
def test_a_sequence_that_the_engine_cannot_compute(change: dict[str, object], flaw: str) -> None:
    opened = dataclasses.replace(GOOD, **change)
    assert (flaw in sequence_error(opened, INFO)) if flaw else not sequence_error(opened, INFO)
    assert sequence_error(without_host_work(opened, INFO.vocab), INFO) == ""
    assert open_error(without_host_work(opened, INFO.vocab), INFO) == ""


def test_a_stand_in_keeps_its_place_and_the_tokens_that_exist() -> None:
    stood = without_host_work(dataclasses.replace(GOOD, tokens=ints([1, 500]), processors=("{}",)), 500)
    assert list(stood.tokens) == [1, 0]
    assert (stood.slot, stood.generation, stood.seq, stood.max_length) == (3, 2, 7, 9)
    assert (stood.sampling.temperature, stood.logprobs, stood.processors) == (0.0, 0, ())
    assert list(stood.stop_ids) == []


def test_a_prediction_has_only_tokens_that_the_weights_have() -> None:
    opened = dataclasses.replace(GOOD, prediction=ints([3, 500, 499, 70_000]))
    checked = checked_slot(opened, INFO)
    assert checked == dataclasses.replace(GOOD, prediction=ints([3, 499]))
    assert checked_slot(GOOD, INFO) is GOOD


@pytest.mark.parametrize(
    ("max_step_tokens", "max_context", "blocks"),
    [(64, 256, 100), (1024, 256, 100), (1, 256, 100), (64, 256, 2)],
)
def test_the_long_steps_of_a_warm_up_are_steps_as_a_scheduler_may_plan_them(
    max_step_tokens: int, max_context: int, blocks: int
) -> None:
    info = dataclasses.replace(INFO, max_step_tokens=max_step_tokens, max_context=max_context, blocks=blocks)
    ((opened, plans),) = long_steps(info)
    assert not open_error(opened, info)
    assert [plan_error(plan, info, {0}) for plan in plans] == ["", ""]
    assert sum(plans[0].counts) == min(max_step_tokens, (info.context - 1) // 2)


def test_plan_of_more_tokens_than_a_step_has_is_refused() -> None:
    info = dataclasses.replace(INFO, max_step_tokens=8, slots=4)
    plans = [trial_plan([0, 0], counts, [1, 1]) for counts in ([4, 4], [4, 5])]
    assert [plan_error(plan, info, {0, 1}) for plan in plans] == [
        "", "the plan computes 9 tokens; a step of this engine has at most 8"
    ]  # fmt: skip


def test_a_device_without_an_engine_is_refused() -> None:
    with pytest.raises(SetupError, match="no engine for xpu: set `device` to one of cpu, cuda"):
        engine_of("xpu")
