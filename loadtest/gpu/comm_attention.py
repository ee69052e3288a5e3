"""Attention of a rank's prompts for loadtest.gpu.comm: as the engine does it on a GPU, by torch on a CPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.elementwise import apply_rope, rms_norm, rope_table
from services.executor.model.description import Shapes
from services.executor.parallel.step_split import Chunk

BLOCK_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Norms:
    """Of the heads of q and k, `[head_dim]`, or None."""

    query: Tensor | None
    key: Tensor | None


class Attention(Protocol):
    """Knows the KV of all prompts, of `room` tokens each."""

    def prepare(self, chunks: tuple[Chunk, ...]) -> Any:
        """What the device must know of a pass of these chunks."""

    def __call__(self, layer: int, qkv: Tensor, norms: Norms, prepared: Any) -> Tensor:
        """`[tokens, heads * head_dim]`."""


class HostAttention:
    """See Attention."""

    def __init__(self, shapes: Shapes, prompts: int, room: int) -> None:
        self._shapes = shapes
        self._kv = torch.zeros(shapes.layers, 2, prompts, room, shapes.kv_heads, shapes.head_dim)
        frequencies = torch.tensor(shapes.inverse_frequencies(), dtype=torch.float64)
        self._rotations = rope_table(frequencies, room, shapes.rope_gain)

    def prepare(self, chunks: tuple[Chunk, ...]) -> tuple[Chunk, ...]:
        return chunks

    def __call__(self, layer: int, qkv: Tensor, norms: Norms, prepared: tuple[Chunk, ...]) -> Tensor:
        shapes, out = self._shapes, []
        for chunk in prepared:
            end = chunk.start + chunk.count
            heads = qkv[chunk.first : chunk.first + chunk.count].view(chunk.count, -1, shapes.head_dim)
            query, key, value = torch.split(heads, [shapes.heads, shapes.kv_heads, shapes.kv_heads], 1)
            if norms.query is not None and norms.key is not None:
                query = rms_norm(query, norms.query, shapes.norm_eps)
                key = rms_norm(key, norms.key, shapes.norm_eps)
            kv, rotation = self._kv[layer, :, chunk.slot], self._rotations[chunk.start : end]
            kv[0, chunk.start : end] = apply_rope(key, rotation)
            kv[1, chunk.start : end] = value
            sees = torch.ones(end, end).tril()[chunk.start :].bool()
            q, k, v = (x.transpose(0, 1) for x in (apply_rope(query, rotation), kv[0, :end], kv[1, :end]))
            found = F.scaled_dot_product_attention(q, k, v, attn_mask=sees, enable_gqa=True)
            out.append(found.transpose(0, 1).reshape(chunk.count, -1))
        return torch.cat(out)


class CudaAttention:
    """See Attention: the engine's kernels over a paged cache, cuDNN for long chunks that start a prompt."""

    def __init__(self, shapes: Shapes, prompts: int, room: int, device: torch.device) -> None:
        from services.executor.cuda.kernel_configs import device_tuning

        self._shapes = shapes
        blocks = -(-room // BLOCK_TOKENS)
        size = (prompts * blocks, shapes.layers, 2, BLOCK_TOKENS, shapes.kv_heads, shapes.head_dim)
        self._kv = torch.zeros(size, dtype=torch.bfloat16, device=device)
        order = torch.randperm(prompts * blocks, generator=torch.Generator().manual_seed(3))
        self._tables = order.view(prompts, blocks).int().to(device)
        frequencies = torch.tensor(shapes.inverse_frequencies(), dtype=torch.float64)
        self._rotations = rope_table(frequencies, room, shapes.rope_gain).to(device)
        self._tuning = device_tuning(torch.cuda.get_device_name(device)).prefill

    def prepare(self, chunks: tuple[Chunk, ...]) -> Any:
        from kernels.attention.prefill import PrefillTiles, tile_queries
        from kernels.elementwise.gpu import RopeInputs
        from services.executor.cuda.input_batch import split_dense, tiles_of

        device, shapes = self._tables.device, self._shapes
        positions = torch.cat([torch.arange(c.start, c.start + c.count) for c in chunks]).to(device)
        slots = torch.cat([torch.full((c.count,), c.slot) for c in chunks]).to(device)
        blocks = self._tables[slots, positions // BLOCK_TOKENS]
        places = (blocks * BLOCK_TOKENS + positions % BLOCK_TOKENS).int()
        placed = RopeInputs(self._rotations, positions.int(), places, dtype=torch.bfloat16)
        dense, rest = split_dense(chunks)
        tiles = None
        if rest:
            columns = tiles_of(rest, tile_queries(shapes.heads, shapes.kv_heads, self._tuning))
            tiles = PrefillTiles(*torch.from_numpy(columns.copy()).to(device), tables=self._tables)
        return placed, dense, tiles

    def __call__(self, layer: int, qkv: Tensor, norms: Norms, prepared: Any) -> Tensor:
        from kernels.attention.prefill import attend_prefill
        from kernels.elementwise.gpu import HeadNorms, rope_write
        from services.executor.cuda.model import _attend_dense

        (placed, dense, tiles), shapes = prepared, self._shapes
        head_norms = HeadNorms(norms.query, norms.key, shapes.norm_eps)
        query = rope_write(qkv, placed, head_norms, self._kv, layer, shapes.heads)
        out = torch.empty_like(query)
        if tiles is not None:
            attend_prefill(query, self._kv, layer, tiles, self._tuning, out)
        for chunk in dense:
            _attend_dense(query, qkv, chunk, shapes, out)
        return out.view(len(qkv), -1)
