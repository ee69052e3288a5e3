"""Files and batches with the unmodified openai client, on a real fleet with the simulated engine."""

from __future__ import annotations

import io
import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI
from openai.types import Batch
from openai.types.responses import Response
from support.running_up import HEADRACE, Up, running_up

MODEL = "smollm2-135m-instruct"


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    with running_up(tmp_path_factory.mktemp("up"), "--durable", HEADRACE_HTTP="127.0.0.1:0") as up:
        yield up


@pytest.fixture
def client(up: Up) -> OpenAI:
    return OpenAI(base_url=up.http_url, api_key="x", max_retries=0)


def test_a_file_goes_up_and_comes_back(client: OpenAI) -> None:
    content = b"".join(b"line %d\n" % i for i in range(60_000))
    made = client.files.create(file=("in.jsonl", content), purpose="batch")
    assert (made.object, made.bytes, made.filename, made.purpose, made.status) == (
        "file", len(content), "in.jsonl", "batch", "processed",
    )  # fmt: skip
    assert client.files.retrieve(made.id) == made
    assert client.files.content(made.id).read() == content
    second = client.files.create(file=("b.jsonl", io.BytesIO(b"x")), purpose="batch")
    assert [each.id for each in client.files.list(purpose="batch")] == [second.id, made.id]
    assert [each.id for each in client.files.list(limit=1)] == [second.id, made.id]  # page after page
    for each in (made, second):
        assert client.files.delete(each.id).deleted
        with pytest.raises(openai.NotFoundError, match="there is no file"):
            client.files.retrieve(each.id)
        with pytest.raises(openai.NotFoundError):
            client.files.content(each.id)
    assert list(client.files.list()) == []


def test_a_wrong_upload_is_refused_and_leaves_nothing(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="`purpose`: batch is expected"):
        client.files.create(file=("a", b"x"), purpose="assistants")
    with pytest.raises(openai.BadRequestError, match="the file is empty"):
        client.files.create(file=("a", b""), purpose="batch")
    with pytest.raises(openai.BadRequestError, match="is no form"):
        client.post("/files", body={"purpose": "batch"}, cast_to=object)
    with pytest.raises(openai.BadRequestError, match="expires_after"):
        client.files.create(
            file=("a", b"x"), purpose="batch", expires_after={"anchor": "created_at", "seconds": 9}
        )
    assert list(client.files.list()) == []


def line(number: int, **more: Any) -> dict[str, Any]:
    body = {"model": MODEL, "prompt": f"request {number}", "max_tokens": 10 + number % 7, "seed": number}
    fields = {"custom_id": f"r{number}", "method": "POST", "url": "/v1/completions"}
    return {**fields, "body": {**body, "ignore_eos": True, **more}}


def begun(client: OpenAI, lines: list[dict[str, Any]], **more: Any) -> str:
    """The id of a batch of these lines."""
    content = "".join(json.dumps(each) + "\n" for each in lines).encode()
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    asked = {"endpoint": "/v1/completions", "completion_window": "24h", **more}
    made = client.batches.create(input_file_id=file.id, **asked)
    assert (made.status, made.input_file_id, made.object) == ("validating", file.id, "batch")
    return made.id


def ended(client: OpenAI, batch: str, seconds: float = 120) -> Batch:
    limit = time.monotonic() + seconds
    while (found := client.batches.retrieve(batch)).status not in (
        "completed", "failed", "expired", "cancelled",
    ):  # fmt: skip
        assert time.monotonic() < limit, found
        time.sleep(0.1)
    return found


def lines_of(client: OpenAI, file: str | None) -> list[dict[str, Any]]:
    assert file is not None
    return [json.loads(raw) for raw in client.files.content(file).text.splitlines()]


def text(answer: dict[str, Any]) -> str:
    return str(answer["response"]["body"]["choices"][0]["text"])


