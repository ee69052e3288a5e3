"""Long requests are prepared beside the event loop, in their order, and only so many bytes of them wait."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from support.text_models import served

from services.tokenizer import intake
from services.tokenizer.intake import BackgroundEncoder
from services.tokenizer.prepare import Prepared, ServedModel, Submission
from shared.errors import BadRequest, Overloaded
from shared.messages import Tokenized


@pytest.fixture
def model(tmp_path: Path) -> ServedModel:
    found = served(tmp_path)
    for special in (False, True):
        found.vocabulary.encode("warm up", special=special)
    return found


def asked(request: str, prompt: str, tenant: str = "t") -> Submission:
    body = json.dumps({"prompt": prompt, "request_id": request}).encode()
    return Submission(tenant, f"inbox.{request}", body, "fresh", 7, 1, "")


async def test_encoded_requests_come_back_on_the_loop_in_order(model: ServedModel) -> None:
    done: list[Prepared] = []
    threads = set()

    def take(prepared: Prepared) -> None:
        threads.add(asyncio.get_running_loop())
        done.append(prepared)

    waiting = BackgroundEncoder(model, take)
    for i, prompt in enumerate(("word " * 10, "a" * 100_000, "b")):
        waiting.put(asked(f"r{i}", prompt))
    assert waiting.waiting == 3
    await waiting.drain()
    assert waiting.waiting == 0
    assert [p.request for p in done] == ["r0", "r1", "r2"]
    assert [type(p.outcome) for p in done] == [Tokenized, BadRequest, Tokenized]
    assert threads == {asyncio.get_running_loop()}


async def test_only_so_many_bytes_wait(model: ServedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake, "MAX_WAITING_BYTES", 500)
    done: list[Prepared] = []
    waiting = BackgroundEncoder(model, done.append)
    waiting.put(asked("r1", "a" * 300))
    with pytest.raises(
        Overloaded, match="bytes of your long requests wait for this tokenizer: try again later"
    ):
        waiting.put(asked("r2", "a" * 300))
    waiting.put(asked("others", "a" * 300, "u"))
    while waiting.waiting:
        await asyncio.sleep(0.001)
    waiting.put(asked("r3", "a" * 300))
    await waiting.drain()
    assert [p.request for p in done] == ["r1", "others", "r3"]


async def test_bytes_of_invented_tenants_are_bounded_too(
    model: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intake, "MAX_WAITING_BYTES", 500)
    done: list[Prepared] = []
    waiting = BackgroundEncoder(model, done.append)
    for i in range(3):
        waiting.put(asked(f"r{i}", "a" * 300, f"t{i}"))
    with pytest.raises(Overloaded, match="0 bytes of your long requests wait"):
        waiting.put(asked("one more", "a" * 300, "new"))
    await waiting.drain()
    assert len(done) == 3


async def test_tenants_have_the_thread_in_turn(model: ServedModel) -> None:
    done: list[Prepared] = []
    waiting = BackgroundEncoder(model, done.append)
    for name in ("a1", "a2", "a3", "b1", "b2"):
        waiting.put(asked(name, "a" * 300, name[0]))
    await waiting.drain()
    assert [p.request for p in done] == ["a1", "a2", "b1", "a3", "b2"]
