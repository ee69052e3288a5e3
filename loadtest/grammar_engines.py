"""Two grammar engines behind one face, for loadtest.grammars: the executor's, and its former one."""

from __future__ import annotations

import importlib
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any, Protocol

import numpy as np

LIMIT_S = 20.0  # for the compilation of one grammar
MASKS = 120  # of one text that are measured


class RefusedError(Exception):
    """The schema is refused before an answer begins."""


class Engine(Protocol):
    """A grammar engine with the default model's vocabulary. Compiled grammars and matchers are its own."""

    def prepared(self, schema: Any) -> str:
        """The source that the tokenizer sends. Raises RefusedError."""

    def compiled(self, source: str) -> Any:
        """Raises RefusedError."""

    def started(self, compiled: Any) -> Any:
        """A matcher for one row."""

    def mask(self, matcher: Any) -> Any:
        """The tokens that may follow, one bit each."""

    def accept(self, matcher: Any, token: int) -> bool: ...

    def ended(self, matcher: Any) -> bool:
        """Whether the answer may end here."""

    def tokens(self, text: str) -> list[int]: ...

    def walk(self, compiled: Any, text: str, masks: list[float]) -> bool:
        """Whether the whole text is accepted. Adds µs of the masks to `masks`."""

    def random_walk(self, compiled: Any, steps: int) -> list[float]:
        """µs of the masks of a text at random."""


class _Engine:
    def __init__(self) -> None:
        """Load the default model's vocabulary."""
        from support.default_model import model_path

        files = importlib.import_module("shared.vocab.files").ModelFiles("m", model_path())
        loaded = importlib.import_module("shared.vocab.vocabulary").load_vocabulary(files)
        self.vocabulary: Any = loaded
        self.size: int = loaded.size

    def tokens(self, text: str) -> list[int]:
        ids: list[int] = self.vocabulary.encode(text)
        return ids

    def walk(self: Any, compiled: Any, text: str, masks: list[float]) -> bool:
        matcher = self.started(compiled)
        for k, token in enumerate(self.tokens(text)):
            if k < MASKS:
                began = time.perf_counter()
                self.mask(matcher)
                masks.append((time.perf_counter() - began) * 1e6)
            if not self.accept(matcher, token):
                return False
        return bool(self.ended(matcher))

    def random_walk(self: Any, compiled: Any, steps: int) -> list[float]:
        matcher, chance, masks = self.started(compiled), random.Random(0), []
        for _ in range(steps):
            began = time.perf_counter()
            words = self.mask(matcher)
            masks.append((time.perf_counter() - began) * 1e6)
            bits = np.unpackbits(np.asarray(words).view(np.uint8).reshape(-1), bitorder="little")
            allowed = [int(i) for i in np.flatnonzero(bits) if i not in self.vocabulary.eos_ids]
            if not allowed or not self.accept(matcher, chance.choice(allowed)):
                break
        return masks


class LlGuidance(_Engine):
    """As services/executor/sampling/grammar.py and grammar.py use it."""

    def __init__(self) -> None:
        super().__init__()
        from services.executor.sampling.grammar import _tokenizer

        texts = self.vocabulary.bytes_with(frozenset())
        self._words = _tokenizer(texts, list(self.vocabulary.eos_ids))
        self._allowed = np.zeros(-(-self.size // 32), np.int32)

    def prepared(self, schema: Any) -> str:
        from services.tokenizer.structured_output import engine_refuses, followed
        from shared.answer_formats import grammar
        from shared.errors import BadRequest

        try:
            source = grammar.whole(
                None, grammar.json_rules("text", followed(schema, "schema")), thinking=False
            )
        except BadRequest as error:
            raise RefusedError(str(error)) from error
        if why := engine_refuses(source):
            raise RefusedError(why)
        return source

    def compiled(self, source: str) -> Any:
        from llguidance import LLMatcher

        from shared.answer_formats import grammar

        matcher = LLMatcher(self._words, source, log_level=0, limits=grammar.limits())
        if matcher.is_error():
            raise RefusedError(matcher.get_error())
        return matcher

    def started(self, compiled: Any) -> Any:
        return compiled.deep_copy()

    def mask(self, matcher: Any) -> Any:
        matcher.unsafe_compute_mask_ptr(self._allowed.ctypes.data, self._allowed.nbytes)
        if matcher.is_error():
            raise RefusedError(matcher.get_error())
        return self._allowed

    def accept(self, matcher: Any, token: int) -> bool:
        return bool(matcher.try_consume_tokens([token]))

    def ended(self, matcher: Any) -> bool:
        return bool(matcher.is_accepting())


class XGrammar(_Engine):
    """As commit d0d851d6 used it: `resolved`, then compile_json_schema without free white space."""

    def __init__(self) -> None:
        super().__init__()
        self._library: Any = importlib.import_module("xgrammar")
        kinds = self._library
        before = importlib.import_module("services.executor.sampling.grammar")
        texts = [
            b"" if before._CONTROL.intersection(text) else text
            for text in self.vocabulary.bytes_with(frozenset())
        ]
        info = kinds.TokenizerInfo(
            texts,
            vocab_type=kinds.VocabType.RAW,
            vocab_size=self.size,
            stop_token_ids=list(self.vocabulary.eos_ids),
        )
        self._compiler = kinds.GrammarCompiler(info, max_threads=1, cache_limit_bytes=64 << 20)
        self._allowed = kinds.allocate_token_bitmask(1, self.size)

    def prepared(self, schema: Any) -> str:
        former = importlib.import_module("services.tokenizer.structured_output")
        try:
            return json.dumps(former.resolved(schema, "schema"), ensure_ascii=False)
        except importlib.import_module("shared.errors").BadRequest as error:
            raise RefusedError(str(error)) from error

    def compiled(self, source: str) -> Any:
        try:
            return self._compiler.compile_json_schema(source, any_whitespace=False)
        except Exception as error:  # it raises many types
            raise RefusedError(str(error)) from error

    def started(self, compiled: Any) -> Any:
        return self._library.GrammarMatcher(compiled)

    def mask(self, matcher: Any) -> Any:
        matcher.fill_next_token_bitmask(self._allowed, 0)
        return self._allowed.numpy()

    def accept(self, matcher: Any, token: int) -> bool:
        return not matcher.is_terminated() and bool(matcher.accept_token(token))

    def ended(self, matcher: Any) -> bool:
        return bool(matcher.is_completed())


_ENGINES: dict[str, Engine] = {}


def engine_of(name: str, old: Path | None) -> Engine:
    """The engine, loaded once. `old`: the checkout with what XGrammar's schemas were prepared by."""
    if name not in _ENGINES:
        if name == "xgrammar":
            if old is None:
                sys.exit("--engine xgrammar takes --old: a checkout of commit d0d851d6")
            sys.path.insert(0, str(old))
            try:
                importlib.import_module("xgrammar")
            except ImportError:
                sys.exit("XGrammar is not installed: pip install xgrammar==0.2.8")
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads would not live in a fork
        found: Engine = LlGuidance() if name == "llguidance" else XGrammar()
        found.walk(found.compiled(found.prepared({"type": "integer"})), "1", [])  # all is loaded
        _ENGINES[name] = found
    return _ENGINES[name]
