"""A virtual executor. Steps run in order, so all times of a step are known when its plan is sent:

    plan ──hop──▶ stage 1 ▶ stage 2 ▶ ... ▶ [host: logits processors] ──hop──▶ result
    copy ──hop──▶ a queue down, a queue up (copies.py) ──hop──▶ copied

A step takes T / stages in each stage, different steps are in different stages at once, and the device runs
on while the host works. Tokens are a fixed id until the request's real length is reached, then its stop id.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

from loadtest.simulator.copies import Copies, Link
from loadtest.simulator.fences import FenceBroken, Fences
from loadtest.simulator.hops import Hop, Way
from loadtest.simulator.requests import MODEL, STOP_ID, TEXT_ID
from shared.messages import ExecHello, Ints, KvCopied, KvCopy, SlotClose, SlotOpen, StepPlan, StepResult, ints
from shared.step_model import StepModel, shape_of, shape_of_rows


@dataclass(frozen=True, slots=True)
class Machine:
    """One executor of a virtual world: its speed, its memory and the way to it."""

    model: StepModel
    blocks: int = 50_000
    block_tokens: int = 16
    slots: int = 256
    max_step_tokens: int = 8_192
    max_context: int = 131_072
    stages: int = 1
    hop: Hop = field(default_factory=Hop)
    block_bytes: int = 0  # 0: no copies
    link: Link = field(default_factory=Link)
    host_id: str = "virtual"


@dataclass(slots=True)
class Totals:
    """What an engine has done."""

    steps: int = 0
    rows: int = 0
    tokens: int = 0
    prefill_tokens: int = 0
    recomputed_tokens: int = 0  # computed before, in a slot that was taken away
    recompute_us: int = 0  # by which steps were longer for that
    wasted_rows: int = 0  # of slots that had ended
    resumed: int = 0  # sequences opened again
    busy_us: int = 0  # of all stages
    idle_us: int = 0  # of all stages, while any request was live
    host_us: int = 0
    modes: dict[str, int] = field(default_factory=dict)  # overlap mode -> steps


@dataclass(slots=True)
class _Slot:
    seq: int
    left: int  # tokens until its end
    stop: bool  # the last one is a stop id
    host_fed: bool
    computed: int = 0  # tokens whose KV its chunks have made
    sampled: int = 0
    fed_us: int = 0  # its last sample is there, on the device or from the host


class VirtualEngine:
    """Takes what an executor takes; `run` answers a plan with its result and when that arrives."""

    def __init__(self, name: str, machine: Machine, seed: int, output_tokens: Callable[[int], int]) -> None:
        self.totals = Totals()
        self.work_since_us = 0  # any request has been live since then
        self.in_flight = 0
        self.log = array("q")  # (begin_us, end_us, forward_us) of each step
        self._answered_us = array("q")  # when the scheduler has the result of each
        self.machine = machine
        self.hello = _hello(name, machine)
        self._output_tokens = output_tokens  # of a sequence: its real length
        self._slots: dict[int, _Slot] = {}
        self._computed: dict[int, int] = {}  # sequence -> tokens computed in slots that it has left
        self._fences = Fences(machine.blocks, machine.block_tokens)
        rng = random.Random(seed)
        self._inbound, self._outbound = Way(machine.hop, rng), Way(machine.hop, rng)
        self.copies = Copies(machine.link)
        self._copied = {True: Way(machine.hop, rng), False: Way(machine.hop, rng)}
        self._free_us = [0] * machine.stages
        self._host_free_us = 0
        self._sent_us = 0

    def open(self, opened: SlotOpen) -> None:
        """A slot for a sequence; one that was open before goes on where its record ends."""
        self._fences.opened(opened)
        generated = len(opened.tokens) - opened.prompt_tokens
        room, output = opened.max_length - opened.prompt_tokens, self._output_tokens(opened.seq)
        self._slots[opened.slot] = _Slot(
            seq=opened.seq,
            left=min(room, output) - generated,
            stop=output <= room and STOP_ID in opened.stop_ids,
            host_fed=bool(opened.processors),
            computed=opened.computed,
        )
        self.totals.resumed += opened.seq in self._computed

    def close(self, closed: SlotClose) -> None:
        """The slot is given back."""
        self._fences.closed(closed.slot)
        slot = self._slots.pop(closed.slot)
        computed = slot.computed + max(slot.sampled - 1, 0)
        self._computed[slot.seq] = max(computed, self._computed.get(slot.seq, 0))

    def answered(self, step: int) -> None:
        """The result of a step has reached the scheduler."""
        self._fences.answered(step)
        self.in_flight -= 1

    def copy(self, copy: KvCopy, sent_us: int) -> tuple[KvCopied, int]:
        """The answer to a copy that is sent now, and when it reaches the scheduler."""
        self._fences.copying(copy)
        after_us = self.log[3 * copy.after_step - 2] if copy.after_step else 0  # the end of that step
        done, left_us = self.copies.run(copy, self._inbound.arrival_us(sent_us), after_us)
        known_us = self._answered_us[copy.after_step - 1] if copy.after_step else 0  # one stream, in order
        return done, max(self._copied[copy.to_arena].arrival_us(left_us), known_us)

    def copied(self, job: int) -> None:
        """The answer to a copy has reached the scheduler."""
        self._fences.copied(job)

    def run(self, plan: StepPlan, sent_us: int) -> tuple[StepResult, int]:
        """The result of a plan that is sent now, and when it reaches the scheduler."""
        self._fences.planned(plan)
        self.in_flight += 1
        arrived_us = self._inbound.arrival_us(sent_us)
        shape = shape_of(plan)
        forward_us = self.machine.model.step_us(shape)
        if 0 in plan.from_device:
            self._note_chunks(plan)
        begin_us, end_us, wait_us = self._compute(max(arrived_us, self._fed_us(plan, sent_us)), forward_us)
        ids, done, host_rows = self._sample(plan, end_us)
        self._sent_us, host_us = max(self._sent_us, end_us), 0
        if host_rows:
            host_us = self._on_host(plan, host_rows, end_us)
        self.log.extend((begin_us, end_us, forward_us))
        totals = self.totals
        totals.steps += 1
        totals.modes[plan.mode] = totals.modes.get(plan.mode, 0) + 1
        totals.rows += shape.rows
        totals.tokens += shape.tokens
        result = StepResult(
            exec_epoch=plan.exec_epoch,
            step=plan.step,
            ids=ids,
            done=done,
            start_wall_us=begin_us,
            end_wall_us=self._sent_us,  # of the host lane's work, too, as in a real executor
            forward_us=forward_us,
            wait_us=wait_us,
            queued_us=begin_us - arrived_us,
            host_us=host_us,
        )
        self._answered_us.append(self._outbound.arrival_us(self._sent_us))
        return result, self._answered_us[-1]

    def _fed_us(self, plan: StepPlan, sent_us: int) -> int:
        """When the last input of a step is there. In one stage the order of steps sees to it."""
        fed_us = 0
        if self.machine.stages == 1 and not self._host_free_us:
            return fed_us
        for slot_id, device in zip(plan.slots, plan.from_device, strict=True):
            slot = self._slots[slot_id]
            if device and slot.host_fed and slot.fed_us > sent_us:
                raise FenceBroken(f"step {plan.step} plans a host-fed row before the host has answered")
            if device and slot.fed_us > fed_us:
                fed_us = slot.fed_us
        return fed_us

    def _compute(self, ready_us: int, forward_us: int) -> tuple[int, int, int]:
        """Run through the stages: (begin, end, how long the first stage had nothing to do)."""
        stages, totals = len(self._free_us), self.totals
        begin_us, wait_us, at_us, done_us = 0, 0, ready_us, 0
        for stage, free_us in enumerate(self._free_us):
            start_us = max(at_us, free_us)
            totals.idle_us += max(start_us - max(free_us, self.work_since_us), 0)
            if stage == 0:
                begin_us, wait_us = start_us, start_us - free_us
            part_us = forward_us * (stage + 1) // stages - done_us
            done_us += part_us
            self._free_us[stage] = at_us = start_us + part_us
        totals.busy_us += forward_us
        return begin_us, at_us, wait_us

    def _sample(self, plan: StepPlan, end_us: int) -> tuple[Ints, Ints, int]:
        count = len(plan.sample_slots)
        ids, done, host_rows = ints([TEXT_ID]) * count, ints([0]) * count, 0
        slots = self._slots
        for index, slot_id in enumerate(plan.sample_slots):
            slot = slots[slot_id]
            if slot.left <= 0:
                ids[index], done[index] = -1, 2
                self.totals.wasted_rows += 1
                continue
            slot.left -= 1
            slot.sampled += 1
            slot.fed_us = end_us
            host_rows += slot.host_fed
            if not slot.left:
                done[index] = 1
                if slot.stop:
                    ids[index] = STOP_ID
        return ids, done, host_rows

    def _on_host(self, plan: StepPlan, rows: int, end_us: int) -> int:
        """The host lane: it works after the forward, on one step at a time."""
        took_us = rows * self.machine.model.host_row_ns // 1_000
        self._host_free_us = self._sent_us = max(end_us, self._host_free_us) + took_us
        for slot_id in plan.sample_slots:
            self._slots[slot_id].fed_us = self._host_free_us
        self.totals.host_us += took_us
        return took_us

    def _note_chunks(self, plan: StepPlan) -> None:
        """Count prompt tokens, and those that were computed before; what these cost is what the step would
        have been shorter without them."""
        totals, useful, again = self.totals, list[tuple[int, int]](), 0
        columns = zip(plan.slots, plan.starts, plan.counts, plan.from_device, strict=True)
        for slot_id, start, count, device in columns:
            repeated = 0
            if not device:
                slot = self._slots[slot_id]
                slot.computed = start + count
                totals.prefill_tokens += count
                repeated = max(min(self._computed.get(slot.seq, 0), start + count) - start, 0)
            again += repeated
            if repeated < count:
                useful.append((start + repeated, count - repeated))
        totals.recomputed_tokens += again
        if again:
            step_us = self.machine.model.step_us
            without_us = step_us(shape_of_rows(useful)) if useful else 0
            totals.recompute_us += step_us(shape_of(plan)) - without_us


def _hello(name: str, machine: Machine) -> ExecHello:
    return ExecHello(
        executor=name,
        exec_epoch=1,
        host_id=machine.host_id,
        model=MODEL,
        fingerprint="virtual",
        vocab_digest="virtual",
        vocab=2**31 - 1,  # a log has ids of any model
        blocks=machine.blocks,
        block_tokens=machine.block_tokens,
        slots=machine.slots,
        max_step_tokens=machine.max_step_tokens,
        max_context=machine.max_context,
        backend="virtual",
        stages=machine.stages,
        bytes_per_block=machine.block_bytes,
    )
