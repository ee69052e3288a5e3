"""The vocabulary in a Hugging Face folder (tokenizer.json and its companions), as VocabularyParts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from shared.errors import SetupError
from shared.vocabulary_parts import VocabularyParts


def hf_parts(folder: Path) -> VocabularyParts:
    """Read the vocabulary of a model folder. Raises SetupError when tokenizer.json is missing or is
    of a family that cannot be decoded token by token."""
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
        build=lambda: tokenizer,
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
