"""The cores and the memory that a process may use, by trees of /proc and /sys of kernels and containers."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from shared.processes import CoreWaits, available_bytes, oom_kills, usable_cores, usable_threads

V2, V1 = "0::{}\n", "5:cpuset:/\n4:cpu,cpuacct:{}\n1:name=systemd:/\n0::/\n"
V1_MEMORY = "4:memory:{}\n0::/\n"
NO_LIMIT = 9_223_372_036_854_771_712


def tree(root: Path, groups: str, files: Mapping[str, str]) -> Path:
    for name, text in {"proc/self/cgroup": groups, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda of: set(range(8)))


@pytest.mark.parametrize(
    ("groups", "files", "cores"),
    [
        (V2.format("/"), {}, 8),
        (V2.format("/"), {"sys/fs/cgroup/cpu.max": "max 100000\n"}, 8),
        (V2.format("/"), {"sys/fs/cgroup/cpu.max": "150000 100000\n"}, 1.5),  # a container's own view
        (V2.format("/a/b"), {"sys/fs/cgroup/a/b/cpu.max": "max 10", "sys/fs/cgroup/a/cpu.max": "30 10"}, 3),
        (V2.format("/a"), {"sys/fs/cgroup/a/cpu.max": "1600000 100000"}, 8),  # more than there are
        (V2.format("/../.."), {"sys/fs/cgroup/cpu.max": "50000 100000"}, 0.5),
        (V1.format("/docker/1f"), {
            "sys/fs/cgroup/cpu,cpuacct/docker/1f/cpu.cfs_quota_us": "200000\n",
            "sys/fs/cgroup/cpu,cpuacct/docker/1f/cpu.cfs_period_us": "100000\n",
        }, 2),
        (V1.format("/docker/1f"), {  # the path is the host's, what is mounted the container's
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "150000\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        }, 1.5),
        (V1.format("/"), {
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        }, 8),
        (V2.format("/"), {"sys/fs/cgroup/cpu.max": "what is this"}, 8),
        (V2.format("/"), {"sys/fs/cgroup/cpu.max": "50000 0"}, 8),
        ("what\n\n7:cpu\n" + V2.format("/"), {"sys/fs/cgroup/cpu.max": "150000 100000\n"}, 1.5),
    ],
)  # fmt: skip
def test_the_affinity_mask_and_the_tightest_quota_decide(
    tmp_path: Path, groups: str, files: Mapping[str, str], cores: float
) -> None:
    assert usable_cores(tree(tmp_path, groups, files)) == cores


@pytest.mark.parametrize(
    ("groups", "at", "files", "available"),
    [
        (V2.format("/"), "", {}, 7_999_488),
        (V2.format("/"), "", {"max": "max", "current": "5", "stat": ""}, 7_999_488),
        (V2.format("/"), "", {  # a container's own view; pages of files are given back
            "max": "3000000\n", "current": "2000000\n", "stat": "anon 1\ninactive_file 50\nactive_file 70\n",
        }, 1_000_050),
        (V2.format("/a/b"), "a", {"max": "3000", "current": "1000", "stat": ""}, 2000),  # a slice of systemd
        (V2.format("/"), "", {"max": "3000", "current": "4000", "stat": ""}, 0),
        (V1_MEMORY.format("/docker/1f"), "memory", {  # what is mounted is the container's
            "limit_in_bytes": "3000", "usage_in_bytes": "1000",
            "stat": "inactive_file 1\ntotal_inactive_file 9\n",
        }, 2009),
        (V1_MEMORY.format("/"), "memory", {
            "limit_in_bytes": f"{NO_LIMIT}", "usage_in_bytes": "1", "stat": "",
        }, 7_999_488),
    ],
)  # fmt: skip
def test_memory_is_what_the_machine_and_every_cgroup_have_left(
    tmp_path: Path, groups: str, at: str, files: Mapping[str, str], available: int
) -> None:
    limits = {str(Path("sys/fs/cgroup", at, f"memory.{name}")): text for name, text in files.items()}
    meminfo = {"proc/meminfo": "MemTotal: 9000000 kB\nMemAvailable:   7812 kB\n"}
    assert available_bytes(tree(tmp_path, groups, {**meminfo, **limits})) == available


@pytest.mark.parametrize(
    ("groups", "counters", "kills"),
    [
        (V2.format("/a"), "sys/fs/cgroup/a/memory.events", 3),
        (V1_MEMORY.format("/"), "sys/fs/cgroup/memory/memory.oom_control", 3),
        (V2.format("/"), "none", 9),  # the root has no such file
    ],
)
def test_processes_that_the_kernel_has_killed_for_memory(
    tmp_path: Path, groups: str, counters: str, kills: int
) -> None:
    files = {"proc/vmstat": "nr_free 1\noom_kill 9\n", counters: "oom 5\noom_kill 3\noom_group_kill 1\n"}
    assert oom_kills(tree(tmp_path, groups, files)) == kills


def test_affinity_mask_is_used_without_proc(tmp_path: Path) -> None:
    assert usable_cores(tmp_path) == 8


@pytest.mark.parametrize(
    ("cores", "processes", "threads"), [(8, 1, 8), (1.5, 1, 2), (0.5, 1, 1), (8, 3, 2), (2, 4, 1)]
)
def test_threads_fill_the_cores_and_are_at_least_one(
    monkeypatch: pytest.MonkeyPatch, cores: float, processes: int, threads: int
) -> None:
    monkeypatch.setattr("shared.processes.usable_cores", lambda: cores)
    assert usable_threads(processes) == threads


def test_the_share_is_that_of_the_busy_thread_that_waited_longest(tmp_path: Path) -> None:
    def write(**threads: tuple[int, int]) -> None:
        for name, (ran, waited) in threads.items():
            (tmp_path / name).mkdir(exist_ok=True)
            (tmp_path / name / "schedstat").write_text(f"{ran} {waited} 7\n")

    write(t1=(1_000, 500), t2=(1_000, 0), t3=(50, 0))
    waits = CoreWaits(tmp_path)
    write(t1=(1_900, 600), t2=(1_700, 300), t3=(60, 90))  # t3 could run for 100 alone
    assert waits.share() == 0.3
    write(t1=(2_900, 600), t4=(600, 400))  # a new one, and t2 and t3 slept
    assert waits.share() == 0.4
    (tmp_path / "t4" / "schedstat").unlink()  # it has ended
    write(t1=(3_000, 600))
    assert waits.share() == 0


@pytest.mark.parametrize("text", [None, "0 0 0\n"])
def test_all_of_the_time_may_be_waiting_without_statistics(tmp_path: Path, text: str | None) -> None:
    (tmp_path / "t").mkdir()
    if text:
        (tmp_path / "t" / "schedstat").write_text(text)
    assert CoreWaits(tmp_path).share() == 1
    assert CoreWaits(tmp_path / "none").share() == 1


def test_a_thread_of_this_process_waits_where_two_share_a_core() -> None:
    waits, core = CoreWaits(), min(os.sched_getaffinity(0))

    def compute() -> None:
        os.sched_setaffinity(0, {core})
        until = time.monotonic() + 0.2
        while time.monotonic() < until:
            hashlib.sha256(bytes(1_000_000))  # without the GIL

    threads = [threading.Thread(target=compute) for _ in range(2)]
    for each in threads:
        each.start()
    time.sleep(0.15)
    share = waits.share()
    for each in threads:
        each.join()
    assert share > 0.3
