"""Clients that go away, and cancels, over real processes: which are noticed, what is stopped, what is
free."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import nats
import pytest
from nats.aio.client import Client as Nats
from nats.aio.subscription import Subscription
from support.running_up import HEARTBEATS, StartUp, Up, assert_all_free, running_up

from services.launcher import nats_server as servers
from services.launcher.nats_server import ServerLimits

SUBJECT = "headrace.v1.generate.public.smollm2-135m-instruct"
SLOW = "step=10000"  # what matters here is the time of an answer, not how many steps it has
LONG = 8_000  # tokens: 80 s of steps, far longer than it takes to notice
WINDOW = 2


def body(request: str, **fields: Any) -> bytes:
    ask = {"prompt": "Hello", "max_tokens": LONG, "ignore_eos": True, "seed": 1, "request_id": request}
    return json.dumps({**ask, **fields}).encode()


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    with running_up(tmp_path_factory.mktemp("vanish"), HEADRACE_SIM=SLOW) as up:
        yield up


@pytest.fixture
async def nc(up: Up) -> AsyncIterator[Nats]:
    connection = await nats.connect(up.nats_url)
    yield connection
    await connection.close()


@asynccontextmanager
async def stranger(up: Up) -> AsyncIterator[Nats]:
    """A client that vanishes at the end of the block."""
    connection = await nats.connect(up.nats_url, allow_reconnect=False)
    try:
        yield connection
    finally:
        await connection.close()


def unheld(engine: dict[str, Any]) -> int:
    """Blocks that no request holds: free ones, and those that wait for a copy in a tier below or are in
    one."""
    return int(engine["free_blocks"] + engine["dirty_blocks"] + engine["copying_blocks"])


async def started(nc: Nats, data: bytes) -> tuple[Subscription, list[dict[str, Any]]]:
    """A stream with its first frames read."""
    inbox = nc.new_inbox()
    replies = await nc.subscribe(inbox)
    await nc.publish(SUBJECT, data, reply=inbox)
    return replies, [json.loads((await replies.next_msg(60)).data) for _ in range(3)]


STOPPED = ("error", "the client has gone")
FINISHED = ("length", "")


async def end_of(nc: Nats, request: str) -> tuple[str, str]:
    """(reason, error) of a request, once it has ended."""
    heartbeats = await nc.subscribe(HEARTBEATS)
    async with asyncio.timeout(60):
        while True:
            facts = json.loads((await nc.request(f"headrace.v1.trace.{request}", timeout=60)).data)
            if facts["state"] == "ended":
                await heartbeats.unsubscribe()
                choice = facts["choices"][0]
                assert choice["tokens"] < LONG
                return choice["reason"], choice["error"]
            await heartbeats.next_msg(30)


async def test_a_reader_that_disconnects_stops_its_request(up: Up, nc: Nats) -> None:
    async with stranger(up) as client:
        await started(client, body("gone", stream=True))
    assert await end_of(nc, "gone") == STOPPED
    await assert_all_free(nc)


async def test_a_reader_that_is_killed_stops_its_request(up: Up, nc: Nats) -> None:
    async with stranger(up) as client:
        await started(client, body("killed", stream=True))
        client._transport._io_writer.transport.abort()  # a reset: what a dead process leaves
        assert await end_of(nc, "killed") == STOPPED
    await assert_all_free(nc)


async def test_a_reader_that_unsubscribes_stops_its_request(up: Up, nc: Nats) -> None:
    async with stranger(up) as client:
        replies, _ = await started(client, body("deaf", stream=True))
        await replies.unsubscribe()
        assert await end_of(nc, "deaf") == STOPPED
    await assert_all_free(nc)


async def test_request_with_finish_detached_ends_without_its_vanished_reader(up: Up, nc: Nats) -> None:
    async with stranger(up) as client:
        await started(client, body("kept", stream=True, finish_detached=True, max_tokens=30))
    assert await end_of(nc, "kept") == FINISHED
    await assert_all_free(nc)


async def test_a_client_that_waits_for_one_reply_and_vanishes_is_noticed(up: Up, nc: Nats) -> None:
    for request, fields, end in (
        ("alone", {}, STOPPED),
        ("alone-kept", {"finish_detached": True, "max_tokens": 300}, FINISHED),
    ):
        async with stranger(up) as client:
            waiting = asyncio.create_task(client.request(SUBJECT, body(request, **fields), timeout=60))
            probe = await nc.subscribe("_INBOX.*.headrace-probe")
            await probe.next_msg(60)  # by now the service has seen that it is there
            await probe.unsubscribe()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert await end_of(nc, request) == end
    await assert_all_free(nc)


async def test_one_exact_inbox_gets_one_message_and_is_never_taken_for_gone(up: Up, nc: Nats) -> None:
    """As `nats req` does it: the first message is the answer."""
    inbox = f"{nc.new_inbox()}.exact"
    replies = await nc.subscribe(inbox)
    await nc.publish(SUBJECT, body("exact", max_tokens=300), reply=inbox)  # 3 s: fifteen beats
    answer = json.loads((await replies.next_msg(60)).data)
    assert answer["usage"]["completion_tokens"] == 300
    await assert_all_free(nc)


async def test_a_reader_that_reads_nothing_is_cut_off_by_the_server_and_noticed(start_up: StartUp) -> None:
    """With less patience than the server of `up` has, or the test would take a minute."""
    server = servers.start(limits=ServerLimits(max_payload="1MB", max_pending="1MB", write_deadline="500ms"))
    try:
        up = start_up("--nats-url", server.url)
        nc = await nats.connect(up.nats_url)
        host, _, port = server.url.rpartition("/")[2].partition(":")
        with socket.socket() as lazy:
            lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            lazy.connect((host, int(port)))
            ask = body("lazy", stream=True, n=32)
            lines = f"SUB lazy.in 1\r\nPUB {SUBJECT} lazy.in {len(ask)}\r\n".encode() + ask + b"\r\n"
            lazy.sendall(b'CONNECT {"verbose":false}\r\n' + lines)
            assert await end_of(nc, "lazy") == STOPPED
        await assert_all_free(nc)
        await nc.close()
        assert up.stop(signal.SIGTERM) == 0
    finally:
        server.stop()


async def test_a_cancel_frees_the_blocks_within_two_steps(start_up: StartUp) -> None:
    """Counted in steps, by asking before and after the cancel on the same connection."""
    up = start_up(HEADRACE_SIM="step=100000,token=20")
    nc = await nats.connect(up.nats_url)

    async def engine() -> dict[str, Any]:
        facts = json.loads((await nc.request("$SRV.STATS.headrace-scheduler", timeout=60)).data)["data"]
        (found,) = facts["executors"].values()
        return dict(found)

    try:
        other, _ = await started(nc, body("goes-on", stream=True))
        for attempt in range(5):
            long = {"prompt": "a long prompt " * 100, "max_tokens": LONG - 1000}  # within the context
            replies, _ = await started(nc, body(f"c{attempt}", stream=True, **long))
            before = await engine()
            await nc.publish(f"headrace.v1.cancel.public.c{attempt}", b"")
            now = after = await engine()
            assert before["running"] == 2
            while now["running"] > 1 or now["fenced_blocks"] or now["free_slots"] < now["slots"] - 1:
                assert now["steps"] < after["steps"] + WINDOW, "held longer than two steps"
                now = await engine()
            assert unheld(now) > unheld(before) + 10
            await replies.unsubscribe()
            if after["steps"] == before["steps"]:
                break  # no step ended around the cancel: the count above is exact
        else:
            raise AssertionError("a step ended around each of five cancels")
        await other.unsubscribe()
        await assert_all_free(nc)
    finally:
        await nc.close()
