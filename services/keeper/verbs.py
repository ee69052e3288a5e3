"""What users ask of a keeper: `submit` stores a request, `result` answers with its state, `cancel` ends it,
`delete` removes its record.

    client ──submit──▶ keeper ──check──▶ tokenizer: valid? its seed and class
                       keeper ──create-only──▶ stream WORK
    client ◀─queued─── keeper

The id and the hash of the body decide what a second submit is: the same request has the same answer, another
one under the same id is refused.
"""

from __future__ import annotations

import re
import secrets

from services.keeper import records
from services.keeper.core import KEPT_S
from services.keeper.parts import Keeper
from shared import bodies
from shared.api import REQUEST_ID
from shared.client.client import error_of
from shared.errors import (
    BadRequest,
    Cancelled,
    DuplicateRequest,
    PayloadTooLarge,
    Unavailable,
    UnknownModel,
    UnknownRequest,
    WireError,
)
from shared.nats import access, subjects
from shared.nats.interface import NoResponders, RequestTimeout
from shared.nats.jetstream import FULL_RETRY_MS, StreamFull, Taken

CHECK_US = 10_000_000  # a tokenizer takes up to three seconds for a megabyte
REPLIES = f"{access.INBOX}.*.{access.user_of('keeper')}.*"  # answers to the requests of all keepers
SIZE_POLL_US = 5_000_000  # between two looks at the size of the stream; it fills in minutes
RUNS_US = 100_000  # for another keeper to answer, far longer than it takes: a reader of a state waits for it
RECORD_ROOM = 4_096  # bytes of a record beside its request and its answer
SUBMIT_TRIES = 8  # of a second: a stream whose leader has died has another after six; clients wait for ten


