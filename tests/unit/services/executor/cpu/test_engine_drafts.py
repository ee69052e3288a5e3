"""Drafts change no token: any sampling, dtype and number of drafts, beside each other in one batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.executor.plan_maker import GREEDY, Drafted, PlanMaker
from support.small_llama import write_small_llama
from support.structured import grammar_of

from services.executor.checkpoint.loader import TorchOptions
from services.executor.cpu.engine import TorchBackend, build
from services.executor.sampling.logits_processors import Wait
from shared.messages import Sampling, floats, ints

TOKENS = 24
PROMPT = [5, 9, 33, 210, 87, 14, 300, 41]
OBJECT: dict[str, Any] = {
    "type": "object",
    "properties": {"river": {"type": "string"}, "length": {"type": "integer"}},
    "required": ["river", "length"],
}
CASES: dict[str, dict[str, Any]] = {
    "greedy": {"sampling": GREEDY},
    "seeded": {"sampling": Sampling(temperature=0.9), "seed": 11},
    "filters": {"sampling": Sampling(temperature=1.2, top_k=20, top_p=0.9, min_p=0.01), "seed": 12},
    "penalties": {
        "sampling": Sampling(
            temperature=0.8, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.3
        ),
        "seed": 13,
    },
    "bias": {
        "sampling": Sampling(temperature=0.7, bias_ids=ints([40, 41]), bias_values=floats([3.0, -5.0])),
        "seed": 14,
    },
    "least length": {
        "sampling": Sampling(temperature=1.0),
        "seed": 15,
        "min_tokens": 9,
        "stop_ids": ints(range(0, 460, 5)),
    },
    "log probabilities": {"sampling": Sampling(temperature=0.9), "seed": 16, "logprobs": 3},
    "processor": {
        "sampling": Sampling(temperature=0.9, frequency_penalty=0.2),
        "seed": 17,
        "processors": ('{"name": "wait", "args": {"ms": 0}}',),
    },
    "grammar": {
        "sampling": Sampling(temperature=0.9),
        "seed": 18,
        "grammar": grammar_of({"structured_outputs": {"regex": "([a-z]{1,4} ){30}"}}),
    },
    "object": {
        "sampling": Sampling(temperature=0.9),
        "seed": 19,
        "grammar": grammar_of({"structured_outputs": {"json": OBJECT}}),
    },
    **{f"seed {seed}": {"sampling": Sampling(temperature=0.8), "seed": seed} for seed in range(20, 26)},
}
MOST = {"f32": (2, 4, 5, 6), "int8": (2, 8)}
MODES: dict[str, dict[str, Any]] = {
    "f32": {"dtype": "f32"},
    "bf16": {"dtype": "bf16"},
    "deterministic bf16": {"dtype": "bf16", "deterministic": True},
    "int8": {"dtype": "int8"},
}


def engine_of(folder: Path, **options: Any) -> TorchBackend:
    return build(
        TorchOptions(
            model_path=write_small_llama(folder, hidden=64, layers=2),
            model_name="tiny",
            device="cpu",
            blocks=200,
            slots=16,
            threads=2,
            max_context=256,
            processors={"wait": Wait},
            max_drafts=8,
            **options,
        )
    )


def generated(engine: TorchBackend, most: int, predictions: dict[int, list[int]] | None = None) -> Drafted:
    """The tokens of all cases in one batch; the first one is the prompt's sample."""
    maker = PlanMaker(engine)
    for slot, case in enumerate(CASES.values()):
        more = {"max_length": len(PROMPT) + TOKENS, "prediction": ints((predictions or {}).get(slot, []))}
        maker.open(slot, PROMPT, **more, **case)
    first = maker.prefill(dict.fromkeys(range(len(CASES)), len(PROMPT)))
    assert not first.row_errors
    lengths = {slot: len(PROMPT) + 1 for slot in range(len(CASES)) if not first.done[slot]}
    found = maker.decode_with_drafts(lengths, TOKENS - 1, most)
    for slot, ids in found.ids.items():
        ids.insert(0, first.ids[slot])
    engine.reset()
    return found


@pytest.mark.parametrize("mode", MODES)
def test_drafts_change_no_token(mode: str, tmp_path: Path) -> None:
    engine = engine_of(tmp_path / "tiny", **MODES[mode])
    plain = generated(engine, 0)
    assert plain.kept == dict.fromkeys(range(len(CASES)), 0)
    wrong = {
        slot: [7 if at % 5 == 4 else token for at, token in enumerate(ids)] for slot, ids in plain.ids.items()
    }
    for most in MOST.get(mode, (1, 3)):
        found = generated(engine, most, wrong)
        for slot, name in enumerate(CASES):
            assert found.ids[slot] == plain.ids[slot], (name, most)
            if "logprobs" in CASES[name]:
                assert found.logprobs[slot] == plain.logprobs[slot], (name, most)
            assert found.kept[slot] > 0, (name, most)
        assert sum(found.refused.values()) > 0
        assert found.steps < plain.steps
    engine.close()
