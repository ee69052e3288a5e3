"""The default model's vocabulary and chat template, against ids that llama.cpp and transformers gave."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.text_models import gpt2_char, plain_bpe

from services.tokenizer.loading import load_model
from services.tokenizer.prepare import ServedModel, encode_prompt, read_request
from shared.config import Settings
from shared.vocab.files import CATALOGUE, DEFAULT_MODEL, models_dir
from shared.vocab.gguf import read_metadata

SYSTEM = "1 9690 198 2683 359 253 5356 5646 11173 3365 3511 308 34519 28 7018 411 407 19712 8182 2 198"
PROMPTS = {
    "What is the capital of France?": "1780 314 260 3575 282 4649 47",
    "Write a haiku about the sea.": "19161 253 421 30614 563 260 3426 30",
    "List three prime numbers between 10 and 30.": "6106 1296 9552 2966 826 216 33 32 284 216 35 32 30",
    "Explain what a KV cache is in one sentence.": "36971 732 253 659 70 13842 314 281 582 6330 30",
    "Translate 'good morning' to Spanish.": "8241 12837 637 12018 5738 23 288 5071 30",
}
TEXTS = st.text(
    alphabet=st.one_of(st.sampled_from(" \n'\"a1Zé½漢🎉٣"), st.characters(exclude_categories=["Cs"]))
)


@pytest.fixture(scope="module")
def model() -> ServedModel:
    return load_model(Settings(model=DEFAULT_MODEL))


@pytest.fixture(scope="module")
def raw() -> tuple[list[str], list[tuple[str, str]]]:
    """The tokens and merges as they stand in the file."""
    file = models_dir(Settings().cache_dir) / CATALOGUE[DEFAULT_MODEL].file
    data = read_metadata(file)
    merges = [tuple(merge.split(" ")) for merge in data["tokenizer.ggml.merges"]]
    return data["tokenizer.ggml.tokens"], merges


@pytest.mark.parametrize("question", PROMPTS)
def test_prompt_ids_equal_transformers(model: ServedModel, question: str) -> None:
    request = read_request({"messages": [{"role": "user", "content": question}]})
    expected = f"{SYSTEM} 1 4093 198 {PROMPTS[question]} 2 198 1 520 9531 198"
    assert encode_prompt(request, None, model, 0) == [int(token) for token in expected.split()]


def test_answer_text_equals_transformers(model: ServedModel) -> None:
    ids = [504, 3575, 282, 4649, 314, 7042, 30, 2]
    assert model.vocabulary.decode(ids) == "The capital of France is Paris."


@settings(max_examples=30, deadline=None)
@given(TEXTS)
def test_any_text_equals_plain_python(
    model: ServedModel, raw: tuple[list[str], list[tuple[str, str]]], text: str
) -> None:
    ids = model.vocabulary.encode(text)
    assert ids == plain_bpe(text, *raw, single_digits=True)
    # This vocabulary has no token for some bytes (of control characters and unassigned planes); every
    # engine drops them.
    known = {byte for byte in range(256) if gpt2_char(byte) in raw[0]}
    if known.issuperset(text.encode()):
        assert model.vocabulary.decode(ids) == text


def test_facts_of_the_model_are_right(model: ServedModel) -> None:
    vocabulary = model.vocabulary
    assert (vocabulary.size, vocabulary.eos_ids, vocabulary.prefix_ids) == (49152, (2, 0), ())
    assert len(vocabulary.special_ids) == 17
    assert (model.name, model.max_context) == (DEFAULT_MODEL, 8192)
