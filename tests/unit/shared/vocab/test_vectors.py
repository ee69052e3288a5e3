"""The files of sentence-transformers, and which of their keys are refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from support.executor.tiny_encoders import encoder_folder
from tokenizers import normalizers

from shared.errors import SetupError
from shared.vocab.files import ModelFiles, VectorSettings, vector_settings
from shared.vocab.vocabulary import Vocabulary, load_vocabulary

BERT, WHOLE, POOLING = "sentence_bert_config", "config_sentence_transformers", "1_Pooling/config"
FORWARD = {"method": "forward", "method_output_name": "last_hidden_state"}
TEXT = "The QUICK brown fox jumps over the lazy dog. Naïve café, Größe 日本 [SEP] prices "
TEXTS = ["The Fox", TEXT, TEXT * 3]


def folder_of(tmp_path: Path, **changes: Any) -> Path:
    """A BERT as sentence-transformers writes one, in which these keys of its files are others."""
    folder = encoder_folder("bert", tmp_path, "mean_tokens")
    for name, change in changes.items():
        file = folder / f"{name}.json"
        body = json.loads(file.read_text()) if file.is_file() else {}
        file.write_text(json.dumps(change if isinstance(change, list) else {**body, **change}))
    return folder


def loaded(folder: Path) -> Vocabulary:
    return load_vocabulary(ModelFiles("m", folder))


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({}, {"most_tokens": 160}),
        ({BERT: {"max_seq_length": 32, "do_lower_case": True}}, {"most_tokens": 32, "lower_case": True}),
        ({BERT: {"max_seq_length": 512}}, {"most_tokens": 512}),
        ({BERT: {"max_seq_length": None}, "tokenizer_config": {"model_max_length": 64}}, {"most_tokens": 64}),
        ({"tokenizer_config": {"model_max_length": 10**30}}, {"most_tokens": 160}),
        ({"sentence_roberta_config": {"max_seq_length": 9}}, {"most_tokens": 9}),
        ({WHOLE: {"prompts": {"query": "query: "}, "default_prompt_name": None}}, {"most_tokens": 160}),
        (
            {WHOLE: {"prompts": {"query": "query: "}, "default_prompt_name": "query"}},
            {"most_tokens": 160, "prompt": "query: "},
        ),
        ({POOLING: {"pooling_mode": "cls"}}, {"most_tokens": 160, "pooling": ("cls",)}),
        (
            {POOLING: {"pooling_mode_cls_token": True, "word_embedding_dimension": 64}},
            {"most_tokens": 160, "pooling": ("mean_tokens", "cls_token")},
        ),
        ({POOLING: {"pooling_mode_mean_tokens": False}}, {"most_tokens": 160, "pooling": ("mean",)}),
        ({POOLING: {"include_prompt": False}}, {"most_tokens": 160}),
        ({BERT: {"config_args": {"add_pooling_layer": False}, "unpad_inputs": True}}, {"most_tokens": 160}),
        (
            {BERT: {"modality_config": {"text": FORWARD}, "module_output_name": "token_embeddings",
                    "transformer_task": "feature-extraction"}},
            {"most_tokens": 160},
        ),
    ],
)  # fmt: skip
def test_every_key_that_changes_a_vector_is_read(
    tmp_path: Path, changes: dict[str, Any], wanted: dict[str, Any]
) -> None:
    usual = {"pooling": ("mean_tokens",)}
    assert vector_settings(folder_of(tmp_path, **changes)) == VectorSettings(**{**usual, **wanted})


def module(kind: str, path: str = "", **more: Any) -> dict[str, Any]:
    return {"type": kind if "." in kind else f"sentence_transformers.models.{kind}", "path": path, **more}


TWO = [module("Transformer"), module("Pooling", "1_Pooling")]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"modules": [*TWO, module("Dense", "2_Dense")]}, "a module Dense"),
        ({"modules": [TWO[0], TWO[0]]}, "a module sentence_transformers.models.Transformer"),
        ({"modules": [module("custom_st.Transformer"), TWO[1]]}, "a module custom_st.Transformer"),
        ({"modules": [module("Transformer", "0_Transformer"), TWO[1]]}, "path = '0_Transformer'"),
        ({"modules": [module("Transformer", kwargs=["task"]), TWO[1]]}, "kwargs = ['task'] in modules.json"),
        ({BERT: {"max_seq_length": "many"}}, "max_seq_length"),
        ({BERT: {"max_seq_length": 0}}, "max_seq_length"),
        ({BERT: {"surprise": 3}}, "surprise = 3 in sentence_bert_config.json"),
        ({BERT: {"query_length": 32}}, "query_length = 32 in sentence_bert_config.json"),
        ({BERT: {"modality_config": {"message": {}}}}, "modality_config = {'message': {}}"),
        (
            {BERT: {"tokenizer_args": {"model_max_length": 8}}},
            "model_max_length = 8 in tokenizer_args of sentence_bert_config.json",
        ),
        ({POOLING: {"surprise": True}}, "surprise = True in 1_Pooling/config.json"),
        (
            {POOLING: {"include_prompt": False}, WHOLE: {"prompts": {"q": "x"}, "default_prompt_name": "q"}},
            "include_prompt = False",
        ),
        ({WHOLE: {"default_prompt_name": "q"}}, "default_prompt_name"),
        ({WHOLE: {"model_type": "SparseEncoder"}}, "model_type = 'SparseEncoder'"),
    ],
)
def test_unsupported_vector_setting_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    assert vector_settings(folder_of(tmp_path, **changes)).refused.startswith(named)


@pytest.mark.parametrize(
    "changes",
    [
        {"modules": [{"path": ""}]},
        {"modules": [TWO[0], module("Pooling", "elsewhere")]},
        {BERT: [1]},
    ],
)
def test_damaged_files_are_setup_errors(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(SetupError, match=r"modules|elsewhere/config|sentence_bert_config\.json"):
        vector_settings(folder_of(tmp_path, **changes))


@pytest.mark.parametrize(
    ("changes", "side"),
    [
        ({}, "right"),
        ({"tokenizer_config": {"truncation_side": "left"}}, "left"),
        ({"tokenizer": {"truncation": {"direction": "Left", "max_length": 20, "strategy": "LongestFirst",
                                       "stride": 0}}}, "left"),
        ({"tokenizer_config": {"do_lower_case": False}}, "right"),
        ({"tokenizer_config": {"do_lower_case": False, "strip_accents": True}}, "right"),
        ({"tokenizer_config": {"tokenize_chinese_chars": False}}, "right"),
        ({"tokenizer_config": {"do_lower_case": False, "tokenizer_class": "TokenizersBackend"}}, "right"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("most", [3, 17, 32])
def test_a_text_is_cut_as_in_transformers(
    tmp_path: Path, changes: dict[str, Any], side: str, most: int
) -> None:
    """sentence-transformers lets transformers' tokenizer cut the texts."""
    folder = folder_of(tmp_path, **changes)
    library = transformers.AutoTokenizer.from_pretrained(folder)
    assert library.truncation_side == side
    for text in TEXTS:
        wanted = library(text, truncation=True, max_length=most).input_ids
        assert loaded(folder).encode_for_vector(text, most) == wanted


