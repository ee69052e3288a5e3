"""Which blocks to copy down now, and which to give up: the policy of kind `tier` judges them in groups.

By cost: a copy (measured rate, with half the queue), or computing it again (by the length before it), times
the chance that somebody will want it. Blocks of paused sequences will be wanted; of ended ones as often as
prompts have found their beginnings cached.
"""

from __future__ import annotations

from dataclasses import dataclass

from services.scheduler.policies.tiers import View
from services.scheduler.records import Phase as Life
from services.scheduler.state import Executor, State
from services.scheduler.tiers.jobs import executor_of
from services.scheduler.tiers.link import TOLD_US
from services.scheduler.tiers.worth import Recompute

JOB_BYTES = 64 << 20  # 1.3 ms of a PCIe link: what comes next does not wait long
JOB_BLOCKS = 128
LOOKED_AT = 256  # dirty blocks, at one time; or twice as many as are wanted
GROUP = 16  # blocks of a sequence that are judged alike


@dataclass(frozen=True, slots=True)
class _Look:
    """How things are while blocks are judged."""

    pressed: int  # places wanted beyond those that are free
    copy_us: int  # of a block, and its share of half the wait; 0 where it is worth a try
    paused_us: int  # the same of who is paused, and waits for it: no try is made at his cost
    chance_pm: int
    recompute: Recompute


def choose(state: State, executor: Executor, pressed: int, room: int) -> list[int]:
    """The blocks to copy now: dirty ones, and where that is not enough settled ones. Dirty ones that are not
    worth it become free."""
    ledger = executor.ledger
    look = _Look(
        pressed=pressed,
        copy_us=_copy_us(state, executor),
        paused_us=_expected_us(executor),
        chance_pm=state.reuse_pm,
        recompute=Recompute.of(executor),
    )
    judge, chosen, dealt = state.limits.policy.the("tier"), list[int](), 0
    verdicts: dict[tuple[int, int], tuple[str, bool]] = {}  # of the blocks of a sequence, in groups
    dirty, settled = ledger.dirty(max(LOOKED_AT, 2 * pressed)), list[int]()
    if room and pressed > 0:
        settled = ledger.settled(LOOKED_AT)
    for block in (*dirty, *settled):
        if dealt >= pressed > 0 or (len(chosen) == room and pressed <= 0):
            break  # enough
        seq, at = ledger.owner_of(block)
        group = seq, at // GROUP
        if group not in verdicts:
            view = _view(state, executor, look, group)
            verdicts[group] = judge(view), view.paused
        what, paused = verdicts[group]
        if what == "drop" and not ledger.is_fenced(block):
            ledger.give_up(block)
            state.meter.dropped_blocks += 1
            state.meter.dropped_paused_blocks += paused
            dealt += 1
        elif what == "copy" and len(chosen) < room:
            chosen.append(block)
            dealt += 1
    return chosen


def _copy_us(state: State, executor: Executor) -> int:
    """Of a block, with its share of half the wait. A link of which too little is known is worth a try; while
    that is on its way nothing is given up for being slow, unless it takes long itself."""
    link = executor.down
    if not link.known(state.now_us):
        mine = (job for job in state.tiers.jobs.values() if job.queued_bytes and not job.up)
        here = [job.began_us for job in mine if executor_of(state, job) is executor]
        if state.now_us - min(here, default=state.now_us) < TOLD_US:
            return 0
    return _expected_us(executor)


def _expected_us(executor: Executor) -> int:
    """Of a block, with its share of half the wait, as the link has been."""
    link = executor.down
    return link.block_us(executor.hello.bytes_per_block) + link.wait_us() // (2 * most_blocks(executor))


def _view(state: State, executor: Executor, look: _Look, group: tuple[int, int]) -> View:
    paused = is_paused(state, group[0])
    return View(
        paused=paused,
        pressed=look.pressed > 0,
        idle=not executor.down.pending_jobs,
        chance_pm=1000 if paused else look.chance_pm,
        copy_us=look.paused_us if paused else look.copy_us,
        recompute_us=look.recompute.block_us(group[1] * GROUP),
    )


def most_blocks(executor: Executor, most_bytes: int = JOB_BYTES) -> int:
    return max(1, min(JOB_BLOCKS, most_bytes // max(executor.hello.bytes_per_block, 1)))


def is_paused(state: State, seq: int) -> bool:
    """Whether the sequence waits, and will want what it has computed."""
    sequence = state.sequences.get(seq)
    return sequence is not None and sequence.phase is Life.WAITING
