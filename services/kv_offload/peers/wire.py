"""The threads of peers: one reads from other arenas through a transport, one hashes the own blocks for them.

    loop: run(command) ──▶ thread ──▶ loop: done(event, values)

The values of a read are in memory of the transport until the next read, which the core starts only after it
has copied them to L1. The transport opens on the reading thread; until then, and if it cannot, there are no
peers.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from pkgutil import resolve_name
from typing import Protocol

from services.kv_offload.backends.interface import RemoteError
from services.kv_offload.events import PeerCommand, PeerRead, PeerReadEnded, PeerSum, PeerSummed
from services.kv_offload.l2.worker import HEADER_BYTES, build, verify_payload
from shared.errors import HeadraceError

log = logging.getLogger("headrace.kv_offload")

WRONG = -1
# A module's `build` returns what opens its transport for the file of an arena, None if it is not installed.
WIRES = {
    "nixl": "services.kv_offload.peers.nixl:build",
}


class Wire(Protocol):
    """Reads other processes' arenas, and lets them read the one it was opened for. Used from one thread."""

    address: bytes  # of the own arena, for the `read` of others

    def read(
        self, address: bytes, offsets: Sequence[int], value_bytes: int, end_s: float
    ) -> list[memoryview]:
        """The bytes at `offsets` of the arena at `address`, valid until the next call. Ends at `end_s`
        (time.monotonic) at the latest. Raises RemoteError if it is late or the other process is gone; nothing
        that arrives later is written to memory of another read."""

    def close(self) -> None:
        """End all connections. The arena can be closed afterwards."""


OpenWire = Callable[[Path], Wire]


def wire() -> OpenWire | None:
    """Opens the first transport that is installed here; None without one."""
    return next((opens for name in WIRES.values() if (opens := resolve_name(name)()) is not None), None)


Ended = tuple[PeerReadEnded | PeerSummed, list[memoryview]]
Done = Callable[[PeerReadEnded | PeerSummed, list[memoryview]], None]


class PeerThreads:
    """Runs commands. All methods are called on the loop."""

    def __init__(
        self, open_wire: Callable[[], Wire], view: Callable[[bytes], memoryview], done: Done
    ) -> None:
        self.address = b""  # empty: not open
        self.why = ""  # the error that keeps it closed, or of the last read that failed
        self.problem: BaseException | None = None
        self._wire: Wire | None = None
        self._view = view
        self._done = done
        self._loop = asyncio.get_running_loop()
        self._reader = ThreadPoolExecutor(1, "peer-reads")
        self._summer = ThreadPoolExecutor(1, "peer-sums")
        self._opening = self._loop.run_in_executor(self._reader, self._open, open_wire)

    def run(self, command: PeerCommand) -> None:
        """Start a command; `done` is called at its end."""
        if isinstance(command, PeerSum):
            views = [self._view(slot) for _, slot, _ in command.blocks]
            work = self._loop.run_in_executor(self._summer, self._sum, command, views)
        else:
            end_s = time.monotonic() + command.limit_us / 1e6
            work = self._loop.run_in_executor(self._reader, self._read, command, end_s)
        work.add_done_callback(self._on_ended)

    async def close(self) -> None:
        """Wait for the read that runs, which has a deadline, and close the transport."""
        await asyncio.wait({self._opening})
        if self._wire is not None:
            await self._loop.run_in_executor(self._reader, self._wire.close)
        for pool in (self._reader, self._summer):
            await asyncio.to_thread(pool.shutdown)

    def _on_ended(self, work: asyncio.Future[Ended]) -> None:
        if (error := work.exception()) is not None:
            self.problem = self.problem or error
        else:
            self._done(*work.result())

    # ---- on the threads -----------------------------------------------------------------------------

    def _open(self, open_wire: Callable[[], Wire]) -> None:
        try:
            self._wire = open_wire()
        except (HeadraceError, OSError) as error:
            self.why = str(error)
            log.warning("L1 of other hosts cannot be read: %s", error)
        else:
            self.address = self._wire.address

    def _sum(self, command: PeerSum, views: Sequence[memoryview]) -> Ended:
        headers = []
        for (name, _, valid_tokens), view in zip(command.blocks, views, strict=True):
            with view:
                headers.append(build(name, valid_tokens, view))
        return PeerSummed(command.lease, b"".join(headers)), []

    def _read(self, command: PeerRead, end_s: float) -> Ended:
        assert self._wire is not None, "nothing is read before it is open"
        try:
            values = self._wire.read(command.address, command.offsets, command.value_bytes, end_s)
        except RemoteError as error:
            self.why = error.message
            return PeerReadEnded(command.call), []
        headers = [
            command.headers[at : at + HEADER_BYTES] for at in range(0, len(command.headers), HEADER_BYTES)
        ]
        headers += [b""] * (len(values) - len(headers))
        rows = zip(headers, values, command.names, strict=False)
        found = [verify_payload(header, value, name) for header, value, name in rows]
        return PeerReadEnded(command.call, tuple(WRONG if n is None else n for n in found)), values
