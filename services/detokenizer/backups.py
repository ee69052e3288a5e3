"""`Backups` keeps copies of requests that are open at other detokenizers. Pure.

A request so survives the loss of both its scheduler and its detokenizer:

    backup ──opened here, or done elsewhere──▶ forgotten
      ├── one of the two has gone, and no claim arrives for ONE_LOST_US ──▶ forgotten: it was answered
      └── its scheduler and its detokenizer have gone ──▶ adopted: lost (failover.py), without tokens

An adopted stream starts over, since the text that its client has is unknown here. Done keys go to all other
detokenizers, and again to one that appears or returns: it may have missed them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field

from shared.messages import Claims, Open, Tokenized, longs

ONE_LOST_US = 40_000_000  # longer than the search for another scheduler: see failover.WAIT_TURNS
DONE_US, MAX_DONE = 60_000_000, 65_536  # limits of the done keys; the oldest are dropped


@dataclass(slots=True)
class Backup:
    """A request that is open at another detokenizer."""

    scheduler: str  # `kind.id`, as is `shard`
    shard: str
    tokenized: Tokenized
    trace: str
    since_us: int
    void: set[str] = field(default_factory=set)  # which of the two have lost their state
    one_lost_us: int = 0  # time at which one of the two had gone; 0: both live
    cancelled: bool = False


def key_of(request: Tokenized | Open) -> int:
    """The key of a request in Claims; a later request with the same id has another inbox."""
    name = f"{request.tenant} {request.request} {request.inbox}"
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


class Backups:
    """The backups of this shard for other shards, and the done keys for both."""

    def __init__(self) -> None:
        self._backups: dict[int, Backup] = {}
        self._named: dict[tuple[str, str], set[int]] = {}  # keys by tenant and request
        self._done: list[int] = []  # not reported yet
        self._done_us: dict[int, int] = {}  # time by done key; the oldest first

    def __len__(self) -> int:
        """0 when idle."""
        return len(self._backups)

    def on_backup(self, scheduler: str, tokenized: Tokenized, trace: str, now_us: int) -> None:
        """Keep a backup from the request's scheduler."""
        if (key := key_of(tokenized)) in self._done_us:
            return
        self._backups[key] = Backup(scheduler, f"detokenizer.{tokenized.shard}", tokenized, trace, now_us)
        self._named.setdefault((tokenized.tenant, tokenized.request), set()).add(key)

    def on_opened(self, opened: Open) -> None:
        """A request is open here: it needs no backup, and a done one with this key is no longer done."""
        if self._backups or self._done_us:
            self._forget(key := key_of(opened))
            self._done_us.pop(key, None)

    def on_cancelled(self, tenant: str, request: str) -> None:
        """Mark the backups of a cancelled request."""
        for key in self._named.get((tenant, request), ()):
            self._backups[key].cancelled = True

    def on_answered(self, opened: Open, now_us: int) -> None:
        """A request has ended here: report it to the others."""
        key = key_of(opened)
        self._done.append(key)
        self._note_done(key, now_us)

    @property
    def has_unsent(self) -> bool:
        """True if `report` has new keys."""
        return bool(self._done)

    def report(self) -> Claims:
        """The done keys since the last report, for the caller to send."""
        done, self._done = self._done, []
        return Claims(done=longs(done))

    @property
    def known(self) -> Claims:
        """All recent done keys, for a detokenizer that may have missed reports."""
        return Claims(done=longs(self._done_us))

    def on_claims(self, claims: Claims, now_us: int) -> None:
        """Forget the requests that another detokenizer has answered."""
        for key in claims.done:
            self._forget(key)
            self._note_done(key, now_us)

    def on_gone(self, source: str, lives: Callable[[str], bool], now_us: int, *, void: bool) -> list[Backup]:
        """A scheduler or a detokenizer is silent, or has lost its state (`void`). Removes and returns the
        backups that now have neither."""
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
        """Once a heartbeat: drop the backups past their time limit, and those with one side lost for
        ONE_LOST_US: they are answered. A side that returns with its state is not lost."""
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
