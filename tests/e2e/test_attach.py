"""Readers of running requests on real processes: killed, replaced, and cut off by deaths of services."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import nats
import pytest
from support.running_up import HEADRACE, StartUp, Up, running_up

from loadtest import faults
from loadtest.leaks import settle
from services.launcher import credentials
from services.launcher import nats_server as servers
from services.launcher.commands import auth
from services.launcher.commands.auth import Plan
from services.launcher.nats_server import NatsServer, ServerLimits
from shared.client.client import Client
from shared.errors import Moved, UnknownRequest
from shared.nats import subjects
from shared.nats.bus import NatsBus
from shared.replies import text_hash

MODEL = "smollm2-135m-instruct"
TOKENS = 200
SLOW = {"HEADRACE_SIM": "step=20000"}  # 4 s for an answer: a fault in the middle of it
ALL = {**dict.fromkeys(("tokenizer", "scheduler", "executor", "kv_offload", "keeper"), 1), "detokenizer": 2}
HUNG_S = 120  # far above what a recovery takes: a guard against hanging


def asked(request_id: str, **more: Any) -> dict[str, Any]:
    return {
        "prompt": f"The sea of {request_id}", "max_tokens": TOKENS, "ignore_eos": True, "seed": 7,
        "temperature": 1, "request_id": request_id, **more,
    }  # fmt: skip


@dataclass
class Reader:
    """The text that one reader has, and what it has seen."""

    texts: dict[int, str] = field(default_factory=dict)
    attempts: list[int] = field(default_factory=list)
    ended: bool = False

    async def read(self, client: Client, request_id: str, chars: int = 0) -> None:
        """Follow a request from where this reader is, to its end or until it has so many characters."""
        started = bool(self.texts)
        async with asyncio.timeout(HUNG_S), aclosing(client.follow(request_id, {**self.texts})) as frames:
            async for frame in frames:
                if frame["type"] == "accepted":
                    if frame["attempt"] > (self.attempts[-1] if self.attempts else 1 if started else 1 << 30):
                        self.texts = {}
                    self.attempts.append(frame["attempt"])
                for choice in frame["choices"] if frame["type"] == "delta" else ():
                    before = self.texts.get(choice["index"], "")
                    assert choice["at"] == len(before)
                    self.texts[choice["index"]] = before + choice["text"]
                self.ended = frame["type"] == "done"
                if chars and len(self.texts.get(0, "")) >= chars:
                    return


@asynccontextmanager
async def connected(url: str, tenant: str = "public") -> AsyncIterator[Client]:
    bus = await NatsBus.connect(url, timeout_s=30)
    try:
        yield await Client.open(bus, tenant)
    finally:
        await bus.drain()


async def submitted(client: Client, body: dict[str, Any]) -> None:
    """Submit it, once a keeper is there."""
    async with asyncio.timeout(HUNG_S):
        while True:
            try:
                await client.request(subjects.submit(client.tenant, MODEL), body)
                return
            except Exception:  # noqa: BLE001 - the keeper is the last service to start
                await asyncio.sleep(0.1)


async def whole(client: Client, request_id: str, **more: Any) -> dict[int, str]:
    """The answer to the same request, not durable."""
    answer = await client.complete({**asked(request_id, **more), "model": MODEL, "request_id": "again"})
    return {choice["index"]: choice["text"] for choice in answer["choices"]}


async def vanished(up: Up, request_id: str, text: str) -> None:
    """A reader that attaches, and is dead before it reads a frame."""
    nc = await nats.connect(up.nats_url, allow_reconnect=False)
    await nc.subscribe(inbox := nc.new_inbox())
    body = {"choices": {"0": {"chars": len(text), "hash": text_hash(text)}}, "attempt": 1}
    await nc.publish(subjects.attach("public", request_id), json.dumps(body).encode(), reply=inbox)
    await nc.flush()
    nc._transport._io_writer.transport.abort()  # a reset: what a dead process leaves
    await nc.close()


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    two = {"HEADRACE_DETOKENIZERS": "2"}
    with running_up(tmp_path_factory.mktemp("attach"), "--durable", **SLOW, **two) as up:
        yield up


async def test_a_killed_reader_is_followed_by_others_without_gap_or_repeat(up: Up) -> None:
    async with connected(up.nats_url) as client:
        await submitted(client, asked("r"))
        first = subprocess.Popen([*HEADRACE, "attach", "r"], env=up.env, stdout=subprocess.PIPE)
        assert first.stdout is not None
        data = b""
        while len(data) < 40:
            data += await asyncio.to_thread(first.stdout.read1)
        first.kill()
        first.wait()
        data += first.stdout.read()
        reader = Reader({0: data.decode()})
        await vanished(up, "r", reader.texts[0])
        await reader.read(client, "r", len(reader.texts[0]) + 200)
        await vanished(up, "r", reader.texts[0])
        await reader.read(client, "r")
        record = await client.request(subjects.result("public", "r"))
        assert (reader.texts[0], reader.ended) == (record["answer"]["choices"][0]["text"], True)
        assert reader.attempts == [1, 1], "the text has started over"


async def test_a_stream_moves_from_a_dead_reader_to_another(up: Up) -> None:
    body = {**asked("moves", n=2), "model": MODEL, "stream": True, "finish_detached": True}
    nc = await nats.connect(up.nats_url, allow_reconnect=False)
    frames = await nc.subscribe(inbox := nc.new_inbox())
    await nc.publish(subjects.generate("public", MODEL), json.dumps(body).encode(), reply=inbox)
    reader = Reader()
    while len(reader.texts.get(1, "")) < 40:
        frame = json.loads((await frames.next_msg(60)).data)
        for choice in frame.get("choices", ()):
            reader.texts[choice["index"]] = reader.texts.get(choice["index"], "") + choice["text"]
    nc._transport._io_writer.transport.abort()
    await nc.close()
    async with connected(up.nats_url) as client:
        expected = asyncio.create_task(whole(client, "moves", n=2))
        await reader.read(client, "moves", len(reader.texts[0]) + 200)
        other = client.follow("moves", {**reader.texts})
        assert (await anext(other))["attempt"] == 1
        third = Reader({**reader.texts})
        ends = asyncio.create_task(third.read(client, "moves"))
        with pytest.raises(Moved):
            [frame async for frame in other]
        await ends
        assert (third.texts, third.ended, third.attempts) == (await expected, True, [1])
        await settle(client.bus, ALL, HUNG_S)


async def test_a_detokenizer_dies_while_its_requests_are_followed(up: Up) -> None:
    """One after the other, so that each reader loses the one it reads from. The text goes on."""
    async with connected(up.nats_url) as client:
        ids = [f"r{number}" for number in range(6)]
        for request_id in ids:
            await submitted(client, asked(request_id))
        readers = [Reader() for _ in ids]
        at_40 = [reader.read(client, i, 40) for reader, i in zip(readers, ids, strict=True)]
        await asyncio.gather(*at_40)
        ends = [asyncio.create_task(r.read(client, i)) for r, i in zip(readers, ids, strict=True)]
        faults.kill(faults.pids_of(up.process.pid, "detokenizer")[0])
        await asyncio.gather(*ends)
        for reader, request_id in zip(readers, ids, strict=True):
            record = await client.request(subjects.result("public", request_id))
            assert reader.texts[0] == record["answer"]["choices"][0]["text"]
            assert reader.ended


@pytest.fixture
def server() -> Iterator[NatsServer]:
    limits = replace(ServerLimits(), jetstream_memory="16MB", jetstream_file="1GB")
    server = servers.start(limits=limits)
    yield server
    server.stop()


async def test_the_nats_server_dies_while_requests_are_followed(
    server: NatsServer, start_up: StartUp
) -> None:
    up = start_up("--durable", "--nats-url", server.url, **SLOW)
    async with connected(up.nats_url) as client:
        await submitted(client, asked("kept"))
        body = {**asked("fast"), "model": MODEL}
        stream = client.stream(body)
        assert (await anext(stream))["type"] == "accepted"
        kept, fast = Reader(), Reader()
        both = (kept, "kept"), (fast, "fast")
        await asyncio.gather(*(reader.read(client, request_id, 40) for reader, request_id in both))
        with pytest.raises(Moved):
            [frame async for frame in stream]
        ends = asyncio.gather(*(reader.read(client, request_id) for reader, request_id in both))
        server.process.kill()
        server.process.wait()
        server.restart()
        await ends
        assert kept.texts == await whole(client, "kept")
        assert fast.texts == await whole(client, "fast")


async def test_a_durable_request_is_followed_through_the_loss_of_everything(
    server: NatsServer, start_up: StartUp
) -> None:
    up = start_up("--durable", "--nats-url", server.url, **SLOW)
    async with connected(up.nats_url) as client:
        await submitted(client, asked("r", n=2))
        reader = Reader()
        end = asyncio.create_task(reader.read(client, "r"))
        while len(reader.texts.get(0, "")) < 40:
            await asyncio.sleep(0.01)
        server.process.kill()
        faults.kill_all(up.process.pid)
        up.process.wait()
        server.process.wait()
        server.restart()
        start_up("--durable", "--nats-url", server.url, **SLOW)
        await end
        record = await client.request(subjects.result("public", "r"))
        texts = {choice["index"]: choice["text"] for choice in record["answer"]["choices"]}
        assert (reader.texts, reader.ended) == (texts, True)
        assert reader.attempts == sorted(set(reader.attempts)), "attempts only grow"


async def test_tenant_follows_only_its_own_requests_under_credentials(
    start_up: StartUp, tmp_path: Path
) -> None:
    users = tmp_path / "users"
    auth.generate(users, Plan("nats://nats:4222", "default", ("acme", "bob")), print)
    up = start_up("--durable", "--auth", str(users), **SLOW)
    urls = {name: credentials.url_of(users, name, up.nats_url) for name in ("acme", "bob")}
    async with connected(urls["acme"], "acme") as acme, connected(urls["bob"], "bob") as bob:
        await submitted(acme, asked("r"))
        reader = Reader()
        await reader.read(acme, "r", 40)
        with pytest.raises(UnknownRequest):
            await Reader().read(bob, "r")
        spied: list[bytes] = []
        await bob.bus.subscribe("_INBOX.bob.1.2", lambda delivery: spied.append(delivery.data))
        await bob.bus.flush()
        acme.bus.publish(subjects.attach("acme", "r"), b"", reply="_INBOX.bob.1.2")
        await reader.read(acme, "r")
        await bob.bus.flush()
        assert spied == [], "frames went to the inbox of another tenant"
        record = await acme.request(subjects.result("acme", "r"))
        assert (reader.texts[0], reader.attempts) == (record["answer"]["choices"][0]["text"], [1, 1])
    assert "ermissions" not in up.log.read_text()
