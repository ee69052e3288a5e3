"""Everything is lost in the middle of long answers: with savepoints they go on, to the same text."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from support.pipeline.five_actors import Connect
from support.pipeline.kept import Kept, ended, jetstream
from support.small_llama import write_small_llama

from services.detokenizer.durable import savepoints
from services.keeper import queues
from shared import codec
from shared.errors import HeadraceError
from shared.messages import Tokenized
from shared.nats import subjects
from shared.nats.interface import Delivery
from shared.savepoints import unpack

LONG = 240
LOST_S = 120
GROWN = 16
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "string", "minLength": 150, "maxLength": 160}, "b": {"type": "integer"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
PLAIN = {"prompt": "The quick brown fox", "max_tokens": LONG, "ignore_eos": True, "temperature": 0.9}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "two": {"n": 2, "min_tokens": 200},
    "schema": {
        "ignore_eos": False,
        "response_format": {"type": "json_schema", "json_schema": {"name": "r", "schema": SCHEMA}},
    },
    "penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.4, "repetition_penalty": 1.2},
    "scores": {"logprobs": 2},
}


@pytest.fixture
async def connect() -> AsyncIterator[Connect]:
    async with jetstream() as opened:
        yield opened


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deliveries of a dead keeper come again after a second, and short answers have several savepoints."""
    monkeypatch.setitem(queues._CONFIG, "ack_wait", 1_000_000_000)
    monkeypatch.setattr(savepoints, "GROWN", GROWN)


async def submit(fleet: Kept, asked: dict[str, Any]) -> None:
    for name, body in asked.items():
        async with asyncio.timeout(LOST_S):
            while True:
                try:
                    await fleet.client.request(
                        subjects.submit("public", "tiny"), {**body, "request_id": name}
                    )
                    break
                except HeadraceError as error:
                    if not error.retryable:
                        raise
                    await asyncio.sleep(0.02)


def generated(fleet: Kept) -> int:
    """Tokens that its scheduler has applied."""
    core = fleet.runtimes["scheduler-1"].actor._core  # type: ignore[attr-defined]  # white box
    return int(core.state.counters.generated_tokens)


async def test_answers_go_on_after_the_loss_of_everything(
    connect: Connect, fleet: str, tmp_path: Path
) -> None:
    model = write_small_llama(tmp_path / "tiny", hidden=64, layers=2)
    settings: dict[str, Any] = {
        "backend": "torch", "dtype": "f32", "deterministic": True, "model": str(model), "model_name": "tiny",
        "kv_blocks": 300, "slots": 16, "max_context": 1_024,
    }  # fmt: skip
    first = await Kept.start(connect, fleet, **settings)
    assert isinstance(first, Kept)
    asked = {name: {**PLAIN, "seed": seed, **more} for seed, (name, more) in enumerate(KINDS.items())}
    complete = first.client.complete
    alone = await asyncio.gather(*(complete({**body, "model": "tiny"}) for body in asked.values()))
    answers = dict(zip(asked, alone, strict=True))
    text = answers["plain"]["choices"][0]["text"]
    at = next(i for i in range(len(text) * 3 // 4, len(text)) if text.find(text[i : i + 3]) == i)
    asked["stop"] = {**asked["plain"], "stop": [text[at : at + 3], "no such text"]}
    answers["stop"] = await complete({**asked["stop"], "model": "tiny"})
    assert answers["stop"]["choices"][0]["text"] == text[:at]
    before = generated(first)

    bus, stored, resumed = await connect(), dict[str, int](), dict[str, int]()
    all_stored = asyncio.Event()

    def on_state(delivery: Delivery) -> None:
        tokenized, _ = unpack(delivery.data)
        stored[tokenized.request] = sum(tokenized.generated)
        if stored.keys() == asked.keys() and min(stored.values()) >= GROWN:
            all_stored.set()

    def on_tokenized(delivery: Delivery) -> None:
        message = codec.decode(delivery.data).message
        if isinstance(message, Tokenized) and message.generated:
            resumed[message.request] = sum(message.generated)

    await bus.subscribe(subjects.STATE_ALL, on_state)
    await bus.subscribe(f"hr.{fleet}.scheduler.*.in.Tokenized", on_tokenized)
    await bus.flush()
    await submit(first, {name: {**body, "durable": "tokens"} for name, body in asked.items()})
    await asyncio.wait_for(all_stored.wait(), LOST_S)
    await first.die()
    await bus.flush()
    kept = dict(stored)

    second = await Kept.start(connect, fleet, **settings)
    assert isinstance(second, Kept)
    records = {name: await ended(second.client, name, LOST_S) for name in asked}
    for name, record in records.items():
        assert record["status"] == "completed", (name, record)
        assert record["answer"]["choices"] == answers[name]["choices"], name
        assert record["answer"]["run"] == 1, "what goes on is the run of before"
        for tokens in ("prompt_tokens", "completion_tokens"):
            assert record["answer"]["usage"][tokens] == answers[name]["usage"][tokens], name
    assert resumed == kept
    assert generated(second) <= before - sum(kept.values()) + 8 * len(asked)
    left = "headrace.store.state.>"
    streams = second.runtimes["keeper-1"].actor._streams  # type: ignore[attr-defined]  # white box
    async with asyncio.timeout(LOST_S):
        while await streams.subjects_like(subjects.STATE_STREAM, left):
            await asyncio.sleep(0.01)
    await second.assert_idle()
    await second.stop()
