"""The event log of a scheduler: enough bytes to replay it.

    frame        length u32 | crc32 u32 | msgpack record
    records      HEADER format, version, facts · SNAPSHOT events so far, page, pages, bytes
                 EVENT now_us, event, digest of its commands · HASH events so far, hash of the state

A log is a series of *stretches*: a header, a snapshot, and the events after it with some hashes. A replay can
start at any stretch. A torn frame at the end, after a crash, is ignored; damage before the end is an error.

The actor calls `attach`, which wraps the core in a `Recorder`. It writes to a `Sink`: a file, or a subject of
the bus. `read` yields the records of a log; `freeze` and `thaw` turn a state into plain data and back.
"""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import logging
import struct
import sys
import zlib
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from operator import attrgetter
from pathlib import Path
from types import FunctionType
from typing import Any, BinaryIO, Protocol, cast, get_args

import msgpack

from services.scheduler.core import Scheduler, session_parts
from services.scheduler.state.counters import Counters, StepLog
from services.scheduler.state.requests import Arrived, EndedRequests, Event, Send
from services.scheduler.state.state import Chain, State
from shared import codec
from shared.actor.mailbox import Mailbox
from shared.errors import BadRequest, EngineError, HeadraceError, SetupError, WireError
from shared.nats import access, subjects
from shared.nats.interface import Bus, Delivery
from shared.processes import open_private

log = logging.getLogger("headrace.replay")

FORMAT, VERSION = "headrace.events", 20  # of a snapshot: 1 to 19 hold other names of modules and fields
PAGE_BYTES = 48 * 1024  # of a snapshot: with its frame under the payload limit of any server
DIGEST_BYTES = 8
MAX_RECORD_BYTES = 1 << 30
HEADER, SNAPSHOT, EVENT, HASH = range(4)

HASH_EVERY = 1_000  # events, plus HASH_EVERY_PER_SEQUENCE for each sequence:
HASH_EVERY_PER_SEQUENCE = 10  # a hash takes about 90 us for each sequence, so 10 us for each event
SNAPSHOT_EVERY = 100_000  # events
STRETCH_BYTES = 64 << 20  # after so many bytes a snapshot comes sooner

ON_BUS = "nats"  # value of the setting for the bus; other values are a file
FILE_FLUSH_US = 1_000_000
FILE_BYTES = 256 << 20  # after so many bytes the next stretch starts another file
KEPT_FILES = 4  # of one log
BATCH_US = 256_000
BATCH_BYTES = 60 * 1024  # with its headers below 64 KiB
OFFSET_HEADER = "Headrace-Offset"  # bytes of the log before the message's, so that a loss shows
BEGINS_HEADER = "Headrace-Snapshot"  # the message starts a stretch

HASH_BYTES = 16
NOT_HASHED = (Counters, EndedRequests, StepLog, Chain)  # no decision depends on them; of a chain: see there
TUPLE, ARRAY, RECORD = range(3)  # values
LIST, DICT, ORDERED, SET, FROZENSET, DEQUE, ENUM, FUNCTION, ERROR, INSTANCE = range(10)  # objects

_FRAME = struct.Struct("<II")
_EVENTS = {cls.__name__: cls for cls in get_args(Event)}
_FIELDS = {name: tuple(f.name for f in dataclasses.fields(cls)) for name, cls in _EVENTS.items()}
_pack = msgpack.Packer().pack

Frozen = list[Any]


class LogError(BadRequest):
    """A file is not an event log, is damaged, or has another version."""


class FreezeError(EngineError):
    """A value in the state or in a snapshot has no frozen form."""


