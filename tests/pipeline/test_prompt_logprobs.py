"""Log probabilities of prompts, through all actors: those of transformers, whole also while services die."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
import torch
import transformers
from support.memory_bus import MemoryBroker
from support.pipeline.five_actors import Pipeline
from support.pipeline.gateway_side import add_gateway, healthy, remove_gateway
from support.small_llama import write_small_llama

from services.tokenizer import prepare
from shared.nats.interface import Bus

pytestmark = pytest.mark.asyncio(loop_scope="module")
whole_file = pytest_asyncio.fixture(scope="module", loop_scope="module")
LIMITS = {"kv_blocks": 60, "slots": 8, "max_context": 512, "step_tokens": 64}
TEXT = "The quick brown fox jumps over the lazy dog, and the dog sleeps. " * 12


class Fleet:
    """The actors, and the model in transformers."""

    def __init__(self, pipeline: Pipeline, http: httpx.AsyncClient, folder: Path) -> None:
        self.pipeline, self.http = pipeline, http
        self._model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    async def tokens(self, text: str) -> list[int]:
        return list((await self.http.post("/tokenize", json={"prompt": text})).json()["tokens"])

    def wanted(self, ids: list[int]) -> torch.Tensor:
        """`[tokens - 1, vocab]`"""
        with torch.inference_mode():
            return self._model(torch.tensor([ids])).logits[0, :-1].double().log_softmax(-1)


@whole_file
async def fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    broker = MemoryBroker()

    async def connect() -> Bus:
        return broker.connect()

    folder = write_small_llama(tmp_path_factory.mktemp("m") / "tiny", hidden=64, layers=2)
    pipeline = await Pipeline.start(
        connect, "prompts", backend="torch", dtype="f32", model=str(folder), model_name="m", **LIMITS
    )
    url = await add_gateway(pipeline)
    async with httpx.AsyncClient(base_url=url, timeout=30) as http:
        await healthy(pipeline)
        yield Fleet(pipeline, http, folder)
    await remove_gateway(pipeline)
    await pipeline.assert_idle()
    await pipeline.stop()


def check(fleet: Fleet, ids: list[int], entries: list[Any], alternatives: int) -> None:
    """`entries` is vLLM's `prompt_logprobs`."""
    assert len(entries) == len(ids)
    assert entries[0] is None
    for row, token, entry in zip(fleet.wanted(ids), ids[1:], entries[1:], strict=True):
        best = row.topk(alternatives).indices.tolist() if alternatives else []
        assert entry.keys() == {str(each) for each in [token, *best]}
        assert next(iter(entry)) == str(token)
        for name, found in entry.items():
            assert found["logprob"] == pytest.approx(float(row[int(name)]), abs=1e-4)
        assert entry[str(token)]["rank"] == 1 + int((row > row[token]).sum())


async def test_a_completion_has_the_log_probabilities_of_its_prompt(fleet: Fleet) -> None:
    ids = await fleet.tokens(TEXT)
    assert len(ids) > 2 * LIMITS["step_tokens"]  # chunks
    for again in range(2):  # the second time its blocks are in the prefix cache
        body = {"model": "m", "prompt": TEXT, "max_tokens": 1, "prompt_logprobs": 3, "n": 2, "temperature": 1}
        answer = (await fleet.http.post("/v1/completions", json={**body, "seed": again})).json()
        for choice in answer["choices"]:
            check(fleet, ids, choice["prompt_logprobs"], 3)


async def test_an_echo_with_logprobs_begins_with_the_prompt_and_goes_on_with_the_answer(fleet: Fleet) -> None:
    ids = await fleet.tokens(TEXT)
    body = {
        "model": "m",
        "prompt": ids,
        "max_tokens": 4,
        "ignore_eos": True,
        "temperature": 0,
        "echo": True,
        "logprobs": 2,
    }
    (choice,) = (await fleet.http.post("/v1/completions", json=body)).json()["choices"]
    found = choice["logprobs"]
    assert {len(column) for column in found.values()} == {len(ids) + 4}
    assert choice["text"].startswith(TEXT)
    assert "".join(found["tokens"]) == choice["text"]
    assert [
        choice["text"][at:].startswith(token)
        for at, token in zip(found["text_offset"], found["tokens"], strict=True)
    ]
    rows = fleet.wanted(ids)
    assert found["token_logprobs"][0] is None
    assert found["top_logprobs"][0] is None
    wanted = [float(row[token]) for row, token in zip(rows, ids[1:], strict=True)]
    assert found["token_logprobs"][1 : len(ids)] == pytest.approx(wanted, abs=1e-4)
    best = [sorted(row.topk(2).values.tolist()) for row in rows]
    for row, tops in zip(best, found["top_logprobs"][1 : len(ids)], strict=True):
        assert sorted(tops.values()) == pytest.approx(row[-len(tops) :], abs=1e-4)


