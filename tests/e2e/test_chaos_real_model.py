"""The executor or the scheduler dies amid real answers: every greedy id is still that of the reference."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.running_up import Up, running_up
from support.token_tap import Tap

from loadtest import faults
from loadtest.leaks import settle
from shared.client import Client
from shared.nats.bus import NatsBus
from shared.nats.interface import Delivery

CASES = json.loads((Path(__file__).parents[1] / "data" / "smollm2_greedy.json").read_text())["cases"]
MODEL = "smollm2-135m-instruct"
EXPECTED = dict.fromkeys(("tokenizer", "scheduler", "executor", "kv_offload", "detokenizer"), 1)


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    engine = ("--backend", "torch", "--dtype", "f32", "--threads", "1")  # beside other tests
    with running_up(tmp_path_factory.mktemp("real"), *engine) as up:
        yield up


async def ids_with_a_death_after(up: Up, tokens: int, victim: int) -> dict[tuple[str, int], list[int]]:
    """The ids of the reference prompts, all at once; process `victim` is killed when `tokens` have come."""
    bus = await NatsBus.connect(up.nats_url, timeout_s=30)
    client, tap = await Client.open(bus), Tap()
    enough = asyncio.Event()

    def take(delivery: Delivery) -> None:
        tap.take(delivery)
        if sum(map(len, tap.ids.values())) >= tokens:
            enough.set()

    await bus.subscribe("hr.default.detokenizer.*.in.*", take)
    bodies = [
        {
            "model": MODEL,
            "messages": [{"role": "user", "content": case["prompt"]}],
            "temperature": 0,
            "max_tokens": 64,
            "request_id": f"case-{i}",
        }
        for i, case in enumerate(CASES)
    ]
    async with asyncio.TaskGroup() as group:
        answers = [group.create_task(client.complete(body, timeout_s=120)) for body in bodies]
        await enough.wait()
        assert not any(answer.done() for answer in answers)
        faults.kill(victim)
    await settle(bus, EXPECTED, 60)
    await bus.drain()
    return tap.ids


@pytest.mark.parametrize("victim", ["executor", "scheduler"])
def test_a_dead_service_costs_no_token(real: Up, victim: str) -> None:
    ids = asyncio.run(ids_with_a_death_after(real, 25, real.child(victim)))
    for i, case in enumerate(CASES):
        assert ids[f"case-{i}", 0] == case["output_ids"], case["prompt"]


def test_a_dead_rank_costs_no_token_either(tmp_path: Path) -> None:
    """Its group ends and is started anew, and the sequences go on there. For stages of a pipeline see
    unit/services/executor/group/test_driver_stages.py."""
    engine = ("--backend", "torch", "--dtype", "f32", "--threads", "1", "--device", "cpu/tp2")
    with running_up(tmp_path, *engine) as up:
        leader = up.child("executor")
        (rank,) = faults.children(leader)
        ids = asyncio.run(ids_with_a_death_after(up, 25, rank))
        assert up.child("executor") != leader
        (anew,) = faults.children(up.child("executor"))
        assert anew != rank
    for i, case in enumerate(CASES):
        assert ids[f"case-{i}", 0] == case["output_ids"], case["prompt"]
    assert not any(Path(f"/proc/{pid}").exists() for pid in (leader, rank, anew))