@dataclass(frozen=True, slots=True)
class Header:
    """The first record of a stretch."""

    facts: Mapping[str, Any]  # scheduler, epoch, model


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state after `number` events."""

    number: int
    data: bytes


@dataclass(frozen=True, slots=True)
class LoggedEvent:
    """Event `number`, counted from 1, and the digest of its commands."""

    number: int
    now_us: int
    event: Event
    digest: bytes


@dataclass(frozen=True, slots=True)
class StateHash:
    """The hash of the state after `number` events."""

    number: int
    digest: bytes


Record = Header | Snapshot | LoggedEvent | StateHash


async def attach(core: Scheduler, mailbox: Mailbox, event_log: str, model: str) -> Recorder:
    """Record a scheduler's core as the setting `event_log` defines: to a file, or to the subject of this
    scheduler. A request on the snapshot subject starts a stretch. Raises SetupError if the file cannot be
    written."""
    facts = {"scheduler": mailbox.actor, "epoch": mailbox.epoch, "model": model}
    facts["wall_offset_us"] = mailbox.clock.wall_us() - mailbox.clock.now_us()
    if event_log != ON_BUS:
        return Recorder(core, FileSink(Path(event_log)), facts)
    sink = BusSink(mailbox.bus, subjects.events(mailbox.actor))
    recorder = Recorder(core, sink, facts)

    def on_asked(asked: Delivery) -> None:
        recorder.begin(mailbox.clock.now_us())
        sink.push()  # now: an idle scheduler has no later event to flush it
        if access.can_answer(mailbox.bus, asked):
            mailbox.bus.publish(asked.reply, b"")

    await mailbox.bus.subscribe(subjects.events_snapshot(mailbox.actor), on_asked)
    return recorder


class Sink(Protocol):
    """The destination of a log's bytes: a file, or a subject that `headrace record` subscribes to."""

    def begin(self) -> None:
        """Start a stretch: readers need nothing that was written before."""

    def write(self, data: bytes, now_us: int) -> None:
        """Add whole frames. Does not block."""

    def flush(self, now_us: int) -> None:
        """Write buffered frames that are old enough."""

    def close(self) -> None:
        """Write all buffered frames."""


class Recorder:
    """Wraps a core, and logs its events and the digests of its commands.

    A record is written after its event is handled, also if the core raises: then it is needed most.
    """

    def __init__(self, core: Scheduler, sink: Sink, facts: Mapping[str, Any]) -> None:
        self._core = core
        self._sink = sink
        self._facts = facts
        self._events = 0
        self._hashed = 0  # events until the last hash
        self._stretch_bytes = 0  # since the snapshot
        self._begun = False

    @property
    def state(self) -> State:
        """The core's state."""
        return self._core.state

    @property
    def is_idle(self) -> bool:
        """As the core's."""
        return self._core.is_idle

    def handle(self, event: Event, now_us: int) -> list[Send]:
        """As the core's `handle`."""
        if not self._begun:
            self.begin(now_us)
        commands: list[Send] = []
        try:
            commands = self._core.handle(event, now_us)
        finally:
            self._events += 1
            frame = happened(now_us, event, commands)
            self._stretch_bytes += len(frame)
            self._sink.write(frame, now_us)
        if self._events - self._hashed >= HASH_EVERY + HASH_EVERY_PER_SEQUENCE * len(self.state.sequences):
            self._hashed = self._events
            self._sink.write(_framed([HASH, self._events, state_hash(self.state)]), now_us)
        if self._events % SNAPSHOT_EVERY == 0 or self._stretch_bytes >= STRETCH_BYTES:
            self.begin(now_us)
        return commands

    def begin(self, now_us: int) -> None:
        """Start a stretch: a header and a snapshot."""
        self._begun, self._stretch_bytes = True, 0
        self._sink.begin()
        self._sink.write(header(self._facts), now_us)
        for page in snapshot_pages(self._events, snapshot(self.state)):
            self._sink.write(page, now_us)

    def upkeep(self, now_us: int) -> None:
        """Flush; called once a heartbeat."""
        self._sink.flush(now_us)

    def close(self) -> None:
        """Complete the log."""
        self._sink.close()


