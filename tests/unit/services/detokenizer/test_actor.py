"""The detokenizer's shell: an error in its own timers and subscriptions fails it, as one over a message."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from support.actor_fleet import Fleet, watched_fleet
from support.text_models import write_sentencepiece_gguf

from services.detokenizer.actor import DetokenizerActor
from services.detokenizer.core import DetokenizerCore
from services.detokenizer.failover import Failover
from shared.actor.runtime import Runtime
from shared.codec import Envelope
from shared.messages import Close, Open, Tokenized, Tokens, Usage, ints
from shared.nats import subjects
from shared.nats.interface import Delivery
from shared.savepoints import pack
from shared.vocab.files import ModelFiles
from shared.vocab.vocabulary import load_vocabulary


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    async with watched_fleet() as fleet:
        yield fleet


@pytest.fixture
async def runtime(fleet: Fleet, tmp_path: Path) -> Runtime:
    path = write_sentencepiece_gguf(tmp_path / "l.gguf", {})
    actor = DetokenizerActor(load_vocabulary(ModelFiles("l", path)), "m", 1_000_000)
    return await fleet.started(actor, "d")


async def opened(fleet: Fleet) -> None:
    message = Open(
        seq=7, request="r1", attempt=1, tenant="t", model="m", inbox="_INBOX.a.1", stream=True,
        received_wall_us=5_000_000, prompt_tokens=4,
    )  # fmt: skip
    fleet.put(Envelope("scheduler.s", 1, 1, message), to="detokenizer.d")
    await fleet.broker.settle()


async def flushed(fleet: Fleet, runtime: Runtime) -> None:
    await opened(fleet)


async def cancelled(fleet: Fleet, runtime: Runtime) -> None:
    fleet.outside.publish(subjects.cancel("t", "r1"), b"")


async def without_a_reader(fleet: Fleet, runtime: Runtime) -> None:
    await opened(fleet)  # the server reports no responders to the first frame


async def without_scheduler(fleet: Fleet, runtime: Runtime) -> None:
    """Its first turn is a part of the news; the second one comes by the timer."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Failover, "is_active", True)
        patched.setattr(Failover, "advance", lambda *args: [])
        runtime.actor._after_loss([])  # type: ignore[attr-defined]  # as when one has gone


async def back_at_the_broker(fleet: Fleet, runtime: Runtime) -> None:
    runtime.actor.on_broker(False)
    runtime.actor.on_broker(True)


async def closed(fleet: Fleet, runtime: Runtime) -> None:
    await opened(fleet)
    usage = Usage(prompt_tokens=4, completion_tokens=0, cached_tokens=0)
    message = Close(seq=7, final=0, reason="length", usage=usage)
    fleet.put(Envelope("scheduler.s", 1, 2, message), to="detokenizer.d")
    await fleet.broker.settle()


@pytest.mark.parametrize(
    ("where", "broken", "cause"),
    [
        (DetokenizerCore, "flush", flushed),
        (DetokenizerCore, "on_client_gone", without_a_reader),
        (DetokenizerCore, "advance_reconnect", back_at_the_broker),
        (Failover, "on_cancelled", cancelled),
        (Failover, "advance", without_scheduler),
        ("services.detokenizer.actor", "stamped", closed),
    ],
)
async def test_error_in_a_timer_fails_the_detokenizer(
    fleet: Fleet,
    runtime: Runtime,
    monkeypatch: pytest.MonkeyPatch,
    where: type | str,
    broken: str,
    cause: object,
) -> None:
    """The reader of that text would wait for ever: a supervisor starts it again, and schedulers open
    their requests elsewhere."""

    def fail(*args: object) -> None:
        raise RuntimeError(f"broken in {broken}")

    if isinstance(where, str):
        monkeypatch.setattr(f"{where}.{broken}", fail)
    else:
        monkeypatch.setattr(where, broken, fail)
    await cause(fleet, runtime)  # type: ignore[operator]  # one of the above
    async with asyncio.timeout(60):
        error = await runtime.failed()
    assert str(error) == f"broken in {broken}"


def resumption(**more: Any) -> bytes:
    asked = Tokenized(
        request="r", attempt=1, tenant="t", model="m", inbox="_INBOX.t.headrace-keeper.r", timeout_us=10**9,
        tokens=ints([5, 6, 7]), generated=ints([1]), reasons=("",), savepoints="c",
    )  # fmt: skip
    return pack(dataclasses.replace(asked, **more), None)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"2 x", "not a savepoint"),
        (resumption(model="other"), "of another model"),
        (resumption(tenant="u"), "of another model"),
        (resumption(inbox="_INBOX.t.x"), "of another model"),
        (resumption(), ""),
    ],
)
async def test_keeper_gets_the_reason_when_a_savepoint_is_of_no_use(
    fleet: Fleet, runtime: Runtime, data: bytes, why: str
) -> None:
    deliveries: list[Delivery] = []
    reply = "_INBOX.t.headrace-keeper.r"
    await fleet.outside.subscribe(reply, deliveries.append)
    fleet.outside.publish(subjects.resume("t", "m"), data, reply=reply)
    await fleet.broker.settle()
    assert [json.loads(each.data)["error"]["code"] for each in deliveries] == ([400] if why else [])
    assert all(why in each.data.decode() for each in deliveries)
    assert runtime.actor.status()["failover"] == (0 if why else 1)


async def test_a_savepoint_that_cannot_be_stored_is_counted_and_the_answer_goes_on(
    fleet: Fleet, runtime: Runtime
) -> None:
    inbox = "_INBOX.t.headrace-keeper.r"
    asked = Tokenized(
        request="r", attempt=1, tenant="t", model="m", inbox=inbox, timeout_us=10**9,
        tokens=ints([5]), max_tokens=99, savepoints="c",
    )  # fmt: skip
    opened = Open(seq=7, request="r", attempt=1, tenant="t", model="m", inbox=inbox, prompt_tokens=1)
    tokens = Tokens(
        executor="e", step=1, seqs=ints([7]), first=ints([0]), counts=ints([70]), ids=ints([40] * 70)
    )
    answers: list[Delivery] = []
    await fleet.outside.subscribe(inbox, answers.append)
    for seq, message in enumerate((opened, asked, tokens), 1):
        fleet.put(Envelope("scheduler.s", 1, seq, message), to="detokenizer.d")
    await fleet.broker.settle()
    store: Any = runtime.actor._parts[0]  # type: ignore[attr-defined]  # white box
    store._write_due()
    await fleet.broker.settle()
    assert (store.stored, store.failed) == (0, 1)  # nothing listens: there is no stream
    for ack in (b'{"stream":"HR_STATE","seq":1}', b'{"error":{"code":503}}'):
        fleet.outside.publish(store._acks, ack)
    await fleet.broker.settle()
    assert {m.name.rpartition(".")[2]: m.value for m in store.metrics} == {
        "checkpoints": 1, "checkpoints_failed": 2,
    }  # fmt: skip
    close = Close(seq=7, final=70, reason="length", usage=Usage(prompt_tokens=1))
    fleet.put(Envelope("scheduler.s", 1, 4, close), to="detokenizer.d")
    await fleet.broker.settle()
    assert json.loads(answers[0].data)["usage"]["completion_tokens"] == 70
