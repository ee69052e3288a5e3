"""`AnswerReader` turns the text of one choice into deltas or a message of the OpenAI API.

Reasoning has two names: `reasoning_content`, as DeepSeek and most clients have it, and vLLM's `reasoning`. A
call starts with a delta of its id and name; deltas with pieces of its arguments follow.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shared.answer_formats.formats import Channels, Format, chosen
from shared.answer_formats.parser import AnswerParser
from shared.answer_formats.reader import ARGUMENTS, CALL, CONTENT, Part

Body = dict[str, Any]

SHORT_ID = 9  # characters, as the chat templates of Mistral demand


@dataclass(frozen=True, slots=True)
class Functions:
    """The functions that an answer may call: the schemas of their arguments by name."""

    schemas: Mapping[str, Any]
    parallel: bool = True


def functions_of(fields: Body) -> Functions | None:
    """The functions of a request; None if its answer may have no calls. The tokenizer validates them."""
    tools, choice = fields.get("tools"), fields.get("tool_choice", "auto")
    if not isinstance(tools, list) or not tools or choice == "none":
        return None
    schemas = {
        str(function.get("name")): function.get("parameters")
        for tool in tools
        if isinstance(tool, dict) and isinstance(function := tool.get("function"), dict)
    }
    return Functions(schemas, fields.get("parallel_tool_calls") is not False)


class AnswerReader:
    """Reads the text of one choice."""

    def __init__(self, form: Format, thinking: bool, functions: Functions | None, name: str) -> None:
        """`name` of the choice, which its calls have in their ids."""
        self._form = form
        self._name = name
        self._parser = AnswerParser(
            form,
            thinking=thinking,
            tools=None if functions is None else functions.schemas,
            parallel=functions is None or functions.parallel,
        )

    def feed(self, text: str) -> list[Body]:
        """The deltas of this piece of text."""
        return [self._delta(part) for part in self._parser.feed(text)]

    def finish(self) -> list[Body]:
        """The last deltas."""
        return [self._delta(part) for part in self._parser.finish()]

    def reason(self, given: str) -> str:
        """The `finish_reason`; an answer that was cut keeps its own."""
        return "tool_calls" if self._parser.calls and given == "stop" else given

    def message(self, text: str) -> Body:
        """The message of a whole text."""
        content, reasoning, calls = "", "", list[Body]()
        for part in (*self._parser.feed(text), *self._parser.finish()):
            if part.kind == CALL:
                calls.append(self._call(part))
            elif part.kind == ARGUMENTS:
                calls[part.call]["function"]["arguments"] += part.text
            elif part.kind == CONTENT:
                content += part.text
            else:
                reasoning += part.text
        message: Body = {"role": "assistant", "content": content or (None if calls else "")}
        if reasoning:
            message |= {"reasoning_content": reasoning, "reasoning": reasoning}
        return {**message, "tool_calls": calls} if calls else message

    def _delta(self, part: Part) -> Body:
        if part.kind == CONTENT:
            return {"content": part.text}
        if part.kind == CALL:
            return {"tool_calls": [{"index": part.call, **self._call(part)}]}
        if part.kind == ARGUMENTS:
            return {"tool_calls": [{"index": part.call, "function": {"arguments": part.text}}]}
        return {"reasoning_content": part.text, "reasoning": part.text}

    def _call(self, part: Part) -> Body:
        number = f"{self._name}_{part.call}"
        short = hashlib.sha256(number.encode()).hexdigest()[:SHORT_ID]
        function = {"name": part.text, "arguments": ""}
        return {
            "id": short if self._form.short_ids else f"call_{number}",
            "type": "function",
            "function": function,
        }


def reader_of(answer_format: str, functions: Functions | None, name: str) -> AnswerReader | None:
    """The reader of a choice; None if its text is its content."""
    form, thinking = chosen(answer_format)
    if form is None:
        return None
    channels = isinstance(form.notations[0], Channels)
    if functions is None and form.think is None and not channels:
        return None
    return AnswerReader(form, thinking, functions, name)
