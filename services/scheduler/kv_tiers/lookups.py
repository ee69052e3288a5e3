"""This module asks the tiers for what a waiting unit needs, and begins and ends jobs for its neighbours.

A tier is asked when the unit arrives, so that the remote tier can begin to bring what is missing; it is asked
again at the unit's turn, if the answer is old and the device does not hold it all.

A job is a copy of blocks up (load.py) or down (store.py): `fresh` begins one, and `finish` ends it, whatever
it has come to.
"""

from __future__ import annotations

from services.scheduler import prefix_cache
from services.scheduler.recompute_cost import Recompute
from services.scheduler.state.requests import Sequence
from services.scheduler.state.state import Executor, State
from services.scheduler.state.transfers import (
    ANSWER_US,
    MISSES,
    REMOTE,
    REST_US,
    Answer,
    Job,
    Lookup,
    Place,
    Tier,
)
from services.scheduler.state.waiting_queue import Unit
from shared.messages import KvFound, KvLookup, KvRelease, ints

WAIT_US, MOST_WAIT_US = 20_000, 200_000  # an admission waits so long for answers, by what they may save
STALE_US = 2_000_000
FEW_BLOCKS = 3  # of a prompt: computed with its last tokens before an answer is there
MAX_KEYS = 1_000  # 32 of the 64 KiB that a message may have


def arrived(state: State, unit: Unit) -> None:
    """A unit begins to wait: ask every tier that it may start above. Where the device holds it all, too: what
    is asked for often stays in a tier, and goes on to the remote one."""
    for executor, tier in _places(state, unit):
        if _place(executor, tier) not in unit.answers:
            _ask(state, executor, tier, unit)


