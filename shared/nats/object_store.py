"""`ObjectStore` keeps files in a stream: a message for each chunk, and one about the whole, which comes last.

    headrace.store.file.TENANT.FILE.0 … N-1      the chunks, each written once
    headrace.store.file.TENANT.FILE.meta         name, bytes, chunks, checksum: with it the file exists

Not the format of NATS's own object store (ADR-20): there a bucket is a stream, so each tenant would need one;
chunks share a subject, so their order is that of their writer, and a chunk that was sent twice is there
twice; its readers are consumers. Here a chunk is read by its subject with a direct get (ADR-31), several at a
time and from any place, and permissions can name a tenant.

Long contents travel in chunks, several on their way at a time: memory is bounded, order and checksum are
kept. What carries a chunk is the caller's: this stream, or a request to a keeper.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from shared import bodies
from shared.errors import EngineError, HeadraceError, Unavailable, UnknownRequest
from shared.nats import subjects
from shared.nats.jetstream import JetStream, StreamFull, Taken

STORE_BYTES = 2_147_483_648  # files, and answers of batches that are not over
UPLOAD_BYTES = STORE_BYTES // 2  # above, uploads are refused: answers of accepted batches find room
STREAM = {
    "subjects": [subjects.FILE_ALL, subjects.LINE_ALL], "storage": "file", "discard": "new",
    "max_msgs_per_subject": 1, "max_bytes": STORE_BYTES, "allow_direct": True, "allow_msg_ttl": True,
}  # fmt: skip
CHUNK_BYTES = 131_072  # an eighth of the default payload of a nats-server, and few messages for a file
IN_FLIGHT = 8  # chunks on their way: 1 MiB hides the round trips
TRIES = 3  # of a chunk: a call fails while the server is busy or restarts
FILE_ID = re.compile(r"file-[0-9a-f]{22}")

Meta = dict[str, Any]


class UnknownFile(UnknownRequest):
    """The tenant has no such file."""

    type = "not_found"


def new_id(prefix: str, now_wall_us: int) -> str:
    """A fresh id; ids sort by time."""
    return f"{prefix}{now_wall_us:014x}{secrets.token_hex(4)}"


def content_of(meta: Meta) -> Content:
    """The size and the checksum in the message about a file."""
    return Content(meta["bytes"], meta["chunks"], meta["sha256"])


@dataclass(frozen=True, slots=True)
class ObjectStore:
    """The files of all tenants. All calls raise Unavailable, and StreamFull where they store."""

    streams: JetStream

    async def open(self, replicas: int = 1) -> None:
        """Make the stream if it is missing. `replicas`: servers of a cluster that have each message."""
        await self.streams.make_stream(subjects.FILE_STREAM, {**STREAM, "num_replicas": replicas})

    async def room(self) -> None:
        """Raises StreamFull if no upload is accepted now."""
        held = await self.streams.bytes_of(subjects.FILE_STREAM)
        if held > UPLOAD_BYTES:
            why = f"the store of files holds {held:,} bytes of {UPLOAD_BYTES:,} for uploads"
            raise StreamFull(f"{why}: delete files, or try again later", retry_after_ms=60_000)

    async def put(self, tenant: str, file: str, number: int, chunk: bytes, ttl_s: int) -> None:
        """Store a chunk, once."""
        subject = subjects.file_part(tenant, file, number)
        for left in reversed(range(TRIES)):
            try:
                with contextlib.suppress(Taken):  # by an earlier try
                    await self.streams.create(subject, chunk, ttl_s)
                return
            except StreamFull:
                raise
            except Unavailable:
                if not left:
                    raise

    async def keep_file(self, tenant: str, meta: Meta, ttl_s: int) -> None:
        """Make a file of the stored chunks. Raises Taken if there is one of its id."""
        await self.streams.create(subjects.file_part(tenant, meta["id"], "meta"), bodies.encode(meta), ttl_s)

    async def write(self, tenant: str, meta: Meta, pieces: AsyncIterable[bytes], ttl_s: int) -> Meta:
        """Store a whole file; `meta` is a FileMeta without its sizes. Nothing is left of one that fails."""
        file = meta["id"]
        try:
            content = await send_chunks(pieces, lambda n, chunk: self.put(tenant, file, n, chunk, ttl_s))
            whole = {**meta, "bytes": content.bytes, "chunks": content.chunks, "sha256": content.sha256}
            await self.keep_file(tenant, whole, ttl_s)
        except BaseException:
            with contextlib.suppress(HeadraceError):
                await self.delete(tenant, file)
            raise
        return whole

    async def meta(self, tenant: str, file: str) -> Meta:
        """The message about a file. Raises UnknownFile."""
        found = None
        if FILE_ID.fullmatch(file):
            found = await self.streams.last(subjects.FILE_STREAM, subjects.file_part(tenant, file, "meta"))
        if found is None:
            raise UnknownFile(f"there is no file {file!r:.80}", param="file_id")
        return {**bodies.decode(bodies.FileMeta, found)}

    async def chunk(self, tenant: str, file: str, number: int) -> bytes:
        """A chunk. Raises UnknownFile."""
        subject = subjects.file_part(tenant, file, number)
        for left in reversed(range(TRIES)):
            try:
                found = await self.streams.last(subjects.FILE_STREAM, subject)
            except Unavailable:
                if not left:
                    raise
            else:
                if found is None:
                    raise UnknownFile(f"file {file!r:.80} has been deleted", param="file_id")
                return found
        raise Unavailable(f"file {file!r:.80} cannot be read now: try again")

    def read(self, tenant: str, meta: Meta) -> AsyncGenerator[bytes]:
        """The content of a file. Raises UnknownFile if it is deleted meanwhile."""
        return read_chunks(content_of(meta), lambda number: self.chunk(tenant, meta["id"], number))

    async def files(self, tenant: str) -> list[str]:
        """The ids of a tenant's files, the newest first."""
        pattern = subjects.file_part(tenant, "*", "meta")
        found = await self.streams.subjects_like(subjects.FILE_STREAM, pattern)
        return sorted((subject.split(".")[4] for subject in found), reverse=True)

    async def delete(self, tenant: str, file: str) -> None:
        """Remove a file; first the message that makes it one."""
        for part in ("meta", "*"):
            await self.streams.purge(subjects.FILE_STREAM, subjects.file_part(tenant, file, part))

    async def unfinished(self) -> set[tuple[str, str]]:
        """Tenants and ids with chunks that are no file: of an upload that goes on, or of one that died."""
        begun, kept = await self._with("0"), await self._with("meta")
        return begun - kept

    async def _with(self, part: str) -> set[tuple[str, str]]:
        pattern = subjects.file_part_any_tenant(part)
        found = await self.streams.subjects_like(subjects.FILE_STREAM, pattern)
        names = (subject.split(".") for subject in found)  # headrace.store.file.TENANT.FILE.PART
        return {(subjects.untoken(name[3]), name[4]) for name in names}


