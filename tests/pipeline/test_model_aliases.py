"""One model under three names: over HTTP and NATS, in lists, and next to other models."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from support.memory_bus import MemoryBroker
from support.pipeline.five_actors import KINDS, Pipeline
from support.pipeline.gateway_side import add_gateway, healthy, remove_gateway
from support.text_models import write_bpe_gguf

from services.tokenizer import actor as tokenizer
from shared.actor.runtime import Runtime
from shared.config import load
from shared.errors import SetupError, UnknownModel
from shared.nats import subjects

NAMES = ["first", "gpt-4o", "org/third one.v2"]
ASKED: dict[str, Any] = {"prompt": "The sea", "max_tokens": 5, "seed": 7}

pytestmark = pytest.mark.asyncio(loop_scope="module")
whole_file = pytest_asyncio.fixture(scope="module", loop_scope="module")


@whole_file
async def pipeline() -> AsyncIterator[Pipeline]:
    broker = MemoryBroker()

    async def connect() -> Any:
        return broker.connect()

    running = await Pipeline.start(connect, "aliases", model_name=",".join(NAMES))
    yield running
    await running.assert_idle()
    await running.stop()


@whole_file
async def http(pipeline: Pipeline) -> AsyncIterator[httpx.AsyncClient]:
    url = await add_gateway(pipeline)
    await healthy(pipeline)
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        yield client
    await remove_gateway(pipeline)


async def test_requests_over_http_have_the_name_that_they_used(http: httpx.AsyncClient) -> None:
    texts = set()
    for name in NAMES:
        asked = {**ASKED, "model": name}
        whole = (await http.post("/v1/completions", json=asked)).json()
        assert whole["model"] == name
        texts.add(whole["choices"][0]["text"])
        streamed = (await http.post("/v1/completions", json={**asked, "stream": True})).text
        assert f'"model":"{name}"' in streamed
        message = {"model": name, "max_tokens": 3, "messages": [{"role": "user", "content": "Hi"}]}
        assert (await http.post("/v1/messages", json=message)).json()["model"] == name
    assert len(texts) == 1  # the same seed and model
    assert (await http.post("/v1/completions", json=ASKED)).json()["model"] == NAMES[0]


async def test_tokens_and_echo_under_each_name(http: httpx.AsyncClient) -> None:
    for name in NAMES:
        found = (await http.post("/tokenize", json={"model": name, "prompt": "The sea"})).json()
        assert found["model"] == name
        tokens = found["tokens"]
        back = (await http.post("/detokenize", json={"model": name, "tokens": tokens})).json()
        assert back == {"model": name, "prompt": "The sea"}
        echo = {**ASKED, "model": name, "prompt": tokens, "echo": True}
        answer = (await http.post("/v1/completions", json=echo)).json()
        assert answer["choices"][0]["text"].startswith("The sea")


async def test_every_name_is_listed(http: httpx.AsyncClient, pipeline: Pipeline) -> None:
    listed = (await http.get("/v1/models")).json()["data"]
    assert [(entry["id"], entry["root"]) for entry in listed] == [(name, NAMES[0]) for name in sorted(NAMES)]
    assert len({entry["max_model_len"] for entry in listed}) == 1
    one = (await http.get(f"/v1/models/{NAMES[2]}")).json()
    assert (one["id"], one["root"]) == (NAMES[2], NAMES[0])
    tags = (await http.get("/api/tags")).json()["models"]
    assert [tag["name"] for tag in tags] == sorted(NAMES)
    unknown = await http.post("/v1/completions", json={**ASKED, "model": "fourth"})
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
    await pipeline.assert_idle()


async def test_requests_over_nats_reach_every_name(pipeline: Pipeline) -> None:
    answers = [await pipeline.client.complete({**ASKED, "model": name}) for name in NAMES]
    assert len({answer["choices"][0]["text"] for answer in answers}) == 1
    assert {answer["model"] for answer in answers} == {NAMES[0]}
    without = {**ASKED, "model": NAMES[1]}
    subject = subjects.generate("public", NAMES[2])
    assert (await pipeline.client.request(subject, without))["model"] == NAMES[0]  # both are names of it
    with pytest.raises(UnknownModel):
        await pipeline.client.complete({**ASKED, "model": "fourth"})


async def test_scheduler_and_executor_have_the_first_name_alone(pipeline: Pipeline) -> None:
    peers = pipeline.runtimes["scheduler-1"].mailbox.peers
    assert {peers.models(kind)[0] for kind in ("tokenizer", "executor", "scheduler", "detokenizer")} == {
        NAMES[0]
    }
    assert peers.aliases() == dict.fromkeys(NAMES[1:], NAMES[0])


@pytest.mark.parametrize(
    ("names", "why"),
    [
        ("other,gpt-4o", "'gpt-4o' is a name of model 'first' on this server"),
        ("gpt-4o", "'gpt-4o' is a name of model 'first' on this server"),
        ("other,first", "'first' is a name of another model on this server"),
    ],
)
async def test_a_name_of_another_model_is_refused(pipeline: Pipeline, names: str, why: str) -> None:
    settings = load(flags={"fleet": "beside", "model_name": names}).settings
    runtime = Runtime(tokenizer.build(settings), await pipeline.connect(), "beside", "tokenizer-9")
    with pytest.raises(SetupError, match=why):
        await runtime.start()


@pytest.mark.parametrize("kind", ["tokenizer", "detokenizer"])
async def test_another_vocabulary_under_the_same_name_is_refused(
    pipeline: Pipeline, kind: str, tmp_path: Path
) -> None:
    """Two fleets of one name on one server would read each other's token ids."""
    model = str(write_bpe_gguf(tmp_path / "tiny.gguf"))
    settings = load(flags={"fleet": "aliases", "model": model, "model_name": NAMES[0]}).settings
    runtime = Runtime(KINDS[kind](settings), await pipeline.connect(), "aliases", f"{kind}-9")
    await runtime.start()
    error = await asyncio.wait_for(runtime.failed(), 20)
    assert isinstance(error, SetupError)
    assert "serves another model under the name 'first' in this fleet" in str(error)
    await runtime.finish(5)
    same = Runtime(
        KINDS[kind](pipeline.settings), await pipeline.connect(), "aliases", f"{kind}-8",
        heartbeat_interval_us=50_000,
    )  # fmt: skip
    await same.start()
    await pipeline.until(lambda: f"{kind}-8" in pipeline.runtimes[f"{kind}-1"].mailbox.peers.ready(kind))
    await same.finish(5)
    assert (same.failure, pipeline.runtimes[f"{kind}-1"].failure) == (None, None)
