"""`check` verifies every invariant of the scheduler's state. `World` calls it after events.

What the state keeps so that a decision needs no loop over everything (counts, sums, caches, heaps, timers)
equals a recount. `BlockPool.check` does the same for one pool.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from services.scheduler.state import requests
from services.scheduler.state.requests import Phase, Sequence
from services.scheduler.state.state import GRAMMARS, MAX_DROPPED, PREFILL, Executor, RowSums, State
from services.scheduler.state.transfers import JobPhase, Tiers
from services.scheduler.state.waiting_queue import (
    ClassQueue,
    Client,
    Head,
    TenantBacklog,
    WaitingQueue,
    tokens_of,
)
from shared.kv_blocks import extend, root_key
from shared.messages import AT_DEVICE

PLACES = {Phase.WAITING: (1, 0, 0), Phase.RUNNING: (0, 1, 0), Phase.CLOSING: (0, 0, 1)}


def check(state: State) -> None:
    """Raise AssertionError unless all invariants hold: of the queue, the tiers and each executor, and of
    what they have of each other. For tests, after any event: it looks at everything."""
    _check_queue(state.waiting)
    _check_tiers(state.tiers)
    _check_requests(state)
    _check_executors(state)
    watched: dict[int, int] = {}
    for at_us, seq in state.deadlines.heap:
        watched[seq] = min(at_us, watched.get(seq, at_us))
    late = (s for s in state.sequences.values() if watched.get(s.seq, s.due_us + 1) > s.due_us)
    assert not list(late), "no timer watches a deadline"
    assert len(state.dropped) <= MAX_DROPPED
    assert len(state.ended.by_key) <= requests.MAX_ENDED


def _check_requests(state: State) -> None:
    """Each sequence that has not ended waits in one group, runs on one executor, or is closing."""
    live = {s.seq: s for request in state.requests.values() for s in request.sequences}
    live = {seq: s for seq, s in live.items() if s.phase is not Phase.ENDED}
    assert state.sequences == live, "a sequence has no request, or a request lost one"
    assert all(request.key == key for key, request in state.requests.items())
    assert all(any(s.seq in live for s in r.sequences) for r in state.requests.values()), "it has ended"
    blamed = {key for key, request in state.requests.items() if request.executor_deaths}
    assert blamed <= state.suspects <= state.requests.keys(), "a suspect is overlooked, or has ended"
    waiting = Counter(s.seq for group in state.waiting for s in group.sequences)
    running = Counter(s.seq for executor in state.executors.values() for s in executor.running)
    for seq, s in live.items():
        places = waiting[seq], running[seq], int(s.close is not None)
        assert places == PLACES[s.phase], f"{s.phase}: waits, runs and has ended {places} times"
        if s.phase is not Phase.RUNNING:
            _check_left(s)
    assert waiting.keys() | running.keys() <= live.keys(), "a sequence that has ended waits or runs"


def _check_executors(state: State) -> None:
    """Counts over the executors of a model, and the jobs of each one."""
    executors, jobs = state.executors, list(state.tiers.jobs.values())
    assert state.by_model.keys() == {e.hello.model for e in executors.values()}
    for model, served in state.by_model.items():
        there = [e for e in executors.values() if e.hello.model == model]
        assert served.executors == there
        assert served.running_by_class == _by_class(s for e in there for s in e.running)
        assert served.running_by_tenant == Counter(s.tenant for e in there for s in e.running)
    assert not executors.keys() & (state.dropped.keys() | state.asleep.keys() | state.excluded.keys())
    assert state.some_leave or not any(e.draining or e.role == PREFILL for e in executors.values())
    assert all(job.executor in executors for job in jobs), "a job outlived its executor"
    for name, executor in executors.items():
        _check_executor(executor)
        assert (name, executor.epoch) == (executor.hello.executor, executor.hello.exec_epoch)
        assert len(executor.in_flight) <= state.limits.window, "more steps are in flight than the window"
        mine = [job for job in jobs if job.executor == name]
        copied = Counter(block for job in mine for block in job.blocks)
        assert all(job.epoch == executor.epoch for job in mine)
        assert executor.pool.copies == copied
        for link, up in ((executor.up, True), (executor.down, False)):
            queued = [job.queued_bytes for job in mine if job.up is up and job.queued_bytes]
            assert (link.pending_jobs, link.pending_bytes) == (len(queued), sum(queued))
        loads = {job.seq: job.number for job in mine if job.up}
        waits = {s.seq: s.copies.load_job for s in executor.running if s.copies.load_job}
        assert waits.items() <= loads.items(), "a sequence waits for a load that has ended"


def _check_executor(executor: Executor) -> None:
    """Raise AssertionError unless the invariants hold of the pool, the steps in flight, and what is kept
    of the running sequences: counts, sums and `settled` equal a recount."""
    pool, running, flights, size = (
        executor.pool,
        executor.running,
        executor.in_flight,
        executor.hello.block_tokens,
    )
    pool.check()
    assert pool.slots == len(pool.free_slots) + pool.fenced_slots + len(running), "a slot is lost"
    assert len({s.slot for s in running}) == len(running), "two sequences have one slot"
    assert not {s.slot for s in running} & set(pool.free_slots), "a slot in use is free"
    assert pool.reserved == sum(s.reserved for s in running), "a reservation has no sequence"
    held = Counter(block for s in running for block in s.table)
    assert held == Counter({block: n for block, n in enumerate(pool.refs) if n}), "a table is not counted"
    first = executor.step - len(flights) + 1
    assert [flight.step for flight in flights] == list(range(first, executor.step + 1)), "a step is lost"
    assert pool.acked_step == first - 1 == executor.steps_done, "a step has a result and is not acknowledged"
    assert all(first < step <= executor.step for step in executor.early_results), (
        "a result waits for no other"
    )
    rows = Counter(s.seq for flight in flights for s, at in flight.rows if s.placement == at)
    drafts = Counter[int]()
    for flight in flights:
        at = zip(flight.plan.sample_rows, flight.rows, strict=True)
        fed, counts = flight.plan.from_device, flight.plan.counts
        of_rows = [counts[row] - 1 if fed[row] == AT_DEVICE else 0 for row, _ in at]
        assert flight.drafts == {row: count for row, count in enumerate(of_rows) if count}, (
            "drafts are not counted"
        )
        for (s, at), count in zip(flight.rows, of_rows, strict=True):
            drafts[s.seq] += count if s.placement == at else 0
    for s in running:
        assert s.drafting.in_flight == drafts[s.seq], "a draft in flight is of no step"
        _check_running(s, size, rows.pop(s.seq, 0))
        assert (s.executor, s.phase) == (executor.hello.executor, Phase.RUNNING), "it runs elsewhere"
        assert s.opened_after <= executor.step
        assert s.generation <= executor.generation
        assert s.parent is None or (s.parent in running and s.parent.is_prefilling), "its parent has gone"
        root, keys = (
            root_key(executor.hello.fingerprint, s.tenant, s.request.tokenized.adapter),
            list[bytes](),
        )
        extend(keys, root, s.tokens, size, s.registered * size)
        keyed = zip(s.table, keys, strict=False)
        assert all(pool.key_of[block] in (key, None) for block, key in keyed), "a block has another key"
    assert not rows, "a row in flight is of no running sequence"
    assert {target for _, target in executor.fork_copies} <= held.keys(), "a copy for a fork has no block"
    assert executor.host_fed == sum(s.host_fed for s in running)
    assert executor.fixed_lengths == sum(s.has_fixed_end for s in running)
    assert executor.micro_batch_rows == [sum(s.micro_batch == at for s in running) for at in (0, 1)]
    assert executor.running_by_class == _by_class(running)
    assert executor.running_by_tenant == Counter(s.tenant for s in running)
    assert len(executor.grammars) <= GRAMMARS
    places = {placed.digest for placed in executor.adapters.values() if placed.loaded}
    assert len({placed.digest for placed in executor.adapters.values()}) == len(executor.adapters)
    assert all(1 <= place <= executor.hello.adapter_places for place in executor.adapters)
    wanted = {s.request.tokenized.adapter for s in running} - {""}
    assert wanted <= places, "a sequence runs without its adapter in a place"
    recount, kept = RowSums(executor.row_changes), executor.sums
    for s in running:
        recount.count(s, 1, size)
    if kept.row_changes == executor.row_changes:
        assert _counts(kept) == _counts(recount), "a row has changed, and the sums do not follow"
    assert executor.settled != executor.changes or flights or not running, (
        "it waits for no step and no result"
    )


def _counts(sums: RowSums) -> tuple[int, int, list[int], int, int]:
    """The sums over the rows, without what is derived from them."""
    return sums.decodes, sums.decode_tokens, sums.prompt_tokens, sums.backlog_tokens, sums.backlog_prompts


def _by_class(sequences: Iterable[Sequence]) -> list[int]:
    """How many of these sequences are of each class."""
    found = Counter(s.request.level for s in sequences)
    return [found[level] for level in range(len(requests.CLASS_NAMES))]


def _check_running(s: Sequence, block_tokens: int, in_flight: int) -> None:
    """Raise AssertionError unless the invariants of a running sequence hold. `in_flight`: rows of steps
    without a result that sample a token of it."""
    assert min(s.slot, s.reserved) >= 0, "a running sequence has no slot"
    assert s.prompt_tokens <= s.opened_length <= len(s.tokens) < s.max_length
    assert 0 <= s.computed < s.max_length, "more than the sequence is planned"
    drafts = s.drafting.in_flight
    assert s.planned_length == len(s.tokens) + in_flight + drafts, "a row in flight is not planned"
    assert s.computed <= len(s.table) * block_tokens, "a computed token has no block"
    assert len(set(s.table)) == len(s.table), "a block is twice in a table"
    assert s.table_capacity == s.table_sent * block_tokens <= len(s.table) * block_tokens
    assert s.registered <= len(s.table), "a key has no block"
    assert s.adopted <= len(s.table)
    assert not s.copies.load_job or s.is_prefilling, "a decode waits for a load"
    assert s.parent is None or not (s.table or s.computed), "it has begun before its parent ended"


def _check_left(s: Sequence) -> None:
    """Raise AssertionError if the sequence runs nowhere and still has something of an executor."""
    kept = s.table or s.table_sent or s.table_capacity or s.registered or s.reserved
    kept = kept or s.computed or s.opened_length or s.adopted or s.copies.stored or s.drafting.in_flight
    assert not kept, "it has blocks, and runs nowhere"
    assert (s.executor, s.slot, s.parent) == ("", -1, None), "it has a slot, and runs nowhere"
    waits = s.copies.load_job or s.copies.store_job or s.compiles_grammar or s.debt.owed_us
    assert not waits, "it waits for an executor that it has left"


def _check_queue(waiting: WaitingQueue) -> None:
    """Raise AssertionError unless the queues, and the sums over them, are those of the waiting groups."""
    backlog: dict[str, TenantBacklog] = {}
    for number, group in waiting.groups.items():
        assert number == group.number == group.sequences[0].seq, "a group has another number"
        assert all(s.group == number for s in group.sequences), "a sequence names another group"
        assert group.parked != (group.queue is not None), "a group is in no queue, or parked in one"
        held = backlog.setdefault(group.client[0], TenantBacklog())
        held.groups += 1
        held.tokens += sum(len(s.tokens) for s in group.sequences)
    assert waiting.tenants == backlog, "the backlogs of tenants are not those of their groups"
    assert waiting.queued_tokens == sum(held.tokens for held in backlog.values())
    assert {g.number for g in waiting.parked} == {g.number for g in waiting.groups.values() if g.parked}
    placed = len(waiting.parked)
    for (model, level), queue in waiting.queues.items():
        assert (queue.model, queue.level) == (model, level)
        fresh = [group for groups in queue.clients.values() for group in groups.values()]
        here, placed = [*queue.preempted, *fresh], placed + queue.groups
        assert all(group.queue is queue and group.request.tokenized.model == model for group in here)
        assert all(group.resumes for group in queue.preempted)
        assert not any(g.resumes for g in fresh)
        sums = len(here), sum(map(tokens_of, here)), sum(group.max_tokens for group in here)
        assert (queue.groups, queue.tokens, queue.max_tokens) == sums, "a queue's sums are not its groups'"
        orders = [[g.order for g in groups.values()] for groups in queue.clients.values()]
        assert all(order == sorted(order) for order in (*orders, [g.order for g in queue.preempted]))
        tokens = {client: sum(map(tokens_of, of.values())) for client, of in queue.clients.items()}
        assert queue.client_tokens == tokens
        assert all(queue.clients.values())
        for heads in (queue.heads, [*queue.idle_heads, *(((), 0, client) for client in queue.busy)]):
            _check_heads(waiting, queue, heads)
    assert placed == len(waiting.groups), "a group is in two places"


def _check_heads(waiting: WaitingQueue, queue: ClassQueue, heads: list[Head]) -> None:
    """Each client has an entry that is at most its first group's rank: so none is overlooked."""
    least: dict[Client, tuple[tuple[int, ...], int]] = {}
    for rank, number, client in heads:
        least[client] = min(least.get(client, (rank, number)), (rank, number))
    order = waiting.policy.function("order")
    for client, groups in queue.clients.items():
        first = next(iter(groups.values()))
        own = order(*first.order, waiting.served.get(client)), first.number
        assert least.get(client, ((1 << 62,), 0)) <= own, "a heap overlooks a client"


def _check_tiers(tiers: Tiers) -> None:
    """Raise AssertionError unless each lookup and job is of a tier in use; a copy may outlive it."""
    used = {tier.actor: tier for tier in tiers.by_host.values()}
    assert all(tier.host_id == host for host, tier in tiers.by_host.items()), "a tier serves another host"
    assert not used.keys() & tiers.standby.keys(), "a tier is in use and stands by"
    assert all(lookup.offload in used for lookup in tiers.lookups.values()), "a lookup outlived its tier"
    assert not tiers.lookups.keys() & tiers.jobs.keys(), "a lookup and a job have one number"
    for number, job in tiers.jobs.items():
        assert (job.number, len(job.blocks)) == (number, len(job.keys)), "a block of a job has no key"
        assert job.phase is JobPhase.COPYING or job.offload in used, "a job waits for a tier that is gone"
        assert len(job.valid) == (len(job.blocks) if job.up else 0)
        assert job.up or not job.seq, "a store has a sequence"