def test_batch_of_a_thousand_lines_completes(client: OpenAI) -> None:
    batch = begun(client, [line(i) for i in range(1_000)], metadata={"who": "test"})
    found = ended(client, batch)
    assert found.status == "completed", found
    assert found.request_counts is not None
    assert found.request_counts.model_dump() == {"total": 1_000, "completed": 1_000, "failed": 0}
    assert (found.metadata, found.error_file_id, found.errors) == ({"who": "test"}, None, None)
    answers = lines_of(client, found.output_file_id)
    assert [each["custom_id"] for each in answers] == [f"r{i}" for i in range(1_000)]
    assert {each["response"]["status_code"] for each in answers} == {200}
    for i in (0, 500, 999):
        assert text(answers[i]) == plain_text(client, i)
    assert next(iter(client.batches.list())).id == batch


def plain_text(client: OpenAI, number: int) -> str:
    body = line(number)["body"]
    known = {name: body.pop(name) for name in ("model", "prompt", "max_tokens", "seed")}
    return client.completions.create(**known, extra_body=body).choices[0].text


def test_a_wrong_line_fails_the_batch_with_its_number(client: OpenAI) -> None:
    lines = [line(i) for i in range(7_200)]
    lines[6_999] = {**lines[6_999], "method": "GET"}
    lines[7_100] = {**lines[7_100], "custom_id": "r5"}
    lines[7_101]["body"]["model"] = "no-such-model"
    found = ended(client, begun(client, lines))
    assert (found.status, found.output_file_id, found.failed_at is not None) == ("failed", None, True)
    assert found.errors is not None
    assert [(e.line, e.code) for e in found.errors.data or ()] == [
        (7_000, "invalid_request"), (7_101, "invalid_request"), (7_102, "model_not_found"),
    ]  # fmt: skip
    (method, twice, _) = [e.message or "" for e in found.errors.data or ()]
    assert "line 7000: `method`" in method
    assert "line 7101: its custom_id 'r5' is that of line 6" in twice


def test_a_refused_line_is_an_error_of_its_own_and_the_rest_completes(client: OpenAI) -> None:
    lines = [line(0), line(1, max_tokens=10**6), line(2, prompt=["a", "b"]), line(3, temperature=9)]
    found = ended(client, begun(client, lines))
    assert found.status == "completed"
    assert found.request_counts is not None
    assert found.request_counts.model_dump() == {"total": 4, "completed": 2, "failed": 2}
    answers = lines_of(client, found.output_file_id)
    assert [each["custom_id"] for each in answers] == ["r0", "r2"]
    assert [choice["index"] for choice in answers[1]["response"]["body"]["choices"]] == [0, 1]
    refused = lines_of(client, found.error_file_id)
    assert [(each["custom_id"], each["response"]["status_code"]) for each in refused] == [
        ("r1", 400), ("r3", 400),
    ]  # fmt: skip
    params = [each["response"]["body"]["error"]["param"] for each in refused]
    assert params == ["max_tokens", "temperature"]


def test_batch_answers_lines_for_responses(client: OpenAI) -> None:
    asked = {"model": MODEL, "input": "What is NATS?", "max_output_tokens": 5, "ignore_eos": True}
    lines = [
        {"custom_id": f"r{i}", "url": "/v1/responses", "body": {**asked, "instructions": "ab"[i % 2]}}
        for i in range(4)
    ]
    found = ended(client, begun(client, lines, endpoint="/v1/responses"))
    answers = lines_of(client, found.output_file_id)
    assert [each["custom_id"] for each in answers] == ["r0", "r1", "r2", "r3"]
    for each in answers:
        response = Response.model_validate(each["response"]["body"])
        assert (response.status, response.usage.output_tokens) == ("incomplete", 5)  # type: ignore[union-attr]
        assert response.output_text


def test_a_cancelled_batch_keeps_its_answers(client: OpenAI) -> None:
    batch = begun(client, [line(i, max_tokens=100) for i in range(4_000)])
    while (counts := client.batches.retrieve(batch).request_counts) is None or counts.completed < 450:
        time.sleep(0.1)
    assert client.batches.cancel(batch).status == "cancelling"
    found = ended(client, batch, 30)
    assert found.status == "cancelled", found
    assert found.cancelled_at is not None
    assert found.request_counts is not None
    answers = lines_of(client, found.output_file_id)
    assert 450 <= len(answers) == found.request_counts.completed < 4_000
    assert len({each["custom_id"] for each in answers}) == len(answers)
    with pytest.raises(openai.BadRequestError, match="has ended: it is cancelled"):
        client.batches.cancel(batch)


