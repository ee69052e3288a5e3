"""A keeper on a real nats-server with its streams on disk, and a tokenizer and a model moved by the test."""

from __future__ import annotations

import asyncio
import json
import resource
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import AsyncMock

import pytest

from services.keeper import actor, queues
from services.keeper.actor import KeeperActor
from services.launcher import nats_server as servers
from services.launcher.nats_server import NatsServer, ServerLimits
from shared.actor.membership import NEEDED
from shared.actor.runtime import Runtime
from shared.api import run_of
from shared.client.client import Client
from shared.clock import SystemClock
from shared.errors import (
    BadRequest,
    Cancelled,
    DuplicateRequest,
    HeadraceError,
    Overloaded,
    PayloadTooLarge,
    Unavailable,
    UnknownModel,
    UnknownRequest,
)
from shared.messages import Heartbeat
from shared.nats import object_store, subjects
from shared.nats.bus import NatsBus
from shared.nats.interface import Delivery, NoResponders
from shared.nats.jetstream import JetStream
from shared.replies import error_reply, to_json
from shared.savepoints import body_hash

BODY = {"prompt": "Hi", "request_id": "r"}


@pytest.fixture
def server() -> Iterator[NatsServer]:
    limits = replace(ServerLimits(), jetstream_memory="16MB", jetstream_file="1GB")
    server = servers.start(limits=limits)
    yield server
    server.stop()


class World:
    """Keepers, a client, and a fleet that answers when and what the test wants."""

    def __init__(self, server: NatsServer) -> None:
        self.server = server
        self.wrong: HeadraceError | None = None  # the tokenizer's verdict
        self.outcomes: list[HeadraceError | None] = []  # of the next requests; None: an answer
        self.asked: list[Delivery] = []
        self.news: list[Any] = []
        self.cancels: list[Delivery] = []
        self.keepers: list[Runtime] = []
        self.came = asyncio.Event()

    async def open(self) -> None:
        self.bus = await NatsBus.connect(self.server.url, timeout_s=30)
        self.client = await Client.open(self.bus)
        await self.bus.subscribe("headrace.store.check.*.m", self._check)
        await self.bus.subscribe("headrace.v1.generate.*.m", self._generate)
        await self.bus.subscribe(
            "headrace.v1.models", lambda d: self.bus.publish(d.reply, b'{"data":[{"id":"m"}]}')
        )
        await self.bus.subscribe("headrace.v1.done.*.*", self._done)
        await self.bus.flush()

    async def keeper(self) -> Runtime:
        bus = await NatsBus.connect(self.server.url, timeout_s=30)
        keeper = Runtime(KeeperActor(), bus, "f", f"k{len(self.keepers)}")
        await keeper.start()
        self.keepers.append(keeper)
        return keeper

    async def opened(self) -> Runtime:
        """A keeper that has made the streams."""
        keeper = await self.keeper()
        async with asyncio.timeout(60):
            while True:
                try:
                    await self.result("no such id")
                except UnknownModel:
                    return keeper
                except Unavailable:
                    await asyncio.sleep(0.01)

    async def close(self) -> None:
        for keeper in self.keepers:
            await keeper.finish(5.0)
        await self.bus.drain()

    def _check(self, delivery: Delivery) -> None:
        body = to_json({"seed": 7, "slo_class": "standard"})
        self.bus.publish(delivery.reply, body if self.wrong is None else error_reply(self.wrong, "", ""))

    def _generate(self, delivery: Delivery) -> None:
        self.asked.append(delivery)
        self._notify()
        if self.outcomes:
            self.answer(delivery, self.outcomes.pop(0))

    def _done(self, delivery: Delivery) -> None:
        self.news.append(json.loads(delivery.data))
        self._notify()

    def _notify(self) -> None:
        self.came.set()

    def answer(self, asked: Delivery, outcome: HeadraceError | None = None) -> None:
        body = {"choices": [{"text": json.loads(asked.data)["prompt"]}]}
        self.bus.publish(asked.reply, error_reply(outcome, "", "") if outcome else to_json(body))

    async def submit(self, **more: Any) -> dict[str, Any]:
        return await self.client.request(subjects.submit("public", "m"), {**BODY, **more})

    async def result(self, request_id: str = "r") -> dict[str, Any]:
        return await self.client.request(subjects.result("public", request_id))

    async def until(self, what: list[Any], count: int = 1) -> None:
        async with asyncio.timeout(60):
            while len(what) < count:
                self.came.clear()
                await self.came.wait()

    def ready(self, keeper: Runtime, *kinds: str) -> None:
        """A keeper gets the heartbeat of a service of each of these kinds."""
        for kind in kinds:
            beat = Heartbeat(
                kind=kind, actor=kind, host_id="h", state="ready", model="m", interval_us=60_000_000
            )
            keeper.mailbox.peers.update(1, beat, keeper.clock.now_us())

    def scheduler(self, keeper: Runtime, digest: str) -> None:
        """A keeper gets heartbeats of executors with this digest."""
        beat = Heartbeat(
            kind="scheduler", actor="s", host_id="h", state="ready", model="m", model_digest=digest
        )
        keeper.mailbox.peers.update(1, beat, keeper.clock.now_us())

    async def messages(self, stream: str) -> int:
        info = await self.bus.request(f"$JS.API.STREAM.INFO.{stream}", b"", timeout_us=5_000_000)
        return int(json.loads(info.data)["state"]["messages"])


