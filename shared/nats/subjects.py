"""All NATS subjects, each declared once with what it carries.

`headrace.v1` is public and stable. `hr.<fleet>` is internal, and so is `headrace.store`, which all fleets on
a server share. Names from users (models, tenants, request ids) and of actors (a host name has dots) are one
token each: characters with a meaning for NATS are escaped as `=XX`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

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


class Subject:
    """The subjects of one kind. In its pattern, `{name}` is one token, escaped; `{name?}` may be `*`, any
    one; `{name!}` stands as it is given. `carries`: the bodies and, after `->`, the answers: types of
    bodies.py and other modules of `shared`, or bytes, text, empty; by the last name if they differ."""

    def __init__(self, pattern: str, about: str, carries: str | Mapping[str, str] = "") -> None:
        self.pattern, self.about, self.carries = pattern, about, carries
        self.names = re.findall(r"\{([a-z]+[?!]?)\}", pattern)
        self.every = re.sub(r"\{.*?\}", "*", pattern)  # a pattern for all of them
        self.form = re.sub(r"\{.*?\}", "%s", pattern)
        self._tokens = [_WRITTEN.get(name[-1], token) for name in self.names]

    def __call__(self, *names: str | int) -> str:
        """The subject for these names. Raises ValueError for an empty one, TypeError for another number."""
        if len(names) != len(self._tokens):
            raise TypeError(f"{self.pattern} has {len(self._tokens)} names, not {len(names)}")
        return self.form % tuple(map(_write, self._tokens, names))

    def of_any_tenant(self, name: str) -> str:
        """The pattern for all tenants."""
        return self.form.replace("%s", "*", 1) % token(name)


def _write(write: Callable[[Any], str] | None, name: Any) -> Any:
    return name if write is None else write(name)


def _any(name: str) -> str:
    return name if name == "*" else token(name)


_WRITTEN: dict[str, Callable[[Any], str] | None] = {"?": _any, "!": None}
_REQUEST = "ChatRequest | CompletionRequest | EmbeddingRequest"


# fmt: off
generate = Subject("headrace.v1.generate.{tenant}.{model}", "A client's request", f"{_REQUEST} -> Frame")
generate_any_tenant = generate.of_any_tenant
cancel = Subject("headrace.v1.cancel.{tenant}.{request}", "A client's cancellation of a request; empty body",
    "empty")
submit = Subject("headrace.v1.submit.{tenant}.{model}",
    "A durable request. The reply follows when it is stored", f"{_REQUEST} -> Submitted")
result = Subject("headrace.v1.result.{tenant}.{request}",
    "The state of a durable request, with its answer once there is one", "empty -> Record")
delete = Subject("headrace.v1.delete.{tenant}.{request}",
    "The record of a durable request goes; a request that waits or runs is cancelled", "empty -> Deleted")
attach = Subject("headrace.v1.attach.{tenant}.{request}",
    "Request with many replies: the text of a running request, from a character on", "Attach -> Frame")
keep = Subject("headrace.v1.keep.{tenant}.{request}",
    "The gateway has a keeper store a response that it has answered", "Kept -> Submitted")
done = Subject("headrace.v1.done.{tenant}.{request}",
    "The news that a durable request has ended, with its state", "Ended")
work = Subject("headrace.store.work.{tenant}.{request}",
    "A durable request that waits for its answer, in stream HR_WORK", "Work")
work_of = Subject("headrace.store.work.{tenant}.>", "The durable requests and batches of a tenant that wait")
record = Subject("headrace.store.record.{tenant}.{request}",
    "How a durable request has ended, in stream HR_DONE", "Record")
files = Subject("headrace.v1.files.{tenant}.{verb!}",
    "Files of a tenant. `verb`: put, keep, show, list, read, delete", {"put": "bytes -> empty",
    "keep": "FileKept -> FileMeta", "show": "FileNamed -> FileMeta", "list": "PageAsked -> FileMeta",
    "read": "ChunkNamed -> bytes", "delete": "FileNamed -> Deleted"})
batches = Subject("headrace.v1.batches.{tenant}.{verb!}",
    "Batches of a tenant. `verb`: create, show, list, cancel", {"create": "BatchCreated -> Batch",
    "show": "BatchNamed -> Batch", "list": "PageAsked -> Batch", "cancel": "BatchNamed -> Batch"})
forward = Subject("headrace.v1.forward.{tenant}.{verb!}",
    "The keeper of an edge hands a durable request to the centre. `verb`: submit, result, cancel",
    {"submit": "Forwarded -> Submitted", "result": "Forwarded -> Record", "cancel": "Forwarded -> Forwarded"})
file_part = Subject("headrace.store.file.{tenant}.{file?}.{part!}",
    "A chunk of a file by its number, or `meta`, in stream HR_FILES. `*` stands for any file", {"": "bytes",
    "meta": "FileMeta"})
file_part_any_tenant = Subject("headrace.store.file.*.*.{part!}", "A part of all files")
batch_line = Subject("headrace.store.line.{tenant}.{batch}.{line!}.{outcome!}",
    "How a line of a batch has ended, `ok` or `error`, in stream HR_FILES", "BatchLine")
batch_job = Subject("headrace.store.work.{tenant}.{batch?}.batch",
    "A batch that is not over, in stream HR_WORK. Its subject has a part more than that of a request",
    "Batch")
batch_part = Subject("headrace.store.record.{tenant}.{batch?}.{part!}",
    "`end`, `state` or `cancel` of a batch, in stream HR_DONE", {"": "Batch", "cancel": "CancelMark"})
hook = Subject("headrace.store.hook.{host!}.{tenant}.{event!}",
    "An event for a webhook, in stream HR_HOOKS. `host`: a key of the host that gets it", "HookMessage")
hooks_of = Subject("headrace.store.hook.{host!}.>",
    "All events of a host, also those of an earlier version, which lack the tenant")
runs = Subject("headrace.store.runs.{tenant}.{request}",
    "The keeper that has sent a request to a tokenizer answers another one", "empty -> empty")
check = Subject("headrace.store.check.{tenant}.{model}",
    "A tokenizer validates a request that a keeper is about to store", f"{_REQUEST} -> Drawn")
check_any_tenant = check.of_any_tenant
state = Subject("headrace.store.state.{tenant}.{request}",
    "The last savepoint of a durable request, in stream HR_STATE", "Tokenized | Tokens")
resume = Subject("headrace.store.resume.{tenant}.{model}",
    "A detokenizer has a durable request go on after its savepoint", "Tokenized | Tokens -> Frame")
resume_any_tenant = resume.of_any_tenant
session = Subject("headrace.v1.session.{tenant}.{session}",
    "A verb for a session of a tenant, by the client's id; each scheduler answers, `unknown` where it is not",
    "SessionAsked -> SessionState | Refused")
sessions = Subject("headrace.v1.sessions.{tenant}", "The sessions of a tenant, from each scheduler",
    "empty -> Sessions")
trace = Subject("headrace.v1.trace.{request}", "The stages of a request", "text -> Trace")
policy = Subject("headrace.v1.policy.{scheduler}",
    "The operator changes the policy of a scheduler; the body is `kind=name,...`", "text -> Change")
set_alias = Subject("headrace.v1.alias.{name}",
    'The operator sets what an alias stands for; the body is `{"model": weight, ...}`', "Targets -> Change")
alias = Subject("headrace.store.alias.{name}",
    "The last change of an alias: for all that resolve it, and in stream HR_ALIASES", "Alias")
adapter = Subject("headrace.v1.adapter.{name}",
    "The operator adds an adapter under a name, or removes it", "AdapterSet -> Change")
adapter_check = Subject("headrace.store.adapter.{model}",
    "An executor reads the folder of an adapter: its digest, rank and size", "AdapterNamed -> AdapterFacts")
sleep = Subject("headrace.v1.sleep.{scheduler}",
    'Executors of a scheduler sleep or wake; the body is `{"asleep", "executors"}`', "text -> SleepStates")
load = Subject("headrace.v1.load.{model}",
    "Each `headrace up` that has executors of a model loads or unloads them; the body is `load` or `unload`",
    "text -> HostAnswer")
events = Subject("headrace.v1.events.{scheduler}", "The event log of a scheduler, if it is on", "bytes")
events_snapshot = Subject("headrace.v1.events.{scheduler}.snapshot", "Publish a snapshot now, for a new log",
    "empty -> empty")
models = Subject("headrace.v1.models.{tenant}", "The models that are served", "empty -> Models")
tokenize = Subject("headrace.v1.tokenize.{tenant}.{model}", "Text to token ids", f"{_REQUEST} -> TokensAsked")
tokenize_any_tenant = tokenize.of_any_tenant
detokenize = Subject("headrace.v1.detokenize.{tenant}.{model}", "Token ids to text", "TokensAsked -> Text")
detokenize_any_tenant = detokenize.of_any_tenant
mailbox = Subject("hr.{fleet}.{kind!}.{actor}.in.{message!}",
    "A message for one actor. `message` is the message's class name", "Envelope")
mailbox_all = Subject("hr.{fleet}.{kind!}.{actor}.in.*",
    "All messages for one actor: one subscription, since several would lose their relative order")
heartbeat = Subject("hr.{fleet}.beat.{kind!}.{actor}", "The heartbeats of an actor", "Heartbeat")
heartbeat_all = Subject("hr.{fleet}.beat.*.*", "The heartbeats of the whole fleet")
heartbeat_request = Subject("hr.{fleet}.beat_ask",
    "A new actor requests a heartbeat from every actor of the fleet", "empty")
metrics = Subject("hr.{fleet}.metrics", "Every actor of the fleet answers with its metrics",
    "empty -> Report")
gone = Subject("_R.{actor}.{request}",
    "The reply subject of frames: a 503 of the server on it means that the client has gone", "empty")
gone_all = Subject("_R.{actor}.*", "The 503s for all frames of a detokenizer")
_status = Subject("headrace.v1.status", "The states of all services", "empty -> ServiceStatus")
_sessions = Subject("headrace.v1.sessions", "The sessions of all tenants, from each scheduler",
    "empty -> Sessions")
_aliases = Subject("headrace.store.aliases", "The aliases that a tokenizer has", "empty -> Alias")
# fmt: on

STATUS = _status.every
SESSIONS = _sessions.every
SESSION_ALL, SESSIONS_ANY_TENANT = session.every, sessions.every
ALIASES = _aliases.every
GENERATE_ALL = generate.every  # the queue group that answers 404
LOAD_ALL = load.every
CANCEL_ALL = cancel.every
TOKENIZER_HEARTBEATS_ALL_FLEETS = "hr.*.beat.tokenizer.*"
HEARTBEAT_REQUEST_ALL_FLEETS = "hr.beat_ask"  # a new actor requests the heartbeats of every fleet
MODELS = f"{PUBLIC}.models"  # without a tenant
MODELS_ANY_TENANT = f"{PUBLIC}.models.*"
TRACE_ALL = trace.every
SUBMIT_ALL = submit.every
RESULT_ALL = result.every
KEEP_ALL = keep.every
DELETE_ALL = delete.every
ATTACH_ALL = attach.every
FILES_ALL = files.every
BATCHES_ALL = batches.every
FORWARD_ALL = forward.every
DONE_ALL = done.every
WORK_STREAM, RECORD_STREAM, FILE_STREAM = "HR_WORK", "HR_DONE", "HR_FILES"
HOOK_STREAM, STATE_STREAM = "HR_HOOKS", "HR_STATE"
ALIAS_STREAM = "HR_ALIASES"
WORK_ALL = f"{STORE}.work.>"
RECORD_ALL = f"{STORE}.record.>"
STATE_ALL = f"{STORE}.state.>"
FILE_ALL = f"{STORE}.file.>"
LINE_ALL = f"{STORE}.line.>"
RUNS_ALL = runs.every
HOOK_ALL = f"{STORE}.hook.>"
ALIAS_ALL = f"{STORE}.alias.*"
SET_ALIAS_ALL = f"{PUBLIC}.alias.*"
ADAPTER_ALL = adapter.every
_TRACE_TENANT = "tenant "
TRACE_STEPS = b"steps"  # body of a trace request that includes the steps of its time


def is_batch_job(subject: str) -> bool:
    """True for the subject of a batch in stream HR_WORK."""
    return subject.count(".") > WORK_ALL.count(".") + 1


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
