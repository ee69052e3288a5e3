"""Where Prometheus reads each process of `headrace up`: a port each, from the standard one upwards.

A service that is started again keeps its port.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shared.listening import http_url
from shared.otel_env import PROMETHEUS_HOST, PROMETHEUS_PORT, prometheus_address
from shared.scrape import PATH, reserve


def pages(env: Mapping[str, str], names: Sequence[str]) -> dict[str, tuple[str, int]]:
    """The address of each service, none when `env` asks for no pages. From port 0 on each gets a free one.
    Raises SetupError when one is taken."""
    address = prometheus_address(env)
    if address is None:
        return {}
    host, first = address
    wanted = [first + i if first else 0 for i in range(len(names))]
    bound = [reserve(host, port) for port in wanted]
    found = {name: (host, taken.getsockname()[1]) for name, taken in zip(names, bound, strict=True)}
    for taken in bound:
        taken.close()
    return found


def variables(page: tuple[str, int] | None) -> dict[str, str]:
    """What the process at this address is told."""
    return {} if page is None else {PROMETHEUS_HOST: page[0], PROMETHEUS_PORT: str(page[1])}


def shown(found: Mapping[str, tuple[str, int]]) -> str:
    """All of them in a line, for a person."""
    return ", ".join(f"{name} {http_url(*page)}{PATH}" for name, page in found.items())
