"""A frozen state made anew.

There is no pickle: only containers, and classes and functions that loaded modules of the scheduler and of
shared/ hold under the same name. No constructor of theirs is called.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from enum import Enum
from types import FunctionType
from typing import Any, cast

import msgpack

from services.scheduler.replay import freeze as form
from services.scheduler.replay.errors import FreezeError
from services.scheduler.state import State
from shared.errors import HeadraceError

_WRONG = (ValueError, TypeError, KeyError, IndexError, AttributeError, msgpack.UnpackException)
_CONTAINERS = {form.LIST: list, form.DICT: dict, form.ORDERED: OrderedDict, form.SET: set}


def restore(data: bytes) -> State:
    """The state of a snapshot. Raises FreezeError for bytes that are none, or of other classes than now."""
    try:
        state = thaw(msgpack.unpackb(data))
    except _WRONG as error:
        raise FreezeError(f"not a snapshot of a scheduler: {error!r:.200}") from error
    if not isinstance(state, State):
        raise FreezeError(f"a snapshot of a scheduler is expected, not of a {type(state).__name__}")
    return state


def thaw(frozen: form.Frozen) -> Any:
    """What `freeze` was given, made anew. Raises FreezeError for a class that is not known here."""
    return _Thawer(*frozen).run()


class _Thawer:
    def __init__(self, classes: list[Any], rows: list[list[Any]]) -> None:
        self._classes = [_class(*named) for named in classes]
        self._names = [names for _, names in classes]
        self._rows = rows
        self._objects = [self._empty(row) for row in rows]

    def run(self) -> Any:
        """Instances are filled first: a dictionary may hash them."""
        pairs = list(zip(self._rows, self._objects, strict=True))
        for row, made in pairs:
            if row[0] == form.INSTANCE:
                self._set(made, row[1], row[2])
        for row, made in pairs:
            if row[0] in (form.DICT, form.ORDERED):
                made.update(zip(map(self._value, row[1]), map(self._value, row[2]), strict=True))
            elif row[0] in (form.LIST, form.DEQUE):
                made.extend(map(self._value, row[-1]))
            elif row[0] == form.SET:
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
        if kind == form.TUPLE:
            return tuple(map(self._value, parts[0]))
        if kind == form.ARRAY:
            return array(*parts)
        if kind != form.RECORD:
            raise FreezeError(f"a value of kind {kind!r} is not known here")
        made: Any = object.__new__(self._classes[parts[0]])
        self._set(made, *parts)
        return made

    def _empty(self, row: list[Any]) -> Any:
        """The object of a row, still without what it may share with others."""
        kind, *parts = row
        if kind in _CONTAINERS:
            return _CONTAINERS[kind]()
        if kind == form.INSTANCE:
            return object.__new__(self._classes[parts[0]])
        if kind == form.DEQUE:
            return deque(maxlen=parts[0])
        if kind == form.FROZENSET:
            return frozenset(map(self._value, parts[0]))
        if kind == form.ENUM:
            return _known(parts[0], type, Enum)[parts[1]]
        if kind == form.FUNCTION:
            return _known(parts[0], FunctionType)
        if kind == form.ERROR:
            message, param, retry_after_ms = parts[1:]
            error = _known(parts[0], type, HeadraceError)
            return error(message, param=param, retry_after_ms=retry_after_ms)
        raise FreezeError(f"an object of kind {kind!r} is not known here")


def _class(name: str, names: list[str]) -> type:
    found: type = _known(name, type)
    if (fields := form.fields_of(found)) != names:
        raise FreezeError(
            f"{name} has other fields now ({', '.join(fields)}): use the version that wrote this"
        )
    return found


def _known(name: str, kind: type, base: type = object) -> Any:
    found = form.find(name)
    if not isinstance(found, kind) or not (base is object or issubclass(cast("type", found), base)):
        raise FreezeError(f"{name} is not known here: use the version of Headrace that wrote this")
    return found
