"""A forked service: whose child it is, what it gets, how it ends, and what happens without the server."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from loadtest import faults
from services.launcher import fork_server
from services.launcher.fork_server import SERVE, ForkServer, started_ahead
from services.launcher.supervisor import ServiceSpec, Supervisor
from shared.errors import SetupError
from shared.processes import with_import_path

ENV = with_import_path({**os.environ, "HEADRACE_NATS_URL": "nats://127.0.0.1:1"})
REFUSED = b"invalid choice: 'unknown'"


@pytest.fixture
def output(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path / "output", os.O_RDWR | os.O_CREAT)
    yield fd
    os.close(fd)


def servers(pid: int) -> list[int]:
    """The fork servers among the children of a process."""
    return [p for p in faults.children(pid) if "fork_server" in Path(f"/proc/{p}/cmdline").read_text()]


async def test_forks_are_our_children_with_command_lines_of_their_own(output: int) -> None:
    forks, us = ForkServer(ENV), os.getpid()
    started = [forks.start((*SERVE, kind), ENV, output) for kind in ("scheduler", "scheduler", "kv_offload")]
    *schedulers, tier = await asyncio.gather(*started)
    forks.close()
    async with asyncio.timeout(60):
        while len(found := faults.pids_of(us, "scheduler")) < 2 or not faults.pids_of(us, "kv_offload"):
            await asyncio.sleep(0)
    assert found == sorted(forked.pid for forked in schedulers)
    assert faults.pids_of(us, "kv_offload") == [tier.pid]
    assert os.getsid(tier.pid) == tier.pid
    for forked in (*schedulers, tier):
        os.kill(forked.pid, signal.SIGKILL)
        assert await forked.wait() == forked.returncode == -signal.SIGKILL


async def test_each_has_its_own_environment_and_its_status_arrives(output: int) -> None:
    forks = ForkServer(ENV | {"HEADRACE_WINDOW": "first"})
    assert (
        await (await forks.start((*SERVE, "scheduler"), ENV | {"HEADRACE_STEP_TOKENS": "no"}, output)).wait()
        == 1
    )
    read = os.pread(output, 4096, 0)
    assert await (await forks.start((*SERVE, "unknown"), ENV, output)).wait() == 2
    forks.close()
    assert b"HEADRACE_STEP_TOKENS" in read
    assert b"HEADRACE_WINDOW" not in read
    assert REFUSED in os.pread(output, 4096, len(read))


async def test_a_command_line_may_be_no_utf_8(output: int) -> None:
    forks = ForkServer(ENV)
    assert await (await forks.start((*SERVE, os.fsdecode(b"\xff")), ENV, output)).wait() == 2
    forks.close()


async def test_services_start_as_before_where_the_fork_server_cannot_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fork_server, "LIBC", None)
    us = os.getpid()
    ended, lines = asyncio.Event(), []

    def log_line(name: str, line: str) -> None:
        lines.append(line)
        if REFUSED.decode() in line:
            ended.set()

    supervisor = Supervisor([ServiceSpec("a", "a", (*SERVE, "unknown"))], ENV, log_line)
    supervisor.start()
    async with asyncio.timeout(60):
        await ended.wait()
        assert servers(us) == []
    await supervisor.kill()


async def test_one_that_was_started_ahead_starts_the_services(monkeypatch: pytest.MonkeyPatch) -> None:
    us = os.getpid()
    monkeypatch.setenv("HEADRACE_LEAF", "nats://a:password@centre:7422")
    with started_ahead() as forks:
        (server,) = servers(us)
        assert b"HEADRACE_LEAF" not in Path(f"/proc/{server}/environ").read_bytes()
        supervisor = Supervisor(
            [ServiceSpec("a", "a", (*SERVE, "scheduler"))], ENV, lambda *line: None, forks
        )
        supervisor.start()
        async with asyncio.timeout(60):
            while not faults.pids_of(us, "scheduler"):
                await asyncio.sleep(0)
        assert servers(us) == [server]
        await supervisor.kill()
    assert servers(us) == []
    with pytest.raises(SetupError), started_ahead():
        raise SetupError("a port is taken")
    assert servers(us) == []
    monkeypatch.setattr(fork_server, "LIBC", None)
    with started_ahead() as forks:
        assert forks is None


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
async def test_services_start_as_before_without_the_server(
    fault: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    us, refused, lines = os.getpid(), asyncio.Queue[str](), []

    def log_line(name: str, line: str) -> None:
        lines.append(line)
        if REFUSED.decode() in line:
            refused.put_nowait(line)

    supervisor = Supervisor([ServiceSpec("a", "a", (*SERVE, "unknown"))], ENV, log_line)
    supervisor.start()
    async with asyncio.timeout(60):
        await refused.get()
        (server,) = servers(us)
        monkeypatch.setattr(fork_server, "FORK_WAIT_S", 0.1)
        os.kill(server, fault)
        await refused.get()
        await refused.get()
    await supervisor.kill()
    assert [line.partition(";")[0] for line in lines if "again" in line][:2] == ["ended with status 2"] * 2
    assert faults.pids_of(us, "unknown") == []
