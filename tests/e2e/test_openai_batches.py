"""Files and batches with the unmodified openai client, on a real fleet with the simulated engine."""

from __future__ import annotations

import io
from collections.abc import Iterator

import openai
import pytest
from openai import OpenAI
from support.running_up import Up, running_up


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
