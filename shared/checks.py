"""What a message promises beyond its types: columns of one length, counts that add up, sane numbers.

Checked once, where bytes become a message, so that no actor meets a row that is not there. Whatever
depends on the receiver's state (is this slot open?) is the receiver's to check. Runs for each message of
each step: a few microseconds at 256 rows.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

from shared.messages import (
    Beat,
    Close,
    Ended,
    ExecHello,
    Ints,
    Open,
    PromptTokens,
    Resend,
    SlotOpen,
    StepPlan,
    StepResult,
    StreamAt,
    StreamReset,
    Tokenized,
    Tokens,
)
from shared.messages.steps import PIECE_LANES

MAX_PARTS = 256  # of one token list: 3 million tokens
MAX_CHOICES = 1_024
MAX_BLOCKS, MAX_SLOTS = 2**24, 2**16  # of one executor: 16 M blocks of 2 MiB are 32 TiB
MAX_INTERVAL_US = 3_600_000_000
MAX_NUMBER = 2**53  # of a stream
MAX_PROCESSORS, MAX_PROCESSOR_CHARS = 8, 4_096  # of one request; a name with its arguments
MAX_ROW_ERROR_CHARS = 1_000
MAX_STAGES = 64  # of a pipeline
MAX_PIECES = 256  # of a step in halves, in its result

_SEED_END = 2**64
_USUAL = 1_024  # rows: shorter columns of these contents, the usual ones, are compared as bytes
_ONES = array("i", [1] * _USUAL).tobytes()
_COUNTING = array("i", range(_USUAL)).tobytes()


def flaw(message: object) -> str:
    """What is wrong with a message, empty when nothing is."""
    check = _CHECKS.get(type(message).__name__)
    return "" if check is None else check(message)


def _is(column: Ints, usual: bytes) -> bool:
    """True when a column begins `usual`: a fiftieth of the time of a look at each row."""
    return column.tobytes() == usual[: 4 * len(column)]


def _negative(column: Ints) -> bool:
    """True when a number in a column is: its last byte, the highest, is over 127."""
    return not column.tobytes()[3::4].isascii()


def _total(counts: Ints) -> int:
    return len(counts) if _is(counts, _ONES) else sum(counts)


def _scores(m: StepResult | Tokens | PromptTokens) -> bool:
    """Log probabilities: none, or one for each id with its alternatives."""
    if not (m.logprobs or m.top_counts or m.top_ids or m.top_logprobs):
        return True
    if not len(m.ids) == len(m.logprobs) == len(m.top_counts) or _negative(m.top_counts):
        return False
    return sum(m.top_counts) == len(m.top_ids) == len(m.top_logprobs) and not _negative(m.top_ids)


def _step_plan(m: StepPlan) -> str:
    rows, tables = len(m.slots), len(m.table_slots)
    if not len(m.starts) == len(m.counts) == len(m.from_device) == rows:
        return "its forward columns differ in length"
    if _negative(m.slots) or _negative(m.starts) or not (_is(m.counts, _ONES) or min(m.counts) > 0):
        return "a forward row has a negative slot or start, or no token"
    if len(m.sample_rows) != len(m.sample_slots) or len(m.copy_from) != len(m.copy_to):
        return "its sample or copy columns differ in length"
    sampled = m.sample_rows
    if not (len(sampled) <= rows and _is(sampled, _COUNTING)) and (
        _negative(sampled) or max(sampled) >= rows
    ):
        return "a sample row names no forward row"
    if _negative(m.sample_slots) or _negative(m.copy_from) or _negative(m.copy_to):
        return "a sample row or a copy has a negative number"
    if not tables:
        return "" if not m.table_blocks else "it has table entries of no slot"
    if not len(m.table_first) == len(m.table_counts) == tables:
        return "its table columns differ in length"
    if any(map(_negative, (m.table_slots, m.table_first, m.table_counts, m.table_blocks))):
        return "a table column has a negative number"
    return "" if _total(m.table_counts) == len(m.table_blocks) else "its table counts do not add up"


def _step_result(m: StepResult) -> str:
    if len(m.ids) != len(m.done):
        return "its columns differ in length"
    if m.queued_us < 0 or m.host_us < 0:
        return "a duration is negative"
    if m.row_errors and (wrong := _row_errors(m)):
        return wrong
    if m.pieces and (wrong := _pieces(m.pieces)):
        return wrong
    return "" if _scores(m) else "its log probabilities do not add up"


def _pieces(pieces: Ints) -> str:
    if len(pieces) > 3 * MAX_PIECES:
        return f"it has over {MAX_PIECES} pieces"
    if len(pieces) % 3 or _negative(pieces) or max(pieces[::3]) >= len(PIECE_LANES):
        return "a piece of it has no lane, begin or length"
    return ""


def _row_errors(m: StepResult) -> str:
    rows = {row for row, _ in m.row_errors}
    if len(rows) < len(m.row_errors) or min(rows) < 0 or max(rows) >= len(m.ids):
        return "a row error names no row, or one twice"
    if not all(0 < len(why) <= MAX_ROW_ERROR_CHARS for _, why in m.row_errors):
        return f"a row error is empty or over {MAX_ROW_ERROR_CHARS} characters"
    return ""


def _processors(m: Tokenized | SlotOpen) -> str:
    if len(m.processors) > MAX_PROCESSORS:
        return f"it has over {MAX_PROCESSORS} logits processors"
    if not all(0 < len(text) <= MAX_PROCESSOR_CHARS for text in m.processors):
        return f"a logits processor is empty or over {MAX_PROCESSOR_CHARS} characters"
    return ""


def _tokens(m: Tokens) -> str:
    if not len(m.seqs) == len(m.first) == len(m.counts):
        return "its columns differ in length"
    if _negative(m.counts) or _negative(m.first) or _negative(m.ids):
        return "a column has a negative number"
    if _total(m.counts) != len(m.ids):
        return "its counts do not add up"
    return "" if _scores(m) else "its log probabilities do not add up"


def _prompt_tokens(m: PromptTokens) -> str:
    return "" if _scores(m) else "its log probabilities do not add up"


def _parts(m: Tokenized | Open | SlotOpen) -> str:
    if not 0 <= m.part < m.parts <= MAX_PARTS:
        return f"part {m.part} of {m.parts} is not one of at most {MAX_PARTS}"
    return "a token id is negative" if _negative(m.tokens) else ""


def _tokenized(m: Tokenized) -> str:
    if m.part:
        return _parts(m)
    if not (1 <= m.n <= MAX_CHOICES and m.max_tokens >= 1 and m.timeout_us >= 0 and 0 <= m.seed < _SEED_END):
        return "n, max_tokens, timeout_us or seed is out of range"
    if not (m.request and m.inbox) or "" in m.stop:
        return "its request, inbox or a stop string is empty"
    if len(m.sampling.bias_ids) != len(m.sampling.bias_values):
        return "its bias columns differ in length"
    if not len(m.generated) == len(m.reasons) in (0, m.n) or _negative(m.generated):
        return "what it has generated is not told of each choice"
    if min(m.age_us, m.first_us) < 0:
        return "its age is negative"
    return _processors(m) or _parts(m)


def _open(m: Open) -> str:
    if not 0 <= m.choice < m.choices <= MAX_CHOICES:
        return f"choice {m.choice} is not one of {m.choices}"
    return "a stop string is empty" if "" in m.stop else _parts(m)


def _close(m: Close) -> str:
    return "" if m.final >= 0 else "its final index is negative"


def _ended(m: Ended) -> str:
    return "" if m.index >= 0 else "its index is negative"


def _slot_open(m: SlotOpen) -> str:
    if m.slot < 0 or m.max_length < 0 or not 0 <= m.seed < _SEED_END:
        return "slot, max_length or seed is out of range"
    if len(m.sampling.bias_ids) != len(m.sampling.bias_values):
        return "its bias columns differ in length"
    return _processors(m) or _parts(m)


def _exec_hello(m: ExecHello) -> str:
    sizes = (m.block_tokens, m.max_step_tokens, m.max_context, m.vocab)
    sane = 1 <= m.blocks <= MAX_BLOCKS and 1 <= m.slots <= MAX_SLOTS and min(sizes) >= 1
    sane = sane and 1 <= m.stages <= MAX_STAGES and m.two_stream_tokens >= 0
    return "" if sane else "its blocks, slots, sizes or stages are out of range"


def _resend(m: Resend) -> str:
    return "" if 0 < m.first_seq < MAX_NUMBER else "its number is out of range"


def _stream_reset(m: StreamReset) -> str:
    return "" if 0 < m.next_seq < MAX_NUMBER else "its number is out of range"


def _stream_at(m: StreamAt) -> str:
    return "" if 0 <= m.last_seq < MAX_NUMBER else "its number is out of range"


def _beat(m: Beat) -> str:
    return "" if 0 < m.interval_us <= MAX_INTERVAL_US else "its interval is out of range"


_CHECKS: dict[str, Callable[[Any], str]] = {
    "Beat": _beat, "Close": _close, "Ended": _ended, "ExecHello": _exec_hello, "Open": _open,
    "PromptTokens": _prompt_tokens, "Resend": _resend, "SlotOpen": _slot_open, "StepPlan": _step_plan,
    "StepResult": _step_result, "StreamAt": _stream_at, "StreamReset": _stream_reset,
    "Tokenized": _tokenized, "Tokens": _tokens,
}  # fmt: skip
