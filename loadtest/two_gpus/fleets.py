"""`headrace up` with a random model, as the stages start it, and what they ask it."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadtest import faults
from loadtest.fleet import MODEL
from loadtest.http_readers import cpu_us
from loadtest.leaks import settle
from loadtest.running_up import running_up
from services.launcher.host_agent import VISIBLE
from shared.client.client import Client, request_all
from shared.nats import subjects
from shared.nats.bus import NatsBus

Status = dict[str, Any]
READY_S = 120.0
WATCH_S = 0.6


@dataclass(frozen=True, slots=True)
class Up:
    """A running `headrace up`."""

    pid: int
    url: str
    bus: NatsBus
    client: Client
    executors: int
    has_l1: bool

    async def status(self, kind: str) -> list[Status]:
        """What the services of a kind say."""
        answers = await request_all(self.bus, subjects.STATUS, 0.3)
        return [dict(answer) for answer in answers if answer.get("kind") == kind]

    async def scheduler(self) -> Status:
        (found,) = await self.status("scheduler")
        return found

    async def settled(self, within_s: float = READY_S) -> None:
        """Return once all executors are there, have L1, and nothing runs."""
        counts = {"executor": self.executors, "scheduler": 1}
        await settle(self.bus, counts, within_s)
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
        scheduler = await self.scheduler()
        reply = await self.bus.request(
            subjects.policy(str(scheduler["id"])), change.encode(), timeout_us=5_000_000
        )
        answer = json.loads(reply.data)
        if "after" not in answer:
            raise ValueError(f"{change}: {answer}")
        return str(answer["after"])

    def executor_pids(self) -> list[int]:
        return faults.pids_of(self.pid, "executor")

    async def busiest_executor(self) -> int:
        """The process id of the executor that uses most CPU now: of the one that decodes."""
        before = {pid: sum(cpu_us([pid]).values()) for pid in self.executor_pids()}
        await asyncio.sleep(WATCH_S)
        used = {pid: sum(cpu_us([pid]).values()) - us for pid, us in before.items()}
        return max(used, key=lambda pid: used[pid])


@asynccontextmanager
async def up(
    folder: str,
    *flags: str,
    device: str,
    executors: int = 1,
    l1_mib: int = 0,
    gpus: str = "",
    logs: str = "",
) -> AsyncGenerator[Up]:
    """A fleet of the model in `folder`; `gpus`: those that it sees, all without. What it says goes to a
    file in the folder `logs`."""
    options: Sequence[str] = (
        "--backend", "dummy", "--model", folder, "--model-name", MODEL, "--device", device, "--no-durable",
        "--executors", str(executors), "--l1", str(l1_mib) if l1_mib else "off", *flags,
    )  # fmt: skip
    name = f"{device.replace('/', '_')}-{executors}-{'deterministic' in ' '.join(flags):d}.log"
    log = str(Path(logs) / name) if logs else os.devnull
    fleet = running_up(options, {VISIBLE: gpus} if gpus else {}, log)
    began_s = time.monotonic()
    pid, url = await asyncio.to_thread(fleet.__enter__)
    try:
        bus = await NatsBus.connect(url, name="bench", timeout_s=10)
        found = Up(pid, url, bus, await Client.open(bus), executors, bool(l1_mib))
        await found.settled()
        print(f"start of {device} x {executors}: {time.monotonic() - began_s:.1f} s", flush=True)
        yield found
        await bus.drain()
    finally:
        await asyncio.to_thread(fleet.__exit__, None, None, None)
