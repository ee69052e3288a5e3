"""`grammar_of` turns the output options of a request into the one form that executors compile. Pure.

response_format      {"type": "json_object"} | {"type": "json_schema", "json_schema": {"schema": …}}
structured_outputs   {"json": …} | {"regex": …} | {"choice": [...]} | {"grammar": …} | {"json_object": true}
guided_json, guided_regex, guided_choice, guided_grammar: the same, as vLLM named them before
grammar              EBNF, as llama.cpp names it
tools, tool_choice   functions that the model may call: see `Tools`
──▶ {"kind": "json" | "regex" | "ebnf" | "structural_tag", "source": …}, JSON in Tokenized.grammar. A
    structural tag has `markers`, too: control tokens that stand in its texts; and `json`, true if its content
    is JSON.

A JSON schema that the grammar engine cannot follow exactly is refused, with the keyword: see `resolved`.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from shared.answer_formats import grammar
from shared.answer_formats.formats import HERMES, Format
from shared.api import GenerateRequest, Tool
from shared.errors import BadRequest

Schema = dict[str, Any]

MAX_GRAMMAR_CHARS = 32_768  # kind included: more would leave no room for other options in the message
# States are counted before an automaton is built: sets and wildcards, for which the compiler checks most of
# the vocabulary, times the repetitions around them (`([a-z]{0,60} ){0,60}`: 3,600). In a schema all
# patterns and lengths that differ count together.
MAX_STATES = 4_096
MAX_DEPTH = 32  # of a schema
_TOO_DEEP = f"is nested deeper than {MAX_DEPTH}"
MAX_LENGTH, MAX_ITEMS = 1_024, 256  # repetitions that a grammar writes out: more take seconds to compile
ANY_OBJECT = {"type": "object", "additionalProperties": True}

_sre: Any = importlib.import_module("re._parser")
_REPEATS = (_sre.MAX_REPEAT, _sre.MIN_REPEAT, _sre.POSSESSIVE_REPEAT)
_ASSERTS = (_sre.ASSERT, _sre.ASSERT_NOT)
_FREE = (_sre.LITERAL, _sre.AT)
_CONTROL_LETTER = re.compile(r"\\(?:c([A-Za-z])|.)", re.DOTALL)  # `\cA`, which Python does not know
# A text, a set, a comment, a repetition with its bounds, a bracket, or a name.
_EBNF = re.compile(
    r'"(?:\\.|[^"\\])*+"?|\[(?:\\.|[^\]\\])*+\]?|#[^\n]*|\{\s*(\d*)\s*,?\s*(\d*)\s*\}|[()]|[\w.-]+', re.DOTALL
)
MOST_COUNT = 10**9

_OLD = "guided_"  # vLLM's old names: `guided_json` is {"json": …} in `structured_outputs`
# These and `tools` exclude each other.
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
    """The grammar of a request as JSON, empty if it has none; `tools` are those of the request, `form` is the
    format of its answer. `thinking`: its prompt opens the reasoning. `available`: an executor can follow a
    grammar. Raises BadRequest."""
    fields = {name: getattr(request, name) for name in _FIELDS} | {"tools": tools}
    asked = [name for name, value in fields.items() if value is not None]
    if not asked:
        return ""
    if len(asked) > 1:
        raise BadRequest(f"`{asked[1]}` and `{asked[0]}` exclude each other", param=asked[1])
    (param,) = asked
    if not available:
        raise BadRequest(
            f"`{param}`: no executor of this model can follow a grammar: it takes an engine with weights and "
            "the package xgrammar (pip install 'headrace[grammar]')",
            param=param,
        )
    asked_for = fields[param]
    if param.startswith(_OLD):
        asked_for = {param.removeprefix(_OLD): asked_for}
    match asked_for:
        case Tools() as tools:
            text = tools.grammar(form or HERMES, thinking=thinking)
        case {"json_schema": {"schema": schema}} | {"json": schema}:
            text = _json(schema, param)
        case {"type": "json_object"} | {"json_object": True}:
            text = _json(ANY_OBJECT, param)
        case {"regex": pattern}:
            text = _packed("regex", _checked_regex(pattern, param))
        case {"choice": choices}:
            text = _packed("ebnf", "root ::= " + " | ".join(map(_quoted, choices)))
        case str(ebnf) | {"grammar": ebnf}:
            text = _ebnf(ebnf, param)
    _check_chars(text, param)
    if form is not None and form.think is not None and param != "tools":
        text = _after_reasoning(text, form, thinking, param)
    for name in ("ignore_eos", "min_tokens") if text else ():
        if getattr(request, name):
            raise BadRequest(f"`{name}`: with `{param}` an answer ends by itself", param=name)
    return text


def _after_reasoning(text: str, form: Format, thinking: bool, param: str) -> str:
    """The grammar, from the end of the reasoning on."""
    packed = json.loads(text)
    match packed["kind"]:
        case "json":
            rule = {
                "type": "json_schema",
                "json_schema": json.loads(packed["source"]),
                "max_whitespace_cnt": 1,
            }
        case "regex":
            rule = {"type": "regex", "pattern": packed["source"]}
        case _:
            rule = {"type": "grammar", "grammar": packed["source"]}
    rule = grammar.after_reasoning(form, rule, thinking=thinking)
    text = _structural(form, rule, json=packed["kind"] == "json")
    _check_chars(text, param)
    return text


def _json(schema: Any, param: str) -> str:
    if isinstance(schema, str):  # as in vLLM
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError):
            raise BadRequest(f"`{param}`: the schema is a text that is not JSON", param=param) from None
    return _packed("json", json.dumps(resolved(schema, param), ensure_ascii=False))


def _checked_regex(pattern: str, param: str) -> str:
    _check_chars(pattern, param)
    try:
        states = regex_states(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise BadRequest(f"`{param}`: the regex is wrong: {error!s:.200}", param=param) from None
    if states > MAX_STATES:
        raise BadRequest(f"`{param}`: the regex {_too_large(states)}", param=param)
    if (found := misread_in(pattern)) and found not in _LOOKAHEADS:  # those are refused when it is compiled
        raise BadRequest(f"`{param}`: the regex cannot be followed with {found}", param=param)
    return pattern


def _check_chars(text: str, param: str) -> None:
    if len(text) > MAX_GRAMMAR_CHARS:
        raise BadRequest(
            f"`{param}` takes {len(text)} characters, over {MAX_GRAMMAR_CHARS}; shorten it", param=param
        )


def _too_large(states: int) -> str:
    return f"has {states} states with its repetitions, over {MAX_STATES}: lower their bounds, or use * or +"


def _ebnf(text: str, param: str) -> str:
    if not re.search(r"(?m)^\s*root\s*::=", text):
        raise BadRequest(f"`{param}`: EBNF with a rule `root ::= …` is expected", param=param)
    _check_chars(text, param)
    if (states := ebnf_states(text)) > MAX_STATES:
        raise BadRequest(f"`{param}`: the grammar {_too_large(states)}", param=param)
    return _packed("ebnf", text)


def _quoted(text: str) -> str:
    """An EBNF literal."""
    return json.dumps(text, ensure_ascii=True)


def _packed(kind: str, source: str) -> str:
    return json.dumps({"kind": kind, "source": source}, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class Tools:
    """The tools of a request: as given, with the resolved schemas of their arguments, and the choice.

    tool_choice   auto: text, in which the model may write calls
                  required, or a function by name: nothing but calls
                  none: the tools are ignored

    Calls are written as the model's family does (shared/answer_formats). The chat template gets the tools if
    it shows them; else `turns.fitted` writes them into the system message.
    """

    given: list[Tool]
    schemas: dict[str, Schema | bool]
    choice: str  # auto, required
    parallel: bool = True  # more than one call

    def grammar(self, form: Format, *, thinking: bool) -> str:
        """As executors compile it; empty for a family whose calls have no grammar."""
        required = self.choice == "required"
        rule = grammar.calls(form, self.schemas, required=required, parallel=self.parallel)
        if rule is None:
            return ""
        return _structural(form, grammar.after_reasoning(form, rule, thinking=thinking))


def _structural(form: Format, rule: dict[str, Any], **more: bool) -> str:
    tag = json.dumps({"type": "structural_tag", "format": rule}, ensure_ascii=False)
    found = {"kind": "structural_tag", "source": tag, "markers": sorted(form.markers), **more}
    return json.dumps(found, ensure_ascii=False)


def read_tools(request: GenerateRequest) -> Tools | None:
    """The tools of a request; None without tools or with `tool_choice` none. Raises BadRequest."""
    given, choice = request.tools or [], request.tool_choice
    if not isinstance(choice, str) and choice["type"] == "allowed_tools":
        allowed, choice = choice["allowed_tools"]["tools"], choice["allowed_tools"]["mode"]
        names = {tool["function"]["name"] for tool in allowed}
        given = [tool for tool in given if tool["function"]["name"] in names]
        if len(given) < len(names):
            raise BadRequest("`tool_choice`: `tools` has not all of these functions", param="tool_choice")
    functions = [tool["function"] for tool in given]
    schemas = {each["name"]: resolved(each.get("parameters") or ANY_OBJECT, "tools") for each in functions}
    if len(schemas) < len(given):
        raise BadRequest("`tools`: two functions have the same name", param="tools")
    named = not isinstance(choice, str)
    if not isinstance(choice, str):
        schemas = {name: schema for name, schema in schemas.items() if name == choice["function"]["name"]}
        choice = "required"
    if choice == "required" and not schemas:
        raise BadRequest("`tool_choice`: `tools` has no such function", param="tool_choice")
    if not schemas or choice == "none":
        return None
    return Tools(given, schemas, choice, request.parallel_tool_calls is not False and not named)


def parsed(message: dict[str, Any]) -> dict[str, Any]:
    """The same message with the arguments of its calls as objects. Raises BadRequest."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    whole = [{**call, "type": "function", "function": _call(call)} for call in calls]
    return {**message, "tool_calls": whole}


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


