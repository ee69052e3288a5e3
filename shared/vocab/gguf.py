"""What a GGUF file states: its key-value header, and the vocabulary in it.

The header is that of https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The gguf library wraps each
string of a vocabulary in NumPy views and takes ten times as long, seconds. This reader walks the header once
and builds plain Python values. The executor reads the tensors.

`gguf_parts` reads two families of vocabularies: byte-level BPE (`gpt2`: GPT-2, Llama 3, Qwen, SmolLM), and
SentencePiece BPE with byte fallback (`llama`: Llama 2, Mistral) with merges derived from the tokens' scores.
llama.cpp's name in `tokenizer.ggml.pre` selects the split of text into words before BPE; each entry of
_BY_NAME is the pipeline of the model's own tokenizer.json (llama.cpp's `llama-vocab.cpp` has the same
patterns).
"""

from __future__ import annotations

import mmap
import struct
from array import array
from collections.abc import Callable, Mapping
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence, Split

from shared.errors import SetupError
from shared.vocab.files import unreadable
from shared.vocab.vocabulary import VocabularyParts, kept_merges

_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")


def read_metadata(path: Path) -> dict[str, Any]:
    """Every metadata key of the file. Arrays become lists. Raises SetupError on a damaged file."""
    return read_header(path)[0]


def read_header(path: Path) -> tuple[dict[str, Any], int]:
    """The metadata, and the byte offset of the tensor directory. Raises like `read_metadata`."""
    about = path.stat()
    metadata, end = _header(path, (about.st_ino, about.st_mtime_ns, about.st_size))
    return dict(metadata), end


def forget_header() -> None:
    """Free what is kept for the next reader of the same file: 10 MB of strings for 49k tokens."""
    _header.cache_clear()


@lru_cache(maxsize=1)  # an executor needs it three times, and a vocabulary takes a tenth of a second
def _header(path: Path, version: tuple[int, ...]) -> tuple[dict[str, Any], int]:
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            cursor = _Cursor(data)
            metadata = cursor.header()
    except (struct.error, IndexError, UnicodeDecodeError, ValueError) as error:
        raise unreadable(path, "a whole GGUF file", error) from error
    except SetupError as error:
        raise SetupError(f"{path} {error.message}") from error
    if (kind := metadata.get("general.type", "model")) != "model":
        raise SetupError(f"{path}: this GGUF file is of type {kind!r}, not a model: give a model")
    if metadata.get("split.count", 0) > 1:  # only the first part has the other keys
        raise SetupError(
            f"{path}: this GGUF file is one part of several, which is not supported; join them with "
            "`llama-gguf-split --merge` and give the result"
        )
    return metadata, cursor.at


