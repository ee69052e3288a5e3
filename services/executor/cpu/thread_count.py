"""How many threads compute the next step: as many as steps have shown to be quickest lately.

Every thread of a team waits for the slowest at each of some hundred barriers a step. A thread that shares its
core with another process is that slowest one: beside one busy process on two cores one thread does more than
two. Nobody says when such a process comes or goes; so a few steps are tried with more or with fewer threads,
at once when steps have become slow, and rarely while all is well.

    steps of the chosen count ... │ trial: TRIAL_STEPS with the next count │ the quicker one ...

Pure: steps and their times in, a count out.
"""

from __future__ import annotations

from collections import deque
from statistics import median

TRIAL_STEPS = 4
SOONEST, LATEST = 8, 256  # steps between two trials: twice as many after each that found nothing better
BETTER = 0.93  # of the time: from here on the tried count is taken
SLOWER = 1.3  # of what steps took before: something has come, and trials are due again
HOPELESS = 2.0  # a trial whose step takes so many times as long ends at once
_RISE = 1.002  # of the least times with each step, of all sizes alike: machines and contexts change


class ThreadCount:
    """The count for the next step, `now`, from 1 to `most`. Of one engine, on one thread."""

    def __init__(self, most: int) -> None:
        self._ladder = _ladder(most)
        self._at = len(self._ladder) - 1  # what is chosen
        self._tried: int | None = None  # a place on the ladder, in a trial
        self._failed = 0  # trials since the choice changed, or steps became slow: each goes farther away
        self._least: dict[int, float] = {}  # us, by size of step: what relates steps of all sizes
        self._recent: deque[float] = deque(
            maxlen=2 * TRIAL_STEPS
        )  # times over the least, of the chosen count
        self._trial: list[float] = []
        self._begins = (
            False  # the first step of a trial does not count: it makes threads, or compiles for them
        )
        self._wait, self._steps = SOONEST, 0  # until the next trial; since the last

    @property
    def now(self) -> int:
        return self._ladder[self._at if self._tried is None else self._tried]

    def observe(self, tokens: int, took_us: int) -> None:
        """A step of so many tokens took so long, with `now` threads."""
        size = tokens.bit_length()
        least = self._least.get(size)
        if self._tried is None:  # a trial is measured by what was known before it
            for other in self._least:
                self._least[other] *= _RISE
            self._least[size] = took_us if least is None else min(took_us, self._least[size])
        if least is None or len(self._ladder) == 1:
            return  # nothing to compare it with
        slowness = took_us / least
        if self._tried is None:
            self._settled(slowness)
        elif self._begins:
            self._begins = False
        else:
            self._trial.append(slowness)
            if slowness > HOPELESS * median(self._recent) or len(self._trial) == TRIAL_STEPS:
                self._judge()

    def _settled(self, slowness: float) -> None:
        before = median(self._recent) if len(self._recent) == self._recent.maxlen else slowness
        self._recent.append(slowness)
        self._steps += 1
        if median([*self._recent][-TRIAL_STEPS:]) > SLOWER * before:
            self._wait, self._failed = SOONEST, 0
        if self._steps >= self._wait:
            self._tried, self._trial, self._begins, self._steps = self._next(), [], True, 0

    def _next(self) -> int:
        """The nearest place not tried yet, of two as near the lower one; and every other time the next higher
        one: when a process has gone, nothing else shows it."""
        if self._failed % 2 and self._at + 1 < len(self._ladder):
            return self._at + 1
        others = [at for at in range(len(self._ladder)) if at != self._at]
        others.sort(key=lambda at: abs(at - self._at))
        return others[self._failed // 2 % len(others)]

    def _judge(self) -> None:
        """Take the tried count, or stay and try the other direction later."""
        assert self._tried is not None, "a trial is under way"
        if len(self._trial) == TRIAL_STEPS and median(self._trial) < BETTER * median(self._recent):
            self._at, self._wait, self._failed = self._tried, SOONEST, 0
            self._recent.clear()
        else:
            self._failed += 1
            self._wait = min(2 * self._wait, LATEST)
        self._tried = None


def _ladder(most: int) -> list[int]:
    """The counts that are tried, from 1 to `most`: 1, 2, 3, 4, 6, 8, 12, 16, ..."""
    counts = {most}
    power = 1
    while power < most:
        counts |= {power, min(most, power * 3 // 2)}
        power *= 2
    return sorted(counts)
