"""Checks the reuse of one engine's blocks and slots by the scheduler.

A block that a slot will write must be in no other table, and no step or copy in flight may name it; a load
writes blocks of no table; a slot is opened again only when every step that names it has come back. Raises
FenceBroken.
"""

from __future__ import annotations

from collections import deque

from shared.messages import KvCopy, SlotOpen, StepPlan


class FenceBroken(AssertionError):
    """Memory was given out while it was in use: a bug of the scheduler."""


class Fences:
    """Tables as an executor holds them, and the steps whose results are not back."""

    def __init__(self, blocks: int, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._holders = [0] * blocks  # tables that hold the block
        self._named = [0] * blocks  # last step in flight that named it when its slot was closed
        self._tables: dict[int, list[int]] = {}
        self._in_flight: deque[StepPlan] = deque()
        self._acknowledged = 0
        self._copies: dict[int, KvCopy] = {}
        self._stored: dict[int, int] = {}  # block -> copies in flight that read it
        self._loaded: set[int] = set()  # blocks that copies in flight write

    def opened(self, opened: SlotOpen) -> None:
        """SlotOpen leaves the scheduler."""
        if opened.slot in self._tables or self._last_naming(opened.slot):
            raise FenceBroken(f"slot {opened.slot} is opened while a step may still use it")
        self._tables[opened.slot] = []

    def closed(self, slot: int) -> None:
        """SlotClose leaves the scheduler."""
        last = self._last_naming(slot)
        for block in self._tables.pop(slot):
            self._holders[block] -= 1
            self._named[block] = max(self._named[block], last)

    def planned(self, plan: StepPlan) -> None:
        """StepPlan leaves the scheduler."""
        at = 0
        for slot, first, count in zip(plan.table_slots, plan.table_first, plan.table_counts, strict=True):
            self._extend(plan, slot, first, plan.table_blocks[at : at + count].tolist())
            at += count
        self._in_flight.append(plan)

    def answered(self, step: int) -> None:
        """A StepResult reaches the scheduler."""
        self._acknowledged = step
        while self._in_flight and self._in_flight[0].step <= step:
            self._in_flight.popleft()

    def copying(self, copy: KvCopy) -> None:
        """KvCopy leaves the scheduler."""
        if copy.job in self._copies:
            raise FenceBroken(f"job {copy.job} is copied twice")
        self._copies[copy.job] = copy
        for block in copy.blocks:
            if block in self._loaded:
                raise FenceBroken(f"job {copy.job} copies block {block}, which a load still fills")
            if copy.to_arena:
                self._stored[block] = self._stored.get(block, 0) + 1
                continue
            if self._holders[block] or self._named[block] > self._acknowledged or block in self._stored:
                raise FenceBroken(f"job {copy.job} loads into block {block}, which is still in use")
            self._loaded.add(block)

    def copied(self, job: int) -> None:
        """KvCopied reaches the scheduler."""
        copy = self._copies.pop(job)
        if not copy.to_arena:
            self._loaded.difference_update(copy.blocks)
            return
        for block in copy.blocks:
            self._stored[block] -= 1
            if not self._stored[block]:
                del self._stored[block]

    def _extend(self, plan: StepPlan, slot: int, first: int, blocks: list[int]) -> None:
        table = self._tables[slot]
        if first != len(table):
            raise FenceBroken(f"step {plan.step} leaves a hole in the table of slot {slot}")
        written = plan.starts[plan.slots.index(slot)] // self._block_tokens  # those before are read only
        for index, block in enumerate(blocks, first):
            if index >= written and (self._holders[block] or self._named[block] > self._acknowledged):
                raise FenceBroken(f"step {plan.step} writes block {block}, which is still in use")
            if block in self._loaded or (index >= written and block in self._stored):
                raise FenceBroken(f"step {plan.step} takes block {block}, which a copy still uses")
            self._holders[block] += 1
            table.append(block)

    def _last_naming(self, slot: int) -> int:
        """The last step in flight that names a slot, or 0."""
        for plan in reversed(self._in_flight):
            if slot in plan.slots or slot in plan.sample_slots:
                return plan.step
        return 0
