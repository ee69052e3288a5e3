"""The hints of clients about their sessions: under all the names that they send, checked, in one form.

    headers ── with_headers ──┐
    body ─────────────────────┴─▶ fields of a native request ── hints_of ──▶ Hints ──▶ Tokenized

A session is a chain of prompts of one tenant, each of which extends the one before. Where a client does not
name it, a scheduler finds it by the prompt. Hints are wishes: a wrong one costs its sender alone.

Precedence: the headers of the first row of HEADERS, the body, the headers of agents. An agent does not know
this server, so its damaged header is passed over; any other damaged hint is a 400 that names it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Annotated, Any, NamedTuple, NotRequired

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationInfo, with_config
from typing_extensions import TypedDict

from shared.errors import BadRequest

MAX_KEEP_S = 86_400
MAX_ID_CHARS = 256
ID = rf"^[\x20-\x7e]{{1,{MAX_ID_CHARS}}}$"
_RETENTION = r"^(in[-_]memory|[0-9]{1,9}[smh])$"
_SECONDS = {"s": 1, "m": 60, "h": 3_600}
_YES_OR_NO = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
USED, PASSED_OVER, MALFORMED = "used", "passed_over", "malformed"  # what becomes of a header


class Names(NamedTuple):
    """The headers of one kind of client. `agent`: of one within the session, which is a session of its own;
    `root`: the session that a program began with."""

    session: str
    parent: str = ""
    agent: str = ""
    root: str = ""
    final: str = ""


HEADERS = (
    Names("X-Dynamo-Session-ID", "X-Dynamo-Parent-Session-ID", final="X-Dynamo-Session-Final"),
    Names("X-Claude-Code-Session-Id", "X-Claude-Code-Parent-Agent-Id", agent="X-Claude-Code-Agent-Id"),
    Names("Thread-Id", "X-Codex-Parent-Thread-Id", root="Session-Id"),  # Codex
    Names("Session-Id"),  # Codex
    Names("session_id"),  # Codex, of an earlier version
    Names("X-Session-Id", "X-Parent-Session-Id"),  # OpenCode
)


@dataclass(frozen=True, slots=True)
class Hints:
    """The one form; the fields are those of Tokenized. Ids are the client's."""

    session: str = ""
    parent: str = ""
    root: str = ""  # requests of all its sessions go to one scheduler
    final: bool = False
    expects_tokens: int = 0
    keep_us: int = 0
    prefetch: bool = False


def name_of(tenant: str, session_id: str) -> str:
    """The name of a session: 32 hex digits. Two tenants with one id have two sessions."""
    return blake2b(f"{tenant}\0{session_id}".encode(), digest_size=16).hexdigest() if session_id else ""


def seconds_of(retention: object) -> int | None:
    """The seconds of `5m`, `24h` and the like, 0 of `in_memory`; None for anything else, or over a day."""
    if not isinstance(retention, str) or not re.fullmatch(_RETENTION, retention):
        return None
    seconds = int(retention[:-1]) * _SECONDS[retention[-1]] if retention[0] != "i" else 0
    return seconds if seconds <= MAX_KEEP_S and retention[0] != "0" else None


def bad_hint(param: str, expected: str) -> BadRequest:
    """The error for a hint with another value."""
    return BadRequest(f"`{param}`: {expected}", param=param)


# ---- fields of a body ---------------------------------------------------------------------------


def is_id(value: object) -> bool:
    """Whether this may be the id of a session."""
    return isinstance(value, str) and len(value) <= MAX_ID_CHARS and bool(re.fullmatch(ID, value))


def _checked(is_right: Callable[[Any], bool], expected: str, schema: Any) -> PlainValidator:
    """Accepts values that are right; any other is a 400 that names the field."""

    def check(value: object, info: ValidationInfo) -> object:
        if not is_right(value):
            raise bad_hint(str(info.field_name), expected)
        return value

    return PlainValidator(check, schema)


AN_ID = f"1 to {MAX_ID_CHARS} printable ASCII characters are expected"
SessionId = Annotated[str, _checked(is_id, AN_ID, Annotated[str, Field(pattern=ID)])]
A_TIME = f"a time of at most {MAX_KEEP_S // 3600}h is expected, as 300s, 5m or 24h"
Retention = Annotated[
    str,
    _checked(
        lambda value: seconds_of(value) is not None,
        f"{A_TIME}, or in_memory",
        Annotated[str, Field(pattern=_RETENTION)],
    ),
]
_Flag = Annotated[bool, _checked(lambda value: isinstance(value, bool), "true or false is expected", bool)]
_MEMBERS: Mapping[str, tuple[Callable[[Any], bool], str]] = {  # of nvext.agent_hints
    "osl": (
        lambda v: _is_number(v) and v >= 1 and v == int(v),
        "the expected tokens of the answer, a whole number from 1 on, are expected",
    ),
    "speculative_prefill": (lambda v: isinstance(v, bool), "true or false is expected"),
    "priority": (lambda v: _is_number(v), "a finite number is expected"),
    "strict_priority": (
        lambda v: isinstance(v, bool) or _is_number(v),
        "true, false or a finite number is expected",
    ),
}


def _is_number(value: object) -> bool:
    return type(value) is int or (isinstance(value, float) and math.isfinite(value))


