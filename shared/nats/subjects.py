"""All NATS subjects.

`headrace.v1` is public and stable. `hr.<fleet>` is internal, and so is `headrace.store`, which all fleets on
a server share. Names from users (models, tenants, request ids) and of actors (a host name has dots) are one
token each: characters with a meaning for NATS are escaped as `=XX`.
"""

from __future__ import annotations

import re

PUBLIC = "headrace.v1"
STORE = "headrace.store"
MAX_NAME_CHARS = 128  # of a tenant, a model, a request id
MAX_INBOX_CHARS = 512  # an inbox is part of several messages of its request
_OURS = ("hr.", "headrace.", "_R.", "$")  # no reply may go here
DEFAULT_TENANT = "public"
PROBE_TENANT = "headrace-probe"  # of requests that test a model; no quota holds for it
_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_")
_ESCAPED = re.compile(r"(?:[A-Za-z0-9_-]|=[0-9A-F]{2})+")


def token(name: str) -> str:
    """One subject token for any non-empty name; reversible by `untoken`."""
    if not name:
        raise ValueError("a subject token cannot be empty")
    return "".join(c if c in _PLAIN else "".join(f"={b:02X}" for b in c.encode()) for c in name)


def untoken(text: str) -> str:
    """The name of a token. Raises ValueError on a damaged escape."""
    if not _ESCAPED.fullmatch(text):
        raise ValueError(f"{text!r:.80} is not an escaped name")
    first, *escapes = text.split("=")
    return (first.encode() + b"".join(bytes.fromhex(e[:2]) + e[2:].encode() for e in escapes)).decode()


def generate(tenant: str, model: str) -> str:
    """A client's request."""
    return f"{PUBLIC}.generate.{token(tenant)}.{token(model)}"


def generate_any_tenant(model: str) -> str:
    """Requests for one model: its tokenizers subscribe as a queue group, and each one for copies."""
    return f"{PUBLIC}.generate.*.{token(model)}"


GENERATE_ALL = f"{PUBLIC}.generate.*.*"  # the queue group that answers 404
LOAD_ALL = f"{PUBLIC}.load.*"
CANCEL_ALL = f"{PUBLIC}.cancel.*.*"
TOKENIZER_HEARTBEATS_ALL_FLEETS = "hr.*.beat.tokenizer.*"
HEARTBEAT_REQUEST_ALL_FLEETS = "hr.beat_ask"  # a new actor requests the heartbeats of every fleet
MODELS = f"{PUBLIC}.models"  # without a tenant
MODELS_ANY_TENANT = f"{PUBLIC}.models.*"
STATUS = f"{PUBLIC}.status"
TRACE_ALL = f"{PUBLIC}.trace.*"
SUBMIT_ALL = f"{PUBLIC}.submit.*.*"
RESULT_ALL = f"{PUBLIC}.result.*.*"
KEEP_ALL = f"{PUBLIC}.keep.*.*"
DELETE_ALL = f"{PUBLIC}.delete.*.*"
ATTACH_ALL = f"{PUBLIC}.attach.*.*"
FILES_ALL = f"{PUBLIC}.files.*.*"
BATCHES_ALL = f"{PUBLIC}.batches.*.*"
FORWARD_ALL = f"{PUBLIC}.forward.*.*"
DONE_ALL = f"{PUBLIC}.done.*.*"
WORK_STREAM, RECORD_STREAM, FILE_STREAM = "HR_WORK", "HR_DONE", "HR_FILES"
HOOK_STREAM, STATE_STREAM = "HR_HOOKS", "HR_STATE"
ALIAS_STREAM = "HR_ALIASES"
WORK_ALL = f"{STORE}.work.>"
RECORD_ALL = f"{STORE}.record.>"
STATE_ALL = f"{STORE}.state.>"
FILE_ALL = f"{STORE}.file.>"
LINE_ALL = f"{STORE}.line.>"
RUNS_ALL = f"{STORE}.runs.*.*"
HOOK_ALL = f"{STORE}.hook.>"
ALIAS_ALL = f"{STORE}.alias.*"
ALIASES = f"{STORE}.aliases"  # request-reply: the aliases that a tokenizer has
SET_ALIAS_ALL = f"{PUBLIC}.alias.*"
_TRACE_TENANT = "tenant "
TRACE_STEPS = b"steps"  # body of a trace request that includes the steps of its time


