"""The form of an upload, however its bytes arrive."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from services.gateway.batches import MAX_FIELD_BYTES, MAX_FIELDS, UploadForm
from shared.errors import BadRequest

TYPE = "multipart/form-data; boundary=XyZ"
CONTENT = b"one\r\n--Xy\r\n--XyZtwo\r\n\x00\xff"  # starts of the boundary are content
HEAD = b'--XyZ\r\nContent-Disposition: form-data; name="'


def part(name: str, value: bytes, more: str = "") -> bytes:
    return HEAD + f'{name}"{more}\r\n\r\n'.encode() + value + b"\r\n"


WHOLE = (
    part("purpose", b"batch")
    + part("file", CONTENT, '; filename="a b.jsonl"')
    + part("x", b"")
    + b"--XyZ--\r\n"
)


async def pieces(body: bytes, size: int) -> AsyncIterator[bytes]:
    for start in range(0, len(body), size):
        yield body[start : start + size]


async def read(body: bytes, size: int = 1_000) -> tuple[UploadForm, bytes]:
    form = UploadForm(TYPE)
    return form, b"".join([piece async for piece in form.pieces(pieces(body, size))])


async def test_the_file_is_the_same_wherever_the_body_is_cut() -> None:
    for size in range(1, len(WHOLE) + 1):
        form, content = await read(WHOLE, size)
        assert (content, form.fields["purpose"], form.filename) == (CONTENT, "batch", "a b.jsonl")


async def test_pieces_leave_before_the_end() -> None:
    form, came = UploadForm(TYPE), list[bytes]()

    async def body() -> AsyncIterator[bytes]:
        yield part("file", b"", '; filename="x"')[:-2]
        for i in range(3):
            yield b"%d" % i * 1_000
            assert sum(map(len, came)) == 1_000 * (i + 1), "the piece before has left"

    with pytest.raises(BadRequest, match="cut off"):
        async for piece in form.pieces(body()):
            came.append(piece)
    assert len(came) == 3


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (WHOLE[:-9], "cut off"),
        (part("purpose", b"batch") + b"--XyZ--\r\n", "has no `file`"),
        (part("file", b"x") + part("file", b"y") + b"--XyZ--\r\n", "two files"),
        (b"no form at all", "damaged"),
        (part("purpose", b"x" * (MAX_FIELD_BYTES + 1)), "longer than"),
        (HEAD + b"x" * (MAX_FIELD_BYTES + 1), "longer than"),
        (b"".join(part(f"f{i}", b"") for i in range(MAX_FIELDS + 1)), "fields"),
    ],
)
async def test_a_wrong_form_is_refused(body: bytes, why: str) -> None:
    with pytest.raises(BadRequest, match=why):
        await read(body)


@pytest.mark.parametrize("kind", ["application/json", "", "multipart/form-data"])
def test_another_content_type_is_refused(kind: str) -> None:
    with pytest.raises(BadRequest, match="is no form"):
        UploadForm(kind)
