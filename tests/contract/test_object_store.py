"""Files in a stream of a real nats-server with a store on disk."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from hashlib import sha256
from random import Random
from typing import Any

import pytest

from services.launcher import nats_server as servers
from services.launcher.nats_server import NatsServer, ServerLimits
from shared.errors import EngineError
from shared.nats import subjects
from shared.nats.bus import NatsBus
from shared.nats.jetstream import JetStream, StreamFull, Taken
from shared.nats.object_store import CHUNK_BYTES, STREAM, ObjectStore, UnknownFile, lines_of, new_id

FILE = new_id("file-", 1)


@pytest.fixture
def server() -> Iterator[NatsServer]:
    limits = replace(ServerLimits(), jetstream_memory="16MB", jetstream_file="3GB")
    server = servers.start(limits=limits)
    yield server
    server.stop()


@pytest.fixture
async def store(server: NatsServer) -> AsyncIterator[ObjectStore]:
    bus = await NatsBus.connect(server.url, timeout_s=30)
    store = ObjectStore(JetStream(bus))
    await store.open()
    yield store
    await bus.drain()


async def pieces(content: bytes, size: int) -> AsyncIterator[bytes]:
    for start in range(0, len(content), size):
        yield content[start : start + size]


async def written(store: ObjectStore, content: bytes, tenant: str = "a", **more: Any) -> dict[str, Any]:
    about = {"created_at": 1, "expires_at": 601, "filename": "f", "purpose": "batch", "status": "processed"}
    meta = {"id": FILE, "object": "file", **about, **more}
    return await store.write(tenant, meta, pieces(content, 1_000_003), ttl_s=600)


async def content_of(store: ObjectStore, tenant: str = "a") -> bytes:
    meta = await store.meta(tenant, FILE)
    return b"".join([chunk async for chunk in store.read(tenant, meta)])


@pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES, 20 * CHUNK_BYTES + 77])
async def test_written_file_is_read_back(store: ObjectStore, size: int) -> None:
    content = Random(size).randbytes(size)
    meta = await written(store, content, filename="x.jsonl")
    assert (meta["bytes"], meta["chunks"]) == (size, -(-size // CHUNK_BYTES))
    assert meta["sha256"] == sha256(content).hexdigest()
    assert await store.meta("a", FILE) == meta
    assert await content_of(store) == content


async def test_files_are_their_tenants_own(store: ObjectStore) -> None:
    await written(store, b"mine")
    for tenant, name in (("b", FILE), ("*", FILE), ("a", new_id("file-", 2)), ("a", "*"), ("a", "file-x.y")):
        with pytest.raises(UnknownFile):
            await store.meta(tenant, name)
    assert [await store.files(tenant) for tenant in "ab*"] == [[FILE], [], []]
    await store.delete("*", FILE)
    assert await content_of(store) == b"mine"
    with pytest.raises(Taken):
        await store.keep_file("a", {"id": FILE}, 60)


async def test_deleted_or_failed_file_leaves_nothing(store: ObjectStore) -> None:
    await written(store, b"x" * 3 * CHUNK_BYTES)
    meta = await store.meta("a", FILE)
    await store.delete("a", FILE)
    with pytest.raises(UnknownFile):
        await store.meta("a", FILE)
    with pytest.raises(UnknownFile, match="has been deleted"):
        _ = [chunk async for chunk in store.read("a", meta)]

    async def torn() -> AsyncIterator[bytes]:
        yield b"x" * 3 * CHUNK_BYTES
        raise ConnectionError

    with pytest.raises(ConnectionError):
        await store.write("a", {"id": FILE}, torn(), 60)
    assert await store.files("a") == []
    assert await store.streams.subjects_like(subjects.FILE_STREAM, subjects.FILE_ALL) == []


async def test_a_deleted_file_stays_deleted_beside_a_mirror_and_a_new_one_is_there_at_once(
    store: ObjectStore,
) -> None:
    """An operator's backup keeps what was deleted, and answers direct reads for its origin."""
    await written(store, b"first" * 100)
    await store.streams.make_stream("BACKUP", {"storage": "file", "mirror": {"name": subjects.FILE_STREAM}})
    async with asyncio.timeout(60):
        while (await store.streams._info("BACKUP", {}))["state"]["messages"] < 2:  # a chunk and the facts
            await asyncio.sleep(0.01)
    await store.delete("a", FILE)
    for _ in range(40):
        with pytest.raises(UnknownFile):
            await store.meta("a", FILE)
    for size in range(20):
        await written(store, b"x" * size)
        assert await content_of(store) == b"x" * size
        await store.delete("a", FILE)


async def test_a_damaged_file_is_an_error_before_its_last_chunk(store: ObjectStore) -> None:
    await written(store, b"x" * 3 * CHUNK_BYTES)
    await store.streams.replace(subjects.file_part("a", FILE, 1), b"y" * CHUNK_BYTES)
    chunks = store.read("a", await store.meta("a", FILE))
    assert [await anext(chunks), await anext(chunks)] == [b"x" * CHUNK_BYTES, b"y" * CHUNK_BYTES]
    with pytest.raises(EngineError, match="damaged"):
        await anext(chunks)


async def test_chunks_without_a_file_are_found(store: ObjectStore) -> None:
    await written(store, b"whole")
    other = new_id("file-", 3)
    await store.put("b.c", other, 0, b"half", 60)
    assert await store.unfinished() == {("b.c", other)}


async def test_a_full_store_refuses(server: NatsServer) -> None:
    bus = await NatsBus.connect(server.url, timeout_s=30)
    store = ObjectStore(JetStream(bus))
    await store.streams.make_stream(subjects.FILE_STREAM, {**STREAM, "max_bytes": 400_000})
    with pytest.raises(StreamFull):
        await written(store, b"x" * 5 * CHUNK_BYTES)
    assert await store.files("a") == []
    await written(store, b"x" * 2 * CHUNK_BYTES)
    await bus.drain()


async def test_one_message_of_a_pattern(store: ObjectStore) -> None:
    js, any_outcome = store.streams, subjects.batch_line("a", "b", 7, "*")
    await js.create(subjects.batch_line("a", "b", 7, "ok"), b"first", 60, only=any_outcome)
    for outcome in ("ok", "error"):
        with pytest.raises(Taken):
            await js.create(subjects.batch_line("a", "b", 7, outcome), b"second", 60, only=any_outcome)
    eighth = subjects.batch_line("a", "b", 8, "error")
    await js.create(eighth, b"x", 60, only=subjects.batch_line("a", "b", 8, "*"))
    found = await js.subjects_like(subjects.FILE_STREAM, subjects.batch_line("a", "b", "*", "*"))
    assert sorted(found) == [subjects.batch_line("a", "b", 7, "ok"), eighth]


async def test_lines_are_cut_wherever_pieces_end() -> None:
    text = b"one\n\ntwo\nthree"
    for size in range(1, len(text) + 1):
        assert [line async for line in lines_of(pieces(text, size), 10)] == [b"one", b"", b"two", b"three"]
    with pytest.raises(ValueError, match="longer than 3"):
        _ = [line async for line in lines_of(pieces(b"x" * 9, 2), 3)]
