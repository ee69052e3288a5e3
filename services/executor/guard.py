"""What a plan, a slot or a copy must not ask of an engine: slots that are not open, blocks, positions and
tokens that do not exist. On a device such an index kills the process or writes into another sequence's
memory; here it costs the step, or the copy. Checked on the event loop, while the device computes.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from services.executor.backend import BackendInfo
from shared.messages import Ints, KvCopy, SlotOpen, StepPlan


def plan_flaw(plan: StepPlan, info: BackendInfo, open_slots: set[int]) -> str:
    """Why the plan cannot run on this engine with these slots open; empty when it can."""
    slots = {*plan.slots, *plan.table_slots}
    if plan.sample_slots != plan.slots:  # as in a step of decodes
        slots.update(plan.sample_slots)
    if not slots <= open_slots:
        return f"the plan names slot {min(slots - open_slots)}, which is not open"
    for blocks in (plan.table_blocks, plan.copy_from, plan.copy_to):
        if blocks and max(blocks) >= info.blocks:
            return f"the plan names block {max(blocks)} of {info.blocks}"
    if (end := _farthest(plan.starts, plan.counts)) > info.max_context:
        return f"the plan computes token {end} of a context of {info.max_context}"
    if (end := _farthest(plan.table_first, plan.table_counts)) > -(-info.max_context // info.block_tokens):
        return f"the plan sets entry {end} of a block table, more than a context has"
    return ""


def open_flaw(opened: SlotOpen, info: BackendInfo) -> str:
    """Why the slot cannot be opened on this engine; empty when it can."""
    if opened.slot >= info.slots:
        return f"slot {opened.slot} is not one of {info.slots} slots"
    if not opened.tokens:
        return f"slot {opened.slot} is opened without a token"
    if len(opened.tokens) > info.max_context:
        return f"slot {opened.slot} has {len(opened.tokens)} tokens in a context of {info.max_context}"
    for ids in (opened.tokens, opened.sampling.bias_ids):
        if ids and int(_numbers(ids).max()) >= info.vocab:
            return f"slot {opened.slot} has a token outside the vocabulary of {info.vocab}"
    return ""


def copy_flaw(copy: KvCopy, info: BackendInfo) -> str:
    """Why the blocks cannot be copied, whatever the arena; empty when they can."""
    if len(copy.blocks) != len(copy.offsets):
        return f"it has {len(copy.blocks)} blocks and {len(copy.offsets)} offsets"
    if not info.bytes_per_block or copy.block_bytes != info.bytes_per_block:
        return f"its blocks have {copy.block_bytes} bytes, those of this engine {info.bytes_per_block}"
    if copy.blocks and not 0 <= min(copy.blocks) <= max(copy.blocks) < info.blocks:
        return f"it names a block that is not one of {info.blocks}"
    return ""


def _farthest(first: Ints, counts: Ints) -> int:
    """The largest end of a range. No number is negative, so no sum of two is over 32 bits."""
    return int((_numbers(first) + _numbers(counts)).max()) if first else 0


def _numbers(column: Ints) -> NDArray[np.uint32]:
    return np.frombuffer(column, dtype=np.uint32)
