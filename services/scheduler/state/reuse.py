"""How much of each tenant's prompts was found in caches lately: the chance that a block is used again.

`admission` adds each prompt, `kv_tiers/store` asks. Shares are weighted by tokens, since a block of a long
prompt is worth as much as one of a short prompt. A tenant has its own share: the chats of one tenant
show nothing about the agents of another.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

MOST_TENANTS = 1_024  # then the share of the one that was silent longest is forgotten
PRIOR_TOKENS, PRIOR_PM = 4_096, 500  # as if so many tokens had been looked up before the first prompt
KEPT, OF = 15, 16  # of the tokens so far, at each prompt


@dataclass(slots=True)
class Reused:
    """Tokens of one tenant's prompts, the last ones in full and earlier ones less and less."""

    tokens: int = PRIOR_TOKENS
    found_tokens: int = PRIOR_TOKENS * PRIOR_PM // 1000

    @property
    def chance_pm(self) -> int:
        """The share that was found, per mille."""
        return self.found_tokens * 1000 // max(self.tokens, 1)


@dataclass(slots=True)
class Reuse:
    """The shares of all tenants."""

    tenants: OrderedDict[str, Reused] = field(default_factory=OrderedDict)  # silent for longest first

    def add(self, tenant: str, found_tokens: int, tokens: int) -> None:
        """A prompt of `tokens` begins, and caches know `found_tokens` of them."""
        reused = self.tenants.setdefault(tenant, Reused())
        self.tenants.move_to_end(tenant)
        reused.tokens = reused.tokens * KEPT // OF + tokens
        reused.found_tokens = reused.found_tokens * KEPT // OF + found_tokens
        if len(self.tenants) > MOST_TENANTS:
            self.tenants.popitem(last=False)

    def chance_pm(self, tenant: str) -> int:
        """The chance that a block of this tenant is used again, per mille."""
        reused = self.tenants.get(tenant)
        return PRIOR_PM if reused is None else reused.chance_pm

    @property
    def mean_pm(self) -> int:
        """The share of all tenants together."""
        return self._sum().chance_pm

    @property
    def most_pm(self) -> int:
        """The highest chance of any tenant."""
        return max((reused.chance_pm for reused in self.tenants.values()), default=PRIOR_PM)

    def _sum(self) -> Reused:
        every = self.tenants.values()
        if not every:
            return Reused()
        return Reused(sum(r.tokens for r in every), sum(r.found_tokens for r in every))
