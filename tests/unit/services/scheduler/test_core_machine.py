"""The scheduler's core on engines that check every block: any events in any order (a Hypothesis machine).

What holds after each history:

    blocks      a block has one owner, or sequences that share a prefix; none is given out before its fence
    ends        every request ends
    classes     no sequence is preempted for one of a lower class
    tokens      a request has the same tokens, whenever its sequences are preempted

Also the window and overlap. `HEADRACE_MACHINE_EXAMPLES` runs more histories than CI.
"""

from __future__ import annotations

import dataclasses
import os
import random
import re
from collections import Counter, deque
from unittest import mock

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from support.executor.paged_engine import STOP_ID, expected_tokens, vector_of
from support.scheduler.fake_tier import FakeTier
from support.scheduler.world import World, any_limits
from support.scheduler.world_checks import ALL, Turns

from services.scheduler import preemption
from services.scheduler.admission import TRIAL_DEATHS
from services.scheduler.executors import roles, sleep
from services.scheduler.state import requests
from services.scheduler.state.requests import (
    PIN_AFTER_PREEMPTIONS,
    Arrived,
    PeerDraining,
    PeerLost,
    PeerReady,
    Sequence,
    SleepSet,
    StreamLost,
    Ticked,
)
from services.scheduler.state.state import Executor, State
from shared.kv_blocks import choice_seed
from shared.messages import WHOLE_VECTOR, Cancel, Detached, StepResult, StopFound, ints

LEAST_EVENTS = 4_500  # of all histories together
ENGINES, SHARDS = ("e1", "e2"), ("d1", "d2")
CLASSES = requests.parse("interactive=100/10/0,standard=200/20/50,batch=0/50/80")
TIER_FAULTS = (
    "lose", "restart", "unmapped", "frozen", "thaw", "forget", "copy_fails", "no_room", "missing", "lossy"
)  # fmt: skip
PROCESSORS = ('{"name":"x"}',)
SEEDS = st.integers(0, 2**32)
CHANGES = (
    "order=vtc", "order=fcfs", "batching=mixed", "batching=prefill_first", "batching=decode_first",
    "batching=loadtest.policies:static", "reservation=on_demand", "reservation=reserve",
    "reservation=foreseen",
    "victim=cheapest",
    "victim=latest", "victim=loadtest.policies:least_computed", "routing=ttft", "routing=room",
    "routing=loadtest.policies:prefix", "tier=tiered", "tier=loadtest.policies:swap",
    "tier=loadtest.policies:recompute", "tier=loadtest.policies:forget",
    "roles=loadtest.policies:prefill_1", "roles=loadtest.policies:prefill_1", "roles=adaptive",
    "roles=colocated",
)  # fmt: skip
PARTS = ((7, 7, 7, 7), (8, 8, 8, 8), (9,), (7, 8))  # of prompts


def share(executor: Executor, sequence: Sequence) -> float:
    """The part of its slots or blocks that the tenant of a sequence has, whichever is more."""
    own = [s for s in executor.running if s.tenant == sequence.tenant]
    blocks = sum(len(s.table) + s.reserved for s in own)
    return max(len(own) / executor.pool.slots, blocks / executor.pool.blocks)


