"""The values of GGUF's types of tensors. gguf.py and gguf_blocks.py read them."""

from __future__ import annotations

import math

import numpy as np
import torch
from gguf.constants import GGMLQuantizationType as Kind
from gguf.quants import dequantize as gguf_dequantize
from numpy.typing import NDArray
from torch import Tensor


def dequantize(raw: NDArray[np.uint8], kind: Kind, shape: tuple[int, ...]) -> Tensor:
    """The values of a tensor of `shape`, float32. Raises the gguf library's NotImplementedError for a type
    that it cannot read; the caller adds the file and the tensor.

    The gguf library's NumPy code is the reference, and serves every type outside FAST. FAST has the types
    of common small models in torch, bit-equal and on all threads: 0.3 s where NumPy takes 2 s, for 135M
    parameters on 2 cores. Layouts: ggml-common.h of llama.cpp."""
    if kind == Kind.F32:
        return torch.from_numpy(raw.view(np.float32).copy()).view(shape)
    if kind in FAST:
        return FAST[kind](torch.from_numpy(raw.copy())).view(shape)
    return torch.from_numpy(gguf_dequantize(raw.reshape(math.prod(shape[:-1]), -1), kind)).view(shape)


def _float16s(blocks: Tensor, count: int) -> Tensor:
    """The first `count` float16 numbers of each block as float32."""
    return blocks[:, : 2 * count].contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor, scale: Tensor, offset: Tensor) -> Tensor:
    """32 values of 4 bits per block of 16 bytes, low nibbles first: `nibble * scale + offset`."""
    values = torch.empty(packed.shape[0], 32)
    torch.mul(packed & 15, scale, out=values[:, :16])
    torch.mul(packed >> 4, scale, out=values[:, 16:])
    return values.add_(offset)


def _q4_0(raw: Tensor) -> Tensor:
    blocks = raw.view(-1, 18)  # scale f16, 16 bytes of nibbles around 8
    scale = _float16s(blocks, 1)
    return _nibbles(blocks[:, 2:], scale, scale * -8)


def _q4_1(raw: Tensor) -> Tensor:
    blocks = raw.view(-1, 20)  # scale f16, least value f16, 16 bytes of nibbles
    scale, least = _float16s(blocks, 2).chunk(2, -1)
    return _nibbles(blocks[:, 4:], scale, least)


def _q8_0(raw: Tensor) -> Tensor:
    blocks = raw.view(-1, 34)  # scale f16, 32 int8
    return blocks[:, 2:].view(torch.int8) * _float16s(blocks, 1)


def _f16(raw: Tensor) -> Tensor:
    return raw.view(torch.float16).float()


def _bf16(raw: Tensor) -> Tensor:
    return raw.view(torch.bfloat16).float()


FAST = {  # others are read with the gguf library
    Kind.F16: _f16, Kind.BF16: _bf16, Kind.Q4_0: _q4_0, Kind.Q4_1: _q4_1, Kind.Q8_0: _q8_0,
}  # fmt: skip
