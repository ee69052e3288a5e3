"""What the authors of a model state for requests that leave a field out: what is read, what is refused."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from services.tokenizer.loading import sampling_defaults
from services.tokenizer.prepare import SamplingDefaults
from shared.errors import SetupError
from shared.vocab.files import CATALOGUE, DEFAULT_MODEL, ModelFiles


def folder_with(path: Path, text: str | None) -> ModelFiles:
    if text is not None:
        (path / "generation_config.json").write_text(text)
    return ModelFiles("m", path)


@pytest.mark.parametrize(
    ("stated", "fields", "max_tokens"),
    [
        ({}, {}, 0),
        ({"eos_token_id": 2, "transformers_version": "4.52", "max_length": 9, "presence_penalty": 1}, {}, 0),
        (  # of Qwen3
            {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95},
            {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
            0,
        ),
        ({"do_sample": False, "temperature": 0.6, "top_p": 0.9}, {"temperature": 0, "top_p": 0.9}, 0),
        ({"do_sample": False}, {"temperature": 0}, 0),
        ({"do_sample": None, "temperature": None, "top_k": None, "top_p": 1}, {"top_p": 1}, 0),
        ({"temperature": 0, "top_k": 0, "min_p": 0}, {"temperature": 0, "top_k": 0, "min_p": 0}, 0),
        ({"top_k": -1, "repetition_penalty": 1.05}, {"top_k": -1, "repetition_penalty": 1.05}, 0),
        ({"max_new_tokens": 512, "top_k": 50.0}, {"top_k": 50}, 512),
    ],
)
def test_a_folder_states_its_defaults_in_generation_config(
    tmp_path: Path, stated: dict[str, Any], fields: dict[str, float], max_tokens: int
) -> None:
    found = sampling_defaults(folder_with(tmp_path, json.dumps(stated)))
    assert found == SamplingDefaults(fields, max_tokens)


def test_a_folder_without_the_file_states_nothing(tmp_path: Path) -> None:
    assert sampling_defaults(folder_with(tmp_path, None)) == SamplingDefaults()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"temperature": "hot"}', "`temperature` is 'hot': "),
        ('{"temperature": true}', "`temperature` is True: "),
        ('{"temperature": -0.5}', "`temperature` is -0.5: "),
        ('{"temperature": 1e999}', "`temperature` is inf: "),
        ('{"temperature": NaN}', "`temperature` is nan: "),
        ('{"temperature": [0.6]}', "`temperature` is [0.6]: "),
        ('{"top_p": -1}', "`top_p` is -1: "),
        ('{"top_p": 90}', "`top_p` is 90: "),
        ('{"top_k": 0.5}', "`top_k` is 0.5: "),
        ('{"top_k": 4294967296}', "`top_k` is 4294967296: "),
        ('{"min_p": 2}', "`min_p` is 2: "),
        ('{"repetition_penalty": 0}', "`repetition_penalty` is 0: "),
        ('{"do_sample": "no"}', "`do_sample` is 'no': "),
        ('{"max_new_tokens": 0}', "`max_new_tokens` is 0: "),
    ],
)
def test_a_wrong_value_is_an_error_with_its_file_and_key(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(SetupError) as error:
        sampling_defaults(folder_with(tmp_path, text))
    assert error.value.message.startswith(f"{tmp_path}/generation_config.json: {words}")
    assert error.value.message.endswith("or ignore what it states with --generation-config none")


@pytest.mark.parametrize("text", ["", "no JSON", "[]", '"x"', "[[1]]", "[" * 100_000, '{"temperature": 0.'])
def test_a_file_that_is_no_object_is_an_error_with_its_name(tmp_path: Path, text: str) -> None:
    with pytest.raises(SetupError, match=r"generation_config\.json is not valid JSON"):
        sampling_defaults(folder_with(tmp_path, text))


def test_a_gguf_file_states_its_defaults_in_keys_of_llama_cpp(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    import gguf

    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_float32("general.sampling.temp", 0.5)
    writer.add_int32("general.sampling.top_k", 20)
    writer.add_float32("general.sampling.min_p", 0.0)
    writer.add_float32("general.sampling.penalty_repeat", 1.5)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with caplog.at_level(logging.INFO):
        found = sampling_defaults(ModelFiles("m", path))
    assert found == SamplingDefaults({"temperature": 0.5, "top_k": 20, "min_p": 0.0})
    assert str(found) == "temperature 0.5, top_k 20, min_p 0"
    assert caplog.messages == [
        f"{path}: not followed: general.sampling.penalty_repeat",
        f"a request that names no sampling gets {found}, as {path} states",
    ]


def test_the_default_model_is_greedy_as_its_file_states_nothing(tmp_path: Path) -> None:
    import gguf

    path = tmp_path / CATALOGUE[DEFAULT_MODEL].file
    writer = gguf.GGUFWriter(path, "llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert sampling_defaults(ModelFiles("m", path)).fields == {"temperature": 0}
