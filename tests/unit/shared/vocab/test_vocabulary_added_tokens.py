"""Added tokens beside any text, under any normalizer: a prompt has the ids of the tokenizers library, and the
name of a token in a message is text."""

from __future__ import annotations

import functools
import itertools
import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.text_models import write_hf_folder
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE, Unigram

from services.tokenizer.chat_template import ChatTemplate
from shared.vocab.files import ModelFiles
from shared.vocab.vocabulary import load_vocabulary

LLAMA = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
NORMALIZERS = {
    "none": None,
    "llama": LLAMA,
    "replace": normalizers.Replace(" ", "▁"),
    "nfc": normalizers.NFC(),
    "nfkc": normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")]),
    "lowercase": normalizers.Lowercase(),
    "strip": normalizers.Sequence([normalizers.Strip(), LLAMA]),
    "bert": normalizers.BertNormalizer(lowercase=True),
    "accents": normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()]),
}
SPLITS = {
    "none": None,
    "metaspace": pre_tokenizers.Metaspace(prepend_scheme="first"),
    "always": pre_tokenizers.Metaspace(prepend_scheme="always"),
}
FLAGS = [
    {"lstrip": lstrip, "rstrip": rstrip, "single_word": word, "normalized": normalized, "special": special}
    for lstrip, rstrip, word, normalized, special in itertools.product((False, True), repeat=5)
]
NEIGHBOURS = (
    "",
    " ",
    "  ",
    "a",
    "b ",
    " A",
    "\u0338",
    "é",
    "ﬁ",
    "1",
    ">",
    "\n",
    "漢",
    "▁",
    ".",
    "<|u|>",
    "<|U|>",
)
CONTENTS = st.lists(st.lists(st.sampled_from(NEIGHBOURS), max_size=4).map("".join), max_size=4)
TOKEN, OTHER, PLAIN = "<|u|>", "<|w|>", "<|v|>"
CHARACTERS = sorted({*"▁ A1.<|>\n漢\u0338\u0301é≯", *map(chr, range(97, 123))})
ENTRIES = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *CHARACTERS]


def library(normalizer: str, split: str, token: AddedToken) -> Tokenizer:
    """A tokenizer with a token for each character and each byte, and some added ones."""
    model = BPE({each: i for i, each in enumerate(ENTRIES)}, [], unk_token="<unk>", byte_fallback=True)
    tokenizer = Tokenizer(model if split == "none" else Unigram([(each, -5.0) for each in ENTRIES], 0, True))
    tokenizer.normalizer, tokenizer.pre_tokenizer = NORMALIZERS[normalizer], SPLITS[split]  # type: ignore[assignment]
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback()])
    tokenizer.add_tokens([token, AddedToken("ab"), AddedToken(PLAIN, normalized=False, special=True)])
    return tokenizer


@functools.cache
def folder() -> Path:
    return write_hf_folder(Path(tempfile.mkdtemp()) / "m")


def prompt(tokenizer: Tokenizer, contents: list[str]) -> list[int]:
    """The ids of a chat whose template writes two tokens after each message."""
    tokenizer.save(str(folder() / "tokenizer.json"))
    template = (
        "{% for m in messages %}{{ m.content }}" + TOKEN + PLAIN + "{{ m.content }}" + TOKEN + "{% endfor %}"
    )
    (folder() / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    vocabulary = load_vocabulary(ModelFiles("m", folder()))
    messages = [{"role": "user", "content": content} for content in contents]
    return ChatTemplate(vocabulary).encode(messages, None, False, 0)


@pytest.mark.parametrize("normalizer", NORMALIZERS)
@settings(max_examples=60)
@given(split=st.sampled_from([*SPLITS]), flags=st.sampled_from(FLAGS), contents=CONTENTS)
def test_ids_equal_the_librarys_and_names_in_messages_are_text(
    normalizer: str, split: str, flags: dict[str, bool], contents: list[str]
) -> None:
    """The library's token has another name of the same form, which no message has."""
    other = library(normalizer, split, AddedToken(OTHER, **flags))
    text = "".join(f"{content}{OTHER}{PLAIN}{content}{OTHER}" for content in contents)
    w, u = ENTRIES.index("w"), ENTRIES.index("u")
    wanted = [u if i == w else i for i in other.encode(text, add_special_tokens=False).ids]
    assert prompt(library(normalizer, split, AddedToken(TOKEN, **flags)), contents) == wanted
