"""Well-formed messages that make no sense, into every mailbox of a working pipeline: no actor fails, no
request is lost, and what was held is free again."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from support.memory_bus import MemoryBroker
from support.pipeline.five_actors import Pipeline

from shared import codec
from shared.codec import Envelope
from shared.messages import (
    Accepted,
    Close,
    Detached,
    Ended,
    ExecReset,
    ExecWelcome,
    GrammarFailed,
    KvCommit,
    KvCopied,
    KvFound,
    KvLookup,
    KvRelease,
    KvReserve,
    Message,
    Open,
    PromptTokens,
    Rejected,
    Resend,
    SlotClose,
    SlotOpen,
    StepPlan,
    StepResult,
    StopFound,
    StreamAt,
    StreamReset,
    Tokens,
    ints,
)
from shared.nats import subjects

ASK = {"prompt": "Hello", "max_tokens": 12, "temperature": 0, "seed": 3, "model": "smollm2-135m-instruct"}
BIG = 2**31 - 1
NO_TOKENS = Tokens(executor="", step=0, seqs=ints(), first=ints(), counts=ints(), ids=ints())
STRAY = Tokens(executor="", step=-1, seqs=ints([-1]), first=ints([BIG]), counts=ints([1]), ids=ints([BIG]))
RESERVE = KvReserve(job=-1, owner="", keys=b"x" * 999, value_bytes=-1, lease_us=-1)


def plan(epoch: int, step: int, **columns: list[int]) -> StepPlan:
    row = {
        "slots": [0],
        "starts": [0],
        "counts": [1],
        "from_device": [1],
        "sample_rows": [0],
        "sample_slots": [0],
    }
    return StepPlan(
        exec_epoch=epoch, step=step, mode="single", micro_batch=0,
        **{name: ints(values) for name, values in {**row, **columns}.items()},
    )  # fmt: skip


def result(epoch: int, step: int, rows: int) -> StepResult:
    return StepResult(exec_epoch=epoch, step=step, ids=ints([5] * rows), done=ints([0] * rows))


def absurd(exec_epoch: int) -> list[tuple[str, str, Message]]:
    """(from, to, message); all but the sense is right."""
    up, down, ask = ("executor", "scheduler"), ("scheduler", "detokenizer"), ("scheduler", "executor")
    text = {"request": "r", "attempt": 1, "tenant": "t", "model": "m", "inbox": "nowhere"}
    rows: list[tuple[tuple[str, str], Message]] = [
        (up, result(exec_epoch, BIG, 1)),
        (up, result(exec_epoch, 0, 3)),
        (up, result(exec_epoch - 1, 1, 1)),
        (up, GrammarFailed(slot=BIG, generation=-1, message="no")),
        (up, KvCopied(job=-1, status="?")),
        (("detokenizer", "scheduler"), StopFound(seq=1, index=-5)),
        (("detokenizer", "scheduler"), StopFound(seq=-1, index=BIG)),
        (("detokenizer", "scheduler"), Ended(seq=BIG, index=0, reason="?")),
        (("detokenizer", "scheduler"), Detached(seqs=ints([-1, BIG, 0]))),
        (("kv_offload", "scheduler"), KvFound(job=BIG, tiers=ints([9]))),
        (("tokenizer", "scheduler"), NO_TOKENS),
        (ask, ExecWelcome(exec_epoch=-1)),
        (ask, ExecReset(exec_epoch=-1, why="?")),
        (ask, plan(exec_epoch, BIG)),
        (ask, plan(exec_epoch, -1)),
        (ask, plan(exec_epoch - 1, 1)),
        (ask, SlotClose(slot=BIG, generation=0, last_step=BIG)),
        (ask, SlotClose(slot=-1, generation=0, last_step=-1)),
        (down, Close(seq=BIG, final=BIG, reason="?")),
        (down, Close(seq=1, final=0, reason="moved")),
        (down, STRAY),
        (down, PromptTokens(seq=1, step=0, first=-3, ids=ints([BIG]))),
        (down, plan(1, 1)),
        (("scheduler", "tokenizer"), Accepted(tenant="t", request="?", attempt=-1)),
        (("scheduler", "tokenizer"), Rejected(tenant="t", request="?", attempt=0, code=-7, message="")),
        (("scheduler", "tokenizer"), Open(seq=-1, **text)),
        (("scheduler", "kv_offload"), KvLookup(job=-1, keys=b"odd")),
        (("scheduler", "kv_offload"), RESERVE),
        (("scheduler", "kv_offload"), KvCommit(job=BIG, written=ints([7] * 99))),
        (("scheduler", "kv_offload"), KvRelease(jobs=ints([-1, BIG]))),
        *((way, m) for way in (up, down, ask) for m in (Resend(first_seq=2**52), StreamAt(last_seq=2**52))),
        *((way, StreamReset(next_seq=2**52, lost=True)) for way in (up, down, ask)),
    ]  # fmt: skip
    return [(*way, message) for way, message in rows]


def inject(pipeline: Pipeline, sender: str, to: str, message: Message) -> None:
    """Outside the numbered stream, in the name of a living actor."""
    runtime = pipeline.runtimes[f"{sender}-1"]
    envelope = Envelope(runtime.mailbox.source, runtime.mailbox.epoch, 0, message)
    subject = subjects.mailbox(pipeline.settings.fleet, to, f"{to}-1", type(message).__name__)
    runtime.bus.publish(subject, codec.encode(envelope))


@pytest.fixture
async def pipeline(fleet: str) -> AsyncIterator[Pipeline]:
    broker = MemoryBroker()

    async def connect() -> object:
        return broker.connect()

    pipeline = await Pipeline.start(connect, fleet)  # type: ignore[arg-type]  # a MemoryBus is a Bus
    yield pipeline
    await pipeline.stop()  # asserts that no actor has failed


def exec_epoch(pipeline: Pipeline) -> int:
    epoch = pipeline.status("scheduler")["executors"]["executor-1"]["epoch"]
    assert isinstance(epoch, int)
    return epoch


async def test_nonsense_before_and_during_requests_changes_no_answer(pipeline: Pipeline) -> None:
    want = await pipeline.client.complete(ASK)
    for sender, to, message in absurd(exec_epoch(pipeline)):
        inject(pipeline, sender, to, message)
    await pipeline.until(lambda: bool(pipeline.status("scheduler")["executors"]))
    stream = pipeline.client.stream({**ASK, "max_tokens": 200}, timeout_s=20)
    types = []
    async for frame in stream:
        types.append(frame["type"])
        for sender, to, message in absurd(exec_epoch(pipeline)) if len(types) == 3 else []:
            inject(pipeline, sender, to, message)
    assert types[-1] == "done"
    again = await pipeline.client.complete(ASK)
    assert again["choices"] == want["choices"]
    await pipeline.assert_idle()


@pytest.mark.parametrize(
    ("columns", "why"),
    [
        ({}, "the plan names slot 0, which is not open"),
        ({"slots": [BIG], "sample_slots": [BIG]}, f"the plan names slot {BIG}, which is not open"),
    ],
)
async def test_unplanned_step_costs_the_incarnation_only(
    pipeline: Pipeline, columns: dict[str, list[int]], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    want = await pipeline.client.complete(ASK)
    steps = pipeline.status("scheduler")["executors"]["executor-1"]["steps"]
    before = exec_epoch(pipeline)
    inject(pipeline, "scheduler", "executor", plan(before, steps + 1, **columns))
    await pipeline.until(
        lambda: before not in [e["epoch"] for e in pipeline.status("scheduler")["executors"].values()]
    )
    await pipeline.until(lambda: bool(pipeline.status("scheduler")["executors"]))
    assert why in caplog.text
    assert (await pipeline.client.complete(ASK))["choices"] == want["choices"]
    await pipeline.assert_idle()


async def test_a_slot_that_does_not_exist_fails_the_next_step_typed(pipeline: Pipeline) -> None:
    want = await pipeline.client.complete(ASK)
    for slot, tokens in ((BIG, [5]), (3, [])):
        opened = SlotOpen(slot=slot, generation=1, seq=1, prompt_tokens=1, tokens=ints(tokens))
        inject(pipeline, "scheduler", "executor", opened)
        with pytest.raises(Exception, match=r"step \d+ of executor\.executor-1 failed: EngineError: slot"):
            await pipeline.client.complete(ASK)
        assert (await pipeline.client.complete(ASK))["choices"] == want["choices"]
    await pipeline.assert_idle()


async def test_token_outside_the_weights_is_an_error_of_its_own_slot_alone(pipeline: Pipeline) -> None:
    want = await pipeline.client.complete(ASK)
    opened = SlotOpen(slot=3, generation=1, seq=1, prompt_tokens=1, tokens=ints([BIG]))
    inject(pipeline, "scheduler", "executor", opened)
    assert (await pipeline.client.complete(ASK))["choices"] == want["choices"]
    inject(pipeline, "scheduler", "executor", SlotClose(slot=3, generation=1, last_step=0))
    await pipeline.assert_idle()


async def test_a_result_of_another_length_resets_the_executor_and_loses_no_request(
    pipeline: Pipeline,
) -> None:
    want = await pipeline.client.complete({**ASK, "max_tokens": 100})
    frames = []
    async for frame in pipeline.client.stream({**ASK, "max_tokens": 100}, timeout_s=20):
        frames.append(frame)
        if len(frames) == 3:
            executor = pipeline.runtimes["scheduler-1"].actor._core.state.executors["executor-1"]  # type: ignore[attr-defined]
            inject(pipeline, "executor", "scheduler", result(executor.epoch, executor.in_flight[0].step, 7))
    text = "".join(c["text"] for f in frames if f["type"] == "delta" for c in f["choices"])
    assert text == want["choices"][0]["text"]
    await pipeline.assert_idle()
