"""Chooses which executors compute prompts and which decode. `core.decide` calls `review`.

Every PERIOD_US the policy of kind `roles` decides how many executors shall only prefill. `view_of` predicts
what each number would cost, from learned step times. A change must be wanted in CHANGE_PERIODS periods in a
row. Roles belong to the scheduler: an executor has no setting for them.

    prefill  gets prompts that are longer than the limit of the decoding ones. The blocks of each chunk are
             copied to L1 once it is computed; after its first token a sequence moves (moves.py)
    decode   gets what has a token, and prompts of at most `prompt_limit` tokens: those that hardly stretch
             a step

Admission checks the roles (`_suits` in ../admission.py): no role keeps a sequence from the only executor for
it.

`Division` divides the executors of a model among its schedulers. Pure.

Executors join one scheduler, which checks that they compute the same tokens (load_shedding.py). While the
scheduler with the most executors has two more than the one with the fewest, it gives that one an executor:

    welcomed here ──Drain──▶ gets no new sequences ──empty, or after DRAIN_US──▶ Give ──▶ welcomed there

Sequences that still run then are queued again with all their tokens. One executor moves at a time. With one
executor for two schedulers nothing moves: the second scheduler stands by.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from services.scheduler.load_shedding import serving
from services.scheduler.overlap import MIN_SEEN
from services.scheduler.state.cost_model import chunk_tokens
from services.scheduler.state.policies import RolesOption, RolesView
from services.scheduler.state.state import DECODE, PREFILL, Executor, Roles, State
from services.scheduler.step_planner import GRAIN_TOKENS, step_bound_us
from shared.actor.membership import Peers
from shared.step_model import NO_ROWS, StepShape

PERIOD_US = 5_000_000
CHANGE_PERIODS = 2
FULL_PM = 800  # an executor that is busier has a queue that grows fast
HARDLY_PM = 1_100  # step time with a prompt on a decoding executor, relative to decodes alone
TAIL_PM = 10  # a step with a chunk counts as the tail of the time between tokens if so many steps have one
LINK_TIMES = 4  # the link must be so many times as fast as prefill fills blocks
NEVER_US = 1 << 40


def review(state: State) -> None:
    """Apply what the policy wants, once a period."""
    if state.now_us < state.roles_due_us:
        return
    state.roles_due_us = state.now_us + PERIOD_US
    for model in sorted({e.hello.model for e in state.executors.values()}):
        roles = state.roles.setdefault(model, Roles(state.now_us))
        executors = serving(state, model)
        _measure(state, model, roles, executors)
        wanted = 0
        if len(executors) > 1 and _are_connected(executors):
            wanted = state.limits.policy.function("roles")(view_of(state, roles, executors))
        _change(state, roles, executors, max(0, min(wanted, len(executors) - 1)))


def _are_connected(executors: list[Executor]) -> bool:
    """Whether all executors share the blocks of one L1."""
    first = executors[0].hello
    alike = (first.host_id, first.fingerprint)
    return all(e.pool.write_back and (e.hello.host_id, e.hello.fingerprint) == alike for e in executors)


def _measure(state: State, model: str, roles: Roles, executors: list[Executor]) -> None:
    """Update the demand, prompt tokens a second, with what was computed and what waits more than before."""
    waiting = sum(queue.tokens for (name, _), queue in state.waiting.queues.items() if name == model)
    waiting += sum(e.row_sums().backlog_tokens for e in executors)
    computed, squares = sum(e.prompts.tokens for e in executors), sum(e.prompts.squares for e in executors)
    took_us = state.now_us - roles.since_us
    if took_us > 0:
        roles.demand = max(computed + waiting - roles.waiting, 0) * 1_000_000 // took_us
    if computed:
        roles.prompt_tokens = max(squares // computed, 1) if squares else max(roles.prompt_tokens, 1)
    roles.since_us, roles.waiting = state.now_us, waiting
    for e in executors:
        e.prompts.tokens = e.prompts.squares = 0


def _change(state: State, roles: Roles, executors: list[Executor], wanted: int) -> None:
    roles.periods = roles.periods + 1 if wanted == roles.wanted else 1
    roles.wanted = wanted
    if wanted != roles.prefills and roles.periods >= CHANGE_PERIODS:
        roles.prefills = wanted
        state.counters.role_changes += 1
        state.blocked_on = ()
    most = min(roles.prefills, len(executors) - 1)
    executors = sorted(executors, key=lambda e: (e.role != PREFILL, len(e.running), e.source))
    for at, executor in enumerate(executors):
        executor.role = "" if most <= 0 else PREFILL if at < most else DECODE
        state.some_leave |= executor.role == PREFILL
        executor.prompts.limit = _prompt_limit(state, executor) if executor.role == DECODE else 0


def _prompt_limit(state: State, executor: Executor) -> int:
    """The longest prompt that hardly stretches a step of the present decodes."""
    sums = executor.row_sums()
    if executor.cost_model.seen < MIN_SEEN:
        return 0
    shape = _decodes(sums.decodes, sums.decode_tokens)
    bound_us = executor.cost_model.predict_us(shape) * HARDLY_PM // 1_000
    most = max(state.limits.step_tokens - sums.decodes, 0)
    return chunk_tokens(executor.cost_model, partial(shape.with_chunk, 0), bound_us, GRAIN_TOKENS, most)


def view_of(state: State, roles: Roles, executors: list[Executor]) -> RolesView:
    """What each number of prefilling executors is predicted to cost. Executors count as alike. There are no
    options while too little is known, or while nothing decodes."""
    unknown = RolesView(len(executors), roles.prefills, ())
    sums = [e.row_sums() for e in executors]
    rows, tokens = sum(s.decodes for s in sums), sum(s.decode_tokens for s in sums)
    model = max(executors, key=lambda e: (e.cost_model.seen, e.source))
    if not (rows and roles.demand and roles.prompt_tokens) or model.cost_model.seen < MIN_SEEN:
        return unknown
    classes = zip(*(e.running_by_class for e in executors), strict=True)
    tbt_us = min(slo.tbt_us for slo, counts in zip(state.limits.classes, classes, strict=True) if any(counts))
    load = _Load(state, model, roles, rows, tokens, len(executors), tbt_us)
    options = [load.together(), *(load.apart(count) for count in range(1, len(executors)))]
    return RolesView(len(executors), roles.prefills, tuple(options))


class _Load:
    """The present load, and predictions of what becomes of it."""

    def __init__(
        self, state: State, model: Executor, roles: Roles, rows: int, tokens: int, executors: int, tbt_us: int
    ) -> None:
        self._model, self._executors, self._tbt_us = model, executors, tbt_us
        self._rows, self._tokens = rows, tokens
        self._demand, self._prompt = roles.demand, roles.prompt_tokens
        self._step_tokens = min(state.limits.step_tokens, model.hello.max_step_tokens)

    def together(self) -> RolesOption:
        """Each executor computes prompts beside its part of the decodes, in chunks as ../step_planner.py
        makes them."""
        costs, count, half = self._model.cost_model, self._executors, self._prompt // 2
        shape = self._share(count)
        alone_us, room = costs.predict_us(shape), max(self._step_tokens - shape.rows, GRAIN_TOKENS)
        waiting_us = (costs.predict_us(shape.with_chunk(0, room)) - alone_us) * self._prompt // room
        bound_us = step_bound_us(alone_us, self._tbt_us, waiting_us)
        fits = chunk_tokens(costs, partial(shape.with_chunk, half), bound_us, GRAIN_TOKENS, room)
        chunk = min(fits or self._model.hello.block_tokens, self._prompt)
        step_us = costs.predict_us(shape.with_chunk(half, chunk))
        chunks = self._demand * 1_000 // (count * chunk)  # a second and executor, times 1000
        busy_pm = chunks * max(step_us - alone_us, 0) // 1_000_000
        itl_us = alone_us * 1_000 // (1_000 - busy_pm) if busy_pm < 950 else NEVER_US
        often = chunks * itl_us // 1_000_000 >= TAIL_PM
        ttft_us = self._ttft_us(step_us, chunk, count)
        return RolesOption(0, itl_us, step_us if often else alone_us, ttft_us)

    def apart(self, prefills: int) -> RolesOption:
        """So many executors only prefill."""
        model = self._model
        costs, shape, chunk = model.cost_model, self._share(self._executors - prefills), self._step_tokens
        itl_us = costs.predict_us(shape)
        chunk = min(chunk, self._prompt)
        step_us = costs.predict_us(NO_ROWS.with_chunk(self._prompt // 2, chunk))
        block_us = max(step_us * model.hello.block_tokens // chunk, 1)
        copy_us = model.down.block_us(LINK_TIMES * model.hello.bytes_per_block)
        fits = (
            itl_us <= self._tbt_us
            and shape.rows <= model.pool.slots
            and shape.kv_tokens * 10 <= model.pool.blocks * model.hello.block_tokens * 9
            and (not model.down.copies_seen or copy_us <= block_us)  # try a link that is not known
            and self._demand * step_us // (prefills * chunk) <= FULL_PM * 1_000
        )
        ttft_us = self._ttft_us(step_us, chunk, prefills) if fits else NEVER_US
        return RolesOption(prefills, itl_us, itl_us * HARDLY_PM // 1_000, ttft_us)

    def _share(self, executors: int) -> StepShape:
        """The shape of a step of the decodes of one of so many executors."""
        rows = -(-self._rows // executors)
        return _decodes(rows, self._tokens * rows // self._rows)

    def _ttft_us(self, step_us: int, chunk: int, executors: int) -> int:
        """Time of a prompt in such steps on one of so many executors, with the wait of an M/D/k queue."""
        alone_us = step_us * self._prompt // chunk
        busy = self._demand * step_us / (executors * chunk * 1e6)
        if busy >= 1.0:
            return NEVER_US
        wait = 1.0
        for _ in range(executors):
            wait *= busy
        return alone_us + int(alone_us * wait / (2 * executors * (1.0 - busy)))


def _decodes(rows: int, cached: int) -> StepShape:
    return StepShape(rows, rows, cached + rows, cached)


DRAIN_US = 10_000_000  # most answers end within it; the others cost their recomputation
ARRIVE_US = 10_000_000  # until the next move if the executor does not arrive; it takes a heartbeat


@dataclass(frozen=True, slots=True)
class Drain:
    """Place no new sequences on this executor."""

    executor: str


@dataclass(frozen=True, slots=True)
class Give:
    """Make this executor join a scheduler: another one, or this one again if the move is not needed."""

    executor: str
    scheduler: str


class Division:
    """The move that one scheduler has under way."""

    def __init__(self) -> None:
        self._executor = ""  # that moves
        self._given = False
        self._until_us = 0

    def decide(
        self, me: str, model: str, peers: Peers, running: Mapping[str, int], now_us: int
    ) -> Drain | Give | None:
        """What to do now; call it once a heartbeat. `running`: sequences by executor of scheduler `me`."""
        served = peers.executors_of(model)
        counts = {actor: served[actor] for actor in peers.ready("scheduler", model)}
        fewest = min(counts, key=lambda actor: (counts[actor], actor), default=me)
        uneven = served[me] - counts.get(fewest, served[me]) >= 2
        if self._given:
            peer = peers.get(f"executor.{self._executor}")
            if peer is None or peer.heartbeat.scheduler not in ("", me) or now_us >= self._until_us:
                self._executor, self._given = "", False
        elif self._executor:
            left = running.get(self._executor)
            if left is None:  # it has died
                self._executor = ""
            elif not left or not uneven or now_us >= self._until_us:
                self._given, self._until_us = True, now_us + ARRIVE_US
                return Give(self._executor, fewest if uneven else me)
        elif uneven and me == max(counts, key=lambda actor: (counts[actor], actor)):
            ready = [executor for executor in peers.ready("executor", model) if executor in running]
            self._executor = min(ready, key=lambda executor: (running[executor], executor), default="")
            self._until_us = now_us + DRAIN_US
            return Drain(self._executor) if self._executor else None
        return None
