"""An engine that takes plans literally and checks every word: blocks hold token ids instead of KV.

A row may only compute on a prefix that is really in the blocks of its table; a sampled token is a
hash of that whole prefix, so any block that is shared, copied, reused or fenced wrongly changes the
tokens, and `expected_tokens` computes from the prompt alone what they must be.

`copy` moves token ids between blocks and the arena, so that the same holds of blocks that went down to a tier
and came back. The fences of copies are asserted in tests/support/scheduler/tier_side.py.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass, field

from support.scheduler.fake_tier import WRONG, Arena

from shared.messages import (
    AT_DEVICE,
    ExecHello,
    KvCopied,
    KvCopy,
    SlotClose,
    SlotOpen,
    StepPlan,
    StepResult,
    floats,
    ints,
)

VOCAB, STOP_ID = 1000, 2


def next_token(prefix: list[int], seed: int, stops: bool, adapter: str = "") -> int:
    """The token after `prefix`; about one in 12 is the stop id where `stops`."""
    facts = (prefix, seed, adapter) if adapter else (prefix, seed)
    digest = hashlib.blake2b(repr(facts).encode(), digest_size=4).digest()
    value = int.from_bytes(digest, "little")
    if stops and value % 12 == 0:
        return STOP_ID
    return 3 + value % (VOCAB - 3)


def vector_of(prefix: list[int]) -> bytes:
    """Four finite numbers that depend on the whole prefix."""
    digest = hashlib.blake2b(repr(prefix).encode(), digest_size=4).digest()
    return floats(byte - 100.0 for byte in digest).tobytes()


def mark_of(adapter: str) -> int:
    """What an adapter makes of a token's KV: other KV than that of the model, or of another adapter."""
    return int.from_bytes(hashlib.blake2b(adapter.encode(), digest_size=3).digest()) << 10 if adapter else 0


