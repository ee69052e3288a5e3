"""`grammar_of` turns the output options of a request into the one form that executors follow. Pure.

response_format      {"type": "json_object"} | {"type": "json_schema", "json_schema": {"schema": …}}
structured_outputs   {"json": …} | {"regex": …} | {"choice": [...]} | {"grammar": …} | {"json_object": true}
guided_json, guided_regex, guided_choice, guided_grammar: the same, as vLLM named them before
grammar              EBNF, as llama.cpp names it
tools, tool_choice   functions that the model may call: see `Tools`
──▶ a grammar of llguidance (shared/answer_formats/grammar.py), JSON in Tokenized.grammar: see `packed`

A JSON schema that the engine cannot follow exactly is refused, with the keyword: see `followed`. The engine
compiles each grammar here, too, within `limits`: a request with a wrong one never reaches an executor.

`followed` prepares a JSON schema for the grammar engine, or names the keyword that it cannot follow. Pure.

The engine (llguidance) follows JSON Schema 2020-12 but for `not`, `if`, `dependent…`, `contains`,
`uniqueItems`, `propertyNames` and `unevaluated…`. An answer under the grammar is valid under the schema.
What the grammar leaves out of what the schema allows is listed here and in docs/reference/api.md:

* properties come in the order of the schema; an object with named properties has no others, unless it has
  `additionalProperties` or is joined with other schemas (`allOf`, or a keyword beside `$ref` or `anyOf`)
* characters stand as they are; escapes are those of the quote, the backslash and control characters
* a number with bounds, `multipleOf` or in `enum` is written without an exponent
* integers in `enum` and `const` are at most 2^53 - 1, other bounds below 2^63: beyond, JSON numbers lose
  digits

Two ways to treat a keyword that cannot be followed: `followed` refuses it by its path; with `dropped` it is
left out, its path is recorded, and the rest of the schema is followed.
"""

from __future__ import annotations

import functools
import json
import logging
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from decimal import ROUND_DOWN, Decimal
from typing import Any
from urllib.parse import quote, unquote

from llguidance import LLMatcher, regex_to_lark
from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark

from shared.answer_formats import grammar
from shared.answer_formats.formats import HERMES, Format
from shared.answer_formats.grammar import Rules, limits
from shared.api import GenerateRequest, Tool
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


@dataclass(frozen=True, slots=True)
class Output:
    """What a request asks of its answer: tools, a form of its text, or both. See prepare.AnswerForm."""

    request: GenerateRequest
    tools: Tools | None

    @property
    def given(self) -> list[Tool] | None:
        return None if self.tools is None else self.tools.given

    @property
    def is_all_calls(self) -> bool:
        return self.tools is not None and self.tools.choice == "required"

    @property
    def has_text_grammar(self) -> bool:
        return any(getattr(self.request, name) is not None for name in _FIELDS)

    def grammar(self, form: Format | None, *, thinking: bool, available: bool) -> str:
        return grammar_of(self.request, self.tools, form, thinking=thinking, available=available)


def output_of(request: GenerateRequest) -> Output:
    """Raises BadRequest for wrong tools."""
    return Output(request, read_tools(request))


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
    it shows them; else `fitted` writes them into the system message.
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


Schema = dict[str, Any]

MAX_DEPTH = 32
MOST_EXACT = 2**53 - 1  # the largest integer that every reader of JSON keeps (RFC 7493)
MOST_BOUND = 2**63  # the engine's bounds are signed integers of 64 bits
_LAST = MOST_BOUND - 1024  # the last double below it
LEAST_STEP = 1e-15  # between a bound and a number that is not it
MAX_FOLDED_SETS = 64  # sets of a case-insensitive pattern: each costs the compiler up to 1 ms
_PLACE = re.compile(r"^at \d+\(\d+\): ")
_ESCAPE = re.compile(r"\\.", re.DOTALL)
_SPACES = {r"\s": r"[[\s\x{feff}]--\x{85}]", r"\S": r"[[\S\x{85}]--\x{feff}]"}  # ECMA's: a BOM, no NEL
_TOO_DEEP = f"is nested deeper than {MAX_DEPTH}"

