"""Arms that are served side by side, each in slices of time of its own.

A machine's speed drifts by up to 10 % from one minute to the next: arms that are served one after the other
tell no smaller difference. Here each has its fleet and all have the same requests; some seconds of one, some
of the next, until all are done. Between its slices an arm's scheduler is stopped (SIGSTOP), the steps and
copies under way come to their end, and its clock stands still.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from loadtest.fleet import Fleet
from loadtest.real.served import Served, env_of, side_by_side
from loadtest.tax.measured import Size, latencies_of, settings_of, warming
from loadtest.tax.protocol import Arm, Point

BEAT_MS = 20_000  # a service is dead after three beats missed: more than the slices of the others
MOST_PAUSE_S = 10.0  # behind that a server takes a stopped scheduler's connection for dead
POLL_S = 0.02
STILL = 3  # polls in which a fleet used no CPU time that counts
ASLEEP_US = 10_000  # of all its processes, from one poll to the next: the clock's least step


@dataclass(slots=True)
class Clock:
    """It runs in the slices of an arm."""

    spent_s: float = 0.0
    began_s: float | None = field(default=None, init=False)

    def now_s(self) -> float:
        """Seconds of all slices so far."""
        return self.spent_s + (0.0 if self.began_s is None else time.perf_counter() - self.began_s)

    def start(self) -> None:
        """Begin a slice."""
        self.began_s = time.perf_counter()

    def stop(self, at_s: float) -> None:
        """End it, at that time of the machine's clock."""
        self.spent_s += at_s - (at_s if self.began_s is None else self.began_s)
        self.began_s = None


@dataclass(slots=True)
class _Side:
    fleet: Served
    lengths: list[tuple[int, int]]
    clock: Clock = field(default_factory=Clock)
    asked: asyncio.Task[list[float]] | None = None

    @property
    def done(self) -> bool:
        """All is answered."""
        return self.asked is not None and self.asked.done()

    async def slice(self, slice_s: float) -> None:
        """Let it go on for a while; at most until all is answered."""
        processes = self.fleet.fleet
        processes.signal("scheduler", signal.SIGCONT)
        self.clock.start()
        if self.asked is None:
            self.asked = asyncio.create_task(latencies_of(self.fleet, self.lengths, self.clock.now_s))
        done, _ = await asyncio.wait([self.asked], timeout=slice_s)
        if done:
            self.clock.stop(time.perf_counter())
        else:
            processes.signal("scheduler", signal.SIGSTOP)
            self.clock.stop(await _at_rest(processes))


async def in_slices(
    size: Size, lengths: list[tuple[int, int]], point: Point, arms: Sequence[Arm], slice_s: float
) -> Mapping[str, list[float]]:
    """The latencies of each arm, in seconds of its own slices, the least first. They take turns in order."""
    beat = env_of(beat_interval_ms=BEAT_MS)
    envs = {arm.name: settings_of(size, point, arm) | beat for arm in arms}
    async with side_by_side(envs) as fleets:
        for fleet in fleets.values():
            await fleet.all(warming())
        sides = {name: _Side(fleet, lengths) for name, fleet in fleets.items()}
        try:
            for fleet in fleets.values():
                await _at_rest(fleet.fleet)
                fleet.fleet.signal("scheduler", signal.SIGSTOP)
            waiting = list(sides.values())
            while waiting:
                for side in waiting:
                    await side.slice(slice_s)
                waiting = [side for side in waiting if not side.done]
            return {name: await side.asked for name, side in sides.items() if side.asked is not None}
        finally:
            for fleet in fleets.values():
                fleet.fleet.signal("scheduler", signal.SIGCONT)


async def _at_rest(fleet: Fleet) -> float:
    """When its processes had nothing left to do, by the machine's clock."""
    last_s, used_us, still = time.perf_counter(), sum(fleet.cpu_us().values()), 0
    while still < STILL:
        await asyncio.sleep(POLL_S)
        before_us, used_us = used_us, sum(fleet.cpu_us().values())
        if used_us - before_us > ASLEEP_US:
            last_s, still = time.perf_counter(), 0
        else:
            still += 1
    return last_s
