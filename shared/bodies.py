"""Declares every JSON body of a subject, with its bounds. nats/subjects.py names the bodies of each subject.

    builder ── a body, checked by the types ──▶ encode ──▶ subject ──▶ decode, asked ── the body ──▶ reader

A body is a TypedDict: its fields have these names on the wire. Unknown fields are kept, since a newer version
may have sent them. `decode` reads what a service has sent or stored, `asked` what a client has sent; both
check types and bounds. Positional messages between actors are in messages.py; public requests in api.py.
"""

# ruff: noqa: UP013 - a catalogue: a body takes a few lines

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cache
from typing import Annotated, Any, Literal, NotRequired, TypeVar, cast

from pydantic import Field, TypeAdapter, ValidationError, WrapValidator
from pydantic_core import from_json
from typing_extensions import TypedDict, is_typeddict

from shared.errors import BadRequest, WireError
from shared.session_hints import MAX_KEEP_S

T = TypeVar("T")
Json = dict[str, Any]  # of another definition: a public request, an answer, an object of OpenAI

MAX_EXACT = 2**53 - 1  # of a number, as in JavaScript
CHUNK_NUMBERS = 100_000
FILE_KEPT_S, MIN_KEPT_S = 2_592_000, 3_600  # a file goes after 30 days, or earlier


def _else(why: str) -> WrapValidator:
    """The text of the error for another value, after the field's name."""

    def check(value: object, inner: Callable[[object], object]) -> object:
        try:
            return inner(value)
        except ValidationError:
            raise ValueError(why) from None

    return WrapValidator(check)


Count = Annotated[int, Field(ge=0, le=MAX_EXACT)]
Name = Annotated[str, Field(min_length=1, max_length=512)]
# The time of a batch: 24h, as OpenAI has it, or another up to a week.
WINDOW = r"^([1-9][0-9]{0,3}m|([1-9][0-9]?|1[0-5][0-9]|16[0-8])h|[1-7]d)$"
Status = Literal["queued", "running", "completed", "failed", "cancelled", "deleted"]


# fmt: off
# ---- durable requests ---------------------------------------------------------------------------

# A durable request that waits: services/keeper/records.py has its meaning
Work = TypedDict("Work", {
    "tenant": Name, "id": Name, "model": str, "body": Json, "digest": str, "submitted_us": int,
    "keep": NotRequired[Json], "webhook": NotRequired[str], "model_digest": NotRequired[str],
})

# A durable request is stored, or was. `model`: that an alias stood for
Submitted = TypedDict("Submitted", {"id": Name, "status": Status, "model": NotRequired[str]})

# A durable request in its store: it waits, runs or has ended. `digest`: of the body as it was submitted;
# clients do not get it; `keep`: what the gateway needs to answer for it over HTTP; `model_changed`: another
# model has answered than that of `submit`
Record = TypedDict("Record", {
    "id": Name, "status": Status, "digest": NotRequired[str], "model": NotRequired[str],
    "submitted_at": NotRequired[int], "ended_at": NotRequired[int], "keep": NotRequired[Json],
    "request": NotRequired[Json], "answer": NotRequired[Json], "error": NotRequired[Json],
    "model_changed": NotRequired[bool],
})

# A request that was answered already, for its record
Kept = TypedDict("Kept", {"request": Json, "keep": Json, "answer": Json, "model": NotRequired[str]})

# The news that a durable request or a batch has ended
Ended = TypedDict("Ended", {"id": Name, "status": str})

# The record of a request is gone
Deleted = TypedDict("Deleted", {"id": Name, "deleted": bool})

# What a tokenizer chooses for a valid request; further fields are defaults of its model
Drawn = TypedDict("Drawn", {
    "seed": NotRequired[int], "slo_class": NotRequired[str], "error": NotRequired[Json],
})

# The text of one choice that a reader has. `hash`: replies.text_hash
Had = TypedDict("Had", {"chars": Count, "hash": NotRequired[str]})

# A reader wants the frames of a request, from where it is; an empty body: from the start. `choices`: by
# index; `attempt`: of its last frame; `leave`: it wants no more
Attach = TypedDict("Attach", {
    "choices": NotRequired[dict[str, Had]], "attempt": NotRequired[Count], "leave": NotRequired[bool],
})

# A message to a client: accepted, delta, done or error; the answer of a request without a stream has its
# `choices` alone. Readers of each frame check what they use, see client/follow.py
Frame = TypedDict("Frame", {
    "type": NotRequired[str], "request_id": NotRequired[str], "attempt": NotRequired[int],
    "frame": NotRequired[int], "choices": NotRequired[list[Json]], "error": NotRequired[Json],
})

# The keeper of an edge asks the centre: `submit` has model and request, the other verbs an id
Forwarded = TypedDict("Forwarded", {
    "id": NotRequired[Name], "model": NotRequired[Name], "request": NotRequired[Json],
})

# An event for a webhook; `body` is sent as it is
HookMessage = TypedDict("HookMessage", {"url": str, "body": str})


