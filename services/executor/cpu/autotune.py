"""Times the products of a CPU once, and chooses with how many threads an engine starts. `ThreadCount` changes
their number between steps.

The dtype stays a rule (`best_dtype`): it decides answers, KV keys and model digests, which must not differ
between two starts, or between two hosts of a fleet, because other work ran during a measurement. Timings only
show where another dtype would be faster.

Matrices larger than the second cache are multiplied with 1, 8 and 32 rows, as the engine does it, with one
thread, half of the cores and all, in turn, for BUDGET_S. The least time of each counts, so other work for a
part of the time does no harm. Other work all the time shows in the CPU time of the threads: then the timing
is not believed, and made again an hour later. Timings are in `timings/` of the cache folder, in a file for
each CPU, quota, version of the kernels, dtype and type of weights.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import math
import os
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated

import torch
from pydantic import BaseModel, Field
from torch import Tensor

import kernels.cpu_jit
from services.executor.checkpoint.loader import DTYPES, device_of, dtype_named
from services.executor.checkpoint.stored import Dense, Stored
from services.executor.cpu.linear import Products
from shared.config import Settings
from shared.processes import CoreWaits, usable_cores, usable_threads

log = logging.getLogger("headrace.executor")

ROWS = (1, 8, 32)  # of the steps of one user, of a few, of many
# A number of threads is taken if it needs at most so much of the time of all of them: two measurements of a
# quiet machine differ by less, so that equal machines begin alike.
TIE = 0.95
# Least times are believed if AGREE times are within NEAR times each, and each number of threads had most of
# the CPU time that it could have, in one of its windows: 0.92 to 1.0 of it without other work, 0.3 to 0.5 for
# two threads where another process computes.
NEAR, AGREE = 1.2, 3
SHARE = 0.75
RETRY_S = 3600  # starts beside other work are not slowed down by one timing each
# Each number of threads has ROUNDS windows: where other processes run, Linux needs some ms to spread new
# threads over the cores.
ROUNDS, BUDGET_S = 2, 0.5  # with the matrices, of which packed ones take 0.2 s, less than a second
_BYTES, _COLUMNS = 8 << 20, 1024  # of a matrix: more than the second cache of a core; in whole blocks
_SCALE = 100_000_000  # weights: times of matrices of unlike dtypes are shown for so many
_CPU = ("vendor_id", "cpu family", "model", "model name", "stepping", "flags", "CPU implementer", "CPU part",
        "CPU variant", "Features")  # fmt: skip
_LIMITS = ("NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES", "ONEDNN_MAX_CPU_ISA")  # instructions that are not used
TRIAL_STEPS = 4
SOONEST, LATEST = 8, 256  # steps between two trials: doubled after each trial that found nothing faster
LATEST_AT_MOST = 1024  # with the most threads: that fewer are faster shows in slow steps, too
BETTER = 0.93  # a tried count is taken if it needs at most so much of the time
SLOWER = 1.3  # steps that take so many times as long as before: trials are due again
CONTENDED = 0.3  # of their time threads wait for a core where fewer threads may be faster; alone 0.08 to 0.16
HOPELESS = 1.5  # a trial ends at once if a step takes so many times as long
_RISE = 1.002  # growth of a class's least time with each of its steps: machines and contexts change

_NUMBERS = ("f32", "bf16", "int8")  # dtypes of which any numbers make a matrix

Product = tuple[Callable[[Tensor], Tensor], list[Tensor], int]  # with inputs of ROWS rows; its weights
Times = Mapping[int, Sequence[float]]  # ms of _SCALE weights at ROWS, by threads


class _Kept(BaseModel):
    """A file of timings. `about`: the machine and versions; `made`: s, Unix time; the rest as in Timing."""

    about: list[str]
    made: float
    steady: bool
    ms: dict[str, dict[int, list[Annotated[float, Field(gt=0, allow_inf_nan=False)]]]]


@dataclass(frozen=True, slots=True)
class Timing:
    """Times of one machine. `dtype`: what the engine computes in, timed with several numbers of threads;
    other dtypes with the most. `steady`: whether they are believed."""

    dtype: str
    cores: float
    ms: Mapping[str, Times]
    steady: bool = True

    @property
    def threads(self) -> int:
        """The threads to begin with."""
        times = self.ms[self.dtype]
        return best_threads(times, self.cores) if self.steady else max(times)

    def faster(self) -> tuple[str, float] | None:
        """The dtype whose products take the least time, and its part of the time of the engine's. None for
        the engine's own, or one as fast."""
        times = {name: _mean(of[max(of)]) for name, of in self.ms.items()}
        best = min(times, key=lambda name: times[name])
        part = times[best] / times[self.dtype]
        return (best, part) if self.steady and part < TIE else None

    def __str__(self) -> str:
        most = max(self.ms[self.dtype])
        shown = [f"{_shown(of)} ({n})" for n, of in sorted(self.ms[self.dtype].items(), reverse=True)]
        shown += [f"{name} {_shown(of[most])}" for name, of in self.ms.items() if name != self.dtype]
        why = "" if self.steady else ", as other work disturbed the timing"
        return (
            f"{self.threads} of {most} threads to begin with{why}; ms for products of 100M weights with "
            f"{'/'.join(map(str, ROWS))} rows (threads): {self.dtype} {', '.join(shown)}"
        )


