"""The door refuses requests, and says why and when to try again. What is refused holds nothing.

A request is refused that can never be served here, that finds no room to wait, or whose first token would
come after the limit of its class: `ttft_us` predicts when that is. Room to wait is shared: where it is full a
tenant is refused that has its equal part, and one that waits for nothing never.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from services.scheduler.overlap import MIN_SEEN
from services.scheduler.state import requests
from services.scheduler.state.requests import Sequence
from services.scheduler.state.state import Executor, State
from services.scheduler.state.waiting_queue import MAX_CLIENTS, Held
from shared.codec import MAX_TOKENS
from shared.fair_share import over_share
from shared.kv_blocks import blocks_for
from shared.messages import Rejected, Tokenized, rejection
from shared.step_model import StepShape

REFUSED_US = 10_000_000  # longer than a tokenizer asks
MAX_REFUSED = 10_000
OVERTAKE_US = 200_000  # a cancel is no longer ahead of its request: one from before was of an earlier request
RETRY_AFTER_MS = 1_000
CHUNK_TOKENS = 256  # of the chunk by which the speed of prefill is judged
SURE_STEPS = 64  # seen by an executor before anybody is refused on its account

Refusal = tuple[int, str, int]  # code, message, retry after ms


def refused(state: State, asked: Tokenized) -> Rejected | None:
    """The refusal, or None to accept. A resend of what was refused is refused again, whatever has become
    free since: its client has been told."""
    key, submission = (asked.tenant, asked.request), (asked.received_wall_us, asked.attempt)
    known = state.refused.get(key)
    if known is not None and known[1] == submission:
        return known[2]
    refusal = _refusal(state, asked, len(asked.tokens)) or _no_room(state, asked)
    if refusal is None:
        return None
    state.refused.pop(key, None)  # the oldest are first
    if len(state.refused) >= MAX_REFUSED:
        del state.refused[next(iter(state.refused))]
    state.meter.count_rejected(refusal[0])
    rejected = rejection(asked, *refusal)
    state.refused[key] = (state.now_us + REFUSED_US, submission, rejected)
    return rejected


def refused_again(state: State, source: str, asked: Tokenized) -> Rejected | None:
    """The refusal of a request that another scheduler had accepted, and that the detokenizer `source` asks to
    go on with: it has stood in a queue once. A 503 is not remembered, since it asks again."""
    refusal: Refusal | None = None
    shard = source.removeprefix("detokenizer.")
    if shard not in state.detokenizers and shard not in state.leaving:
        refusal = 503, f"{source} is not ready", RETRY_AFTER_MS
    elif len(asked.reasons) != asked.n or prompt_length(asked) < 1:
        refusal = 400, "what it has generated is not told of each choice", 0
    refusal = refusal or _refusal(state, asked, prompt_length(asked))
    if refusal is None:
        return None
    if refusal[0] != 503:
        state.meter.count_rejected(refusal[0])
    return rejection(asked, *refusal)


def prompt_length(asked: Tokenized) -> int:
    """Tokens of the prompt; behind it may be what was generated."""
    return len(asked.tokens) - sum(asked.generated)


def received_us(state: State, asked: Tokenized) -> int:
    """When a tokenizer saw a request that comes in now, but for the time that messages were on their way."""
    return state.now_us - asked.age_us - asked.waited_us


def _refusal(state: State, asked: Tokenized, prompt: int) -> Refusal | None:
    """Why a request with so many prompt tokens can never be served, or not now; None: it can."""
    key = (asked.tenant, asked.request)
    cancelled_us = state.tombstones.pop(key, None)
    if cancelled_us is not None and received_us(state, asked) <= cancelled_us + OVERTAKE_US:
        return 499, "cancelled by the client before it arrived", 0
    if key in state.requests:
        return 409, f"a request with the id {asked.request!r} is running: choose another id", 0
    if state.draining:
        return 503, "the scheduler is draining: send the request again", RETRY_AFTER_MS
    if not prompt:
        return 400, "the prompt is empty: send at least one token", 0
    executors = _serving(state, asked)
    if not executors:
        return 503, f"no executor of {asked.model!r} is ready: see `headrace status`", RETRY_AFTER_MS
    if unknown := _unknown(executors, asked):
        return 400, unknown, 0
    if prompt + asked.max_tokens > _most_tokens(executors, asked.n, prompt):
        return 400, _too_large(executors, asked, prompt), 0
    return None


def _unknown(executors: list[Executor], asked: Tokenized) -> str:
    """What of a request no engine can be asked for, whatever is free; empty when one can."""
    vocab = max(executor.hello.vocab for executor in executors)
    for what, ids in (("prompt", asked.tokens), ("logit_bias", asked.sampling.bias_ids)):
        if ids and (largest := max(ids)) >= vocab:
            return (
                f"`{what}`: the weights of {asked.model!r} have {vocab} tokens, and no token {largest}, "
                "which its tokenizer knows: leave it out"
            )
    most = [executor.hello.max_stop_ids for executor in executors]
    if min(most) and len(asked.stop_ids) > max(most):
        return (
            f"`stop_token_ids`: {len(asked.stop_ids)} with the model's own are over the {max(most)} of the "
            "engine: ask for fewer"
        )
    return ""


def _no_room(state: State, asked: Tokenized) -> Refusal | None:
    """Why a request may not wait here now; None: it may."""
    if not state.detokenizers:
        return 503, "no detokenizer is ready: see `headrace status`", RETRY_AFTER_MS
    own = state.waiting.tenants.get(asked.tenant)
    if own is None and len(state.waiting.tenants) < MAX_CLIENTS:
        return None  # whoever waits for nothing may wait: a retry would find no better moment
    if _full(state, asked, own or Held()):
        waits = f"{len(state.waiting)} requests are waiting, {own.units if own else 0} of them yours"
        return 429, f"{waits}: try again later", RETRY_AFTER_MS
    return _too_late(state, asked)


def _full(state: State, asked: Tokenized, own: Held) -> bool:
    """True when the request may not wait: the queue is full, and its tenant has an equal part of it."""
    waiting, limits = state.waiting, state.limits
    tenants = max(len(waiting.tenants), 1)
    units, tokens = 1, asked.n * len(asked.tokens)
    return over_share(own.units + units, len(waiting) + units, limits.max_waiting, tenants) or over_share(
        own.tokens + tokens, waiting.held_tokens + tokens, limits.max_waiting_tokens, tenants
    )


def _too_late(state: State, asked: Tokenized) -> Refusal | None:
    """Refuse now what would get its first token after its class's limit: waiting would only cost it time,
    and everybody else. Whoever finds nobody ahead, or only those who make way, is never refused: nothing is
    quicker than to try."""
    level = requests.level_of(asked.slo_class)
    limit_us = state.limits.classes[level].ttft_us
    units, _ = state.waiting.ahead(asked.model, (asked.tenant, level))
    if not units and any(not _staying(e, level) for e in _serving(state, asked)):
        return None
    if not limit_us or (wait_us := ttft_us(state, asked, level)) <= limit_us:
        return None
    message = (
        f"the first token would take {wait_us / 1e6:.1f} s, over the {limit_us / 1e6:g} s of class "
        f"{asked.slo_class}: try again later, or ask in class batch"
    )
    return 429, message, max(RETRY_AFTER_MS, (wait_us - limit_us) // 1000)


def fitted(state: State, asked: Tokenized) -> Tokenized:
    """The request, with as many `max_tokens` as ever fit where nobody asked for any: its tokenizer has put in
    what the model's context has room for, which an executor's KV cache may not hold."""
    if not asked.open_end:
        return asked
    prompt = prompt_length(asked)
    room = _most_tokens(_serving(state, asked), asked.n, prompt) - prompt
    room = max(room, *asked.generated) if asked.generated else room
    return dataclasses.replace(asked, max_tokens=room) if 0 < room < asked.max_tokens else asked


def _serving(state: State, asked: Tokenized) -> list[Executor]:
    return [e for e in state.executors.values() if e.hello.model == asked.model and not e.draining]


def _most_tokens(executors: list[Executor], n: int, prompt: int) -> int:
    """The longest that each of `n` choices of a prompt can get on one of the executors, tokens; 0 where none
    has the slots. They share the full blocks of their prompt, as in headroom.holds."""
    most = 0
    for hello in (e.hello for e in executors if n <= e.hello.slots):
        blocks = (hello.blocks + (n - 1) * (prompt // hello.block_tokens)) // n
        most = max(most, min(hello.max_context, MAX_TOKENS, blocks * hello.block_tokens))
    return most


def _too_large(executors: list[Executor], asked: Tokenized, prompt: int) -> str:
    context = max(e.hello.max_context for e in executors)
    tokens = max(e.hello.blocks * e.hello.block_tokens for e in executors)
    least = 1 if asked.open_end else asked.max_tokens
    cure = "shorten the prompt" if asked.open_end else "ask for fewer max_tokens"
    return (
        f"{prompt} prompt tokens + {least} to generate, times {asked.n}, never fit: the context is {context} "
        f"tokens and the KV cache holds {tokens}; {cure}" + (", or for fewer choices" if asked.n > 1 else "")
    )


@dataclass(frozen=True, slots=True)
class Queue:
    """What has to start on one executor, up to and with the request in question."""

    level: int
    slots: int
    tokens: int


def ttft_us(state: State, asked: Tokenized, level: int) -> int:
    """The predicted time to the first token of a request that comes in now; 0 while too little is known.

        prompt tokens ahead of it and its own, by the speed of prefill beside the present decodes
        + the wait for a slot and for blocks, by the answers that run and how long answers are
        + one loop

    Ahead are the prompts that run and those that wait in its class and higher ones. One slot is enough:
    choices start one by one.
    """
    executors = _serving(state, asked)
    if not executors or any(e.costs.seen < max(SURE_STEPS, MIN_SEEN) for e in executors):
        return 0
    units, tokens = state.waiting.ahead(asked.model, (asked.tenant, level))
    ahead = tokens + sum(_prompt_left(e, level) for e in executors) + len(asked.tokens)
    speed = sum(1_000_000_000_000 // max(_ns_per_token(e), 1) for e in executors)  # tokens in 1,000 s
    queue = Queue(level, units // len(executors) + 1, tokens // len(executors) + len(asked.tokens))
    wait_us = min(_place_us(state, e, queue) for e in executors)
    return ahead * 1_000_000_000 // max(speed, 1) + wait_us + min(e.costs.loop_us for e in executors)


def _staying(executor: Executor, level: int) -> list[Sequence]:
    """Who of those that run gives no place to a request of this class."""
    return [s for s in executor.running if s.level <= level or s.pinned]


def _prompt_left(executor: Executor, level: int) -> int:
    ahead = [s for s in executor.running if s.leader is None and s.level <= level]
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
    pool = executor.pool
    stay = _staying(executor, queue.level)
    gone = len(executor.running) - len(stay)
    given = sum(len(s.table) for s in executor.running) - sum(len(s.table) for s in stay)
    slots = queue.slots - pool.free_slots - gone
    free = pool.unreserved_blocks + pool.coming_blocks
    blocks = blocks_for(queue.tokens, pool.block_tokens) - free - given
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