_ANNOTATIONS = frozenset(
    {"title", "description", "default", "examples", "example", "$schema", "$id", "id", "$anchor", "$comment"}
    | {
        "deprecated",
        "readOnly",
        "writeOnly",
        "$vocabulary",
        "contentMediaType",
        "contentEncoding",
        "contentSchema",
    }
    | {"discriminator", "externalDocs", "xml", "strict", "optional"}  # of OpenAPI and of clients
)
_TYPES: dict[str, Callable[[Any], bool]] = {
    "object": lambda v: isinstance(v, dict),
    "array": lambda v: isinstance(v, list),
    "string": lambda v: isinstance(v, str),
    "integer": lambda v: type(v) is int or (type(v) is float and v.is_integer()),
    "number": lambda v: type(v) in (int, float),
    "boolean": lambda v: isinstance(v, bool),
    "null": lambda v: v is None,
}
_NUMERIC_FORMATS = frozenset(
    {"int32", "int64", "uint", "uint8", "uint16", "uint32", "uint64", "float", "double"}
)
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_SIZES = (("minLength", "maxLength"), ("minItems", "maxItems"), ("minProperties", "maxProperties"))
_IN_REFERENCE = "#/$~!&'()*+,;=:@"
_JOINS = ("$ref", "anyOf", "oneOf", "allOf")
_OF_OBJECTS = frozenset(
    {"properties", "patternProperties", "additionalProperties", "required", "minProperties", "maxProperties"}
)

_MONTHS = (
    "(0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8])"
)
_LEAP = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)-02-29"
_DATE = f"([0-9]{{4}}-({_MONTHS})|{_LEAP})"
_HOUR = "([01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = f"{_HOUR}:[0-5][0-9](\\.[0-9]{{1,9}})?(Z|[+-]{_HOUR})"
# RFC 3339, with the days that a month has; the engine's own dates end with 31 in every month.
_SPELLED = {"date": f"^{_DATE}$", "time": f"^{_TIME}$", "date-time": f"^{_DATE}T{_TIME}$"}
# The engine's own names of hosts may be too long, or wrong punycode: here no label has `--` as its
# third and fourth letter. RFC 5321 bounds the parts of an address, and the engine's own addresses do not.
_A, _X = "[A-Za-z0-9]", "[A-Za-z0-9-]"
_LABEL = f"{_A}({_A}|{_X}{_A}|{_X}{{2}}{_A}|{_X}({_A}{_X}|-{_A}){_X}{{0,58}}{_A})?"
_HOST = {"pattern": f"^{_LABEL}(\\.{_LABEL})*$", "maxLength": 253}
_ADDRESS = {"pattern": f"^[^@]{{1,64}}@{_LABEL}(\\.{_LABEL})*$", "maxLength": 254}
FORMATS = (*_SPELLED, "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid")


def followed(schema: Any, param: str, dropped: list[str] | None = None) -> Schema | bool:
    """The schema as the grammar engine takes it. `param` is the field of the request. Without `dropped` a
    keyword that cannot be followed raises BadRequest with its path; else its path is appended there."""
    reader = _Reader(schema, param, dropped)
    return reader.read(schema, "", 0)


