"""What each service, tenant and operator may publish and read at the nats-server: what it needs, no more.

    tenant ──generate, cancel, tokenize, detokenize of its own name──▶ tokenizer, detokenizer, scheduler
    tenant ◀──────────────── replies below its own inbox ───────────── tokenizer, detokenizer
    service ──mailboxes of those it works with──▶ service

So a tenant can neither ask in another's name nor read another's replies, and no tenant reaches a mailbox. A
service that answers only whoever asks it may publish to that reply subject once, and to no other inbox.
"""

from __future__ import annotations

from dataclasses import dataclass

from shared import login
from shared.subjects import PUBLIC, token

_MAILBOXES = {
    "tokenizer": ("scheduler",),
    "scheduler": ("tokenizer", "executor", "kv_offload", "detokenizer"),
    "executor": ("scheduler",),
    "kv_offload": ("scheduler",),
    "detokenizer": ("scheduler",),
    "gateway": (),
}  # who sends to whom
SERVICES = tuple(_MAILBOXES)
OPERATOR = "operator"
_READS = {
    "tokenizer": (
        f"{PUBLIC}.generate.*.*",
        f"{PUBLIC}.cancel.*.*",
        f"{PUBLIC}.tokenize.*.*",
        f"{PUBLIC}.models",
        "hr.*.beat.tokenizer.*",
    ),
    "scheduler": (f"{PUBLIC}.cancel.*.*", f"{PUBLIC}.trace.*", f"{PUBLIC}.events.*.snapshot"),
    "detokenizer": (f"{PUBLIC}.detokenize.*.*", f"{PUBLIC}.cancel.*.*", "_R.*.*"),
}
# The inbox of a request travels to the detokenizer in a message; the tokenizer's answer comes seconds later.
_WRITES = {
    "tokenizer": (f"{login.INBOX}.>", "hr.beat_ask"),
    "scheduler": (f"{PUBLIC}.events.*",),
    "detokenizer": (f"{login.INBOX}.>",),
}
_ASKS = tuple(f"{PUBLIC}.{verb}.*.*" for verb in ("generate", "cancel", "tokenize", "detokenize"))
_LOOKS = (f"{PUBLIC}.models", f"{PUBLIC}.status", f"{PUBLIC}.trace.*")


@dataclass(frozen=True, slots=True)
class Permissions:
    """Subject patterns. `answers`: besides `publish`, one message to the reply subject of each that came."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]
    answers: bool = False


def of_service(kind: str, fleet: str) -> Permissions:
    """A service of `kind`, one of SERVICES."""
    f, name = token(fleet), login.SERVICE_PREFIX + kind
    asks = (*_ASKS, *_LOOKS) if kind == "gateway" else ()
    publish = (
        *(f"hr.{f}.{other}.*.in.*" for other in _MAILBOXES[kind]),
        *_WRITES.get(kind, ()),
        *asks,
        f"hr.{f}.beat.{kind}.*",
        f"hr.{f}.beat_ask",
        f"$SRV.STATS.{name}.*",  # its own health check
    )
    subscribe = (
        f"hr.{f}.{kind}.*.in.*",
        *_READS.get(kind, ()),
        f"hr.{f}.beat.*.*",
        f"hr.{f}.beat_ask",
        "hr.beat_ask",
        f"{PUBLIC}.status",
        *(
            f"$SRV.{verb}{tail}"
            for verb in ("PING", "INFO", "STATS")
            for tail in ("", f".{name}", f".{name}.*")
        ),
        f"{login.INBOX}.{name}.>",
    )
    return Permissions(publish, subscribe, answers=True)


def of_operator(fleet: str) -> Permissions:
    """The command line of whoever runs the fleet: asks in any tenant's name, sees every service."""
    f = token(fleet)
    return Permissions(
        publish=(*_ASKS, *_LOOKS, f"{PUBLIC}.events.*.snapshot", f"hr.{f}.beat_ask", "$SRV.>"),
        subscribe=(f"{login.INBOX}.{user_of(OPERATOR)}.>", f"hr.{f}.beat.*.*", f"{PUBLIC}.events.*"),
    )


def of_tenant(tenant: str) -> Permissions:
    """A client: requests in its own name, replies of its own."""
    name = token(tenant)
    own = tuple(f"{PUBLIC}.{verb}.{name}.*" for verb in ("generate", "cancel", "tokenize", "detokenize"))
    return Permissions(publish=(*own, f"{PUBLIC}.models"), subscribe=(f"{login.INBOX}.{name}.>",))


def user_of(service: str) -> str:
    """The name under which a service or the operator connects."""
    return login.SERVICE_PREFIX + service
