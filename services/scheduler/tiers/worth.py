"""What it would cost to compute tokens again, by the costs that the executor has shown."""

from __future__ import annotations

from dataclasses import dataclass

from services.scheduler.costs import Costs
from services.scheduler.overlap import MIN_SEEN
from services.scheduler.records import Sequence
from services.scheduler.state import Executor
from shared.step_model import StepShape

CHUNK_TOKENS = 256  # until chunks have been planned
MANY_CHUNKS = 8


@dataclass(frozen=True, slots=True)
class Recompute:
    """Device time of prompt chunks beside the rows that decode now."""

    costs: Costs
    base: StepShape
    base_us: int
    block_tokens: int
    chunk_tokens: int

    @classmethod
    def of(cls, executor: Executor) -> Recompute:
        """As things are on an executor."""
        return cls._beside(executor, decode_shape(executor))

    @classmethod
    def behind(cls, executor: Executor, sequence: Sequence) -> Recompute:
        """For one that has just been admitted: who is before it decodes by then."""
        before = [s for s in executor.running if s is not sequence and not s.loading]
        cached = sum(max(s.computed, s.opened_length) for s in before)
        return cls._beside(executor, StepShape(len(before), len(before), cached + len(before), cached))

    @classmethod
    def _beside(cls, executor: Executor, base: StepShape) -> Recompute:
        base_us = executor.costs.predict_us(base) if base.rows else 0
        chunk_tokens = executor.chunk_tokens or CHUNK_TOKENS
        return cls(executor.costs, base, base_us, executor.hello.block_tokens, chunk_tokens)

    @property
    def known(self) -> bool:
        return self.costs.seen >= MIN_SEEN

    def tokens_us(self, start: int, tokens: int) -> int:
        """Of `tokens` from `start` on; 0 while nothing is known."""
        if not self.known or tokens <= 0:
            return 0
        end, total, chunk = start + tokens, 0, self.chunk_tokens
        if tokens > MANY_CHUNKS * chunk:  # the cost is a polynomial of degree two: Simpson's rule is exact
            ends = (start, start + (tokens - chunk) // 2, end - chunk)
            first, middle, last = (self._chunk_us(at, chunk) for at in ends)
            return (first + 4 * middle + last) * tokens // (6 * chunk)
        while start < end:
            count = min(chunk, end - start)
            total += self._chunk_us(start, count)
            start += count
        return total

    def block_us(self, at: int) -> int:
        """Of the `at`-th block of a sequence, as part of a larger chunk."""
        if not self.known:
            return 0
        chunk_us = self._chunk_us(at * self.block_tokens, self.chunk_tokens)
        return chunk_us * self.block_tokens // self.chunk_tokens

    def _chunk_us(self, start: int, tokens: int) -> int:
        return max(self.costs.predict_us(self.base.with_chunk(start, tokens)) - self.base_us, 0)


def decode_shape(executor: Executor) -> StepShape:
    """A step of the rows that decode now."""
    decodes = [s.computed for s in executor.running if not s.prefilling and not s.loading]
    cached = sum(decodes)
    return StepShape(len(decodes), len(decodes), cached + len(decodes), cached)
