"""A `Vocabulary` turns text into token ids and back, for one model.

Decoding is defined on bytes: each token is a byte string, empty for special tokens. A text is the
concatenation decoded as UTF-8, with U+FFFD for invalid bytes (the maximal-subpart rule of Unicode 3.9, which
both Python and Hugging Face's decoder follow). So decoding token by token equals decoding the whole.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Iterable
from functools import cached_property

from tokenizers import Tokenizer

from shared.errors import SetupError
from shared.vocab.files import ModelFiles
from shared.vocab.vocab_files import VocabularyParts, gguf_parts, hf_parts, with_other_names

_LOOKS_CONTROL = re.compile(r"<[|｜].+[|｜]>")
_MARKUP = re.compile(r"</?[a-z_]+>")


def load_vocabulary(files: ModelFiles) -> Vocabulary:
    """The vocabulary of a model. Raises SetupError if it is missing or of an unknown family."""
    return Vocabulary(gguf_parts(files.path) if files.is_gguf else hf_parts(files.path))


class Vocabulary:
    """One model's tokens. The encoder is built at its first use."""

    def __init__(self, parts: VocabularyParts) -> None:
        if not parts.tokens:
            raise SetupError("the vocabulary is empty; fetch the model again")
        self._parts = parts
        self.size = len(parts.tokens)
        self.special_ids = parts.special
        self.prefix_ids = parts.prefix_ids
        self.eos_ids = parts.eos_ids
        self.chat_template = parts.chat_template
        self.context_tokens = parts.context_tokens
        self.secret = secrets.token_hex(8)  # of this process; never in an id or an answer

    @cached_property
    def controls(self) -> dict[str, int]:
        """Text and id of the tokens that give a prompt its form, which users must not be able to write:
        control tokens, end tokens, and other added tokens that look like a control token or occur in the chat
        template (fine-tunes do not mark all of theirs)."""
        tokens, template = self._parts.tokens, self.chat_template
        chosen = {*self.special_ids, *self.eos_ids}
        for i in self._parts.added - chosen:
            name = tokens[i].strip()
            if _LOOKS_CONTROL.fullmatch(name) or (name and not name.isalnum() and name in template):
                chosen.add(i)
        return {tokens[i]: i for i in sorted(chosen) if tokens[i]}

    @cached_property
    def markup(self) -> frozenset[str]:
        """The `controls` that a model writes within its answer, such as `<think>` and `</think>`."""
        ends = {self._parts.tokens[i] for i in (*self.special_ids, *self.eos_ids)}
        found = {name for name in self.controls if _MARKUP.fullmatch(name)} - ends
        return frozenset(
            name for name in found if {f"<{name.strip('</>')}>", f"</{name.strip('</>')}>"} <= found
        )

    @property
    def bos_token(self) -> str:
        """Text of the BOS token, "" if there is none."""
        return "" if self._parts.bos_id is None else self._parts.tokens[self._parts.bos_id]

    @property
    def eos_token(self) -> str:
        """Text of the first end token, "" if there is none."""
        return self._parts.tokens[self.eos_ids[0]] if self.eos_ids else ""

    @cached_property
    def digest(self) -> str:
        """Hex digest of all tokens in order: with equal digests equal ids mean equal text."""
        special = ",".join(map(str, sorted(self.special_ids)))
        return hashlib.sha256("\0".join([*self._parts.tokens, special]).encode()).hexdigest()[:32]

    @cached_property
    def token_bytes(self) -> list[bytes]:
        """The bytes of each id; empty for special tokens."""
        table = _byte_level_table if self._parts.byte_level else _sentencepiece_table
        found = table(self._parts.tokens)
        for i in self.special_ids:
            found[i] = b""
        return found

    @property
    def strips_leading_space(self) -> bool:
        """SentencePiece puts a space before the first word; decoding removes it."""
        return not self._parts.byte_level

    @cached_property
    def longest_token_bytes(self) -> int:
        """The length of the longest token's text: a text of n bytes has at least n divided by this tokens."""
        names = (len(self._parts.tokens[i].encode()) for i in self.special_ids)
        return max((*names, *map(len, self.token_bytes)))

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Token ids of `text`, without `prefix_ids`. With `special`, `controls` in the text become their ids;
        without it only their `secret_names` do. Thread-safe after the first use of each form. Raises
        ValueError for a lone surrogate."""
        tokenizer = self._with_controls if special else self._tokenizer
        try:
            # The fastest function of the library, and the one that releases the GIL.
            (encoding,) = tokenizer.encode_batch_fast([text], add_special_tokens=False)
        except TypeError as error:
            raise ValueError("the text holds a lone surrogate") from error
        ids: list[int] = encoding.ids
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`. Raises IndexError for an id outside the vocabulary."""
        table = self.token_bytes
        data = b"".join([table[i] for i in ids])
        return data.removeprefix(b" " if self.strips_leading_space else b"").decode("utf-8", "replace")

    def token_text(self, token: int) -> str:
        """The readable form of one token: its text, or the name of a control token. An id outside the
        vocabulary, possible with a padded output layer, has no text."""
        if token >= self.size:
            return ""
        if token in self.special_ids:
            return self._parts.tokens[token]
        return self.token_bytes[token].decode("utf-8", "replace")

    @cached_property
    def secret_names(self) -> dict[str, str]:
        """A random name for each of `controls`, which no client can write."""
        return {token: f"\ufdd0{self.secret}{i}\ufdd1" for token, i in self.controls.items()}

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        """The tokenizer that reads control tokens in a text as text."""
        return with_other_names(self._with_controls, self.secret_names)

    @cached_property
    def _with_controls(self) -> Tokenizer:
        return self._parts.build()


def _byte_level_table(tokens: list[str]) -> list[bytes]:
    """The inverse of GPT-2's table. A token with a character outside the table is its own text, as in Hugging
    Face's decoder (added tokens may have spaces)."""
    back = {ord(char): byte for byte, char in enumerate(byte_characters())}
    # Other characters below 256 must not pass as bytes: map them out of latin-1's range.
    back |= {code: 0x100 for code in range(256) if code not in back}

    def to_bytes(token: str) -> bytes:
        try:
            return token.translate(back).encode("latin-1")
        except UnicodeEncodeError:
            return token.encode("utf-8")

    return [to_bytes(token) for token in tokens]


def byte_characters() -> list[str]:
    """The printable character that stands for each byte in byte-level BPE (GPT-2)."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("ÿ") + 1)} - {0xAD}
    moved = (code for code in range(256) if code not in printable)
    shifted = {code: chr(256 + i) for i, code in enumerate(moved)}
    return [shifted.get(code, chr(code)) for code in range(256)]


_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _sentencepiece_table(tokens: list[str]) -> list[bytes]:
    def to_bytes(token: str) -> bytes:
        byte = _BYTE_TOKEN.fullmatch(token)
        return bytes.fromhex(byte[1]) if byte else token.replace("▁", " ").encode("utf-8")

    return [to_bytes(token) for token in tokens]
