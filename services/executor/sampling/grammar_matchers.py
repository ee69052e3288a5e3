"""Structured output: a slot's grammar restricts which tokens may follow. grammar.py finds it by its table.

    SlotOpen ──▶ compile on a thread, equal grammars once ──▶ a matcher for each slot
    refused  ──▶ the matcher accepts the slot's new tokens, then the chosen one if it may follow
    mask     ──▶ the matcher accepts the slot's new tokens; the logits of forbidden tokens become -inf
                 (on a GPU in the kernel that chooses, by `write_masks`)

A matcher needs the token before, which is known here once it is sampled. So these rows, unlike rows with
processors, may be planned while the step before runs (run-ahead). The first token waits for the compilation:
the scheduler plans the row after GrammarReady. Source: https://github.com/guidance-ai/llguidance.

GrammarCompiler compiles grammars on threads of its own. CompiledGrammars calls it.

    request ──▶ compiled before, by digest? ──▶ done
            ──▶ the tenant's queue ── tenants in turn ──▶ a thread ──▶ kept

llguidance compiles most grammars in a millisecond and bounds its own work, at most about 2 s for a hostile
pattern; it holds no lock of Python meanwhile. The first grammar starts a thread; more start, up to
COMPILERS, while a tenant waits and all are busy. A tenant has at most one thread, so slow grammars delay
only their own tenant. Refusals are kept, too. The end waits for no thread.
"""

from __future__ import annotations

import hashlib
import re
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotInTime
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from numpy.typing import NDArray
from torch import Tensor

from services.executor.engine import ReportGrammar, ignore_grammar_news
from services.executor.sampling.grammar import HostWork, Tokens
from services.executor.sampling.sampler import Sampler
from shared.answer_formats import grammar
from shared.errors import EngineError
from shared.messages import ROW_REFUSED, GrammarFailed, GrammarReady, SlotOpen
from shared.vocab.vocabulary import Vocabulary

NAME = re.compile(r'[{,](\s*)"[^"]*":')  # of an object, with the white space before it
QUOTE = ' "'  # begins a name if none is known
NEAR = 48  # tokens in which the last name lies
GLUES = (': "', ": ")  # between a name and its value, as most models write them
_WORD_BITS = 32
_NONE = -1
COMPILE_S = 20.0  # a row waits so long for its grammar; the scheduler plans it when it is compiled
_DEAD_END = "the grammar goes on with a text that no token of the model has: allow another one there"


@dataclass(slots=True)
class _Row:
    """The grammar of one slot."""

    compilation: Compilation
    taken: int  # tokens of the slot that the matcher has accepted, counted with the prompt
    matcher: LLMatcher | None = None
    ended: bool = False  # its last token is an end token, which the matcher does not get
    ahead: int = _NONE  # accepted beyond `taken`: a chosen token, perhaps not recorded yet


