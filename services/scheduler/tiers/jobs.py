"""What all jobs have in common: how one begins, and how it ends, whatever it has come to."""

from __future__ import annotations

from services.scheduler.state import Executor, State
from services.scheduler.tiers.state import Job, Tier
from shared.messages import KvRelease, ints


def fresh(state: State, executor: Executor, tier: Tier, blocks: list[int], keys: list[bytes]) -> Job:
    """A job that asks for these blocks, which are fenced from now on."""
    job = Job(
        number=state.tiers.number(),
        tier=tier.actor,
        generation=tier.generation,
        executor=executor.hello.executor,
        epoch=executor.epoch,
        blocks=blocks,
        keys=keys,
        began_us=state.now_us,
    )
    executor.ledger.begin_copy(blocks)
    state.tiers.jobs[job.number] = job
    return job


def executor_of(state: State, job: Job) -> Executor | None:
    """The incarnation that the job's blocks are of, if it lives."""
    executor = state.executors.get(job.executor)
    return executor if executor is not None and executor.epoch == job.epoch else None


def tier_of(state: State, job: Job) -> Tier | None:
    """The incarnation of the tier that the job is about, if it lives."""
    tier = state.tiers.named(f"kv_offload.{job.tier}")
    return tier if tier is not None and tier.generation == job.generation else None


def count(executor: Executor, job: Job, size_bytes: int) -> None:
    """So many bytes of the job wait for the link."""
    uncount(executor, job)
    job.queued_bytes = size_bytes
    (executor.up if job.up else executor.down).begin(size_bytes)


def uncount(executor: Executor, job: Job) -> None:
    """None of it does any more."""
    if job.queued_bytes:
        (executor.up if job.up else executor.down).end(job.queued_bytes)
        job.queued_bytes = 0


def finish(state: State, job: Job, *, release: bool = True) -> None:
    """Forget a job: its blocks are free of it, and (with `release`) so is its place in the arena. A tier that
    is given up for dead is told, too: it may live, and nobody else would end the lease for long."""
    del state.tiers.jobs[job.number]
    executor = executor_of(state, job)
    if executor is not None:
        executor.ledger.end_copy(job.blocks)
        uncount(executor, job)
    source = f"kv_offload.{job.tier}"
    tier = state.tiers.named(source)
    if release and (tier is None or tier.generation == job.generation):
        state.send(source, KvRelease(jobs=ints([job.number])))
