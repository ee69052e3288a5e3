"""Baselines for comparison, as policies by module and name: `--policy batching=loadtest.policies:static`."""

from __future__ import annotations

from services.scheduler.state.policies import (
    BatchingView,
    OffloadView,
    RolesView,
    RoutingOption,
    StepShare,
    on_demand,
    with_traits,
)
from services.scheduler.state.requests import Sequence
from shared.kv_blocks import blocks_for

CHUNK_TOKENS = 1_024  # the first chunk, to by_chunk
# A running sequence counts as much as so many tokens of prefix hit, to prefix. Without it all requests with a
# common prefix pile up on one executor (Mooncake trace, four executors: TTFT p50 5.5 s instead of 0.6).
LOAD_TOKENS = 512


@with_traits("closed")
def static(view: BatchingView) -> StepShare:
    """All prompts of the batch, then all its tokens: request-level batching."""
    return StepShare(not view.prompts, "whole")


@with_traits("greedy")
def greedy(tokens: int, max_length: int, block_tokens: int) -> int:
    """What a sequence needs for its next token, and nothing is kept free for growth: preemptions are many."""
    return on_demand(tokens, max_length, block_tokens)


@with_traits("greedy")
def by_chunk(tokens: int, max_length: int, block_tokens: int) -> int:
    """What its first chunk needs, and else as `greedy`: as vLLM V1 admits. Want of a block may preempt a
    sequence within its prompt."""
    return blocks_for(min(tokens + 1, max_length, CHUNK_TOKENS), block_tokens)


def prefix(options: list[RoutingOption]) -> RoutingOption:
    """The most cached tokens of the prompt, minus LOAD_TOKENS a running sequence; if equal, the most room."""
    return max(options, key=lambda o: (o.hit_tokens - LOAD_TOKENS * o.running, o.room_blocks, o.source))


def least_computed(candidates: list[Sequence]) -> list[Sequence]:
    """The sequence of the lowest class whose loss costs least to compute again."""
    return sorted(candidates, key=lambda s: (-s.level, s.computed, -s.request.arrival_us, -s.seq))


@with_traits("leaves")
def swap(view: OffloadView) -> str:
    """At any cost, the blocks of a preempted sequence are copied at once and leave the device."""
    if view.preempted:
        return "copy"
    return "drop" if view.pressed else "keep"


@with_traits("no_tiers")
def recompute(view: OffloadView) -> str:
    """Nothing is copied or asked for; blocks of a preempted sequence stay cached until others need them."""
    return "drop"


@with_traits("no_tiers", "forgets")
def forget(view: OffloadView) -> str:
    """Nothing is copied, and nothing of a preempted sequence stays cached: all of it is computed again, as in
    vLLM without prefix caching."""
    return "drop"


def prefill_1(view: RolesView) -> int:
    """One executor prefills, the others decode."""
    return 1


def prefill_2(view: RolesView) -> int:
    """Two executors prefill."""
    return 2


def prefill_3(view: RolesView) -> int:
    """Three executors prefill."""
    return 3
