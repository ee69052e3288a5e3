"""The grammar of an answer as a structural tag of XGrammar: reasoning, then text with calls, or JSON. Pure.

https://xgrammar.mlc.ai/docs/structural_tag/structural_tag_usage.html defines the form. Calls have the form of
the model's family (`Format.writes`), which it was trained on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shared.answer_formats.formats import Format, Writes, Xml

Rule = dict[str, Any]

MAX_GAP = 2  # white space around the reasoning: most families write two line breaks after it


def calls(form: Format, schemas: Mapping[str, Any], *, required: bool, parallel: bool) -> Rule | None:
    """Text in which the model may call these functions, or nothing but calls. None for a family without a
    grammar, and for text in which a lone `[` would start a call."""
    writes = form.writes
    if writes is None or (not required and writes.first and not form.opens):
        return None
    first = form.notations[0]
    style = first.style if isinstance(first, Xml) else "json"
    tags = [_call(writes, name, schema, style) for name, schema in schemas.items()]
    if writes.first:
        several = {
            "type": "tags_with_separator",
            "tags": tags,
            "separator": writes.between,
            "at_least_one": True,
            "stop_after_first": not parallel,
        }
        tags = [{"type": "tag", "begin": writes.first, "content": several, "end": writes.last}]
    if not required:
        return {
            "type": "triggered_tags",
            "triggers": [_trigger(form, writes)],
            "tags": tags,
            "stop_after_first": not parallel,
        }
    if writes.first:
        return tags[0]
    return {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": writes.between,
        "at_least_one": True,
        "stop_after_first": not parallel,
    }


def either(one: Rule, other: Rule) -> Rule:
    """An answer that follows one of the rules."""
    return {"type": "or", "elements": [one, other]}


def after_reasoning(form: Format, rule: Rule, *, thinking: bool) -> Rule:
    """The rule, after the reasoning of a family that reasons. `thinking`: the prompt opens it; else the model
    may."""
    if form.think is None:
        return rule
    begin, end = form.think
    gap = {"type": "regex", "pattern": rf"[ \n]{{0,{MAX_GAP}}}"}
    block = {
        "type": "sequence",
        "elements": [
            *(() if thinking else (gap,)),
            {"type": "tag", "begin": "" if thinking else begin, "content": {"type": "any_text"}, "end": end},
            gap,
        ],
    }
    first = block if thinking else {"type": "optional", "content": block}
    return {"type": "sequence", "elements": [first, rule]}


def _call(writes: Writes, name: str, schema: Any, style: str) -> Rule:
    content = {"type": "json_schema", "json_schema": schema, "style": style, "max_whitespace_cnt": 1}
    begin = writes.before.replace("NAME", name)
    return {"type": "tag", "begin": begin, "content": content, "end": writes.after}


def _trigger(form: Format, writes: Writes) -> str:
    """The text after which a call must follow."""
    start = writes.first or writes.before.partition("NAME")[0]
    return next((marker for marker in form.opens if start.startswith(marker)), start)
