"""`probe` asks a chat template what it shows: it renders small conversations and looks for their words. Pure.

Templates differ in more ways than their texts show: one drops the results of tools, one raises at a second
system message, one reads tools from the system message, one shows calls only beside a null content. What a
template does not show, `turns.fitted` writes into turns that it does. The rendered call has a form, too:
that of the family whose parser reads it back.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from shared.answer_formats.formats import FORMATS, HERMES, Format, Writes, Xml, format_of
from shared.answer_formats.parser import AnswerParser
from shared.answer_formats.reader import ARGUMENTS, CALL

Message = dict[str, Any]
# (messages, tools, add_generation_prompt) to the prompt; None if the template raises.
Render = Callable[[Sequence[Message], Any, bool], str | None]

ANY, SHORT, FUNCTION = "any", "short", "function"
VARIABLE, OF_SYSTEM, WRITTEN = "variable", "key of the system message", "written"
READ, NOT_READ, SPELLED, UNKNOWN = "read back", "not read back", "written by headrace", "unknown"
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


@dataclass(frozen=True, kw_only=True)
class TemplateSkills:
    """What a template shows if it is given so. The defaults are those of a template that shows all."""

    form: Format = HERMES  # of the calls in the prompt
    calls_are: str = UNKNOWN  # the calls as the prompt shows them: READ, NOT_READ, SPELLED, UNKNOWN
    tools: str = VARIABLE  # where tools go: VARIABLE, OF_SYSTEM, WRITTEN
    empty_tools: bool = False  # an empty list for none
    calls: bool = True  # the key `tool_calls` of a message
    text_arguments: bool = False  # arguments of calls as JSON texts
    ids: str = ANY  # ids of calls: ANY, SHORT (nine letters and digits), FUNCTION (functions.NAME:0)
    null_content: bool = False  # calls only beside a null content
    text_beside_calls: bool = True  # else a message of its own before that of the calls
    parallel: bool = True  # several calls in one message
    results: bool = True  # messages of the role `tool`
    named_results: bool = False  # only with the key `name`
    functions: bool = True  # messages of the role `function`
    system: bool = True
    several_systems: bool = True  # at the start
    late_system: bool = True
    developer: bool = True
    repeats: bool = True  # two messages of one role in a row
    user_after_result: bool = True
    parts: frozenset[str] = frozenset()  # roles whose content may be a list of parts
    only_parts: frozenset[str] = frozenset()  # roles whose content must be one


SHOWS_ALL = TemplateSkills()


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
