"""The client library against a scripted service, over both buses."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from shared.client import client as client_module
from shared.client.client import Client, UnreadFrames, request_all
from shared.errors import (
    BadRequest,
    DeadlineExceeded,
    EngineError,
    Overloaded,
    Unavailable,
    error_body,
    error_headers,
)
from shared.nats import subjects
from shared.nats.interface import Bus, BusFault, Delivery, NoResponders

Connect = Callable[[], Awaitable[Bus]]
END = {"Headrace-End": "1"}


def frame(number: int, kind: str = "delta", attempt: int = 1, **more: Any) -> dict[str, Any]:
    return {"type": kind, "request_id": "r", "attempt": attempt, "frame": number, **more}


class Service:
    """Answers each request with the frames of `script`; the last one carries the end header."""

    def __init__(self, bus: Bus, script: list[dict[str, Any]]) -> None:
        self._bus = bus
        self._script = script
        self.asked: list[dict[str, Any]] = []
        self.traces: list[str] = []
        self.cancelled: asyncio.Queue[str] = asyncio.Queue()

    async def listen(self, model: str) -> None:
        await self._bus.subscribe(subjects.generate_any_tenant(model), self._on_request, queue="tokenizers")
        await self._bus.subscribe(subjects.CANCEL_ALL, lambda d: self.cancelled.put_nowait(d.subject))
        await self._bus.flush()

    def _on_request(self, delivery: Delivery) -> None:
        self.asked.append(json.loads(delivery.data))
        self.traces.append(delivery.headers.get("traceparent", ""))
        for i, body in enumerate(self._script):
            ended = i == len(self._script) - 1 and body["type"] in ("done", "error", "answer")
            self._bus.publish(delivery.reply, json.dumps(body).encode(), headers=END if ended else None)


@pytest.fixture
async def client(connect: Connect) -> AsyncIterator[Client]:
    return await Client.open(await connect())


async def serve(connect: Connect, model: str, script: list[dict[str, Any]]) -> Service:
    service = Service(await connect(), script)
    await service.listen(model)
    return service


async def test_a_stream_gives_every_frame_in_order(connect: Connect, client: Client, fleet: str) -> None:
    script = [frame(0, "accepted"), *(frame(i) for i in range(1, 9)), frame(9, "done")]
    service = await serve(connect, fleet, script)
    got = [f async for f in client.stream({"model": fleet, "prompt": "p"}, trace="00-a-b-01")]
    assert got == script
    (asked,) = service.asked
    assert (asked["stream"], asked["prompt"], asked["model"]) == (True, "p", fleet)
    assert len(asked["request_id"]) == 22
    assert service.traces == ["00-a-b-01"]
    assert service.cancelled.empty()


async def test_each_wait_has_its_own_limit() -> None:
    """Though one timer serves many waits: a later and shorter one does not wait for the first one's end."""
    unread, came = UnreadFrames(lambda: None), Delivery("s", b"x")
    first = asyncio.ensure_future(unread.get(600))
    await asyncio.sleep(0)
    unread.put(came)
    assert await first is came
    for _ in range(2):
        with pytest.raises(TimeoutError):
            await unread.get(0.01)
    unread.put(came)
    assert await unread.get(0.01) is came
    unread.close()


async def test_a_plain_request_gets_the_one_reply(connect: Connect, client: Client, fleet: str) -> None:
    service = await serve(connect, fleet, [{"type": "answer", "choices": [{"text": "x"}]}])
    got = await client.complete({"model": fleet, "stream": True, "request_id": "mine"})
    assert got["choices"] == [{"text": "x"}]
    assert service.asked == [{"model": fleet, "stream": False, "request_id": "mine"}]


async def test_a_hole_in_the_stream_is_an_error_and_cancels(
    connect: Connect, client: Client, fleet: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "GAP_S", 0.05)
    service = await serve(connect, fleet, [frame(0, "accepted"), frame(1), frame(3)])
    frames = client.stream({"model": fleet, "request_id": "r"})
    assert [(await anext(frames))["frame"] for _ in range(2)] == [0, 1]
    with pytest.raises(EngineError, match=r"frame 2 of request r is missing \(frame 3 arrived\)"):
        await anext(frames)
    assert await asyncio.wait_for(service.cancelled.get(), 5) == "headrace.v1.cancel.public.r"


@pytest.mark.parametrize("attempt", [1, 2])
async def test_a_stream_may_start_over(connect: Connect, client: Client, fleet: str, attempt: int) -> None:
    again = [frame(0, "accepted", attempt), frame(1, "delta", attempt), frame(2, "done", attempt)]
    await serve(connect, fleet, [frame(0, "accepted"), frame(1), frame(2), *again])
    assert [f["frame"] async for f in client.stream({"model": fleet})] == [0, 1, 2, 0, 1, 2]


