"""A GGUF file's header, and the words of its vocabulary."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
from support.text_models import write_bpe_gguf

from shared.errors import SetupError
from shared.vocab.files import ModelFiles
from shared.vocab.gguf import pre_tokenizer, read_metadata
from shared.vocab.vocabulary import load_vocabulary


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("gpt-2", "It's 1234 a  b", ["It", "'s", "Ġ1234", "Ġa", "Ġ", "Ġb"]),
        ("smollm", "a 1234", ["a", "Ġ", "1", "2", "3", "4"]),
        ("llama-bpe", "It'S 1234567 a\n\n b", ["It", "'S", "Ġ", "123", "456", "7", "Ġa", "ĊĊ", "Ġb"]),
        ("qwen2", "x1234 (y)", ["x", "1", "2", "3", "4", "Ġ(", "y", ")"]),
    ],
)
def test_words_of_each_family_are_encoded(pre: str, text: str, words: list[str]) -> None:
    assert [word for word, _ in pre_tokenizer(pre).pre_tokenize_str(text)] == words


def test_an_unknown_pre_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"'viking'.*llama-bpe.*tokenizer\.json"):
        load_vocabulary(ModelFiles("m", write_bpe_gguf(tmp_path / "m.gguf", pre="viking")))


def test_metadata_equals_the_gguf_library(tmp_path: Path) -> None:
    path = write_bpe_gguf(tmp_path / "m.gguf")
    fields = gguf.GGUFReader(path).fields
    expected = {name: field.contents() for name, field in fields.items() if not name.startswith("GGUF.")}
    assert read_metadata(path) == expected


def test_values_of_all_types_are_read(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "t.gguf", "llama")
    values = {"u8": 7, "i8": -7, "u16": 9, "i16": -9, "u32": 1, "i32": -1, "u64": 2**40, "i64": -(2**40)}
    for name, value in values.items():
        long_name = name.replace("u", "uint") if name[0] == "u" else name.replace("i", "int")
        getattr(writer, f"add_{long_name}")(name, value)
    writer.add_float32("f32", 0.5)
    writer.add_float64("f64", 0.1)
    writer.add_bool("yes", True)
    writer.add_array("flags", [True, False])
    writer.add_array("floats", [0.5, 0.25])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    expected = {**values, "f32": 0.5, "f64": 0.1, "yes": True, "flags": [True, False], "floats": [0.5, 0.25]}
    assert {k: v for k, v in read_metadata(tmp_path / "t.gguf").items() if k in expected} == expected


@pytest.mark.parametrize("keep", [0, 3, 20, 200, -3])
def test_a_cut_gguf_file_is_a_setup_error(tmp_path: Path, keep: int) -> None:
    path = write_bpe_gguf(tmp_path / "m.gguf")
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(SetupError, match="GGUF"):
        read_metadata(path)
