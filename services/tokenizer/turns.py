"""`fitted` writes what a chat template does not show into turns that it does. Pure.

    developer, function       the roles system and tool
    tools                     in the system message, with the form in which to call them
    calls, results            in the text of the assistant's turn, in a turn of the user
    system messages           one at the start; else in a turn of the user
    two turns of one role     one turn

`TemplateSkills` has which of these a template needs; a template that shows all gets the messages unchanged.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from itertools import starmap

from services.tokenizer.template_probe import (
    FUNCTION,
    OF_SYSTEM,
    SHORT,
    WRITTEN,
    Message,
    TemplateSkills,
    is_writable,
    written_form,
)
from shared.answer_formats.formats import Format, Python
from shared.api import joined

_BETWEEN = "\n\n"  # between two messages in one turn
_SHORT_ID = 9


def fitted(messages: list[Message], tools: list[Message] | None, skills: TemplateSkills) -> list[Message]:
    """The messages for a template. Arguments of their calls are objects (`parsed`)."""
    turns = [_in_known_role(message, skills) for message in messages]
    turns = _with_calls(turns, skills)
    if tools is not None and skills.tools == WRITTEN:
        turns = _told(turns, told(tools, skills.form))
    elif tools is not None and skills.tools == OF_SYSTEM:
        turns = _with_key(turns, json.dumps([tool["function"] for tool in tools], ensure_ascii=False))
    turns = _merged(_with_systems(turns, skills), skills)
    return [_shaped(turn, skills) for turn in turns]


def told(tools: list[Message], form: Format) -> str:
    """The part of the system message about the tools."""
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    return (
        f"You may call functions. They are, as JSON, in <tools></tools>:\n<tools>\n{listed}\n</tools>\n"
        "To call one, answer in this form, with its name for NAME and a JSON object for ARGUMENTS:\n"
        f"{written([('NAME', 'ARGUMENTS')], form)}"
    )


def written(calls: Iterable[tuple[str, str]], form: Format) -> str:
    """Calls, as names and JSON, in the form that the parser of a format reads."""
    if isinstance(form.notations[0], Python):
        return form.opens[-1] + "[" + ", ".join(starmap(_in_python, calls)) + "]" + form.ends[-1]
    form = form if is_writable(form) else written_form(form)
    writes = form.writes
    assert writes is not None
    texts = [writes.before.replace("NAME", name) + arguments + writes.after for name, arguments in calls]
    return writes.first + writes.between.join(texts) + writes.last


def _in_python(name: str, arguments: str) -> str:
    try:
        given = json.loads(arguments)
    except (ValueError, RecursionError):
        given = None
    if not isinstance(given, dict):
        return f"{name}({arguments})"
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in given.items())})"


def _in_known_role(message: Message, skills: TemplateSkills) -> Message:
    role = message["role"]
    if role == "developer" and not skills.developer:
        role = "system"
    elif role == "function" and not skills.functions:
        role = "tool"
    content = message["content"]
    return {**message, "role": role, "content": content if role in skills.parts else joined(content)}


# ---- calls and results ---------------------------------------------------------------------------


def _with_calls(turns: list[Message], skills: TemplateSkills) -> list[Message]:
    fit: list[Message] = []
    ids = _Ids(skills)
    rest = list(reversed(turns))
    shown = True  # the last calls: as the template shows them
    while rest:
        turn = rest.pop()
        given = turn.get("tool_calls")
        calls = given if isinstance(given, list) else []
        if turn["role"] != "tool":
            shown = not (skills.calls and calls and _needs_text(turn, skills))
        if turn["role"] == "tool":
            fit.append(_result(turn, ids, skills) if shown and skills.results else _answered(turn))
        elif not calls:
            fit.append(turn)
        elif not (skills.calls and shown):
            fit.append(_spelled(turn, skills.form))
        elif len(calls) > 1 and not skills.parallel:
            results: list[Message] = []
            while rest and rest[-1]["role"] == "tool":
                results.append(rest.pop())
            rest += reversed(_one_by_one(turn, results))
        else:
            ids.add(calls)
            fit += _native(turn, ids, skills)
    return fit


def _one_by_one(turn: Message, results: list[Message]) -> list[Message]:
    """The calls of a turn, each followed by its result."""
    apart: list[Message] = []
    for number, call in enumerate(turn["tool_calls"]):
        named = [each for each in results if each.get("tool_call_id") == call.get("id") is not None]
        mine = named or [each for each in results[:1] if each.get("tool_call_id") is None]
        results = [each for each in results if each not in mine]
        first = turn if number == 0 else {**turn, "content": "", "reasoning_content": ""}
        apart += [{**first, "tool_calls": [call]}, *mine]
    return [*apart, *results]


def _native(turn: Message, ids: _Ids, skills: TemplateSkills) -> list[Message]:
    """A turn with calls, as the template shows it."""
    calls = []
    for call in turn["tool_calls"]:
        function = call["function"]
        if skills.text_arguments and not isinstance(function["arguments"], str):
            arguments = json.dumps(function["arguments"], ensure_ascii=False)
            function = {**function, "arguments": arguments}
        calls.append({**call, "function": function, **ids.of(call, "id")})
    text, none = joined(turn["content"]), None if skills.null_content else ""
    called = {**turn, "tool_calls": calls, "content": turn["content"] if text else none}
    if not text or skills.text_beside_calls:
        return [called]
    said = {key: value for key, value in turn.items() if key != "tool_calls"}
    return [
        said,
        {key: value for key, value in called.items() if key != "reasoning_content"} | {"content": none},
    ]


def _needs_text(turn: Message, skills: TemplateSkills) -> bool:
    """Whether a text beside calls can stand neither in their message nor in one before it."""
    return bool(joined(turn["content"])) and not skills.text_beside_calls and not skills.repeats


def _spelled(turn: Message, form: Format) -> Message:
    """A turn with its calls in its text."""
    functions = [call["function"] for call in turn["tool_calls"]]
    calls = [(each["name"], _as_json(each["arguments"])) for each in functions]
    texts = [text for text in (joined(turn["content"]), written(calls, form)) if text]
    return {**{k: v for k, v in turn.items() if k != "tool_calls"}, "content": "\n".join(texts)}


def _as_json(arguments: object) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _answered(turn: Message) -> Message:
    """The result of a call in a turn of the user, in the tags that Hermes gave it."""
    return {"role": "user", "content": f"<tool_response>\n{joined(turn['content'])}\n</tool_response>"}


def _result(turn: Message, ids: _Ids, skills: TemplateSkills) -> Message:
    turn = {**turn, **ids.of(turn, "tool_call_id")}
    if skills.named_results and "name" not in turn:
        turn["name"] = ids.name(turn.get("tool_call_id"))
    return turn


class _Ids:
    """The ids of calls as a template takes them, and the names of their functions."""

    def __init__(self, skills: TemplateSkills) -> None:
        self._kind = skills.ids
        self._given: dict[str, str] = {}
        self._names: dict[str, str] = {}

    def add(self, calls: list[Message]) -> None:
        """Calls of the conversation, in order."""
        for call in calls:
            name, given = call["function"]["name"], str(call.get("id"))
            self._names[given] = name
            self._given[given] = f"functions.{name}:{len(self._given)}"

    def name(self, given: object) -> str:
        return self._names.get(str(given), "")

    def of(self, message: Message, key: str) -> Message:
        """The key `key` of a message, if the template takes another id than it has."""
        given = message.get(key)
        if self._kind == FUNCTION and str(given) in self._given:
            return {key: self._given[str(given)]}
        if self._kind != SHORT or (isinstance(given, str) and len(given) == _SHORT_ID and given.isalnum()):
            return {}
        return {key: hashlib.sha256(str(given).encode()).hexdigest()[:_SHORT_ID]}


# ---- system messages, and turns of one role ------------------------------------------------------


def _told(turns: list[Message], text: str) -> list[Message]:
    """The conversation with `text` in its first system message."""
    if turns and turns[0]["role"] == "system":
        return [{**turns[0], "content": joined(turns[0]["content"]) + _BETWEEN + text}, *turns[1:]]
    return [{"role": "system", "content": text}, *turns]


def _with_key(turns: list[Message], tools: str) -> list[Message]:
    if not turns or turns[0]["role"] != "system":
        turns = [{"role": "system", "content": ""}, *turns]
    return [{**turns[0], "tools": tools}, *turns[1:]]


def _with_systems(turns: list[Message], skills: TemplateSkills) -> list[Message]:
    fit: list[Message] = []
    waiting: list[str] = []  # texts of system messages for the next turn of the user
    at_start = True
    for turn in turns:
        at_start = at_start and turn["role"] == "system"
        if turn["role"] == "system" and not (skills.system if at_start else skills.late_system):
            waiting.append(joined(turn["content"]))
        elif at_start and fit and not skills.several_systems:
            fit[0] = _both(fit[0], turn)
        elif waiting:
            told = {"role": "user", "content": _BETWEEN.join(waiting)}
            fit += [_both(told, turn)] if turn["role"] == "user" else [told, turn]
            waiting = []
        else:
            fit.append(turn)
    return [*fit, {"role": "user", "content": _BETWEEN.join(waiting)}] if waiting else fit


def _merged(turns: list[Message], skills: TemplateSkills) -> list[Message]:
    """Turns that may not follow each other in one; a turn of the user after a result in the result."""
    fit: list[Message] = []
    for turn in turns:
        last = fit[-1]["role"] if fit else ""
        same = last == turn["role"] in ("user", "assistant") and not skills.repeats
        if same and not any(each.get("tool_calls") for each in (fit[-1], turn)):
            fit[-1] = _both(fit[-1], turn)
        elif (last, turn["role"]) == ("tool", "user") and not skills.user_after_result:
            fit[-1] = {**fit[-1], "content": _both(fit[-1], turn)["content"]}
        else:
            fit.append(turn)
    return fit


def _both(first: Message, second: Message) -> Message:
    """Two messages as one."""
    texts = [text for text in (joined(first["content"]), joined(second["content"])) if text]
    return {**first, **second, "role": first["role"], "content": _BETWEEN.join(texts)}


def _shaped(turn: Message, skills: TemplateSkills) -> Message:
    if skills.only_parts and isinstance(turn["content"], str):
        return {**turn, "content": [{"type": "text", "text": turn["content"]}]}
    return turn
