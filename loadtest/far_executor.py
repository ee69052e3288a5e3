"""Measures what the way to the nats-server costs an executor on another host: an executor of simulated steps
in a network namespace of its own, all other services in another one, with a round trip between them.

    PYTHONPATH=.:tests python -m loadtest.far_executor --out far_executor.json    # as root

`period_us` is the time between the starts of steps that carry every row, by the executor's timestamps: the
median over as many steps as are in flight (setting `window`), which come in bursts. What it has over the
length of a step is idle time of the executor.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path

from support.hosts.fleet import HostFleet, host_fleet
from support.hosts.network import network

from loadtest.case import Case
from loadtest.fleet import FLEET, cpu_name, until_ready
from loadtest.step_overhead import load, sim_env, tap
from shared.client.client import Client
from shared.messages import StepResult
from shared.nats.bus import NatsBus

NEAR = ("tokenizer", "scheduler", "detokenizer")
ENDS_S = 60


@contextmanager
def services(fleet: HostFleet, case: Case) -> Iterator[None]:
    """One process of each service that a request needs, the executor on the far host."""
    near, far = fleet.net.hosts
    env = {**os.environ, **sim_env(case), "HEADRACE_FLEET": FLEET, "HEADRACE_NATS_URL": fleet.nats_url}
    serve = (sys.executable, "-m", "services.launcher.cli", "serve")
    quiet = {"env": {**env, "HEADRACE_LOG_LEVEL": "warning"}}
    with ExitStack() as stack:
        for host, kind in (*((near, kind) for kind in NEAR), (far, "executor")):
            process: subprocess.Popen[bytes] = host.popen(*serve, kind, **quiet)
            stack.callback(process.wait, ENDS_S)
            stack.callback(process.terminate)
        yield


def measure(fleet: HostFleet, case: Case, rtts_ms: Sequence[float]) -> list[dict[str, object]]:
    """The rows of one case, one for each round trip."""
    rows: list[dict[str, object]] = []
    near, far = fleet.net.hosts

    async def one(rtt_ms: float) -> None:
        bus = await NatsBus.connect(fleet.nats_url, name="bench", timeout_s=ENDS_S)
        client = await Client.open(bus)
        await until_ready(client)
        tapped: list[StepResult] = []
        await bus.subscribe(f"hr.{FLEET}.scheduler.*.in.StepResult", lambda d: tap(d, tapped))
        await load(client, case)
        await bus.drain()
        period_us = period(tapped, case)
        idle = 100 * (1 - case.step_us / period_us)
        rows.append(
            {**asdict(case), "rtt_ms": rtt_ms, "period_us": round(period_us), "idle_percent": round(idle, 1)}
        )

    with services(fleet, case):
        for rtt_ms in rtts_ms:
            fleet.net.link(near, far, rtt_ms=rtt_ms)
            near.inside(lambda rtt_ms=rtt_ms: one(rtt_ms))  # type: ignore[misc]  # a default binds the value
    return rows


def period(results: list[StepResult], case: Case) -> float:
    """The time of a step, µs."""
    starts = {r.step: r.start_wall_us for r in results if len(r.ids) == case.rows}
    later = ((starts[step], starts.get(step + case.window)) for step in starts)
    return statistics.median((end - start) / case.window for start, end in later if end)


def main() -> None:
    """Run the grid and print a line for each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--step-ms", type=float, nargs="+", default=[10, 20, 50])
    parser.add_argument("--rtt-ms", type=float, nargs="+", default=[0, 2, 20, 40])
    parser.add_argument("--windows", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    table = []
    with (
        network("near", "far") as net,
        tempfile.TemporaryDirectory() as folder,
        host_fleet(net, Path(folder)) as fleet,
    ):
        fleet.start_nats()
        for step_ms in args.step_ms:
            for window in args.windows:
                case = Case(int(step_ms * 1000), window, args.rows, args.steps)
                for row in measure(fleet, case, args.rtt_ms):
                    table.append(row)
                    print(json.dumps(row), flush=True)
    if args.out:
        machine = {"cores": os.cpu_count(), "python": platform.python_version(), "cpu": cpu_name()}
        machine["load"] = os.getloadavg()
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps({"machine": machine, "cases": table}, indent=1) + "\n")


if __name__ == "__main__":
    main()
