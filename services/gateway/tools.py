"""Calls of functions in what a model wrote, as the OpenAI API has them. Pure.

whole     nothing but one object {"name": …, "arguments": …}: some function had to be called
tagged    text, and in it <tool_call>…</tool_call> with such an object each
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

BEGIN, END = "<tool_call>", "</tool_call>"
WHOLE, TAGGED = "whole", "tagged"
_CALL = re.compile(re.escape(BEGIN) + r"(.*?)" + re.escape(END), re.DOTALL)


def how_called(fields: dict[str, Any]) -> str:
    """WHOLE, TAGGED, or empty for a request that calls no functions; the tokenizer judges the fields."""
    choice = fields.get("tool_choice", "auto")
    if not fields.get("tools") or choice == "none":
        return ""
    return TAGGED if choice == "auto" else WHOLE


@dataclass(slots=True)
class ToolText:
    """The text of one choice: what of it is content, and at its end the calls in it."""

    how: str
    name: str  # of the choice: its calls are named after it
    _held: list[str] = field(default_factory=list)  # may be a call, or is one

    def feed(self, piece: str) -> str:
        """The part of the text so far that is content and was not given before."""
        if self.how == WHOLE:
            self._held.append(piece)
            return ""
        text = "".join([*self._held, piece])
        at = text.find(BEGIN)
        cut = at if at >= 0 else len(text) - _begun(text)
        self._held = [text[cut:]]
        return text[:cut]

    def finish(self) -> tuple[str, list[dict[str, Any]]]:
        """The rest of the content, and the calls. A call that was cut short is content."""
        text = "".join(self._held)
        self._held.clear()
        if self.how == WHOLE:
            found = [_read(text)]
            return (text, []) if found[0] is None else ("", self._named(found))
        found = [_read(match[1]) for match in _CALL.finditer(text)]
        if not found or None in found:
            return text, []
        return _CALL.sub("", text).strip("\n"), self._named(found)

    def _named(self, found: list[dict[str, str] | None]) -> list[dict[str, Any]]:
        return [
            {"id": f"call_{self.name}_{i}", "type": "function", "function": function}
            for i, function in enumerate(found)
        ]


def _read(text: str) -> dict[str, str] | None:
    try:
        call = json.loads(text, strict=False)  # bare control characters are escaped in what goes out
    except ValueError:
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str) or "arguments" not in call:
        return None
    return {"name": call["name"], "arguments": json.dumps(call["arguments"], ensure_ascii=False)}


def _begun(text: str) -> int:
    """How many characters at the end of `text` may be the beginning of a call."""
    most = min(len(text), len(BEGIN) - 1)
    return next((n for n in range(most, 0, -1) if BEGIN.startswith(text[-n:])), 0)
