"""The public client library against a scripted service on a nats-server."""

from __future__ import annotations

import asyncio
import importlib
import json
import math
import sys
import textwrap
import threading
import tomllib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import headrace
from headrace import Client, connect
from services.launcher.nats_server import NatsServer
from shared.errors import Cancelled, SetupError, Unavailable, error_body, error_headers
from shared.nats import subjects
from shared.nats.bus import NatsBus
from shared.nats.interface import Delivery

ROOT = Path(__file__).parents[3]
END = {"Headrace-End": "1"}
BODY = {"messages": [{"role": "user", "content": "Hello"}]}


class Service:
    """Answers each request of one model: whole, in three frames, or without an end if `endless`."""

    def __init__(self, bus: NatsBus) -> None:
        self.bus, self.tenants, self.endless = bus, list[str](), False
        self.cancelled: asyncio.Queue[str] = asyncio.Queue()

    def on_request(self, delivery: Delivery) -> None:
        body = json.loads(delivery.data)
        self.tenants.append(delivery.subject.split(".")[3])
        if body.get("prompt") == "refused":
            error = Unavailable("not now")
            self.bus.publish(
                delivery.reply, json.dumps(error_body(error)).encode(), headers=error_headers(error)
            )
            return
        if not body["stream"]:
            answer = {"type": "answer", "choices": [{"message": {"content": "Hi"}}]}
            self.bus.publish(delivery.reply, json.dumps(answer).encode(), headers=END)
            return
        kinds = ("accepted", "delta") if self.endless else ("accepted", "delta", "done")
        for number, kind in enumerate(kinds):
            frame = {"type": kind, "request_id": body["request_id"], "attempt": 1, "frame": number}
            headers = END if kind == "done" else None
            self.bus.publish(delivery.reply, json.dumps(frame).encode(), headers=headers)


@pytest.fixture
async def service(nats_server: NatsServer, fleet: str) -> AsyncIterator[Service]:
    bus = await NatsBus.connect(nats_server.url)
    serving = Service(bus)
    await bus.subscribe(subjects.generate_any_tenant(fleet), serving.on_request, queue="tokenizers")
    await bus.subscribe(subjects.CANCEL_ALL, lambda d: serving.cancelled.put_nowait(d.subject))
    await bus.flush()
    yield serving
    await bus.drain()


