"""The scheduler's core among fakes: paged engines, a detokenizer, clients, and a clock."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from hypothesis import strategies as st
from paged_engine import STOP_ID, PagedEngine, expected_tokens

from services.scheduler import closing
from services.scheduler.core import Scheduler
from services.scheduler.events import Arrived, Event, PeerLost, PeerReady, Send, Ticked
from services.scheduler.policy import Policy
from services.scheduler.state import Limits
from shared.blocks import choice_seed
from shared.messages import (
    Accepted,
    Close,
    Ended,
    ExecHello,
    ExecReset,
    Open,
    Rejected,
    SlotClose,
    SlotOpen,
    StepPlan,
    StepResult,
    Tokenized,
    Tokens,
    ints,
)

RESERVE = Limits(policy=Policy(kv="reserve"))


def any_limits(data: st.DataObject) -> Limits:
    """Settings of any kind: windows, overlap modes, policies."""
    policy = Policy(
        rank=data.draw(st.sampled_from(["vtc", "fcfs"])),
        fill=data.draw(st.sampled_from(["mixed", "prefill_first", "decode_first", "static"])),
        kv=data.draw(st.sampled_from(["on_demand", "on_demand", "reserve"])),
    )
    return Limits(
        window=data.draw(st.integers(1, 4)),
        overlap=data.draw(st.sampled_from(["auto", "single", "run_ahead", "two_batch"])),
        step_tokens=data.draw(st.integers(1, 40)),
        policy=policy,
    )


@dataclass
class Reader:
    """One sequence as a detokenizer sees it."""

    opened: Open
    tokens: list[int] = field(default_factory=list)
    closed: Close | None = None


@dataclass
class World:
    """Drives one scheduler. Results of engines wait in `results` until a test delivers them."""

    limits: Limits = field(default_factory=Limits)
    now_us: int = 0
    shards: tuple[str, ...] = ("d1",)
    scheduler: Scheduler = field(init=False)
    engines: dict[str, PagedEngine] = field(default_factory=dict)
    results: dict[str, deque[StepResult]] = field(default_factory=dict)
    readers: dict[int, Reader] = field(default_factory=dict)
    accepted: list[str] = field(default_factory=list)
    rejected: list[Rejected] = field(default_factory=list)
    asked: dict[str, Tokenized] = field(default_factory=dict)
    plans: list[StepPlan] = field(default_factory=list)
    unanswered: dict[str, dict[int, tuple[set[int], set[int], set[int]]]] = field(default_factory=dict)
    resets: list[str] = field(default_factory=list)
    moved: list[tuple[str, int]] = field(default_factory=list)
    auto_end: bool = True
    events: int = 0
    took_us: int = 0  # of a step, and as much for 16 rows more; 0: the engines do not say
    checks: list[Callable[[World], None]] = field(default_factory=list)  # made after each event

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(self.limits)
        for shard in self.shards:
            self.handle(PeerReady("detokenizer", shard, 1))

    def add_engine(self, name: str = "e1", epoch: int = 1, **facts: int) -> None:
        values = {"blocks": 32, "block_tokens": 4, "slots": 4, "max_step_tokens": 64, "max_context": 64}
        hello = ExecHello(
            executor=name,
            exec_epoch=epoch,
            host_id="h",
            model="m",
            fingerprint="f",
            vocab_digest="v",
            vocab=1000,
            **{**values, **facts},
        )
        self.engines[name] = PagedEngine(hello)
        self.results[name] = deque()
        self.handle(Arrived(f"executor.{name}", hello))

    def ask(self, request: str, prompt: list[int], max_tokens: int, **more: object) -> None:
        stops = bool(more.pop("stops", False))
        asked = Tokenized(
            request=request,
            attempt=1,
            tenant=str(more.pop("tenant", "public")),
            model="m",
            inbox=f"inbox.{request}",
            timeout_us=int(more.pop("timeout_us", 10**9)),
            max_tokens=max_tokens,
            tokens=ints(prompt),
            stop_ids=ints([STOP_ID] if stops else []),
            **more,  # type: ignore[arg-type]  # test shorthand
        )
        self.asked[request] = asked
        self.handle(Arrived("tokenizer.t1", asked))

    def handle(self, event: Event) -> None:
        self.now_us += 10
        self.events += 1
        for command in self.scheduler.handle(event, self.now_us):
            self._carry_out(command)
        state = self.scheduler.state
        for executor in state.executors.values():
            executor.ledger.check()
        watched: dict[int, int] = {}
        for at_us, seq in state.due.heap:
            watched[seq] = min(at_us, watched.get(seq, at_us))
        for sequence in state.sequences.values():
            assert watched[sequence.seq] <= closing.due_at_us(sequence), "a deadline that nobody watches"
        for check in self.checks:
            check(self)

    def deliver(self, name: str = "e1") -> bool:
        """Hand the oldest result of an engine to the scheduler."""
        if not self.results[name]:
            return False
        self.handle(Arrived(f"executor.{name}", self.results[name].popleft()))
        return True

    def run(self, steps: int = 10_000) -> None:
        """Deliver results until nothing moves."""
        for _ in range(steps):
            delivered = [self.deliver(name) for name in list(self.engines)]
            if not any(delivered):
                return
        raise AssertionError("the world does not come to rest")

    def crash(self, name: str) -> None:
        self.engines.pop(name)
        self.results.pop(name)
        self.handle(PeerLost("executor", name))

    def tick(self, by_us: int) -> None:
        self.now_us += by_us
        self.handle(Ticked())

    def readers_of(self, request: str) -> list[Reader]:
        found = [r for r in self.readers.values() if r.opened.request == request]
        return sorted(found, key=lambda r: r.opened.choice)

    def assert_answers(self, request: str) -> None:
        """Every choice has exactly the tokens that its prompt and seed demand."""
        asked = self.asked[request]
        readers = self.readers_of(request)
        assert len(readers) == asked.n
        for reader in readers:
            seed = choice_seed(asked.seed, reader.opened.choice)
            want = expected_tokens(list(asked.tokens), seed, asked.max_tokens, STOP_ID in asked.stop_ids)
            assert reader.tokens == want
            assert reader.closed is not None
            assert reader.closed.final == len(want)
            assert reader.closed.reason == ("stop" if want[-1] == STOP_ID else "length")

    def assert_idle(self) -> None:
        """Nothing is left: no request, no block, no slot, no promise."""
        assert self.scheduler.idle
        assert not self.scheduler.state.waiting
        for executor in self.scheduler.state.executors.values():
            ledger = executor.ledger
            assert (ledger.free_blocks, ledger.free_slots) == (ledger.blocks, ledger.slots)
            assert (ledger.reserved, ledger.fenced_blocks) == (0, 0)
            assert not self.engines[executor.hello.executor].slots

    def _carry_out(self, command: Send) -> None:
        kind, _, name = command.to.partition(".")
        if kind == "executor" and name not in self.engines:
            return
        match command.message:
            case SlotOpen() as opened:
                assert opened.slot not in self._named(name, 0), "a slot is reused before its fence"
                self.engines[name].open(opened)
            case SlotClose() as closed:
                self.engines[name].close(closed)
            case StepPlan() as plan:
                self.plans.append(plan)
                self._check_fences(name, plan)
                self.results[name].append(self._timed(plan, self.engines[name].run(plan)))
            case ExecReset():
                self.resets.append(name)
            case Accepted(request=request):
                self.accepted.append(request)
            case Rejected() as rejected:
                self.rejected.append(rejected)
            case Open() as opened:
                self.readers[opened.seq] = Reader(opened, list(opened.tokens))
            case Tokens() as tokens:
                self._read(tokens)
            case Close(seq=seq, reason="moved"):
                self.moved.append((command.to, seq))
            case Close() as close:
                self.readers[close.seq].closed = close
                if self.auto_end:
                    ended = Ended(seq=close.seq, index=close.final, reason=close.reason)
                    self.handle(Arrived(command.to, ended))

    def _timed(self, plan: StepPlan, result: StepResult) -> StepResult:
        if not self.took_us:
            return result
        took_us = self.took_us + self.took_us * len(plan.slots) // 16
        times = {"forward_us": took_us, "start_wall_us": self.now_us, "end_wall_us": self.now_us + took_us}
        return dataclasses.replace(result, **times)

    def _named(self, name: str, which: int) -> set[int]:
        """Slots (0), blocks (1) or targets of copies (2) that steps name whose results are undelivered."""
        waiting = {result.step for result in self.results[name]}
        steps = self.unanswered.setdefault(name, {})
        return {x for step, named in steps.items() if step in waiting for x in named[which]}

    def _check_fences(self, name: str, plan: StepPlan) -> None:
        """What a plan is first to write into must be named by no step in flight. Cached blocks of a prefix
        are only read."""
        engine, size = self.engines[name], self.engines[name].hello.block_tokens
        owned = {block for slot in engine.slots.values() for block in slot.table}
        owned |= self._named(name, 2)  # a fork's copy may be made a step before its table is sent
        tables = {slot: list(state.table) for slot, state in engine.slots.items()}
        deltas = iter(plan.table_blocks)
        for slot, count in zip(plan.table_slots, plan.table_counts, strict=True):
            tables[slot] += [next(deltas) for _ in range(count)]
        written: set[int] = set()
        before = [(slot, set(state.table)) for slot, state in engine.slots.items()]
        for slot, start, count in zip(plan.slots, plan.starts, plan.counts, strict=True):
            row = set(tables[slot][start // size : (start + count - 1) // size + 1])
            others = [table for other, table in before if other != slot]
            assert row.isdisjoint(written.union(*others)), "a shared block is written"
            written |= row
        written.update(plan.copy_to)
        assert not (written - owned) & self._named(name, 1), "a block is reused before its fence"
        blocks = {block for slot in plan.slots for block in tables[slot]} | written
        slots = set(plan.slots) | set(plan.sample_slots)
        self.unanswered[name][plan.step] = (slots, blocks, set(plan.copy_to))

    def _read(self, tokens: Tokens) -> None:
        at = 0
        for seq, first, count in zip(tokens.seqs, tokens.first, tokens.counts, strict=True):
            reader = self.readers[seq]
            assert reader.closed is None, "a token after the end"
            assert first == len(reader.tokens), "a hole or a double in the token stream"
            reader.tokens.extend(tokens.ids[at : at + count])
            at += count
