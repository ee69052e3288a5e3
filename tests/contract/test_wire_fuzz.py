"""Bytes that no service should send: any bytes become a message that keeps its promises, or a
WireError, and no more memory than the bytes themselves deserve."""

from __future__ import annotations

import contextlib
import dataclasses
import tracemalloc
from array import array
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.wire_samples import SAMPLES, enveloped

from shared import codec
from shared.codec import MAX_MESSAGE_BYTES, MAX_NUMBER, MAX_PARTS, Assembler, Envelope, validation_error
from shared.errors import WireError
from shared.messages import Cancel, Message, Resend, StepPlan, floats, ints

KINDS = sorted(SAMPLES)
golden = st.sampled_from(KINDS).map(lambda kind: codec.encode(enveloped(SAMPLES[kind])))
leaf = (
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=20)
    | st.binary(max_size=40) | st.builds(msgpack.ExtType, st.integers(0, 127), st.binary(max_size=8))
)  # fmt: skip
value = st.recursive(leaf, lambda inner: st.lists(inner, max_size=6), max_leaves=20)


def survives(data: bytes) -> Message | None:
    """Decode; what comes out can be sent again and decodes to the same."""
    with contextlib.suppress(WireError):
        envelope = codec.decode(data)
        assert validation_error(envelope.message) == ""
        assert repr(codec.decode(codec.encode(envelope))) == repr(envelope), "a stable form; NaN is not =="
        return envelope.message
    return None


@given(st.binary(max_size=200))
def test_random_bytes_become_a_message_or_an_error(data: bytes) -> None:
    survives(data)


@given(golden, st.data())
def test_truncated_bytes_become_an_error(data: bytes, draw: st.DataObject) -> None:
    assert survives(data[: draw.draw(st.integers(0, len(data) - 1))]) is None


@given(golden, st.data())
def test_flipped_bytes_become_a_message_or_an_error(data: bytes, draw: st.DataObject) -> None:
    flipped = bytearray(data)
    for at in draw.draw(st.lists(st.integers(0, len(data) - 1), min_size=1, max_size=4)):
        flipped[at] ^= draw.draw(st.integers(1, 255))
    survives(bytes(flipped))


@given(st.sampled_from(KINDS), st.data())
def test_a_field_of_any_type_and_size(kind: str, draw: st.DataObject) -> None:
    row = msgpack.unpackb(codec.encode(enveloped(SAMPLES[kind])))
    row[draw.draw(st.integers(0, len(row) - 1))] = draw.draw(value)
    survives(msgpack.packb(row))


@given(st.sampled_from(KINDS), st.lists(value, max_size=30))
def test_rows_of_any_values_become_a_message_or_an_error(kind: str, fields: list[Any]) -> None:
    survives(msgpack.packb([1, kind, "a.b", 1, 1, "", *fields]))


@pytest.mark.parametrize(
    "data",
    [
        b"\xdd\xff\xff\xff\xff",  # an array of 4 G entries
        b"\xdf\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\xc9\xff\xff\xff\xff\x01",
        b"\x91" * 60_000,
        b"\x96\x01" + b"\xdd\x7f\xff\xff\xff" * 1000,
        b"\xd6\xff\xff\xff\xff\xff",  # a timestamp
        b"\xd7\xff\xff\xff\xff\xff\xff\xff\xff\xff",
        bytes(MAX_MESSAGE_BYTES + 1),
    ],
)
def test_hostile_lengths_and_depths_take_no_memory(data: bytes) -> None:
    tracemalloc.start()
    with pytest.raises(WireError):
        codec.decode(data)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 2_000_000


part = st.builds(
    lambda kind, number, parts, tokens: dataclasses.replace(
        SAMPLES[kind], part=number, parts=parts, tokens=ints(tokens)
    ),
    st.sampled_from(["Tokenized", "Open", "SlotOpen"]),
    st.integers(-1, 4),
    st.integers(1, 4),
    st.lists(st.integers(0, 9), max_size=3),
)


