"""The default step budget follows the load, on the virtual H200."""

from __future__ import annotations

from functools import cache

import pytest

from loadtest.scenarios import default_load
from loadtest.scenarios.default_load import CLOSED_TOK_S, LOADS, VLLM_ITL_MS, VLLM_TTFT_MS, itl_ms
from services.scheduler import step_planner

measured = cache(default_load.measured)


@pytest.mark.parametrize("rate", VLLM_ITL_MS)
def test_gaps_and_first_tokens_are_no_later_than_in_vllm(rate: int) -> None:
    scale, row = CLOSED_TOK_S / measured(0)["tok_s"], measured(rate)
    for mine, other in zip(itl_ms(row), VLLM_ITL_MS[rate], strict=True):
        assert mine <= scale * other
    for mine, other in zip((row["ttft_ms_p50"], row["ttft_ms_p99"]), VLLM_TTFT_MS[rate], strict=True):
        assert mine <= scale * other


@pytest.mark.parametrize("rate", LOADS)
def test_short_steps_under_a_light_load_cost_no_tokens(rate: int, monkeypatch: pytest.MonkeyPatch) -> None:
    follows = measured(rate)
    monkeypatch.setattr(step_planner, "EASY_PM", 10**9)  # as long as was promised, at any load
    always = default_load.measured(rate)
    assert follows["tok_s"] >= 0.998 * always["tok_s"]
    if rate == 16:
        assert follows["itl_ms_p99"] < 0.8 * always["itl_ms_p99"]


def test_a_light_load_has_short_gaps_on_other_days_too() -> None:
    scale = CLOSED_TOK_S / measured(0)["tok_s"]
    for seed in (18, 19):
        row = itl_ms(measured(16, seed=seed))  # its p50 is that of decodes alone: as many as that day brings
        for mine, other in zip(row[1:], VLLM_ITL_MS[16][1:], strict=True):
            assert mine <= scale * other