class Verbs:
    """Serves `submit`, `result` and `cancel` for one keeper."""

    def __init__(self, keeper: Keeper) -> None:
        self._keeper, self._bus, self._clock = keeper, keeper.bus, keeper.clock
        self._streams, self._queues, self._aliases = keeper.streams, keeper.queues, keeper.aliases
        self._peers = keeper.mailbox.peers
        keeper.end = self.end
        keeper.verbs |= {
            subjects.SUBMIT_ALL: self.submit, subjects.RESULT_ALL: self.result,
            subjects.DELETE_ALL: self.delete, subjects.KEEP_ALL: self.keep,
        }  # fmt: skip
        self.submitted = self.kept = 0
        self._looked_us, self._half_full = 0, False

    async def submit(self, tenant: str, model: str, data: bytes) -> records.Body:
        """Store a request; returns when the stream has it. The model that an alias stands for is stored: it
        answers, also after the alias has changed. Raises the error that `generate` would give,
        DuplicateRequest for another request under this id, StreamFull, PayloadTooLarge, Unavailable."""
        body = _read(data)
        request_id = body.get("request_id") or secrets.token_hex(11)
        if not isinstance(request_id, str) or not re.fullmatch(REQUEST_ID, request_id):
            raise BadRequest(
                f"`request_id` is not 1 to {subjects.MAX_NAME_CHARS} of A-Z a-z 0-9 . _ : -",
                param="request_id",
            )
        if len(reply_subject(tenant, request_id)) > subjects.MAX_INBOX_CHARS:
            raise BadRequest("`request_id` is too long beside the name of this tenant", param="request_id")
        digest, keep = records.digest_of(model, body), _kept(body)
        # a record that a mirror lacks costs a second run, whose record is then taken
        if (known := await self._known(tenant, request_id, sure=False)) is not None:
            return _same(known, digest, model)
        asked, is_model = model, self._peers.has_model(model)
        model = model if is_model else self._aliases.resolve(model, tenant, request_id) or model
        if not is_model and self._aliases.adapter(asked, tenant) is not None:
            body |= {"model": asked}  # the model's tokenizer finds the adapter by it, also later
        elif "model" in body and model != asked:
            body |= {"model": model}
        webhook = self._keeper.check_url(body.pop("webhook")) if "webhook" in body else ""
        drawn: records.Body = {}
        if not self._keeper.must_forward(model):  # else a tokenizer there validates it, once the link is up
            drawn = await self._checked(tenant, model, {**body, "request_id": request_id})
        stored = records.body_to_store(body, request_id, drawn)
        now_us, computed_by = self._clock.wall_us(), self._peers.model_digest(model)
        work = records.Work(tenant, request_id, model, stored, digest, now_us, keep, webhook, computed_by)
        packed = work.pack()
        if keep and len(packed) + RECORD_ROOM > self._bus.max_payload:  # its record has them, too
            size = f"a request of {len(packed)} bytes leaves no room for its record"
            raise PayloadTooLarge(f"{size}: the server's max_payload is {self._bus.max_payload}; send less")
        await self._queues.before(tenant)
        try:
            await self._create(subjects.work(tenant, request_id), packed)
        except Taken:  # by another submit, or by a try of this one whose answer was lost
            known = await self._known(tenant, request_id)
            ours = {"id": request_id, "digest": digest, "status": records.QUEUED, "model": model}
            return _same(known or ours, digest, asked)
        self.submitted += 1
        self._queues.on_stored(tenant)
        return _stored(request_id, records.QUEUED, asked, model)

    async def result(self, tenant: str, request_id: str, _: bytes = b"") -> records.Body:
        """The state of a request, with its answer or its error once it has ended. Raises UnknownRequest for
        an id that this tenant has not submitted, or whose record is older than a day; Unavailable."""
        known = await self._known(tenant, request_id)
        if known is None or known["status"] == records.DELETED:
            raise UnknownRequest(f"no durable request {request_id!r:.140} of this tenant is kept", param="id")
        return {name: value for name, value in known.items() if name != "digest"}

    async def cancel(self, tenant: str, request_id: str) -> bool:
        """Store that a request was cancelled, if it waits or runs; services that run it end it themselves.
        Returns whether this call has ended it. Raises Unavailable."""
        at = subjects.work(tenant, request_id)
        waits = await self._streams.last(subjects.WORK_STREAM, at, sure=False)  # most cancels are of others
        if waits is None:
            return False
        ended = records.work_of(waits).record(self._clock.wall_us(), Cancelled("cancelled by the client"))
        try:
            await self._streams.create(
                subjects.record(tenant, request_id), bodies.encode(ended), ttl_s=KEPT_S
            )
        except Taken:
            return False
        return True

    async def end(self, tenant: str, request_id: str) -> None:
        """Cancel a request, with the news of its end, where no client has sent a cancel to all services.
        Raises Unavailable."""
        if await self.cancel(tenant, request_id):
            news = bodies.encode(bodies.Ended(id=request_id, status=records.CANCELLED))
            self._bus.publish(subjects.done(tenant, request_id), news)
            self._bus.publish(subjects.cancel(tenant, request_id), b"")  # services may run it

    async def delete(self, tenant: str, request_id: str, _: bytes) -> records.Body:
        """Delete the record of a request; one that waits or runs is cancelled before. Raises like `result`,
        and StreamFull."""
        await self.result(tenant, request_id)
        await self.end(tenant, request_id)
        mark = bodies.encode(bodies.Record(id=request_id, digest="", status="deleted"))
        await self._streams.replace(subjects.record(tenant, request_id), mark, ttl_s=KEPT_S)
        return {**bodies.Deleted(id=request_id, deleted=True)}

    async def keep(self, tenant: str, request_id: str, data: bytes) -> records.Body:
        """Store a request that was answered already: its fields `request`, `keep` and `answer`. Raises
        BadRequest, DuplicateRequest for an id with a record, StreamFull, PayloadTooLarge, Unavailable."""
        kept = bodies.asked(bodies.Kept, data)
        now_us, model = self._clock.wall_us(), kept.get("model", "")
        if not await self._has_room_to_keep(self._clock.now_us()):
            full = "the store is half full: the rest is for the answers of durable requests"
            raise StreamFull(full, retry_after_ms=FULL_RETRY_MS)
        work = records.Work(
            tenant, request_id, model, kept["request"], records.digest_of(model, kept), now_us, kept["keep"]
        )
        record = bodies.encode(work.record(now_us, kept["answer"]))
        await self._streams.create(subjects.record(tenant, request_id), record, ttl_s=KEPT_S)
        self.kept += 1
        return {"id": request_id, "status": records.COMPLETED}

    async def _has_room_to_keep(self, now_us: int) -> bool:
        """True while the records take at most half of their stream."""
        if now_us >= self._looked_us + SIZE_POLL_US:
            self._looked_us = now_us
            used, most = await self._streams.room(subjects.RECORD_STREAM)
            self._half_full = most > 0 and 2 * used > most
        return not self._half_full

    async def _known(self, tenant: str, request_id: str, *, sure: bool = True) -> records.Body | None:
        """The record of a request, or its state without one. The work is read first: it goes after the record
        has come. `sure`: as of `JetStream.last`."""
        work_at, record_at = subjects.work(tenant, request_id), subjects.record(tenant, request_id)
        waits = await self._streams.last(subjects.WORK_STREAM, work_at, sure=sure)
        lacks_both = sure and waits is None
        record = await self._streams.last(subjects.RECORD_STREAM, record_at, sure=lacks_both)
        if record is not None:
            return {**bodies.decode(bodies.Record, record)}
        if waits is None:
            return None
        work = records.work_of(waits)
        key = tenant, request_id
        runs = self._keeper.is_running(key) or await self._is_running_elsewhere(*key)
        status = records.RUNNING if runs else records.QUEUED
        at = work.submitted_us // 1_000_000
        return {
            "id": work.id,
            "model": work.model,
            "digest": work.digest,
            "submitted_at": at,
            "status": status,
            **work.kept,
        }

    async def _is_running_elsewhere(self, tenant: str, request_id: str) -> bool:
        """Whether another keeper of the fleet has sent a request to a tokenizer: only that one answers."""
        if len(self._peers.ready("keeper")) < 2:
            return False
        try:
            await self._bus.request(subjects.runs(tenant, request_id), b"", timeout_us=RUNS_US)
        except (NoResponders, RequestTimeout):
            return False
        return True

    async def _create(self, subject: str, data: bytes) -> None:
        """Create-only, again and again while the stream does not answer. A server with a full disk answers
        reads alone: then a second try is the last one."""
        reads = False
        for left in reversed(range(SUBMIT_TRIES)):
            try:
                await self._streams.create(subject, data)
            except Unavailable as error:
                if reads:
                    why = f"{error.message}; it answers reads, so its disk is perhaps full: see `status`"
                    raise Unavailable(why, retry_after_ms=FULL_RETRY_MS) from None
                if not left:
                    raise
            else:
                return
            reads = await self._streams.can_read(subjects.WORK_STREAM)

    async def _checked(self, tenant: str, model: str, body: records.Body) -> records.Body:
        """What a tokenizer draws for a valid request. Raises its error for another one."""
        try:
            delivery = await self._bus.request(
                subjects.check(tenant, model), bodies.encode(body), timeout_us=CHECK_US
            )
        except NoResponders:
            raise await self._no_tokenizer(model) from None
        except RequestTimeout:
            why = f"no tokenizer of {model!r:.80} has validated the request in {CHECK_US / 1e6:g} s"
            raise Unavailable(f"{why}: try again", retry_after_ms=1_000) from None
        answer = bodies.decode(bodies.Drawn, delivery.data)
        if "error" in answer:
            raise error_of(answer)
        return {**answer}

    async def _no_tokenizer(self, model: str) -> Unavailable | UnknownModel:
        try:
            delivery = await self._bus.request(subjects.MODELS, b"", timeout_us=CHECK_US)
            names = sorted(each["id"] for each in bodies.decode(bodies.Models, delivery.data)["data"])
        except (NoResponders, RequestTimeout, WireError):
            names = []
        if not names or model in names:
            why = f"no tokenizer validates requests for {model!r:.80} now: try again"
            return Unavailable(why, retry_after_ms=1_000)
        served = ", ".join(names)
        return UnknownModel(f"no service serves model {model!r:.80}; ask for one of: {served}", param="model")