class CompiledGrammars:
    """See services.executor.sampling.grammar.Grammars; by llguidance."""

    def __init__(
        self, load: Callable[[], Vocabulary], vocab: int, report: ReportGrammar = ignore_grammar_news
    ) -> None:
        self._compiler, self._report = GrammarCompiler(load, vocab), report
        self._rows: dict[int, _Row] = {}
        self._vocab, self._words = vocab, -(-vocab // _WORD_BITS)

    def open(self, opened: SlotOpen) -> None:
        self.close(opened.slot)
        if opened.grammar:
            compilation = self._compiler.request(opened.grammar, opened.tenant)
            row = self._rows[opened.slot] = _Row(compilation, opened.prompt_tokens)
            compilation.result.add_done_callback(lambda _: self._on_ended(opened, row))

    def close(self, slot: int) -> None:
        row = self._rows.pop(slot, None)
        if row is not None:
            self._compiler.release(row.compilation)

    def end(self) -> None:
        self._compiler.close()

    def rows_of(self, slots: Sequence[int]) -> list[int]:
        return [i for i, slot in enumerate(slots) if slot in self._rows] if self._rows else []

    def _on_ended(self, opened: SlotOpen, row: _Row) -> None:
        if self._rows.get(opened.slot) is not row or row.compilation.result.cancelled():
            return
        slot, generation = opened.slot, opened.generation
        error = row.compilation.result.exception()
        if isinstance(error, GrammarRefusedError):
            self._report(GrammarFailed(slot=slot, generation=generation, message=str(error)))
        else:  # any other error becomes a row error, and the next slot compiles anew
            took_us = 0 if error else max(row.compilation.took_us, 1)
            self._report(GrammarReady(slot=slot, generation=generation, compile_us=took_us))

    def mask(
        self, logits: Tensor, rows: Sequence[int], slots: Sequence[int], tokens: Tokens
    ) -> dict[int, str]:
        """Forbid in place the tokens that may not follow, in these rows of `logits` `[rows, vocab]`; row i
        belongs to `slots[i]`. Returns why rows failed, by index. On a CPU."""
        allowed = np.empty((len(rows), self._words), dtype=np.int32)
        failures = self.write_masks(allowed, {row: k for k, row in enumerate(rows)}, slots, tokens)
        host, vocab = logits.numpy(), logits.shape[1]
        for row, words in zip(rows, allowed.view(np.uint8), strict=True):
            bits = np.unpackbits(words, count=vocab, bitorder="little")
            np.copyto(host[row], -np.inf, where=bits == 0)  # a third of the time of masked_fill_
        return failures

    def write_masks(
        self, masks: NDArray[np.int32], places: dict[int, int], slots: Sequence[int], tokens: Tokens
    ) -> dict[int, str]:
        begin, row_bytes = masks.ctypes.data, self._words * masks.itemsize
        masks[[*places.values()]] = -1
        ready: dict[int, LLMatcher] = {}

        def accept(row: int) -> None:
            state = self._rows[slots[row]]
            matcher = self._accept(state, tokens(slots[row]))
            if not state.ended:  # else the plan was made before the sequence's end was known
                ready[row] = matcher

        def check(row: int) -> None:
            if ready[row].is_error():
                why = f"grammar: {first_line(ready[row].get_error())}"
                raise GrammarRefusedError(why[:MAX_WHY_CHARS])
            if not masks[places[row], : self._words].any():
                raise GrammarRefusedError(_DEAD_END)

        failures = _each([*places], accept)
        for row, matcher in ready.items():  # on llguidance's threads 32 masks took 1.3 ms, so 0.2
            matcher.unsafe_compute_mask_ptr(begin + places[row] * masks.strides[0], row_bytes)
        return failures | _each(list(ready), check)

    def refused(
        self, ids: Sequence[int], rows: Sequence[int], slots: Sequence[int], tokens: Tokens
    ) -> tuple[list[int], dict[int, str]]:
        """The rows among `rows` with a token `ids[row]` that may not follow; and why rows failed, by
        index."""
        again: list[int] = []

        def accept(row: int) -> None:
            slot, token = slots[row], ids[row]
            state = self._rows[slot]
            matcher = self._accept(state, tokens(slot))
            if state.ended:
                return
            ends = self._compiler.ends
            if matcher.is_accepting() if token in ends else matcher.try_consume_tokens([token]):
                state.ahead = token
            else:
                again.append(row)

        failures = _each(rows, accept)
        return again, failures

    def forced(self, tokens: Tokens, slot: int, most: int) -> Sequence[int]:
        """The text that the grammar forces, as tokens; around it white space and quotes as the answer has so
        far, or as most models write them."""
        row = self._rows.get(slot)
        if row is None or not row.compilation.result.done() or row.compilation.result.exception():
            return ()
        try:
            matcher = self._accept(row, tokens(slot))
        except EngineError:
            return ()  # the row fails where it is sampled
        if row.ended or (vocabulary := self._compiler.vocabulary) is None:
            return ()
        text, taken, encode = "", 0, vocabulary.encode

        def add(more: str) -> bool:
            nonlocal text, taken
            ids = encode(more)
            if matcher.validate_tokens(ids) < len(ids) or not matcher.consume_tokens(ids):
                return False
            text, taken = text + more, taken + len(ids)
            return True

        names = matcher.compute_ff_bytes()
        if not names:
            before = NAME.findall(vocabulary.decode(tokens(slot)[-NEAR:]))
            if (before and before[-1] and add(f'{before[-1]}"')) or add(QUOTE):
                names = matcher.compute_ff_bytes()
        while names and add(names.decode(errors="ignore")):
            names = matcher.compute_ff_bytes() if taken <= most and any(map(add, GLUES)) else b""
        matcher.rollback(taken)
        ids = encode(text)[:most] if len(text.strip(' "\n')) > 1 else []  # a brace alone is most often more
        return ids if max(ids, default=0) < self._vocab else ()  # weights may have fewer tokens

    def choose(
        self, sampler: Sampler, logits: Tensor, slots: list[int], positions: list[int], tokens: Tokens
    ) -> HostWork:
        """Choose by rejection sampling; the id of a failed row means nothing.

            logits ── choose ──▶ may it follow? ── yes ──▶ it stays: no mask is made
                                               └── no ───▶ mask ── choose again, independently

        Within strings and numbers most likely tokens may follow, and a mask costs a walk over the vocabulary.
        The probabilities are those of a masked draw: with A the sum of p over allowed tokens, an allowed
        token t gets p(t) + (1 - A) p(t) / A = p(t) / A. If the likeliest token is allowed, it is the
        likeliest allowed token. Filters (top-k, top-p, min-p) depend on the other tokens: rows with a filter
        are masked first."""
        rows = self.rows_of(slots)
        if not rows:
            return sampler.choose(logits, slots, positions), 0, {}
        began_ns = time.monotonic_ns()
        first = [row for row in rows if sampler.has_filters(slots[row])]
        failures: dict[int, str] = {}
        if first:
            logits = logits.clone()
            failures |= self.mask(logits, first, slots, tokens)
        choosing_ns = time.monotonic_ns()
        adjusted = sampler.adjusted(logits, slots, positions)
        ids = sampler.pick(adjusted, logits, slots, positions)
        chosen = ids.tolist()
        chosen_ns = time.monotonic_ns()
        tried = [row for row in rows if row not in first and chosen[row] >= 0]
        again, failed = self.refused(chosen, tried, slots, tokens)
        failures |= failed
        if again:
            masked, their_slots = adjusted[again], [slots[row] for row in again]
            failed = self.mask(masked, range(len(again)), their_slots, tokens)
            failures |= {again[k]: why for k, why in failed.items()}
            before = masked if adjusted is logits else logits[again]
            places = [positions[row] for row in again]
            ids[again] = sampler.pick(masked, before, their_slots, places, again=True)
        sampler.remember(slots, ids)
        host_us = (time.monotonic_ns() - chosen_ns + choosing_ns - began_ns) // 1000
        return ids, host_us, failures

    def _accept(self, row: _Row, tokens: Sequence[int]) -> LLMatcher:
        """The slot's matcher, after it has accepted exactly `tokens`."""
        if row.matcher is None:
            row.matcher = row.compilation.result.result(COMPILE_S).deep_copy()
        matcher, ends = row.matcher, self._compiler.ends
        if row.ahead != _NONE:
            if len(tokens) > row.taken and tokens[row.taken] == row.ahead:
                row.taken += 1
                row.ended = row.ahead in ends
            elif row.ahead not in ends:
                matcher.rollback(1)
            row.ahead = _NONE
        for token in tokens[row.taken :]:
            if row.ended:
                break
            row.ended = token in ends
            if not (row.ended or matcher.consume_token(token)):
                raise EngineError(f"token {token} does not follow its grammar")
        row.taken = len(tokens)
        return matcher


def _each(rows: Sequence[int], do: Callable[[int], None]) -> dict[int, str]:
    """Call `do` for each row; why rows failed, by index."""
    failures: dict[int, str] = {}
    for row in rows:
        try:
            do(row)
        except NotInTime:
            failures[row] = f"the grammar is not compiled after {COMPILE_S:g} s: ask again later"
        except GrammarRefusedError as error:
            failures[row] = f"{ROW_REFUSED}{error}"
        except Exception as error:  # noqa: BLE001 - a grammar fails its own request only
            failures[row] = (
                str(error) if isinstance(error, EngineError) else f"grammar: {first_line(str(error))}"
            )
    return failures


COMPILERS = 2
COMPILED = 64  # compiled grammars kept
MAX_WHY_CHARS = 120  # 256 of them fit into a result
# Within a string of bounded length, tokens may follow that are short enough for what is left of it. These
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
        self.vocabulary: Vocabulary | None = None  # likewise
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
        ended = [key for key, one in self._cache.items() if one.result.done()]
        for key in ended[:-COMPILED]:
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
                self.ends, self.vocabulary = frozenset(ends), vocabulary
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
