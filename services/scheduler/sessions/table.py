"""The sessions of a scheduler, and their bounds.

    RUNNING  a request of it waits or runs       IDLE  its last answer has ended: blocks wait for the next one
    ended    not in the table any more

A session that nothing proves is a guess: an answer has ended, and the next prompt may extend it. It ranks no
block, and goes first when the table is full. An id of the client, a call in an answer, or a prompt that
extends an earlier one proves it.

Sessions share prefixes. `shares` counts, for each SHARED_AT-th key, the sessions that have it: a block is one
session's own if the counted key at or before it is. A key that another session had is shared, too: else a
system prompt would end with each session that has it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from struct import Struct

from services.scheduler.state.state import Chain
from shared.kv_blocks import KEY_BYTES

MOST_SESSIONS = 4_096
MOST_OF_TENANT = 1_024  # or an equal part of MOST_SESSIONS, if that is more
MOST_KEY_BYTES = 128 << 20
SHARED_AT = 16  # blocks: every so many keys one is counted
MOST_SEEN = 65_536  # keys of sessions that are over: a later one shares them
SPAN_BLOCKS = 64  # tips are looked up by the last border of a span before them
MOST_TIPS = 4  # of a session: of its last two turns, each with and without the answer

_KEY = Struct(f"{KEY_BYTES}s")
Keyed = tuple[bytes, int]  # root of the keys and tokens of a block, as in Sequence


@dataclass(frozen=True, slots=True)
class Tip:
    """The end of a prompt or of an answer: so many full blocks, and digests of their tokens."""

    blocks: int
    digest: bytes
    border: bytes  # the digest at the last border of a span


@dataclass(slots=True, eq=False)
class Session:
    """One chain of prompts that extend each other."""

    name: str
    tenant: str
    keyed: Keyed
    parent: str = ""
    has_id: bool = False  # the client has named it
    is_proven: bool = False
    chain: Chain = field(default_factory=Chain)  # of all its blocks
    last_key: bytes = b""  # of the chain
    tips: list[Tip] = field(default_factory=list)  # the last one last
    running: int = 0  # requests of it that wait or run
    seqs: list[int] = field(default_factory=list)  # the sequences that released its blocks last
    turns: int = 0
    tool: str = ""  # the slowest that its last answer called
    idle_since_us: int = 0
    kept_until_us: int = 0
    is_late: bool = False  # it was counted among those that do not return
    is_final: bool = False  # it ends with the request that runs
    touched_us: int = 0  # when its blocks in L1 were last moved to the warm end
    risen_blocks: int = 0  # that came up before a request of it
    risen_us: int = 0  # when
    had_blocks: int = 0  # that the device had of its last prompt
    ranked_us: int = 0  # when its blocks last got the rank of kept ones
    came_us: int = 0  # when its last request came
    paused_us: int = 0  # the sum of its pauses
    parent_turns: int = -1  # of the chain that it has left, when it left; -1: it has left none
    is_left: bool = False  # a branch of it has gone on instead

    @property
    def keys(self) -> bytes:
        """The keys of all its blocks, one after another."""
        return self.chain.keys

    @property
    def blocks(self) -> int:
        return len(self.keys) // KEY_BYTES

    def key(self, at: int) -> bytes:
        """The key of its block `at`."""
        return self.keys[at * KEY_BYTES : (at + 1) * KEY_BYTES]

    def first_keys(self, blocks: int) -> list[bytes]:
        """The keys of its first blocks."""
        return [key for (key,) in _KEY.iter_unpack(self.keys[: blocks * KEY_BYTES])]

    def common_blocks(self, keys: list[bytes]) -> int:
        """How many of its first blocks have these keys: a chain agrees up to one point."""
        low, high = 0, min(self.blocks, len(keys))
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.key(middle - 1) == keys[middle - 1] else (low, middle - 1)
        return low


@dataclass(slots=True)
class Outcomes:
    """What became of sessions, since the start. The last three sum to the returns."""

    released: int = 0
    superseded: int = 0
    over: int = 0  # ended, since they hardly ever return, or their parents went on
    dead_blocks: int = 0
    prefetched: int = 0  # blocks
    wasted: int = 0  # of these, those that no request has used
    device: int = 0  # returns whose prompt was mostly there
    below: int = 0  # or came from a tier
    computed: int = 0  # or was computed


@dataclass(slots=True)
class TenantSessions:
    """The sessions of one tenant: names, those that were idle for longest first."""

    guesses: OrderedDict[str, None] = field(default_factory=OrderedDict)
    idle: OrderedDict[str, None] = field(default_factory=OrderedDict)  # proven ones
    kept: dict[str, None] = field(default_factory=dict)  # those that a client keeps, the first one first
    count: int = 0  # also running ones


@dataclass(slots=True)
class Tips:
    """The tips of the sessions of one root, which stands for a tenant and a layout of KV."""

    sessions: dict[bytes, str] = field(default_factory=dict)  # digest -> name
    borders: dict[bytes, dict[int, int]] = field(default_factory=dict)  # border -> blocks of a tip -> tips


@dataclass(slots=True)
class Table:
    """See the top of this file."""

    by_name: dict[str, Session] = field(default_factory=dict)
    by_seq: dict[int, Session] = field(default_factory=dict)
    tenants: dict[str, TenantSessions] = field(default_factory=dict)
    tips: dict[Keyed, Tips] = field(default_factory=dict)
    shares: dict[bytes, int] = field(default_factory=dict)
    seen: dict[bytes, None] = field(default_factory=dict)  # counted keys that a session had, oldest first
    key_bytes: int = 0

    def add(self, session: Session) -> list[Session]:
        """A new session, which runs. Returns those that have no room any more: their blocks live on."""
        of = self.tenants.setdefault(session.tenant, TenantSessions())
        self.by_name[session.name] = session
        of.count += 1
        return [*self._over(of), *self.over_all()]

    def _over(self, of: TenantSessions) -> Iterator[Session]:
        most = max(MOST_OF_TENANT, MOST_SESSIONS // len(self.tenants))
        while of.count > most and (session := self._least(of)) is not None:
            self.remove(session)
            yield session

    def over_all(self) -> Iterator[Session]:
        """Remove sessions until the bounds of all tenants together hold: also after one has grown."""
        while len(self.by_name) > MOST_SESSIONS or self.key_bytes > MOST_KEY_BYTES:
            largest = max(self.tenants.values(), key=lambda each: len(each.guesses) + len(each.idle))
            if (session := self._least(largest)) is None:
                return  # all run: requests have a bound of their own
            self.remove(session)
            yield session

    def _least(self, of: TenantSessions) -> Session | None:
        """The guess that was idle for longest, else the session."""
        for names in (of.guesses, of.idle):
            if names:
                return self.by_name[next(iter(names))]
        return None

    def remove(self, session: Session) -> None:
        """A session is over."""
        del self.by_name[session.name]
        self.set_keys(session, b"")
        self.set_tips(session, [])
        self.set_seqs(session, [])
        of = self.tenants[session.tenant]
        of.guesses.pop(session.name, None)
        of.idle.pop(session.name, None)
        of.kept.pop(session.name, None)
        of.count -= 1
        if not of.count:
            del self.tenants[session.tenant]

    def rename(self, session: Session, name: str) -> None:
        """It has another name from now on, and a request of it has come."""
        tips, of = session.tips, self.tenants[session.tenant]
        self.set_tips(session, [])
        self.wake(session)
        if session.name in of.kept:
            del of.kept[session.name]
            of.kept[name] = None
        self.by_name[name] = self.by_name.pop(session.name)
        session.name = name
        self.set_tips(session, tips)

    def rest(self, session: Session) -> None:
        """It is idle from now on."""
        of = self.tenants[session.tenant]
        (of.idle if session.is_proven else of.guesses)[session.name] = None

    def wake(self, session: Session) -> None:
        """A request of it has come."""
        of = self.tenants[session.tenant]
        of.guesses.pop(session.name, None)
        of.idle.pop(session.name, None)

    def set_seqs(self, session: Session, seqs: list[int]) -> None:
        """These sequences have released its blocks."""
        for seq in session.seqs:
            self.by_seq.pop(seq, None)
        session.seqs = seqs
        self.by_seq.update(dict.fromkeys(seqs, session))

    def set_keys(self, session: Session, keys: bytes) -> None:
        """Its blocks are these now."""
        before, session.chain, session.last_key = session.keys, Chain(keys), keys[-KEY_BYTES:]
        self.key_bytes += len(keys) - len(before)
        size = SHARED_AT * KEY_BYTES
        for at in range(size, max(len(keys), len(before)) + 1, size):
            old, new = before[at - KEY_BYTES : at], keys[at - KEY_BYTES : at]
            if old == new:
                continue
            if len(old) == KEY_BYTES:
                self._unshare(old)
            if len(new) == KEY_BYTES:
                self.shares[new] = self.shares.get(new, 0) + 1

    def _unshare(self, key: bytes) -> None:
        """One session less has this counted key."""
        if count := self.shares.pop(key) - 1:
            self.shares[key] = count
        self.seen.pop(key, None)
        self.seen[key] = None
        if len(self.seen) > MOST_SEEN:
            del self.seen[next(iter(self.seen))]

    def own_from(self, session: Session) -> int:
        """Its blocks from this one on are in no other session, and were in none."""
        low, high = 0, session.blocks // SHARED_AT  # counted keys that others have, too: a prefix of them
        while low < high:
            middle = (low + high) // 2
            key = session.key((middle + 1) * SHARED_AT - 1)
            shared = self.shares[key] > 1 or key in self.seen
            low, high = (middle + 1, high) if shared else (low, middle)
        return (low + 1) * SHARED_AT - 1 if low < session.blocks // SHARED_AT else session.blocks

    def set_tips(self, session: Session, tips: list[Tip]) -> None:
        """A prompt that continues one of these continues the session."""
        if (
            session.tips and (index := self.tips.get(session.keyed)) is not None
        ):  # a later session may have all
            for tip in session.tips:
                self._unindex(index, tip, session.name)
            if not index.sessions:
                del self.tips[session.keyed]
        session.tips = tips[-MOST_TIPS:]
        for tip in session.tips:
            index = self.tips.setdefault(session.keyed, Tips())
            if tip.digest not in index.sessions:
                at_border = index.borders.setdefault(tip.border, {})
                at_border[tip.blocks] = at_border.get(tip.blocks, 0) + 1
            index.sessions[tip.digest] = session.name

    def _unindex(self, index: Tips, tip: Tip, name: str) -> None:
        if index.sessions.get(tip.digest) != name:
            return  # a later session has it
        del index.sessions[tip.digest]
        at_border = index.borders[tip.border]
        at_border[tip.blocks] -= 1
        if not at_border[tip.blocks]:
            del at_border[tip.blocks]
        if not at_border:
            del index.borders[tip.border]
