"""Where two streams begin to pay."""

from __future__ import annotations

import pytest

from services.executor.parallel.step_split import NEVER, split_threshold


@pytest.mark.parametrize(
    ("times", "wanted"),
    [
        ({64: (1.0, 1.6), 1024: (4.0, 3.99), 2048: (8.0, 7.5), 4096: (16.0, 13.0)}, 2048),
        ({4096: (16.0, 13.0), 64: (1.0, 0.5), 2048: (8.0, 8.5)}, 4096),  # a stroke of luck at 64
        ({64: (1.0, 0.9)}, 64),
        ({64: (1.0, 0.9), 128: (1.0, 1.0)}, NEVER),
        ({}, NEVER),
    ],
)
def test_the_least_size_from_which_on_it_pays(times: dict[int, tuple[float, float]], wanted: int) -> None:
    assert split_threshold(times) == wanted
