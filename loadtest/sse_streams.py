"""Many slow SSE streams at once through the gateway, against the simulated engine: none lost, none mixed.

    python -m loadtest.sse_streams --streams 1000 --minutes 5 --slow 20 --out sse_streams.json

Every stream has a seed that another one has, too: the two texts must be equal, and their chunks carry their
own id. Some clients take nothing: the others must not notice. The gateway's memory is sampled from /proc.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loadtest import faults
from loadtest.fleet import MODEL, cpu_name
from loadtest.memory import PAGE_BYTES, Growth

SLOTS = 256  # of one executor
TOKENS_A_SECOND = 2
SETTLED_S = 120.0  # from then on memory must be flat


@dataclass
class Stream:
    """One request and what came of it."""

    seed: int
    request: str
    text: str = ""
    ended: bool = False
    alien: int = 0  # chunks of another request
    gaps_s: list[float] = field(default_factory=list)  # between two chunks with text


async def read(stream: Stream, address: tuple[str, int], tokens: int) -> None:
    """Ask, and read to the end."""
    body = {
        "model": MODEL, "prompt": f"stream {stream.seed}", "seed": stream.seed, "max_tokens": tokens,
        "ignore_eos": True, "stream": True, "slo_class": "batch", "timeout_s": 3600,
    }  # fmt: skip
    reader, writer = await asyncio.open_connection(*address, limit=2**20)
    writer.write(request_bytes(body, stream.request))
    last_s = 0.0
    while line := await reader.readline():
        if line == b"data: [DONE]\n":
            stream.ended = True
            break
        if not line.startswith(b"data: "):
            continue
        chunk = json.loads(line[6:])
        stream.alien += chunk.get("id") != stream.request
        text = "".join(choice["text"] for choice in chunk.get("choices", ()))
        stream.text += text
        now_s = time.monotonic()
        if text and last_s:
            stream.gaps_s.append(now_s - last_s)
        last_s = now_s
    writer.close()


async def take_nothing(address: tuple[str, int], tokens: int) -> socket.socket:
    """A client that asks, and then does not read."""
    deaf = socket.socket()
    deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    deaf.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(deaf, address)
    body = {"model": MODEL, "prompt": "deaf", "max_tokens": tokens, "ignore_eos": True, "stream": True}
    await loop.sock_sendall(deaf, request_bytes(body, f"deaf-{deaf.fileno()}"))
    return deaf


def request_bytes(body: dict[str, Any], request: str) -> bytes:
    """A POST as it goes over the wire."""
    data = json.dumps({**body, "request_id": request}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: gateway\r\n"
    return f"{head}content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data


async def watch(pid: int, memory: Growth) -> None:
    """Sample the memory of the gateway."""
    while True:
        memory.samples.append((time.monotonic(), resident_bytes(pid)))
        await asyncio.sleep(2)


def resident_bytes(pid: int) -> int:
    """What a process has in memory now."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES


async def measure(args: argparse.Namespace, address: tuple[str, int], pid: int) -> dict[str, Any]:
    """Run all streams; the figures."""
    tokens = int(args.minutes * 60 * TOKENS_A_SECOND)
    streams = [Stream(i % (args.streams // 2), f"stream-{i}") for i in range(args.streams)]
    memory = Growth("gateway")
    watching = asyncio.create_task(watch(pid, memory))
    deaf = [await take_nothing(address, tokens) for _ in range(args.slow)]
    await asyncio.gather(*(read(stream, address, tokens) for stream in streams))
    watching.cancel()
    for each in deaf:
        each.close()
    half = args.streams // 2
    gaps = sorted(gap for stream in streams for gap in stream.gaps_s)
    took_s = memory.samples[-1][0] - memory.samples[0][0]
    return {
        "streams": args.streams,
        "slow_readers": args.slow,
        "tokens_each": tokens,
        "lost": sum(not stream.ended for stream in streams),
        "mixed": sum(stream.alien > 0 for stream in streams)
        + sum(a.text != b.text for a, b in zip(streams[:half], streams[half:], strict=False)),
        "different_texts": len({stream.text for stream in streams}),
        "gap_p50_ms": round(statistics.median(gaps) * 1e3, 1),
        "gap_p99_ms": round(gaps[int(len(gaps) * 0.99)] * 1e3, 1),
        "gateway_rss_mb": round(memory.samples[-1][1] / 1e6, 1),
        "rss_percent_per_min": round(memory.percent_per_min(min(SETTLED_S / took_s, 0.6)), 3),
    }


def main() -> None:
    """Start a server, measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--slow", type=int, default=20)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    executors = -(-(args.streams + args.slow) // SLOTS)
    step_us = 1_000_000 // TOKENS_A_SECOND
    with tempfile.TemporaryDirectory() as home:
        env = {**os.environ, "XDG_RUNTIME_DIR": home, "HEADRACE_L1": "off"}
        command = [
            sys.executable, "-m", "services.launcher.cli", "up", "--backend", "sim", "--port", "0",
            "--http", "127.0.0.1:0", "--executors", str(executors), "--sim", f"step={step_us}",
            "--max-waiting", "4096",
        ]  # fmt: skip
        up = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
        assert up.stdout is not None
        url = next(line.split()[-1] for line in up.stdout if "OpenAI API:" in line)
        next(line for line in up.stdout if line.startswith("ready after"))
        host, port = url.removeprefix("http://").removesuffix("/v1").split(":")
        (gateway,) = faults.pids_of(up.pid, "gateway")
        try:
            figures = asyncio.run(measure(args, (host, int(port)), gateway))
        finally:
            up.terminate()
            up.wait(60)
    figures = {"machine": f"{cpu_name()}, {os.cpu_count()} cores", **figures}
    print(json.dumps(figures, indent=2))
    if args.out is not None:
        args.out.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
