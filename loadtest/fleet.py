"""Starts, watches and stops the services as processes on their own nats-server, for the benches."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from services.launcher import nats_server
from services.launcher.serve import KINDS as ALL_KINDS
from shared.client.client import Client
from shared.processes import die_with_parent

FLEET = "bench"
KINDS = tuple(kind for kind in ALL_KINDS if kind != "gateway")  # the benches speak NATS
MODEL = "smollm2-135m-instruct"
READY_S = 600.0  # of a fleet on a machine with much else to do


class Fleet:
    """One process of each service. `env` holds settings and whatever else they should see."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self.server = nats_server.start()
        full = {
            **os.environ,
            "HEADRACE_NATS_URL": self.server.url,
            "HEADRACE_FLEET": FLEET,
            "HEADRACE_LOG_LEVEL": "warning",
            **env,
        }
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-m", "services.launcher.cli", "serve", kind],
                env=full,
                preexec_fn=die_with_parent(),
            )
            for kind in KINDS
        ]

    def stop(self) -> None:
        """End the services, then the server."""
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            process.wait(20)
        self.server.stop()

    def cpu_us(self) -> dict[str, int]:
        """CPU time of each process so far, user and system."""
        names = [*KINDS, "nats-server"]
        pids = [*(p.pid for p in self.processes), self.server.process.pid]
        return {name: _cpu_us(pid) for name, pid in zip(names, pids, strict=True)}


async def until_ready(client: Client) -> None:
    """Return once a request is answered. Raises its last error after READY_S."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + READY_S
    while True:
        try:
            await client.complete({"model": MODEL, "prompt": [300], "max_tokens": 1}, timeout_s=5)
        except Exception:
            if loop.time() > deadline:
                raise
            await asyncio.sleep(0.1)
        else:
            return


def cpu_name() -> str:
    """The processor's name."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def _cpu_us(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    ticks = int(fields[11]) + int(fields[12])
    return ticks * 1_000_000 // os.sysconf("SC_CLK_TCK")