def best_threads(times: Times, cores: float) -> int:
    """The number of threads with the shortest mean time; the largest number unless another is clearly faster.
    Times are scaled by n / `cores`: a CPU quota stops surplus threads for a part of each period, and short
    products do not show that."""
    means = {n: _mean(of) * max(1.0, n / cores) for n, of in times.items()}
    best, most = min(means, key=lambda n: means[n]), max(means)
    return best if means[best] < TIE * means[most] else most


def counts(cores: float) -> list[int]:
    """The numbers of threads to time."""
    most = max(1, math.ceil(cores))
    return sorted({1, max(1, most // 2), max(1, int(cores)), most})


def timing_for(
    settings: Settings, path: Path, dtype: str, others: Sequence[str] = (), *, again: bool = False
) -> Timing | None:
    """The stored timing for an engine in `dtype`, or a new one, measured in about a second (the first also
    compiles kernels). None on a GPU, if the settings fix the threads, and if there is only one choice. One
    that is not believed is made again after RETRY_S, or after the clock was set back, or if `again`."""
    device, ranks = settings.device_and_ranks
    chosen = settings.threads or settings.deterministic or ranks > 1 or settings.backend in ("dummy", "sim")
    of_model = dtype_named(dtype).sample if dtype in DTYPES else None
    if chosen or not (of_model or dtype in _NUMBERS) or device_of(device).type != "cpu":
        return None
    matrix = ("", None) if of_model is None else of_model(path)
    if matrix is None:
        return None
    cores = usable_cores()
    dtypes, threads = [dtype, *(other for other in others if other != dtype)], counts(cores)
    if len(dtypes) == len(threads) == 1:
        return None
    about = [*_machine(), f"{cores:g} cores", dtype, matrix[0]]
    name = hashlib.sha256("\n".join(about).encode()).hexdigest()[:16]
    file = settings.cache_dir.expanduser() / "timings" / f"{name}.json"
    kept = _read(file, about, dtypes, threads)
    if kept is not None and (kept.steady or (not again and 0 <= time.time() - kept.made < RETRY_S)):
        return Timing(dtype, cores, {each: kept.ms[each] for each in dtypes}, kept.steady)
    with _alone(file.parent) as alone:
        if not alone:
            log.info("another process times products: %d threads to begin with", max(threads))
            return None
        ms, steady = _measured({each: _product(each, matrix[1]) for each in dtypes}, threads, cores)
        _write(file, _Kept(about=about, made=time.time(), steady=steady, ms=ms))
        return Timing(dtype, cores, ms, steady)


def _mean(times: Sequence[float]) -> float:
    """The geometric mean: each of ROWS has the same weight, however long it takes."""
    return math.exp(sum(map(math.log, times)) / len(times))


def _shown(times: Sequence[float]) -> str:
    return "/".join(f"{ms:.{0 if ms >= 10 else 1}f}" for ms in times)


# ---- measure --------------------------------------------------------------------------------------------


def _product(dtype: str, sample: Callable[[int, int], Stored] | None) -> Product:
    """A product with a matrix, as the engine makes it."""
    weight: Stored
    computed = dtype_named(dtype).computed
    if sample is not None and dtype_named(dtype).sample:
        weight = sample(_BYTES, _COLUMNS)
    else:
        size = 1 if dtype == "int8" else computed.itemsize
        weight = Dense.of(torch.ones(_BYTES // _COLUMNS // size, _COLUMNS, dtype=computed))
    products = Products(computed, torch.device("cpu"), deterministic=False, kept_in=dtype)
    inputs = [torch.ones(rows, _COLUMNS, dtype=computed) for rows in ROWS]
    return products.linear(weight), inputs, math.prod(weight.shape)


@torch.inference_mode()
def _measured(
    products: Mapping[str, Product], threads: Sequence[int], cores: float
) -> tuple[dict[str, dict[int, list[float]]], bool]:
    """The least times, of the first dtype with all numbers of threads, and whether to believe them."""
    before, most = torch.get_num_threads(), max(threads)
    dtypes = {n: [*products] if n == most else [*products][:1] for n in threads}
    taken: dict[int, dict[str, list[list[float]]]]
    taken = {n: {dtype: [[] for _ in ROWS] for dtype in dtypes[n]} for n in threads}
    shares = dict.fromkeys(threads, 0.0)
    try:
        for n in threads:  # compiles
            for dtype in dtypes[n]:
                _time_once(products[dtype], n, [[] for _ in ROWS])
        for n in [*threads] * ROUNDS:
            cpu, began, window = time.process_time(), time.perf_counter(), BUDGET_S / ROUNDS / len(threads)
            while (took := time.perf_counter() - began) < window:
                for dtype in dtypes[n]:
                    _time_once(products[dtype], n, taken[n][dtype])
            shares[n] = max(shares[n], (time.process_time() - cpu) / took / min(n, cores))
    finally:
        torch.set_num_threads(before)
    ms: dict[str, dict[int, list[float]]] = {dtype: {} for dtype in products}
    for n, of_dtypes in taken.items():
        for dtype, times in of_dtypes.items():
            ms[dtype][n] = [min(of) * 1e3 * _SCALE / products[dtype][2] for of in times]
    all_times = [of for of_dtypes in taken.values() for times in of_dtypes.values() for of in times]
    return ms, are_undisturbed(all_times, shares.values())


def _time_once(made: Product, threads: int, taken: list[list[float]]) -> None:
    product, inputs, _ = made
    torch.set_num_threads(threads)
    product(inputs[0])  # starts the threads, and takes the matrix of another dtype out of the caches
    for x, times in zip(inputs, taken, strict=True):
        began = time.perf_counter()
        product(x)
        times.append(time.perf_counter() - began)


def are_undisturbed(all_times: Iterable[Sequence[float]], shares: Iterable[float]) -> bool:
    """Whether each shortest time was measured without interference. `shares`: for each number of threads the
    part of its possible CPU time that it got."""
    near = (sum(took <= NEAR * min(times) for took in times) for times in all_times)
    return all(count >= AGREE for count in near) and all(share >= SHARE for share in shares)


# ---- keep -----------------------------------------------------------------------------------------------


def _machine() -> list[str]:
    """What times depend on, besides the cores, the dtype and the type of the weights."""
    lines: list[str] = []
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
    cpu = [line for line in lines if line.partition(":")[0].strip() in _CPU]
    limits = [f"{name}={os.environ.get(name, '')}" for name in _LIMITS]
    return [*cpu, *limits, torch.__version__, kernels.cpu_jit.sources_digest()]


def _read(file: Path, about: list[str], dtypes: Sequence[str], threads: list[int]) -> _Kept | None:
    """The timing in a file. None without one, and for a damaged one, another machine or other dtypes."""
    try:
        kept = _Kept.model_validate_json(file.read_bytes())
    except (OSError, ValueError):
        return None
    wanted = {dtype: threads if dtype == dtypes[0] else threads[-1:] for dtype in dtypes}
    fits = kept.about == about and all(sorted(kept.ms.get(of, ())) == wanted[of] for of in dtypes)
    if not fits or any(len(times) != len(ROWS) for of in kept.ms.values() for times in of.values()):
        return None
    return kept


def _write(file: Path, kept: _Kept) -> None:
    """All of it or nothing: another start may read at any time."""
    try:
        with tempfile.TemporaryDirectory(prefix=".draft-", dir=file.parent) as folder:
            draft = Path(folder) / file.name
            draft.write_text(kept.model_dump_json())
            draft.replace(file)
    except OSError as error:
        log.warning("timings are not kept: %s", error)


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[bool]:
    """Whether no other process measures now: two that do disturb each other."""
    free = True
    with contextlib.ExitStack() as opened:
        with contextlib.suppress(OSError):  # no writable folder, or one without locks
            folder.mkdir(parents=True, exist_ok=True)
            lock = os.open(folder, os.O_RDONLY)
            opened.callback(os.close, lock)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                free = False
        yield free


class ThreadCount:
    """Chooses how many threads, 1 to `most`, compute the next step: the count that was fastest recently,
    `now`. Each engine has its own, used by one thread.

    A step has some hundred calls, each of which ends with its slowest piece of work. A thread that shares its
    core with another process is often inside of one when it loses the core: next to one busy process on two
    cores, one thread may be faster than two. Such processes start and end at any time. So a few steps are
    tried with more or fewer threads: soon after steps have become slow, and rarely otherwise; with fewer only
    if threads have waited for a core, or steps of many sizes would be tried again and again.

        steps with the chosen count ... │ trial: TRIAL_STEPS with the next count │ the faster count ...
    """

    def __init__(self, most: int, first: int = 0, waits: Callable[[], float] = lambda: 1.0) -> None:
        """`first`: the count to begin with; 0: `most`. `waits`: the share of the time since its last call
        that a thread waited for a core."""
        self._waits = waits
        self._ladder = sorted({*_ladder(most), first or most})
        self._at = self._ladder.index(first or most)  # index of the chosen count
        self._tried: int | None = None  # index of the count in a trial
        self._failed = 0  # trials since the choice changed or steps became slow: each goes farther away
        self._least: dict[int, float] = {}  # least us by class of step: makes steps of all sizes comparable
        self._recent: deque[float] = deque(maxlen=2 * TRIAL_STEPS)  # chosen count: times / least times
        self._trial: list[float] = []
        self._starts = False  # a trial's first step does not count: it creates threads or compiles for them
        self._wait, self._steps = SOONEST, 0  # until the next trial; since the last

    @property
    def now(self) -> int:
        return self._ladder[self._at if self._tried is None else self._tried]

    def observe(self, tokens: int, took_us: int) -> None:
        """Take the time of a step with `now` threads."""
        size = _class_of(tokens)
        least = self._least.get(size)
        if self._tried is None:  # a trial is compared with the times before it
            self._least[size] = took_us if least is None else min(took_us, least * _RISE)
        if least is None or len(self._ladder) == 1:
            self._tried = None  # nothing to compare with: such steps would never end a trial
            return
        slowness = took_us / least
        if self._tried is None:
            self._without_trial(slowness)
        elif self._starts:
            self._starts = False
        else:
            self._trial.append(slowness)
            if slowness > HOPELESS * median(self._recent) or len(self._trial) == TRIAL_STEPS:
                self._judge()

    def _without_trial(self, slowness: float) -> None:
        before = median(self._recent) if len(self._recent) == self._recent.maxlen else slowness
        self._recent.append(slowness)
        self._steps += 1
        if median([*self._recent][-TRIAL_STEPS:]) > SLOWER * before:
            self._wait, self._failed = SOONEST, 0
        if self._steps >= self._wait:
            self._tried, self._trial, self._starts, self._steps = self._next(), [], True, 0
            if self._tried is None:
                self._wait = min(2 * self._wait, LATEST)

    def _next(self) -> int | None:
        """The nearest index not tried yet, the lower of two. Every other time the next higher index: only a
        trial shows that another process has ended. None: there are only lower ones, and no thread lacks a
        core."""
        lowest = 0 if self._waits() >= CONTENDED else self._at + 1
        if self._failed % 2 and self._at + 1 < len(self._ladder):
            return self._at + 1
        others = [at for at in range(lowest, len(self._ladder)) if at != self._at]
        others.sort(key=lambda at: abs(at - self._at))
        return others[self._failed // 2 % len(others)] if others else None

    def _judge(self) -> None:
        """Take the tried count, or keep the chosen one and try another later."""
        assert self._tried is not None, "a trial is under way"
        if len(self._trial) == TRIAL_STEPS and median(self._trial) < BETTER * median(self._recent):
            self._at, self._wait, self._failed = self._tried, SOONEST, 0
            self._recent.clear()
        else:
            self._failed += 1
            fewer = self._at + 1 < len(self._ladder)
            self._wait = min(2 * self._wait, LATEST if fewer else LATEST_AT_MOST)
        self._tried = None


def _class_of(tokens: int) -> int:
    """The four first digits in base 2, and how many follow: steps of one class are alike to an eighth, else a
    short prompt with one thread would look faster than a longer one with two."""
    below = max(0, tokens.bit_length() - 4)
    return 16 * below + (tokens >> below)


def thread_count() -> ThreadCount:
    """The count of an engine that starts with the threads that torch has. A quota of 1.5 cores stops two
    threads for a part of each 100 ms, which few of the steps show: trials would take more than autotune.py
    chose."""
    first = torch.get_num_threads()
    most = first if usable_cores() % 1 else max(first, usable_threads())
    return ThreadCount(most, first, CoreWaits().share)


def _ladder(most: int) -> list[int]:
    """The counts to try, from 1 to `most`: 1, 2, 3, 4, 6, 8, 12, 16, ..."""
    counts = {most}
    power = 1
    while power < most:
        counts |= {power, min(most, power * 3 // 2)}
        power *= 2
    return sorted(counts)
