"""Refuses requests, with a reason and a time to retry. `arrival` and `core` call it.

A request is refused if it can never be served here, if the queue is full, or if its first token would come
after the TTFT limit of its class (`ttft_us`). Tenants share a full queue equally: it refuses a tenant that
has its equal share, and never one without a waiting request. A refused request leaves no state but the
answer to a resend.

Decides which kind of executor serves a model name; executors of other kinds stay out.

The kind is `ExecHello.model_digest`: weights, dtype, KV format and deterministic mode. The setting
`model_digest`, or else the first executor, decides. Another kind takes over when every executor of the first
has died or drains. With `accept_mixed` all kinds serve.

A request stays with the kind that has generated its tokens: other weights would not continue the text that
its client has read. If that kind is gone it fails with a typed error; a request with savepoints, which has
one plain answer, starts over when it is taken over. A request without tokens starts anywhere.
"""

from __future__ import annotations

import dataclasses
from functools import cache
from pkgutil import resolve_name
from typing import Any

from services.scheduler.overlap import MIN_SEEN
from services.scheduler.state import requests
from services.scheduler.state.requests import Request, Sequence
from services.scheduler.state.state import DECODE, Executor, State
from services.scheduler.state.waiting_queue import MAX_CLIENTS, TenantBacklog
from shared.codec import MAX_TOKENS
from shared.errors import NO_PROMPT_SCORES, rejection
from shared.fair_share import is_over_share
from shared.kv_blocks import blocks_for
from shared.messages import ExecHello, Rejected, Tokenized
from shared.step_model import StepShape

REFUSED_US = 10_000_000  # longer than a tokenizer resends
MAX_REFUSED = 10_000
OVERTAKE_US = 200_000  # a cancel overtakes its request by less: an older one was for an earlier request
RETRY_AFTER_MS = 1_000
WAKE_WAIT_US = 120_000_000  # the turn of another model, 30 s, its drain, and the load of large weights
CHUNK_TOKENS = 256  # the chunk by which the speed of prefill is judged
MIN_STEPS_SEEN = 64  # steps of an executor before its cost model is a reason to refuse

Refusal = tuple[int, str, int]  # code, message, retry after ms
ADAPTERS = {  # which adapters executors have
    "lora": "services.scheduler.adapters:Adapters",
}


@cache
def adapting() -> Any:
    """The decisions about adapters; None: there are none."""
    return next((resolve_name(name) for name in ADAPTERS.values()), None)


def refuse(state: State, tokenized: Tokenized) -> Rejected | None:
    """The refusal, or None to accept. A resend of a refused request is refused again, even if there is room
    now: its client already has the refusal. A 503 is not counted: the tokenizer asks again, and counts those
    that reach a client."""
    key, submission = (tokenized.tenant, tokenized.request), (tokenized.received_wall_us, tokenized.attempt)
    known = state.refused.get(key)
    if known is not None and known[1] == submission:
        return known[2]
    refusal = (
        _refusal(state, tokenized, len(tokenized.tokens))
        or _over_quota(state, tokenized.tenant)
        or _no_room(state, tokenized)
    )
    if refusal is None:
        return None
    state.refused.pop(key, None)  # the oldest are first
    if len(state.refused) >= MAX_REFUSED:
        del state.refused[next(iter(state.refused))]
    if refusal[0] != 503:
        state.counters.count_rejected(refusal[0])
    rejected = rejection(tokenized, *refusal)
    state.refused[key] = (state.now_us + REFUSED_US, submission, rejected)
    return rejected


def refuse_takeover(state: State, source: str, tokenized: Tokenized) -> Rejected | None:
    """The refusal of a dead scheduler's request from the detokenizer `source`; None to accept. The queue's
    limits do not apply: another scheduler has accepted it. A 503 is not counted: the detokenizer retries."""
    refusal: Refusal | None = None
    shard = source.removeprefix("detokenizer.")
    if shard not in state.detokenizers and shard not in state.draining_detokenizers:
        refusal = 503, f"{source} is not ready", RETRY_AFTER_MS
    elif len(tokenized.reasons) != tokenized.n or prompt_length(tokenized) < 1:
        refusal = 400, "`reasons` or `generated` does not have an entry for each choice", 0
    refusal = refusal or _refusal(state, tokenized, prompt_length(tokenized))
    if refusal is None:
        return None
    if refusal[0] != 503:
        state.counters.count_rejected(refusal[0])
    return rejection(tokenized, *refusal)


