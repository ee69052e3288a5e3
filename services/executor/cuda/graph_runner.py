"""A step on the device: its inputs copied, its forward and its sampling queued, as graphs where there is one.

    copy inputs ─▶ set slot words ─▶ forward (graph by tokens) ─▶ head, sample (graph by samples) ─▶ copy ids
                                       stages before ─▶│   │─▶ stages behind

Decodes have a graph for each bucket of rows, mixed steps for each bucket of tokens; longer steps are launched
one kernel after the other, which a long step hides. Forward and sampling meet in one buffer of hidden states.
Where a row's bits must not depend on its company (tuning.by_row) all steps are mixed ones. Of a pipeline only
the last stage samples.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.cuda import CUDAGraph, Event

from kernels.inputs.gpu import move
from kernels.sampling.gpu import Chosen, choose, scratch
from services.executor.checkpoint.loader import Loaded
from services.executor.cuda.input_batch import (
    IDLE,
    NO_TILES,
    RING,
    SPLIT_COLUMNS,
    ArrangedStep,
    InputStaging,
    Layout,
    TilePlanner,
    Words,
    keep,
)
from services.executor.cuda.kernel_configs import DeviceTuning
from services.executor.cuda.model import CudaModel
from services.executor.cuda.slot_table import CudaSlots

if TYPE_CHECKING:
    from services.executor.cuda.comm_overlap import TwoStreams
    from services.executor.cuda.split_graphs import SplitGraphRunner


# Not 224, 448, 576 or 896: the library is slower there than at the next (448 rows: 13.0 ms, 512: 9.5).
_ROW_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 256)
_TOKEN_BUCKETS = (32, 64, 96, 128, 192, 256, 320, 384, 512, 640, 768, 1024, 1280, 1536, 2048)
_LONG_BUCKETS = (2560, 3072, 4096, 5120, 6144, 8192)  # of several GPUs, which are quicker than one host


class GraphRunner:
    """Owns the buffers and the graphs. Runs in `torch.inference_mode` and on one thread, but for reading what
    `queue` returns."""

    def __init__(
        self,
        loaded: Loaded,
        model: CudaModel,
        slots: CudaSlots,
        tuning: DeviceTuning,
        most: int,
        streams: TwoStreams | None = None,
    ) -> None:
        """`most`: tokens in a step. With `streams` some may come in micro-batches."""
        shapes, cache, stage = loaded.shapes, loaded.cache, loaded.stage
        self._model, self._slots, self._stage = model, slots, stage
        rows, device = slots.spare_slot, cache.tensor.device
        self._tile_planner = TilePlanner(loaded, tuning, rows)
        self.apart = self._tile_planner.apart
        self._staging = InputStaging(loaded, slots, self._tile_planner, most)
        self.row_buckets = [*(size for size in _ROW_BUCKETS if size < rows), rows]
        long = _LONG_BUCKETS if loaded.ranks.size > 1 else ()
        sizes = {*_TOKEN_BUCKETS, *long, *(() if self.apart else self.row_buckets)}
        self.token_buckets = sorted(size for size in sizes if size <= most)
        largest = max([*self.token_buckets, rows])
        self._hidden = torch.zeros(largest, shapes.hidden, dtype=cache.activations, device=device)
        self._received = None if stage.first else torch.zeros_like(self._hidden)  # from the stage before
        self._scratch = scratch(rows, shapes.vocab, device)
        samples = self._tile_planner.samples
        self._chosen = torch.zeros(2, samples, dtype=torch.int32, device=device)
        self._results = [torch.empty(2, samples, dtype=torch.int32, pin_memory=True) for _ in range(RING)]
        self._turn = 0
        self._graphs: dict[tuple[str, int], CUDAGraph] = {}
        self._pool: Any = None  # of torch's allocator: the graphs share their memory
        self.split_graphs: SplitGraphRunner | None = None
        if streams is not None:
            from services.executor.cuda.split_graphs import SplitGraphRunner

            stagings = self._staging, InputStaging(loaded, slots, self._tile_planner, most)
            self.split_graphs = SplitGraphRunner(
                model, streams, self._tile_planner, stagings, self._hidden[:rows], most
            )

    def capture(self, told: Callable[[int, int], None], *, alone: bool = True) -> None:
        """Capture all graphs, the largest first: they share their memory. `told` hears how many are done. A
        GPU that is not `alone` sums with others: the library for that looks at its events meanwhile, on a
        thread of its own, which a capture forbids to all threads unless it is told not to."""
        forbids = "global" if alone else "thread_local"
        wanted = [("mixed", size) for size in reversed(self.token_buckets)]
        wanted += [("split", size) for kind, size in wanted if self._tile_planner.splits(size)]
        wanted += [("decode", size) for size in reversed(self.row_buckets) if self.apart]
        wanted += [("sample", size) for size in reversed(self.row_buckets) if self._stage.last]
        for done, (kind, size) in enumerate(wanted):
            told(done, len(wanted))
            layout = self._tile_planner.layout(kind, size)
            self._staging.stage(layout, IDLE, NO_TILES)
            run = self._sample if kind == "sample" else self._forward
            run(layout, size)
            torch.cuda.synchronize()
            graph = CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode=forbids):
                run(layout, size)
            self._pool = self._pool or graph.pool()
            graph.replay()  # its first launch brings it to the device
            self._graphs[kind, size] = graph
        told(len(wanted), len(wanted))

    def queue(self, step: ArrangedStep, updates: tuple[Words, Words]) -> None:
        """Queue a step's inputs and its forward."""
        tiles = self._tile_planner.tiles(step.chunks)
        kind = "split" if len(tiles) == SPLIT_COLUMNS else "mixed"
        if self.apart and not step.chunks:
            kind = "decode"
        buckets = self.row_buckets if kind == "decode" else self.token_buckets
        size = next((size for size in buckets if size >= step.tokens), 0)
        layout = self._tile_planner.layout(kind, size)
        graph = self._graphs.get((kind, size)) if tiles.shape[1] <= layout.tiles or kind == "decode" else None
        if size > _TOKEN_BUCKETS[-1] and self._tile_planner.wants_dense(step):
            graph = None
        if graph is not None:
            self._staging.stage(layout, step, tiles, updates)
            self._receive(step.tokens, size)
            graph.replay()
            self._send(self._hidden, step.tokens)
            return
        cut = self._tile_planner.without_graph(step)
        self._staging.stage(cut.layout, step, cut.tiles, updates)
        made = self._staging.step(cut.layout, step.decode_rows, cut.dense)
        received = self._receive(step.tokens, len(made.positions))
        hidden = self._model.hidden(made, received=received)
        if not self._stage.last:
            self._send(hidden, step.tokens)
            return
        keep(hidden, self._hidden[: step.samples.shape[1]], self._staging.words[: self._tile_planner.samples])

    def sample(self, count: int) -> tuple[Tensor, Event]:
        """Queue the head and the sampler for the first `count` sample rows of the step queued last. Ids and
        done `[2, rows]` in pinned memory, right once the event has come."""
        size = next(size for size in self.row_buckets if size >= count)
        graph = self._graphs.get(("sample", size))
        if graph is None:
            self._sample(self._tile_planner.layout("sample", size), size)
        else:
            graph.replay()
        self._turn = (self._turn + 1) % RING
        answer = self._results[self._turn]
        move(self._chosen, answer)
        ready = Event()  # type: ignore[no-untyped-call]  # torch annotates it not
        ready.record()
        return answer, ready

    def logits(self, count: int) -> Tensor:
        """Logits `[count, vocab]` in float32 of the first sample rows of the step queued last."""
        return self._model.logits(self._hidden, self._staging.words[:count]).float()

    def _receive(self, tokens: int, rows: int) -> Tensor | None:
        """What the stage before gives for this step, followed by zeros: `[rows, hidden]`."""
        if self._received is None:
            return None
        received = (
            self._received[:rows]
            if rows <= len(self._received)
            else self._received.new_empty(rows, self._received.shape[1])
        )
        if tokens:
            self._stage.receive(received[:tokens])
        received[tokens:] = 0  # what padding adds up there must not grow from step to step
        return received

    def _send(self, hidden: Tensor, tokens: int) -> None:
        if tokens and not self._stage.last:
            self._stage.send(hidden[:tokens])

    def _forward(self, layout: Layout, size: int) -> None:
        rows = min(size, self._slots.spare_slot) if self.apart else 0
        received = None if self._received is None else self._received[:size]
        self._model.hidden(self._staging.step(layout, rows), self._hidden[:size], received)

    def _sample(self, layout: Layout, size: int) -> None:
        columns = self._staging.words[: layout.token_at].view(3, -1)
        logits = self._model.logits(self._hidden, columns[0, :size])
        chosen = Chosen(self._chosen[0], self._chosen[1])
        choose(logits, columns[1], columns[2], self._slots.choices, self._scratch, chosen)