@with_config(ConfigDict(extra="ignore"))
class AgentHints(TypedDict):
    """`priority` and `strict_priority` have no effect; unknown members are ignored."""

    osl: NotRequired[Annotated[int, Field(ge=1, description="tokens that the answer will have")]]
    speculative_prefill: NotRequired[
        Annotated[bool, Field(description="the blocks of the session come up before its next request")]
    ]
    priority: NotRequired[float]
    strict_priority: NotRequired[bool | float]


@with_config(ConfigDict(extra="ignore"))
class NvExt(TypedDict):
    """The extension of Dynamo's clients; unknown members are ignored."""

    agent_hints: NotRequired[AgentHints]


def _nvext(value: object) -> object:
    if not isinstance(value, dict):
        raise bad_hint("nvext", "an object is expected")
    hints = value.get("agent_hints")
    if hints is None:
        return {}
    if not isinstance(hints, dict):
        raise bad_hint("nvext.agent_hints", "an object is expected")
    given = {name: each for name, each in hints.items() if name in _MEMBERS and each is not None}
    for name, each in given.items():
        is_right, expected = _MEMBERS[name]
        if not is_right(each):
            raise bad_hint(f"nvext.agent_hints.{name}", expected)
    return {"agent_hints": given}


class SessionFields(BaseModel):
    """The session of a request, in every API."""

    session_id: SessionId | None = Field(None, description="the session: one id for a chain of prompts")
    parent_session_id: SessionId | None = Field(None, description="the session that started this one")
    root_session_id: SessionId | None = Field(
        None, description="the first session of a program, all of which go to one scheduler; else the parent"
    )
    session_final: _Flag = Field(False, description="no request of the session follows")
    nvext: Annotated[dict[str, Any], PlainValidator(_nvext, NvExt)] = Field(
        default_factory=dict, description="hints under Dynamo's names"
    )


def hints_of(asked: SessionFields, retention: str | None = None) -> Hints:
    """The hints of a valid body. Raises BadRequest for those that contradict each other."""
    if asked.parent_session_id is not None:
        if asked.session_id is None:
            raise bad_hint("parent_session_id", "`session_id` is missing beside it")
        if asked.parent_session_id == asked.session_id:
            raise bad_hint("parent_session_id", "the session itself is no parent of it")
    hints = asked.nvext.get("agent_hints", {})
    return Hints(
        session=asked.session_id or "",
        parent=asked.parent_session_id or "",
        root=asked.root_session_id or asked.parent_session_id or asked.session_id or "",
        final=asked.session_final,
        expects_tokens=int(hints.get("osl", 0)),
        keep_us=(seconds_of(retention) or 0) * 1_000_000,
        prefetch=hints.get("speculative_prefill", False),
    )


# ---- headers ------------------------------------------------------------------------------------

Given = Callable[[str], Sequence[str]]  # the values of a header


def with_headers(body: Mapping[str, Any], given: Given) -> tuple[dict[str, Any], dict[str, str]]:
    """The fields that headers add to those of a body, and what became of each header. Raises BadRequest for a
    header of the first row that is damaged, or that the body contradicts."""
    fields, fates = dict[str, Any](), dict[str, str]()
    for row in HEADERS:
        values = {
            member: value for member, header in row._asdict().items() if (value := _value(given, header))
        }
        if row is HEADERS[0]:
            fields = _of_ours(row, values, body)
            fates |= {getattr(row, member): USED for member in values}
        elif "session" in values:
            found = None if "session_id" in {**body, **fields} else _of_agent(values)
            fates[row.session] = USED if found else PASSED_OVER if found is None else MALFORMED
            fields |= found or {}
    return fields, fates


def _value(given: Given, header: str) -> str:
    """The value of a header; several that differ are one, which is damaged."""
    values = dict.fromkeys(value.strip() for value in given(header)) if header else {}
    return "\n".join(values)


def _of_ours(row: Names, values: Mapping[str, str], body: Mapping[str, Any]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for member, name in (
        ("session", "session_id"),
        ("parent", "parent_session_id"),
        ("final", "session_final"),
    ):
        if (value := values.get(member)) is None:
            continue
        header: str = getattr(row, member)
        read = _YES_OR_NO.get(value.lower()) if member == "final" else value if is_id(value) else None
        if read is None:
            raise bad_hint(header, "true or false is expected" if member == "final" else AN_ID)
        if name in body and body[name] != read:
            raise bad_hint(name, f"the header {header} has another value: send one of both")
        fields[name] = read
    return fields


def _of_agent(values: Mapping[str, str]) -> dict[str, Any]:
    """The fields of an agent's headers; none if one of them is damaged."""
    if not all(map(is_id, values.values())):
        return {}
    session, parent = values["session"], values.get("parent", "")
    root = values.get("root", "")
    if agent := values.get("agent", ""):  # ids of agents are unique within their session
        root, parent = session, f"{session}/{parent}" if parent and parent != agent else session
        session = f"{session}/{agent}"
    if not is_id(session) or not (not parent or is_id(parent)):
        return {}
    found = {"session_id": session, "parent_session_id": parent, "root_session_id": root}
    return {
        name: value for name, value in found.items() if value and (name == "session_id" or value != session)
    }
