"""The event log as bytes: what happened to a scheduler, enough to do it again.

    frame        length u32 | crc32 u32 | msgpack record
    records      HEADER format, version, facts · SNAPSHOT events so far, page, pages, bytes
                 EVENT now_us, event, digest of its commands · HASH events so far, hash of the state

A log is a row of *stretches*: a header, a snapshot, the events after it with a hash now and then. Any stretch
suffices to go on from. What a crash tore at the end is ignored; damage before is an error.
"""

from __future__ import annotations

import dataclasses
import hashlib
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, cast, get_args

import msgpack

from services.scheduler.events import Arrived, Event, Send
from services.scheduler.replay.errors import LogError
from shared import codec
from shared.errors import WireError

FORMAT, VERSION = "headrace.events", 1
PAGE_BYTES = 48 * 1024  # of a snapshot: with its frame under the payload limit of any server
DIGEST_BYTES = 8
MAX_RECORD_BYTES = 1 << 30
HEADER, SNAPSHOT, EVENT, HASH = range(4)
_FRAME = struct.Struct("<II")
_EVENTS = {cls.__name__: cls for cls in get_args(Event)}
_FIELDS = {name: tuple(f.name for f in dataclasses.fields(cls)) for name, cls in _EVENTS.items()}
_pack = msgpack.Packer().pack


@dataclass(frozen=True, slots=True)
class Header:
    """Begins a stretch."""

    facts: Mapping[str, Any]  # scheduler, model, headrace: its version


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state after `number` events."""

    number: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Happened:
    """Event `number`, counted from 1, and the digest of the commands that it brought about."""

    number: int
    now_us: int
    event: Event
    digest: bytes


@dataclass(frozen=True, slots=True)
class StateHash:
    """Of the state after `number` events."""

    number: int
    digest: bytes


Record = Header | Snapshot | Happened | StateHash


def header(facts: Mapping[str, Any]) -> bytes:
    """The frame that begins a stretch."""
    return _framed([HEADER, FORMAT, VERSION, dict(facts)])


def snapshot_pages(number: int, data: bytes) -> Iterator[bytes]:
    """The frames of a snapshot."""
    starts = range(0, max(len(data), 1), PAGE_BYTES)
    for page, start in enumerate(starts):
        yield _framed([SNAPSHOT, number, page, len(starts), data[start : start + PAGE_BYTES]])


def happened(now_us: int, event: Event, commands: Sequence[Send]) -> bytes:
    """The frame of an event and of what it brought about."""
    return _framed([EVENT, now_us, _event_row(event), digest_of(commands)])


def state_hash(number: int, digest: bytes) -> bytes:
    """The frame of a hash."""
    return _framed([HASH, number, digest])


def digest_of(commands: Sequence[Send]) -> bytes:
    """What tells these commands from others."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for command in commands:
        digest.update(_pack([command.to, command.trace, codec.to_row(command.message)]))
    return digest.digest()


def read(stream: BinaryIO) -> Iterator[Record]:
    """The records of a log, snapshots joined. Raises LogError for what is none, is damaged before its last
    record, or is of another version."""
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
                yield Happened(number, rest[0], _event(rest[1]), rest[2])
            elif kind == HASH:
                yield StateHash(*rest)
        except (ValueError, TypeError, KeyError, IndexError, WireError) as error:
            raise LogError(f"the log is damaged at byte {at}: {error}") from error


def stretches(stream: BinaryIO) -> list[int]:
    """Where each stretch begins, in bytes. Raises LogError like `read`."""
    return [at for at, fields in _rows(stream) if fields[0] == HEADER]


def _framed(fields: list[Any]) -> bytes:
    data = cast("bytes", _pack(fields))
    return _FRAME.pack(len(data), zlib.crc32(data)) + data


def _rows(stream: BinaryIO) -> Iterator[tuple[int, list[Any]]]:
    """Each whole frame and where it begins. The first one is a header, or the stream is no log."""
    at, first = 0, True
    while len(head := stream.read(_FRAME.size)) == _FRAME.size:
        length, crc = _FRAME.unpack(head)
        data = stream.read(length) if 0 < length <= MAX_RECORD_BYTES else b""
        if not data or len(data) != length or zlib.crc32(data) != crc:
            if first:
                raise LogError("not an event log: its first record is none")
            if stream.read(1):
                raise LogError(f"the log is damaged at byte {at}: take its part before, or another copy")
            return
        fields = msgpack.unpackb(data)
        if first and fields[:2] != [HEADER, FORMAT]:
            raise LogError("not an event log: it does not begin with a header")
        yield at, fields
        at, first = at + _FRAME.size + length, False


def _check_format(rest: list[Any]) -> None:
    if rest[:2] != [FORMAT, VERSION]:
        raise LogError(
            f"a log of version {rest[1]!r}, this Headrace reads {VERSION}: use the one that wrote it"
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