def reply_subject(tenant: str, request_id: str) -> str:
    """Where the answer to a durable request goes, whichever keeper sends it: below the inbox of its tenant,
    as the services demand."""
    name = access.user_of("keeper")
    return f"{access.INBOX}.{subjects.token(tenant)}.{name}.{subjects.token(request_id)}"


def _read(data: bytes) -> records.Body:
    """The fields of a submitted request. Raises BadRequest."""
    body = bodies.fields_of(data)
    if body.get("stream") or "stream_options" in body:
        raise BadRequest("a durable request has one answer, no stream: leave `stream` out", param="stream")
    return body


def _kept(body: records.Body) -> records.Body:
    """Take `keep` out of a body: it is for the record, not for the tokenizer. Raises BadRequest."""
    keep = body.pop("keep", {})
    if not isinstance(keep, dict):
        raise BadRequest("`keep` is not an object", param="keep")
    return keep


def _stored(request_id: str, status: str, asked: str, model: str) -> records.Body:
    """The answer to a submit. With the model, if an alias was asked for."""
    return {"id": request_id, "status": status, **({"model": model} if model != asked else {})}


def _same(known: records.Body, digest: str, asked: str) -> records.Body:
    """The answer to a submit of a known id."""
    if known["digest"] != digest:
        raise DuplicateRequest(
            f"another request was submitted as {known['id']}: use another request_id", param="request_id"
        )
    return _stored(known["id"], known["status"], asked, known.get("model", asked))