def cancel(tenant: str, request: str) -> str:
    """A client's cancellation of a request; empty body."""
    return f"{PUBLIC}.cancel.{token(tenant)}.{token(request)}"


def submit(tenant: str, model: str) -> str:
    """Request-reply: a durable request. The reply follows when it is stored."""
    return f"{PUBLIC}.submit.{token(tenant)}.{token(model)}"


def result(tenant: str, request: str) -> str:
    """Request-reply: the state of a durable request, with its answer once there is one."""
    return f"{PUBLIC}.result.{token(tenant)}.{token(request)}"


def delete(tenant: str, request: str) -> str:
    """Request-reply: the record of a durable request goes; a request that waits or runs is cancelled."""
    return f"{PUBLIC}.delete.{token(tenant)}.{token(request)}"


def attach(tenant: str, request: str) -> str:
    """Request with many replies: the text of a running request, from a character on."""
    return f"{PUBLIC}.attach.{token(tenant)}.{token(request)}"


def keep(tenant: str, request: str) -> str:
    """Request-reply: the gateway has a keeper store a response that it has answered."""
    return f"{PUBLIC}.keep.{token(tenant)}.{token(request)}"


def done(tenant: str, request: str) -> str:
    """The news that a durable request has ended, with its state."""
    return f"{PUBLIC}.done.{token(tenant)}.{token(request)}"


def work(tenant: str, request: str) -> str:
    """A durable request that waits for its answer, in stream HR_WORK."""
    return f"{STORE}.work.{token(tenant)}.{token(request)}"


def work_of(tenant: str) -> str:
    """The durable requests and batches of a tenant that wait."""
    return f"{STORE}.work.{token(tenant)}.>"


def record(tenant: str, request: str) -> str:
    """How a durable request has ended, in stream HR_DONE."""
    return f"{STORE}.record.{token(tenant)}.{token(request)}"


def files(tenant: str, verb: str) -> str:
    """Request-reply: files of a tenant. `verb`: put, keep, show, list, read, delete."""
    return f"{PUBLIC}.files.{token(tenant)}.{verb}"


def batches(tenant: str, verb: str) -> str:
    """Request-reply: batches of a tenant. `verb`: create, show, list, cancel."""
    return f"{PUBLIC}.batches.{token(tenant)}.{verb}"


def forward(tenant: str, verb: str) -> str:
    """Request-reply: the keeper of an edge hands a durable request to the centre. `verb`: submit, result,
    cancel."""
    return f"{PUBLIC}.forward.{token(tenant)}.{verb}"


def file_part(tenant: str, file: str, part: int | str) -> str:
    """A chunk of a file by its number, or `meta`, in stream HR_FILES. `*` stands for any file."""
    return f"{STORE}.file.{token(tenant)}.{_any(file)}.{part}"


def file_part_any_tenant(part: int | str) -> str:
    """A part of all files."""
    return f"{STORE}.file.*.*.{part}"


def batch_line(tenant: str, batch: str, line: int | str, outcome: str) -> str:
    """How a line of a batch has ended, `ok` or `error`, in stream HR_FILES."""
    return f"{STORE}.line.{token(tenant)}.{token(batch)}.{line}.{outcome}"


def batch_job(tenant: str, batch: str) -> str:
    """A batch that is not over, in stream HR_WORK. Its subject has a part more than that of a request."""
    return f"{STORE}.work.{token(tenant)}.{_any(batch)}.batch"


def is_batch_job(subject: str) -> bool:
    """True for the subject of a batch in stream HR_WORK."""
    return subject.count(".") > WORK_ALL.count(".") + 1


