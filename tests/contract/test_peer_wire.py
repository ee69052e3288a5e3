"""Every transport between peers: right bytes, and an error in time when the other process dies or hangs."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.kv_offload.file_wire import FileWire

from services.kv_offload.backends.interface import RemoteError
from services.kv_offload.peers import nixl
from services.kv_offload.peers.nixl import MOST_LATE, NixlWire
from services.kv_offload.peers.wire import Wire

PAGE, PAGES = 4096, 64
LONG_S = 60  # for a read that works; a guard against hanging
OWNER = """
import sys
from pathlib import Path
from {module} import {name}
wire = {name}(Path(sys.argv[1]))
print(wire.address.hex(), flush=True)
sys.stdin.read()
wire.close()
"""


@dataclass
class Owner:
    """A process with an arena that may be read."""

    process: subprocess.Popen[str]
    address: bytes
    content: bytes

    def values(self, *offsets: int, size: int = PAGE) -> list[bytes]:
        return [self.content[offset : offset + size] for offset in offsets]


Start = Callable[[], Owner]


@pytest.fixture(params=[FileWire, NixlWire], ids=["files", "nixl"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> type[FileWire | NixlWire]:
    if request.param is NixlWire and not nixl.is_installed():
        pytest.skip("headrace[nixl] is not installed: 241 MB, so not part of `dev`")
    monkeypatch.setenv("UCX_TLS", "tcp,self")  # as between hosts without RDMA
    kind: type[FileWire | NixlWire] = request.param
    return kind


@pytest.fixture
def start(kind: type[FileWire | NixlWire], tmp_path: Path) -> Iterator[Start]:
    owners: list[Owner] = []

    def started() -> Owner:
        path = tmp_path / f"arena-{len(owners)}"
        content = random.Random(len(owners)).randbytes(PAGES * PAGE)
        path.write_bytes(content)
        program = OWNER.format(module=kind.__module__, name=kind.__name__)
        argv = [sys.executable, "-c", program, str(path)]
        pipe = subprocess.PIPE
        env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        process = subprocess.Popen(argv, stdin=pipe, stdout=pipe, text=True, env=env)
        assert process.stdout is not None
        owners.append(Owner(process, bytes.fromhex(process.stdout.readline()), content))
        return owners[-1]

    yield started
    for owner in owners:
        owner.process.send_signal(signal.SIGCONT)
        owner.process.communicate()


@pytest.fixture
def wire(kind: type[FileWire | NixlWire], tmp_path: Path) -> Iterator[Wire]:
    path = tmp_path / "own"
    path.write_bytes(bytes(PAGE))
    opened = kind(path)
    yield opened
    opened.close()


def read(wire: Wire, owner: Owner, *offsets: int, size: int = PAGE) -> list[bytes]:
    found = wire.read(owner.address, offsets, size, time.monotonic() + LONG_S)
    return [bytes(value) for value in found]


def test_ranges_of_any_order_and_size(wire: Wire, start: Start) -> None:
    owner, other = start(), start()
    for offsets, size in (
        ((0,), PAGE),
        ((5 * PAGE, PAGE, 3 * PAGE), PAGE),
        ((PAGE,), 40 * PAGE),
        ((0, 0), 7),
    ):
        assert read(wire, owner, *offsets, size=size) == owner.values(*offsets, size=size)
        assert read(wire, other, *offsets, size=size) == other.values(*offsets, size=size)
    assert owner.process.communicate()[0] == "", "it has closed its arena"
    assert owner.process.returncode == 0


def test_a_killed_process_is_an_error_and_others_go_on(wire: Wire, start: Start, kind: type) -> None:
    owner, other = start(), start()
    assert read(wire, owner, 0) == owner.values(0)
    owner.process.kill()
    owner.process.wait()
    if kind is NixlWire:  # of files one sees no death
        for _ in range(MOST_LATE + 2):
            with pytest.raises(RemoteError, match="a read from a peer failed"):
                read(wire, owner, 0)
    assert read(wire, other, PAGE) == other.values(PAGE)


def test_a_read_from_a_process_that_hangs_ends_in_time_and_writes_nothing_later(
    wire: Wire, start: Start, kind: type
) -> None:
    owner, other = start(), start()
    assert read(wire, owner, 0) == owner.values(0)
    if kind is FileWire:
        return  # the file is read by the kernel
    owner.process.send_signal(signal.SIGSTOP)
    os.waitpid(owner.process.pid, os.WUNTRACED)  # all its threads have stopped
    with pytest.raises(RemoteError, match="no answer in time"):
        wire.read(owner.address, (PAGE,), PAGE, time.monotonic() + 0.2)
    values = wire.read(other.address, (3 * PAGE,), PAGE, time.monotonic() + LONG_S)
    owner.process.send_signal(signal.SIGCONT)
    while wire._late:  # type: ignore[attr-defined]  # until what was given up has arrived
        wire._late = [late for late in wire._late if not wire._settled(*late)]  # type: ignore[attr-defined]
    assert [bytes(value) for value in values] == other.values(3 * PAGE)
    assert read(wire, owner, 2 * PAGE) == owner.values(2 * PAGE), "it is read again"


def test_an_address_of_nothing_is_an_error(wire: Wire) -> None:
    for address in (b"", b"x", bytes(100)):
        with pytest.raises(RemoteError):
            wire.read(address, (0,), PAGE, time.monotonic() + LONG_S)
