"""What users ask of a keeper about batches: `create`, `show`, `list`, `cancel`.

A batch is a job in the work queue until it has ended; then it is a record. The keeper that holds it notes its
state from time to time, so any keeper can answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable
from typing import Any

from services.keeper.batch_core import CANCELLING, VALIDATING
from services.keeper.batch_shell import STATE_KEPT_S, WEBHOOK
from services.keeper.queues import TenantQueues
from services.keeper.records import Body, to_json
from services.keeper.verbs import FILE_KEPT_S, MIN_KEPT_S, fields_of, listing, page_of, reply_subject
from shared.clock import Clock
from shared.errors import BadRequest
from shared.nats import subjects
from shared.nats.jetstream import JetStream, Taken
from shared.nats.object_store import ObjectStore, UnknownFile, new_id
from shared.openai.batch_lines import URLS, WINDOW
from shared.openai.call import MAX_PROMPTS

MAX_WINDOW_S = 604_800  # a week
BATCH_ID = re.compile(r"batch_[0-9a-f]{22}")
MAX_LINE_ID = f".50000:{MAX_PROMPTS}"  # what the longest id of a request has after that of its batch
MAX_METADATA, MAX_NAME, MAX_VALUE = 16, 64, 512  # entries and characters, as OpenAI has them
_UNIT_S = {"m": 60, "h": 3_600, "d": 86_400}
_FIELDS = ("input_file_id", "endpoint", "completion_window", "metadata", "output_expires_after", "webhook")
_TIMES = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")


class BatchVerbs:
    """Answers `headrace.v1.batches.TENANT.VERB`."""

    def __init__(
        self, store: ObjectStore, clock: Clock, queues: TenantQueues, webhook: Callable[[object], str]
    ) -> None:
        """`webhook` checks a URL."""
        self._store, self._clock, self._queues, self._webhook = store, clock, queues, webhook
        self._streams: JetStream = store.streams
        self._verbs: dict[str, Callable[[str, Body], Awaitable[Body]]] = {
            "create": self._create, "show": self._show, "list": self._list, "cancel": self._cancel,
        }  # fmt: skip

    async def answer(self, tenant: str, verb: str, data: bytes) -> Body:
        """The reply to a verb. Raises BadRequest, UnknownFile, StreamFull, Unavailable."""
        if verb not in self._verbs:
            raise BadRequest(f"{verb!r:.40} is no verb of batches: {', '.join(self._verbs)}")
        return await self._verbs[verb](tenant, fields_of(data))

    async def _create(self, tenant: str, asked: Body) -> Body:
        window_s = _checked(asked)
        await self._store.meta(tenant, asked["input_file_id"])
        now_us = self._clock.wall_us()
        batch, now_s = new_id("batch_", now_us), now_us // 1_000_000
        if len(reply_subject(tenant, batch + MAX_LINE_ID)) > subjects.MAX_INBOX_CHARS:
            raise BadRequest("the name of this tenant is too long for batches")
        job: Body = {
            "id": batch,
            "object": "batch",
            "endpoint": asked["endpoint"],
            "errors": None,
            "input_file_id": asked["input_file_id"],
            "completion_window": asked["completion_window"],
            "status": VALIDATING,
            "output_file_id": None,
            "error_file_id": None,
            "created_at": now_s,
            "expires_at": now_s + window_s,
            **{f"{name}_at": None for name in _TIMES},
            "request_counts": {"total": 0, "completed": 0, "failed": 0},
            "metadata": asked.get("metadata"),
        }
        kept_s = asked.get("output_expires_after", {}).get("seconds", FILE_KEPT_S)
        hook = {WEBHOOK: self._webhook(asked["webhook"])} if "webhook" in asked else {}
        data = to_json({**job, "_output_kept_s": kept_s, **hook})
        await self._queues.before(tenant)
        await self._streams.create(subjects.batch_job(tenant, batch), data)
        self._queues.on_stored(tenant)
        return job

    async def _show(self, tenant: str, asked: Body) -> Body:
        batch = str(asked.get("id"))
        found = await self._found(tenant, batch) if BATCH_ID.fullmatch(batch) else None
        if found is None:
            raise UnknownFile(f"there is no batch {batch!r:.80}", param="batch_id")
        return found

    async def _found(self, tenant: str, batch: str) -> Body | None:
        """A batch. The job is read first: it goes after the record of the end has come."""

        async def read(stream: str, subject: str, *, sure: bool = True) -> Any:
            data = await self._streams.last(stream, subject, sure=sure)
            return None if data is None else json.loads(data)

        job = await read(subjects.WORK_STREAM, subjects.batch_job(tenant, batch))
        end, state, cancel = [
            await read(subjects.RECORD_STREAM, subjects.batch_part(tenant, batch, part), sure=job is None)
            for part in ("end", "state", "cancel")
        ]
        if end is None and job is None:
            return None
        found: Body = end or state or job
        if end is None and cancel is not None:
            found = {**found, "status": CANCELLING, "cancelling_at": cancel["at"]}
        return {name: value for name, value in found.items() if not name.startswith("_")}

    async def _list(self, tenant: str, asked: Body) -> Body:
        jobs = await self._streams.subjects_like(subjects.WORK_STREAM, subjects.batch_job(tenant, "*"))
        ends = subjects.batch_part(tenant, "*", "end")
        ended = await self._streams.subjects_like(subjects.RECORD_STREAM, ends)
        every = {subjects.untoken(subject.split(".")[4]) for subject in (*jobs, *ended)}
        ids, limit = page_of(sorted(every, reverse=True), asked)
        found = [await self._found(tenant, batch) for batch in ids[: limit + 1]]
        return listing([each for each in found if each is not None], limit)

    async def _cancel(self, tenant: str, asked: Body) -> Body:
        found = await self._show(tenant, asked)
        if found["status"] in ("completed", "failed", "expired", "cancelled"):
            raise BadRequest(f"batch {found['id']} has ended: it is {found['status']}", param="batch_id")
        at = to_json({"at": self._clock.wall_us() // 1_000_000})
        try:
            subject = subjects.batch_part(tenant, found["id"], "cancel")
            await self._streams.create(subject, at, STATE_KEPT_S)
        except Taken:
            pass  # it is cancelled already
        return await self._show(tenant, asked)


def _checked(asked: Body) -> int:
    """The time of a batch in seconds. Raises BadRequest for fields that are wrong."""
    if unknown := [name for name in asked if name not in _FIELDS]:
        raise BadRequest(f"`{unknown[0]:.40}` is not a field of a batch; leave it out", param=unknown[0][:40])
    if not isinstance(asked.get("input_file_id"), str):
        raise BadRequest("`input_file_id`: the id of a file is expected", param="input_file_id")
    if asked.get("endpoint") not in [*URLS]:  # it may be of any type
        raise BadRequest(f"`endpoint`: one of {', '.join(URLS)} is expected", param="endpoint")
    window, metadata = asked.get("completion_window"), asked.get("metadata", {})
    window_s = 0
    if isinstance(window, str) and re.fullmatch(WINDOW, window):
        window_s = int(window[:-1]) * _UNIT_S[window[-1]]
    if not 0 < window_s <= MAX_WINDOW_S:
        raise BadRequest(
            "`completion_window`: 24h or another time up to 7d is expected", param="completion_window"
        )
    if not isinstance(metadata, dict) or len(metadata) > MAX_METADATA:
        raise BadRequest(
            f"`metadata`: an object of at most {MAX_METADATA} texts is expected", param="metadata"
        )
    for name, value in metadata.items():
        if not isinstance(value, str) or len(name) > MAX_NAME or len(value) > MAX_VALUE:
            why = f"`metadata`: names of {MAX_NAME} and texts of {MAX_VALUE} characters are expected"
            raise BadRequest(why, param="metadata")
    expires = asked.get("output_expires_after", {"seconds": FILE_KEPT_S})
    kept_s = expires.get("seconds") if isinstance(expires, dict) else None
    if type(kept_s) is not int or not MIN_KEPT_S <= kept_s <= FILE_KEPT_S:
        why = f"`output_expires_after`: `seconds` from {MIN_KEPT_S} to {FILE_KEPT_S} are expected"
        raise BadRequest(why, param="output_expires_after")
    return window_s
