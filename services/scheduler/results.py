"""What a step brought: the sampled ids become tokens of their sequences, in order, once."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from services.scheduler import closing, growth
from services.scheduler.leaving import wait_again, withdraw
from services.scheduler.records import Phase, Sequence
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
    broken = dict(result.row_errors)
    batches: dict[str, _Batch] = {}
    over: list[tuple[Sequence, str]] = []
    tops = _tops(result)
    wasted = 0
    for index, (sequence, placement) in enumerate(flight.rows):
        token = result.ids[index]
        if sequence.placement != placement or sequence.phase is not Phase.RUNNING or token < 0:
            if broken and index in broken and sequence.placement == placement and sequence.live:
                over.append((sequence, broken[index]))
            wasted += 1
            continue
        shard = sequence.request.shard
        if shard:
            batch = batches.get(shard) or batches.setdefault(shard, _Batch())
            if len(batch.seqs) == MAX_ROWS:
                state.send(f"detokenizer.{shard}", _message(executor, result.step, batch))
                batch = batches[shard] = _Batch()
            batch.seqs.append(sequence.seq)
            batch.first.append(len(sequence.tokens) - sequence.prompt_tokens)
            batch.ids.append(token)
            if result.logprobs:
                _add_logprobs(batch, result, index, tops)
        sequence.tokens.append(token)
        sequence.last_token_us = state.now_us
        if token in sequence.stop_ids:
            over.append((sequence, "stop"))
        elif len(sequence.tokens) >= sequence.max_length:
            over.append((sequence, "length"))
        if not sequence.first_token_us:
            sequence.first_token_us = state.now_us
            state.meter.ttft_us.add(state.now_us - sequence.request.arrival_us)
    state.meter.wasted_rows += wasted
    state.meter.generated_tokens += len(flight.rows) - wasted
    for shard, batch in batches.items():
        state.send(f"detokenizer.{shard}", _message(executor, result.step, batch))
    _end(state, executor, over)


def _end(state: State, executor: Executor, over: list[tuple[Sequence, str]]) -> None:
    for sequence, reason in over:
        if reason in ("stop", "length"):
            closing.finish(state, sequence, sequence.generated, reason)
        else:
            closing.fail_one(
                state, sequence, 500, f"a logits processor on {executor.source} failed: {reason}"
            )


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


def _tops(result: StepResult) -> list[int]:
    """Where each row's alternatives start in `top_ids`."""
    starts, at = [], 0
    for count in result.top_counts:
        starts.append(at)
        at += count
    return starts


def _add_logprobs(batch: _Batch, result: StepResult, index: int, tops: list[int]) -> None:
    batch.logprobs.append(result.logprobs[index])
    count, start = result.top_counts[index], tops[index]
    batch.top_counts.append(count)
    batch.top_ids.extend(result.top_ids[start : start + count])
    batch.top_logprobs.extend(result.top_logprobs[start : start + count])


def _message(executor: Executor, step: int, batch: _Batch) -> Tokens:
    return Tokens(
        executor=executor.hello.executor,
        step=step,
        seqs=batch.seqs,
        first=batch.first,
        counts=ints([1]) * len(batch.seqs),
        ids=batch.ids,
        logprobs=batch.logprobs,
        top_counts=batch.top_counts,
        top_ids=batch.top_ids,
        top_logprobs=batch.top_logprobs,
    )
