"""Where a text begins and ends: the ids that a model's files name, or that are known by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.text_models import CONTROLS, write_bpe_gguf, write_hf_folder, write_sentencepiece_gguf
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from shared.vocab.files import ModelFiles
from shared.vocab.vocabulary import Vocabulary, load_vocabulary


def loaded(path: Path) -> Vocabulary:
    return load_vocabulary(ModelFiles("m", path))


def change(file: Path, **fields: Any) -> None:
    body = json.loads(file.read_text()) if file.is_file() else {}
    file.write_text(json.dumps({k: v for k, v in {**body, **fields}.items() if v is not None}))


@pytest.mark.parametrize("kind", [1, 3, 4])
def test_gguf_ends_at_the_names_of_llama_cpps_end_tokens(tmp_path: Path, kind: int) -> None:
    """At any type: they are control tokens then, and have no text."""
    names = ["<|eot_id|>", "<|end|>", "<end_of_turn>", "<|eom_id|>"]
    kinds = dict.fromkeys(CONTROLS, 3) | dict.fromkeys(["<|im_end|>", "<|endoftext|>", *names], kind)
    vocabulary = loaded(write_bpe_gguf(tmp_path / "m.gguf", kinds=kinds, eos_id=5))
    ends = [vocabulary.encode(name, special=True) for name in names]
    assert vocabulary.eos_ids == (5, 0, 2, *sorted(i for (i,) in ends))
    assert vocabulary.decode(vocabulary.eos_ids) == ""
    assert not set(vocabulary.encode("".join(names))) & set(vocabulary.eos_ids)


def test_token_end_is_no_end_beside_return_and_call(tmp_path: Path) -> None:
    kinds = dict.fromkeys(["<|end|>", "<|return|>", "<|call|>"], 3)
    vocabulary = loaded(write_bpe_gguf(tmp_path / "m.gguf", kinds=kinds))
    (end,), (back,) = (vocabulary.encode(name, special=True) for name in ("<|end|>", "<|return|>"))
    assert end not in vocabulary.eos_ids
    assert back in vocabulary.eos_ids


@pytest.mark.parametrize("pre", ["llama-bpe", "llama3", "llama-v3", "smollm", "qwen2", "gpt-2"])
@pytest.mark.parametrize("key", [None, True, False])
def test_completion_prompt_of_a_gguf_starts_with_its_begin_token(
    tmp_path: Path, pre: str, key: bool | None
) -> None:
    """Llama 3's files leave `add_bos_token` out, and llama.cpp adds the token."""
    vocabulary = loaded(write_bpe_gguf(tmp_path / "m.gguf", pre, add_bos=key))
    begins = pre.startswith("llama") if key is None else key
    assert vocabulary.prefix_ids == ((1,) if begins else ())


def test_ids_of_a_gguf_without_a_token_are_none(tmp_path: Path) -> None:
    vocabulary = loaded(write_bpe_gguf(tmp_path / "m.gguf", bos_id=2**32 - 1, eos_id=2**32 - 1, add_bos=True))
    assert (vocabulary.bos_token, vocabulary.prefix_ids) == ("", ())
    assert vocabulary.eos_ids == (0, 2)  # by their names


def test_end_tokens_of_a_folder_follow_its_files(tmp_path: Path) -> None:
    """The tokenizer's end comes first: it is the `eos_token` of the chat template."""
    folder = write_hf_folder(tmp_path / "m")
    change(folder / "generation_config.json", eos_token_id=[0, 2, 7])
    assert loaded(folder).eos_ids == (2, 0, 7)
    assert loaded(folder).eos_token == "<|im_end|>"
    (folder / "generation_config.json").unlink()
    assert loaded(folder).eos_ids == (2,)
    change(folder / "config.json", eos_token_id=[9, 8])
    assert loaded(folder).eos_ids == (2, 9, 8)
    change(folder / "config.json", eos_token_id=8)
    assert loaded(folder).eos_ids == (2, 8)
    change(folder / "generation_config.json", max_length=5)  # it has no ends
    assert loaded(folder).eos_ids == (2, 8)
    change(folder / "generation_config.json", eos_token_id=[-1, 7, 128001])  # of another vocabulary
    assert loaded(folder).eos_ids == (2, 7)


def with_template(tmp_path: Path, template: str, **config: bool | None) -> Path:
    """A folder whose tokenizer puts its tokens around a text."""
    folder = write_hf_folder(tmp_path / "m")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    named = [(token, i) for i, token in enumerate(CONTROLS)]
    tokenizer.post_processor = TemplateProcessing(single=template, special_tokens=named)
    tokenizer.save(str(folder / "tokenizer.json"))
    change(folder / "tokenizer_config.json", **config)
    return folder


@pytest.mark.parametrize(
    ("template", "asked", "prefix"),
    [
        ("<|im_start|> $A", None, (1,)),
        ("<|endoftext|> <|im_start|> $A <|im_end|>", None, (0, 1)),  # GLM has two
        ("$A <|im_end|>", None, ()),
        ("<|im_start|> $A", False, ()),
        ("$A", True, (1,)),
    ],
)
def test_completion_prompt_of_a_folder_starts_with_its_begin_token(
    tmp_path: Path, template: str, asked: bool | None, prefix: tuple[int, ...]
) -> None:
    folder = with_template(tmp_path, template, add_bos_token=asked)
    assert loaded(folder).prefix_ids == prefix


@pytest.mark.parametrize(
    ("template", "asked", "suffix"),
    [
        ("<|im_start|> $A", None, ()),
        ("$A <|endoftext|>", None, (0,)),  # Qwen3-Embedding
        ("$A <|im_end|> <|endoftext|>", False, (2, 0)),
        ("$A", True, (2,)),
        ("$A", False, ()),
    ],
)
def test_text_for_a_vector_ends_with_the_folders_end_token(
    tmp_path: Path, template: str, asked: bool | None, suffix: tuple[int, ...]
) -> None:
    folder = with_template(tmp_path, template, add_eos_token=asked)
    assert loaded(folder).suffix_ids == suffix


def test_no_merge_of_plain_pieces_makes_a_control_token(tmp_path: Path) -> None:
    """SentencePiece models have `</` and `s>`, and a control token scores highest of all."""
    pieces = {"<": -5.0, "/": -5.0, "s": -5.0, ">": -5.0, "</": -2.0, "s>": -2.0, "<s": -2.0, "▁": -1.0}
    vocabulary = loaded(write_sentencepiece_gguf(tmp_path / "s.gguf", pieces))
    ids = vocabulary.encode("</s><s><unk>")
    assert not {0, 1, 2} & set(ids)
    assert vocabulary.decode(ids) == "</s><s><unk>"
    assert vocabulary.encode("</s>", special=True) == [2]
    assert vocabulary.decode([0, 1, 2]) == ""
