"""Parts of calls that are read as a whole: where JSON or Python ends, and their values as JSON. Pure."""

from __future__ import annotations

import ast
import json
import re
from typing import Any

_OUTSIDE = re.compile(r'["{}\[\]]')
_INSIDE = re.compile(r'["\\]')
_CONTROL = {code: json.dumps(chr(code))[1:-1] for code in range(0x20)}
_PYTHON = re.compile(r"[\"'()\[\]{}\\]")
_CONSTANTS = {"true": True, "false": False, "null": None}
_KEY = re.compile(r"([{,]\s*)([\w.$-]+)(\s*:)")


class JsonScanner:
    """Finds the end of one JSON object, list or string, piece by piece. It escapes bare control characters in
    strings, which models write."""

    def __init__(self, depth: int = 0) -> None:
        self._depth = depth
        self._inside = self._escaped = False

    def scan(self, text: str, at: int) -> tuple[str, int, bool]:
        """The part of `text` from `at` on that belongs to the value, its end, and whether the value ends."""
        parts: list[str] = []
        while at < len(text):
            if self._escaped:
                self._escaped = False
                parts.append(text[at].translate(_CONTROL))
                at += 1
                continue
            found = (_INSIDE if self._inside else _OUTSIDE).search(text, at)
            end = found.end() if found else len(text)
            part = text[at:end]
            parts.append(part.translate(_CONTROL) if self._inside else part)
            at = end
            if found and self._read_char(found[0]):
                return "".join(parts), at, True
        return "".join(parts), at, False

    def _read_char(self, char: str) -> bool:
        if char == '"':
            self._inside = not self._inside
        elif char == "\\":
            self._escaped = True
        else:
            self._depth += 1 if char in "{[" else -1
        return not self._inside and not self._escaped and self._depth <= 0


class PythonScanner:
    """Finds the end of one bracketed Python expression, piece by piece."""

    def __init__(self) -> None:
        self._depth = 0
        self._quote = ""
        self._escaped = False

    def scan(self, text: str, at: int) -> tuple[str, int, bool]:
        """The part of `text` from `at` on that belongs to the expression, its end, and whether it ends."""
        start = at
        while at < len(text):
            if self._escaped:
                self._escaped = False
                at += 1
                continue
            found = _PYTHON.search(text, at)
            if found is None:
                return text[start:], len(text), False
            at = found.end()
            if self._read_char(found[0]):
                return text[start:at], at, True
        return text[start:], at, False

    def _read_char(self, char: str) -> bool:
        if self._quote:
            self._escaped = char == "\\"
            self._quote = "" if char == self._quote else self._quote
        elif char in "\"'":
            self._quote = char
        elif char != "\\":
            self._depth += 1 if char in "([{" else -1
            return self._depth <= 0
        return False


Calls = list[tuple[str, str]]  # name, arguments as JSON


def python_calls(text: str) -> Calls | None:
    """The calls in a Python expression; None if it has anything else."""
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        nodes = tree.elts if isinstance(tree, ast.List) else [tree]
        return [_python_call(node) for node in nodes] or None
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _python_call(node: ast.expr) -> tuple[str, str]:
    if not isinstance(node, ast.Call) or node.args or any(each.arg is None for each in node.keywords):
        raise ValueError("a call with named arguments is expected")
    arguments = {str(each.arg): _value(each.value) for each in node.keywords}
    return ast.unparse(node.func).removesuffix(".call"), dumps(arguments)


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_value(item) for item in items]
        case ast.Dict(keys=keys, values=values) if None not in keys:
            return {
                str(_value(key)): _value(value)
                for key, value in zip(keys, values, strict=True)
                if key is not None
            }
    value = ast.literal_eval(node)
    if not isinstance(value, str | int | float | bool | None):
        raise ValueError("JSON has no such value")
    return value


def braces_call(text: str, quote: str) -> Calls | None:
    """The call `call:f{a:1,b:TEXT}`, where `quote` is around texts; None if it is not one."""
    head, brace, body = text.strip().removeprefix("call:").partition("{")
    if not brace or not re.fullmatch(r"[\w.-]+", head):
        return None
    parts = (brace + body).split(quote)
    parts[1::2] = [json.dumps(part, ensure_ascii=False) for part in parts[1::2]]
    parts[::2] = [_KEY.sub(r'\1"\2"\3', part) for part in parts[::2]]
    try:
        arguments = json.loads("".join(parts))
    except (ValueError, RecursionError):
        return None
    return [(head, dumps(arguments))] if isinstance(arguments, dict) else None


def json_calls(text: str) -> Calls | None:
    """The calls in a JSON object or list, with their keys in any order; None if it has anything else."""
    try:
        found = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None
    calls: Calls = []
    for call in found if isinstance(found, list) else [found]:
        if isinstance(call, dict) and isinstance(call.get("function"), dict):
            call = call["function"]  # OpenAI's own form
        name = call.get("name", call.get("tool_name")) if isinstance(call, dict) else None
        if not isinstance(name, str) or not name:
            return None
        calls.append((name, arguments_of(call.get("arguments", call.get("parameters")))))
    return calls or None


def keyed_calls(text: str) -> Calls | None:
    """The calls in a list of JSON objects that have the name of the function as their one key."""
    try:
        found = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None
    each = found if isinstance(found, list) else [found]
    if not all(isinstance(call, dict) and len(call) == 1 for call in each):
        return None
    return [(name, arguments_of(value)) for call in each for name, value in call.items()] or None


def arguments_of(value: object) -> str:
    """The arguments of a call as JSON; some models write them as a text, or leave them out."""
    if isinstance(value, str):
        inner = unquoted(value)
        return value if isinstance(inner, dict) else dumps(value)
    return dumps({} if value is None else value)


def unquoted(text: str) -> object:
    """The value of a JSON text; the text itself if it is none."""
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return text


def value_of(text: str) -> str:
    """The JSON of a text that is a JSON value or a Python literal; any other text is a string."""
    for read in (json.loads, lambda literal: _value(ast.parse(literal, mode="eval").body)):
        try:
            value = read(text.strip())
            if not isinstance(value, str):
                return dumps(value, allow_nan=False)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
    return dumps(text)


def escaped(text: str) -> str:
    """`text` as the inside of a JSON string."""
    return dumps(text)[1:-1]


def dumps(value: object, *, allow_nan: bool = True) -> str:
    """JSON with all characters as they are. Raises ValueError for a number that JSON does not have, unless
    `allow_nan`."""
    return json.dumps(value, ensure_ascii=False, allow_nan=allow_nan)