@given(st.lists(part | st.just(Cancel(tenant="t", request="r")), max_size=12))
def test_parts_join_in_any_order(messages: list[Any]) -> None:
    """What comes out whole equals an unbroken run of parts, by a reading of its own."""
    assembler, run = Assembler(), list[Any]()
    for message in messages:
        try:
            whole = assembler.add(message)
        except WireError:
            run.clear()
            continue
        if isinstance(message, Cancel) or message.parts == 1:
            assert whole == message
            continue
        run = [message] if message.part == 0 else [*run, message]
        assert [m.part for m in run] == list(range(len(run)))
        assert {m.parts for m in run} == {message.parts}
        if whole is None:
            assert len(run) < message.parts
        else:
            joined = array("i", (token for m in run for token in m.tokens))
            assert whole == dataclasses.replace(run[0], part=0, parts=1, tokens=joined)
            run.clear()


def test_parts_are_bounded() -> None:
    tokenized = SAMPLES["Tokenized"]
    for number, parts in ((0, MAX_PARTS + 1), (-1, 2), (2, 2), (0, 0)):
        data = codec.encode(Envelope("a.b", 1, 1, dataclasses.replace(tokenized, part=number, parts=parts)))
        with pytest.raises(WireError, match=r"^Tokenized: part -?\d+ of \d+ is not one of at most 256$"):
            codec.decode(data)


PLAN, STEP, TOKENS = SAMPLES["StepPlan"], SAMPLES["StepResult"], SAMPLES["Tokens"]
HELLO, ASKED, OPENED, SLOT = (SAMPLES[k] for k in ("ExecHello", "Tokenized", "Open", "SlotOpen"))
ROW = StepPlan(
    exec_epoch=1, step=1, mode="single", micro_batch=0, slots=ints([3]), starts=ints([0]), counts=ints([2]),
    from_device=ints([0]), sample_rows=ints([0]), sample_slots=ints([3]),
)  # fmt: skip


def but(message: Any, **fields: Any) -> Any:
    return dataclasses.replace(message, **fields)


