"""The wire is frozen: golden bytes of every kind, older and newer senders, and hostile bytes."""

from __future__ import annotations

import dataclasses
import json
import struct
from array import array
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.wire_samples import SAMPLES, enveloped

from shared import codec
from shared.codec import MAX_MESSAGE_BYTES, Assembler, Envelope, decode, encode, split
from shared.errors import PayloadTooLarge, WireError
from shared.messages import Accepted, Message, Open, Sampling, SlotOpen, Tokenized, ints

GOLDEN_FILE = Path(__file__).parents[1] / "data" / "golden_wire.json"
GOLDEN: dict[str, str] = json.loads(GOLDEN_FILE.read_text())
OLDER: dict[str, str] = json.loads((GOLDEN_FILE.parent / "golden_wire_older.json").read_text())
KINDS = sorted(codec.KINDS)
RESERVED = {"AuxMsg", "KvRenew", "KvRenewed"}  # names of kinds that are gone: a new kind has another name
SHOW = (
    "PYTHONPATH=.:tests/contract python -c 'from wire_samples import *; from shared.codec import encode; "
    'print(encode(enveloped(SAMPLES["{kind}"])).hex())\''
)


def required_fields(message: Message) -> int:
    missing = dataclasses.MISSING
    fields = dataclasses.fields(message)
    return sum(f.default is missing and f.default_factory is missing for f in fields)


def row_of(kind: str) -> list[Any]:
    row: list[Any] = msgpack.unpackb(bytes.fromhex(GOLDEN[kind]))
    return row


def test_every_kind_has_a_sample_and_golden_bytes() -> None:
    assert sorted(SAMPLES) == KINDS
    assert sorted(GOLDEN) == KINDS, "a new kind needs its line; see the next test's message for the bytes"
    assert len(KINDS) == 50
    assert RESERVED.isdisjoint(KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_samples_leave_no_field_at_its_default(kind: str) -> None:
    for f in dataclasses.fields(SAMPLES[kind]):
        default = f.default_factory() if callable(f.default_factory) else f.default
        assert getattr(SAMPLES[kind], f.name) != default, f.name


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_are_the_golden_ones(kind: str) -> None:
    found = encode(enveloped(SAMPLES[kind])).hex()
    assert found == GOLDEN.get(kind), (
        f"the bytes of {kind} changed. Released bytes never change: new fields go last, with a default. "
        f"The line of a new kind or field is shown by: {SHOW.replace('{kind}', kind)}"
    )


def test_layout_equals_one_by_hand() -> None:
    expected = [1, "KvReserved", "scheduler.s0", 1_700_000_000_000_000, 300, enveloped(SAMPLES["Beat"]).trace]
    expected += [8, 3, struct.pack("<qq", 2**33, -1), "full"]
    assert row_of("KvReserved") == expected
    sampling = [0.5, 40, 0.75, 0.125, 1.25, -0.5, 0.25]
    sampling += [struct.pack("<ii", 7, 49151), struct.pack("<ff", -100, 2.5)]
    assert row_of("SlotOpen")[6:14] == [5, 9, 70_000, 3, 2, 67, 2**63 + 1, sampling]


@pytest.mark.parametrize("kind", KINDS)
def test_golden_bytes_decode_to_the_sample(kind: str) -> None:
    assert decode(bytes.fromhex(GOLDEN[kind])) == enveloped(SAMPLES[kind])


@pytest.mark.parametrize("kind", KINDS)
def test_fields_of_a_newer_sender_are_ignored(kind: str) -> None:
    row = row_of(kind)
    newer = [[*value, "new"] if _is_record(kind, i) else value for i, value in enumerate(row)]
    assert decode(msgpack.packb([*newer, 7, ["new"], b"x"])) == enveloped(SAMPLES[kind])


def _is_record(kind: str, index: int) -> bool:
    if index < 6:
        return False
    field = dataclasses.fields(SAMPLES[kind])[index - 6]
    return dataclasses.is_dataclass(getattr(SAMPLES[kind], field.name))


def test_newer_records_inside_a_list_are_ignored_too() -> None:
    row = row_of("Close")
    decisions = 6 + [f.name for f in dataclasses.fields(SAMPLES["Close"])].index("decisions")
    row[decisions] = [[*decision, "new"] for decision in row[decisions]]
    assert decode(msgpack.packb(row)).message == SAMPLES["Close"]


@pytest.mark.parametrize("kind", KINDS)
def test_fields_missing_from_an_older_sender_get_their_defaults(kind: str) -> None:
    sample = SAMPLES[kind]
    required = required_fields(sample)
    names = [f.name for f in dataclasses.fields(sample)]
    expected = type(sample)(**{name: getattr(sample, name) for name in names[:required]})
    assert decode(msgpack.packb(row_of(kind)[: 6 + required])).message == expected


@pytest.mark.parametrize("kind", sorted(OLDER))
def test_golden_bytes_of_before_decode_to_the_sample_without_its_new_fields(kind: str) -> None:
    known = len(msgpack.unpackb(bytes.fromhex(OLDER[kind]))) - 6
    fields = dataclasses.fields(SAMPLES[kind])
    assert known < len(fields)
    new = {f.name: f.default_factory() if callable(f.default_factory) else f.default for f in fields[known:]}
    expected = enveloped(dataclasses.replace(SAMPLES[kind], **new))
    assert decode(bytes.fromhex(OLDER[kind])) == expected


def test_a_nested_record_of_an_older_sender_gets_its_defaults() -> None:
    row = row_of("SlotOpen")
    sampling = 6 + [f.name for f in dataclasses.fields(SlotOpen)].index("sampling")
    row[sampling] = [0.5, 40]
    message = decode(msgpack.packb(row)).message
    assert isinstance(message, SlotOpen)
    assert message.sampling == Sampling(temperature=0.5, top_k=40)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if required_fields(SAMPLES[kind])])
