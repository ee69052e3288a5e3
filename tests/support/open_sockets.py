"""The sockets that a process has open, from /proc: no tracing, no rights."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

Address = tuple[str, int]


def remote_addresses(pid: int) -> set[Address]:
    """The other ends of the process's connections, TCP and UDP."""
    inodes = set(_socket_inodes(pid))
    tables = ("tcp", "tcp6", "udp", "udp6")
    rows = (row.split() for name in tables for row in _lines(Path(f"/proc/{pid}/net/{name}")))
    return {_address(row[2]) for row in rows if row[9] in inodes and not row[2].endswith(":0000")}


def _socket_inodes(pid: int) -> Iterator[str]:
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = os.readlink(entry)
        except FileNotFoundError:
            continue  # closed meanwhile
        if target.startswith("socket:["):
            yield target[8:-1]


def _lines(table: Path) -> list[str]:
    return table.read_text().splitlines()[1:] if table.exists() else []


def _address(text: str) -> Address:
    """`0100007F:1F90` is 127.0.0.1 port 8080: words of four bytes, in the order of the processor."""
    host, port = text.split(":")
    words = bytes.fromhex(host)
    packed = b"".join(words[i : i + 4][::-1] for i in range(0, len(words), 4))
    name = socket.inet_ntop(socket.AF_INET if len(packed) == 4 else socket.AF_INET6, packed)
    return name.removeprefix("::ffff:"), int(port, 16)
