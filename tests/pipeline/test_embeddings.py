"""Vectors of texts: through all actors beside transformers, over HTTP, and while services die."""

from __future__ import annotations

import asyncio
import base64
import json
from array import array
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import pytest_asyncio
import torch
import transformers
from openai import AsyncOpenAI
from support import virtual_loop
from support.chat_families import write_folder
from support.executor import paged_engine
from support.executor.tiny_encoders import CONTEXT, KINDS, encoder_folder, tokenizer_of, wanted_vector
from support.memory_bus import MemoryBroker
from support.pipeline.five_actors import Pipeline
from support.pipeline.gateway_side import MODEL, add_gateway, healthy, remove_gateway
from support.pipeline.virtual_fleet import VirtualFleet
from support.text_models import served
from tokenizers import Tokenizer, processors

from shared.client.client import Client, probe
from shared.errors import BadRequest
from shared.nats import subjects

pytestmark = pytest.mark.asyncio(loop_scope="module")
whole_file = pytest_asyncio.fixture(scope="module", loop_scope="module")

PROMPTS = 100
END = "<|endoftext|>"


def embedding_folder(path: Path) -> Path:
    """A tiny Qwen3 whose tokenizer puts an end token after each text, as Qwen3-Embedding's does."""
    folder = write_folder("qwen3", path)
    file = folder / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file))
    end = [(END, tokenizer.token_to_id(END))]
    tokenizer.post_processor = processors.TemplateProcessing(single=f"$A {END}", special_tokens=end)
    tokenizer.save(str(file))
    return folder


async def test_a_vector_is_that_of_transformers_also_beside_chats(tmp_path: Path) -> None:
    folder = embedding_folder(tmp_path / "m")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32)
    broker = MemoryBroker()

    async def connect() -> Any:
        return broker.connect()

    flags = {"backend": "torch", "dtype": "f32", "model": str(folder), "model_name": "m", "kv_blocks": 100}
    pipeline = await Pipeline.start(connect, "vectors", **flags)

    async def answers() -> list[str]:
        bodies = [
            {"model": "m", "prompt": f"The {n}", "max_tokens": 24, "temperature": 1, "seed": n}
            for n in range(4)
        ]
        replies = await asyncio.gather(*map(pipeline.client.complete, bodies))
        return [reply["choices"][0]["text"] for reply in replies]

    alone = await answers()
    texts = ["The quick brown fox", "naïve 日本語 1234", "x " * 60, "The quick brown fox"]
    beside = asyncio.create_task(answers())
    vectors = await asyncio.gather(*(pipeline.client.embed({"model": "m", "input": each}) for each in texts))
    assert await beside == alone
    for text, vector in zip(texts, vectors, strict=True):
        ids = tokenizer(text)["input_ids"]
        assert ids[-1] == tokenizer.convert_tokens_to_ids(END)
        tokenized = await pipeline.client.request(subjects.tokenize("public", "m"), {"input": text})
        assert tokenized["tokens"] == ids
        with torch.no_grad():
            state = model(torch.tensor([ids])).last_hidden_state[0, -1].double()
        assert float(state / state.norm() @ torch.tensor(vector).double()) > 0.999999
        again = await pipeline.client.complete({"model": "m", "input": ids})
        assert again["embedding"] == pytest.approx(list(vector), abs=1e-6)
        assert again["usage"]["prompt_tokens"] == len(ids)
    most = len(vectors[0])
    with pytest.raises(BadRequest, match=f"dimensions: vectors of model m have {most} numbers, and not"):
        await pipeline.client.embed({"model": "m", "input": "x", "dimensions": most + 1})
    await pipeline.assert_idle()
    await pipeline.stop()


@pytest.mark.parametrize("kind", KINDS)
async def test_an_encoder_gives_vectors_and_nothing_else(kind: str, tmp_path: Path) -> None:
    folder = encoder_folder(kind, tmp_path / "m")
    broker = MemoryBroker()

    async def connect() -> Any:
        return broker.connect()

    flags = {"backend": "torch", "dtype": "f32", "model": str(folder), "model_name": "m", "step_tokens": 32}
    pipeline = await Pipeline.start(connect, "encoder", **flags)
    texts = ["The quick brown fox", "naïve 日本語 1234", "jumps over " * 12, "The quick brown fox"] * 5
    vectors = await asyncio.gather(*(pipeline.client.embed({"model": "m", "input": each}) for each in texts))
    for text, vector in zip(texts, vectors, strict=True):
        ids = tokenizer_of(kind).encode(text).ids
        assert float(wanted_vector(kind, ids) @ torch.tensor(vector).double()) > 0.999999
    again = await pipeline.client.embed({"model": "m", "input": texts[2]})  # a hit in the prefix cache
    assert again == pytest.approx(list(vectors[2]), abs=1e-6)
    assert await probe(pipeline.client, "m") == "input"
    with pytest.raises(BadRequest, match="m is an encoder"):
        await pipeline.client.complete({"model": "m", "prompt": "The", "max_tokens": 2})
    with pytest.raises(BadRequest, match="context"):
        await pipeline.client.embed({"model": "m", "input": [7] * (CONTEXT + 1)})
    most = CONTEXT if kind == "bert" else CONTEXT - 2  # others begin after the id of padding
    longest = await pipeline.client.embed({"model": "m", "input": [7] * most})
    assert float(wanted_vector(kind, [7] * most) @ torch.tensor(longest).double()) > 0.999999
    with pytest.raises(BadRequest, match="context"):
        await pipeline.client.embed({"model": "m", "input": [7] * (most + 1)})
    await pipeline.assert_idle()
    await pipeline.stop()


