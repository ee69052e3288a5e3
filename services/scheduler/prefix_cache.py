"""The prefix cache as sequences use it: keys of their blocks, hits before a chunk, new blocks after it.

A block gets its key when the step that fills it is planned: an executor runs steps in order, so whoever is
planned later finds it filled. Tokens that are not known yet (sampled by steps in flight) have no key.
"""

from __future__ import annotations

from itertools import takewhile

from services.scheduler.state.requests import NO_TAIL, Sequence, Tail
from services.scheduler.state.state import Executor
from shared.kv_blocks import extend, root_key, tail_key


def extend_keys(executor: Executor, sequence: Sequence) -> None:
    """Make the keys of its full blocks, as this executor's cache knows them."""
    hello = executor.hello
    root = root_key(hello.fingerprint, sequence.request.tokenized.tenant)
    if (root, hello.block_tokens) != sequence.keyed:
        sequence.keyed, sequence.keys = (root, hello.block_tokens), []
    _key(sequence)


def lookup(executor: Executor, sequence: Sequence) -> list[int]:
    """Cached blocks of the longest prefix; the last token is always computed, since it is sampled from."""
    hello = executor.hello
    extend_keys(executor, sequence)
    return executor.pool.match(sequence.keys[: (len(sequence.tokens) - 1) // hello.block_tokens])


def lost_after(executor: Executor, sequence: Sequence, found: int) -> int:
    """How many blocks of its prompt behind the first `found` the device had, and gave away without a copy."""
    lost = executor.pool.lost
    return sum(1 for _ in takewhile(lost.__contains__, sequence.keys[found:])) if lost else 0


def tail_block(executor: Executor, sequence: Sequence, hits: int) -> int | None:
    """The block with the tail of a preempted sequence, if it is here and follows `hits` cached blocks."""
    tail = sequence.tail
    if not tail.key or tail.at != hits or tail.root != sequence.keyed[0]:
        return None
    return executor.pool.writable(tail.key)


def tail_is_copied(executor: Executor, sequence: Sequence) -> bool:
    """True while a tier below takes the tail, and nobody may write on it."""
    if not sequence.tail.key:
        return False
    block = executor.pool.block_of.get(sequence.tail.key)
    return block is not None and block in executor.pool.copies


def claim_tail(executor: Executor, sequence: Sequence, block: int) -> None:
    """Go on writing in the block with its tail."""
    executor.pool.claim(block)
    sequence.table.append(block)
    sequence.computed += sequence.tail.valid


def adopt(executor: Executor, sequence: Sequence, blocks: list[int]) -> int:
    """Put cached blocks at the end of its table instead of computing them. Returns how many of its tokens
    nobody had computed for it before."""
    executor.pool.adopt(blocks)
    start = sequence.computed
    sequence.table.extend(blocks)
    sequence.computed += len(blocks) * executor.hello.block_tokens
    sequence.registered = len(sequence.table)
    new = max(0, sequence.computed - max(sequence.most_computed, start))
    sequence.most_computed = max(sequence.most_computed, sequence.computed)
    sequence.cached_tokens += new
    return new


def catch_up(executor: Executor, sequence: Sequence) -> None:
    """Adopt what others have computed of its prompt since it was admitted."""
    block_tokens, pool = executor.hello.block_tokens, executor.pool
    while sequence.computed == len(sequence.table) * block_tokens:
        at = len(sequence.table)
        if (at + 1) * block_tokens >= sequence.opened_length:
            return
        block = pool.block_of.get(sequence.keys[at])
        if block is None:
            return
        if sequence.reserved:  # not of a chunk beyond those that were promised
            sequence.reserved -= 1
            pool.unreserve(1)
        adopt(executor, sequence, [block])


def register(executor: Executor, sequence: Sequence, upto_tokens: int) -> None:
    """Offer its full blocks of known tokens below `upto_tokens` to others."""
    full = min(upto_tokens, len(sequence.tokens)) // executor.hello.block_tokens
    if full <= sequence.registered:
        return
    _key(sequence)
    fresh = slice(sequence.registered, full)
    executor.pool.register(sequence.table[fresh], sequence.keys[fresh])
    sequence.registered = full


def register_tail(executor: Executor, sequence: Sequence) -> None:
    """Before a preemption: offer what it has computed to itself, full blocks and the partial one behind them.
    Its last token is computed again in any case, since it is sampled from."""
    block_tokens = executor.hello.block_tokens
    computed = min(sequence.computed, len(sequence.tokens) - 1)
    at, valid = divmod(computed, block_tokens)
    register(executor, sequence, at * block_tokens)
    if sequence.tail.at < at:
        sequence.tail = NO_TAIL  # of a preemption before: its block is full now
    if not valid or at >= len(sequence.table):
        return
    if any(target == sequence.table[at] for _, target in executor.fork_copies):
        return  # of a fork that no step has made yet
    _key(sequence)
    key = executor.pool.key_of[sequence.table[at]]  # it has one if its last token is the sequence's last
    if key is None:
        before = sequence.keys[at - 1] if at else sequence.keyed[0]
        key = tail_key(before, sequence.tokens[at * block_tokens : computed])
        executor.pool.register_tail(sequence.table[at], key, valid)
    sequence.tail = Tail(at, valid, key, sequence.keyed[0])


def _key(sequence: Sequence) -> None:
    root, block_tokens = sequence.keyed
    if len(sequence.keys) < len(sequence.tokens) // block_tokens:
        extend(sequence.keys, root, sequence.tokens, block_tokens, len(sequence.tokens))