class _Reader:
    """One schema, its references resolved against itself."""

    def __init__(self, root: Any, param: str, dropped: list[str] | None) -> None:
        self._root = root
        self._param = param
        self._dropped = dropped
        # ids of schemas that are joined with others, so they cannot close their objects
        self._open = set[int]()
        self._followed = set[str]()  # references that lead to a schema
        self._find_joined(root, 0)

    def read(self, schema: Any, path: str, depth: int) -> Schema | bool:
        """The part of the schema at `path`. Raises BadRequest."""
        if depth > MAX_DEPTH:
            raise self._refused(path, _TOO_DEEP)
        if isinstance(schema, bool) and path:
            return schema
        if not isinstance(schema, dict):
            if self._dropped is None or not path:
                raise self._refused(path, "is not a schema: an object is expected")
            self._dropped.append(path)
            return True
        kept: Schema = {}
        for name in schema:
            if name in _ANNOTATIONS or name.startswith("x-"):
                continue
            try:
                self._add_keyword(kept, schema, name, f"{path}/{name}", depth)
            except BadRequest:
                if self._dropped is None:
                    raise
                self._dropped.append(f"{path}/{name}")
        return self._whole(kept, schema, path)

    def _add_keyword(self, kept: Schema, schema: Schema, name: str, path: str, depth: int) -> None:
        """Add one keyword to `kept`. Raises BadRequest."""
        value = schema[name]
        match name:
            case "properties" | "$defs" | "definitions":
                kept[name] = self._each(value, path, depth)
            case "patternProperties":
                of = self._each(value, path, depth)
                kept[name] = {self._pattern(key, f"{path}/{key!s:.80}"): part for key, part in of.items()}
            case "items" if isinstance(value, list):  # as before 2020-12
                kept["prefixItems"] = self._list(value, path, depth)
            case "additionalItems":
                if isinstance(schema.get("items"), list):
                    kept["items"] = self.read(value, path, depth + 1)
            case "items" | "additionalProperties":
                kept[name] = self.read(value, path, depth + 1)
            case "oneOf" if self._dropped is not None:
                kept.setdefault("allOf", []).append({"anyOf": self._list(value, path, depth)})
                self._dropped.append(path)  # two of them may hold
            case "allOf":
                kept.setdefault("allOf", []).extend(self._list(value, path, depth))
            case "anyOf" | "oneOf" | "prefixItems":
                kept[name] = self._list(value, path, depth)
            case "$ref":
                self._follow(value, path)
                kept[name] = quote(unquote(value), safe=_IN_REFERENCE)
            case "type":
                kept[name] = self._types(value, path)
            case "const":
                (kept[name],) = self._values([value], schema, path)
            case "enum":
                kept[name] = self._values(value, schema, path)
            case "required":
                kept[name] = self._names(value, path)
            case "pattern":
                kept[name] = self._pattern(value, path)
            case "format":
                self._format(kept, schema, value, path)
            case "multipleOf" | "minimum" | "maximum" | "exclusiveMinimum" | "exclusiveMaximum":
                self._bound(kept, schema, name, path)
            case "nullable" | "uniqueItems" if value is False:
                pass
            case "nullable" if value is True:
                kept[name] = True  # `_whole` writes it out
            case _ if any(name in pair for pair in _SIZES):
                kept[name] = self._size(value, path)
            case _:
                raise self._refused(path, "cannot be followed")

    def _whole(self, kept: Schema, schema: Schema, path: str) -> Schema:
        """What keywords mean beside each other."""
        self._check_ranges(kept, path)
        named = {**kept.get("properties", {}), **kept.get("patternProperties", {})}
        if named and id(schema) not in self._open:
            for name in kept.get("required", ()):
                kept.setdefault("properties", {}).setdefault(name, True)
            kept.setdefault("additionalProperties", False)
        self._check_spellings(kept, path)
        others: list[Schema] = [{"type": "null"}] if kept.pop("nullable", False) else []
        if self._may_be(kept, "number"):
            others += _missed(kept)
            _move_whole_bounds(kept)
        if others:
            defs: Schema = {place: kept.pop(place) for place in ("$defs", "definitions") if place in kept}
            kept = {"anyOf": [kept, *others], **defs}
        return kept

    def _each(self, parts: Any, path: str, depth: int) -> Schema:
        if not isinstance(parts, dict):
            raise self._refused(path, "is not an object of schemas")
        return {name: self.read(part, f"{path}/{name!s:.80}", depth + 1) for name, part in parts.items()}

    def _list(self, parts: Any, path: str, depth: int) -> list[Schema | bool]:
        if not isinstance(parts, list) or not parts:
            raise self._refused(path, "is not a list of schemas")
        return [self.read(part, f"{path}/{i}", depth + 1) for i, part in enumerate(parts)]

    def _names(self, names: Any, path: str) -> list[str]:
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise self._refused(path, "is not a list of names")
        return names

    def _types(self, kinds: Any, path: str) -> Any:
        listed = [kinds] if isinstance(kinds, str) else kinds
        if (
            not isinstance(listed, list)
            or not listed
            or not all(isinstance(k, str) and k in _TYPES for k in listed)
        ):
            raise self._refused(path, f"is not one of {', '.join(_TYPES)}")
        return kinds

    def _may_be(self, schema: Schema, kind: str) -> bool:
        kinds = schema.get("type", list(_TYPES))
        return kind in (kinds if isinstance(kinds, list) else [kinds])

    def _values(self, values: Any, schema: Schema, path: str) -> list[Any]:
        if not isinstance(values, list) or not values:
            raise self._refused(path, "is not a list of values")
        kinds = schema.get("type", [])
        kinds = [kind for kind in (kinds if isinstance(kinds, list) else [kinds]) if kind in _TYPES]
        if kinds and not all(any(_TYPES[kind](v) for kind in kinds) for v in values):
            raise self._refused(path, "has a value of a type that `type` does not allow")
        return [self._written(value, path) for value in values]

    def _written(self, value: Any, path: str) -> Any:
        """A value of `enum` with its numbers as the engine writes them."""
        match value:
            case bool():
                return value
            case dict():
                return {key: self._written(each, path) for key, each in value.items()}
            case list():
                return [self._written(each, path) for each in value]
            case int() | float() if abs(value) > MOST_EXACT:
                raise self._refused(
                    path,
                    f"has the number {value}: over 2^53 - 1 JSON numbers lose digits; write it as a text",
                )
            case float() if value.is_integer():
                return int(value)
            case str() if not value.isprintable() and any("\ud800" <= letter <= "\udfff" for letter in value):
                raise self._refused(path, "has half of a surrogate pair, which is no text")
        return value

    def _pattern(self, value: Any, path: str) -> str:
        """A pattern with the white space of ECMA 262."""
        if not isinstance(value, str):
            raise self._refused(path, "is not a text")
        if is_hostile(value):
            raise self._refused(path, f"has over {MAX_FOLDED_SETS} sets without regard to case")
        pattern = _ESCAPE.sub(lambda found: _SPACES.get(found[0], found[0]), value)
        if why := engine_refuses(json.dumps({"grammars": [{"json_schema": {"pattern": pattern}}]})):
            raise self._refused(path, f"cannot be followed: {why}")
        return pattern

    def _format(self, kept: Schema, schema: Schema, value: Any, path: str) -> None:
        if isinstance(value, str) and value in _NUMERIC_FORMATS and not self._may_be(schema, "string"):
            return
        if value not in FORMATS:
            raise self._refused(path, f"is not one of {', '.join(FORMATS)}")
        if value not in (*_SPELLED, "hostname"):
            kept["format"] = value
        if value in ("email", "hostname"):
            kept.setdefault("allOf", []).append(_ADDRESS if value == "email" else _HOST)
        elif value in _SPELLED:
            kept.setdefault("allOf", []).append({"pattern": _SPELLED[value]})

    def _bound(self, kept: Schema, schema: Schema, name: str, path: str) -> None:
        """A bound as a number that the engine keeps exactly. A bound of integers is an integer."""
        value = schema[name]
        if name.startswith("exclusive") and isinstance(value, bool):  # as in draft 4 and OpenAPI 3.0
            bound = name.removeprefix("exclusive").lower()
            if value and type(schema.get(bound)) in (int, float):
                kept.pop(bound, None)
                self._bound(kept, {**schema, name: schema[bound]}, name, path)
            return
        if type(value) is not int and not (type(value) is float and math.isfinite(value)):
            raise self._refused(path, "is not a number")
        if name == "multipleOf":
            if value <= 0:
                raise self._refused(path, "is not over 0")
        elif schema.get(f"exclusive{name.capitalize()}") is True:
            return  # written by its companion
        elif self._may_be(schema, "integer") and not self._may_be(schema, "number"):
            name, value = _of_integers(name, value)
            if name in kept:
                value = max(value, kept[name]) if name == "minimum" else min(value, kept[name])
        else:
            value = _inwards(value, name.endswith("inimum"))
        if abs(value) >= MOST_BOUND:
            raise self._refused(path, "is not below 2^63: leave it out, or take a text")
        kept[name] = value

    def _size(self, value: Any, path: str) -> int:
        if type(value) not in (int, float) or not 0 <= value < MOST_BOUND or value != int(value):
            raise self._refused(path, "is not a number from 0")
        return int(value)

    def _check_ranges(self, kept: Schema, path: str) -> None:
        for least, most in (*_SIZES, ("minimum", "maximum")):
            if least in kept and most in kept and kept[least] > kept[most]:
                if self._dropped is None:
                    raise self._refused(f"{path}/{least}", f"is over `{most}`")
                self._dropped += [f"{path}/{least}", f"{path}/{most}"]
                del kept[least], kept[most]

    def _check_spellings(self, kept: Schema, path: str) -> None:
        """A name with a control character has two spellings in JSON; the engine would take the second one for
        another property."""
        if kept.get("additionalProperties", True) is False and "patternProperties" not in kept:
            return
        for name in kept.get("properties", ()):
            if re.search(r"[\x00-\x1f\x7f]", name):
                if self._dropped is None:
                    raise self._refused(
                        f"{path}/properties", f"names {name!r:.40} in an object with other properties"
                    )
                self._dropped.append(f"{path}/additionalProperties")
                kept["additionalProperties"] = False
                kept.pop("patternProperties", None)

    def _find_joined(self, schema: Any, depth: int) -> None:
        """Mark the schemas whose objects another schema adds to."""
        if depth > MAX_DEPTH:
            return
        if isinstance(schema, list):
            for part in schema:
                self._find_joined(part, depth + 1)
        if not isinstance(schema, dict):
            return
        joins = [name for name in _JOINS if name in schema]
        several = len(joins) + bool(_OF_OBJECTS & schema.keys()) > 1
        if several or (isinstance(schema.get("allOf"), list) and len(schema["allOf"]) > 1):
            self._mark(schema)
        for name, part in schema.items():
            if name not in ("enum", "const", "default", "examples"):
                self._find_joined(part, depth + 1)

    def _mark(self, schema: Any) -> None:
        """Mark a schema and all that it is joined with."""
        if not isinstance(schema, dict) or id(schema) in self._open:
            return
        self._open.add(id(schema))
        for name in ("anyOf", "oneOf", "allOf"):
            for part in schema[name] if isinstance(schema.get(name), list) else ():
                self._mark(part)
        if isinstance(schema.get("$ref"), str):
            self._mark(self._find(schema["$ref"]))

    def _follow(self, reference: Any, path: str, seen: tuple[str, ...] = ()) -> None:
        """Check that a reference leads to a schema, without a cycle of references and `anyOf`, `oneOf` or
        `allOf` alone: no value would ever begin."""
        if not isinstance(reference, str) or reference.partition("/")[0] != "#":
            raise self._refused(path, "is not a reference into this schema, like #/$defs/name")
        if reference in seen or len(seen) > MAX_DEPTH:
            raise self._refused(path, "refers to itself" if reference in seen else _TOO_DEEP)
        parts = [] if reference in self._followed else [self._target(reference, path)]
        for part in parts:  # it grows
            if isinstance(part, dict) and "$ref" in part:
                self._follow(part["$ref"], path, (*seen, reference))
            for name in ("anyOf", "oneOf", "allOf") if isinstance(part, dict) else ():
                parts += part[name] if isinstance(part.get(name), list) else ()
        self._followed.add(reference)

    def _target(self, reference: str, path: str) -> Any:
        target = self._find(reference)
        if not isinstance(target, dict | bool):
            raise self._refused(path, "leads to no schema")
        return target

    def _find(self, reference: str) -> Any:
        """The part of the schema that a reference names; None if there is none."""
        target: Any = self._root
        for step in unquote(reference).split("/")[1:]:
            name = step.replace("~1", "/").replace("~0", "~")
            match target:
                case dict() if name in target:
                    target = target[name]
                case list() if name.isascii() and name.isdigit() and int(name) < len(target):
                    target = target[int(name)]
                case _:
                    return None
        return target

    def _refused(self, path: str, why: str) -> BadRequest:
        where = f"the schema's {path:.160}" if path else "the schema"
        return BadRequest(f"`{self._param}`: {where} {why}", param=self._param)


