"""Fixtures: servers of a test's own, and one for the tests of a file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.running_up import StartUp, Up, end, running_up, starter


@pytest.fixture
def start_up(tmp_path: Path) -> Iterator[StartUp]:
    """Starts servers of the test's own, and stops them at its end."""
    running: list[Up] = []
    yield starter(tmp_path, running)
    end(running)


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """One server for the tests of a file."""
    with running_up(tmp_path_factory.mktemp("up")) as up:
        yield up
