"""The verdict of the run of many short requests: memory that is held grows, fragmentation does not count."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from loadtest.churn import heap
from loadtest.churn.__main__ import kept, processes
from loadtest.churn.watch import Line, Watch, line

PID = 7
MIB = 1 << 20


def watched(rss: list[int], blocks: list[int], fds: list[int]) -> Watch:
    watch = Watch(1, Path(), "")
    watch.names[PID] = "scheduler"
    watch.samples[PID] = [
        {
            "requests": 1_000 * i,
            "rss": r,
            "pss": r,
            "anonymous": r,
            "fds": f,
            "blocks": b,
            "malloc_bytes": MIB,
        }
        for i, (r, b, f) in enumerate(zip(rss, blocks, fds, strict=True))
    ]
    watch.broker = [
        {"requests": 1_000 * i, "connections": 4, "subscriptions": 9 + i} for i in range(len(rss))
    ]
    return watch


def test_a_line_has_its_ends_and_its_slope_for_1000_requests() -> None:
    assert line([(0, 10.0), (1_000, 12.0), (2_000, 14.0)]) == Line(10.0, 14.0, 2.0)
    assert line([(0, 10.0), (2_000, 10.0)]).growth_pct == 0.0
    assert line([(0, 100.0), (500, 103.0)]).growth_pct == pytest.approx(3.0)


@pytest.mark.parametrize(
    ("rss", "blocks", "grows"),
    [
        ([100, 150, 150, 150, 150], [10, 15, 15, 15, 15], False),  # the start alone
        ([100, 100, 100, 104, 108], [10, 10, 10, 10, 10], False),  # pages that are partly used
        ([100, 100, 100, 104, 108], [1_000, 1_000, 1_000, 1_040, 1_080], True),
        ([10, 10, 10, 10.3, 10.6], [1_000, 1_000, 1_000, 1_040, 1_080], False),  # less than an arena
    ],
)
def test_a_process_fails_if_anonymous_and_allocated_memory_grow_in_the_later_half(
    rss: list[float], blocks: list[int], grows: bool
) -> None:
    found = processes(watched([round(MIB * each) for each in rss], blocks, [3] * 5), growth_pct=2.0)
    assert found[PID]["grows"] is grows


def test_open_files_and_subscriptions_are_kept_if_there_are_more_than_before() -> None:
    assert kept(watched([MIB] * 3, [1] * 3, [3, 9, 3])) == ["subscriptions: 9, now 11"]
    assert kept(watched([MIB] * 3, [1] * 3, [3, 3, 5]))[1:] == [f"scheduler {PID}: 3 files, now 5"]


def test_a_process_with_the_module_of_the_folder_answers_the_signal(tmp_path: Path) -> None:
    heap.sitecustomize(tmp_path)
    paths = [str(tmp_path), str(Path(heap.__file__).parents[2])]
    with subprocess.Popen(
        [sys.executable, "-c", "import sys; print('there', flush=True); sys.stdin.read()"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert heap.answers(process.pid)
        os.kill(process.pid, heap.ASK)
        process.communicate()
    found = json.loads((tmp_path / str(process.pid)).read_text())
    assert found["blocks"] > 1_000
    assert process.returncode == 0
