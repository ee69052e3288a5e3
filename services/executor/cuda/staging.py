"""What a forward reads, on its way to the device, and how its tokens are cut into tiles of attention.

plan ─▶ Cutter: tiles, and the room of a graph ─▶ Staging: pinned words ─▶ words on the device ─▶ ForwardStep
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.cuda import Event

from kernels.paged_attention.decode import DecodeRows
from kernels.paged_attention.prefill import PrefillTiles, tile_queries
from kernels.paged_attention.split import PrefillSplit, parts_room
from kernels.step_inputs.gpu import Resolved, move, resolve, scatter
from services.executor.cuda.inputs import (
    SPLIT_COLUMNS,
    Arranged,
    Layout,
    Words,
    fill,
    split_dense,
    tiles_of,
)
from services.executor.cuda.model import ForwardStep
from services.executor.cuda.slots import CudaSlots
from services.executor.cuda.splits import split_room, split_tiles
from services.executor.cuda.tuning import DeviceTuning
from services.executor.halves import Chunk
from services.executor.loading import Loaded

RING = 8  # steps whose inputs or answers may lie in pinned memory at once: more than are ever in flight
LONG_TOKENS = 4096
_CHUNKS = 32  # of a mixed graph beside decodes: each may end in a tile that is not full

NO_TILES: Words = np.zeros((4, 0), dtype=np.int32)
UNSET: tuple[Words, Words] = (np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.int32))
IDLE = Arranged(0, 0, np.zeros((3, 0), dtype=np.int32), (), np.zeros((3, 0), dtype=np.int32))


@dataclass(frozen=True, slots=True)
class Cut:
    """A step's tiles, and where they and its tokens lie. `dense`: what cuDNN attends."""

    layout: Layout
    tiles: Words
    dense: tuple[Chunk, ...] = ()


