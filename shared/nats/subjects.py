"""Every NATS subject, in one place.

`headrace.v1` is public and stable; `hr.<fleet>` is internal. Names of users (models, tenants,
request ids) and of actors (a host name has dots) are one token each: characters that mean something to
NATS are escaped as `=XX`.
"""

from __future__ import annotations

import re

PUBLIC = "headrace.v1"
MAX_NAME_CHARS = 128  # of a tenant, a model, a request id
MAX_INBOX_CHARS = 512  # it travels in several messages of its request
_OURS = ("hr.", "headrace.", "_R.", "$")  # no client reads here
DEFAULT_TENANT = "public"
_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_")
_ESCAPED = re.compile(r"(?:[A-Za-z0-9_-]|=[0-9A-F]{2})+")


def token(name: str) -> str:
    """One subject token for any non-empty name; reversible by `untoken`."""
    if not name:
        raise ValueError("a subject token cannot be empty")
    return "".join(c if c in _PLAIN else "".join(f"={b:02X}" for b in c.encode()) for c in name)


def untoken(text: str) -> str:
    """The name that `token` escaped. Raises ValueError on a damaged escape."""
    if not _ESCAPED.fullmatch(text):
        raise ValueError(f"{text!r:.80} is not an escaped name")
    first, *escapes = text.split("=")
    return (first.encode() + b"".join(bytes.fromhex(e[:2]) + e[2:].encode() for e in escapes)).decode()


def generate(tenant: str, model: str) -> str:
    """Where a client publishes a request."""
    return f"{PUBLIC}.generate.{token(tenant)}.{token(model)}"


def generate_any_tenant(model: str) -> str:
    """What the tokenizers of one model listen to, as a queue group and each for itself."""
    return f"{PUBLIC}.generate.*.{token(model)}"


GENERATE_ALL = f"{PUBLIC}.generate.*.*"  # the queue group that answers 404
CANCEL_ALL = f"{PUBLIC}.cancel.*.*"
TOKENIZER_HEARTBEATS_ALL_FLEETS = "hr.*.beat.tokenizer.*"
HEARTBEAT_REQUEST_ALL_FLEETS = "hr.beat_ask"  # a newcomer asks here for the heartbeats of every fleet
MODELS = f"{PUBLIC}.models"  # asked in nobody's name
MODELS_ANY_TENANT = f"{PUBLIC}.models.*"
STATUS = f"{PUBLIC}.status"
TRACE_ALL = f"{PUBLIC}.trace.*"
TRACE_STEPS = b"steps"  # body of a question for a trace with the steps of its time


def cancel(tenant: str, request: str) -> str:
    """Where a client publishes (an empty body) to stop a request."""
    return f"{PUBLIC}.cancel.{token(tenant)}.{token(request)}"


def trace(request: str) -> str:
    """Where one asks for the stages of a request."""
    return f"{PUBLIC}.trace.{token(request)}"


def events(scheduler: str) -> str:
    """Where a scheduler publishes its event log, if it does."""
    return f"{PUBLIC}.events.{token(scheduler)}"


def events_snapshot(scheduler: str) -> str:
    """Request-reply: publish a snapshot now, so that a log can begin."""
    return f"{PUBLIC}.events.{token(scheduler)}.snapshot"


def models(tenant: str) -> str:
    """Request-reply: the models that are served."""
    return f"{MODELS}.{token(tenant)}"


def tokenize(tenant: str, model: str) -> str:
    """Request-reply: text to token ids."""
    return f"{PUBLIC}.tokenize.{token(tenant)}.{token(model)}"


def tokenize_any_tenant(model: str) -> str:
    """What the tokenizers of one model listen to for `tokenize`."""
    return f"{PUBLIC}.tokenize.*.{token(model)}"


def detokenize(tenant: str, model: str) -> str:
    """Request-reply: token ids to text."""
    return f"{PUBLIC}.detokenize.{token(tenant)}.{token(model)}"


def detokenize_any_tenant(model: str) -> str:
    """What the detokenizers of one model listen to for `detokenize`."""
    return f"{PUBLIC}.detokenize.*.{token(model)}"


def name_at(subject: str, index: int) -> str:
    """The user name in position `index` (from 0) of a public subject. Raises ValueError when it is
    damaged, or longer than MAX_NAME_CHARS."""
    name = untoken(subject.split(".")[index])
    if len(name) > MAX_NAME_CHARS:
        raise ValueError(f"a name has at most {MAX_NAME_CHARS} characters")
    return name


def names_in(subject: str) -> tuple[str, str] | None:
    """Tenant and model, or tenant and request, of a public subject; None when one is damaged or long."""
    try:
        return name_at(subject, 3), name_at(subject, 4)
    except ValueError:
        return None


def is_inbox(subject: str) -> bool:
    """True for a reply subject that an answer may be sent to. One of our own would let a client write,
    by our hand, where it may not write itself; wildcards and blanks are no subject at all."""
    if not 0 < len(subject) <= MAX_INBOX_CHARS or subject.startswith(_OURS):
        return False
    return all(name and name not in ("*", ">") and name.isprintable() for name in subject.split(".")) and (
        " " not in subject
    )


def mailbox(fleet: str, kind: str, actor: str, message: str) -> str:
    """Where a message for one actor goes. `message` is the message's class name."""
    return f"hr.{token(fleet)}.{kind}.{token(actor)}.in.{message}"


def mailbox_all(fleet: str, kind: str, actor: str) -> str:
    """The one wildcard subscription of an actor: several would lose their relative order."""
    return f"hr.{token(fleet)}.{kind}.{token(actor)}.in.*"


def heartbeat(fleet: str, kind: str, actor: str) -> str:
    """Where an actor's heartbeats go."""
    return f"hr.{token(fleet)}.beat.{kind}.{token(actor)}"


def heartbeat_all(fleet: str) -> str:
    """The heartbeats of the whole fleet."""
    return f"hr.{token(fleet)}.beat.*.*"


def heartbeat_request(fleet: str) -> str:
    """A newcomer asks here for everybody's heartbeat at once."""
    return f"hr.{token(fleet)}.beat_ask"


def gone(actor: str, request: str) -> str:
    """Reply subject of delta frames: the server's 503 on it says that the client has gone."""
    return f"_R.{token(actor)}.{token(request)}"


def gone_all(actor: str) -> str:
    """What a detokenizer listens to for those."""
    return f"_R.{token(actor)}.*"
