"""`probe` asks a chat template what it shows: it renders small conversations and looks for their words. Pure.

Templates differ in more ways than their texts show: one drops the results of tools, one raises at a second
system message, one reads tools from the system message, one shows calls only beside a null content. What a
template does not show, `fitted` writes into turns that it does. The rendered call has a form, too: that of
the family whose parser reads it back.

    developer, function       the roles system and tool
    tools                     in the system message, with the form in which to call them
    calls, results            in the text of the assistant's turn, in a turn of the user
    system messages           one at the start; else in a turn of the user
    two turns of one role     one turn
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import product, starmap
from typing import Any

from services.tokenizer.chat_template import (
    ANY,
    FUNCTION,
    NOT_READ,
    OF_SYSTEM,
    READ,
    SHORT,
    SHOWS_ALL,
    SPELLED,
    VARIABLE,
    WRITTEN,
    Message,
    Render,
    TemplateSkills,
)
from shared.answer_formats.formats import FORMATS, HERMES, Format, Python, Writes, Xml, format_of
from shared.answer_formats.parser import AnswerParser
from shared.answer_formats.reader import ARGUMENTS, CALL
from shared.api import joined

_ROLES = ("system", "user", "assistant", "tool")

# Words that stand in no template.
_ARGUMENTS = {"zqkey": "zqvalue", "zqcount": 7}
_MORE = {"zqkey": "zqother", "zqcount": 8}
_SCHEMA = {  # `zqcount` is in calls alone
    "type": "object",
    "properties": {"zqkey": {"type": "string", "description": "zqkeyabout"}},
}
_NAME, _SECOND, _ODD_ROLE = "zqfunction", "zqsecond", "zqrole"
PROBE_TOOLS = [
    {"type": "function", "function": {"name": name, "description": f"{name}about", "parameters": _SCHEMA}}
    for name in (_NAME, _SECOND)
]
_MARKER_BEGUN = re.compile(r"[<\[][^<>\[\]\s]*$")  # the start of a marker
_IDS = {
    ANY: ("call_zq0123456789", "call_zq0123456780"),
    SHORT: ("zqa012345", "zqb012345"),
    FUNCTION: (f"functions.{_NAME}:0", f"functions.{_SECOND}:1"),
}
_ASKED = {"role": "user", "content": "zqasked"}
_ANSWER = {"role": "assistant", "content": "zqsaid"}
_SYSTEM = {"role": "system", "content": "zqsystem"}


def probe(render: Render, source: str, form: Format | None, *, with_tools: bool) -> TemplateSkills:
    """The skills of the template with this text, of conversations with tools or without. `form`: the answer
    format that is configured; None to find it."""
    found = format_of(source) if form is None else form
    probed = _Probe(render, with_tools=with_tools)
    skills = probed.questions()
    if skills is None:  # nothing is known of it
        return replace(SHOWS_ALL, form=found)
    skills = probed.calls(probed.tools(skills))
    skills = probed.form(skills, found, fixed=form is not None)
    return probed.turns(probed.results(skills))


def can_parse(form: Format, text: str, name: str = _NAME, arguments: Mapping[str, Any] = _ARGUMENTS) -> bool:
    """Whether the parser of the format finds exactly this call in a text."""
    parser = AnswerParser(form, tools={name: _SCHEMA})
    parts = [*parser.feed(text), *parser.finish()]
    names = [part.text for part in parts if part.kind == CALL]
    found = "".join(part.text for part in parts if part.kind == ARGUMENTS)
    try:
        return names == [name] and json.loads(found) == arguments
    except ValueError:
        return False


def common_start(one: str, other: str) -> str:
    """The longest text that both start with."""
    pairs = enumerate(zip(one, other, strict=False))
    size = next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))
    return one[:size]


def call_of(name: str, arguments: object, identifier: str) -> Message:
    return {"id": identifier, "type": "function", "function": {"name": name, "arguments": arguments}}


class _Probe:
    """One template, of conversations with tools or without."""

    def __init__(self, render: Render, *, with_tools: bool) -> None:
        self._render, self._with_tools = render, with_tools
        self._tools: list[Message] | None = None  # as the template gets them
        self._none: list[Message] | None = None  # as the template gets no tools
        self._tools_at = VARIABLE
        self._only_parts = frozenset[str]()

    def _text(self, messages: Sequence[Message], *, starts: bool = False) -> str | None:
        shaped = [
            {**message, "content": [{"type": "text", "text": message["content"]}]}
            if self._only_parts and isinstance(message["content"], str)
            else message
            for message in messages
        ]
        return self._render(shaped, self._tools, starts)

    def _has_texts(self, *messages: Message, also: Sequence[str] = ()) -> bool:
        """Whether the prompt has the text of all messages."""
        text = self._text(messages)
        words = [each["content"] for each in messages if isinstance(each["content"], str)]
        return text is not None and all(word in text for word in (*words, *also))

    def questions(self) -> TemplateSkills | None:
        """How a question is shown; None if it is not."""
        for self._only_parts, self._none in product((frozenset(), frozenset(_ROLES)), (None, [])):
            self._tools = self._none
            if self._has_texts(_ASKED):
                return replace(SHOWS_ALL, only_parts=self._only_parts, empty_tools=self._none is not None)
        return None

    def tools(self, skills: TemplateSkills) -> TemplateSkills:
        """Where tools are shown, and whether the system message is."""
        shown = self._has_texts(_SYSTEM, _ASKED)
        self._tools_at, tools = self._where_tools_are_shown(_SYSTEM if shown else None)
        skills = replace(skills, system=shown)
        if not self._with_tools:
            return skills
        self._tools = tools
        return replace(skills, tools=self._tools_at, system=self._has_texts(_SYSTEM, _ASKED))

    def _where_tools_are_shown(self, system: Message | None) -> tuple[str, list[Message] | None]:
        names = [f"{name}about" for name in (_NAME, _SECOND)]
        self._tools = PROBE_TOOLS
        shown = self._has_texts(_ASKED, also=names)
        self._tools = self._none
        if shown:
            return VARIABLE, PROBE_TOOLS
        functions = json.dumps([tool["function"] for tool in PROBE_TOOLS])
        if system is not None and self._has_texts({**system, "tools": functions}, _ASKED, also=names):
            return OF_SYSTEM, self._none
        return WRITTEN, self._none

    def calls(self, skills: TemplateSkills) -> TemplateSkills:
        """In which shape calls are shown."""
        for ids, as_text, null in product(_IDS, (False, True), (False, True)):
            skills = replace(skills, ids=ids, text_arguments=as_text, null_content=null)
            text = self._with_call(skills)
            if text is None or not self._is_call_shown(text, _NAME, "zqvalue"):
                continue
            both = self._with_call(skills, content="zqbeside")
            two = self._with_call(skills, second=True)
            beside = both is not None and self._is_call_shown(both, "zqbeside", _NAME, "zqvalue")
            parallel = two is not None and self._is_call_shown(two, _NAME, _SECOND, "zqvalue", "zqother")
            return replace(skills, text_beside_calls=beside, parallel=parallel)
        return replace(skills, calls=False, ids=ANY, text_arguments=False, null_content=False)

    def _with_call(self, skills: TemplateSkills, **more: Any) -> str | None:
        """The prompt with a call as its last message, or before a result if the template shows it only
        there."""
        called = self._called(skills, **more)
        text = self._text([_ASKED, called])
        if text is not None and self._is_call_shown(text, _NAME, "zqvalue"):
            return text
        ids = [call["id"] for call in called["tool_calls"]]
        return self._text(
            [_ASKED, called, *({"role": "tool", "content": "zqr", "tool_call_id": i} for i in ids)]
        )

    def form(self, skills: TemplateSkills, found: Format, *, fixed: bool) -> TemplateSkills:
        """The format of the calls in the prompt: that of the rendered call, else the one that
        Headrace writes."""
        text = self._answer(skills) if skills.calls else ""
        read = next(
            (form for form in ([found] if fixed else _likely(found, text)) if can_parse(form, text)), None
        )
        if skills.calls and skills.tools != WRITTEN:
            return replace(skills, form=read or found, calls_are=READ if read else NOT_READ)
        if skills.tools == WRITTEN and not is_writable(read or found):
            read, found = None, written_form(found)
        calls = skills.calls and read is not None
        return replace(skills, form=read or found, calls=calls, calls_are=READ if calls else SPELLED)

    def _answer(self, skills: TemplateSkills) -> str:
        """The rendered call, from where an answer begins."""
        text, answered_text = self._with_call(skills) or "", self._text([_ASKED, _ANSWER])
        before = (
            self._text([_ASKED], starts=True)
            if answered_text is None
            else answered_text.partition(_ANSWER["content"])[0]
        )
        return text.removeprefix(_MARKER_BEGUN.sub("", common_start(before or "", text)))

    def results(self, skills: TemplateSkills) -> TemplateSkills:
        """Whether results of calls are shown; by a template without tools, under a role that it knows."""
        asked = [_ASKED, self._called(skills) if skills.calls else _ANSWER]
        takes = self._is_role if self._tools_at == WRITTEN else self._has_text_after
        for name in ({}, {"name": _NAME}):
            result = {"role": "tool", "content": "zqresult", "tool_call_id": self._id(skills), **name}
            if not takes(asked, result):
                continue
            after = self._has_texts(*asked, result, {**_ASKED, "content": "zqafter"})
            if skills.system and not self._has_texts(_SYSTEM, *asked, result):
                skills = replace(skills, system=False)  # shown only beside a question, as Mistral Nemo does
            return replace(skills, named_results=bool(name), user_after_result=after)
        return replace(skills, results=False)

    def turns(self, skills: TemplateSkills) -> TemplateSkills:
        """Which orders of messages are shown, which roles, and which lists of parts."""
        second = {"role": "system", "content": "zqlater"}
        given = {"role": "developer", "content": "zqgiven"}
        answered = [_ASKED, _ANSWER, {**_ASKED, "content": "zqagain"}]
        leading = [_SYSTEM] if skills.system else []
        late = [*leading, *answered[:2], second, *answered[2:]], [*leading, _ASKED, second]
        again = [_ASKED, {**_ASKED, "content": "zqmore"}], [*answered[:2], {**_ANSWER, "content": "zqmore"}]
        return replace(
            skills,
            several_systems=skills.system and self._has_texts(_SYSTEM, second, _ASKED),
            late_system=skills.system and all(self._has_texts(*messages) for messages in late),
            developer=self._is_role([], given, [_ASKED])
            and all(
                self._has_texts(*messages) for messages in ([*leading, given, _ASKED], [*answered[:2], given])
            ),
            functions=self._is_role(
                [_ASKED, _ANSWER], {"role": "function", "content": "zqgiven", "name": _NAME}
            ),
            repeats=all(self._has_texts(*messages) for messages in again),
            parts=frozenset(role for role in _ROLES if self._has_parts(role, skills)) | skills.only_parts,
        )

    def _has_parts(self, role: str, skills: TemplateSkills) -> bool:
        openings: dict[str, list[Message]] = {
            "system": [],
            "user": [],
            "assistant": [_ASKED],
            "tool": [_ASKED, self._called(skills) if skills.calls else _ANSWER],
        }
        parts = [{"type": "text", "text": word} for word in ("zqfirst", "zqlast")]
        more = {"tool_call_id": self._id(skills), "name": _NAME} if role == "tool" else {}
        after = [_ASKED] if role == "system" else []
        text = self._text([*openings[role], {"role": role, "content": parts, **more}, *after])
        dumped = text is not None and any(f"{quote}text{quote}" in text for quote in "'\"")
        return text is not None and "zqfirst" in text and "zqlast" in text and not dumped

    def _has_text_after(self, before: list[Message], message: Message, after: Sequence[Message] = ()) -> bool:
        return self._has_texts(*before, message, *after)

    def _is_role(self, before: list[Message], message: Message, after: Sequence[Message] = ()) -> bool:
        """Whether the message is shown, and not under its bare role as one of any other name would be."""
        if not self._has_text_after(before, message, after):
            return False
        odd = self._text([*before, {**message, "role": _ODD_ROLE}, *after])
        text = self._text([*before, message, *after])
        return odd is None or text is None or text.lower() != odd.lower().replace(_ODD_ROLE, message["role"])

    def _called(self, skills: TemplateSkills, content: str | None = None, *, second: bool = False) -> Message:
        given: list[Any] = [_ARGUMENTS, _MORE]
        if skills.text_arguments:
            given = [json.dumps(each) for each in given]
        calls = [call_of(_NAME, given[0], self._id(skills))]
        if second:
            calls.append(call_of(_SECOND, given[1], self._id(skills, 1)))
        none = None if skills.null_content else ""
        return {"role": "assistant", "content": none if content is None else content, "tool_calls": calls}

    def _is_call_shown(self, text: str, *words: str) -> bool:
        """Whether a call is in the prompt with these words, more often than without it (tools have names,
        too), and its arguments are neither Python nor encoded twice."""
        without = self._text([_ASKED, _ANSWER]) or ""
        added = all(text.count(word) > without.count(word) for word in words)
        return added and '\\"zqcount' not in text and "'zqcount'" not in text

    @staticmethod
    def _id(skills: TemplateSkills, which: int = 0) -> str:
        return _IDS[skills.ids][which]


def _likely(found: Format, text: str) -> list[Format]:
    """Formats that may read the call in `text`: first those with it as their first notation, as grammars and
    Headrace write it; `found` and formats with its reasoning before others."""
    alike = [found, *(form for form in FORMATS.values() if form.think == found.think)]
    first = [form for form in alike if can_parse(replace(form, notations=form.notations[:1]), text)]
    exact = [form for form in first if form.writes is not None and _beginning(form.writes) in text]
    return [*exact, *first, *alike, *FORMATS.values()]


def _beginning(writes: Writes) -> str:
    return (writes.first + writes.before).replace("NAME", _NAME)


def is_writable(form: Format) -> bool:
    """Whether Headrace can write calls of this format."""
    return form.writes is not None and not isinstance(form.notations[0], Xml)


def written_form(found: Format) -> Format:
    """The format in the prompt of a template without tools: that of `found`, or Hermes'."""
    if is_writable(found):
        return found
    return FORMATS["think"] if found.think == FORMATS["think"].think else HERMES


