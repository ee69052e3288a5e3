"""The header of a value in L2: golden bytes, and nothing but the value that was asked for passes."""

from __future__ import annotations

import struct

import pytest
from blake3 import blake3

from services.kv_offload.l2 import worker

PRINT = "00112233445566778899aabbccddeeff"
NAME = (PRINT, bytes(range(32)))
PAYLOAD = bytes(i * 7 % 256 for i in range(1000))


def value(name: tuple[str, bytes] = NAME, valid: int = 16, payload: bytes = PAYLOAD) -> bytes:
    return worker.build(name, valid, payload) + payload


def test_header_equals_the_specification() -> None:
    fields = b"HRKV" + struct.pack("<HH", 1, 128) + PRINT.encode() + bytes(range(32))
    fields += struct.pack("<QI", 1000, 16) + bytes(12)
    assert worker.build(NAME, 16, PAYLOAD) == fields + blake3(fields + PAYLOAD).digest()
    assert len(worker.build(NAME, 16, PAYLOAD)) == worker.HEADER_BYTES == 128


def test_header_equals_the_golden_vectors() -> None:
    assert worker.build(NAME, 16, PAYLOAD).hex() == GOLDEN
    assert worker.remote_name(NAME) == f"hr1:{PRINT}:{bytes(range(32)).hex()}"


def test_a_whole_value_passes_with_its_valid_tokens() -> None:
    for valid in (0, 1, 16, 2**32 - 1):
        assert worker.verify(value(valid=valid), NAME) == valid
    assert worker.verify(memoryview(bytearray(value())), NAME) == 16
    assert worker.verify(value(payload=b""), NAME) == 16


@pytest.mark.parametrize("bit", [0, 3, 7])
def test_no_flipped_bit_passes(bit: int) -> None:
    good = value()
    for at in range(len(good)):
        bad = bytearray(good)
        bad[at] ^= 1 << bit
        assert worker.verify(bad, NAME) is None, at


def test_no_other_length_passes() -> None:
    good = value()
    assert all(worker.verify(good[:size], NAME) is None for size in range(len(good)))
    assert worker.verify(good + b"\0", NAME) is None


def test_no_value_of_another_name_passes() -> None:
    other_key = (PRINT, bytes(32))
    other_print = ("f" * 32, NAME[1])
    for foreign in (other_key, other_print):
        assert worker.verify(value(), foreign) is None
        assert worker.verify(value(foreign), NAME) is None
        assert worker.verify(value(foreign), foreign) == 16


GOLDEN = (
    "48524b5601008000303031313232333334343535363637373838393961616262"
    "6363646465656666000102030405060708090a0b0c0d0e0f1011121314151617"
    "18191a1b1c1d1e1fe80300000000000010000000000000000000000000000000"
    "550b94cbd64cbd143e365152fb013197338b43c2962f6c79b5263116da309cd1"
)
