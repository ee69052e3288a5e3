"""`grammar_of` turns the output options of a request into the one form that executors follow. Pure.

response_format      {"type": "json_object"} | {"type": "json_schema", "json_schema": {"schema": …}}
structured_outputs   {"json": …} | {"regex": …} | {"choice": [...]} | {"grammar": …} | {"json_object": true}
guided_json, guided_regex, guided_choice, guided_grammar: the same, as vLLM named them before
grammar              EBNF, as llama.cpp names it
tools, tool_choice   functions that the model may call: see `Tools`
──▶ a grammar of llguidance (shared/answer_formats/grammar.py), JSON in Tokenized.grammar: see `packed`

A JSON schema that the engine cannot follow exactly is refused, with the keyword: see json_schema.py. The
engine compiles each grammar here, too, within `limits`: a request with a wrong one never reaches an executor.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
from dataclasses import dataclass, field
from typing import Any

from llguidance import regex_to_lark
from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark

from services.tokenizer.json_schema import MAX_FOLDED_SETS, Schema, engine_refuses, followed, is_hostile
from shared.answer_formats import grammar
from shared.answer_formats.formats import HERMES, Format
from shared.answer_formats.grammar import Rules
from shared.api import GenerateRequest, Tool, present
from shared.errors import BadRequest

MAX_GRAMMAR_CHARS = 262_144  # of a grammar
MAX_PACKED_CHARS = 32_768  # of a grammar in a message: more would leave no room for other options
ANY_OBJECT: Schema = {"type": "object"}

MAX_LOG_CHARS = 1_000

log = logging.getLogger("headrace.tokenizer")

_OLD = "guided_"  # vLLM's old names: `guided_json` is {"json": …} in `structured_outputs`
# These exclude each other.
_FIELDS = (
    "response_format", "structured_outputs", "grammar",
    *(f"{_OLD}{rule}" for rule in ("json", "regex", "choice", "grammar")),
)  # fmt: skip


def grammar_of(
    request: GenerateRequest,
    tools: Tools | None,
    form: Format | None = None,
    *,
    thinking: bool = False,
    available: bool = True,
) -> str:
    """The grammar of a request for a message, empty if it has none; `tools` are those of the request, `form`
    is the format of its answer. `thinking`: its prompt opens the reasoning. `available`: an executor can
    follow a grammar; else tools that are not strict are free. Raises BadRequest."""
    asked = [name for name in _FIELDS if getattr(request, name) is not None]
    if len(asked) > 1:
        raise BadRequest(f"`{asked[1]}` and `{asked[0]}` exclude each other", param=asked[1])
    param = asked[0] if asked else "tools"
    if not asked and tools is None:
        return ""
    if not available:
        if not asked and tools is not None and not tools.strict:
            log.info("tools are not followed: no executor of this model can follow a grammar")
            return ""
        of = "" if asked or tools is None else f" for the parameters of {min(tools.strict)!r:.40}"
        why = f"no executor of this model can follow a grammar{of}: it takes an engine with weights"
        raise BadRequest(f"`{param}`: {why}", param=param)
    text = _text_of(getattr(request, param), param) if asked else None
    if tools is None:
        assert text is not None
        source = grammar.whole(form, text, thinking=thinking)
        _check(source, param)
    else:
        if text is not None:
            _check(grammar.whole(None, text, thinking=False), param)
        found = tools.grammar(form or HERMES, text, thinking=thinking)
        if found is None:  # the family's calls have no grammar, and text is free
            return ""
        source = found
    for name in ("ignore_eos", "min_tokens"):
        if getattr(request, name):
            raise BadRequest(f"`{name}`: with `{param}` an answer ends by itself", param=name)
    return grammar.packed(source, form.markers if form else frozenset())


def binds_text(request: GenerateRequest) -> bool:
    """Whether the text of the answer follows a grammar, apart from calls."""
    return any(getattr(request, name) is not None for name in _FIELDS)


def _text_of(asked: Any, param: str) -> Rules:
    """The rules of the answer's text, the first one `text`."""
    if param.startswith(_OLD):
        asked = {param.removeprefix(_OLD): asked}
    match asked:
        case {"json_schema": {"schema": schema}} | {"json": schema}:
            return grammar.json_rules("text", _schema(schema, param))
        case {"type": "json_object"} | {"json_object": True}:
            return grammar.json_rules("text", ANY_OBJECT)
        case {"regex": pattern}:
            if is_hostile(pattern):
                why = f"the regex has over {MAX_FOLDED_SETS} sets without regard to case"
                raise BadRequest(f"`{param}`: {why}", param=param)
            return {"text": f"/{regex_to_lark(pattern)}/"}
        case {"choice": choices}:
            return {"text": " | ".join(map(grammar.literal, choices))}
        case str(ebnf) | {"grammar": ebnf}:
            return {"text": f"@{grammar.NESTED}", grammar.NESTED: _ebnf(ebnf, param)}
    raise AssertionError(f"{param} was read before")


