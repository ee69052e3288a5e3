"""Tokenizer and detokenizer as actors over an in-process bus, with a scheduler that answers by hand."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Literal

import pytest
from support.memory_bus import MemoryBroker, MemoryBus
from support.text_models import write_bpe_gguf, write_hf_folder
from support.virtual_loop import FakeClock

from services.detokenizer import actor as detokenizer
from services.tokenizer import actor as tokenizer
from services.tokenizer import core, queries
from shared.actor.mailbox import Mailbox
from shared.actor.runtime import Actor, HeartbeatPayload, Runtime
from shared.config import Settings
from shared.messages import (
    Accepted,
    Cancel,
    Close,
    Detached,
    Ended,
    Message,
    Open,
    Rejected,
    Tokenized,
    Tokens,
    ints,
)
from shared.nats import access, subjects
from shared.nats.interface import Delivery, NoResponders

TRACE = "00-0123456789abcdef0123456789abcdef-0123456789abcdef-01"
CHAT = {"messages": [{"role": "user", "content": "Hi"}]}


class HandScheduler(Actor):
    """Accepts everything, sends the prompt back as the answer, two tokens a step."""

    kind = "scheduler"

    def __init__(self, seq: int = 0) -> None:
        self.got: list[Message] = []
        self.tokenized: list[tuple[Tokenized, str]] = []
        self.refuse = False
        self.hold = False
        self.keeps = False  # leaves each request with its detokenizer
        self.seq = seq

    async def start(self, mailbox: Mailbox) -> None:
        self.mailbox = mailbox

    def heartbeat_payload(self) -> HeartbeatPayload:
        return HeartbeatPayload(model="tiny")

    def receive(self, source: str, message: Message, trace: str) -> None:
        self.got.append(message)
        if not isinstance(message, Tokenized):
            return
        self.tokenized.append((message, trace))
        key = {"tenant": message.tenant, "request": message.request, "attempt": message.attempt}
        if self.refuse:
            self.mailbox.send(source, Rejected(**key, code=429, message="full", retry_after_ms=9))
            return
        self.mailbox.send(source, Accepted(**key))
        self.seq += 1
        if message.generated:
            self.go_on(source, message, trace)
            return
        shard = self.mailbox.peers.ready("detokenizer")[0]
        self.answer(f"detokenizer.{shard}", message, trace, self.seq)

    def go_on(self, shard: str, asked: Tokenized, trace: str) -> None:
        """Nothing is left to generate."""
        (count,) = asked.generated
        opened = Open(
            seq=self.seq, request=asked.request, attempt=asked.attempt, tenant=asked.tenant,
            model=asked.model, inbox=asked.inbox, stream=asked.stream, format=asked.format,
            tokens=asked.tokens[-count:],
        )  # fmt: skip
        self.mailbox.send(shard, opened, trace)
        self.mailbox.send(shard, Close(seq=self.seq, final=count, reason="length"))

    def answer(self, shard: str, asked: Tokenized, trace: str, seq: int) -> None:
        opened = Open(
            seq=seq, request=asked.request, attempt=asked.attempt, tenant=asked.tenant, model=asked.model,
            inbox=asked.inbox,
            stream=asked.stream, format=asked.format, stop=asked.stop, prompt_tokens=len(asked.tokens),
        )  # fmt: skip
        self.mailbox.send(shard, opened, trace)
        for at in range(0, len(asked.tokens), 2):
            ids = asked.tokens[at : at + 2]
            step = Tokens(
                executor="e", step=at, seqs=ints([seq]), first=ints([at]), counts=ints([len(ids)]), ids=ids
            )
            self.mailbox.send(shard, step)
        if self.keeps:
            self.mailbox.send(shard, asked, trace)
        if not self.hold:
            self.mailbox.send(shard, Close(seq=seq, final=len(asked.tokens), reason="length"))


class World:
    """One of each, and a client."""

    def __init__(
        self, broker: MemoryBroker, settings: Settings, stack: AsyncExitStack, *, guarded: bool = False
    ) -> None:
        """`guarded`: each service has credentials of its own."""
        self.broker = broker
        self._guarded = guarded
        self.settings = settings
        self.client: MemoryBus = broker.connect()
        self._stack = stack

    async def run(self, actor: Actor, name: str) -> Runtime:
        user = access.user_of(actor.kind) if self._guarded else ""
        runtime = Runtime(actor, self.broker.connect(user), "fleet", name)
        await runtime.start()
        self._stack.push_async_callback(runtime.finish, 1.0)
        await self.broker.settle()
        return runtime

    async def ask(self, subject: str, body: dict[str, Any] | bytes) -> Delivery:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await self.client.request(subject, data, timeout_us=5_000_000, headers={"traceparent": TRACE})

    async def stream(self, body: dict[str, Any]) -> list[Delivery]:
        got: list[Delivery] = []
        ended = asyncio.Event()

        def on_frame(delivery: Delivery) -> None:
            got.append(delivery)
            if "Headrace-End" in delivery.headers:
                ended.set()

        inbox = self.client.new_inbox()
        await self.client.subscribe(inbox, on_frame)
        subject = subjects.generate("public", "tiny")
        self.client.publish(subject, json.dumps({**body, "stream": True}).encode(), reply=inbox)
        await asyncio.wait_for(ended.wait(), 5)
        return got


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    path = write_bpe_gguf(tmp_path_factory.mktemp("text") / "tiny.gguf")
    return Settings(model=str(path), cache_dir=Path("/nowhere"))


@pytest.fixture
async def world(settings: Settings) -> AsyncIterator[World]:
    async with AsyncExitStack() as stack:
        yield World(MemoryBroker(), settings, stack)


@pytest.fixture
async def scheduler(world: World) -> HandScheduler:
    await world.run(tokenizer.build(world.settings), "t1")
    await world.run(detokenizer.build(world.settings), "d1")
    actor = HandScheduler()
    await world.run(actor, "s1")
    return actor


async def test_a_plain_request_and_its_trace(world: World, scheduler: HandScheduler) -> None:
    reply = await world.ask(subjects.generate("acme", "tiny"), {**CHAT, "request_id": "r9"})
    body = json.loads(reply.data)
    assert body["choices"][0]["message"]["content"] == "user\nHi\nassistant\n"
    assert (body["id"], body["choices"][0]["finish_reason"]) == ("r9", "length")
    assert reply.headers == {"Headrace-End": "1", "traceparent": TRACE}
    ((asked, trace),) = scheduler.tokenized
    assert (asked.tenant, asked.request, trace) == ("acme", "r9", TRACE)
    assert asked.sent_wall_us >= asked.received_wall_us > 0
    async with asyncio.timeout(60):
        while len(scheduler.got) < 2:  # the last frame leaves before it gets the end
            await asyncio.sleep(0)
    (ended,) = scheduler.got[1:]
    assert isinstance(ended, Ended)
    assert (ended.seq, ended.index, ended.reason) == (1, len(asked.tokens), "length")
    assert 0 < ended.first_wall_us <= ended.built_wall_us <= ended.sent_wall_us


async def test_models_stated_defaults_apply_to_each_request(world: World, tmp_path: Path) -> None:
    """Also of one that is stored: sent again to a model that states others, it is the same."""
    folder = write_hf_folder(tmp_path / "m")
    (folder / "generation_config.json").write_text('{"temperature": 0.25, "top_k": 9}')
    cases: tuple[tuple[Literal["auto", "none"], str], ...] = (
        ("auto", "temperature 0.25, top_k 9"),
        ("none", "temperature 1, as nothing is stated"),
    )
    for how, stated in cases:
        named = {"model": str(folder), "model_name": how, "cache_dir": Path("/nowhere")}
        built = tokenizer.build(Settings(**named, generation_config=how))
        await world.run(built, how)
        assert built.status()["sampling"] == stated
    asked = {**CHAT, "top_k": 3, "seed": 1}
    kept = json.loads((await world.ask(subjects.check("public", "auto"), asked)).data)
    assert kept == {"seed": 1, "slo_class": "standard", "temperature": 0.25, "top_k": 3}
    plain = json.loads((await world.ask(subjects.check("public", "none"), asked)).data)
    assert plain == {"seed": 1, "slo_class": "standard"}


async def test_stream_delivers_its_frames_in_order(world: World, scheduler: HandScheduler) -> None:
    got = await world.stream({**CHAT, "stop": ["ant"]})
    frames = [json.loads(delivery.data) for delivery in got]
    assert [frame["frame"] for frame in frames] == list(range(len(frames)))
    assert (frames[0]["type"], frames[-1]["type"]) == ("accepted", "done")
    text = "".join(c["delta"]["content"] for f in frames[1:-1] for c in f["choices"])
    assert text == "user\nHi\nassist"
    assert frames[-1]["choices"][0]["finish_reason"] == "stop"
    drawn = scheduler.tokenized[0][0]
    assert len(drawn.request) == 22
    assert {delivery.reply for delivery in got[:-1]} == {subjects.gone("d1", "1")}


async def test_refusals_reach_the_client(world: World, scheduler: HandScheduler) -> None:
    subject = subjects.generate("public", "tiny")
    reply = await world.ask(subject, {**CHAT, "temperature": -1})
    assert reply.headers["Nats-Service-Error-Code"] == "400"
    assert json.loads(reply.data)["error"]["param"] == "temperature"
    scheduler.refuse = True
    error = json.loads((await world.ask(subject, CHAT)).data)["error"]
    assert (error["code"], error["message"], error["retry_after_ms"]) == (429, "full", 9)


async def test_a_request_of_a_fleet_that_starts_waits_for_its_scheduler(world: World) -> None:
    await world.run(tokenizer.build(world.settings), "t1")
    asked = asyncio.create_task(world.ask(subjects.generate("public", "tiny"), CHAT))
    await world.broker.settle()
    await world.run(detokenizer.build(world.settings), "d1")
    await world.run(HandScheduler(), "s1")
    assert "choices" in json.loads((await asked).data)


async def test_unknown_models_have_no_receiver_until_each_model_of_the_fleet_has_a_tokenizer(
    world: World,
) -> None:
    settings = world.settings.model_copy(update={"awaited_models": "tiny,other"})
    await world.run(tokenizer.build(settings), "t1")
    for name in ("other", "gpt-9"):
        with pytest.raises(NoResponders):
            await world.ask(subjects.generate("public", name), CHAT)
    await world.run(tokenizer.build(settings.model_copy(update={"model_name": "other"})), "t2")
    reply = await world.ask(subjects.generate("public", "gpt-9"), CHAT)
    assert json.loads(reply.data)["error"]["code"] == 404


async def test_a_question_that_meets_a_bug_is_a_500_and_not_silence(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise TypeError("a bug")

    monkeypatch.setattr(queries, "tokenize_body", fails)
    await world.run(tokenizer.build(world.settings), "t1")
    reply = await world.ask(subjects.tokenize("public", "tiny"), {"prompt": "Hi"})
    error = json.loads(reply.data)["error"]
    assert (error["code"], error["message"]) == (500, "the tokenizer failed on this request: TypeError")


async def test_unknown_models_and_no_scheduler(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "WAIT_US", 0)  # the start is over
    await world.run(tokenizer.build(world.settings), "t1")
    reply = await world.ask(subjects.generate("public", "gpt-9"), CHAT)
    error = json.loads(reply.data)["error"]
    assert (error["code"], error["message"]) == (
        404,
        "no service serves model 'gpt-9'; ask for one of: tiny",
    )
    reply = await world.ask(subjects.generate("public", "tiny"), CHAT)
    assert json.loads(reply.data)["error"]["code"] == 503
    long = "=C3=A4" * 129
    for names, param, why in (
        ("public.=Z", "subject", "the subject is damaged: tenant and model are names of 1 to 128"),
        ("=ZZ.tiny", "subject", "the subject is damaged"),
        (f"{long}.tiny", "tenant", "the name in `tenant` is too long: a name has at most 128 characters"),
        (f"public.{long}", "model", "the name in `model` is too long: a name has at most 128 characters"),
    ):
        reply = await world.ask(f"headrace.v1.generate.{names}", CHAT)
        error = json.loads(reply.data)["error"]
        assert (error["code"], error["param"], error["message"][: len(why)]) == (400, param, why)


async def replies_to(world: World, subject: str) -> list[dict[str, Any]]:
    """All that comes on the reply subject of a request."""
    got: list[Delivery] = []
    inbox = world.client.new_inbox()
    await world.client.subscribe(inbox, got.append)
    world.client.publish(subject, json.dumps(CHAT).encode(), reply=inbox)
    for _ in range(4):
        await world.broker.settle()
    return [json.loads(delivery.data) for delivery in got]


async def test_subject_of_a_foreign_service_is_left_to_that_service(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A service of another version, perhaps: no heartbeat of it came."""
    monkeypatch.setattr(queries, "LOOK_EVERY_S", 0)
    await world.run(tokenizer.build(world.settings), "t1")
    bus = world.broker.connect()

    def serve(asked: Delivery) -> None:
        bus.publish(asked.reply, b'{"by": "another"}')

    await bus.subscribe(subjects.generate_any_tenant("other"), serve)
    questions = await bus.subscribe(subjects.tokenize_any_tenant("other"), serve)
    subject = subjects.generate("public", "other")
    assert [await replies_to(world, subject) for _ in range(2)] == [[{"by": "another"}]] * 2
    await questions.cancel()
    by_us, by_another = sorted(await replies_to(world, subject), key=len, reverse=True), {"by": "another"}
    assert by_another in by_us  # and a 404, since it does not announce that it listens
    assert len(by_us) == 2