class FileSink:
    """A new file; if the name exists it gets a number. Raises SetupError.

    After FILE_BYTES the next stretch goes into another file, and only the last KEPT_FILES are kept. Only the
    owner may read the files, since they have every prompt. On a full disk the log ends, and the next stretch
    goes into another file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path.expanduser()
        self.path, self._file, self._number = _create(self._path)
        self._files = deque([self.path])
        self._flushed_us = 0
        self._lost = False  # the rest of this stretch
        log.info("the event log goes to %s", self.path)

    def begin(self) -> None:
        if not self._lost and self._file.tell() < FILE_BYTES:
            return
        self.close()
        try:
            self.path, self._file, self._number = _create(self._path, self._number + 1)
        except SetupError as error:
            self._lose(error.message)
            return
        self._lost = False
        self._files.append(self.path)
        log.info("the event log continues in %s", self.path)
        if len(self._files) > KEPT_FILES:
            self._files.popleft().unlink(missing_ok=True)

    def write(self, data: bytes, now_us: int) -> None:
        if self._lost:
            return
        try:
            self._file.write(data)
        except OSError as error:
            self._lose(error)
        self.flush(now_us)

    def flush(self, now_us: int) -> None:
        if not self._lost and now_us - self._flushed_us >= FILE_FLUSH_US:
            self._flushed_us = now_us
            try:
                self._file.flush()
            except OSError as error:
                self._lose(error)

    def close(self) -> None:
        try:
            self._file.close()  # it writes what is left
        except OSError as error:
            self._lose(error)

    def _lose(self, error: OSError | str) -> None:
        if not self._lost:
            log.error("the event log %s lacks its end: %s", self.path, error)
        self._lost = True


def _create(path: Path, number: int = 1) -> tuple[Path, BinaryIO, int]:
    """Create the first file from this number on that does not exist. Returns its path, the file, its
    number."""
    if path.is_dir():
        raise SetupError(f"the event log {path} is a folder: name a file in `event_log`")
    while True:
        tried = path.with_name(f"{path.stem}-{number}{path.suffix}") if number > 1 else path
        try:
            return tried, open_private(tried, buffering=256 * 1024), number
        except FileExistsError:
            number += 1
        except OSError as error:
            raise SetupError(
                f"the event log {path} cannot be written ({error.strerror}): name another file in `event_log`"
            ) from None


class BusSink:
    """Messages on a subject: pieces of one stream of bytes, each with its offset."""

    def __init__(self, bus: Bus, subject: str) -> None:
        self._bus = bus
        self._subject = subject
        self._waiting = bytearray()
        self._offset = 0
        self._begins = False
        self._sent_us = 0

    def begin(self) -> None:
        """Start a new message."""
        self.push()
        self._begins = True

    def write(self, data: bytes, now_us: int) -> None:
        """Frames share a message if they fit; a longer frame is split."""
        if self._waiting and len(self._waiting) + len(data) > BATCH_BYTES:
            self.push()
        self._waiting += data
        if len(self._waiting) >= BATCH_BYTES:
            self.push()
        self.flush(now_us)

    def flush(self, now_us: int) -> None:
        """Publish buffered frames every BATCH_US."""
        if now_us - self._sent_us >= BATCH_US:
            self._sent_us = now_us
            self.push()

    def close(self) -> None:
        self.push()

    def push(self) -> None:
        """Publish all buffered frames now."""
        data, self._waiting = bytes(self._waiting), bytearray()
        for start in range(0, len(data), BATCH_BYTES):
            headers = {OFFSET_HEADER: str(self._offset)}
            if self._begins:
                headers[BEGINS_HEADER] = "1"
                self._begins = False
            piece = data[start : start + BATCH_BYTES]
            self._bus.publish(self._subject, piece, headers=headers)
            self._offset += len(piece)


def header(facts: Mapping[str, Any]) -> bytes:
    """The first frame of a stretch."""
    return _framed([HEADER, FORMAT, VERSION, dict(facts)])


def snapshot_pages(number: int, data: bytes) -> Iterator[bytes]:
    """The frames of a snapshot."""
    starts = range(0, max(len(data), 1), PAGE_BYTES)
    for page, start in enumerate(starts):
        yield _framed([SNAPSHOT, number, page, len(starts), data[start : start + PAGE_BYTES]])


def happened(now_us: int, event: Event, commands: Sequence[Send]) -> bytes:
    """The frame of an event and the digest of its commands."""
    return _framed([EVENT, now_us, _event_row(event), digest_of(commands)])


def digest_of(commands: Sequence[Send]) -> bytes:
    """A digest of commands, DIGEST_BYTES long."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for command in commands:
        digest.update(_pack([command.to, command.trace, codec.to_row(command.message)]))
    return digest.digest()


