"""How fast an executor goes in its overlap mode, as measured: what the guard of overlap.py judges by."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Speed:
    """Some steps of one mode."""

    steps: int
    rows: int
    us: int
    took_us: int


@dataclass(slots=True)
class Pace:
    """Rows that came back and the time they took, while the executor had work."""

    mode: str = ""
    since_step: int = 0  # the mode was chosen then
    since_rows: int = 0  # so many ran then
    hosted: bool = False  # some rows were host-fed then
    half: int = 1  # micro-batch of the last step of two_batch: the first is A
    step_us: int = 0  # a step's time, a moving average
    steps: int = 0
    rows: int = 0
    us: int = 0
    took_us: int = 0  # of it, the device's
    last_us: int = 0  # the last result, 0 when the executor fell idle after it
    probe_until: int = 0  # single until this step, to compare with
    measure_from: int = 0  # results from this step on are of the probe
    probed_step: int = 0  # the last probe ended then
    before: Speed | None = None  # of the mode before the probe
    banned: str = ""  # a mode that was slower than single
    banned_until: int = 0

    @property
    def speed(self) -> Speed:
        """What was measured since the last restart."""
        return Speed(self.steps, self.rows, self.us, self.took_us)

    def planned(self, now_us: int) -> None:
        """A step is planned that no other is in flight with: unless the last result brought it about, the
        executor has been idle, for want of work."""
        if now_us != self.last_us:
            self.last_us = 0

    def note(self, step: int, rows: int, took_us: int, now_us: int, *, busy: bool) -> None:
        """The result of a step has come; `busy` says whether there is more to do."""
        if step == self.measure_from:
            self.restart()
        elif self.last_us:
            self.steps += 1
            self.rows += rows
            self.took_us += took_us
            self.us += now_us - self.last_us
        self.last_us = now_us if busy else 0

    def restart(self) -> None:
        """Measure anew."""
        self.steps = self.rows = self.us = self.took_us = 0
