"""What must hold in a copy of the product that has one sampling parameter more: see
tests/contract/test_new_parameter.py. A program: it gets an empty folder.

`max_gap` keeps the tokens whose logits, divided by the temperature, are at most so far below the largest."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.executor.empty_plans import plan
from support.executor.gpu_side import DEVICE
from support.executor.plan_maker import PlanMaker, Row

from services.executor.checkpoint.config import check_hf
from services.executor.checkpoint.families import FAMILIES
from services.executor.cpu.engine import TorchOptions, build
from services.executor.cuda.engine import DeviceSampling
from services.executor.cuda.input_batch import CudaSlots
from services.executor.sampling.sampler import Sampler
from services.gateway.dialects.ollama import OllamaChatRequest
from services.gateway.dialects.ollama import read as read_ollama
from services.tokenizer import prepare
from shared.api import ChatRequest
from shared.codec import from_row, to_row
from shared.errors import BadRequest
from shared.messages import Sampling, SlotOpen, ints
from shared.openai.responses import request as responses

VOCAB, STEPS = 460, 6
WISHES: list[dict[str, Any]] = [
    {"temperature": 1.5},
    {"temperature": 1.5, "max_gap": 1e-6},  # the likeliest alone
    {"temperature": 1.5, "max_gap": 0.8},
    {"temperature": 1.5, "max_gap": 2.0, "top_k": 30, "frequency_penalty": 0.5},
    {"temperature": 0.0, "max_gap": 1.0},
]
SHAPE = {
    "model_type": "llama", "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "max_gap": 0.0,
}  # fmt: skip


def opened(slot: int, tokens: list[int], sampling: Sampling) -> SlotOpen:
    return SlotOpen(
        slot=slot, generation=0, seq=slot, seed=7 + slot, prompt_tokens=len(tokens), sampling=sampling,
        tokens=ints(tokens),
    )  # fmt: skip


def check_requests() -> None:
    """Every dialect reads it, with its bounds, and the wire carries it."""
    turn = [{"role": "user", "content": "x"}]
    asked = ChatRequest.model_validate({"messages": turn, "max_gap": 2.5})
    sampling = prepare._sampling(asked, VOCAB)
    assert sampling == Sampling(**{"max_gap": 2.5})
    assert from_row(to_row(opened(0, [1], sampling))) == opened(0, [1], sampling)
    assert read_ollama({"messages": turn, "options": {"max_gap": 3}}, OllamaChatRequest)["max_gap"] == 3
    assert responses.read({"input": "x", "max_gap": 4})["max_gap"] == 4
    with pytest.raises(BadRequest, match="max_gap"):
        responses.read({"input": "x", "max_gap": -1})
    with pytest.raises(BadRequest, match="max_gap"):
        read_ollama({"messages": turn, "options": {"max_gap": 101}}, OllamaChatRequest)
    check_hf(SHAPE, "llama", FAMILIES["llama"])


def check_samplers() -> None:
    """Torch, also row by row, and the kernel after what it does not take, choose the same tokens."""
    slots = list(range(len(WISHES)))
    made = [opened(slot, [1, 2, 3], Sampling(**WISHES[slot])) for slot in slots]
    device, cpu = torch.device(DEVICE), torch.device("cpu")
    reference, alone = (Sampler(len(slots), VOCAB, cpu, deterministic=exact) for exact in (False, True))
    state = CudaSlots(len(slots), 6, 99, 90, device, VOCAB)
    kernel = DeviceSampling(len(slots), VOCAB, state.choices, torch.bfloat16)
    for each in made:
        reference.open(each)
        alone.open(each)
        state.open(each)
        kernel.open(each)
    assert [kernel.is_outside_graph([slot]) for slot in slots] == [False, True, True, True, False]
    places, values = (torch.from_numpy(words).to(device) for words in state.take_updates(plan(1)))
    state.words[places.long()] = values
    kept = 0
    for step in range(STEPS):
        normal = torch.randn(len(slots), VOCAB, generator=torch.Generator().manual_seed(step))
        logits, positions = (normal * 2).bfloat16().float(), [3 + step] * len(slots)
        wanted = reference.choose(logits, slots, positions).tolist()
        assert alone.choose(logits, slots, positions).tolist() == wanted
        assert kernel.choose(logits.to(device), slots, positions)[0].tolist() == wanted
        assert [wanted[1], wanted[4]] == logits.argmax(-1)[[1, 4]].tolist()
        assert logits[2].max() - logits[2, wanted[2]] <= 1.5 * 0.8
        kept += wanted[0] != int(logits[0].argmax())
    assert kept, "without the parameter other tokens than the likeliest are drawn"


def check_engine(folder: Path) -> None:
    """The engine on a CPU."""
    (folder / "config.json").write_text(json.dumps(SHAPE))
    engine = build(
        TorchOptions(
            model_path=folder, model_name="m", dummy=True, device="cpu", dtype="f32", blocks=40, slots=3,
            threads=1,
        )
    )  # fmt: skip
    maker, ids = PlanMaker(engine), []
    for slot, wish in enumerate(({"temperature": 0.0}, WISHES[1], WISHES[0])):
        maker.open(slot, [1, 2, 3], Sampling(**wish), seed=5)
    rows = [Row(slot, 0, 3, feeds=(slot,)) for slot in range(3)]
    for step in range(STEPS):
        ids.append(list(maker.run(rows).ids))
        rows = [Row(slot, 3 + step, 1, feeds=(slot,), from_device=True) for slot in range(3)]
    assert [row[0] for row in ids] == [row[1] for row in ids]
    assert [row[0] for row in ids] != [row[2] for row in ids]


if __name__ == "__main__":
    check_requests()
    check_samplers()
    check_engine(Path(sys.argv[1]))
