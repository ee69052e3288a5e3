"""A request outlives its scheduler and its detokenizer: another detokenizer keeps a copy. Pure.

    copy ──opened here, or done elsewhere──▶ forgotten
      └── its scheduler and its detokenizer have gone ──▶ adopted: an orphan (failover.py) without a token

What its reader has seen is not known here, so that an adopted stream starts over.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field

from shared.messages import Claims, Open, Tokenized, longs


@dataclass(slots=True)
class Copy:
    """A request that is open at another detokenizer."""

    scheduler: str  # `kind.id`, as is `shard`
    shard: str
    asked: Tokenized
    trace: str
    since_us: int
    void: set[str] = field(default_factory=set)  # those of the two that have lost all they knew
    cancelled: bool = False


def key_of(request: Tokenized | Open) -> int:
    """Names a request in Claims; the next one with its id has another inbox."""
    name = f"{request.tenant} {request.request} {request.inbox}"
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


class Copies:
    """What this shard keeps for others, and what the others may forget."""

    def __init__(self) -> None:
        self._copies: dict[int, Copy] = {}
        self._done: list[int] = []  # not told yet

    def __len__(self) -> int:
        """0 when idle."""
        return len(self._copies)

    def keep(self, scheduler: str, asked: Tokenized, trace: str, now_us: int) -> None:
        """A copy from the scheduler that serves it."""
        self._copies[key_of(asked)] = Copy(scheduler, f"detokenizer.{asked.shard}", asked, trace, now_us)

    def opened(self, opened: Open) -> None:
        """It is open here."""
        if self._copies:
            self._copies.pop(key_of(opened), None)

    def cancelled(self, tenant: str, request: str) -> None:
        """Its client wants no more of it."""
        for copy in self._copies.values():
            if (copy.asked.tenant, copy.asked.request) == (tenant, request):
                copy.cancelled = True

    def answered(self, opened: Open) -> None:
        """A request has ended here; the others are to forget it."""
        self._done.append(key_of(opened))

    @property
    def unsent(self) -> bool:
        """True when `report` has something to tell."""
        return bool(self._done)

    def report(self) -> Claims:
        """What the others do not know yet; it is told now."""
        done, self._done = self._done, []
        return Claims(done=longs(done))

    def told(self, claims: Claims) -> None:
        """Another detokenizer has answered these."""
        for key in claims.done:
            self._copies.pop(key, None)

    def gone(self, source: str, lives: Callable[[str], bool], *, void: bool) -> list[Copy]:
        """A scheduler or a detokenizer is silent, or has lost all it knew (`void`). Returns the copies that
        are nobody else's now, and keeps them no more."""
        alone = []
        for key, copy in self._copies.items():
            both = {copy.scheduler, copy.shard}
            if void and source in both:
                copy.void.add(source)
            if source in both and not any(lives(each) for each in both - copy.void):
                alone.append(key)
        return [self._copies.pop(key) for key in alone]

    def expire(self, now_us: int) -> None:
        """Once a beat: nobody waits for an answer beyond its time limit."""
        late = [key for key, c in self._copies.items() if now_us - c.since_us > c.asked.timeout_us]
        for key in late:
            del self._copies[key]
