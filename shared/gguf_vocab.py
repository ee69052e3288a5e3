"""The vocabulary in a GGUF file's metadata, as VocabularyParts.

Two families: byte-level BPE (`gpt2`: GPT-2, Llama 3, Qwen, SmolLM) and SentencePiece BPE with byte
fallback (`llama`: Llama 2, Mistral), whose merges follow from the tokens' scores.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, normalizers
from tokenizers.models import BPE

from shared.errors import SetupError
from shared.gguf_metadata import read_metadata
from shared.pretokenizers import pre_tokenizer, skips_merges_for_whole_words
from shared.vocabulary_parts import VocabularyParts

_CONTROL, _USER_DEFINED = 3, 4  # llama.cpp's token types
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


def gguf_parts(path: Path) -> VocabularyParts:
    """Read the vocabulary of a GGUF file. Raises SetupError for a family that is not supported."""
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
