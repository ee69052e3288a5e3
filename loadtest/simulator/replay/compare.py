"""The differences of two frozen states, as readable paths: `state.requests[('t', 'r')].attempt: 1, now 2`."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from services.scheduler.reports import event_log as form
from services.scheduler.reports.event_log import Frozen

Place = tuple[str, int, int]  # path, object here, object there


def differences(here: Frozen, there: Frozen, most: int = 5) -> list[str]:
    """The first differences, nearest to the root first; none when the states are equal."""
    found: list[str] = []
    seen: set[tuple[int, int]] = set()
    places: deque[Place] = deque([("state", 0, 0)])
    while places and len(found) < most:
        path, i, j = places.popleft()
        if (i, j) in seen:
            continue
        seen.add((i, j))
        rows = here[1][i], there[1][j]
        for name, one, other in _parts(path, here[0], there[0], rows):
            if _is_object(one) and _is_object(other):
                places.append((name, one[0], other[0]))
            elif one != other:
                found.append(f"{name}: {_short(one)}, now {_short(other)}")
    return found[:most]


def _parts(
    path: str, classes: list[Any], others: list[Any], rows: tuple[list[Any], list[Any]]
) -> Iterator[tuple[str, Any, Any]]:
    """What two rows hold, pair by pair."""
    one, other = rows
    if one[0] != other[0]:
        yield path, tuple(one), tuple(other)
    elif one[0] == form.INSTANCE:
        (name, fields), (other_name, _) = classes[one[1]], others[other[1]]
        if name != other_name:
            yield path, name, other_name
        else:
            yield from _fields(path, fields, one[2], other[2])
    elif one[0] in (form.DICT, form.ORDERED):
        if one[1] != other[1]:
            yield f"{path}.keys()", tuple(one[1]), tuple(other[1])
        else:
            names = [f"{path}[{_short(key)}]" for key in one[1]]
            yield from zip(names, one[2], other[2], strict=True)
    elif one[0] in (form.LIST, form.DEQUE) and len(one[-1]) == len(other[-1]):
        yield from ((f"{path}[{i}]", a, b) for i, (a, b) in enumerate(zip(one[-1], other[-1], strict=True)))
    else:
        yield path, tuple(one[1:]), tuple(other[1:])


def _fields(path: str, names: list[str], here: list[Any], there: list[Any]) -> Iterator[tuple[str, Any, Any]]:
    for name, one, other in zip(names, here, there, strict=True):
        yield f"{path}.{name}", one, other


def _is_object(value: Any) -> bool:
    return type(value) is list and len(value) == 1


def _short(value: Any) -> str:
    if type(value) is list and len(value) == 2 and value[0] == form.TUPLE:
        value = tuple(value[1])
    return f"{value!r:.80}"
