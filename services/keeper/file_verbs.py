"""What users ask of a keeper about files: `put` and `keep` store one, then `show`, `list`, `read`, `delete`.

    client ──put 0 … put N-1──▶ keeper ──▶ stream HR_FILES
           ──keep: name, size, checksum──▶  now it is a file

Any keeper answers any of them: none remembers anything of an upload. The gateway and the command line use
them alike, and any tenant may: only keepers have permissions for the stream.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable

from services.keeper.records import Body
from shared.chunks import CHUNK_BYTES
from shared.clock import Clock
from shared.errors import BadRequest, DuplicateRequest, PayloadTooLarge
from shared.json_body import read_json
from shared.nats.jetstream import Taken
from shared.nats.object_store import FILE_ID, ObjectStore, UnknownFile

MAX_FILE_BYTES = 209_715_200  # 200 MB, as OpenAI has it for a batch
MAX_CHUNKS = MAX_FILE_BYTES // CHUNK_BYTES
MAX_LISTED = 100
KEPT_S = 2_592_000  # a file goes after 30 days
MIN_KEPT_S = 3_600
UPLOAD_S = 3_600  # chunks that are no file after this time were left by an uploader that died
RAW = b"="  # the reply to `read` starts with it; that of an error is JSON
_PUT = re.compile(rb"([^ \n]{1,64}) (\d{1,5})\n")
_SHA256 = re.compile(r"[0-9a-f]{64}")


class FileVerbs:
    """Answers `headrace.v1.files.TENANT.VERB`."""

    def __init__(self, store: ObjectStore, clock: Clock) -> None:
        self._store, self._clock = store, clock
        self._verbs: dict[str, Callable[[str, Body], Awaitable[Body | bytes]]] = {
            "keep": self._keep, "show": self._show, "list": self._list, "read": self._read,
            "delete": self._delete,
        }  # fmt: skip
        self._sweep_us = 0  # of the next look for unfinished files
        self._unfinished: set[tuple[str, str]] = set()  # at the last one

    async def open(self, replicas: int) -> None:
        """Make the stream if it is missing."""
        await self._store.open(replicas)

    async def answer(self, tenant: str, verb: str, data: bytes) -> Body | bytes:
        """The reply to a verb. Raises BadRequest, UnknownFile, StreamFull, PayloadTooLarge, Unavailable."""
        if verb == "put":
            return await self._put(tenant, data)
        if verb not in self._verbs:
            raise BadRequest(f"{verb!r:.40} is no verb of files: put, {', '.join(self._verbs)}")
        return await self._verbs[verb](tenant, fields_of(data))

    async def sweep(self, now_us: int) -> None:
        """Remove what uploaders that died have left. Call from time to time."""
        if now_us >= self._sweep_us:
            self._sweep_us = now_us + UPLOAD_S * 1_000_000
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
        await self._store.put(tenant, file, number, chunk, KEPT_S)
        return {"bytes": len(chunk)}

    async def _keep(self, tenant: str, asked: Body) -> Body:
        meta, ttl_s = self._checked(asked)
        try:
            await self._store.keep(tenant, meta, ttl_s)
        except Taken:  # by an earlier try whose answer was lost
            if (known := await self._store.meta(tenant, meta["id"]))["sha256"] != meta["sha256"]:
                raise DuplicateRequest(f"there is another file {meta['id']}", param="id") from None
            return known
        return meta

    def _checked(self, asked: Body) -> tuple[Body, int]:
        """The message about a file, and how long it is kept."""
        file, name, purpose = (asked.get(field) for field in ("id", "filename", "purpose"))
        size, chunks, digest = (asked.get(field) for field in ("bytes", "chunks", "sha256"))
        if not isinstance(file, str) or not FILE_ID.fullmatch(file):
            raise BadRequest("`id`: `file-<22 hex digits>` is expected", param="id")
        if not isinstance(name, str) or not 0 < len(name) <= 255:
            raise BadRequest("`filename`: 1 to 255 characters are expected", param="filename")
        if purpose != "batch":
            raise BadRequest("`purpose`: batch is expected, files have no other use here", param="purpose")
        if type(size) is not int or type(chunks) is not int or chunks != -(-size // CHUNK_BYTES):
            raise BadRequest(f"`bytes`, `chunks`: {size!r:.20} bytes are not {chunks!r:.20} chunks")
        if size == 0:
            raise BadRequest("the file is empty", param="file")
        if not isinstance(digest, str) or not _SHA256.fullmatch(digest):
            raise BadRequest("`sha256`: 64 hex digits are expected", param="sha256")
        kept_s = asked.get("expires_s", KEPT_S)
        if type(kept_s) is not int or not MIN_KEPT_S <= kept_s <= KEPT_S:
            why = f"`expires_after[seconds]`: {MIN_KEPT_S} to {KEPT_S} are expected"
            raise BadRequest(why, param="expires_after")
        meta = file_object(file, name, purpose, self._clock.wall_us(), kept_s)
        return {**meta, "bytes": size, "chunks": chunks, "sha256": digest}, kept_s

    async def _show(self, tenant: str, asked: Body) -> Body:
        return await self._store.meta(tenant, str(asked.get("id")))

    async def _list(self, tenant: str, asked: Body) -> Body:
        wanted, order = asked.get("purpose"), asked.get("order", "desc")
        if order not in ("asc", "desc"):
            raise BadRequest("`order`: asc or desc is expected", param="order")
        ids = await self._store.files(tenant)
        if order == "asc":
            ids.reverse()
        ids, limit = page_of(ids, asked)
        found = list[Body]()
        for file in ids:
            meta = await self._store.meta(tenant, file)
            if wanted is None or meta["purpose"] == wanted:
                found.append(meta)
            if len(found) > limit:
                break
        return listing(found, limit)

    async def _read(self, tenant: str, asked: Body) -> bytes:
        file, number = str(asked.get("id")), asked.get("chunk")
        if not FILE_ID.fullmatch(file) or type(number) is not int or not 0 <= number < 100_000:
            raise BadRequest("`id` of a file and `chunk`, a number, are expected")
        return RAW + await self._store.chunk(tenant, file, number)

    async def _delete(self, tenant: str, asked: Body) -> Body:
        """Also of an upload that is given up."""
        file, unfinished = str(asked.get("id")), asked.get("unfinished") is True
        if not unfinished or not FILE_ID.fullmatch(file):
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


def fields_of(data: bytes) -> Body:
    """The fields of a request. Raises BadRequest."""
    try:
        fields = read_json(data or b"{}")
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is not a JSON object: {error!s:.200}") from None
    if not isinstance(fields, dict):
        raise BadRequest("the body is not a JSON object")
    return {name: value for name, value in fields.items() if value is not None}


def page_of(ids: list[str], asked: Body) -> tuple[list[str], int]:
    """The ids after `after`, and how many the page has at most. Raises BadRequest, UnknownFile."""
    limit, after = asked.get("limit", MAX_LISTED), asked.get("after")
    if type(limit) is not int or limit < 1:
        raise BadRequest(f"`limit`: a number from 1 on is expected, not {limit!r:.20}", param="limit")
    if after is not None:
        if after not in ids:
            raise UnknownFile(f"`after`: there is no {after!r:.80}", param="after")
        ids = ids[ids.index(after) + 1 :]
    return ids, min(limit, MAX_LISTED)


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
