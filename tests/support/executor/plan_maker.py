"""Drives a Backend as a scheduler would: opens slots, hands out blocks, makes plans. For tests of engines."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

from services.executor.engine import Backend, StepOutput
from shared.kv_blocks import blocks_for
from shared.messages import AT_DEVICE, Sampling, SlotOpen, StepPlan, ints

GREEDY = Sampling(temperature=0.0)


@dataclass
class Row:
    """A forward row, and the slots its last position samples for."""

    slot: int
    start: int
    count: int
    from_device: bool = False
    feeds: tuple[int, ...] = ()


@dataclass
class Drafted:
    """The ids of each slot in steps with drafts, their log probabilities, and how the drafts went."""

    ids: dict[int, list[int]]
    logprobs: dict[int, list[float]] = field(default_factory=dict)
    kept: dict[int, int] = field(default_factory=dict)
    refused: dict[int, int] = field(default_factory=dict)
    steps: int = 0


@dataclass
class PlanMaker:
    """Gives blocks in shuffled order, so that no test passes by contiguous luck."""

    backend: Backend
    seed: int = 0
    tables: dict[int, list[int]] = field(default_factory=dict)
    step: int = 0
    _untold: dict[int, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.free = list(range(self.backend.info.blocks))
        random.Random(self.seed).shuffle(self.free)

    def open(self, slot: int, tokens: list[int], sampling: Sampling = GREEDY, **more: object) -> None:
        """Open a slot; a second opening starts it again with new blocks."""
        self.tables[slot] = []
        opened = SlotOpen(
            **{"slot": slot, "generation": 0, "seq": slot, "prompt_tokens": len(tokens), **more},
            sampling=sampling,
            tokens=ints(tokens),
        )
        self.backend.open_slot(opened)

    def plan(self, rows: list[Row], copies: tuple[tuple[int, int], ...] = ()) -> StepPlan:
        """A plan for `rows`, with the blocks that they need."""
        self.step += 1
        if len({row.slot for row in rows}) < len(rows):
            raise ValueError("a slot has one row in a plan")
        deltas = {row.slot: self._grow(row.slot, row.start + row.count) for row in rows}
        for slot, extra in self._untold.items():
            deltas[slot] = (0, extra)
        self._untold.clear()
        feeds = [(i, slot) for i, row in enumerate(rows) for slot in row.feeds]
        return StepPlan(
            exec_epoch=1,
            step=self.step,
            mode="single",
            micro_batch=0,
            slots=ints(row.slot for row in rows),
            starts=ints(row.start for row in rows),
            counts=ints(row.count for row in rows),
            from_device=ints(int(row.from_device) for row in rows),
            sample_rows=ints(i for i, _ in feeds),
            sample_slots=ints(slot for _, slot in feeds),
            table_slots=ints(slot for slot, (_, blocks) in deltas.items() if blocks),
            table_first=ints(first for first, blocks in deltas.values() if blocks),
            table_counts=ints(len(blocks) for _, blocks in deltas.values() if blocks),
            table_blocks=ints(block for _, blocks in deltas.values() for block in blocks),
            copy_from=ints(source for source, _ in copies),
            copy_to=ints(target for _, target in copies),
        )

    def set_table(self, slot: int, blocks: list[int]) -> None:
        """Give a slot the table of a fork; the next plan has it for the backend."""
        self.tables[slot] = list(blocks)
        self._untold[slot] = list(blocks)

    def run(self, rows: list[Row], copies: tuple[tuple[int, int], ...] = ()) -> StepOutput:
        """One step, forward and sample."""
        plan = self.plan(rows, copies)
        return self.backend.sample(self.backend.forward(plan))

    def prefill(self, prompts: dict[int, int]) -> StepOutput:
        """Whole prompts by slot -> length, one step, each sampling one token."""
        return self.run([Row(slot, 0, count, feeds=(slot,)) for slot, count in prompts.items()])

    def decode(self, lengths: dict[int, int], steps: int) -> dict[int, list[int]]:
        """Device-fed steps of slots -> tokens so far (the last one sampled): the ids of each slot."""
        out: dict[int, list[int]] = {slot: [] for slot in lengths}
        for done in range(steps):
            rows = [Row(s, length - 1 + done, 1, True, (s,)) for s, length in lengths.items()]
            for slot, token in zip(lengths, self.run(rows).ids, strict=True):
                out[slot].append(token)
        return out

    def decode_with_drafts(self, lengths: dict[int, int], tokens: int, most: int) -> Drafted:
        """Steps with up to `most` drafts a row until each slot has `tokens` more tokens, or has ended."""
        found, at = Drafted({slot: [] for slot in lengths}), dict(lengths)
        ends = {slot: length + tokens for slot, length in lengths.items()}
        while at:
            rows = [
                Row(s, length - 1, min(1 + most, ends[s] - length), True, (s,)) for s, length in at.items()
            ]
            plan = self.plan(rows)
            plan = replace(plan, from_device=ints([AT_DEVICE] * len(rows)))
            output, first = self.backend.sample(self.backend.forward(plan)), 0
            counts = output.counts or ints([1]) * len(rows)
            drafted = output.drafted or ints([0]) * len(rows)
            for row, slot in enumerate(list(at)):
                run = slice(first, first + counts[row])
                found.ids[slot] += output.ids[run]
                found.logprobs.setdefault(slot, []).extend(output.logprobs[run])
                found.kept[slot] = found.kept.get(slot, 0) + counts[row] - 1
                found.refused[slot] = found.refused.get(slot, 0) + drafted[row] - counts[row] + 1
                first, at[slot] = first + counts[row], at[slot] + counts[row]
                if output.done[row] or at[slot] >= ends[slot]:
                    del at[slot]
            found.steps += 1
        return found

    def _grow(self, slot: int, tokens: int) -> tuple[int, list[int]]:
        table = self.tables[slot]
        first = len(table)
        table += [self.free.pop() for _ in range(blocks_for(tokens, self.backend.info.block_tokens) - first)]
        return first, table[first:]
