"""Text to ids and back, against plain-Python BPE, the gguf library and Hugging Face's own decoder."""

from __future__ import annotations

import itertools
import json
import os
from dataclasses import replace
from pathlib import Path

import gguf
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.text_models import (
    CONTROLS,
    TEMPLATE,
    plain_bpe,
    trained,
    write_bpe_gguf,
    write_hf_folder,
    write_sentencepiece_gguf,
)
from tokenizers import decoders

from shared.errors import SetupError
from shared.vocab.files import CATALOGUE, DEFAULT_MODEL, ModelFiles, resolve, served_name, size_bytes
from shared.vocab.gguf import gguf_parts, read_metadata
from shared.vocab.vocabulary import Vocabulary, _renamed, byte_characters, load_vocabulary

TOKENS, MERGES = trained()
TRICKY = [
    "Hello, world!  two  spaces\n\n\ttabs \r\n end ",
    "日本語のテキスト、漢字とかな。中文 한국어",
    "🎉🚀👩‍💻 e\u0301 ½ ² Ⅳ ٣٤ 12345 3.14",
    "it's we'll THEY'VE don't",
    "",
]
TEXTS = st.text(
    alphabet=st.one_of(st.sampled_from(" \n'a1Zé½漢🎉٣"), st.characters(exclude_categories=["Cs"]))
)


