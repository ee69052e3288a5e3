"""On GPUs the two micro-batches of a step talk each under the other's compute; how they communicate goes by
the model.

    dense models         NCCL with few thread blocks, each of which holds a processor
    of experts           copies between GPUs, which hold none, where these map each other's memory: a grouped
                         product has a program for each processor, and runs twice as long where one must wait

Measured on four H200 (docs/benchmarks/multi_gpu.md): 8,192 tokens of a dense 8B 1.17 x with NCCL; of experts
1.02 x with NCCL, 1.12 x with copies.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch
import torch.distributed as distributed
from torch import Tensor
from torch.cuda import Event, Stream

from kernels.inputs.gpu import record_timestamp
from services.executor.checkpoint.loader import Loaded
from services.executor.engine import COMM, COMPUTE, MAX_SEGMENTS, Segment
from services.executor.parallel.coroutines import AllReduces, Collective, ForwardPass, run_interleaved
from services.executor.parallel.peer_memory import PeerMemory
from services.executor.parallel.ranks import Collectives, PeerCopies, Ranks
from services.executor.parallel.step_split import CUT_TOKENS

log = logging.getLogger("headrace.executor")

BLOCKS = 16  # of a collective that has a limit
BARRIER_PROCESSORS = 2  # processors that are left for the programs with which copies wait for each other
_HIGH = -1  # a talk waits for no compute: its few programs get processors before the other stream's


class SegmentTimer(Protocol):
    """What two micro-batches of a step did when, on a GPU. See services.executor.engine.Notes.

    Of steps that are launched one kernel after the other by events (EventSegmentTimer); of those in a graph
    by kernels that write the device's clock (TimestampSegmentTimer), for the events of a graph are those of
    its next replay, too."""

    def segment(self, lane: int) -> AbstractContextManager[None]:
        """Note what is queued on the current stream within this. The first MAX_SEGMENTS pieces are."""


class TwoStreams:
    """One for an engine. `sums`: what the micro-batches say."""

    def __init__(self, sums: AllReduces, spared: int, device: torch.device) -> None:
        """`spared`: processors that the products leave free."""
        self.sums, self._spared = sums, spared
        self._comm_stream = CommStream(device)

    def run_interleaved(self, forward_passes: Sequence[ForwardPass], timer: SegmentTimer) -> list[Tensor]:
        """Queue both programs to their ends; what they return."""
        with leave_processors_free(self._spared):
            return self._comm_stream.run_interleaved(forward_passes, timer)


def two_streams(loaded: Loaded, most_tokens: int, *, deterministic: bool) -> TwoStreams:
    """For an engine of several ranks, made by all of them at once; `most_tokens` in a step."""
    ranks, device, shapes = loaded.ranks, loaded.cache.tensor.device, loaded.shapes
    if deterministic:  # by rank, wherever a number stands
        return TwoStreams(ranks, 0, device)
    if shapes.experts is not None and shapes.hidden % ranks.size == 0:
        rows = most_tokens // 2 + 2 * CUT_TOKENS
        copies = _copies(ranks, device, rows * shapes.hidden * loaded.cache.activations.itemsize)
        if copies is not None:
            return TwoStreams(copies, BARRIER_PROCESSORS, device)
    return TwoStreams(nccl_of_few_blocks(), 0, device)


def nccl_of_few_blocks() -> Collectives:
    """Collectives of at most BLOCKS thread blocks, made by every rank at once."""
    options = distributed.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options.config.max_ctas = BLOCKS
    return Collectives(distributed.new_group(pg_options=options))


def _copies(ranks: Ranks, device: torch.device, most_bytes: int) -> PeerCopies | None:
    """None, on all ranks, where one cannot have such memory."""
    copies = None
    try:
        assert distributed.group.WORLD is not None, "the ranks have joined"
        copies = PeerCopies(PeerMemory(most_bytes, device, distributed.group.WORLD))
    except (RuntimeError, ImportError, AttributeError, OSError) as error:
        log.warning("micro-batches of steps talk through NCCL, and gain less: %s", error)
    return copies if all(ranks.exchange(copies is not None)) else None


class CommStream:
    """Two streams: programs compute on one, in turn, and communicate on another, of high priority, under each
    other.

        compute   A ─── B ─── A ─── B ───     waits for A's collective before A goes on
        comm            A     B     A         waits for the compute that it sends

    Owns the stream that communicates. One for a thread that computes."""

    def __init__(self, device: torch.device) -> None:
        self._stream = Stream(device, priority=_HIGH)  # type: ignore[no-untyped-call]  # torch annotates it not

    def run_interleaved(
        self, forward_passes: Sequence[ForwardPass], timer: SegmentTimer | None = None
    ) -> list[Tensor]:
        """Run programs to their ends; what they return, on the current stream. Without notes it may be
        captured in a graph."""
        compute, comm = torch.cuda.current_stream(), self._stream

        def start(micro_batch: int, collective: Collective) -> Callable[[], object]:
            comm.wait_stream(compute)
            with torch.cuda.stream(comm), timer.segment(COMM[micro_batch]) if timer else nullcontext():
                collective()
                done = comm.record_event()
            return functools.partial(_wait, compute, done, collective)

        if timer is None:
            found = run_interleaved(forward_passes, start)
        else:
            found = run_interleaved(
                forward_passes, start, lambda micro_batch: timer.segment(COMPUTE[micro_batch])
            )
        compute.wait_stream(comm)
        return found


def _wait(compute: Stream, done: Event, collective: Collective) -> None:
    """Until then the `collective` holds its tensors."""
    compute.wait_event(done)


class EventSegmentTimer:
    """Of one step; an event costs the host some microseconds."""

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
        """Once the step has ended on the device."""
        origin = self._recorded[0][1]
        return tuple(
            Segment(lane, int(1e3 * origin.elapsed_time(began)), int(1e3 * began.elapsed_time(ended)))
            for lane, began, ended in self._recorded
        )


class TimestampSegmentTimer:
    """Of a graph, while it is captured: where each piece begins and ends the clock is written to `times`."""

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
        """Of a replay: `times` as it left them, on the host."""
        timed: list[list[int]] = times[: len(self._lanes)].tolist()
        origin = timed[0][0]
        return tuple(
            Segment(lane, (began - origin) // 1000, (ended - began) // 1000)
            for lane, (began, ended) in zip(self._lanes, timed, strict=True)
        )


@contextmanager
def leave_processors_free(count: int) -> Iterator[None]:
    """Within this, products of torch and cuBLAS use `count` of the processors less; 0: all. What runs beside
    the products has the processors that they leave free.

    A product with a program for each processor, one of which must wait for a processor that communicates,
    runs twice as long; on fewer processors it runs a few per cent longer. Counts at the launch, so at the
    capture of a graph."""
    if not count:
        yield
        return
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    before = torch._C._get_sm_carveout_experimental()
    torch._C._set_sm_carveout_experimental(count)  # what _grouped_mm goes by
    _cublas_processors(properties.multi_processor_count - count)
    try:
        yield
    finally:
        _cublas_processors(0)
        torch._C._set_sm_carveout_experimental(before)


def _cublas_processors(count: int) -> None:
    """0: all. Not every release of torch tells cuBLAS itself."""
    major = str(torch.version.cuda).split(".", maxsplit=1)[0]
    try:
        library = ctypes.CDLL(f"libcublas.so.{major}")
    except OSError:  # linked in otherwise: then torch's own products alone leave processors free
        return
    handle: int = torch.cuda.current_blas_handle()  # type: ignore[no-untyped-call]  # torch annotates it not
    library.cublasSetSmCountTarget(ctypes.c_void_p(handle), ctypes.c_int(count))