def read(stream: BinaryIO) -> Iterator[Record]:
    """The records of a log, with joined snapshots. Raises LogError if the stream is not a log, is damaged
    before its last record, or has another version."""
    number, pages = 0, list[bytes]()
    for at, fields in _rows(stream):
        try:
            kind, *rest = fields
            if kind == HEADER:
                _check_format(rest)
                pages = []
                yield Header(rest[2])
            elif kind == SNAPSHOT:
                number, page, count, data = rest
                pages.append(data)
                if page + 1 == count == len(pages):
                    yield Snapshot(number, b"".join(pages))
            elif kind == EVENT:
                number += 1
                yield LoggedEvent(number, rest[0], _event(rest[1]), rest[2])
            elif kind == HASH:
                yield StateHash(*rest)
        except (ValueError, TypeError, KeyError, IndexError, WireError) as error:
            raise LogError(f"the log is damaged at byte {at}: {error}") from error


def stretches(stream: BinaryIO) -> list[int]:
    """The offset of each stretch, in bytes. Raises LogError like `read`."""
    return [at for at, fields in _rows(stream) if fields[0] == HEADER]


def _framed(fields: list[Any]) -> bytes:
    data = cast("bytes", _pack(fields))
    return _FRAME.pack(len(data), zlib.crc32(data)) + data


def _rows(stream: BinaryIO) -> Iterator[tuple[int, list[Any]]]:
    """Each whole frame with its offset. Raises LogError if the first one is not a header."""
    at, first = 0, True
    while len(head := stream.read(_FRAME.size)) == _FRAME.size:
        length, crc = _FRAME.unpack(head)
        data = stream.read(length) if 0 < length <= MAX_RECORD_BYTES else b""
        if not data or len(data) != length or zlib.crc32(data) != crc:
            if first:
                raise LogError("not an event log: its first frame is damaged")
            if stream.read(1):
                raise LogError(f"the log is damaged at byte {at}: take its part before, or another copy")
            return
        fields = msgpack.unpackb(data)
        if first and fields[:2] != [HEADER, FORMAT]:
            raise LogError("not an event log: it does not start with a header")
        yield at, fields
        at, first = at + _FRAME.size + length, False


def _check_format(rest: list[Any]) -> None:
    name, version, _ = rest
    if (name, version) != (FORMAT, VERSION):
        raise LogError(
            f"an event log of version {version!r}, and this Headrace reads version {VERSION}: replay it with "
            "the Headrace that wrote it"
        )


def _event_row(event: Event) -> list[Any]:
    name = type(event).__name__
    if isinstance(event, Arrived):
        return [name, event.source, codec.to_row(event.message), event.trace, event.transit_us]
    return [name, *(getattr(event, field) for field in _FIELDS[name])]


def _event(row: list[Any]) -> Event:
    name, *values = row
    if name == Arrived.__name__:
        values[1] = codec.from_row(values[1])
    made: Event = _EVENTS[name](*values)
    return made


def state_hash(state: State) -> bytes:
    """A hash of everything in the state that decisions depend on, HASH_BYTES long."""
    with _uncollected():
        return hashlib.blake2b(_pack_frozen(freeze(state, NOT_HASHED)), digest_size=HASH_BYTES).digest()


def snapshot(state: State) -> bytes:
    """The whole state as bytes. Raises FreezeError for a value without a frozen form."""
    with _uncollected():
        return _pack_frozen(freeze(state))


