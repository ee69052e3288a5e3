"""Measures KV in fp8 beside bf16, in one run: its cost in the logits, and its saving in a decode step.

What is compared takes turns, shape by shape, so that neither has the colder GPU.
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

BATCHES = (1, 32, 128, 256)
KEPT = ("auto", "fp8")  # of a model in bf16
_BLOCK_TOKENS = 16
_SHAPES = tuple((batch, context) for context in (1152, 8192) for batch in (1, 32, 64, 128, 256))
_LAYOUTS = (
    Tuning(64, 2, 5, 4), Tuning(64, 3, 5, 4), Tuning(128, 2, 5, 4), Tuning(128, 2, 7, 4), Tuning(32, 4, 7, 2),
    Tuning(64, 2, 7, 4, chained=True), Tuning(128, 2, 5, 4, chained=True), Tuning(128, 2, 7, 4, chained=True),
)  # fmt: skip
_TRIED = ((1, 1152), (32, 1152), (64, 1152), (256, 1152))
_BOTH_BYTES = 110 << 30  # of two engines with room for the steps


def fp8(limits: dict[str, float], step_tokens: int) -> dict[str, Any]:
    """Divergence and agreement by model and path, attention alone, also in other layouts, steps by batch."""
    found: dict[str, Any] = {"attention": _attention(limits)}
    found["layouts"] = [row for layout in _LAYOUTS for row in attention(limits, FP8, layout, _TRIED)]
    torch.cuda.empty_cache()
    found["decode"] = _steps(limits, step_tokens)
    torch.cuda.empty_cache()
    found["exact"] = [row for kind in ("llama", "qwen3") for row in compare(kind, *KEPT)]
    return found


def _attention(limits: dict[str, float]) -> list[dict[str, Any]]:
    """A layer over bf16 and over fp8 in turn, shape by shape."""
    rows = []
    for shape in _SHAPES:
        wide, narrow = (attention(limits, kept, shapes=[shape])[0] for kept in (torch.bfloat16, FP8))
        torch.cuda.empty_cache()
        rows += [wide, narrow | {"times_as_fast": wide["us"] / narrow["us"]}]
    return rows


def _steps(limits: dict[str, float], step_tokens: int) -> list[dict[str, Any]]:
    """Both engines in turn, batch by batch; one after the other on a device without room for both."""
    each = -(-(CONTEXT + STEPS + WARM_STEPS + 1) // _BLOCK_TOKENS)
    blocks = max(BATCHES) * each + 16
    both = torch.cuda.mem_get_info()[0] > _BOTH_BYTES
    steps: dict[tuple[str, int], dict[str, Any]] = {}
    for together in (KEPT,) if both else tuple((kept,) for kept in KEPT):
        engines = {kept: llama_8b(step_tokens, kv_dtype=kept, blocks=blocks) for kept in together}
        for batch in BATCHES:
            for kept, built in engines.items():
                size = built.backend.info.bytes_per_block
                steps[kept, batch] = {"kv": kept, "in_turn": both, "bytes_per_block": size}
                steps[kept, batch] |= decode(built, limits, (batch,))[0]
        for built in engines.values():
            end(built)
        del engines, built
        end(None)  # now that nothing refers to the memory
    rows = []
    for batch in BATCHES:
        wide, narrow = (steps[kept, batch] for kept in KEPT)
        saved, bytes_saved = wide["step_ms"] / narrow["step_ms"], wide["read_gb"] / narrow["read_gb"]
        rows += [wide, narrow | {"times_as_fast": saved, "bytes_times_fewer": bytes_saved}]
        print(
            f"fp8 at batch {batch}: {saved:.3f} times as fast, {bytes_saved:.3f} times fewer bytes",
            flush=True,
        )
    return rows
