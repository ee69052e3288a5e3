"""Runs split steps, one micro-batch's collectives under the other's compute, as one CUDA graph where it fits.

    inputs of A, inputs of B ─▶ both passes (graph by the tokens of a micro-batch), sampled rows ─▶ head,
    sample

Without a graph the host launches every kernel of both micro-batches, and several GPUs wait for it. In a graph
all chunks are attended by block tables: cuDNN needs their lengths. graph_runner.py owns it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.cuda import CUDAGraph

from kernels.inputs.gpu import move
from services.executor.cuda.comm_overlap import (
    EventSegmentTimer,
    SegmentTimer,
    TimestampSegmentTimer,
    TwoStreams,
)
from services.executor.cuda.input_batch import (
    IDLE,
    NO_TILES,
    RING,
    UNSET,
    ArrangedStep,
    InputStaging,
    Layout,
    TilePlanner,
    Words,
    keep,
    padded,
    samples_of,
)
from services.executor.cuda.model import CudaModel, ForwardStep
from services.executor.engine import MAX_SEGMENTS, Segment
from services.executor.parallel.step_split import CUT_TOKENS

# Tokens of a micro-batch.
_BUCKETS = (512, 640, 768, 1024, 1280, 1536, 2048, 2560, 3072, 4096, 5120, 6144, 8192)

Segments = Callable[[], tuple[Segment, ...]]  # call it once the step has ended on the device


@dataclass(frozen=True, slots=True)
class _Captured:
    layout: Layout
    rows: int  # decode rows of the first micro-batch
    timer: TimestampSegmentTimer
    graph: CUDAGraph

    def holds(self, first: ArrangedStep, second: ArrangedStep, tiles: tuple[Words, Words]) -> bool:
        tokens = max(first.tokens, second.tokens)
        return (
            tokens <= self.layout.tokens
            and first.decode_rows <= self.rows
            and max(each.shape[1] for each in tiles) <= self.layout.tiles
        )


class SplitGraphRunner:
    """Split steps of an engine with several ranks. Runs on the thread of its GraphRunner."""

    def __init__(
        self,
        model: CudaModel,
        streams: TwoStreams,
        tile_planner: TilePlanner,
        stagings: tuple[InputStaging, InputStaging],
        sampled: Tensor,
        most: int,
    ) -> None:
        """`sampled` `[rows, hidden]`: gets the head's input. `most`: tokens in a step."""
        self._model, self._streams, self._tile_planner = model, streams, tile_planner
        self._stagings, self._sampled = stagings, sampled
        largest = -(-most // (2 * CUT_TOKENS)) * CUT_TOKENS
        self._buckets = (*(size for size in _BUCKETS if size < largest), largest)
        self._graphs: dict[int, _Captured] = {}
        self._pool: Any = None  # torch's memory pool that the graphs share
        self._times = torch.empty(RING, 4 * MAX_SEGMENTS, dtype=torch.int32, pin_memory=True)
        self._turn = 0

    def capture(self, tokens: int) -> None:
        """Capture the graph of steps of so many tokens. All ranks call it at once, larger steps first."""
        size = next(size for size in self._buckets if 2 * size >= tokens)
        layout = self._tile_planner.layout("mixed", size)
        rows = min(size, len(self._sampled)) if self._tile_planner.apart else 0
        for staging in self._stagings:
            staging.stage(layout, IDLE, NO_TILES)
        self._run(layout, rows, TimestampSegmentTimer(self._sampled.device))
        torch.cuda.synchronize()
        graph, timer = CUDAGraph(), TimestampSegmentTimer(self._sampled.device)
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            self._run(layout, rows, timer)
        self._pool = self._pool or graph.pool()
        self._graphs[size] = _Captured(layout, rows, timer, graph)

    def capture_from(self, tokens: int) -> None:
        """Capture the graphs of steps of at least so many tokens; drop the others."""
        for size in reversed(self._buckets):
            if 2 * size < tokens:
                self._graphs.pop(size, None)
            elif size not in self._graphs:
                self.capture(2 * size)

    def queue(
        self,
        micro_batches: tuple[ArrangedStep, ArrangedStep],
        order: Sequence[int],
        updates: tuple[Words, Words],
    ) -> Segments:
        """Queue the inputs and the forwards of a split step. The second micro-batch has no decode rows.
        `order` of the sample rows: see services.executor.parallel.step_split. Returns the segments of the
        step."""
        first, second = micro_batches
        tiles = self._tile_planner.whole_tiles(first.chunks), self._tile_planner.whole_tiles(second.chunks)
        held = (self._graphs[size] for size in sorted(self._graphs))
        captured = next((each for each in held if each.holds(first, second, tiles)), None)
        if captured is None:
            return self._launch(first, second, order, updates)
        samples = samples_of(first, second, captured.layout.tokens, order)
        staging_a, staging_b = self._stagings
        staging_a.stage(captured.layout, replace(first, samples=samples), tiles[0], updates)
        staging_b.stage(captured.layout, replace(second, samples=IDLE.samples), tiles[1])
        captured.graph.replay()
        turn, self._turn = self._turn, (self._turn + 1) % RING
        times = self._times[turn]
        move(captured.timer.times.view(torch.int32).view(-1), times)
        return lambda: captured.timer.segments(times.view(torch.int64).view(-1, 2))

    def _run(self, layout: Layout, rows: int, timer: SegmentTimer) -> None:
        staging_a, staging_b = self._stagings
        first, second = staging_a.step(layout, rows), staging_b.step(layout, 0)
        self._run_interleaved(first, second, len(self._sampled), timer)

    def _launch(
        self, first: ArrangedStep, second: ArrangedStep, order: Sequence[int], updates: tuple[Words, Words]
    ) -> Segments:
        """The same without a graph."""
        samples = samples_of(first, second, padded(first.tokens), order)
        made = []
        for staging, micro_batch, its_samples, its_words in zip(
            self._stagings, (first, second), (samples, IDLE.samples), (updates, UNSET), strict=True
        ):
            cut = self._tile_planner.without_graph(micro_batch)
            staging.stage(cut.layout, replace(micro_batch, samples=its_samples), cut.tiles, its_words)
            made.append(staging.step(cut.layout, micro_batch.decode_rows, cut.dense))
        timer = EventSegmentTimer()
        self._run_interleaved(made[0], made[1], len(order), timer)
        return timer.segments

    def _run_interleaved(
        self, first: ForwardStep, second: ForwardStep, rows: int, timer: SegmentTimer
    ) -> None:
        sums = self._streams.sums
        hidden = self._streams.run_interleaved(
            [self._model.forward_pass(micro_batch, sums) for micro_batch in (first, second)], timer
        )
        keep(torch.cat(hidden), self._sampled[:rows], self._stagings[0].words[: self._tile_planner.samples])
