"""What two halves of a batch gain when rows need the host: the default model's device thread, no pipeline.

    python -m loadtest.host_lane --rows 16 --ms 20

Every row has a logits processor. *single* plans all rows when the last result is in; *halves* plans each
half when its own result is in, so that one is on the device while the other is on the host lane. Rounds of
both are run in turn, and the ratio is of their medians.
"""

from __future__ import annotations

import argparse
import itertools
import queue
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

from loadtest.step_profile import MODEL, PROMPT_TOKENS
from services.executor.backend import Backend
from services.executor.processors import MakeProcessor, Wait
from services.executor.step import DeviceThread
from services.executor.torch_backend import TorchOptions, build
from shared.blocks import blocks_for
from shared.clock import SystemClock
from shared.config import load
from shared.messages import Sampling, SlotOpen, StepPlan, StepResult, ints
from shared.model_files import resolve

BLOCK_TOKENS = 16
MAX_TOKENS = 700  # of a sequence; block tables leave room for them


class WaitInTurn(Wait):
    """Like Wait, but one row after the other: it says that it computes."""

    waits = False


class Spin(Wait):
    """Computes in Python for `ms` a row, and holds the interpreter all the while."""

    waits = False

    def process(self, generated: Sequence[int], logits: Any) -> Any:
        end_ns = time.perf_counter_ns() + int((self.ms or 0) * 1e6)
        while time.perf_counter_ns() < end_ns:
            pass
        return logits


PROCESSORS: Mapping[str, MakeProcessor] = {"side_by_side": Wait, "in_turn": WaitInTurn, "spin": Spin}


class Rows:
    """Sequences of mixed context on a device thread, planned by hand."""

    def __init__(self, backend: Backend, processor: str, ms: float, rows: int) -> None:
        self._results: queue.SimpleQueue[StepResult] = queue.SimpleQueue()
        self._device = DeviceThread(lambda: backend, SystemClock(), self._results.put)
        built: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._device.start(built.put)
        built.get()
        self._steps = itertools.count(1)
        lengths = random.Random(1)
        self._at = [lengths.randint(*PROMPT_TOKENS) for _ in range(rows)]
        blocks = blocks_for(MAX_TOKENS, BLOCK_TOKENS)
        asked = (f'{{"name": "{processor}", "args": {{"ms": {ms}}}}}',) if processor else ()
        for slot, length in enumerate(self._at):
            prompt = ints(lengths.randrange(300, 40_000) for _ in range(length))
            self._device.put(
                SlotOpen(
                    slot=slot, generation=1, seq=slot, prompt_tokens=length, seed=slot, tokens=prompt,
                    sampling=Sampling(), processors=asked,
                )
            )  # fmt: skip
            self._put([slot], [0], [length], (slot, slot * blocks, blocks))
            self.take()

    def decode(self, slots: Sequence[int]) -> None:
        """Plan the next token of these rows."""
        self._put(slots, [self._at[slot] for slot in slots], [1] * len(slots))
        for slot in slots:
            self._at[slot] += 1

    def take(self) -> StepResult:
        """The next result; an error of it is raised."""
        result = self._results.get()
        if result.error or result.row_errors:
            raise RuntimeError(f"step {result.step}: {result.error or result.row_errors}")
        return result

    def end(self) -> None:
        """End the device thread."""
        self._device.join(60)

    def _put(
        self,
        slots: Sequence[int],
        starts: list[int],
        counts: list[int],
        table: tuple[int, int, int] | None = None,
    ) -> None:
        slot, first_block, blocks = table or (0, 0, 0)
        self._device.put(
            StepPlan(
                exec_epoch=1,
                step=next(self._steps),
                mode="two_batch",
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
        )


def single(rows: Rows, count: int, steps: int) -> float:
    """Tokens a second of all rows in one batch."""
    began = time.perf_counter()
    for _ in range(steps):
        rows.decode(range(count))
        rows.take()
    return steps * count / (time.perf_counter() - began)


def halves(rows: Rows, count: int, steps: int) -> float:
    """Tokens a second of two halves in turn."""
    members = (range(count // 2), range(count // 2, count))
    began = time.perf_counter()
    for half in members:
        rows.decode(half)
    for step in range(2 * steps):
        rows.take()
        if step < 2 * (steps - 1):
            rows.decode(members[step % 2])
    return steps * count / (time.perf_counter() - began)


def main() -> None:
    """Print tokens a second of both, and the ratio, for each processor."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--ms", type=float, default=20)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=15, help="of a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--processors", nargs="+", default=["", *PROCESSORS], choices=["", *PROCESSORS])
    args = parser.parse_args()
    files = resolve(MODEL, load().settings.cache_dir)
    for name in args.processors:
        backend = build(
            TorchOptions(
                model_path=files.path, model_name=MODEL, threads=args.threads, max_step_tokens=512,
                dtype="f32", slots=args.rows, max_context=MAX_TOKENS, processors=PROCESSORS,
            )
        )  # fmt: skip
        rows = Rows(backend, name, args.ms, args.rows)
        arms: dict[str, list[float]] = {"single": [], "halves": []}
        for _ in range(args.rounds):
            arms["single"].append(single(rows, args.rows, args.steps))
            arms["halves"].append(halves(rows, args.rows, args.steps))
        rows.end()
        one, two = (statistics.median(arm) for arm in arms.values())
        print(f"{name or 'no processor':>14}: single {one:.1f}, halves {two:.1f} tokens/s, {two / one:.2f} ×")


if __name__ == "__main__":
    main()