def test_a_wrong_batch_is_refused(client: OpenAI) -> None:
    file = client.files.create(file=("in.jsonl", b"{}"), purpose="batch")
    good: dict[str, Any] = {
        "input_file_id": file.id, "endpoint": "/v1/completions", "completion_window": "24h",
    }  # fmt: skip
    for wrong, why in (
        ({"endpoint": "/v1/embeddings"}, "`endpoint`"),
        ({"completion_window": "8d"}, "`completion_window`"),
        ({"metadata": {"a": "x" * 513}}, "`metadata`"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, "output_expires_after"),
    ):
        with pytest.raises(openai.BadRequestError, match=why):
            client.batches.create(**{**good, **wrong})
    with pytest.raises(openai.NotFoundError, match="there is no file"):
        client.batches.create(**{**good, "input_file_id": file.id[:-1] + "x"})
    for name in ("batch_x", "batch_" + "0" * 22):
        with pytest.raises(openai.NotFoundError, match="there is no batch"):
            client.batches.retrieve(name)
    file = client.files.create(file=("in.jsonl", b"\n\n"), purpose="batch")
    found = ended(client, client.batches.create(**{**good, "input_file_id": file.id}).id)
    assert found.status == "failed"


def test_batch_runs_in_the_shell(up: Up, client: OpenAI, tmp_path: Path) -> None:
    given, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    given.write_text("".join(json.dumps(line(i)) + "\n" for i in range(20)))
    submitted = up.run("batch", "submit", str(given))
    assert (submitted.returncode, submitted.stderr) == (0, "")
    batch = submitted.stdout.strip()
    assert ended(client, batch).status == "completed"
    shown = up.run("batch", "status", batch)
    assert (shown.returncode, shown.stdout) == (0, "completed: 20 of 20 requests\n")
    assert json.loads(up.run("batch", "status", batch, "--json").stdout)["id"] == batch
    assert up.run("batch", "fetch", batch, str(out)).returncode == 0
    assert [json.loads(raw)["custom_id"] for raw in out.read_text().splitlines()] == [
        f"r{i}" for i in range(20)
    ]
    again = up.run("batch", "run", str(given), str(out))
    assert (again.returncode, f"{out} exists" in again.stderr) == (1, True)
    late = up.run("batch", "cancel", batch)
    assert (late.returncode, "has ended: it is completed" in late.stderr) == (1, True)
    unknown = up.run("batch", "status", "batch_x")
    assert (unknown.returncode, "there is no batch" in unknown.stderr) == (1, True)


def test_run_goes_on_after_a_kill(up: Up, client: OpenAI, tmp_path: Path) -> None:
    given, out, note = (tmp_path / name for name in ("in.jsonl", "out.jsonl", "out.jsonl.batch"))
    given.write_text("".join(json.dumps(line(i, max_tokens=100 * (i or 1))) + "\n" for i in range(3)))
    command = [*HEADRACE, "batch", "run", str(given), str(out)]
    with subprocess.Popen(command, env=up.env) as killed:
        limit = time.monotonic() + 60
        while not note.exists() or not note.read_text():
            assert time.monotonic() < limit
            time.sleep(0.01)
        killed.kill()
    batch = note.read_text().split()[0]
    given.write_text(given.read_text() + json.dumps(line(9)) + "\n")
    other = up.run("batch", "run", str(given), str(out))
    assert (other.returncode, "is of another input" in other.stderr) == (1, True)
    given.write_text("".join(given.read_text().splitlines(keepends=True)[:-1]))
    done = up.run("batch", "run", str(given), str(out))
    assert (done.returncode, done.stdout) == (0, "completed: 3 of 3 requests\n"), done.stderr
    assert [json.loads(raw)["custom_id"] for raw in out.read_text().splitlines()] == ["r0", "r1", "r2"]
    assert not note.exists()
    assert sum(each.id == batch for each in client.batches.list()) == 1
    given.write_text(json.dumps(line(0)) + "\n{}\n")
    wrong = up.run("batch", "run", str(given), str(tmp_path / "wrong.jsonl"))
    assert (wrong.returncode, "line 2: " in wrong.stderr) == (1, True)
    assert [each.name for each in tmp_path.glob("wrong*")] == [], "the next run is of another batch"