class _Cursor:
    """A position in the mapped file."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self.at = 0

    def header(self) -> dict[str, Any]:
        magic, version = self._data[:4], _U32.unpack_from(self._data, 4)[0]
        if magic == b"GGUF" and version and version & 0xFFFF == 0:
            raise SetupError(
                "is a GGUF file of big-endian order, which is not supported; give the usual one, or turn a "
                "copy around with `gguf-convert-endian FILE little`"
            )
        if magic == b"GGUF" and version == 1:
            raise SetupError(
                "is a GGUF file of version 1, which is not supported; give one of version 2 or 3"
            )
        if magic != b"GGUF" or version not in (2, 3):
            raise ValueError(f"it starts with {magic!r} and version {version}, not with b'GGUF' and 2 or 3")
        count = _U64.unpack_from(self._data, 16)[0]  # after the tensor count
        self.at = 24
        return {self._string(): self._value(self._u32()) for _ in range(count)}

    def _u32(self) -> int:
        self.at += 4
        return int(_U32.unpack_from(self._data, self.at - 4)[0])

    def _u64(self) -> int:
        self.at += 8
        return int(_U64.unpack_from(self._data, self.at - 8)[0])

    def _string(self) -> str:
        size = self._u64()
        start, self.at = self.at, self.at + size
        if self.at > len(self._data):
            raise ValueError("a string runs past the end")
        return self._data[start : self.at].decode()

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            inner, count = self._u32(), self._u64()
            return self._strings(count) if inner == _STRING else self._scalars(inner, count)
        return self._scalars(kind, 1)[0]

    def _scalars(self, kind: int, count: int) -> list[Any]:
        if kind not in _SCALARS:
            raise ValueError(f"unknown value type {kind}")
        code = "B" if kind == _BOOL else _SCALARS[kind]
        column: array[Any] = array(code)
        size = count * column.itemsize
        column.frombytes(self._data[self.at : self.at + size])
        if len(column) != count:
            raise ValueError("an array runs past the end")
        self.at += size
        return [bool(v) for v in column] if kind == _BOOL else column.tolist()

    def _strings(self, count: int) -> list[str]:
        # The two long arrays (tokens, merges) take nearly all the time: one tight loop with local names.
        data, unpack, at = self._data, _U64.unpack_from, self.at
        out = []
        for _ in range(count):
            start = at + 8
            at = start + unpack(data, at)[0]
            out.append(data[start:at].decode())
        if at > len(data):
            raise ValueError("a string array runs past the end")
        self.at = at
        return out


_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # llama.cpp's token types
_SPECIAL = (_UNKNOWN, _CONTROL)
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
# Tokens with these names end a text, for any token type in the file. llama.cpp's list without `</s>` and the
# like, which are text in some vocabularies (where they are the end, a key names them).
_END_NAMES = frozenset(
    {"<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|endoftext|>"}
    | {"<|end_of_text|>", "<end_of_turn>", "<end_of_utterance>", "<EOT>", "<｜end▁of▁sentence｜>"}
)
_HARMONY = {"<|return|>", "<|call|>"}  # in a vocabulary with these, `<|end|>` ends only a part of an answer
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def gguf_parts(path: Path) -> VocabularyParts:
    """Read the vocabulary of a GGUF file's metadata. Raises SetupError for a family that is not supported."""
    data = read_metadata(path)
    builders: dict[str, Callable[[dict[str, Any]], Callable[[Mapping[str, str]], Tokenizer]]] = {
        "gpt2": _byte_level,
        "llama": _sentencepiece,
    }
    model = data.get("tokenizer.ggml.model", "")
    if model not in builders:
        raise SetupError(f"{path} has a {model!r} vocabulary; Headrace reads {' and '.join(builders)}")
    tokens: list[str] = data["tokenizer.ggml.tokens"]
    ends = _gguf_ends(data)
    kinds: list[int] = data.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    kinds = [_CONTROL if i in ends else kind for i, kind in enumerate(kinds)]
    data["tokenizer.ggml.token_type"] = kinds
    bos = data.get("tokenizer.ggml.bos_token_id")
    bos = bos if bos in range(len(tokens)) else None  # 2**32 - 1 stands for none
    begins = model == "llama" or can_skip_merges(data.get("tokenizer.ggml.pre", ""))
    add_bos = data.get("tokenizer.ggml.add_bos_token", begins)
    return VocabularyParts(
        tokens=tokens,
        special=frozenset(i for i, kind in enumerate(kinds) if kind in _SPECIAL),
        added=frozenset(i for i, kind in enumerate(kinds) if kind in (*_SPECIAL, _USER_DEFINED)),
        byte_level=model == "gpt2",
        space_before=model == "llama" and bool(data.get("tokenizer.ggml.add_space_prefix", True)),
        build=builders[model](data),
        prefix_ids=(bos,) if add_bos and bos is not None else (),
        suffix_ids=ends[:1] if data.get("tokenizer.ggml.add_eos_token") else (),
        bos_id=bos,
        eos_ids=ends,
        chat_template=data.get("tokenizer.chat_template", ""),
        context_tokens=int(data.get(f"{data.get('general.architecture')}.context_length", 0)),
    )


def _gguf_ends(data: dict[str, Any]) -> tuple[int, ...]:
    """The end ids: those of the keys, `eos_token_id` first, then those of _END_NAMES."""
    tokens: list[str] = data["tokenizer.ggml.tokens"]
    keyed = [data[f"tokenizer.ggml.{key}"] for key in _END_KEYS if f"tokenizer.ggml.{key}" in data]
    names = _END_NAMES.intersection(tokens)
    if names >= _HARMONY:
        names -= {"<|end|>"}
    named = [i for i, token in enumerate(tokens) if token in names]
    return tuple(dict.fromkeys(i for i in (*keyed, *named) if 0 <= i < len(tokens)))


def _needed(data: dict[str, Any], key: str) -> Any:
    """What a tokenizer cannot do without; an executor can. Raises SetupError."""
    if (found := data.get(f"tokenizer.ggml.{key}")) is None:
        raise SetupError(
            f"the GGUF file has no tokenizer.ggml.{key}, which a tokenizer needs; fetch it again"
        )
    return found


