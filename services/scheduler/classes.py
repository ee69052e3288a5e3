"""Service classes: what a client was promised, and what follows from it.

ttft_us   longest predicted wait for the first token; a request that would wait longer is refused at
          once with a time to retry, one that has waited so long is given up. 0: it may wait for ever
tbt_us    longest time between two tokens: prompt chunks beside its decodes are cut to keep it
age_us    after so long in the queue a request counts as one class higher. 0: never
"""

from __future__ import annotations

from dataclasses import dataclass

from shared.errors import SetupError

NAMES = ("interactive", "standard", "batch")  # by level, the highest first
DEFAULT = "interactive=10000/50/0,standard=60000/100/20000,batch=0/500/60000"


@dataclass(frozen=True, slots=True)
class SloClass:
    """The promise to one class, in microseconds; see the top of this file."""

    name: str
    ttft_us: int
    tbt_us: int
    age_us: int


def parse(text: str) -> tuple[SloClass, ...]:
    """The classes by level, from `name=ttft/tbt/age,...` in milliseconds; a class that is not named keeps its
    default. Raises SetupError."""
    found = _read(DEFAULT) | _read(text)
    return tuple(found[name] for name in NAMES)


def level_of(name: str) -> int:
    """0 is the highest. The edge admits no other name; should one come, it is of the middle class."""
    return NAMES.index(name) if name in NAMES else 1


def _read(text: str) -> dict[str, SloClass]:
    found: dict[str, SloClass] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, numbers = part.partition("=")
        try:
            ttft_ms, tbt_ms, age_ms = (int(number) for number in numbers.split("/"))
        except ValueError:
            raise SetupError(_wrong(part, "is not name=ttft/tbt/age in whole milliseconds")) from None
        if name not in NAMES:
            raise SetupError(_wrong(part, f"names no class: {', '.join(NAMES)}"))
        if name in found:
            raise SetupError(_wrong(part, "names a class for the second time"))
        if min(ttft_ms, age_ms) < 0 or tbt_ms < 1:
            raise SetupError(_wrong(part, "has a time below zero, or no time between tokens"))
        found[name] = SloClass(name, ttft_ms * 1000, tbt_ms * 1000, age_ms * 1000)
    return found


def _wrong(part: str, why: str) -> str:
    return f"setting slo: {part!r} {why}; for example slo={DEFAULT}"
