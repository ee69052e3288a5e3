"""The dtypes in which weights stay quantised in memory: where each can be, and what loads it.

packed, packed8    on a CPU: in the blocks of a GGUF file, or in 4 bits as in a checkpoint
fp8                on a GPU: e4m3 with a scale for each row (schemes.py)
int4               on a GPU: in 4 bits as in a checkpoint, in 4 to 8 bits as in a GGUF file (int4.py)
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as GgmlType

import kernels.cpu_jit
from services.executor.checkpoint.config import read_shapes
from services.executor.checkpoint.loader import Dtype, TorchOptions, why_not_on_cpu
from services.executor.checkpoint.stored import Stored, scheme_in
from services.executor.checkpoint.weights import LoadPart
from services.executor.quantised.gguf import stored_gguf, type_of_blocks
from services.executor.quantised.int4 import LEAST_CAPABILITY as LEAST_FOR_INT4
from services.executor.quantised.int4 import can_take, dummy_in_int4, part_in_blocks, part_in_int4
from services.executor.quantised.schemes import LEAST_CAPABILITY, part_in_fp8


def best_packed(path: Path, ranks: int) -> tuple[str, str]:
    """See Dtype: packed for a GGUF file whose weights are mostly in blocks and for a checkpoint in 4 bits, on
    one rank with the instructions."""
    in_4_bits = scheme_in(path).kept_in == "int4"
    if path.suffix != ".gguf" and not in_4_bits:
        return "", ""
    if not kernels.cpu_jit.has(*kernels.cpu_jit.BYTES):
        return "f32", "this CPU has no AVX2 with F16C, or Numba is missing"
    if ranks > 1:
        return "f32", "several ranks share the layers, and cuts may fall within a block"
    if not in_4_bits and type_of_blocks(path) is None:
        return "f32", "few weights of the file are in blocks of 4 to 8 bits"
    return "packed", "the weights stay in the file's blocks; packed8 is faster, with other near ties"


def why_not_packed(options: TorchOptions, device: torch.device) -> str:
    """Why these weights cannot be packed on `device`; empty if they can."""
    path = options.model_path
    if why := why_not_on_cpu(options, device):
        return why
    if path.suffix != ".gguf" and scheme_in(path).kept_in != "int4":
        return f"dtype {options.dtype} is for GGUF files and checkpoints in 4 bits; use int8, bf16 or f32"
    return ""


def sample(path: Path) -> tuple[str, Callable[[int, int], Stored]] | None:
    """See Dtype: of the type of the most weights, if products take it; a checkpoint in 4 bits is as Q4_0."""
    kind = type_of_blocks(path) if path.suffix == ".gguf" else GgmlType.Q4_0
    if kind is None:
        return None

    def make(size_bytes: int, columns: int) -> Stored:
        from services.executor.quantised.gguf_blocks import InBlocks  # it imports Numba

        block, block_bytes = GGML_QUANT_SIZES[kind]
        row_bytes = columns // block * block_bytes
        raw = np.full((size_bytes // row_bytes, row_bytes), 1, np.uint8)
        return InBlocks.of(raw, kind, len(raw))

    return kind.name, make


def _load_int4(options: TorchOptions) -> LoadPart:
    if options.dummy:
        return dummy_in_int4
    if options.model_path.suffix != ".gguf":
        return part_in_int4
    from services.executor.quantised.gguf_blocks import part_in_groups  # it imports Numba

    return part_in_groups


def why_not_fp8(options: TorchOptions, device: torch.device) -> str:
    """Why these weights cannot be in fp8 on `device`; empty if they can."""
    if device.type != "cuda":
        return "dtype fp8 is for GPUs; on a CPU use packed (GGUF files), int8, bf16 or f32"
    if torch.cuda.get_device_capability(device) < LEAST_CAPABILITY:
        return (
            f"dtype fp8 needs compute capability {'.'.join(map(str, LEAST_CAPABILITY))}, which "
            f"{torch.cuda.get_device_name(device)} has not; use bf16"
        )
    if options.deterministic:
        return (
            "dtype fp8 is not deterministic: the library chooses its kernel by the number of rows; use bf16"
        )
    if options.model_path.suffix != ".gguf" and read_shapes(options.model_path).experts is not None:
        return "dtype fp8 has no products of experts; use bf16"
    return ""


def why_not_int4(options: TorchOptions, device: torch.device) -> str:
    """Why these weights cannot stay in 4 bits on `device`; empty if they can."""
    instead = "use dtype fp8 or bf16, which dequantise the weights at load, to twice or four times the memory"
    if device.type != "cuda":
        return "dtype int4 is for GPUs; on a CPU use packed, or f32, bf16 or int8, which dequantise at load"
    gguf = options.model_path.suffix == ".gguf"
    in_blocks = gguf and kernels.cpu_jit.available() and type_of_blocks(options.model_path) is not None
    if not options.dummy and not in_blocks and scheme_in(options.model_path).kept_in != "int4":
        return (
            "dtype int4 is for checkpoints in 4 bits (awq, gptq, compressed-tensors pack-quantized and "
            "mxfp4-pack-quantized) and GGUF files of 4 to 8 bits; use fp8 or bf16"
        )
    if in_blocks:
        shapes, _ = stored_gguf(options.model_path)
        if not can_take(shapes.hidden, shapes.intermediate):
            return (
                f"dtype int4 has no products of {shapes.hidden} by {shapes.intermediate} columns, which are "
                f"no multiples of 128; {instead}"
            )
    if importlib.util.find_spec("humming") is None:
        return f"weights in 4 bits need humming-kernels: pip install 'headrace[int4]'; or {instead}"
    if torch.cuda.get_device_capability(device) < LEAST_FOR_INT4:
        return (
            f"dtype int4 needs compute capability {'.'.join(map(str, LEAST_FOR_INT4))}, which "
            f"{torch.cuda.get_device_name(device)} has not; {instead}"
        )
    if options.deterministic:
        return f"dtype int4 is not deterministic: its kernels differ by the number of rows; {instead}"
    if gguf:
        return ""
    shapes = read_shapes(options.model_path)
    if shapes.experts is not None and not can_take(shapes.hidden, shapes.experts.width):
        return (
            f"dtype int4 has no products of experts of {shapes.hidden} by {shapes.experts.width} columns, "
            "which are no multiples of 128; use dtype bf16, which dequantises them at load"
        )
    return ""


PACKED = Dtype(
    computed=torch.float32, kv=torch.float16,  # half the reads of f32
    why_not=why_not_packed, load_part=lambda _: part_in_blocks, in_blocks=True, own_sums=True,
    best=best_packed, sample=sample,
)  # fmt: skip
FP8 = Dtype(why_not=why_not_fp8, load_part=lambda _: part_in_fp8)
INT4 = Dtype(why_not=why_not_int4, load_part=_load_int4, in_blocks=True)
