"""Tenants with an account of the nats-server each, and services under their own credentials."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import nats
import pytest
import pytest_asyncio
from nats.aio.client import Client as Nats
from nats.errors import NoRespondersError
from support.pipeline.five_actors import Pipeline

from services.launcher import credentials
from services.launcher import nats_server as servers
from services.launcher.commands import auth
from services.launcher.commands.auth import Plan
from shared.actor.runtime import Runtime
from shared.client.client import Client
from shared.config import load
from shared.errors import Moved, SetupError
from shared.nats import access, subjects
from shared.nats.bus import NatsBus
from shared.nats.interface import Bus, BusFault

MODEL = "smollm2-135m-instruct"
FLEET = "accounts"
LONG = 8_000  # tokens: far more than are made until a reader that has gone is noticed
CONNECTIONS = 3  # of bob at once

pytestmark = pytest.mark.asyncio(loop_scope="module")
whole_file = pytest_asyncio.fixture(scope="module", loop_scope="module")


class Guarded(Pipeline):
    """The five actors and a client of the operator, each with the credentials of `headrace auth`."""

    users: Path
    url: str
    faults: list[BusFault]

    async def add(self, kind: str, name: str) -> Runtime:
        async def connect() -> Bus:
            return await self.connection(kind)

        before, self.connect = self.connect, connect
        runtime = await super().add(kind, name)
        self.connect = before
        return runtime

    async def connection(self, user: str) -> NatsBus:
        url = credentials.url_of(self.users, user, self.url)
        return await NatsBus.connect(url, timeout_s=20, on_fault=self.faults.append)


@whole_file
async def pipeline(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Guarded]:
    users = tmp_path_factory.mktemp("auth")
    auth.generate(users, Plan("nats://nats:4222", FLEET, ("acme",), accounts=True), print)
    limits = f"connections={CONNECTIONS},payload=64KB"
    auth.generate(users, Plan("nats://nats:4222", FLEET, ("bob",), limits=limits), print)
    server = servers.start(extra=credentials.authorization(users, FLEET))
    Guarded.users, Guarded.url, Guarded.faults = users, server.url, []

    async def operator() -> Bus:
        return await running.connection("operator")

    flags = {"fleet": FLEET, "backend": "sim", "sim": "step=1000", "l1": "off"}
    running = Guarded(operator, load(flags=flags).settings)
    await running.begin()
    yield running
    await running.assert_idle()
    await running.stop()
    await running.client.bus.drain()
    assert running.faults == [], "no service wanted more than it may"
    server.stop()


@asynccontextmanager
async def plain(pipeline: Guarded, tenant: str, **options: Any) -> AsyncIterator[Nats]:
    """A nats-py client as it comes, with the usual inboxes."""
    url = credentials.url_of(pipeline.users, tenant, pipeline.url)
    connection = await nats.connect(url, allow_reconnect=False, **options)
    try:
        yield connection
    finally:
        await connection.close()


def body(**fields: Any) -> bytes:
    return json.dumps({"prompt": "Hello", "max_tokens": 4, "ignore_eos": True, "seed": 1, **fields}).encode()


async def ask(nc: Nats, tenant: str, verb: str = "generate", name: str = MODEL, **fields: Any) -> Any:
    return json.loads((await nc.request(f"headrace.v1.{verb}.{tenant}.{name}", body(**fields), 60)).data)


async def started(nc: Nats, tenant: str, request: str, **fields: Any) -> Any:
    """A stream with its first frames read."""
    replies = await nc.subscribe(inbox := nc.new_inbox())
    data = body(request_id=request, stream=True, **{"max_tokens": LONG, **fields})
    await nc.publish(f"headrace.v1.generate.{tenant}.{MODEL}", data, reply=inbox)
    for _ in range(3):
        await replies.next_msg(60)
    return replies


async def rest_of(replies: Any) -> list[Any]:
    """The frames up to the last one."""
    frames, ended = [], False
    while not ended:
        message = await replies.next_msg(60)
        frames.append(json.loads(message.data))
        ended = "Headrace-End" in (message.headers or {})
    return frames


async def end_of(pipeline: Guarded, request: str) -> tuple[str, str]:
    """(reason, error) of a request, once it has ended."""
    async with asyncio.timeout(60):
        while True:
            asked = pipeline.client.bus.request(subjects.trace(request), b"", timeout_us=60_000_000)
            answered = json.loads((await asked).data)
            if answered["state"] == "ended":
                return answered["choices"][0]["reason"], answered["choices"][0]["error"]


@pytest.mark.parametrize("prefix", ["_INBOX", "_INBOX.acme", "_INBOX.some.where"])
async def test_a_client_needs_no_inbox_of_its_own(pipeline: Guarded, prefix: str) -> None:
    async with plain(pipeline, "acme", inbox_prefix=prefix) as nc:
        whole = await ask(nc, "acme")
        assert whole["usage"]["completion_tokens"] == 4
        (*_, last) = await rest_of(await started(nc, "acme", "short", max_tokens=40))
        assert (last["type"], last["usage"]["completion_tokens"]) == ("done", 40)
        assert (await ask(nc, "acme", "tokenize"))["tokens"]
        models = json.loads((await nc.request("headrace.v1.models.acme", b"", 60)).data)
        assert [each["id"] for each in models["data"]] == [MODEL]
        assert (await ask(nc, "acme", max_tokens=0))["error"]["param"] == "max_tokens"
        assert (await ask(nc, "acme", name="none"))["error"]["code"] == 404


async def test_a_service_that_may_only_answer_reaches_any_inbox(pipeline: Guarded) -> None:
    """Its permission to answer is for the reply subject as the server knows it."""
    keeper = await pipeline.connection("keeper")
    await keeper.subscribe(subjects.RESULT_ALL, lambda asked: keeper.publish(asked.reply, asked.data))
    await keeper.flush()
    for prefix in ("_INBOX", "_INBOX.acme"):
        async with plain(pipeline, "acme", inbox_prefix=prefix) as nc:
            assert (
                await nc.request("headrace.v1.result.acme.r", prefix.encode(), 60)
            ).data == prefix.encode()
    await keeper.drain()


async def test_client_and_operator_work_as_before_with_accounts(pipeline: Guarded) -> None:
    bus = await pipeline.connection("acme")
    client = await Client.open(bus, "acme")
    for each in (client, pipeline.client.as_tenant("acme")):
        answer = await each.complete({"model": MODEL, "prompt": "Hello", "max_tokens": 4, "ignore_eos": True})
        assert answer["usage"]["completion_tokens"] == 4
    await bus.drain()


async def test_a_tenant_sees_and_reaches_nothing_of_another(pipeline: Guarded) -> None:
    async with plain(pipeline, "acme") as acme, plain(pipeline, "bob") as bob:
        for verb in ("cancel", "attach", "generate", "submit", "done", "policy", "keep", "forward"):
            with pytest.raises(NoRespondersError):  # the services are not in bob's account
                await bob.request(f"headrace.v1.{verb}.acme.mine", body(), 60)
        sniffed = await bob.subscribe(">")
        await bob.flush()
        replies = await started(acme, "acme", "mine", max_tokens=400)
        tried = [
            "headrace.v1.cancel.acme.mine",
            "headrace.v1.cancel.bob.mine",  # in its own name: another request
            "_INBOX.acme.headrace-operator.1",
            f"hr.{FLEET}.scheduler.scheduler-1.in.Tokenized",
        ]
        for subject in tried:
            await bob.publish(subject, b"x")
        await acme.publish(f"headrace.v1.generate.acme.{MODEL}", body(), reply="_INBOX.bob.1.2")
        assert (await rest_of(replies))[-1]["usage"]["completion_tokens"] == 400
        assert await ask(acme, "acme")
        await bob.flush()
        assert [(await sniffed.next_msg(1)).subject for _ in range(sniffed.pending_msgs)] == tried, "its own"


async def test_a_reader_that_is_killed_stops_its_request(pipeline: Guarded) -> None:
    async with plain(pipeline, "acme") as nc:
        await started(nc, "acme", "killed")
        nc._transport._io_writer.transport.abort()  # a reset: what a dead process leaves
        loop = asyncio.get_running_loop()
        began = loop.time()
        assert await end_of(pipeline, "killed") == ("error", "the client has gone")
        await pipeline.assert_idle()
    print(f"free {loop.time() - began:.3f} s after the kill")


async def test_a_client_that_waits_for_one_reply_and_vanishes_is_noticed(pipeline: Guarded) -> None:
    async with plain(pipeline, "acme") as nc:
        data = body(request_id="alone", max_tokens=LONG)
        probe = await nc.subscribe("_INBOX.*.headrace-probe")
        waiting = asyncio.create_task(nc.request(f"headrace.v1.generate.acme.{MODEL}", data, 60))
        await probe.next_msg(60)  # by now the service has seen that it is there
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert await end_of(pipeline, "alone") == ("error", "the client has gone")


async def test_tenant_cancels_and_attaches_in_its_own_account(pipeline: Guarded) -> None:
    async with plain(pipeline, "acme") as first, plain(pipeline, "acme") as second:
        left = await started(first, "acme", "moved")
        read = await second.subscribe(inbox := second.new_inbox())
        await second.publish("headrace.v1.attach.acme.moved", b"{}", reply=inbox)
        assert json.loads((await read.next_msg(60)).data)["type"] == "accepted"
        assert (await rest_of(left))[-1]["error"]["type"] == Moved.type
        await second.publish("headrace.v1.cancel.acme.moved")
        assert (await rest_of(read))[-1]["error"]["code"] == 499


async def test_a_tenant_at_its_limits_disturbs_no_other(pipeline: Guarded) -> None:
    cut = asyncio.Event()

    async def closed() -> None:
        cut.set()

    async with (
        plain(pipeline, "acme") as acme,
        plain(pipeline, "bob") as bob,
        plain(pipeline, "bob", closed_cb=closed) as big,
        plain(pipeline, "bob"),
    ):
        both = {"acme": acme, "bob": bob}
        streams = [await started(nc, name, f"of-{name}", max_tokens=400) for name, nc in both.items()]
        reason = "maximum account active connections exceeded|its account has as many as it may"
        with pytest.raises(SetupError, match=reason):  # a reset may overtake the server's words each time
            url = credentials.url_of(pipeline.users, "bob", pipeline.url)
            await NatsBus.connect(url, timeout_s=1)
        await big.publish(f"headrace.v1.generate.bob.{MODEL}", body(prompt="x" * 70_000))
        await asyncio.wait_for(cut.wait(), 60)
        async with plain(pipeline, "acme") as another:
            assert (await ask(another, "acme", prompt="x" * 70_000))["error"]["code"] == 400  # it arrived
        for replies in streams:
            assert (await rest_of(replies))[-1]["usage"]["completion_tokens"] == 400


async def test_no_account_of_a_tenant_has_streams_on_disk_and_no_stranger_an_account(
    pipeline: Guarded,
) -> None:
    with pytest.raises(SetupError, match="refuses a connection without user"):
        await NatsBus.connect(pipeline.url, timeout_s=20)
    async with plain(pipeline, "acme") as nc:
        with pytest.raises(nats.js.errors.ServiceUnavailableError):
            await nc.jetstream().add_stream(name="S", subjects=["s"])
    assert access.parse(credentials.url_of(pipeline.users, "keeper")).accounts
