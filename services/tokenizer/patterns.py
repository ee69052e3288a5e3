"""A schema's `pattern` as the grammar engine follows it rightly. Pure.

XGrammar 0.2.8 lets `(b1+)?` begin in the middle where the group ends with a repetition: `a(b1+)?Z` then
allows `a1Z`. It has `(|b1+)` right, which is the same.
"""

from __future__ import annotations

import re

# An escape, a set, a group's begin or its end with what makes it optional, or any character.
_PART = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\((?:\?:|\?P?<\w+>|\?)?|\)\??\??|.", re.DOTALL)


def without_optional_groups(pattern: str) -> str:
    """The pattern with `(…)?` written as `(|…)`. One that is no regular expression comes back as it may."""
    written: list[str] = []
    opened: list[int] = []  # where in `written` each open group begins
    for part in _PART.findall(pattern):
        if part.startswith("("):
            opened.append(len(written))
        elif part.startswith(")") and opened:
            begin = opened.pop()
            if part != ")" and written[begin] != "(?":
                written[begin] += "|"
                part = ")"
        written.append(part)
    return "".join(written)
