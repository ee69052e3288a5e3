"""Applies step results: each sampled id becomes a token of its sequence, in order and once.

`core` calls it. Results also update the cost model, the step log and the counters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as SequenceOf
from itertools import accumulate, pairwise
from typing import NamedTuple

from services.scheduler import headroom, lifecycle, overlap, preemption
from services.scheduler.kv_tiers import store
from services.scheduler.preemption import requeue
from services.scheduler.state.counters import LoggedStep
from services.scheduler.state.requests import MAX_IDS, Sequence, add_scores
from services.scheduler.state.state import Executor, InFlight, State
from shared.messages import ROW_REFUSED, GrammarFailed, GrammarReady, Ints, StepResult, Tokens, ints


class TokenRows(NamedTuple):
    """Columns of the rows of a result that give tokens."""

    at: SequenceOf[int]  # index of the id in the result
    rows: list[Sequence]  # with drafts, a sequence for each of its tokens
    ids: Ints
    nth: SequenceOf[int] = ()  # which token of its row each is; empty: each row has one

    def of(self, some: SequenceOf[int]) -> TokenRows:
        """Some of these rows."""
        nth = [self.nth[i] for i in some] if self.nth else ()
        return TokenRows(
            [self.at[i] for i in some], [self.rows[i] for i in some], ints([self.ids[i] for i in some]), nth
        )


def is_as_planned(executor: Executor, result: StepResult) -> bool:
    """True for a result with as many rows as its step in flight, none with more drafts than planned, and for
    a repeated one. Any other result would leave its step in flight for ever, or give tokens to the wrong
    sequences."""
    if result.step <= executor.step - len(executor.in_flight):
        return True
    flight = next((flight for flight in executor.in_flight if flight.step == result.step), None)
    if flight is None or len(result.done) != len(flight.rows):
        return False
    if not result.counts or not any(result.drafted):
        return True
    most = flight.drafts
    return len(result.drafted) == len(flight.rows) and all(
        drafted <= most.get(row, 0) for row, drafted in enumerate(result.drafted)
    )


def apply_result(state: State, executor: Executor, result: StepResult) -> None:
    """Apply results in the order of their steps. An early result waits; a repeated one does nothing."""
    if result.step > executor.step - len(executor.in_flight):
        executor.early_results.setdefault(result.step, result)
    while executor.in_flight and executor.in_flight[0].step in executor.early_results:
        _apply(state, executor, executor.early_results.pop(executor.in_flight[0].step))


def on_grammar_ended(state: State, source: str, news: GrammarReady | GrammarFailed) -> None:
    """A slot's grammar is compiled; or it cannot be, and its request fails."""
    if (executor := state.executors.get(source.removeprefix("executor."))) is None:
        return
    for sequence in executor.running:
        if (sequence.slot, sequence.generation) == (news.slot, news.generation):
            sequence.compiles_grammar = False
            if isinstance(news, GrammarFailed):
                lifecycle.fail(state, sequence.request, 400, news.message)
            elif news.compile_us:
                executor.note_compiled(sequence.request.tokenized.grammar)
            return


def _apply(state: State, executor: Executor, result: StepResult) -> None:
    flight = executor.in_flight.popleft()
    executor.pool.acknowledge(result.step)
    executor.steps_done += 1
    _note(state, executor, flight, result)
    executor.changes += 1  # after the cost model has learned: what is derived from it starts anew
    if result.error:
        _fail_step(state, executor, flight, result)
        return
    _send_prompt_scores(state, result)
    over: list[tuple[Sequence, str]] = []
    used, tokens = _give(state, executor, flight, result, over)
    state.counters.wasted_rows += len(flight.rows) - used
    state.counters.generated_tokens += tokens
    _end(state, executor, over)


def _send_prompt_scores(state: State, result: StepResult) -> None:
    """Send the log probabilities of prompts on. The choices of a request share one prompt."""
    for piece in result.prompts:
        sequence = state.sequences.get(piece.seq)
        if sequence is None or not sequence.request.keep_prompt_scores(piece):
            continue
        if shard := sequence.request.shard:
            state.send(f"detokenizer.{shard}", piece)


def _give(
    state: State, executor: Executor, flight: InFlight, result: StepResult, over: list[tuple[Sequence, str]]
) -> tuple[int, int]:
    """Append each row's token to its sequence and send the tokens on. Returns how many rows gave a token or a
    vector, and how many tokens. A row of an earlier placement is ignored. Builds whole columns, since this
    runs for each row of each step."""
    given, used = _tokens_of(flight, result)
    if flight.drafts:
        _take_back_drafts(state, executor, flight, result)
    if result.vectors:
        given = _without_pooled(state, dict(result.vectors), given, over)
    _send_tokens(state, executor, result, given)
    at, rows, ids, nth = given
    if result.logprobs:
        _keep_scores(result, at, rows)
    now_us = state.now_us
    alone = rows if not nth else dict.fromkeys(rows)  # tokens of one row come at once
    for since_us, times in Counter([s.last_token_us for s in alone]).items():  # one or two times
        if since_us:
            state.counters.inter_token_us.add(now_us - since_us, times)
    for s, token in zip(rows, ids, strict=True):
        tokens = s.tokens
        tokens.append(token)
        s.last_token_us = now_us
        if token in s.stop_ids:
            over.append((s, "stop"))
        elif len(tokens) >= s.max_length:
            over.append((s, "length"))
        if not s.first_token_us:
            s.first_token_us = now_us
            state.counters.ttft_us.add(now_us - s.request.arrival_us)
    for index, why in result.row_errors:
        sequence, placement = flight.rows[index]
        if sequence.placement == placement:
            over.append((sequence, why))
    return used, len(rows)


