"""The executor's grammar engine with the default model's vocabulary, for loadtest.grammars."""

from __future__ import annotations

import os
import random
import time
from functools import cache
from typing import Any

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from services.executor.sampling.grammar_matchers import _tokenizer
from services.tokenizer.structured_output import engine_refuses, followed
from shared.answer_formats import grammar
from shared.config import load
from shared.errors import BadRequest
from shared.vocab.files import DEFAULT_MODEL, resolve
from shared.vocab.vocabulary import load_vocabulary

LIMIT_S = 20.0  # for the compilation of one grammar
MASKS = 120  # of one text that are measured


class RefusedError(Exception):
    """The schema is refused before an answer begins."""


class Engine:
    """As services/executor/sampling/grammar_matchers.py uses the library."""

    def __init__(self) -> None:
        self.vocabulary = load_vocabulary(resolve(DEFAULT_MODEL, load().settings.cache_dir))
        texts = self.vocabulary.bytes_with(frozenset())
        self._words = _tokenizer(texts, list(self.vocabulary.eos_ids))
        self._allowed = np.zeros(-(-self.vocabulary.size // 32), np.int32)

    def prepared(self, schema: Any) -> str:
        """The source that the tokenizer sends. Raises RefusedError."""
        try:
            rules = grammar.json_rules("text", followed(schema, "schema"))
            source = grammar.whole(None, rules, thinking=False)
        except BadRequest as error:
            raise RefusedError(str(error)) from error
        if why := engine_refuses(source):
            raise RefusedError(why)
        return source

    def compiled(self, source: str) -> Any:
        """A matcher at its start. Raises RefusedError."""
        matcher = LLMatcher(self._words, source, log_level=0, limits=grammar.limits())
        if matcher.is_error():
            raise RefusedError(matcher.get_error())
        return matcher

    def mask(self, matcher: Any) -> NDArray[np.int32]:
        """The tokens that may follow, one bit each."""
        matcher.unsafe_compute_mask_ptr(self._allowed.ctypes.data, self._allowed.nbytes)
        if matcher.is_error():
            raise RefusedError(matcher.get_error())
        return self._allowed

    def accept(self, matcher: Any, token: int) -> bool:
        """Go on by a token, if the grammar allows it."""
        return bool(matcher.try_consume_tokens([token]))

    def walk(self, compiled: Any, text: str, masks: list[float]) -> bool:
        """Whether the whole text is accepted. Adds µs of the masks to `masks`."""
        matcher = compiled.deep_copy()
        for k, token in enumerate(self.vocabulary.encode(text)):
            if k < MASKS:
                began = time.perf_counter()
                self.mask(matcher)
                masks.append((time.perf_counter() - began) * 1e6)
            if not self.accept(matcher, token):
                return False
        return bool(matcher.is_accepting())

    def random_walk(self, compiled: Any, steps: int) -> list[float]:
        """µs of the masks of a text at random."""
        matcher, chance, masks = compiled.deep_copy(), random.Random(0), []
        for _ in range(steps):
            began = time.perf_counter()
            words = self.mask(matcher)
            masks.append((time.perf_counter() - began) * 1e6)
            bits = np.unpackbits(words.view(np.uint8), bitorder="little")
            allowed = [int(i) for i in np.flatnonzero(bits) if i not in self.vocabulary.eos_ids]
            if not allowed or not self.accept(matcher, chance.choice(allowed)):
                break
        return masks


@cache
def engine() -> Engine:
    """The engine, loaded once."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads would not live in a fork
    found = Engine()
    found.walk(found.compiled(found.prepared({"type": "integer"})), "1", [])  # all is loaded
    return found
