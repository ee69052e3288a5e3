"""Two schedulers with an executor each: a chat stays at one of them; they join, leave and die under load."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from itertools import pairwise
from typing import Any

import pytest
from support.memory_bus import MemoryBroker, MemoryBus
from support.pipeline.five_actors import Pipeline

from services.scheduler.actor import SchedulerActor
from services.scheduler.executors import roles
from services.scheduler.executors.roles import Division, Give
from services.tokenizer.actor import TokenizerActor
from shared.actor.membership import Peers
from shared.session_hints import name_of

MODEL = "smollm2-135m-instruct"
CHATS, TURNS = 16, 3
BODY: dict[str, Any] = {"model": MODEL, "seed": 5, "ignore_eos": True}


@pytest.fixture
async def pipeline() -> AsyncIterator[Pipeline]:
    """Both schedulers have an executor."""
    broker = MemoryBroker()

    async def connect() -> MemoryBus:
        return broker.connect()

    running = await Pipeline.start(connect, "two", sim="step=1000", heartbeat_interval_ms=50)
    for kind in ("scheduler", "executor"):
        await running.add(kind, f"{kind}-2")
    await divided(running, 1, 1)
    yield running
    await running.stop()


async def divided(pipeline: Pipeline, *counts: int) -> None:
    """The schedulers have so many executors, and the tokenizer knows."""

    def now() -> bool:
        actors = [runtime.actor for runtime in pipeline.runtimes.values()]
        found = sorted(len(a._core.state.executors) for a in actors if isinstance(a, SchedulerActor))
        (seen,) = (a._core._loads.executors for a in actors if isinstance(a, TokenizerActor))
        return found == [*counts] and sorted(seen.values()) == [count for count in counts if count]

    await pipeline.until(now)


async def kill(pipeline: Pipeline, name: str) -> None:
    """The actor falls silent."""
    runtime = pipeline.runtimes.pop(name)
    assert runtime._heartbeats is not None
    runtime._heartbeats.cancel()
    await runtime.bus.drain()
    runtime.bus.publish = lambda *args, **more: None  # type: ignore[method-assign]  # as of a dead process


async def chat(pipeline: Pipeline, number: int, tokens: int) -> list[tuple[str, int, int]]:
    """The text, prompt tokens and cached tokens of each turn."""
    messages, turns = [], []
    for turn in range(TURNS):
        messages.append({"role": "user", "content": f"Chat {number} asks {turn}: " + "why? " * 30})
        reply = await pipeline.client.complete({**BODY, "messages": [*messages], "max_tokens": tokens})
        text, usage = reply["choices"][0]["message"]["content"], reply["usage"]
        turns.append((text, usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]))
        messages.append({"role": "assistant", "content": text})
    return turns


async def chats(
    pipeline: Pipeline, numbers: Sequence[int] = range(CHATS), tokens: int = 40
) -> list[list[tuple[str, int, int]]]:
    return await asyncio.gather(*(chat(pipeline, number, tokens) for number in numbers))


def texts(answers: list[list[tuple[str, int, int]]]) -> list[list[str]]:
    return [[text for text, _, _ in turns] for turns in answers]


async def test_each_turn_finds_the_turns_before_it(pipeline: Pipeline) -> None:
    answers = await chats(pipeline, range(24))
    counted = [
        runtime.actor._core.state.counters.prefix_hit_tokens
        for runtime in pipeline.runtimes.values()
        if isinstance(runtime.actor, SchedulerActor)
    ]
    assert min(counted) > 0, "both schedulers work"
    for turns in answers:
        for (_, before, _), (_, prompt, cached) in pairwise(turns):
            assert before - 16 <= cached < prompt
    await pipeline.until(lambda: not any(status_of(pipeline, "requests")))


def status_of(pipeline: Pipeline, what: str) -> list[Any]:
    actors = [r.actor for name, r in pipeline.runtimes.items() if name.startswith("scheduler")]
    return [actor.status()[what] for actor in actors]


@pytest.mark.parametrize("victim", ["scheduler", "executor"])
async def test_a_death_costs_no_request_and_one_that_joins_gets_an_executor(
    pipeline: Pipeline, victim: str
) -> None:
    """An executor that does not come back leaves a scheduler without one: its requests go to the other."""
    expected = texts(await chats(pipeline))
    asking = asyncio.create_task(chats(pipeline))
    await pipeline.until(lambda: all(count > 0 for count in status_of(pipeline, "running")))
    await kill(pipeline, f"{victim}-2")
    assert texts(await asking) == expected
    again = asyncio.create_task(chats(pipeline))
    if victim == "scheduler":
        await divided(pipeline, 2)
        await pipeline.add("scheduler", "scheduler-3")
    else:
        await divided(pipeline, 0, 1)
        await pipeline.add("executor", "executor-3")
    await divided(pipeline, 1, 1)
    assert texts(await again) == expected
    await pipeline.until(lambda: not any(status_of(pipeline, "requests")))


async def test_a_scheduler_that_leaves_finishes_its_requests(pipeline: Pipeline) -> None:
    expected = texts(await chats(pipeline))
    asking = asyncio.create_task(chats(pipeline))
    await pipeline.until(lambda: all(count > 0 for count in status_of(pipeline, "running")))
    await pipeline.runtimes["scheduler-2"].finish(30)
    del pipeline.runtimes["scheduler-2"]
    assert texts(await asking) == expected
    await divided(pipeline, 2)


async def test_an_executor_moves_in_the_middle_of_long_answers(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its sequences are queued again with all their tokens."""
    expected = texts(await chats(pipeline, tokens=200))
    await pipeline.runtimes.pop("scheduler-2").finish(30)
    await divided(pipeline, 2)
    monkeypatch.setattr(roles, "DRAIN_US", 0)
    moved, turn = [], Division.decide

    def watched(self: Division, me: str, model: str, peers: Peers, running: Any, now_us: int) -> Any:
        move = turn(self, me, model, peers, running, now_us)
        if isinstance(move, Give):
            moved.append(running[move.executor])
        return move

    monkeypatch.setattr(Division, "decide", watched)
    asking = asyncio.create_task(chats(pipeline, tokens=200))
    await pipeline.until(lambda: sum(status_of(pipeline, "running")) > CHATS // 2)
    await pipeline.add("scheduler", "scheduler-3")
    await divided(pipeline, 1, 1)
    assert texts(await asking) == expected
    assert moved
    assert moved[0] > 0
    await pipeline.until(lambda: not any(status_of(pipeline, "requests")))


async def test_all_sessions_of_a_program_are_at_one_scheduler(pipeline: Pipeline) -> None:
    """Their prompts have no start in common: the first session of the program is their key."""

    async def ask(program: int, agent: str) -> None:
        top = f"program {program}"
        named = (
            {"session_id": f"{top}/{agent}", "parent_session_id": top, "root_session_id": top}
            if agent
            else {}
        )
        body = {**BODY, "max_tokens": 2, "session_id": top, **named}
        await pipeline.client.complete({**body, "prompt": f"{agent} of {program}: " + "why? " * 30})

    programs = range(12)
    await asyncio.gather(*(ask(program, agent) for program in programs for agent in ("", "a", "b")))
    schedulers = [r.actor for r in pipeline.runtimes.values() if isinstance(r.actor, SchedulerActor)]
    states = [actor._core.state for actor in schedulers]
    found = [{row.session for row in state.sessions.rows(state, "", 99)} for state in states]
    assert min(map(len, found)) > 0, "both schedulers work"
    assert sum(map(len, found)) == 36
    for program in programs:
        names = {name_of("public", f"program {program}{agent}") for agent in ("", "/a", "/b")}
        assert [names & each for each in found if names & each] == [names]
