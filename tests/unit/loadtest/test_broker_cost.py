"""What the broker's cost is made of: medians and ratios by hand; the services in one process."""

from __future__ import annotations

from typing import Any

import pytest

from loadtest.broker_cost import CASES, FIGURES, summary, table
from loadtest.fleet import MODEL
from loadtest.one_process import one_process
from shared.config import load


def pair(memory: float, nats: float) -> dict[str, dict[str, Any]]:
    sides = {"memory": memory, "nats": nats}
    return {side: dict.fromkeys(FIGURES, 1.0) | {"output_throughput": rate} for side, rate in sides.items()}


def test_the_cost_is_the_median_of_pairs_not_of_sides() -> None:
    found = summary([pair(100, 99), pair(200, 196), pair(400, 388)])
    assert found["cost_pct"] == pytest.approx({"median": 2.0, "least": 1.0, "most": 3.0})
    assert found["medians"]["memory"]["output_throughput"] == 200
    assert found["ratios"]["output_throughput"] == pytest.approx(0.98)
    case = {"name": "case", "concurrency": 8, "pairs": [1, 2, 3], **found}
    assert "cost 2.00 % of throughput (1.00 to 3.00, 3 pairs)" in table(case)
    assert "| output_throughput | 200.000 | 196.000 | 0.980 |" in table(case)


def test_the_cases_are_those_of_the_goal() -> None:
    cpu, sim = CASES
    assert (cpu.concurrency, cpu.settings["backend"]) == (32, "torch")
    assert (sim.concurrency, sim.settings["sim"]) == (128, "step=5000")


async def test_five_services_in_one_process() -> None:
    settings = load(flags={"fleet": "one", "backend": "sim", "sim": "step=200", "l1": "off"}).settings
    body = {"model": MODEL, "prompt": [300] * 40, "max_tokens": 7, "ignore_eos": True}
    async with one_process(settings) as client:
        answer = await client.complete(body)
    assert answer["usage"]["completion_tokens"] == 7
