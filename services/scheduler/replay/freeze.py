"""Any state as plain data: for hashes, which tell two states apart, and for snapshots, which bring one back.

    [classes, objects]   classes: [name, field names]    objects: one row each, the root first
    value in a row       a plain one as itself · [i] = object i · [TUPLE, values] · [ARRAY, typecode, bytes]
                         · [RECORD, class, values]

What can change is an object, numbered in the order of the first visit, breadth first: cycles and chains of
any length are fine, and what was shared stays shared. Tuples, columns and frozen dataclasses are values:
equal states give equal bytes whether or not they share them. Nothing here knows a field by its name.
`thaw.py` is the way back.
"""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import sys
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from operator import attrgetter
from types import FunctionType
from typing import Any, cast

import msgpack

from services.scheduler.meter import Meter
from services.scheduler.recent import Recent
from services.scheduler.replay.errors import FreezeError
from services.scheduler.state import State
from services.scheduler.steps import Steps
from shared.errors import HeadraceError

HASH_BYTES = 16
NO_DECISIONS = (Meter, Recent, Steps)  # what the state only tells: no part of its hash
_OURS = ("services.scheduler.", "shared.")
_BUILT_IN = (list, dict, OrderedDict, set, frozenset, deque, FunctionType)
_PLAIN = frozenset({int, str, bool, float, bytes, type(None)})
TUPLE, ARRAY, RECORD = range(3)  # values
LIST, DICT, ORDERED, SET, FROZENSET, DEQUE, ENUM, FUNCTION, ERROR, INSTANCE = range(10)  # objects

Frozen = list[Any]


def state_hash(state: State) -> bytes:
    """What tells this state from any other that could decide otherwise."""
    with _uncollected():
        return hashlib.blake2b(_pack(freeze(state, NO_DECISIONS)), digest_size=HASH_BYTES).digest()


def snapshot(state: State) -> bytes:
    """The whole state. Raises FreezeError for what has no frozen form."""
    with _uncollected():
        return _pack(freeze(state))


def freeze(root: Any, left_out: tuple[type, ...] = ()) -> Frozen:
    """`root` and all it reaches as plain data; instances of `left_out` count as None."""
    return _Freezer(left_out).run(root)


@contextmanager
def _uncollected() -> Iterator[None]:
    """Without the cyclic garbage collector: so many new lists would start it, and it takes half the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _pack(frozen: Frozen) -> bytes:
    try:
        return cast("bytes", msgpack.packb(frozen))
    except (OverflowError, ValueError) as error:
        raise FreezeError(f"a number of the state is over 64 bits: {error}") from error


def name_of(thing: Any) -> str:
    """The name under which a class or a function of ours is frozen. Raises FreezeError for any other."""
    name = f"{thing.__module__}:{thing.__qualname__}"
    if find(name) is not thing:
        raise FreezeError(
            f"{name} has no frozen form: keep plain data, dataclasses and functions of a module"
        )
    return name


def find(name: str) -> Any:
    """What `name_of` named, None when no loaded module of ours has it."""
    module, _, within = name.partition(":")
    found = sys.modules.get(module) if module.startswith(_OURS) else None
    for part in within.split("."):
        found = getattr(found, part, None)
    return found


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
        """How instances of a class become rows; None for those that `_row` knows itself."""
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
    """The attributes of an instance: of a dataclass its fields, of any other class its slots and its
    `__dict__`."""
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