@contextmanager
def _uncollected() -> Iterator[None]:
    """Pause the cyclic garbage collector: the many new lists start it, and it would take half the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _pack_frozen(frozen: Frozen) -> bytes:
    try:
        return cast("bytes", msgpack.packb(frozen))
    except (OverflowError, ValueError) as error:
        raise FreezeError(f"a number of the state is over 64 bits: {error}") from error


_PLAIN = frozenset({int, str, bool, float, bytes, type(None)})
_BUILT_IN = (list, dict, OrderedDict, set, frozenset, deque, FunctionType)


def freeze(root: Any, left_out: tuple[type, ...] = ()) -> Frozen:
    """`root` and all objects that it reaches, as plain data. Instances of `left_out` become None.

        [classes, objects]   classes: [name, field names]    objects: one row each, the root first
        value in a row       a plain one as itself · [i] = object i · [TUPLE, values]
                             · [ARRAY, typecode, bytes] · [RECORD, class, values]

    Hashes and snapshots use it; `thaw` is the inverse. Mutable objects are numbered in the order of the first
    visit, breadth first: cycles and chains of any length work, and shared objects stay shared. Tuples, arrays
    and frozen dataclasses are values: equal states give equal bytes, shared or not. No field is special.
    """
    return _Freezer(left_out).run(root)


@dataclass(frozen=True, slots=True)
class _Class:
    number: int
    is_value: bool
    values: Callable[[Any], Iterable[Any]]


class _Freezer:
    def __init__(self, left_out: tuple[type, ...]) -> None:
        self._left_out = left_out
        self._numbers: dict[int, int] = {}  # by id(): `_objects` keeps them alive
        self._objects: list[Any] = []
        self._classes: dict[type, _Class | None] = dict.fromkeys(_BUILT_IN)
        self._named: list[list[Any]] = []

    def run(self, root: Any) -> Frozen:
        self._value(root)
        return [self._named, [self._row(thing) for thing in self._objects]]  # grows while it is walked

    def _value(self, value: Any) -> Any:
        kind = type(value)
        if kind in _PLAIN:
            return value
        if kind is tuple:
            return [TUPLE, self._values(value)]
        if kind is array:
            return [ARRAY, value.typecode, value.tobytes()]
        number = self._numbers.get(id(value))
        if number is not None:
            return [number]
        if kind in self._left_out:
            return None
        known = self._class(kind)
        if known is not None and known.is_value:
            return [RECORD, known.number, self._values(known.values(value))]
        self._numbers[id(value)] = len(self._objects)
        self._objects.append(value)
        return [len(self._objects) - 1]

    def _values(self, values: Iterable[Any]) -> list[Any]:
        found = list(values)
        if _PLAIN.issuperset(map(type, found)):
            return found
        value = self._value
        return [v if type(v) in _PLAIN else value(v) for v in found]

    def _row(self, thing: Any) -> list[Any]:
        kind = type(thing)
        if (known := self._class(kind)) is not None:
            return [INSTANCE, known.number, self._values(known.values(thing))]
        if kind is list:
            return [LIST, self._values(thing)]
        if kind is dict or kind is OrderedDict:
            return [DICT if kind is dict else ORDERED, self._values(thing), self._values(thing.values())]
        if kind is set or kind is frozenset:
            return [SET if kind is set else FROZENSET, self._values(_ordered(thing))]
        if kind is deque:
            return [DEQUE, thing.maxlen, self._values(thing)]
        if kind is FunctionType:
            return [FUNCTION, name_of(thing)]
        if isinstance(thing, Enum):
            return [ENUM, name_of(kind), thing.name]
        return [ERROR, name_of(kind), thing.message, thing.param, thing.retry_after_ms]

    def _class(self, kind: type) -> _Class | None:
        """How instances of a class become rows; None for classes that `_row` handles itself."""
        if kind not in self._classes:
            self._classes[kind] = None if issubclass(kind, Enum | HeadraceError) else self._new_class(kind)
        return self._classes[kind]

    def _new_class(self, kind: type) -> _Class:
        names = fields_of(kind)
        if not names:
            raise FreezeError(f"a {kind.__module__}.{kind.__qualname__} has no frozen form")
        getter = attrgetter(*names) if len(names) > 1 else lambda it: (getattr(it, names[0]),)
        is_value = dataclasses.is_dataclass(kind) and cast(Any, kind).__dataclass_params__.frozen
        self._named.append([name_of(kind), names])
        return _Class(len(self._named) - 1, is_value, getter)


def fields_of(kind: type) -> list[str]:
    """The attributes of an instance: the fields of a dataclass, else the slots and `__dict__`."""
    if dataclasses.is_dataclass(kind):
        return [f.name for f in dataclasses.fields(kind)]
    bases = kind.__mro__[:-1]
    names = [name for base in reversed(bases) for name in vars(base).get("__slots__", ())]
    return [*names, "__dict__"] if any("__dict__" in vars(base) for base in bases) else names


def _ordered(values: Iterable[Any]) -> list[Any]:
    try:
        return sorted(values)
    except TypeError as error:
        raise FreezeError(f"a set without an order: {error}") from error


_OURS = ("services.scheduler.", "shared.")


def name_of(thing: Any) -> str:
    """The frozen name of a class or function of the scheduler or shared/. Raises FreezeError for others."""
    name = f"{thing.__module__}:{thing.__qualname__}"
    if find(name) is not thing:
        raise FreezeError(
            f"{name} has no frozen form: keep plain data, dataclasses and functions of a module"
        )
    return name


def find(name: str) -> Any:
    """The class or function with a frozen name; None if no loaded module has it."""
    module, _, within = name.partition(":")
    found = sys.modules.get(module) if module.startswith(_OURS) else None
    for part in within.split("."):
        found = getattr(found, part, None)
    return found


_WRONG = (ValueError, TypeError, KeyError, IndexError, AttributeError, msgpack.UnpackException)
_CONTAINERS = {LIST: list, DICT: dict, ORDERED: OrderedDict, SET: set}


def restore(data: bytes) -> State:
    """The state of a snapshot. Raises FreezeError for other bytes, or if classes have changed since."""
    session_parts()  # a state has objects of their classes
    try:
        state = thaw(msgpack.unpackb(data))
    except _WRONG as error:
        raise FreezeError(f"not a snapshot of a scheduler: {error!r:.200}") from error
    if not isinstance(state, State):
        raise FreezeError(f"a snapshot of a scheduler is expected, not of a {type(state).__name__}")
    return state


def thaw(frozen: Frozen) -> Any:
    """A copy of what was frozen. Raises FreezeError for an unknown class.

    Unlike pickle, it makes only containers, and classes and functions of loaded modules of the scheduler and
    shared/ with the same name. It calls no constructors of theirs.
    """
    return _Thawer(*frozen).run()


class _Thawer:
    def __init__(self, classes: list[Any], rows: list[list[Any]]) -> None:
        self._classes = [_class(*named) for named in classes]
        self._names = [names for _, names in classes]
        self._rows = rows
        self._objects = [self._empty(row) for row in rows]

    def run(self) -> Any:
        """Fill instances before dictionaries, which may hash them."""
        pairs = list(zip(self._rows, self._objects, strict=True))
        for row, made in pairs:
            if row[0] == INSTANCE:
                self._set(made, row[1], row[2])
        for row, made in pairs:
            if row[0] in (DICT, ORDERED):
                made.update(zip(map(self._value, row[1]), map(self._value, row[2]), strict=True))
            elif row[0] in (LIST, DEQUE):
                made.extend(map(self._value, row[-1]))
            elif row[0] == SET:
                made.update(map(self._value, row[1]))
        return self._objects[0]

    def _set(self, made: Any, number: int, values: list[Any]) -> None:
        for name, value in zip(self._names[number], values, strict=True):
            object.__setattr__(made, name, self._value(value))

    def _value(self, value: Any) -> Any:
        if type(value) is not list:
            return value
        if len(value) == 1:
            return self._objects[value[0]]
        kind, *parts = value
        if kind == TUPLE:
            return tuple(map(self._value, parts[0]))
        if kind == ARRAY:
            return array(*parts)
        if kind != RECORD:
            raise FreezeError(f"a value of kind {kind!r} is not known here")
        made: Any = object.__new__(self._classes[parts[0]])
        self._set(made, *parts)
        return made

    def _empty(self, row: list[Any]) -> Any:
        """The object of a row, without references to other objects."""
        kind, *parts = row
        if kind in _CONTAINERS:
            return _CONTAINERS[kind]()
        if kind == INSTANCE:
            return object.__new__(self._classes[parts[0]])
        if kind == DEQUE:
            return deque(maxlen=parts[0])
        if kind == FROZENSET:
            return frozenset(map(self._value, parts[0]))
        if kind == ENUM:
            return _known(parts[0], type, Enum)[parts[1]]
        if kind == FUNCTION:
            return _known(parts[0], FunctionType)
        if kind == ERROR:
            message, param, retry_after_ms = parts[1:]
            error = _known(parts[0], type, HeadraceError)
            return error(message, param=param, retry_after_ms=retry_after_ms)
        raise FreezeError(f"an object of kind {kind!r} is not known here")


def _class(name: str, names: list[str]) -> type:
    found: type = _known(name, type)
    if (fields := fields_of(found)) != names:
        raise FreezeError(
            f"{name} has other fields now ({', '.join(fields)}): use the version that wrote this"
        )
    return found


def _known(name: str, kind: type, base: type = object) -> Any:
    found = find(name)
    if not isinstance(found, kind) or not (base is object or issubclass(cast("type", found), base)):
        raise FreezeError(f"{name} is not known here: use the version of Headrace that wrote this")
    return found
