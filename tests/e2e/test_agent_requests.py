"""Agents' requests, recorded from their npm packages, are answered by a real model over HTTP. Their texts are
left out; the model's name and the length of the answer are ours."""

from __future__ import annotations

import gzip
import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.running_up import Up, running_up

RECORDED: list[dict[str, Any]] = json.loads(
    gzip.decompress((Path(__file__).parents[1] / "data" / "agent_requests.json.gz").read_bytes())
)
MODEL = "smollm2-135m-instruct"
LENGTHS = {
    "/v1/messages": "max_tokens",
    "/v1/responses": "max_output_tokens",
    "/v1/chat/completions": "max_tokens",
}


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    with running_up(
        tmp_path_factory.mktemp("agents"), "--backend", "torch", HEADRACE_HTTP="127.0.0.1:0"
    ) as up:
        yield up


@pytest.mark.parametrize("recorded", RECORDED, ids=lambda recorded: recorded["name"])
def test_a_request_of_an_agent_is_answered(real: Up, recorded: dict[str, Any]) -> None:
    path, body = recorded["path"].partition("?")[0], {**recorded["body"], "model": MODEL}
    if path in LENGTHS:
        body[LENGTHS[path]] = 3
    headers = {**recorded["headers"], "Content-Type": "application/json", "x-api-key": "any"}
    url = real.http_url.removesuffix("/v1") + recorded["path"]
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as answer:
        text = answer.read().decode()
    assert answer.status == 200
    assert '"error":{' not in text.replace(" ", "")
    if path not in LENGTHS:
        assert json.loads(text)["input_tokens"] > 1_000
    else:
        assert any(
            end in text for end in ("message_stop", "response.incomplete", "response.completed", "[DONE]")
        )
