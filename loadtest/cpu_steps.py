"""Measures steps of the CPU engine by dtype, in turn in one process: no scheduler, no messages.

    python -m loadtest.cpu_steps f32 bf16 int8 packed --out cpu_steps.json

Decode steps of 1, 8 and 32 sequences of 100 to 150 tokens (--before others), and one prompt of 512 tokens: ms
from the plan to the token, or ms of one core with --cpu-time and threads=1 for each engine, which other work
on the machine disturbs less. A wider machine computes with the instructions of AVX2 machines where
NUMBA_CPU_FEATURES=+avx2,+fma,+f16c and ONEDNN_MAX_CPU_ISA=AVX2 are set.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable

from loadtest.command_line import parser_of
from loadtest.driver import Driver
from loadtest.eval.engines import SIDE_BY_SIDE, Arm
from loadtest.fleet import cpu_name
from services.executor.engine import Backend

ROWS = (1, 8, 32)
BEFORE, MORE, PROMPT = 100, 60, 512
CONTEXT = 1024
LIMITED_BY = ("NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES", "ONEDNN_MAX_CPU_ISA")


Clock = Callable[[], float]  # s


class Steps:
    """Decode steps of some sequences of one engine."""

    def __init__(self, engine: Backend, rows: int, clock: Clock, before: int = BEFORE) -> None:
        """`before`: tokens of each sequence before the first step."""
        self._driver, self._rows, self._clock = Driver(engine), rows, clock
        self._at = self._before = before
        for slot in range(rows):
            opened, blocks = self._driver.open(slot, before + MORE, before + MORE)
            plan = self._driver.plan([(opened, 0, before, False)], {opened: blocks}, samples=False)
            self._driver.run([plan])

    def next_ms(self) -> float:
        """The time of one step."""
        rows = [(slot, self._at, 1, False) for slot in range(self._rows)]
        self._at = self._before if self._at + 2 > self._before + MORE else self._at + 1
        return timed_ms(self._driver, rows, {}, self._clock)

    def close(self) -> None:
        self._driver.close()


def timed_ms(
    driver: Driver, rows: list[tuple[int, int, int, bool]], tables: dict[int, list[int]], clock: Clock
) -> float:
    plan = driver.plan(rows, tables)
    began = clock()
    driver.run([plan])
    return (clock() - began) * 1e3


def prompt_ms(engine: Backend, clock: Clock) -> float:
    """The time of a prompt in one step."""
    driver = Driver(engine)
    slot, blocks = driver.open(0, PROMPT + 8, PROMPT + 8)
    took = timed_ms(driver, [(slot, 0, PROMPT, False)], {slot: blocks}, clock)
    driver.close()
    return took


def main() -> None:
    parser = parser_of("cpu_steps", __doc__)
    parser.add_argument("engines", nargs="+", help="as for `headrace eval kl`: DTYPE,SETTING=VALUE,...")
    parser.add_argument("--model", default="", help="default: the setting")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--before", type=int, default=BEFORE, help="tokens before the decode steps")
    parser.add_argument("--cpu-time", action="store_true")
    given = parser.parse_args()
    clock = time.process_time if given.cpu_time else time.perf_counter
    slots = f",slots={max(ROWS)}"
    context = max(CONTEXT, -(-max(ROWS) * (given.before + MORE) // SIDE_BY_SIDE))  # gives blocks enough
    engines = {name: Arm.read(name + slots).build(given.model, context) for name in given.engines}
    found: dict[str, dict[str, list[float]]] = {}
    for rows in ROWS:
        steps = {name: Steps(engine, rows, clock, given.before) for name, engine in engines.items()}
        taken: dict[str, list[float]] = {name: [] for name in engines}
        for _ in range(given.rounds):
            for name, each in steps.items():
                taken[name].append(each.next_ms())
        for each in steps.values():
            each.close()
        found[f"{rows} rows"] = taken
    taken = {name: [] for name in engines}
    for _ in range(max(5, given.rounds // 5)):
        for name, engine in engines.items():
            taken[name].append(prompt_ms(engine, clock))
    found[f"prompt of {PROMPT}"] = taken
    for what, of_engines in found.items():
        shown = (f"{name} {statistics.median(ms):.2f}" for name, ms in of_engines.items())
        print(f"{what}, ms: {'  '.join(shown)}")
    if given.out:
        limited = {name: os.environ[name] for name in LIMITED_BY if name in os.environ}
        about = {
            "cpu": cpu_name(),
            "before": given.before,
            "cpu_time": given.cpu_time,
            "load": os.getloadavg(),
            "limited": limited,
        }
        given.out.write_text(json.dumps({**about, "ms": found}))


if __name__ == "__main__":
    main()
