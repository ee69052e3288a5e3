"""Structured output: what a request asks for as the one form that executors compile. Pure.

response_format      {"type": "json_object"} | {"type": "json_schema", "json_schema": {"schema": …}}
structured_outputs   {"json": …} | {"regex": …} | {"choice": [...]} | {"grammar": …} | {"json_object": true}
grammar              EBNF, as llama.cpp names it
tools, tool_choice   see tools.py
──▶ {"kind": "json" | "regex" | "ebnf" | "tags", "source": …}, JSON in Tokenized.grammar
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from services.tokenizer.schema import followed
from services.tokenizer.tools import read_tools
from shared.errors import BadRequest

MAX_GRAMMAR_CHARS = 32_768  # with its kind: more would leave no room for other options
ANY_OBJECT = {"type": "object", "additionalProperties": True}
_FIELDS = ("response_format", "structured_outputs", "grammar")


def grammar_of(fields: dict[str, Any]) -> str:
    """The grammar that the fields of a request ask for, empty when they ask for none. Raises BadRequest."""
    tools = read_tools(fields)
    asked = [name for name in _FIELDS if fields.get(name) not in (None, "", {"type": "text"})]
    asked += ["tools"] if tools is not None else []
    if len(asked) > 1:
        raise BadRequest(f"`{asked[1]}` and `{asked[0]}` exclude each other", param=asked[1])
    if not asked:
        return ""
    read: dict[str, Callable[[Any], str]] = {
        "response_format": _response_format,
        "structured_outputs": _structured,
        "grammar": lambda value: _ebnf(value, "grammar"),
        "tools": lambda _: json.dumps(tools.grammar) if tools is not None else "",
    }
    text = read[asked[0]](fields[asked[0]])
    if len(text) > MAX_GRAMMAR_CHARS:
        raise BadRequest(
            f"`{asked[0]}` takes {len(text)} characters, over {MAX_GRAMMAR_CHARS}; shorten it", param=asked[0]
        )
    if fields.get("ignore_eos") is True:
        raise BadRequest(f"`ignore_eos`: with `{asked[0]}` an answer ends by itself", param="ignore_eos")
    return text


def _response_format(value: Any) -> str:
    param = "response_format"
    match value:
        case {"type": "json_object", **rest} if not rest:
            return _json(ANY_OBJECT, param)
        case {"type": "json_schema", "json_schema": {"schema": schema}, **rest} if not rest:
            return _json(schema, param)
    raise BadRequest(
        '`response_format`: {"type": "text"}, {"type": "json_object"} or {"type": "json_schema", '
        '"json_schema": {"name": …, "schema": …}} is expected',
        param=param,
    )


def _structured(value: Any) -> str:
    param = "structured_outputs"
    match value:
        case {"json": schema, **rest} if not rest:
            return _json(schema, param)
        case {"json_object": True, **rest} if not rest:
            return _json(ANY_OBJECT, param)
        case {"regex": str() as pattern, **rest} if not rest:
            return _packed("regex", _checked_regex(pattern, param))
        case {"choice": [*choices], **rest} if not rest and choices:
            if all(isinstance(choice, str) and choice for choice in choices):
                return _packed("ebnf", "root ::= " + " | ".join(map(_quoted, choices)))
        case {"grammar": text, **rest} if not rest:
            return _ebnf(text, param)
    raise BadRequest(
        "`structured_outputs`: one of `json`, `json_object`, `regex`, `choice`, `grammar` is expected",
        param=param,
    )


def _json(schema: Any, param: str) -> str:
    if isinstance(schema, str):  # vLLM takes the schema as a text, too
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError):
            raise BadRequest(f"`{param}`: the schema is a text, and no JSON", param=param) from None
    return _packed("json", json.dumps(followed(schema, param), ensure_ascii=False))


def _checked_regex(pattern: str, param: str) -> str:
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise BadRequest(f"`{param}`: the regex is wrong: {error!s:.200}", param=param) from None
    return pattern


def _ebnf(text: Any, param: str) -> str:
    if not isinstance(text, str) or not re.search(r"(?m)^\s*root\s*::=", text):
        raise BadRequest(f"`{param}`: EBNF with a rule `root ::= …` is expected", param=param)
    return _packed("ebnf", text)


def _quoted(text: str) -> str:
    """A literal of EBNF."""
    return json.dumps(text, ensure_ascii=True)


def _packed(kind: str, source: str) -> str:
    return json.dumps({"kind": kind, "source": source}, ensure_ascii=False)
