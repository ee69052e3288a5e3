"""Long contents in chunks, several on their way at a time: memory is bounded, order and checksum are kept.

What carries a chunk is the caller's: a stream, or a request to a keeper.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable
from dataclasses import dataclass
from hashlib import sha256

from shared.errors import EngineError

CHUNK_BYTES = 131_072  # an eighth of the default payload of a nats-server, and few messages for a file
IN_FLIGHT = 8  # chunks on their way: 1 MiB hides the round trips


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
