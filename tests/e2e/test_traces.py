"""Traces as a collector gets them: real processes, a real OTLP receiver, 50 requests under load."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

import nats
import pytest
from nats.aio.client import Client as Nats
from nats.aio.msg import Msg
from support.otlp_receiver import Received, Receiver
from support.running_up import StartUp

from shared.telemetry.traces import covered_us

SUBJECT = "headrace.v1.generate.public.smollm2-135m-instruct"
REQUESTS, AT_ONCE = 50, 16
LONG_PROMPT = list(range(300, 1000))  # 700 tokens: chunks of at most 256


@dataclass
class Sent:
    """One request as its client saw it."""

    request: str
    chunked: bool
    published_ns: int = 0
    ended_ns: int = 0
    headers: dict[str, str] = field(default_factory=dict)


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    yield receiver
    receiver.stop()


async def ask(nc: Nats, request: str, *, long: bool, **more: object) -> Sent:
    """Stream one request to its end."""
    sent, ended = Sent(request, long), asyncio.Event()

    async def on_frame(message: Msg) -> None:
        if message.headers and message.headers.get("Headrace-End") == "1":
            sent.ended_ns, sent.headers = time.time_ns(), message.headers
            ended.set()

    inbox = nc.new_inbox()
    subscription = await nc.subscribe(inbox, cb=on_frame)
    prompt = [1000 + int(re.sub(r"\D", "", request) or 999), *LONG_PROMPT[1 : None if long else 20]]
    body = {"prompt": prompt, "max_tokens": 256, "ignore_eos": True, "stream": True, "request_id": request}
    subject = str(more.pop("subject", SUBJECT))
    headers = {str(k): str(v) for k, v in more.pop("headers", {}).items()}  # type: ignore[attr-defined] # test shorthand
    sent.published_ns = time.time_ns()
    await nc.publish(subject, json.dumps({**body, **more}).encode(), reply=inbox, headers=headers or None)
    await asyncio.wait_for(ended.wait(), 60)
    await subscription.unsubscribe()
    return sent


async def under_load(url: str) -> list[Sent]:
    nc, room = await nats.connect(url), asyncio.Semaphore(AT_ONCE)

    async def one(i: int) -> Sent:
        async with room:
            return await ask(nc, f"r{i}", long=i % 2 == 0)

    await ask(nc, "warm-up", long=True)
    sent = await asyncio.gather(*(one(i) for i in range(REQUESTS)))
    await nc.close()
    return sent


def leaves(spans: list[Received]) -> list[Received]:
    parents = {s.parent_id for s in spans}
    return [s for s in spans if s.span_id not in parents]


def coverage(sent: Sent, spans: list[Received]) -> float:
    """The part of the time from publish to last frame that the leaf spans cover."""
    start, end = sent.published_ns, sent.ended_ns
    clipped = [(max(s.start_ns, start), min(s.end_ns, end)) for s in leaves(spans)]
    return covered_us(clipped) / (end - start)


@pytest.mark.timed
def test_one_trace_per_request_that_covers_its_time(receiver: Receiver, start_up: StartUp) -> None:
    up = start_up(
        "--tokenizers", "2", "--detokenizers", "2",
        OTEL_EXPORTER_OTLP_ENDPOINT=receiver.url, OTEL_BSP_SCHEDULE_DELAY="100",
        HEADRACE_SIM="step=5000,token=20", HEADRACE_STEP_TOKENS="256",
    )  # fmt: skip
    sent = asyncio.run(under_load(up.nats_url))
    roots = receiver.wait_for([one.request for one in sent], 120)
    spans = list(receiver.spans)
    traces: dict[str, list[Received]] = defaultdict(list)
    for span in spans:
        traces[span.trace_id].append(span)
    assert len({root.trace_id for root in roots.values()}) == REQUESTS
    found = []
    for one in sent:
        root, trace = roots[one.request], traces[roots[one.request].trace_id]
        assert one.headers["traceparent"].split("-")[1:3] == [root.trace_id, root.span_id]
        assert root.parent_id == ""
        assert {s.parent_id for s in trace} <= {"", *(s.span_id for s in trace)}
        chunks = [s for s in trace if s.name.startswith("prefill chunk")]
        assert sum(s.attributes["tokens"] for s in chunks) == (700 if one.chunked else 20)
        assert len(chunks) >= (3 if one.chunked else 1)
        names = {s.name for s in trace}
        assert names >= {"received", "tokenize", "transit", "queue", "prefill", "first token", "decode"}
        assert names >= {"detokenize", "send"}
        found.append(coverage(one, trace))
    print(f"coverage: worst {min(found):.4f}, median {statistics.median(found):.4f}")
    assert statistics.median(found) >= 0.95
    assert min(found) >= 0.95
    check_steps(spans)
    services = {s.resource["service.name"] for s in spans}
    assert services == {f"headrace-{kind}" for kind in ("tokenizer", "scheduler", "executor", "detokenizer")}
    assert {s.attributes["component"].partition(".")[0] for s in spans if "component" in s.attributes} == {
        name.removeprefix("headrace-") for name in services
    }
    assert (
        len({s.resource.get("service.instance.id") for s in spans}) == 7
    )  # one without: where only the kind is known
    assert up.log.read_text().count("a test span arrived at") == 5


def check_steps(spans: list[Received]) -> None:
    """Step spans are linked to the roots of the requests they serve, and share their batch ids."""
    steps = [s for s in spans if s.name.startswith("step ")]
    known = {(s.trace_id, s.span_id) for s in spans if "gen_ai.operation.name" in s.attributes}
    assert steps
    assert all(0 < len(s.links) <= 16 and set(s.links) <= known for s in steps)
    batches = {s.attributes["batch.id"] for s in spans if s.name.startswith("prefill chunk")}
    assert batches & {s.attributes["batch.id"] for s in steps}
    for step in steps:
        a = step.attributes
        assert (a["overlap.mode"], a["micro_batch"]) == ("run_ahead", 0)
        assert 0 < a["forward_us"] + a["sample_us"] <= (step.end_ns - step.start_ns) / 1000 + 1
        assert a["rows"] >= 1


def test_a_clients_trace_goes_on_and_failures_are_traced(receiver: Receiver, start_up: StartUp) -> None:
    up = start_up(OTEL_EXPORTER_OTLP_ENDPOINT=receiver.url, OTEL_SERVICE_NAME="llm")
    mine, unsampled = "4bf92f3577b34da6a3ce929d0e0e4736", "0af7651916cd43dd8448eb211c80319c"

    async def chat() -> list[Sent]:
        nc = await nats.connect(up.nats_url)
        silent = {"traceparent": f"00-{unsampled}-00f067aa0ba902b7-00"}
        sampled = {"traceparent": f"00-{mine}-00f067aa0ba902b7-01"}
        done = [
            await ask(nc, "quiet", long=False, headers=silent),
            await ask(nc, "good", long=False, headers=sampled, n=2),
            await ask(nc, "bad", long=False, headers=sampled, temperature=-1),
            await ask(nc, "late", long=False, headers=sampled, timeout_s=0.02),
            await ask(nc, "", long=False, headers=sampled, subject="headrace.v1.generate.t.other"),
        ]
        await nc.close()
        return done

    sent = asyncio.run(chat())
    assert [one.headers["traceparent"].split("-")[1] for one in sent] == [unsampled, mine, mine, mine, mine]
    roots = receiver.wait_for(["bad", "good", "late", ""], 120)
    assert "quiet" not in receiver.roots()
    assert {(r.trace_id, r.parent_id) for r in roots.values()} == {(mine, "00f067aa0ba902b7")}
    assert [roots[name].attributes.get("error.type") for name in ("good", "bad", "late")] == [
        None, "invalid_request_error", "timeout",
    ]  # fmt: skip
    assert roots[""].attributes["error.type"] == "model_not_found"
    assert "temperature" in roots["bad"].error
    assert "not done within" in roots["late"].error
    children = [s.name for s in receiver.spans if s.parent_id == roots["bad"].span_id]
    assert sorted(children) == ["received", "tokenize"]
    children = [s.name for s in receiver.spans if s.parent_id == roots["good"].span_id]
    assert [name for name in children if name.startswith("choice")] == ["choice 0", "choice 1"]
    assert {s.resource["service.name"] for s in receiver.spans} == {"llm"}


@pytest.mark.timed  # a report once a minute
def test_a_dead_collector_costs_a_line(start_up: StartUp) -> None:
    up = start_up(
        OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:9", OTEL_BSP_SCHEDULE_DELAY="50",
        OTEL_METRIC_EXPORT_INTERVAL="500", OTEL_EXPORTER_OTLP_METRICS_TIMEOUT="1",
    )  # fmt: skip
    asyncio.run(under_load(up.nats_url))
    where = "http://127.0.0.1:9/v1/traces"
    deadline_s = time.monotonic() + 60
    fewest = {
        f"a test span did not arrive at {where} (Connection refused)": 3,
        "metrics: do not arrive at": 5,
    }
    while any(up.log.read_text().count(line) < count for line, count in fewest.items()):
        assert time.monotonic() < deadline_s, up.log.read_text()
    assert up.stop(signal.SIGTERM) == 0
    lines = up.log.read_text().splitlines()
    spans = [line for line in lines if f"spans did not arrive at {where}" in line]
    assert len(spans) <= 3, "each of three services may report once a minute"
    assert len([line for line in lines if "metrics: do not arrive at" in line]) == 5, "once for each service"
    assert not [line for line in lines if "Traceback" in line or "opentelemetry" in line]
