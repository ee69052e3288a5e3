"""The grammar of an answer as llguidance takes it: reasoning, then text with calls, or JSON. Pure.

https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md defines the form, a dialect of Lark. Calls
have the form of the model's family (`Format.writes`), which it was trained on. Rules are a table of name and
body; `whole` joins them.
"""

from __future__ import annotations

import base64
import json
import re
import zlib
from collections.abc import Mapping
from typing import Any

from llguidance import LLParserLimits

from shared.answer_formats.arguments import Argument
from shared.answer_formats.formats import Format, Writes, Xml

Rules = dict[str, str]  # body by name; a name in capitals is one token of the grammar's own lexer

NESTED = "nested"  # the name of a grammar with rules of its own
GAP = r"/[ \n]{0,2}/"  # white space around the reasoning: most families write two line breaks after it
ANYTHING = "/(?s:.*)/"
# White space of JSON: a few blanks, or a line break and an indentation. Small models would write it for ever.
WHITE_SPACE = r"[ \t]{1,4}|\r?\n[ \t]{0,64}"
MAX_STATES = 100_000  # of a lexer, 1 to 2 kB each
# A forced text may be written in any tokens: the mask then has what the rejection of a free draw leaves.
OPTIONS = '%llguidance {"no_forcing": true}'
ZIPPED_CHARS = 8_192  # longer grammars are compressed in messages
MAX_SOURCE_BYTES = 4 << 20
KIND = "llguidance"


def limits() -> LLParserLimits:
    """Limits of one grammar's compilation and of its steps."""
    return LLParserLimits(max_lexer_states=MAX_STATES, verbose_errors=False)


def whole(form: Format | None, rules: Mapping[str, str], *, thinking: bool) -> str:
    """The grammar that begins with the first of `rules`, after the reasoning of a family that reasons.
    `thinking`: the prompt opens it; else the model may."""
    first = next(iter(rules)).partition("[")[0]
    rules = dict(rules)
    start = first
    if form is not None and form.think is not None:
        begin, end = form.think
        rules["thought[lazy]"] = f"{ANYTHING} {literal(end)}"
        rules["THINK"] = f"/[ \\n]{{0,2}}{_in_pattern(begin)}/"
        start = f"thought {GAP} {first}" if thinking else f"(THINK thought {GAP})? {first}"
    nested = rules.pop(NESTED, None)
    lark = "\n".join((OPTIONS, f"start: {start}", *(f"{name}: {body}" for name, body in rules.items())))
    grammars = [{"lark_grammar": lark}] + ([{"name": NESTED, "lark_grammar": nested}] if nested else [])
    return json.dumps({"grammars": grammars}, ensure_ascii=False)


def packed(source: str, markers: frozenset[str] = frozenset()) -> str:
    """A grammar for a message; `markers` are the control tokens that stand in its texts."""
    found: dict[str, Any] = {"kind": KIND, "markers": sorted(markers)}
    if len(source) > ZIPPED_CHARS:
        found["zipped"] = base64.b85encode(zlib.compress(source.encode())).decode()
    else:
        found["source"] = source
    return json.dumps(found, ensure_ascii=False)


def unpacked(text: str) -> tuple[str, frozenset[str]]:
    """The grammar and the markers of a message. Raises ValueError for another kind, such as that of an older
    tokenizer."""
    found = json.loads(text)
    if found.get("kind") != KIND:
        raise ValueError(f"a grammar of the kind {found.get('kind')!r} is of another version")
    source = found.get("source")
    if source is None:
        unzip = zlib.decompressobj()
        source = unzip.decompress(base64.b85decode(found["zipped"]), MAX_SOURCE_BYTES).decode()
    return source, frozenset(found["markers"])


def literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def json_rules(name: str, schema: Any) -> Rules:
    """JSON that is valid under a schema, as structured_output.py prepares it."""
    options = {"x-guidance": {"whitespace_pattern": WHITE_SPACE}}
    schema = schema if isinstance(schema, dict) else {} if schema else {"not": {}}
    return {name: f"%json {json.dumps({**options, **schema}, ensure_ascii=False)}"}