# ---- files and batches --------------------------------------------------------------------------

FileId = Annotated[str, Field(pattern="^file-[0-9a-f]{22}$"), _else("file-<22 hex digits> is expected")]
_KEPT = f"{MIN_KEPT_S} to {FILE_KEPT_S} are expected"
KeptS = Annotated[int, Field(ge=MIN_KEPT_S, le=FILE_KEPT_S)]

# `keep` a file of the chunks that were put
FileKept = TypedDict("FileKept", {
    "id": FileId,
    "filename": Annotated[
        str, Field(min_length=1, max_length=255), _else("1 to 255 characters are expected")
    ],
    "purpose": Annotated[Literal["batch"], _else("batch is expected, files have no other use here")],
    "bytes": Count, "chunks": Count,
    "sha256": Annotated[str, Field(pattern="^[0-9a-f]{64}$"), _else("64 hex digits are expected")],
    "expires_s": NotRequired[Annotated[KeptS, _else(f"`expires_after[seconds]`: {_KEPT}")]],
})

# OpenAI's object of a file, with its chunks
FileMeta = TypedDict("FileMeta", {
    "id": str, "object": str, "bytes": Count, "created_at": int, "expires_at": int, "filename": str,
    "purpose": str, "status": str, "chunks": Count, "sha256": str,
})

# `show` or `delete` a file, also one whose upload is given up
FileNamed = TypedDict("FileNamed", {"id": str, "unfinished": NotRequired[bool]})

# `read` a chunk of a file
ChunkNamed = TypedDict("ChunkNamed", {"id": FileId, "chunk": Annotated[int, Field(ge=0, lt=CHUNK_NUMBERS)]})

# A page of a list, the newest first
PageAsked = TypedDict("PageAsked", {
    "limit": NotRequired[Annotated[int, Field(ge=1)]], "after": NotRequired[str],
    "order": NotRequired[Literal["asc", "desc"]], "purpose": NotRequired[str],
})

# When the files of a batch go
OutputExpires = TypedDict("OutputExpires", {"seconds": KeptS})

MetaName = Annotated[str, Field(max_length=64)]
_META = "at most 16 texts of 512 characters are expected, with names of 64"
MetaText = Annotated[str, Field(max_length=512)]

# `create` a batch. `webhook`: services/keeper/webhooks.py judges it
BatchCreated = TypedDict("BatchCreated", {
    "input_file_id": str, "endpoint": Literal["/v1/chat/completions", "/v1/completions", "/v1/responses"],
    "completion_window": Annotated[
        str, Field(pattern=WINDOW), _else("24h or another time up to 7d is expected")
    ],
    "metadata": NotRequired[Annotated[dict[MetaName, MetaText], Field(max_length=16), _else(_META)]],
    "output_expires_after": NotRequired[Annotated[OutputExpires, _else(f"seconds from {_KEPT}")]],
    "webhook": NotRequired[Any],
})

# OpenAI's object of a batch; private fields start with `_`
Batch = TypedDict("Batch", {"id": Name, "status": str, "endpoint": str, "input_file_id": str})

# `show` or `cancel` a batch
BatchNamed = TypedDict("BatchNamed", {"id": str})

# A batch was cancelled then, in seconds of the wall clock
CancelMark = TypedDict("CancelMark", {"at": Count})


# ---- models, texts, the fleet -------------------------------------------------------------------

Targets = dict[str, int]  # models with their weights, of an alias; aliases.read_targets has the bounds

# An entry of the list of models. `targets`: of an alias
Model = TypedDict("Model", {
    "id": Name, "root": NotRequired[str], "targets": NotRequired[list[Json]], "state": NotRequired[str],
})

# OpenAI's list of models
Models = TypedDict("Models", {"data": list[Model]})

# Ids to turn into a text
TokensAsked = TypedDict("TokensAsked", {"tokens": list[Annotated[int, Field(ge=0)]]})

# The text of ids
Text = TypedDict("Text", {"model": str, "text": str})

# A policy or an alias before and after a change, or why it is unchanged. `stored`: of an alias: it survives
# the last tokenizer
Change = TypedDict("Change", {
    "before": NotRequired[Any], "after": NotRequired[Any], "stored": NotRequired[bool],
    "error": NotRequired[Json],
})

# What an operator adds: the folder of an adapter of a model, where its executors run; nothing removes it.
# `tenant`: alone may use it; `replace`: another one may have the name
AdapterSet = TypedDict("AdapterSet", {
    "model": NotRequired[Name], "path": NotRequired[str], "tenant": NotRequired[Name],
    "replace": NotRequired[bool],
})

# The folder of an adapter, and what an executor finds there
AdapterNamed = TypedDict("AdapterNamed", {"path": str})
AdapterFacts = TypedDict("AdapterFacts", {
    "digest": NotRequired[str], "rank": NotRequired[int], "bytes": NotRequired[Count],
    "error": NotRequired[Json],
})

