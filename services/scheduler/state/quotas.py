"""`Quotas` limits the requests and tokens a minute of each tenant, and `read_quotas` reads them from a file.

    arrival: 1 request, tokens of the prompt ──▶ two buckets of a tenant ◀── tokens of the answer: end

A bucket holds at most a minute's amount and fills continuously. A request is accepted while both buckets hold
at least one; an answer may take the tokens below zero, and the tenant then waits until they are above. So a
quota bounds the mean, and no answer is cut short. `load_shedding` asks, `arrival` and `finish` charge.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from shared.nats.subjects import MAX_NAME_CHARS, PROBE_TENANT

ANY = "*"  # the quota of each tenant without a line of its own
UNLIMITED = "-"
MINUTE_US = 60_000_000
MAX_BUCKETS = 20_000  # then those that are full are dropped: they hold nothing
NAMES = ("requests", "tokens")

Quota = tuple[int, int]  # requests, tokens a minute; 0: unlimited


def read_quotas(text: str) -> dict[str, Quota]:
    """The quotas by tenant. Raises ValueError with the line number."""
    found: dict[str, Quota] = {}
    for number, line in enumerate(text.splitlines(), 1):
        fields = line.partition("#")[0].split()
        if not fields:
            continue
        amounts = [0 if amount == UNLIMITED else int(amount) for amount in fields[1:] if _is_amount(amount)]
        if len(amounts) != 2 or len(fields) != 3 or len(fields[0]) > MAX_NAME_CHARS:
            raise ValueError(f"line {number}: `tenant requests tokens` a minute is expected, or {UNLIMITED}")
        found[fields[0]] = amounts[0], amounts[1]
    return found


def _is_amount(text: str) -> bool:
    return text == UNLIMITED or (text.isdecimal() and 0 < int(text) <= 10**12)


@dataclass(slots=True)
class Bucket:
    """What a tenant has left, in amounts x MINUTE_US, so that it fills in whole numbers."""

    left: list[int]
    filled_us: int


@dataclass(slots=True)
class Quotas:
    """The quotas, and what the tenants have left of them."""

    by_tenant: dict[str, Quota] = field(default_factory=dict)
    buckets: dict[str, Bucket] = field(default_factory=dict)

    def set(self, quotas: Iterable[tuple[str, int, int]]) -> None:
        """Replace the quotas; a tenant keeps what it has used."""
        self.by_tenant = {tenant: (requests, tokens) for tenant, requests, tokens in quotas}

    def wait(self, tenant: str, now_us: int) -> tuple[str, int] | None:
        """Why a request of the tenant must wait, and how long, us; None: it is accepted now."""
        quota = self._quota(tenant)
        if quota is None or tenant not in self.buckets:
            return None
        bucket = self._filled(tenant, quota, now_us)
        waits = [
            (-(-(MINUTE_US - left) // amount), f"{amount} {name} a minute")
            for left, amount, name in zip(bucket.left, quota, NAMES, strict=True)
            if amount and left < MINUTE_US
        ]
        if not waits:
            return None
        wait_us, what = max(waits)
        return what, wait_us

    def charge(self, tenant: str, now_us: int, requests: int, tokens: int) -> None:
        """Take from the tenant's buckets."""
        if (quota := self._quota(tenant)) is None:
            return
        if len(self.buckets) >= MAX_BUCKETS and tenant not in self.buckets:
            self._drop_full(now_us)
        bucket = self._filled(tenant, quota, now_us)
        taken = (requests if quota[0] else 0, tokens if quota[1] else 0)
        bucket.left = [left - amount * MINUTE_US for left, amount in zip(bucket.left, taken, strict=True)]

    def _quota(self, tenant: str) -> Quota | None:
        if not self.by_tenant or tenant == PROBE_TENANT:
            return None
        return self.by_tenant.get(tenant) or self.by_tenant.get(ANY)

    def _filled(self, tenant: str, quota: Quota, now_us: int) -> Bucket:
        """The tenant's bucket, filled up to now."""
        bucket = self.buckets.get(tenant)
        if bucket is None:
            bucket = self.buckets[tenant] = Bucket([amount * MINUTE_US for amount in quota], now_us)
        since_us, bucket.filled_us = now_us - bucket.filled_us, now_us
        bucket.left = [
            min(left + amount * since_us, amount * MINUTE_US)
            for left, amount in zip(bucket.left, quota, strict=True)
        ]
        return bucket

    def _drop_full(self, now_us: int) -> None:
        for tenant in list(self.buckets):
            quota = self._quota(tenant) or (0, 0)
            if self._filled(tenant, quota, now_us).left == [amount * MINUTE_US for amount in quota]:
                del self.buckets[tenant]
