"""Room for growth: how many blocks admission leaves free for what the running sequences are expected to need.

Admission that looks at present needs alone pauses sequence after sequence later on. Keeping a share of the
expected growth free removed more stalls than any victim rule in simulation; the share adapts: each pause for
want of a block adds to it, each step without one takes a little away (AIMD, as SGLang's new_token_ratio).
"""

from __future__ import annotations

from services.scheduler.state import Executor, State

LEAST_PM, MOST_PM = 50, 1_000  # per mille of the expected growth
PAUSE_ADDS_PM = 100
STEP_DIVIDES = 512


def most_spare_blocks(state: State, executor: Executor) -> int:
    """At least as many as `spare_blocks`, without a look at every row."""
    if state.limits.policy.greedy:
        return 0
    each = max(state.mean_output, executor.hello.block_tokens) // executor.hello.block_tokens + 2
    return len(executor.running) * each * executor.growth_pm // 1000


def spare_blocks(state: State, executor: Executor) -> int:
    """Blocks that admission must leave free. None on an empty executor, or nothing large could ever start."""
    if state.limits.policy.greedy:
        return 0
    expected, block_tokens, mean = 0, executor.hello.block_tokens, state.mean_output
    for s in executor.running:  # once an admission, over every row
        length = len(s.tokens)
        left, most = mean + s.prompt_tokens - length, s.max_length - length
        if left < block_tokens:
            left = block_tokens
        more = length + (left if left < most else most) - (len(s.table) + s.reserved) * block_tokens
        if more > 0:
            expected += more
    return expected * executor.growth_pm // (1000 * block_tokens)


def paused(executor: Executor) -> None:
    """A sequence had to be paused for want of a block."""
    executor.growth_pm = min(MOST_PM, executor.growth_pm + PAUSE_ADDS_PM)


def stepped(executor: Executor) -> None:
    """A step went by."""
    executor.growth_pm = max(LEAST_PM, executor.growth_pm - executor.growth_pm // STEP_DIVIDES)


def learn(state: State, generated: int) -> None:
    """A sequence has ended after so many tokens."""
    state.mean_output = max(1, (15 * state.mean_output + generated) // 16)
