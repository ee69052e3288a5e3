"""What clients ask for a session: its state, its end, its blocks up, or its blocks kept. Idempotent.

    release   its own blocks are dead, on the device and in L1; with `tree` also those of sessions it started
    keep      its blocks go after those of all others, and are copied instead of dropped, until then
    prefetch  its blocks come up, if there is room that nothing else wants
    state     nothing

A tenant keeps at most an equal part of the blocks among the tenants with a session; a tenant alone keeps what
it likes. The sessions that it kept first lose their rank.
"""

from __future__ import annotations

from services.scheduler.sessions.table import Session, Table
from services.scheduler.state.state import State

OVER_SHARE = "over the tenant's share"
MOST_KEEP_US = 86_400_000_000


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
    """Keep a session for so long, as far as its tenant may. False if it is more than the tenant's part."""
    of = table.tenants[session.tenant]
    part = sum(executor.pool.blocks for executor in state.executors.values()) // max(len(table.tenants), 1)
    alone = len(table.tenants) == 1
    if session.blocks > part and not alone:
        return False
    session.kept_until_us = max(session.kept_until_us, state.now_us + min(keep_us, MOST_KEEP_US))
    of.kept.pop(session.name, None)
    of.kept[session.name] = None
    if not alone:
        _shrink(state, table, of.kept, part)
    return True


def _shrink(state: State, table: Table, kept: dict[str, None], part: int) -> None:
    """The sessions that were kept first lose their rank until the others fit in the tenant's part."""
    sizes = {name: table.by_name[name].blocks for name in kept}
    total = sum(sizes.values())
    for name, blocks in sizes.items():
        session = table.by_name[name]
        if total <= part and session.kept_until_us > state.now_us:
            continue
        session.kept_until_us = 0
        del kept[name]
        total -= blocks
