"""What users ask of a keeper about batches: `create`, `show`, `list`, `cancel`.

A batch is a job in the work queue until it has ended; then it is a record. The keeper that holds it notes its
state from time to time, so any keeper can answer.

What users ask of a keeper about files: `put` and `keep` store one, then `show`, `list`, `read`, `delete`.

    client ──put 0 … put N-1──▶ keeper ──▶ stream HR_FILES
           ──keep: name, size, checksum──▶  now it is a file

Any keeper answers any of them: none remembers anything of an upload. The gateway and the command line use
them alike, and any tenant may: only keepers have permissions for the stream.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Awaitable, Callable
from typing import Any

from services.keeper.batches.batch_core import CANCELLING, STATE_KEPT_S, VALIDATING, WEBHOOK
from services.keeper.parts import Keeper
from services.keeper.records import Body
from services.keeper.verbs import reply_subject
from shared import bodies
from shared.clock import Clock
from shared.errors import BadRequest, DuplicateRequest, HeadraceError, PayloadTooLarge
from shared.nats import subjects
from shared.nats.jetstream import Taken
from shared.nats.object_store import CHUNK_BYTES, FILE_ID, ObjectStore, UnknownFile, new_id
from shared.openai.batch_lines import MAX_FILE_BYTES
from shared.openai.call import MAX_PROMPTS

PARTS: dict[str, type[Any]] = {"end": bodies.Batch, "state": bodies.Batch, "cancel": bodies.CancelMark}
BATCH_ID = re.compile(r"batch_[0-9a-f]{22}")
MAX_LINE_ID = f".50000:{MAX_PROMPTS}"  # what the longest id of a request has after that of its batch
_UNIT_S = {"m": 60, "h": 3_600, "d": 86_400}
_TIMES = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")

MAX_CHUNKS = MAX_FILE_BYTES // CHUNK_BYTES
MAX_LISTED = 100
UPLOAD_S = 3_600  # chunks that are no file after this time were left by an uploader that died
RAW = b"="  # the reply to `read` starts with it; that of an error is JSON
_PUT = re.compile(rb"([^ \n]{1,64}) (\d{1,5})\n")


class BatchVerbs:
    """Answers `headrace.v1.batches.TENANT.VERB`."""

    def __init__(self, keeper: Keeper, store: ObjectStore) -> None:
        self._keeper, self._store = keeper, store
        self._streams, self._queues, self._clock = keeper.streams, keeper.queues, keeper.clock
        self._verbs: dict[str, tuple[type[Any], Callable[[str, Any], Awaitable[Body]]]] = {
            "create": (bodies.BatchCreated, self._create), "show": (bodies.BatchNamed, self._show),
            "list": (bodies.PageAsked, self._list), "cancel": (bodies.BatchNamed, self._cancel),
        }  # fmt: skip

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
        hook = {WEBHOOK: self._keeper.check_url(asked["webhook"])} if "webhook" in asked else {}
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

        records = subjects.RECORD_STREAM
        job = await read(bodies.Batch, subjects.WORK_STREAM, subjects.batch_job(tenant, batch))
        end, state, cancel = [
            await read(kind, records, subjects.batch_part(tenant, batch, part), sure=job is None)
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


class FileVerbs:
    """Answers `headrace.v1.files.TENANT.VERB`."""

    def __init__(self, store: ObjectStore, clock: Clock) -> None:
        self._store, self._clock = store, clock
        self._verbs: dict[str, tuple[type[Any], Callable[[str, Any], Awaitable[Body | bytes]]]] = {
            "keep": (bodies.FileKept, self._keep), "show": (bodies.FileNamed, self._show),
            "list": (bodies.PageAsked, self._list), "read": (bodies.ChunkNamed, self._read),
            "delete": (bodies.FileNamed, self._delete),
        }  # fmt: skip
        self._sweep_us = 0  # of the next look for unfinished files
        self._unfinished: set[tuple[str, str]] = set()  # at the last one

    async def answer(self, tenant: str, verb: str, data: bytes) -> Body | bytes:
        """The reply to a verb. Raises BadRequest, UnknownFile, StreamFull, PayloadTooLarge, Unavailable."""
        if verb == "put":
            return await self._put(tenant, data)
        if verb not in self._verbs:
            raise BadRequest(f"{verb!r:.40} is no verb of files: put, {', '.join(self._verbs)}")
        kind, handle = self._verbs[verb]
        return await handle(tenant, bodies.asked(kind, data))

    async def sweep(self, now_us: int) -> None:
        """Remove what uploaders that died have left. Call from time to time."""
        if now_us >= self._sweep_us:
            self._sweep_us = now_us + UPLOAD_S * 1_000_000
            with contextlib.suppress(HeadraceError):
                found = await self._store.unfinished()
                for tenant, file in self._unfinished & found:
                    await self._store.delete(tenant, file)
                self._unfinished = found - self._unfinished

    async def _put(self, tenant: str, data: bytes) -> Body:
        """`ID NUMBER`, a line end, and the chunk."""
        head = _PUT.match(data)
        file, number = (head[1].decode(errors="replace"), int(head[2])) if head else ("", 0)
        if head is None or not FILE_ID.fullmatch(file):
            raise BadRequest("a chunk starts with `file-<22 hex digits> NUMBER` and a line end")
        chunk = data[head.end() :]
        if number >= MAX_CHUNKS or len(chunk) > CHUNK_BYTES:
            why = f"a file has at most {MAX_FILE_BYTES:,} bytes, in chunks of {CHUNK_BYTES:,}"
            raise PayloadTooLarge(f"{why}: split it", param="file")
        if number == 0:
            await self._store.room()
        await self._store.put(tenant, file, number, chunk, bodies.FILE_KEPT_S)
        return {"bytes": len(chunk)}

    async def _keep(self, tenant: str, asked: bodies.FileKept) -> Body:
        size, chunks = asked["bytes"], asked["chunks"]
        if chunks != -(-size // CHUNK_BYTES):
            raise BadRequest(f"`bytes`, `chunks`: {size} bytes are not {chunks} chunks")
        if size == 0:
            raise BadRequest("the file is empty", param="file")
        kept_s = asked.get("expires_s", bodies.FILE_KEPT_S)
        meta = file_object(asked["id"], asked["filename"], asked["purpose"], self._clock.wall_us(), kept_s)
        meta |= {"bytes": size, "chunks": chunks, "sha256": asked["sha256"]}
        try:
            await self._store.keep_file(tenant, meta, kept_s)
        except Taken:  # by an earlier try whose answer was lost
            if (known := await self._store.meta(tenant, meta["id"]))["sha256"] != meta["sha256"]:
                raise DuplicateRequest(f"there is another file {meta['id']}", param="id") from None
            return known
        return meta

    async def _show(self, tenant: str, asked: bodies.FileNamed) -> Body:
        return await self._store.meta(tenant, asked["id"])

    async def _list(self, tenant: str, asked: bodies.PageAsked) -> Body:
        wanted = asked.get("purpose")
        ids, limit = page_of(await self._store.files(tenant), asked)
        found = list[Body]()
        for file in ids:
            meta = await self._store.meta(tenant, file)
            if wanted is None or meta["purpose"] == wanted:
                found.append(meta)
            if len(found) > limit:
                break
        return listing(found, limit)

    async def _read(self, tenant: str, asked: bodies.ChunkNamed) -> bytes:
        return RAW + await self._store.chunk(tenant, asked["id"], asked["chunk"])

    async def _delete(self, tenant: str, asked: bodies.FileNamed) -> Body:
        """Also of an upload that is given up."""
        file = asked["id"]
        if not asked.get("unfinished") or not FILE_ID.fullmatch(file):
            await self._store.meta(tenant, file)
        await self._store.delete(tenant, file)
        return {"id": file, "object": "file", "deleted": True}


def file_object(file: str, name: str, purpose: str, now_wall_us: int, kept_s: int) -> Body:
    """OpenAI's object of a file."""
    now_s = now_wall_us // 1_000_000
    return {
        "id": file,
        "object": "file",
        "created_at": now_s,
        "expires_at": now_s + kept_s,
        "filename": name,
        "purpose": purpose,
        "status": "processed",
    }


def page_of(ids: list[str], asked: bodies.PageAsked) -> tuple[list[str], int]:
    """The ids after `after` in the order of the page, and how many it has at most; `ids`: the newest first.
    Raises UnknownFile."""
    if asked.get("order") == "asc":
        ids = ids[::-1]
    if (after := asked.get("after")) is not None:
        if after not in ids:
            raise UnknownFile(f"`after`: there is no {after!r:.80}", param="after")
        ids = ids[ids.index(after) + 1 :]
    return ids, min(asked.get("limit", MAX_LISTED), MAX_LISTED)


def listing(found: list[Body], limit: int) -> Body:
    """OpenAI's list; `found` may have one more than the page."""
    page = found[:limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(found) > limit,
    }
