"""The supervisor over small real processes: lines, restarts, order of the drain, kills, no orphans."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from services.launcher import supervisor as module
from services.launcher.supervisor import ExecutorProcesses, ServiceSpec, Supervisor, service_specs

FOREVER = "import signal, time; print('up', flush=True); signal.pause()"
POLITE = (
    "import signal, sys; signal.signal(signal.SIGTERM, lambda *a: (print('bye', flush=True), sys.exit(0)));"
    "print('up', flush=True); signal.pause()"
)
STUBBORN = (
    "import signal\n"
    "for number in (signal.SIGTERM, signal.SIGINT): signal.signal(number, signal.SIG_IGN)\n"
    "print('up', flush=True)\n"
    "while 1: signal.pause()"
)
LAST_WORDS = (
    "import signal, sys\n"
    "def second(*a): print('stopped', flush=True); sys.exit(130)\n"
    "def first(*a): signal.signal(signal.SIGTERM, second)\n"
    "signal.signal(signal.SIGINT, second); signal.signal(signal.SIGTERM, first)\n"
    "print('up', flush=True)\n"
    "while 1: signal.pause()"
)
DEAF = (
    "import signal, sys; signal.signal(signal.SIGUSR1, lambda *a: sys.exit(0))\n"
    "for number in (signal.SIGTERM, signal.SIGINT): signal.signal(number, signal.SIG_IGN)\n"
    "print('up', flush=True)\n"
    "while 1: signal.pause()"
)
NEEDY = (
    "import signal, sys; signal.signal(signal.SIGUSR1, lambda *a: sys.exit(0));"
    "signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True)\n"
    "while 1: signal.pause()"
)


class Lines:
    """Collects the lines of services and wakes the waiter for one."""

    def __init__(self) -> None:
        self.got: list[tuple[str, str]] = []
        self._changed = asyncio.Event()

    def __call__(self, name: str, line: str) -> None:
        self.got.append((name, line))
        self._changed.set()

    async def wait_for(self, name: str, line: str, times: int = 1) -> None:
        async with asyncio.timeout(60):
            while self.got.count((name, line)) < times:
                self._changed.clear()
                await self._changed.wait()


def spec(name: str, code: str, kind: str = "") -> ServiceSpec:
    return ServiceSpec(name, kind or name, (sys.executable, "-S", "-c", code))


async def test_a_service_may_start_later() -> None:
    lines = Lines()
    supervisor = Supervisor([spec("a", FOREVER), spec("b", FOREVER)], dict(os.environ), lines)
    supervisor.start(without=("b",))
    await lines.wait_for("a", "up")
    assert supervisor.services[1].process is None
    supervisor.start()
    await lines.wait_for("b", "up")
    assert lines.got.count(("a", "up")) == 1
    await supervisor.kill()


async def test_services_start_in_turn_beside_the_executor_on_few_cores() -> None:
    lines = Lines()
    specs = [spec("a", FOREVER), spec("b", FOREVER), spec("later", FOREVER), spec("x", FOREVER, "executor")]
    supervisor = Supervisor(specs, dict(os.environ), lines)
    await supervisor.start_in_turn(without={"later"})
    await lines.wait_for("x", "up")
    first, second, later, _ = supervisor.services
    assert (first.logged.is_set(), second.logged.is_set(), later.task) == (True, True, None)
    assert lines.got.index(("a", "up")) < lines.got.index(("b", "up"))
    await supervisor.kill()


async def test_end_of_each_process_is_reported_before_the_next_start_unless_the_supervisor_killed_it() -> (
    None
):
    lines, ended = Lines(), list[tuple[str, int]]()
    supervisor = Supervisor([spec("a", FOREVER)], dict(os.environ), lines)
    supervisor.on_end = lambda spec, pid: ended.append((spec.name, pid))
    supervisor.start()
    await lines.wait_for("a", "up")
    first = supervisor.services[0].process
    assert first is not None
    os.kill(first.pid, signal.SIGKILL)
    await lines.wait_for("a", "up", 2)
    assert ended == [("a", first.pid)]
    await supervisor.kill()
    assert ended == [("a", first.pid)]


def supervise(lines: Lines, *specs: ServiceSpec) -> Supervisor:
    supervisor = Supervisor(specs, dict(os.environ), lines)
    supervisor.start()
    return supervisor


async def test_drains_kind_by_kind_in_order() -> None:
    lines = Lines()
    running = supervise(lines, spec("b", POLITE), spec("a-0", POLITE, "a"), spec("a-1", POLITE, "a"))
    for name in ("a-0", "a-1", "b"):
        await lines.wait_for(name, "up")
    assert await running.drain([("a",), ("b",)], 20, lambda left, kind: None) is True
    goodbyes = [name for name, line in lines.got if line == "bye"]
    assert sorted(goodbyes[:2]) == ["a-0", "a-1"]
    assert goodbyes[2:] == ["b"]
    assert [s.process.returncode for s in running.services if s.process] == [0, 0, 0]


async def test_kinds_of_a_group_drain_together() -> None:
    lines, reported = Lines(), list[str]()
    running = supervise(lines, spec("a", NEEDY), spec("b", POLITE), spec("c", POLITE))
    for name in ("a", "b", "c"):
        await lines.wait_for(name, "up")
    draining = asyncio.create_task(
        running.drain([("a", "b"), ("c",)], 1000, lambda left, kinds: reported.append(kinds))
    )
    await lines.wait_for("b", "bye")
    assert ("c", "bye") not in lines.got
    running.services[0].send(signal.SIGUSR1)
    assert await asyncio.wait_for(draining, 60) is True
    assert reported[0] == "a and b"
    assert lines.got[-1] == ("c", "bye")


async def test_one_that_hangs_is_killed_and_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BACKOFF_FIRST_S", 0.01)
    monkeypatch.setattr(module, "HANG_POLL_S", 0.01)
    lines, hung = Lines(), list[int]()
    running = supervise(lines, spec("a", FOREVER), spec("b", FOREVER))
    for name in ("a", "b"):
        await lines.wait_for(name, "up")
    process = running.services[0].process
    assert process is not None
    hung.append(process.pid)
    watching = asyncio.create_task(running.watch(lambda name, pid: 17.2 if pid in hung else 0.0))
    await lines.wait_for("a", "has sent no heartbeat for 17 s and used no CPU: killed")
    await lines.wait_for("a", "was ended by SIGKILL; starts again in 0.01 s")
    await lines.wait_for("a", "up", times=2)
    watching.cancel()
    await running.kill()
    assert lines.got.count(("b", "up")) == 1


async def test_a_death_shows_though_a_grandchild_holds_the_pipe(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(module, "BACKOFF_FIRST_S", 0.01)
    monkeypatch.setattr(module, "LAST_LINES_S", 0.05)
    code = (
        "import os, signal, subprocess, sys\n"
        f"held = {str(tmp_path / 'held')!r}\n"
        "if not os.path.exists(held):\n"
        "    child = subprocess.Popen([sys.executable, '-S', '-c', 'import signal; signal.pause()'])\n"
        "    open(held, 'w').write(str(child.pid)); print('bye', flush=True); sys.exit(3)\n"
        "print('up', flush=True); signal.pause()"
    )
    lines = Lines()
    running = supervise(lines, spec("a", code))
    await lines.wait_for("a", "up")
    assert lines.got[:2] == [("a", "bye"), ("a", "ended with status 3; starts again in 0.01 s")]
    grandchild = int((tmp_path / "held").read_text())
    async with asyncio.timeout(60):
        while Path(f"/proc/{grandchild}").exists() and _state(grandchild) != "Z":
            await asyncio.sleep(0.01)  # its parent has no parent here: init reaps it in its own time
    await running.kill()


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


async def test_a_service_that_is_still_needed_is_kept_running_in_a_drain(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "BACKOFF_FIRST_S", 0.01)
    lines, reported = Lines(), asyncio.Event()
    running = supervise(lines, spec("a", NEEDY), spec("b", POLITE))
    await lines.wait_for("a", "up")
    await lines.wait_for("b", "up")
    draining = asyncio.create_task(running.drain([("a",), ("b",)], 1000, lambda left, kind: reported.set()))
    await reported.wait()
    running.services[1].send(signal.SIGKILL)
    await lines.wait_for("b", "up", times=2)
    running.services[0].send(signal.SIGUSR1)  # b is here again: a can end
    assert await asyncio.wait_for(draining, 60) is True
    assert [s.restarts for s in running.services] == [0, 1]
    assert lines.got[-1] == ("b", "bye")


@pytest.mark.parametrize(
    "error",
    [OSError(11, "no process left"), RuntimeError("can't start new thread")],
    ids=["process", "thread"],
)
async def test_process_that_cannot_be_started_is_tried_again(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BACKOFF_FIRST_S", 0.01)
    lines, start, refused = Lines(), asyncio.create_subprocess_exec, [error]

    async def exec_or_refuse(*args: Any, **options: Any) -> asyncio.subprocess.Process:
        if refused:
            raise refused.pop()
        return await start(*args, **options)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", exec_or_refuse)
    running = supervise(lines, spec("a", POLITE))
    await lines.wait_for("a", f"did not start ({error}); starts again in 0.01 s")
    await lines.wait_for("a", "up")
    assert await running.drain([("a",)], 20, lambda left, kind: None) is True


async def test_process_that_does_not_drain_in_time_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KILL_GRACE_S", 0.05)
    lines, reported = Lines(), []
    running = supervise(lines, spec("a", STUBBORN))
    await lines.wait_for("a", "up")
    assert await running.drain([("a",)], 0.05, lambda left, kind: reported.append(kind)) is False
    assert [s.process.returncode for s in running.services if s.process] == [-signal.SIGKILL]
    assert reported[0] == "a"


async def test_one_that_hangs_in_a_drain_costs_no_later_one_its_last_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "KILL_GRACE_S", 1000)
    monkeypatch.setattr(module, "LAST_ERRORS_S", 0.01, raising=False)
    lines = Lines()
    running = supervise(lines, spec("a", DEAF), spec("b", LAST_WORDS), spec("c", LAST_WORDS))
    for name in ("a", "b", "c"):
        await lines.wait_for(name, "up")
    draining = asyncio.create_task(running.drain([("a",), ("b",), ("c",)], 0.01, lambda left, kind: None))
    for name in ("b", "c"):
        await lines.wait_for(name, "stopped")
    running.services[0].send(signal.SIGUSR1)  # it has until the end
    assert await asyncio.wait_for(draining, 60) is False
    assert [s.process.returncode for s in running.services if s.process] == [0, 130, 130]


async def test_one_that_hangs_in_its_drain_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HANG_POLL_S", 0.01)
    lines, reported = Lines(), asyncio.Event()
    running = supervise(lines, spec("a", STUBBORN), spec("b", POLITE))
    for name in ("a", "b"):
        await lines.wait_for(name, "up")
    draining = asyncio.create_task(running.drain([("a",), ("b",)], 1000, lambda left, kind: reported.set()))
    await reported.wait()
    watching = asyncio.create_task(running.watch(lambda name, pid: 17.2 if name == "a" else 0.0))
    assert await asyncio.wait_for(draining, 60) is False
    watching.cancel()
    assert ("a", "has sent no heartbeat for 17 s and used no CPU: killed") in lines.got
    assert [s.process.returncode for s in running.services if s.process] == [-signal.SIGKILL, 0]
    assert lines.got[-1] == ("b", "bye")


async def test_a_kill_ends_a_drain() -> None:
    lines = Lines()
    running = supervise(lines, spec("a", STUBBORN), spec("b", FOREVER))
    await lines.wait_for("a", "up")
    await lines.wait_for("b", "up")
    reported = asyncio.Event()
    draining = asyncio.create_task(running.drain([("a",), ("b",)], 1000, lambda left, kind: reported.set()))
    await reported.wait()
    await running.kill()
    await asyncio.wait_for(draining, 60)
    await running.kill()
    assert {s.process.returncode for s in running.services if s.process} == {-signal.SIGKILL}


async def test_a_dead_service_starts_again_with_back_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BACKOFF_FIRST_S", 0.01)
    monkeypatch.setattr(module, "BACKOFF_LAST_S", 0.02)
    lines = Lines()
    running = supervise(lines, spec("a", "print('up'); raise SystemExit(3)"), spec("b", POLITE))
    await lines.wait_for("a", "up", times=4)
    await lines.wait_for("b", "up")
    assert await running.first_failure == "a ended with status 3"
    ended = [line for name, line in lines.got if name == "a" and line != "up"]
    assert ended[:3] == [f"ended with status 3; starts again in {t} s" for t in ("0.01", "0.02", "0.02")]
    assert running.services[0].restarts >= 3
    assert await running.drain([("a",), ("b",)], 20, lambda left, kind: None) is True
    assert lines.got.count(("b", "up")) == 1


@pytest.mark.parametrize(
    ("ours", "kills", "hint"),
    [
        (True, 1, ""),
        (False, 0, " (not by this command: perhaps by the kernel, for memory, see `dmesg`)"),
        (False, 1, " (the kernel killed for memory: its oom_kill has risen, see `dmesg`)"),
    ],
)
async def test_killed_service_is_reported_by_its_signal_and_perhaps_by_the_cause(
    ours: bool, kills: int, hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BACKOFF_FIRST_S", 0.01)
    counts = iter([7, 7 + kills])
    monkeypatch.setattr(module, "oom_kills", lambda: next(counts, 0))
    lines = Lines()
    running = supervise(lines, spec("a", FOREVER))
    await lines.wait_for("a", "up")
    (service,) = running.services
    assert service.process is not None
    if ours:
        service.send(signal.SIGKILL)
    else:
        os.kill(service.process.pid, signal.SIGKILL)
    await lines.wait_for("a", f"was ended by SIGKILL{hint}; starts again in 0.01 s")
    await lines.wait_for("a", "up", times=2)
    await running.kill()


async def test_service_with_a_truncated_mapped_file_is_reported_with_that_cause() -> None:
    lines = Lines()
    code = (
        "import mmap, os, tempfile\n"
        "file = tempfile.TemporaryFile(); file.truncate(8192)\n"
        "data = mmap.mmap(file.fileno(), 8192); os.truncate(file.fileno(), 0); data[5000]"
    )
    running = supervise(lines, spec("a", code))
    why = "a file that it had mapped, like a model's while it loads, was cut off or could not be read"
    await lines.wait_for("a", f"was ended by SIGBUS ({why}); starts again in 0.5 s")
    await running.kill()


async def test_lines_of_any_length_and_bytes() -> None:
    lines = Lines()
    code = (
        "import signal, sys; out = sys.stdout.buffer; out.write(b'x' * 3_000_000 + b'\\nb\\xffd\\nlast');"
        "out.flush(); signal.pause()"
    )
    running = supervise(lines, spec("a", code))
    await lines.wait_for("a", "b�d")
    await running.kill()
    assert ("a", "last") in lines.got


def test_services_die_with_the_launcher(tmp_path: Path) -> None:
    """SIGKILL on the process that supervises: its child must be gone, though it got no signal."""
    code = f"""
