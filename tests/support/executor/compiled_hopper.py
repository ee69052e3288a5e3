"""Compiles kernels.attention.hopper for an H100 and prints what a program of it takes, as JSON.

A process of its own: Triton's interpreter, which the tests turn on, leaves nothing to compile."""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.experimental.gluon._runtime import GluonASTSource

from kernels.attention import hopper
from services.executor.cuda.kernel_configs import device_tuning

_WORDS = ("table_blocks", "layer_row", "block_rows", "absent")
_COLUMNS = ("tables", "tile_slots", "tile_rows", "tile_starts", "tile_counts", "tile_part", "tile_parts")


def main() -> None:
    """The kernel for chunks in parts, which has everything that the other one has, by the type of KV."""
    print(json.dumps({kept: _taken(kept) for kept in ("bf16", "fp8e4nv")}))


def _taken(kept: str) -> dict[str, int]:
    narrow = kept != "bf16"
    layout = hopper._SHARED_NARROW[128] if narrow else hopper._SHARED
    tuning = device_tuning("NVIDIA H100 80GB HBM3").prefill_tma
    assert tuning is not None
    kinds = {
        **dict.fromkeys(("query", "out"), "*bf16"),
        **dict.fromkeys(("partial", "sums"), "*fp32"),
        **dict.fromkeys(_COLUMNS, "*i32"),
        **dict.fromkeys(_WORDS, "i32"),
        "kv": f"tensordesc<{kept}[16,128],{layout!r}>",
        "scale": "fp32",
    }
    sizes = {
        "KV_HEADS": 8, "GROUP": 4, "DIM": 128, "TILE": tuning.tile_tokens, "BLOCK_TOKENS": 16,
        "STAGES": tuning.stages, "SPLIT": True, "NARROW": narrow, "SHARED": hopper._SHARED,
        "REGISTERS": hopper._REGISTERS_NARROW if narrow else hopper._REGISTERS,
    }  # fmt: skip
    names = hopper._attend.arg_names
    source = GluonASTSource(
        hopper._attend,
        {name: kinds.get(name, "constexpr") for name in names},
        {(names.index(name),): value for name, value in sizes.items()},
        {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if kinds.get(name, "")[:1] == "*"},
    )
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    with tempfile.TemporaryDirectory() as folder:
        ptx = Path(folder) / "a.ptx"
        ptx.write_text(made.asm["ptx"])
        command = [get_ptxas(90).path, "-v", "--gpu-name=sm_90a", str(ptx), "-o", f"{folder}/a.cubin"]
        log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    spilled = sum(map(int, re.findall(r"(\d+) bytes spill stores", log)))
    return {"shared": made.metadata.shared, "warps": made.metadata.num_warps, "spilled_bytes": spilled}


if __name__ == "__main__":
    main()
