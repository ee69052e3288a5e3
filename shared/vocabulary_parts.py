"""What a vocabulary is made of, whichever file it was read from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tokenizers import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabularyParts:
    """`tokens[i]` is the stored form of token i: byte-level BPE writes each byte as one printable
    character (GPT-2's table), SentencePiece writes a space as U+2581 and a lone byte as `<0xAB>`."""

    tokens: list[str]  # "" for an id that has no token
    special: frozenset[int]  # control tokens: they have no text
    byte_level: bool  # else SentencePiece with byte fallback
    build: Callable[[], Tokenizer]  # slow (0.2 s), and a detokenizer never needs it
    prefix_ids: tuple[int, ...]  # put before a plain completion prompt: bos, or nothing
    bos_id: int | None
    eos_ids: tuple[int, ...]
    chat_template: str  # jinja source, "" when the model has none
    context_tokens: int  # longest sequence the model was made for, 0 when unknown
