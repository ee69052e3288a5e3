"""How many things each container holds that an object reaches, by where it is; and which of them grow.

    {"State.due.heap": 12, "State.requests": 3, "Request.sequences": 2, ...}

A container is named by the class that has it and the attribute, one within another by `[]`; of many with one
name the largest counts. Only objects of services/ and shared/ are looked into.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from types import FunctionType, MethodType, ModuleType
from typing import Any

PLAIN = (str, bytes, int, float, bool, type(None), type, FunctionType, MethodType, ModuleType)
OTHERS = {"MemoryBus", "Vocabulary", "ServedModel", "Settings", "Policy"}  # of the process, or of the model
SLACK = 32  # of what is under way just when it is looked at, or waits to be swept


def sizes(*roots: Any) -> dict[str, int]:
    """The containers that these objects reach."""
    found: dict[str, int] = {}
    seen: set[int] = set()
    todo: deque[tuple[str, Any]] = deque((type(root).__name__, root) for root in roots)
    while todo:
        name, thing = todo.popleft()
        if isinstance(thing, PLAIN) or id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, dict):
            items: Iterable[Any] = [*thing, *thing.values()]
        elif isinstance(thing, list | tuple | set | frozenset | deque):
            items = list(thing)
        else:
            todo.extend(_attributes(thing))
            continue
        if not isinstance(thing, tuple | frozenset):
            found[name] = max(found.get(name, 0), len(thing))
        todo.extend((f"{name}[]", item) for item in items)
    return found


def grown(samples: list[dict[str, int]]) -> dict[str, list[int]]:
    """The containers that were larger in the second half of the time than they ever were in the first."""
    half = len(samples) // 2
    found = {}
    for name in {name for sample in samples for name in sample}:
        over_time = [sample.get(name, 0) for sample in samples]
        if max(over_time[half:]) > 1.2 * max(over_time[:half]) + SLACK:
            found[name] = over_time
    return found


def _attributes(thing: Any) -> list[tuple[str, Any]]:
    kind = type(thing)
    if not kind.__module__.startswith(("services.", "shared.")) or kind.__name__ in OTHERS:
        return []
    slots = [name for base in kind.__mro__ for name in vars(base).get("__slots__", ())]
    names = {*slots, *getattr(thing, "__dict__", ())}
    return [
        (f"{kind.__name__}.{name}", getattr(thing, name)) for name in sorted(names) if hasattr(thing, name)
    ]