def refresh(state: State, unit: Unit) -> None:
    """A unit is the next to start, and lacks room: so that its turn does not wait for an answer, ask before
    that where there is none, or the last one will be old."""
    for executor, tier in _places(state, unit):
        answer = unit.answers.get(_place(executor, tier))
        old = answer is None or _is_old(state, executor, tier, unit, STALE_US // 2)
        if old and not _covered(executor, unit):
            _ask(state, executor, tier, unit)


def pending(state: State, unit: Unit) -> bool:
    """True while the unit should wait for an answer, or for the end of a copy of its tail. Asks again where
    the last answer is old, which one may be again when it comes: but a turn lasts MOST_WAIT_US at most."""
    places, head = _places(state, unit), unit.sequences[0]
    if not unit.turn_us or state.now_us > unit.turn_us + STALE_US:
        unit.turn_us = state.now_us
    if any(prefix_cache.tail_is_copied(executor, head) for executor, _ in places):
        return state.now_us < unit.turn_us + MOST_WAIT_US
    if all(_waited(state, executor, head, unit.turn_us) for executor, _ in places):
        return False
    waits = False
    for executor, tier in places:
        answer = unit.answers.get(_place(executor, tier))
        ask = answer is None or _is_old(state, executor, tier, unit, STALE_US)
        silent = (
            answer is not None and answer.at_us < 0 and not _waited(state, executor, head, answer.asked_us)
        )
        if not (ask or silent) or _covered(executor, unit):
            continue
        waits = not ask or _ask(state, executor, tier, unit) is not None or waits
    return waits


def _waited(state: State, executor: Executor, sequence: Sequence, since_us: int) -> bool:
    """True when an answer has been waited for as long as computing would take that it may save: waiting in
    vain costs no more. After a burst of long prompts the answers lie behind it in our own queue."""
    waited_us = state.now_us - since_us
    if waited_us < WAIT_US or waited_us >= MOST_WAIT_US:
        return waited_us >= MOST_WAIT_US
    held = len(prefix_cache.lookup(executor, sequence)) * executor.hello.block_tokens
    return waited_us >= Recompute.of(executor).tokens_us(held, len(sequence.tokens) - held)


def _is_old(state: State, executor: Executor, tier: Tier, unit: Unit, stale_us: int) -> bool:
    """Something may have come since the answer: of a paused sequence that lacks some, what was stored after
    its pause."""
    answer = unit.answers[_place(executor, tier)]
    if answer.at_us < 0:
        return False
    if state.now_us - answer.at_us > stale_us:
        return True
    held = len(prefix_cache.lookup(executor, unit.sequences[0]))
    return unit.resumes and tier.stores != answer.stores and not all(answer.found[held:])


def found(state: State, source: str, message: KvFound) -> None:
    """An answer. One that comes after the unit has started is of no use."""
    tiers = state.tiers
    lookup, tier = tiers.lookups.get(message.job), tiers.named(source)
    if lookup is None or tier is None or tier.actor != lookup.tier:
        return
    del tiers.lookups[message.job]
    tier.answered()
    unit = state.waiting.units.get(lookup.unit)
    answer = unit.answers.get(lookup.place) if unit is not None else None
    if answer is not None and answer.job == message.job:
        answer.found, answer.at_us = tuple(message.tiers), state.now_us
        answer.fetched.update(at for at, where in enumerate(message.tiers) if where == REMOTE)


def expire(state: State) -> None:
    """Lookups that nobody has answered; the oldest are first. Many at one time are one miss: after a burst
    their answers may lie behind it in our own queue."""
    lookups, silent = state.tiers.lookups, dict[str, None]()
    while lookups:
        job, lookup = next(iter(lookups.items()))
        if state.now_us < lookup.asked_us + ANSWER_US:
            break
        del lookups[job]
        silent[lookup.tier] = None
    for actor in silent:
        missed(state, actor)


def missed(state: State, actor: str) -> None:
    """A tier has not answered. After a few times in a row it is left alone for a while."""
    for tier in state.tiers.by_host.values():
        if tier.actor == actor:
            tier.misses += 1
            if tier.misses >= MISSES:
                tier.rest_until_us = state.now_us + REST_US
                state.meter.tier_rests += 1


def _places(state: State, unit: Unit) -> list[tuple[Executor, Tier]]:
    """One executor of the model for each tier and kind of engine that stores in it."""
    tiers = state.tiers
    if not tiers.by_host:
        return []
    places: dict[Place, tuple[Executor, Tier]] = {}
    for executor in state.executors.values():
        tier = tiers.below(executor.hello, state.now_us)
        if tier is None or not executor.pool.write_back or executor.draining:
            continue
        if executor.hello.model == unit.request.asked.model:
            places.setdefault(_place(executor, tier), (executor, tier))
    return list(places.values())


def _place(executor: Executor, tier: Tier) -> Place:
    return tier.actor, executor.hello.fingerprint


def _ask(state: State, executor: Executor, tier: Tier, unit: Unit) -> Answer | None:
    head = unit.sequences[0]
    keys = wanted(executor, head)
    if not keys:
        return None
    number, place = state.tiers.number(), _place(executor, tier)
    before = unit.answers.get(place)
    fetched = before.fetched if before is not None else set[int]()
    answer = unit.answers[place] = Answer(state.now_us, stores=tier.stores, job=number, fetched=fetched)
    state.tiers.lookups[number] = Lookup(unit.number, place, state.now_us)
    fingerprint = executor.hello.fingerprint
    # Every key, not up to the first miss: what the device shares with others was never copied down.
    message = KvLookup(job=number, keys=b"".join(keys), prefix=False, fingerprint=fingerprint, promote=True)
    state.send(tier.source, message, unit.request.trace)
    return answer


def wanted(executor: Executor, sequence: Sequence) -> list[bytes]:
    """Keys of everything that a tier may hold of a sequence, in order; the tail of a paused one is last. The
    last token is always computed, since it is sampled from."""
    prefix_cache.name_blocks(executor, sequence)
    full = (len(sequence.tokens) - 1) // executor.hello.block_tokens
    keys = sequence.keys[: min(full, MAX_KEYS)]
    if sequence.tail.key and sequence.tail.at == len(keys) and sequence.tail.root == sequence.keyed[0]:
        keys.append(sequence.tail.key)
    return keys


def _covered(executor: Executor, unit: Unit) -> bool:
    """True when the device holds all that could be brought, but for a few blocks of a new prompt."""
    sequence, few = unit.sequences[0], 0 if unit.resumes else FEW_BLOCKS
    hits = prefix_cache.lookup(executor, sequence)
    if (len(hits) + few + 1) * executor.hello.block_tokens < len(sequence.tokens):
        return False
    return not sequence.tail.key or prefix_cache.tail_block(executor, sequence, len(hits)) is not None


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
    executor.pool.begin_copy(blocks)
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
        executor.pool.end_copy(job.blocks)
        uncount(executor, job)
    source = f"kv_offload.{job.tier}"
    tier = state.tiers.named(source)
    if release and (tier is None or tier.generation == job.generation):
        state.send(source, KvRelease(jobs=ints([job.number])))
