"""A grammar says which tokens may follow, for slots that were opened with one: structured output.

    SlotOpen ──▶ compile, in a process of its own; equal grammars once ──▶ a matcher for each slot
    refused  ──▶ the matcher takes the slot's new tokens, then the one just chosen, if that may follow
    mask     ──▶ the matcher takes the slot's new tokens, the logits of all others become -inf

A matcher needs the token before, and that is known here as soon as it is sampled: unlike rows with
processors, these are planned like any other, with the next step queued (run-ahead). The first token waits for
the compilation: the scheduler is told when it has ended, and plans the row then. Source: XGrammar, arXiv
2411.15100.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import TimeoutError as NotInTime
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from services.executor.engine import ReportGrammar, ignore_grammar_news
from services.executor.sampling.grammar_compiler import (
    Compilation,
    GrammarCompiler,
    GrammarRefusedError,
    xgrammar,
)
from services.executor.sampling.grammar_process import COMPILE_S, line
from services.executor.sampling.sampler import Sampler
from shared.errors import EngineError
from shared.messages import ROW_REFUSED, GrammarFailed, GrammarReady, SlotOpen
from shared.vocab.vocabulary import Vocabulary

_WORD_BITS = 32
_NONE = -1
Tokens = Callable[[int], Sequence[int]]  # of a slot, so far


@dataclass(slots=True)
class _Row:
    """The grammar of one slot."""

    compilation: Compilation
    taken: int  # tokens of the slot that the matcher knows, the prompt among them
    matcher: Any = None
    mute: frozenset[int] = frozenset()  # tokens without a text, of which XGrammar would warn
    ahead: int = _NONE  # a token that it knows besides, chosen and perhaps not in the record yet


class Grammars:
    """The grammars of open slots. `open` and `close` are the device thread's; who samples has the rest."""

    def __init__(
        self,
        load_vocabulary: Callable[[], Vocabulary],
        vocab: int,
        report: ReportGrammar = ignore_grammar_news,
    ) -> None:
        """`report` is called on some thread when the compilation for a slot that is open has ended."""
        self._compiler = GrammarCompiler(load_vocabulary, vocab)
        self._report = report
        self._rows: dict[int, _Row] = {}
        self._words = -(-vocab // _WORD_BITS)

    def open(self, opened: SlotOpen) -> None:
        """Take a slot's grammar, if it has one, and begin to compile it."""
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
        """End what compiles."""
        self._compiler.close()

    def _ended(self, opened: SlotOpen, row: _Row) -> None:
        if self._rows.get(opened.slot) is not row or row.compilation.result.cancelled():
            return
        slot, generation = opened.slot, opened.generation
        error = row.compilation.result.exception()
        if isinstance(error, GrammarRefusedError):
            self._report(GrammarFailed(slot=slot, generation=generation, message=str(error)))
        else:  # any other error is told by its row
            took_us = row.compilation.took_us
            self._report(GrammarReady(slot=slot, generation=generation, compile_us=took_us))

    def rows_of(self, slots: Sequence[int]) -> list[int]:
        """The indices of slots with a grammar."""
        return [i for i, slot in enumerate(slots) if slot in self._rows] if self._rows else []

    def mask(
        self,
        logits: Tensor,
        rows: Sequence[int],
        slots: Sequence[int],
        tokens: Callable[[int], Sequence[int]],
    ) -> dict[int, str]:
        """Forbid what may not follow, in place, in these rows of `logits` `[rows, vocab]`. Row i is for
        `slots[i]`, of which `tokens` gives what there is so far. Returns why rows failed, by index."""
        allowed = torch.full((len(rows), self._words), -1, dtype=torch.int32)
        places = {row: k for k, row in enumerate(rows)}

        def fill(row: int) -> None:
            slot = slots[row]
            matcher = self._accept(self._rows[slot], tokens(slot))
            if not matcher.is_terminated():  # else a row of a plan made before its end was known
                matcher.fill_next_token_bitmask(allowed, places[row])

        failures = _each(rows, fill)
        _forbid(logits, rows, allowed)
        return failures

    def refused(
        self,
        ids: Sequence[int],
        rows: Sequence[int],
        slots: Sequence[int],
        tokens: Callable[[int], Sequence[int]],
    ) -> tuple[list[int], dict[int, str]]:
        """Those of these rows whose token, `ids[row]`, may not follow; and why rows failed, by index."""
        again: list[int] = []

        def ask(row: int) -> None:
            slot, token = slots[row], ids[row]
            state = self._rows[slot]
            matcher = self._accept(state, tokens(slot))
            if matcher.is_terminated():
                return
            if token not in state.mute and matcher.accept_token(token):
                state.ahead = token
            else:
                again.append(row)

        failures = _each(rows, ask)
        return again, failures

    def _accept(self, row: _Row, tokens: Sequence[int]) -> Any:
        """The slot's matcher, which knows all of its tokens then and no other."""
        if row.matcher is None:
            compiled = row.compilation.result.result(COMPILE_S)
            row.matcher = xgrammar().GrammarMatcher(compiled)
            row.mute = frozenset(compiled.tokenizer_info.special_token_ids)
        matcher = row.matcher
        if row.ahead != _NONE:
            if len(tokens) > row.taken and tokens[row.taken] == row.ahead:
                row.taken += 1
            else:
                matcher.rollback(1)
            row.ahead = _NONE
        for token in tokens[row.taken :]:
            if not matcher.is_terminated() and not matcher.accept_token(token):
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
    """As Sampler.choose, within the slots' grammars: ids `[rows]`, the time on the host in us, and why rows
    failed, by index; the id of such a row means nothing.

        logits ── choose ──▶ may it follow? ── yes ──▶ it stays: no mask was made
                                           └── no ───▶ mask ── choose again, independently

    Inside of strings and numbers most of what a model wants may follow, and a mask costs a walk over the
    vocabulary. The chances are those of a masked draw: where the tokens that may follow have the mass A, p(t)
    + (1 - A) p(t) / A = p(t) / A. And a likeliest token that may follow is the likeliest of those that may.
    Not so for filters (top-k, top-p, min-p), which count what they leave: rows with one are masked first."""
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
    ids = sampler.propose(logits, slots, positions)
    chosen = ids.tolist()
    chosen_ns = time.monotonic_ns()
    tried = [row for row in rows if row not in first and chosen[row] >= 0]
    again, failed = grammars.refused(chosen, tried, slots, tokens)
    failures |= failed
    if again:
        at = torch.tensor(again, device=logits.device)
        some, theirs = logits[at], [slots[row] for row in again]
        failed = grammars.mask(some, range(len(again)), theirs, tokens)
        failures |= {again[k]: why for k, why in failed.items()}
        ids[at] = sampler.propose(some, theirs, [positions[row] for row in again], again=True)
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
            failures[row] = f"{ROW_REFUSED}the grammar takes over {COMPILE_S:g} s to compile: simplify it"
        except GrammarRefusedError as error:
            failures[row] = f"{ROW_REFUSED}{error}"
        except Exception as error:  # noqa: BLE001 - one request's grammar fails alone
            failures[row] = str(error) if isinstance(error, EngineError) else f"grammar: {line(error)}"
    return failures


def _forbid(logits: Tensor, rows: Sequence[int], allowed: Tensor) -> None:
    """Where a bit of `allowed` `[rows, words]` is 0, the logit becomes -inf."""
    words = allowed.numpy().view(np.uint8)
    bits = np.unpackbits(words, axis=1, count=logits.shape[1], bitorder="little")
    forbidden = torch.from_numpy(bits).to(logits.device, non_blocking=True).eq(0)
    if len(rows) == len(logits):
        logits.masked_fill_(forbidden, float("-inf"))
    else:
        at = torch.tensor(rows, device=logits.device)
        logits[at] = logits[at].masked_fill_(forbidden, float("-inf"))
