"""However large what the limits admit: each message reaches its receiver whole, in parts that are short."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.wire_samples import SAMPLES

from services.kv_offload.peers.book import BATCH
from services.scheduler.kv_tiers.lookups import MAX_KEYS
from services.scheduler.state.requests import MAX_CHUNKS, MAX_DECISIONS, MAX_IDS
from services.scheduler.step_planner import MOST_VECTORS
from services.tokenizer.structured_output import MAX_PACKED_CHARS
from shared import codec
from shared.api import (
    MAX_BIASES,
    MAX_CHOICES,
    MAX_LOGPROBS,
    MAX_STOP_CHARS,
    MAX_STOP_IDS,
    MAX_STOPS,
)
from shared.codec import (
    MAX_MESSAGE_BYTES,
    MAX_OPTIONS_BYTES,
    MAX_PARTS,
    MAX_PROCESSOR_CHARS,
    MAX_PROCESSORS,
    MAX_SLOTS,
    MAX_TOKENS,
    Assembler,
    Envelope,
    decode,
    encode_all,
)
from shared.errors import PayloadTooLarge, WireError
from shared.messages import Chunk, Decision, Fragment, Message, floats, ints, longs
from shared.nats.subjects import MAX_INBOX_CHARS, MAX_NAME_CHARS

NAME, WHY = "n" * MAX_NAME_CHARS, "ř" * 4_000
STOPS = ("𝄞" * MAX_STOP_CHARS,) * MAX_STOPS
MOST = 2**31 - 1


def travelled(message: Message) -> Message | None:
    """The message as its receiver gets it."""
    assembler, whole = Assembler(), None
    for number, data in enumerate(encode_all(Envelope(f"scheduler.{NAME}", 2**63, 7, message, "t" * 256))):
        assert whole is None
        assert len(data) <= MAX_MESSAGE_BYTES
        envelope = decode(data)
        assert envelope.seq == 7 + number
        whole = assembler.add(envelope.message)
    return whole


def but(kind: str, **fields: Any) -> Message:
    return dataclasses.replace(SAMPLES[kind], **fields)


def column(rows: int) -> Any:
    return ints([MOST]) * rows


def scores(rows: int, tops: int) -> dict[str, Any]:
    return {
        "logprobs": floats([-0.5]) * rows,
        "top_counts": ints([tops]) * rows,
        "top_ids": column(rows * tops),
        "top_logprobs": floats([-0.5]) * (rows * tops),
    }


def names(kind: str) -> dict[str, str]:
    """The names in a message, as long as they may be."""
    long = {
        "tenant",
        "request",
        "model",
        "executor",
        "owner",
        "actor",
        "host_id",
        "fingerprint",
        "arena",
        "parent_span",
    }
    fields = {f.name: NAME for f in dataclasses.fields(SAMPLES[kind]) if f.name in long}
    return fields | ({"inbox": "i" * MAX_INBOX_CHARS} if hasattr(SAMPLES[kind], "inbox") else {})


def options(draw: st.DrawFn) -> dict[str, Any]:
    """What a request may bring beside its prompt, at its limits or not at all; together up to theirs."""
    biases = draw(st.sampled_from([0, MAX_BIASES]))
    sampling = dataclasses.replace(
        SAMPLES["SlotOpen"].sampling, bias_ids=column(biases), bias_values=floats([9.5]) * biases
    )  # type: ignore[union-attr]  # it is a SlotOpen
    grammar = draw(st.sampled_from([0, MAX_PACKED_CHARS]))
    processors = draw(st.integers(0, MAX_PROCESSORS if not grammar else 2))
    return {
        "sampling": sampling,
        "stop_ids": column(draw(st.sampled_from([0, MAX_STOP_IDS]))),
        "grammar": "g" * grammar,
        "processors": ("p" * MAX_PROCESSOR_CHARS,) * processors,
        "part": 0,
        "parts": 1,
        "logprobs": 1 + MAX_LOGPROBS,
    }


@st.composite
def requests(draw: st.DrawFn, kind: str, most: int) -> Message:
    tokens = column(draw(st.sampled_from([1, most]) | st.integers(1, most)))
    if kind == "Open":
        return but("Open", **names("Open"), stop=STOPS, part=0, parts=1, tokens=tokens)
    fields = options(draw) | {"tokens": tokens}
    if kind == "SlotOpen":
        return but("SlotOpen", **fields)
    n = draw(st.sampled_from([1, MAX_CHOICES]))
    fields |= names(kind) | {"n": n, "generated": column(n), "reasons": ("length",) * n}
    fields["stop"] = STOPS[: draw(st.integers(0, MAX_STOPS // 4))]
    if not draw(st.booleans()):
        fields |= {"generated": ints(), "reasons": (), "age_us": 0, "first_us": 0}
    return but("Tokenized", **fields)


@st.composite
def rows(draw: st.DrawFn, kind: str, most: int) -> Message:
    """Messages whose columns are as long as an executor has slots, blocks or jobs."""
    count = draw(st.sampled_from([1, MAX_IDS, most]) | st.integers(1, most))
    tops = draw(st.integers(0, MAX_LOGPROBS + 1)) if count <= 4 * MAX_IDS else 20
    many = column(count)
    zeros = ints([0]) * count
    made: dict[str, Callable[[], Message]] = {
        "StepPlan": lambda: but(
            kind, slots=many, starts=many, counts=many, from_device=zeros, sample_rows=zeros,
            sample_slots=many, table_slots=many, table_first=many, table_counts=ints([1]) * count,
            table_blocks=many,
            copy_from=many, copy_to=many, wait_jobs=many,
        ),
        "StepResult": lambda: but(
            kind, ids=many, done=many, error=WHY, row_errors=((0, "e" * 1_000),),
            vectors=((0, bytes(32_768)),), counts=ints([1]) * count, drafted=zeros,
            **scores(count, tops),
        ),
        "Tokens": lambda: but(
            kind, **names(kind), seqs=many, first=many, counts=ints([1]) * count, ids=many,
            **scores(count, tops),
        ),
        "PromptTokens": lambda: but(kind, ids=many, ranks=ints([1]) * count, **scores(count, tops)),
        "Detached": lambda: but(kind, seqs=many),
        "KvRelease": lambda: but(kind, jobs=many),
        "KvGone": lambda: but(kind, keys=bytes(32 * count)),
        "KvForget": lambda: but(kind, **names(kind), keys=bytes(32 * count)),
        "KvTouch": lambda: but(kind, **names(kind), keys=bytes(32 * count)),
        "KvCommit": lambda: but(kind, written=many),
        "KvStored": lambda: but(kind, tiers=many),
        "KvReserved": lambda: but(kind, offsets=longs([2**62]) * count),
        "KvReserve": lambda: but(kind, **names(kind), keys=bytes(32 * count), valid_tokens=many),
        "KvLookup": lambda: but(kind, **names(kind), keys=bytes(32 * count)),
        "KvFound": lambda: but(kind, tiers=many),
        "KvPrefetch": lambda: but(kind, **names(kind), keys=bytes(32 * count)),
        "KvReady": lambda: but(kind, offsets=longs([2**62]) * count, valid_tokens=many),
        "KvCopy": lambda: but(kind, blocks=many, offsets=longs([2**62]) * count),
        "PeerLookup": lambda: but(kind, **names(kind), keys=bytes(32 * count)),
        "PeerFound": lambda: but(
            kind, offsets=longs([2**62]) * count, headers=bytes(128 * min(count, BATCH))
        ),
        "Close": lambda: but(
            kind,
            **names(kind),
            message=WHY,
            decisions=(Decision(at_us=MOST, what="admit", why=WHY, numbers=(("n", MOST),)),) * MAX_DECISIONS,
            chunks=(Chunk(at_us=MOST, took_us=MOST, tokens=MOST, step=MOST, executor=NAME),) * MAX_CHUNKS,
        ),
    }  # fmt: skip
    return made[kind]()


PAGED = ("Open", "SlotOpen", "Tokenized")
TIERS = (
    "KvCopy", "KvForget", "KvFound", "KvLookup", "KvPrefetch", "KvReady", "KvReserve", "KvTouch", "PeerFound",
    "PeerLookup",
)  # fmt: skip
ROWS = (
    "Close", "Detached", "KvCommit", "KvGone", "KvRelease", "KvReserved", "KvStored", "PromptTokens",
    "StepPlan", "StepResult", "Tokens", *TIERS,
)  # fmt: skip
FIXED = sorted({*SAMPLES} - {*PAGED, *ROWS, "Fragment"})


@pytest.mark.parametrize("kind", PAGED)
@given(data=st.data())
@settings(max_examples=25, deadline=None, derandomize=True)
def test_requests_of_any_length_arrive_whole(kind: str, data: st.DataObject) -> None:
    message = data.draw(requests(kind, 60_000))
    row = dict(zip((f.name for f in dataclasses.fields(message)), codec.to_row(message)[1:], strict=True))
    size = len(msgpack.packb(list((row | {"tokens": b""}).values())))
    if kind == "Tokenized" and size > MAX_OPTIONS_BYTES and not message.generated:  # type: ignore[union-attr]
        with pytest.raises(PayloadTooLarge, match="the options of the request"):
            travelled(message)
        return
    assert travelled(message) == message


@pytest.mark.parametrize("kind", PAGED)
def test_the_longest_sequence_arrives_whole_and_a_longer_one_is_refused(kind: str) -> None:
    fields = {"part": 0, "parts": 1, "tokens": ints([5]) * MAX_TOKENS}
    assert travelled(but(kind, **fields)) == but(kind, **fields)
    beyond = ints([5]) * (MAX_TOKENS + codec.PAGE_TOKENS + 1)
    with pytest.raises(PayloadTooLarge, match=f"{kind} needs 257 messages, over 256: send fewer tokens"):
        travelled(but(kind, **fields | {"tokens": beyond}))


@pytest.mark.parametrize("kind", ROWS)
@given(data=st.data())
@settings(max_examples=12, deadline=None, derandomize=True)
def test_columns_of_any_length_arrive_whole(kind: str, data: st.DataObject) -> None:
    message = data.draw(rows(kind, MAX_KEYS if kind in TIERS else MAX_SLOTS))
    assert travelled(message) == message


def test_the_vectors_of_a_step_arrive_whole() -> None:
    rows = ints(range(2 * MOST_VECTORS))
    vectors = tuple((row, bytes(4 * 8_192)) for row in range(MOST_VECTORS))
    columns = {"ids": rows, "done": rows, "counts": ints(), "drafted": ints()}
    message = but("StepResult", **columns, vectors=vectors, **scores(len(rows), 20))
    assert (travelled(message) == message) is True


@pytest.mark.parametrize("kind", FIXED)
def test_the_longest_names_and_reasons_fit_into_one_message(kind: str) -> None:
    fields = {f.name for f in dataclasses.fields(SAMPLES[kind])}
    message = but(kind, **names(kind), **{name: WHY for name in ("message", "why") if name in fields})
    assert travelled(message) == message
    assert len(list(encode_all(Envelope(f"scheduler.{NAME}", 2**63, 2**63, message, "t" * 256)))) == 1


def test_a_plan_over_all_parts_is_refused_before_the_first_is_sent() -> None:
    plan = but("StepPlan", table_counts=ints([4_000_000, 0]), table_blocks=column(4_000_000))
    with pytest.raises(PayloadTooLarge, match=r"StepPlan needs \d+ messages, over 256"):
        next(encode_all(Envelope("scheduler.s", 1, 1, plan)))


# ---- fragments that no service should send ---------------------------------------------------------

PLAN = but("StepPlan", table_counts=ints([50_000, 0]), table_blocks=column(50_000))


def fragments(message: Message) -> list[Fragment]:
    found = [decode(data).message for data in encode_all(Envelope("a.b", 1, 1, message))]
    assert all(isinstance(each, Fragment) for each in found)
    return found  # type: ignore[return-value]  # as was just asserted


def test_fragments_that_do_not_follow_are_an_error_and_the_next_message_is_read() -> None:
    first, second, third, *_ = fragments(PLAN)
    for before, wrong in [([], second), ([first], third), ([first, second], second)]:
        assembler = Assembler()
        assert [assembler.add(each) for each in before] == [None] * len(before)
        with pytest.raises(WireError, match=r"part \d of a message does not follow"):
            assembler.add(wrong)
        assert [assembler.add(each) for each in fragments(PLAN)][-1] == PLAN


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ([], "unknown message kind None"),
        ({}, "unknown message kind None"),
        (["Shout"], "unknown message kind 'Shout'"),
        (codec.to_row(but("StepPlan", starts=ints())), "StepPlan: its forward columns differ in length"),
        (codec.to_row(SAMPLES["Fragment"]), "Fragment is not sent in fragments"),
        (codec.to_row(but("Open", part=0)), "Open is not sent in fragments"),
    ],
)
def test_fragments_of_what_is_no_message_are_an_error(row: object, why: str) -> None:
    with pytest.raises(WireError, match=why):
        Assembler().add(Fragment(part=0, parts=1, data=msgpack.packb(row)))


@pytest.mark.parametrize("fields", [(0, MAX_PARTS + 1, b"x"), (-1, 2, b"x"), (2, 2, b"x"), (0, 1, b"")])
def test_fragments_are_bounded_where_they_arrive(fields: tuple[int, int, bytes]) -> None:
    part, parts, data = fields
    with pytest.raises(
        WireError, match=r"Fragment: (part -?\d+ of \d+ is not one of at most 256|it is empty)"
    ):
        decode(codec.encode(Envelope("a.b", 1, 1, Fragment(part=part, parts=parts, data=data))))
