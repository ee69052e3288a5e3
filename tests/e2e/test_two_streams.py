"""A prompt on two ranks whose step comes in halves: real processes, and what is seen of it from outside. For
the tokens of halves and of the whole see unit/services/executor/group/test_driver_micro_batches.py."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import nats
import pytest
from support.kv_offload.traffic import prompt
from support.otlp_receiver import Received, Receiver
from support.running_up import SMALL_L1, running_up
from support.small_llama import write_small_llama

SUBJECT = "headrace.v1.generate.public.small-llama"
RANKS = ("--backend", "torch", "--dtype", "f32", "--device", "cpu/tp2", "--threads", "1")


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    yield receiver
    receiver.stop()


async def ask(url: str, request: str, tokens: list[int]) -> None:
    body = {"prompt": tokens, "max_tokens": 4, "temperature": 0, "ignore_eos": True, "request_id": request}
    nc = await nats.connect(url)
    answer = json.loads((await nc.request(SUBJECT, json.dumps(body).encode(), timeout=120)).data)
    await nc.close()
    assert answer["usage"]["completion_tokens"] == 4


def common_ns(one: Received, other: Received) -> int:
    return max(0, min(one.end_ns, other.end_ns) - max(one.start_ns, other.start_ns))


def test_ranks_communicate_during_the_compute_of_the_other_half(tmp_path: Path, receiver: Receiver) -> None:
    traced = {"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.url, "OTEL_BSP_SCHEDULE_DELAY": "100", **SMALL_L1}
    ranks = (*RANKS, "--model", str(write_small_llama(tmp_path / "small-llama")))
    with running_up(tmp_path, *ranks, "--overlap", "auto/two_stream", **traced) as up:
        asyncio.run(ask(up.nats_url, "halved", prompt(1)))
        receiver.wait_for(["halved"], 120)
        shown = up.run("trace", "halved", "--overlap")
        assert shown.returncode == 0, shown.stderr
        found = json.loads(up.run("trace", "halved", "--overlap", "--json").stdout)["two_streams"]
        asyncio.run(ask(up.nats_url, "whole", prompt(2)[:20]))
        whole = json.loads(up.run("trace", "whole", "--overlap", "--json").stdout)
    assert whole["two_streams"] is None
    assert 0 < found["hidden_comm_us"] <= found["comm_us"]
    lanes = {piece["lane"] for piece in found["segments"]}
    assert lanes == {"compute A", "compute B", "comm A", "comm B"}
    below = shown.stdout.split(f"step {found['step']} of {found['tokens']} tokens in micro-batches")[
        1
    ].splitlines()
    assert [line[:9] for line in below[1:5]] == ["compute A", "compute B", "comm A   ", "comm B   "]
    assert all(mark in line for mark, line in zip("██▒▒", below[1:5], strict=True))

    steps = [s for s in receiver.spans if s.name.startswith("step ") and s.attributes["tokens"] >= 128]
    assert {step.attributes["overlap.comm"] for step in steps} == {"two_stream"}
    pieces = [s for s in receiver.spans if s.parent_id == steps[0].span_id]
    collectives = [s for s in pieces if s.name == "comm A"]
    computed = [s for s in pieces if s.name == "compute B"]
    assert any(common_ns(collective, compute) > 0 for collective in collectives for compute in computed)
