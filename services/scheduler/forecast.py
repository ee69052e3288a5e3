"""When a request would get its first token if it came in now: what the door judges by.

    prompt tokens ahead of it and its own, by the speed of prefill beside the present decodes
    + the wait for a slot and for blocks, by the answers that run and how long answers are
    + one loop
Ahead are the prompts that run and those that wait in its class and higher ones.
"""

from __future__ import annotations

from services.scheduler.overlap import MIN_SEEN
from services.scheduler.state import Executor, State
from shared.blocks import blocks_for
from shared.messages import Tokenized
from shared.step_model import StepShape

CHUNK_TOKENS = 256
SURE_STEPS = 64  # seen by an executor before anybody is refused on its account


def ttft_us(state: State, asked: Tokenized, level: int) -> int:
    """The predicted time to the first token; 0 while too little is known."""
    executors = [e for e in state.executors.values() if e.hello.model == asked.model and not e.draining]
    if not executors or any(e.costs.seen < max(SURE_STEPS, MIN_SEEN) for e in executors):
        return 0
    waiting_tokens = state.waiting.tokens_ahead(asked.model, (asked.tenant, level))
    ahead = waiting_tokens + sum(_prompt_left(e) for e in executors) + len(asked.tokens)
    speed = sum(1_000_000_000 // max(_ns_per_token(e), 1) for e in executors)  # tokens a second
    wait_us = min(_place_us(state, e, asked, waiting_tokens // len(executors)) for e in executors)
    return ahead * 1_000_000 // max(speed, 1) + wait_us + min(e.costs.loop_us for e in executors)


def _prompt_left(executor: Executor) -> int:
    return sum(max(s.opened_length - s.computed, 0) for s in executor.running if s.leader is None)


def _ns_per_token(executor: Executor) -> int:
    """Of a prompt chunk beside the decodes that run."""
    decodes = [s for s in executor.running if not s.prefilling]
    kv_tokens = sum(s.computed for s in decodes)
    shape = StepShape(
        rows=len(decodes) + 1,
        tokens=len(decodes) + CHUNK_TOKENS,
        kv_tokens=kv_tokens + CHUNK_TOKENS,
        attention=kv_tokens + CHUNK_TOKENS * CHUNK_TOKENS // 2,
    )
    return executor.costs.predict_us(shape) * 1000 // CHUNK_TOKENS


def _place_us(state: State, executor: Executor, asked: Tokenized, waiting_tokens: int) -> int:
    """Until slots and blocks for those that wait and for this request are free."""
    ledger, block_tokens = executor.ledger, executor.hello.block_tokens
    units = len(state.waiting) // max(len(state.executors), 1)
    blocks = blocks_for(waiting_tokens + len(asked.tokens), block_tokens)
    lack_blocks = blocks - (ledger.free_blocks - ledger.reserved)
    lack_slots = units + asked.n - ledger.free_slots
    if lack_blocks <= 0 and lack_slots <= 0:
        return 0
    left = sorted((max(min(state.mean_output, s.max_length - s.prompt_tokens) - s.generated, 1), s.seq,
                   len(s.table)) for s in executor.running)  # fmt: skip
    steps = 0
    for tokens, _, held in left:
        lack_blocks, lack_slots, steps = lack_blocks - held, lack_slots - 1, tokens
        if lack_blocks <= 0 and lack_slots <= 0:
            break
    else:  # those that wait come and go in turn, too
        rounds = -(-max(lack_slots, 0) // max(len(left), 1))
        steps += rounds * state.mean_output
    return steps * (executor.pace.step_us or 1)
