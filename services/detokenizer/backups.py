"""A request outlives its scheduler and its detokenizer: another detokenizer keeps a copy. Pure.

    copy ──opened here, or done elsewhere──▶ forgotten
      ├── one of the two has gone, and no claim of it for ONE_LOST_US ──▶ forgotten: it was answered
      └── its scheduler and its detokenizer have gone ──▶ adopted: an orphan (failover.py) without a token

What its reader has seen is not known here, so that an adopted stream starts over. What is done is told to
all, and once more to a detokenizer that comes, or was silent and is back: it may not have heard.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field

from shared.messages import Claims, Open, Tokenized, longs

ONE_LOST_US = (
    40_000_000  # longer than a request without a scheduler looks for another: see failover.WAIT_TURNS
)
DONE_US, MAX_DONE = 60_000_000, 65_536  # for so long it is known what is done; then the oldest go


@dataclass(slots=True)
class Backup:
    """A request that is open at another detokenizer."""

    scheduler: str  # `kind.id`, as is `shard`
    shard: str
    tokenized: Tokenized
    trace: str
    since_us: int
    void: set[str] = field(default_factory=set)  # those of the two that have lost all they knew
    one_lost_us: int = 0  # since when one of the two has gone; 0: both are there
    cancelled: bool = False


def key_of(request: Tokenized | Open) -> int:
    """Names a request in Claims; the next one with its id has another inbox."""
    name = f"{request.tenant} {request.request} {request.inbox}"
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


class Backups:
    """What this shard keeps for others, and what the others may forget."""

    def __init__(self) -> None:
        self._backups: dict[int, Backup] = {}
        self._named: dict[tuple[str, str], set[int]] = {}  # their keys, by tenant and request
        self._done: list[int] = []  # not told yet
        self._done_us: dict[int, int] = {}  # when, of all that are done; the oldest first

    def __len__(self) -> int:
        """0 when idle."""
        return len(self._backups)

    def keep(self, scheduler: str, tokenized: Tokenized, trace: str, now_us: int) -> None:
        """A copy from the scheduler that serves it."""
        if (key := key_of(tokenized)) in self._done_us:
            return
        self._backups[key] = Backup(scheduler, f"detokenizer.{tokenized.shard}", tokenized, trace, now_us)
        self._named.setdefault((tokenized.tenant, tokenized.request), set()).add(key)

    def opened(self, opened: Open) -> None:
        """It is open here; one with the same name may have been done before."""
        if self._backups or self._done_us:
            self._forget(key := key_of(opened))
            self._done_us.pop(key, None)

    def cancelled(self, tenant: str, request: str) -> None:
        """Its client wants no more of it."""
        for key in self._named.get((tenant, request), ()):
            self._backups[key].cancelled = True

    def answered(self, opened: Open, now_us: int) -> None:
        """A request has ended here; the others are to forget it."""
        key = key_of(opened)
        self._done.append(key)
        self._note_done(key, now_us)

    @property
    def unsent(self) -> bool:
        """True when `report` has something to tell."""
        return bool(self._done)

    def report(self) -> Claims:
        """What the others do not know yet; it is told now."""
        done, self._done = self._done, []
        return Claims(done=longs(done))

    @property
    def known(self) -> Claims:
        """What was done lately, for one that may not have heard."""
        return Claims(done=longs(self._done_us))

    def on_claims(self, claims: Claims, now_us: int) -> None:
        """Another detokenizer has answered these."""
        for key in claims.done:
            self._forget(key)
            self._note_done(key, now_us)

    def gone(self, source: str, lives: Callable[[str], bool], now_us: int, *, void: bool) -> list[Backup]:
        """A scheduler or a detokenizer is silent, or has lost all it knew (`void`). Returns the copies that
        are nobody else's now, and keeps them no more."""
        alone = []
        for key, copy in self._backups.items():
            both = {copy.scheduler, copy.shard}
            if source not in both:
                continue
            if void:
                copy.void.add(source)
            if any(lives(each) for each in both - copy.void):
                copy.one_lost_us = copy.one_lost_us or now_us
            else:
                alone.append(key)
        return [self._drop(key) for key in alone]

    def expire(self, now_us: int, lives: Callable[[str], bool]) -> None:
        """Once a heartbeat: nobody waits for an answer beyond its time limit, and one of which nobody speaks
        since its scheduler or its detokenizer has gone is answered. One that was only silent goes on."""
        for key, copy in list(self._backups.items()):
            if copy.one_lost_us and not copy.void and lives(copy.scheduler) and lives(copy.shard):
                copy.one_lost_us = 0
            unspoken = copy.one_lost_us and now_us - copy.one_lost_us > ONE_LOST_US
            if unspoken or now_us - copy.since_us > copy.tokenized.timeout_us:
                self._drop(key)
        while self._done_us and next(iter(self._done_us.values())) < now_us - DONE_US:
            del self._done_us[next(iter(self._done_us))]

    def _note_done(self, key: int, now_us: int) -> None:
        self._done_us.pop(key, None)
        self._done_us[key] = now_us
        if len(self._done_us) > MAX_DONE:
            del self._done_us[next(iter(self._done_us))]

    def _forget(self, key: int) -> None:
        if key in self._backups:
            self._drop(key)

    def _drop(self, key: int) -> Backup:
        copy = self._backups.pop(key)
        keys = self._named[name := (copy.tokenized.tenant, copy.tokenized.request)]
        keys.discard(key)
        if not keys:
            del self._named[name]
        return copy
