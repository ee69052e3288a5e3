"""`headrace up` on the simulated engine, as real processes, and commands run against it."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import nats
from nats.aio.client import Client as Nats

from loadtest import faults

HEADRACE = (sys.executable, "-m", "services.launcher.cli")
INSTALLED = (
    sys.executable,
    "-P",
    *HEADRACE[1:],
)  # as the script of an installation: by PYTHONPATH, from anywhere
READY_S = 180  # far above what it takes: a guard against hanging, no measure
QUICK = {
    "HEADRACE_SIM": "step=1000",
    "HEADRACE_HTTP": "off",
    "HEADRACE_HEARTBEAT_INTERVAL_MS": "400",  # below, a process that a busy machine holds up seems dead
    "HEADRACE_L1": "32",  # MiB: to reserve the pages of more takes time
    "HEADRACE_TOKENIZERS": "1",  # two of each by default
    "HEADRACE_DETOKENIZERS": "1",
    "HEADRACE_DURABLE": "false",  # a keeper is a process more
}
BY_DEFAULT_DURABLE = {name: value for name, value in QUICK.items() if name != "HEADRACE_DURABLE"}
# A server that another test kills must come back before another `up` takes its port, as 4222 would be. Each
# worker has ports of its own, below those that the kernel gives to connections.
_PORTS = count(20_000 + 1_000 * int(os.environ.get("PYTEST_XDIST_WORKER", "gw9").removeprefix("gw")))
HEARTBEATS = "hr.*.beat.*.*"  # when to look again: without a wait the services do little but answer
SMALL_L1 = {"HEADRACE_L1": "64"}  # many servers share this machine


@dataclass
class Up:
    """A running `headrace up` and what it printed."""

    process: subprocess.Popen[str]
    env: dict[str, str]
    log: Path
    printed: list[str] = field(default_factory=list)

    def read_until(self, pattern: str) -> str:
        """Read its stdout up to a line that matches. Fails when it ends before, or hangs."""
        assert self.process.stdout is not None
        guard = threading.Timer(READY_S, self.process.kill)
        guard.start()
        try:
            while line := self.process.stdout.readline():
                self.printed.append(line.rstrip())
                if re.search(pattern, line):
                    return line.rstrip()
        finally:
            guard.cancel()
        raise AssertionError(f"no {pattern!r} in {self.printed}\n{self.log.read_text()[-4000:]}")

    @property
    def nats_url(self) -> str:
        """The URL in the block that `up` prints."""
        return next(line.split()[-1] for line in self.printed if "NATS:" in line)

    @property
    def http_url(self) -> str:
        """The URL of the OpenAI API, likewise; with HEADRACE_HTTP=127.0.0.1:0."""
        return next(line.split()[-1] for line in self.printed if "OpenAI API:" in line)

    def run(self, *args: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        """A headrace command in a second shell."""
        return subprocess.run(
            [*HEADRACE, *args],
            env=self.env,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=180,
            check=False,
        )

    def children(self) -> list[int]:
        """Process ids of the services and the server."""
        return faults.children(self.process.pid)

    def child(self, kind: str) -> int:
        """The process id of the only service of a kind."""
        (found,) = faults.pids_of(self.process.pid, kind)
        return found

    def stop(self, *signals: signal.Signals) -> int:
        """Signal it, wait for its end; its exit status."""
        for number in signals:
            self.process.send_signal(number)
        status = self.process.wait(180)
        assert self.process.stdout is not None
        self.printed += self.process.stdout.read().splitlines()
        return status


class Terminal:
    """A headrace command on a terminal of its own."""

    def __init__(self, env: Mapping[str, str], *args: str) -> None:
        self._ours, theirs = pty.openpty()
        env = {**env, "TERM": "xterm", "NO_COLOR": "1"}
        self.process = subprocess.Popen(
            [*HEADRACE, *args], env=env, stdin=theirs, stdout=theirs, stderr=theirs,
            start_new_session=True, preexec_fn=_take_terminal,
        )  # fmt: skip
        os.close(theirs)
        self.text = ""

    def read_until(self, pattern: str) -> str:
        """What is on the screen since the last call, up to a match."""
        while not (match := re.search(pattern, self.text)):
            piece = os.read(self._ours, 65536)
            assert piece, self.text
            self.text += piece.decode(errors="replace")
        seen, self.text = self.text[: match.end()], self.text[match.end() :]
        return seen

    def type(self, text: str) -> None:
        """Press keys."""
        os.write(self._ours, text.encode())

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)


def _take_terminal() -> None:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


StartUp = Callable[..., Up]


async def statuses(nc: Nats) -> dict[str, dict[str, Any]]:
    """The status of each service of a fleet of one each, by kind."""
    inbox = nc.new_inbox()
    answers = await nc.subscribe(inbox)
    await nc.publish("headrace.v1.status", b"", reply=inbox)
    found = [json.loads((await answers.next_msg(30)).data) for _ in range(5)]
    await answers.unsubscribe()
    return {answer["kind"]: answer for answer in found}


async def assert_all_free(nc: Nats) -> None:
    """Requests, blocks, slots, sequences and inboxes are all free, at the latest after what is on its way
    has arrived: asked again with each heartbeat, and no longer than a fence could last."""
    heartbeats = await nc.subscribe(HEARTBEATS)
    async with asyncio.timeout(60):
        while _held(await statuses(nc)):
            await heartbeats.next_msg(30)
    await heartbeats.unsubscribe()


def assert_idle(up: Up) -> None:
    """The same of a fleet without clients."""

    async def ask() -> None:
        nc = await nats.connect(up.nats_url)
        await assert_all_free(nc)
        await nc.close()

    asyncio.run(ask())


def _held(services: dict[str, dict[str, Any]]) -> dict[str, Any]:
    scheduler, executor = services["scheduler"], services["executor"]
    counts = {name: scheduler[name] for name in ("requests", "waiting", "running", "closing")}
    for name, engine in scheduler["executors"].items():
        counts[f"blocks of {name}"] = engine["blocks"] - engine["free_blocks"] - engine["dirty_blocks"]
        counts[f"slots of {name}"] = engine["slots"] - engine["free_slots"]
        counts |= {f"{held} of {name}": engine[held] for held in ("reserved_blocks", "fenced_blocks")}
    counts |= {"open slots": executor["open_slots"], "pending": services["tokenizer"]["pending"]}
    counts |= {name: services["detokenizer"][name] for name in ("sequences", "requests")}
    return {name: count for name, count in counts.items() if count}


def wait_until_gone(pids: list[int]) -> None:
    """Return when every process has ended; fails after a time that only a hang can take."""
    for pid in pids:
        try:
            handle = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        ended, _, _ = select.select([handle], [], [], 120)
        os.close(handle)
        assert ended, f"process {pid} is an orphan: {Path(f'/proc/{pid}/cmdline').read_text()}"


def ignoring(*signals: int) -> Callable[[], None]:
    """A `preexec_fn`: the process is started with these ignored, as by nohup or a script. Others that end a
    process have their default, under any environment of the tests."""

    def ignore() -> None:
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN if number in signals else signal.SIG_DFL)

    return ignore


def starter(
    folder: Path,
    running: list[Up],
    quick: Mapping[str, str] = QUICK,
    popen: Callable[..., subprocess.Popen[Any]] = subprocess.Popen,
) -> StartUp:
    def start(
        *args: str, wait: bool = True, ignored: Sequence[int] = (), cwd: Path | None = None, **env: str
    ) -> Up:
        home = folder / f"up{len(running)}"
        home.mkdir()
        full = {k: v for k, v in os.environ.items() if not k.startswith("HEADRACE_")}
        full |= {"XDG_RUNTIME_DIR": str(home), "XDG_STATE_HOME": str(home), **quick, **SMALL_L1, **env}
        full.setdefault("HEADRACE_PORT", str(next(_PORTS)))
        log = home / "stderr"
        process = popen(
            [*(INSTALLED if cwd else HEADRACE), "up", "--backend", "sim", *args],
            cwd=cwd,
            env=full,
            stdout=subprocess.PIPE,
            stderr=log.open("w"),
            text=True,
            preexec_fn=ignoring(*ignored),
        )
        up = Up(process, full, log)
        running.append(up)
        if wait:
            up.read_until("^ready after")
        return up

    return start


def end(running: list[Up]) -> None:
    for up in running:
        children = up.children() if up.process.poll() is None else []
        if up.process.poll() is None:
            up.stop(signal.SIGTERM)
        wait_until_gone(children)


@contextmanager
def running_up(folder: Path, *args: str, **env: str) -> Iterator[Up]:
    """A server for the length of a block."""
    running: list[Up] = []
    try:
        yield starter(folder, running)(*args, **env)
    finally:
        end(running)
