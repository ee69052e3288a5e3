"""Connects sequences with the prefix cache: keys of their blocks, hits before a chunk, new blocks after it.

A block gets its key when the step that fills it is planned: an executor runs steps in order, so a later step
finds it filled. Tokens that are not known yet (sampled by steps in flight) have no key. Admission, the step
planner and preemption call it. The cache itself is in state/block_pool.py.
"""

from __future__ import annotations

from itertools import takewhile

from services.scheduler.state.requests import NO_TAIL, Sequence, Tail
from services.scheduler.state.state import Executor
from shared.kv_blocks import extend, root_key, tail_key


def extend_keys(executor: Executor, sequence: Sequence) -> None:
    """Compute the keys of the sequence's full blocks for this executor's kind of KV. Another executor may be
    the last that was asked about it."""
    keyed, tokens = keyed_of(executor, sequence), sequence.tokens
    if keyed != sequence.keyed:
        sequence.keyed, sequence.keys = keyed, []
    root, block_tokens = keyed
    if len(sequence.keys) < len(tokens) // block_tokens:
        extend(sequence.keys, root, tokens, block_tokens, len(tokens))


def keyed_of(executor: Executor, sequence: Sequence) -> tuple[bytes, int]:
    """The root of a sequence's keys on this executor, and the tokens of a block. A request for the log
    probabilities of its prompt has keys of its own: a hit of another one's blocks would skip their rows."""
    hello, tokenized, tenant = executor.hello, sequence.request.tokenized, sequence.tenant
    if tokenized.prompt_logprobs:
        tenant = f"{tenant} {tokenized.request} {sequence.request.arrival_us}"
    return root_key(hello.fingerprint, tenant, tokenized.adapter), hello.block_tokens


def lookup(executor: Executor, sequence: Sequence) -> list[int]:
    """Cached blocks of the longest prefix. The last token is always computed: the next is sampled from it."""
    hello = executor.hello
    extend_keys(executor, sequence)
    return executor.pool.match(sequence.keys[: (len(sequence.tokens) - 1) // hello.block_tokens])


def lost_after(executor: Executor, sequence: Sequence, found: int) -> int:
    """How many blocks of its prompt after the first `found` were evicted without a copy."""
    lost = executor.pool.lost
    return sum(1 for _ in takewhile(lost.__contains__, sequence.keys[found:])) if lost else 0


def tail_block(executor: Executor, sequence: Sequence, hits: int) -> int | None:
    """The block with the tail of a preempted sequence, if it is cached and follows `hits` cached blocks."""
    tail = sequence.tail
    if not tail.key or tail.at != hits or tail.root != sequence.keyed[0]:
        return None
    return executor.pool.writable(tail.key)


def is_tail_copied(executor: Executor, sequence: Sequence) -> bool:
    """True while the tail is copied to a tier, and must not be written."""
    if not sequence.tail.key:
        return False
    block = executor.pool.block_of.get(sequence.tail.key)
    return block is not None and block in executor.pool.copies


def claim_tail(executor: Executor, sequence: Sequence, block: int) -> None:
    """Take the block with the sequence's tail, to append to it."""
    executor.pool.claim(block)
    sequence.table.append(block)
    executor.advance(sequence, sequence.tail.valid)


def adopt(executor: Executor, sequence: Sequence, blocks: list[int]) -> int:
    """Append cached blocks to the table of a running sequence instead of computing them. Returns how many of
    their tokens were never computed for this sequence."""
    executor.pool.adopt(blocks)
    start = sequence.computed
    sequence.table.extend(blocks)
    executor.advance(sequence, len(blocks) * executor.hello.block_tokens)
    sequence.registered = sequence.adopted = len(sequence.table)
    new = max(0, sequence.computed - max(sequence.most_computed, start))
    sequence.most_computed = max(sequence.most_computed, sequence.computed)
    sequence.cached_tokens += new
    return new


def catch_up(executor: Executor, sequence: Sequence) -> None:
    """Adopt blocks of its prompt that other sequences have computed since its admission."""
    block_tokens, pool = executor.hello.block_tokens, executor.pool
    while sequence.computed == len(sequence.table) * block_tokens:
        at = len(sequence.table)
        if (at + 1) * block_tokens >= sequence.opened_length:
            return
        block = pool.block_of.get(sequence.keys[at])
        if block is None:
            return
        if sequence.reserved:  # 0 in a chunk beyond the reservation
            sequence.reserved -= 1
            pool.unreserve(1)
        adopt(executor, sequence, [block])


def register(executor: Executor, sequence: Sequence, upto_tokens: int) -> None:
    """Give keys to its full blocks of known tokens below `upto_tokens`: others may adopt them."""
    full = min(upto_tokens, len(sequence.tokens)) // executor.hello.block_tokens
    if full <= sequence.registered:
        return
    extend_keys(executor, sequence)
    fresh = slice(sequence.registered, full)
    executor.pool.register(sequence.table[fresh], sequence.keys[fresh])
    sequence.registered = full


def register_tail(executor: Executor, sequence: Sequence) -> None:
    """Before a preemption: give keys to its computed blocks, and to the partial one after them.
    The last token is computed again in any case, since the next one is sampled from it."""
    block_tokens = executor.hello.block_tokens
    computed = min(sequence.computed, len(sequence.tokens) - 1)
    at, valid = divmod(computed, block_tokens)
    register(executor, sequence, at * block_tokens)
    if sequence.tail.at < at:
        sequence.tail = NO_TAIL  # left by an earlier preemption: its block is full now
    if not valid or at >= len(sequence.table):
        return
    if any(target == sequence.table[at] for _, target in executor.fork_copies):
        return  # no step has made the fork's copy yet
    extend_keys(executor, sequence)
    key = executor.pool.key_of[sequence.table[at]]  # it has one if its last token is the sequence's last
    if key is None:
        before = sequence.keys[at - 1] if at else sequence.keyed[0]
        key = tail_key(before, sequence.tokens[at * block_tokens : computed])
        executor.pool.register_tail(sequence.table[at], key, valid)
    sequence.tail = Tail(at, valid, key, sequence.keyed[0])
