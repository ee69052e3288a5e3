"""A vocabulary has the same VocabularyParts, whether a Hugging Face folder or a GGUF file holds it.

Of GGUF files two families are read: byte-level BPE (`gpt2`: GPT-2, Llama 3, Qwen, SmolLM) and SentencePiece
BPE with byte fallback (`llama`: Llama 2, Mistral), whose merges follow from the tokens' scores. How text is
cut into words before BPE merges goes by llama.cpp's name in `tokenizer.ggml.pre`; each entry of _BY_NAME is
the pipeline of the model's own tokenizer.json (llama.cpp's `llama-vocab.cpp` holds the same patterns).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence, Split

from shared.errors import SetupError
from shared.vocab.gguf import read_metadata

_CONTROL, _USER_DEFINED = 3, 4  # llama.cpp's token types
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabularyParts:
    """`tokens[i]` is the stored form of token i: byte-level BPE writes each byte as one printable
    character (GPT-2's table), SentencePiece writes a space as U+2581 and a lone byte as `<0xAB>`."""

    tokens: list[str]  # "" for an id that has no token
    special: frozenset[int]  # control tokens: they have no text
    byte_level: bool  # else SentencePiece with byte fallback
    build: Callable[[], Tokenizer]  # a new one each time; slow (0.2 s), and a detokenizer never needs it
    prefix_ids: tuple[int, ...]  # put before a plain completion prompt: bos, or nothing
    bos_id: int | None
    eos_ids: tuple[int, ...]
    chat_template: str  # jinja source, "" when the model has none
    context_tokens: int  # longest sequence the model was made for, 0 when unknown


def hf_parts(folder: Path) -> VocabularyParts:
    """Read the vocabulary of a model folder (tokenizer.json and its companions). Raises SetupError when
    tokenizer.json is missing or is of a family that cannot be decoded token by token."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise SetupError(f"{folder} has no tokenizer.json; Headrace reads no other tokenizer format there")
    source = file.read_text("utf-8")
    try:
        tokenizer = Tokenizer.from_str(source)
    except Exception as error:  # the library raises nothing narrower
        raise SetupError(f"{file} is not a tokenizer ({error}); fetch the model again") from error
    config = _json(folder / "tokenizer_config.json")
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    tokens = [""] * (max(vocab.values()) + 1)
    for token, i in vocab.items():
        tokens[i] = token
    added = tokenizer.get_added_tokens_decoder()
    bos = vocab.get(_text_of(config.get("bos_token")))
    return VocabularyParts(
        tokens=tokens,
        special=frozenset(i for i, token in added.items() if token.special),
        byte_level=_is_byte_level(json.loads(source), file),
        build=lambda: Tokenizer.from_str(source),
        prefix_ids=tuple(tokenizer.encode("").ids[:1]),
        bos_id=bos,
        eos_ids=_eos_ids(folder, config, vocab),
        chat_template=_chat_template(folder, config),
        context_tokens=int(_json(folder / "config.json").get("max_position_embeddings", 0)),
    )


def _is_byte_level(source: dict[str, Any], file: Path) -> bool:
    decoder = source.get("decoder") or {}
    kinds = {step.get("type") for step in [decoder, *decoder.get("decoders", [])]}
    if not kinds & {"ByteLevel", "ByteFallback"}:
        raise SetupError(
            f"{file} decodes with {sorted(map(str, kinds))}; Headrace streams byte-level BPE and "
            "SentencePiece with byte fallback only"
        )
    return "ByteLevel" in kinds


def _eos_ids(folder: Path, config: dict[str, Any], vocab: dict[str, int]) -> tuple[int, ...]:
    """The end ids of generation_config.json (a chat model may have several), and the tokenizer's."""
    listed = _json(folder / "generation_config.json").get("eos_token_id")
    ids = listed if isinstance(listed, list) else [listed]
    ids.append(vocab.get(_text_of(config.get("eos_token"))))
    return tuple(dict.fromkeys(i for i in ids if isinstance(i, int)))


def _chat_template(folder: Path, config: dict[str, Any]) -> str:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text("utf-8")
    template = config.get("chat_template") or ""
    if isinstance(template, list):  # several named ones
        template = {entry["name"]: entry["template"] for entry in template}.get("default", "")
    return str(template)


def _text_of(token: object) -> str:
    """Special tokens stand as text or as an object with the text inside."""
    return str(token.get("content", "")) if isinstance(token, dict) else str(token or "")


def _json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        loaded = json.loads(file.read_text("utf-8"))
    except ValueError as error:
        raise SetupError(f"{file} is not valid JSON ({error}); fetch the model again") from error
    return dict(loaded)


def gguf_parts(path: Path) -> VocabularyParts:
    """Read the vocabulary of a GGUF file's metadata. Raises SetupError for a family that is not supported."""
    data = read_metadata(path)
    builders: dict[str, Callable[[dict[str, Any]], Callable[[], Tokenizer]]] = {
        "gpt2": _byte_level,
        "llama": _sentencepiece,
    }
    model = data.get("tokenizer.ggml.model", "")
    if model not in builders:
        raise SetupError(f"{path} has a {model!r} vocabulary; Headrace reads {' and '.join(builders)}")
    tokens: list[str] = data["tokenizer.ggml.tokens"]
    kinds: list[int] = data.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    bos = data.get("tokenizer.ggml.bos_token_id")
    ends = [data[f"tokenizer.ggml.{key}"] for key in _END_KEYS if f"tokenizer.ggml.{key}" in data]
    add_bos = data.get("tokenizer.ggml.add_bos_token", model == "llama")
    return VocabularyParts(
        tokens=tokens,
        special=frozenset(i for i, kind in enumerate(kinds) if kind == _CONTROL),
        byte_level=model == "gpt2",
        build=builders[model](data),
        prefix_ids=(bos,) if add_bos and bos is not None else (),
        bos_id=bos,
        eos_ids=tuple(dict.fromkeys(ends)),
        chat_template=data.get("tokenizer.chat_template", ""),
        context_tokens=int(data.get(f"{data.get('general.architecture')}.context_length", 0)),
    )


def _byte_level(data: dict[str, Any]) -> Callable[[], Tokenizer]:
    pre = data.get("tokenizer.ggml.pre", "")
    pipeline = pre_tokenizer(pre)  # now, so that an unknown name fails at start

    def build() -> Tokenizer:
        tokens, merges = data["tokenizer.ggml.tokens"], data["tokenizer.ggml.merges"]
        model = BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=[tuple(merge.split(" ", 1)) for merge in merges],
            ignore_merges=skips_merges_for_whole_words(pre),
        )
        tokenizer = Tokenizer(model)
        tokenizer.pre_tokenizer = pipeline
        if "qwen" in pre:
            tokenizer.normalizer = normalizers.NFC()
        tokenizer.decoder = decoders.ByteLevel()
        _add_special(tokenizer, data)
        return tokenizer

    return build


