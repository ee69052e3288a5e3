"""The files of `headrace batch run`: what an input may not have, and what is kept of an output."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from services.launcher.commands.batch import Line, _prepare, read_input
from shared.errors import BadRequest, SetupError


def line(custom_id: str = "a", **more: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": "Hi"}]}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body} | more


def written(*lines: object) -> io.BytesIO:
    return io.BytesIO(b"".join(json.dumps(each).encode() + b"\n" for each in lines))


def answered(custom_id: str, status: int = 200) -> bytes:
    return json.dumps({"custom_id": custom_id, "response": {"status_code": status}}).encode() + b"\n"


def test_the_place_of_each_request() -> None:
    first, second = json.dumps(line("ä")).encode(), json.dumps(line("b")).encode()
    lines, checksum = read_input(io.BytesIO(first + b"\n\n" + second))
    assert lines == [Line("ä", 0, len(first) + 1), Line("b", len(first) + 2, len(second))]
    assert checksum != read_input(io.BytesIO(first + b"\n" + second))[1]


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ([], "line 3: a JSON object is expected"),
        (line(""), "line 3: `custom_id`: a text"),
        (line("a"), "line 3: its custom_id 'a' is that of line 1"),
        (line("c", method="GET"), "line 3: `method`: POST"),
        (line("c", url="/v1/embeddings"), "line 3: `url`: one of /v1/chat/completions, /v1/completions"),
        (line("c", body="x"), "line 3: `body`: a JSON object"),
        (line("c", body={"prompt": "x", "stream": True}), "line 3: `body.stream`"),
        (line("c", body={"prompt": "x", "echo": True}), "line 3: `body.echo`"),
        (line("c", body={"prompt": "x"}), "line 3: `messages` is missing"),
        (line("c", url="/v1/completions"), "line 3: `prompt` is missing"),
    ],
)
def test_one_wrong_line_is_told_by_its_number(wrong: object, why: str) -> None:
    with pytest.raises(BadRequest) as refused:
        read_input(written(line("a"), line("b"), wrong))
    assert refused.value.message.startswith(why)


def test_a_file_without_requests_or_json() -> None:
    with pytest.raises(BadRequest, match="the input has no requests"):
        read_input(io.BytesIO(b"\n\n"))
    with pytest.raises(BadRequest, match="line 1: it is not JSON"):
        read_input(io.BytesIO(b"{"))
    with pytest.raises(BadRequest, match="lone surrogate"):
        read_input(io.BytesIO(b'{"custom_id": "\\ud800"}'))


def test_an_output_is_continued_without_torn_and_refused_lines(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    assert _prepare(out, "sum", {"a"}, resume=True) == set()  # nothing there yet
    out.write_bytes(answered("a") + answered("b", 400) + b"[]\n" + answered("c") + answered("d")[:-1])
    with pytest.raises(SetupError, match="exists: continue it with --resume"):
        _prepare(out, "sum", {"a"}, resume=False)
    with pytest.raises(SetupError, match="has answers to another input"):
        _prepare(out, "other", {"a", "b", "c", "d"}, resume=True)
    with pytest.raises(SetupError, match="an answer to 'c', which is not in the input"):
        _prepare(out, "sum", {"a"}, resume=True)
    assert _prepare(out, "sum", {"a", "b", "c", "d"}, resume=True) == {"a", "c"}
    assert out.read_bytes() == answered("a") + answered("c")
    with pytest.raises(SetupError, match="cannot be used"):
        _prepare(tmp_path / "no" / "out", "sum", {"a"}, resume=False)
