"""Permissions at the nats-server: each service, tenant and operator gets only what it needs.

    tenant ──generate, cancel, tokenize, … with its own name──▶ tokenizer, detokenizer, scheduler
    tenant ◀──────────── replies below its own inbox ────────── tokenizer, detokenizer
    service ──mailboxes of the services it works with──▶ service

`headrace auth` writes them (services/launcher/commands/auth.py). The public subjects are in access.py.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from shared.nats import subjects
from shared.nats.access import INBOX, LEAF, MAPPED, OPERATOR, PUBLIC, SERVICE_PREFIX

_MAILBOXES = {  # sender -> receivers
    "tokenizer": ("scheduler", "tokenizer"),
    "scheduler": ("tokenizer", "executor", "kv_offload", "detokenizer"),
    "executor": ("scheduler",),
    "kv_offload": ("scheduler", "kv_offload"),
    "detokenizer": ("scheduler", "detokenizer"),
    "gateway": (),
    "keeper": (),
}
SERVICES = tuple(_MAILBOXES)
_STORED = (subjects.WORK_STREAM, subjects.RECORD_STREAM, subjects.FILE_STREAM, subjects.STATE_STREAM)
_PULLED = (subjects.WORK_STREAM, subjects.HOOK_STREAM)
_MADE = (*_STORED, subjects.HOOK_STREAM, subjects.ALIAS_STREAM)
# The others: F is a fleet, K the kind of a service or the operator, with its prefix in the names of users.
_INTERNAL = (
    ("hr.F.beat.K.*", "all", ""),
    ("hr.F.beat.*.*", "", "all operator"),
    ("hr.F.beat_ask", "all operator", "all"),
    ("hr.*.beat.tokenizer.*", "", "tokenizer"),
    ("hr.beat_ask", "tokenizer", "all"),
    ("hr.F.metrics", "gateway", "all"),
    ("hr.F.K.*.in.*", "", "all"),
    ("_R.*.*", "", "detokenizer"),
    # The inbox of a request travels to the detokenizer in a message; the tokenizer's answer may follow late.
    (f"{INBOX}.>", "tokenizer detokenizer", "leaf"),
    (f"{INBOX}.T.>", "", "tenant"),
    (f"{INBOX}.{SERVICE_PREFIX}K.>", "", "all operator"),
    (f"{INBOX}.*.{SERVICE_PREFIX}K.>", "", "gateway keeper operator"),  # they send requests of all tenants
    (f"{INBOX}.*.{MAPPED}.>", "keeper", ""),  # the permission to answer is for the subject before `mapped`
    *(
        (f"$SRV.{verb}{which}", "", "all")
        for verb in ("PING", "INFO", "STATS")
        for which in ("", f".{SERVICE_PREFIX}K", f".{SERVICE_PREFIX}K.*")
    ),
    ("$SRV.>", "operator", ""),
    (f"{subjects.STORE}.>", "keeper", ""),
    (f"{subjects.STORE}.check.*.*", "", "tokenizer"),
    (f"{subjects.STORE}.runs.*.*", "", "keeper"),
    (f"{subjects.STORE}.state.*.*", "detokenizer", ""),
    (f"{subjects.STORE}.resume.*.*", "", "detokenizer"),
    (subjects.ALIAS_ALL, "tokenizer", "tokenizer gateway keeper"),
    (f"{subjects.STORE}.adapter.*", "tokenizer", "executor"),
    (subjects.ALIASES, "tokenizer gateway", "tokenizer gateway keeper"),
    *(
        (f"$JS.{call.format(stream)}", "tokenizer" if stream == subjects.ALIAS_STREAM else "keeper", "")
        for call, streams in (
            ("API.STREAM.INFO.{}", _MADE),
            ("API.STREAM.CREATE.{}", _MADE),
            ("API.STREAM.MSG.GET.{}", (*_STORED, subjects.ALIAS_STREAM)),
            ("API.DIRECT.GET.{}.>", (*_STORED, subjects.ALIAS_STREAM)),
            ("API.STREAM.PURGE.{}", (subjects.FILE_STREAM, subjects.STATE_STREAM, subjects.HOOK_STREAM)),
            ("API.CONSUMER.LIST.{}", (subjects.WORK_STREAM,)),
            ("API.CONSUMER.DELETE.{}.*", (subjects.WORK_STREAM,)),
            (f"API.CONSUMER.CREATE.{{}}.*.{subjects.STORE}.work.*.>", (subjects.WORK_STREAM,)),
            (f"API.CONSUMER.CREATE.{{}}.*.{subjects.STORE}.hook.*.>", (subjects.HOOK_STREAM,)),
            ("API.CONSUMER.MSG.NEXT.{}.*", _PULLED),
            ("ACK.{}.>", _PULLED),
        )
        for stream in streams
    ),
)
_NAMES = re.compile(r"\b[TFK]\b")


@dataclass(frozen=True, slots=True)
class Permissions:
    """Subject patterns. `answers`: may also publish one message to the reply subject of each request."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]
    answers: bool = False


def of_service(kind: str, fleet: str) -> Permissions:
    """The permissions of a service `kind`, one of SERVICES."""
    return _of(kind, subjects.token(fleet))


def of_operator(fleet: str) -> Permissions:
    """The permissions of the operator's command line: requests for any tenant, the state of all services."""
    return _of(OPERATOR, subjects.token(fleet))


def of_tenant(tenant: str) -> Permissions:
    """The permissions of a tenant: its own requests and replies. With accounts they are what the two accounts
    exchange."""
    return _of("tenant", tenant=subjects.token(tenant))


def of_leaf() -> Permissions:
    """The permissions of the nats-server of an edge: requests for any tenant go up, replies to any tenant
    come down. Allowed subjects are those that services subscribe to, as wide as they do: a server compares
    patterns, and `generate.acme.*` is no part of `generate.*.MODEL`."""
    return _of(LEAF)


def _of(name: str, fleet: str = "", tenant: str = "*") -> Permissions:
    """What the tables allow to one of their names; tokens of subjects."""
    own, names = {"T": tenant, "F": fleet, "K": name}, {name, *(("all",) if name in SERVICES else ())}
    rows = [*((f"{subjects.PUBLIC}.{row[0]}", *row[1:]) for row in PUBLIC), *_INTERNAL]
    publish, subscribe = (
        [_NAMES.sub(lambda found: own[found[0]], row[0]) for row in rows if names & {*row[column].split()}]
        for column in (1, 2)
    )
    publish += [f"hr.{fleet}.{receiver}.*.in.*" for receiver in _MAILBOXES.get(name, ())]
    return Permissions(tuple(publish), tuple(subscribe), answers=name in (*SERVICES, OPERATOR))