def prompt_length(tokenized: Tokenized) -> int:
    """Tokens of the prompt, without generated tokens that may follow it."""
    return len(tokenized.tokens) - sum(tokenized.generated)


def received_us(state: State, tokenized: Tokenized) -> int:
    """When a tokenizer received a request that arrives now, without the time of messages."""
    return state.now_us - tokenized.age_us - tokenized.waited_us


def _refusal(state: State, tokenized: Tokenized, prompt: int) -> Refusal | None:
    """Why a request with `prompt` prompt tokens can never be served, or not now; None if it can."""
    key = (tokenized.tenant, tokenized.request)
    cancelled_us = state.tombstones.pop(key, None)
    if cancelled_us is not None and received_us(state, tokenized) <= cancelled_us + OVERTAKE_US:
        return 499, "cancelled by the client before it arrived", 0
    if key in state.requests:
        return 409, f"a request with the id {tokenized.request!r} is running: choose another id", 0
    if state.draining:
        return 503, "the scheduler is draining: send the request again", RETRY_AFTER_MS
    if not prompt:
        return 400, "the prompt is empty: send at least one token", 0
    if serving(state, tokenized.model):
        return unfit(state, tokenized, prompt)
    waits = state.limits.cold_start_wait_us and not any(tokenized.generated)
    return None if waits or _can_come_back(state) else no_executor(tokenized)


def executor_wait_us(state: State) -> int:
    """How long a request waits for an executor of its model; 0: it does not wait."""
    return max(state.limits.cold_start_wait_us, WAKE_WAIT_US if _can_come_back(state) else 0)


def _can_come_back(state: State) -> bool:
    """Whether executors sleep, are about to, or may be unloaded while others use their memory: they can
    come back."""
    return (
        state.limits.shares_memory
        or bool(state.asleep)
        or any(executor.sleep_by_us for executor in state.executors.values())
    )


def no_executor(tokenized: Tokenized) -> Refusal:
    """The refusal of a request whose model has no executor."""
    return 503, f"no executor of {tokenized.model!r} is ready: see `headrace status`", RETRY_AFTER_MS


def unfit(state: State, tokenized: Tokenized, prompt: int) -> Refusal | None:
    """Why none of the executors, of which there is one, can ever serve a request; None if one can."""
    executors = _unlike(state, tokenized.model)
    if unknown := _unknown(executors, tokenized) or _without_place(executors, tokenized):
        return 400, unknown, 0
    if prompt + tokenized.max_tokens > _most_tokens(executors, tokenized.n, prompt):
        return 400, _too_large(executors, tokenized, prompt), 0
    return None


def _unknown(executors: list[Executor], tokenized: Tokenized) -> str:
    """Why no engine can serve the request; empty if one can."""
    vocab = max(executor.hello.vocab for executor in executors)
    for what, ids in (("prompt", tokenized.tokens), ("logit_bias", tokenized.sampling.bias_ids)):
        if ids and (largest := max(ids)) >= vocab:
            return (
                f"`{what}`: the weights of {tokenized.model!r} have {vocab} tokens, and no token {largest}, "
                "which its tokenizer knows: leave it out"
            )
    most = [executor.hello.max_stop_ids for executor in executors]
    if min(most) and len(tokenized.stop_ids) > max(most):
        return (
            f"`stop_token_ids`: {len(tokenized.stop_ids)} with the model's own are over the {max(most)} of "
            "the engine: ask for fewer"
        )
    if tokenized.prompt_logprobs and not all(executor.hello.scores_prompts for executor in executors):
        return f"`prompt_logprobs`: {NO_PROMPT_SCORES}"
    return ""


