"""Verbs for sessions over NATS: which one they name, what is refused, and sessions as JSON."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from services.scheduler.reports import sessions, status
from services.scheduler.state.state import Limits, NoSessions, State
from shared import bodies
from shared.messages import SessionAnswer, SessionVerb
from shared.nats import subjects
from shared.nats.interface import Delivery
from shared.session_hints import name_of
from shared.telemetry.counters import MetricPoint

IDLE = SessionAnswer(
    state="idle", tokens=41_216, l1=41_216, will="prefetch", tenant="acme", session="ab" * 16, tool="shell",
    idle_us=1_200_000, returns_p50_us=2_100_000, load_us=101_000,
)  # fmt: skip
BELOW = replace(IDLE, state="below")


@dataclass
class Core:
    """Has the sessions of these names, and records what it was asked."""

    known: dict[str, SessionAnswer] = field(default_factory=dict)
    asked: list[SessionVerb] = field(default_factory=list)

    def ask(self, verb: SessionVerb) -> SessionAnswer:
        self.asked.append(verb)
        return self.known.get(verb.session, SessionAnswer(state="unknown"))

    def verb(self, body: object, session: str = "run 1", tenant: str = "acme") -> dict[str, Any]:
        data = body if isinstance(body, bytes) else bodies.encode(body)  # type: ignore[arg-type]  # may be wrong
        return sessions.verb_answer(Delivery(subjects.session(tenant, session), data, "in"), "s", self.ask)


@pytest.mark.parametrize(
    ("body", "verb"),
    [
        ({"do": "state"}, {"verb": "state"}),
        ({"do": "release", "tree": True}, {"verb": "release", "tree": True}),
        ({"do": "release", "tree": None}, {"verb": "release"}),
        ({"do": "prefetch", "of a newer client": 1, "ttl_s": 5}, {"verb": "prefetch"}),
        ({"do": "keep", "ttl_s": 600}, {"verb": "keep", "keep_us": 600_000_000}),
        ({"do": "keep", "ttl_s": 0.5}, {"verb": "keep", "keep_us": 500_000}),
    ],
)
def test_a_verb_reaches_the_session_of_its_tenant_alone(body: dict[str, Any], verb: dict[str, Any]) -> None:
    name = name_of("acme", "run 1")
    core = Core({name: IDLE})
    answered = core.verb(body)
    assert core.asked == [SessionVerb(tenant="acme", session=name, **verb)]
    assert answered == {
        "scheduler": "s", "id": "run 1", "state": "idle", "tokens": 41_216, "device": 0, "l1": 41_216,
        "l2": 0, "will": "prefetch", "tenant": "acme", "session": "ab" * 16, "tool": "shell", "idle_s": 1.2,
        "returns_p50_s": 2.1, "load_s": 0.101,
    }  # fmt: skip
    assert bodies.decode(bodies.SessionState, bodies.encode(answered)) == answered
    assert core.verb(body, tenant="other")["state"] == "unknown"


def test_an_inferred_session_is_reached_by_the_name_in_the_list() -> None:
    core = Core({"ab" * 16: IDLE})
    assert core.verb({"do": "state"}, "ab" * 16)["state"] == "idle"
    assert [verb.session for verb in core.asked] == [name_of("acme", "ab" * 16), "ab" * 16]
    assert core.verb({"do": "state"}, "AB" * 16)["state"] == "unknown"


LATER = "`ttl_s`: seconds over 0, to 86400, are expected"


@pytest.mark.parametrize(
    ("body", "message", "param"),
    [
        ({}, "`do`: Field required", "do"),
        ({"do": "pin"}, "`do`: state, release, prefetch or keep is expected", "do"),
        ({"do": "keep"}, LATER, "ttl_s"),
        ({"do": "keep", "ttl_s": 0}, LATER, "ttl_s"),
        ({"do": "keep", "ttl_s": -1}, LATER, "ttl_s"),
        ({"do": "keep", "ttl_s": 1e12}, LATER, "ttl_s"),
        (b'{"do": "keep", "ttl_s": 1e400}', LATER, "ttl_s"),
        (b'{"do": "keep", "ttl_s": NaN}', LATER, "ttl_s"),
        ({"do": "keep", "ttl_s": "long"}, LATER, "ttl_s"),
        ({"do": "release", "tree": 1}, "`tree`: Input should be a valid boolean", "tree"),
        (b"[]", "the body is not a JSON object", None),
    ],
)
def test_a_damaged_verb_is_refused_with_its_field(body: object, message: str, param: str | None) -> None:
    core = Core()
    error = core.verb(body)["error"]
    assert (error["code"], error["message"], error.get("param")) == (400, message, param)
    assert not core.asked


@pytest.mark.parametrize("session", ["i" * 257, "ü", "a\nb"])
def test_a_damaged_id_is_refused(session: str) -> None:
    error = Core().verb({"do": "state"}, session)["error"]
    assert error["message"] == "`id`: 1 to 256 printable ASCII characters are expected"
    broken = Delivery("headrace.v1.session.acme.=X", b"{}", "in")
    assert (
        sessions.verb_answer(broken, "s", Core().ask)["error"]["message"]
        == "the subject is damaged: tenant and id are names, escaped as =XX"
    )


def test_ids_of_256_characters_with_any_printable_one_have_their_subject() -> None:
    session = "".join(map(chr, range(32, 127))).ljust(256, "/")
    core = Core({name_of("acme", session): IDLE})
    assert core.verb({"do": "state"}, session)["state"] == "idle"


class Listed(NoSessions):
    """Has one session of each of two tenants."""

    def rows(self, state: State, tenant: str, most: int) -> list[SessionAnswer]:
        rows = [BELOW, SessionAnswer(state="running", tokens=16, device=16, tenant="beta")]
        return [row for row in rows if tenant in ("", row.tenant)][:most]

    def count(self, tenant: str) -> int:
        return 1 if tenant else 2

    def counted(self, state: State) -> dict[str, Any]:
        return {"idle": 1, "running": 1, "released": 7}


def test_a_tenant_sees_its_own_sessions_and_the_operator_all() -> None:
    state = State(Limits())
    assert sessions.listed(state, "acme") == {"data": [], "count": 0}
    assert sessions.listed(state, "") == {"data": [], "count": 0}
    state.sessions = Listed()
    own = sessions.listed(state, "beta")
    assert own == {"data": [sessions.shown(Listed().rows(state, "beta", 9)[0])], "count": 1}
    every = sessions.listed(state, "")
    assert [row["tenant"] for row in every["data"]] == ["acme", "beta"]
    sums = {"idle": 0, "below": 1, "running": 1, "device": 16, "l1": 41_216}
    assert (every["count"], every["summary"]) == (2, {**sums, "released": 7})


@pytest.mark.parametrize(
    ("subject", "tenant"),
    [(subjects.SESSIONS, ""), (subjects.sessions("a.b"), "a.b"), ("headrace.v1.sessions.=X", None)],
)
def test_the_subject_of_a_list_names_its_tenant(subject: str, tenant: str | None) -> None:
    assert sessions.tenant_of(subject) == tenant


class Counting(NoSessions):
    """Has counted all that it may count."""

    def counted(self, state: State) -> dict[str, Any]:
        return {
            "running": 2, "idle": 30, "kept": 1, "released": 3, "superseded": 4, "over": 0,
            "tools": [{"tool": "shell", "p50_us": 2_500_000, "pauses": 9}],
            "returns": {"device": 5, "computed": 1}, "prefetched": 16, "wasted": 2,
        }  # fmt: skip


def test_sessions_are_metrics_and_a_count_in_the_status() -> None:
    state = State(Limits())
    assert status.status(state)["sessions"] == 0
    bare = {point.name for point in status.metric_points(state)}
    assert not [name for name in bare if "session" in name or "prefetch" in name]
    state.sessions = Counting()
    assert status.status(state)["sessions"] == 32
    found = {
        (
            point.name.removeprefix("headrace.scheduler."),
            *(value for _, value in point.attributes),
        ): point.value
        for point in status.metric_points(state)
        if isinstance(point, MetricPoint) and point.name not in bare
    }
    assert found == {
        ("sessions", "running"): 2, ("sessions", "idle"): 30, ("sessions", "kept"): 1,
        ("session_pause", "shell"): 2.5, ("session_returns", "device"): 5, ("session_returns", "computed"): 1,
        ("sessions.ended", "released"): 3, ("sessions.ended", "superseded"): 4, ("sessions.ended", "over"): 0,
        ("prefetched_blocks",): 16, ("prefetch_wasted_blocks",): 2,
    }  # fmt: skip


class Many(NoSessions):
    """Has as many sessions as a scheduler may have, with long words."""

    def rows(self, state: State, tenant: str, most: int) -> list[SessionAnswer]:
        return [replace(IDLE, why="w" * 40, tool="t" * 64)] * min(4_096, most)

    def count(self, tenant: str) -> int:
        return 4_096


def test_a_list_has_few_rows_and_fits_in_a_message() -> None:
    state = State(Limits())
    state.sessions = Many()
    body = sessions.listed(state, "acme")
    assert (len(body["data"]), body["count"]) == (200, 4_096)
    assert len(bodies.encode(body)) < 200_000
