"""What users ask of a keeper about batches: `create`, `show`, `list`, `cancel`.

A batch is a job in the work queue until it has ended; then it is a record. The keeper that holds it notes its
state from time to time, so any keeper can answer.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import Any

from services.keeper.batch_core import CANCELLING, VALIDATING
from services.keeper.batch_shell import STATE_KEPT_S, WEBHOOK
from services.keeper.queues import TenantQueues
from services.keeper.records import Body
from services.keeper.verbs import listing, page_of, reply_subject
from shared import bodies
from shared.clock import Clock
from shared.errors import BadRequest
from shared.nats import subjects
from shared.nats.jetstream import JetStream, Taken
from shared.nats.object_store import ObjectStore, UnknownFile, new_id
from shared.openai.call import MAX_PROMPTS

PARTS: dict[str, type[Any]] = {"end": bodies.Batch, "state": bodies.Batch, "cancel": bodies.CancelMark}
BATCH_ID = re.compile(r"batch_[0-9a-f]{22}")
MAX_LINE_ID = f".50000:{MAX_PROMPTS}"  # what the longest id of a request has after that of its batch
_UNIT_S = {"m": 60, "h": 3_600, "d": 86_400}
_TIMES = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")


class BatchVerbs:
    """Answers `headrace.v1.batches.TENANT.VERB`."""

    def __init__(
        self, store: ObjectStore, clock: Clock, queues: TenantQueues, webhook: Callable[[object], str]
    ) -> None:
        """`webhook` checks a URL."""
        self._store, self._clock, self._queues, self._webhook = store, clock, queues, webhook
        self._streams: JetStream = store.streams
        self._verbs: dict[str, tuple[type[Any], Callable[[str, Any], Awaitable[Body]]]] = {
            "create": (bodies.BatchCreated, self._create),
            "show": (bodies.BatchNamed, self._show),
            "list": (bodies.PageAsked, self._list),
            "cancel": (bodies.BatchNamed, self._cancel),
        }

    async def answer(self, tenant: str, verb: str, data: bytes) -> Body:
        """The reply to a verb. Raises BadRequest, UnknownFile, StreamFull, Unavailable."""
        if verb not in self._verbs:
            raise BadRequest(f"{verb!r:.40} is no verb of batches: {', '.join(self._verbs)}")
        kind, handle = self._verbs[verb]
        return await handle(tenant, bodies.asked(kind, data))

    async def _create(self, tenant: str, asked: bodies.BatchCreated) -> Body:
        await self._store.meta(tenant, asked["input_file_id"])
        now_us, window = self._clock.wall_us(), asked["completion_window"]
        batch, now_s = new_id("batch_", now_us), now_us // 1_000_000
        if len(reply_subject(tenant, batch + MAX_LINE_ID)) > subjects.MAX_INBOX_CHARS:
            raise BadRequest("the name of this tenant is too long for batches")
        job: Body = {
            "id": batch,
            "object": "batch",
            "endpoint": asked["endpoint"],
            "errors": None,
            "input_file_id": asked["input_file_id"],
            "completion_window": window,
            "status": VALIDATING,
            "output_file_id": None,
            "error_file_id": None,
            "created_at": now_s,
            "expires_at": now_s + int(window[:-1]) * _UNIT_S[window[-1]],
            **{f"{name}_at": None for name in _TIMES},
            "request_counts": {"total": 0, "completed": 0, "failed": 0},
            "metadata": asked.get("metadata"),
        }
        expires = asked.get("output_expires_after")
        kept_s = bodies.FILE_KEPT_S if expires is None else expires["seconds"]
        hook = {WEBHOOK: self._webhook(asked["webhook"])} if "webhook" in asked else {}
        data = bodies.encode({**job, "_output_kept_s": kept_s, **hook})
        await self._queues.before(tenant)
        await self._streams.create(subjects.batch_job(tenant, batch), data)
        self._queues.on_stored(tenant)
        return job

    async def _show(self, tenant: str, asked: bodies.BatchNamed) -> Body:
        batch = asked["id"]
        found = await self._found(tenant, batch) if BATCH_ID.fullmatch(batch) else None
        if found is None:
            raise UnknownFile(f"there is no batch {batch!r:.80}", param="batch_id")
        return found

    async def _found(self, tenant: str, batch: str) -> Body | None:
        """A batch. The job is read first: it goes after the record of the end has come."""

        async def read(kind: type[Any], stream: str, subject: str, *, sure: bool = True) -> Any:
            data = await self._streams.last(stream, subject, sure=sure)
            return None if data is None else bodies.decode(kind, data)

        job = await read(bodies.Batch, subjects.WORK_STREAM, subjects.batch_job(tenant, batch))
        end, state, cancel = [
            await read(
                kind, subjects.RECORD_STREAM, subjects.batch_part(tenant, batch, part), sure=job is None
            )
            for part, kind in PARTS.items()
        ]
        if end is None and job is None:
            return None
        found: Body = end or state or job
        if end is None and cancel is not None:
            found = {**found, "status": CANCELLING, "cancelling_at": cancel["at"]}
        return {name: value for name, value in found.items() if not name.startswith("_")}

    async def _list(self, tenant: str, asked: bodies.PageAsked) -> Body:
        jobs = await self._streams.subjects_like(subjects.WORK_STREAM, subjects.batch_job(tenant, "*"))
        ends = subjects.batch_part(tenant, "*", "end")
        ended = await self._streams.subjects_like(subjects.RECORD_STREAM, ends)
        every = {subjects.untoken(subject.split(".")[4]) for subject in (*jobs, *ended)}
        ids, limit = page_of(sorted(every, reverse=True), asked)
        found = [await self._found(tenant, batch) for batch in ids[: limit + 1]]
        return listing([each for each in found if each is not None], limit)

    async def _cancel(self, tenant: str, asked: bodies.BatchNamed) -> Body:
        found = await self._show(tenant, asked)
        if found["status"] in ("completed", "failed", "expired", "cancelled"):
            raise BadRequest(f"batch {found['id']} has ended: it is {found['status']}", param="batch_id")
        at = bodies.encode(bodies.CancelMark(at=self._clock.wall_us() // 1_000_000))
        try:
            subject = subjects.batch_part(tenant, found["id"], "cancel")
            await self._streams.create(subject, at, STATE_KEPT_S)
        except Taken:
            pass  # it is cancelled already
        return await self._show(tenant, asked)
