"""The scheduler's core among fakes: paged engines, a detokenizer, clients, and a clock; and kv_offload, where
a test adds it (see tests/support/scheduler/tier_side.py).
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from hypothesis import strategies as st
from support.executor.paged_engine import STOP_ID, PagedEngine, expected_tokens
from support.scheduler import invariants
from support.scheduler.fake_tier import FakeTier
from support.scheduler.tier_side import Pending, TierSide

from services.scheduler.core import Scheduler
from services.scheduler.state import policies
from services.scheduler.state.policies import Policy
from services.scheduler.state.requests import (
    Arrived,
    Event,
    OffloadLost,
    OffloadReady,
    PeerLost,
    PeerReady,
    PolicySet,
    Send,
    Ticked,
)
from services.scheduler.state.state import AUTO, Limits
from shared.kv_blocks import choice_seed
from shared.messages import (
    AT_DEVICE,
    Accepted,
    AdapterLoad,
    AdapterLoaded,
    Close,
    Ended,
    ExecHello,
    ExecRefused,
    ExecReset,
    ExecSleep,
    ExecWake,
    ExecWelcome,
    KvCopy,
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

RESERVE = Limits(policy=Policy(reservation="reserve"))


def any_limits(data: st.DataObject) -> Limits:
    """Settings of any kind: windows, overlap modes, policies."""
    policy = Policy(
        order=data.draw(st.sampled_from(["vtc", "fcfs"])),
        batching=data.draw(
            st.sampled_from(["mixed", "prefill_first", "decode_first", "loadtest.policies:static"])
        ),
        reservation=data.draw(st.sampled_from(["on_demand", "on_demand", "reserve", "foreseen"])),
    )
    return Limits(
        window=data.draw(st.integers(1, 4)),
        overlap=data.draw(st.sampled_from(["auto", "single", "run_ahead", "two_batch"])),
        step_tokens=data.draw(st.integers(1, 40)),
        speculate=data.draw(st.sampled_from([AUTO, 0, 1, 3, 7])),
        cold_start_wait_us=data.draw(st.sampled_from([0, 10**9])),
        move_after_us=data.draw(st.sampled_from([0, 0, 20_000, 10**9])),
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
    unanswered: dict[str, dict[int, tuple[set[int], ...]]] = field(default_factory=dict)  # see _named
    resets: list[str] = field(default_factory=list)
    refusals: dict[str, str] = field(default_factory=dict)  # engines that are kept out, and why
    moved: list[tuple[str, int]] = field(default_factory=list)
    hellos: deque[ExecHello] = field(default_factory=deque)  # of engines that sleep or are awake again
    naps: list[str] = field(default_factory=list)  # the command and the engine
    adapter_loads: dict[str, deque[AdapterLoad]] = field(default_factory=dict)  # by engine, not made yet
    broken_adapters: set[str] = field(default_factory=set)  # digests whose folder is gone
    auto_end: bool = True
    calls: dict[str, tuple[str, ...]] = field(default_factory=dict)  # by request: what its answer calls
    events: int = 0
    took_us: int = 0  # of a step, and as much for 16 rows more; 0: the engines report none
    checks: list[Callable[[World], None]] = field(default_factory=list)  # made after each event
    check_every: int = 4  # so many events the whole state is checked; 0: a test changes it by hand
    side: TierSide = field(default_factory=TierSide)

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(self.limits)
        for shard in self.shards:
            self.handle(PeerReady("detokenizer", shard, 1))

    def add_engine(
        self,
        name: str = "e1",
        epoch: int = 1,
        host: str = "h",
        kind: str = "f",
        digest: str = "",
        flags: tuple[str, ...] = (),
        **facts: int,
    ) -> None:
        """`kind` is its fingerprint, `digest` its model digest: with `flags`, that of its weights, too."""
        values = {"blocks": 32, "block_tokens": 4, "slots": 4, "max_step_tokens": 64, "max_context": 64}
        values["bytes_per_block"] = 256
        hello = ExecHello(
            executor=name,
            exec_epoch=epoch,
            host_id=host,
            model="m",
            fingerprint=kind,
            vocab_digest="v",
            vocab=1000,
            model_digest=digest,
            weights=digest[: 3 * bool(flags)],
            flags=flags,
            **{**values, **facts},
        )
        self.engines[name] = PagedEngine(hello)
        self.results[name] = deque()
        self._new_incarnation(name)
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
        if self.check_every and self.events % self.check_every == 0:
            invariants.check(self.scheduler.state)
        for check in self.checks:
            check(self)

    def set_policy(self, policy: str) -> None:
        """Change the policy, as `headrace policy set` does."""
        self.limits = dataclasses.replace(self.limits, policy=policies.parse(policy, self.limits.policy))
        self.handle(PolicySet(str(self.limits.policy)))

    def deliver(self, name: str = "e1") -> bool:
        """Hand the oldest result of an engine to the scheduler."""
        if not self.results[name]:
            return False
        self.handle(Arrived(f"executor.{name}", self.results[name].popleft()))
        return True

    def run(self, steps: int = 10_000) -> None:
        """Deliver results, copies and answers of kv_offload until nothing moves."""
        for _ in range(steps):
            delivered = [self.deliver(name) for name in list(self.engines)]
            delivered += [self.deliver_copy(name) for name in list(self.engines)]
            delivered += [self.deliver_adapter(name) for name in list(self.engines)]
            delivered.append(self.deliver_hello())
            if not any([*delivered, self.deliver_tier()]):
                return
        raise AssertionError("the world does not come to rest")

    def deliver_hello(self) -> bool:
        """An engine sleeps now, or is awake again: as a new incarnation, with nothing in its blocks."""
        if not self.hellos:
            return False
        hello = self.hellos.popleft()
        name = hello.executor
        engine = self.engines.get(name)
        if engine is not None and engine.hello.exec_epoch == hello.exec_epoch - 1:  # else it has died since
            assert not self.engines[name].slots, "it is asleep with an open slot"
            self.engines[name], self.results[name] = PagedEngine(hello), deque()
            self._new_incarnation(name)
            self.handle(Arrived(f"executor.{name}", hello))
        return True

    def deliver_adapter(self, name: str = "e1") -> bool:
        """An engine ends its oldest load of an adapter."""
        if not self.adapter_loads.get(name):
            return False
        load = self.adapter_loads[name].popleft()
        error = "it is gone" if load.digest in self.broken_adapters else ""
        if not error:
            self.engines[name].load(load.place, load.digest)
        loaded = AdapterLoaded(place=load.place, digest=load.digest, error=error, bytes=5, took_us=7)
        self.handle(Arrived(f"executor.{name}", loaded))
        return True

    def crash(self, name: str) -> None:
        self.engines.pop(name)
        self.adapter_loads.pop(name, None)
        self.results.pop(name)
        self.side.engine_gone(name)
        self.handle(PeerLost("executor", name))

    def tick(self, by_us: int) -> None:
        self.now_us += by_us
        self.handle(Ticked())

    @property
    def tier(self) -> FakeTier:
        """The kv_offload that lives."""
        assert self.side.tier is not None
        return self.side.tier

    @property
    def copies(self) -> dict[str, deque[Pending]]:
        """Copies that are not answered, by engine."""
        return self.side.copies

    def add_tier(self, tier: FakeTier, name: str = "k1", host: str = "h") -> None:
        """kv_offload is ready: its arena is mapped by the engines of its host, and the scheduler gets its
        heartbeat."""
        self.side.tier, self.side.name, self.side.host = tier, name, host
        self.map_arena()
        self.handle(OffloadReady(name, tier.arena.generation, host, tier.arena.generation, tier.tiers))

    def map_arena(self) -> None:
        """Engines of the tier's host map its present arena."""
        for engine in self.engines.values():
            if self.side.tier is not None and engine.hello.host_id == self.side.host:
                engine.arena = self.side.tier.arena

    def lose_tier(self) -> None:
        """kv_offload dies. What was on its way is lost; its arena stays mapped."""
        self.side.kept, self.side.tier = self.side.tier, None
        self.handle(OffloadLost(self.side.name))

    def restart_tier(self, mapped: bool = True) -> None:
        """kv_offload as a new incarnation: L1 empty. Engines that are late still map the old arena."""
        tier = self.side.tier or self.side.kept
        assert tier is not None
        tier.restart(tier.arena.generation + 1, self.now_us)
        self.side.tier, self.side.kept = tier, None
        if mapped:
            self.map_arena()
        generation = tier.arena.generation
        self.handle(OffloadReady(self.side.name, generation, self.side.host, generation, tier.tiers))

    def make_copy(self, name: str = "e1", at: int = 0) -> bool:
        """Let an engine make a copy now; its answer waits."""
        pending = [pending for pending in self.copies.get(name, ()) if pending.done is None]
        if at >= len(pending):
            return False
        pending[at].done = self.engines[name].copy(pending[at].copy)
        return True

    def deliver_copy(self, name: str = "e1", at: int = 0) -> bool:
        """Make a copy, if it is not made yet, and hand its KvCopied to the scheduler."""
        waiting = self.copies.get(name, deque())
        if at >= len(waiting):
            return False
        pending = waiting[at]
        del waiting[at]
        done = pending.done or self.engines[name].copy(pending.copy)
        self.side.moved_blocks += len(pending.copy.blocks) if done.status == "ok" else 0
        self.handle(Arrived(f"executor.{name}", done))
        return True

    def deliver_tier(self, at: int = 0) -> bool:
        """Hand an answer of kv_offload to the scheduler. Where one waits for L2 and nothing else is there,
        time goes on until it is."""
        tier = self.side.tier
        if tier is None:
            return False
        tier.advance(self.now_us)
        if not tier.replies and tier.next_us is not None:
            self.now_us = max(self.now_us, tier.next_us)
            tier.advance(self.now_us)
        if at >= len(tier.replies):
            return False
        _, message = tier.replies[at]
        del tier.replies[at]
        self.handle(Arrived(f"kv_offload.{self.side.name}", message))
        return True

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
            stops = STOP_ID in asked.stop_ids
            want = expected_tokens(list(asked.tokens), seed, asked.max_tokens, stops, asked.adapter)
            assert reader.tokens == want
            assert reader.closed is not None
            assert reader.closed.final == len(want)
            assert reader.closed.reason == ("stop" if want[-1] == STOP_ID else "length")

    def finish(self) -> None:
        """Every request ends with the right answer, and nothing is left."""
        for _ in range(100):
            self.run()
            if self.scheduler.is_idle:
                break
            self.tick(200_000)
        for request in self.asked:
            self.assert_answers(request)
        self.assert_idle()

    def assert_idle(self) -> None:
        """Nothing is left: no request, no block, no slot, no promise."""
        assert self.scheduler.is_idle
        assert not self.scheduler.state.waiting
        if self.check_every:
            invariants.check(self.scheduler.state)
        for executor in self.scheduler.state.executors.values():
            pool = executor.pool
            free = pool.free_blocks + pool.dirty_blocks
            assert (free, len(pool.free_slots)) == (pool.blocks, pool.slots)
            assert (pool.reserved, pool.fenced_blocks) == (0, 0)
            assert not self.engines[executor.hello.executor].slots
        assert not any(self.copies.values())
        if self.side.tier is not None:
            self.side.tier.check()
            left = {job for _, job in self.side.tier.leases} - self.side.orphans
            assert not left, "a lease is left"

    def _carry_out(self, command: Send) -> None:
        kind, _, name = command.to.partition(".")
        if kind == "kv_offload":
            assert name == self.side.name
            self.side.take(command.message, self.now_us)
            return
        if kind == "executor" and name not in self.engines:
            return
        match command.message:
            case KvCopy() as copy:
                self._take_copy(name, copy)
            case SlotOpen() as opened:
                assert opened.slot not in self._named(name, 0), "a slot is reused before its fence"
                self.engines[name].open(opened)
            case AdapterLoad() as load:
                self.adapter_loads.setdefault(name, deque()).append(load)
            case SlotClose() as closed:
                self.engines[name].close(closed)
            case StepPlan() as plan:
                self.plans.append(plan)
                self._check_fences(name, plan)
                self.results[name].append(self._timed(plan, self.engines[name].run(plan)))
            case ExecRefused(why=why):
                self.refusals[name] = why
            case ExecWelcome():
                self.refusals.pop(name, None)
            case ExecSleep(exec_epoch=epoch) | ExecWake(exec_epoch=epoch):
                hello, asleep = self.engines[name].hello, isinstance(command.message, ExecSleep)
                assert (hello.exec_epoch, hello.asleep) == (epoch, not asleep), "it had the command before"
                self.naps.append(f"{'sleep' if asleep else 'wake'} {name}")
                self.side.engine_dropped(name)  # a long copy may still run
                self.hellos.append(dataclasses.replace(hello, exec_epoch=epoch + 1, asleep=asleep))
            case ExecReset():
                self.resets.append(name)
                self._forget_copies(name)  # its hello comes when they have ended, and reports none
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
                    calls = self.calls.get(self.readers[close.seq].opened.request, ())
                    ended = Ended(seq=close.seq, index=close.final, reason=close.reason, calls=calls)
                    self.handle(Arrived(command.to, ended))

    def _take_copy(self, name: str, copy: KvCopy) -> None:
        waiting = {result.step for result in self.results[name]}
        pool, size = self.scheduler.state.executors[name].pool, self.engines[name].hello.block_tokens
        valid = {x: pool.valid_tokens.get(x, size) for x in copy.blocks}  # a step may write after that
        steps = {
            step: (named[1], {x for x, at in named[3].items() if at < valid.get(x, 1)}, named[4])
            for step, named in self.unanswered.get(name, {}).items()
            if step in waiting
        }
        self.side.fence(copy, self.engines[name], name, steps)
        self.copies[name].append(Pending(copy))

    def _forget_copies(self, name: str) -> None:
        self.side.engine_gone(name)
        self.copies[name] = deque()

    def _new_incarnation(self, name: str) -> None:
        """An engine starts: none of its copies or loads goes on, nothing writes for it into the arena."""
        self._forget_copies(name)
        self.adapter_loads.pop(name, None)
        self.map_arena()
        if self.side.tier is not None:
            self.side.tier.owner_gone(f"executor.{name}")

    def _timed(self, plan: StepPlan, result: StepResult) -> StepResult:
        if not self.took_us:
            return result
        took_us = self.took_us + self.took_us * len(plan.slots) // 16
        times = {"forward_us": took_us, "start_wall_us": self.now_us, "end_wall_us": self.now_us + took_us}
        return dataclasses.replace(result, **times)

    def _named(self, name: str, which: int) -> set[int]:
        """Slots (0), blocks (1), targets of copies (2), blocks written (3) or sources of copies (4) of steps
        whose results are undelivered."""
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
        written: dict[int, int] = {}  # block -> the first of its places that is
        before = [(slot, set(state.table)) for slot, state in engine.slots.items()]
        columns = zip(plan.slots, plan.starts, plan.counts, plan.from_device, strict=True)
        for slot, most, count, fed in columns:
            start = most
            if fed == AT_DEVICE and not engine.failed:  # a failed step has left the slot where it was
                start = len(engine.slots[slot].tokens) - 1
            count += most - start
            row = dict.fromkeys(tables[slot][start // size : (start + count - 1) // size + 1], 0)
            row[tables[slot][start // size]] = start % size
            others = [table for other, table in before if other != slot]
            assert row.keys().isdisjoint(set(written).union(*others)), "a shared block is written"
            written |= row
        written |= dict.fromkeys(plan.copy_to, 0)
        assert not (set(written) - owned) & self._named(name, 1), "a block is reused before its fence"
        blocks = {block for slot in plan.slots for block in tables[slot]} | set(written)
        slots = set(plan.slots) | set(plan.sample_slots)
        sources = set(plan.copy_from)
        self.side.planned(name, blocks | sources, set(written))
        self.unanswered[name][plan.step] = (slots, blocks, set(plan.copy_to), written, sources)

    def _read(self, tokens: Tokens) -> None:
        at = 0
        for seq, first, count in zip(tokens.seqs, tokens.first, tokens.counts, strict=True):
            reader = self.readers[seq]
            assert reader.closed is None, "a token after the end"
            assert first == len(reader.tokens), "a hole or a double in the token stream"
            reader.tokens.extend(tokens.ids[at : at + count])
            at += count
