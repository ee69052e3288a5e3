"""The two messages of the store: `Work`, a request that waits for its answer, and the record of its end.

Both are JSON, each under a subject of its tenant and id. A record is made once and never changes, but for a
mark that takes its place when its tenant deletes it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from typing import Any

from shared import bodies
from shared.api import MAX_TIMEOUT_S
from shared.errors import Cancelled, HeadraceError, error_body

QUEUED, RUNNING, COMPLETED, FAILED, CANCELLED = "queued", "running", "completed", "failed", "cancelled"
DELETED = "deleted"  # in place of the record: the id is used, and what is delivered again is not computed

REQUEST, RESPONSE, BATCH = "request", "response", "batch"  # what an event is about, as its type has it
RESPONSES = "/v1/responses"  # the path of a response

Body = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Hook:
    """The event that a client wants once a request or a batch has ended."""

    url: str
    kind: str
    tenant: str
    id: str  # of the request or the batch
    submitted: int  # with it the event has an id of its own, also where an id is used again after a day


@dataclass(frozen=True, slots=True)
class Work:
    """A durable request as it is stored: sent again, it is the same request, with the same seed and class."""

    tenant: str
    id: str
    model: str
    body: Body  # of the request to the tokenizer
    digest: str  # of the body as it was submitted
    submitted_us: int  # wall clock
    keep: Body = field(default_factory=dict)  # what the gateway needs to answer for it over HTTP
    webhook: str = ""  # the URL for the event of its end
    model_digest: str = ""  # of the executors of its model at `submit`; empty: not known

    @property
    def kept(self) -> Body:
        """For states and the record of a request that came over HTTP."""
        return {"keep": self.keep, "request": self.body} if self.keep else {}

    @property
    def hook(self) -> Hook | None:
        """The event of its end; None: its client asked for none."""
        kind = RESPONSE if self.keep.get("path") == RESPONSES else REQUEST
        return Hook(self.webhook, kind, self.tenant, self.id, self.submitted_us) if self.webhook else None

    @property
    def has_savepoints(self) -> bool:
        """Whether its tokens are kept while it runs."""
        return self.body.get("durable") == "tokens"

    def pack(self) -> bytes:
        """The message in stream WORK, without what is empty: keepers of an earlier version have fewer
        fields."""
        return bodies.encode({name: value for name, value in asdict(self).items() if value != ""})

    def record(self, now_wall_us: int, outcome: Body | HeadraceError, *, changed: bool = False) -> Body:
        """How it has ended: with an answer or an error. `changed`: another model has answered than that of
        `submit`."""
        record: Body = {
            "id": self.id,
            "model": self.model,
            "digest": self.digest,
            "submitted_at": self.submitted_us // 1_000_000,
            "ended_at": now_wall_us // 1_000_000,
            **self.kept,
            **({"model_changed": True} if changed else {}),
        }
        if isinstance(outcome, HeadraceError):
            status = CANCELLED if isinstance(outcome, Cancelled) else FAILED
            return {**record, "status": status, **error_body(outcome, self.id)}
        return {**record, "status": COMPLETED, "answer": outcome}


def work_of(data: bytes) -> Work:
    """The work in a message of stream WORK. Raises WireError."""
    return Work(**bodies.decode(bodies.Work, data))


def digest_of(model: str, body: Mapping[str, Any]) -> str:
    """A hash of a submitted request without its id. The order of the fields does not count."""
    fields = {name: value for name, value in body.items() if name != "request_id"}
    return sha256(json.dumps([model, fields], sort_keys=True).encode()).hexdigest()


def body_to_store(body: Mapping[str, Any], request_id: str, drawn: Mapping[str, Any]) -> Body:
    """The request that the keeper sends. `drawn`: seed, class and defaults of the model, from a tokenizer.
    Without a time limit it has the longest one: it waits for an executor. It ends also while no keeper reads
    it: the next keeper may be there in time for the answer."""
    return {"timeout_s": MAX_TIMEOUT_S, **body, **drawn, "request_id": request_id, "finish_detached": True}
