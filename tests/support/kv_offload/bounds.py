"""What a fault of the tiers may cost a request, measured against undisturbed runs of the same fleet.

Machines that run tests are busy with other things, and differently so from minute to minute. So every bound
is in units of its own run: one *step* is the median gap between two tokens, and what a run may take is what
an undisturbed one took, times how much slower its steps were, plus the deadlines that services keep.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from support.kv_offload.traffic import Answer

from services.scheduler.kv_tiers.load import MOST_DEADLINE_US
from services.scheduler.kv_tiers.lookups import MOST_WAIT_US
from services.scheduler.state.transfers import ANSWER_US, TRY_BLOCKS
from shared import codec
from shared.messages import KvCopied, KvCopy, KvFound, KvLookup, KvPrefetch, KvReady, KvReserve, KvReserved
from shared.nats.interface import Delivery

DEADLINE_S = (MOST_WAIT_US + MOST_DEADLINE_US + ANSWER_US) / 1e6  # the longest wait of a request for a tier
HITS_WITHIN_S = 5.0  # of a tier that is back
L1_S, L1_TIMES, L1_STEPS = 0.002, 5.0, 0.25  # see assert_l1_is_quick
KINDS = (KvLookup, KvFound, KvPrefetch, KvReady, KvReserve, KvReserved, KvCopy, KvCopied)
WATCHED = {kind.__name__ for kind in KINDS}


@dataclass(frozen=True, slots=True)
class Run:
    """What clients saw of one storm."""

    step_s: float
    longest_gap_s: float
    longest_first_s: float  # TTFT; of some thirty requests this is the 99th percentile

    @classmethod
    def of(cls, answers: Sequence[Answer]) -> Run:
        """The figures of answers that all came."""
        gaps_s = [gap_s for answer in answers for gap_s in answer.gaps_s]
        return cls(median(gaps_s), max(gaps_s), max(answer.first_s for answer in answers))

    def slower_than(self, other: Run) -> float:
        """How many times longer a step took; 1 at least."""
        return max(1.0, self.step_s / other.step_s)


def assert_gaps(run: Run, calm: Run) -> None:
    """No stream stands still for longer than in the undisturbed run, two more steps of the longest that it
    had (they carry a prompt's chunk), and the deadline."""
    allowed_s = 3 * calm.longest_gap_s * run.slower_than(calm) + DEADLINE_S
    assert run.longest_gap_s <= allowed_s, (run, calm)


def assert_first_tokens(run: Run, cold: Run) -> None:
    """The first token comes no later than where nothing is cached, and the deadline."""
    allowed_s = cold.longest_first_s * run.slower_than(cold) + DEADLINE_S
    assert run.longest_first_s <= allowed_s, (run, cold)


@dataclass
class TierWatch:
    """Receives the services' messages to each other about blocks."""

    l1_s: list[float] = field(default_factory=list)  # how long answers took that L1 alone gave: hits, stores
    loads_s: list[float] = field(default_factory=list)  # when blocks had been brought to a device
    _asked_s: dict[int, float] = field(default_factory=dict)  # job -> when
    _up: set[int] = field(default_factory=set)  # jobs

    def take(self, delivery: Delivery) -> None:
        """One message between services of a fleet with one scheduler, which numbers the jobs."""
        if delivery.subject.rpartition(".")[2] not in WATCHED:
            return
        message, now_s = codec.decode(delivery.data).message, time.monotonic()
        match message:
            case KvLookup(job=job) | KvPrefetch(job=job) | KvReserve(job=job):
                self._asked_s[job] = now_s
            case KvFound(job=job, tiers=tiers) if all(tier == 1 for tier in tiers):
                self._answered(job, now_s)
            case KvReady(job=job, status="ok", from_l2=0) | KvReserved(job=job):
                self._answered(job, now_s)
            case KvCopy(job=job, to_arena=False, blocks=blocks) if len(blocks) > TRY_BLOCKS:
                self._up.add(job)  # not a try of a link that looks slow
            case KvCopied(job=job, status="ok") if job in self._up:
                self.loads_s.append(now_s)

    def _answered(self, job: int, now_s: float) -> None:
        if (asked_s := self._asked_s.pop(job, None)) is not None:
            self.l1_s.append(now_s - asked_s)


def assert_l1_is_quick(frozen_s: Sequence[float], calm_s: Sequence[float], run: Run) -> None:
    """The median answer takes 2 ms at most. A machine with much else to do needs longer for any message: five
    times an undisturbed answer, or a quarter of a step, are allowed as well. One that waited for a call to L2
    would take that call's deadline of a second. Where all wait, the scheduler soon asks no more: that L1
    serves on is asserted beside this."""
    assert min(len(frozen_s), len(calm_s)) >= 3, "too few answers for a verdict"
    assert median(frozen_s) <= max(L1_S, L1_TIMES * median(calm_s), L1_STEPS * run.step_s), frozen_s