_ANNOTATIONS = frozenset(
    {"title", "description", "default", "examples", "$schema", "$id", "$comment", "deprecated"}
    | {"readOnly", "writeOnly"}
)
_PLACES = frozenset({"$defs", "definitions"})
_BY_TYPE: dict[str, frozenset[str]] = {
    "object": frozenset({"properties", "required", "additionalProperties"}),
    "array": frozenset({"items", "prefixItems", "minItems", "maxItems"}),
    "string": frozenset({"minLength", "maxLength", "pattern", "format"}),
    "integer": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}),
    "number": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}),
    "boolean": frozenset(),
    "null": frozenset(),
}
_ALONE = ("$ref", "anyOf", "allOf", "const", "enum")  # allowed only with annotations and `type`
_PYTHON: dict[str, Callable[[object], bool]] = {
    "object": lambda v: isinstance(v, dict),
    "array": lambda v: isinstance(v, list),
    "string": lambda v: isinstance(v, str),
    "integer": lambda v: type(v) is int,
    "number": lambda v: type(v) in (int, float),
    "boolean": lambda v: isinstance(v, bool),
    "null": lambda v: v is None,
}
_DATE = (
    "[0-9]{4}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)"
    "|02-(0[1-9]|1[0-9]|2[0-8]))"
)
_HOUR = "([01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = f"{_HOUR}:[0-5][0-9](\\.[0-9]{{1,9}})?(Z|[+-]{_HOUR})"
# RFC 1123 without two hyphens in a row, which have a meaning of their own (RFC 5890); at most 253 characters.
_LABEL = "[A-Za-z0-9]{1,20}(-[A-Za-z0-9]{1,20}){0,2}"
_HOST = f"({_LABEL}\\.){{0,3}}[A-Za-z][A-Za-z0-9]{{1,20}}"
_ATOM = (
    "[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]{1,31}"  # RFC 5322; two with a dot fit into the 64 characters of RFC 5321
)
_PCHAR = "([A-Za-z0-9._~!$&'()*+,;=:@/-]|%[0-9A-F]{2})"  # RFC 3986
_GROUP = "[0-9a-f]{1,4}"
_IPV6 = "|".join(  # RFC 4291: eight groups, or fewer around `::`
    [f"({_GROUP}:){{7}}{_GROUP}", f"({_GROUP}:){{1,7}}:", f":(:{_GROUP}){{1,7}}", "::"]
    + [f"({_GROUP}:){{1,{n}}}(:{_GROUP}){{1,{7 - n}}}" for n in range(1, 7)]
)
_N = "[0-9]{1,9}"
_CLOCK = f"T({_N}H({_N}M({_N}S)?)?|{_N}M({_N}S)?|{_N}S)"
_DAYS = f"({_N}Y({_N}M({_N}D)?)?|{_N}M({_N}D)?|{_N}D)"
_SPELLED = {
    "date": f"^{_DATE}$", "time": f"^{_TIME}$", "date-time": f"^{_DATE}T{_TIME}$",  # RFC 3339
    "duration": f"^P({_DAYS}({_CLOCK})?|{_CLOCK}|{_N}W)$",  # RFC 3339, appendix A
    "hostname": f"^{_HOST}$",
    "email": f"^{_ATOM}(\\.{_ATOM})?@{_HOST}$",
    "uri": f"^[a-z][a-z0-9+.-]{{1,15}}://{_HOST}(:[0-9]{{1,4}})?(/{_PCHAR}{{0,80}})?(\\?{_PCHAR}{{0,80}})?$",
    "ipv6": f"^({_IPV6})$",
}  # fmt: skip
FORMATS = (*_SPELLED, "uuid", "ipv4")  # all have a bounded length


