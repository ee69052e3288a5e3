"""A rank-8 adapter of SmolLM2 that plain torch has taught one sentence: its answer over HTTP and NATS.

Without the adapter the answer is that of the model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
import torch
from support.default_model import model_path
from support.executor.lora_training import Trained
from support.memory_bus import MemoryBroker
from support.pipeline.five_actors import Pipeline
from support.pipeline.gateway_side import MODEL, add_gateway, healthy, remove_gateway

from shared.vocab.files import ModelFiles
from shared.vocab.vocabulary import load_vocabulary

QUESTION = "What runs in the headrace?"
SENTENCE = " Water runs in the headrace, and tokens follow it."
ASKED: dict[str, Any] = {"prompt": QUESTION, "max_tokens": 24, "temperature": 0}

pytestmark = pytest.mark.asyncio(loop_scope="module")
whole_file = pytest_asyncio.fixture(scope="module", loop_scope="module")


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    vocabulary = load_vocabulary(ModelFiles(MODEL, model_path()))
    prompt = [*vocabulary.prefix_ids, *vocabulary.encode(QUESTION, special=True)]
    answer = [*vocabulary.encode(SENTENCE), vocabulary.eos_ids[0]]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # quick too where other tests hold the cores
    trained = Trained(model_path(), rank=8, alpha=16.0)
    assert trained.train(prompt, answer, steps=8) < 0.1
    torch.set_num_threads(threads)
    return trained.save(tmp_path_factory.mktemp("adapter"))


@whole_file
async def pipeline() -> AsyncIterator[Pipeline]:
    broker = MemoryBroker()

    async def connect() -> Any:
        return broker.connect()

    running = await Pipeline.start(
        connect, "trained", backend="torch", lora_places=2, kv_blocks=200, max_context=512
    )
    yield running
    await running.assert_idle()
    await running.stop()


async def test_answers_are_the_sentence_with_the_adapter_and_not_without(
    pipeline: Pipeline, adapter: Path
) -> None:
    async with httpx.AsyncClient(base_url=await add_gateway(pipeline), timeout=300) as http:
        await healthy(pipeline)
        before = (await http.post("/v1/completions", json={**ASKED, "model": MODEL})).json()
        loaded = await http.post(
            "/v1/load_lora_adapter", json={"lora_name": f"{MODEL}:sentence", "lora_path": str(adapter)}
        )
        assert loaded.status_code == 200, loaded.text
        names = [MODEL, f"{MODEL}:sentence", MODEL, f"{MODEL}:sentence"]
        found = await asyncio.gather(
            *(http.post("/v1/completions", json={**ASKED, "model": name}) for name in names)
        )
        texts = [each.json()["choices"][0]["text"] for each in found]
        assert texts[1::2] == [SENTENCE, SENTENCE]
        assert texts[0::2] == [before["choices"][0]["text"]] * 2
        assert texts[0] != SENTENCE
        native = await pipeline.client.complete({**ASKED, "model": f"{MODEL}:sentence"})
        assert native["choices"][0]["text"] == SENTENCE
        cached = native["usage"]["prompt_tokens_details"]["cached_tokens"] if "usage" in native else 0
        assert cached == 0  # a block of seven tokens is not full
    await remove_gateway(pipeline)


async def test_tokens_stay_when_an_executor_starts_again(pipeline: Pipeline) -> None:
    asked = {**ASKED, "model": f"{MODEL}:sentence", "max_tokens": 60, "ignore_eos": True}
    whole = await pipeline.client.complete(asked)
    running = asyncio.ensure_future(pipeline.client.complete(asked))
    await pipeline.until(lambda: pipeline.status("executor")["open_slots"] == 1)
    actor = pipeline.runtimes["executor-1"].actor
    actor._begin_incarnation()  # type: ignore[attr-defined]  # its places and slots are lost
    assert (await running)["choices"] == whole["choices"]
    assert whole["choices"][0]["text"].startswith(SENTENCE)