@functools.lru_cache(maxsize=64)
def engine_refuses(source: str) -> str:
    """What the engine has against a grammar, in its words; empty if it compiles."""
    why: str = LLMatcher.validate_grammar(source, None, limits=limits())
    return "" if not why or why.startswith("WARNING") else _PLACE.sub("", why.strip().splitlines()[0])[:200]


def is_hostile(pattern: str) -> bool:
    """True for a pattern that would keep the compiler busy for seconds."""
    return "(?i" in pattern and pattern.count("[") + pattern.count("\\") > MAX_FOLDED_SETS


def _missed(kept: Schema) -> list[Schema]:
    """Numbers within bounds that the engine refuses in their shortest form: a bound cut to fewer decimals. Up
    to 2.55 llguidance 1.9.1 takes 2.50 and not 2.5. A whole one may end with `.0`, which a value of `enum`
    cannot: it is the one multiple of a half between its neighbours."""
    if any(name in kept for name in ("enum", "const", *_JOINS)):
        return []
    given = {name: Decimal(repr(kept[name])) for name in (*_BOUNDS, "multipleOf") if name in kept}
    below, above = given.get("exclusiveMaximum"), given.get("exclusiveMinimum")
    least, most = given.get("minimum"), given.get("maximum")
    found = set[Decimal]()
    for bound in filter(None, (below, above, least, most)):
        decimals = max(0, -int(bound.normalize().as_tuple().exponent))
        found |= {bound.quantize(Decimal(1).scaleb(-left), ROUND_DOWN) + 0 for left in range(1, decimals)}
    numbers = sorted(
        float(each)
        for each in found
        if (least is None or least <= each) and (most is None or each <= most)
        if (above is None or above < each) and (below is None or each < below)
        if "multipleOf" not in given or not each % given["multipleOf"]
    )
    whole = [n for n in numbers if n.is_integer() and abs(n) < 2**40]  # of larger ones a double has no 0.4
    near: list[Schema] = [
        {"type": "number", "minimum": n - 0.4, "maximum": n + 0.4, "multipleOf": 0.5} for n in whole
    ]
    parts = [n for n in numbers if n not in whole]
    return [*near, {"enum": parts}] if parts else near


