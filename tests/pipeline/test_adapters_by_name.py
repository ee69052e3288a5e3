"""Adapters by name through all services: over HTTP and NATS, replaced under load, removed, of one tenant."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
import torch
from support.executor.peft_folders import save_adapter
from support.memory_bus import MemoryBroker
from support.pipeline.five_actors import Pipeline
from support.pipeline.gateway_side import MODEL, add_gateway, healthy, remove_gateway

from services.tokenizer.adapters import AdapterNames
from shared import bodies
from shared.aliases import AdapterFiles, Alias
from shared.client.client import Client
from shared.errors import UnknownModel
from shared.nats import subjects

ASKED: dict[str, Any] = {"prompt": "The sea", "max_tokens": 6, "seed": 7, "ignore_eos": True}

pytestmark = pytest.mark.asyncio(loop_scope="module")
whole_file = pytest_asyncio.fixture(scope="module", loop_scope="module")


@whole_file
async def pipeline() -> AsyncIterator[Pipeline]:
    broker = MemoryBroker()

    async def connect() -> Any:
        return broker.connect()

    running = await Pipeline.start(connect, "adapters", lora_places=2, lora_rank=8)
    yield running
    await running.assert_idle()
    await running.stop()


@whole_file
async def http(pipeline: Pipeline) -> AsyncIterator[httpx.AsyncClient]:
    url = await add_gateway(pipeline)
    await healthy(pipeline)
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        yield client
    await remove_gateway(pipeline)


def folder(path: Path, seed: int, rank: int = 4) -> str:
    tensors = {"base_model.model.x.lora_A.weight": torch.full((rank, 2), float(seed))}
    return str(save_adapter(path, tensors, rank=rank, alpha=8.0))


async def add(http: httpx.AsyncClient, name: str, path: str, **more: object) -> httpx.Response:
    return await http.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": path, **more})


async def text(http: httpx.AsyncClient, model: str, **more: object) -> str:
    found = await http.post("/v1/completions", json={**ASKED, "model": model, **more})
    assert found.status_code == 200, found.text
    assert found.json()["model"] == model
    return str(found.json()["choices"][0]["text"])


async def change(pipeline: Pipeline, name: str, **body: Any) -> dict[str, Any]:
    reply = await pipeline.client.bus.request(
        subjects.adapter(name), bodies.encode(body), timeout_us=5_000_000
    )
    return bodies.decode(bodies.Json, reply.data)


async def test_an_adapter_is_a_model_from_its_load_to_its_unload(
    http: httpx.AsyncClient, pipeline: Pipeline, tmp_path: Path
) -> None:
    name = f"{MODEL}:sql"
    loaded = await add(http, name, folder(tmp_path / "a", 1))
    assert loaded.text == f"Success: LoRA adapter '{name}' added successfully."
    listed = {entry["id"]: entry for entry in (await http.get("/v1/models")).json()["data"]}
    assert (listed[name]["parent"], listed[name]["adapter"]["rank"]) == (MODEL, 4)
    base, adapted = await text(http, MODEL), await text(http, name)
    assert base != adapted
    native = await pipeline.client.complete({**ASKED, "model": name})
    assert native["choices"][0]["text"] == adapted
    stream = (await http.post("/v1/completions", json={**ASKED, "model": name, "stream": True})).text
    assert f'"model":"{name}"' in stream
    tokens = await http.post("/tokenize", json={"model": name, "prompt": "The sea"})
    assert tokens.json()["count"] > 0

    again = await add(http, name, folder(tmp_path / "b", 2))
    assert again.status_code == 400
    assert "has been loaded already" in again.json()["error"]["message"]
    removed = await http.post("/v1/unload_lora_adapter", json={"lora_name": name})
    assert removed.text == f"Success: LoRA adapter '{name}' removed successfully."
    gone = await http.post("/v1/completions", json={**ASKED, "model": name})
    assert (gone.status_code, gone.json()["error"]["param"]) == (404, "model")
    never = await http.post("/v1/unload_lora_adapter", json={"lora_name": "never"})
    assert never.status_code == 404


async def test_wrong_adapters_are_refused_with_the_field(http: httpx.AsyncClient, tmp_path: Path) -> None:
    good, wide = folder(tmp_path / "good", 1), folder(tmp_path / "wide", 1, rank=9)
    for body, status, word in (
        ({"lora_path": good}, 400, "`lora_name` is missing"),
        ({"lora_name": "a"}, 400, "`lora_path` is missing"),
        ({"lora_name": "a", "lora_path": 5}, 400, "`lora_path` is not a str"),
        ({"lora_name": "a", "lora_path": good, "lora_size": 5}, 400, "`lora_size` is not a field"),
        ({"lora_name": "a", "lora_path": str(tmp_path / "none")}, 400, "is missing where the executor runs"),
        ({"lora_name": "a", "lora_path": "relative"}, 400, "is not an absolute path"),
        ({"lora_name": "a", "lora_path": wide}, 400, "over the 8 of --lora-rank"),
        ({"lora_name": MODEL, "lora_path": good}, 400, "is a model or an alias"),
        ({"lora_name": "a", "lora_path": good, "model": "other"}, 404, "no service serves model 'other'"),
        ({"lora_name": "x" * 200, "lora_path": good}, 400, "at most 128 characters"),
    ):  # fmt: skip
        found = await http.post("/v1/load_lora_adapter", json=body)
        assert (found.status_code, word in found.text) == (status, True), found.text
    assert [entry["id"] for entry in (await http.get("/v1/models")).json()["data"]] == [MODEL]


async def test_a_name_that_changes_while_its_adapter_is_read_keeps_the_change(
    http: httpx.AsyncClient, pipeline: Pipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = AdapterNames._check

    async def set_meanwhile(self: AdapterNames, model: str, path: str) -> bodies.AdapterFacts:
        alias = bodies.encode({MODEL: 1})
        reply = await pipeline.client.bus.request(subjects.set_alias("both"), alias, timeout_us=5_000_000)
        assert bodies.decode(bodies.Change, reply.data).get("after")
        return await read(self, model, path)

    monkeypatch.setattr(AdapterNames, "_check", set_meanwhile)
    refused = await add(http, "both", folder(tmp_path / "a", 1))
    assert (refused.status_code, "was changed while" in refused.text) == (503, True), refused.text
    answer = (await http.post("/v1/completions", json={**ASKED, "model": "both"})).json()
    assert answer["choices"][0]["text"] == await text(http, MODEL)
    deleted = await pipeline.client.bus.request(subjects.set_alias("both"), b"{}", timeout_us=5_000_000)
    assert "error" not in bodies.decode(bodies.Change, deleted.data)


async def test_requests_during_a_replacement_all_have_the_old_or_the_new_weights(
    http: httpx.AsyncClient, tmp_path: Path
) -> None:
    assert (await add(http, "hot", folder(tmp_path / "v1", 1))).status_code == 200
    old = await text(http, "hot")
    asked = [asyncio.ensure_future(text(http, "hot")) for _ in range(20)]
    replaced = asyncio.ensure_future(add(http, "hot", folder(tmp_path / "v2", 2), load_inplace=True))
    for _ in range(20):
        await asyncio.sleep(0)
        asked.append(asyncio.ensure_future(text(http, "hot")))
    assert (await replaced).status_code == 200
    new = await text(http, "hot")
    found = await asyncio.gather(*asked)
    assert {*found} <= {old, new}
    assert new != old
    assert (await http.post("/v1/unload_lora_adapter", json={"lora_name": "hot"})).status_code == 200


async def test_more_adapters_than_places_are_served_one_after_the_other(
    http: httpx.AsyncClient, pipeline: Pipeline, tmp_path: Path
) -> None:
    names = [f"many-{i}" for i in range(7)]
    for i, name in enumerate(names):
        assert (await add(http, name, folder(tmp_path / name, i))).status_code == 200
    together = await asyncio.gather(*(text(http, name) for name in names * 3))
    assert together[:7] == together[7:14] == together[14:]
    assert len({*together}) == 7
    places = pipeline.status("scheduler")["executors"]["executor-1"]["adapters"]
    assert len(places) == 2
    for name in names:
        await http.post("/v1/unload_lora_adapter", json={"lora_name": name})


async def test_an_adapter_of_a_tenant_does_not_exist_for_others(
    pipeline: Pipeline, http: httpx.AsyncClient, tmp_path: Path
) -> None:
    added = await change(pipeline, "own", path=folder(tmp_path / "own", 5), tenant="acme")
    assert added["after"]["tenant"] == "acme"
    found = await http.post("/v1/completions", json={**ASKED, "model": "own"})
    assert found.status_code == 404
    assert "own" not in [entry["id"] for entry in (await http.get("/v1/models")).json()["data"]]
    with pytest.raises(UnknownModel):
        await pipeline.client.complete({**ASKED, "model": "own"})
    acme = await Client.open(await pipeline.connect(), "acme")
    assert (await acme.complete({**ASKED, "model": "own"}))["usage"]["completion_tokens"] == 6
    await change(pipeline, "own")


async def test_a_model_answers_under_the_name_that_an_adapter_had(
    pipeline: Pipeline, http: httpx.AsyncClient
) -> None:
    """Such as one that has the adapter merged: it starts after the adapter was removed."""
    removed = Alias(MODEL, 1, (), AdapterFiles("ab", "/a", 4, 8))
    pipeline.client.bus.publish(subjects.alias(MODEL), removed.pack())
    named = await http.post("/v1/completions", json={**ASKED, "model": MODEL})
    assert (named.status_code, named.json().get("model")) == (200, MODEL), named.text


async def test_the_key_of_a_tenant_adds_no_adapter(pipeline: Pipeline, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("acme hr-acme\nheadrace-operator hr-op\n")
    body = {"lora_name": "keyed", "lora_path": folder(tmp_path / "keyed", 1)}
    async with httpx.AsyncClient(base_url=await add_gateway(pipeline, "keyed", keys)) as client:
        for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
            for key, status in (("hr-acme", 403), ("hr-other", 401), ("hr-op", 200)):
                headers = {"Authorization": f"Bearer {key}"}
                asked = body if "unload" not in path else {"lora_name": "keyed"}
                assert (await client.post(path, json=asked, headers=headers)).status_code == status
    await remove_gateway(pipeline, "keyed")
