"""Where a tokenizer finds what decides the model of a request to an alias."""

from __future__ import annotations

import json

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.tokenizer.aliases import request_id_in
from shared.nats.interface import Delivery

IDS = st.from_regex(r"[A-Za-z0-9._:-]{1,128}", fullmatch=True)
TEXTS = st.text(st.characters(codec="utf-8"), max_size=40)


def found(data: bytes, reply: str = "_INBOX.1") -> str:
    return request_id_in(Delivery("headrace.v1.generate.t.chat", data, reply))


@given(IDS, TEXTS, st.sampled_from([None, 2]))
def test_the_id_is_found_in_json_beside_any_text(request: str, text: str, indent: int | None) -> None:
    message = f'{text} "request_id": "other" {text}'
    body = {"prompt": message, "messages": [{"content": message}], "request_id": request, "user": message}
    assert found(json.dumps(body, indent=indent).encode()) == request
    assert found(json.dumps(body, ensure_ascii=False).encode()) == request


@given(IDS, st.integers(), st.sampled_from([True, None, 7, "x", {"request": 1}]))
def test_the_id_is_found_in_msgpack(request: str, before: int, after: object) -> None:
    body = {"n": before % 2**63, "prompt": "Hi", "request_id": request, "stream": after, "user": "u"}
    assert found(msgpack.packb(body)) == request
    assert found(msgpack.packb({"prompt": "Hi", "request_id": request})) == request


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b'{"prompt": "Hi"}',
        b'{"request_id": 7}',
        b'{"request_id": "a b"}',
        b"\xff\x00",
        b"{" * 99_999,
    ],
)
def test_message_without_an_id_goes_the_same_way_again(data: bytes) -> None:
    assert found(data) == found(data)
    assert found(data) != found(data, "_INBOX.2")
    assert found(data) != found(data + b" ")
