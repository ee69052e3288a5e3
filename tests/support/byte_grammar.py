"""Grammars over a vocabulary of single bytes: whether they accept a text."""

from __future__ import annotations

from types import SimpleNamespace

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from shared.answer_formats import grammar

END = 256


class _Bytes(SimpleNamespace):
    def __call__(self, text: bytes) -> list[int]:
        return list(text)


_WORDS = _Bytes(
    eos_token_id=END,
    bos_token_id=None,
    tokens=[*(bytes([i]) for i in range(END)), b"\xff<end>"],
    special_token_ids=[END],
)
TOKENIZER = LLTokenizer(TokenizerWrapper(_WORDS), n_vocab=END + 1, slices=[])


def matcher(source: str) -> LLMatcher:
    """A matcher at the start of a grammar of `grammar.whole`."""
    found = LLMatcher(TOKENIZER, source, log_level=0, limits=grammar.limits())
    assert not found.is_error(), found.get_error()
    return found


def accepts(source: str, text: str) -> bool:
    """Whether the whole text follows the grammar, and may end."""
    started = matcher(source)
    data = list(text.encode())
    return started.try_consume_tokens(data) == len(data) and started.is_accepting()