# ---- over HTTP ----------------------------------------------------------------------------------


@whole_file
async def pipeline() -> AsyncIterator[Pipeline]:
    broker = MemoryBroker()

    async def connect() -> Any:
        return broker.connect()

    running = await Pipeline.start(connect, "embeddings", sim="step=2000")
    yield running
    await running.stop()


@whole_file
async def http(pipeline: Pipeline) -> AsyncIterator[httpx.AsyncClient]:
    url = await add_gateway(pipeline)
    await healthy(pipeline)
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        yield client
    await remove_gateway(pipeline)


async def embed(http: httpx.AsyncClient, given: Any, **fields: Any) -> Any:
    reply = await http.post("/v1/embeddings", json={"model": MODEL, "input": given, **fields})
    assert reply.status_code == 200, reply.text
    return reply.json()


async def test_every_form_of_input_is_embedded(http: httpx.AsyncClient) -> None:
    found = await embed(http, "Hello")
    assert (found["object"], found["model"]) == ("list", MODEL)
    (first,) = found["data"]
    assert (first["object"], first["index"]) == ("embedding", 0)
    vector = first["embedding"]
    assert len(vector) == 64
    assert np.linalg.norm(vector) == pytest.approx(1)
    tokens = (await http.post("/tokenize", json={"model": MODEL, "prompt": "Hello"})).json()["tokens"]
    assert found["usage"] == {"prompt_tokens": len(tokens), "total_tokens": len(tokens)}
    for same in (["Hello"], tokens, [tokens]):
        assert (await embed(http, same))["data"] == found["data"]
    several = await embed(http, ["Hello", "Bye", "Hello"])
    assert [each["index"] for each in several["data"]] == [0, 1, 2]
    one, other, again = (each["embedding"] for each in several["data"])
    assert one == again == vector != other
    pair = (await embed(http, [tokens, tokens[:1]]))["data"]
    assert pair[0]["embedding"] == vector


async def test_vectors_come_as_bytes_and_by_leading_numbers(http: httpx.AsyncClient) -> None:
    vector = (await embed(http, "Hello"))["data"][0]["embedding"]
    (packed,) = (await embed(http, "Hello", encoding_format="base64", user="me"))["data"]
    assert list(np.frombuffer(base64.b64decode(packed["embedding"]), "<f4")) == vector
    (cut,) = (await embed(http, "Hello", dimensions=5))["data"]
    assert cut["embedding"] == pytest.approx(list(np.array(vector[:5]) / np.linalg.norm(vector[:5])))


async def test_the_clients_of_openai_and_ollama(http: httpx.AsyncClient) -> None:
    vector = (await embed(http, "Hello"))["data"][0]["embedding"]
    async with AsyncOpenAI(base_url=f"{http.base_url}/v1", api_key="any", max_retries=0) as client:
        found = await client.embeddings.create(model=MODEL, input=["Hello", "Bye"])
        assert found.data[0].embedding == pytest.approx(vector)
    body = {"model": f"{MODEL}:latest", "input": ["Hello"], "keep_alive": "5m", "truncate": True}
    reply = await http.post("/api/embed", json=body)
    assert reply.status_code == 200, reply.text
    assert reply.json()["embeddings"] == [vector]
    assert reply.json()["prompt_eval_count"] == 1
    refused = await http.post("/api/embed", json={"model": MODEL, "input": []})
    assert (refused.status_code, list(refused.json())) == (400, ["error"])