def _schema(schema: Any, param: str) -> Schema | bool:
    if isinstance(schema, str):  # as in vLLM
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError):
            raise BadRequest(f"`{param}`: the schema is a text that is not JSON", param=param) from None
    return followed(schema, param)


def _ebnf(text: str, param: str) -> str:
    if not re.search(r"(?m)^\s*root\s*::=", text):
        raise BadRequest(f"`{param}`: EBNF with a rule `root ::= …` is expected", param=param)
    try:
        return gbnf_to_lark(text)
    except RecursionError:
        raise BadRequest(f"`{param}`: the grammar is nested too deeply", param=param) from None
    except Exception as error:
        if not isinstance(error, GbnfToLarkError) and type(error) is not Exception:
            raise
        raise BadRequest(f"`{param}`: grammar: {error!s:.200}", param=param) from None


def _too_long(source: str) -> str:
    """The reason to refuse a grammar that is too long; empty for any other."""
    length, most = len(source), MAX_GRAMMAR_CHARS
    if length <= most:
        length, most = len(grammar.packed(source)), MAX_PACKED_CHARS
    return f"the grammar takes {length} characters, over {most}; shorten it" if length > most else ""


def _check(source: str, param: str) -> None:
    """Raises BadRequest for a grammar that is too long, or that the engine does not take."""
    if why := _too_long(source):
        raise BadRequest(f"`{param}`: {why}", param=param)
    if source and (why := engine_refuses(source)):
        raise BadRequest(f"`{param}`: the grammar engine refuses it: {why}", param=param)


@dataclass(frozen=True, slots=True)
class Tools:
    """The tools of a request: as given, with the resolved schemas of their arguments, and the choice.

    tool_choice   auto: text, in which the model may write calls; if the text follows a grammar, that or calls
                  required, or a function by name: nothing but calls
                  none: the tools are ignored

    Calls are written as the model's family does (shared/answer_formats). The chat template gets the tools if
    it shows them; else `turns.fitted` writes them into the system message.
    """

    given: list[Tool]
    schemas: dict[str, Schema]
    choice: str  # auto, required
    parallel: bool = True  # more than one call
    strict: frozenset[str] = frozenset()  # functions whose schemas are followed to the letter, or refused
    loosened: dict[str, list[str]] = field(default_factory=dict)  # what is not followed of whose schema

    def grammar(self, form: Format, text: Rules | None, *, thinking: bool) -> str | None:
        """The grammar of calls and of `text`, the rules of what is no call; None for a family whose calls
        have no grammar. Raises BadRequest."""
        required = self.choice == "required"

        def source_of(schemas: dict[str, Schema]) -> str | None:
            rules = grammar.calls(form, schemas, required=required, parallel=self.parallel, text=text)
            return None if rules is None else grammar.whole(form, rules, thinking=thinking)

        source = source_of(self.schemas)
        try:
            _check(source or "", "tools")
        except BadRequest:
            asked = self.strict if _too_long(source or "") else self.schemas  # each takes the engine 1 ms
            schemas = {**self.schemas, **{name: self._alone(name) for name in asked}}
            if schemas == self.schemas:  # each can be followed, but not all together
                schemas = {
                    name: each if name in self.strict else ANY_OBJECT for name, each in schemas.items()
                }
            log.info("tools are followed in part: some arguments are free")
            source = source_of(schemas)
            _check(source or "", "tools")
        return source

    def _alone(self, name: str) -> Schema:
        """The schema of a function if the engine takes it; else that of any object. Raises BadRequest."""
        try:
            _check(
                grammar.whole(None, grammar.json_rules("text", self.schemas[name]), thinking=False), "tools"
            )
        except BadRequest as error:
            if name in self.strict:
                raise _of_function(error, name) from None
            return ANY_OBJECT
        return self.schemas[name]


