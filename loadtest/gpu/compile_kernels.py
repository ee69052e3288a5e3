"""Compiles the Triton kernels of an engine for GPUs that are not here.

    python -m loadtest.gpu.compile_kernels 80 86 89 90 100 120

Prints the largest shared memory of each kernel by compute capability; exits with 1 if one does not fit.

The engine's own code runs over tensors without memory, in the layouts of each device, and a kernel that would
be launched is compiled instead. Products of humming-kernels and collectives are not among them."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from kernels.attention import FP8
from kernels.attention.decode import DecodeRows, attend_decode, decode_work, plan_decode
from kernels.attention.prefill import PrefillSplit, PrefillTiles, attend_prefill, parts_room
from kernels.attention.ref import Scoring
from kernels.drafts.gpu import COLUMNS, accept, propose
from kernels.elementwise.gpu import DraftState, Resolved, SlotState, move, place_tiles, resolve, scatter
from kernels.moe.gpu import combine, dispatch, permute, route
from kernels.quantised.ref import Fp8Rows
from kernels.sampling.gpu import Choices, choose, scratch
from kernels.sampling.ref import PARAMETERS
from services.executor.checkpoint.kv_cache import KvCache
from services.executor.checkpoint.loader import Loaded
from services.executor.checkpoint.stored import Dense
from services.executor.checkpoint.weights import assemble, whole_model
from services.executor.cuda import model as cuda_model
from services.executor.cuda.compile_ahead import compile_ahead
from services.executor.cuda.kernel_configs import Computed, tuning_for
from services.executor.cuda.optioned import ForwardStep
from services.executor.model.description import GELU, Options, Shapes, describe
from services.executor.sampling.sampler import STOP_IDS

META = torch.device("meta")
SHARED_BYTES = {  # that one program may have, by compute capability
    80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10,
}  # fmt: skip
DEVICES = {90: "NVIDIA H200"}  # others have no layouts of their own
BLOCK, BLOCKS, CONTEXT, SLOTS, VOCAB = 16, 64, 4096, 1024, 128_256
ROWS = (1, 17, 64, 1024)  # of decodes, with each of the layouts
LLAMA = Shapes(
    architecture="llama", layers=2, hidden=4096, heads=32, kv_heads=8, head_dim=128, intermediate=14336,
    vocab=VOCAB, norm_eps=1e-5, rope_theta=5e5,
)  # fmt: skip
OPTIONED = (  # attention with windows, caps and sinks, in heads of the sizes that models with them have
    replace(
        LLAMA, heads=8, kv_heads=4, head_dim=256, qk_norm=True,
        options=Options(
            windows=(512, 0), local_rope=(1e4, ()), attention_cap=50.0, post_norms=True, act=GELU,
            embedding_scale=64.0, logit_cap=30.0,
        ),
    ),
    replace(
        LLAMA, heads=64, head_dim=64, qkv_bias=True, out_bias=True,
        options=Options(windows=(128, 0), sinks=True),
    ),
)  # fmt: skip


def ints(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.int32, device=META)


@contextmanager
def compiling_for(capability: int, found: dict[str, int]) -> Iterator[None]:
    """Kernels are compiled for such a GPU; `found` gets the largest shared memory of each."""
    target = GPUTarget("cuda", capability, 32)
    driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: target,
            get_current_device=lambda: capability,
            get_current_stream=lambda device: 0,
        )
    )
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(multi_processor_count=132)  # type: ignore[misc, assignment]  # there is none

    def note(*, src: Any, metadata: dict[str, Any], **more: Any) -> None:
        found[src.name] = max(found.get(src.name, 0), metadata["shared"])

    knobs.compilation.listener = note
    yield


def loaded_model(shapes: Shapes, *, wide: bool, kept: torch.dtype, fp8: bool) -> Loaded:
    dtype = torch.float32 if wide else torch.bfloat16
    sizes = {part.name: part.shape for part, _ in describe(shapes).parts()}
    weights = assemble(
        whole_model(shapes),
        lambda part, layer: Dense.of(torch.empty(sizes[part.name], dtype=dtype, device=META)),
        dtype, META,
    )  # fmt: skip
    kv = torch.empty(BLOCKS + 1, 2, 2, BLOCK, shapes.kv_heads, shapes.head_dim, dtype=kept, device=META)
    return Loaded(
        shapes=shapes, weights=weights, cache=KvCache(kv, dtype), context=CONTEXT, fingerprint="", files=(),
        threads=1, kept_in="fp8" if fp8 else "",
    )  # fmt: skip


def run_forward(computed: Computed, *, kept: torch.dtype, fp8: bool = False, shapes: Shapes = LLAMA) -> None:
    """Steps of decodes, with drafts too, and steps with chunks of prompts, whole and in parts."""
    loaded, tuning = loaded_model(shapes, wide=computed.wide, kept=kept, fp8=fp8), tuning_for(computed)
    kv = loaded.cache.tensor
    works = {each.decode: decode_work(kv, shapes.heads, SLOTS, 132, each.decode, 8) for each in tuning.all()}
    model = cuda_model.CudaModel(loaded, works, tuning, SLOTS)
    if fp8:
        for layer in model._layers:
            for name in ("qkv", "out", "gate_up", "down"):
                scales = torch.empty(len(layer[name]), device=META)
                layer[name] = Fp8Rows(layer[name].to(FP8), scales)
    tables = ints(SLOTS + 1, CONTEXT // BLOCK)

    def step(tokens: int, rows: int, queries: int = 1, entries: int = 0) -> None:
        found = Resolved(ints(tokens), ints(tokens), ints(max(rows, 1)))
        decode = (
            DecodeRows(ints(rows * queries), found.lengths, tables, queries, ints(tokens)) if rows else None
        )
        tiles, split = None, None
        if tokens > rows * queries:
            count = entries or 32
            if entries:
                room = parts_room(entries, shapes.kv_heads, tuning.prefill.rows, shapes.head_dim, META)
                split = PrefillSplit(ints(count), ints(count), ints(count), room)
            tiles = PrefillTiles(ints(count), ints(count), ints(count), ints(count), tables, split)
        model.hidden(ForwardStep(found, ints(tokens), decode, tiles))

    if not computed.deterministic:
        for rows in ROWS:
            step(rows, rows)
        step(64, 8, queries=8)
    step(512, 0 if computed.deterministic else 256)
    if not tuning.prefill.one_loop:
        step(512, 256, entries=32)


def run_scored(computed: Computed) -> None:
    """Attention with a window, a cap and sinks."""
    tuning = tuning_for(replace(computed, options=True))
    kv = torch.empty(BLOCKS + 1, 2, 2, BLOCK, 8, 128, dtype=torch.bfloat16, device=META)
    by = Scoring(window=128, cap=50.0, sinks=torch.empty(32, device=META))
    query = torch.empty(64, 32, 128, dtype=torch.bfloat16, device=META)
    tables, work = ints(SLOTS + 1, CONTEXT // BLOCK), decode_work(kv, 32, SLOTS, 132, tuning.many.decode)
    rows = DecodeRows(ints(64), ints(64), tables, 1, ints(64))
    plan_decode(work, rows, by.window)
    attend_decode(query, kv, 0, rows, work, torch.empty_like(query), by)
    tiles = PrefillTiles(ints(32), ints(32), ints(32), ints(32), tables, None)
    attend_prefill(query, kv, 0, tiles, tuning.prefill, torch.empty_like(query), by)


def run_others() -> None:
    """What stands before and after a forward: inputs, drafts, sampling, experts."""
    history, place = ints(SLOTS + 1, CONTEXT + 1), ints(SLOTS + 1)
    drafts = DraftState(place, ints(SLOTS + 1, 8), place, place, place, history)
    choices = [
        Choices(
            parameters=torch.empty(SLOTS + 1, len(PARAMETERS), device=META),
            seeds=torch.empty(SLOTS + 1, dtype=torch.int64, device=META), max_lengths=place,
            stop_ids=ints(SLOTS + 1, STOP_IDS), last_tokens=place, done=place, masked=place,
            masks=torch.empty(SLOTS, VOCAB // 8, dtype=torch.uint8, device=META),
            places=place if drafted else None, history=history if drafted else None,
        )
        for drafted in (False, True)
    ]  # fmt: skip
    room, words = scratch(SLOTS, VOCAB, META), ints(4096)
    for dtype in (torch.bfloat16, torch.float32):
        for each in choices:
            logits = torch.empty(64, VOCAB, dtype=dtype, device=META)
            choose(logits, ints(64), ints(64), each, room, ints(2, 64))
    choose(logits, ints(64), ints(64), choices[1], room, ints(2, 64), verifies=True)
    for placed in (None, drafts):
        state = SlotState(ints(SLOTS + 1, CONTEXT // BLOCK), place, place, placed)
        for queries in (1, 2, 4, 8) if placed else (1,):
            found = Resolved(ints(64), ints(64), ints(64 // queries))
            resolve(words, state, BLOCKS, BLOCK, found, queries)
    for queries in (2, 4, 8):
        propose(ints(8 * queries), queries, place, drafts)
        accept(
            (ints(8 * queries), ints(8 * queries)),
            ints(2, 64),
            ints(64),
            choices[1],
            ints(queries + COLUMNS, 8),
        )
        place_tiles((ints(8), ints(8), ints(8), ints(8)), ints(64), place, queries)
    scatter(ints(8), ints(8), words)
    move(words, ints(4096))
    x = torch.empty(64, 2048, dtype=torch.bfloat16, device=META)
    weights, chosen = route(torch.empty(64, 64, dtype=torch.bfloat16, device=META), 8, renormalise=True)
    permuted = permute(chosen, 0, 64)
    combine(dispatch(x, permuted), permuted, weights)


def compile_all(capability: int) -> dict[str, Any]:
    """The shared memory of every kernel, or a list of those that do not fit."""
    found: dict[str, int] = {}
    usual = Computed(device=DEVICES.get(capability, "another"), head_dim=128, block_tokens=BLOCK)

    def launch() -> None:
        run_others()
        run_forward(usual, kept=torch.bfloat16)
        run_scored(usual)
        if capability >= 89:
            run_forward(replace(usual, fp8_kv=True), kept=FP8)
        if capability >= 90:
            run_forward(usual, kept=torch.bfloat16, fp8=True)
        run_forward(replace(usual, wide=True), kept=torch.float32)
        run_forward(replace(usual, deterministic=True), kept=torch.bfloat16)
        for shapes in OPTIONED:
            other = replace(usual, head_dim=shapes.head_dim, options=True)
            run_forward(other, kept=torch.bfloat16, shapes=shapes)
            run_forward(replace(other, deterministic=True), kept=torch.bfloat16, shapes=shapes)

    with compiling_for(capability, found), torch.inference_mode():
        count = compile_ahead(launch)
    most = SHARED_BYTES[capability]
    over = {name: size for name, size in found.items() if size > most}
    return {"compiled": count, "limit": most, "over": over, "shared": dict(sorted(found.items()))}


def main() -> int:
    """Returns 1 if a kernel needs more shared memory than its GPU has."""
    made = {name: compile_all(int(name)) for name in sys.argv[1:] or map(str, SHARED_BYTES)}
    print(json.dumps({"triton": triton.__version__, "torch": torch.__version__, **made}, indent=1))
    return int(any(each["over"] for each in made.values()))


if __name__ == "__main__":
    sys.exit(main())
