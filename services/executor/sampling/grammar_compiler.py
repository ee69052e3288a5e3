"""GrammarCompiler compiles grammars on threads of its own. Grammars calls it.

    request ──▶ compiled before, by digest? ──▶ done
            ──▶ the tenant's queue ── tenants in turn ──▶ a thread ──▶ kept

llguidance compiles most grammars in a millisecond and bounds its own work, at most about 2 s for a hostile
pattern; it holds no lock of Python meanwhile. The first grammar starts a thread; more start, up to
COMPILERS, while a tenant waits and all are busy. A tenant has at most one thread, so slow grammars delay
only their own tenant. Refusals are kept, too. The end waits for no thread.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import SimpleNamespace

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from shared.answer_formats import grammar
from shared.errors import EngineError
from shared.vocab.vocabulary import Vocabulary

COMPILERS = 2
COMPILED = 64  # compiled grammars kept
MAX_WHY_CHARS = 120  # 256 of them fit into a result
# Within a string of bounded length, tokens may follow that are short enough for what is left of it: these
# sets are made once. With llguidance's own slices, of 10 and 30, the slowest masks take twice as long.
_SLICES = [
    r"[\x20\x0A\x0D\x09]+",
    *(rf'[^"\\\x00-\x1F\x7F]{{1,{length}}}' for length in (1, 2, 3, 4, 5, 6, 7, 8, 10, 14, 30)),
    r'[^"\\\x00-\x1F\x7F]+',
]
_CONTROL = b"\xff"  # before the name of a token that is no text, for llguidance


class GrammarRefusedError(Exception):
    """The grammar itself cannot be compiled: the message is for the client."""


@dataclass(slots=True, eq=False)
class Compilation:
    """One grammar, for all slots with this text. `result` is a matcher at its start, which slots copy, or
    raises GrammarRefusedError or EngineError."""

    text: str
    result: Future[LLMatcher] = field(default_factory=Future)
    wanted: int = 0  # open slots with it
    took_us: int = 0


class GrammarCompiler:
    """The compiler of one engine. The device thread calls `request`, `release` and `close`."""

    def __init__(self, load_vocabulary: Callable[[], Vocabulary], vocab: int) -> None:
        """`vocab` is the width of the logits."""
        self._load_vocabulary = load_vocabulary
        self._vocab = vocab
        self._views: dict[frozenset[str], LLTokenizer] = {}  # by the control tokens that have a text
        self._making = threading.Lock()  # guards `_views`
        self.ends = frozenset[int]()  # tokens that end an answer; known once a grammar is compiled
        self._changed = threading.Condition()  # guards the fields below
        self._cache: OrderedDict[bytes, Compilation] = OrderedDict()
        self._queues: OrderedDict[str, deque[Compilation]] = OrderedDict()  # by tenant, next turn first
        self._busy: set[str] = set()  # tenants with a thread
        self._threads: list[threading.Thread] = []
        self._closed = False

    def request(self, text: str, tenant: str) -> Compilation:
        """The compilation of a grammar, for one more slot."""
        key = hashlib.blake2b(text.encode(), digest_size=32).digest()
        with self._changed:
            found = self._cache.get(key)
            if found is None or found.result.cancelled():
                found = self._cache[key] = Compilation(text)
                self._queues.setdefault(tenant, deque()).append(found)
                self._start_threads()
            found.wanted += 1
            self._cache.move_to_end(key)
            self._trim()
        return found

    def release(self, compilation: Compilation) -> None:
        """A slot with this grammar has closed. Without slots a compilation does not start."""
        with self._changed:
            compilation.wanted -= 1

    def close(self) -> None:
        """Start no other compilation. Waits for none."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _start_threads(self) -> None:
        """Wake a thread for a waiting tenant without one, or start one."""
        waits = not self._closed and any(tenant not in self._busy for tenant in self._queues)
        if waits and len(self._threads) == len(self._busy) < COMPILERS:
            thread = threading.Thread(target=self._run, name="grammars", daemon=True)
            self._threads.append(thread)
            thread.start()
        self._changed.notify_all()

    def _trim(self) -> None:
        """Drop the least recently used compilations that have ended; slots keep their own reference."""
        for key, one in list(self._cache.items()):
            if len(self._cache) <= COMPILED:
                return
            if one.result.done():
                del self._cache[key]

    def _run(self) -> None:
        while (turn := self._next()) is not None:
            tenant, compilation = turn
            began_ns = time.monotonic_ns()
            found: LLMatcher | None = None
            error: Exception = EngineError("the grammar was not compiled")
            try:
                found = self._compile(compilation.text)
            except Exception as raised:  # noqa: BLE001 - it fails the requests with this grammar only
                error = raised
            compilation.took_us = (time.monotonic_ns() - began_ns) // 1000
            with self._changed:
                self._busy.discard(tenant)
                self._changed.notify_all()
            if found is not None:
                compilation.result.set_result(found)
                continue
            if not isinstance(error, GrammarRefusedError):
                self._forget(compilation)
            compilation.result.set_exception(error)

    def _next(self) -> tuple[str, Compilation] | None:
        """The next compilation in turn, of a tenant without a thread; None at the end."""
        with self._changed:
            while not self._closed:
                tenant = next((tenant for tenant in self._queues if tenant not in self._busy), None)
                if tenant is None:
                    self._changed.wait()
                    continue
                queue = self._queues.pop(tenant)
                compilation = queue.popleft()
                if queue:
                    self._queues[tenant] = queue  # after the other tenants
                if compilation.wanted > 0:
                    self._busy.add(tenant)
                    self._start_threads()
                    return tenant, compilation
                compilation.result.cancel()
        return None

    def _forget(self, compilation: Compilation) -> None:
        with self._changed:
            for key in [key for key, one in self._cache.items() if one is compilation]:
                del self._cache[key]

    def _compile(self, text: str) -> LLMatcher:
        """Called on a compiler thread. Raises GrammarRefusedError."""
        try:
            source, markers = grammar.unpacked(text)
        except (ValueError, KeyError, TypeError) as error:
            raise GrammarRefusedError(f"grammar: {error!s:.{MAX_WHY_CHARS}}") from error
        matcher = LLMatcher(self._view(markers), source, log_level=0, limits=grammar.limits())
        if matcher.is_error():
            raise GrammarRefusedError(f"grammar: {first_line(matcher.get_error())}"[:MAX_WHY_CHARS])
        return matcher

    def _view(self, markers: frozenset[str]) -> LLTokenizer:
        """The vocabulary as grammars with these markers see it."""
        with self._making:
            if markers not in self._views:
                vocabulary = self._load_vocabulary()
                texts = vocabulary.bytes_with(markers)[: self._vocab]  # weights may have fewer tokens
                texts += [b""] * (self._vocab - len(texts))
                ends = [i for i in vocabulary.eos_ids if i < self._vocab]
                self.ends = frozenset(ends)
                self._views[markers] = _tokenizer(texts, ends)
            return self._views[markers]


def _tokenizer(texts: Sequence[bytes], ends: list[int]) -> LLTokenizer:
    """llguidance's view of tokens with these texts; a token without a text is a control token."""
    silent = [i for i, text in enumerate(texts) if not text]
    tokens = [text or _CONTROL + b"<%d>" % i for i, text in enumerate(texts)]

    class Words(SimpleNamespace):
        def __call__(self, text: bytes) -> list[int]:
            """Grammars with tokens of their own would need it; ours have texts alone."""
            return []

    words = Words(eos_token_id=ends[0], bos_token_id=None, tokens=tokens, special_token_ids=silent)
    return LLTokenizer(TokenizerWrapper(words), n_vocab=len(texts), eos_token=ends, slices=_SLICES)


def first_line(text: str) -> str:
    """The first line of an error of llguidance, whose later lines are its own grammar."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "")