class Cutter:
    """Of one engine."""

    def __init__(self, loaded: Loaded, tuning: DeviceTuning, rows: int) -> None:
        """`rows`: the most that are sampled in a step."""
        shapes, device = loaded.shapes, loaded.cache.tensor.device
        self.apart = not tuning.by_row  # decodes have a kernel and graphs of their own
        self._has_dense = (  # cuDNN does it, and need not do it alike for every length
            loaded.cache.activations == torch.bfloat16 and shapes.head_dim in (64, 128) and not tuning.by_row
        )
        self._tile = tile_queries(shapes.heads, shapes.kv_heads, tuning.prefill)
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        self._splits = split_room(tuning.prefill, shapes.kv_heads, processors)
        self.parts = parts_room(
            self._splits.entries, shapes.kv_heads, tuning.prefill.rows, shapes.head_dim, device
        )
        self.samples = -(-rows // 4) * 4
        self._ragged = _CHUNKS if self.apart else rows

    def tiles(self, chunks: tuple[Chunk, ...]) -> Words:
        return split_tiles(tiles_of(chunks, self._tile), self._splits) if chunks else NO_TILES

    def whole_tiles(self, chunks: tuple[Chunk, ...]) -> Words:
        """None of them split."""
        return tiles_of(chunks, self._tile) if chunks else NO_TILES

    def splits(self, tokens: int) -> bool:
        """Whether a step of so many tokens may gain by splits."""
        return tokens // self._tile < self._splits.entries

    def layout(self, kind: str, size: int) -> Layout:
        """Of the graph of a kind for so many tokens, or rows."""
        if kind in ("decode", "sample"):
            return Layout(self.samples, size, 0)
        split = kind == "split"
        tiles = self._splits.entries if split else size // self._tile + min(size, self._ragged)
        return Layout(self.samples, size, -(-tiles // 4) * 4, split)

    def longest(self, tokens: int) -> Layout:
        """No step of up to so many tokens needs more."""
        return Layout(self.samples, tokens, max(tokens, self._splits.entries + 4), split=True)

    def wants_dense(self, step: Arranged) -> bool:
        """Whether a prompt in it is so long that cuDNN is worth the launches of all its kernels."""
        return self._has_dense and any(c.start == 0 and c.count > LONG_TOKENS for c in step.chunks)

    def without_graph(self, step: Arranged) -> Cut:
        """As long as it must be."""
        dense, rest = split_dense(step.chunks) if self._has_dense else ((), step.chunks)
        tiles = self.tiles(rest)
        room, split = -(-tiles.shape[1] // 4) * 4, len(tiles) == SPLIT_COLUMNS
        return Cut(Layout(self.samples, padded(step.tokens), room, split), tiles, dense)


class Staging:
    """The inputs of a forward, in pinned memory and on the device. What is queued reads the newest."""

    def __init__(self, loaded: Loaded, slots: CudaSlots, cutter: Cutter, tokens: int) -> None:
        """`tokens`: the most in a step."""
        self._cache, self._slots, self._parts = loaded.cache, slots, cutter.parts
        rows, device = slots.nobody, loaded.cache.tensor.device
        words = cutter.longest(tokens + rows + 16).words + 2 * len(slots.words)
        zeros = functools.partial(torch.zeros, dtype=torch.int32, device=device)
        self.words: Tensor = zeros(words)
        self._found: Tensor = zeros(2, padded(tokens + rows))
        self._lengths: Tensor = zeros(max(rows, 1))
        self._ring = [torch.empty(words, dtype=torch.int32, pin_memory=True) for _ in range(RING)]
        self._free: list[Event | None] = [None] * RING
        self._turn = 0

    def bring(self, layout: Layout, step: Arranged, tiles: Words, words: tuple[Words, Words] = UNSET) -> None:
        """Bring a step's words to the device and set those of the slots."""
        turn, self._turn = self._turn, (self._turn + 1) % RING
        free = self._free[turn]
        if free is not None:
            free.synchronize()
        pinned = self._ring[turn]
        buffer = pinned.numpy()
        fill(buffer, layout, step, tiles, self._slots.nobody)
        begin, count = -(-layout.words // 4) * 4, len(words[0])
        room = -(-count // 4) * 4
        buffer[begin : begin + count] = words[0]
        buffer[begin + room : begin + room + count] = words[1]
        end = begin + 2 * room
        move(pinned[:end], self.words)
        if count:
            scatter(
                self.words[begin : begin + count], self.words[begin + room : begin + room + count],
                self._slots.words,
            )  # fmt: skip
        free = self._free[turn] = Event()  # type: ignore[no-untyped-call]  # torch annotates it not
        free.record()

    def step(self, layout: Layout, rows: int, dense: tuple[Chunk, ...] = ()) -> ForwardStep:
        """The tensors of a forward over the words of the device, and the launch that resolves them."""
        tokens, at = layout.tokens, layout.token_at
        found = Resolved(self._found[0, :tokens], self._found[1, :tokens], self._lengths[: max(rows, 1)])
        state, words = self._slots.state, self.words
        resolve(words[at:], state, self._cache.spare, self._cache.block_tokens, found)
        slots = words[at : at + tokens]
        tiles = None
        if layout.tiles:
            named = words[layout.tile_at : layout.words].view(layout.tile_columns, -1)
            split = PrefillSplit(named[4], named[5], named[6], self._parts) if layout.split else None
            tiles = PrefillTiles(named[0], named[1], named[2], named[3], state.tables, split)
        decode = DecodeRows(slots[:rows], found.lengths, state.tables) if rows else None
        return ForwardStep(found, words[at + tokens : at + 2 * tokens], decode, tiles, dense)


def keep(hidden: Tensor, sampled: Tensor, rows: Tensor) -> None:
    """Have a step's sampled rows, which `rows` begin with, where a graph that samples finds them."""
    sampled.copy_(hidden.index_select(0, rows[: len(sampled)]))
    torch.arange(len(rows), out=rows)


def padded(tokens: int) -> int:
    return -(-tokens // 16) * 16
