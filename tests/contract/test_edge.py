"""An edge and its centre: two real nats-servers with a leaf node connection that the test can cut, and the
keepers of both sides."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import nats
import pytest
from support.self_signed import self_signed
from support.slow_link import SlowLink

from services.keeper import forwarding
from services.keeper.actor import KeeperActor
from services.launcher import credentials, leaf
from services.launcher import nats_server as servers
from services.launcher.commands import auth
from services.launcher.commands.auth import Plan
from services.launcher.nats_server import NatsServer, ServerLimits
from shared.actor.runtime import Runtime
from shared.client.client import Client
from shared.errors import (
    BadRequest,
    EngineError,
    HeadraceError,
    Overloaded,
    Unavailable,
    UnknownModel,
)
from shared.nats import access, subjects
from shared.nats.bus import NatsBus
from shared.nats.interface import Bus, Delivery, NoResponders, RequestTimeout
from shared.replies import error_reply, to_json

LIMITS = replace(ServerLimits(), jetstream_memory="16MB", jetstream_file="1GB")
HERE = "local"  # the model of the edge; the centre has `m`


@dataclass
class Pair:
    """The two servers, and the way between them."""

    centre: NatsServer
    edge: NatsServer
    link: SlowLink


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@pytest.fixture
def pair() -> Iterator[Pair]:
    port = free_port()
    centre = servers.start(limits=LIMITS, extra=leaf.listen(f"127.0.0.1:{port}", None))
    with SlowLink(port) as link:
        url = f"nats-leaf://127.0.0.1:{link.port}"
        limits = replace(leaf.limits_of("e", LIMITS), domain="edge-e")
        edge = servers.start(limits=limits, extra=leaf.remote(url, [HERE], has_users=False))
        yield Pair(centre, edge, link)
        edge.stop()
    centre.stop()


class Side:
    """The keepers of one side, a client there, and a fleet that answers what the test wants."""

    def __init__(self, server: NatsServer, model: str, here: frozenset[str] | None) -> None:
        self.server, self.model, self.here = server, model, here
        self.wrong: HeadraceError | None = None  # the tokenizer's verdict
        self.answers = True
        self.asked: list[Delivery] = []
        self.news: list[Any] = []
        self.cancels: list[str] = []
        self.keepers: list[Runtime] = []
        self.came = asyncio.Event()

    async def open(self) -> None:
        self.bus: Bus = await NatsBus.connect(self.server.url, timeout_s=30)
        self.client = await Client.open(self.bus)
        await self.bus.subscribe(f"headrace.store.check.*.{self.model}", self._check)
        await self.bus.subscribe(f"headrace.v1.generate.*.{self.model}", self._generate)
        await self.bus.subscribe(subjects.DONE_ALL, self._done)
        await self.bus.subscribe(subjects.CANCEL_ALL, self._cancelled)
        await self.bus.flush()
        await self.keeper()
        async with asyncio.timeout(60):
            while True:
                try:
                    await self.client.state("no such id")
                except UnknownModel:
                    return
                except Unavailable:
                    await asyncio.sleep(0.01)

    async def keeper(self) -> Runtime:
        """One more keeper."""
        bus = await NatsBus.connect(self.server.url, timeout_s=30)
        keeper = Runtime(KeeperActor(here=self.here), bus, "f", f"k{len(self.keepers)}")
        await keeper.start()
        self.keepers.append(keeper)
        return keeper

    async def close(self) -> None:
        for keeper in self.keepers:
            await keeper.finish(5.0)
        await self.bus.drain()

    def _check(self, delivery: Delivery) -> None:
        body = to_json({"seed": 7, "slo_class": "standard"})
        self.bus.publish(delivery.reply, body if self.wrong is None else error_reply(self.wrong, "", ""))

    def _generate(self, delivery: Delivery) -> None:
        self.asked.append(delivery)
        self.came.set()
        if self.answers:
            self.answer(delivery)

    def _done(self, delivery: Delivery) -> None:
        self.news.append(json.loads(delivery.data))
        self.came.set()

    def _cancelled(self, delivery: Delivery) -> None:
        self.cancels.append(delivery.subject)
        self.came.set()

    def answer(self, asked: Delivery, outcome: HeadraceError | None = None) -> None:
        body = {"choices": [{"text": json.loads(asked.data)["prompt"]}]}
        self.bus.publish(asked.reply, error_reply(outcome, "", "") if outcome else to_json(body))

    async def submit(self, request_id: str, model: str = "m", **more: Any) -> dict[str, Any]:
        body = {"prompt": f"Hi {request_id}", "request_id": request_id, **more}
        return await self.client.request(subjects.submit("public", model), body)

    async def until(self, what: list[Any], count: int = 1) -> None:
        async with asyncio.timeout(60):
            while len(what) < count:
                self.came.clear()
                await self.came.wait()

    async def without_work(self) -> None:
        """Return when its queue is empty: the ack of a request follows the news of its end."""
        async with asyncio.timeout(40):
            while await self.messages(subjects.WORK_STREAM):
                await asyncio.sleep(0.02)

    async def messages(self, stream: str) -> int:
        info = await self.bus.request(f"$JS.API.STREAM.INFO.{stream}", b"", timeout_us=5_000_000)
        return int(json.loads(info.data)["state"]["messages"])


async def linked(edge: Bus) -> None:
    """Return when requests of the edge reach the centre."""
    async with asyncio.timeout(60):
        while True:
            try:
                await edge.request(subjects.forward("public", "result"), b'{"id":"x"}', timeout_us=5_000_000)
            except (NoResponders, RequestTimeout):
                await asyncio.sleep(0.02)
            else:
                return


@pytest.fixture
async def sides(pair: Pair) -> AsyncIterator[tuple[Side, Side]]:
    centre, edge = Side(pair.centre, "m", None), Side(pair.edge, HERE, frozenset([HERE]))
    await centre.open()
    await edge.open()
    await linked(edge.bus)
    yield centre, edge
    await edge.close()
    await centre.close()


STAYS = [
    "hr.f.beat.tokenizer.t", "hr.f.scheduler.s.in.Tokenized", "hr.beat_ask", "headrace.store.state.public.r",
    "headrace.store.check.public.m", "headrace.v1.submit.public.m", "headrace.v1.result.public.r",
    "headrace.v1.delete.public.r", "headrace.v1.keep.public.r", "headrace.v1.done.public.r",
    "headrace.v1.files.public.put", "headrace.v1.batches.public.create", "headrace.v1.status",
    "headrace.v1.trace.r", "headrace.v1.policy.s", "headrace.v1.events.s",
    "headrace.v1.sleep.s", "headrace.v1.load.m",
    f"headrace.v1.generate.public.{HERE}", f"headrace.v1.tokenize.public.{HERE}",
    "_INBOX.public.headrace-keeper.r", "_R.d.r", "$JS.ACK.HR_WORK.tenant-public.1.1.1.1.1", "$SRV.PING",
]  # fmt: skip
PASSES = [
    "headrace.v1.generate.public.m", "headrace.v1.cancel.public.r", "headrace.v1.tokenize.public.m",
    "headrace.v1.attach.public.r", "headrace.v1.models", "headrace.v1.models.public",
    "headrace.v1.forward.public.submit", "_INBOX.abc.1", "_INBOX.public.headrace-gateway.1.2",
]  # fmt: skip


async def test_subjects_of_one_side_do_not_cross_the_link(pair: Pair, sides: tuple[Side, Side]) -> None:
    """Also for a reader of everything, which the servers know by another pattern than those denied."""
    centre, edge = sides
    for sender, reader in ((edge.bus, centre.bus), (centre.bus, edge.bus)):
        read: list[str] = []
        everything = await reader.subscribe(
            ">", lambda m, read=read: read.append(m.subject) if m.data == b"mark" else None
        )
        await reader.flush()
        async with asyncio.timeout(60):
            while PASSES[-1] not in read:  # the other server knows of the reader
                sender.publish(PASSES[-1], b"mark")
                await sender.flush()
                await asyncio.sleep(0.01)
        read.clear()
        for subject in (*STAYS, *PASSES):
            sender.publish(subject, b"mark")
        async with asyncio.timeout(60):
            while not set(PASSES) <= {*read}:
                await asyncio.sleep(0.01)
        assert {*read} & {*STAYS} == set()
        await everything.cancel()


async def test_twenty_requests_survive_a_cut_and_a_death_and_local_ones_do_not_wait(
    pair: Pair, sides: tuple[Side, Side]
) -> None:
    centre, edge = sides
    pair.link.cut()
    for number in range(20):
        assert await edge.submit(f"r{number}") == {"id": f"r{number}", "status": "queued"}
    await edge.submit("here", HERE)
    await edge.until(edge.news)
    assert (edge.news, centre.asked) == ([{"id": "here", "status": "completed"}], [])
    assert (await edge.client.state("r0"))["status"] == "queued"
    pair.edge.process.kill()
    pair.edge.process.wait()
    pair.edge.restart()
    pair.link.accept()
    await edge.until(edge.news, 21)
    assert sorted(each["id"] for each in edge.news[1:]) == sorted(f"r{n}" for n in range(20))
    for number in range(20):
        record = await edge.client.state(f"r{number}")
        assert (record["status"], record["answer"]["choices"]) == (
            "completed", [{"text": f"Hi r{number}"}],
        )  # fmt: skip
    assert len(centre.asked) == 20, "each is computed once"
    assert len(edge.asked) == 1
    assert await edge.messages(subjects.RECORD_STREAM) == 21
    assert await centre.messages(subjects.RECORD_STREAM) == 20
    assert await edge.submit("r0") == {"id": "r0", "status": "completed"}


async def test_the_link_is_cut_while_the_centre_computes(pair: Pair, sides: tuple[Side, Side]) -> None:
    centre, edge = sides
    centre.answers = False
    await edge.submit("r")
    await centre.until(centre.asked)
    await edge.keepers[0].finish(5.0)  # and another keeper takes the request over
    pair.link.cut()
    await edge.keeper()
    centre.answer(centre.asked[0])
    await centre.until(centre.news)
    pair.link.accept()
    await edge.until(edge.news)
    assert edge.news == [{"id": "r", "status": "completed"}]
    assert len(centre.asked) == 1
    await edge.without_work()


async def test_a_cancel_before_the_link_is_back_reaches_no_tokenizer(
    pair: Pair, sides: tuple[Side, Side]
) -> None:
    centre, edge = sides
    pair.link.cut()
    await edge.submit("r")
    edge.client.cancel("r")
    await edge.until(edge.news)
    assert edge.news == [{"id": "r", "status": "cancelled"}]
    pair.link.accept()
    await edge.submit("next")
    await edge.until(edge.news, 2)
    assert [json.loads(each.data)["request_id"] for each in centre.asked] == ["next"]
    await edge.without_work()


async def test_a_cancel_while_the_link_is_down_reaches_the_centre_later(
    pair: Pair, sides: tuple[Side, Side]
) -> None:
    centre, edge = sides
    centre.answers = False
    await edge.submit("r")
    await centre.until(centre.asked)
    pair.link.cut()
    edge.client.cancel("r")
    await edge.until(edge.news)
    assert (await edge.client.state("r"))["status"] == "cancelled"
    assert centre.news == []
    pair.link.accept()
    await centre.until(centre.news)
    assert centre.news == [{"id": "r", "status": "cancelled"}]
    await centre.until(centre.cancels)
    assert subjects.cancel("public", "r") in centre.cancels, "the services have it"
    await edge.without_work()
    assert edge.keepers[0].actor.status()["in_flight"] == 0


@pytest.mark.parametrize(
    ("wrong", "code"), [(BadRequest("`n` is wrong", param="n"), 400), (UnknownModel("?"), None)]
)
async def test_centre_refuses_a_wrong_forward(
    sides: tuple[Side, Side], wrong: HeadraceError, code: int | None
) -> None:
    """An invalid request fails; a fault of the centre is retried."""
    centre, edge = sides
    centre.wrong = wrong
    await edge.submit("r")
    if code is None:
        while not edge.keepers[0].actor.status()["refused"]:
            await asyncio.sleep(0.02)
        centre.wrong = None
    await edge.until(edge.news)
    record = await edge.client.state("r")
    assert (record["status"], record.get("error", {}).get("code")) == (
        "completed" if code is None else "failed", code,
    )  # fmt: skip


async def test_an_id_that_is_taken_there_fails_and_a_full_queue_does_not(
    sides: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    centre, edge = sides
    await centre.submit("r", prompt="another")
    await centre.until(centre.news)
    await edge.submit("r")
    await edge.until(edge.news)
    record = await edge.client.state("r")
    assert (record["status"], record["error"]["code"]) == ("failed", 409)
    full = [Overloaded("full", retry_after_ms=10)]
    before = centre.keepers[0].actor._queues.before  # type: ignore[attr-defined]

    async def refuse_once(tenant: str) -> None:
        if full:
            raise full.pop()
        await before(tenant)

    monkeypatch.setattr(centre.keepers[0].actor._queues, "before", refuse_once)  # type: ignore[attr-defined]
    await edge.submit("later")
    await edge.until(edge.news, 2)
    assert (await edge.client.state("later"))["status"] == "completed"
    assert full == []


async def test_a_request_that_kills_executors_there_fails_here(sides: tuple[Side, Side]) -> None:
    centre, edge = sides
    centre.answers = False
    await edge.submit("r")
    await centre.until(centre.asked)
    centre.answer(centre.asked[0], EngineError("killed three executors"))
    await edge.until(edge.news)
    record = await edge.client.state("r")
    assert (record["status"], record["error"]["message"]) == ("failed", "killed three executors")


async def test_the_centre_loses_its_store_and_gets_the_request_again(sides: tuple[Side, Side]) -> None:
    centre, edge = sides
    centre.answers = False
    await edge.submit("r")
    await centre.until(centre.asked)
    await centre.keepers[0].finish(5.0)
    for stream in (subjects.WORK_STREAM, subjects.RECORD_STREAM):
        await centre.bus.request(f"$JS.API.STREAM.DELETE.{stream}", b"", timeout_us=5_000_000)
    centre.answers = True
    await centre.keeper()
    await edge.until(edge.news)
    assert edge.news == [{"id": "r", "status": "completed"}]


async def test_more_than_wait_in_memory_leave_the_window_to_local_work(
    pair: Pair, sides: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    centre, edge = sides
    monkeypatch.setattr(forwarding, "MOST_HERE", 2)
    pair.link.cut()
    for number in range(6):
        await edge.submit(f"r{number}")
    while edge.keepers[0].actor.status()["refused"] < 3:  # type: ignore[operator]
        await asyncio.sleep(0.02)
    pair.link.accept()
    await edge.until(edge.news, 6)
    assert len(centre.asked) == 6


async def test_forward_refuses_another_form(sides: tuple[Side, Side]) -> None:
    _, edge = sides
    for verb, body in (
        ("submit", b"{}"), ("submit", b'{"model":"m","request":7}'), ("result", b"[]"), ("cancel", b""),
        ("result", b'{"id":7}'), ("keep", b'{"id":"r"}'),
    ):  # fmt: skip
        answer = await edge.bus.request(subjects.forward("public", verb), body, timeout_us=10_000_000)
        assert json.loads(answer.data)["error"]["code"] == 400


async def test_edge_reaches_a_centre_only_with_credentials_and_tls(tmp_path: Path) -> None:
    """What its own configuration denies, and what the centre does even if it denies nothing."""
    self_signed(tmp_path / "ca.pem", tmp_path / "key.pem")
    port, tls = free_port(), auth.tls_of(str(tmp_path / "ca.pem"), str(tmp_path / "key.pem"))
    auth.generate(tmp_path, Plan("tls://nats:4222", "f", ("acme",), tls=tls, leaves=True), print)
    conf = (tmp_path / "nats" / "nats.conf").read_text().splitlines()
    (block,) = [line for line in conf if line.startswith("leafnodes ")]
    listens = block.replace(f"port: {leaf.PORT}", f'listen: "127.0.0.1:{port}"')
    centre = servers.start(extra=f"{credentials.authorization(tmp_path, 'f')}{listens}\n")
    url = credentials.url_of(tmp_path, "leaf", f"tls://127.0.0.1:{port}") + f"?ca={tmp_path / 'ca.pem'}"
    remote = leaf.remote(url, [], has_users=True)
    lawless = "\n".join(line for line in remote.splitlines() if "deny_" not in line)
    edges = [servers.start(extra=extra) for extra in (remote, lawless)]
    tokenizer = await NatsBus.connect(credentials.url_of(tmp_path, "tokenizer", centre.url), timeout_s=30)
    await tokenizer.subscribe("headrace.v1.generate.*.m", lambda m: tokenizer.publish(m.reply, m.data))
    await tokenizer.subscribe("hr.f.tokenizer.*.in.*", lambda m: tokenizer.publish(m.reply, m.data))
    await tokenizer.flush()
    for edge in edges:
        bus = await NatsBus.connect(edge.url.replace("//", "//acme@"), timeout_s=30)
        asked = bus.request(subjects.generate("acme", "m"), b"x", timeout_us=5_000_000)
        async with asyncio.timeout(60):
            while True:
                try:
                    assert (await asked).data == b"x"
                    break
                except NoResponders:
                    await asyncio.sleep(0.02)
                    asked = bus.request(subjects.generate("acme", "m"), b"x", timeout_us=5_000_000)
        with pytest.raises(NoResponders):
            await bus.request("hr.f.tokenizer.t.in.Accepted", b"x", timeout_us=5_000_000)
        read: list[str] = []
        await bus.subscribe(">", lambda m, read=read: read.append(m.subject))
        await bus.flush()
        tokenizer.publish("hr.f.beat.tokenizer.t", b"")
        await bus.request(subjects.generate("acme", "m"), b"x", timeout_us=5_000_000)
        assert not [subject for subject in read if subject.startswith("hr.")]
        await bus.drain()
    await tokenizer.drain()
    for server in (*edges, centre):
        server.stop()


@pytest.mark.parametrize(
    ("edge_has", "centre_has", "prefix"),
    [
        (True, True, "_INBOX"), (True, True, "_INBOX.acme"), (True, False, "_INBOX.acme"),
        (False, True, "_INBOX.acme"),
    ],
)  # fmt: skip
async def test_tenants_have_accounts_at_either_side(
    tmp_path: Path, *, edge_has: bool, centre_has: bool, prefix: str
) -> None:
    port, here, there = free_port(), tmp_path / "edge", tmp_path / "centre"
    auth.generate(here, Plan("nats://nats:4222", "f", ("acme",), accounts=edge_has), print)
    auth.generate(there, Plan("nats://nats:4222", "f", ("acme",), leaves=True, accounts=centre_has), print)
    extra = credentials.authorization(there, "f") + leaf.listen(f"127.0.0.1:{port}", there)
    centre = servers.start(extra=extra)
    url, account = (
        credentials.url_of(there, "leaf", f"nats-leaf://127.0.0.1:{port}"),
        credentials.account_of(here),
    )
    remote = leaf.remote(url, [], has_users=True, account=account)
    edge = servers.start(extra=credentials.authorization(here, "f") + remote)
    tokenizer = await NatsBus.connect(credentials.url_of(there, "tokenizer", centre.url), timeout_s=30)
    gone = asyncio.Event()

    def answer(asked: Delivery) -> None:
        if asked.data == b"left":
            tokenizer.publish(asked.reply, b"x", reply=inbox)
        elif access.can_answer(tokenizer, asked):
            tokenizer.publish(asked.reply, asked.data)

    inbox = tokenizer.new_inbox()
    await tokenizer.subscribe(inbox, lambda _: gone.set())
    await tokenizer.subscribe("headrace.v1.generate.*.m", answer)
    await tokenizer.flush()
    acme = await nats.connect(credentials.url_of(here, "acme", edge.url), inbox_prefix=prefix)
    async with asyncio.timeout(60):
        while True:
            try:
                assert (await acme.request("headrace.v1.generate.acme.m", b"x", 10)).data == b"x"
                break
            except nats.errors.NoRespondersError:
                await asyncio.sleep(0.02)
    await acme.publish("headrace.v1.generate.acme.m", b"left", reply=f"{prefix}.gone.1")
    await asyncio.wait_for(gone.wait(), 20)
    await acme.close()
    await tokenizer.drain()
    edge.stop()
    centre.stop()
