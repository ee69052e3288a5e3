"""A step on the device: its inputs copied, its forward and its sampling queued, as graphs where there is one.

    copy inputs ─▶ set slot words ─▶ forward (graph by tokens) ─▶ head, sample (graph by samples) ─▶ copy ids
                                       stages before ─▶│   │─▶ stages behind


Decodes have a graph for each bucket of rows, mixed steps for each bucket of tokens; longer steps are launched
one kernel after the other, which a long step hides. Both halves meet in one buffer of hidden states. Where a
row's bits must not depend on its company (tuning.by_row) all steps are mixed ones. Of a pipeline only
the last stage samples.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.cuda import CUDAGraph, Event

from kernels.paged_attention.decode import DecodeRows
from kernels.paged_attention.prefill import PrefillTiles, tile_queries
from kernels.paged_attention.split import PrefillSplit, parts_room
from kernels.sampler.gpu import Chosen, choose, scratch
from kernels.step_inputs.gpu import Resolved, move, resolve, scatter
from services.executor.cuda.inputs import (
    SPLIT_COLUMNS,
    Arranged,
    Layout,
    Words,
    fill,
    samples_of,
    split_dense,
    tiles_of,
)
from services.executor.cuda.model import CudaModel, ForwardStep
from services.executor.cuda.pieces import CudaNotes
from services.executor.cuda.slots import CudaSlots
from services.executor.cuda.splits import split_room, split_tiles
from services.executor.cuda.tuning import DeviceTuning
from services.executor.halves import Chunk
from services.executor.loading import Loaded

if TYPE_CHECKING:
    from services.executor.cuda.two_streams import TwoStreams

# Not 224, 448, 576 or 896: the library is slower there than at the next (448 rows: 13.0 ms, 512: 9.5).
_ROW_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 256)
_TOKEN_BUCKETS = (32, 64, 96, 128, 192, 256, 320, 384, 512, 640, 768, 1024, 1280, 1536, 2048)
_RING = 8  # steps whose inputs or answers may lie in pinned memory at once: more than are ever in flight
_CHUNKS = 32  # of a mixed graph beside decodes: each may end in a tile that is not full


@dataclass(frozen=True, slots=True)
class _Inputs:
    """What a forward reads on the device: the words of its step, and what they resolve to."""

    words: Tensor
    found: Tensor  # [2, tokens]
    lengths: Tensor


class Passes:
    """Owns the buffers and the graphs. Runs in `torch.inference_mode` and on one thread, but for reading what
    `queue` returns."""

    def __init__(
        self,
        loaded: Loaded,
        model: CudaModel,
        slots: CudaSlots,
        tuning: DeviceTuning,
        most: int,
    ) -> None:
        """`most`: tokens in a step."""
        shapes, cache, stage = loaded.shapes, loaded.cache, loaded.stage
        self._model, self._slots, self._cache, self._stage = model, slots, cache, stage
        rows, device = slots.nobody, cache.tensor.device
        self._device = device
        self.apart = not tuning.by_row  # decodes have a kernel and graphs of their own
        self._has_dense = (  # cuDNN does it, and need not do it alike for every length
            cache.activations == torch.bfloat16 and shapes.head_dim in (64, 128) and not tuning.by_row
        )
        self._tile = tile_queries(shapes.heads, shapes.kv_heads, tuning.prefill)
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        self._splits = split_room(tuning.prefill, shapes.kv_heads, processors)
        self._parts = parts_room(
            self._splits.entries, shapes.kv_heads, tuning.prefill.rows, shapes.head_dim, device
        )
        self.row_buckets = [*(size for size in _ROW_BUCKETS if size < rows), rows]
        sizes = {*_TOKEN_BUCKETS, *(() if self.apart else self.row_buckets)}
        self.token_buckets = sorted(size for size in sizes if size <= most)
        self._ragged = _CHUNKS if self.apart else rows
        self._samples = -(-rows // 4) * 4
        tiles = max(most + rows + 16, self._splits.entries + 4)
        longest = Layout(self._samples, most + rows + 16, tiles, split=True)
        words = longest.words + 2 * len(slots.words)
        self._ring = [torch.empty(words, dtype=torch.int32, pin_memory=True) for _ in range(_RING)]
        self._ring_free: list[Event | None] = [None] * _RING
        self._turn = 0
        alone = loaded.ranks.size == 1
        self._inputs = _inputs(words, most + rows, rows, device)
        self._behind = self._inputs if alone else _inputs(words, most + rows, rows, device)  # of a half
        largest = max([*self.token_buckets, rows])
        self._hidden = torch.zeros(largest, shapes.hidden, dtype=cache.activations, device=device)
        self._came = None if stage.first else torch.zeros_like(self._hidden)  # from the stage before
        self._scratch = scratch(rows, shapes.vocab, device)
        self._chosen = torch.zeros(2, self._samples, dtype=torch.int32, device=device)
        self._answers = [
            torch.empty(2, self._samples, dtype=torch.int32, pin_memory=True) for _ in range(_RING)
        ]
        self._graphs: dict[tuple[str, int], CUDAGraph] = {}
        self._pool: Any = None  # of torch's allocator: the graphs share their memory

    def capture(self, told: Callable[[int, int], None], *, alone: bool = True) -> None:
        """Capture all graphs, the largest first: they share their memory. `told` hears how many are done. A
        GPU that is not `alone` sums with others: the library for that looks at its events meanwhile, on a
        thread of its own, which a capture forbids to all threads unless it is told not to."""
        forbids = "global" if alone else "thread_local"
        wanted = [("mixed", size) for size in reversed(self.token_buckets)]
        wanted += [("split", size) for kind, size in wanted if size // self._tile < self._splits.entries]
        wanted += [("decode", size) for size in reversed(self.row_buckets) if self.apart]
        wanted += [("sample", size) for size in reversed(self.row_buckets) if self._stage.last]
        for done, (kind, size) in enumerate(wanted):
            told(done, len(wanted))
            layout = self._layout(kind, size)
            self._copy(layout, _IDLE, _NO_TILES, _UNSET, self._inputs)
            run = self._sample if kind == "sample" else self._forward
            run(layout, size)
            torch.cuda.synchronize()
            graph = CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode=forbids):
                run(layout, size)
            self._pool = self._pool or graph.pool()
            self._graphs[kind, size] = graph
        told(len(wanted), len(wanted))

    def queue(self, step: Arranged, words: tuple[Words, Words]) -> None:
        """Queue a step's inputs and its forward."""
        tiles = self._tiles(step.chunks)
        kind = "split" if len(tiles) == SPLIT_COLUMNS else "mixed"
        if self.apart and not step.chunks:
            kind = "decode"
        buckets = self.row_buckets if kind == "decode" else self.token_buckets
        size = next((size for size in buckets if size >= step.tokens), 0)
        layout = self._layout(kind, size)
        graph = self._graphs.get((kind, size)) if tiles.shape[1] <= layout.tiles or kind == "decode" else None
        if graph is not None:
            self._copy(layout, step, tiles, words, self._inputs)
            self._receive(step.tokens, size)
            graph.replay()
            self._send(self._hidden, step.tokens)
            return
        made = self._prepare(step, words, self._inputs)
        came = self._receive(step.tokens, len(made.positions))
        hidden = self._model.hidden(made, came=came)
        if not self._stage.last:
            self._send(hidden, step.tokens)
            return
        _keep(hidden, self._hidden[: step.samples.shape[1]], self._inputs.words[: self._samples])

    def queue_halves(
        self,
        halves: tuple[Arranged, Arranged],
        order: Sequence[int],
        words: tuple[Words, Words],
        streams: TwoStreams,
    ) -> CudaNotes:
        """The same of a step in halves, of which the second has no decode rows; the `order` of their sample
        rows: see services.executor.halves. What they do when."""
        first, second = halves
        samples = samples_of(first, second, _padded(first.tokens), order)
        made = (
            self._prepare(replace(first, samples=samples), words, self._inputs),
            self._prepare(replace(second, samples=_IDLE.samples), _UNSET, self._behind),
        )
        notes = CudaNotes()
        hidden = streams.together([self._model.program(half, streams.sums) for half in made], notes)
        _keep(torch.cat(hidden), self._hidden[: len(order)], self._inputs.words[: self._samples])
        return notes

    def _prepare(self, step: Arranged, words: tuple[Words, Words], inputs: _Inputs) -> ForwardStep:
        """Queue the inputs of a forward that has no graph."""
        dense, rest = split_dense(step.chunks) if self._has_dense else ((), step.chunks)
        tiles = self._tiles(rest)
        room = -(-tiles.shape[1] // 4) * 4
        layout = Layout(self._samples, _padded(step.tokens), room, split=len(tiles) == SPLIT_COLUMNS)
        self._copy(layout, step, tiles, words, inputs)
        return self._step(layout, step.decode_rows, inputs, dense)

    def sample(self, count: int) -> tuple[Tensor, Event]:
        """Queue the head and the sampler for the first `count` sample rows of the step queued last. Ids and
        done `[2, rows]` in pinned memory, right once the event has come."""
        size = next(size for size in self.row_buckets if size >= count)
        graph = self._graphs.get(("sample", size))
        if graph is None:
            self._sample(self._layout("sample", size), size)
        else:
            graph.replay()
        answer = self._answers[self._turn]
        move(self._chosen, answer)
        ready = Event()  # type: ignore[no-untyped-call]  # torch annotates it not
        ready.record()
        return answer, ready

    def logits(self, count: int) -> Tensor:
        """Logits `[count, vocab]` in float32 of the first sample rows of the step queued last."""
        return self._model.logits(self._hidden, self._inputs.words[:count]).float()

    def _receive(self, tokens: int, rows: int) -> Tensor | None:
        """What the stage before gives for this step, followed by zeros: `[rows, hidden]`."""
        if self._came is None:
            return None
        came = (
            self._came[:rows] if rows <= len(self._came) else self._came.new_empty(rows, self._came.shape[1])
        )
        if tokens:
            self._stage.receive(came[:tokens])
        came[tokens:] = 0  # what padding adds up there must not grow from step to step
        return came

    def _send(self, hidden: Tensor, tokens: int) -> None:
        if tokens and not self._stage.last:
            self._stage.send(hidden[:tokens])

    def _tiles(self, chunks: tuple[Chunk, ...]) -> Words:
        return split_tiles(tiles_of(chunks, self._tile), self._splits) if chunks else _NO_TILES

    def _layout(self, kind: str, size: int) -> Layout:
        if kind in ("decode", "sample"):
            return Layout(self._samples, size, 0)
        split = kind == "split"
        tiles = self._splits.entries if split else size // self._tile + min(size, self._ragged)
        return Layout(self._samples, size, -(-tiles // 4) * 4, split)

    def _copy(
        self, layout: Layout, step: Arranged, tiles: Words, words: tuple[Words, Words], inputs: _Inputs
    ) -> None:
        """Bring a step's words to the device and set those of the slots."""
        turn, self._turn = self._turn, (self._turn + 1) % _RING
        free = self._ring_free[turn]
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
        move(pinned[:end], inputs.words)
        if count:
            scatter(
                inputs.words[begin : begin + count], inputs.words[begin + room : begin + room + count],
                self._slots.words,
            )  # fmt: skip
        free = self._ring_free[turn] = Event()  # type: ignore[no-untyped-call]  # torch annotates it not
        free.record()

    def _step(self, layout: Layout, rows: int, inputs: _Inputs, dense: tuple[Chunk, ...] = ()) -> ForwardStep:
        """The tensors of a forward over the words of the device, and the launch that resolves them."""
        tokens, at = layout.tokens, layout.token_at
        found = Resolved(inputs.found[0, :tokens], inputs.found[1, :tokens], inputs.lengths[: max(rows, 1)])
        state, words = self._slots.state, inputs.words
        resolve(words[at:], state, self._cache.spare, self._cache.block_tokens, found)
        slots = words[at : at + tokens]
        tiles = None
        if layout.tiles:
            named = words[layout.tile_at : layout.words].view(layout.tile_columns, -1)
            split = PrefillSplit(named[4], named[5], named[6], self._parts) if layout.split else None
            tiles = PrefillTiles(named[0], named[1], named[2], named[3], state.tables, split)
        decode = DecodeRows(slots[:rows], found.lengths, state.tables) if rows else None
        return ForwardStep(found, words[at + tokens : at + 2 * tokens], decode, tiles, dense)

    def _forward(self, layout: Layout, size: int) -> None:
        rows = min(size, self._slots.nobody) if self.apart else 0
        came = None if self._came is None else self._came[:size]
        self._model.hidden(self._step(layout, rows, self._inputs), self._hidden[:size], came)

    def _sample(self, layout: Layout, size: int) -> None:
        columns = self._inputs.words[: layout.token_at].view(3, -1)
        logits = self._model.logits(self._hidden, columns[0, :size])
        chosen = Chosen(self._chosen[0], self._chosen[1])
        choose(logits, columns[1], columns[2], self._slots.choices, self._scratch, chosen)


def _inputs(words: int, tokens: int, rows: int, device: torch.device) -> _Inputs:
    zeros = functools.partial(torch.zeros, dtype=torch.int32, device=device)
    return _Inputs(zeros(words), zeros(2, _padded(tokens)), zeros(max(rows, 1)))


def _keep(hidden: Tensor, sampled: Tensor, rows: Tensor) -> None:
    """Have a step's sampled rows, which `rows` begin with, where a graph that samples finds them."""
    sampled.copy_(hidden.index_select(0, rows[: len(sampled)]))
    torch.arange(len(rows), out=rows)


def _padded(tokens: int) -> int:
    return -(-tokens // 16) * 16


_NO_TILES: Words = np.zeros((4, 0), dtype=np.int32)
_UNSET: tuple[Words, Words] = (np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.int32))
_IDLE = Arranged(0, 0, np.zeros((3, 0), dtype=np.int32), (), np.zeros((3, 0), dtype=np.int32))
