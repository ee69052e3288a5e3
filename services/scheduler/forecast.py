"""When a request would get its first token if it came in now: what the door judges by.

    prompt tokens ahead of it and its own, by the speed of prefill beside the present decodes
    + the wait for a slot and for blocks, by the answers that run and how long answers are
    + one loop
Ahead are the prompts that run and those that wait in its class and higher ones.
"""

from __future__ import annotations

from dataclasses import dataclass

from services.scheduler.overlap import MIN_SEEN
from services.scheduler.records import Sequence
from services.scheduler.state import Executor, State
from shared.blocks import blocks_for
from shared.messages import Tokenized
from shared.step_model import StepShape

CHUNK_TOKENS = 256
SURE_STEPS = 64  # seen by an executor before anybody is refused on its account


@dataclass(frozen=True, slots=True)
class Queue:
    """What has to start on one executor, up to and with the request in question."""

    level: int
    slots: int
    tokens: int


def ttft_us(state: State, asked: Tokenized, level: int) -> int:
    """The predicted time to the first token; 0 while too little is known."""
    executors = [e for e in state.executors.values() if e.hello.model == asked.model and not e.draining]
    if not executors or any(e.costs.seen < max(SURE_STEPS, MIN_SEEN) for e in executors):
        return 0
    units, tokens = state.waiting.ahead(asked.model, (asked.tenant, level))
    ahead = tokens + sum(_prompt_left(e, level) for e in executors) + len(asked.tokens)
    speed = sum(1_000_000_000 // max(_ns_per_token(e), 1) for e in executors)  # tokens a second
    queue = Queue(level, units // len(executors) + asked.n, tokens // len(executors) + len(asked.tokens))
    wait_us = min(_place_us(state, e, queue) for e in executors)
    return ahead * 1_000_000 // max(speed, 1) + wait_us + min(e.costs.loop_us for e in executors)


def _prompt_left(executor: Executor, level: int) -> int:
    ahead = [s for s in executor.running if s.leader is None and s.request.level <= level]
    return sum(max(s.opened_length - s.computed, 0) for s in ahead)


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


def _place_us(state: State, executor: Executor, queue: Queue) -> int:
    """Until slots and blocks for all of the queue are free. Lower classes give theirs up at once."""
    ledger = executor.ledger
    stay = [s for s in executor.running if s.request.level <= queue.level or s.pinned]
    gone = len(executor.running) - len(stay)
    given = sum(len(s.table) for s in executor.running) - sum(len(s.table) for s in stay)
    slots = queue.slots - ledger.free_slots - gone
    free = ledger.free_blocks + ledger.coming_blocks - ledger.reserved
    blocks = blocks_for(queue.tokens, ledger.block_tokens) - free - given
    steps = 0
    for tokens, held in sorted((_left(state, s), len(s.table)) for s in stay):
        if slots <= 0 and blocks <= 0:
            break
        slots, blocks, steps = slots - 1, blocks - held, tokens
    if slots > 0:  # those that wait come and go in turn, too
        steps += -(-slots // max(len(stay) + gone, 1)) * state.mean_output
    return steps * executor.pace.step_us


def _left(state: State, s: Sequence) -> int:
    """Tokens until the sequence ends, by the mean of all."""
    return max(min(state.mean_output, s.max_length - s.prompt_tokens) - s.generated, 1)
