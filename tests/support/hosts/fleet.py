"""A fleet on the hosts of a network: a nats-server, Redis, and `headrace up` on each host."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from support.hosts.network import Host, Network
from support.running_up import HEADRACE, StartUp, Up, end, starter

from services.launcher.nats_server import ServerLimits, find_binary

NATS_PORT, ROUTES_PORT, REDIS_PORT = 4222, 6222, 6379


@dataclass
class HostFleet:
    """What runs on the hosts. `hub` has the nats-server and Redis."""

    net: Network
    folder: Path
    args: tuple[str, ...] = ()  # of each `up`, for tests
    running: list[Up] = field(default_factory=list)

    @property
    def hub(self) -> Host:
        return self.net.hosts[0]

    @property
    def nats_url(self) -> str:
        return self.url_of(self.hub)

    def url_of(self, host: Host) -> str:
        """The nats-server of a host."""
        return f"nats://{host.address}:{NATS_PORT}"

    @property
    def redis_url(self) -> str:
        return f"redis://{self.hub.address}:{REDIS_PORT}"

    def start_nats(self, extra: str = "", host: Host | None = None) -> subprocess.Popen[str]:
        """On the hub or another host, with `extra` in its configuration; ready."""
        host = host or self.hub
        config = self.folder / f"nats-{host.name}.conf"
        config.write_text("\n".join([f'listen: "0.0.0.0:{NATS_PORT}"', *ServerLimits().lines(), extra]))
        return _ready(host, str(find_binary()), "-c", str(config), ready_line="Server is ready")

    def start_cluster(self) -> None:
        """One nats-server on each host, which form a cluster."""
        routes = ", ".join(f'"nats://{host.address}:{ROUTES_PORT}"' for host in self.net.hosts)
        listen = f'listen: "0.0.0.0:{ROUTES_PORT}"'
        for host in self.net.hosts:
            extra = f"server_name: {host.name}\ncluster {{ name: hosts, {listen}, routes: [{routes}] }}"
            self.start_nats(extra, host)

    def start_redis(self) -> subprocess.Popen[str]:
        """On the hub, ready."""
        options = ("--bind", "0.0.0.0", "--protected-mode", "no", "--save", "", "--appendonly", "no")
        return _ready(self.hub, "redis-server", *options, ready_line="Ready to accept connections")

    def up(self, host: Host, *args: str, wait: bool = True, **env: str) -> Up:
        """`headrace up` on a host."""
        start: StartUp = starter(
            self.folder, self.running, popen=lambda argv, **options: host.popen(*argv, **options)
        )
        return start(*args, wait=wait, **env)

    def join(self, host: Host, *args: str, **env: str) -> Up:
        """`headrace up --join` on a host."""
        return self.up(host, "--join", self.nats_url, *args, **env)

    def command(self, host: Host, *args: str) -> str:
        """The stdout of a headrace command on a host."""
        return host.run(*HEADRACE, *args, env=self.running[0].env | {"HEADRACE_NATS_URL": self.nats_url})


@contextmanager
def host_fleet(net: Network, folder: Path) -> Iterator[HostFleet]:
    """A fleet for the length of a block; at its end all processes of the hosts are stopped."""
    fleet = HostFleet(net, folder)
    with ExitStack() as stack:
        stack.callback(lambda: [host.kill() for host in net.hosts])
        stack.callback(lambda: end(fleet.running[::-1]))
        yield fleet


def _ready(host: Host, *argv: str, ready_line: str) -> subprocess.Popen[str]:
    """A program that has written a line with `ready_line`."""
    process = host.popen(*argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    lines = []
    for line in process.stdout or ():
        lines.append(line)
        if ready_line in line:
            return process
    raise AssertionError(f"{argv[0]} has ended: {''.join(lines)}")
