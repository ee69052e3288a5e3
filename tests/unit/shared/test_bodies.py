"""Bodies of subjects: what is taken, what is refused and how, and that unknown fields stay."""

from __future__ import annotations

import json
from typing import Any

import pytest

from shared import bodies
from shared.errors import BadRequest, WireError

FILE = {
    "id": f"file-{'0' * 22}", "filename": "a.jsonl", "purpose": "batch", "bytes": 3, "chunks": 1,
    "sha256": "0" * 64,
}  # fmt: skip
BATCH = {"input_file_id": "f", "endpoint": "/v1/completions", "completion_window": "24h"}


def test_a_record_keeps_the_fields_of_a_newer_version() -> None:
    record = {"id": "a", "status": "completed", "answer": {"choices": []}, "later": [1, {"x": None}]}
    assert bodies.decode(bodies.Record, json.dumps(record).encode()) == record


def test_a_stored_body_keeps_the_order_of_its_fields() -> None:
    batch = {"id": "a", "object": "batch", "endpoint": "/v1/completions", "errors": None, "status": "x"}
    data = bodies.encode({**batch, "input_file_id": "f"})
    assert bodies.encode(bodies.decode(bodies.Batch, data)) == data


def test_a_long_field_that_is_unknown_leaves_the_answer_short() -> None:
    with pytest.raises(BadRequest) as refused:
        bodies.asked(bodies.BatchCreated, json.dumps({**BATCH, "x" * 1_000: 1}).encode())
    assert refused.value.param == "x" * 80
    assert len(refused.value.message) < 200


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"{", "not a Record: Expecting"), (b"[]", "not a Record: : Input should be a valid dict"),
        (b'{"id": "a"}', "not a Record: status: Field required"), (b"[" * 90_000, "not a Record: max"),
        (b'{"id": "a", "status": "lost"}', "not a Record: status: Input should be 'queued'"),
        (b'{"id": 7, "status": "queued"}', "not a Record: id: Input should be a valid string"),
        (b'{"id": "a", "status": "queued", "answer": []}', "not a Record: answer: Input"),
    ],
)  # fmt: skip
def test_a_damaged_record_is_named(data: bytes, why: str) -> None:
    with pytest.raises(WireError) as refused:
        bodies.decode(bodies.Record, data)
    assert refused.value.message.startswith(why)


@pytest.mark.parametrize(
    ("kind", "body", "change", "param"),
    [
        (bodies.FileKept, FILE, {"id": "file-1"}, "id"),
        (bodies.FileKept, FILE, {"filename": ""}, "filename"),
        (bodies.FileKept, FILE, {"filename": "a" * 256}, "filename"),
        (bodies.FileKept, FILE, {"purpose": "x"}, "purpose"),
        (bodies.FileKept, FILE, {"bytes": True}, "bytes"),
        (bodies.FileKept, FILE, {"bytes": 3.0}, "bytes"),
        (bodies.FileKept, FILE, {"sha256": "A" * 64}, "sha256"),
        (bodies.FileKept, FILE, {"expires_s": 3_599}, "expires_after"),
        (bodies.FileKept, FILE, {"expires_s": 2_592_001}, "expires_after"),
        (bodies.BatchCreated, BATCH, {"x": 1}, "x"),
        (bodies.BatchCreated, BATCH, {"endpoint": "/v1"}, "endpoint"),
        (bodies.BatchCreated, BATCH, {"completion_window": "8d"}, "completion_window"),
        (bodies.BatchCreated, BATCH, {"completion_window": "169h"}, "completion_window"),
        (bodies.BatchCreated, BATCH, {"metadata": {str(i): "" for i in range(17)}}, "metadata"),
        (bodies.BatchCreated, BATCH, {"metadata": {"a" * 65: ""}}, "metadata"),
        (bodies.BatchCreated, BATCH, {"metadata": {"a": "x" * 513}}, "metadata"),
        (bodies.BatchCreated, BATCH, {"output_expires_after": {"seconds": 1}}, "output_expires_after"),
        (bodies.PageAsked, {}, {"limit": 0}, "limit"), (bodies.PageAsked, {}, {"order": "up"}, "order"),
        (bodies.Attach, {}, {"choices": {"0": {"chars": 2**53}}}, "choices"),
        (bodies.Kept, {"request": {}, "keep": {}, "answer": {}}, {"answer": 1}, "answer"),
    ],
)  # fmt: skip
def test_a_wrong_field_of_a_client_is_named(
    kind: type[Any], body: dict[str, Any], change: dict[str, Any], param: str
) -> None:
    assert bodies.asked(kind, bodies.encode(body)) == body
    with pytest.raises(BadRequest) as refused:
        bodies.asked(kind, bodies.encode({**body, **change}))
    assert (refused.value.param, refused.value.message[: len(param) + 1]) == (param, f"`{param}")


@pytest.mark.parametrize("data", [b"[]", b"7", b"{", b"\xff", b"[" * 90_000])
def test_a_body_that_is_no_object_is_refused(data: bytes) -> None:
    with pytest.raises(BadRequest, match="the body is not a JSON object"):
        bodies.asked(bodies.PageAsked, data)


def test_null_fields_and_an_empty_body_are_absent_fields() -> None:
    assert bodies.asked(bodies.PageAsked, b'{"limit": null}') == bodies.asked(bodies.PageAsked, b" \n") == {}