ASKED = but(ASKED, part=0, parts=1)
MORE_THAN_DRAFTS = "a row has more tokens than its drafts allow"
NOT_SAMPLED_ONCE = "a row at the device's place is not sampled once, for its slot"
FLAWED: list[tuple[Any, str]] = [
    (but(ROW, starts=ints([0, 1])), "its forward columns differ in length"),
    (but(ROW, counts=ints([])), "its forward columns differ in length"),
    (but(ROW, slots=ints([-1])), "a forward row has a negative slot or start, or no token"),
    (but(ROW, starts=ints([-5])), "a forward row has a negative slot or start, or no token"),
    (but(ROW, counts=ints([0])), "a forward row has a negative slot or start, or no token"),
    (but(ROW, sample_rows=ints([1])), "a sample row names no forward row"),
    (but(ROW, sample_rows=ints([-1])), "a sample row names no forward row"),
    (but(ROW, sample_rows=ints([0, 0])), "its sample or copy columns differ in length"),
    (but(ROW, sample_slots=ints([-1])), "a sample row or a copy has a negative number"),
    (but(ROW, copy_from=ints([1])), "its sample or copy columns differ in length"),
    (but(ROW, copy_from=ints([1]), copy_to=ints([-2])), "a sample row or a copy has a negative number"),
    (but(ROW, table_blocks=ints([1])), "it has table entries of no slot"),
    (but(ROW, table_slots=ints([3])), "its table columns differ in length"),
    (
        but(
            ROW, table_slots=ints([3]), table_first=ints([0]), table_counts=ints([2]), table_blocks=ints([7])
        ),
        "its table counts do not add up",
    ),
    (
        but(
            ROW, table_slots=ints([3]), table_first=ints([0]), table_counts=ints([1]), table_blocks=ints([-7])
        ),
        "a table column has a negative number",
    ),
    (but(STEP, done=ints()), "its columns differ in length"),
    (but(STEP, ids=ints([5, 6, 7]), counts=ints()), "its columns differ in length"),
    (but(STEP, counts=ints([1])), "its columns differ in length"),
    (but(STEP, drafted=ints([3])), "its columns differ in length"),
    (but(STEP, counts=ints([2, 0])), "its counts do not add up"),
    (but(STEP, counts=ints([2, 1])), "its counts do not add up"),
    (but(STEP, ids=ints([5, 6, 7]), counts=ints([2, 1]), drafted=ints([0, 1])), MORE_THAN_DRAFTS),
    (but(STEP, drafted=ints([1, -1])), MORE_THAN_DRAFTS),
    (but(ROW, from_device=ints([2]), sample_rows=ints(), sample_slots=ints()), NOT_SAMPLED_ONCE),
    (but(ROW, from_device=ints([2]), sample_slots=ints([4])), NOT_SAMPLED_ONCE),
    (but(ROW, from_device=ints([2]), sample_rows=ints([0, 0]), sample_slots=ints([3, 3])), NOT_SAMPLED_ONCE),
    (but(STEP, logprobs=floats([0.5] * 99)), "its log probabilities do not add up"),
    (but(STEP, top_counts=ints([-1] * len(STEP.ids))), "its log probabilities do not add up"),
    (but(TOKENS, first=ints()), "its columns differ in length"),
    (but(TOKENS, counts=ints([99] * len(TOKENS.seqs))), "its counts do not add up"),
    (but(TOKENS, counts=ints([-1] * len(TOKENS.seqs))), "a column has a negative number"),
    (but(TOKENS, ids=ints([-4] * len(TOKENS.ids))), "a column has a negative number"),
    (but(TOKENS, top_ids=ints()), "its log probabilities do not add up"),
    (but(ASKED, n=0), "n, max_tokens, timeout_us or seed is out of range"),
    (but(ASKED, n=2**31), "n, max_tokens, timeout_us or seed is out of range"),
    (but(ASKED, max_tokens=-1), "n, max_tokens, timeout_us or seed is out of range"),
    (but(ASKED, timeout_us=-1), "n, max_tokens, timeout_us or seed is out of range"),
    (but(ASKED, seed=-1), "n, max_tokens, timeout_us or seed is out of range"),
    (but(ASKED, stop=("a", "")), "its request, inbox or a stop string is empty"),
    (but(ASKED, inbox=""), "its request, inbox or a stop string is empty"),
    (but(ASKED, tokens=ints([5, -1])), "a token id is negative"),
    (but(ASKED, sampling=but(ASKED.sampling, bias_ids=ints())), "its bias columns differ in length"),
    (but(OPENED, choice=5, choices=5), "choice 5 is not one of 5"),
    (but(OPENED, choice=-1), f"choice -1 is not one of {OPENED.choices}"),
    (but(OPENED, stop=("",)), "a stop string is empty"),
    (but(SAMPLES["Close"], final=-1), "its final index is negative, or its vector damaged"),
    (but(SAMPLES["Close"], vector=b"abc"), "its final index is negative, or its vector damaged"),
    (but(SAMPLES["Ended"], index=-1), "its index is negative, or its calls are too many or too long"),
    (
        but(SAMPLES["Ended"], calls=("c",) * 9),
        "its index is negative, or its calls are too many or too long",
    ),
    (
        but(SAMPLES["Ended"], calls=("c" * 65,)),
        "its index is negative, or its calls are too many or too long",
    ),
    (
        but(SAMPLES["SessionVerb"], verb="pin"),
        "it has no session, a negative time or a verb beyond state, release, prefetch, keep",
    ),
    (but(ASKED, keep_us=-1), "its age, min_tokens, expects_tokens or keep_us is negative"),
    (but(SLOT, slot=-1), "slot, max_length, min_tokens, pooling or seed is out of range"),
    (but(SLOT, pooling=-2), "slot, max_length, min_tokens, pooling or seed is out of range"),
    (but(ASKED, pooling=-2), "its pooling is out of range"),
    (but(STEP, vectors=((len(STEP.ids), b"abcd"),)), "a vector names no row, or is none of float32"),
    (but(STEP, vectors=((0, b""),)), "a vector names no row, or is none of float32"),
    (but(STEP, vectors=((0, b"abc"),)), "a vector names no row, or is none of float32"),
    (but(SLOT, prediction=ints([-1])), "a token id of its prediction is negative"),
    (but(ASKED, prediction=ints([-1])), "a token id of its prediction is negative"),
    (but(SLOT, tokens=ints([-1])), "a token id is negative"),
    (but(HELLO, blocks=2**40), "its blocks, slots, sizes or stages are out of range"),
    (but(HELLO, slots=0), "its blocks, slots, sizes or stages are out of range"),
    (but(HELLO, block_tokens=0), "its blocks, slots, sizes or stages are out of range"),
    (but(HELLO, max_drafts=65), "its blocks, slots, sizes or stages are out of range"),
    (but(HELLO, max_draft_rows=-1), "its blocks, slots, sizes or stages are out of range"),
    (but(HELLO, stages=0), "its blocks, slots, sizes or stages are out of range"),
    (but(HELLO, stages=65), "its blocks, slots, sizes or stages are out of range"),
    (but(STEP, queued_us=-1), "a duration is negative"),
    (but(STEP, host_us=-1), "a duration is negative"),
    (but(STEP, segments=ints([0, 1])), "a segment of it has no lane, start or length"),
    (but(STEP, segments=ints([0, 1, -1])), "a segment of it has no lane, start or length"),
    (but(STEP, segments=ints([4, 1, 1])), "a segment of it has no lane, start or length"),
    (but(STEP, segments=ints([0, 1, 1]) * 257), "it has over 256 segments"),
    (but(STEP, row_errors=((len(STEP.ids), "x"),)), "a row error names no row, or one twice"),
    (but(STEP, row_errors=((-1, "x"),)), "a row error names no row, or one twice"),
    (but(STEP, row_errors=((0, "x"), (0, "y"))), "a row error names no row, or one twice"),
    (but(STEP, row_errors=((0, ""),)), "a row error is empty or over 1000 characters"),
    (but(STEP, row_errors=((0, "x" * 1001),)), "a row error is empty or over 1000 characters"),
    (but(ASKED, processors=("{}",) * 9), "it has over 8 logits processors"),
    (but(ASKED, processors=("x" * 4097,)), "a logits processor is empty or over 4096 characters"),
    (but(SLOT, processors=("{}",) * 9), "it has over 8 logits processors"),
    (but(SLOT, processors=("",)), "a logits processor is empty or over 4096 characters"),
    (but(SAMPLES["Beat"], interval_us=0), "its interval is out of range"),
    (but(SAMPLES["Beat"], interval_us=2**62), "its interval is out of range"),
    (Resend(first_seq=-1), "its number is out of range"),
    (but(SAMPLES["StreamReset"], next_seq=MAX_NUMBER), "its number is out of range"),
    (but(SAMPLES["StreamAt"], last_seq=-1), "its number is out of range"),
]


