"""How long sessions pause and whether they return, by the tool that their last answer called.

Each pause is counted for the tenant's tool, for the tenant, and for all: what is known of a name with few
samples comes from the next wider one, and from a prior before there is any. An answer without calls has the
tool USER.

    returns   the share of such pauses that end at all
    lasts     the share of those that are longer than the idle time so far

The policy `sessions=learned` (../state/policies.py) makes the chance of a return of both. Integers only, per
mille: each machine finds the same numbers.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

USER = ""  # of an answer that calls nothing
MOST_NAMES = 4_096  # then the one that was silent for longest is forgotten
BUCKETS = 23  # powers of two of a millisecond: up to 1 ms, 2 ms, … about an hour
HALVED_AT = 256  # samples: then all counts are halved, so that the last ones weigh more
ENOUGH = 8  # pauses or outcomes of a name, from which a wider name is not asked
PRIOR_WEIGHT = 4  # outcomes that the prior counts as
TOOL_RETURNS_PM, USER_RETURNS_PM = 990, 300
# of a prior of 1,000 pauses, how many end by 2^n ms; tools: 86 % within 1 s, 95 % within 10 s
TOOL_ENDS_PM = (50, 100, 160, 230, 310, 390, 480, 570, 660, 760, 860, 890, 920, 945, 960, 975, 985, 992, 996)
USER_ENDS_PM = (0, 0, 0, 0, 0, 0, 0, 0, 0, 10, 30, 70, 130, 220, 340, 480, 620, 740, 840, 910, 950, 980)


def _prior(ends_pm: tuple[int, ...]) -> list[int]:
    """Counts by bucket."""
    whole = [*ends_pm, *[1_000] * (BUCKETS - len(ends_pm))]
    return [end - before for before, end in zip([0, *whole], whole, strict=False)]


TOOL_PAUSES, USER_PAUSES = _prior(TOOL_ENDS_PM), _prior(USER_ENDS_PM)


def bucket_of(pause_us: int) -> int:
    """The bucket of a pause: 0 up to 1 ms, then one for each power of two."""
    return min(((max(pause_us, 1) - 1) // 1_000).bit_length(), BUCKETS - 1)


@dataclass(slots=True)
class Pauses:
    """One name: pauses that have ended, by bucket, and how many have not."""

    counts: list[int] = field(default_factory=lambda: [0] * BUCKETS)
    samples: int = 0  # the sum of the counts
    lost: int = 0  # sessions that have not returned

    def add(self, pause_us: int) -> None:
        """A session has returned."""
        self.counts[bucket_of(pause_us)] += 1
        self.samples += 1
        self._halve()

    def lose(self) -> None:
        """A session has been idle for so long that it counts as one that does not return."""
        self.lost += 1
        self._halve()

    def _halve(self) -> None:
        if self.samples + self.lost >= HALVED_AT:
            self.counts = [count // 2 for count in self.counts]
            self.samples, self.lost = sum(self.counts), self.lost // 2


@dataclass(slots=True)
class LearnedPauses:
    """The pauses of every tool of every tenant."""

    names: OrderedDict[tuple[str, str, bool], Pauses] = field(default_factory=OrderedDict)

    def add(self, tenant: str, tool: str, pause_us: int, *, was_lost: bool) -> None:
        """A session has returned. `was_lost`: it was counted among those that do not."""
        for pauses in self._counted(tenant, tool):
            pauses.add(pause_us)
            pauses.lost -= was_lost and pauses.lost > 0

    def lose(self, tenant: str, tool: str) -> None:
        """A session has not returned so far."""
        for pauses in self._counted(tenant, tool):
            pauses.lose()

    def returns_pm(self, tenant: str, tool: str) -> int:
        """The share of pauses that end."""
        prior = PRIOR_WEIGHT * (TOOL_RETURNS_PM if tool else USER_RETURNS_PM)
        returned, seen = self._outcomes(tenant, tool)
        return (returned * 1_000 + prior) // (seen + PRIOR_WEIGHT)

    def seen(self, tenant: str, tool: str) -> int:
        """How many outcomes `returns_pm` is made of."""
        return self._outcomes(tenant, tool)[1]

    def _outcomes(self, tenant: str, tool: str) -> tuple[int, int]:
        """Pauses that ended, and all, of the narrowest name with enough of them, else of the widest."""
        returned = seen = 0
        for pauses in self._known(tenant, tool):
            returned, seen = pauses.samples, pauses.samples + pauses.lost
            if seen >= ENOUGH:
                break
        return returned, seen

    def lasts_pm(self, tenant: str, tool: str, idle_us: int) -> int:
        """The share of pauses that end which are longer than `idle_us`: never 0, since a longer one than any
        so far may come."""
        counts, total = self._pauses(tenant, tool)
        at = bucket_of(idle_us)
        upper_us = 1_000 << at
        lower_us = upper_us // 2 if at else 0
        rest = counts[at] * max(upper_us - idle_us, 0) // max(upper_us - lower_us, 1)
        return (sum(counts[at + 1 :]) + rest) * 1_000 // (total + 2) + 1_000 // (total + 2) + 1

    def quantile_us(self, tenant: str, tool: str, per_mille: int) -> int:
        """The time within which this share of the pauses that end has ended: an upper bound of a bucket."""
        counts, total = self._pauses(tenant, tool)
        seen = 0
        for at, count in enumerate(counts):
            seen += count
            if seen * 1_000 >= total * per_mille:
                return 1_000 << at
        return 1_000 << BUCKETS

    def slowest(self, tenant: str, calls: tuple[str, ...]) -> str:
        """The one of several running tools that usually ends last."""
        return max(calls, key=lambda tool: (self.quantile_us(tenant, tool, 500), tool), default=USER)

    def _counted(self, tenant: str, tool: str) -> list[Pauses]:
        """The tenant's tool, all tools of the tenant, and all; made where they are missing."""
        found = []
        for name in _names(tenant, tool):
            pauses = self.names.pop(name, None) or Pauses()
            self.names[name] = pauses
            found.append(pauses)
        while len(self.names) > MOST_NAMES:
            self.names.popitem(last=False)
        return found

    def _known(self, tenant: str, tool: str) -> list[Pauses]:
        return [pauses for name in _names(tenant, tool) if (pauses := self.names.get(name)) is not None]

    def _pauses(self, tenant: str, tool: str) -> tuple[list[int], int]:
        """The counts of the narrowest name with enough samples, else the prior; and their sum."""
        for pauses in self._known(tenant, tool):
            if pauses.samples >= ENOUGH:
                return pauses.counts, pauses.samples
        return (TOOL_PAUSES if tool else USER_PAUSES), 1_000


def _names(tenant: str, tool: str) -> list[tuple[str, str, bool]]:
    """From the narrowest to the widest. What users do shows nothing about tools."""
    wider = [(tenant, USER, bool(tool)), ("", USER, bool(tool))]
    return [(tenant, tool, True), *wider] if tool else wider
