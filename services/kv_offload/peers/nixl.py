"""NIXL (`pip install 'headrace[nixl]'`) as the transport between arenas: RDMA where there is some, else TCP.

UCX, inside the wheel, listens on a port of its own choice on every network of the host (`UCX_NET_DEVICES`
and `UCX_TLS` restrict it), without encryption, and a peer with the address can read any memory of this
process: so it belongs into a network that only hosts of the fleet reach.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import mmap
import os
import struct
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from services.kv_offload.backends.interface import RemoteError
from services.kv_offload.peers.wire import OpenWire

PACKAGE = "nixl_cu12"  # `nixl` alone would install the one for CUDA 13, too; without a GPU they are the same
POLL_S = (20e-6, 1e-3)  # the first pause between two looks at a transfer, and the longest
MOST_LATE = 4  # reads given up that have not ended, of BATCH_BYTES each; with more there are no reads
_BASE = struct.Struct("<Q")  # address of the arena in its process, before NIXL's own metadata


def is_installed() -> bool:
    """Whether NIXL is installed here."""
    return importlib.util.find_spec(PACKAGE) is not None


def build() -> OpenWire | None:
    """Opens the transport; None if NIXL is not installed."""
    return NixlWire if is_installed() else None


class _Memory(NamedTuple):
    """Registered memory."""

    map: mmap.mmap
    base: int  # its address
    handle: Any


class NixlWire:
    """See `wire.Wire`, for the arena in the file `path`."""

    def __init__(self, path: Path) -> None:
        for name in ("NIXL_LOG_LEVEL", "UCX_LOG_LEVEL"):  # each peer that has gone is an error there
            os.environ.setdefault(name, "FATAL")
        try:
            from nixl_cu12._api import nixl_agent, nixl_agent_config

            self._agent: Any = nixl_agent(path.name, nixl_agent_config(backends=["UCX"]))
            with path.open("r+b") as file:
                self._arena = self._registered(mmap.mmap(file.fileno(), 0))
            self.address = _BASE.pack(self._arena.base) + self._agent.get_agent_metadata()
        except Exception as error:
            raise RemoteError(f"NIXL does not start: {error!r}") from error
        self._names: dict[bytes, str] = {}  # address -> the agent's name of the peer
        self._scratch: _Memory | None = None
        self._late: list[tuple[bytes, Any, _Memory]] = []  # transfers given up, and what they may still write

    def read(
        self, address: bytes, offsets: Sequence[int], value_bytes: int, end_s: float
    ) -> list[memoryview]:
        self._late = [late for late in self._late if not self._has_ended(*late)]
        if len(self._late) > MOST_LATE:
            raise RemoteError("reads from peers hang: NIXL does not end them")
        scratch, transfer = self._room(len(offsets) * value_bytes), None
        try:
            transfer = self._transfer(address, offsets, value_bytes, scratch)
            state, pause_s = self._agent.transfer(transfer), POLL_S[0]
            while state == "PROC" and time.monotonic() < end_s:
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, POLL_S[1])
                state = self._agent.check_xfer_state(transfer)
            if state != "DONE":
                raise RemoteError(f"no answer in time ({state})")
            self._agent.release_xfer_handle(transfer)
        except Exception as error:
            if transfer is None:
                self._forget(address)
            else:
                self._late.append((address, transfer, scratch))
                self._scratch = None
            raise RemoteError(f"a read from a peer failed: {error}") from error
        whole = memoryview(scratch.map)
        return [whole[i * value_bytes : (i + 1) * value_bytes] for i in range(len(offsets))]

    def close(self) -> None:
        for address in list(self._names):
            self._forget(address)
        self._agent = None  # ends its threads

    def _transfer(self, address: bytes, offsets: Sequence[int], value_bytes: int, scratch: _Memory) -> Any:
        if address not in self._names:
            name = self._agent.add_remote_agent(address[_BASE.size :])
            self._names[address] = name.decode() if isinstance(name, bytes) else name
        (base,) = _BASE.unpack_from(address)
        into = [(scratch.base + i * value_bytes, value_bytes, 0) for i in range(len(offsets))]
        there = [(base + offset, value_bytes, 0) for offset in offsets]
        local, remote = (self._agent.get_xfer_descs(rows, "DRAM") for rows in (into, there))
        return self._agent.initialize_xfer("READ", local, remote, self._names[address])

    def _room(self, size_bytes: int) -> _Memory:
        if self._scratch is None or len(self._scratch.map) < size_bytes:
            if self._scratch is not None:
                self._agent.deregister_memory(self._scratch.handle)
            self._scratch = self._registered(mmap.mmap(-1, size_bytes))
        return self._scratch

    def _registered(self, memory: mmap.mmap) -> _Memory:
        base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        return _Memory(memory, base, self._agent.register_memory([(base, len(memory), 0, "")], "DRAM"))

    def _has_ended(self, address: bytes, transfer: Any, scratch: _Memory) -> bool:
        """Whether a transfer that was given up has ended: its memory is not written any more, and freed."""
        try:
            state = self._agent.check_xfer_state(transfer)
        except Exception:  # noqa: BLE001 - the peer is gone
            state = "ERR"
        if state == "PROC":
            return False
        with contextlib.suppress(Exception):
            self._agent.release_xfer_handle(transfer)
        self._agent.deregister_memory(scratch.handle)
        if state != "DONE":
            self._forget(address)
        return True

    def _forget(self, address: bytes) -> None:
        """Leave a peer; the next read connects again."""
        if (name := self._names.pop(address, None)) is not None:
            with contextlib.suppress(Exception):
                self._agent.remove_remote_agent(name)