class Elsewhere(Actor):
    """A tokenizer of another model that listens to nothing any more."""

    kind = "tokenizer"

    def heartbeat_payload(self) -> HeartbeatPayload:
        return HeartbeatPayload(model="other")


async def test_model_whose_tokenizer_has_just_died_is_unavailable_and_not_unknown(world: World) -> None:
    await world.run(tokenizer.build(world.settings), "t1")
    await world.run(Elsewhere(), "t2")
    (reply,) = await replies_to(world, subjects.generate("public", "other"))
    error = reply["error"]
    assert (error["code"], error["retry_after_ms"]) == (503, 1_000)


async def test_model_whose_tokenizer_dies_right_after_subscribing_is_unavailable(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request is judged by a question that came after it, never by one before it."""
    monkeypatch.setattr(queries, "LOOK_EVERY_S", 0)
    await world.run(tokenizer.build(world.settings), "t1")
    await world.run(Elsewhere(), "t2")
    bus, subject = world.broker.connect(), subjects.generate("public", "other")
    served = [
        await bus.subscribe(of("other"), lambda asked: bus.publish(asked.reply, b'{"by": "other"}'))
        for of in (subjects.generate_any_tenant, subjects.tokenize_any_tenant)
    ]
    assert await replies_to(world, subject) == [{"by": "other"}]
    for subscription in served:
        await subscription.cancel()
    (reply,) = await replies_to(world, subject)
    assert reply["error"]["code"] == 503


async def test_a_cancel_that_reaches_the_tokenizer_first(world: World) -> None:
    runtime = await world.run(tokenizer.build(world.settings), "t1")
    await world.run(HandScheduler(), "s1")
    world.broker.drop("hr.fleet.scheduler.s1.in.Tokenized")
    asking = asyncio.ensure_future(
        world.ask(subjects.generate("public", "tiny"), {**CHAT, "request_id": "r"})
    )
    await asyncio.sleep(0)
    await world.broker.settle()
    assert runtime.actor.status()["pending"] == 1
    world.client.publish(subjects.cancel("public", "r"), b"")
    world.client.publish("headrace.v1.cancel.public.=Z", b"")
    assert json.loads((await asking).data)["error"]["code"] == 499
    assert runtime.actor.status()["pending"] == 0


async def test_a_cancel_that_finds_its_request_in_the_queue(world: World, scheduler: HandScheduler) -> None:
    """Four short requests in the mailbox, and a long one on its thread; all are cancelled but the first."""
    subject = subjects.generate("public", "tiny")
    bodies = [{**CHAT, "request_id": f"r{i}"} for i in range(4)]
    bodies.append({"prompt": "word " * 4_000, "request_id": "r4"})
    asked = [asyncio.ensure_future(world.ask(subject, body)) for body in bodies]
    await asyncio.sleep(0)
    for i in range(1, 5):
        world.client.publish(subjects.cancel("public", f"r{i}"), b"")
    answers = [json.loads((await reply).data) for reply in asked]
    assert [answer.get("error", {}).get("code") for answer in answers] == [None, 499, 499, 499, 499]
    assert [message.request for message, _ in scheduler.tokenized] == ["r0"]


async def test_queries_are_answered_by_the_tokenizer(world: World, scheduler: HandScheduler) -> None:
    models = json.loads((await world.ask(subjects.MODELS, b"")).data)
    assert [entry["id"] for entry in models["data"]] == ["tiny"]
    ids = json.loads((await world.ask(subjects.tokenize("public", "tiny"), {"prompt": "Hi é"})).data)[
        "tokens"
    ]
    text = json.loads((await world.ask(subjects.detokenize("public", "tiny"), {"tokens": ids})).data)
    assert text == {"model": "tiny", "text": "Hi é"}
    for subject, body in [
        (subjects.tokenize("public", "tiny"), {}),
        (subjects.detokenize("public", "tiny"), {"tokens": [10**9]}),
        (subjects.detokenize("public", "tiny"), b"nonsense"),
    ]:
        assert json.loads((await world.ask(subject, body)).data)["error"]["code"] == 400


async def test_a_long_question_is_answered_beside_the_others(
    world: World, scheduler: HandScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client counts a conversation of any length that its model could take."""
    refused, tokenized = threading.Event(), queries._tokenized

    def waiting(*asked: Any) -> Any:
        refused.wait(60)
        return tokenized(*asked)

    monkeypatch.setattr(queries, "MAX_QUESTION_BYTES", 64)
    monkeypatch.setattr(queries, "MAX_QUESTIONS_BYTES", 150)
    monkeypatch.setattr(queries, "_tokenized", waiting)
    subject, text = subjects.tokenize("public", "tiny"), "Hi é " * 20
    body = json.dumps({"prompt": text}).encode()
    long = asyncio.ensure_future(world.ask(subject, body))
    await asyncio.sleep(0)
    error = json.loads((await world.ask(subject, body)).data)["error"]
    why = f"{len(body)} bytes of your long prompts wait to be counted: try again later"
    assert (error["code"], error["message"]) == (429, why)
    refused.set()
    found = json.loads((await long).data)
    again = json.loads(
        (await world.ask(subjects.detokenize("public", "tiny"), {"tokens": found["tokens"]})).data
    )
    assert (again["text"], found["count"]) == (text, len(found["tokens"]))
    monkeypatch.undo()
    wrong = {"prompt": 5, "pad": "x" * 70_000}
    assert json.loads((await world.ask(subject, wrong)).data)["error"]["code"] == 400
    deep = b'{"messages": [{"role": "user", "content": "x", "y": ' + b"[" * 70_000 + b"]" * 70_000 + b"}]}"
    assert json.loads((await world.ask(subject, deep)).data)["error"]["code"] == 400


async def test_a_client_that_leaves_is_reported(world: World, scheduler: HandScheduler) -> None:
    scheduler.hold = True
    body = json.dumps({**CHAT, "stream": True}).encode()
    world.client.publish(subjects.generate("public", "tiny"), body, reply="_INBOX.nobody.listens")
    await world.broker.settle()
    assert Detached(seqs=ints([1])) in scheduler.got


async def test_clients_get_the_death_of_a_scheduler_that_had_not_left_their_request(
    world: World,
) -> None:
    await world.run(tokenizer.build(world.settings), "t1")
    shard = detokenizer.build(world.settings)
    await world.run(shard, "d1")
    actor = HandScheduler()
    actor.hold = True
    await world.run(actor, "s1")
    asking = asyncio.ensure_future(world.ask(subjects.generate("public", "tiny"), CHAT))
    await asyncio.sleep(0)
    await world.broker.settle()
    assert shard.status()["requests"] == 1
    actor.mailbox.epoch += 1  # any first message of the next incarnation
    actor.mailbox.send("detokenizer.d1", Close(seq=9, final=0, reason="moved"))
    error = json.loads((await asking).data)["error"]
    assert (error["code"], error["message"]) == (503, "the scheduler was restarted; send the request again")
    assert shard.status()["requests"] == 0


@pytest.mark.parametrize("stream", [True, False])
async def test_scheduler_that_dies_costs_no_request_that_it_has_left(world: World, stream: bool) -> None:
    await world.run(tokenizer.build(world.settings), "t1")
    shard = detokenizer.build(world.settings)
    await world.run(shard, "d1")
    first, second = HandScheduler(), HandScheduler(seq=500)
    first.hold = first.keeps = True
    scheduler = await world.run(first, "s1")
    asking = asyncio.ensure_future(
        world.stream(CHAT) if stream else world.ask(subjects.generate("public", "tiny"), CHAT)
    )
    await asyncio.sleep(0)
    await world.broker.settle()
    assert shard.status()["requests"] == 1
    await scheduler.finish(0)
    gone_from(shard, "scheduler")
    await world.run(second, "s2")
    answer = await asking
    if isinstance(answer, list):
        frames = [json.loads(d.data) for d in answer]
        assert [frame["type"] for frame in frames] == ["accepted", "delta", "done"]
        text = frames[1]["choices"][0]["delta"]["content"]
    else:
        text = json.loads(answer.data)["choices"][0]["message"]["content"]
    assert text == "user\nHi\nassistant\n"
    ((asked, trace),) = second.tokenized
    assert (list(asked.generated), trace) == ([len(asked.tokens) // 2], first.tokenized[0][1])
    assert (shard.status()["requests"], shard.status()["failover"]) == (0, 0)


def gone_from(actor: Any, kind: str) -> None:
    """What the runtime does a beat after a peer has stopped."""
    (gone,) = [
        p for p in actor._mailbox.peers.expire(actor._mailbox.clock.now_us()) if p.heartbeat.kind == kind
    ]
    actor.on_peer_gone(gone)


async def test_cancel_is_received_while_no_scheduler_lives(world: World) -> None:
    await world.run(tokenizer.build(world.settings), "t1")
    shard = detokenizer.build(world.settings)
    await world.run(shard, "d1")
    actor = HandScheduler()
    actor.hold = actor.keeps = True
    scheduler = await world.run(actor, "s1")
    body = {**CHAT, "request_id": "r1"}
    asking = asyncio.ensure_future(world.ask(subjects.generate("public", "tiny"), body))
    await asyncio.sleep(0)
    await world.broker.settle()
    await scheduler.finish(0)
    world.client.publish(f"{subjects.PUBLIC}.cancel.public.bad name", b"")
    world.client.publish(subjects.cancel("public", "r1"), b"")
    await world.broker.settle()
    gone_from(shard, "scheduler")
    assert json.loads((await asking).data)["error"]["code"] == 499


async def test_a_full_backlog_merges_frames(
    world: World, scheduler: HandScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MemoryBus, "backlog_bytes", property(lambda self: 10**9))
    frames = [json.loads(d.data) for d in await world.stream(CHAT)]
    assert [frame["type"] for frame in frames] == ["accepted", "delta", "done"]
    assert frames[1]["choices"][0]["delta"]["content"] == "user\nHi\nassistant\n"


async def test_messages_for_others_are_left_alone(world: World, scheduler: HandScheduler) -> None:
    scheduler.mailbox.send("tokenizer.t1", Cancel(tenant="t", request="r"))
    scheduler.mailbox.send("detokenizer.d1", Cancel(tenant="t", request="r"))
    await world.broker.settle()
    assert json.loads((await world.ask(subjects.MODELS, b"")).data)["object"] == "list"


async def test_an_answer_too_large_for_the_server_is_413(world: World, scheduler: HandScheduler) -> None:
    world.broker.max_payload = 950  # 110 ids fit, and 110 escaped characters do not
    body = {"prompt": "\x01" * 110}
    error = json.loads((await world.ask(subjects.generate("public", "tiny"), body)).data)["error"]
    assert error["code"] == 413
    assert "over the server's limit of 950" in error["message"]


async def test_options_that_no_message_can_carry_are_a_413(
    world: World, scheduler: HandScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shared.codec.MAX_OPTIONS_BYTES", 200)
    actor = tokenizer.build(world.settings)
    await world.run(actor, "t1")
    reply = await world.ask(subjects.generate("acme", "tiny"), {**CHAT, "stop": ["s" * 200]})
    error = json.loads(reply.data)["error"]
    assert error["code"] == 413
    assert "shorten its grammar, stop strings, logit_bias or prediction" in error["message"]
    assert (scheduler.tokenized, actor.status()["pending"]) == ([], 0)


async def test_a_tick_that_fails_fails_the_actor(world: World) -> None:
    """Else what is pending would never be asked for again."""
    actor = tokenizer.build(world.settings)
    await world.run(actor, "t1")

    async def tick() -> None:
        raise ZeroDivisionError

    actor._ticking = asyncio.ensure_future(tick())
    actor.upkeep()  # not run yet
    await asyncio.sleep(0)
    with pytest.raises(ZeroDivisionError):
        actor.upkeep()
    actor._ticking = None


async def test_a_long_prompt_is_prepared_beside_and_answered(world: World, scheduler: HandScheduler) -> None:
    actor = tokenizer.build(world.settings)
    await world.run(actor, "t1")
    reply = await world.ask(subjects.generate("acme", "tiny"), {"prompt": "word " * 10_000})
    error = json.loads(reply.data)["error"]
    assert (error["code"], error["param"]) == (400, "prompt")
    assert (scheduler.tokenized, actor.status()["pending"]) == ([], 0)


async def test_a_bug_met_by_a_request_is_its_500(
    world: World, scheduler: HandScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("services.tokenizer.prepare.prepare", broken)
    error = json.loads((await world.ask(subjects.generate("public", "tiny"), CHAT)).data)["error"]
    assert (error["code"], error["message"]) == (
        500,
        "the tokenizer failed on this request: ZeroDivisionError",
    )


IN_A_NAME = [
    subjects.generate("a b", "tiny"), subjects.generate("a b", "other"), "headrace.v1.generate.a=20b.=Z",
    subjects.tokenize("a b", "tiny"), subjects.detokenize("a b", "tiny"), subjects.models("a b"),
]  # fmt: skip
IN_NO_NAME = [subjects.MODELS, subjects.STATUS, "$SRV.PING", "$SRV.STATS.headrace-detokenizer"]


@pytest.mark.parametrize(
    ("subject", "place"),
    [
        *((subject, "a=20b") for subject in IN_A_NAME),
        *((subject, "headrace-operator") for subject in IN_NO_NAME),
    ],
)
async def test_answer_goes_only_below_the_inbox_of_a_permitted_requester(
    settings: Settings, subject: str, place: str
) -> None:
    """A tenant may not publish there, but a service may."""
    async with AsyncExitStack() as stack:
        world = World(MemoryBroker(), settings, stack, guarded=True)
        await world.run(tokenizer.build(world.settings), "t1")
        await world.run(detokenizer.build(world.settings), "d1")
        await world.run(HandScheduler(), "s1")
        got: list[str] = []

        def take(delivery: Delivery) -> None:
            if not delivery.subject.startswith(
                "_INBOX.headrace-tokenizer."
            ):  # what it asks the server itself
                got.append(delivery.subject)

        for pattern in ("_INBOX.>", "my.>"):
            await world.client.subscribe(pattern, take)
        elsewhere = ("bob.x", "a.x", "a=20b2.x", "a=20b", "public.headrace-gateway.1.x")
        elsewhere += ("headrace-gateway.1.x",) if place == "a=20b" else ("a=20b.headrace-gateway.1.x",)
        for reply in ("my.answers.x", "_INBOX.x", *(f"_INBOX.{name}" for name in elsewhere)):
            world.client.publish(subject, json.dumps(CHAT).encode(), reply=reply)
        await world.broker.settle()
        assert got == []
        for reply in (f"_INBOX.{place}.x", f"_INBOX.{place}.headrace-gateway.1.x"):
            world.client.publish(subject, json.dumps(CHAT).encode(), reply=reply)
            async with asyncio.timeout(60):
                while not got:  # the server is queried first whether the model is served
                    await asyncio.sleep(0.001)
                    await world.broker.settle()
            assert set(got) == {reply}
            got.clear()


async def test_a_reply_subject_that_gets_no_answer_is_logged_once_a_minute(
    settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    clock = FakeClock()
    broker = MemoryBroker()
    runtime = Runtime(tokenizer.build(settings), broker.connect(), "fleet", "t1", clock=clock)
    await runtime.start()
    client = broker.connect()

    async def ask(times: int) -> list[str]:
        caplog.clear()
        for _ in range(times):
            client.publish(
                subjects.generate("acme", "tiny"), b"{}", reply="hr.fleet.scheduler.s1.in.Tokenized"
            )
        await broker.settle()
        for _ in range(2 * times + 10):  # one is seen in each turn, its copy, too
            await asyncio.sleep(0)
        return [r.message for r in caplog.records if "no answer may go to" in r.message]

    assert [line[-40:] for line in await ask(1_000)] == [" on headrace.v1.generate.acme.tiny wants it"[-40:]]
    assert await ask(1_000) == []
    clock.advance(60_000_000)
    (line,) = await ask(2)
    assert line.endswith("; 1999 more like it since the last line")
    await runtime.finish(1.0)


async def test_questions_without_a_reply_subject_are_ignored(world: World, scheduler: HandScheduler) -> None:
    for subject in (
        subjects.generate("public", "tiny"),
        subjects.generate("public", "other"),
        subjects.MODELS,
        subjects.tokenize("public", "tiny"),
        subjects.detokenize("public", "tiny"),
    ):
        world.client.publish(subject, json.dumps(CHAT).encode())
    await world.broker.settle()
    assert scheduler.got == []


async def test_lost_messages_are_requested_again(world: World, scheduler: HandScheduler) -> None:
    """Until its scheduler opens the request again it has a hole."""
    scheduler.hold = True
    shard = detokenizer.build(world.settings)
    await world.run(shard, "d0")
    asking = asyncio.ensure_future(world.ask(subjects.generate("public", "tiny"), CHAT))
    await asyncio.sleep(0)
    await world.broker.settle()
    shard.on_stream_lost("scheduler.s1")
    await world.broker.settle()
    assert scheduler.got[-1] == Detached(seqs=ints())
    scheduler.hold = False
    asked, trace = scheduler.tokenized[0]
    again = dataclasses.replace(asked, attempt=2)
    scheduler.answer("detokenizer.d0", again, trace, 1)
    body = json.loads((await asking).data)
    assert body["choices"][0]["message"]["content"] == "user\nHi\nassistant\n"
