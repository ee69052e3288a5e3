"""What weights in fp8 cost in the logits of a GGUF model, computed in torch, so that no GPU is needed.

`python -m loadtest.eval.fp8_reference MODEL.gguf` compares weights in fp8, and weights and activations as a
GPU has them, with float32. Everything else is float32, and a window is one prompt.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.elementwise import apply_rope, rope_table
from kernels.quantised import dequantise_rows, quantise_rows
from loadtest.eval.divergence import kl_divergence, log_probs, same_top
from loadtest.eval.text import TEXT, read_windows, scored
from services.executor.checkpoint.gguf import load_gguf
from services.executor.checkpoint.kv_cache import _attend, _Rows
from services.executor.checkpoint.quantised import ScaledFp8, part_in_fp8
from services.executor.checkpoint.stored import Dense
from services.executor.checkpoint.weights import Weights, plain_part
from services.executor.model.description import Attention, Projection, Rope, Shapes, describe
from services.executor.model.program import REFERENCE, Placed, Step, placed, run, split_heads, steps_of
from services.executor.parallel.coroutines import run_alone
from services.executor.parallel.ranks import SOLO
from shared.vocab.files import ModelFiles

CONTEXT, WINDOWS = 512, 4


def main() -> None:
    """Print a row for each way, as JSON."""
    path = Path(sys.argv[1])
    windows = read_windows(TEXT, ModelFiles(path.stem, path), CONTEXT, WINDOWS)
    followed = torch.cat([torch.tensor(window)[scored(CONTEXT).start + 1 :] for window in windows])
    at = torch.arange(len(followed))
    wanted = _log_probs(path, windows, fp8=False, activations=False)
    for name, activations in (("weights", False), ("weights and activations", True)):
        found = _log_probs(path, windows, fp8=True, activations=activations)
        kl = kl_divergence(wanted, found)
        print(json.dumps({
            "in_fp8": name, "positions": len(kl),
            "kl_mean": kl.mean().item(), "kl_median": kl.median().item(),
            "kl_p99": kl.quantile(0.99).item(), "kl_max": kl.max().item(),
            "same_top": same_top(wanted, found).double().mean().item(),
            "perplexity_ratio": (wanted[at, followed] - found[at, followed]).mean().exp().item(),
        }), flush=True)  # fmt: skip


@torch.inference_mode()
def _log_probs(path: Path, windows: list[list[int]], *, fp8: bool, activations: bool) -> Tensor:
    load_part = part_in_fp8 if fp8 else plain_part
    shapes, weights = load_gguf(path, torch.float32, torch.device("cpu"), load_part=load_part)
    every = [_hidden(shapes, weights, each, activations=activations) for each in windows]
    rows, head = scored(CONTEXT), weights.head.values
    return torch.cat([log_probs(F.linear(hidden[rows.start : rows.stop], head)) for hidden in every])


def _hidden(shapes: Shapes, weights: Weights, tokens: list[int], *, activations: bool) -> Tensor:
    frequencies = torch.tensor(shapes.inverse_frequencies(), dtype=torch.float64)
    rotations = rope_table(frequencies, len(tokens), shapes.rope_gain)

    def attended(rope: Placed, attention: Placed) -> Step:
        def step(values: Any) -> None:
            query, key, value = split_heads(values.x, attention.op.heads, attention.op.kv_heads)
            values.x = _attend(apply_rope(query, rotations), apply_rope(key, rotations), value)

        return step

    def projected(one: Placed) -> Step:
        weight = one.weights[one.op.weight.name]
        bias = None if one.op.bias is None else one.dense(one.op.bias)

        def step(values: Any) -> None:
            x = values.x
            if activations and isinstance(weight, ScaledFp8):
                x = dequantise_rows(quantise_rows(x))
            values.x = F.linear(x, weight.values, bias)

        return step

    operations = placed(describe(shapes), weights.layers, Dense.of(weights.norm), keep=True)
    table = {**REFERENCE, (Rope, Attention): attended, (Projection,): projected}
    values = _Rows(*[weights.embedding.rows(torch.tensor(tokens)).values] * 2)
    run_alone(run(steps_of(operations, table, REFERENCE), values, SOLO, 1))
    return values.x


if __name__ == "__main__":
    main()