def expected_tokens(
    prompt: list[int], seed: int, max_tokens: int, stops: bool, adapter: str = ""
) -> list[int]:
    """What a sequence must generate, at any events around it."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + max_tokens:
        tokens.append(next_token(tokens, seed, stops, adapter))
        if stops and tokens[-1] == STOP_ID:
            break
    return tokens[len(prompt) :]


@dataclass
class _Slot:
    opened: SlotOpen
    table: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    done: bool = False
    adapter: str = ""  # digest


class PagedEngine:
    """Runs SlotOpen, StepPlan and SlotClose in order; `run` returns the step's result."""

    def __init__(self, hello: ExecHello) -> None:
        self.hello = hello
        self.blocks: list[list[int]] = [[-1] * hello.block_tokens for _ in range(hello.blocks)]
        self.slots: dict[int, _Slot] = {}
        self.step = 0
        self.fails = False  # the next step: it leaves garbage in every block that it was to write
        self.failed = False  # a step has: steps planned before its result have wrong places
        self.copy_fails = False  # the next copy: it stops half way
        self.copy_us = 1  # of a block
        self.arena: Arena | None = None
        self.dice = random.Random(7)
        self.drafted = self.accepted = 0
        self.adapters: dict[int, str] = {}  # digests by place

    def open(self, opened: SlotOpen) -> None:
        assert opened.slot not in self.slots, "a slot is opened while it is open"
        adapter = self.adapters[opened.adapter] if opened.adapter else ""
        self.slots[opened.slot] = _Slot(opened, tokens=list(opened.tokens), adapter=adapter)

    def load(self, place: int, digest: str) -> None:
        """Put an adapter into a place."""
        assert 0 < place <= self.hello.adapter_places
        assert place not in {slot.opened.adapter for slot in self.slots.values()}, "a place in use is loaded"
        self.adapters[place] = digest

    def close(self, closed: SlotClose) -> None:
        assert closed.last_step <= self.step, "a slot is closed before its last step has run"
        assert self.slots.pop(closed.slot).opened.generation == closed.generation

    def run(self, plan: StepPlan) -> StepResult:
        assert plan.step == self.step + 1
        self.step = plan.step
        self._update_tables(plan)
        for source, target in zip(plan.copy_from, plan.copy_to, strict=True):
            self.blocks[target] = list(self.blocks[source])
        if self.fails:
            return self._fail(plan)
        prefixes = [self._forward(plan, row) for row in range(len(plan.slots))]
        tokens = sum(plan.counts)
        assert tokens <= self.hello.max_step_tokens
        ids, done, vectors, counts, drafted = ints(), ints(), [], ints(), ints()
        for row, slot_id in zip(plan.sample_rows, plan.sample_slots, strict=True):
            slot, before = self.slots[slot_id], len(ids)
            if slot.opened.pooling:
                vectors.append((len(done), vector_of(prefixes[row][0])))
            for prefix in prefixes[row]:  # the last known token, then each draft, up to the first wrong one
                if len(ids) > before and slot.tokens != prefix:
                    break
                token, state = self._sample(slot, prefix)
                ids.append(token)
                if state:
                    break
            done.append(state)
            counts.append(len(ids) - before)
            drafted.append(len(prefixes[row]) - 1)
        self.drafted += sum(drafted)
        self.accepted += len(ids) - len(done)
        if AT_DEVICE not in plan.from_device:
            counts, drafted = ints(), ints()
        return StepResult(
            exec_epoch=plan.exec_epoch,
            step=plan.step,
            ids=ids,
            done=done,
            vectors=tuple(vectors),
            counts=counts,
            drafted=drafted,
        )

    def copy(self, copy: KvCopy) -> KvCopied:
        """Move blocks now. What is not `ok` has moved nothing, or half of it."""
        if self.arena is None or self.arena.generation != copy.arena_generation:
            return KvCopied(job=copy.job, status="no_arena" if self.arena is None else "stale_arena")
        assert copy.after_step <= self.step, "a copy is made before the step that it comes after"
        failed, self.copy_fails = self.copy_fails, False
        count = len(copy.blocks) // 2 if failed else len(copy.blocks)
        for block, offset in zip(copy.blocks[:count], copy.offsets[:count], strict=True):
            assert offset % copy.block_bytes == 0
            if copy.to_arena:
                self.arena.ranges[offset] = list(self.blocks[block])
            else:
                self.blocks[block] = list(self.arena.ranges.get(offset, [WRONG]))
                self.blocks[block] += [WRONG] * (self.hello.block_tokens - len(self.blocks[block]))
        status, size = "failed" if failed else "ok", count * copy.block_bytes
        return KvCopied(job=copy.job, status=status, bytes=size, took_us=count * self.copy_us)

    def _fail(self, plan: StepPlan) -> StepResult:
        self.fails, self.failed = False, True
        size, rows = self.hello.block_tokens, len(plan.sample_rows)
        written = list(plan.copy_to)
        for slot, start, count in zip(plan.slots, plan.starts, plan.counts, strict=True):
            written += self.slots[slot].table[start // size : (start + count - 1) // size + 1]
        for block in written:
            self.blocks[block] = [-1] * size
        nothing = {"ids": ints([-1] * rows), "done": ints([0] * rows)}
        return StepResult(exec_epoch=plan.exec_epoch, step=plan.step, error="RuntimeError: boom", **nothing)

    def _update_tables(self, plan: StepPlan) -> None:
        at = 0
        columns = zip(plan.table_slots, plan.table_first, plan.table_counts, strict=True)
        for slot_id, first, count in columns:
            table = self.slots[slot_id].table
            assert first == len(table), "a table delta leaves a hole"
            table.extend(plan.table_blocks[at : at + count])
            at += count

    def _forward(self, plan: StepPlan, row: int) -> list[list[int]]:
        """The prefixes after which this row samples: one, and one more for each draft."""
        slot = self.slots[plan.slots[row]]
        start, count = plan.starts[row], plan.counts[row]
        if slot.done:
            return [[]]
        if plan.from_device[row] == AT_DEVICE:
            start, most = len(slot.tokens) - 1, start
            assert most >= start, "the slot is longer than the plan allows"
            assert most + count < slot.opened.max_length, "a draft beyond the sequence's end"
            new = [slot.tokens[-1], *self._drafts(slot, count - 1)]
            count = len(new)
        elif plan.from_device[row]:
            assert count == 1
            assert self.failed or start == len(slot.tokens) - 1, "the place of a decode is not its slot's"
            new = [slot.tokens[-1]]
        else:
            new = list(slot.opened.tokens[start : start + count])
            assert len(new) == count, "a host-fed row reaches beyond the host's tokens"
        size = self.hello.block_tokens
        for offset, token in enumerate(new):
            kv = token ^ mark_of(slot.adapter)
            self.blocks[slot.table[(start + offset) // size]][(start + offset) % size] = kv
        kvs = [self.blocks[slot.table[i // size]][i % size] for i in range(start + count)]
        whole = [kv ^ mark_of(slot.adapter) for kv in kvs]
        drafts = count - 1 if plan.from_device[row] == AT_DEVICE else 0
        return [whole[: start + count - drafts + nth] for nth in range(drafts + 1)]

    def _drafts(self, slot: _Slot, most: int) -> list[int]:
        """Up to `most` tokens that may follow: right ones, and at any place a wrong one."""
        known = list(slot.tokens)
        for _ in range(self.dice.randint(0, most)):
            right = self.dice.random() < 0.7
            token = next_token(known, slot.opened.seed, STOP_ID in slot.opened.stop_ids, slot.adapter)
            known.append(token if right else self.dice.randrange(VOCAB))
        return known[len(slot.tokens) :]

    def _sample(self, slot: _Slot, prefix: list[int]) -> tuple[int, int]:
        if slot.done:
            return -1, 2
        stops = STOP_ID in slot.opened.stop_ids
        token = next_token(prefix, slot.opened.seed, stops, slot.adapter)
        slot.tokens.append(token)
        slot.done = (stops and token == STOP_ID) or len(prefix) + 1 >= slot.opened.max_length
        return token, int(slot.done)