def _tokens_of(flight: InFlight, result: StepResult) -> tuple[TokenRows, int]:
    """The tokens for sequences that are still where the step was planned, and of how many rows they are."""
    if result.counts:
        at, rows, nth, first, used = list[int](), list[Sequence](), list[int](), 0, 0
        for (s, placement), count in zip(flight.rows, result.counts, strict=True):
            if s.placement == placement and result.ids[first] >= 0:
                at += range(first, first + count)
                rows += [s] * count
                nth += range(count)
                used += 1
            first += count
        return TokenRows(at, rows, ints([result.ids[i] for i in at]), nth), used
    rows, ids = [s for s, placement in flight.rows if s.placement == placement], result.ids
    everywhere: SequenceOf[int] = range(len(ids))  # of each row, its index in the result
    if len(rows) < len(ids) or min(ids, default=0) < 0:
        paired = enumerate(zip(flight.rows, ids, strict=True))
        everywhere = [i for i, ((s, placement), token) in paired if s.placement == placement and token >= 0]
        rows, ids = [flight.rows[i][0] for i in everywhere], ints([ids[i] for i in everywhere])
    return TokenRows(everywhere, rows, ids), len(rows)


def _take_back_drafts(state: State, executor: Executor, flight: InFlight, result: StepResult) -> None:
    """Drafts that were not kept, or not found, count as computed no longer; and what this step shows of
    drafts."""
    pace, counters, most = executor.drafting, state.counters, executor.hello.max_drafts
    pace.last_step = flight.step
    pace.last_pm = 1_000 * (sum(result.counts) - len(result.counts)) // len(flight.rows)
    for row, planned in flight.drafts.items():
        s, placement = flight.rows[row]
        if s.placement != placement:
            continue
        drafting, drafted, kept = s.drafting, 0, 0
        if result.counts:
            drafted, kept = result.drafted[row], result.counts[row] - 1
        s.computed -= planned - kept
        s.steps += planned - kept
        drafting.in_flight -= planned
        executor.count_decodes(kept - planned)
        is_refused = kept < drafted and not result.done[row]
        drafting.learn(drafted, kept, refused=is_refused)
        pace.learn(drafted, kept, refused=is_refused)
        if drafted:
            drafting.choose(pace.least_pm, most)
            drafting.tried_step = flight.step if is_refused else drafting.tried_step
            if drafting.in_turn and (drafting.count or (kept and pace.least_pm <= 1_000)):
                pace.ask(flight.rows[row])
            counters.drafts += 1
            counters.draft_tokens += drafted
            counters.accepted_tokens += kept


def _without_pooled(
    state: State, vectors: dict[int, bytes], given: TokenRows, over: list[tuple[Sequence, str]]
) -> TokenRows:
    """Keep the vectors of these rows, which end their sequences. Returns the rows with a token."""
    for index, s in zip(given.at, given.rows, strict=True):
        if index in vectors:
            s.vector = vectors[index]
            s.first_token_us = s.last_token_us = state.now_us
            state.counters.ttft_us.add(state.now_us - s.request.arrival_us)
            over.append((s, "stop"))
    return given.of([i for i, index in enumerate(given.at) if index not in vectors])


def _send_tokens(state: State, executor: Executor, result: StepResult, given: TokenRows) -> None:
    """Send the tokens of a step to the detokenizers. Called before the sequences have them."""
    shards = [s.request.shard for s in given.rows]
    for shard in filter(None, dict.fromkeys(shards)):
        mine = given
        if shards.count(shard) < len(shards):
            mine = given.of([i for i, other in enumerate(shards) if other == shard])
        for start in range(0, len(mine.rows), MAX_IDS):
            part = range(start, min(start + MAX_IDS, len(mine.rows)))
            some = mine if len(part) == len(mine.rows) else mine.of(part)
            state.send(f"detokenizer.{shard}", _tokens(executor, result, some))


def _tokens(executor: Executor, result: StepResult, given: TokenRows) -> Tokens:
    rows, counts, first = given.rows, ints([1]) * len(given.rows), [0] * len(given.rows)
    if given.nth:  # the tokens of a row are one entry
        begins = [i for i, nth in enumerate(given.nth) if i == 0 or not nth]
        counts = ints([end - begin for begin, end in pairwise([*begins, len(rows)])])
        rows, first = [rows[i] for i in begins], [given.nth[i] for i in begins]
    message = Tokens(
        executor=executor.hello.executor,
        step=result.step,
        seqs=ints([s.seq for s in rows]),
        first=ints([len(s.tokens) - s.prompt_tokens + nth for s, nth in zip(rows, first, strict=True)]),
        counts=counts,
        ids=given.ids,
    )
    if result.logprobs:
        starts = list(accumulate(result.top_counts, initial=0))  # of each row's alternatives
        for index in given.at:
            add_scores(message, result, index, slice(starts[index], starts[index + 1]))
    return message


