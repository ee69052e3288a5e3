"""Real answers over real processes: sequences are paused and restored, log probabilities are those of
transformers in float32, and amid deaths of services every greedy id is still that of the reference."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI
from support.default_model import model_path
from support.kv_offload.traffic import Answer, Traffic, prompt, traffic_to
from support.loose_tools import FOLLOWED, LOOSE, tool_with
from support.running_up import Up, running_up
from support.small_llama import write_small_llama
from support.token_tap import Tap

from loadtest import faults
from loadtest.drafts import bodies as drafts_bodies
from loadtest.leaks import settle
from shared.client.client import Client
from shared.nats.bus import NatsBus
from shared.nats.interface import Delivery
from shared.vocab.files import ModelFiles
from shared.vocab.vocabulary import Vocabulary, load_vocabulary

DATA = Path(__file__).parents[1] / "data"
CASES = json.loads((DATA / "smollm2_greedy.json").read_text())["cases"]
SCORED = json.loads((DATA / "smollm2_logprobs.json").read_text())["cases"]
MODEL = "smollm2-135m-instruct"
ENGINE = ("--backend", "torch", "--dtype", "f32", "--threads", "1")  # beside other tests
BLOCKS = 20  # three of ten requests fit
EXPECTED = dict.fromkeys(("tokenizer", "scheduler", "executor", "kv_offload", "detokenizer"), 1)
TOP = 5
CLOSE = 1e-4

Ids = dict[tuple[str, int], list[int]]


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    folder = tmp_path_factory.mktemp("real")
    with running_up(folder, *ENGINE, "--kv-blocks", str(BLOCKS), HEADRACE_HTTP="127.0.0.1:0") as up:
        yield up


def test_every_tool_that_clients_have_is_answered(real: Up) -> None:
    tools = {**LOOSE, **FOLLOWED}
    with OpenAI(base_url=real.http_url, api_key="any", max_retries=0, timeout=120) as client:
        for name, schema in tools.items():
            answer = client.chat.completions.create(
                model=MODEL,
                messages=[{"role": "user", "content": "Hi"}],
                max_tokens=2,
                tools=[tool_with(schema)],  # type: ignore[list-item]  # as clients send it
            )
            assert answer.choices[0].finish_reason in ("stop", "length"), name


def test_the_real_model_is_paused_and_computes_nothing_twice(real: Up) -> None:
    asyncio.run(crowded(real))  # before others: the counts are those of the executor's life


async def crowded(up: Up) -> None:
    """The reference prompts, each twice, all at once, and on beyond their ends."""
    async with traffic_to(up, MODEL) as traffic:
        answers = await asyncio.gather(*(chat(traffic, i) for i in range(len(CASES)) for _ in range(2)))
        for answer in answers:
            expected = CASES[answer.number]["output_ids"][:40]
            assert (answer.error, answer.ids[: len(expected)]) == ("", expected)
            assert answer.ids == answers[2 * answer.number].ids, (
                "both times the same, after the reference's end"
            )
        await traffic.settle()
        measured, services = await traffic.tiers(), await traffic.services()
    print({name: measured[name] for name in ("preemptions", "loads", "restored_tokens", "recomputed")})
    assert measured["preemptions"] > 0
    assert measured["loads"] > 0
    assert measured["restored_tokens"] >= 16 * measured["loads"] > 0
    few = 2 * measured["preemptions"] + 16 * measured["loads_declined"]
    assert measured["recomputed"] <= few, (
        "tokens whose sample was in flight; tails that are computed in no time"
    )
    executor, store = services["executor"], services["kv_offload"]
    block_bytes = executor["stored_bytes"] // measured["stored_blocks"]
    assert executor["stored_bytes"] == measured["stored_blocks"] * block_bytes > 0
    assert (
        executor["loaded_bytes"] == (measured["l1_hit_blocks"] + measured["l2_hit_blocks"]) * block_bytes > 0
    )
    assert store["keys"]["moved"]["stored"] == measured["stored_blocks"]


async def chat(traffic: Traffic, case: int) -> Answer:
    asked = CASES[case]["prompt"]
    return await traffic.ask(
        case,
        prompt=None,
        messages=[{"role": "user", "content": asked}],
        max_tokens=40,
    )


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return load_vocabulary(ModelFiles("m", model_path()))


@pytest.fixture(scope="module")
def client(real: Up) -> Iterator[OpenAI]:
    with OpenAI(base_url=real.http_url, api_key="any", max_retries=0, timeout=120) as client:
        yield client


def text_of(vocabulary: Vocabulary, token: int) -> bytes:
    """As the answer has it: a control token, such as the end, by its name."""
    return vocabulary.token_bytes[token] or vocabulary.token_text(token).encode()


@pytest.mark.parametrize("case", SCORED, ids=lambda case: case["prompt"])
def test_log_probabilities_equal_transformers_log_probabilities(
    case: dict[str, Any], client: OpenAI, vocabulary: Vocabulary
) -> None:
    """Each token of the answer, and the five likeliest tokens in its place, are compared."""
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": case["prompt"]}],
        temperature=0,
        max_tokens=64,
        logprobs=True,
        top_logprobs=TOP,
    )
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == case["prompt_tokens"]
    found = answer.choices[0].logprobs
    assert found is not None
    assert found.content is not None
    wanted = case["answer"]
    assert [bytes(t.bytes or ()) for t in found.content] == [text_of(vocabulary, w["id"]) for w in wanted]
    for token, want in zip(found.content, wanted, strict=True):
        assert math.isclose(token.logprob, want["logprob"], rel_tol=0, abs_tol=CLOSE), token.token
        got = [(bytes(top.bytes or ()), top.logprob) for top in token.top_logprobs]
        of = {
            text_of(vocabulary, i): value
            for i, value in zip(want["top_ids"], want["top_logprobs"], strict=True)
        }
        assert [value for _, value in got] == pytest.approx(want["top_logprobs"][:TOP], rel=0, abs=CLOSE)
        assert [value for _, value in got] == pytest.approx([of[text] for text, _ in got], rel=0, abs=CLOSE)


async def ids_of(up: Up, bodies: list[dict[str, Any]], victim: int, after: int = 25) -> Ids:
    """The ids of all answers, asked for at once; process `victim`, if any, is killed when `after`
    tokens have come."""
    bus = await NatsBus.connect(up.nats_url, timeout_s=30)
    client, tap = await Client.open(bus), Tap()
    enough = asyncio.Event()

    def take(delivery: Delivery) -> None:
        tap.take(delivery)
        if sum(map(len, tap.ids.values())) >= after:
            enough.set()

    await bus.subscribe("hr.default.detokenizer.*.in.*", take)
    async with asyncio.TaskGroup() as group:
        answers = [group.create_task(client.complete(body, timeout_s=120)) for body in bodies]
        await enough.wait()
        assert not any(answer.done() for answer in answers)
        if victim:
            faults.kill(victim)
    await settle(bus, EXPECTED, 60)
    await bus.drain()
    return tap.ids


@pytest.mark.parametrize("victim", ["executor", "scheduler"])
def test_a_dead_service_costs_no_token(real: Up, victim: str) -> None:
    bodies = [
        {
            "model": MODEL,
            "messages": [{"role": "user", "content": case["prompt"]}],
            "temperature": 0,
            "max_tokens": 64,
            "request_id": f"{victim}-{i}",
        }
        for i, case in enumerate(CASES)
    ]
    ids = asyncio.run(ids_of(real, bodies, real.child(victim)))
    for i, case in enumerate(CASES):
        assert ids[f"{victim}-{i}", 0] == case["output_ids"], case["prompt"]


def test_a_dead_executor_costs_no_token_of_answers_with_drafts(real: Up) -> None:
    plain, drafted = (
        [
            {**body, "speculate": drafts, "request_id": f"copy-{drafts}-{i}"}
            for i, body in enumerate(drafts_bodies("copy", 4))
        ]
        for drafts in (False, True)
    )
    before = accepted_drafts(real)
    without = asyncio.run(ids_of(real, plain, 0))
    assert accepted_drafts(real) == before
    amid = asyncio.run(ids_of(real, drafted, real.child("executor"), after=60))
    assert accepted_drafts(real) > before + 100
    assert [amid[f"copy-True-{i}", 0] for i in range(4)] == [without[f"copy-False-{i}", 0] for i in range(4)]


def accepted_drafts(up: Up) -> int:
    """Drafts that became tokens so far."""
    services = json.loads(up.run("status", "--json").stdout)["services"]
    (scheduler,) = (service for service in services if service["kind"] == "scheduler")
    return int(scheduler["measured"]["drafts"]["accepted"])


def test_a_dead_rank_costs_no_token_either(tmp_path: Path) -> None:
    """Its group ends and is started anew, and the sequences go on there, with the ids of a group that lives.
    For stages of a pipeline see unit/services/executor/group/test_driver_stages.py."""
    model = write_small_llama(tmp_path / "small-llama", layers=4)
    ranks = ("--model", str(model), "--device", "cpu/tp2", "--deterministic")
    with running_up(tmp_path, *ENGINE, *ranks) as up:
        leader = up.child("executor")
        (rank,) = faults.children(leader)
        asked = {
            what: [
                {
                    "model": "small-llama", "prompt": prompt(i)[:30], "ignore_eos": True, "temperature": 0,
                    "max_tokens": 48, "request_id": f"{what}-{i}",
                }
                for i in range(4)
            ]
            for what in ("alone", "amid")
        }  # fmt: skip
        alone = asyncio.run(ids_of(up, asked["alone"], 0))
        ids = asyncio.run(ids_of(up, asked["amid"], rank))
        assert up.child("executor") != leader
        (anew,) = faults.children(up.child("executor"))
        assert anew != rank
    assert {len(each) for each in alone.values()} == {48}
    assert [ids[f"amid-{i}", 0] for i in range(4)] == [alone[f"alone-{i}", 0] for i in range(4)]
    assert not any(Path(f"/proc/{pid}").exists() for pid in (leader, rank, anew))
