"""`FileClient`: files of a tenant over NATS, by requests to a keeper."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable
from typing import Any, TypeVar

from shared import bodies
from shared.client.client import Client, error_of
from shared.clock import Clock
from shared.errors import HeadraceError, Unavailable, UnknownModel, UnknownRequest
from shared.nats import subjects
from shared.nats.interface import NoResponders, RequestTimeout
from shared.nats.object_store import Content, UnknownFile, content_of, new_id, read_chunks, send_chunks

TRIES = 3  # of a chunk: a keeper may have died with the request
NO_KEEPER = "no keeper answers (yet): is `headrace up` running, without `--no-durable`? See `headrace status`"

Body = dict[str, Any]
T = TypeVar("T")


class FileClient:
    """Files of the tenant of `client`."""

    def __init__(self, client: Client, clock: Clock) -> None:
        self._client, self._clock = client, clock

    async def request(self, verb: str, body: Body) -> Body:
        """The reply to a verb: show, list, delete. Raises UnknownFile, BadRequest, Unavailable."""
        return await asked(self._client, subjects.files(self._client.tenant, verb), body)

    async def upload(self, pieces: AsyncIterable[bytes], described: Callable[[], Body]) -> Body:
        """Store a file; the object of the file. `described`: its filename, its purpose and more, asked for
        after its last piece. Nothing is left of one that fails. Raises StreamFull as Overloaded,
        PayloadTooLarge, BadRequest, Unavailable."""
        file, tenant = new_id("file-", self._clock.wall_us()), self._client.tenant

        async def put(number: int, chunk: bytes) -> None:
            data = f"{file} {number}\n".encode() + chunk
            await _again(lambda: self._raw(subjects.files(tenant, "put"), data))

        try:
            content = await send_chunks(pieces, put)
            meta = {"bytes": content.bytes, "chunks": content.chunks, "sha256": content.sha256}
            return await _again(lambda: self.request("keep", {**described(), "id": file, **meta}))
        except BaseException:
            with contextlib.suppress(HeadraceError):
                await self.request("delete", {"id": file, "unfinished": True})
            raise

    async def read(self, file: str) -> tuple[Content, AsyncGenerator[bytes]]:
        """The size of a file, and its content. Raises UnknownFile, EngineError for a damaged one."""
        content, subject = content_of(await self.request("show", {"id": file})), self._subject_of_read

        async def get(number: int) -> bytes:
            chunk: bodies.ChunkNamed = {"id": file, "chunk": number}
            return (await _again(lambda: self._raw(subject, bodies.encode(chunk))))[1:]

        return content, read_chunks(content, get)

    @property
    def _subject_of_read(self) -> str:
        return subjects.files(self._client.tenant, "read")

    async def _raw(self, subject: str, data: bytes) -> bytes:
        """A reply of bytes, or of JSON without an error."""
        try:
            reply = (await self._client.ask(subject, data)).data
        except NoResponders:
            raise Unavailable(NO_KEEPER) from None
        if reply.startswith(b'{"type":"error"'):
            raise _typed(error_of(bodies.decode(bodies.Json, reply)))
        return reply


async def asked(client: Client, subject: str, body: Body) -> Body:
    """The reply of a keeper. Raises UnknownFile for a 404, and Unavailable without a keeper."""
    try:
        return await client.request(subject, body)
    except NoResponders:
        raise Unavailable(NO_KEEPER) from None
    except HeadraceError as error:
        raise _typed(error) from None


def _typed(error: HeadraceError) -> HeadraceError:
    """A 404 on the wire is any; here it is a file or a batch."""
    if isinstance(error, UnknownModel | UnknownRequest):
        return UnknownFile(error.message, param=error.param)
    return error


async def _again(call: Callable[[], Awaitable[T]]) -> T:
    for _ in range(TRIES - 1):
        with contextlib.suppress(RequestTimeout):
            return await call()
    return await call()
