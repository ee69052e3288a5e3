"""Requests through all five services, over the memory bus and over a real nats-server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from support.pipeline.five_actors import Connect, Pipeline
from support.token_tap import Tap

from services.tokenizer.loading import load_model
from shared.errors import BadRequest, Cancelled, DeadlineExceeded, DuplicateRequest, Unavailable, UnknownModel

CHAT: dict[str, Any] = {
    "model": "smollm2-135m-instruct",
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "max_tokens": 12,
    "seed": 7,
    "ignore_eos": True,
}


@pytest.fixture
async def pipeline(connect: Connect, fleet: str) -> AsyncIterator[Pipeline]:
    running = await Pipeline.start(connect, fleet)
    yield running
    await running.stop()


async def text_of(pipeline: Pipeline, body: dict[str, Any]) -> str:
    frames = [frame async for frame in pipeline.client.stream(body)]
    choices = [choice for frame in frames for choice in frame.get("choices", [])]
    return "".join(choice.get("delta", {}).get("content") or "" for choice in choices)


async def test_a_plain_request_gets_one_openai_shaped_reply(pipeline: Pipeline) -> None:
    reply = await pipeline.client.complete(CHAT)
    assert reply["object"] == "chat.completion"
    assert reply["usage"]["prompt_tokens"] == 37
    assert reply["usage"]["completion_tokens"] == 12
    assert reply["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert reply["choices"][0]["finish_reason"] == "length"
    assert reply["choices"][0]["message"]["role"] == "assistant"
    await pipeline.assert_idle()


async def test_stream_has_the_same_text_as_the_plain_reply(pipeline: Pipeline) -> None:
    reply = await pipeline.client.complete(CHAT)
    frames = [frame async for frame in pipeline.client.stream(CHAT)]
    assert [frames[0]["type"], frames[-1]["type"]] == ["accepted", "done"]
    assert [f["frame"] for f in frames] == list(range(len(frames)))
    assert await text_of(pipeline, CHAT) == reply["choices"][0]["message"]["content"]


async def test_choices_are_distinct_and_reproducible(pipeline: Pipeline) -> None:
    body = {**CHAT, "n": 3}
    first, again = await pipeline.client.complete(body), await pipeline.client.complete(body)
    texts = [choice["message"]["content"] for choice in first["choices"]]
    assert len(set(texts)) == 3
    assert [choice["message"]["content"] for choice in again["choices"]] == texts
    one = await pipeline.client.complete(CHAT)
    assert one["choices"][0]["message"]["content"] == texts[0]
    assert first["usage"]["completion_tokens"] == 36
    await pipeline.assert_idle()


async def test_a_stop_string_ends_the_answer_before_it(pipeline: Pipeline) -> None:
    full = (await pipeline.client.complete({**CHAT, "max_tokens": 40}))["choices"][0]["message"]["content"]
    stop = full[len(full) // 2 : len(full) // 2 + 3]
    reply = await pipeline.client.complete({**CHAT, "max_tokens": 40, "stop": [stop]})
    assert reply["choices"][0]["finish_reason"] == "stop"
    assert reply["choices"][0]["message"]["content"] == full[: full.index(stop)]
    assert reply["usage"]["completion_tokens"] < 40
    await pipeline.assert_idle()


async def test_a_stop_token_ends_the_answer_and_has_no_text(pipeline: Pipeline, connect: Connect) -> None:
    """Unless its text is asked for; it counts as a token either way."""
    tap = Tap()
    await (await connect()).subscribe(f"hr.{pipeline.settings.fleet}.detokenizer.*.in.*", tap.take)
    body = {**CHAT, "max_tokens": 40}
    await pipeline.client.complete({**body, "request_id": "full"})
    ids, text_of_ids = tap.ids["full", 0], load_model(pipeline.settings).vocabulary.decode
    at = next(i for i in range(5, 40) if ids[i] not in ids[:i] and text_of_ids([ids[i]]))
    body["stop_token_ids"] = [ids[at]]
    for more, shown in (({}, ids[:at]), ({"include_stop_str_in_output": True}, ids[: at + 1])):
        reply = await pipeline.client.complete({**body, **more})
        assert reply["choices"][0]["finish_reason"] == "stop"
        assert reply["choices"][0]["message"]["content"] == text_of_ids(shown)
        assert await text_of(pipeline, {**body, **more}) == text_of_ids(shown)
        assert reply["usage"]["completion_tokens"] == at + 1
    await pipeline.assert_idle()


async def test_many_streams_at_once_lose_nothing(pipeline: Pipeline) -> None:
    bodies = [{**CHAT, "seed": i, "max_tokens": 20} for i in range(40)]
    alone = [await text_of(pipeline, body) for body in bodies[:3]]
    together = await asyncio.gather(*(text_of(pipeline, body) for body in bodies))
    assert together[:3] == alone
    assert len(set(together)) == 40
    await pipeline.assert_idle()


async def test_cancel_ends_a_stream_with_499(pipeline: Pipeline) -> None:
    body = {**CHAT, "max_tokens": 5000, "request_id": "to-be-cancelled"}
    with pytest.raises(Cancelled):
        async for frame in pipeline.client.stream(body):
            if frame["type"] == "delta":
                pipeline.client.cancel("to-be-cancelled")
    await pipeline.assert_idle()


async def test_a_client_that_goes_away_frees_its_blocks(pipeline: Pipeline, connect: Connect) -> None:
    from shared.client.client import Client

    bus = await connect()
    leaving = await Client.open(bus)
    async for frame in leaving.stream({**CHAT, "max_tokens": 5000, "request_id": "left"}):
        if frame["type"] == "delta":
            break
    await bus.drain()
    await pipeline.assert_idle()


async def test_the_same_id_twice_is_a_conflict(pipeline: Pipeline) -> None:
    body = {**CHAT, "max_tokens": 3000, "request_id": "twice"}
    stream = pipeline.client.stream(body)
    await anext(stream)
    with pytest.raises(DuplicateRequest, match="twice"):
        await pipeline.client.complete(body)
    pipeline.client.cancel("twice")
    with pytest.raises(Cancelled):
        async for _ in stream:
            pass
    await pipeline.assert_idle()


async def test_a_deadline_is_a_typed_error(pipeline: Pipeline) -> None:
    with pytest.raises(DeadlineExceeded):
        await pipeline.client.complete({**CHAT, "max_tokens": 8000, "timeout_s": 0.1})
    await pipeline.assert_idle()


async def test_a_prompt_that_never_fits_is_a_400(pipeline: Pipeline) -> None:
    with pytest.raises(BadRequest, match="9000"):
        await pipeline.client.complete({"model": CHAT["model"], "prompt": [5] * 9000})


async def test_a_stopped_executor_comes_back_under_another_name(pipeline: Pipeline) -> None:
    """Its sequences go on at the next executor, with the tokens they would have had."""
    body = {**CHAT, "max_tokens": 200}
    undisturbed = await text_of(pipeline, body)
    texts = [asyncio.create_task(text_of(pipeline, body)) for _ in range(4)]
    scheduler = pipeline.runtimes["scheduler-1"].actor
    await pipeline.until(lambda: scheduler.status()["running"] == 4)
    await pipeline.runtimes.pop("executor-1").finish(0)
    await pipeline.add("executor", "executor-1")
    assert await asyncio.gather(*texts) == [undisturbed] * 4
    await pipeline.assert_idle()


async def test_no_scheduler_is_a_503(pipeline: Pipeline) -> None:
    await pipeline.client.complete(CHAT)  # the start is over
    await pipeline.runtimes.pop("scheduler-1").finish(0)
    with pytest.raises(Unavailable):
        await pipeline.client.complete(CHAT)


async def test_two_fleets_on_one_server_do_not_deny_each_other(pipeline: Pipeline, connect: Connect) -> None:
    other = await Pipeline.start(connect, f"{pipeline.settings.fleet}-other", model_name="another-model")
    await pipeline.until(lambda: len(pipeline.status("tokenizer")["models_here"]) == 2)
    await pipeline.until(lambda: len(other.status("tokenizer")["models_here"]) == 2)
    for model in ("another-model", CHAT["model"]) * 3:
        assert (await pipeline.client.complete({**CHAT, "model": model}))["model"] == model
    with pytest.raises(UnknownModel):
        await pipeline.client.complete({**CHAT, "model": "absent"})
    await other.stop()
