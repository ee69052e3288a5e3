"""`RecomputeCost` predicts the device time to compute tokens again, from the executor's cost model.

Preemption, KV tiers and admission use it. A resumed sequence is spared for a while (`on_resume`), and the
device time of its recomputation is compared with the prediction (`start_debt`, `on_step`).
"""

from __future__ import annotations

from dataclasses import dataclass

from services.scheduler.overlap import MIN_SEEN
from services.scheduler.state.cost_model import CostModel
from services.scheduler.state.requests import Sequence
from services.scheduler.state.state import Executor, InFlight, State
from services.scheduler.state.waiting_queue import SequenceGroup
from shared.step_model import StepShape

CHUNK_TOKENS = 256  # until chunks have been planned
MANY_CHUNKS = 8

PROTECTED_US = 2_000_000  # at least: a sequence that is preempted again at once has resumed for nothing
PROTECTED_TIMES = 4  # times its recompute cost


@dataclass(slots=True)  # not frozen: setting the fields would take three times as long
class RecomputeCost:
    """Predicts the device time of prompt chunks in steps with the present decodes."""

    costs: CostModel
    base: StepShape
    base_us: int
    block_tokens: int
    chunk_tokens: int

    @classmethod
    def of(cls, executor: Executor) -> RecomputeCost:
        """With the executor's present decodes."""
        base, sums = decode_shape(executor), executor.row_sums()
        if sums.base_us < 0:
            sums.base_us = executor.cost_model.predict_us(base) if base.rows else 0
        return cls._with_base(executor, base, sums.base_us)

    @classmethod
    def after_admission(cls, executor: Executor, sequence: Sequence) -> RecomputeCost:
        """For a sequence that has just been admitted: the sequences before it decode by then."""
        before = [s for s in executor.running if s is not sequence and not s.load_job]
        cached = sum(max(s.computed, s.opened_length) for s in before)
        base = StepShape(len(before), len(before), cached + len(before), cached)
        return cls._with_base(executor, base, executor.cost_model.predict_us(base) if base.rows else 0)

    @classmethod
    def _with_base(cls, executor: Executor, base: StepShape, base_us: int) -> RecomputeCost:
        chunk_tokens = executor.chunk_tokens or CHUNK_TOKENS
        return cls(executor.cost_model, base, base_us, executor.hello.block_tokens, chunk_tokens)

    @property
    def known(self) -> bool:
        return self.costs.seen >= MIN_SEEN

    def tokens_us(self, start: int, tokens: int) -> int:
        """Time to compute `tokens` tokens from position `start`; 0 while the cost model has seen too
        little."""
        if not self.known or tokens <= 0:
            return 0
        end, total, chunk = start + tokens, 0, self.chunk_tokens
        if tokens > MANY_CHUNKS * chunk:  # the cost is a polynomial of degree two: Simpson's rule is exact
            ends = (start, start + (tokens - chunk) // 2, end - chunk)
            first, middle, last = (self._chunk_us(at, chunk) for at in ends)
            return (first + 4 * middle + last) * tokens // (6 * chunk)
        while start < end:
            count = min(chunk, end - start)
            total += self._chunk_us(start, count)
            start += count
        return total

    def steps_us(self, prompts: StepShape, step_tokens: int) -> tuple[int, int]:
        """Time of the equal steps, of at most `step_tokens` prompt tokens, that compute these prompts beside
        the present decodes, and how much longer they take than the decodes alone; (0, 0) without prompts."""
        if not prompts.tokens:
            return 0, 0
        base, steps = self.base, -(-prompts.tokens // step_tokens)
        tokens = prompts.tokens // steps
        shape = StepShape(
            base.rows + prompts.rows,
            base.tokens + tokens,
            base.kv_tokens + prompts.kv_tokens - (prompts.tokens - tokens) // 2,  # on average
            base.attention + prompts.attention // steps,
        )
        us = steps * self.costs.predict_us(shape)
        return us, max(us - steps * self.base_us, 0)

    def block_us(self, at: int) -> int:
        """Time to compute the `at`-th block of a sequence, as part of a larger chunk."""
        if not self.known:
            return 0
        chunk_us = self._chunk_us(at * self.block_tokens, self.chunk_tokens)
        return chunk_us * self.block_tokens // self.chunk_tokens

    def _chunk_us(self, start: int, tokens: int) -> int:
        return max(self.costs.predict_us(self.base.with_chunk(start, tokens)) - self.base_us, 0)


def backlog_us(executor: Executor, sequence: Sequence | None, costs: RecomputeCost) -> int:
    """Time of the device's work before this sequence: the steps in flight and the prompts before it. A load
    does not wait for them."""
    sums = executor.row_sums()
    tokens, prompts = sums.backlog_tokens, sums.backlog_prompts
    if sequence is not None and (own := sequence.backlog_tokens(executor.hello.block_tokens)):
        tokens, prompts = tokens - own, prompts - 1
    us = prompts * costs.tokens_us(0, tokens // prompts) if prompts else 0  # as prompts of one length
    return sum(flight.predicted_us for flight in executor.in_flight) + us


def decode_shape(executor: Executor) -> StepShape:
    """The shape of a step of the rows that decode now."""
    sums = executor.row_sums()
    if sums.base is None:
        rows, cached = sums.decodes, sums.decode_tokens
        sums.base = StepShape(rows, rows, cached + rows, cached)
    return sums.base


def on_resume(state: State, executor: Executor, sequence: Sequence, group: SequenceGroup) -> None:
    """Protect a resumed sequence, and set its turn and its recompute debt."""
    if not group.resumes:
        return
    lost = max(0, min(sequence.most_computed, len(sequence.tokens) - 1) - sequence.computed)
    sequence.turn_until_us = 2 * state.now_us - group.queued_us
    sequence.turn_tokens = sequence.most_computed + max(lost, 1)
    cost_us = RecomputeCost.of(executor).tokens_us(sequence.computed, lost)
    if not state.limits.policy.greedy:
        sequence.protected_until_us = state.now_us + max(PROTECTED_US, PROTECTED_TIMES * cost_us)
    if not sequence.load_job:
        start_debt(executor, sequence)


def start_debt(executor: Executor, sequence: Sequence) -> None:
    """Predict the time to recompute the lost tokens. Not tracked for a sequence preempted during prefill: its
    next chunks mix recomputed and new tokens."""
    lost = len(sequence.tokens) - 1 - sequence.computed
    if 0 < lost <= sequence.most_computed - sequence.computed:
        costs = RecomputeCost.after_admission(executor, sequence)
        # one more: the last token, from which the next is sampled
        sequence.recompute_debt_us = costs.tokens_us(sequence.computed, lost + 1)
        sequence.recompute_paid_us = 0


def on_step(state: State, executor: Executor, flight: InFlight, took_us: int) -> None:
    """Charge a step's time beyond its decodes to its chunks, by their tokens. The chunk that reaches the
    sequence's last known token closes the debt."""
    plan, first = flight.plan, len(flight.plan.slots) - len(flight.chunks)
    indebted = [
        (s, row)
        for row, (s, _) in enumerate(flight.chunks, first)
        if s.recompute_debt_us and s.opened_after < flight.step
    ]
    if not indebted:
        return
    chunk_tokens = sum(plan.counts[first:])
    price_us = max(0, took_us - without_chunks_us(executor, flight))
    for sequence, row in indebted:
        sequence.recompute_paid_us += price_us * plan.counts[row] // max(chunk_tokens, 1)
        if plan.starts[row] + plan.counts[row] >= sequence.opened_length:
            _close_debt(state, sequence)


def _close_debt(state: State, sequence: Sequence) -> None:
    state.counters.add_recompute(sequence.recompute_paid_us, sequence.recompute_debt_us)
    sequence.record_decision(
        state.now_us,
        "recomputed",
        "its lost tokens are computed again",
        predicted_us=sequence.recompute_debt_us,
        took_us=sequence.recompute_paid_us,
    )
    sequence.recompute_debt_us = 0


def without_chunks_us(executor: Executor, flight: InFlight) -> int:
    """Predicted time of a step's decodes alone; 0 if it had none."""
    plan, rows = flight.plan, len(flight.plan.slots) - len(flight.chunks)
    if not rows:
        return 0
    cached = sum(plan.starts[:rows])
    return executor.cost_model.predict_us(StepShape(rows, rows, cached + rows, cached))