def _sentencepiece(data: dict[str, Any]) -> Callable[[], Tokenizer]:
    def build() -> Tokenizer:
        tokens, scores = data["tokenizer.ggml.tokens"], data["tokenizer.ggml.scores"]
        unknown = tokens[data.get("tokenizer.ggml.unknown_token_id", 0)]
        vocab = {token: i for i, token in enumerate(tokens)}
        model = BPE(
            vocab=vocab,
            merges=merges_from_scores(tokens, scores),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
        tokenizer = Tokenizer(model)
        steps: list[normalizers.Normalizer] = [normalizers.Replace(" ", "▁")]
        if data.get("tokenizer.ggml.add_space_prefix", True):
            steps.insert(0, normalizers.Prepend("▁"))
        tokenizer.normalizer = normalizers.Sequence(steps)
        _add_special(tokenizer, data)
        return tokenizer

    return build


def merges_from_scores(tokens: list[str], scores: list[float]) -> list[tuple[str, str]]:
    """BPE merges in the order SentencePiece would do them: each token's splits into two tokens, by
    the score of the whole (higher first)."""
    ids = {token: i for i, token in enumerate(tokens)}
    ranked = []
    for i, token in enumerate(tokens):
        for cut in range(1, len(token)):
            left, right = ids.get(token[:cut]), ids.get(token[cut:])
            if left is not None and right is not None:
                ranked.append((-scores[i], i, left, right))
    ranked.sort()
    return [(tokens[left], tokens[right]) for _, _, left, right in ranked]


def _add_special(tokenizer: Tokenizer, data: dict[str, Any]) -> None:
    tokens, kinds = data["tokenizer.ggml.tokens"], data.get("tokenizer.ggml.token_type", [])

    def added(wanted: int, special: bool) -> list[AddedToken]:
        chosen = (token for token, kind in zip(tokens, kinds, strict=False) if kind == wanted)
        return [AddedToken(token, special=special, normalized=False) for token in chosen]

    tokenizer.add_special_tokens(added(_CONTROL, special=True))
    tokenizer.add_tokens(added(_USER_DEFINED, special=False))


def pre_tokenizer(pre: str) -> PreTokenizer:
    """The pre-tokenizer of a byte-level BPE model. Raises SetupError for a name not known here."""
    make = _BY_NAME.get(pre)
    if make is None:
        known = ", ".join(sorted(_BY_NAME))
        raise SetupError(
            f"this GGUF file asks for the pre-tokenizer {pre!r}, which Headrace does not know "
            f"(it knows {known}); use the model's Hugging Face folder with its tokenizer.json"
        )
    return make()


def skips_merges_for_whole_words(pre: str) -> bool:
    """True where a word that is itself a token is taken without merging (Llama 3)."""
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
