"""SmolLM2-135M in f32 with tiers below: paused at any step and brought back, its greedy ids are those that
transformers computed. A group of two likewise, with a small model. For hits of tiers see test_kv_hits.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.pipeline.tiered import Tiered, differ, patient
from support.small_llama import write_small_llama

CASES = json.loads((Path(__file__).parents[1] / "data" / "smollm2_greedy.json").read_text())["cases"]
CASE = max((c for c in CASES if len(c["output_ids"]) >= 16), key=lambda c: len(c["prompt"]))
MODEL = "smollm2-135m-instruct"
SIZES: dict[str, Any] = {"kv_blocks": 48, "slots": 4, "max_context": 256, "step_tokens": 32}
TOKENS = 10
INDICES = ((1, 6), (3, 10))  # two pauses in each run


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    patient(monkeypatch)


async def test_pauses_at_four_steps_change_no_token() -> None:
    async with Tiered.up(MODEL, overlap="single", **SIZES) as pipeline:
        first = pipeline.forced.executor.step
        cold = await pipeline.ask(CASE["prompt"], TOKENS, tenant="cold")
        assert cold.ids == CASE["output_ids"][:TOKENS]
        assert pipeline.forced.executor.step - first >= INDICES[-1][-1]
        for indices in INDICES:
            loads, restored = pipeline.meter.loads, pipeline.forced.restored
            pipeline.forced.pause_at(*indices)
            again = await pipeline.ask(CASE["prompt"], TOKENS, tenant=f"paused-{indices[0]}")
            assert differ(cold, again) <= 1e-4
            assert pipeline.meter.loads == loads + 2
            assert pipeline.forced.restored >= restored + 4
        assert pipeline.forced.indices == [index for indices in INDICES for index in indices]


@pytest.mark.parametrize("device", ["cpu/tp2", "cpu/pp2"])
async def test_a_group_of_two_is_paused_and_brought_back(device: str, tmp_path: Path) -> None:
    """Every rank's part of a block goes down and comes up; the leader's is spoiled in between."""
    model, cold = str(write_small_llama(tmp_path / "small", layers=2)), list[int]()
    async with Tiered.up(model, overlap="single", device=device, **SIZES) as pipeline:
        for name, indices in (("cold", ()), ("paused", INDICES[0])):
            loads, restored = pipeline.meter.loads, pipeline.forced.restored
            if indices:
                pipeline.forced.pause_at(*indices)
            answer = await pipeline.ask(CASE["prompt"], TOKENS, tenant=name)
            cold = cold or answer.ids
            assert answer.ids == cold
            assert len(cold) == TOKENS
            assert pipeline.meter.loads == loads + len(indices)
            assert pipeline.forced.restored >= restored + 2 * len(indices)
