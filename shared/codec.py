"""The codec turns messages into bytes and back: a positional msgpack array, version first.

    [version, kind, source, epoch, seq, trace, field, field, ...]

Columns are raw little-endian bytes, nested records are arrays. A decoder ignores unknown fields (a newer
sender) and fills missing ones with their defaults (an older sender). Another version, an unknown kind or a
wrong type is a WireError.

`validation_error` checks the invariants beyond types: columns of equal length, counts that add up, numbers in
range. `decode` checks them once, so that actors can rely on them; the receiver checks conditions that depend
on its state (is this slot open?). The check takes a few microseconds for a message with 256 rows.
"""

from __future__ import annotations

import dataclasses
import sys
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

import msgpack

from shared import messages
from shared.errors import PayloadTooLarge, WireError

if sys.byteorder != "little":  # columns would need a byte swap that nothing tests
    raise ImportError("Headrace's wire format needs a little-endian machine")

VERSION = 1
MAX_MESSAGE_BYTES = 64 * 1024
PAGE_TOKENS = 12_000  # 48 kB of ids: with the other fields under MAX_MESSAGE_BYTES
FRAGMENT_BYTES = 60_000  # with the envelope under MAX_MESSAGE_BYTES
MAX_OPTIONS_BYTES = 56 * 1024  # of a Tokenized without its tokens: its Open and SlotOpen fit as well
_ENVELOPE_BYTES = 1_024  # more than source, numbers and trace take

# limits of `validation_error`
MAX_PARTS = 256  # of one token list, or of fragments: 15 MB
MAX_TOKENS = (MAX_PARTS - 1) * PAGE_TOKENS  # of one sequence: 3 million, the first part may be all options
MAX_CHOICES = 1_024
MAX_BLOCKS, MAX_SLOTS = 2**24, 2**16  # of one executor: 16 M blocks of 2 MiB are 32 TiB
MAX_INTERVAL_US = 3_600_000_000
MAX_NUMBER = 2**53  # of a stream
MAX_PROCESSORS, MAX_PROCESSOR_CHARS = 8, 4_096  # of one request; a name with its arguments
MAX_ROW_ERROR_CHARS = 1_000
MAX_STAGES = 64  # of a pipeline
MAX_DRAFTS = 64  # of a row
MAX_PLACES = 256  # of adapters in a step
MAX_SEGMENTS = 256  # timeline segments of a step in its result
MAX_CALLS, MAX_CALL_CHARS = 8, 64  # functions that an Ended names
SESSION_VERBS = ("state", "release", "prefetch", "keep")

WIRE_NAMES = {"Heartbeat": "Beat"}  # kind on the wire by class name, where they differ

_SEED_END = 2**64
_USUAL = 1_024  # rows: shorter columns with the usual contents below are compared as bytes
_ONES = array("i", [1] * _USUAL).tobytes()
_COUNTING = array("i", range(_USUAL)).tobytes()

Paged = (
    messages.Tokenized | messages.Open | messages.SlotOpen
)  # the kinds with `tokens` that may need several parts


@dataclass(frozen=True, slots=True)
class Envelope:
    """A message and its sender. `seq` counts the messages of one sender to one mailbox from 1; 0 is for
    messages outside a stream (heartbeats)."""

    source: str  # kind.id of the sender
    epoch: int
    seq: int
    message: messages.Message
    trace: str = ""


def encode(envelope: Envelope) -> bytes:
    """The wire bytes of a message. Raises PayloadTooLarge over MAX_MESSAGE_BYTES."""
    packed = _packed(envelope)
    if len(packed) > MAX_MESSAGE_BYTES:
        kind = type(envelope.message).__name__
        raise PayloadTooLarge(
            f"{kind} of {len(packed)} bytes is over {MAX_MESSAGE_BYTES}: send it in smaller parts"
        )
    return packed


def _packed(envelope: Envelope) -> bytes:
    message = envelope.message
    layout = _LAYOUT_OF[type(message)]
    head = [VERSION, layout.kind, envelope.source, envelope.epoch, envelope.seq, envelope.trace]
    packed: bytes = msgpack.packb(head + layout.to_row(message))
    return packed


