"""Structured output: a slot's grammar restricts which tokens may follow. host_sampling.py calls it.

    SlotOpen ──▶ compile on a thread, equal grammars once ──▶ a matcher for each slot
    refused  ──▶ the matcher accepts the slot's new tokens, then the chosen one if it may follow
    mask     ──▶ the matcher accepts the slot's new tokens; the logits of forbidden tokens become -inf
                 (on a GPU in the kernel that chooses, by `write_masks`)

A matcher needs the token before, which is known here once it is sampled. So these rows, unlike rows with
processors, may be planned while the step before runs (run-ahead). The first token waits for the compilation:
the scheduler plans the row after GrammarReady. Source: https://github.com/guidance-ai/llguidance.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import TimeoutError as NotInTime
from dataclasses import dataclass

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray
from torch import Tensor

from services.executor.engine import ReportGrammar, ignore_grammar_news
from services.executor.sampling.grammar_compiler import (
    MAX_WHY_CHARS,
    Compilation,
    GrammarCompiler,
    GrammarRefusedError,
    first_line,
)
from services.executor.sampling.sampler import Sampler
from shared.errors import EngineError
from shared.messages import ROW_REFUSED, GrammarFailed, GrammarReady, SlotOpen
from shared.vocab.vocabulary import Vocabulary

_WORD_BITS = 32
_NONE = -1
COMPILE_S = 20.0  # a row waits so long for its grammar; the scheduler plans it when it is compiled
_DEAD_END = "the grammar goes on with a text that no token of the model has: allow another one there"
Tokens = Callable[[int], Sequence[int]]  # a slot's tokens so far


@dataclass(slots=True)
class _Row:
    """The grammar of one slot."""

    compilation: Compilation
    taken: int  # tokens of the slot that the matcher has accepted, counted with the prompt
    matcher: LLMatcher | None = None
    ended: bool = False  # its last token is an end token, which the matcher does not get
    ahead: int = _NONE  # accepted beyond `taken`: a chosen token, perhaps not recorded yet


class Grammars:
    """The grammars of open slots. `open` and `close` are for the device thread, the rest for the thread that
    samples."""

    def __init__(
        self,
        load_vocabulary: Callable[[], Vocabulary],
        vocab: int,
        report: ReportGrammar = ignore_grammar_news,
    ) -> None:
        """`report` is called on any thread when the compilation for an open slot has ended."""
        self._compiler = GrammarCompiler(load_vocabulary, vocab)
        self._report = report
        self._rows: dict[int, _Row] = {}
        self._words = -(-vocab // _WORD_BITS)

    def open(self, opened: SlotOpen) -> None:
        """Start to compile a slot's grammar, if it has one."""
        self.close(opened.slot)
        if opened.grammar:
            compilation = self._compiler.request(opened.grammar, opened.tenant)
            row = self._rows[opened.slot] = _Row(compilation, opened.prompt_tokens)
            compilation.result.add_done_callback(lambda _: self._ended(opened, row))

    def close(self, slot: int) -> None:
        """Forget a slot. Closing an unknown slot does nothing."""
        row = self._rows.pop(slot, None)
        if row is not None:
            self._compiler.release(row.compilation)

    def end(self) -> None:
        """End the compilations."""
        self._compiler.close()

    def _ended(self, opened: SlotOpen, row: _Row) -> None:
        if self._rows.get(opened.slot) is not row or row.compilation.result.cancelled():
            return
        slot, generation = opened.slot, opened.generation
        error = row.compilation.result.exception()
        if isinstance(error, GrammarRefusedError):
            self._report(GrammarFailed(slot=slot, generation=generation, message=str(error)))
        else:  # any other error becomes a row error
            took_us = row.compilation.took_us
            self._report(GrammarReady(slot=slot, generation=generation, compile_us=took_us))

    def rows_of(self, slots: Sequence[int]) -> list[int]:
        """The indices of slots with a grammar."""
        return [i for i, slot in enumerate(slots) if slot in self._rows] if self._rows else []

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
        """Write which tokens may follow in row i of `places`, a bit each, to `masks[places[i]]`; `masks` is
        `[*, words]`, with at least a bit for each token. The masks of rows that failed or have ended allow
        all. Returns why rows failed, by index."""
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


def choose(
    grammars: Grammars,
    sampler: Sampler,
    logits: Tensor,
    slots: list[int],
    positions: list[int],
    tokens: Tokens,
) -> tuple[Tensor, int, dict[int, str]]:
    """Like Sampler.choose, within the slots' grammars, by rejection sampling. Returns ids `[rows]`, the time
    on the host in us, and why rows failed, by index; the id of a failed row means nothing.

        logits ── choose ──▶ may it follow? ── yes ──▶ it stays: no mask is made
                                           └── no ───▶ mask ── choose again, independently

    Within strings and numbers most likely tokens may follow, and a mask costs a walk over the vocabulary. The
    probabilities are those of a masked draw: with A the sum of p over allowed tokens, an allowed token t gets
    p(t) + (1 - A) p(t) / A = p(t) / A. If the likeliest token is allowed, it is the likeliest allowed token.
    Filters (top-k, top-p, min-p) depend on the other tokens: rows with a filter are masked first."""
    rows = grammars.rows_of(slots)
    if not rows:
        return sampler.choose(logits, slots, positions), 0, {}
    began_ns = time.monotonic_ns()
    first = [row for row in rows if sampler.filters(slots[row])]
    failures: dict[int, str] = {}
    if first:
        logits = logits.clone()
        failures |= grammars.mask(logits, first, slots, tokens)
    choosing_ns = time.monotonic_ns()
    adjusted = sampler.adjusted(logits, slots, positions)
    ids = sampler.pick(adjusted, logits, slots, positions)
    chosen = ids.tolist()
    chosen_ns = time.monotonic_ns()
    tried = [row for row in rows if row not in first and chosen[row] >= 0]
    again, failed = grammars.refused(chosen, tried, slots, tokens)
    failures |= failed
    if again:
        masked, their_slots = adjusted[again], [slots[row] for row in again]
        failed = grammars.mask(masked, range(len(again)), their_slots, tokens)
        failures |= {again[k]: why for k, why in failed.items()}
        before = masked if adjusted is logits else logits[again]
        places = [positions[row] for row in again]
        ids[again] = sampler.pick(masked, before, their_slots, places, again=True)
    sampler.remember(slots, ids)
    host_us = (time.monotonic_ns() - chosen_ns + choosing_ns - began_ns) // 1000
    return ids, host_us, failures


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
