"""GraphRunner queues a step's inputs, forward and sampling on the device, as CUDA graphs where they fit.

    copy inputs ─▶ update slots ─▶ forward (graph by tokens) ─▶ head, sample (graph by samples) ─▶ copy ids
                            from the stage before ─▶│   │─▶ to the next stage

Decode steps have a graph for each bucket of rows, mixed steps for each bucket of tokens. Longer steps are
launched kernel by kernel, which their length hides. The forward leaves hidden states in a buffer that
sampling reads. If a row's bits must not depend on other rows (tuning.by_row), all steps are mixed steps. Only
the last stage of a pipeline samples.

Steps with drafts have graphs of their own, by rows and by the drafts of each row; all other steps run the
same graphs as without drafts.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.cuda import CUDAGraph, Event

from kernels.drafts.gpu import COLUMNS, accept
from kernels.elementwise.gpu import move
from kernels.sampling.gpu import choose, scratch
from services.executor.checkpoint.loader import Loaded
from services.executor.cuda import input_batch
from services.executor.cuda.comm_overlap import (
    EventSegmentTimer,
    SegmentTimer,
    TimestampSegmentTimer,
    TwoStreams,
)
from services.executor.cuda.compile_ahead import compile_ahead
from services.executor.cuda.kernel_configs import DeviceTuning
from services.executor.cuda.model import CudaModel
from services.executor.cuda.optioned import ForwardStep
from services.executor.engine import MAX_SEGMENTS, Segment
from services.executor.parallel.step_split import CUT_TOKENS

log = logging.getLogger("headrace.executor")

# Not 224, 448, 576 or 896: the library is slower there than at the next bucket (448 rows: 13.0 ms, 512: 9.5).
_ROW_BUCKETS = (
    1,
    2,
    4,
    8,
    16,
    24,
    32,
    48,
    64,
    80,
    96,
    112,
    128,
    160,
    192,
    256,
    320,
    384,
    512,
    640,
    768,
    1024,
)
_TOKEN_BUCKETS = (32, 64, 96, 128, 192, 256, 320, 384, 512, 640, 768, 1024, 1280, 1536, 2048)
# With several GPUs the host launches too slowly.
_LONG_BUCKETS = (2560, 3072, 4096, 5120, 6144, 8192)
# Tokens of a micro-batch.
_SPLIT_BUCKETS = (512, 640, 768, 1024, 1280, 1536, 2048, 2560, 3072, 4096, 5120, 6144, 8192)

_ADAPTED = "+"  # after the kind of a graph whose rows may have adapters

Segments = Callable[[], tuple[Segment, ...]]  # call it once the step has ended on the device


class GraphRunner:
    """Owns the buffers and the graphs. Runs in `torch.inference_mode` and on one thread at a time; another
    thread may read the results of `sample`."""

    def __init__(
        self,
        loaded: Loaded,
        model: CudaModel,
        slots: input_batch.CudaSlots,
        tuning: DeviceTuning,
        most: int,
        streams: TwoStreams | None = None,
    ) -> None:
        """`most`: tokens in a step. With `streams` steps may be split into micro-batches."""
        shapes, cache, stage = loaded.shapes, loaded.cache, loaded.stage
        self._model, self._slots, self._stage = model, slots, stage
        rows, device = slots.spare_slot, cache.tensor.device
        self._tile_planner = input_batch.TilePlanner(loaded, tuning, rows)
        self.apart = self._tile_planner.apart
        self._staging = input_batch.InputStaging(loaded, slots, self._tile_planner, most)
        self.row_buckets = [*(size for size in _ROW_BUCKETS if size < rows), rows]
        long = _LONG_BUCKETS if loaded.ranks.size > 1 else ()
        sizes = {*_TOKEN_BUCKETS, *long, *(() if self.apart else self.row_buckets)}
        self.token_buckets = sorted(size for size in sizes if size <= most)
        self._draft_buckets = draft_buckets(self.row_buckets, most) if slots.state.drafts is not None else []
        largest = max([*self.token_buckets, rows, *(size * queries for size, queries in self._draft_buckets)])
        self._hidden = torch.zeros(largest, shapes.hidden, dtype=cache.activations, device=device)
        self._received = None if stage.first else torch.zeros_like(self._hidden)  # from the stage before
        drafts = max((size * queries for size, queries in self._draft_buckets), default=0)
        self._scratch = scratch(max(rows, drafts), shapes.vocab, device)
        samples = self._tile_planner.samples
        self._chosen = torch.zeros(2, samples, dtype=torch.int32, device=device)
        self._tried = torch.zeros(2, drafts, dtype=torch.int32, device=device)  # before drafts are accepted
        accepted = max((size * (queries + COLUMNS) for size, queries in self._draft_buckets), default=0)
        most_words = max(2 * samples, accepted)
        self._accepted = torch.zeros(accepted, dtype=torch.int32, device=device)
        self._results = [
            torch.empty(most_words, dtype=torch.int32, pin_memory=device.type == "cuda")
            for _ in range(input_batch.RING)
        ]
        self._turn = 0
        self._graphs: dict[tuple[str, int, int], CUDAGraph] = {}
        self._pool: Any = None  # torch's memory pool that the graphs share
        self._has_experts = shapes.experts is not None
        self.split_graphs: SplitGraphRunner | None = None
        if streams is not None:
            stagings = self._staging, input_batch.InputStaging(loaded, slots, self._tile_planner, most)
            self.split_graphs = SplitGraphRunner(
                model, streams, self._tile_planner, stagings, self._hidden[:rows], most
            )

    def capture(self, progress: Callable[[int, int], None], *, alone: bool = True) -> None:
        """Capture all graphs, the largest first, since they share memory. Calls `progress` with the number of
        captured graphs and of all. If the GPU is not `alone`, NCCL's own thread queries events meanwhile: the
        capture then forbids that only to this thread."""
        forbids = "global" if alone else "thread_local"
        wanted = [("mixed", size, 1) for size in reversed(self.token_buckets)]
        wanted += [("split", size, 1) for kind, size, _ in wanted if self._tile_planner.can_split(size)]
        wanted += [("decode", size, 1) for size in reversed(self.row_buckets) if self.apart]
        wanted += [(kind, *each) for kind in ("decode", "sample") for each in reversed(self._draft_buckets)]
        if self._model.adapters is not None:
            wanted += [(kind + _ADAPTED, *of) for kind, *of in wanted if kind != "sample"]
        wanted += [("sample", size, 1) for size in reversed(self.row_buckets) if self._stage.last]
        if alone and not self._has_experts:  # their products would read bounds that no kernel has written
            self._compile(wanted)
        for done, (kind, size, queries) in enumerate(wanted):
            progress(done, len(wanted))
            layout = self._tile_planner.layout(kind.removesuffix(_ADAPTED), size, queries)
            self._staging.stage(layout, input_batch.IDLE, input_batch.NO_TILES)
            run = self._run_of(kind)
            run(layout, size)
            torch.cuda.synchronize()
            graph = CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode=forbids):
                run(layout, size)
            self._pool = self._pool or graph.pool()
            graph.replay()  # the first launch uploads the graph
            self._graphs[kind, size, queries] = graph
        progress(len(wanted), len(wanted))

    def _compile(self, wanted: Sequence[tuple[str, int, int]]) -> None:
        """Compile the kernels of these graphs, if Triton's cache lacks some of the last one's."""

        def launch(graphs: Sequence[tuple[str, int, int]]) -> None:
            for kind, size, queries in graphs:
                layout = self._tile_planner.layout(kind.removesuffix(_ADAPTED), size, queries)
                self._staging.stage(layout, input_batch.IDLE, input_batch.NO_TILES)
                self._run_of(kind)(layout, size)
            torch.cuda.synchronize()

        began_s = time.monotonic()
        if new := compile_ahead(lambda: launch(wanted[-1:])):
            log.info("compiling the kernels of %d graphs, once for a machine …", len(wanted))
            new += compile_ahead(lambda: launch(wanted[:-1]))
            log.info("compiled %d kernels in %.1f s", new, time.monotonic() - began_s)

    def _run_of(self, kind: str) -> Callable[[input_batch.Layout, int], None]:
        if kind == "sample":
            return self._sample
        return partial(self._forward, adapted=True) if kind.endswith(_ADAPTED) else self._forward

    def forget(self) -> None:
        """Drop all graphs and their memory, because what they read has moved."""
        self._graphs.clear()
        self._pool = None

    def queue(
        self,
        step: input_batch.ArrangedStep,
        updates: tuple[input_batch.Words, input_batch.Words],
        *,
        adapted: bool = False,
    ) -> None:
        """Queue a step's inputs and its forward. `adapted`: some of its rows have adapters."""
        if step.queries > 1:
            self._queue_drafts(step, updates, adapted=adapted)
            return
        tiles = self._tile_planner.tiles(step.chunks)
        kind = "split" if len(tiles) == input_batch.SPLIT_COLUMNS else "mixed"
        if self.apart and not step.chunks:
            kind = "decode"
        buckets = self.row_buckets if kind == "decode" else self.token_buckets
        size = next((size for size in buckets if size >= step.tokens), 0)
        layout = self._tile_planner.layout(kind, size)
        fits = tiles.shape[1] <= layout.tiles or kind == "decode"
        graph = self._graphs.get((kind + _ADAPTED * adapted, size, 1)) if fits else None
        if size > _TOKEN_BUCKETS[-1] and self._tile_planner.needs_dense(step):
            graph = None
        if graph is not None:
            self._staging.stage(layout, step, tiles, updates)
            self._receive(step.tokens, size)
            graph.replay()
            self._send(self._hidden, step.tokens)
            return
        cut = self._tile_planner.without_graph(step)
        self._staging.stage(cut.layout, step, cut.tiles, updates)
        made = self._staging.step(cut.layout, step.decode_rows, cut.dense, adapted=adapted)
        received = self._receive(step.tokens, len(made.positions))
        hidden = self._model.hidden(made, received=received)
        if not self._stage.last:
            self._send(hidden, step.tokens)
            return
        input_batch.keep(
            hidden, self._hidden[: step.samples.shape[1]], self._staging.words[: self._tile_planner.samples]
        )

    def drafts_of(self, rows: int, wanted: int) -> int:
        """The drafts of each row in a step of so many rows of which some want `wanted`; 0: it has none."""
        fits = [queries - 1 for size, queries in self._draft_buckets if size >= rows]
        return min((count for count in fits if count >= wanted), default=max(fits, default=0))

    def _queue_drafts(
        self,
        step: input_batch.ArrangedStep,
        updates: tuple[input_batch.Words, input_batch.Words],
        *,
        adapted: bool,
    ) -> None:
        size = self._draft_rows(step.tokens // step.queries, step.queries)
        layout = self._tile_planner.layout("decode", size, step.queries)
        self._staging.stage(layout, step, self._tile_planner.whole_tiles(step.chunks), updates)
        if (graph := self._graphs.get(("decode" + _ADAPTED * adapted, size, step.queries))) is not None:
            graph.replay()
        else:
            self._forward(layout, size, adapted=adapted)

    def _draft_rows(self, rows: int, queries: int) -> int:
        return min(size for size, each in self._draft_buckets if size >= rows and each == queries)

    def answer(self, rows: int, queries: int = 1) -> tuple[Tensor, Event]:
        """Pinned memory for a step's ids and done `[2, at least rows]`, or with drafts what
        kernels.drafts.gpu.accept gives; and an event. Both are for `sample`."""
        self._turn = (self._turn + 1) % input_batch.RING
        shape = 2, self._chosen.shape[1]
        if queries > 1:
            shape = queries + COLUMNS, self._draft_rows(rows, queries)
        answer = self._results[self._turn][: shape[0] * shape[1]].view(shape)
        return answer, Event()  # type: ignore[no-untyped-call]  # no annotations in torch

    def sample(self, count: int, answer: Tensor, ready: Event) -> None:
        """Queue the head and the sampler for the first `count` sample rows of the step queued last, each with
        its drafts. `answer` is valid after `ready`."""
        queries = max(len(answer) - COLUMNS, 1)
        size = next(size for size in self.row_buckets if size >= count)
        if queries > 1:
            size = self._draft_rows(count, queries)
        graph = self._graphs.get(("sample", size, queries))
        if graph is None:
            self._sample(self._tile_planner.layout("sample", size, queries), size)
        else:
            graph.replay()
        move(self._chosen if queries == 1 else self._accepted[: answer.numel()], answer)
        ready.record()

    def logits(self, count: int) -> Tensor:
        """Logits `[count, vocab]` float32 of the first sample rows of the step queued last."""
        return self._model.logits(self._hidden, self._staging.words[:count]).float()

    def hidden(self, count: int) -> Tensor:
        """The hidden states `[count, hidden]` of the same rows."""
        return self._hidden.index_select(0, self._staging.words[:count])

    def _receive(self, tokens: int, rows: int) -> Tensor | None:
        """The rows from the stage before, followed by zeros: `[rows, hidden]`. None on the first stage."""
        if self._received is None:
            return None
        received = (
            self._received[:rows]
            if rows <= len(self._received)
            else self._received.new_empty(rows, self._received.shape[1])
        )
        if tokens:
            self._stage.receive(received[:tokens])
        received[tokens:] = 0  # sums in padding rows must not grow from step to step
        return received

    def _send(self, hidden: Tensor, tokens: int) -> None:
        if tokens and not self._stage.last:
            self._stage.send(hidden[:tokens])

    def _forward(self, layout: input_batch.Layout, size: int, *, adapted: bool = False) -> None:
        rows = min(size, self._slots.spare_slot) if self.apart else 0
        received = None if self._received is None else self._received[:size]
        step = self._staging.step(layout, rows, adapted=adapted)
        self._model.hidden(step, self._hidden[: layout.tokens], received)

    def _sample(self, layout: input_batch.Layout, size: int) -> None:
        columns, queries = self._staging.words[: layout.token_at].view(3, -1), layout.queries
        logits = self._model.logits(self._hidden, columns[0, : size * queries])
        choices, room = self._slots.choices, self._scratch
        if queries == 1:
            choose(logits, columns[1], columns[2], choices, room, self._chosen)
            return
        choose(logits, columns[1], columns[2], choices, room, self._tried, verifies=True)
        ids_at = layout.token_at + 2 * layout.tokens
        ids = self._staging.words[ids_at : ids_at + layout.tokens]
        answer = self._accepted[: (queries + COLUMNS) * size].view(-1, size)
        accept((columns[0], columns[1]), self._tried, ids, choices, answer)


def draft_buckets(row_buckets: Sequence[int], most: int) -> list[tuple[int, int]]:
    """Rows and tokens of each row, of the graphs of steps with drafts, of up to `most` tokens."""
    queries = [1 + count for count in input_batch.DRAFTS]
    sizes = [size for size in row_buckets if size <= input_batch.MAX_DRAFT_ROWS]
    return [(size, each) for size in sizes for each in queries if size * each <= most]


@dataclass(frozen=True, slots=True)
class _Captured:
    layout: input_batch.Layout
    rows: int  # decode rows of the first micro-batch
    timer: TimestampSegmentTimer
    graph: CUDAGraph

    def has_room(
        self,
        first: input_batch.ArrangedStep,
        second: input_batch.ArrangedStep,
        tiles: tuple[input_batch.Words, input_batch.Words],
    ) -> bool:
        tokens = max(first.tokens, second.tokens)
        return (
            tokens <= self.layout.tokens
            and first.decode_rows <= self.rows
            and max(each.shape[1] for each in tiles) <= self.layout.tiles
        )


class SplitGraphRunner:
    """Runs split steps of an engine with several ranks, one micro-batch's collectives under the other's
    compute, as one CUDA graph where it fits. Runs on the thread of its GraphRunner.

        inputs of A, inputs of B ─▶ both passes (graph by the tokens of a micro-batch) ─▶ head, sample

    Without a graph the host launches every kernel of both micro-batches, and several GPUs wait for it. In a
    graph all chunks are attended by block tables: cuDNN needs their lengths."""

    def __init__(
        self,
        model: CudaModel,
        streams: TwoStreams,
        tile_planner: input_batch.TilePlanner,
        stagings: tuple[input_batch.InputStaging, input_batch.InputStaging],
        sampled: Tensor,
        most: int,
    ) -> None:
        """`sampled` `[rows, hidden]`: gets the head's input. `most`: tokens in a step."""
        self._model, self._streams, self._tile_planner = model, streams, tile_planner
        self._stagings, self._sampled = stagings, sampled
        largest = -(-most // (2 * CUT_TOKENS)) * CUT_TOKENS
        self._buckets = (*(size for size in _SPLIT_BUCKETS if size < largest), largest)
        self._graphs: dict[int, _Captured] = {}
        self._pool: Any = None  # torch's memory pool that the graphs share
        self._times = torch.empty(input_batch.RING, 4 * MAX_SEGMENTS, dtype=torch.int32, pin_memory=True)
        self._turn = 0

    def capture(self, tokens: int) -> None:
        """Capture the graph of steps of so many tokens. All ranks call it at once, larger steps first."""
        size = next(size for size in self._buckets if 2 * size >= tokens)
        layout = self._tile_planner.layout("mixed", size)
        rows = min(size, len(self._sampled)) if self._tile_planner.apart else 0
        for staging in self._stagings:
            staging.stage(layout, input_batch.IDLE, input_batch.NO_TILES)
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
        micro_batches: tuple[input_batch.ArrangedStep, input_batch.ArrangedStep],
        order: Sequence[int],
        updates: tuple[input_batch.Words, input_batch.Words],
    ) -> Segments:
        """Queue the inputs and the forwards of a split step. The second micro-batch has no decode rows.
        `order` of the sample rows: see services.executor.parallel.step_split. Returns the segments of the
        step."""
        first, second = micro_batches
        tiles = self._tile_planner.whole_tiles(first.chunks), self._tile_planner.whole_tiles(second.chunks)
        held = (self._graphs[size] for size in sorted(self._graphs))
        captured = next((each for each in held if each.has_room(first, second, tiles)), None)
        if captured is None:
            return self._launch(first, second, order, updates)
        samples = input_batch.samples_of(first, second, captured.layout.tokens, order)
        staging_a, staging_b = self._stagings
        staging_a.stage(captured.layout, replace(first, samples=samples), tiles[0], updates)
        staging_b.stage(captured.layout, replace(second, samples=input_batch.IDLE.samples), tiles[1])
        captured.graph.replay()
        turn, self._turn = self._turn, (self._turn + 1) % input_batch.RING
        times = self._times[turn]
        move(captured.timer.times.view(torch.int32).view(-1), times)
        return lambda: captured.timer.segments(times.view(torch.int64).view(-1, 2))

    def _run(self, layout: input_batch.Layout, rows: int, timer: SegmentTimer) -> None:
        staging_a, staging_b = self._stagings
        first, second = staging_a.step(layout, rows), staging_b.step(layout, 0)
        self._run_interleaved(first, second, len(self._sampled), timer)

    def _launch(
        self,
        first: input_batch.ArrangedStep,
        second: input_batch.ArrangedStep,
        order: Sequence[int],
        updates: tuple[input_batch.Words, input_batch.Words],
    ) -> Segments:
        """The same without a graph."""
        samples = input_batch.samples_of(first, second, input_batch.padded(first.tokens), order)
        made = []
        for staging, micro_batch, its_samples, its_words in zip(
            self._stagings,
            (first, second),
            (samples, input_batch.IDLE.samples),
            (updates, input_batch.UNSET),
            strict=True,
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
        input_batch.keep(
            torch.cat(hidden), self._sampled[:rows], self._stagings[0].words[: self._tile_planner.samples]
        )