def encode_all(envelope: Envelope) -> Iterator[bytes]:
    """The wire bytes of a message of any length, or of its parts, numbered from its number on. Raises
    PayloadTooLarge before the first one: for request options over MAX_OPTIONS_BYTES, and for more than
    MAX_PARTS."""
    message = envelope.message
    paged = isinstance(message, Paged)
    if not isinstance(message, Paged) or len(message.tokens) <= PAGE_TOKENS:  # most messages
        packed = _packed(envelope)
        if len(packed) <= (MAX_OPTIONS_BYTES if paged else MAX_MESSAGE_BYTES):
            yield packed
            return
    for number, part in enumerate(split(message) if paged else _fragments(message), envelope.seq):
        yield encode(dataclasses.replace(envelope, seq=number, message=part))


def _fragments(message: messages.Message) -> list[messages.Fragment]:
    data = msgpack.packb(to_row(message))
    starts = range(0, len(data), FRAGMENT_BYTES)
    _check_parts(message, len(starts))
    return [
        messages.Fragment(part=part, parts=len(starts), data=data[start : start + FRAGMENT_BYTES])
        for part, start in enumerate(starts)
    ]


def _check_parts(message: messages.Message, parts: int) -> None:
    if parts > MAX_PARTS:
        raise PayloadTooLarge(
            f"{type(message).__name__} needs {parts} messages, over {MAX_PARTS}: send fewer tokens"
        )


def decode(data: bytes) -> Envelope:
    """The message in `data`. Raises WireError for anything else, and for an invalid message."""
    if len(data) > MAX_MESSAGE_BYTES:
        raise WireError(f"{len(data)} bytes are over {MAX_MESSAGE_BYTES}, the most a message may have")
    row = _unpacked(data)
    if not isinstance(row, list) or len(row) < 6:
        raise WireError("not an envelope: an array of at least 6 fields is expected")
    version, kind, source, epoch, seq, trace = row[:6]
    if type(version) is not int or version != VERSION:
        raise WireError(f"protocol version {version!r} is not {VERSION}: upgrade the older service")
    header = (_string(source), _integer(epoch), _integer(seq))
    return Envelope(*header, _validated(kind, row[6:]), _string(trace))


def _unpacked(data: bytes) -> Any:
    try:
        return msgpack.unpackb(data, strict_map_key=True, max_map_len=0)
    except (ValueError, msgpack.UnpackException) as error:
        raise WireError(f"not msgpack: {error}") from error


def _validated(kind: Any, fields: list[Any]) -> messages.Message:
    """The message of a kind with these fields. Raises WireError if it is invalid."""
    layout = _LAYOUTS.get(kind) if isinstance(kind, str) else None
    if layout is None:
        raise WireError(f"unknown message kind {kind!r:.80}")
    message: messages.Message = layout.from_row(fields)
    if wrong := validation_error(message):
        raise WireError(f"{kind}: {wrong}")
    return message


def kind_of(message: object) -> str:
    """The kind of a message on the wire."""
    name = type(message).__name__
    return WIRE_NAMES.get(name, name)


def to_row(message: messages.Message) -> list[Any]:
    """[kind, field, field, ...]: a message of any size as plain data, for files and fragments."""
    layout = _LAYOUT_OF[type(message)]
    return [layout.kind, *layout.to_row(message)]


def from_row(row: list[Any]) -> messages.Message:
    """The message of a row from `to_row`. Raises WireError."""
    layout = _LAYOUTS.get(row[0]) if row and isinstance(row[0], str) else None
    if layout is None:
        raise WireError(f"unknown message kind {row[:1]!r:.80}")
    message: messages.Message = layout.from_row(row[1:])
    return message


