"""Compares readers over HTTP with readers over NATS: the gaps between tokens, and the gateways' CPU time.

    python -m loadtest.http_readers --streams 256 --gateways 1,2 --out http_readers.json

One `headrace up` for each number of gateways, on the simulated engine or with the flags after `--`. Readers
of both kinds take turns, each time in a process of `headrace bench`, and all streams start at once. Services
and client share the cores of this machine: an ITL far above the step is the client's, and the CPU time of a
chunk is the figure to compare.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from loadtest import faults
from loadtest.bench.machine import circumstances
from loadtest.fleet import MODEL
from loadtest.running_up import running_up
from shared.processes import bind

SLOTS = 256  # of one executor
FIGURES = ("median_itl_ms", "p90_itl_ms", "p99_itl_ms", "p99_ttft_ms", "output_throughput", "client_cpu_pct")


def run(url: str, streams: int, tokens: int, prompt: int) -> dict[str, Any]:
    """The figures of one round."""
    with tempfile.TemporaryDirectory() as home:
        out = Path(home) / "out.json"
        command = [
            sys.executable, "-m", "loadtest.bench", "run", "--url", url, "--model", MODEL, "--json", str(out),
            "--max-concurrency", str(streams), "--num-prompts", str(streams), "--input-len", str(prompt),
            "--output-len", str(tokens),
        ]  # fmt: skip
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        figures = json.loads(out.read_text())["runs"][0]["figures"]
    return {"failed": figures["failed"], "tokens": figures["total_output_tokens"]} | {
        name: round(figures[name], 2) for name in FIGURES
    }


def cpu_us(pids: list[int]) -> dict[str, int]:
    """CPU time of processes so far: their own, and the kernel's for them."""
    fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
    ticks = os.sysconf("SC_CLK_TCK")
    return {
        kind: sum(int(f[at]) for f in fields) * 1_000_000 // ticks
        for kind, at in (("user", 11), ("system", 12))
    }


def measure(args: argparse.Namespace, gateways: int) -> dict[str, Any]:
    """Both kinds of readers, `rounds` times each."""
    bound = bind("127.0.0.1", 0)
    host, port = bound.getsockname()[:2]
    bound.close()
    engine = args.flags or ["--backend", "sim", "--sim", f"step={args.step_us}", "--overlap", "run_ahead"]
    flags = [
        *engine, "--slots", str(SLOTS), "--l1", "off", "--executors", str(-(-args.streams // SLOTS)),
        "--http", f"{host}:{port}", "--gateways", str(gateways), "--max-waiting", str(args.streams),
        "--slo", "standard=600000/1000/600000",
    ]  # fmt: skip
    rounds: dict[str, list[dict[str, Any]]] = {"nats": [], "http": []}
    with running_up(flags) as (pid, nats_url):
        urls = {"nats": nats_url, "http": f"http://{host}:{port}"}
        run(urls["http"], args.streams, 8, args.prompt)
        pids = faults.pids_of(pid, "gateway")
        for _ in range(args.rounds):
            for how, url in urls.items():
                before = cpu_us(pids)
                figures = run(url, args.streams, args.tokens, args.prompt)
                for kind, us in cpu_us(pids).items():
                    figures[f"gateway_{kind}_us_per_chunk"] = round(
                        (us - before[kind]) / figures["tokens"], 1
                    )
                rounds[how].append(figures)
    medians = {
        how: {name: statistics.median(each[name] for each in of) for name in of[0]}
        for how, of in rounds.items()
    }
    ratio = medians["http"]["p99_itl_ms"] / medians["nats"]["p99_itl_ms"]
    return {
        "gateways": gateways,
        "p99_itl_http_to_nats": round(ratio, 3),
        "medians": medians,
        "rounds": rounds,
    }


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--gateways", default="1", help="one number, or several with commas")
    parser.add_argument("--tokens", type=int, default=100, help="of an answer")
    parser.add_argument("--prompt", type=int, default=16, help="its tokens")
    parser.add_argument("--step-us", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    parser.add_argument("flags", nargs="*", help="of `up`, in place of the simulated engine")
    args = parser.parse_args()
    cases = [measure(args, int(gateways)) for gateways in args.gateways.split(",")]
    result = {
        "circumstances": circumstances(),
        "streams": args.streams,
        "step_us": args.step_us,
        "flags": args.flags,
        "cases": cases,
    }
    print(json.dumps(result, indent=2))
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
