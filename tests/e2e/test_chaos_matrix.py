"""Cells of the chaos matrix on every change: a SIGKILL in the middle of clients over HTTP and over NATS, to
one service each, and to one of two schedulers and of two executors of each of two models at once.

`scripts/soak chaos` runs all of it, with 600 requests a cell and stops of 10 s and 40 s.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from support.small_llama import write_small_llama

from loadtest.chaos import cells
from loadtest.chaos.cells import Answers, Cell, Shape, Target
from loadtest.fleet import MODEL

REQUESTS = 48
CELLS = [
    ("scheduler",), ("executor",), ("detokenizer",), ("tokenizer",), ("nats-server",),
    ("scheduler", "detokenizer"), ("kv_offload",),
]  # fmt: skip


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    with cells.target(log=str(tmp_path_factory.mktemp("chaos") / "log")) as found:
        yield found


@pytest.fixture(scope="module")
def right(fleet: Target) -> Answers:
    return asyncio.run(cells.answers(fleet, REQUESTS))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("victims", CELLS, ids="+".join)
def test_a_death_costs_no_answer(fleet: Target, right: Answers, victims: tuple[str, ...]) -> None:
    counts = asyncio.run(cells.run(Cell(victims, "kill"), fleet, right, REQUESTS))
    print(counts)
    assert counts.flaws == [], counts.messages
    assert counts.right > REQUESTS // 2
    if "nats-server" not in victims:
        assert counts.right == REQUESTS


# ---- two of everything --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    folder = tmp_path_factory.mktemp("several")
    models = MODEL, str(write_small_llama(folder / "small-llama", hidden=64, layers=1))
    with cells.target(log=str(folder / "log"), shape=Shape(models, schedulers=2, executors=2)) as found:
        yield found


@pytest.mark.timeout(300)
def test_one_of_two_of_each_dies(several: Target) -> None:
    right = asyncio.run(cells.answers(several, REQUESTS))
    counts = asyncio.run(cells.run(Cell(("scheduler", "executor"), "kill"), several, right, REQUESTS))
    print(counts)
    assert counts.flaws == [], counts.messages
    assert counts.refused == 0, "the other one serves"