def batch_part(tenant: str, batch: str, part: str) -> str:
    """`end`, `state` or `cancel` of a batch, in stream HR_DONE."""
    return f"{STORE}.record.{token(tenant)}.{_any(batch)}.{part}"


def hook(host: str, tenant: str, event: str) -> str:
    """An event for a webhook, in stream HR_HOOKS. `host`: a key of the host that gets it."""
    return f"{STORE}.hook.{host}.{token(tenant)}.{event}"


def hooks_of(host: str) -> str:
    """All events of a host, also those of an earlier version, which lack the tenant."""
    return f"{STORE}.hook.{host}.>"


def _any(name: str) -> str:
    return name if name == "*" else token(name)


def runs(tenant: str, request: str) -> str:
    """Request-reply: the keeper that has sent a request to a tokenizer answers another one."""
    return f"{STORE}.runs.{token(tenant)}.{token(request)}"


def check(tenant: str, model: str) -> str:
    """Request-reply: a tokenizer validates a request that a keeper is about to store."""
    return f"{STORE}.check.{token(tenant)}.{token(model)}"


def check_any_tenant(model: str) -> str:
    """`check` requests of all tenants for one model."""
    return f"{STORE}.check.*.{token(model)}"


def state(tenant: str, request: str) -> str:
    """The last checkpoint of a durable request, in stream HR_STATE."""
    return f"{STORE}.state.{token(tenant)}.{token(request)}"


def resume(tenant: str, model: str) -> str:
    """Request-reply: a detokenizer has a durable request go on after its checkpoint."""
    return f"{STORE}.resume.{token(tenant)}.{token(model)}"


def resume_any_tenant(model: str) -> str:
    """`resume` requests of all tenants for one model."""
    return f"{STORE}.resume.*.{token(model)}"


def trace(request: str) -> str:
    """Request-reply: the stages of a request."""
    return f"{PUBLIC}.trace.{token(request)}"


def trace_body(tenant: str) -> bytes:
    """The body of a trace request that may read requests of one tenant alone. The operator's has none."""
    return f"{_TRACE_TENANT}{token(tenant)}".encode()


def asked_trace(body: bytes) -> tuple[str, bool]:
    """Whose requests a trace request may read, empty: those of all tenants; and whether it wants the steps.
    A damaged name is that of no tenant."""
    text = body.decode("utf-8", "replace")
    if not text.startswith(_TRACE_TENANT):
        return "", body == TRACE_STEPS
    try:
        return untoken(text.removeprefix(_TRACE_TENANT)), False
    except ValueError:
        return text, False


def policy(scheduler: str) -> str:
    """Request-reply: the operator changes the policy of a scheduler; the body is `kind=name,...`."""
    return f"{PUBLIC}.policy.{token(scheduler)}"


def set_alias(name: str) -> str:
    """Request-reply: the operator sets what an alias stands for; the body is `{"model": weight, ...}`."""
    return f"{PUBLIC}.alias.{token(name)}"


def alias(name: str) -> str:
    """The last change of an alias: for all that resolve it, and in stream HR_ALIASES."""
    return f"{STORE}.alias.{token(name)}"


def sleep(scheduler: str) -> str:
    """Request-reply: executors of a scheduler sleep or wake; the body is `{"asleep", "executors"}`."""
    return f"{PUBLIC}.sleep.{token(scheduler)}"


def load(model: str) -> str:
    """Request-reply: each `headrace up` that has executors of a model loads or unloads them; the body is
    `load` or `unload`."""
    return f"{PUBLIC}.load.{token(model)}"


def events(scheduler: str) -> str:
    """The event log of a scheduler, if it is on."""
    return f"{PUBLIC}.events.{token(scheduler)}"


def events_snapshot(scheduler: str) -> str:
    """Request-reply: publish a snapshot now, for a new log."""
    return f"{PUBLIC}.events.{token(scheduler)}.snapshot"


