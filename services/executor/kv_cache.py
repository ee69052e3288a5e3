"""The paged KV cache: one tensor, block-major.

    kv [block][layer][K|V][token][kv_head][head_dim]

A block of all layers is one contiguous run, so that a copy between tiers is one transfer. Behind the
blocks of the scheduler lies one more, the spare block: rows of finished sequences write there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.kv_blocks import copy_blocks
from services.executor.shapes import Shapes
from shared.errors import SetupError
from shared.messages import Ints

LAYOUT = "block.layer.kv.token.head.dim"
_CPU_BYTES = 1 << 30
_GPU_SHARE = 0.9  # of the memory free once the weights are loaded; the rest is for activations


class KvCache:
    """Owns the device memory of the blocks. Zeroed at start: a masked score must not meet a NaN."""

    def __init__(self, tensor: Tensor, activations: torch.dtype | None = None) -> None:
        """`tensor` is `[blocks + 1, layers, 2, block_tokens, kv_heads, head_dim]`; `activations` is what the
        model computes in, where KV is kept in another dtype."""
        self.tensor = tensor
        self.activations = activations or tensor.dtype
        self.blocks = tensor.shape[0] - 1
        self.spare = self.blocks
        self.block_tokens = tensor.shape[3]
        self.bytes_per_block = tensor[0].numel() * tensor.element_size()

    def copy(self, source: Ints, target: Ints) -> None:
        """Copy whole blocks: `source[i]` to `target[i]`."""
        if len(source):
            device = self.tensor.device
            copy_blocks(self.tensor, torch.tensor(source, device=device), torch.tensor(target, device=device))


def allocate(shapes: Shapes, blocks: int, block_tokens: int, kept: torch.dtype, like: Tensor) -> KvCache:
    """A cache in `kept` of `blocks` blocks and the spare one, for activations like `like` and on its device.
    Raises SetupError when the memory is not there."""
    shape = (blocks + 1, shapes.layers, 2, block_tokens, shapes.kv_heads, shapes.head_dim)
    try:
        return KvCache(torch.zeros(shape, dtype=kept, device=like.device), like.dtype)
    except (RuntimeError, MemoryError) as error:  # torch says out of memory with either
        raise SetupError(
            f"no memory for {blocks} KV blocks on {like.device} ({error}); lower kv_blocks"
        ) from error


def block_bytes(shapes: Shapes, block_tokens: int, dtype: torch.dtype) -> int:
    """The size of one block of all layers."""
    return shapes.layers * 2 * block_tokens * shapes.kv_heads * shapes.head_dim * dtype.itemsize


def fitting_blocks(size_bytes: int, device: torch.device, most: int) -> int:
    """How many blocks of `size_bytes` to have: what free memory allows, and not over `most`."""
    budget = _CPU_BYTES
    if device.type == "cuda":
        budget = int(torch.cuda.mem_get_info(device)[0] * _GPU_SHARE)
    return max(1, min(budget // size_bytes - 1, most))
