"""What a gateway needs before it starts, and its requests before a tokenizer has."""

from __future__ import annotations

import asyncio
import resource
from pathlib import Path

import httpx
import pytest
from support.memory_bus import MemoryBroker

from services.gateway import actor
from services.gateway.actor import MAX_FILES, build
from shared.actor.runtime import Actor, HeartbeatPayload, Runtime
from shared.client import client
from shared.config import Settings
from shared.errors import Overloaded, SetupError, error_body
from shared.nats import subjects
from shared.replies import to_json

LOGIN = "nats://headrace-gateway:secret@nats:4222"


def test_gateway_may_have_as_many_connections_as_the_machine_allows() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, soft), hard))
        build(Settings())
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == min(hard, MAX_FILES) > 256
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_low_limit_of_open_files_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(actor, "MAX_FILES", 64)
    build(Settings())
    assert caplog.messages[0].startswith("only 64 files may be open (ulimit -n)")


def test_gateway_with_permission_for_every_name_needs_keys(tmp_path: Path) -> None:
    with pytest.raises(
        SetupError, match=r"as headrace-gateway .* `http_keys` is empty: set it to the file"
    ) as refused:
        build(Settings(nats_url=LOGIN))
    assert "secret" not in refused.value.message
    keys = tmp_path / "keys"
    keys.write_text("acme one\n")
    build(Settings(nats_url=LOGIN, http_keys=str(keys)))
    build(Settings(nats_url="nats://nats:4222"))
    with pytest.raises(SetupError, match="`http` is off"):
        build(Settings(http="off"))


class OtherTokenizer(Actor):
    """Of another model."""

    kind = "tokenizer"

    def heartbeat_payload(self) -> HeartbeatPayload:
        return HeartbeatPayload(model="other")


@pytest.mark.parametrize(
    ("start_us", "awaited", "other", "wanted"),
    [
        (actor.START_US, "", False, 429),
        (0, "", False, 503),
        (actor.START_US, "other,m", True, 429),
        (actor.START_US, "other", True, 503),
        (actor.START_US, "", True, 503),
    ],
)
async def test_a_request_waits_for_the_first_tokenizer_of_a_fleet_that_starts(
    start_us: int, awaited: str, other: bool, wanted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actor, "START_US", start_us)
    monkeypatch.setattr(client, "AGAIN_S", 0.01)
    broker, gateway = MemoryBroker(), build(Settings(http="127.0.0.1:0", awaited_models=awaited))
    runtime, bus, unheard = (
        Runtime(gateway, broker.connect(), "fleet", "g1"),
        broker.connect(),
        asyncio.Event(),
    )
    await runtime.start()
    others = Runtime(OtherTokenizer(), broker.connect(), "fleet", "t1")
    if other:
        await others.start()
        await broker.settle()
    await bus.subscribe("_INBOX.>", lambda reply: unheard.set() if reply.has_no_responders else None)
    async with httpx.AsyncClient(base_url=str(gateway.status()["url"]), timeout=60) as http:
        asked = asyncio.create_task(http.post("/v1/completions", json={"model": "m", "prompt": "x"}))
        await unheard.wait()
        full = to_json(error_body(Overloaded("full")))
        await bus.subscribe(
            subjects.generate_any_tenant("m"), lambda request: bus.publish(request.reply, full)
        )
        assert (await asked).status_code == wanted
    await runtime.finish(1)
    if other:
        await others.finish(1)
