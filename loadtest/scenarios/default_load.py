"""Simulates the default settings under 16 and 32 requests a second on the virtual H200, beside vLLM 0.26.0's
figures from a real one (1,024 tokens in, 256 out; steps of up to 1,024 tokens).

    python -m loadtest.scenarios.default_load

The virtual machine is a little faster or slower than the real one: vLLM's times are scaled by the ratio of
the closed loop of 64 here to vLLM's 4,837 tokens/s there. The same load on a real one:

    python -m loadtest.gpu.serve --parts defaults --out gpu_defaults_h200.json
"""

from __future__ import annotations

import random

from loadtest.scenarios.definitions import H200
from loadtest.simulator.report import Figures, figures
from loadtest.simulator.requests import SimRequest, Workload, plain_prompt
from loadtest.simulator.world import Setup, World
from services.scheduler.state.state import Limits

CLOSED, CLOSED_TOK_S = 64, 4_837
LOADS = {0: 192, 16: 192, 32: 320}  # requests a second (0: the closed loop) -> requests
NAMES = ("p50", "p90", "p99", "max")
VLLM_ITL_MS = {16: (6.95, 17.0, 27.8, 30.0), 32: (31.6, 36.2, 68.3, 109.0)}  # as CLASS_NAMES
VLLM_TTFT_MS = {16: (63.0, 143.0), 32: (354.0, 1_775.0)}  # p50, p99
PROMPT, ANSWER = 1_024, 256
WARM = 8


def _asked(number: int, at_us: int, answer: int) -> SimRequest:
    return SimRequest(f"r{number}", at_us, plain_prompt(number, PROMPT), answer, answer)


def load(rate: int, seed: int = 17) -> Workload:
    """Poisson arrivals, or the closed loop."""
    rng, at_us, made = random.Random(seed), 0, []
    for number in range(1, LOADS[rate] + 1):
        at_us += int(rng.expovariate(rate) * 1e6) if rate else 0
        made.append(_asked(number, at_us, ANSWER))
    return Workload(tuple(made), 0 if rate else CLOSED)


def measured(rate: int, limits: Limits | None = None, seed: int = 17) -> Figures:
    """A load on a machine that has served a few requests before."""
    warm = Workload(tuple(_asked(1_000_000 + number, 0, 64) for number in range(WARM)))
    world = World(Setup((H200,), limits or Limits(), seed), warm)
    world.run()
    readers, began_us = world.readers, world.now_us
    readers.records.clear()
    del readers.gaps_us[:]
    world.go_on(load(rate, seed))
    seconds = (max(record.ended_us for record in readers.records) - began_us) / 1e6
    tok_s = sum(record.tokens for record in readers.records) / seconds
    return figures(world) | {"tok_s": round(tok_s, 1), "seconds": round(seconds, 2)}


def itl_ms(row: Figures) -> tuple[float, ...]:
    """p50, p90, p99 and the longest of the gaps between tokens."""
    return tuple(round(row[f"itl_ms_{name}"], 1) for name in NAMES)


def main() -> None:
    """Print the table."""
    closed = measured(0)
    print(f"closed loop {CLOSED}: {closed['tok_s']:,.0f} tok/s, ITL {itl_ms(closed)}")
    scale = CLOSED_TOK_S / closed["tok_s"]
    for rate, of_vllm in VLLM_ITL_MS.items():
        row = measured(rate)
        ttft = row["ttft_ms_p50"], row["ttft_ms_p99"]
        print(f"{rate}/s: {row['tok_s']:,.0f} tok/s, TTFT {ttft} ms, ITL {'/'.join(NAMES)} {itl_ms(row)}")
        print(
            f"      vLLM, scaled: TTFT {tuple(round(scale * ms) for ms in VLLM_TTFT_MS[rate])}, "
            f"ITL {tuple(round(scale * ms, 1) for ms in of_vllm)}"
        )


if __name__ == "__main__":
    main()