async def test_a_stream_that_starts_over_fills_its_hole(connect: Connect, client: Client, fleet: str) -> None:
    again = [frame(0, "accepted", 2), frame(1, "delta", 2), frame(2, "done", 2)]
    await serve(connect, fleet, [frame(0, "accepted"), frame(2), frame(3), frame(1), *again])
    got = [(f["attempt"], f["frame"]) async for f in client.stream({"model": fleet})]
    assert got == [(1, 0), (2, 0), (2, 1), (2, 2)]


async def test_a_late_frame_of_an_earlier_attempt_is_ignored(
    connect: Connect, client: Client, fleet: str
) -> None:
    frames = [frame(0, "accepted", 2), frame(1, "delta", 1), frame(0, "accepted", 1), frame(1, "done", 2)]
    await serve(connect, fleet, frames)
    got = [(f["attempt"], f["frame"]) async for f in client.stream({"model": fleet})]
    assert got == [(2, 0), (2, 1)]


async def test_a_late_error_of_an_earlier_attempt_is_ignored(
    connect: Connect, client: Client, fleet: str
) -> None:
    given_up = {**frame(1, "error", 1), **error_body(Unavailable("a part was lost"), "r")}
    await serve(connect, fleet, [frame(0, "accepted", 2), given_up, frame(1, "done", 2)])
    got = [(f["attempt"], f["frame"]) async for f in client.stream({"model": fleet})]
    assert got == [(2, 0), (2, 1)]


async def test_errors_come_back_typed(connect: Connect, client: Client, fleet: str) -> None:
    error = Overloaded("1024 requests wait: try later", retry_after_ms=1500)
    await serve(connect, fleet, [{**frame(0, "error"), **error_body(error, "r")}])
    with pytest.raises(Overloaded, match="1024 requests wait: try later") as caught:
        await client.complete({"model": fleet})
    assert caught.value.retry_after_ms == 1500
    with pytest.raises(Overloaded):
        _ = [f async for f in client.stream({"model": fleet})]


async def test_an_error_keeps_its_parameter(connect: Connect, client: Client, fleet: str) -> None:
    bus = await connect()
    error = BadRequest("temperature is over 2", param="temperature")
    await bus.subscribe(
        subjects.generate_any_tenant(fleet),
        lambda d: bus.publish(d.reply, json.dumps(error_body(error)).encode(), headers=error_headers(error)),
    )
    await bus.flush()
    with pytest.raises(BadRequest, match="temperature is over 2") as caught:
        await client.complete({"model": fleet})
    assert caught.value.param == "temperature"


async def test_client_gets_an_error_when_no_service_has_the_model(client: Client, fleet: str) -> None:
    with pytest.raises(
        Unavailable, match=f"no service answers for model '{fleet}': start one with `headrace up`"
    ):
        await client.complete({"model": fleet}, timeout_s=60)


async def test_client_times_out_when_a_service_is_silent(
    connect: Connect, client: Client, fleet: str
) -> None:
    service = await serve(connect, fleet, [])
    with pytest.raises(DeadlineExceeded, match=r"no answer to request quiet within 0\.02 s"):
        await client.complete({"model": fleet, "request_id": "quiet"}, timeout_s=0.02)
    assert await asyncio.wait_for(service.cancelled.get(), 5) == "headrace.v1.cancel.public.quiet"


async def test_leaving_a_stream_cancels_it(connect: Connect, client: Client, fleet: str) -> None:
    service = await serve(connect, fleet, [frame(0, "accepted"), frame(1)])
    async with contextlib.aclosing(client.stream({"model": fleet, "request_id": "left"})) as frames:
        assert (await anext(frames))["type"] == "accepted"
    assert await asyncio.wait_for(service.cancelled.get(), 5) == "headrace.v1.cancel.public.left"


