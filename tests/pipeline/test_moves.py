"""Sequences move while they run: from executors that are rolled, and from those that only prefill. Nothing is
lost, and every answer is that of a calm executor without drafts.

`HEADRACE_HANDOVER_MODEL=smollm2-135m-instruct` hands over sequences of that model and not of a
small random one.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest
from support.memory_bus import MemoryBroker, MemoryBus
from support.pipeline.five_actors import Pipeline
from support.small_llama import VOCAB, write_small_llama

from services.scheduler.actor import SchedulerActor
from services.scheduler.core import change_policy as set_policy
from services.scheduler.executors import roles
from services.scheduler.state.state import PREFILL, State
from shared.client.client import Client

MODEL = "smollm2-135m-instruct"
PATIENT_S = 240  # a guard against hanging
HANDED_OVER = os.environ.get("HEADRACE_HANDOVER_MODEL", "")
SIM: dict[str, Any] = {"sim": "step=1000,token=30,accept=60", "speculate": "3", "l1": "64"}
REAL: dict[str, Any] = {
    "backend": "torch", "dtype": "f32", "deterministic": True, "model_name": "tiny", "kv_blocks": 200,
    "slots": 16, "max_context": 512, "step_tokens": 32, "l1": "64", "speculate": "4",
    "slo": "standard=0/100/0",  # no request is refused on a slow machine
}  # fmt: skip
LONG = [3 + 7 * at % (VOCAB - 3) for at in range(320)]
ASKED: list[dict[str, Any]] = [
    {"prompt": LONG[:40], "n": 2, "seed": 1, "max_tokens": 70},
    {"prompt": LONG[7:60], "temperature": 0, "max_tokens": 70, "logprobs": 2},
    {"prompt": LONG[9:70], "seed": 4, "structured_outputs": {"regex": "[a-f]{1,3}( [0-9]{2,4}){9}"}},
    {"prompt": LONG, "temperature": 0, "max_tokens": 40},
    {"prompt": LONG[100:], "n": 2, "seed": 2, "max_tokens": 30, "repetition_penalty": 1.2},
]


async def fleet_of(name: str, executors: int, **settings: Any) -> Pipeline:
    """A pipeline with so many executors; sequences of a draining one move at once."""
    broker = MemoryBroker()

    async def connect() -> MemoryBus:
        return broker.connect()

    pipeline = await Pipeline.start(connect, name, drain_timeout_s=0, **settings)
    for number in range(2, executors + 1):
        await pipeline.add("executor", f"executor-{number}")
    await pipeline.until(lambda: len(state_of(pipeline).executors) == executors)
    await pipeline.until(lambda: bool(state_of(pipeline).tiers.by_host))
    return pipeline


def state_of(pipeline: Pipeline) -> State:
    scheduler = pipeline.runtimes["scheduler-1"].actor
    assert isinstance(scheduler, SchedulerActor)
    return scheduler._core.state


async def roll(pipeline: Pipeline, name: str) -> None:
    """An executor drains and ends, and one of its name comes."""
    state = state_of(pipeline)
    await pipeline.until(lambda: any(s.generated > 2 for s in state.executors[name].running))
    await pipeline.runtimes.pop(name).finish(PATIENT_S)
    assert state.requests, "the roll waited for the last answer"
    await pipeline.until(lambda: name not in state.executors)
    await pipeline.add("executor", name)
    await pipeline.until(lambda: name in state.executors and state.executors[name].hello.blocks > 0)


async def answers(pipeline: Pipeline, tenant: str, asked: list[dict[str, Any]]) -> list[Any]:
    """The choices of each answer. Tenants share no cache."""
    client = await Client.open(await pipeline.connect(), tenant)
    replies = await asyncio.gather(*(client.complete(body, timeout_s=PATIENT_S) for body in asked))
    return [reply["choices"] for reply in replies]


async def test_three_executors_one_after_the_other() -> None:
    pipeline = await fleet_of("rolls", 3, **SIM)
    asked: list[dict[str, Any]] = [
        {"model": MODEL, "prompt": [number + 5] * 300, "seed": number, "n": 1 + number % 2,
         "max_tokens": 300 + 20 * number, "ignore_eos": True}
        for number in range(16)
    ]  # fmt: skip
    expected = await answers(pipeline, "calm", [{**body, "speculate": False} for body in asked])
    asking = asyncio.create_task(answers(pipeline, "rolled", asked))
    for name in ("executor-1", "executor-2", "executor-3"):
        await roll(pipeline, name)
    assert await asking == expected
    counters = state_of(pipeline).counters
    assert counters.moves >= 16
    assert counters.accepted_tokens > 1_000
    assert counters.loads > 0
    assert counters.finished.get("error", 0) == 0
    await pipeline.assert_idle()
    await pipeline.stop()


@pytest.mark.parametrize("victim", ["nothing", "kv_offload", "executor"])
async def test_choices_grammars_log_probabilities_and_long_prompts(victim: str, tmp_path: Path) -> None:
    """On real engines; the victim dies as soon as a sequence moves."""
    model = write_small_llama(tmp_path / "tiny", hidden=64, layers=2)
    pipeline = await fleet_of(f"real-{victim}", 2, model=str(model), **REAL)
    asked = [{"model": "tiny", "ignore_eos": "structured_outputs" not in body, **body} for body in ASKED]
    expected = await answers(pipeline, "calm", [{**body, "speculate": False} for body in asked])
    state = state_of(pipeline)
    predicted = [
        {**body, "prediction": {"type": "content", "content": choices[0]["text"]}}
        for body, choices in zip(asked, expected, strict=True)
    ]
    asking = asyncio.create_task(answers(pipeline, "rolled", predicted))
    await pipeline.until(lambda: any(s.generated > 2 for e in state.executors.values() for s in e.running))
    busiest = max(state.executors, key=lambda name: len(state.executors[name].running))
    leaving = asyncio.create_task(pipeline.runtimes[busiest].finish(PATIENT_S))
    await pipeline.until(lambda: state.counters.moves > 0)
    if victim != "nothing":
        await kill(pipeline, busiest if victim == "executor" else "kv_offload-1")
    assert await asking == expected
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    pipeline.runtimes.pop(busiest, None)
    assert state.counters.accepted_tokens > 0
    assert state.counters.finished.get("error", 0) == 0
    await pipeline.stop()


@pytest.mark.parametrize("victim", ["nothing", "kv_offload", "executor"])
async def test_sequences_move_from_prefill_to_decode_executors(
    victim: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of two real engines only prefills. The victim, the one that prefills or the tier, dies as soon as a
    sequence is handed over."""
    model = HANDED_OVER or str(write_small_llama(tmp_path / "tiny", hidden=64, layers=2))
    pipeline = await fleet_of(f"apart-{victim}", 2, model=model, **REAL)
    asked = [{"model": "tiny", "ignore_eos": "structured_outputs" not in body, **body} for body in ASKED]
    expected = await answers(pipeline, "calm", [{**body, "speculate": False} for body in asked])
    state = state_of(pipeline)
    await pipeline.until(lambda: all(e.pool.write_back for e in state.executors.values()))
    monkeypatch.setattr(roles, "PERIOD_US", 0)
    set_policy(state, "roles=loadtest.policies:prefill_1")
    state.roles_due_us, loads = 0, state.counters.loads
    asking = asyncio.create_task(answers(pipeline, "apart", asked))
    await pipeline.until(lambda: state.counters.moves > 0)
    prefills = next(name for name, executor in state.executors.items() if executor.role == PREFILL)
    if victim != "nothing":
        await kill(pipeline, prefills if victim == "executor" else "kv_offload-1")
    assert await asking == expected
    assert state.counters.finished.get("error", 0) == 0
    print(f"{victim} died: {state.counters.moves} moves, {state.counters.loads - loads} loads, same answers")
    if victim == "nothing":
        assert state.counters.moves >= (1 if HANDED_OVER else len(asked))  # a slow engine hands over fewer
        assert state.counters.loads > loads
        await pipeline.until(lambda: not any(job for job in state.tiers.jobs.values()))
    await pipeline.stop()


async def kill(pipeline: Pipeline, name: str) -> None:
    """The actor falls silent."""
    runtime = pipeline.runtimes.pop(name)
    assert runtime._heartbeats is not None
    runtime._heartbeats.cancel()
    await runtime.bus.drain()
    runtime.bus.publish = lambda *args, **more: None  # type: ignore[method-assign]  # as of a dead process