def test_a_missing_required_field_is_an_error(kind: str) -> None:
    required = required_fields(SAMPLES[kind])
    with pytest.raises(WireError, match=f"{kind} needs {required} fields"):
        decode(msgpack.packb(row_of(kind)[: 5 + required]))


@pytest.mark.parametrize("kind", KINDS)
def test_a_wrong_type_in_any_field_is_an_error(kind: str) -> None:
    for index in (2, 3, 4, 5, *range(6, len(row_of(kind)))):
        row = row_of(kind)
        row[index] = None
        with pytest.raises(WireError):
            decode(msgpack.packb(row))


@pytest.mark.parametrize(
    ("index", "value", "text"),
    [
        (0, 2, "protocol version 2 is not 1"),
        (0, True, "protocol version True is not 1"),
        (1, "Shout", "unknown message kind 'Shout'"),
        (1, ["Tokens"], "unknown message kind"),
        (7, True, "int is expected, not True"),
        (8, b"\0\0\0", "a column of 4-byte values is expected"),
        (8, "abcd", "a column of 4-byte values is expected"),
    ],
)
def test_errors_name_the_flaw(index: int, value: object, text: str) -> None:
    row = row_of("Tokens")
    row[index] = value
    with pytest.raises(WireError, match=text):
        decode(msgpack.packb(row))


@pytest.mark.parametrize(
    ("kind", "field", "value", "text"),
    [
        ("Open", "stop", "abc", "a list is expected, not 'abc'"),
        ("Open", "stop", [1], "str is expected, not 1"),
        ("Beat", "load", [["used"]], "a list is expected, not"),
        ("SlotOpen", "sampling", ["hot"], "float is expected, not 'hot'"),
        ("SlotOpen", "sampling", 1, "Sampling needs 0 fields"),
    ],
)
def test_nested_errors_name_the_flaw(kind: str, field: str, value: object, text: str) -> None:
    row = row_of(kind)
    row[6 + [f.name for f in dataclasses.fields(SAMPLES[kind])].index(field)] = value
    with pytest.raises(WireError, match=text):
        decode(msgpack.packb(row))


@pytest.mark.parametrize("data", [b"", b"\xc1", msgpack.packb({}), msgpack.packb([1, "Beat"]), b"\x90junk"])
def test_bytes_without_an_envelope_are_an_error(data: bytes) -> None:
    with pytest.raises(WireError):
        decode(data)


@pytest.mark.parametrize("kind", KINDS)
def test_every_truncation_is_an_error(kind: str) -> None:
    data = bytes.fromhex(GOLDEN[kind])
    for length in range(len(data)):
        with pytest.raises(WireError):
            decode(data[:length])


def decodes_or_refuses(data: bytes) -> None:
    try:
        envelope = decode(data)
    except WireError:
        return
    assert codec.kind_of(envelope.message) in codec.KINDS


@given(st.binary(max_size=400))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_random_bytes_never_crash_the_decoder(data: bytes) -> None:
    decodes_or_refuses(data)


byte_changes = st.lists(st.tuples(st.integers(0), st.integers(0, 255)), min_size=1, max_size=6)


@given(st.sampled_from(KINDS), byte_changes)
@settings(max_examples=500, deadline=None, derandomize=True)
def test_damaged_bytes_never_crash_the_decoder(kind: str, damage: list[tuple[int, int]]) -> None:
    data = bytearray.fromhex(GOLDEN[kind])
    for position, value in damage:
        data[position % len(data)] = value
    decodes_or_refuses(bytes(data))


junk = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4),
    max_leaves=8,
)


@given(st.sampled_from(KINDS), st.lists(junk, max_size=30))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_well_formed_rows_of_junk_never_crash_the_decoder(kind: str, fields: list[Any]) -> None:
    decodes_or_refuses(msgpack.packb([codec.VERSION, kind, "scheduler.s0", 1, 1, "", *fields]))


def test_deep_nesting_is_refused() -> None:
    with pytest.raises(WireError):
        decode(b"\x91" * 100_000)


def test_a_column_of_another_width_is_a_mistake_of_the_sender() -> None:
    with pytest.raises(TypeError, match="a column of 'i' is expected, not of 'q'"):
        encode(enveloped(SlotOpen(slot=0, generation=0, seq=0, prompt_tokens=1, tokens=array("q", [1]))))


