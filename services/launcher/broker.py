"""The embedded nats-server kept running: one that ends is started again on its ports.

The services reconnect by themselves and repair their streams, so a restart costs the requests in
flight a pause, not their answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import threading
from collections.abc import Callable

from services.launcher.nats_server import NatsServer
from services.launcher.supervisor import BACKOFF_FIRST_S, BACKOFF_LAST_S, HEALTHY_S, ended_how
from shared.errors import SetupError


async def keep_running(server: NatsServer, tell: Callable[[str], None]) -> None:
    """Restart `server` whenever it ends, with back-off, until cancelled. Run on the main thread."""
    loop, backoff_s = asyncio.get_running_loop(), BACKOFF_FIRST_S
    while True:
        started_at = loop.time()
        what = ended_how(await ended(server.process))
        if loop.time() - started_at > HEALTHY_S:
            backoff_s = BACKOFF_FIRST_S
        runs = False
        while not runs:
            tell(f"nats-server {what}; starts again in {backoff_s:g} s")
            await asyncio.sleep(backoff_s)
            backoff_s = min(backoff_s * 2, BACKOFF_LAST_S)
            try:
                server.restart()
                runs = True
            except (SetupError, OSError, subprocess.SubprocessError) as error:
                what = f"did not start ({error})"


async def ended(process: subprocess.Popen[bytes]) -> int:
    """Wait for the end of a process; its status. Cancelled, it leaves a thread that waits on."""
    loop = asyncio.get_running_loop()
    status: asyncio.Future[int] = loop.create_future()

    def settle(value: int) -> None:
        if not status.done():
            status.set_result(value)

    def wait() -> None:
        value = process.wait()
        with contextlib.suppress(RuntimeError):  # the loop has closed: nobody asks any more
            loop.call_soon_threadsafe(settle, value)

    threading.Thread(target=wait, name="nats-server", daemon=True).start()
    return await status