@pytest.mark.parametrize(
    ("body", "param", "named"),
    [
        ({}, "input", "is missing"),
        ({"input": ""}, "input", "is empty"),
        ({"input": []}, "input", "is empty"),
        ({"input": ["Hello", ""]}, "input", "is empty"),
        ({"input": [[1, 2], []]}, "input", "is empty"),
        ({"input": 5}, "input", "one text or one list of token ids"),
        ({"input": ["Hello", 5]}, "input", "one text or one list of token ids"),
        ({"input": [10**7]}, "input", "is not a token id"),
        ({"input": ["x"] * 2_049}, "input", "2049 inputs are over 2048"),
        ({"input": [[5] * 8_193]}, "input", "context_length_exceeded: This model's maximum context length"),
        ({"input": "x", "dimensions": 0}, "dimensions", "greater than or equal to 1"),
        ({"input": "x", "dimensions": 65}, None, "have 64 numbers, and not 65"),
        ({"input": "x", "encoding_format": "int8"}, "encoding_format", "'float' or 'base64'"),
        ({"input": "x", "temperature": 0}, "temperature", "not a field of a request"),
        ({"input": "x", "stream": True}, "stream", "vectors come at once"),
        ({"input": "x", "prompt": "y"}, "prompt", "is not for this path"),
    ],
)
async def test_embeddings_have_the_errors_of_a_chat(
    http: httpx.AsyncClient, body: dict[str, Any], param: str | None, named: str
) -> None:
    reply = await http.post("/v1/embeddings", json={"model": MODEL, **body})
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert named in error["message"]
    assert error["param"] == param
    unknown = await http.post("/v1/embeddings", json={"model": "other", "input": "x"})
    assert unknown.status_code == 404


async def test_a_vector_is_not_kept_for_later(pipeline: Pipeline) -> None:
    check = subjects.check("public", MODEL)
    assert "seed" in await pipeline.client.request(check, {"prompt": "Hello"})
    with pytest.raises(BadRequest, match="`input`: vectors are not kept for later"):
        await pipeline.client.request(check, {"input": "Hello"})


async def test_many_inputs_are_in_the_pipeline_at_once(http: httpx.AsyncClient, pipeline: Pipeline) -> None:
    steps = pipeline.status("scheduler")["executors"]["executor-1"]["steps"]
    texts = [f"text {number}" for number in range(600)]
    found = await embed(http, texts)
    assert [each["index"] for each in found["data"]] == list(range(600))
    assert len({json.dumps(each["embedding"]) for each in found["data"]}) == 600
    assert pipeline.status("scheduler")["executors"]["executor-1"]["steps"] - steps < 300
    await pipeline.assert_idle()


async def test_a_failure_of_one_fails_the_call_and_ends_the_others(
    http: httpx.AsyncClient, pipeline: Pipeline
) -> None:
    texts = [*("x " * 4_000 + str(n) for n in range(20)), [10**7]]
    reply = await http.post("/v1/embeddings", json={"model": MODEL, "input": texts})
    assert reply.status_code == 400
    assert "is not a token id" in reply.json()["error"]["message"]
    await pipeline.assert_idle()


async def test_a_client_that_leaves_ends_its_requests(http: httpx.AsyncClient, pipeline: Pipeline) -> None:
    texts = ["x " * 4_000 + str(number) for number in range(200)]
    done = pipeline.status("scheduler")["executors"]["executor-1"]["steps"]
    with pytest.raises(httpx.ReadTimeout):
        await http.post("/v1/embeddings", json={"model": MODEL, "input": texts}, timeout=0.7)
    await pipeline.assert_idle()
    assert pipeline.status("scheduler")["executors"]["executor-1"]["steps"] - done < 200 * 8_000 / 2_048


# ---- while services die -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "victims",
    [
        ("executor",),
        ("detokenizer",),
        ("scheduler",),
        ("detokenizer", "executor"),
        ("detokenizer", "scheduler"),
    ],
    ids="+".join,
)
def test_no_vector_is_lost_or_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, victims: tuple[str, ...]
) -> None:
    model = served(tmp_path)
    monkeypatch.setattr(paged_engine, "VOCAB", model.vocabulary.size)
    kinds = [kind for kind in ("scheduler", "detokenizer", "executor") for _ in range(2)]

    def wanted(number: int) -> list[float]:
        text = model.vocabulary.encode(text_of(number), special=True)
        ids = [*model.vocabulary.prefix_ids, *text, *model.vocabulary.suffix_ids]
        return array("f", paged_engine.vector_of(ids)).tolist()

    async def live() -> None:
        fleet = VirtualFleet(model, 1)
        names = [await fleet.add(kind) for kind in ("kv_offload", *kinds, "tokenizer")]
        client = await Client.open(fleet.broker.connect())
        await asyncio.sleep(3)

        async def vector(number: int) -> list[float]:
            body = {"model": "tiny", "input": text_of(number), "timeout_s": 60}
            return (await client.embed(body)).tolist()

        asking = [asyncio.create_task(vector(number)) for number in range(PROMPTS)]
        await asyncio.sleep(0.01)
        for victim in victims:
            of_kind = {n: fleet.runtimes[n].actor.status() for n in names if n.startswith(victim)}
            busy = max(of_kind, key=lambda n: int(str(of_kind[n].get("requests", 0))))
            await fleet.kill(busy)
        assert not all(task.done() for task in asking), "the deaths come too late to matter"
        assert [await task for task in asking] == [wanted(number) for number in range(PROMPTS)]
        await fleet.stop()

    virtual_loop.run(live())


def text_of(number: int) -> str:
    return f"Hello {number} " + "again " * (number % 7)
