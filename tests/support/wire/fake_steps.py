"""The fake scheduler's half that works with the executor: slots, plans, results."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING

from support.wire.fake_state import FakeSequence, Tables
from support.wire.fakes import EXECUTOR

from shared.kv_blocks import choice_seed
from shared.messages import (
    ExecHello,
    ExecWelcome,
    GrammarFailed,
    GrammarReady,
    Message,
    SlotClose,
    SlotOpen,
    StepPlan,
    StepResult,
    Tokens,
    ints,
)

if TYPE_CHECKING:
    from support.wire.fake_scheduler import FakeScheduler


class Steps:
    """One step in flight on one executor."""

    def __init__(self, house: FakeScheduler) -> None:
        self.house = house
        self.tables = Tables()
        self.exec_epoch = 0
        self.step = 0
        self.in_flight: list[int] = []  # sequences sampled by the step in flight
        self._slots = count()

    def send(self, message: Message) -> None:
        self.house.mailbox.send(EXECUTOR, message)

    def open_slot(self, sequence: FakeSequence) -> None:
        request, sequence.fresh = sequence.request, True
        sequence.slot, sequence.generation = next(self._slots), sequence.generation + 1
        sequence.state = "grammar" if request.grammar else "running"
        self.send(
            SlotOpen(
                slot=sequence.slot,
                generation=sequence.generation,
                seq=sequence.seq,
                prompt_tokens=len(request.tokens),
                computed=sequence.computed,
                max_length=len(request.tokens) + request.max_tokens,
                seed=choice_seed(request.seed, sequence.choice),
                grammar=request.grammar,
                tokens=ints(sequence.tokens),
            ),
        )

    def free_slot(self, sequence: FakeSequence) -> None:
        self.send(SlotClose(slot=sequence.slot, generation=sequence.generation, last_step=self.step))
        self.tables.free(sequence)

    def _on_ExecHello(self, source: str, hello: ExecHello) -> None:
        restarted, self.exec_epoch, self.in_flight = self.exec_epoch != 0, hello.exec_epoch, []
        self.send(ExecWelcome(exec_epoch=hello.exec_epoch))
        for sequence in self.house.sequences.values():
            if restarted and sequence.state in ("grammar", "running"):
                self.tables.free(sequence)
                self.open_slot(sequence)
        self.plan()

    def _by_slot(self, message: GrammarReady | GrammarFailed) -> FakeSequence:
        found = (message.slot, message.generation)
        return next(s for s in self.house.sequences.values() if (s.slot, s.generation) == found)

    def _on_GrammarReady(self, source: str, ready: GrammarReady) -> None:
        self._by_slot(ready).state = "running"
        self.plan()

    def _on_GrammarFailed(self, source: str, failed: GrammarFailed) -> None:
        self.house.close(self._by_slot(failed), 0, "error", 400)

    def plan(self) -> None:
        """One row for each running sequence; choices that still share their prompt share its row."""
        running = [s for s in self.house.sequences.values() if s.state == "running"]
        if self.in_flight or not running or not self.exec_epoch:
            return
        self.step += 1
        rows: list[FakeSequence] = []
        sample_rows, copies = [], []
        for sequence in running:
            twin = next((r for r in rows if _same_prompt(r, sequence)), None)
            sample_rows.append(len(rows) if twin is None else rows.index(twin))
            if twin is None:
                copies += self.tables.make_room(sequence)
                rows.append(sequence)
        starts = [s.computed for s in rows]
        for row in rows:
            row.computed = len(row.tokens)
        for sequence, index in zip(running, sample_rows, strict=True):
            if sequence is not rows[index]:
                self.tables.share(sequence, rows[index])
        deltas = [s for s in running if s.sent_entries < len(s.table)]
        self.send(
            StepPlan(
                exec_epoch=self.exec_epoch,
                step=self.step,
                mode="single",
                micro_batch=0,
                slots=ints(s.slot for s in rows),
                starts=ints(starts),
                counts=ints(s.computed - start for s, start in zip(rows, starts, strict=True)),
                from_device=ints(0 if s.fresh else 1 for s in rows),
                sample_rows=ints(sample_rows),
                sample_slots=ints(s.slot for s in running),
                table_slots=ints(s.slot for s in deltas),
                table_first=ints(s.sent_entries for s in deltas),
                table_counts=ints(len(s.table) - s.sent_entries for s in deltas),
                table_blocks=ints(b for s in deltas for b in s.table[s.sent_entries :]),
                copy_from=ints(old for old, _ in copies),
                copy_to=ints(new for _, new in copies),
                wait_jobs=ints(job for s in running for job in s.wait_jobs),
            ),
        )
        for sequence in running:
            sequence.sent_entries, sequence.fresh, sequence.wait_jobs = len(sequence.table), False, []
        self.in_flight = [s.seq for s in running]

    def _on_StepResult(self, source: str, result: StepResult) -> None:
        if result.exec_epoch != self.exec_epoch or result.step != self.step or not self.in_flight:
            return
        sampled, self.in_flight = [self.house.sequences[seq] for seq in self.in_flight], []
        live = [(s, t) for s, t in zip(sampled, result.ids, strict=True) if s.state == "running"]
        for sequence, token in live:
            sequence.tokens.append(token)
        for shard in dict.fromkeys(s.shard for s, _ in live):
            mine = [(s, t) for s, t in live if s.shard == shard]
            tokens = Tokens(
                executor="e0",
                step=result.step,
                seqs=ints(s.seq for s, _ in mine),
                first=ints(len(s.generated) - 1 for s, _ in mine),
                counts=ints(1 for _ in mine),
                ids=ints(t for _, t in mine),
            )
            self.house.mailbox.send(shard, tokens)
        for sequence, _ in live:
            if len(sequence.generated) == sequence.request.max_tokens:
                self.house.close(sequence, len(sequence.generated), "length")
            elif len(sequence.generated) == self.house.pause_after.get(sequence.seq):
                self.house.tiers.pause(sequence)
        self.plan()


def _same_prompt(one: FakeSequence, other: FakeSequence) -> bool:
    return one.request is other.request and one.tokens == other.tokens and one.computed == other.computed == 0
