"""Records and replays one virtual hour: every command and every state hash must be equal.

    python -m loadtest.replay_hour TRACE [--minutes 60] [--keep LOG] [--json OUT]

The Azure trace runs on one simulated 8B executor with a pool small enough that sequences are preempted, and
the event log goes to a file as in a running scheduler. Then the log alone is replayed, whole and from its
last snapshot.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from loadtest.sim.traces import Cut, azure
from loadtest.simulator.engine import Machine
from loadtest.simulator.hops import Hop
from loadtest.simulator.replay.rerun import Report, rerun_file
from loadtest.simulator.world import Setup, World
from services.scheduler.reports.event_log import FileSink, Recorder
from shared.step_model import PRESETS

BLOCKS = 1_500  # 24k tokens: short in busy minutes
CLASSES = ("standard", "interactive", "batch")


def record(trace: Path, minutes: float, log: Path) -> dict[str, Any]:
    """Run the trace with a log; what happened in it."""
    machine = Machine(PRESETS["h200-8b"], blocks=BLOCKS, hop=Hop(500, 200))
    world = World(Setup((machine,), seed=1), azure(trace, Cut(minutes=minutes, classes=CLASSES)))
    sink = FileSink(log)
    core = world.scheduler
    world.scheduler = Recorder(core, sink, {"scheduler": "virtual", "epoch": 1})  # type: ignore[assignment]  # stands where the core stands
    started = time.monotonic()
    world.run()
    sink.close()
    meter = core.state.counters
    return {
        "requests": sum(meter.finished.values()) + sum(meter.rejected.values()),
        "rejected": sum(meter.rejected.values()),
        "steps": sum(meter.steps.values()),
        "preemptions": meter.preemptions,
        "virtual_s": world.now_us / 1e6,
        "wall_s": round(time.monotonic() - started, 1),
        "log_bytes": sink.path.stat().st_size,
    }


def replayed(report: Report) -> dict[str, Any]:
    """What a replay found."""
    return {
        "equal": report.difference is None,
        "events": report.events,
        "commands": report.commands,
        "hashes": report.hashes,
        "snapshots": report.snapshots,
        "virtual_s": report.virtual_us / 1e6,
        "wall_s": round(report.wall_us / 1e6, 1),
        "difference": str(report.difference or ""),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--keep", type=Path, help="keep the log here")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        log = options.keep or Path(folder) / "hour.log"
        found = {"recorded": record(options.trace, options.minutes, log)}
        print(json.dumps(found["recorded"]), flush=True)
        found["replayed"] = replayed(rerun_file(log))
        print(json.dumps(found["replayed"]), flush=True)
        found["from_last_snapshot"] = replayed(rerun_file(log, last_only=True))
        print(json.dumps(found["from_last_snapshot"]))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    raise SystemExit(not all(part["equal"] for name, part in found.items() if name != "recorded"))


if __name__ == "__main__":
    main()
