"""two_batch in real processes: the processors of A run, its result is applied and its next plan sent while B
is on the executor. Stamps are compared with each other, never with a limit."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from collections.abc import Iterator
from typing import Any

import nats
import pytest
from nats.aio.client import Client as Nats
from support.otlp_receiver import Received, Receiver
from support.running_up import StartUp, Up

SUBJECT = "headrace.v1.generate.public.smollm2-135m-instruct"
ROWS, TOKENS = 8, 32
WAIT = "wait=services.executor.sampling.logits_processors:Wait"
# 4 rows of 3 ms on the host, under a step of 40 ms of the other half: time enough for the way there and back
HOST_ROW_US = 3_000
SLOW = {"HEADRACE_SIM": f"step=40000,host_row={HOST_ROW_US}", "HEADRACE_OVERLAP": "two_batch"}

Step = dict[str, Any]


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    yield receiver
    receiver.stop()


async def ask(nc: Nats, request: str) -> None:
    body = {
        "prompt": [1000 + int(request.removeprefix("r")), *range(300, 320)],
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "request_id": request,
        "logits_processors": ["wait"],
    }
    answer = json.loads((await nc.request(SUBJECT, json.dumps(body).encode(), timeout=60)).data)
    assert answer["usage"]["completion_tokens"] == TOKENS


async def all_at_once(url: str) -> None:
    nc = await nats.connect(url)
    await asyncio.gather(*(ask(nc, f"r{i}") for i in range(ROWS)))
    await nc.close()


def decodes(up: Up, request: str) -> list[Step]:
    """The steps between the last prompt's and the first answer's end."""
    trace = json.loads(up.run("trace", request, "--json").stdout)
    (columns,) = trace["steps"].values()
    steps = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    begun = max(i for i, step in enumerate(steps) if step["prefill_tokens"]) + 1
    return [step for step in steps[begun + 2 :] if step["rows"] == ROWS // 2]


def step_spans(receiver: Receiver) -> list[Received]:
    return [span for span in receiver.spans if span.name.startswith("step ")]


@pytest.mark.timed
def test_a_is_processed_while_b_is_on_the_executor(receiver: Receiver, start_up: StartUp) -> None:
    up = start_up(
        "--logits-processors", WAIT, OTEL_EXPORTER_OTLP_ENDPOINT=receiver.url,
        OTEL_BSP_SCHEDULE_DELAY="100", **SLOW,
    )  # fmt: skip
    asyncio.run(all_at_once(up.nats_url))
    roots = receiver.wait_for([f"r{i}" for i in range(ROWS)], 30)
    check_halves(step_spans(receiver), roots)
    steps = decodes(up, "r0")
    check_alternation(steps)
    check_overlap(steps)
    check_drawing(up)


def check_alternation(steps: list[Step]) -> None:
    """A, B, A, B: every row is in one half or the other."""
    assert len(steps) > TOKENS  # most of the 2 * TOKENS
    assert {step["mode"] for step in steps} == {"two_batch"}
    pairs = list(itertools.pairwise(steps))
    assert all(one["step"] + 1 == two["step"] for one, two in pairs)
    assert all(one["micro_batch"] + two["micro_batch"] == 1 for one, two in pairs)
    assert {one["rows"] + two["rows"] for one, two in pairs} == {ROWS}


def check_overlap(steps: list[Step]) -> None:
    """In most steps, `one` of A and the next one, `two`, of B, all that follows one's forward until the next
    plan of A is there happens between the beginning and the end of two's forward."""
    hidden = {"host": 0, "result": 0, "plan": 0}
    triples = list(zip(steps, steps[1:], steps[2:], strict=False))
    for one, two, third in triples:
        forward_us = (two["start_us"], two["start_us"] + two["forward_us"])
        host_end_us = one["end_us"] - one["sample_us"]
        arrived_us = third["start_us"] - third["queued_us"]
        assert one["host_us"] >= HOST_ROW_US * ROWS // 2, "the engine slept for every row"
        assert one["planned_us"] < one["start_us"] <= host_end_us - one["host_us"]
        assert one["result_us"] <= third["planned_us"], "a half is planned from its own result"
        hidden["host"] += forward_us[0] <= host_end_us - one["host_us"] and host_end_us <= forward_us[1]
        hidden["result"] += forward_us[0] <= one["result_us"] <= forward_us[1]
        hidden["plan"] += forward_us[0] <= third["planned_us"] <= arrived_us <= forward_us[1]
    print(f"hidden under the other half, of {len(triples)} steps: {hidden}")
    assert min(hidden.values()) > len(triples) / 2, (hidden, len(triples))


def check_halves(spans: list[Received], roots: dict[str, Received]) -> None:
    """By the links of step spans: A and B share no request, and together they are all."""
    halves: dict[int, set[tuple[str, str]]] = {0: set(), 1: set()}
    decodes = [s for s in spans if not s.attributes["prefill_tokens"] and s.attributes["rows"] == ROWS // 2]
    for span in decodes:
        assert span.attributes["overlap.mode"] == "two_batch"
        halves[span.attributes["micro_batch"]] |= set(span.links)
    known = {(root.trace_id, root.span_id) for root in roots.values()}
    assert decodes
    assert halves[0] | halves[1] <= known
    assert not halves[0] & halves[1]
    assert {len(half) for half in halves.values()} <= {0, ROWS // 2}


def check_drawing(up: Up) -> None:
    """The picture has both halves and the host's work of both, and hides some of it."""
    shown = up.run("trace", "r0", "--overlap")
    assert shown.returncode == 0, shown.stderr
    lanes = {line.split("  ")[0].strip(): line for line in shown.stdout.splitlines()}
    assert "two_batch" in shown.stdout.splitlines()[0]
    assert "█" in lanes["compute A"]
    assert "█" in lanes["compute B"]
    host = next(line for line in shown.stdout.splitlines() if line.startswith("host"))
    assert re.fullmatch(r"host +[AB# ]+", host)
    assert {"A", "B"} <= set(host)
    found = json.loads(up.run("trace", "r0", "--overlap", "--json").stdout)
    assert found["modes"] == ["two_batch"]
    assert 0 < found["hidden_host_us"] <= found["host_us"]
    assert found["hidden_host_us"] > found["host_us"] / 2


def test_single_hides_nothing(start_up: StartUp) -> None:
    """The same rows in one batch: every step begins after the result of the one before."""
    up = start_up("--logits-processors", WAIT, **{**SLOW, "HEADRACE_OVERLAP": "single"})
    asyncio.run(all_at_once(up.nats_url))
    trace = json.loads(up.run("trace", "r0", "--json").stdout)
    (columns,) = trace["steps"].values()
    assert set(columns["mode"]) == {"single"}
    assert set(columns["micro_batch"]) == {0}
    assert all(
        result_us <= planned_us
        for result_us, planned_us in zip(columns["result_us"], columns["planned_us"][1:], strict=False)
    )
    found = json.loads(up.run("trace", "r0", "--overlap", "--json").stdout)
    assert (found["hidden_host_us"], found["modes"]) == (0, ["single"])