def read_tools(request: GenerateRequest) -> Tools | None:
    """The tools of a request; None without tools or with `tool_choice` none. Raises BadRequest."""
    given, choice = request.tools or [], request.tool_choice
    if not isinstance(choice, str) and choice["type"] == "allowed_tools":
        allowed, choice = choice["allowed_tools"]["tools"], choice["allowed_tools"]["mode"]
        names = {tool["function"]["name"] for tool in allowed}
        given = [tool for tool in given if tool["function"]["name"] in names]
        if len(given) < len(names):
            raise BadRequest("`tool_choice`: `tools` has not all of these functions", param="tool_choice")
    functions = {tool["function"]["name"]: tool["function"] for tool in given}
    if len(functions) < len(given):
        raise BadRequest("`tools`: two functions have the same name", param="tools")
    named = not isinstance(choice, str)
    if not isinstance(choice, str):
        functions = {name: each for name, each in functions.items() if name == choice["function"]["name"]}
        choice = "required"
    if choice == "required" and not functions:
        raise BadRequest("`tool_choice`: `tools` has no such function", param="tool_choice")
    if not functions or choice == "none":
        return None
    strict = frozenset(name for name in functions if choice == "required" or functions[name].get("strict"))
    loosened: dict[str, list[str]] = {}
    schemas: dict[str, Schema] = {}
    for name, function in functions.items():
        dropped: list[str] = []
        schemas[name] = _arguments(name, function.get("parameters"), None if name in strict else dropped)
        if dropped:
            loosened[name] = dropped
    if loosened:
        parts = "; ".join(f"{name} without {', '.join(paths)}" for name, paths in loosened.items())
        log.info("tools are followed in part: %s", parts[:MAX_LOG_CHARS])
    parallel = request.parallel_tool_calls is not False and not named
    return Tools(given, schemas, choice, parallel, strict, loosened)


def _arguments(name: str, parameters: Any, dropped: list[str] | None) -> Schema:
    """The schema of a function's arguments. What is not followed of it is appended to `dropped`, or refused
    without that list. Raises BadRequest."""
    if not parameters:
        return ANY_OBJECT
    try:
        if not isinstance(parameters, dict):
            raise BadRequest("`tools`: the schema is not a schema: an object is expected", param="tools")
        schema = followed({"type": "object", **parameters}, "tools", dropped)
        if not isinstance(schema, dict) or schema.get("type") not in ("object", None):
            raise BadRequest("`tools`: the schema is not one of an object", param="tools")
    except BadRequest as error:
        if dropped is None:
            raise _of_function(error, name) from None
        dropped.append("/")
        return ANY_OBJECT
    return {**schema, "type": "object"}


def _of_function(error: BadRequest, name: str) -> BadRequest:
    """The error with the function that it is about."""
    text = str(error).replace("`tools`: the schema's ", "`tools`: the schema ")
    return BadRequest(text.replace("the schema", f"the parameters of {name!r:.40}:", 1), param="tools")


def parsed(message: dict[str, Any]) -> dict[str, Any]:
    """The same message with the arguments of its calls as objects. Raises BadRequest."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    whole = [{**present(call), "type": "function", "function": _call(call)} for call in calls]
    return {**message, "tool_calls": whole}


def _call(call: Any) -> dict[str, Any]:
    """An earlier call with its arguments as a value; null, an empty text and absence mean none."""
    match call:
        case {"function": {"name": str() as name, **more}}:
            value = more.get("arguments")
            if isinstance(value, str):
                with contextlib.suppress(ValueError, RecursionError):
                    value = json.loads(value) if value.strip() else None
            return {"name": name, "arguments": {} if value is None else value}
    raise BadRequest(
        '`messages`: a tool call is {"type": "function", "function": {"name": …, "arguments": …}}',
        param="messages",
    )
