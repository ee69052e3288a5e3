"""Hosts on this machine: network namespaces with a name, an address and a /dev/shm of their own.

with network("alpha", "beta", rtt_ms=20) as net:   # skips the test where the kernel forbids it
    alpha, beta = net.hosts
    alpha.popen("nats-server", "-a", alpha.address)  # as subprocess.Popen; files are those of this machine
    text = beta.inside(lambda: ask(f"nats://{alpha.address}:4222"))  # a coroutine, with sockets of beta
    beta.cut(); beta.mend()                        # `ip link set eth0 down`, `up`; packets are lost meanwhile
    net.link(alpha, beta, rtt_ms=80, mbit=100)
    beta.kill()                                    # SIGKILL to all its processes; `popen` starts new ones

Memory and cores are those of the machine. All ports of a host, also those of 127.0.0.1, are its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
from support.hosts import cable

T = TypeVar("T")
_SETUP = """
echo {name} >/proc/sys/kernel/hostname && mount -t tmpfs tmpfs /dev/shm && ip link set lo up || exit
echo made; exec cat
"""  # it ends with its stdin, so with the test


class Host:
    """One of a network. Its processes die with `kill` or by their own end."""

    def __init__(self, name: str, number: int) -> None:
        self.name, self.number, self.address = name, number, cable.address(number)
        unshare = ("unshare", "--net", "--mount", "--uts", "sh", "-c", _SETUP.format(name=name))
        pipe = subprocess.PIPE
        self._holder = subprocess.Popen(unshare, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
        assert self._holder.stdout is not None
        assert self._holder.stderr is not None
        if self._holder.stdout.readline() != "made\n":
            raise OSError(self._holder.stderr.read().strip())

    @property
    def pid(self) -> int:
        """A process that holds the namespaces."""
        return self._holder.pid

    def popen(self, *argv: str, **options: Any) -> subprocess.Popen[Any]:
        """Start a program here; `process.pid` is its own."""
        enter = ("nsenter", "--target", str(self.pid), "--net", "--mount", "--uts", "--")
        return subprocess.Popen([*enter, *argv], **options)

    def run(self, *argv: str, **options: Any) -> str:
        """The stdout of a program here. Raises CalledProcessError."""
        with self.popen(*argv, stdout=subprocess.PIPE, text=True, **options) as process:
            out, _ = process.communicate()
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, argv, out)
        return str(out)

    def inside(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The result of a coroutine that runs on a thread of this host: its sockets are those of the host."""

        def run() -> T:
            cable.enter(self.pid)
            return asyncio.run(work())

        with ThreadPoolExecutor(1) as thread:
            return thread.submit(run).result()

    def cut(self) -> None:
        """Take its link away: what is sent from now on, to it and by it, is lost; no connection is closed."""
        self.run("ip", "link", "set", "eth0", "down")

    def mend(self) -> None:
        """Give the link back."""
        self.run("ip", "link", "set", "eth0", "up")

    def pids(self) -> list[int]:
        """All processes of this host."""
        own, found = os.stat(f"/proc/{self.pid}/ns/net").st_ino, []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):  # it has ended
                if entry.name.isdecimal() and (entry / "ns/net").stat().st_ino == own:
                    found.append(int(entry.name))
        return [pid for pid in found if pid not in (self.pid, os.getpid())]

    def kill(self) -> None:
        """SIGKILL to every process, as when its power fails, until none is left."""
        while pids := [pid for pid in self.pids() if not _is_dead(pid)]:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        """End the host."""
        self.kill()
        self._holder.communicate()


class Network:
    """Hosts and the cable that joins each of them to each other one."""

    def __init__(self, hosts: list[Host]) -> None:
        self.hosts = hosts
        argv = [sys.executable, "-ES", cable.__file__, *(str(host.pid) for host in hosts)]
        pipe = subprocess.PIPE
        self._cable = subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
        self._await_answer()
        for host in hosts:
            host.run("ip", "address", "add", f"{host.address}/24", "dev", "eth0")
            host.run("ip", "link", "set", "eth0", "mtu", str(cable.MTU), "up")

    def link(self, a: Host, b: Host, *, rtt_ms: float = 0, mbit: float = float("inf")) -> None:
        """From now on packets between two hosts take half of `rtt_ms` each way, at most `mbit` a second."""
        assert self._cable.stdin is not None
        for source, target in ((a, b), (b, a)):
            way = f"{source.number} {target.number} {rtt_ms / 2000} {mbit * 1e6 / 8}"
            self._cable.stdin.write(f"{way}\n")
            self._cable.stdin.flush()
            self._await_answer()

    def close(self) -> None:
        """End the cable, then the hosts."""
        self._cable.communicate()

    def _await_answer(self) -> None:
        assert self._cable.stdout is not None
        assert self._cable.stderr is not None
        if self._cable.stdout.readline() != "\n":
            raise OSError(self._cable.stderr.read().strip().rpartition("\n")[2])


@contextmanager
def network(*names: str, rtt_ms: float = 0) -> Iterator[Network]:
    """Hosts of these names, `rtt_ms` from each other. Skips the test where the kernel forbids them."""
    with ExitStack() as stack:
        try:
            hosts = []
            for number, name in enumerate(names):
                hosts.append(Host(name, number))
                stack.callback(hosts[-1].close)
            net = Network(hosts)
            stack.callback(net.close)
        except (OSError, subprocess.CalledProcessError) as error:
            # Only the kernel can forbid it; `scripts/check` prints why (-rs).
            pytest.skip(f"the kernel forbids hosts of a test (root, ip, unshare and /dev/net/tun): {error}")
        for a in hosts:
            for b in hosts[a.number + 1 :]:
                net.link(a, b, rtt_ms=rtt_ms)
        yield net


def _is_dead(pid: int) -> bool:
    """True for a process that only its parent's `wait` is missing from."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True
