"""Answers verbs for sessions, and shows what they are. Part of the shell: `State.sessions` decides.

    {"do": "keep", "ttl_s": 600} ──▶ headrace.v1.session.TENANT.ID ──▶ SessionVerb, an event of the core
    {"state": "idle", "will": "keep", …} ◀── the reply ◀── SessionAnswer, a command of the core

A client names a session by its own id, or by the name that a list of sessions shows: that of an inferred one.
Every scheduler of the server answers. `unknown` is the answer of one that does not have the session.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from services.scheduler.state.state import State
from shared import bodies, session_hints
from shared.actor.mailbox import Mailbox
from shared.errors import BadRequest, HeadraceError, error_body
from shared.messages import SessionAnswer, SessionVerb
from shared.nats import access, subjects
from shared.nats.interface import Delivery
from shared.replies import to_json

MOST_ROWS = 200  # of one answer: a look at the blocks of each takes 60 us, between two steps
UNKNOWN = "unknown"
_NAME = re.compile("[0-9a-f]{32}")

Ask = Callable[[SessionVerb], SessionAnswer]


async def attach(mailbox: Mailbox, model: str, state: State, ask: Ask) -> None:
    """Answer verbs and lists from now on. `ask` gives a verb to the core."""

    about = {"id": mailbox.actor, "fleet": mailbox.fleet, "model": model}

    def on_verb(asked: Delivery) -> None:
        if access.can_answer(mailbox.bus, asked):
            mailbox.bus.publish(asked.reply, to_json(verb_answer(asked, mailbox.actor, ask)))

    def on_list(asked: Delivery) -> None:
        if access.can_answer(mailbox.bus, asked):
            tenant = tenant_of(asked.subject)
            body = {} if tenant is None else listed(state, tenant)
            mailbox.bus.publish(asked.reply, to_json({**about, "data": [], **body}))

    await mailbox.bus.subscribe(subjects.SESSION_ALL, mailbox.guarded(on_verb))
    await mailbox.bus.subscribe(subjects.SESSIONS_ANY_TENANT, mailbox.guarded(on_list))
    await mailbox.bus.subscribe(subjects.SESSIONS, mailbox.guarded(on_list))


def tenant_of(subject: str) -> str | None:
    """The tenant of a list, empty for all; None for a damaged name."""
    if subject == subjects.SESSIONS:
        return ""
    try:
        return subjects.name_at(subject, 3)
    except ValueError:
        return None


def verb_answer(asked: Delivery, scheduler: str, ask: Ask) -> dict[str, Any]:
    """The reply to a verb: the session, or the error of the request."""
    try:
        tenant, session_id = names_in(asked.subject)
        found = _answered(read_verb(tenant, session_id, asked.data), session_id, ask)
    except HeadraceError as error:
        return {**error_body(error)}
    return {"scheduler": scheduler, "id": session_id, **shown(found)}


def _answered(verb: SessionVerb, session_id: str, ask: Ask) -> SessionAnswer:
    found = ask(verb)
    if found.state == UNKNOWN and _NAME.fullmatch(session_id):
        return ask(replace(verb, session=session_id))
    return found


def names_in(subject: str) -> tuple[str, str]:
    """Tenant and the client's id of a session. Raises BadRequest."""
    try:
        tenant = subjects.name_at(subject, 3)
        session_id = subjects.untoken(subject.split(".")[4])
    except ValueError:
        raise BadRequest("the subject is damaged: tenant and id are names, escaped as =XX") from None
    if not session_hints.is_id(session_id):
        raise session_hints.bad_hint("id", session_hints.AN_ID)
    return tenant, session_id


def read_verb(tenant: str, session_id: str, data: bytes) -> SessionVerb:
    """The verb in a body. Raises BadRequest."""
    body = bodies.asked(bodies.SessionAsked, data)
    if body["do"] == "keep" and "ttl_s" not in body:
        raise session_hints.bad_hint("ttl_s", f"seconds over 0, to {session_hints.MAX_KEEP_S}, are expected")
    return SessionVerb(
        tenant=tenant,
        session=session_hints.name_of(tenant, session_id),
        verb=body["do"],
        keep_us=int(body.get("ttl_s", 0) * 1e6) if body["do"] == "keep" else 0,
        tree=body.get("tree", False),
    )


def listed(state: State, tenant: str) -> dict[str, Any]:
    """The sessions of a tenant, or of all with what was learned; sums are of the rows."""
    rows = state.sessions.rows(state, tenant, MOST_ROWS)
    body: dict[str, Any] = {"data": [shown(row) for row in rows], "count": state.sessions.count(tenant)}
    if tenant or not (summary := state.sessions.counted(state)):
        return body
    below = sum(row.state == "below" for row in rows)
    sums = {"device": sum(row.device for row in rows), "l1": sum(row.l1 for row in rows)}
    return {**body, "summary": {**summary, **sums, "idle": summary["idle"] - below, "below": below}}


def shown(answer: SessionAnswer) -> dict[str, Any]:
    """A session as JSON: times in seconds, and only what is known."""
    times = ("idle_us", "kept_us", "returns_p50_us", "returns_p90_us", "load_us", "compute_us")
    body: dict[str, Any] = {name: getattr(answer, name) for name in ("state", "tokens", "device", "l1", "l2")}
    body |= {
        name: text for name in ("will", "why", "tenant", "session", "tool") if (text := getattr(answer, name))
    }
    return body | {f"{name[:-3]}_s": us / 1e6 for name in times if (us := getattr(answer, name))}
