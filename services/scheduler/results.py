"""What a step brought: the sampled ids become tokens of their sequences, in order, once."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from itertools import accumulate

from services.scheduler import closing, growth
from services.scheduler.leaving import wait_again, withdraw
from services.scheduler.records import Sequence
from services.scheduler.state import Executor, InFlight, State
from services.scheduler.steps import StepRecord
from shared.messages import StepResult, Tokens, floats, ints

MAX_ROWS = 256  # in one Tokens: with 20 alternatives each 48 of the 64 KiB that a message may have


@dataclass(slots=True)
class _Batch:
    """The tokens of one step for one detokenizer shard."""

    seqs: array[int] = field(default_factory=ints)
    first: array[int] = field(default_factory=ints)
    ids: array[int] = field(default_factory=ints)
    logprobs: array[float] = field(default_factory=floats)
    top_counts: array[int] = field(default_factory=ints)
    top_ids: array[int] = field(default_factory=ints)
    top_logprobs: array[float] = field(default_factory=floats)


def fits(executor: Executor, result: StepResult) -> bool:
    """True for the result of a step in flight, row for row, and for one seen before. Any other would leave
    its step in flight for ever, or give tokens to the wrong sequences."""
    if result.step <= executor.step - len(executor.in_flight):
        return True
    flight = next((flight for flight in executor.in_flight if flight.step == result.step), None)
    return flight is not None and len(result.ids) == len(flight.rows)


def take(state: State, executor: Executor, result: StepResult) -> None:
    """Apply results in the order of their steps: one that comes early waits for those before it, one seen
    before does nothing."""
    if result.step > executor.step - len(executor.in_flight):
        executor.early.setdefault(result.step, result)
    while executor.in_flight and executor.in_flight[0].step in executor.early:
        _apply(state, executor, executor.early.pop(executor.in_flight[0].step))


def _apply(state: State, executor: Executor, result: StepResult) -> None:
    flight = executor.in_flight.popleft()
    executor.ledger.acknowledge(result.step)
    executor.steps_done += 1
    _note(state, executor, flight, result)
    if result.error:
        _fail_step(state, executor, result)
        return
    over: list[tuple[Sequence, str]] = []
    given = _give(state, executor, flight, result, over)
    state.meter.wasted_rows += len(flight.rows) - given
    state.meter.generated_tokens += given
    _end(state, executor, over)


def _give(
    state: State, executor: Executor, flight: InFlight, result: StepResult, over: list[tuple[Sequence, str]]
) -> int:
    """Append each row's token to its sequence and send them on; how many there were. A row of an earlier
    placement gives nothing. This loop runs for each row of each step, hence the local names."""
    outgoing = _Outgoing(state, executor, result)
    shard, batch, given, now_us = "", _Batch(), 0, state.now_us
    for index, (sequence, placement) in enumerate(flight.rows):
        token = result.ids[index]
        if sequence.placement != placement or token < 0:
            continue
        given += 1
        tokens, request = sequence.tokens, sequence.request
        if request.shard:
            if request.shard != shard or len(batch.ids) == MAX_ROWS:
                shard, batch = request.shard, outgoing.batch(request.shard)
            batch.seqs.append(sequence.seq)
            batch.first.append(len(tokens) - sequence.prompt_tokens)
            batch.ids.append(token)
            if result.logprobs:
                outgoing.add_logprobs(batch, index)
        tokens.append(token)
        sequence.last_token_us = now_us
        if token in sequence.stop_ids:
            over.append((sequence, "stop"))
        elif len(tokens) >= sequence.max_length:
            over.append((sequence, "length"))
        if not sequence.first_token_us:
            sequence.first_token_us = now_us
            state.meter.ttft_us.add(now_us - request.arrival_us)
    outgoing.send()
    for index, why in result.row_errors:
        sequence, placement = flight.rows[index]
        if sequence.placement == placement:
            over.append((sequence, why))
    return given


def _end(state: State, executor: Executor, over: list[tuple[Sequence, str]]) -> None:
    for sequence, reason in over:
        if not sequence.live:
            continue  # another choice of its request has failed, and the request with it
        if reason in ("stop", "length"):
            closing.finish(state, sequence, sequence.generated, reason)
        else:
            closing.fail(state, sequence.request, 500, f"{executor.source}: {reason}")


def _note(state: State, executor: Executor, flight: InFlight, result: StepResult) -> None:
    """Keep the step for traces, and learn from its times."""
    _learn(state, executor, flight, result)
    for _, note in flight.chunks:
        note.done_us = state.now_us
    plan = flight.plan
    record = StepRecord(
        executor=executor.hello.executor,
        step=flight.step,
        planned_us=flight.planned_us,
        result_us=state.now_us,
        start_wall_us=result.start_wall_us,
        end_wall_us=result.end_wall_us,
        forward_us=result.forward_us,
        sample_us=result.sample_us,
        wait_us=result.wait_us,
        rows=len(plan.slots),
        tokens=sum(plan.counts),
        prefill_tokens=sum(plan.counts[-len(flight.chunks) :]) if flight.chunks else 0,
        micro_batch=plan.micro_batch,
        mode=plan.mode,
        failed=bool(result.error),
        host_us=result.host_us,
        queued_us=result.queued_us,
    )
    chunked = [sequence.request for sequence, _ in flight.chunks]
    state.steps.add(record, executor.epoch, chunked, (s.request for s, _ in flight.rows))


def _learn(state: State, executor: Executor, flight: InFlight, result: StepResult) -> None:
    """What the step says about costs. `took_us` is the device's time; beside it and the wait behind the step
    before, everything from plan to result is the loop."""
    growth.stepped(executor)
    took_us, lived_us = result.forward_us + result.sample_us, result.end_wall_us - result.start_wall_us
    executor.pace.note(flight.step, len(flight.rows), took_us, state.now_us, busy=bool(executor.running))
    if result.error or lived_us <= 0:
        return  # an engine that does not say
    costs, pace = executor.costs, executor.pace
    costs.observe(flight.shape, took_us)
    costs.observe_loop(max(0, state.now_us - flight.planned_us - result.queued_us - lived_us))
    if result.host_us:
        costs.observe_host(sum(s.host_fed for s, _ in flight.rows), result.host_us)
    pace.step_us += (took_us - pace.step_us) // 8 if pace.step_us else took_us
    state.meter.add_step(took_us, flight.predicted_us)


def _fail_step(state: State, executor: Executor, result: StepResult) -> None:
    """The engine failed on a step: no sequence that it may have touched can trust its KV any more, nor can
    the prefix cache. Those that came later, and may stand on cached blocks, start over."""
    for sequence in [s for s in executor.running if s.opened_after < result.step]:
        message = f"step {result.step} of {executor.source} failed: {result.error}"
        closing.fail(state, sequence.request, 500, message)
    for sequence in list(executor.running):
        sequence.decide(state.now_us, "requeue", "a step before it failed", tokens=len(sequence.tokens))
        withdraw(state, sequence, 0)
        wait_again(state, sequence)
    executor.ledger.forget_cache()


class _Outgoing:
    """The tokens of one step on their way to the detokenizer shards."""

    def __init__(self, state: State, executor: Executor, result: StepResult) -> None:
        self._state = state
        self._executor = executor
        self._result = result
        self._batches: dict[str, _Batch] = {}
        self._tops = list(accumulate(result.top_counts, initial=0))  # where each row's alternatives start

    def batch(self, shard: str) -> _Batch:
        """A batch of a shard with room for a row."""
        batch = self._batches.setdefault(shard, _Batch())
        if len(batch.ids) == MAX_ROWS:
            self._send(shard, batch)
            batch = self._batches[shard] = _Batch()
        return batch

    def add_logprobs(self, batch: _Batch, index: int) -> None:
        """The logprobs of a row, for the id that was just added."""
        result, start = self._result, self._tops[index]
        batch.logprobs.append(result.logprobs[index])
        count = result.top_counts[index]
        batch.top_counts.append(count)
        batch.top_ids.extend(result.top_ids[start : start + count])
        batch.top_logprobs.extend(result.top_logprobs[start : start + count])

    def send(self) -> None:
        """Everything that is left."""
        for shard, batch in self._batches.items():
            self._send(shard, batch)

    def _send(self, shard: str, batch: _Batch) -> None:
        message = Tokens(
            executor=self._executor.hello.executor,
            step=self._result.step,
            seqs=batch.seqs,
            first=batch.first,
            counts=ints([1]) * len(batch.seqs),
            ids=batch.ids,
            logprobs=batch.logprobs,
            top_counts=batch.top_counts,
            top_ids=batch.top_ids,
            top_logprobs=batch.top_logprobs,
        )
        self._state.send(f"detokenizer.{shard}", message)
