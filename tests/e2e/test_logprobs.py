"""Log probabilities by HTTP, through every service, are those of transformers in float32."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI
from support.default_model import model_path
from support.running_up import Up, running_up

from shared.vocab.files import ModelFiles
from shared.vocab.vocabulary import Vocabulary, load_vocabulary

MODEL = "smollm2-135m-instruct"
REFERENCE = json.loads((Path(__file__).parents[1] / "data" / "smollm2_logprobs.json").read_text())
TOP = 5
CLOSE = 1e-4


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    folder = tmp_path_factory.mktemp("logprobs")
    engine = ("--backend", "torch", "--dtype", "f32", "--threads", "1")
    with running_up(folder, *engine, HEADRACE_HTTP="127.0.0.1:0") as running:
        yield running


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return load_vocabulary(ModelFiles("m", model_path()))


@pytest.fixture(scope="module")
def client(up: Up) -> Iterator[OpenAI]:
    with OpenAI(base_url=up.http_url, api_key="any", max_retries=0, timeout=120) as client:
        yield client


def text_of(vocabulary: Vocabulary, token: int) -> bytes:
    """As the answer has it: a control token, such as the end, by its name."""
    return vocabulary.token_bytes[token] or vocabulary.token_text(token).encode()


@pytest.mark.parametrize("case", REFERENCE["cases"], ids=lambda case: case["prompt"])
def test_they_are_those_of_transformers(case: dict[str, Any], client: OpenAI, vocabulary: Vocabulary) -> None:
    """Of each token of the answer, and of the likeliest five in its place."""
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": case["prompt"]}],
        temperature=0,
        max_tokens=64,
        logprobs=True,
        top_logprobs=TOP,
    )
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == case["prompt_tokens"]
    found = answer.choices[0].logprobs
    assert found is not None
    assert found.content is not None
    wanted = case["answer"]
    assert [bytes(t.bytes or ()) for t in found.content] == [text_of(vocabulary, w["id"]) for w in wanted]
    for token, want in zip(found.content, wanted, strict=True):
        assert math.isclose(token.logprob, want["logprob"], rel_tol=0, abs_tol=CLOSE), token.token
        got = [(bytes(top.bytes or ()), top.logprob) for top in token.top_logprobs]
        of = {
            text_of(vocabulary, i): value
            for i, value in zip(want["top_ids"], want["top_logprobs"], strict=True)
        }
        assert [value for _, value in got] == pytest.approx(want["top_logprobs"][:TOP], rel=0, abs=CLOSE)
        assert [value for _, value in got] == pytest.approx([of[text] for text, _ in got], rel=0, abs=CLOSE)