# ---- long messages -----------------------------------------------------------------------------

PROMPT = ints((i * 7919) % 49_152 for i in range(100_000))
LONG: dict[str, Tokenized | Open | SlotOpen] = {
    kind: dataclasses.replace(SAMPLES[kind], part=0, parts=1, tokens=PROMPT)  # type: ignore[misc]  # of a union
    for kind in ("Tokenized", "Open", "SlotOpen")
}


def travel(message: Message) -> tuple[list[int], Message | None]:
    """Sizes of the parts on the wire, and what the assembler makes of them."""
    assembler, sizes, whole = Assembler(), [], None
    for part in split(message):
        assert whole is None
        data = encode(Envelope("s" * 300, 2**63, 2**63, part, "t" * 200))
        sizes.append(len(data))
        whole = assembler.add(decode(data).message)
    return sizes, whole


@pytest.mark.parametrize("kind", sorted(LONG))
def test_a_prompt_of_100k_tokens_travels_in_parts(kind: str) -> None:
    sizes, whole = travel(LONG[kind])
    assert max(sizes) <= MAX_MESSAGE_BYTES
    assert len(sizes) == 9  # 8 of 12,000 tokens and one of 4,000
    assert whole == LONG[kind]


@pytest.mark.parametrize("tokens", [0, 1, 11_999, 12_000, 12_001, 24_000, 24_001])
def test_parts_at_the_page_borders(tokens: int) -> None:
    message = dataclasses.replace(LONG["SlotOpen"], tokens=PROMPT[:tokens])
    sizes, whole = travel(message)
    assert len(sizes) == max(1, -(-tokens // 12_000))
    assert whole == message


@given(st.integers(0, 56_000), st.integers(0, 30_000))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_long_options_and_long_prompts_fit_together(options: int, tokens: int) -> None:
    message = Tokenized(
        request="r",
        attempt=0,
        tenant="t",
        model="m",
        inbox="i",
        grammar="g" * options,
        tokens=PROMPT[:tokens],
    )
    sizes, whole = travel(message)
    assert max(sizes) <= MAX_MESSAGE_BYTES
    assert whole == message


@pytest.mark.parametrize("tokens", [0, 1, 11_999, 12_000, 12_001, 15_000, 40_000])
@pytest.mark.parametrize("options", [0, 7_000, 9_000, 54_000])
@pytest.mark.parametrize("kind", sorted(LONG))
def test_bytes_of_any_length_equal_the_parts(kind: str, options: int, tokens: int) -> None:
    text: dict[str, Any] = {"stop": ("g" * (options + 1),)} if kind == "Open" else {"grammar": "g" * options}
    message = dataclasses.replace(LONG[kind], tokens=ints(range(tokens)), **text)
    found = [decode(data) for data in codec.encode_all(Envelope("scheduler.s", 3, 70, message, "trace"))]
    assert [envelope.seq for envelope in found] == [*range(70, 70 + len(found))]
    assert {(e.source, e.epoch, e.trace) for e in found} == {("scheduler.s", 3, "trace")}
    if len(found) > 1:
        assert [envelope.message for envelope in found] == [*split(message)]
    assembler = Assembler()
    assert [assembler.add(envelope.message) for envelope in found][-1] == message


def test_options_over_the_limit_are_refused_with_a_cure() -> None:
    message = dataclasses.replace(
        LONG["Tokenized"],
        grammar="g" * 60_000,
        generated=ints(),
        reasons=(),
        age_us=0,
        shard="",
        model_digest="",
    )
    with pytest.raises(PayloadTooLarge, match="shorten its grammar, stop strings, logit_bias or prediction"):
        list(split(message))


def test_a_message_over_the_limit_is_refused() -> None:
    fits = encode(Envelope("s", 1, 1, Accepted(tenant="", request="r" * 65_000, attempt=0)))
    assert len(fits) <= MAX_MESSAGE_BYTES
    with pytest.raises(PayloadTooLarge, match=r"Accepted of 660.. bytes is over 65536"):
        encode(Envelope("s", 1, 1, Accepted(tenant="", request="r" * 66_000, attempt=0)))


def test_parts_that_do_not_follow_are_an_error() -> None:
    first, second, third, *_ = split(LONG["SlotOpen"])
    opened = next(split(LONG["Open"]))
    for before, wrong in [([], second), ([first], third), ([opened], second), ([first, second], second)]:
        assembler = Assembler()
        assert [assembler.add(part) for part in before] == [None] * len(before)
        with pytest.raises(WireError, match=r"part . of SlotOpen does not follow"):
            assembler.add(wrong)


def test_a_new_first_part_starts_over_and_whole_messages_pass_between() -> None:
    assembler = Assembler()
    first, *rest = split(LONG["SlotOpen"])
    accepted = Accepted(tenant="t", request="r", attempt=0)
    assert assembler.add(first) is None
    assert assembler.add(accepted) is accepted
    assert assembler.add(first) is None
    *between, last = [assembler.add(part) for part in rest]
    assert between == [None] * len(between)
    assert last == LONG["SlotOpen"]