def calls(
    form: Format, schemas: Mapping[str, Any], *, required: bool, parallel: bool, text: Rules | None = None
) -> Rules | None:
    """Text in which the model may call these functions, or nothing but calls. With `text`, calls or that.
    None for a family without a grammar, and for text in which a lone `[` would start a call."""
    writes = form.writes
    if writes is None or (not required and text is None and writes.first and not form.opens):
        return text if writes is None and not required else None
    first = form.notations[0]
    style = first.style if isinstance(first, Xml) else "json"
    rules: Rules = {}
    for i, schema in enumerate(schemas.values()):
        rules |= xml_rules(f"a{i}", schema, style) if style != "json" else json_rules(f"a{i}", schema)
    if required or text is not None:
        rules["calls"] = _section(writes, list(schemas), "", parallel)
        return (
            {"answer": "calls", **rules} if required else {"answer": "text | calls", **(text or {}), **rules}
        )
    start = writes.first or writes.before.partition("NAME")[0]
    trigger = next((marker for marker in form.opens if start.startswith(marker)), start)
    rules["calls"] = _section(writes, list(schemas), trigger, parallel and bool(writes.first))
    opening = f" & ~/[ \\n]{{0,2}}{_in_pattern(form.think[0])}(?s:.*)/" if form.think else ""
    rules |= {"OPENING": ANYTHING + opening, "TEXT": ANYTHING}
    rules |= {"opened[lazy]": f"OPENING {literal(trigger)}", "head[lazy]": f"TEXT {literal(trigger)}"}
    more = " (head calls)* TEXT" if parallel else ""
    return {"answer": f"OPENING | opened calls{more}", **rules}


def _section(writes: Writes, names: list[str], trigger: str, several: bool) -> str:
    """Calls with all that stands around them but the trigger, which the text before ends with."""

    def call_of(before: str) -> str:
        each = (
            _line(literal(before.replace("NAME", name)), f"a{i}", literal(writes.after))
            for i, name in enumerate(names)
        )
        return f"({' | '.join(each)})"

    found = call_of(writes.before if writes.first else writes.before.removeprefix(trigger))
    if several:
        found += f" ({_line(literal(writes.between), call_of(writes.before))})*"
    return _line(literal(writes.first.removeprefix(trigger)), found, literal(writes.last))


def _line(*parts: str) -> str:
    """Parts one after another, without empty texts."""
    return " ".join(part for part in parts if part != '""') or '""'


def _in_pattern(text: str) -> str:
    return re.escape(text).replace("/", "\\/").replace("\\\\/", "\\/")


def xml_rules(name: str, schema: Any, style: str) -> Rules:
    """The arguments of a call, each in tags of its own, in the order of the schema. A text stands as it
    is."""
    opening, closing, between = {
        "qwen_xml": ("<parameter={}>\n", "\n</parameter>", r"/\n?/"),
        "glm_xml": ("<arg_key>{}</arg_key>\n<arg_value>", "</arg_value>", r"/\n?/"),
    }[style]
    schema = schema if isinstance(schema, dict) else {}
    places = {place: schema[place] for place in ("$defs", "definitions") if place in schema}
    rules: Rules = {}
    parts = []
    for i, (key, of) in enumerate(schema.get("properties", {}).items()):
        head = literal(opening.format(key))
        if style == "glm_xml":
            head = _line(literal(f"<arg_key>{key}</arg_key>"), r"/\n?/", literal("<arg_value>"))
        rules |= _value(f"{name}_{i}", of, places, closing, Argument(schema, key))
        argument = f"{between} {head} {name}_{i}"
        parts.append(argument if key in schema.get("required", ()) else f"({argument})?")
    if not parts or schema.get("additionalProperties", False) is not False:
        key = {
            "qwen_xml": '"<parameter=" /[^>\\n]{1,128}/ ">\\n"',
            "glm_xml": '"<arg_key>" /[^<\\n]{1,128}/ "</arg_key>" /\\n?/ "<arg_value>"',
        }
        if schema.get("additionalProperties", True) is not False:
            rules |= {f"{name}_x[lazy]": f"{ANYTHING} {literal(closing)}"}
            parts.append(f"({between} {key[style]} {name}_x)*")
    return {name: " ".join((*parts, between)), **rules}


def _value(name: str, schema: Any, places: dict[str, Any], closing: str, argument: Argument) -> Rules:
    """A value with the tag that closes it."""
    schema = schema if isinstance(schema, dict) else {}
    if "string" not in argument.kinds:
        return {name: f"{name}_j {literal(closing)}", **json_rules(f"{name}_j", {**places, **schema})}
    text = argument.kinds == {"string"}
    if text and (choices := argument.choices()):
        return {name: " | ".join(literal(choice + closing) for choice in choices)}
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    if not text or (not least and most == ""):
        return {f"{name}[lazy]": f"{ANYTHING} {literal(closing)}"}
    capital = name.upper()
    inside = f"/(?s:.{{{least},{most}}})/ & ~/(?s:.*){_in_pattern(closing)}(?s:.*)/"
    return {name: capital, capital: f"{capital}_IN {literal(closing)}", f"{capital}_IN": inside}
