"""Measures two GPUs of one host, stage by stage, each in processes of its own and within its time.

    python -m loadtest.two_gpus --stages tp2,serve,pp2,tp2_fp8,tp2_int4,one+one_fp8,one_int4 --out FILE
    python -m loadtest.two_gpus --stages two,exact --out FILE

Stages joined by + run at once, on a GPU each. The file is written after each stage; a stage that is cut off
leaves the figures that it had by then.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from loadtest.command_line import parser_of, report
from loadtest.gpu.shape import LLAMA_8B
from loadtest.two_gpus.record import Record
from services.launcher import joining

STAGES = {  # the longest time of each, s
    "tp2": 110, "pp2": 90, "tp2_fp8": 90, "tp2_int4": 100, "one": 90, "one_fp8": 90, "one_int4": 90,
    "serve": 190, "two": 405, "exact": 150,
}  # fmt: skip
SERVED = ("serve", "two", "exact")
END_S, LAST_S = 3.0, 5.0


def run_stage(name: str, asked: argparse.Namespace, shape: dict[str, Any]) -> None:
    """One stage, in this process."""
    record = Record(asked.out, asked.limit_s)
    if name not in SERVED:
        from loadtest.gpu import two_gpus

        two_gpus.pipeline(record) if name == "pp2" else two_gpus.decodes(name, record)
        os._exit(0)  # ranks may wait for each other at the end, and for ever
    from loadtest.gpu.serve import write_model
    from loadtest.two_gpus import executors, served

    two = functools.partial(executors.two, parts=[part for part in asked.parts.split(",") if part])
    run: Any = {"serve": served.ranks, "two": two, "exact": executors.exact}[name]
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), shape)
        asyncio.run(run(folder, record, asked.device, asked.logs))


def start(name: str, out: Path, limit_s: float, asked: argparse.Namespace, gpu: int | None) -> Any:
    """A stage as a process group."""
    command = [sys.executable, "-u", "-m", "loadtest.two_gpus", "--stage", name, "--out", str(out)]
    command += ["--limit-s", f"{limit_s:.0f}", "--device", asked.device, "--logs", asked.logs]
    command += ["--parts", asked.parts]
    command += ["--shape", str(asked.shape)] if asked.shape else []
    env = os.environ | ({} if gpu is None else {"CUDA_VISIBLE_DEVICES": str(gpu)})
    return subprocess.Popen(command, env=env, start_new_session=True)


def end(process: subprocess.Popen[bytes], limit_s: float) -> str:
    """How a stage ended; after its time its processes are ended."""
    try:
        return f"status {process.wait(limit_s)}"
    except subprocess.TimeoutExpired:
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(process.pid, number)
                process.wait(END_S)
            except (subprocess.TimeoutExpired, ProcessLookupError):
                continue
        return f"cut off after {limit_s:.0f} s"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # what is left of it


def main() -> None:
    """The command line."""
    parser = parser_of("two_gpus", __doc__)
    parser.add_argument("--stages", default=",".join(STAGES))
    parser.add_argument("--stage", choices=list(STAGES), help="one, in this process")
    parser.add_argument("--limit-s", type=float, default=560)
    parser.add_argument("--device", default="cuda", help="of the served stages")
    parser.add_argument("--shape", type=Path, help="a config.json in place of that of Llama-3.1-8B")
    parser.add_argument("--logs", default="", help="a folder for the services' logs")
    parser.add_argument("--parts", default="", help="of the stage two, in order; all without")
    asked = parser.parse_args()
    shape = json.loads(asked.shape.read_text()) if asked.shape else LLAMA_8B
    if asked.stage:
        run_stage(asked.stage, asked, shape)
        return
    until_s = time.monotonic() + asked.limit_s
    found: dict[str, Any] = {"machine": machine(), "stages": asked.stages}
    with tempfile.TemporaryDirectory() as parts:
        for group in asked.stages.split(","):
            names = group.split("+")
            left_s = until_s - time.monotonic() - LAST_S
            limit_s = min(left_s, max(STAGES[name] for name in names))
            if limit_s < 20:
                print(f"{group}: left out, {left_s:.0f} s are left", flush=True)
                continue
            print(f"== {group}, at most {limit_s:.0f} s", flush=True)
            began_s = time.monotonic()
            running = {
                name: start(name, Path(parts) / name, limit_s, asked, at if len(names) > 1 else None)
                for at, name in enumerate(names)
            }
            for name, process in running.items():
                ended = end(process, max(0.1, began_s + limit_s - time.monotonic()))
                part = Path(parts) / name
                found[name] = json.loads(part.read_text()) if part.exists() else {}
                found[name]["ended"] = ended
                print(f"== {name}: {ended}, {time.monotonic() - began_s:.1f} s", flush=True)
            report(
                found,
                asked.out,
                shown={name: each.get("ended") for name, each in found.items() if name in STAGES},
            )


def machine() -> dict[str, Any]:
    """What the figures are of."""
    commands = {
        "gpus": ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"],
        "links": ["nvidia-smi", "topo", "-m"],
        "commit": ["git", "rev-parse", "HEAD"],
    }
    facts = {"cores": str(os.cpu_count()), "python": platform.python_version(), "system": platform.release()}
    for name, command in commands.items():
        try:
            facts[name] = subprocess.run(command, capture_output=True, text=True, timeout=10).stdout.strip()
        except (OSError, subprocess.TimeoutExpired):
            facts[name] = "unknown"
    facts["seen"] = ",".join(joining.seen(os.environ))
    return facts


if __name__ == "__main__":
    main()