@pytest.fixture
async def world(server: NatsServer) -> AsyncIterator[World]:
    world = World(server)
    await world.open()
    yield world
    await world.close()


def test_a_heartbeat_may_come_before_the_server_has_answered() -> None:
    KeeperActor().upkeep()


async def test_a_keeper_without_parts_answers_durable_requests_alone(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actor, "PARTS", ())
    world.outcomes = [None]
    keeper = await world.opened()
    with pytest.raises(BadRequest, match="this fleet calls none"):
        await world.submit(webhook="https://a.example/")
    await world.submit()
    await world.until(world.news)
    assert (await world.result())["answer"] == {"choices": [{"text": BODY["prompt"]}]}
    for subject in (subjects.files("public", "list"), subjects.batches("public", "list")):
        with pytest.raises(NoResponders):
            await world.client.request(subject)
    assert keeper.actor.status().keys() >= {"queued", "stored"}


async def test_a_request_is_sent_as_it_was_stored_and_its_record_is_kept(world: World) -> None:
    await world.opened()
    assert await world.submit() == {"id": "r", "status": "queued"}
    await world.until(world.asked)
    sent = json.loads(world.asked[0].data)
    assert sent == {
        **BODY, "seed": 7, "slo_class": "standard", "timeout_s": 86_400, "finish_detached": True,
    }  # fmt: skip
    assert (await world.result())["status"] == "running"
    assert world.keepers[0].actor.status()["queued"] == 1, "until it has ended"
    world.answer(world.asked[0])
    await world.until(world.news)
    assert world.news == [{"id": "r", "status": "completed"}]
    record = await world.result()
    assert (record["status"], record["answer"]) == ("completed", {"choices": [{"text": "Hi"}]})
    assert await world.submit() == {"id": "r", "status": "completed"}
    with pytest.raises(DuplicateRequest):
        await world.submit(prompt="Ho")
    assert await world.messages(subjects.RECORD_STREAM) == 1
    with pytest.raises(UnknownModel):
        await world.client.request(subjects.result("acme", "r"))


@pytest.mark.parametrize(
    ("before", "after", "changed"), [("aa", "bb", True), ("aa", "aa", False), ("aa", "", False)]
)
async def test_record_names_the_other_model_that_answered(
    world: World, before: str, after: str, changed: bool
) -> None:
    first = await world.opened()
    world.scheduler(first, before)
    await world.submit()
    await world.until(world.asked)
    await first.finish(5.0)
    second = await world.keeper()
    world.scheduler(second, after)
    await world.until(world.asked, 2)
    world.answer(world.asked[1])
    await world.until(world.news)
    record = await world.result()
    assert (record["status"], record.get("model_changed", False)) == ("completed", changed)


