"""What the users of `headrace auth` may do on a real nats-server: each its own, and nothing of another's."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import nats
import pytest
from nats.aio.client import Client as Nats

from services.gateway.native_call import TenantConnections
from services.keeper.actor import STATE
from services.launcher import credentials
from services.launcher import nats_server as servers
from services.launcher.commands import auth
from services.launcher.commands.auth import Plan
from services.launcher.heartbeats import HeartbeatNote
from services.launcher.nats_server import NatsServer, ServerLimits
from services.launcher.up import announce_death
from shared import codec
from shared.client.client import Client
from shared.codec import Envelope
from shared.config import load
from shared.errors import SetupError, Unavailable
from shared.messages import Heartbeat
from shared.nats import access, subjects
from shared.nats.bus import NatsBus
from shared.nats.interface import BusFault, Delivery
from shared.nats.jetstream import JetStream
from shared.nats.permissions import SERVICES

FLEET = "default"


@pytest.fixture(scope="module")
def users(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("auth")
    auth.generate(folder, Plan("nats://nats:4222", FLEET, ("acme", "bob")), print)
    return folder


@pytest.fixture(scope="module")
def server(users: Path) -> Iterator[NatsServer]:
    server = servers.start(extra=credentials.authorization(users, FLEET))
    yield server
    server.stop()


class Refusals(list[str]):
    """What the server did not let a client do."""

    async def on_error(self, error: Exception) -> None:
        self.append(str(error))


@asynccontextmanager
async def client(server: NatsServer, users: Path, name: str) -> Any:
    """A plain nats-py client with the credentials of `name`: (client, what it was refused)."""
    url, refused = credentials.url_of(users, name, server.url), Refusals()
    prefix = access.parse(url).inbox_prefix
    nc = await nats.connect(url, inbox_prefix=prefix, error_cb=refused.on_error, allow_reconnect=False)
    try:
        yield nc, refused
    finally:
        await nc.close()


async def may_read(nc: Nats, refused: Refusals, subject: str) -> bool:
    """Subscribing is answered before the flush that follows it is."""
    before = len(refused)
    subscription = await nc.subscribe(subject)
    await nc.flush()
    await nc.flush()
    if len(refused) == before:
        await subscription.unsubscribe()
        return True
    assert f'for subscription to "{subject.lower()}"' in refused[-1].lower()
    return False


async def may_write(nc: Nats, refused: Refusals, subject: str) -> bool:
    before = len(refused)
    await nc.publish(subject, b"x")
    await nc.flush()
    await nc.flush()
    if len(refused) == before:
        return True
    assert f'for publish to "{subject.lower()}"' in refused[-1].lower()
    return False


FORBIDDEN_READING = [
    ">", "*", "*.>", "_INBOX.>", "_INBOX.*.>", "_INBOX.*", "_INBOX.bob.>", "_INBOX.bob", "_INBOX.acm.x",
    "hr.>", "headrace.>", "headrace.v1.generate.>", "headrace.v1.generate.acme.*", "headrace.v1.generate.b.*",
    "headrace.v1.attach.acme.*", "headrace.v1.done.bob.*", "headrace.v1.done.>", "headrace.store.>",
    "headrace.store.record.acme.*", "headrace.store.state.acme.*", "headrace.store.resume.acme.*",
    "headrace.v1.status", "headrace.v1.events.*", f"hr.{FLEET}.scheduler.*.in.*", f"hr.{FLEET}.beat.*.*",
    "_R.>", "_R.*.*", "$SYS.>", "$SRV.>", "$JS.>", "$KV.>",
]  # fmt: skip
FORBIDDEN_WRITING = [
    "headrace.v1.generate.bob.m", "headrace.v1.cancel.bob.r", "headrace.v1.tokenize.bob.m",
    "headrace.v1.detokenize.bob.m", "headrace.v1.generate.acme", "headrace.v1.generate.acme.m.x",
    "headrace.v1.generate.acme2.m", "headrace.v1.generate.public.m", "_INBOX.bob.1.2", "_INBOX.acme.1.2",
    "headrace.v1.status", "headrace.v1.trace.r", "headrace.v1.events.s.snapshot", "hr.beat_ask",
    "headrace.v1.policy.s", "headrace.v1.sleep.s", "headrace.v1.alias.a", "headrace.store.alias.a",
    "headrace.store.aliases",
    "$JS.API.DIRECT.GET.HR_ALIASES.headrace.store.alias.a", "headrace.v1.models", "headrace.v1.models.bob",
    "headrace.v1.submit.bob.m", "headrace.v1.result.bob.r", "headrace.v1.keep.bob.r",
    "headrace.v1.delete.bob.r", "headrace.v1.forward.acme.submit",
    "headrace.v1.keep.acme.r", "headrace.v1.attach.bob.r",
    "headrace.v1.done.acme.r",
    "headrace.v1.files.bob.put", "headrace.v1.batches.bob.create", "headrace.store.file.acme.f.0",
    "headrace.store.line.acme.b.1.ok", "$JS.API.STREAM.PURGE.HR_FILES",
    "$JS.API.DIRECT.GET.HR_FILES.headrace.store.file.acme.f.0",
    "headrace.store.work.acme.r", "headrace.store.record.acme.r", "headrace.store.check.acme.m",
    "headrace.store.hook.h.e", "headrace.store.runs.acme.r", "$JS.ACK.HR_HOOKS.h.1.1.1.1.1",
    "$JS.API.CONSUMER.MSG.NEXT.HR_HOOKS.h", "$JS.API.CONSUMER.CREATE.HR_HOOKS.h.headrace.store.hook.h.*",
    "headrace.store.state.acme.r", "headrace.store.resume.acme.m", "$JS.API.STREAM.PURGE.HR_STATE",
    "$JS.API.DIRECT.GET.HR_STATE.headrace.store.state.acme.r",
    "$JS.API.DIRECT.GET.HR_DONE.headrace.store.record.acme.r", "$JS.ACK.HR_WORK.keeper.1.1.1.1.1",
    f"hr.{FLEET}.beat_ask", f"hr.{FLEET}.beat.tokenizer.1", f"hr.{FLEET}.scheduler.1.in.Tokenized",
    f"hr.{FLEET}.executor.1.in.StepPlan", f"hr.{FLEET}.detokenizer.1.in.Tokens",
    f"hr.{FLEET}.kv_offload.1.in.KvLookup", "_R.1.2", "$SRV.PING", "$JS.API.STREAM.LIST",
    "$SYS.REQ.SERVER.PING",
]  # fmt: skip
ALLOWED_WRITING = [
    "headrace.v1.generate.acme.m", "headrace.v1.cancel.acme.r", "headrace.v1.tokenize.acme.m",
    "headrace.v1.detokenize.acme.m", "headrace.v1.models.acme",
    "headrace.v1.submit.acme.m", "headrace.v1.result.acme.r", "headrace.v1.attach.acme.r",
    "headrace.v1.delete.acme.r", "headrace.v1.files.acme.put", "headrace.v1.batches.acme.create",
]  # fmt: skip


async def test_a_tenant_reads_only_its_own_inbox(server: NatsServer, users: Path) -> None:
    async with client(server, users, "acme") as (nc, refused):
        assert [s for s in FORBIDDEN_READING if await may_read(nc, refused, s)] == []
        for subject in ("_INBOX.acme.>", "_INBOX.acme.1.*", nc.new_inbox()):
            assert await may_read(nc, refused, subject)


async def test_a_tenant_writes_only_in_its_own_name(server: NatsServer, users: Path) -> None:
    async with client(server, users, "acme") as (nc, refused):
        assert [s for s in FORBIDDEN_WRITING if await may_write(nc, refused, s)] == []
        assert [s for s in ALLOWED_WRITING if not await may_write(nc, refused, s)] == []


@pytest.mark.parametrize("accounts", [False, True])
async def test_a_stream_may_be_silent_for_longer_than_an_answer_may_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, accounts: bool
) -> None:
    """The permission to answer a request ends after a while, here a millisecond; a stream has none to end."""
    monkeypatch.setattr(auth, "ANSWER_WITHIN", "1ms")
    auth.generate(tmp_path, Plan("nats://nats:4222", FLEET, ("acme", "bob"), accounts=accounts), print)
    server = servers.start(extra=credentials.authorization(tmp_path, FLEET))
    try:
        async with (
            client(server, tmp_path, "detokenizer") as (detokenizer, _),
            client(server, tmp_path, "scheduler") as (scheduler, refused),
            client(server, tmp_path, "acme") as (acme, _),
            client(server, tmp_path, "operator") as (operator, _),
        ):
            inbox, state = acme.new_inbox(), operator.new_inbox()
            frames, states = await acme.subscribe(inbox), await operator.subscribe(state)
            asked = await scheduler.subscribe(subjects.TRACE_ALL)
            for each in (acme, operator, scheduler):
                await each.flush()
            await detokenizer.publish(inbox, b"1")
            await operator.publish(subjects.trace("r"), b"", reply=state)
            question = await asked.next_msg(30)
            began = asyncio.get_running_loop().time()
            while asyncio.get_running_loop().time() < began + 0.01:
                await acme.flush()
            await scheduler.publish(question.reply, b"late")
            await detokenizer.publish(inbox, b"2")
            await scheduler.flush()
            await scheduler.flush()
            assert [(await frames.next_msg(30)).data for _ in range(2)] == [b"1", b"2"]
            assert refused, "the answer was late, and is not let through"
            assert states.pending_msgs == 0
    finally:
        server.stop()


async def test_reply_reaches_the_requesting_tenant_and_no_other(server: NatsServer, users: Path) -> None:
    async with (
        client(server, users, "detokenizer") as (detokenizer, _),
        client(server, users, "acme") as (acme, _),
        client(server, users, "bob") as (bob, refused),
    ):
        inbox = acme.new_inbox()
        mine = await acme.subscribe(inbox)
        spied = [await bob.subscribe(pattern) for pattern in (inbox, "_INBOX.acme.>", "_INBOX.>", ">")]
        await acme.flush()
        await bob.flush()
        await bob.flush()
        assert len(refused) == len(spied)
        await detokenizer.publish(inbox, b"secret")
        assert (await mine.next_msg(30)).data == b"secret"
        await detokenizer.flush()
        await bob.flush()
        assert [s.pending_msgs for s in spied] == [0, 0, 0, 0]


SENDS = {
    "tokenizer": {"scheduler", "tokenizer"},
    "scheduler": {"tokenizer", "executor", "kv_offload", "detokenizer"},
    "executor": {"scheduler"},
    "kv_offload": {"scheduler", "kv_offload"},
    "detokenizer": {"scheduler", "detokenizer"},
    "gateway": set(),
    "keeper": set(),
}


@pytest.mark.parametrize("kind", SERVICES)
async def test_service_writes_only_to_the_services_it_works_with(
    kind: str, server: NatsServer, users: Path
) -> None:
    async with client(server, users, kind) as (nc, refused):
        boxes = [k for k in SERVICES if await may_write(nc, refused, f"hr.{FLEET}.{k}.a1.in.X")]
        assert set(boxes) == SENDS[kind]
        heartbeats = [k for k in SERVICES if await may_write(nc, refused, f"hr.{FLEET}.beat.{k}.a1")]
        assert heartbeats == [kind]
        assert not await may_write(nc, refused, "hr.other.scheduler.a1.in.X")
        assert await may_write(nc, refused, "_INBOX.acme.1.2") == (kind in ("tokenizer", "detokenizer"))
        asks = kind in ("gateway", "keeper", "tokenizer")  # a tokenizer forwards requests to aliases
        assert await may_write(nc, refused, "headrace.v1.generate.acme.m") == asks
        assert await may_write(nc, refused, "headrace.store.alias.a") == (kind in ("keeper", "tokenizer"))
        assert not await may_write(nc, refused, "headrace.v1.alias.a")
        assert await may_write(nc, refused, "headrace.v1.attach.acme.r") == (kind == "gateway")
        assert await may_write(nc, refused, "headrace.v1.keep.acme.r") == (kind == "gateway")
        assert not await may_write(nc, refused, "headrace.v1.policy.a1")
        assert await may_write(nc, refused, "headrace.store.record.acme.r") == (kind == "keeper")
        kept = await may_write(nc, refused, "headrace.store.state.acme.r")
        assert kept == (kind in ("detokenizer", "keeper"))
        assert await may_write(nc, refused, "headrace.store.resume.acme.m") == (kind == "keeper")
        assert await may_write(nc, refused, "$JS.API.STREAM.CREATE.HR_STATE") == (kind == "keeper")
        assert await may_write(nc, refused, "$JS.API.STREAM.DELETE.HR_DONE") is False
        for subject in (
            "$JS.API.STREAM.CREATE.HR_HOOKS", "headrace.store.hook.h.e", "$JS.ACK.HR_HOOKS.h.1.1.1.1.1",
            "$JS.API.CONSUMER.MSG.NEXT.HR_HOOKS.h",
            "$JS.API.CONSUMER.CREATE.HR_HOOKS.h.headrace.store.hook.h.*",
        ):  # fmt: skip
            assert await may_write(nc, refused, subject) == (kind == "keeper")
        assert await may_write(nc, refused, "$JS.API.DIRECT.GET.HR_DONE.headrace.store.record.acme.r") == (
            kind == "keeper"
        )


NOTE = HeartbeatNote(1, 1, "ready", 1.0, 0.0, "executor.e", 5)


@pytest.mark.parametrize(("name", "received"), [("executor", 1), ("scheduler", 0), ("acme", 0)])
async def test_a_death_is_announced_with_the_login_of_its_kind_alone(
    name: str, received: int, server: NatsServer, users: Path
) -> None:
    async with client(server, users, "scheduler") as (scheduler, _):
        notices = await scheduler.subscribe(subjects.heartbeat_all(FLEET))
        await scheduler.flush()
        await announce_death(credentials.url_of(users, name, server.url), load().settings, NOTE)
        await scheduler.flush()
        assert notices.pending_msgs == received
        if received:
            envelope = codec.decode((await notices.next_msg(30)).data)
            last = Heartbeat(kind="executor", actor="e", host_id=load().settings.host_id, state="failed")
            assert envelope == Envelope("executor.e", 5, 0, last)


@pytest.mark.parametrize("kind", SERVICES)
async def test_a_service_reads_its_own_mailbox(kind: str, server: NatsServer, users: Path) -> None:
    async with client(server, users, kind) as (nc, refused):
        boxes = [k for k in SERVICES if await may_read(nc, refused, f"hr.{FLEET}.{k}.a1.in.*")]
        assert boxes == [kind]
        for subject in (">", "hr.>", "_INBOX.>", "_INBOX.acme.>", f"_INBOX.{access.SERVICE_PREFIX}x.>"):
            assert not await may_read(nc, refused, subject)
        assert await may_read(nc, refused, "_INBOX.*.headrace-gateway.1.*") == (kind == "gateway")
        requests = await may_read(nc, refused, "headrace.v1.generate.*.m")
        assert requests == (kind == "tokenizer")
        assert await may_read(nc, refused, "headrace.v1.attach.*.*") == (kind == "detokenizer")
        assert await may_read(nc, refused, "headrace.store.resume.*.m") == (kind == "detokenizer")
        assert await may_read(nc, refused, "headrace.v1.policy.a1") == (kind == "scheduler")
        for verb in ("keep", "delete"):
            assert await may_read(nc, refused, f"headrace.v1.{verb}.*.*") == (kind == "keeper")
        assert await may_read(nc, refused, "headrace.store.runs.*.*") == (kind == "keeper")


async def test_a_detokenizer_stores_savepoints_and_a_keeper_reads_and_removes_them(users: Path) -> None:
    limits = replace(ServerLimits(), jetstream_memory="16MB", jetstream_file="1GB")
    server = servers.start(limits=limits, extra=credentials.authorization(users, FLEET))
    connect = NatsBus.connect
    keeper = await connect(credentials.url_of(users, "keeper", server.url), timeout_s=30)
    detokenizer = await connect(credentials.url_of(users, "detokenizer", server.url), timeout_s=30)
    streams, subject = JetStream(keeper), subjects.state("acme", "r")
    await streams.make_stream(subjects.STATE_STREAM, STATE)
    acks = asyncio.Queue[Delivery]()
    inbox = detokenizer.new_inbox()
    await detokenizer.subscribe(inbox, acks.put_nowait)
    for data in (b"1", b"2"):
        detokenizer.publish(subject, data, reply=inbox)
        assert b'"seq"' in (await asyncio.wait_for(acks.get(), 30)).data
    assert await streams.last(subjects.STATE_STREAM, subject) == b"2"
    await streams.purge(subjects.STATE_STREAM, subject)
    assert await streams.last(subjects.STATE_STREAM, subject) is None
    asked = asyncio.Queue[Delivery]()
    await detokenizer.subscribe(subjects.resume_any_tenant("m"), asked.put_nowait, queue="detokenizer")
    await detokenizer.flush()
    keeper.publish(subjects.resume("acme", "m"), b"1", reply="_INBOX.acme.headrace-keeper.r")
    assert (await asyncio.wait_for(asked.get(), 30)).reply == "_INBOX.acme.headrace-keeper.r"
    await detokenizer.drain()
    await keeper.drain()
    server.stop()


async def test_stored_requests_move_with_the_services_into_their_account(tmp_path: Path) -> None:
    store = tmp_path / "store"
    limits = replace(ServerLimits(), jetstream_memory="16MB", jetstream_file="1GB", store=str(store))
    subject = subjects.state("acme", "r")

    async def last(*, stores: bool = False) -> bytes | None:
        server = servers.start(limits=limits, extra=credentials.authorization(tmp_path, FLEET))
        keeper = await NatsBus.connect(credentials.url_of(tmp_path, "keeper", server.url), timeout_s=30)
        streams = JetStream(keeper)
        if stores:
            await streams.make_stream(subjects.STATE_STREAM, STATE)
            await keeper.request(subject, b"kept", timeout_us=30_000_000)
        try:
            return await streams.last(subjects.STATE_STREAM, subject)
        finally:
            await keeper.drain()
            server.stop()

    auth.generate(tmp_path, Plan("nats://nats:4222", FLEET), print)
    assert await last(stores=True) == b"kept"
    auth.generate(tmp_path, Plan("nats://nats:4222", FLEET, accounts=True), print)
    with pytest.raises(Unavailable):
        await last()
    (store / "jetstream" / "$G").rename(store / "jetstream" / credentials.account_of(tmp_path))
    assert await last() == b"kept"


async def test_service_answers_each_requester_once(server: NatsServer, users: Path) -> None:
    async with (
        client(server, users, "executor") as (executor, refused),
        client(server, users, "operator") as (operator, forbidden),
    ):
        assert await may_write(operator, forbidden, "headrace.v1.policy.a1")
        asked = await executor.subscribe("headrace.v1.status")
        await executor.flush()
        answers = await operator.subscribe(inbox := operator.new_inbox())
        await operator.publish("headrace.v1.status", b"", reply=inbox)
        question = await asked.next_msg(30)
        assert await may_write(executor, refused, question.reply)
        assert not await may_write(executor, refused, question.reply)
        assert (await answers.next_msg(30)).data == b"x"


async def test_gateway_receives_each_tenants_answers_on_a_connection_of_its_own(
    server: NatsServer, users: Path
) -> None:
    main = await NatsBus.connect(credentials.url_of(users, "gateway", server.url), timeout_s=30)
    tokenizer = await NatsBus.connect(credentials.url_of(users, "tokenizer", server.url), timeout_s=30)
    asked: list[str] = []

    def reply(delivery: Delivery) -> None:
        asked.append(delivery.reply)
        tokenizer.publish(delivery.reply, b'{"data": []}')

    await tokenizer.subscribe("headrace.v1.models.*", reply)
    await tokenizer.flush()
    lines = TenantConnections(await Client.open(main), apart=True)
    for tenant in ("acme", "bob"):
        line = await lines.client_of(tenant)
        assert (await line.request(subjects.models(tenant)), line.bus.user) == (
            {"data": []},
            "headrace-gateway",
        )
        assert asked[-1].startswith(f"_INBOX.{tenant}.headrace-gateway.")
    assert len(lines) == 2
    await lines.close()
    await main.drain()
    await tokenizer.drain()


@pytest.mark.parametrize(
    ("url", "login"),
    [
        ("nats://acme:wrong@", "user 'acme'"),
        ("nats://nobody:x@", "user 'nobody'"),
        ("nats://", "a connection without user and password"),
    ],
)
async def test_wrong_credentials_are_an_error_at_once(server: NatsServer, url: str, login: str) -> None:
    address = server.url.removeprefix("nats://")
    with pytest.raises(SetupError) as caught:  # without a time limit, as a service connects
        await asyncio.wait_for(NatsBus.connect(f"{url}{address}"), 10)
    assert f"the nats-server at nats://{address} refuses {login}" in caught.value.message
    assert "`headrace auth`" in caught.value.message
    assert "wrong" not in caught.value.message


async def test_a_subscription_of_another_service_is_a_fault(server: NatsServer, users: Path) -> None:
    refused: asyncio.Queue[BusFault] = asyncio.Queue()
    bus = await NatsBus.connect(
        credentials.url_of(users, "executor", server.url), on_fault=refused.put_nowait
    )
    await bus.subscribe("headrace.v1.generate.*.m", lambda _: None)
    fault = await asyncio.wait_for(refused.get(), 10)
    assert fault.kind == "refused"
    assert '"headrace.v1.generate.*.m"' in fault.detail
    await bus.drain()


@pytest.mark.parametrize("accounts", [False, True])
async def test_a_tenant_of_a_running_server_is_added_by_a_signal(tmp_path: Path, *, accounts: bool) -> None:
    auth.generate(tmp_path, Plan("nats://nats:4222", FLEET, accounts=accounts), print)
    server = servers.start(extra=credentials.authorization(tmp_path, FLEET))
    conf = Path(server.folder.name) / servers.CONFIG_NAME
    tokenizer = await NatsBus.connect(credentials.url_of(tmp_path, "tokenizer", server.url), timeout_s=30)
    await tokenizer.subscribe("headrace.v1.generate.*.m", lambda m: tokenizer.publish(m.reply, m.data))
    await tokenizer.flush()
    try:
        async with client(server, tmp_path, "public") as (public, refused):
            head = conf.read_text().removesuffix(credentials.authorization(tmp_path, FLEET))
            auth.generate(tmp_path, Plan("nats://nats:4222", FLEET, ("late",)), print)
            conf.write_text(head + credentials.authorization(tmp_path, FLEET))
            server.process.send_signal(signal.SIGHUP)
            await _reloaded(server)
            late = await NatsBus.connect(credentials.url_of(tmp_path, "late", server.url), timeout_s=30)
            asked = late.request(subjects.generate("late", "m"), b"x", timeout_us=30_000_000)
            assert (await asked).data == b"x"
            assert (await public.request("headrace.v1.generate.public.m", b"y", 30)).data == b"y"
            assert refused == []  # and the server cut no connection off
            await late.drain()
        await tokenizer.drain()
    finally:
        server.stop()


async def _reloaded(server: NatsServer) -> None:
    """Return when the server has read its file again. Before, it lets new users in, and may cut them off."""
    async with asyncio.timeout(60):
        while "Reloaded server configuration" not in server.log.read_text():
            await asyncio.sleep(0.01)
