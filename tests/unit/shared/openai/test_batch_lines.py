"""The lines of a batch, right and wrong, and what is wrong with them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from shared.errors import BadRequest
from shared.openai.batch_lines import InputCheck, read_line

GOOD: dict[str, Any] = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}


@pytest.mark.parametrize(
    "wrong",
    [
        {"custom_id": 1}, {"custom_id": ""}, {"method": "GET"}, {"method": []}, {"url": "/v1/embeddings"},
        {"url": {}}, {"url": []}, {"body": []}, {"body": {}}, {"body": {"prompt": "x", "stream": True}},
        {"body": {"prompt": "x", "echo": True}}, {"body": {"prompt": "x", "durable": "tokens"}},
        {"body": {"messages": []}},
    ],
)  # fmt: skip
def test_a_wrong_field_of_any_type_is_a_bad_request(wrong: dict[str, Any]) -> None:
    with pytest.raises(BadRequest):
        read_line(json.dumps({**GOOD, **wrong}).encode())


def test_an_error_names_its_line_and_blank_lines_count() -> None:
    check, good = InputCheck(), json.dumps(GOOD).encode()
    line = check.read(good)
    assert line is not None
    assert (line.custom_id, line.body) == ("a", {"prompt": "x"})
    assert check.read(b"  ") is None
    with pytest.raises(BadRequest, match="line 3: its custom_id 'a' is that of line 1"):
        check.read(good)
    with pytest.raises(BadRequest, match="line 4: it is not JSON"):
        check.read(b"{")
    assert (check.line, check.requests) == (4, 1)
