"""What clients ask for a session: its state, its end, its blocks up, or its blocks kept. Idempotent.

    release   its own blocks are dead, on the device and in L1; with `tree` also those of sessions it started
    keep      its blocks go after those of all others, and are copied instead of dropped, until then
    prefetch  its blocks come up, if there is room that nothing else wants
    state     nothing

A tenant keeps at most an equal part of the blocks among the tenants with a session; a tenant alone keeps what
it likes. The sessions that it kept first lose their rank.
"""

from __future__ import annotations

from math import inf

from services.scheduler.sessions.table import Session, Table
from services.scheduler.state.block_pool import keep as keep_blocks
from services.scheduler.state.state import State

OVER_SHARE = "over the tenant's share"
MOST_KEEP_US = 86_400_000_000
RANKED_US = 180_000_000  # kept blocks have their rank for so long, and get it anew while they are kept


def tree(table: Table, session: Session) -> list[Session]:
    """The session, those that it started, and those that they started."""
    children: dict[str, list[Session]] = {}
    for each in table.by_name.values():
        if each.parent and each.tenant == session.tenant:
            children.setdefault(each.parent, []).append(each)
    found = {session.name: session}
    todo = [session]
    while todo:
        for each in children.get(todo.pop().name, ()):
            if each.name not in found:
                found[each.name] = each
                todo.append(each)
    return [*found.values()]


def keep(state: State, table: Table, session: Session, keep_us: int) -> bool:
    """Keep a session for so long, as far as its tenant may. False if it is more than the tenant's part: it
    ranks as others then."""
    of = table.tenants[session.tenant]
    of.kept.pop(session.name, None)
    if session.blocks > _part(state, table):
        session.kept_until_us = 0
        return False
    session.kept_until_us = max(session.kept_until_us, state.now_us + min(keep_us, MOST_KEEP_US))
    of.kept[session.name] = None
    fit(state, table, session)
    rank(state, session)
    return True


def _part(state: State, table: Table) -> float:
    """How many blocks a tenant may keep; a tenant alone, as many as it likes."""
    if len(table.tenants) == 1:
        return inf
    return sum(executor.pool.blocks for executor in state.executors.values()) // len(table.tenants)


def rank(state: State, session: Session) -> None:
    """The blocks of a kept session go after those of others on the device, for RANKED_US at a time: a session
    that is over, or over its tenant's part, loses its rank by itself."""
    session.ranked_us = state.now_us
    until_us = min(session.kept_until_us, state.now_us + RANKED_US)
    for executor in state.executors.values() if until_us > state.now_us else ():
        keep_blocks(executor.pool, session.first_keys(session.blocks), until_us)


def fit(state: State, table: Table, session: Session) -> None:
    """Sessions of its tenant lose their rank until the kept ones fit in the tenant's part: sessions grow, and
    tenants come. First those whose time is over, then those that alone are too large, then the first ones."""
    part, kept = _part(state, table), table.tenants[session.tenant].kept
    if part == inf:
        return  # without a look at each
    each = [table.by_name[name] for name in kept]
    total = sum(one.blocks for one in each)
    if total <= part:
        return
    for one in sorted(each, key=lambda one: (one.kept_until_us > state.now_us, one.blocks <= part)):
        if total <= part:
            return
        one.kept_until_us = 0
        del kept[one.name]
        total -= one.blocks