def resolved(schema: Any, param: str) -> Schema | bool:
    """The schema for the grammar engine. `param` is the field of the request. Raises BadRequest for keywords
    that the engine cannot follow.

    The engine ignores unknown keywords, so an answer could look right and be wrong. The accepted keywords are
    tested: random walks through their grammars must validate (test_structured_output_walks.py). The result
    may be stricter than the schema: an object with named properties gets no others, a time has at most nine
    digits of a second (the engine's own form has no limit), and a date exists in the calendar.
    """
    reader = _Reader(schema, param)
    kept = reader.read(schema, "", 0)
    reader.check_states()
    return kept


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


def _has_text(parsed: Any) -> bool:
    """Whether a regular expression may match a text that stands in a JSON string as it is."""
    for kind, of in parsed:
        match kind:
            case _sre.LITERAL:
                found = _is_plain(of)
            case _sre.IN:
                found = any(_may_be_plain(*part) for part in of)
            case _sre.BRANCH:
                found = any(map(_has_text, of[1]))
            case _sre.SUBPATTERN:
                found = _has_text(of[-1])
            case _sre.ATOMIC_GROUP:
                found = _has_text(of)
            case _:
                found = kind not in _REPEATS or of[0] == 0 or _has_text(of[2])
        if not found:
            return False
    return True


