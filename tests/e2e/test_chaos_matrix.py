"""Six cells of the chaos matrix on every change: a SIGKILL in the middle of clients over HTTP and over NATS.

`scripts/soak chaos` runs all of it, with 600 requests a cell and stops of 10 s and 40 s.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from loadtest.chaos import cells
from loadtest.chaos.cells import Answers, Cell, House

REQUESTS = 150
CELLS = [
    ("scheduler",), ("executor",), ("detokenizer",), ("tokenizer",), ("nats-server",),
    ("scheduler", "detokenizer"),
]  # fmt: skip


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    with cells.house(log=str(tmp_path_factory.mktemp("chaos") / "log")) as house:
        yield house


@pytest.fixture(scope="module")
def right(fleet: House) -> Answers:
    return asyncio.run(cells.answers(fleet, REQUESTS))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("victims", CELLS, ids="+".join)
def test_a_death_costs_no_answer(fleet: House, right: Answers, victims: tuple[str, ...]) -> None:
    counts = asyncio.run(cells.run(Cell(victims, "kill"), fleet, right, REQUESTS))
    print(counts)
    assert counts.flaws == [], counts.messages
    assert counts.right > REQUESTS // 2
