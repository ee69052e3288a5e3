"""Another detokenizer finishes an answer with log probabilities: no token lacks its own."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from support.memory_bus import MemoryBroker
from support.pipeline.five_actors import Pipeline
from support.small_llama import write_small_llama

from shared.nats.interface import Bus

ASKED: dict[str, Any] = {
    "prompt": "The quick brown fox", "max_tokens": 150, "ignore_eos": True, "temperature": 0.9, "seed": 3,
    "n": 2, "logprobs": 2,
}  # fmt: skip


LIMITS = {"kv_blocks": 300, "slots": 16, "max_context": 1_024}


async def started(tmp_path: Path) -> Pipeline:
    broker = MemoryBroker()

    async def connect() -> Bus:
        return broker.connect()

    model = str(write_small_llama(tmp_path / "tiny", hidden=64, layers=2))
    return await Pipeline.start(
        connect, "scores", backend="torch", dtype="f32", model=model, model_name="tiny", **LIMITS
    )


async def die(pipeline: Pipeline, name: str) -> None:
    """A service ends without a word."""
    runtime = pipeline.runtimes.pop(name)
    runtime.bus.publish = lambda *args, **more: None  # type: ignore[method-assign]  # unheard
    await runtime.finish(0)


@pytest.mark.parametrize("stream", [False, True])
async def test_another_detokenizer_has_the_log_probabilities_of_all_tokens(
    tmp_path: Path, stream: bool
) -> None:
    pipeline = await started(tmp_path)
    body = {**ASKED, "model": "tiny"}
    want = await pipeline.client.complete(body)

    async def ask() -> list[dict[str, Any]]:
        if not stream:
            return (await pipeline.client.complete({**body, "request_id": "second"}))["choices"]
        return await streamed(pipeline, {**body, "request_id": "second"})

    asking = asyncio.create_task(ask())
    sequences = pipeline.runtimes["scheduler-1"].actor._core.state.sequences  # type: ignore[attr-defined]  # white box
    await pipeline.until(lambda: any(s.generated > 20 for s in sequences.values()))
    await die(pipeline, "detokenizer-1")
    await pipeline.add("detokenizer", "detokenizer-2")
    choices = await asking
    for got, wanted in zip(choices, want["choices"], strict=True):
        assert got["text"] == wanted["text"]
        assert got["logprobs"]["token_logprobs"] == wanted["logprobs"]["token_logprobs"]
        assert got["logprobs"]["top_logprobs"] == wanted["logprobs"]["top_logprobs"]
    await pipeline.assert_idle()
    await pipeline.stop()


async def streamed(pipeline: Pipeline, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The choices of the last attempt, put together."""
    choices: list[dict[str, Any]] = []
    attempt = 0
    async for frame in pipeline.client.stream(body):
        if frame["attempt"] != attempt:
            attempt = frame["attempt"]
            scores = ("token_logprobs", "top_logprobs")
            choices = [{"text": "", "logprobs": {name: [] for name in scores}} for _ in range(body["n"])]
        for piece in frame.get("choices", ()) if frame["type"] == "delta" else ():
            choice = choices[piece["index"]]
            choice["text"] += piece["text"]
            for name, values in choice["logprobs"].items():
                values += piece["logprobs"][name]
    return choices
