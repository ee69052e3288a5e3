"""Runs a step's two micro-batches on two CUDA streams, so that one's collectives overlap the other's compute.

graph_runner.py calls it. The kind of collective depends on the model:

    dense models    NCCL with few thread blocks, each of which occupies a processor experts         copies
    between GPUs that map each other's memory: they occupy no processor. A grouped product
                    has a program for each processor, and takes twice as long if one of them must wait

Measured on four H200 (docs/benchmarks/multi_gpu.md), 8,192 tokens: a dense 8B model 1.17 x with NCCL; experts
1.02 x with NCCL, 1.12 x with copies.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch
import torch.distributed as distributed
from torch import Tensor
from torch.cuda import Event, Stream

from kernels.elementwise.gpu import record_timestamp
from services.executor.checkpoint.loader import Loaded
from services.executor.engine import COMM, COMPUTE, MAX_SEGMENTS, Segment
from services.executor.parallel.coroutines import AllReduces, Collective, ForwardPass, run_interleaved
from services.executor.parallel.ranks import Collectives, MappedCopies, if_mapped
from services.executor.parallel.step_split import CUT_TOKENS
from services.executor.parallel.symmetric_memory import SymmetricMemory

BLOCKS = 16  # of a collective that has a limit
BARRIER_PROCESSORS = 2  # processors left free for the programs of the copies' barriers
_HIGH = -1  # a collective's few programs get processors before the other stream's


class SegmentTimer(Protocol):
    """Times of a step's micro-batches on a GPU, like services.executor.engine.HostSegmentTimer.

    EventSegmentTimer uses events, for steps without a graph. TimestampSegmentTimer uses kernels that write
    the device's clock, for graphs: a graph's next replay overwrites its events."""

    def segment(self, lane: int) -> AbstractContextManager[None]:
        """Time the work that this context queues on the current stream, for the first MAX_SEGMENTS
        segments."""


class TwoStreams:
    """The streams of one engine. `sums`: the collectives of its micro-batches."""

    def __init__(self, sums: AllReduces, spared: int, device: torch.device) -> None:
        """`spared`: how many processors the products leave free."""
        self.sums, self._spared = sums, spared
        self._comm_stream = CommStream(device)

    def run_interleaved(self, forward_passes: Sequence[ForwardPass], timer: SegmentTimer) -> list[Tensor]:
        """Queue both forward passes to their ends; their results."""
        with leave_processors_free(self._spared):
            return self._comm_stream.run_interleaved(forward_passes, timer)


def two_streams(loaded: Loaded, most_tokens: int, *, deterministic: bool) -> TwoStreams:
    """The streams of an engine of several ranks; all ranks call it at once. `most_tokens`: of a step."""
    ranks, device, shapes = loaded.ranks, loaded.cache.tensor.device, loaded.shapes
    if deterministic:  # `ranks` adds up in the order of the ranks
        return TwoStreams(ranks, 0, device)
    if shapes.experts is not None and shapes.hidden % ranks.size == 0:
        rows = most_tokens // 2 + 2 * CUT_TOKENS
        most_bytes = rows * shapes.hidden * loaded.cache.activations.itemsize
        copies = if_mapped(
            ranks,
            lambda: MappedCopies(SymmetricMemory(most_bytes, device)),
            "micro-batches use NCCL and gain less",
        )
        if copies is not None:
            return TwoStreams(copies, BARRIER_PROCESSORS, device)
    return TwoStreams(nccl_of_few_blocks(), 0, device)


def nccl_of_few_blocks() -> Collectives:
    """Collectives of at most BLOCKS thread blocks; all ranks call it at once."""
    options = distributed.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options.config.max_ctas = BLOCKS
    return Collectives(distributed.new_group(pg_options=options))


class CommStream:
    """Owns a stream of high priority for collectives. Forward passes compute in turn on the current stream.

        compute   A ─── B ─── A ─── B ───     waits for A's collective before A's next compute
        comm            A     B     A         waits for the compute that it sends

    For one computing thread."""

    def __init__(self, device: torch.device) -> None:
        self._stream = Stream(device, priority=_HIGH)  # type: ignore[no-untyped-call]  # no annotations in torch

    def run_interleaved(
        self, forward_passes: Sequence[ForwardPass], timer: SegmentTimer | None = None
    ) -> list[Tensor]:
        """Queue forward passes to their ends; their results, on the current stream. A graph may capture
        it."""
        compute, comm = torch.cuda.current_stream(), self._stream
        timed = timer.segment if timer else lambda lane: nullcontext()

        def start(micro_batch: int, collective: Collective) -> Callable[[], object]:
            comm.wait_stream(compute)
            with torch.cuda.stream(comm), timed(COMM[micro_batch]):
                collective()
                done = comm.record_event()
            return functools.partial(_wait, compute, done, collective)

        found = run_interleaved(forward_passes, start, lambda micro_batch: timed(COMPUTE[micro_batch]))
        compute.wait_stream(comm)
        return found


def _wait(compute: Stream, done: Event, collective: Collective) -> None:
    """`collective` is a parameter so that its tensors live until this wait."""
    compute.wait_event(done)


class EventSegmentTimer:
    """A SegmentTimer of one step; an event costs the host some microseconds."""

    def __init__(self) -> None:
        self._recorded: list[tuple[int, Event, Event]] = []

    @contextmanager
    def segment(self, lane: int) -> Iterator[None]:
        if len(self._recorded) == MAX_SEGMENTS:
            yield
            return
        began, ended = (Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]  # torch's
        began.record()
        try:
            yield
        finally:
            ended.record()
            self._recorded.append((lane, began, ended))

    def segments(self) -> tuple[Segment, ...]:
        """The segments, once the step has ended on the device."""
        origin = self._recorded[0][1]
        return tuple(
            Segment(lane, int(1e3 * origin.elapsed_time(began)), int(1e3 * began.elapsed_time(ended)))
            for lane, began, ended in self._recorded
        )


class TimestampSegmentTimer:
    """A SegmentTimer of a graph's capture: replays write the clock at each segment's start and end to
    `times`."""

    def __init__(self, device: torch.device) -> None:
        self.times: Tensor = torch.zeros(MAX_SEGMENTS, 2, dtype=torch.int64, device=device)  # ns
        self._lanes: list[int] = []

    @contextmanager
    def segment(self, lane: int) -> Iterator[None]:
        at = len(self._lanes)
        if at == MAX_SEGMENTS:
            yield
            return
        self._lanes.append(lane)
        record_timestamp(self.times[at, :1])
        try:
            yield
        finally:
            record_timestamp(self.times[at, 1:])

    def segments(self, times: Tensor) -> tuple[Segment, ...]:
        """The segments of a replay, from a copy of its `times` on the host."""
        timed: list[list[int]] = times[: len(self._lanes)].tolist()
        origin = timed[0][0]
        return tuple(
            Segment(lane, (began - origin) // 1000, (ended - began) // 1000)
            for lane, (began, ended) in zip(self._lanes, timed, strict=True)
        )


@contextmanager
def leave_processors_free(count: int) -> Iterator[None]:
    """In this context, products of torch and cuBLAS leave `count` processors free for work on another stream.

    If one program of a product must wait for a processor that communicates, the product takes twice as long;
    on fewer processors it takes a few per cent longer. The setting counts at the launch or a graph's
    capture."""
    if not count:
        yield
        return
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    before = torch._C._get_sm_carveout_experimental()
    torch._C._set_sm_carveout_experimental(count)  # _grouped_mm reads it
    _cublas_processors(properties.multi_processor_count - count)
    try:
        yield
    finally:
        _cublas_processors(0)
        torch._C._set_sm_carveout_experimental(before)


def _cublas_processors(count: int) -> None:
    """Limit cuBLAS to `count` processors; 0: all. Not every release of torch passes the carveout to
    cuBLAS."""
    major = str(torch.version.cuda).split(".", maxsplit=1)[0]
    try:
        library = ctypes.CDLL(f"libcublas.so.{major}")
    except OSError:  # linked in another way: then only torch's own products leave processors free
        return
    handle: int = torch.cuda.current_blas_handle()  # type: ignore[no-untyped-call]  # no annotations in torch
    library.cublasSetSmCountTarget(ctypes.c_void_p(handle), ctypes.c_int(count))
