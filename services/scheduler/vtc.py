"""Fairness among the clients of a class: the Virtual Token Counter (Sheng et al. 2024, arXiv 2401.00588).

Each token that a client is served adds to its counter; whose counter is least is next. A client that
comes back is lifted to the least counter of those that wait: idleness earns no credit. Prompt tokens from
the prefix cache and tokens computed again after our own preemption cost it nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

INPUT_WEIGHT, OUTPUT_WEIGHT = 1, 2  # of the paper: a decoded token costs about two of a prompt
MAX_CLIENTS = 10_000  # then those that would be lifted anyhow are forgotten

Client = tuple[str, int]  # tenant, level


@dataclass(slots=True)
class Served:
    """What each client has been served, in weighted tokens."""

    counters: dict[Client, int] = field(default_factory=dict)
    floors: dict[int, int] = field(default_factory=dict)  # by level: nobody comes in below

    def of(self, client: Client) -> int:
        """What a client has been served."""
        served = self.counters.get(client)
        return served if served is not None else self.floors.get(client[1], 0)

    def charge_input(self, client: Client, tokens: int) -> None:
        """Prompt tokens have been computed for a client."""
        self.counters[client] = self.of(client) + INPUT_WEIGHT * tokens

    def charge_output(self, client: Client, tokens: int) -> None:
        """A client has got tokens."""
        served = self.counters.get(client)
        self.counters[client] = (self.of(client) if served is None else served) + OUTPUT_WEIGHT * tokens

    def lift(self, client: Client, least: int | None) -> None:
        """A client asks again after it asked for nothing; `least` is the counter of the first that waits,
        or of the last that did."""
        level = client[1]
        floor = max(self.floors.get(level, 0), least or 0)
        self.floors[level] = floor
        if len(self.counters) >= MAX_CLIENTS:
            self.counters = {c: n for c, n in self.counters.items() if n > self.floors.get(c[1], 0)}
        self.counters[client] = max(self.counters.get(client, 0), floor)