async def test_a_request_goes_on_after_its_savepoint_which_then_goes(world: World) -> None:
    first = await world.opened()
    asked = await world.bus.request(f"$JS.API.STREAM.INFO.{subjects.STATE_STREAM}", b"", timeout_us=5_000_000)
    config = json.loads(asked.data)["config"]
    assert (config["max_msgs_per_subject"], config["discard"], config["max_age"]) == (1, "old", 3_600 * 10**9)
    resumed: list[Delivery] = []

    def on_resume(delivery: Delivery) -> None:
        resumed.append(delivery)
        world.came.set()

    await world.bus.subscribe("headrace.store.resume.*.m", on_resume)
    await world.submit(durable="tokens")
    await world.until(world.asked)
    sent = world.asked[0].data
    for data in (b"an old version", f"1 {body_hash(sent)}\nids".encode()):  # the last one counts
        await JetStream(world.bus).replace(subjects.state("public", "r"), data)
    await first.finish(5.0)
    await world.keeper()
    await world.until(resumed)
    assert (resumed[0].data, resumed[0].reply) == (data, world.asked[0].reply)
    assert len(world.asked) == 1
    world.answer(resumed[0]._replace(data=sent))
    await world.until(world.news)
    assert (await world.result())["status"] == "completed"
    await world.keepers[1].finish(5.0)
    assert await world.messages(subjects.STATE_STREAM) == 0


KEEP = {"path": "/v1/responses", "response": {"metadata": {"a": "b"}}}


async def test_http_fields_are_kept_and_not_sent(world: World) -> None:
    await world.opened()
    await world.submit(keep=KEEP)
    await world.until(world.asked)
    sent = json.loads(world.asked[0].data)
    assert "keep" not in sent
    waiting = await world.client.state("r")
    assert (waiting["status"], waiting["keep"], waiting["request"]) == ("running", KEEP, sent)
    world.answer(world.asked[0])
    await world.until(world.news)
    ended = await world.client.state("r")
    assert (ended["status"], ended["keep"], ended["request"]) == ("completed", KEEP, sent)
    assert (await world.submit(keep=KEEP))["status"] == "completed"
    with pytest.raises(DuplicateRequest):
        await world.submit(keep={**KEEP, "path": "other"})
    with pytest.raises(BadRequest, match="`keep` is not an object"):
        await world.submit(keep=[1], request_id="other")


