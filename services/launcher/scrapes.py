"""Where Prometheus reads each process of `headrace up`: a port each, from the standard one upwards.

A service that is started again keeps its port, which is held for it until the run ends: some start seconds
later, and the ports of outgoing connections come out of the same range as free ones.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence

from shared.listening import http_url
from shared.otel_env import PROMETHEUS_HOST, PROMETHEUS_PORT, prometheus_address
from shared.scrape import PATH, reserve


class Pages:
    """The address of each service, none when `env` asks for no pages. From port 0 on each gets a free one."""

    def __init__(self, env: Mapping[str, str], names: Sequence[str]) -> None:
        """Raises SetupError when a port is taken."""
        self.addresses: dict[str, tuple[str, int]] = {}
        self._held: list[socket.socket] = []
        if (address := prometheus_address(env)) is None:
            return
        host, first = address
        for i, name in enumerate(names):
            held = reserve(host, first + i if first else 0, listen=False)
            self._held.append(held)
            self.addresses[name] = (host, held.getsockname()[1])

    def variables(self, name: str) -> dict[str, str]:
        """What the service of this name is told."""
        if (address := self.addresses.get(name)) is None:
            return {}
        return {PROMETHEUS_HOST: address[0], PROMETHEUS_PORT: str(address[1])}

    def shown(self) -> str:
        """All of them in a line, for a person."""
        return ", ".join(f"{name} {http_url(*page)}{PATH}" for name, page in self.addresses.items())

    def close(self) -> None:
        """Hold no port any more."""
        for held in self._held:
            held.close()
