"""ThreadCount chooses how many threads compute the CPU engine's next step: the fastest count of late.

Every thread of a team waits for the slowest at some hundred barriers a step. A thread that shares its core
with another process is the slowest: next to one busy process on two cores, one thread is faster than two.
Such processes start and end at any time. So a few steps are tried with more or fewer threads: soon after
steps have become slow, and rarely otherwise.

    steps with the chosen count ... │ trial: TRIAL_STEPS with the next count │ the faster count ...
"""

from __future__ import annotations

from collections import deque
from statistics import median

TRIAL_STEPS = 4
SOONEST, LATEST = 8, 256  # steps between two trials: doubled after each trial that found nothing faster
BETTER = 0.93  # a tried count is taken if it needs at most so much of the time
SLOWER = 1.3  # steps that take so many times as long as before: trials are due again
HOPELESS = 2.0  # a trial ends at once if a step takes so many times as long
_RISE = 1.002  # growth of all least times with each step: machines and contexts change


class ThreadCount:
    """The count for the next step, `now`, from 1 to `most`. For one engine, on one thread."""

    def __init__(self, most: int) -> None:
        self._ladder = _ladder(most)
        self._at = len(self._ladder) - 1  # index of the chosen count
        self._tried: int | None = None  # index of the count in a trial
        self._failed = 0  # trials since the choice changed or steps became slow: each goes farther away
        self._least: dict[int, float] = {}  # least us by size of step: makes steps of all sizes comparable
        self._recent: deque[float] = deque(maxlen=2 * TRIAL_STEPS)  # chosen count: times / least times
        self._trial: list[float] = []
        self._starts = False  # a trial's first step does not count: it creates threads or compiles for them
        self._wait, self._steps = SOONEST, 0  # until the next trial; since the last

    @property
    def now(self) -> int:
        return self._ladder[self._at if self._tried is None else self._tried]

    def observe(self, tokens: int, took_us: int) -> None:
        """Take the time of a step with `now` threads."""
        size = tokens.bit_length()
        least = self._least.get(size)
        if self._tried is None:  # a trial is compared with the times before it
            for other in self._least:
                self._least[other] *= _RISE
            self._least[size] = took_us if least is None else min(took_us, self._least[size])
        if least is None or len(self._ladder) == 1:
            return  # nothing to compare with
        slowness = took_us / least
        if self._tried is None:
            self._without_trial(slowness)
        elif self._starts:
            self._starts = False
        else:
            self._trial.append(slowness)
            if slowness > HOPELESS * median(self._recent) or len(self._trial) == TRIAL_STEPS:
                self._judge()

    def _without_trial(self, slowness: float) -> None:
        before = median(self._recent) if len(self._recent) == self._recent.maxlen else slowness
        self._recent.append(slowness)
        self._steps += 1
        if median([*self._recent][-TRIAL_STEPS:]) > SLOWER * before:
            self._wait, self._failed = SOONEST, 0
        if self._steps >= self._wait:
            self._tried, self._trial, self._starts, self._steps = self._next(), [], True, 0

    def _next(self) -> int:
        """The nearest index not tried yet, the lower of two. Every other time the next higher index: only a
        trial shows that another process has ended."""
        if self._failed % 2 and self._at + 1 < len(self._ladder):
            return self._at + 1
        others = [at for at in range(len(self._ladder)) if at != self._at]
        others.sort(key=lambda at: abs(at - self._at))
        return others[self._failed // 2 % len(others)]

    def _judge(self) -> None:
        """Take the tried count, or keep the chosen one and try another later."""
        assert self._tried is not None, "a trial is under way"
        if len(self._trial) == TRIAL_STEPS and median(self._trial) < BETTER * median(self._recent):
            self._at, self._wait, self._failed = self._tried, SOONEST, 0
            self._recent.clear()
        else:
            self._failed += 1
            self._wait = min(2 * self._wait, LATEST)
        self._tried = None


def _ladder(most: int) -> list[int]:
    """The counts to try, from 1 to `most`: 1, 2, 3, 4, 6, 8, 12, 16, ..."""
    counts = {most}
    power = 1
    while power < most:
        counts |= {power, min(most, power * 3 // 2)}
        power *= 2
    return sorted(counts)
