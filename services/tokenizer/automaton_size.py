"""Estimates the automaton of a regex or an EBNF grammar, for structured_output.py to refuse large ones. Pure.

The count is of expensive states, in which the compiler checks most of the vocabulary: a set or a wildcard,
multiplied by the repetitions around it (`([a-z]{0,60} ){0,60}`: 3,600). Literals are cheap and not counted.
"""

from __future__ import annotations

import importlib
import re
from typing import Any

_sre: Any = importlib.import_module("re._parser")
_REPEATS = (_sre.MAX_REPEAT, _sre.MIN_REPEAT, _sre.POSSESSIVE_REPEAT)
_ASSERTS = (_sre.ASSERT, _sre.ASSERT_NOT)
_FREE = (_sre.LITERAL, _sre.AT)
# A text, a set, a comment, a repetition with its bounds, a bracket, or a name.
_EBNF = re.compile(
    r'"(?:\\.|[^"\\])*+"?|\[(?:\\.|[^\]\\])*+\]?|#[^\n]*|\{\s*(\d*)\s*,?\s*(\d*)\s*\}|[()]|[\w.-]+', re.DOTALL
)
MOST_COUNT = 10**9


def regex_states(pattern: str) -> int:
    """The states of a regular expression. It is parsed, not compiled: Python's compiler visits each character
    of a case-insensitive set. Raises re.error, RecursionError, OverflowError."""
    return _states(_sre.parse(pattern))


def _states(parsed: Any) -> int:
    total = 0
    for kind, of in parsed:
        if kind in _REPEATS:
            least, most, inner = of
            total += _states(inner) * max(1, least + 1 if most is _sre.MAXREPEAT else most)
        elif kind is _sre.SUBPATTERN:
            total += _states(of[-1])
        elif kind is _sre.BRANCH:
            total += sum(map(_states, of[1]))
        elif kind is _sre.ATOMIC_GROUP:
            total += _states(of)
        elif kind in _ASSERTS:
            total += _states(of[1])
        elif kind not in _FREE:
            total += 1
    return total


def ebnf_states(text: str) -> int:
    """The states that bounded repetitions, `{n,m}`, add to a grammar."""
    added, last, outer = 0, 0, list[int]()
    inside = 0  # states of the current group so far
    for part in _EBNF.finditer(text):
        if part[0] == "(":
            outer.append(inside)
            inside = 0
        elif part[0] == ")":
            last, inside = inside, inside + (outer.pop() if outer else 0)
        elif part[0][0] == "{":
            count = max(map(_count, part.groups()))
            added += last * count
            inside, last = inside + last * (count - 1), last * count
        elif part[0][0] not in '"#':
            inside, last = inside + 1, 1
        else:
            last = 0
    return added


def _count(digits: str | None) -> int:
    return min(int(digits[:10] or 1), MOST_COUNT) if digits else 1
