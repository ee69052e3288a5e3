"""Measures KV in fp8 beside bf16, in one run: its cost in the logits, and its saving in a decode step.

Both engines of the steps are on the device at once and take turns batch by batch, so that neither has the
colder GPU.
"""

from __future__ import annotations

from typing import Any

import torch

from kernels.attention import FP8
from kernels.attention.decode import Tuning
from loadtest.gpu.deterministic import end
from loadtest.gpu.engine import CONTEXT, STEPS, WARM_STEPS, decode
from loadtest.gpu.exact import compare
from loadtest.gpu.kernels import attention
from loadtest.gpu.rig import llama_8b

BATCHES = (32, 128, 256)
KEPT = ("auto", "fp8")  # of a model in bf16
_BLOCK_TOKENS = 16
_LAYOUTS = (
    Tuning(64, 3, 5, 4), Tuning(64, 4, 5, 4), Tuning(64, 3, 7, 4), Tuning(128, 2, 4, 4), Tuning(128, 2, 5, 4),
    Tuning(128, 2, 5, 8), Tuning(128, 3, 4, 8),
)  # fmt: skip
_TRIED = ((32, 1152), (256, 1152))


def fp8(limits: dict[str, float], step_tokens: int) -> dict[str, Any]:
    """Divergence and agreement by model and path, attention alone, also in other layouts, steps by batch."""
    found: dict[str, Any] = {"exact": [row for kind in ("llama", "qwen3") for row in compare(kind, *KEPT)]}
    torch.cuda.empty_cache()
    found["attention"] = [row for kept in (torch.bfloat16, FP8) for row in attention(limits, kept)]
    found["layouts"] = [row for layout in _LAYOUTS for row in attention(limits, FP8, layout, _TRIED)]
    torch.cuda.empty_cache()
    found["decode"] = _steps(limits, step_tokens)
    return found


def _steps(limits: dict[str, float], step_tokens: int) -> list[dict[str, Any]]:
    each = -(-(CONTEXT + STEPS + WARM_STEPS + 1) // _BLOCK_TOKENS)
    blocks = max(BATCHES) * each + 16
    engines = {kept: llama_8b(step_tokens, kv_dtype=kept, blocks=blocks) for kept in KEPT}
    rows = []
    for batch in BATCHES:
        pair = {kept: decode(built, limits, (batch,))[0] for kept, built in engines.items()}
        sizes = {kept: built.backend.info.bytes_per_block for kept, built in engines.items()}
        rows += [{"kv": kept, "bytes_per_block": sizes[kept], **row} for kept, row in pair.items()]
        saved = pair["auto"]["step_ms"] / pair["fp8"]["step_ms"]
        bytes_saved = pair["auto"]["read_gb"] / pair["fp8"]["read_gb"]
        rows[-1] |= {"times_as_fast": saved, "bytes_times_fewer": bytes_saved}
        print(
            f"fp8 at batch {batch}: {saved:.3f} times as fast, {bytes_saved:.3f} times fewer bytes",
            flush=True,
        )
    for built in engines.values():
        end(built)
    return rows