class Machine(RuleBasedStateMachine):
    """Any of the rules at any time; at the end everything comes back, and every request must end."""

    events = 0

    @initialize(data=st.data())
    def start(self, data: st.DataObject) -> None:
        limits = any_limits(data)
        policy = dataclasses.replace(
            limits.policy,
            victim=data.draw(st.sampled_from(["latest", "loadtest.policies:least_computed"])),
            tier=data.draw(
                st.sampled_from(["tiered", "tiered", "loadtest.policies:swap", "loadtest.policies:forget"])
            ),
        )
        limits = dataclasses.replace(
            limits,
            policy=policy,
            classes=CLASSES,
            step_tokens=data.draw(st.integers(4, 80)),
            shares_memory=data.draw(st.booleans()),
        )
        block_tokens = data.draw(st.sampled_from([1, 2, 3, 4, 4, 5, 8, 16]))
        self.world = World(limits, shards=SHARDS, took_us=data.draw(st.sampled_from([0, 200, 5_000])))
        self.world.check_every = 1
        self.world.checks += [*ALL, Turns()]
        self.sizes = {
            name: {"blocks": data.draw(st.integers(32, 96)) // block_tokens, "block_tokens": block_tokens,
                   "slots": data.draw(st.integers(2, 6)), "stages": data.draw(st.sampled_from([1, 1, 2])),
                   "max_step_tokens": data.draw(st.sampled_from([16, 64, 64])),
                   "max_drafts": data.draw(st.sampled_from([0, 7, 7])),
                   "max_draft_rows": data.draw(st.sampled_from([0, 0, 3]))}
            for name in ENGINES
        }  # fmt: skip
        self.asked = self.epoch = 0
        self.excused: dict[str, set[int]] = {}  # request -> codes that a rule gave it a reason for
        self.deaths = Counter[str]()  # of executors, under each request
        self.cut: dict[tuple[str, int], int] = {}  # by StopFound
        self.failures = False
        self.old: deque[tuple[str, StepResult]] = deque(maxlen=20)
        self.spied = mock.patch.object(preemption, "preempt", self.preempt)
        self.real_preempt = preemption.preempt
        self.spied.start()
        self.periods = mock.patch.object(roles, "PERIOD_US", data.draw(st.sampled_from([0, 1_000, 10**9])))
        self.periods.start()
        self.hurried = mock.patch.multiple(sleep, DRAIN_US=30_000, COPY_US=30_000)
        self.hurried.start()
        self.join("e1")
        capacity = data.draw(st.sampled_from([0, 12, 32, 160])) // block_tokens
        if capacity:
            self.world.add_tier(FakeTier(capacity, l2_us=data.draw(st.sampled_from([-1, 300, 60_000]))))

    def preempt(
        self, state: State, executor: Executor, victim: Sequence, why: str, candidates: list[Sequence]
    ) -> None:
        """No sequence is preempted for one of a lower class, or of a tenant that has more, and none more than
        three times, but for a tenant of which nothing runs."""
        found = re.search(r"seq (\d+)", why)
        assert found is not None, "a preemption that names no reason"
        first = state.sequences[int(found[1])]
        group = state.waiting.groups.get(first.group)
        level = group.level if group is not None and first in group.sequences else first.level
        of_class = victim.level >= level + ("needs room" in why)
        assert of_class or share(executor, victim) > share(executor, first), "class inversion"
        assert "has no running sequence" not in why or share(executor, first) == 0
        assert victim in candidates
        assert victim.turn.preemptions - victim.turn.ceded < PIN_AFTER_PREEMPTIONS
        self.real_preempt(state, executor, victim, why, candidates)

    def join(self, name: str) -> None:
        self.epoch += 1_000  # each sleep and wake takes one
        self.world.add_engine(name, epoch=self.epoch, **self.sizes[name])

    def excuse(self, request: str, code: int) -> None:
        self.excused.setdefault(request, set()).add(code)

    @rule(seed=SEEDS)
    def ask(self, seed: int) -> None:
        """A request; many share the beginning of their prompts."""
        dice = random.Random(seed)
        self.asked += 1
        if all(e.draining for e in self.world.scheduler.state.executors.values()):
            self.excuse(f"r{self.asked}", 400)  # whether it fits is known when one joins
        pools = dice.random() < 0.2
        self.world.ask(
            f"r{self.asked}",
            [token for _ in range(dice.randint(1, 5)) for token in dice.choice(PARTS)],
            1 if pools else dice.randint(1, 14),
            seed=seed,
            pooling=WHOLE_VECTOR if pools else 0,
            n=1 if pools else dice.choice((1, 1, 1, 2, 3)),
            slo_class=dice.choice(requests.CLASS_NAMES),
            tenant=dice.choice(("one", "two")),
            stops=dice.random() < 0.3 and not pools,
            processors=PROCESSORS if dice.random() < 0.3 and not pools else (),
            timeout_us=dice.choice((30_000, 10**8, 10**8, 10**8)),
        )

    @rule(seed=SEEDS, busy=st.floats(0, 0.4))
    def flow(self, seed: int, busy: float) -> None:
        """Requests, and results: in order, out of order, twice, and some time after each other."""
        dice, world = random.Random(seed), self.world
        steady = dice.random() < 0.5
        for _ in range(dice.randint(5, 60)):
            name = dice.choice(ENGINES)
            waiting = world.results.get(name)
            if dice.random() < busy and len(world.scheduler.state.waiting) < 12:
                self.ask(dice.getrandbits(32))
            if waiting:
                at = 0 if steady or dice.random() < 0.7 else dice.randrange(len(waiting))
                result = waiting[at]
                del waiting[at]
                world.now_us += dice.choice((0, 100, world.took_us, 2 * world.took_us))
                world.handle(Arrived(f"executor.{name}", result))
                self.old.append((name, result))
            if dice.random() < 0.5:
                world.deliver_copy(name)
            if dice.random() < 0.8:
                world.deliver_tier()
            if dice.random() < 0.2:
                world.deliver_hello()
            if self.old and dice.random() < 0.1:
                name, result = dice.choice(self.old)
                world.handle(Arrived(f"executor.{name}", result))

    @rule(seed=SEEDS)
    def force_preemption(self, seed: int) -> None:
        """Each running sequence may be preempted at any time, and its tokens stay the same."""
        dice, state = random.Random(seed), self.world.scheduler.state
        for executor in state.executors.values():
            for victim in preemption._candidates(state, executor, executor.running):
                if dice.random() < 0.5 and victim in executor.running:
                    state.now_us = self.world.now_us
                    self.preempt(state, executor, victim, f"seq {victim.seq} forced", [victim])
        self.world.handle(Ticked())

    @rule(engine=st.sampled_from(ENGINES))
    def fail_step(self, engine: str) -> None:
        """The engine fails on its next step, and leaves garbage in the blocks."""
        if engine in self.world.engines:
            self.world.engines[engine].fails = self.failures = True

    @rule(engine=st.sampled_from(ENGINES), seed=SEEDS)
    def row_error(self, engine: str, seed: int) -> None:
        """A logits processor fails on one row."""
        executor, waiting = self.world.scheduler.state.executors.get(engine), self.world.results.get(engine)
        if executor is None or not waiting or waiting[0].error or waiting[0].exec_epoch != executor.epoch:
            return
        flights = [flight for flight in executor.in_flight if flight.step == waiting[0].step]
        hosted = [at for flight in flights for at, (s, _) in enumerate(flight.rows) if s.host_fed]
        hosted = [at for at in hosted if not waiting[0].counts or waiting[0].counts[at] == 1]
        if hosted:
            at = random.Random(seed).choice(hosted)
            ids = waiting[0].ids[:]
            ids[sum(waiting[0].counts[:at]) if waiting[0].counts else at] = -1
            waiting[0] = dataclasses.replace(
                waiting[0], ids=ids, row_errors=(*waiting[0].row_errors, (at, "boom"))
            )
            self.excuse(flights[0].rows[at][0].request.tokenized.request, 500)

    @rule(what=st.sampled_from(["cancel", "detach", "stop"]), seed=SEEDS)
    def end(self, what: str, seed: int) -> None:
        """A client or a stop string ends a request: one of the last, or one that is long over."""
        dice, world = random.Random(seed), self.world
        if not world.readers:
            return
        known = sorted(world.readers)
        reader = world.readers[dice.choice(known[-6:] if dice.random() < 0.8 else known)]
        asked, seq = world.asked[reader.opened.request], reader.opened.seq
        shard = f"detokenizer.{dice.choice(SHARDS)}"
        if what == "stop":
            self.cut.setdefault((asked.request, reader.opened.choice), 0)
            world.handle(Arrived(shard, StopFound(seq=seq, index=dice.randint(0, 14))))
            return
        self.excuse(asked.request, 499)
        cancel = Cancel(tenant=asked.tenant, request=asked.request)
        world.handle(
            Arrived("client", cancel) if what == "cancel" else Arrived(shard, Detached(seqs=ints([seq])))
        )

    @rule(engine=st.sampled_from(ENGINES), how=st.sampled_from(["crash", "back", "restart", "lost", "drain"]))
    def executor(self, engine: str, how: str) -> None:
        """An executor joins, crashes, restarts, loses its messages or drains."""
        if engine not in self.world.engines:
            self.join(engine)
        elif how == "crash":
            self.old.extend((engine, result) for result in self.world.results[engine])
            if (lost := self.world.scheduler.state.executors.get(engine)) is not None:
                self.deaths.update({s.request.tokenized.request for s in lost.running})
            self.world.crash(engine)
        elif how == "restart":
            self.old.extend((engine, result) for result in self.world.results[engine])
            self.join(engine)
        elif how == "lost":
            self.world.handle(StreamLost(f"executor.{engine}"))
            self.join(engine)
        elif how == "drain" and len(self.world.engines) == len(ENGINES):
            self.world.handle(PeerDraining("executor", engine))

    @rule(asleep=st.booleans(), engines=st.sampled_from([(), *((name,) for name in ENGINES)]))
    def nap(self, asleep: bool, engines: tuple[str, ...]) -> None:
        """Engines sleep, or wake."""
        self.world.handle(SleepSet(asleep, engines))

    @rule(shard=st.sampled_from(SHARDS), back=st.booleans())
    def detokenizer(self, shard: str, back: bool) -> None:
        """A detokenizer is lost, or comes back as a new process."""
        self.epoch += 1
        lost, ready = PeerLost("detokenizer", shard), PeerReady("detokenizer", shard, self.epoch)
        self.world.handle(ready if back else lost)

    @rule(how=st.sampled_from(TIER_FAULTS), seed=SEEDS)
    def tier(self, how: str, seed: int) -> None:
        """kv_offload dies, comes back empty, is silent, has no room, loses what it has; a copy fails."""
        side, dice = self.world.side, random.Random(seed)
        if side.tier is None:
            if side.kept is not None:
                self.world.restart_tier(mapped=how != "unmapped")
        elif how == "lose":
            self.world.lose_tier()
        elif how in ("restart", "unmapped"):
            self.world.restart_tier(mapped=how == "restart")
        elif how == "frozen":
            side.tier.frozen = True
        elif how == "thaw":
            side.tier.no_room = side.tier.missing = side.tier.lossy = False
            side.tier.thaw(self.world.now_us)
        elif how == "forget" and side.tier.l1:
            leased = {key for lease in side.tier.leases.values() if not lease.offsets for key in lease.keys}
            for key in [key for key in side.tier.l1 if key not in leased and dice.random() < 0.5]:
                side.tier.forget(key)
        elif how == "copy_fails":
            for engine in self.world.engines.values():
                engine.copy_fails = True
        elif how in ("no_room", "missing", "lossy"):
            setattr(side.tier, how, True)

    @rule(change=st.sampled_from(CHANGES))
    def policy(self, change: str) -> None:
        """An operator changes a policy."""
        self.world.set_policy(change)

    @rule(by_us=st.sampled_from([10, 1_000, 20_000, 60_000]))
    def tick(self, by_us: int) -> None:
        self.world.tick(by_us)

    def teardown(self) -> None:
        """With both executors and a detokenizer there, results alone bring every request to an end."""
        if not hasattr(self, "world"):
            return
        world = self.world
        try:
            self.nap(False, ())
            while world.deliver_hello():
                self.nap(False, ())
            for name in ENGINES:
                executor = world.scheduler.state.executors.get(name)
                if executor is None or executor.draining or name not in world.engines:
                    self.join(name)
            self.detokenizer("d1", True)
            if world.side.tier is not None:
                world.side.tier.thaw(world.now_us)
            world.run()
            while not world.scheduler.is_idle and world.scheduler.state.tiers.jobs:
                world.tick(20_000)
                world.run()
            world.assert_idle()
            for reader in world.readers.values():
                self.check_answer(reader.opened.request, reader.opened.choice)
        finally:
            self.spied.stop()
            self.periods.stop()
            self.hurried.stop()
            type(self).events += world.events

    def check_answer(self, request: str, choice: int) -> None:
        """Exactly the tokens that prompt and seed demand, up to its end; an error only with a reason."""
        asked = self.world.asked[request]
        reader = next(r for r in self.world.readers_of(request) if r.opened.choice == choice)
        closed, seed, stops = reader.closed, choice_seed(asked.seed, choice), STOP_ID in asked.stop_ids
        want = [] if asked.pooling else expected_tokens([*asked.tokens], seed, asked.max_tokens, stops)
        assert reader.tokens == want[: len(reader.tokens)]
        assert closed is not None
        assert closed.final <= len(reader.tokens)
        if closed.reason == "error":
            late = {408, 429} | ({500} if self.failures or self.deaths[request] > TRIAL_DEATHS else set())
            assert closed.code in self.excused.get(request, set()) | late
            assert closed.code != 429 or (closed.retry_after_ms >= 1_000 and closed.final == 0)
        elif (request, choice) not in self.cut or len(reader.tokens) == closed.final == len(want):
            assert (reader.tokens, closed.final) == (want, len(want))
            assert closed.vector == (vector_of([*asked.tokens]) if asked.pooling else b"")
            stopped = asked.pooling or want[-1] == STOP_ID
            assert closed.reason == ("stop" if stopped else "length") or self.cut
        usage = closed.usage
        assert (usage.prompt_tokens, usage.completion_tokens) == (len(asked.tokens), closed.final)
        assert 0 <= usage.cached_tokens < len(asked.tokens)


@pytest.mark.timeout(900)
def test_invariants_hold_in_any_history() -> None:
    Machine.events = 0
    examples = int(os.environ.get("HEADRACE_MACHINE_EXAMPLES", "0"))
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=examples or 40,
            stateful_step_count=50,
            deadline=None,
            phases=(Phase.explicit, Phase.generate),  # a failure is shown as found: shrinking takes minutes
            print_blob=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
    assert examples or Machine.events >= LEAST_EVENTS