# The states of a scheduler's executors, or why they are unchanged
SleepStates = TypedDict("SleepStates", {"executors": NotRequired[dict[str, str]], "error": NotRequired[Json]})

# The state of a model on the host of a `headrace up`, or why it is unchanged
HostAnswer = TypedDict("HostAnswer", {
    "host": str, "model": str, "state": NotRequired[str], "error": NotRequired[Json],
})

# The status of a service; its counters are those of telemetry/counters.py
ServiceStatus = TypedDict("ServiceStatus", {
    "kind": Name, "id": Name, "fleet": NotRequired[str], "state": NotRequired[str],
})

# A verb for a session. `ttl_s`: of `keep`; `tree`: of `release`: the sessions that it started, too
SessionAsked = TypedDict("SessionAsked", {
    "do": Annotated[
        Literal["state", "release", "prefetch", "keep"], _else("state, release, prefetch or keep is expected")
    ],
    "ttl_s": NotRequired[Annotated[
        Annotated[float, Field(gt=0, le=MAX_KEEP_S)], _else(f"seconds over 0, to {MAX_KEEP_S}, are expected")
    ]],
    "tree": NotRequired[bool],
})

# A session now, before any copy: services/scheduler/sessions has its meaning, messages.SessionAnswer the
# fields. `id`: as the client has named it in its verb
Seconds = Annotated[float, Field(ge=0)]
SessionState = TypedDict("SessionState", {
    "state": Name, "tokens": Count, "device": Count, "l1": Count, "l2": Count,
    "will": NotRequired[str], "why": NotRequired[str], "scheduler": NotRequired[str],
    "id": NotRequired[str], "session": NotRequired[str], "tenant": NotRequired[str],
    "tool": NotRequired[str], "idle_s": NotRequired[Seconds], "kept_s": NotRequired[Seconds],
    "returns_p50_s": NotRequired[Seconds], "returns_p90_s": NotRequired[Seconds],
    "load_s": NotRequired[Seconds], "compute_s": NotRequired[Seconds],
})

# Why a request was refused
Refused = TypedDict("Refused", {"error": Json})

# The sessions of a scheduler, the least idle first, and what it has learned
Sessions = TypedDict("Sessions", {
    "id": Name, "fleet": NotRequired[str], "model": NotRequired[str], "data": list[SessionState],
    "count": NotRequired[int], "summary": NotRequired[Json],
})

# Where the time of a request went; `unknown` requests have no more
Trace = TypedDict("Trace", {
    "request_id": str, "state": str, "tenant": NotRequired[str], "spans": NotRequired[list[Json]],
    "steps": NotRequired[dict[str, dict[str, list[Any]]]],
})


# fmt: on
for _kind in [each for each in globals().values() if is_typeddict(each)]:  # exact types
    # unknown fields are kept; a keeper of an earlier version has no place for those of `Work`
    _extra = {Work: "ignore", BatchCreated: "forbid"}.get(_kind, "allow")
    _kind.__pydantic_config__ = {"strict": True, "extra": _extra}


# ---- reading and writing ------------------------------------------------------------------------


def encode(body: Mapping[str, Any] | Sequence[Any]) -> bytes:
    """Compact JSON in ASCII: any text that was read from JSON can be written."""
    return json.dumps(body, separators=(",", ":")).encode()


def decode(kind: type[T], data: bytes) -> T:
    """A body of a service or of a store, its fields in their order. Raises WireError."""
    try:
        found = json.loads(data)
        body = _adapter(cast(Hashable, kind)).validate_python(found)
    except (ValueError, RecursionError) as error:
        raise WireError(f"not a {kind.__name__}: {_why(error):.200}") from None
    if isinstance(body, dict):  # pydantic has the declared fields first
        body = {name: body[name] for name in found if name in body}
    return cast(T, body)


def parse_frame(data: bytes) -> Any:
    """The JSON of a frame, at three times the speed of `json.loads`. Raises ValueError."""
    return from_json(data)


def fields_of(data: bytes) -> Json:
    """The fields of a client's body; null means absent, an empty body has none. Raises BadRequest."""
    from shared.api import read_json

    try:
        fields = read_json(data.strip() or b"{}")
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is not a JSON object: {error!s:.200}") from None
    if not isinstance(fields, dict):
        raise BadRequest("the body is not a JSON object")
    return {name: value for name, value in fields.items() if value is not None}


def asked(kind: type[T], data: bytes) -> T:
    """A body of a client. Raises BadRequest with the name of the field."""
    from shared.api import bad_field

    fields = fields_of(data)
    try:
        body: T = _adapter(cast(Hashable, kind)).validate_python(fields)
    except ValidationError as error:
        raise bad_field(error) from None
    return body


@cache
def _adapter(kind: Hashable) -> TypeAdapter[Any]:
    return TypeAdapter(cast(Any, kind))


def _why(error: Exception) -> str:
    errors = getattr(error, "errors", None)
    if errors is None:
        return str(error)
    first = errors(include_url=False, include_input=False)[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
