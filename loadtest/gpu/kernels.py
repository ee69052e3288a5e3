"""Measures single kernels against their own floors, and their results against float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kernels.attention import FP8, ref
from kernels.attention.decode import DecodeRows, Tuning, attend_decode, decode_work, plan_decode
from kernels.sampling.gpu import Choices, choose, mask_room, scratch
from loadtest.gpu.draw import slot_table
from loadtest.gpu.timing import graph_us
from services.executor.cuda.kernel_configs import device_tuning, for_fp8_kv

HEADS, KV_HEADS, DIM, BLOCK_TOKENS, LAYERS = 32, 8, 128, 16, 4
BATCHES = ((1, 1152), (32, 1152), (128, 1152), (256, 1152), (32, 8192))
VOCAB, SAMPLED = 128_256, 64
FILTERS = {
    "greedy": (0.0, 0, 1.0, 0.0), "plain": (1.0, 0, 1.0, 0.0), "top_k 50, top_p 0.9": (1.0, 50, 0.9, 0.0),
    "top_p 0.9": (1.0, 0, 0.9, 0.0), "min_p 0.05": (1.0, 0, 1.0, 0.05),
}  # fmt: skip


@torch.inference_mode()
def kernels(limits: dict[str, float]) -> dict[str, Any]:
    """Decode attention by batch and context, and the sampler by filter."""
    return {"decode_attention": attention(limits), "sampler": _sampler()}


@torch.inference_mode()
def attention(
    limits: dict[str, float],
    kept: torch.dtype = torch.bfloat16,
    layout: Tuning | None = None,
    shapes: Sequence[tuple[int, int]] = BATCHES,
) -> list[dict[str, Any]]:
    """Decode attention by batch and context over a cache in `kept`, beside the time to read it. `layout`: of
    the kernel, the device's own if it is left out."""
    device = torch.device("cuda")
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    tuning = device_tuning(torch.cuda.get_device_name())
    if kept == FP8:
        tuning = for_fp8_kv(tuning)
    blocks = max(batch * -(-context // BLOCK_TOKENS) for batch, context in shapes) + 64
    kv = torch.empty(blocks, LAYERS, 2, BLOCK_TOKENS, KV_HEADS, DIM, dtype=kept, device=device)
    for some in kv.split(4096):
        some.copy_(torch.randn(some.shape, dtype=torch.bfloat16, device=device))
    order = torch.randperm(blocks, device=device).int()
    found = []
    for batch, context in shapes:
        each = -(-context // BLOCK_TOKENS)
        tables = order[: batch * each].view(batch, each).contiguous()
        slots = torch.randperm(batch, device=device).int()
        lengths = torch.full((batch,), context, dtype=torch.int32, device=device)
        query = torch.randn(batch, HEADS, DIM, dtype=torch.bfloat16, device=device)
        out = torch.full_like(query, torch.nan)
        chosen = layout or tuning.of(batch).decode
        work = decode_work(kv, HEADS, batch, processors, chosen)
        rows = DecodeRows(slots, lengths, tables)
        plan_decode(work, lengths)
        attend_decode(query, kv, 1, rows, work, out)
        mask = torch.zeros(1, 1, 1, context, dtype=torch.float64, device=device)
        table = tables[slots[-1:].long()].long()
        own = kv.view(torch.uint8)[table[0]].view(kept).float().double()
        wanted = ref.attend_decode(query[-1:].double(), own, 1, torch.arange(each, device=device)[None], mask)
        error = ((out[-1].double() - wanted[0]).norm() / wanted.norm()).item()
        us = graph_us(lambda i: attend_decode(query, kv, i % LAYERS, rows, work, out), 16)  # noqa: B023
        size = batch * context * KV_HEADS * DIM * 2 * kept.itemsize
        rate = size / us / 1e3
        found.append({
            "kept": str(kept), "layout": str(chosen), "batch": batch, "context": context,
            "mib": size >> 20, "us": us, "gb_s": rate, "of_read": rate / limits["read_gb_s"],
            "error": error, "whole": not bool(out.isnan().any()),
        })  # fmt: skip
        print("attention", found[-1], flush=True)
    return found


def _sampler() -> list[dict[str, Any]]:
    device = torch.device("cuda")
    found = []
    for name, row in FILTERS.items():
        for spread in (1.0, 4.0):
            logits = [(torch.randn(SAMPLED, VOCAB, device=device) * spread).bfloat16() for _ in range(6)]
            table = slot_table([row] * SAMPLED, device)

            def words(value: int) -> torch.Tensor:
                return torch.full((SAMPLED,), value, dtype=torch.int32, device=device)

            seeds = torch.randint(0, 1 << 62, (SAMPLED,), device=device)
            stops = torch.full((SAMPLED, 32), -1, dtype=torch.int32, device=device)
            choices = Choices(
                table, seeds, words(1 << 30), stops, words(0), words(0), words(0),
                mask_room(1, VOCAB, device),
            )  # fmt: skip
            slots, room = (
                torch.arange(SAMPLED, dtype=torch.int32, device=device),
                scratch(SAMPLED, VOCAB, device),
            )
            chosen = torch.zeros(2, SAMPLED, dtype=torch.int32, device=device)
            us = graph_us(lambda i: choose(logits[i % 6], slots, slots, choices, room, chosen), 12)  # noqa: B023
            found.append({"filter": name, "rows": SAMPLED, "vocab": VOCAB, "spread": spread, "us": us})
            print("sampler", found[-1], flush=True)
    return found
