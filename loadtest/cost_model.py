"""How far predicted step times are from measured ones, over the recorded steps of a server under load.

    python -m loadtest.cost_model loadtest/results/cost_model/steps_1.txt.gz

A line is a step: rows, tokens, KV tokens, attention pairs (shared/step_model.py), the microseconds that
it took, and those predicted when it was recorded. The first STARTING steps, of a start, do not count.
"""

from __future__ import annotations

import argparse
import gzip
from math import log
from pathlib import Path
from statistics import mean

from services.scheduler.state.cost_model import CostModel
from shared.step_model import StepShape

STARTING = 20


def errors(file: Path) -> dict[str, tuple[float, float]]:
    """The mean |log(predicted / measured)| of steps with and without chunks: as recorded, and of today's
    cost model, which sees each step after it has predicted it."""
    costs = CostModel()
    found: dict[str, list[tuple[float, float]]] = {"with chunks": [], "decodes alone": []}
    for number, line in enumerate(gzip.decompress(file.read_bytes()).decode().splitlines()):
        rows, tokens, kv_tokens, attention, took_us, recorded_us = map(int, line.split())
        shape = StepShape(rows, tokens, kv_tokens, attention)
        predicted_us = costs.predict_us(shape)
        costs.observe(shape, took_us)
        if number > STARTING and took_us > 0:
            both = [abs(log(max(us, 1) / took_us)) for us in (recorded_us, predicted_us)]
            found["with chunks" if tokens > rows else "decodes alone"].append((both[0], both[1]))
    return {name: (mean(a for a, _ in of), mean(b for _, b in of)) for name, of in found.items() if of}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("files", nargs="+", type=Path)
    for file in parser.parse_args().files:
        for name, (recorded, now) in errors(file).items():
            print(f"{file.name}: {name}: as recorded {recorded:.3f}, now {now:.3f}")