class DamagedFile(EngineError):
    """The content of a file is not what was stored."""


@dataclass(frozen=True, slots=True)
class Content:
    """A content in chunks."""

    bytes: int
    chunks: int
    sha256: str


async def send_chunks(
    pieces: AsyncIterable[bytes], put: Callable[[int, bytes], Awaitable[object]]
) -> Content:
    """Cut a content into chunks and `put` each with its number. Returns when all have been put. Raises the
    first error of `put`."""
    rest, digest, count, size = bytearray(), sha256(), 0, 0
    sending: deque[asyncio.Future[object]] = deque()

    async def send(chunk: bytes) -> None:
        nonlocal count
        if len(sending) >= IN_FLIGHT:
            await sending.popleft()
        sending.append(asyncio.ensure_future(put(count, chunk)))
        count += 1

    try:
        async for piece in pieces:
            digest.update(piece)
            size += len(piece)
            rest += piece
            while len(rest) >= CHUNK_BYTES:
                chunk = bytes(rest[:CHUNK_BYTES])
                del rest[:CHUNK_BYTES]
                await send(chunk)
        if rest:
            await send(bytes(rest))
        while sending:
            await sending.popleft()
    finally:
        await _drop(sending)
    return Content(size, count, digest.hexdigest())


async def read_chunks(content: Content, get: Callable[[int], Awaitable[bytes]]) -> AsyncGenerator[bytes]:
    """The chunks in order. The last one comes after the checksum was compared. Raises EngineError for a
    content that is damaged, and the errors of `get`."""
    digest, asked = sha256(), 0
    coming: deque[asyncio.Future[bytes]] = deque()
    try:
        for number in range(content.chunks):
            while asked < content.chunks and len(coming) < IN_FLIGHT:
                coming.append(asyncio.ensure_future(get(asked)))
                asked += 1
            chunk = await coming.popleft()
            digest.update(chunk)
            if number == content.chunks - 1 and digest.hexdigest() != content.sha256:
                raise DamagedFile("the stored file is damaged: its checksum differs; upload it again")
            yield chunk
    finally:
        await _drop(coming)


async def _drop(tasks: deque[asyncio.Future[object]] | deque[asyncio.Future[bytes]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def lines_of(pieces: AsyncIterable[bytes], most: int) -> AsyncGenerator[bytes]:
    """The lines of a content, without their ends. Raises ValueError for one of more than `most` bytes."""
    rest = bytearray()
    async for piece in pieces:
        rest += piece
        *lines, left = bytes(rest).split(b"\n")
        rest = bytearray(left)
        if len(rest) > most:
            raise ValueError(f"a line is longer than {most} bytes")
        for line in lines:
            yield line
    if rest:
        yield bytes(rest)