async def test_a_stream_that_a_cut_connection_has_ended(
    connect: Connect, fleet: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runner got "no responders" and stopped: silence is then the end. A request that waits in a
    queue has sent no frame yet, and may."""
    monkeypatch.setattr(client_module, "RESUME_S", 0.05)
    bus = await connect()
    handlers: list[Any] = []
    monkeypatch.setattr(bus, "on_fault", handlers.append)
    client = await Client.open(bus)
    await serve(connect, f"{fleet}r", [frame(0, "accepted"), frame(1)])
    await serve(connect, f"{fleet}q", [frame(0, "accepted")])
    running, queued = (
        client.stream({"model": f"{fleet}r"}),
        client.stream({"model": f"{fleet}q"}, timeout_s=0.3),
    )
    assert [(await anext(running))["frame"] for _ in range(2)] == [0, 1]
    assert (await anext(queued))["frame"] == 0
    handlers[0](BusFault("reconnected", "back"))
    with pytest.raises(Unavailable, match="the connection to the nats-server was cut"):
        await anext(running)
    with pytest.raises(DeadlineExceeded, match="no answer to request"):
        await anext(queued)


async def test_a_request_that_a_broker_took_along_is_sent_again(
    connect: Connect, fleet: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same request goes to the service that answers then; at first none may. One with a frame is not
    sent."""
    monkeypatch.setattr(client_module, "AGAIN_S", 0.05)
    bus, service = await connect(), await connect()
    handlers: list[Any] = []
    monkeypatch.setattr(bus, "on_fault", handlers.append)
    client = await Client.open(bus)
    lost, running = list[Any](), list[Any]()
    deaf = await service.subscribe(subjects.generate_any_tenant(f"{fleet}l"), lost.append)
    await service.subscribe(subjects.generate_any_tenant(f"{fleet}r"), running.append)
    await service.flush()
    plain = asyncio.create_task(client.complete({"model": f"{fleet}l"}))
    stream = client.stream({"model": f"{fleet}r"}, timeout_s=1)
    began = asyncio.create_task(anext(stream))
    while not (lost and running):
        await asyncio.sleep(0.01)
    service.publish(running[0].reply, json.dumps(frame(0, "accepted")).encode())
    assert (await began)["frame"] == 0
    await deaf.cancel()
    await service.flush()
    handlers[0](BusFault("reconnected", "back"))
    await asyncio.sleep(0.08)  # sent again, and no service listens
    assert not plain.done()
    again = list[Any]()

    def answer(delivery: Delivery) -> None:
        again.append(delivery)
        service.publish(delivery.reply, b'{"text": "here"}')

    await service.subscribe(subjects.generate_any_tenant(f"{fleet}l"), answer)
    assert await asyncio.wait_for(plain, 60) == {"text": "here"}
    assert [(each.data, each.reply) for each in again] == [(each.data, each.reply) for each in lost]
    assert len(running) == 1
    await stream.aclose()


async def test_requests_for_a_model_are_sent_again_on_demand(connect: Connect, fleet: str) -> None:
    """The requests of every tenant, and only the ones that have no reply yet."""
    client, service = await Client.open(await connect()), await connect()
    arrived = {model: list[Delivery]() for model in ("m", "other")}
    for model, list_ in arrived.items():
        await service.subscribe(subjects.generate_any_tenant(f"{fleet}{model}"), list_.append)
    await service.flush()
    waiting = [
        asyncio.create_task(client.as_tenant(tenant).complete({"model": f"{fleet}{model}"}))
        for tenant, model in (("public", "m"), ("acme", "m"), ("public", "other"))
    ]
    stream = client.stream({"model": f"{fleet}m"}, timeout_s=1)
    began = asyncio.create_task(anext(stream))
    while len(arrived["m"]) < 3 or not arrived["other"]:
        await asyncio.sleep(0.01)
    *_, started = arrived["m"]
    service.publish(started.reply, json.dumps(frame(0, "accepted")).encode())
    await began
    client.resend_unanswered(f"{fleet}m")
    while len(arrived["m"]) < 5:
        await asyncio.sleep(0.01)
    for each in arrived["m"][3:]:
        service.publish(each.reply, b'{"text": "here"}')
    assert await asyncio.gather(*waiting[:2]) == [{"text": "here"}] * 2
    assert len(arrived["other"]) == 1
    waiting[2].cancel()
    await stream.aclose()


async def test_request_ends_after_a_few_attempts_when_no_service_comes_back(
    connect: Connect, fleet: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "AGAIN_S", 0.01)
    bus, service = await connect(), await connect()
    handlers: list[Any] = []
    monkeypatch.setattr(bus, "on_fault", handlers.append)
    client = await Client.open(bus)
    lost = list[Any]()
    deaf = await service.subscribe(subjects.generate_any_tenant(fleet), lost.append)
    await service.flush()
    plain = asyncio.create_task(client.complete({"model": fleet}))
    while not lost:
        await asyncio.sleep(0.01)
    await deaf.cancel()
    await service.flush()
    handlers[0](BusFault("reconnected", "back"))
    with pytest.raises(Unavailable, match="no service"):
        await asyncio.wait_for(plain, 60)


async def test_a_request_for_a_model_that_was_served_waits_until_it_is_served_again(
    connect: Connect, client: Client, fleet: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server of a cluster has died, and its services are on their way to another one."""
    monkeypatch.setattr(client_module, "AGAIN_S", 0.05)
    monkeypatch.setattr(client_module, "TIMES_AGAIN", 10_000)
    away = asyncio.Event()
    service = await connect()

    def answer(delivery: Delivery) -> None:
        service.publish(delivery.reply, b'{"text": "here"}')

    first = await service.subscribe(subjects.generate_any_tenant(fleet), answer)
    await service.flush()
    assert await client.complete({"model": fleet}) == {"text": "here"}
    await first.cancel()
    await service.flush()
    unserved = client._send_again

    def noted(reply: str) -> None:
        away.set()
        unserved(reply)

    monkeypatch.setattr(Client, "_send_again", lambda _, reply: noted(reply))
    waiting = asyncio.create_task(client.complete({"model": fleet}, timeout_s=60))
    await asyncio.wait_for(away.wait(), 60)
    await service.subscribe(subjects.generate_any_tenant(fleet), answer)
    assert await waiting == {"text": "here"}


async def test_a_request_without_a_model(client: Client) -> None:
    with pytest.raises(BadRequest, match="add `model`"):
        await client.complete({"prompt": "x"})


async def test_an_answer_that_is_not_json(connect: Connect, client: Client, fleet: str) -> None:
    bus = await connect()
    await bus.subscribe(subjects.generate_any_tenant(fleet), lambda d: bus.publish(d.reply, b"\x80what"))
    await bus.flush()
    with pytest.raises(EngineError, match="not JSON"):
        await client.complete({"model": fleet})


async def test_query_of_all_services_collects_every_answer(connect: Connect, fleet: str) -> None:
    asker = await connect()
    for name in (b'{"id":1}', b'{"id":2}'):
        bus = await connect()
        await bus.subscribe(fleet, lambda d, bus=bus, name=name: bus.publish(d.reply, name))
        await bus.flush()
    got = await request_all(asker, fleet, wait_s=0.2)
    assert sorted(body["id"] for body in got) == [1, 2]
    got = await request_all(asker, fleet, wait_s=60, enough=lambda body: body["id"] == 2)
    assert {"id": 2} in got


async def test_query_of_all_services_is_empty_when_none_runs(connect: Connect, fleet: str) -> None:
    with pytest.raises(NoResponders, match="no service runs on this server"):
        await request_all(await connect(), fleet, wait_s=60)


DEEP: list[Any] = []
for _ in range(100_000):
    DEEP = [DEEP]


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ({"prompt": "\ud800"}, "holds a lone surrogate"),
        ({"prompt": "x", "request_id": "\ud800"}, "holds a lone surrogate"),
        ({"model": "\ud800", "prompt": "x"}, "holds a lone surrogate"),
        ({"prompt": DEEP}, "is nested too deeply"),
    ],
    ids=["prompt", "id", "model", "deep"],
)
async def test_client_refuses_a_request_that_it_cannot_encode(
    client: Client, body: dict[str, Any], why: str
) -> None:
    with pytest.raises(BadRequest, match=f"the request {why}: send flat values of whole characters"):
        await client.complete({"model": "m", **body}, timeout_s=5)
    assert client.waiting == 0


@pytest.mark.parametrize(
    "data",
    [b"nonsense", b"\xff", b"[1]", b"5", b'{"error": 5}', b'{"error": {"code": "x"}}', b'{"error": {}}'],
)
async def test_an_answer_of_another_form_is_a_typed_error(
    client: Client, connect: Connect, data: bytes
) -> None:
    service = await connect()

    def reply(delivery: Delivery) -> None:
        service.publish(delivery.reply, data)

    await service.subscribe(subjects.generate_any_tenant("m"), reply)
    await service.subscribe("asked", reply)
    await service.flush()
    with pytest.raises(
        EngineError, match=r"answered with (something that is not JSON|an error of another form)"
    ):
        await client.complete({"model": "m"}, timeout_s=5)
    good = [b for b in await request_all(client.bus, "asked", 0.05) if "error" not in b]
    assert good == []


async def test_a_vector_is_refused_when_a_service_of_an_older_version_answers_with_text(
    connect: Connect, client: Client, fleet: str
) -> None:
    text = {"type": "answer", "choices": [{"index": 0, "text": "", "finish_reason": "stop"}]}
    await serve(connect, fleet, [text])
    with pytest.raises(Unavailable, match="older version") as caught:
        await client.embed({"model": fleet, "input": "Hello"})
    assert caught.value.retry_after_ms == 1_000
