"""The cable between the hosts of a test: a process that carries IP packets between network namespaces.

Each host has a TUN device `eth0`. This process reads its packets, and writes each to the host of its address
after the delay of that way and no faster than its rate. A qdisc `netem` would do the same, but few small
kernels have it. Runs as a script, with the standard library alone: `cable.py PID...`, a process in each host.
Then a line of stdin, `FROM TO SECONDS BYTES_PER_S` with the numbers of two hosts, sets a way, and is answered
by an empty line.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import os
import selectors
import struct
import sys
import time
from itertools import count

MTU = 65_000  # far above Ethernet's: few packets, so that this process is no bottleneck
_SET_INTERFACE, _TUN_WITHOUT_HEADER = 0x400454CA, 0x1001
_NETWORK_NAMESPACE = 0x40000000
_LIBC = ctypes.CDLL(None, use_errno=True)


def enter(pid: int) -> None:
    """Make the network of process `pid` that of this thread. Raises OSError."""
    with open(f"/proc/{pid}/ns/net") as namespace:
        if _LIBC.setns(namespace.fileno(), _NETWORK_NAMESPACE):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), f"/proc/{pid}/ns/net")


def tun(pid: int) -> int:
    """The other end of a new device `eth0` in the network of process `pid`. Raises OSError."""
    enter(pid)
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _SET_INTERFACE, struct.pack("16sH22x", b"eth0", _TUN_WITHOUT_HEADER))
    return device


def address(number: int) -> str:
    """The address of a host. The documentation's network (RFC 5737): no machine has it."""
    return f"192.0.2.{number + 1}"


def main(pids: list[int]) -> None:
    """Carry packets until stdin ends."""
    devices = [tun(pid) for pid in pids]
    enter(os.getppid())  # so that this is no process of a host, which dies with the host
    with contextlib.suppress(PermissionError):  # it would be late on a busy machine
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    selector, numbers = selectors.DefaultSelector(), count()
    for number, device in enumerate(devices):
        selector.register(device, selectors.EVENT_READ, number)
    selector.register(sys.stdin, selectors.EVENT_READ)
    ways: dict[tuple[int, int], tuple[float, float]] = {}
    free_s: dict[tuple[int, int], float] = {}  # when the last byte of a way will have left
    under_way: list[tuple[float, int, int, bytes]] = []
    print(flush=True)  # the devices are there
    while True:
        wait_s = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
        for key, _ in selector.select(wait_s):
            if key.data is None:
                if not (line := sys.stdin.readline()):
                    return
                source, target, delay_s, rate = line.split()
                ways[int(source), int(target)] = float(delay_s), float(rate)
                print(flush=True)
                continue
            with contextlib.suppress(BlockingIOError, OSError):
                while packet := os.read(key.fd, MTU + 64):
                    way, now_s = (key.data, packet[19] - 1), time.monotonic()
                    if packet[0] >> 4 != 4 or not 0 <= way[1] < len(devices):
                        continue  # of IPv6, or to all
                    delay_s, rate = ways.get(way, (0.0, float("inf")))
                    free_s[way] = max(now_s, free_s.get(way, 0.0)) + len(packet) / rate
                    heapq.heappush(under_way, (free_s[way] + delay_s, next(numbers), way[1], packet))
        while under_way and under_way[0][0] <= time.monotonic():
            _, _, target, packet = heapq.heappop(under_way)
            with contextlib.suppress(OSError):  # its device is down: lost, as on a wire
                os.write(devices[target], packet)


if __name__ == "__main__":
    main([int(pid) for pid in sys.argv[1:]])