@pytest.mark.parametrize(("message", "wrong"), FLAWED, ids=lambda v: v if isinstance(v, str) else "")
def test_message_bounds_are_checked_on_arrival(message: Any, wrong: str) -> None:
    kind = codec.kind_of(message)
    with pytest.raises(WireError) as caught:
        codec.decode(codec.encode(Envelope("a.b", 1, 1, message)))
    assert caught.value.message == f"{kind}: {wrong}"


@pytest.mark.parametrize("rows", [0, 1, 31, 1024, 1025, 3000])
def test_whole_columns_of_any_length_pass(rows: int) -> None:
    row = ints(range(rows))
    plan = but(ROW, slots=row, starts=row, counts=ints([1] * rows), from_device=row, sample_rows=row)
    plan = but(plan, sample_slots=row)
    tokens = but(
        TOKENS, seqs=row, first=row, counts=ints([2] * rows), ids=ints([5] * (2 * rows)), logprobs=floats(),
        top_counts=ints(), top_ids=ints(), top_logprobs=floats(),
    )  # fmt: skip
    assert validation_error(plan) == validation_error(tokens) == ""
    if rows > 1:
        assert validation_error(but(plan, sample_rows=ints([*range(1, rows), rows])))
        assert validation_error(but(tokens, counts=ints([1] * rows)))


@given(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=20))
def test_a_negative_number_anywhere_in_a_column_is_seen(numbers: list[int]) -> None:
    opened = but(OPENED, tokens=ints(numbers))
    assert bool(validation_error(opened)) == any(number < 0 for number in numbers)