async def test_an_echo_without_an_answer_has_the_prompt_alone(fleet: Fleet) -> None:
    ids = await fleet.tokens("The quick brown fox")
    body = {"model": "m", "prompt": [ids, ids[:1]], "max_tokens": 0, "echo": True, "logprobs": 1}
    answer = (await fleet.http.post("/v1/completions", json=body)).json()
    first, second = (choice["logprobs"] for choice in answer["choices"])
    assert len(first["tokens"]) == len(first["token_logprobs"]) == len(ids)
    assert second["token_logprobs"] == second["top_logprobs"] == [None]
    assert answer["usage"]["completion_tokens"] == 0
    assert answer["usage"]["total_tokens"] == len(ids) + 1


async def test_a_stream_begins_with_the_log_probabilities_of_its_prompt(fleet: Fleet) -> None:
    body = {
        **{"model": "m", "prompt": "The quick brown fox", "max_tokens": 4, "ignore_eos": True},
        **{"temperature": 0, "echo": True, "logprobs": 1, "prompt_logprobs": 1},
    }
    (whole,) = (await fleet.http.post("/v1/completions", json=body)).json()["choices"]
    streamed = (await fleet.http.post("/v1/completions", json={**body, "stream": True})).text
    events = [line.removeprefix("data: ") for line in streamed.splitlines() if line.startswith("data: {")]
    chunks = [json.loads(event)["choices"][0] for event in events]
    assert chunks[0]["prompt_logprobs"] == whole["prompt_logprobs"]
    assert "".join(chunk["text"] for chunk in chunks) == whole["text"]
    for name, column in whole["logprobs"].items():
        assert [each for chunk in chunks if chunk["logprobs"] for each in chunk["logprobs"][name]] == column


async def test_a_chat_has_the_log_probabilities_of_its_prompt(fleet: Fleet) -> None:
    chat = {"messages": [{"role": "user", "content": "The fox"}]}
    ids = (await fleet.http.post("/tokenize", json=chat)).json()["tokens"]
    body = {"model": "m", "max_tokens": 2, "prompt_logprobs": True, **chat}
    check(fleet, ids, (await fleet.http.post("/v1/chat/completions", json=body)).json()["prompt_logprobs"], 1)


@pytest.mark.parametrize("value", [21, -1, "x", 1.5])
async def test_a_wrong_number_of_alternatives_is_refused_by_name(fleet: Fleet, value: object) -> None:
    body = {"model": "m", "prompt": "The", "prompt_logprobs": value}
    answer = await fleet.http.post("/v1/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt_logprobs")


async def test_more_log_probabilities_than_a_message_holds_are_refused(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = await fleet.tokens(TEXT)
    monkeypatch.setattr(prepare, "MOST_PROMPT_SCORES", 3 * len(ids))
    body = {"model": "m", "prompt": TEXT, "max_tokens": 1, "prompt_logprobs": 2}
    assert (await fleet.http.post("/v1/completions", json=body)).status_code == 200
    answer = await fleet.http.post("/v1/completions", json={**body, "prompt_logprobs": 3})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt_logprobs")


async def test_another_detokenizer_has_the_log_probabilities_of_the_prompt(fleet: Fleet) -> None:
    pipeline, ids = fleet.pipeline, await fleet.tokens(TEXT)
    body = {"model": "m", "prompt": TEXT, "max_tokens": 150, "ignore_eos": True, "prompt_logprobs": 2}
    asking = asyncio.create_task(pipeline.client.complete(body))
    sequences = pipeline.runtimes["scheduler-1"].actor._core.state.sequences  # type: ignore[attr-defined]  # white box
    await pipeline.until(lambda: any(s.generated > 5 for s in sequences.values()))
    runtime = pipeline.runtimes.pop("detokenizer-1")
    runtime.bus.publish = lambda *args, **more: None  # type: ignore[method-assign]  # it dies unheard
    await runtime.finish(0)
    await pipeline.add("detokenizer", "detokenizer-2")
    check(fleet, ids, [None, *(await asking)["prompt_logprobs"][1:]], 2)
