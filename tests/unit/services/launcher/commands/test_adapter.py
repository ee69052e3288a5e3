"""`headrace adapter add|list|remove`: what the command sends, and what it prints."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from support.memory_bus import MemoryBroker

from services.launcher.commands import adapter
from services.launcher.session import Target
from shared import bodies
from shared.errors import BadRequest, UnknownModel
from shared.nats import subjects
from shared.nats.interface import Delivery
from shared.replies import error_reply, to_json

FACTS = {"model": "m", "digest": "ab" * 16, "rank": 8, "bytes": 4_900_000, "path": "/a/sql"}


@pytest.fixture
def broker(monkeypatch: pytest.MonkeyPatch) -> MemoryBroker:
    made = MemoryBroker()

    @asynccontextmanager
    async def connected(_: str) -> AsyncIterator[Any]:
        yield made.connect()

    monkeypatch.setattr(adapter, "connected", connected)
    return made


async def answered(broker: MemoryBroker, subject: str, answer: bytes) -> list[Delivery]:
    seen: list[Delivery] = []
    bus = broker.connect()

    def on_asked(delivery: Delivery) -> None:
        seen.append(delivery)
        bus.publish(delivery.reply, answer)

    await bus.subscribe(subject, on_asked)
    return seen


async def test_add_sends_the_folder_and_prints_what_an_executor_found(
    broker: MemoryBroker, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = await answered(
        broker, subjects.adapter("m:sql"), to_json({"before": None, "after": FACTS, "stored": False})
    )
    body = bodies.AdapterSet(path="/a/sql", replace=False, model="m")
    await adapter.change(Target("nats://h:1", "public"), "m:sql", body)
    assert json.loads(seen[0].data) == {"path": "/a/sql", "replace": False, "model": "m"}
    assert capsys.readouterr().out.splitlines() == [
        "m:sql: of m, rank 8, 4.9 MB, digest abababababab from /a/sql",
        "not stored, without JetStream: it ends with the last tokenizer",
    ]


async def test_remove_prints_it_and_raises_the_error_of_an_unknown_name(
    broker: MemoryBroker, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = await answered(
        broker, subjects.adapter("a"), to_json({"before": FACTS, "after": None, "stored": True})
    )
    await adapter.change(Target("nats://h:1", "public"), "a", bodies.AdapterSet())
    assert (seen[0].data, capsys.readouterr().out) == (b"{}", "a: removed\n")
    await answered(broker, subjects.adapter("b"), error_reply(UnknownModel("there is no adapter"), "", ""))
    with pytest.raises(UnknownModel):
        await adapter.change(Target("nats://h:1", "public"), "b", bodies.AdapterSet())
    with pytest.raises(BadRequest):
        await adapter.change(Target("nats://h:1", "public"), "", bodies.AdapterSet())


async def test_list_prints_the_adapters_among_the_models(
    broker: MemoryBroker, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    entry = {"id": "m:sql", "root": "m", "adapter": {"digest": "cd" * 16, "rank": 2, "bytes": 100_000}}
    await answered(broker, subjects.models("public"), to_json({"data": [{"id": "m", "root": "m"}, entry]}))
    await adapter.list_adapters(Target("nats://h:1", "public"))
    assert capsys.readouterr().out == "m:sql: of m, rank 2, 0.1 MB, digest cdcdcdcdcdcd\n"


async def test_list_without_an_adapter_is_a_sentence(
    broker: MemoryBroker, capsys: pytest.CaptureFixture[str]
) -> None:
    await answered(broker, subjects.models("public"), to_json({"data": [{"id": "m", "root": "m"}]}))
    await adapter.list_adapters(Target("nats://h:1", "public"))
    assert capsys.readouterr().out == "no adapters: `headrace adapter add NAME FOLDER` adds one\n"