def _byte_level(data: dict[str, Any]) -> Callable[[Mapping[str, str]], Tokenizer]:
    pre = data.get("tokenizer.ggml.pre", "")
    pipeline = pre_tokenizer(pre)  # here, so that an unknown name fails at start

    def build(names: Mapping[str, str]) -> Tokenizer:
        tokens, merges = data["tokenizer.ggml.tokens"], _needed(data, "merges")
        model = BPE(
            vocab={names.get(token, token): i for i, token in enumerate(tokens)},
            merges=kept_merges(names, (merge.split(" ", 1) for merge in merges)),
            ignore_merges=can_skip_merges(pre),
        )
        tokenizer = Tokenizer(model)
        tokenizer.pre_tokenizer = pipeline
        if "qwen" in pre:
            tokenizer.normalizer = normalizers.NFC()
        tokenizer.decoder = decoders.ByteLevel()
        _add_special(tokenizer, data, names)
        return tokenizer

    return build


def _sentencepiece(data: dict[str, Any]) -> Callable[[Mapping[str, str]], Tokenizer]:
    tokens = data["tokenizer.ggml.tokens"]

    @cache
    def merges() -> list[tuple[str, str]]:
        return merges_from_scores(tokens, _needed(data, "scores"))

    def build(names: Mapping[str, str]) -> Tokenizer:
        unknown = tokens[data.get("tokenizer.ggml.unknown_token_id", 0)]
        model = BPE(
            vocab={names.get(token, token): i for i, token in enumerate(tokens)},
            merges=kept_merges(names, merges()),
            unk_token=names.get(unknown, unknown),
            fuse_unk=True,
            byte_fallback=True,
        )
        tokenizer = Tokenizer(model)
        steps: list[normalizers.Normalizer] = [normalizers.Replace(" ", "▁")]
        if data.get("tokenizer.ggml.add_space_prefix", True):
            steps.insert(0, normalizers.Prepend("▁"))
        tokenizer.normalizer = normalizers.Sequence(steps)
        _add_special(tokenizer, data, names)
        return tokenizer

    return build


def merges_from_scores(tokens: list[str], scores: list[float]) -> list[tuple[str, str]]:
    """BPE merges in SentencePiece's order: all splits of each token into two tokens, by the score of the
    token (higher first)."""
    ids = {token: i for i, token in enumerate(tokens)}
    ranked = []
    for i, token in enumerate(tokens):
        for cut in range(1, len(token)):
            left, right = ids.get(token[:cut]), ids.get(token[cut:])
            if left is not None and right is not None:
                ranked.append((-scores[i], i, left, right))
    ranked.sort()
    return [(tokens[left], tokens[right]) for _, _, left, right in ranked]


def _add_special(tokenizer: Tokenizer, data: dict[str, Any], names: Mapping[str, str]) -> None:
    tokens, kinds = data["tokenizer.ggml.tokens"], data.get("tokenizer.ggml.token_type", [])

    def added(wanted: tuple[int, ...], special: bool) -> list[AddedToken]:
        chosen = (token for token, kind in zip(tokens, kinds, strict=False) if kind in wanted)
        return [AddedToken(names.get(t, t), special=special, normalized=False) for t in chosen]

    tokenizer.add_special_tokens(added(_SPECIAL, special=True))
    tokenizer.add_tokens(added((_USER_DEFINED,), special=False))


def pre_tokenizer(pre: str) -> PreTokenizer:
    """The pre-tokenizer of a byte-level BPE model. Raises SetupError for an unknown name."""
    make = _BY_NAME.get(pre)
    if make is None:
        known = ", ".join(sorted(_BY_NAME))
        raise SetupError(
            f"this GGUF file has the unknown pre-tokenizer {pre!r} (known: {known}); use the "
            "model's Hugging Face folder with its tokenizer.json"
        )
    return make()


def can_skip_merges(pre: str) -> bool:
    """True if a word that is a token needs no merges (Llama 3)."""
    return pre in ("llama-bpe", "llama3", "llama-v3")


def _gpt2() -> PreTokenizer:
    return ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm() -> PreTokenizer:
    return Sequence([Digits(individual_digits=True), _gpt2()])


def _words(digits: str) -> Callable[[], PreTokenizer]:
    def make() -> PreTokenizer:
        split = Split(Regex(_WORDS % digits), behavior="isolated")
        return pre_tokenizers.Sequence([split, ByteLevel(add_prefix_space=False, use_regex=False)])

    return make


_BY_NAME: dict[str, Callable[[], PreTokenizer]] = {
    "gpt-2": _gpt2,
    "smollm": _smollm,
    "llama-bpe": _words("{1,3}"),
    "llama3": _words("{1,3}"),
    "llama-v3": _words("{1,3}"),
    "qwen2": _words(""),
    "deepseek-r1-qwen": _words(""),
}
