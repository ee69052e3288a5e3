"""By hand: the page of the gateway in headless Chromium: each of its promises, on a phone and a desktop,
dark and light, with the gateway killed in mid-stream; then a real model, and a tenant's key.

    python -m venv VENV && VENV/bin/pip install playwright
    apt-get install --no-install-recommends chromium
    python scripts/page_check/run.py VENV [--out FILE]     # and writes docs/images/page.png, page_fleet.png

`browser.py` has the steps. Three fleets are started, one after the other: a simulated engine without L1, slow
enough that a person can stop an answer; a real model with few KV blocks, so that requests are paused; one
with keys. PICTURES=FOLDER in the environment keeps pictures of some steps, for a look.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
HEADRACE = [sys.executable, "-m", "services.launcher.cli"]
PICTURE = ROOT / "docs" / "images" / "page.png"
LIMIT_S = 1_800


class Check:
    """What has been seen so far, and in what browser."""

    def __init__(self, venv: Path, out: Path | None) -> None:
        self._python, self._out = venv / "bin" / "python", out
        self.seen: list[str] = []
        self.failed = 0

    def browse(self, *words: str) -> None:
        """Run the steps of `browser.py` with these words."""
        command = [str(self._python), str(HERE / "browser.py"), *words]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            self.seen.append(line)
        self.failed += process.wait(LIMIT_S) != 0
        if self._out is not None:
            self._out.write_text("".join(self.seen))


@contextmanager
def up(folder: Path, *flags: str) -> Iterator[tuple[str, int]]:
    """A ready `headrace up`: its URL, and its process."""
    with socket.create_server(("127.0.0.1", 0)) as free:  # the gateway comes back on it after its death
        http = f"127.0.0.1:{free.getsockname()[1]}"
    command = [*HEADRACE, "up", "--http", http, "--port", "0", "--fleet", "page", *flags]
    env = {**os.environ, "XDG_STATE_HOME": str(folder)}
    with (folder / "up.log").open("a") as log:
        process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        assert process.stdout is not None
        if not any("ready after" in line for line in process.stdout):
            raise SystemExit(f"headrace up ended:\n{(folder / 'up.log').read_text()[-2_000:]}")
        yield f"http://{http}", process.pid
    finally:
        process.terminate()
        process.wait(60)


async def load(url: str) -> str:
    """Send more requests than the KV blocks hold; the id of one that was paused."""
    async with httpx.AsyncClient(base_url=url, timeout=300) as http:

        async def one(number: int) -> str:
            body = {
                "messages": [{"role": "user", "content": f"Write a long story about the number {number}."}],
                "max_tokens": 120, "ignore_eos": True,
            }  # fmt: skip
            return str((await http.post("/v1/chat/completions", json=body)).json()["id"])

        for name in await asyncio.gather(*map(one, range(12))):
            events = (await http.get(f"/requests/{name}")).json()["spans"][0]["events"]
            if "preempt" in {event["name"] for event in events}:
                return name
    raise SystemExit("no request was paused")


def main() -> None:
    """Check all, and write the pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("venv", type=Path, help="the environment that has playwright")
    parser.add_argument("--out", type=Path, help="a file for what was seen")
    given = parser.parse_args()
    check = Check(given.venv.resolve(), given.out)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        slow = ("--backend", "sim", "--sim", "step=30000,token=20", "--l1", "off")
        with up(folder, *slow) as (url, pid):
            check.browse("simulated", url, str(pid))
        with up(folder, "--kv-blocks", "40", "--slots", "8", "--l1", "256") as (url, _):
            check.browse("real", url, str(PICTURE), asyncio.run(load(url)))
        keys = [*HEADRACE, "auth", str(folder / "auth"), "--tenant", "acme", "--fleet", "page"]
        subprocess.run(keys, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        with up(folder, "--auth", str(folder / "auth"), "--backend", "sim") as (url, _):
            key = (folder / "auth" / "tenants" / "acme" / "api_key").read_text().strip()
            check.browse("tenant", url, key)
    sys.exit(check.failed)


if __name__ == "__main__":
    main()