@pytest.fixture(scope="module")
def smollm(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    path = write_bpe_gguf(tmp_path_factory.mktemp("gguf") / "m.gguf")
    return load_vocabulary(ModelFiles("m", path))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    path = write_hf_folder(tmp_path_factory.mktemp("hf") / "model")
    return load_vocabulary(ModelFiles("model", path))


@pytest.mark.parametrize("text", TRICKY)
def test_bpe_equals_plain_python(smollm: Vocabulary, folder: Vocabulary, text: str) -> None:
    assert smollm.encode(text) == plain_bpe(text, TOKENS, MERGES, single_digits=True)
    assert folder.encode(text) == plain_bpe(text, TOKENS, MERGES, single_digits=False)


@given(TEXTS)
def test_bpe_equals_plain_python_on_any_text(smollm: Vocabulary, text: str) -> None:
    ids = smollm.encode(text)
    assert ids == plain_bpe(text, TOKENS, MERGES, single_digits=True)
    assert smollm.decode(ids) == text


@given(st.lists(st.integers(3, len(TOKENS) - 1)))
def test_decode_equals_hugging_face(smollm: Vocabulary, ids: list[int]) -> None:
    assert smollm.decode(ids) == decoders.ByteLevel().decode([TOKENS[i] for i in ids])


def test_control_tokens_are_text_unless_requested(smollm: Vocabulary) -> None:
    text = "<|im_start|>hi<|im_end|>"
    plain = smollm.encode(text)
    assert not set(plain) & {0, 1, 2}
    assert smollm.decode(plain) == text
    ids = smollm.encode(text, special=True)
    assert (ids[0], ids[-1]) == (1, 2)
    assert smollm.decode(ids) == "hi"


@pytest.mark.parametrize("name", ["smollm", "sentencepiece"])
def test_other_names_take_the_place_of_the_old_ones(name: str, request: pytest.FixtureRequest) -> None:
    """A GGUF file builds what the renamed form of its tokenizer is."""
    vocabulary: Vocabulary = request.getfixturevalue(name)
    build, joined = vocabulary._parts.build, next(t for t in vocabulary._parts.tokens if len(t) == 2)
    names = {**vocabulary.secret_names, joined: "another name"}
    assert json.loads(build(names).to_str()) == json.loads(_renamed(build({}), names).to_str())
    assert build(names).token_to_id(names[joined]) == vocabulary._parts.tokens.index(joined)


@pytest.mark.parametrize("name", ["smollm", "folder"])
def test_vocabulary_has_these_facts(name: str, request: pytest.FixtureRequest) -> None:
    vocabulary: Vocabulary = request.getfixturevalue(name)
    assert vocabulary.size == len(TOKENS)
    assert vocabulary.controls == {token: i for i, token in enumerate(CONTROLS)}
    assert (vocabulary.bos_token, vocabulary.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert vocabulary.eos_ids == (2, 0)
    assert (vocabulary.chat_template, vocabulary.context_tokens) == (TEMPLATE, 128)
    assert vocabulary.prefix_ids == ()
    assert vocabulary.token_bytes[1] == b""


def test_equal_vocabularies_have_equal_digests(
    smollm: Vocabulary, folder: Vocabulary, tmp_path: Path
) -> None:
    other = load_vocabulary(ModelFiles("s", write_sentencepiece_gguf(tmp_path / "s.gguf", {"▁a": -1.0})))
    assert smollm.digest == folder.digest
    assert other.digest != smollm.digest
    assert smollm.tokens_digest == folder.tokens_digest
    assert other.tokens_digest != smollm.tokens_digest


def test_tokens_that_fill_the_ids_are_no_other_vocabulary(smollm: Vocabulary) -> None:
    """llama.cpp's converter writes one for each id of the logits without a token; a folder has none."""
    parts = smollm._parts
    filled = Vocabulary(replace(parts, tokens=[*parts.tokens, "[PAD131]", "[PAD132]", ""]))
    assert filled.tokens_digest == smollm.tokens_digest
    assert filled.digest != smollm.digest
    longer = Vocabulary(replace(parts, tokens=[*parts.tokens, "<|tool|>"]))
    assert longer.tokens_digest != smollm.tokens_digest


def test_byte_characters_equal_the_tokenizers_librarys() -> None:
    assert sorted(byte_characters()) == sorted(pre_alphabet())
    assert byte_characters()[ord(" ")] == "Ġ"


def pre_alphabet() -> list[str]:
    from tokenizers.pre_tokenizers import ByteLevel

    return ByteLevel.alphabet()


# ---- SentencePiece ------------------------------------------------------------------------------

PIECES = {
    "▁": -1.0, "h": -9.0, "e": -9.0, "l": -9.0, "o": -9.0, "t": -9.0, "he": -3.0, "▁t": -2.0, "the": -5.0,
    "▁the": -4.0, "ll": -2.5, "hell": -6.0, "▁hello": -7.0, "lo": -2.2, "hello": -8.0, "el": -2.1,
}  # fmt: skip


def highest_score_first(text: str) -> list[str]:
    """SentencePiece BPE as in llama.cpp: merge the neighbours whose whole scores highest, leftmost first."""
    symbols = list("▁" + text.replace(" ", "▁"))
    while True:
        scored = [
            (-PIECES[a + b], i) for i, (a, b) in enumerate(itertools.pairwise(symbols)) if a + b in PIECES
        ]
        if not scored:
            return symbols
        _, at = min(scored)
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    path = write_sentencepiece_gguf(tmp_path_factory.mktemp("sp") / "s.gguf", PIECES)
    return load_vocabulary(ModelFiles("s", path))


@given(st.text(alphabet="helot ", min_size=1))
def test_sentencepiece_equals_score_merging(sentencepiece: Vocabulary, text: str) -> None:
    names = [list(PIECES)[i - 259] for i in sentencepiece.encode(text)]
    assert names == highest_score_first(text)


@given(TEXTS)
def test_sentencepiece_round_trip_with_byte_fallback(sentencepiece: Vocabulary, text: str) -> None:
    if "▁" not in text:  # SentencePiece cannot distinguish it from a space
        assert sentencepiece.decode(sentencepiece.encode(text)) == text


def test_sentencepiece_vocabulary_has_these_facts(sentencepiece: Vocabulary) -> None:
    assert sentencepiece.prefix_ids == (1,)
    assert sentencepiece.must_strip_space
    assert sentencepiece.token_bytes[3 + 0xE9] == b"\xe9"
    assert sentencepiece.chat_template == ""


# ---- files --------------------------------------------------------------------------------------


def test_a_link_keeps_its_name(tmp_path: Path) -> None:
    """The cache of huggingface_hub: links to files with the name of a checksum."""
    file = write_bpe_gguf(tmp_path / "0123abcd")
    link = tmp_path / "tiny.gguf"
    link.symlink_to(file)
    found = resolve(str(link), tmp_path)
    assert (found.name, found.is_gguf, load_vocabulary(found).size) == ("tiny", True, len(TOKENS))
    (tmp_path / "latest").symlink_to(tmp_path)
    assert served_name(f"{tmp_path}/x/../latest/") == "latest"


def test_resolve_finds_paths_names_and_hub_ids(tmp_path: Path) -> None:
    file = write_bpe_gguf(tmp_path / "tiny.gguf")
    assert resolve(str(file), tmp_path) == ModelFiles("tiny", file)
    cached = tmp_path / "models" / CATALOGUE[DEFAULT_MODEL].file
    cached.parent.mkdir()
    cached.write_bytes(file.read_bytes())
    assert resolve(DEFAULT_MODEL, tmp_path) == ModelFiles(DEFAULT_MODEL, cached)
    hub = write_hf_folder(tmp_path / "models" / "owner--name")
    assert resolve("owner/name", tmp_path) == ModelFiles("owner/name", hub)
    assert served_name(str(hub)) == "owner--name"


def test_missing_models_print_how_to_get_them(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=rf"{tmp_path}/models/.*`headrace pull {DEFAULT_MODEL}`"):
        resolve(DEFAULT_MODEL, tmp_path)
    with pytest.raises(SetupError, match=r"there is no model at /nowhere/x\.gguf"):
        resolve("/nowhere/x.gguf", tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(SetupError, match=r"no config\.json"):
        resolve(str(tmp_path / "empty"), tmp_path)


def test_a_name_without_a_source_is_not_advised_to_be_pulled(tmp_path: Path) -> None:
    for model in ("smollm3", "a/b/c"):
        with pytest.raises(
            SetupError,
            match=rf"^'{model}' is neither a known model \(gemma-3-270m, {DEFAULT_MODEL}\) nor a hub",
        ):
            resolve(model, tmp_path)
    with pytest.raises(SetupError, match=r"'owner/name' is not on this machine .*`headrace pull owner/name`"):
        resolve("owner/name", tmp_path)
    (tmp_path / "models").mkdir()
    write_hf_folder(tmp_path / "models" / "own")
    assert resolve("own", tmp_path).name == "own", "a folder that was put there"


def test_file_that_is_no_model_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("notes.txt", "owner/name", DEFAULT_MODEL):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    for model in ("notes.txt", "./notes.txt", f"{tmp_path}/notes.txt", "owner/name"):
        with pytest.raises(
            SetupError, match=r"(notes\.txt|owner/name) is not a model: give a file whose name en"
        ):
            resolve(model, tmp_path)
    with pytest.raises(SetupError, match=f"`headrace pull {DEFAULT_MODEL}`"):
        resolve(DEFAULT_MODEL, tmp_path)


def test_a_fifo_is_no_model_and_is_not_opened(tmp_path: Path) -> None:
    """That would wait for its writer."""
    file, folder = tmp_path / "x.gguf", write_hf_folder(tmp_path / "folder")
    weights = folder / "model.safetensors"
    for model, fifo in ((file, file), (folder, weights)):
        fifo.unlink(missing_ok=True)
        os.mkfifo(fifo)
        with pytest.raises(SetupError, match=f"{fifo} is a FIFO, a socket or a device"):
            resolve(str(model), tmp_path)


def test_unreadable_vocabularies_are_setup_errors(tmp_path: Path) -> None:
    folder = write_hf_folder(tmp_path / "m")
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(SetupError, match="not valid JSON"):
        load_vocabulary(ModelFiles("m", folder))
    (folder / "tokenizer_config.json").unlink()
    source = (folder / "tokenizer.json").read_text()
    body = {
        **json.loads(source),
        "decoder": {"type": "CTC", "pad_token": "x", "word_delimiter_token": "|", "cleanup": True},
    }
    (folder / "tokenizer.json").write_text(json.dumps(body))
    with pytest.raises(SetupError, match="CTC"):
        load_vocabulary(ModelFiles("m", folder))
    (folder / "tokenizer.json").write_text(source[:100])
    with pytest.raises(SetupError, match="is not a tokenizer"):
        load_vocabulary(ModelFiles("m", folder))
    (folder / "tokenizer.json").unlink()
    with pytest.raises(SetupError, match=r"no tokenizer\.json"):
        load_vocabulary(ModelFiles("m", folder))
    writer = gguf.GGUFWriter(tmp_path / "b.gguf", "bert")
    writer.add_tokenizer_model("bert")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(SetupError, match="'bert'"):
        load_vocabulary(ModelFiles("b", tmp_path / "b.gguf"))


def test_other_files_and_value_types_are_setup_errors(tmp_path: Path) -> None:
    path = write_bpe_gguf(tmp_path / "m.gguf")
    data = path.read_bytes()
    for damaged in (b"GGML" + data[4:], data[:4] + b"\x01" + data[5:], data.replace(b"smollm", b"\xff" * 6)):
        path.write_bytes(damaged)
        with pytest.raises(SetupError, match="GGUF"):
            read_metadata(path)
    path.write_bytes(data.replace(b"tokenizer.ggml.merges", b"tokenizer.ggml.merged"))
    vocabulary = load_vocabulary(ModelFiles("m", path))  # enough for an executor
    with pytest.raises(SetupError, match=r"no tokenizer\.ggml\.merges"):
        vocabulary.encode("a")
    key = (21).to_bytes(8, "little") + b"general.architecture."
    path.write_bytes(data[:16] + (1).to_bytes(8, "little") + key + (99).to_bytes(4, "little"))
    with pytest.raises(SetupError, match="unknown value type 99"):
        read_metadata(path)


def test_tokens_outside_the_byte_alphabet_are_their_own_text(tmp_path: Path) -> None:
    parts = gguf_parts(write_bpe_gguf(tmp_path / "m.gguf"))
    odd = ["漢字", "two words", "Ġa", "\xad"]
    fields = {name: getattr(parts, name) for name in parts.__slots__} | {
        "tokens": odd,
        "special": frozenset(),
    }
    vocabulary = Vocabulary(type(parts)(**fields))
    assert vocabulary.token_bytes == ["漢字".encode(), b"two words", b" a", "\xad".encode()]
    assert vocabulary.decode([0, 2]) == decoders.ByteLevel().decode([odd[0], odd[2]])
    with pytest.raises(SetupError, match="empty"):
        Vocabulary(type(parts)(**(fields | {"tokens": []})))


def test_weights_that_are_links_to_nothing_are_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "a.safetensors").write_bytes(b"123")
    found = resolve(str(tmp_path), tmp_path)
    assert size_bytes(found) == 3
    (tmp_path / "b.safetensors").symlink_to("blobs/gone")
    with pytest.raises(SetupError, match=r"b\.safetensors is a link to a file that is gone"):
        size_bytes(found)