def _without_place(executors: list[Executor], tokenized: Tokenized) -> str:
    if not tokenized.adapter:
        return ""
    part = adapting()
    none = "`model`: the scheduler has no adapters"
    return none if part is None else str(part.refusal(executors, tokenized))


def _over_quota(state: State, tenant: str) -> Refusal | None:
    """Why the quota of a tenant allows no request now; None if it does."""
    if (found := state.quotas.wait(tenant, state.now_us)) is None:
        return None
    what, wait_us = found
    why = f"the quota of {tenant!r:.80}, {what}, is used up: try again in {wait_us / 1e6:.1f} s"
    return 429, why, -(-wait_us // 1000)


def _no_room(state: State, tokenized: Tokenized) -> Refusal | None:
    """Why a request may not wait here now; None if it may."""
    if not state.detokenizers:
        return 503, "no detokenizer is ready: see `headrace status`", RETRY_AFTER_MS
    own = state.waiting.tenants.get(tokenized.tenant)
    if own is None and len(state.waiting.tenants) < MAX_CLIENTS:
        return None  # its tenant has no waiting request: a retry would find no better moment
    if _is_full(state, tokenized, own or TenantBacklog()):
        waits = f"{len(state.waiting)} requests are waiting, {own.groups if own else 0} of them yours"
        return 429, f"{waits}: try again later", RETRY_AFTER_MS
    return _too_late(state, tokenized)


def _is_full(state: State, tokenized: Tokenized, own: TenantBacklog) -> bool:
    """True if the queue is full, and the tenant has its equal share of it."""
    waiting, limits = state.waiting, state.limits
    tenants = max(len(waiting.tenants), 1)
    groups, tokens = 1, tokenized.n * len(tokenized.tokens)
    return is_over_share(
        own.groups + groups, len(waiting) + groups, limits.max_waiting, tenants
    ) or is_over_share(
        own.tokens + tokens, waiting.queued_tokens + tokens, limits.max_waiting_tokens, tenants
    )


def _too_late(state: State, tokenized: Tokenized) -> Refusal | None:
    """The refusal of a request with a TTFT estimate above its class's limit: it would only waste time in the
    queue. Never refuses a request with nothing ahead of it but sequences that it may preempt."""
    level = requests.level_of(tokenized.slo_class)
    limit_us = state.limits.classes[level].ttft_us
    groups, _ = state.waiting.ahead(tokenized.model, (tokenized.tenant, level))
    there = [e.running for e in serving(state, tokenized.model)]
    if not groups and not all(any(_must_stay(s, level) for s in running) for running in there):
        return None
    if not limit_us or (wait_us := ttft_us(state, tokenized, level, limit_us)) <= limit_us:
        return None
    message = (
        f"the first token would take {wait_us / 1e6:.1f} s, over the {limit_us / 1e6:g} s of class "
        f"{tokenized.slo_class}: try again later, or ask in class batch"
    )
    return 429, message, max(RETRY_AFTER_MS, (wait_us - limit_us) // 1000)


def with_possible_max_tokens(state: State, tokenized: Tokenized) -> Tokenized:
    """The request, with `max_tokens` cut to what can fit if the client gave none: the tokenizer has filled in
    the rest of the model's context, which may exceed an executor's KV cache."""
    if not tokenized.open_end:
        return tokenized
    prompt = prompt_length(tokenized)
    room = _most_tokens(_unlike(state, tokenized.model), tokenized.n, prompt) - prompt
    room = max(room, *tokenized.generated) if tokenized.generated else room
    return dataclasses.replace(tokenized, max_tokens=room) if 0 < room < tokenized.max_tokens else tokenized


def serving(state: State, model: str) -> list[Executor]:
    """The executors on which requests for a model may start."""
    served = state.by_model.get(model)
    return [e for e in served.executors if not e.draining] if served is not None else []


def _unlike(state: State, model: str) -> list[Executor]:
    """As `serving`, but only one of executors that can serve the same requests."""
    served = state.by_model.get(model)
    return serving(state, model) if served is None or state.some_leave else served.unlike


def _most_tokens(executors: list[Executor], n: int, prompt: int) -> int:
    """The greatest length, in tokens, of each of `n` choices of a prompt on one of the executors; 0 if none
    has the slots. Choices share the full blocks of their prompt, as in headroom.can_fit."""
    most = 0
    for hello in (e.hello for e in executors if n <= e.hello.slots):
        blocks = (hello.blocks + (n - 1) * (prompt // hello.block_tokens)) // n
        most = max(most, min(hello.max_context, MAX_TOKENS, blocks * hello.block_tokens))
    return most


def _too_large(executors: list[Executor], tokenized: Tokenized, prompt: int) -> str:
    context = max(e.hello.max_context for e in executors)
    tokens = max(e.hello.blocks * e.hello.block_tokens for e in executors)
    least = 1 if tokenized.open_end else tokenized.max_tokens
    cure = "shorten the prompt" if tokenized.open_end else "ask for fewer max_tokens"
    return (
        f"{prompt} prompt tokens + {least} to generate, times {tokenized.n}, never fit: the context is "
        f"{context} tokens and the KV cache holds {tokens}; {cure}"
        + (", or for fewer choices" if tokenized.n > 1 else "")
    )


def ttft_us(state: State, tokenized: Tokenized, level: int, limit_us: int = 0) -> int:
    """The TTFT estimate of a request that arrives now; 0 while the cost models have seen too little. If an
    upper bound is within `limit_us`, that bound.

        prompt tokens ahead of it and its own, at the speed of prefill with the present decodes
        + the wait for a slot and for blocks, from the running sequences and the mean output
        + one loop

    Ahead are running and waiting prompts of its class and higher ones. One slot is enough: choices start one
    by one.
    """
    executors = serving(state, tokenized.model)
    executors = [e for e in executors if e.role != DECODE] or executors
    if not executors or min([e.cost_model.seen for e in executors]) < max(MIN_STEPS_SEEN, MIN_SEEN):
        return 0
    groups, tokens = state.waiting.ahead(tokenized.model, (tokenized.tenant, level))
    ahead = sum([prompt_tokens(executor, level) for executor in executors]) + tokens + len(tokenized.tokens)
    slots, tokens = groups // len(executors) + 1, tokens // len(executors) + len(tokenized.tokens)
    output = state.waiting.output_tokens(tokenized.model, level, state.mean_output_tokens)
    most_wait_us, us = _most_wait_us(state, executors[0], slots, tokens, output), 0
    for some in (executors[:1], executors):  # the first one alone takes longer
        us = ahead * 1_000_000_000 // max(sum([_speed(e) for e in some]), 1)
        us += min([e.cost_model.loop_us for e in some])
        if us + most_wait_us <= limit_us:
            return us + most_wait_us  # the others may be sooner
    return us + min(_slot_wait_us(state, e, level, slots, tokens, output) for e in executors)


def prompt_tokens(executor: Executor, level: int) -> int:
    """Prompt tokens left to compute on an executor, of this class and higher ones."""
    return sum(executor.row_sums().prompt_tokens[: level + 1])


def _must_stay(s: Sequence, level: int) -> bool:
    """Whether a request of this class cannot preempt the sequence."""
    return s.level <= level or s.turn.pinned


def _speed(executor: Executor) -> int:
    """Speed of prefill beside the present decodes, in tokens in 1,000 s."""
    sums = executor.row_sums()
    sums.speed = sums.speed or 1_000_000_000_000 // max(ns_per_token(executor), 1)
    return sums.speed


def ns_per_token(executor: Executor) -> int:
    """Time per token of a prompt chunk in a step with the present decodes."""
    sums = executor.row_sums()
    shape = StepShape(
        rows=sums.decodes + 1,
        tokens=sums.decodes + CHUNK_TOKENS,
        kv_tokens=sums.decode_tokens + CHUNK_TOKENS,
        attention=sums.decode_tokens + CHUNK_TOKENS * CHUNK_TOKENS // 2,
    )
    return executor.cost_model.predict_us(shape) * 1000 // CHUNK_TOKENS


def _most_wait_us(state: State, executor: Executor, slots: int, tokens: int, output: int) -> int:
    """An upper bound of `_slot_wait_us`, without a loop over rows: none is preempted, and each takes the mean
    output to end."""
    pool, running = executor.pool, len(executor.running)
    slots -= executor.hello.slots - running
    if slots <= 0 and blocks_for(tokens, pool.block_tokens) <= pool.unreserved_blocks + pool.coming_blocks:
        return 0
    turns = max(-(-(slots - running) // _used_slots(executor)), 0)
    return (state.mean_output_tokens + turns * output) * executor.pace.step_us


def _used_slots(executor: Executor) -> int:
    """Slots of running sequences, and of those that have ended but are in a step in flight; at least 1."""
    return max(executor.hello.slots - len(executor.pool.free_slots), 1)


def _slot_wait_us(state: State, executor: Executor, level: int, slots: int, tokens: int, output: int) -> int:
    """Time until slots and blocks are free for the work ahead, the new request included, of which each takes
    `output` steps. Lower classes free theirs at once."""
    pool = executor.pool
    ends, other_blocks = _ends(state, executor, level)
    slots -= executor.hello.slots - len(ends)
    free = pool.unreserved_blocks + pool.coming_blocks + other_blocks
    blocks = blocks_for(tokens, pool.block_tokens) - free
    if slots <= 0 and blocks <= 0:
        return 0
    steps = 0
    for left, held in ends:
        if slots <= 0 and blocks <= 0:
            break
        slots, blocks, steps = slots - 1, blocks - held, left
    if slots > 0:  # waiting sequences run and end in turn, too
        steps += -(-slots // _used_slots(executor)) * output
    return steps * executor.pace.step_us


def _ends(state: State, executor: Executor, level: int) -> tuple[list[tuple[int, int]], int]:
    """The ends of the sequences that a request of this class cannot preempt, in order (tokens left, blocks
    held), and the blocks of the others. Sorted again only after the rows or the mean output have changed."""
    sums, mean = executor.row_sums(), state.mean_output_tokens
    known = sums.ends.get(level)
    if known is None or known[0] != mean:
        stay = [s for s in executor.running if _must_stay(s, level)]
        others = sum([len(s.table) for s in executor.running]) - sum([len(s.table) for s in stay])
        known = sums.ends[level] = mean, sorted([(_left(state, s), len(s.table)) for s in stay]), others
    return known[1:]


def _left(state: State, s: Sequence) -> int:
    """Expected tokens until the sequence ends, from the mean output."""
    return max(min(state.mean_output_tokens, s.max_length - s.prompt_tokens) - s.generated, 1)


DIGEST_CHARS = 12  # characters of a digest


def expected_kind(state: State, model: str) -> str:
    """The digest of the kind that serves a model; empty while there is none."""
    kind = state.model_kinds.get(model)
    return kind.digest if kind is not None else ""


def may_run(executor: Executor, request: Request) -> bool:
    """Whether a request may start or resume on an executor: the model must match, and the kind if it has
    generated tokens."""
    hello = executor.hello
    if hello.model != request.tokenized.model or executor.draining:
        return False
    return hello.model_digest == request.model_digest or not any(
        sequence.generated for sequence in request.sequences
    )


def stranded(state: State, request: Request) -> str:
    """Why no executor can continue a request; empty if one can, now or when it is back."""
    others = serving(state, request.tokenized.model)
    if not others or any(may_run(executor, request) for executor in others):
        return ""
    return (
        f"the executors that generated its tokens are gone (model digest "
        f"{request.model_digest[:DIGEST_CHARS] or 'not given'}), and the others have another kind "
        f"({shown_kind(others[0].hello)}): send the request again"
    )


def shown_kind(hello: ExecHello) -> str:
    return hello.model_digest[:DIGEST_CHARS] or "not given"
