"""Five fake actors with the whole wire: just enough state to react to every message.

The fake model's next token depends on every token that the executor reads back from its blocks, so a
wrong block table, copy or restore shows as wrong ids. `expected_ids` is the oracle.
"""

from __future__ import annotations

import hashlib
import json
from itertools import count

from shared.actor.mailbox import Mailbox
from shared.actor.runtime import Actor, HeartbeatPayload
from shared.kv_blocks import choice_seed
from shared.messages import (
    Accepted,
    ArenaReleased,
    Close,
    Ended,
    KvCommit,
    KvPrefetch,
    KvReady,
    KvRelease,
    KvReserve,
    KvReserved,
    KvStored,
    Message,
    Open,
    Rejected,
    StopFound,
    Tokenized,
    Tokens,
    ints,
    longs,
)

BLOCK = 4
SCHEDULER, EXECUTOR, KV = "scheduler.s0", "executor.e0", "kv_offload.host.a"
Arena = dict[tuple[int, int], list[int]]  # (generation, offset) -> the block's tokens


def next_token(context: list[int], seed: int) -> int:
    """The fake model: an id that depends on every token of the context and on the seed."""
    digest = hashlib.blake2b(repr((context, seed)).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") % 1000


def expected_ids(prompt: list[int], seed: int, choice: int, length: int) -> list[int]:
    """What the pipeline must generate for one choice."""
    tokens = list(prompt)
    for _ in range(length):
        tokens.append(next_token(tokens, choice_seed(seed, choice)))
    return tokens[len(prompt) :]


def text_of(ids: list[int]) -> str:
    """The fake vocabulary: one letter a token."""
    return "".join(chr(ord("a") + i % 26) for i in ids)


class FakeTokenizer(Actor):
    """Keeps the inbox of a request until the scheduler has it."""

    kind = "tokenizer"

    def __init__(self) -> None:
        self.inboxes: dict[str, str] = {}

    async def start(self, mailbox: Mailbox) -> None:
        self.mailbox = mailbox

    def submit(self, request: Tokenized) -> None:
        self.inboxes[request.request] = request.inbox
        self.mailbox.send(SCHEDULER, request)

    def receive(self, source: str, message: Message, trace: str) -> None:
        match message:
            case Accepted(request=request):
                del self.inboxes[request]
            case Rejected(request=request, code=code):
                self.mailbox.bus.publish(self.inboxes.pop(request), json.dumps({"error": code}).encode())
            case _:
                raise AssertionError(message)


class FakeKv(Actor):
    """Offsets by key; the bytes are the executor's to copy."""

    kind = "kv_offload"

    def __init__(self) -> None:
        self.generation = 1
        self.allocated = True
        self.stored: dict[bytes, int] = {}
        self.reserved: dict[int, list[bytes]] = {}
        self.leases: set[int] = set()
        self._offsets = count(0, BLOCK)

    async def start(self, mailbox: Mailbox) -> None:
        self.mailbox = mailbox

    def heartbeat_payload(self) -> HeartbeatPayload:
        arena = f"arena-{self.generation}" if self.allocated else ""
        return HeartbeatPayload(arena=arena, arena_generation=self.generation)

    def new_arena(self) -> None:
        """Announce the next generation; allocate it once no executor has the old one mapped."""
        self.generation, self.allocated = self.generation + 1, False
        self.stored.clear()

    def receive(self, source: str, message: Message, trace: str) -> None:
        match message:
            case KvReserve(job=job, keys=keys):
                mine = self.reserved[job] = _keys(keys)
                offsets = longs(self.stored.setdefault(key, next(self._offsets)) for key in mine)
                self.mailbox.send(
                    source, KvReserved(job=job, arena_generation=self.generation, offsets=offsets)
                )
            case KvCommit(job=job, written=written):
                keys_written = zip(self.reserved.pop(job), written, strict=True)
                tiers = ints(1 if self.stored[key] >= 0 and mask else 0 for key, mask in keys_written)
                self.mailbox.send(source, KvStored(job=job, tiers=tiers))
            case KvPrefetch(job=job, keys=keys):
                self.leases.add(job)
                offsets = longs(self.stored.get(key, -1) for key in _keys(keys))
                self.mailbox.send(source, KvReady(job=job, arena_generation=self.generation, offsets=offsets))
            case KvRelease(jobs=jobs):
                self.leases -= set(jobs)
            case ArenaReleased(arena_generation=generation):
                self.allocated = generation == self.generation - 1
            case _:
                raise AssertionError(message)


def _keys(joined: bytes) -> list[bytes]:
    return [joined[i : i + 32] for i in range(0, len(joined), 32)]


class FakeDetokenizer(Actor):
    """Letters for tokens, stop strings across token borders, frames to the client."""

    kind = "detokenizer"

    def __init__(self) -> None:
        self.open: dict[int, Open] = {}
        self.ids: dict[int, list[int]] = {}
        self.stopped: dict[int, int] = {}

    async def start(self, mailbox: Mailbox) -> None:
        self.mailbox = mailbox

    def on_restart(self, source: str) -> None:
        if source == SCHEDULER:
            for opened in self.open.values():
                self._frame(opened, error=503)
            self.open.clear()

    def receive(self, source: str, message: Message, trace: str) -> None:
        match message:
            case Open(seq=seq):
                self.open[seq], self.ids[seq] = message, []
                self._frame(message, accepted=True)
                self._add(source, seq, 0, list(message.tokens))
            case Tokens():
                ids = iter(message.ids)
                for seq, first, size in zip(message.seqs, message.first, message.counts, strict=True):
                    self._add(source, seq, first, [next(ids) for _ in range(size)])
            case Close(seq=seq, reason="moved"):
                self.open.pop(seq, None)
            case Close(seq=seq):
                self._close(source, message)
            case _:
                raise AssertionError(message)

    def _add(self, source: str, seq: int, first: int, ids: list[int]) -> None:
        opened, known = self.open[seq], self.ids[seq]
        assert first == len(known), "tokens in order, none twice"
        known += ids
        if seq in self.stopped or not ids:
            return
        if index := next((text_of(known).find(s) + len(s) for s in opened.stop if s in text_of(known)), 0):
            self.stopped[seq] = index
            self.mailbox.send(source, StopFound(seq=seq, index=index))
        end = self.stopped.get(seq, len(known))
        self._frame(opened, first=first, text=text_of(known[first:end]))

    def _close(self, source: str, close: Close) -> None:
        opened, stop = self.open.pop(close.seq), self.stopped.get(close.seq)
        stopped = stop is not None and stop <= close.final and not close.code
        index, reason = (stop, "stop") if stopped and stop is not None else (close.final, close.reason)
        self._frame(opened, done=index, reason=reason, code=close.code)
        self.mailbox.send(source, Ended(seq=close.seq, index=index, reason=reason))

    def _frame(self, opened: Open, **body: object) -> None:
        self.mailbox.bus.publish(opened.inbox, json.dumps({"choice": opened.choice, **body}).encode())