async def test_a_record_with_its_request_fits_into_a_message(world: World) -> None:
    await world.opened()
    most = world.bus.max_payload
    with pytest.raises(PayloadTooLarge, match="no room for its record"):
        await world.submit(keep=KEEP, prompt="x" * (most - 3_000))
    await world.submit(keep=KEEP, prompt="x" * (most // 2 + 3_000))  # the answer repeats it
    await world.until(world.asked)
    world.answer(world.asked[0])
    await world.until(world.news)
    state = await world.client.state("r")
    assert (state["status"], state["error"]["code"], state["keep"]) == ("failed", 413, KEEP)


async def test_an_answered_response_is_kept_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    await world.opened()
    answered = {"model": "m", "request": BODY, "keep": KEEP, "answer": {"choices": [{"text": "Hi"}]}}

    async def keep(request_id: str, **more: Any) -> dict[str, Any]:
        return await world.client.request(subjects.keep("public", request_id), {**answered, **more})

    assert await keep("k") == {"id": "k", "status": "completed"}
    state = await world.client.state("k")
    assert {name: state[name] for name in answered} == answered
    with pytest.raises(DuplicateRequest):
        await keep("k", answer={"choices": []})
    wrongs: list[dict[str, Any]] = [{"answer": None}, {"keep": []}, {"request": 1}]
    for wrong in wrongs:
        with pytest.raises(BadRequest):
            await keep("other", **wrong)
    with pytest.raises(UnknownModel):
        await world.client.as_tenant("acme").state("k")
    monkeypatch.setattr("services.keeper.verbs.SIZE_POLL_US", -1_000_000)  # at each call
    monkeypatch.setattr(JetStream, "room", room := AsyncMock(return_value=(51, 100)))
    with pytest.raises(Overloaded, match="half full") as full:
        await keep("late")
    assert full.value.retry_after_ms > 0
    room.return_value = (50, 100)
    assert (await keep("late"))["status"] == "completed"


async def test_an_invalid_request_is_refused_before_it_is_stored(world: World) -> None:
    await world.opened()
    world.wrong = BadRequest("`n` is wrong", param="n")
    with pytest.raises(BadRequest, match="`n` is wrong") as caught:
        await world.submit()
    assert caught.value.param == "n"
    for wrong in ({"request_id": "a b"}, {"request_id": 7}, {"stream": True}):
        with pytest.raises(BadRequest):
            await world.submit(**wrong)
    with pytest.raises(UnknownModel, match="ask for one of: m"):
        await world.client.request(subjects.submit("public", "other"), BODY)
    for junk in (b"", b"[]", b"\xff", b'"x"', b"{" * 100_000):
        answer = await world.bus.request(subjects.submit("public", "m"), junk, timeout_us=10_000_000)
        assert json.loads(answer.data)["error"]["code"] == 400
    assert await world.messages(subjects.WORK_STREAM) == 0
    assert world.asked == []


async def test_overlong_name_is_an_error(world: World) -> None:
    await world.opened()
    submit, result = subjects.submit("public", "m" * 129), subjects.result("public", "r" * 129)
    for subject, param in ((submit, "model"), (result, "id")):
        with pytest.raises(BadRequest, match="too long: a name has at most 128 characters") as caught:
            await world.client.request(subject, BODY)
        assert caught.value.param == param


async def test_a_hundred_submits_of_one_id_are_one_request(world: World) -> None:
    await world.opened()
    await world.keeper()
    world.outcomes = [None] * 200
    answers = await asyncio.gather(*(world.submit() for _ in range(100)))
    assert {answer["id"] for answer in answers} == {"r"}
    await world.until(world.news)
    await world.submit()
    assert (len(world.asked), await world.messages(subjects.RECORD_STREAM)) == (1, 1)


async def test_another_keeper_gets_the_answer_of_what_already_runs(world: World) -> None:
    first = await world.opened()
    await world.submit()
    await world.until(world.asked)
    await first.finish(5.0)
    await world.keeper()
    await world.until(world.asked, 2)
    assert world.asked[1].reply == world.asked[0].reply, "the services would start it a second time"
    assert world.asked[1].data == world.asked[0].data
    runs = [run_of(each.headers) for each in world.asked[:2]]
    assert runs == [1, 65], "if the first run is lost, its readers must not go on in the second"
    world.answer(world.asked[0])
    await world.until(world.news)
    assert (await world.result())["status"] == "completed"


async def test_a_request_runs_also_for_a_keeper_that_does_not_have_it(world: World) -> None:
    await world.opened()
    await world.submit()
    await world.until(world.asked)
    second = await world.keeper()
    async with asyncio.timeout(60):
        while len(second.mailbox.peers.ready("keeper")) < 2:
            await asyncio.sleep(0.01)
    assert [(await world.result())["status"] for _ in range(20)] == ["running"] * 20  # both have answered
    verbs = second.actor._verbs  # type: ignore[attr-defined]  # the queue group could choose the other one
    assert (await verbs.result("public", "r"))["status"] == "running"
    with pytest.raises(UnknownRequest):
        await verbs.result("acme", "r")


async def test_a_refused_request_is_tried_again(world: World) -> None:
    keeper = await world.opened()
    world.ready(keeper, *NEEDED)
    world.outcomes = [Unavailable("no executor"), Overloaded("full", retry_after_ms=100), None]
    await world.submit()
    await world.until(world.news)
    assert len(world.asked) == 3
    assert (await world.result())["status"] == "completed"


class SetClock(SystemClock):
    """A wall clock that a test may set."""

    ahead_us = 0

    def wall_us(self) -> int:
        return super().wall_us() + self.ahead_us


@pytest.mark.parametrize("days", [2, -2])
async def test_keeper_fails_no_waiting_request_when_its_clock_is_set(world: World, days: int) -> None:
    """An edge device without a battery clock does that when its link comes."""
    keeper = await world.opened()
    world.ready(keeper, *NEEDED)
    clock = keeper.clock = keeper.mailbox.clock = SetClock()
    world.outcomes = [Unavailable("no executor")] * 8
    for number in range(8):
        await world.submit(request_id=f"r{number}")
    await world.until(world.asked, 8)
    clock.ahead_us = days * 86_400_000_000
    world.outcomes = [None] * 8
    await world.until(world.news, 8)
    assert {each["status"] for each in world.news} == {"completed"}


async def test_keeper_tries_one_request_without_an_executor_and_the_others_once_it_is_there(
    world: World,
) -> None:
    keeper = await world.opened()
    world.ready(keeper, *NEEDED[:2], NEEDED[3])
    world.outcomes = [Unavailable("no executor")]
    await world.submit()
    core = keeper.actor._core  # type: ignore[attr-defined]  # no message has it
    async with asyncio.timeout(60):
        while not core.held_models:
            await asyncio.sleep(0.01)
    names = [f"r{i}" for i in range(20)]
    for name in names:
        await world.submit(request_id=name)
    async with asyncio.timeout(60):
        while core.held_back < 20:
            await asyncio.sleep(0.01)
    assert len(world.asked) == 1
    world.outcomes = [None] * 21
    world.ready(keeper, "executor")
    await world.until(world.news, 21)
    assert {asked["id"] for asked in world.news} == {"r", *names}


async def test_waiting_request_is_cancelled_and_never_submitted(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.keeper.core.WINDOW", 1)
    await world.opened()
    await world.keeper()
    for name in ("first", "second", "third", "fourth"):  # two keepers have one each
        await world.submit(request_id=name)
    await world.until(world.asked, 2)
    for name in ("fourth", "no such id"):
        world.client.cancel(name)
    await world.until(world.news)
    assert world.news == [{"id": "fourth", "status": "cancelled"}]
    with pytest.raises(Cancelled):
        await world.result("fourth")
    world.client.cancel("first")  # runs: the services end it, and what they answer changes nothing
    await world.until(world.news, 2)
    world.outcomes = [None]
    for asked in world.asked[:2]:
        world.answer(asked)
    await world.until(world.news, 4)
    assert {n["id"]: n["status"] for n in world.news} == {
        "first": "cancelled", "second": "completed", "third": "completed", "fourth": "cancelled",
    }  # fmt: skip
    async with asyncio.timeout(60):
        while await world.messages(subjects.WORK_STREAM):
            await asyncio.sleep(0.05)
    assert [json.loads(asked.data)["request_id"] for asked in world.asked].count("fourth") == 0


async def test_a_deleted_request_is_gone_and_never_computed_again(world: World) -> None:
    """Only requests of its tenant; one that runs is cancelled, and its late answer changes nothing."""
    keeper = await world.opened()
    world.outcomes = [None]
    await world.submit(request_id="ended")
    await world.until(world.news)
    await world.submit(request_id="runs")
    await world.until(world.asked, 2)
    cancelled = await world.bus.subscribe("headrace.v1.cancel.public.runs", world.cancels.append)
    for name in ("ended", "runs"):
        with pytest.raises(UnknownModel):  # the 404 of any kind
            await world.client.request(subjects.delete("other", name))
        deleted = await world.client.request(subjects.delete("public", name))
        assert deleted == {"id": name, "deleted": True}
    await world.until(world.news, 2)
    assert world.news[1] == {"id": "runs", "status": "cancelled"}
    assert len(world.cancels) == 1
    await cancelled.cancel()
    await keeper.finish(5.0)  # it has the request in flight: the next one has it delivered again
    world.keepers.clear()
    await world.opened()
    world.answer(world.asked[1])
    async with asyncio.timeout(60):
        while await world.messages(subjects.WORK_STREAM):
            await asyncio.sleep(0.05)
    assert len(world.asked) == 2
    for name in ("ended", "runs"):
        for verb in (subjects.result, subjects.delete):
            with pytest.raises(UnknownModel):
                await world.client.request(verb("public", name))
        with pytest.raises(DuplicateRequest):
            await world.submit(request_id=name)


async def test_a_tenant_with_many_requests_does_not_hold_up_another(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.keeper.core.WINDOW", 8)
    await world.opened()
    for number in range(40):
        await world.submit(request_id=f"r{number}")
    await world.until(world.asked, 8)
    await world.client.request(subjects.submit("acme", "m"), {**BODY, "request_id": "acme"})
    world.outcomes = [None] * 100
    for asked in world.asked[:8]:
        world.answer(asked)
    await world.until(world.news, 41)
    order = [json.loads(asked.data)["request_id"] for asked in world.asked]
    assert order.index("acme") < 20


async def test_above_half_a_stream_a_tenant_has_its_share(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.keeper.queues.SHARED_OUT", 4)
    await world.opened()
    for number in range(4):
        await world.submit(request_id=f"r{number}")
    with pytest.raises(Overloaded, match="4 durable requests wait, 4 of them yours") as caught:
        await world.submit(request_id="r4")
    assert caught.value.retry_after_ms > 0
    for number in range(2):
        await world.client.request(subjects.submit("acme", "m"), {**BODY, "request_id": f"r{number}"})
    with pytest.raises(Overloaded):
        await world.client.request(subjects.submit("acme", "m"), {**BODY, "request_id": "r2"})


async def test_work_without_a_consumer_and_one_of_an_earlier_version_are_taken_over(world: World) -> None:
    first = await world.opened()
    await world.submit()
    await world.until(world.asked)
    await first.finish(5.0)
    streams = JetStream(world.bus)
    for consumer in await streams.consumers(subjects.WORK_STREAM):
        await streams.delete_consumer(subjects.WORK_STREAM, consumer["name"])
    await streams.make_consumer(subjects.WORK_STREAM, queues.EARLIER, {"ack_policy": "explicit"})
    world.outcomes = [None]
    await world.keeper()
    await world.until(world.news)
    assert world.news == [{"id": "r", "status": "completed"}]


@pytest.mark.parametrize("kind", ["mirror", "sources", "filtered", "consumer"])
async def test_another_reader_of_the_work_queue_is_named_and_nothing_is_accepted_until_it_is_gone(
    world: World, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """A mirror takes requests without a consumer out of the queue. What was accepted before is computed."""
    monkeypatch.setattr(queues, "CONSUMERS_POLL_S", 0.05)
    keeper, streams = await world.opened(), JetStream(world.bus)
    await world.submit(request_id="before")
    await world.until(world.asked)
    work = {"name": subjects.WORK_STREAM}
    part = [{**work, "filter_subject": subjects.work_of("absent")}]
    config: dict[str, dict[str, Any]] = {
        "mirror": {"mirror": work},
        "sources": {"sources": [work]},
        "filtered": {"sources": part},
    }
    if kind == "consumer":
        mine = {"ack_policy": "explicit", "filter_subject": subjects.work_of("absent")}
        await streams.make_consumer(subjects.WORK_STREAM, "mine", mine)
    else:
        await streams.make_stream("BACKUP", {"storage": "file", **config[kind]})
    reader = "consumer mine" if kind == "consumer" else "stream BACKUP"
    async with asyncio.timeout(60):
        while not keeper.actor.status()["taken_by"]:
            await asyncio.sleep(0.01)
    with pytest.raises(Unavailable, match=f"^{reader} takes durable requests out of HR_WORK: the operator"):
        await world.submit()
    assert keeper.actor.status()["taken_by"] == reader
    world.answer(world.asked[0])
    await world.until(world.news)
    assert world.news == [{"id": "before", "status": "completed"}]
    if kind == "consumer":
        await streams.delete_consumer(subjects.WORK_STREAM, "mine")
    else:
        await world.bus.request("$JS.API.STREAM.DELETE.BACKUP", b"", timeout_us=5_000_000)
    async with asyncio.timeout(60):
        while keeper.actor.status()["taken_by"]:
            await asyncio.sleep(0.01)
    assert (await world.submit())["status"] == "queued"


async def test_a_request_is_stored_while_its_consumer_cannot_be_made_and_is_computed_later(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cluster may have a leader of the stream, and none of consumers."""
    make, tries = JetStream.make_consumer, 0

    async def without_leader(streams: JetStream, stream: str, name: str, config: Any) -> None:
        nonlocal tries
        tries += 1
        if tries <= 3:
            raise Unavailable("JetStream has not answered: try again", retry_after_ms=1_000)
        await make(streams, stream, name, config)

    await world.opened()
    monkeypatch.setattr(JetStream, "make_consumer", without_leader)
    assert (await world.submit())["status"] == "queued"
    world.outcomes = [None]
    await world.until(world.asked)
    world.answer(world.asked[0])
    await world.until(world.news)
    assert world.news == [{"id": "r", "status": "completed"}]
    assert tries > 3


async def test_an_error_of_the_request_is_its_record(world: World) -> None:
    await world.opened()
    world.outcomes = [BadRequest("no more room", param="max_tokens")]
    await world.submit()
    await world.until(world.news)
    assert world.news == [{"id": "r", "status": "failed"}]
    with pytest.raises(BadRequest, match="no more room"):
        await world.result()


async def test_a_full_stream_refuses_and_loses_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    streams = {**actor.STREAMS, subjects.WORK_STREAM: {**actor.STREAMS[subjects.WORK_STREAM], "max_msgs": 2}}
    monkeypatch.setattr(actor, "STREAMS", streams)
    await world.opened()
    for name in ("a", "b"):
        await world.submit(request_id=name)
    with pytest.raises(Overloaded) as caught:
        await world.submit(request_id="c")
    assert caught.value.retry_after_ms > 0
    await world.until(world.asked, 2)
    for asked in world.asked:
        world.answer(asked)
    await world.until(world.news, 2)
    assert [(await world.result(name))["status"] for name in ("a", "b")] == ["completed"] * 2
    with pytest.raises(UnknownModel):
        await world.result("c")


async def test_writes_that_a_full_disk_leaves_unanswered_are_a_fact_until_the_server_is_back(
    world: World,
) -> None:
    keeper = await world.opened()
    await world.submit(request_id="a")
    await world.until(world.asked)  # all streams are made, and the tenant has its consumer
    assert keeper.actor.status()["unwritten"] == {}
    # As with a full disk, the next write fails. A server that is started again has no such limit.
    resource.prlimit(world.server.process.pid, resource.RLIMIT_FSIZE, (1, resource.RLIM_INFINITY))
    tries = list[bytes]()
    subscription = await world.bus.subscribe(subjects.work("public", "b"), lambda d: tries.append(d.data))
    await world.bus.flush()
    with pytest.raises(Unavailable, match=r"has not answered .* its disk is perhaps full"):
        await world.submit(request_id="b")
    assert len(tries) == 2
    await subscription.cancel()
    found: Any = keeper.actor.status()["unwritten"]
    (work,) = found.values()
    assert [*found] == ["headrace.store.work"]
    assert work["for_s"] > work["tried_ago_s"] >= 0
    assert "JetStream has not answered" in work["why"]
    world.server.process.kill()
    world.server.process.wait()
    world.server.restart()
    async with asyncio.timeout(60):
        while keeper.actor.status()["unwritten"]:
            await asyncio.sleep(0.01)


async def test_the_nats_server_is_killed_while_requests_run(world: World) -> None:
    await world.opened()
    for number in range(5):
        await world.submit(request_id=f"r{number}")
    await world.until(world.asked, 5)
    back = asyncio.Event()
    world.bus.on_fault(lambda fault: back.set() if fault.kind == "reconnected" else None)
    world.server.process.kill()
    world.server.process.wait()
    world.server.restart()
    await asyncio.wait_for(back.wait(), 20)
    world.outcomes = [None] * 20  # of requests whose answer is lost, since their keeper is not back yet
    for asked in world.asked[:5]:
        world.answer(asked)
    async with asyncio.timeout(60):
        for number in range(5):
            while True:
                try:
                    if (await world.result(f"r{number}"))["status"] == "completed":
                        break
                except HeadraceError:
                    pass
                await asyncio.sleep(0.05)
    assert await world.messages(subjects.RECORD_STREAM) == 5


def actor_of(keeper: Runtime) -> KeeperActor:
    assert isinstance(keeper.actor, KeeperActor)
    return keeper.actor


@pytest.mark.parametrize("stream", ["HR_WORK", "HR_DONE", "HR_FILES", "HR_STATE"])
async def test_a_stream_that_is_removed_is_made_again(
    world: World, monkeypatch: pytest.MonkeyPatch, stream: str
) -> None:
    """Without a restart of the keeper; the error names the stream, and the status shows it."""
    monkeypatch.setitem(object_store.STREAM, "max_bytes", 67_108_864)
    keeper = await world.opened()
    world.ready(keeper, *NEEDED)
    await world.submit(request_id="before")
    await world.until(world.asked)
    assert keeper.actor.status()["removed"] == {}
    await world.bus.request(f"$JS.API.STREAM.DELETE.{stream}", b"", timeout_us=5_000_000)
    if stream == "HR_DONE":
        with pytest.raises(Unavailable, match="there is no stream HR_DONE now"):
            await world.result("before")
    if stream == "HR_FILES":
        with pytest.raises(Unavailable, match="there is no stream HR_FILES now"):
            await world.client.request(subjects.files("public", "list"), {})
    if stream in ("HR_FILES", "HR_STATE"):
        actor_of(keeper)._made.lacking.set()  # as the next look finds it, sooner
    async with asyncio.timeout(30):
        while stream not in actor_of(keeper)._made.facts():
            await asyncio.sleep(0.02)
    world.outcomes = [None]
    async with asyncio.timeout(30):
        while True:
            try:
                await world.submit(request_id="after", prompt="again")
                break
            except Unavailable:
                await asyncio.sleep(0.05)
    removed: Any = keeper.actor.status()["removed"]
    assert [*removed] == [stream]
    while not any(each["id"] == "after" for each in world.news):
        await world.until(world.news, len(world.news) + 1)
    assert (await world.result("after"))["status"] == "completed"


async def test_a_consumer_that_is_removed_is_made_again(world: World) -> None:
    keeper = await world.opened()
    world.ready(keeper, *NEEDED)
    world.outcomes = [None, None]
    await world.submit(request_id="before")
    await world.until(world.news)
    subject = "$JS.API.CONSUMER.DELETE.HR_WORK.tenant-public"
    removed = await world.bus.request(subject, b"", timeout_us=5_000_000)
    assert json.loads(removed.data)["success"]
    await world.submit(request_id="after")
    await world.until(world.news, 2)


async def test_keeper_refuses_with_the_reason_and_lives_on_without_jetstream(
    nats_server: NatsServer,
) -> None:
    world = World(nats_server)
    await world.open()
    keeper = await world.keeper()
    with pytest.raises(Unavailable, match="has no JetStream"):
        await world.submit()
    with pytest.raises(Unavailable, match="has no JetStream"):
        await world.result()
    assert (keeper.state, keeper.failure) == ("ready", None)
    await world.close()
