"""GraphRunner queues a step's inputs, forward and sampling on the device, as CUDA graphs where they fit.

    copy inputs ─▶ update slots ─▶ forward (graph by tokens) ─▶ head, sample (graph by samples) ─▶ copy ids
                            from the stage before ─▶│   │─▶ to the next stage

Decode steps have a graph for each bucket of rows, mixed steps for each bucket of tokens. Longer steps are
launched kernel by kernel, which their length hides. The forward leaves hidden states in a buffer that
sampling reads. If a row's bits must not depend on other rows (tuning.by_row), all steps are mixed steps. Only
the last stage of a pipeline samples.
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


# Not 224, 448, 576 or 896: the library is slower there than at the next bucket (448 rows: 13.0 ms, 512: 9.5).
_ROW_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 256)
_TOKEN_BUCKETS = (32, 64, 96, 128, 192, 256, 320, 384, 512, 640, 768, 1024, 1280, 1536, 2048)
_LONG_BUCKETS = (
    2560,
    3072,
    4096,
    5120,
    6144,
    8192,
)  # with several GPUs the host launches too slowly


class GraphRunner:
    """Owns the buffers and the graphs. Runs in `torch.inference_mode` and on one thread; another thread may
    read the results of `sample`."""

    def __init__(
        self,
        loaded: Loaded,
        model: CudaModel,
        slots: CudaSlots,
        tuning: DeviceTuning,
        most: int,
        streams: TwoStreams | None = None,
    ) -> None:
        """`most`: tokens in a step. With `streams` steps may be split into micro-batches."""
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
        self._pool: Any = None  # torch's memory pool that the graphs share
        self.split_graphs: SplitGraphRunner | None = None
        if streams is not None:
            from services.executor.cuda.split_graphs import SplitGraphRunner

            stagings = self._staging, InputStaging(loaded, slots, self._tile_planner, most)
            self.split_graphs = SplitGraphRunner(
                model, streams, self._tile_planner, stagings, self._hidden[:rows], most
            )

    def capture(self, progress: Callable[[int, int], None], *, alone: bool = True) -> None:
        """Capture all graphs, the largest first, since they share memory. Calls `progress` with the number of
        captured graphs and of all. If the GPU is not `alone`, NCCL's own thread queries events meanwhile: the
        capture then forbids that only to this thread."""
        forbids = "global" if alone else "thread_local"
        wanted = [("mixed", size) for size in reversed(self.token_buckets)]
        wanted += [("split", size) for kind, size in wanted if self._tile_planner.splits(size)]
        wanted += [("decode", size) for size in reversed(self.row_buckets) if self.apart]
        wanted += [("sample", size) for size in reversed(self.row_buckets) if self._stage.last]
        for done, (kind, size) in enumerate(wanted):
            progress(done, len(wanted))
            layout = self._tile_planner.layout(kind, size)
            self._staging.stage(layout, IDLE, NO_TILES)
            run = self._sample if kind == "sample" else self._forward
            run(layout, size)
            torch.cuda.synchronize()
            graph = CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode=forbids):
                run(layout, size)
            self._pool = self._pool or graph.pool()
            graph.replay()  # the first launch uploads the graph
            self._graphs[kind, size] = graph
        progress(len(wanted), len(wanted))

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
        """Queue the head and the sampler for the first `count` sample rows of the step queued last. Returns
        ids and done `[2, rows]` in pinned memory, valid after the event."""
        size = next(size for size in self.row_buckets if size >= count)
        graph = self._graphs.get(("sample", size))
        if graph is None:
            self._sample(self._tile_planner.layout("sample", size), size)
        else:
            graph.replay()
        self._turn = (self._turn + 1) % RING
        answer = self._results[self._turn]
        move(self._chosen, answer)
        ready = Event()  # type: ignore[no-untyped-call]  # no annotations in torch
        ready.record()
        return answer, ready

    def logits(self, count: int) -> Tensor:
        """Logits `[count, vocab]` float32 of the first sample rows of the step queued last."""
        return self._model.logits(self._hidden, self._staging.words[:count]).float()

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

    def _forward(self, layout: Layout, size: int) -> None:
        rows = min(size, self._slots.spare_slot) if self.apart else 0
        received = None if self._received is None else self._received[:size]
        self._model.hidden(self._staging.step(layout, rows), self._hidden[:size], received)

    def _sample(self, layout: Layout, size: int) -> None:
        columns = self._staging.words[: layout.token_at].view(3, -1)
        logits = self._model.logits(self._hidden, columns[0, :size])
        chosen = Chosen(self._chosen[0], self._chosen[1])
        choose(logits, columns[1], columns[2], self._slots.choices, self._scratch, chosen)