async def test_the_example_of_the_docstring_runs(
    service: Service, nats_server: NatsServer, fleet: str, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = (headrace.__doc__ or "").splitlines()
    code = textwrap.dedent("\n".join(line for line in lines if line.startswith("    ") or not line))
    code = code.replace("nats://127.0.0.1:4222", nats_server.url).replace("smollm2-135m", fleet)
    await asyncio.to_thread(exec, code, {})
    assert capsys.readouterr().out.split() == ["Hi", "accepted", "delta", "done"]


async def test_sync_and_async_clients_give_the_same_frames_when_one_service_answers(
    service: Service, nats_server: NatsServer, fleet: str
) -> None:
    def read() -> list[dict[str, Any]]:
        with Client(nats_server.url, tenant="acme") as client:
            return list(client.stream({**BODY, "model": fleet, "request_id": "one"}))

    found = await asyncio.to_thread(read)
    async with connect(nats_server.url) as client:
        frames = client.stream({**BODY, "model": fleet, "request_id": "one"})
        assert [frame async for frame in frames] == found
    assert [frame["type"] for frame in found] == ["accepted", "delta", "done"]
    assert service.tenants == ["acme", subjects.DEFAULT_TENANT]


async def test_an_error_of_a_service_is_raised_as_its_type(
    service: Service, nats_server: NatsServer, fleet: str
) -> None:
    def ask() -> None:
        with Client(nats_server.url) as client:
            client.complete({"model": fleet, "prompt": "refused"}, timeout_s=5)

    with pytest.raises(Unavailable, match="not now"):
        await asyncio.to_thread(ask)


async def test_a_stream_that_is_left_cancels_its_request_and_close_ends_the_thread(
    service: Service, nats_server: NatsServer, fleet: str
) -> None:
    service.endless = True

    def leave() -> None:
        with Client(nats_server.url) as client:
            for frame in client.stream({**BODY, "model": fleet, "request_id": "left"}):
                if frame["type"] == "delta":
                    break
        client.close()

    await asyncio.to_thread(leave)
    assert "left" in await asyncio.wait_for(service.cancelled.get(), 5)
    assert "headrace-client" not in {thread.name for thread in threading.enumerate()}


async def test_close_ends_the_calls_of_other_threads_when_they_wait_for_an_answer(
    service: Service, nats_server: NatsServer, fleet: str
) -> None:
    service.endless = True
    body = {**BODY, "model": fleet}
    client = await asyncio.to_thread(Client, nats_server.url)
    frames = client.stream({**body, "request_id": "waits"})
    await asyncio.to_thread(lambda: [next(frames) for _ in range(2)])
    waits = asyncio.create_task(asyncio.to_thread(list, frames))
    await asyncio.gather(*(asyncio.to_thread(client.close) for _ in range(4)))
    with pytest.raises(Cancelled, match="closed before the answer"):
        await asyncio.wait_for(waits, 5)
    assert "waits" in await asyncio.wait_for(service.cancelled.get(), 5)
    calls = (client.complete, client.embed, lambda body: list(client.stream(body)))
    for call in (*calls, lambda body: client.cancel("waits")):
        with pytest.raises(SetupError, match="this client is closed"):
            call(body)


async def test_the_end_of_connect_raises_in_tasks_that_wait_for_an_answer(
    service: Service, nats_server: NatsServer, fleet: str
) -> None:
    service.endless = True
    async with connect(nats_server.url) as client:
        frames = client.stream({**BODY, "model": fleet})
        assert [(await anext(frames))["type"] for _ in range(2)] == ["accepted", "delta"]
        waits = asyncio.create_task(anext(frames))
        await asyncio.sleep(0)
    with pytest.raises(Cancelled, match="closed before the answer"):
        await asyncio.wait_for(waits, 5)


async def test_a_stream_that_is_collected_in_the_thread_of_the_loop_stops_no_call(
    service: Service, nats_server: NatsServer, fleet: str
) -> None:
    service.endless = True

    def collect() -> None:
        with Client(nats_server.url) as client:
            frames = [client.stream({**BODY, "model": fleet, "request_id": "lost"})]
            next(frames[0])
            client._loop.call_soon_threadsafe(frames.clear)
            assert client.complete({**BODY, "model": fleet}, timeout_s=5)["type"] == "answer"

    await asyncio.wait_for(asyncio.to_thread(collect), 10)
    assert "lost" in await asyncio.wait_for(service.cancelled.get(), 5)


async def test_a_fork_of_the_process_raises_and_leaves_the_client_of_the_parent_alone(
    service: Service, nats_server: NatsServer, fleet: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def use() -> str:
        with Client(nats_server.url) as client:
            with monkeypatch.context() as child:
                child.setattr("os.getpid", lambda: -1)
                client.close()
                with pytest.raises(SetupError, match="after the fork"):
                    client.complete({**BODY, "model": fleet})
            return str(client.complete({**BODY, "model": fleet})["type"])

    assert await asyncio.to_thread(use) == "answer"


async def test_an_answer_may_take_any_time_when_the_limit_is_infinite(
    service: Service, nats_server: NatsServer, fleet: str
) -> None:
    async with connect(nats_server.url) as client:
        assert (await client.complete({**BODY, "model": fleet}, timeout_s=math.inf))["type"] == "answer"


async def test_cancel_raises_in_the_caller_when_the_id_is_none(nats_server: NatsServer) -> None:
    def cancel() -> None:
        with Client(nats_server.url) as client:
            client.cancel("")

    with pytest.raises(ValueError, match="empty"):
        await asyncio.to_thread(cancel)


def test_a_client_without_a_server_raises_and_leaves_no_thread() -> None:
    with pytest.raises(SetupError):
        Client("nats://127.0.0.1:1", timeout_s=0.2)
    assert "headrace-client" not in {thread.name for thread in threading.enumerate()}


def test_the_import_fails_with_a_sentence_when_kernels_is_another_distributions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text('"""Kernels from a hub."""\n')
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [n for n in sys.modules if n.partition(".")[0] in ("kernels", "headrace")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ImportError, match=r"kernels/__init__.py.*venv of its own"):
        importlib.import_module("headrace")


def test_the_import_fails_with_a_sentence_when_shared_is_a_folder_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shared").mkdir()
    for name in ("__init__.py", "client.py"):
        (tmp_path / "shared" / name).write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [n for n in sys.modules if n.partition(".")[0] in ("shared", "headrace")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ImportError, match=r"`shared` that is not Headrace's.*another name"):
        importlib.import_module("headrace")
    for name in [n for n in sys.modules if n.partition(".")[0] == "shared"]:
        del sys.modules[name]


def test_wheel_and_images_have_the_package_and_its_types() -> None:
    found = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert "headrace*" in found["packages"]["find"]["include"]
    assert {found["package-data"][name][0] for name in ("headrace", "shared")} == {"py.typed"}
    assert "!headrace" in (ROOT / ".dockerignore").read_text().splitlines()