import asyncio, os, sys
from services.launcher.supervisor import ServiceSpec, Supervisor
async def main():
    code = "import os, signal; print(os.getpid(), flush=True); signal.pause()"
    Supervisor([ServiceSpec("a", "a", ({sys.executable!r}, "-S", "-c", code))], dict(os.environ),
               lambda name, line: print(line, flush=True)).start()
    await asyncio.Event().wait()
asyncio.run(main())
"""
    launcher = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert launcher.stdout is not None
    child = int(launcher.stdout.readline())
    gone = os.pidfd_open(child)
    launcher.kill()
    launcher.wait()
    import select

    assert select.select([gone], [], [], 10)[0] == [gone]  # readable once the process has ended
    os.close(gone)


def test_specs_are_named_by_kind_and_number() -> None:
    specs = service_specs({"scheduler": 1, "executor": 2})
    assert [(s.name, s.kind) for s in specs] == [
        ("scheduler", "scheduler"),
        ("executor-0", "executor"),
        ("executor-1", "executor"),
    ]
    assert specs[1].argv == (
        sys.executable, "-P", "-m", "services.launcher.serve", "executor", "--name", "executor-0",
    )  # fmt: skip


async def test_executors_of_a_model_end_and_start_again() -> None:
    lines = Lines()
    specs = [spec(name, POLITE, "executor") for name in ("a", "b")]
    supervisor = Supervisor(specs, dict(os.environ), lines)
    first, second = (ExecutorProcesses(supervisor, [s], 7) for s in supervisor.services)
    second.stop()
    supervisor.start()
    await lines.wait_for("a", "up")
    assert (first.is_running, first.is_ending, first.is_left_out) == (True, False, False)
    assert (second.is_running, second.is_ending, second.is_left_out) == (False, False, True)
    first.stop()
    assert first.is_ending
    await lines.wait_for("a", "bye")
    second.start()
    await lines.wait_for("b", "up")
    assert not second.is_left_out
    async with asyncio.timeout(60):
        while not first.is_left_out:
            await asyncio.sleep(0.01)
    lines.got.clear()
    first.start()
    await lines.wait_for("a", "up")
    assert (first.is_running, first.restarts) == (True, 0)
    await supervisor.kill()