_BETWEEN = "\n\n"  # between two messages in one turn
_SHORT_ID = 9


def fitted(
    messages: list[Message],
    tools: list[Message] | None,
    skills: TemplateSkills,
) -> list[Message]:
    """The messages for a template. Arguments of their calls are objects (`parsed`)."""
    turns = [_in_known_role(message, skills) for message in messages]
    turns = _with_calls(turns, skills)
    if tools is not None and skills.tools == WRITTEN:
        turns = _with_instructions(turns, instructions(tools, skills.form))
    elif tools is not None and skills.tools == OF_SYSTEM:
        turns = _with_key(turns, json.dumps([tool["function"] for tool in tools], ensure_ascii=False))
    turns = _merged(_with_systems(turns, skills), skills)
    return [_shaped(turn, skills) for turn in turns]


def instructions(tools: list[Message], form: Format) -> str:
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
        calls.append({**call, "function": function, **ids.id_of(call, "id")})
    text, none = joined(turn["content"]), None if skills.null_content else ""
    called = {**turn, "tool_calls": calls, "content": turn["content"] if text else none}
    if not text or skills.text_beside_calls:
        return [called]
    without_calls = {key: value for key, value in turn.items() if key != "tool_calls"}
    return [
        without_calls,
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
    turn = {**turn, **ids.id_of(turn, "tool_call_id")}
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

    def id_of(self, message: Message, key: str) -> Message:
        """The key `key` of a message, if the template takes another id than it has."""
        given = message.get(key)
        if self._kind == FUNCTION and str(given) in self._given:
            return {key: self._given[str(given)]}
        if self._kind != SHORT or (isinstance(given, str) and len(given) == _SHORT_ID and given.isalnum()):
            return {}
        return {key: hashlib.sha256(str(given).encode()).hexdigest()[:_SHORT_ID]}


def _with_instructions(turns: list[Message], text: str) -> list[Message]:
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
            answers = {"role": "user", "content": _BETWEEN.join(waiting)}
            fit += [_both(answers, turn)] if turn["role"] == "user" else [answers, turn]
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