def _move_whole_bounds(kept: Schema) -> None:
    """Move an excluded whole bound away from 0 by a least step, if the other bound is less than 1 beyond it:
    above 0 and up to 0.5 llguidance 1.9.1 takes 0. Numbers within the step are lost."""
    for name, away, opposite in (("exclusiveMinimum", 1, "aximum"), ("exclusiveMaximum", -1, "inimum")):
        bound = kept.get(name, 0.5)
        others = [kept[end] for end in (f"m{opposite}", f"exclusiveM{opposite}") if end in kept]
        step = max(LEAST_STEP, 4 * math.ulp(bound))  # the engine reads no digit after these
        if bound == math.trunc(bound) and bound * away >= 0 and others:
            near = min(abs(each - bound) for each in others)
            if 2 * step < near < 1:
                kept[name] = bound + away * step


def _of_integers(name: str, value: float) -> tuple[str, int]:
    """A bound of integers as `minimum` or `maximum`. One that is beyond all integers of 64 bits is the last
    of them that a double has."""
    least = name.endswith("inimum")
    whole = math.ceil(value) if least else math.floor(value)
    if name.startswith("exclusive") and whole == value:
        whole += 1 if least else -1
    whole = int(_inwards(whole, least))
    whole = max(whole, -_LAST) if least else min(whole, _LAST)
    return ("minimum" if least else "maximum"), whole


def _inwards(value: float, least: bool) -> float:
    """A large integer as the next one towards the allowed side that a double has; others as they are."""
    if type(value) is not int or abs(value) <= MOST_EXACT + 1 or abs(value) >= 2**1023:
        return value
    near = float(value)
    if (least and near < value) or (not least and near > value):
        near = math.nextafter(near, math.inf if least else -math.inf)
    return int(near)