@pytest.mark.parametrize(
    "given", [{}, {"add_prefix_space": True}, {"tokenizer_class": "RobertaTokenizerFast"}]
)
@pytest.mark.parametrize("stored", [False, True])
def test_the_space_before_a_text_is_that_of_roberta_in_transformers(
    tmp_path: Path, given: dict[str, Any], stored: bool
) -> None:
    folder = encoder_folder("roberta", tmp_path)
    file, config = folder / "tokenizer.json", folder / "tokenizer_config.json"
    body = json.loads(file.read_text())
    body["pre_tokenizer"]["add_prefix_space"] = stored
    file.write_text(json.dumps(body))
    config.write_text(json.dumps({**json.loads(config.read_text()), **given}))
    library = transformers.AutoTokenizer.from_pretrained(folder)
    for text in ("The fox", " The  fox"):
        assert loaded(folder).encode_for_vector(text, 0) == library(text).input_ids


def test_lower_case_is_a_step_before_all_others(tmp_path: Path) -> None:
    """As sentence-transformers puts it there: the names of tokens in a text stay."""
    cased = {"tokenizer_config": {"do_lower_case": False}}
    library = transformers.AutoTokenizer.from_pretrained(folder_of(tmp_path / "a", **cased)).backend_tokenizer
    library.normalizer = normalizers.Sequence([normalizers.Lowercase(), library.normalizer])
    found = loaded(folder_of(tmp_path / "b", **cased, **{BERT: {"do_lower_case": True}}))
    for text in TEXTS:
        assert found.encode_for_vector(text, 0) == library.encode(text).ids
    assert found.encode_for_vector("FOX", 0) != loaded(tmp_path / "a").encode_for_vector("FOX", 0)