def _keep_scores(result: StepResult, at: SequenceOf[int], rows: list[Sequence]) -> None:
    """Keep the log probabilities that requests ask for: another detokenizer may need them."""
    starts = list(accumulate(result.top_counts, initial=0))
    for index, s in zip(at, rows, strict=True):
        if s.scores is not None:
            add_scores(s.scores, result, index, slice(starts[index], starts[index + 1]))


def _end(state: State, executor: Executor, over: list[tuple[Sequence, str]]) -> None:
    for sequence, reason in over:
        if not sequence.is_live:
            continue  # another choice of its request has failed, and the request with it
        if reason in ("stop", "length"):
            lifecycle.finish(state, sequence, sequence.generated, reason)
        else:
            refused = reason.startswith(ROW_REFUSED)
            why = reason.removeprefix(ROW_REFUSED) if refused else f"{executor.source}: {reason}"
            tables = [(state.executors.get(s.executor), s.table) for s in sequence.request.sequences]
            lifecycle.fail(state, sequence.request, 400 if refused else 500, why)
            for there, table in tables:
                if there is not None and not refused:  # the KV may be NaN: no other sequence may use it
                    for block in table:
                        there.pool.forget(block)


def _note(state: State, executor: Executor, flight: InFlight, result: StepResult) -> None:
    """Record the step for traces, and update the cost model."""
    _learn(state, executor, flight, result)
    for _, note in flight.chunks:
        note.done_us = state.now_us
    plan = flight.plan
    entry = LoggedStep(
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
        tokens=sum(plan.counts) - sum(flight.drafts.values()) + sum(result.drafted),
        prefill_tokens=sum(plan.counts[-len(flight.chunks) :]) if flight.chunks else 0,
        micro_batch=plan.micro_batch,
        mode=plan.mode,
        failed=bool(result.error),
        host_us=result.host_us,
        queued_us=result.queued_us,
        segments=tuple(result.segments),
        drafts=sum(result.drafted),
        accepted=sum(result.counts) - len(result.counts),
    )
    chunked = [sequence.request for sequence, _ in flight.chunks]
    state.step_log.add(entry, executor.epoch, chunked, (s.request for s, _ in flight.rows))


def _learn(state: State, executor: Executor, flight: InFlight, result: StepResult) -> None:
    """Update the cost model. `took_us` is the device's time. The loop is the time from plan to result without
    it and without the wait for earlier steps."""
    headroom.lower_headroom(executor)
    took_us, lived_us = result.forward_us + result.sample_us, result.end_wall_us - result.start_wall_us
    executor.pace.note(flight.step, len(flight.rows), took_us, state.now_us, busy=bool(executor.running))
    if result.error or lived_us <= 0:
        return  # the engine does not measure
    costs, pace = executor.cost_model, executor.pace
    preemption.pay_debt(state, executor, flight, took_us)
    overlap.learn_lead(executor, flight, result)
    shape = flight.shape
    if flight.drafts:
        drafts = sum(flight.drafts.values()) if executor.has_graphs else sum(result.drafted)
        shape = shape.with_drafts(drafts, again=not executor.has_graphs)
    costs.observe(shape, took_us)
    if not flight.chunks:
        executor.drafting.times.observe(costs, flight.shape, shape, took_us)
    costs.observe_loop(max(0, state.now_us - flight.planned_us - result.queued_us - lived_us))
    if result.host_us:
        costs.observe_host(sum(s.host_fed for s, _ in flight.rows), result.host_us)
    chunk_us = took_us - preemption.without_chunks_us(executor, flight) if flight.chunks else 0
    pace.note_step(took_us, flight.predicted_us, max(chunk_us, 0))
    state.counters.add_step(took_us, flight.predicted_us)


def _fail_step(state: State, executor: Executor, flight: InFlight, result: StepResult) -> None:
    """The engine failed on a step. Sequences in the step fail, since one of them may be the cause. All others
    are queued again with their tokens, since no KV of the executor can be trusted."""
    named = {sequence for sequence, _ in (*flight.rows, *flight.chunks)}
    for sequence in [s for s in executor.running if s in named and s.opened_after < result.step]:
        message = f"step {result.step} of {executor.source} failed: {result.error}"
        lifecycle.fail(state, sequence.request, 500, message)
    for sequence in list(executor.running):
        sequence.record_decision(
            state.now_us, "requeue", "a step of its executor failed", tokens=len(sequence.tokens)
        )
        headroom.withdraw(state, sequence, 0)
        requeue(state, sequence)
    executor.pool.forget_cache()
    store.on_step_failed(state, executor, result.step)
