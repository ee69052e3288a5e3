"""A fleet under load: `headrace up` with a program's flags, a client of it, the status of its services."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadtest import faults
from loadtest.leaks import settle
from loadtest.processes import cpu_s
from shared.client.client import Client, request_all
from shared.nats import subjects
from shared.nats.bus import NatsBus

MODEL = "smollm2-135m-instruct"
SIM = ("--backend", "sim")
STATUS_WAIT_S = 0.3  # for the status of services on this machine
READY_S = 120.0
STOP_S = 90
WATCH_S = 0.6
GONE_S = 2.0  # to leave a server that may have been killed

Body = dict[str, Any]


@contextmanager
def running_up(
    flags: Sequence[str], env: Mapping[str, str] | None = None, log: str = os.devnull
) -> Iterator[tuple[int, str]]:
    """(Process id, URL of its nats-server), once it is ready. The services' log goes to `log`. Raises
    SystemExit when it ends before that."""
    with tempfile.TemporaryDirectory() as home, Path(log).open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "services.launcher.cli", "up", "--port", "0", "--http", "off", *flags],
            env={**os.environ, "XDG_RUNTIME_DIR": home, "XDG_STATE_HOME": home, **(env or {})},
            stdout=subprocess.PIPE,
            stderr=output,
            text=True,
        )
        assert process.stdout is not None
        printed = []
        for line in process.stdout:
            printed.append(line)
            if line.startswith("ready"):
                break
        else:
            raise SystemExit(
                f"`headrace up {' '.join(flags)}` did not start: run it by hand\n{''.join(printed[-5:])}"
            )
        try:
            (url,) = re.findall(r"nats://\S+", "".join(printed))
            yield process.pid, url
        finally:
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=STOP_S)


@asynccontextmanager
async def connected(url: str, timeout_s: float = 30.0) -> AsyncIterator[Client]:
    """A client of the fleet at `url`, for the length of a block; at its end the server may be gone."""
    bus = await NatsBus.connect(url, name="loadtest", timeout_s=timeout_s)
    try:
        yield await Client.open(bus)
    finally:
        with contextlib.suppress(TimeoutError, OSError):
            await asyncio.wait_for(bus.drain(), GONE_S)


@dataclass(frozen=True, slots=True)
class Fleet:
    """A running `headrace up` and a client of it."""

    pid: int
    url: str
    client: Client
    executors: int = 1
    has_l1: bool = False

    @property
    def bus(self) -> NatsBus:
        bus = self.client.bus
        assert isinstance(bus, NatsBus)
        return bus

    async def all(self, bodies: Iterable[Body]) -> None:
        """Send all at once and wait for every answer."""
        await asyncio.gather(*(self.client.complete(body) for body in bodies))

    async def status(self, kind: str) -> list[Body]:
        """The status of the services of a kind."""
        answers = await request_all(self.bus, subjects.STATUS, STATUS_WAIT_S)
        return [dict(answer) for answer in answers if answer.get("kind") == kind]

    async def scheduler(self) -> Body:
        """The status of the only scheduler."""
        (found,) = await self.status("scheduler")
        return found

    async def executor(self) -> Body:
        """The status of the first executor; empty while none answers."""
        return next(iter(await self.status("executor")), {})

    async def settled(self, within_s: float = READY_S) -> None:
        """Return once all executors are there, have L1, and nothing runs."""
        await settle(self.bus, {"executor": self.executors, "scheduler": 1}, within_s)
        until_s = time.monotonic() + within_s
        while self.has_l1 and time.monotonic() < until_s:
            if all(each.get("arena_generation") for each in await self.status("executor")):
                return
            if whys := [each["why_off"] for each in await self.status("kv_offload") if "why_off" in each]:
                print(f"there is no L1: {whys[0]}", flush=True)
                return
            await asyncio.sleep(0.2)

    async def policy(self, change: str) -> str:
        """Change the scheduler's policy; what it is then. Raises ValueError."""
        subject = subjects.policy(str((await self.scheduler())["id"]))
        reply = await self.bus.request(subject, change.encode(), timeout_us=5_000_000)
        answer = json.loads(reply.data)
        if "after" not in answer:
            raise ValueError(f"{change}: {answer}")
        return str(answer["after"])

    def executor_pids(self) -> list[int]:
        return faults.pids_of(self.pid, "executor")

    async def busiest_executor(self) -> int:
        """The process id of the executor that uses most CPU now: of the one that decodes."""
        before = {pid: cpu_s(pid) for pid in self.executor_pids()}
        await asyncio.sleep(WATCH_S)
        return max(before, key=lambda pid: cpu_s(pid) - before[pid])


@asynccontextmanager
async def fleet(
    *flags: str, env: Mapping[str, str] | None = None, executors: int = 1, l1_mib: int = 0, log: str = ""
) -> AsyncIterator[Fleet]:
    """A fleet with these flags, once all executors are there and have L1."""
    sizes = ("--executors", str(executors), "--l1", str(l1_mib) if l1_mib else "off")
    up = running_up((*sizes, *flags), env, log or os.devnull)
    began_s = time.monotonic()
    pid, url = await asyncio.to_thread(up.__enter__)
    try:
        async with connected(url) as client:
            found = Fleet(pid, url, client, executors, bool(l1_mib))
            await found.settled()
            print(f"ready after {time.monotonic() - began_s:.1f} s", flush=True)
            yield found
    finally:
        await asyncio.to_thread(up.__exit__, None, None, None)


def cpu_name() -> str:
    """The processor's name."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def machine() -> Body:
    """The machine of a figure."""
    return {"cpu": cpu_name(), "cores": os.cpu_count(), "load_average": round(os.getloadavg()[0], 1)}
