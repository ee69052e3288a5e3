"""The fake executor of the wire test: blocks that hold token ids in place of keys and values."""

from __future__ import annotations

from dataclasses import dataclass, field

from support.wire.fakes import BLOCK, SCHEDULER, Arena, next_token

from shared.actor.mailbox import Mailbox
from shared.actor.membership import Peer
from shared.actor.runtime import Actor
from shared.messages import (
    ArenaReleased,
    ExecHello,
    ExecReset,
    ExecWelcome,
    GrammarFailed,
    GrammarReady,
    KvCopied,
    KvCopy,
    Message,
    SlotClose,
    SlotOpen,
    StepPlan,
    StepResult,
    ints,
)


@dataclass(slots=True)
class FakeSlot:
    """A slot's record and block table (entry -> block)."""

    opened: SlotOpen
    tokens: list[int]
    table: dict[int, int] = field(default_factory=dict)


class FakeExecutor(Actor):
    """Blocks that hold token ids in place of keys and values."""

    kind = "executor"

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.mapped = 0
        self.resets = 0
        self.die_at_step = 0
        self._clear()

    def _clear(self) -> None:
        self.slots: dict[int, FakeSlot] = {}
        self.blocks: dict[int, list[int]] = {}
        self.copied: set[int] = set()
        self.last_step = 0

    async def start(self, mailbox: Mailbox) -> None:
        self.mailbox = mailbox
        self.hello()

    def hello(self) -> None:
        self._clear()
        self.exec_epoch = self.mailbox.epoch + self.resets
        hello = ExecHello(
            executor="e0",
            exec_epoch=self.exec_epoch,
            host_id="host.a",
            model="m",
            fingerprint="f",
            vocab_digest="v",
            vocab=1000,
            blocks=64,
            block_tokens=BLOCK,
            slots=8,
            max_step_tokens=64,
            max_context=64,
        )
        self.mailbox.send(SCHEDULER, hello)

    def receive(self, source: str, message: Message, trace: str) -> None:
        match message:
            case SlotOpen(slot=slot):
                self.slots[slot] = FakeSlot(message, list(message.tokens))
                self._grammar(message)
            case SlotClose(slot=slot, generation=generation):
                assert self.slots.pop(slot).opened.generation == generation
            case StepPlan(exec_epoch=epoch, step=step) if epoch == self.exec_epoch and step > self.last_step:
                self._step(message)
            case KvCopy():
                self._copy(message)
            case ExecReset(exec_epoch=epoch) if epoch == self.exec_epoch:
                self.on_stream_lost(source)
            case ExecWelcome() | ExecReset() | StepPlan():
                pass
            case _:
                raise AssertionError(message)

    def on_stream_lost(self, source: str) -> None:
        self.resets += 1
        self.hello()

    def on_peer(self, peer: Peer) -> None:
        generation = peer.heartbeat.arena_generation
        if peer.heartbeat.kind == "kv_offload" and generation != self.mapped:
            if self.mapped:
                self.mailbox.send(SCHEDULER, ArenaReleased(executor="e0", arena_generation=self.mapped))
            self.mapped = generation

    def _grammar(self, opened: SlotOpen) -> None:
        slot, generation = opened.slot, opened.generation
        if opened.grammar == "bad":
            self.mailbox.send(
                SCHEDULER, GrammarFailed(slot=slot, generation=generation, message="unbalanced")
            )
        elif opened.grammar:
            self.mailbox.send(SCHEDULER, GrammarReady(slot=slot, generation=generation, compile_us=5))

    def _step(self, plan: StepPlan) -> None:
        if plan.step == self.die_at_step:
            raise RuntimeError("device lost")
        assert set(plan.wait_jobs) <= self.copied
        blocks = iter(plan.table_blocks)
        for slot, first, size in zip(plan.table_slots, plan.table_first, plan.table_counts, strict=True):
            self.slots[slot].table.update({first + i: next(blocks) for i in range(size)})
        for old, new in zip(plan.copy_from, plan.copy_to, strict=True):
            self.blocks[new] = list(self.blocks[old])
        rows = list(zip(plan.slots, plan.starts, plan.counts, plan.from_device, strict=True))
        for slot, start, size, _ in rows:
            for position in range(start, start + size):
                block = self.blocks.setdefault(self.slots[slot].table[position // BLOCK], [0] * BLOCK)
                block[position % BLOCK] = self.slots[slot].tokens[position]
        sampled = [self._sample(rows[r], s) for r, s in zip(plan.sample_rows, plan.sample_slots, strict=True)]
        self.last_step = plan.step
        done = ints([0] * len(sampled))
        self.mailbox.send(
            SCHEDULER,
            StepResult(exec_epoch=self.exec_epoch, step=plan.step, ids=ints(sampled), done=done),
        )

    def _sample(self, row: tuple[int, int, int, int], slot: int) -> int:
        table, length = self.slots[row[0]].table, row[1] + row[2]
        context = [self.blocks[table[p // BLOCK]][p % BLOCK] for p in range(length)]
        token = next_token(context, self.slots[slot].opened.seed)
        self.slots[slot].tokens.append(token)
        return token

    def _copy(self, copy: KvCopy) -> None:
        status = "ok" if copy.arena_generation == self.mapped else "stale_arena"
        if status == "ok":
            assert self.last_step >= copy.after_step
            for block, offset in zip(copy.blocks, copy.offsets, strict=True):
                if copy.to_arena:
                    self.arena[copy.arena_generation, offset] = list(self.blocks[block])
                else:
                    self.blocks[block] = list(self.arena[copy.arena_generation, offset])
            self.copied.add(copy.job)
        self.mailbox.send(SCHEDULER, KvCopied(job=copy.job, status=status))
