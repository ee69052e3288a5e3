"""`StepModel` predicts the time of a step: the scheduler plans with it, the simulated engine sleeps for it.

Weights are read once per step; above the ridge point the matrix products cost time per token. KV reads cost
time per token of context, attention of a chunk per pair of query and key:

    max(weights, tokens) + rows + KV tokens read + attention pairs

All numbers are integers, so that a replay gives the same microseconds on every machine.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from shared.messages import StepPlan

PROMPT_PART = 4  # a quarter of `step_tokens` is for prompts also in a step full of decodes

_PS_PER_NS, _PS_PER_US = 1_000, 1_000_000


@dataclass(slots=True, unsafe_hash=True)  # not frozen: setting the fields would take three times as long
class StepShape:
    """The properties of a step that its time depends on. Built by `shape_of` and `shape_of_rows`, and not
    changed after that."""

    rows: int  # forward rows
    tokens: int  # of all rows
    kv_tokens: int  # sum over rows of start + count: KV reads
    attention: int  # sum over rows of count * (start + count // 2): pairs of query and key

    def with_chunk(self, start: int, count: int) -> StepShape:
        """This shape and one more row of `count` tokens from `start`."""
        return StepShape(
            self.rows + 1,
            self.tokens + count,
            self.kv_tokens + start + count,
            self.attention + count * (start + count // 2),
        )

    def with_drafts(self, drafts: int, *, again: bool) -> StepShape:
        """This shape of decodes with drafts, each a row more; `again`: it reads the KV of its slot again."""
        read = drafts * self.kv_tokens // max(self.rows, 1) if again else drafts
        return StepShape(
            self.rows + drafts, self.tokens + drafts, self.kv_tokens + read, self.attention + read
        )

    def with_chunks(self, chunks: Iterable[tuple[int, int]]) -> StepShape:
        """This shape and one more row for each (start, count)."""
        rows, tokens, kv_tokens, attention = self.rows, self.tokens, self.kv_tokens, self.attention
        for start, count in chunks:
            rows += 1
            tokens += count
            kv_tokens += start + count
            attention += count * (start + count // 2)
        return StepShape(rows, tokens, kv_tokens, attention)


NO_ROWS = StepShape(0, 0, 0, 0)


def shape_of_rows(rows: Iterable[tuple[int, int]]) -> StepShape:
    """The shape of forward rows given as (start, count)."""
    return NO_ROWS.with_chunks(rows)


def shape_of(plan: StepPlan) -> StepShape:
    """The shape of a plan. A row of one token has `start` pairs, so that a decode-only step needs no loop."""
    rows, tokens, before = len(plan.starts), sum(plan.counts), sum(plan.starts)
    if tokens == rows:
        return StepShape(rows, tokens, before + tokens, before)
    return shape_of_rows(zip(plan.starts, plan.counts, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepModel:
    """Coefficients of a model on a machine. `host_row_ns` is the time of a row's logits processors."""

    weights_us: int
    token_ns: int
    row_ns: int = 0
    kv_token_ps: int = 0
    pair_ps: int = 0
    host_row_ns: int = 0

    def step_us(self, shape: StepShape) -> int:
        """The forward and sampling time of a step of this shape."""
        products_ps = max(self.weights_us * _PS_PER_US, shape.tokens * self.token_ns * _PS_PER_NS)
        rows_ps = shape.rows * self.row_ns * _PS_PER_NS
        reads_ps = shape.kv_tokens * self.kv_token_ps + shape.attention * self.pair_ps
        return (products_ps + rows_ps + reads_ps) // _PS_PER_US


# An 8B in bf16 on one H200, fitted to vLLM 0.26 there: decode at a mean context of 1,152 tokens took
# 4.94 / 6.49 / 11.01 / 18.69 ms at 1 / 32 / 128 / 256 rows (the fit: +0.2, -0.4, +1.3, -2.3 %), prefill
# ran at 43.4k tokens/s in prompts of 1k and 37.8k at 8k (+0.2, +1.3 %).
H200_8B = StepModel(
    weights_us=4_900, token_ns=22_500, row_ns=9_800, kv_token_ps=33_000, pair_ps=874, host_row_ns=30_000
)
# SmolLM2-135M in float32 on two cores: decode at about 160 tokens took 37 / 65 / 137 ms at 1 / 8 / 32 rows
# (the fit: +10, -10, +10 %: the real curve bends twice), prefill of 512 tokens ran at 410 tokens/s (0 %).
SMOLLM2_CPU = StepModel(
    weights_us=38_200, token_ns=2_190_000, row_ns=2_130_000, kv_token_ps=1_500_000, pair_ps=960_000
)
PRESETS = {"h200-8b": H200_8B, "smollm2-cpu": SMOLLM2_CPU}
