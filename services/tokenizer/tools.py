"""Functions that a model may call: the grammar of well-formed calls, and how the model learns of them. Pure.

    tool_choice   auto: text, and in it `<tool_call>\\n{"name": …, "arguments": …}\\n</tool_call>`
                  required, or a function by name: nothing but the one object `{"name": …, "arguments": …}`
                  none: as if there were no tools

The markup is the one that most open models were trained on (Hermes). A chat template that knows tools gets
them; for any other they are put into the system message.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from services.tokenizer.schema import Schema, followed
from shared.errors import BadRequest

MAX_TOOLS = 128
BEGIN, END = "<tool_call>", "</tool_call>"
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_HOW = (
    "You may call functions. They are, as JSON, in <tools></tools>:\n<tools>\n{tools}\n</tools>\n"
    'To call one, answer with a JSON object in tags:\n<tool_call>\n{{"name": <function>, "arguments": '
    "<object>}}\n</tool_call>"
)


@dataclass(frozen=True, slots=True)
class Tools:
    """The tools of a request as it gave them, the schema of each one's arguments, and which may be called."""

    given: tuple[dict[str, Any], ...]
    schemas: dict[str, Schema | bool]
    choice: str  # auto, required

    @property
    def grammar(self) -> dict[str, Any]:
        """`kind` and `source` as executors compile them."""
        if self.choice == "auto":
            tags = [
                {
                    "begin": f'{BEGIN}\n{{"name": {json.dumps(n)}, "arguments": ',
                    "schema": s,
                    "end": f"}}\n{END}",
                }
                for n, s in self.schemas.items()
            ]
            return {"kind": "tags", "source": json.dumps({"trigger": BEGIN, "tags": tags})}
        calls = [
            {
                "type": "object",
                "properties": {"name": {"const": name}, "arguments": schema},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
            for name, schema in self.schemas.items()
        ]
        return {"kind": "json", "source": json.dumps(calls[0] if len(calls) == 1 else {"anyOf": calls})}


def read_tools(fields: dict[str, Any]) -> Tools | None:
    """The tools that a request may call; None when it has none or calls none. Raises BadRequest."""
    given, choice = fields.get("tools", []), fields.get("tool_choice", "auto")
    schemas = _schemas(given)
    match choice:
        case {"type": "function", "function": {"name": str() as name}} if name in schemas:
            return Tools(tuple(given), {name: schemas[name]}, "required")
        case "none":
            return None
        case "auto" | "required" if schemas or choice == "auto":
            return Tools(tuple(given), schemas, choice) if schemas else None
    raise BadRequest(
        '`tool_choice`: none, auto, required or {"type": "function", "function": {"name": …}} of one of '
        "`tools` is expected",
        param="tool_choice",
    )


def _schemas(given: Any) -> dict[str, Schema | bool]:
    if not isinstance(given, list) or len(given) > MAX_TOOLS:
        raise BadRequest(f"`tools`: a list of at most {MAX_TOOLS} functions is expected", param="tools")
    schemas: dict[str, Schema | bool] = {}
    for tool in given:
        match tool:
            case {"type": "function", "function": {"name": str() as name, **rest}} if _NAME.fullmatch(name):
                parameters = rest.get("parameters") or {"type": "object", "additionalProperties": True}
                schemas[name] = followed(parameters, "tools")
            case _:
                raise BadRequest(
                    '`tools`: {"type": "function", "function": {"name": …, "parameters": …}} with a name of '
                    "letters, digits, _ and - is expected",
                    param="tools",
                )
    if len(schemas) < len(given):
        raise BadRequest("`tools`: two functions have the same name", param="tools")
    return schemas


def told(messages: list[dict[str, Any]], tools: Tools) -> list[dict[str, Any]]:
    """The conversation for a template that knows no tools: they are in its system message."""
    text = _HOW.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools.given))
    if messages and messages[0]["role"] == "system":
        first = {**messages[0], "content": f"{messages[0]['content']}\n\n{text}"}
        return [first, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def spelled(message: dict[str, Any]) -> dict[str, Any]:
    """A turn in which an assistant has called functions, with the calls as its text."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list) or not calls:
        return message
    texts = [f"{BEGIN}\n{json.dumps(_call(call), ensure_ascii=False)}\n{END}" for call in calls]
    content = "\n".join([message["content"], *texts] if message["content"] else texts)
    return {**{k: v for k, v in message.items() if k != "tool_calls"}, "content": content}


def parsed(message: dict[str, Any]) -> dict[str, Any]:
    """The same turn for a template that knows tools: arguments as the objects that their texts hold."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    return {**message, "tool_calls": [{"type": "function", "function": _call(call)} for call in calls]}


def _call(call: Any) -> dict[str, Any]:
    match call:
        case {"function": {"name": str() as name, "arguments": arguments}}:
            try:
                value = json.loads(arguments) if isinstance(arguments, str) else arguments
            except (ValueError, RecursionError):
                value = arguments
            return {"name": name, "arguments": value}
    raise BadRequest(
        '`messages`: a tool call is {"type": "function", "function": {"name": …, "arguments": …}}',
        param="messages",
    )