def _may_be_plain(kind: Any, of: Any) -> bool:
    """Whether a part of a set may be. What a negated set leaves is not looked at."""
    return kind not in (_sre.LITERAL, _sre.RANGE) or _is_plain(of if kind is _sre.LITERAL else of[1])


def _is_plain(code: int) -> bool:
    return code >= 0x20 and code not in (0x22, 0x5C)


def _control_code(escape: re.Match[str]) -> str:
    return f"\\x{ord(escape[1]) % 32:02x}" if escape[1] else escape[0]


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


class _Reader:
    """One schema, its references resolved against itself."""

    def __init__(self, root: Any, param: str) -> None:
        self._root = root
        self._param = param
        self._followed = set[str]()  # references that lead to a schema
        self._states: dict[object, int] = {}  # by pattern or length; equal ones are compiled once

    def check_states(self) -> None:
        """Refuse a schema with too many states in total. Raises BadRequest."""
        if (states := sum(self._states.values())) > MAX_STATES:
            raise self._refused("", f"{_too_large(states)}; that is all lengths and patterns that differ")

    def read(self, schema: Any, path: str, depth: int) -> Schema | bool:
        """The resolved part of the schema at `path`. Raises BadRequest."""
        if depth > MAX_DEPTH:
            raise self._refused(path, _TOO_DEEP)
        if schema is True:
            return True
        if not isinstance(schema, dict):
            raise self._refused(path, "is not a schema: an object is expected")
        alone = [name for name in _ALONE if name in schema]
        types = self._types(schema, path)
        beside = set().union(*(_BY_TYPE[kind] for kind in types)) if not alone else set[str]()
        known = beside | _ANNOTATIONS | _PLACES | {"type", *alone[:1]}
        for name in schema:
            if name not in known:
                why = f"cannot be followed beside `{alone[0]}`" if alone else "cannot be followed"
                raise self._refused(f"{path}/{name}", why if types or alone else f"{why} without a `type`")
        kept = {name: value for name, value in schema.items() if name not in _ANNOTATIONS}
        for place in _PLACES & kept.keys():
            kept[place] = self._each(kept[place], f"{path}/{place}", depth)
        if alone:
            kept[alone[0]] = self._alone(alone[0], schema, path, depth)
        return self._inside(kept, path, depth)

    def _alone(self, name: str, schema: Schema, path: str, depth: int) -> Any:
        value, where = schema[name], f"{path}/{name}"
        if name == "$ref":
            self._follow(value, where)
        elif name in ("anyOf", "allOf"):
            return self._list(value, where, depth, most=1 if name == "allOf" else MAX_ITEMS)
        else:
            values = value if name == "enum" else [value]
            if not isinstance(values, list) or not values:
                raise self._refused(where, "is not a list of values")
            types = self._types(schema, path)
            if types and not all(any(_PYTHON[kind](v) for kind in types) for v in values):
                raise self._refused(where, "has a value of a type that `type` does not allow")
        return value

    def _inside(self, kept: Schema, path: str, depth: int) -> Schema:
        if "properties" in kept:
            kept["properties"] = self._each(kept["properties"], f"{path}/properties", depth)
        named = kept.get("properties", {})
        missing = [name for name in self._names(kept, path) if name not in named]
        if missing:
            raise self._refused(f"{path}/required", f"names {missing[0]!r:.40}, which is not in `properties`")
        for name in ("additionalProperties", "items"):
            if name in kept and not isinstance(kept[name], bool):
                kept[name] = self.read(kept[name], f"{path}/{name}", depth + 1)
        if named:
            kept["additionalProperties"] = False
        elif "object" in self._types(kept, path):
            kept.setdefault("additionalProperties", True)
        if "prefixItems" in kept:
            kept["prefixItems"] = self._list(kept["prefixItems"], f"{path}/prefixItems", depth)
        self._check_limits(kept, path)
        if kept.get("format") in _SPELLED:
            kept["pattern"] = _SPELLED[kept.pop("format")]
        if "pattern" in kept:
            self._states[kept["pattern"]] = self._pattern_states(kept["pattern"], path)
            kept["pattern"] = without_optional_groups(kept["pattern"])
        else:
            lengths = (kept.get("minLength", 0), kept.get("maxLength", 0))
            self._states[lengths] = max(lengths)
        return kept

    def _pattern_states(self, pattern: str, path: str) -> int:
        """The states of a pattern; 0 if Python cannot parse it, since JSON schema has another dialect."""
        if len(pattern) > MAX_GRAMMAR_CHARS:
            raise self._refused(f"{path}/pattern", f"is over {MAX_GRAMMAR_CHARS} characters")
        if found := misread_in(pattern):
            raise self._refused(f"{path}/pattern", f"cannot be followed with {found}")
        try:
            parsed = _sre.parse(_CONTROL_LETTER.sub(_control_code, pattern))
            if not _has_text(parsed):
                why = "allows no text without a quote, a backslash or a control character"
                raise self._refused(f"{path}/pattern", f"{why}: the grammar has no escapes of JSON")
            return _states(parsed)
        except (re.error, RecursionError, OverflowError):
            return 0

    def _check_limits(self, kept: Schema, path: str) -> None:
        for least, most, limit in (
            ("minLength", "maxLength", MAX_LENGTH),
            ("minItems", "maxItems", MAX_ITEMS),
        ):
            for name in (least, most):
                value = kept.get(name, 0)
                if type(value) is not int or not 0 <= value <= limit:
                    raise self._refused(f"{path}/{name}", f"is not a number from 0 to {limit}")
            if least in kept and most in kept and kept[least] > kept[most]:
                raise self._refused(f"{path}/{least}", f"is over `{most}`")
        for name in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
            if type(kept.get(name, 0)) not in (int, float):
                raise self._refused(f"{path}/{name}", "is not a number")
        lengths = [name for name in ("minLength", "maxLength") if name in kept]
        shaped = [name for name in ("pattern", "format") if name in kept]
        if len(shaped) > 1 or (shaped and lengths):
            raise self._refused(
                f"{path}/{shaped[0]}", f"cannot be followed beside `{[*lengths, *shaped][-1]}`"
            )
        if "pattern" in kept and not isinstance(kept["pattern"], str):
            raise self._refused(f"{path}/pattern", "is not a text")
        if "format" in kept and kept["format"] not in FORMATS:
            raise self._refused(f"{path}/format", f"is not one of {', '.join(FORMATS)}")

    def _list(self, parts: Any, path: str, depth: int, *, most: int = MAX_ITEMS) -> list[Any]:
        if not isinstance(parts, list) or not 0 < len(parts) <= most:
            raise self._refused(path, f"is not a list of 1 to {most} schemas")
        return [self.read(part, f"{path}/{i}", depth + 1) for i, part in enumerate(parts)]

    def _each(self, parts: Any, path: str, depth: int) -> dict[str, Any]:
        if not isinstance(parts, dict):
            raise self._refused(path, "is not an object of schemas")
        return {name: self.read(part, f"{path}/{name!s:.80}", depth + 1) for name, part in parts.items()}

    def _names(self, kept: Schema, path: str) -> list[str]:
        names = kept.get("required", [])
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise self._refused(f"{path}/required", "is not a list of names")
        return names

    def _types(self, schema: Schema, path: str) -> list[str]:
        kinds = schema.get("type", [])
        kinds = [kinds] if isinstance(kinds, str) else kinds
        if not isinstance(kinds, list) or not all(isinstance(k, str) and k in _BY_TYPE for k in kinds):
            raise self._refused(f"{path}/type", f"is not one of {', '.join(_BY_TYPE)}")
        return kinds

    def _follow(self, reference: Any, path: str, seen: tuple[str, ...] = ()) -> None:
        """Check that a reference leads to a schema, without a cycle of references and `anyOf` or `allOf`
        alone: no value would ever begin."""
        if not isinstance(reference, str) or reference.partition("/")[0] != "#":
            raise self._refused(path, "is not a reference into this schema, like #/$defs/name")
        if reference in seen or len(seen) > MAX_DEPTH:
            raise self._refused(path, "refers to itself" if reference in seen else _TOO_DEEP)
        parts = [] if reference in self._followed else [self._target(reference, path)]
        for part in parts:  # it grows
            if isinstance(part, dict) and "$ref" in part:
                self._follow(part["$ref"], path, (*seen, reference))
            for name in ("anyOf", "allOf") if isinstance(part, dict) else ():
                parts += part[name] if isinstance(part.get(name), list) else ()
        self._followed.add(reference)

    def _target(self, reference: str, path: str) -> Any:
        target: Any = self._root
        for step in reference.split("/")[1:]:
            name = step.replace("~1", "/").replace("~0", "~")
            if not isinstance(target, dict) or name not in target:
                raise self._refused(path, f"leads nowhere at {step!r:.40}")
            target = target[name]
        return target

    def _refused(self, path: str, why: str) -> BadRequest:
        where = f"the schema's {path:.160}" if path else "the schema"
        return BadRequest(f"`{self._param}`: {where} {why}", param=self._param)


# An escape, a set, a group's opening, its closing with `?` if it is optional, or any character.
_PART = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*+\]?|\((?:\?:|\?P?<\w+>|\?)?|\)\??\??|.", re.DOTALL)

_LOOKAHEADS, _TEXT_ENDS = ("(?=", "(?!"), (r"\A", r"\Z", r"\z")


def misread_in(pattern: str) -> str:
    """The first part of a pattern that XGrammar 0.2.8 ignores (a lookahead, in a schema) or takes for a
    letter (the text's begin or end); "" without one."""
    parts = _PART.findall(pattern)
    found = (both for part, after in pairwise([*parts, ""]) for both in (part, part + after))
    return next((each for each in found if each in (*_LOOKAHEADS, *_TEXT_ENDS)), "")


def without_optional_groups(pattern: str) -> str:
    """A schema's `pattern` with `(…)?` written as the equivalent `(|…)`.

    XGrammar 0.2.8 may enter `(b1+)?` in the middle if the group ends with a repetition: `a(b1+)?Z` then
    allows `a1Z`. It handles `(|b1+)` correctly. The result for an invalid pattern is undefined.
    """
    written: list[str] = []
    opened: list[int] = []  # start of each open group in `written`
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