def models(tenant: str) -> str:
    """Request-reply: the models that are served."""
    return f"{MODELS}.{token(tenant)}"


def tokenize(tenant: str, model: str) -> str:
    """Request-reply: text to token ids."""
    return f"{PUBLIC}.tokenize.{token(tenant)}.{token(model)}"


def tokenize_any_tenant(model: str) -> str:
    """`tokenize` requests of all tenants for one model."""
    return f"{PUBLIC}.tokenize.*.{token(model)}"


def detokenize(tenant: str, model: str) -> str:
    """Request-reply: token ids to text."""
    return f"{PUBLIC}.detokenize.{token(tenant)}.{token(model)}"


def detokenize_any_tenant(model: str) -> str:
    """`detokenize` requests of all tenants for one model."""
    return f"{PUBLIC}.detokenize.*.{token(model)}"


class NameTooLong(ValueError):
    """A name in a subject has more than MAX_NAME_CHARS."""


def name_at(subject: str, index: int) -> str:
    """The name in position `index` (from 0) of a public subject. Raises ValueError if it is damaged or longer
    than MAX_NAME_CHARS."""
    name = untoken(subject.split(".")[index])
    if len(name) > MAX_NAME_CHARS:
        raise NameTooLong(f"a name has at most {MAX_NAME_CHARS} characters")
    return name


def names_in(subject: str) -> tuple[str, str] | None:
    """Tenant and model, or tenant and request, of a public subject; None if one is damaged or too long."""
    try:
        return name_at(subject, 3), name_at(subject, 4)
    except ValueError:
        return None


def wrong_name(subject: str, second: str) -> tuple[str, str]:
    """Which of the tenant and the `second` name of a subject without `names_in` is wrong, and why."""
    for index, what in (3, "tenant"), (4, second):
        try:
            name_at(subject, index)
        except NameTooLong as error:
            return what, f"the name in `{what}` is too long: {error}"
        except ValueError:
            break
    names = f"tenant and {second} are names of 1 to {MAX_NAME_CHARS} characters, escaped as =XX"
    return "subject", f"the subject is damaged: {names}"


def is_inbox(subject: str) -> bool:
    """True for a valid reply subject. Internal and public subjects are refused: through a service's answer a
    client could publish where it may not. Wildcards and blanks are not allowed in a subject."""
    if not 0 < len(subject) <= MAX_INBOX_CHARS or subject.startswith(_OURS):
        return False
    return all(name and name not in ("*", ">") and name.isprintable() for name in subject.split(".")) and (
        " " not in subject
    )


def mailbox(fleet: str, kind: str, actor: str, message: str) -> str:
    """A message for one actor. `message` is the message's class name."""
    return f"hr.{token(fleet)}.{kind}.{token(actor)}.in.{message}"


def mailbox_all(fleet: str, kind: str, actor: str) -> str:
    """All messages for one actor: one subscription, since several would lose their relative order."""
    return f"hr.{token(fleet)}.{kind}.{token(actor)}.in.*"


def heartbeat(fleet: str, kind: str, actor: str) -> str:
    """The heartbeats of an actor."""
    return f"hr.{token(fleet)}.beat.{kind}.{token(actor)}"


def heartbeat_all(fleet: str) -> str:
    """The heartbeats of the whole fleet."""
    return f"hr.{token(fleet)}.beat.*.*"


def heartbeat_request(fleet: str) -> str:
    """A new actor requests a heartbeat from every actor of the fleet."""
    return f"hr.{token(fleet)}.beat_ask"


def metrics(fleet: str) -> str:
    """Request-reply: every actor of the fleet answers with its metrics."""
    return f"hr.{token(fleet)}.metrics"


def gone(actor: str, request: str) -> str:
    """The reply subject of frames: a 503 of the server on it means that the client has gone."""
    return f"_R.{token(actor)}.{token(request)}"


def gone_all(actor: str) -> str:
    """The 503s for all frames of a detokenizer."""
    return f"_R.{token(actor)}.*"
