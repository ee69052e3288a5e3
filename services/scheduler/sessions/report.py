"""Sessions as people see them: a row for each, and what was learned.

Where the blocks are is counted by one key of SHARED_AT: a list of a thousand long sessions must not hold up
steps. A block that has left the device counts as in L1 unless it left without a copy.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from services.scheduler.preemption import RecomputeCost
from services.scheduler.sessions.pauses import USER, LearnedPauses
from services.scheduler.sessions.table import SHARED_AT, Outcomes, Session, Table
from services.scheduler.state.state import Executor, State
from shared.messages import SessionAnswer

MOST_TOOLS = 32  # with pauses of their own, the most frequent


def row(state: State, pauses: LearnedPauses, session: Session) -> SessionAnswer:
    """A session now."""
    size, now_us, running = session.keyed[1], state.now_us, session.running > 0
    executor, device, l1 = places(state, session)
    p50_us, p90_us = (pauses.quantile_us(session.tenant, session.tool, q) for q in (500, 900))
    load_us, compute_us = _costs(executor, session, device) if executor is not None else (0, 0)
    return SessionAnswer(
        state="running" if running else "idle" if device or not session.blocks else "below",
        tokens=session.blocks * size,
        device=device * size,
        l1=l1 * size,
        tenant=session.tenant,
        session=session.name,
        tool=session.tool,
        idle_us=0 if running else now_us - session.idle_since_us,
        kept_us=max(session.kept_until_us - now_us, 0),
        returns_p50_us=p50_us,
        returns_p90_us=p90_us,
        load_us=load_us if l1 else 0,
        compute_us=compute_us,
    )


def proven(table: Table, tenant: str) -> list[Session]:
    """The proven sessions of a tenant, or of all, the least idle first."""
    found = [s for s in table.by_name.values() if s.is_proven and tenant in ("", s.tenant)]
    return sorted(found, key=lambda s: (not s.running, -s.idle_since_us, s.name))


def counted(state: State, table: Table, pauses: LearnedPauses, outcomes: Outcomes) -> dict[str, Any]:
    """Counts of sessions, and pauses by tool: for metrics, without a look at any block."""
    known = [session for session in table.by_name.values() if session.is_proven]
    running = sum(session.running > 0 for session in known)
    samples: Counter[str] = Counter()
    tenants: dict[str, list[str]] = {}
    for (tenant, tool, _), learned in pauses.names.items():
        if tool != USER:
            samples[tool] += learned.samples
            tenants.setdefault(tool, []).append(tenant)
    frequent = sorted(samples.items(), key=lambda item: (-item[1], item[0]))[:MOST_TOOLS]
    p50_us = {tool: max(pauses.quantile_us(t, tool, 500) for t in tenants[tool]) for tool, _ in frequent}
    ended = pauses.names.get(("", USER, True))
    return {
        "running": running,
        "idle": len(known) - running,
        "kept": sum(session.kept_until_us > state.now_us for session in known),
        "tools": [{"tool": tool, "pauses": count, "p50_us": p50_us[tool]} for tool, count in frequent],
        "lost_pm": ended.lost * 1_000 // max(ended.samples + ended.lost, 1) if ended is not None else 0,
        "returns": {"device": outcomes.device, "l1": outcomes.below, "computed": outcomes.computed},
        "released": outcomes.released,
        "superseded": outcomes.superseded,
        "over": outcomes.over,
        "prefetched": outcomes.prefetched,
        "wasted": outcomes.wasted,
        "dead_blocks": outcomes.dead_blocks,
    }


def places(state: State, session: Session) -> tuple[Executor | None, int, int]:
    """The executor with most of its blocks, how many, and how many a tier below it holds. An executor
    that drains is chosen last among equal ones."""
    ends = [*range(SHARED_AT - 1, session.blocks, SHARED_AT)]
    ends += [session.blocks - 1] if session.blocks % SHARED_AT else []
    keys, best = [session.key(at) for at in ends], (-1, 0)
    found: Executor | None = None
    for executor in sorted(state.executors.values(), key=lambda each: each.draining):
        pool, held, below = executor.pool, 0, 0
        has_tier = state.tiers.below(executor.hello, state.now_us) is not None
        for at, key in enumerate(keys):
            block, count = pool.block_of.get(key), ends[at] - (ends[at - 1] if at else -1)
            held += count if block is not None else 0
            if has_tier:
                below += count if block in pool.clean or (block is None and key not in pool.lost) else 0
        if (held, below) > best:
            found, best = executor, (held, below)
    return found, max(best[0], 0), best[1]


def _costs(executor: Executor, session: Session, device: int) -> tuple[int, int]:
    """Predicted times to load and to compute what the device lacks."""
    size, missing = executor.hello.block_tokens, session.blocks - device
    load_us = executor.up.predict_us(missing * executor.hello.bytes_per_block) if missing else 0
    return load_us, RecomputeCost.of(executor).tokens_us(device * size, missing * size)
