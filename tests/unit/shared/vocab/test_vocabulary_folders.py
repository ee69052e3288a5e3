"""What the files of a folder beside tokenizer.json, and its own settings for a training, do to a prompt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.executor.tiny_encoders import KINDS, encoder_folder, tokenizer_of
from support.text_models import CONTROLS, trained, write_hf_folder
from tokenizers import AddedToken, Tokenizer, decoders, normalizers

from services.tokenizer.chat_template import ChatTemplate
from shared.errors import SetupError
from shared.vocab.files import ModelFiles
from shared.vocab.vocabulary import Vocabulary, load_vocabulary

FLAGS = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False}
CHAT = [{"role": "user", "content": "The quick  fox"}]
EXTRA = "<|im_start|>{{ messages[0].content }}<|extra|> <row><|im_end|>"
NEXT = len(trained()[0])  # the id after those of tokenizer.json


def folder_of(tmp_path: Path, template: str = EXTRA, **files: dict[str, Any]) -> Path:
    """A folder in which these keys of its files are added or (None) taken out."""
    tmp_path.mkdir(exist_ok=True)
    folder = write_hf_folder(tmp_path / "m", template=template)
    for name, change in files.items():
        file = folder / f"{name}.json"
        body = json.loads(file.read_text()) if file.is_file() else {}
        file.write_text(json.dumps({k: v for k, v in {**body, **change}.items() if v is not None}))
    return folder


def loaded(folder: Path) -> Vocabulary:
    return load_vocabulary(ModelFiles("m", folder))


def prompt(vocabulary: Vocabulary) -> list[int]:
    return ChatTemplate(vocabulary).encode(CHAT, None, False, 0)


def test_a_training_cuts_and_pads_no_prompt(tmp_path: Path) -> None:
    plain = loaded(folder_of(tmp_path / "a"))
    cut = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    pad = {
        "strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
        "pad_type_id": 0, "pad_token": "<|endoftext|>",
    }  # fmt: skip
    trained = loaded(folder_of(tmp_path / "b", tokenizer={"truncation": cut, "padding": pad}))
    assert len(prompt(plain)) > 6
    assert prompt(trained) == prompt(plain)
    assert trained.encode("a b c d", special=True) == plain.encode("a b c d")
    assert (trained.prefix_ids, trained.suffix_ids) == ((), ())


ALL = {str(i): {"content": token, "special": True, **FLAGS} for i, token in enumerate(CONTROLS)}
LATER = {"<|extra|>": NEXT, "<row>": NEXT + 1}
STATED = {str(i): {"content": token, "special": i == NEXT, **FLAGS} for token, i in LATER.items()}


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config": {"added_tokens_decoder": {**ALL, **STATED}}},
        {"added_tokens": dict(reversed(LATER.items()))},
        {"tokenizer_config": {"additional_special_tokens": ["<|im_end|>", *LATER]}},
        {"tokenizer_config": {"extra_special_tokens": {"x_token": "<|extra|>", "y_token": "<row>"}}},
        {"special_tokens_map": {"additional_special_tokens": [{"content": t, **FLAGS} for t in LATER]}},
    ],
)
def test_tokens_that_another_file_adds_are_tokens(tmp_path: Path, files: dict[str, Any]) -> None:
    """As text they would be a prompt that the model has never seen."""
    vocabulary = loaded(folder_of(tmp_path, **files))
    ids = prompt(vocabulary)
    space = vocabulary.encode(" ")
    assert ids == [1, *vocabulary.encode(CHAT[0]["content"]), NEXT, *space, NEXT + 1, 2]
    assert vocabulary.size == NEXT + 2


@pytest.mark.parametrize(
    "damaged",
    [
        {"added_tokens_decoder": ["x"]},
        {"added_tokens_decoder": {"a": {}}},
        {"chat_template": [{"name": "default"}]},
        {"chat_template": [None]},
    ],
)
def test_a_damaged_configuration_is_named(tmp_path: Path, damaged: dict[str, Any]) -> None:
    with pytest.raises(SetupError, match=r"tokenizer_config\.json is not a tokenizer's configuration"):
        loaded(folder_of(tmp_path, tokenizer_config=damaged))


def test_a_context_that_is_no_number_is_unknown_here(tmp_path: Path) -> None:
    """The executor names it."""
    assert loaded(folder_of(tmp_path, config={"max_position_embeddings": ["8k"]})).context_tokens == 0


def test_an_absent_pad_token_takes_the_id_before_further_tokens(tmp_path: Path) -> None:
    given = {"pad_token": "[PAD]", "additional_special_tokens": ["<|extra|>"]}
    vocabulary = loaded(folder_of(tmp_path, tokenizer_config=given))
    assert (vocabulary.controls["[PAD]"], vocabulary.controls["<|extra|>"]) == (NEXT, NEXT + 1)


def test_the_configuration_decides_which_spaces_a_token_absorbs(tmp_path: Path) -> None:
    end = {"content": "<|im_end|>", "special": True, **FLAGS, "rstrip": True}
    vocabulary = loaded(folder_of(tmp_path, tokenizer_config={"added_tokens_decoder": {**ALL, "2": end}}))
    assert vocabulary.encode("<|im_end|>  \na", special=True) == [2, *vocabulary.encode("a")]


def test_special_tokens_in_a_file_of_their_own(tmp_path: Path) -> None:
    named = {"bos_token": {"content": "<|im_start|>", **FLAGS}, "eos_token": "<|im_end|>"}
    without = {"bos_token": None, "eos_token": None}
    template = "{{ bos_token }}a{{ eos_token }}"
    folder = folder_of(tmp_path, template, tokenizer_config=without, special_tokens_map=named)
    (folder / "generation_config.json").unlink()
    vocabulary = loaded(folder)
    assert prompt(vocabulary) == [1, *vocabulary.encode("a"), 2]
    assert vocabulary.eos_ids == (2,)


def test_a_template_has_every_special_token_by_name(tmp_path: Path) -> None:
    template = "{{ pad_token }}{{ unk_token }}{{ messages[0].content }}{{ eos_token }}"
    given = {"pad_token": "<|endoftext|>", "unk_token": {"content": "<|im_start|>", **FLAGS}}
    vocabulary = loaded(folder_of(tmp_path, template, tokenizer_config=given))
    assert prompt(vocabulary) == [0, 1, *vocabulary.encode(CHAT[0]["content"]), 2]


def test_named_templates_may_be_an_object(tmp_path: Path) -> None:
    given = {"chat_template": {"tool_use": "x", "default": "a"}}
    assert loaded(folder_of(tmp_path, tokenizer_config=given)).chat_template == "a"


def test_an_end_that_is_a_plain_entry_is_matched_whole(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "a{{ eos_token }}")
    body = json.loads((folder / "tokenizer.json").read_text())
    body["added_tokens"] = [token for token in body["added_tokens"] if token["content"] != "<|im_end|>"]
    (folder / "tokenizer.json").write_text(json.dumps(body))
    vocabulary = loaded(folder)
    assert prompt(vocabulary) == [*vocabulary.encode("a"), 2]
    assert vocabulary.decode([2]) == ""


def test_an_end_that_is_a_plain_word_can_still_be_written(tmp_path: Path) -> None:
    """Some models end at a line break: only its choice by the model ends an answer."""
    tokenizer = Tokenizer.from_file(str(folder_of(tmp_path / "a") / "tokenizer.json"))
    line = tokenizer.token_to_id("Ċ")
    vocabulary = loaded(folder_of(tmp_path / "b", generation_config={"eos_token_id": [2, line]}))
    assert vocabulary.eos_ids == (2, line)
    assert vocabulary.encode("a\nb") == tokenizer.encode("a\nb").ids
    assert "Ċ" not in vocabulary.controls


def sentencepiece(tmp_path: Path, **change: Any) -> Vocabulary:
    """A folder whose tokenizer decodes, and normalises, as in SentencePiece."""
    folder = folder_of(tmp_path, change.get("template", "a"))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.pre_tokenizer = None  # type: ignore[assignment]  # the library takes None
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.add_tokens([AddedToken("▁hi"), AddedToken("<row>", normalized=True)])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, *change.get("steps", ())])
    tokenizer.save(str(folder / "tokenizer.json"))
    return loaded(folder)


def test_a_space_before_the_first_word_goes_only_where_the_tokenizer_removes_it(tmp_path: Path) -> None:
    for name, steps, text in (("a", [decoders.Strip(" ", 1, 0)], "hi"), ("b", [], " hi")):
        vocabulary = sentencepiece(tmp_path / name, steps=steps)
        assert vocabulary.decode([NEXT]) == text


def test_a_normaliser_hides_a_token_after_a_letter_as_in_the_library(tmp_path: Path) -> None:
    assert NEXT + 1 not in prompt(sentencepiece(tmp_path, template="a<row>{{ messages[0].content }}"))
    assert NEXT + 1 in prompt(sentencepiece(tmp_path / "b", template="a <row>{{ messages[0].content }}"))


@pytest.mark.parametrize("kind", KINDS)
def test_vocabularies_of_encoders_are_read(kind: str, tmp_path: Path) -> None:
    vocabulary = load_vocabulary(ModelFiles("m", encoder_folder(kind, tmp_path)))
    library = tokenizer_of(kind)
    begin, end = (library.token_to_id(name) for name in KINDS[kind])
    assert (vocabulary.prefix_ids, vocabulary.suffix_ids) == ((begin,), (end,))
    for text in ("The quick brown fox", "Naïve prices,  12.5%!", "jumps 日本語 over", " x"):
        ids = vocabulary.encode(text)
        assert [begin, *ids, end] == library.encode(text).ids
    plain = "the quick brown fox jumps over"
    assert vocabulary.decode(vocabulary.encode(plain)) == plain
    control = vocabulary.encode(f"a {KINDS[kind][1]} b", special=True)
    assert end in control
    assert end not in vocabulary.encode(f"a {KINDS[kind][1]} b")
