"""What a step of 32 decode rows is made of, inside one process: the torch engine alone, no pipeline.

    python -m loadtest.step_host --threads 1 --sampling top-p

Splits the engine's own two calls: `prepare` is the host's work for a batch (tables, masks, ids), `model`
the forward pass, `sample` the sampler with the slots' bookkeeping. Then the costliest operators as the
torch profiler saw them, and the costliest Python functions as cProfile saw them.
"""

from __future__ import annotations

import argparse
import cProfile
import io
import pstats
import random
import resource
import statistics
import time
from collections.abc import Callable
from typing import Any

from loadtest.step_profile import MODEL, PROMPT_TOKENS, SAMPLING, STREAMS
from services.executor.cpu.engine import TorchBackend, TorchOptions, build
from shared.config import load
from shared.kv_blocks import blocks_for
from shared.messages import Sampling, SlotOpen, StepPlan, ints
from shared.vocab.files import resolve

BLOCK_TOKENS = 16
MAX_STEPS = 400  # of one run; the block tables leave room for them


class Rows:
    """Decode rows that run side by side in an engine, one per slot, of mixed context."""

    def __init__(self, backend: TorchBackend, rows: int, sampling: dict[str, Any]) -> None:
        self._backend = backend
        self._step = 0
        lengths = random.Random(1)
        self._at = [lengths.randint(*PROMPT_TOKENS) for _ in range(rows)]
        first_block = 0
        options = {name: value for name, value in sampling.items() if name != "logprobs"}
        for slot, length in enumerate(self._at):
            blocks = blocks_for(length + MAX_STEPS, BLOCK_TOKENS)
            backend.open_slot(
                SlotOpen(
                    slot=slot,
                    generation=1,
                    seq=slot + 1,
                    prompt_tokens=length,
                    seed=slot,
                    sampling=Sampling(**options),
                    logprobs=1 + int(sampling["logprobs"]) if "logprobs" in sampling else 0,
                    tokens=ints(lengths.randrange(300, 40_000) for _ in range(length)),
                )
            )
            self.run(self._plan([slot], [0], [length], (slot, first_block, blocks)))
            first_block += blocks

    def run(self, plan: StepPlan) -> tuple[int, int]:
        """Forward and sample, µs."""
        start = time.perf_counter_ns()
        pending = self._backend.forward(plan)
        forwarded = time.perf_counter_ns()
        self._backend.sample(pending)
        return (forwarded - start) // 1000, (time.perf_counter_ns() - forwarded) // 1000

    def decode(self) -> tuple[int, int]:
        """One step of every row, as the scheduler would plan it; forward and sample, µs."""
        rows = len(self._at)
        plan = self._plan(range(rows), self._at, [1] * rows)
        self._at = [at + 1 for at in self._at]
        return self.run(plan)

    def _plan(
        self, slots: Any, starts: list[int], counts: list[int], table: tuple[int, int, int] | None = None
    ) -> StepPlan:
        self._step += 1
        slot, first_block, blocks = table or (0, 0, 0)
        return StepPlan(
            exec_epoch=1,
            step=self._step,
            mode="run_ahead",
            micro_batch=0,
            slots=ints(slots),
            starts=ints(starts),
            counts=ints(counts),
            from_device=ints([int(table is None)] * len(counts)),
            sample_rows=ints(range(len(counts))),
            sample_slots=ints(slots),
            table_slots=ints([slot] if table else []),
            table_first=ints([0] if table else []),
            table_counts=ints([blocks] if table else []),
            table_blocks=ints(range(first_block, first_block + blocks)),
        )


def clocked(of: object, name: str) -> list[int]:
    """Replace method `name` of `of` by itself with a clock around it: its times, µs, grow in the list."""
    inner: Callable[..., Any] = getattr(of, name)
    times: list[int] = []

    def run(*args: Any) -> Any:
        start = time.perf_counter_ns()
        result = inner(*args)
        times.append((time.perf_counter_ns() - start) // 1000)
        return result

    setattr(of, name, run)
    return times


def engine(threads: int) -> TorchBackend:
    """The default model as the executor serves it, with blocks for every row's longest context."""
    files = resolve(MODEL, load().settings.cache_dir)
    options = TorchOptions(model_path=files.path, model_name=MODEL, threads=threads, max_step_tokens=512)
    backend = build(options)
    backend.warm_up()
    return backend


def main() -> None:
    """Print the split, then the two profiles."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rows", type=int, default=STREAMS)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--sampling", nargs="+", default=list(SAMPLING), choices=list(SAMPLING))
    parser.add_argument("--profile", action="store_true", help="operators and functions, too")
    args = parser.parse_args()
    backend = engine(args.threads)
    prepare, model = clocked(backend._batches, "build"), clocked(backend._model, "forward")
    for name in args.sampling:
        rows = Rows(backend, args.rows, SAMPLING[name])
        rows.decode()
        for times in (prepare, model):
            times.clear()
        before = resource.getrusage(resource.RUSAGE_SELF)
        steps = [rows.decode() for _ in range(args.steps)]
        after = resource.getrusage(resource.RUSAGE_SELF)
        parts = {
            "prepare": prepare,
            "model": model,
            "forward": [forward for forward, _ in steps],
            "sample": [sample for _, sample in steps],
        }
        shown = (
            f"{part} {statistics.median(us) / 1000:.2f} ms ({min(us) / 1000:.2f}…{max(us) / 1000:.2f})"
            for part, us in parts.items()
        )
        print(f"{args.rows} rows, {args.threads} threads, {name}: {', '.join(shown)}", flush=True)
        faults = (after.ru_minflt - before.ru_minflt) / args.steps
        system_ms = 1e3 * (after.ru_stime - before.ru_stime) / args.steps
        print(f"  page faults {faults:.0f} a step, system time {system_ms:.1f} ms", flush=True)
        if args.profile:
            profile(rows)
        backend.reset()


def profile(rows: Rows, steps: int = 5) -> None:
    """The costliest operators and Python functions of a few steps."""
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as operators:
        for _ in range(steps):
            rows.decode()
    print(
        operators.key_averages().table(sort_by="self_cpu_time_total", row_limit=22, max_name_column_width=40)
    )
    functions = cProfile.Profile()
    functions.enable()
    for _ in range(steps):
        rows.decode()
    functions.disable()
    text = io.StringIO()
    pstats.Stats(functions, stream=text).sort_stats("tottime").print_stats(28)
    print(text.getvalue())


if __name__ == "__main__":
    main()