def split(message: messages.Message) -> Iterator[messages.Message]:
    """The message itself, or its parts if its token list is too long for one message. The first part carries
    the options, the others only the required fields. Raises PayloadTooLarge for options of a new request
    over MAX_OPTIONS_BYTES, and for more than MAX_PARTS."""
    if not isinstance(message, Paged):
        yield message
        return
    options_bytes = _options_bytes(message)
    tokens, room = message.tokens, MAX_MESSAGE_BYTES - _ENVELOPE_BYTES - options_bytes
    first = max(0, min(PAGE_TOKENS, room // tokens.itemsize))
    if len(tokens) <= first:
        yield message
        return
    starts = range(first, len(tokens), PAGE_TOKENS)
    parts = 1 + len(starts)
    _check_parts(message, parts)
    yield dataclasses.replace(message, part=0, parts=parts, tokens=tokens[:first])
    bare = _LAYOUT_OF[type(message)].bare(message)
    for part, start in enumerate(starts, 1):
        yield dataclasses.replace(bare, part=part, parts=parts, tokens=tokens[start : start + PAGE_TOKENS])


def _options_bytes(message: Paged) -> int:
    row = _LAYOUT_OF[type(message)].to_row(dataclasses.replace(message, tokens=array("i")))
    size = len(msgpack.packb(row))
    known = isinstance(message, messages.Tokenized) and (
        message.age_us or message.generated or message.shard or message.model_digest
    )
    new = isinstance(message, messages.Tokenized) and not known
    if new and size > MAX_OPTIONS_BYTES:  # a resumed request has a few more fields
        raise PayloadTooLarge(
            f"the options of the request take {size} bytes, over {MAX_OPTIONS_BYTES}: "
            "shorten its grammar, stop strings, logit_bias or prediction"
        )
    return size


class Assembler:
    """Joins the parts of long messages from one source, which arrive in order."""

    def __init__(self) -> None:
        self._head: Paged | None = None
        self._tokens: array[int] = array("i")
        self._next = 0
        self._fragments: list[messages.Fragment] = []

    def add(self, message: messages.Message) -> messages.Message | None:
        """The whole message at its last part, None before. Raises WireError for a part out of order, and if
        the joined message is invalid."""
        if isinstance(message, messages.Fragment):
            return self._join(message)
        if not isinstance(message, Paged) or message.parts == 1:
            return message
        if message.part == 0:
            self._head, self._tokens, self._next = message, array("i"), 0
        head = self._head
        follows = head is not None and (type(head), head.parts) == (type(message), message.parts)
        if head is None or not follows or message.part != self._next:
            self._head = None
            raise WireError(f"part {message.part} of {type(message).__name__} does not follow")
        self._tokens += message.tokens
        self._next += 1
        if self._next < message.parts:
            return None
        self._head = None
        return dataclasses.replace(head, part=0, parts=1, tokens=self._tokens)

    def _join(self, fragment: messages.Fragment) -> messages.Message | None:
        if fragment.part == 0:
            self._fragments = []
        fragments = self._fragments
        if fragment.part != len(fragments) or (fragments and fragments[0].parts != fragment.parts):
            self._fragments = []
            raise WireError(f"part {fragment.part} of a message does not follow")
        fragments.append(fragment)
        if len(fragments) < fragment.parts:
            return None
        self._fragments = []
        row = _unpacked(b"".join(each.data for each in fragments))
        kind, *fields = row if isinstance(row, list) and row else [None]
        message = _validated(kind, fields)
        if isinstance(message, messages.Fragment | Paged):
            raise WireError(f"{kind} is not sent in fragments")
        return message


# ---- layouts: how each dataclass becomes a row, computed once at import -------------------------

Convert = Callable[[Any], Any]


class _Layout:
    """The fields of one dataclass with their converters in both directions."""

    def __init__(self, cls: type) -> None:
        hints = get_type_hints(cls, include_extras=True)
        self.kind = WIRE_NAMES.get(cls.__name__, cls.__name__)
        self._cls = cls
        self._names = tuple(f.name for f in dataclasses.fields(cls))
        self._required = sum(
            f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
            for f in dataclasses.fields(cls)
        )
        pairs = [_converters(hints[name]) for name in self._names]
        self._out = tuple((name, out) for name, (out, _) in zip(self._names, pairs, strict=True))
        self._into = tuple((name, into) for name, (_, into) in zip(self._names, pairs, strict=True))

    def to_row(self, message: Any) -> list[Any]:
        return [getattr(message, n) if out is None else out(getattr(message, n)) for n, out in self._out]

    def bare(self, message: Any) -> Any:
        """The message with its required fields only."""
        return self._cls(**{name: getattr(message, name) for name in self._names[: self._required]})

    def from_row(self, row: list[Any]) -> Any:
        if not isinstance(row, list) or len(row) < self._required:
            raise WireError(f"{self.kind} needs {self._required} fields")
        try:
            values = {name: into(value) for (name, into), value in zip(self._into, row, strict=False)}
        except WireError as error:
            raise WireError(f"{self.kind}: {error.message}") from error
        return self._cls(**values)


def _converters(hint: Any) -> tuple[Convert | None, Convert]:
    """(to the wire, from the wire) for one field type; None = unchanged."""
    if hint in _PLAIN:
        return None, _PLAIN[hint]
    if (metadata := getattr(hint, "__metadata__", None)) is not None:
        return _column_out(metadata[0]), _column_in(metadata[0])
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        layout = _Layout(hint)
        return layout.to_row, layout.from_row
    if get_origin(hint) is tuple:
        return _tuple_converters(get_args(hint))
    raise TypeError(f"the wire has no form for {hint!r}")


def _tuple_converters(args: tuple[Any, ...]) -> tuple[Convert, Convert]:
    if args[-1] is Ellipsis:
        out, into = _converters(args[0])
        return (
            lambda values: [v if out is None else out(v) for v in values],
            lambda row: tuple(into(v) for v in _listed(row)),
        )
    intos = [_converters(arg)[1] for arg in args]
    return list, lambda row: tuple(into(v) for into, v in zip(intos, _listed(row, len(intos)), strict=True))


def _listed(value: Any, length: int | None = None) -> list[Any]:
    if not isinstance(value, list) or (length is not None and len(value) != length):
        raise WireError(f"a list is expected, not {value!r:.40}")
    return value


def _column_out(typecode: str) -> Convert:
    def convert(column: Any) -> bytes:
        if column.typecode != typecode:  # both are array[int] to the type checker
            raise TypeError(f"a column of {typecode!r} is expected, not of {column.typecode!r}")
        data: bytes = column.tobytes()
        return data

    return convert


def _column_in(typecode: str) -> Convert:
    width = array(typecode).itemsize

    def convert(value: Any) -> array[Any]:
        if not isinstance(value, bytes) or len(value) % width:
            raise WireError(f"a column of {width}-byte values is expected")
        column: array[Any] = array(typecode)
        column.frombytes(value)
        return column

    return convert


def _exact(kind: type) -> Convert:
    def convert(value: Any) -> Any:
        if type(value) is not kind:
            raise WireError(f"{kind.__name__} is expected, not {value!r:.40}")
        return value

    return convert


def _number(value: Any) -> float:
    if type(value) not in (int, float):
        raise WireError(f"float is expected, not {value!r:.40}")
    return float(value)


_integer, _string = _exact(int), _exact(str)
_PLAIN: dict[Any, Convert] = {
    int: _integer, str: _string, bool: _exact(bool), bytes: _exact(bytes), float: _number,
}  # fmt: skip
_LAYOUT_OF: dict[type, _Layout] = {cls: _Layout(cls) for cls in get_args(messages.Message)}
_LAYOUTS = {layout.kind: layout for layout in _LAYOUT_OF.values()}  # by the kind on the wire

KINDS = tuple(_LAYOUTS)
assert isinstance(messages.Message, UnionType)


def open_of(
    tokenized: messages.Tokenized,
    *,
    seq: int,
    attempt: int,
    choice: int,
    prompt_tokens: int,
    tokens: messages.Ints | None = None,
) -> messages.Open:
    """The Open of a choice of a request. Fields that both messages have under one name are the request's;
    `tokens` are those that are generated so far."""
    shared = dict(zip(_OF_BOTH, _of_both(tokenized), strict=True))
    return messages.Open(
        seq=seq, attempt=attempt, choice=choice, choices=tokenized.n, prompt_tokens=prompt_tokens,
        tokens=messages.ints() if tokens is None else tokens, **shared,
    )  # fmt: skip


_OWN = {"attempt", "tokens", "part", "parts", "echo"}  # fields that Open has for itself
_OF_BOTH = tuple(
    sorted(
        {each.name for each in dataclasses.fields(messages.Open)}.intersection(
            each.name for each in dataclasses.fields(messages.Tokenized)
        )
        - _OWN
    )
)
_of_both = attrgetter(*_OF_BOTH)


def validation_error(message: object) -> str:
    """The error in a message, empty for a valid one."""
    check = _CHECKS.get(type(message).__name__)
    return "" if check is None else check(message)


def _is_head(column: messages.Ints, usual: bytes) -> bool:
    """True if a column equals the start of `usual`: a fiftieth of the time of a check of each row."""
    return column.tobytes() == usual[: 4 * len(column)]


def _has_negative(column: messages.Ints) -> bool:
    """True if a column has a negative number: its last byte, the highest, is over 127."""
    return not column.tobytes()[3::4].isascii()


def _total(counts: messages.Ints) -> int:
    return len(counts) if _is_head(counts, _ONES) else sum(counts)


def _has_valid_scores(m: messages.StepResult | messages.Tokens | messages.PromptTokens) -> bool:
    """True if there are no log probabilities, or one for each id with its alternatives."""
    if not (m.logprobs or m.top_counts or m.top_ids or m.top_logprobs):
        return True
    if not len(m.ids) == len(m.logprobs) == len(m.top_counts) or _has_negative(m.top_counts):
        return False
    return sum(m.top_counts) == len(m.top_ids) == len(m.top_logprobs) and not _has_negative(m.top_ids)


def _step_plan(m: messages.StepPlan) -> str:
    rows, tables = len(m.slots), len(m.table_slots)
    if not len(m.starts) == len(m.counts) == len(m.from_device) == rows:
        return "its forward columns differ in length"
    if (
        _has_negative(m.slots)
        or _has_negative(m.starts)
        or not (_is_head(m.counts, _ONES) or min(m.counts) > 0)
    ):
        return "a forward row has a negative slot or start, or no token"
    if len(m.sample_rows) != len(m.sample_slots) or len(m.copy_from) != len(m.copy_to):
        return "its sample or copy columns differ in length"
    sampled = m.sample_rows
    if not (len(sampled) <= rows and _is_head(sampled, _COUNTING)) and (
        _has_negative(sampled) or max(sampled) >= rows
    ):
        return "a sample row names no forward row"
    if messages.AT_DEVICE in m.from_device and (wrong := _drafts(m)):
        return wrong
    if _has_negative(m.sample_slots) or _has_negative(m.copy_from) or _has_negative(m.copy_to):
        return "a sample row or a copy has a negative number"
    if not tables:
        return "" if not m.table_blocks else "it has table entries of no slot"
    if not len(m.table_first) == len(m.table_counts) == tables:
        return "its table columns differ in length"
    if any(map(_has_negative, (m.table_slots, m.table_first, m.table_counts, m.table_blocks))):
        return "a table column has a negative number"
    return "" if _total(m.table_counts) == len(m.table_blocks) else "its table counts do not add up"


def _drafts(m: messages.StepPlan) -> str:
    """Why rows AT_DEVICE are wrong: each is sampled once, in order, for its own slot."""
    own = [(row, m.slots[row]) for row, fed in enumerate(m.from_device) if fed == messages.AT_DEVICE]
    pairs = zip(m.sample_rows, m.sample_slots, strict=True)
    sampled = [pair for pair in pairs if m.from_device[pair[0]] == messages.AT_DEVICE]
    return "" if sampled == own else "a row at the device's place is not sampled once, for its slot"


def _step_result(m: messages.StepResult) -> str:
    rows = len(m.done)
    if len(m.ids) != rows and not m.counts:
        return "its columns differ in length"
    if (m.counts or m.drafted) and (wrong := _counts(m)):
        return wrong
    if m.queued_us < 0 or m.host_us < 0:
        return "a duration is negative"
    if m.row_errors and (wrong := _row_errors(m)):
        return wrong
    if not all(0 <= row < rows and _is_vector(data) and data for row, data in m.vectors):
        return "a vector names no row, or is none of float32"
    if m.segments and (wrong := _segments(m.segments)):
        return wrong
    sound = _has_valid_scores(m) and all(map(_has_valid_prompt_scores, m.prompts))
    return "" if sound else "its log probabilities do not add up"


def _has_valid_prompt_scores(m: messages.PromptTokens) -> bool:
    """True if each log probability of a piece of a prompt has its rank."""
    return len(m.logprobs) == len(m.ranks) and _has_valid_scores(m)


def _counts(m: messages.StepResult) -> str:
    if not len(m.counts) == len(m.drafted) == len(m.done):
        return "its columns differ in length"
    if min(m.counts) < 1 or sum(m.counts) != len(m.ids):
        return "its counts do not add up"
    over = any(count > 1 + drafts for count, drafts in zip(m.counts, m.drafted, strict=True))
    return "a row has more tokens than its drafts allow" if over or _has_negative(m.drafted) else ""


def _segments(segments: messages.Ints) -> str:
    if len(segments) > 3 * MAX_SEGMENTS:
        return f"it has over {MAX_SEGMENTS} segments"
    if len(segments) % 3 or _has_negative(segments) or max(segments[::3]) >= len(messages.SEGMENT_LANES):
        return "a segment of it has no lane, start or length"
    return ""


def _is_vector(data: bytes) -> bool:
    return len(data) % 4 == 0


def _row_errors(m: messages.StepResult) -> str:
    rows = {row for row, _ in m.row_errors}
    if len(rows) < len(m.row_errors) or min(rows) < 0 or max(rows) >= len(m.done):
        return "a row error names no row, or one twice"
    if not all(0 < len(why) <= MAX_ROW_ERROR_CHARS for _, why in m.row_errors):
        return f"a row error is empty or over {MAX_ROW_ERROR_CHARS} characters"
    return ""


def _processors(m: messages.Tokenized | messages.SlotOpen) -> str:
    if len(m.processors) > MAX_PROCESSORS:
        return f"it has over {MAX_PROCESSORS} logits processors"
    if not all(0 < len(text) <= MAX_PROCESSOR_CHARS for text in m.processors):
        return f"a logits processor is empty or over {MAX_PROCESSOR_CHARS} characters"
    return ""


def _tokens(m: messages.Tokens) -> str:
    if not len(m.seqs) == len(m.first) == len(m.counts):
        return "its columns differ in length"
    if _has_negative(m.counts) or _has_negative(m.first) or _has_negative(m.ids):
        return "a column has a negative number"
    if _total(m.counts) != len(m.ids):
        return "its counts do not add up"
    return "" if _has_valid_scores(m) else "its log probabilities do not add up"


def _parts(m: messages.Tokenized | messages.Open | messages.SlotOpen) -> str:
    if not 0 <= m.part < m.parts <= MAX_PARTS:
        return f"part {m.part} of {m.parts} is not one of at most {MAX_PARTS}"
    return "a token id is negative" if _has_negative(m.tokens) else ""


def _tokenized(m: messages.Tokenized) -> str:
    if m.part:
        return _parts(m)
    if not (1 <= m.n <= MAX_CHOICES and m.max_tokens >= 1 and m.timeout_us >= 0 and 0 <= m.seed < _SEED_END):
        return "n, max_tokens, timeout_us or seed is out of range"
    if not (m.request and m.inbox) or "" in m.stop:
        return "its request, inbox or a stop string is empty"
    if len(m.sampling.bias_ids) != len(m.sampling.bias_values):
        return "its bias columns differ in length"
    if not len(m.generated) == len(m.reasons) in (0, m.n) or _has_negative(m.generated):
        return "its generated tokens are not counted for each choice"
    if min(m.age_us, m.first_us, m.waited_us, m.min_tokens, m.expects_tokens, m.keep_us) < 0:
        return "its age, min_tokens, expects_tokens or keep_us is negative"
    if m.pooling < messages.WHOLE_VECTOR:
        return "its pooling is out of range"
    if _has_negative(m.prediction):
        return "a token id of its prediction is negative"
    return _processors(m) or _parts(m)


def _open(m: messages.Open) -> str:
    if not 0 <= m.choice < m.choices <= MAX_CHOICES:
        return f"choice {m.choice} is not one of {m.choices}"
    return "a stop string is empty" if "" in m.stop else _parts(m)


def _slot_open(m: messages.SlotOpen) -> str:
    least = min(m.slot, m.max_length, m.min_tokens, m.pooling - messages.WHOLE_VECTOR)
    if least < 0 or not 0 <= m.seed < _SEED_END:
        return "slot, max_length, min_tokens, pooling or seed is out of range"
    if len(m.sampling.bias_ids) != len(m.sampling.bias_values):
        return "its bias columns differ in length"
    if _has_negative(m.prediction):
        return "a token id of its prediction is negative"
    if not 0 <= m.adapter <= MAX_PLACES:
        return "the place of its adapter is out of range"
    return _processors(m) or _parts(m)


def _exec_hello(m: messages.ExecHello) -> str:
    sizes = (m.block_tokens, m.max_step_tokens, m.max_context, m.vocab)
    sane = 1 <= m.blocks <= MAX_BLOCKS and 1 <= m.slots <= MAX_SLOTS and min(sizes) >= 1
    sane = sane and 1 <= m.stages <= MAX_STAGES and min(m.two_stream_tokens, m.max_stop_ids) >= 0
    sane = sane and 0 <= m.max_drafts <= MAX_DRAFTS and m.max_draft_rows >= 0
    sane = sane and 0 <= m.adapter_places <= MAX_PLACES
    return "" if sane else "its blocks, slots, sizes or stages are out of range"


def _fragment(m: messages.Fragment) -> str:
    if not 0 <= m.part < m.parts <= MAX_PARTS:
        return f"part {m.part} of {m.parts} is not one of at most {MAX_PARTS}"
    return "" if m.data else "it is empty"


def _unless(valid: Callable[[Any], bool], wrong: str) -> Callable[[Any], str]:
    return lambda message: "" if valid(message) else wrong


_RANGE = "its number is out of range"
_CHECKS: dict[str, Callable[[Any], str]] = {
    "AdapterLoad": _unless(lambda m: 1 <= m.place <= MAX_PLACES and m.digest, "its place or digest is none"),
    "AdapterLoaded": _unless(lambda m: min(m.bytes, m.took_us) >= 0, "its bytes or its time are negative"),
    "Claims": _unless(lambda m: len(m.taken) == len(m.ids), "it does not name each request that is taken"),
    "Close": _unless(
        lambda m: m.final >= 0 and _is_vector(m.vector), "its final index is negative, or its vector damaged"
    ),
    "Ended": _unless(
        lambda m: (
            m.index >= 0 and len(m.calls) <= MAX_CALLS and all(0 < len(c) <= MAX_CALL_CHARS for c in m.calls)
        ),
        "its index is negative, or its calls are too many or too long",
    ),
    "ExecHello": _exec_hello,
    "Fragment": _fragment,
    "Heartbeat": _unless(lambda m: 0 < m.interval_us <= MAX_INTERVAL_US, "its interval is out of range"),
    "Open": _open,
    "PromptTokens": _unless(_has_valid_prompt_scores, "its log probabilities do not add up"),
    "Resend": _unless(lambda m: 0 < m.first_seq < MAX_NUMBER, _RANGE),
    "SessionVerb": _unless(
        lambda m: m.verb in SESSION_VERBS and m.session and m.keep_us >= 0,
        f"it has no session, a negative time or a verb beyond {', '.join(SESSION_VERBS)}",
    ),
    "SlotOpen": _slot_open,
    "StepPlan": _step_plan,
    "StepResult": _step_result,
    "StreamAt": _unless(lambda m: 0 <= m.last_seq < MAX_NUMBER, _RANGE),
    "StreamReset": _unless(lambda m: 0 < m.next_seq < MAX_NUMBER, _RANGE),
    "Tokenized": _tokenized,
    "Tokens": _tokens,
}
