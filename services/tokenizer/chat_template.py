"""`ChatTemplate` turns messages into the text and ids of a prompt, with the model's own jinja template.

It runs in jinja's sandbox with the helpers that Hugging Face templates expect. Control tokens that a *user*
writes inside a message stay ordinary text: marks replace them before the template is rendered. In the result
the template's own control tokens get secret names, the only ones that the vocabulary reads as control tokens,
and the marks become text again. So one pass of the model's tokenizer encodes the whole prompt.

`fitted` writes what a chat template does not show into turns that it does. Pure.

    developer, function       the roles system and tool
    tools                     in the system message, with the form in which to call them
    calls, results            in the text of the assistant's turn, in a turn of the user
    system messages           one at the start; else in a turn of the user
    two turns of one role     one turn

`TemplateSkills` has which of these a template needs; a template that shows all gets the messages unchanged.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import lru_cache
from itertools import starmap
from typing import Any, ClassVar, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from services.tokenizer import template_probe
from shared.answer_formats.formats import Format, Python
from shared.api import Tool, joined, present
from shared.errors import NO_TEMPLATE, BadRequest, SetupError
from shared.vocab.vocabulary import Vocabulary

Trie = dict[str, Any]  # by character; "" where a name ends

_TRUSTED_WITH_MARKUP = ("assistant", "system", "developer")  # roles of the model and of the chat's developer
_MARKED_UP = ("content", "reasoning_content")


OWN_TEMPLATES = 16  # of requests, kept compiled


@dataclass(frozen=True, slots=True)
class TemplateOptions:
    """What a request changes about the rendering of its messages."""

    RESERVED: ClassVar[frozenset[str]] = frozenset(
        {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template"}
        | {"bos_token", "eos_token", "strftime_now", "tokenize"}
    )

    source: str = ""  # its own template; empty: the model's
    variables: Mapping[str, Any] = field(default_factory=dict)  # none of RESERVED
    continue_final: bool = False  # the prompt ends with the text of the last message


PLAIN = TemplateOptions()


class ChatTemplate:
    """The compiled template of one model. Raises SetupError if its source is not jinja."""

    def __init__(self, vocabulary: Vocabulary, form: Format | None = None) -> None:
        """`form`: the answer format that is configured; None to find it."""
        self._vocabulary = vocabulary
        self._form = form
        self._controls = list(vocabulary.controls)
        self._number = {name: i for i, name in enumerate(self._controls)}
        self._control = _any_of(self._controls)
        self._not_markup = _any_of(self._number.keys() - vocabulary.markup)
        # Plain letters and digits, which filters such as `tojson` do not change.
        self._mark = vocabulary.secret + "u{}x"
        self._marks = re.compile(self._mark.format(r"(\d+)"))
        self._end = vocabulary.secret + "end"  # marks the end of the message to continue
        environment = template_environment()
        try:
            self._source = vocabulary.chat_template
            self._template = environment.from_string(self._source) if self._source else None
        except TemplateError as error:
            raise SetupError(f"the model's chat template is not valid jinja: {error}") from error
        self._compiled = lru_cache(OWN_TEMPLATES)(environment.from_string)
        self._skills = lru_cache(2 * OWN_TEMPLATES + 2)(self._probed)

    def encode(
        self,
        messages: list[dict[str, Any]],
        tools: list[Tool] | None,
        add_generation_prompt: bool,
        wall_us: int,
        options: TemplateOptions = PLAIN,
    ) -> list[int]:
        """Prompt ids of a conversation with its tools. `wall_us` is the date for templates that print one.
        Raises BadRequest with the template's message."""
        messages = [parsed(_with_reasoning(message)) for message in messages]
        guarded = [self._guarded(message) for message in messages]
        given = None if tools is None else self._guard(tools, self._control)
        skills = self.skills(options.source, with_tools=tools is not None)
        turns = fitted(guarded, given, skills)
        if options.continue_final:
            turns[-1] = {**turns[-1], "content": _ended(turns[-1]["content"], self._end)}
        if given is None or skills.tools != template_probe.VARIABLE:
            given = [] if skills.empty_tools else None
        text = self._render(turns, given, add_generation_prompt, wall_us, options)
        if options.continue_final:
            text, found, _ = text.rpartition(self._end)
            if not found:
                why = "the chat template does not show the last message as it is"
                raise BadRequest(f"`continue_final_message`: {why}", param="continue_final_message")
        names = self._vocabulary.secret_names
        text = self._control.sub(lambda found: names[found[0]], text)
        return self._vocabulary.encode(self._unmarked(text))

    def render(self, messages: list[dict[str, Any]], add_generation_prompt: bool, wall_us: int) -> str:
        """The prompt as text, for people to read. Raises BadRequest."""
        return self._render(messages, None, add_generation_prompt, wall_us, PLAIN)

    @property
    def has_found_form(self) -> bool:
        """Whether the answer format is found by the template, and not configured."""
        return self._form is None

    def skills(self, source: str = "", *, with_tools: bool) -> template_probe.TemplateSkills:
        """What the template shows, of a request's own `source` or the model's. Raises BadRequest."""
        return self._skills(source, with_tools)

    def _probed(self, source: str, with_tools: bool) -> template_probe.TemplateSkills:
        options = TemplateOptions(source)
        if source:
            self._own(source)

        def render(messages: Sequence[Any], tools: Any, add_generation_prompt: bool) -> str | None:
            try:
                return self._render(deepcopy([*messages]), deepcopy(tools), add_generation_prompt, 0, options)
            except BadRequest:
                return None

        return template_probe.probe(render, source or self._source, self._form, with_tools=with_tools)

    def _render(
        self,
        messages: list[Any],
        tools: Any,
        add_generation_prompt: bool,
        wall_us: int,
        options: TemplateOptions,
    ) -> str:
        template = self._own(options.source) if options.source else self._template
        if template is None:
            raise BadRequest(NO_TEMPLATE, param="messages")
        try:
            return template.render(
                {**self._vocabulary.named, **self._guard(dict(options.variables), self._control)},
                messages=messages,
                add_generation_prompt=add_generation_prompt,
                bos_token=self._vocabulary.bos_token,
                eos_token=self._vocabulary.eos_token,
                strftime_now=lambda form: datetime.fromtimestamp(wall_us / 1e6, UTC).strftime(form),
                tools=tools,
                documents=None,
            )
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:
            # Templates raise the last four on messages that they do not expect.
            raise BadRequest(f"chat template: {self._unmarked(str(error))}", param="messages") from error

    def _own(self, source: str) -> Template:
        try:
            return self._compiled(source)
        except TemplateError as error:
            raise BadRequest(
                f"`chat_template`: it is not valid jinja: {error}", param="chat_template"
            ) from error

    def _unmarked(self, text: str) -> str:
        return self._marks.sub(lambda mark: self._controls[int(mark[1])], text)

    def _guarded(self, message: dict[str, Any]) -> dict[str, Any]:
        """A message with marks for its control tokens. Markup such as `<think>` stays in trusted messages:
        templates cut it out of earlier answers."""
        trusted = message.get("role") in _TRUSTED_WITH_MARKUP
        return {
            self._guard(name, self._control): self._guard(
                value, self._not_markup if trusted and name in _MARKED_UP else self._control
            )
            for name, value in message.items()
        }

    def _guard(self, value: Any, control: re.Pattern[str]) -> Any:
        """`value` with each control token in its strings replaced by a mark."""
        if isinstance(value, str):
            return control.sub(lambda found: self._mark.format(self._number[found[0]]), value)
        if isinstance(value, list):
            return [self._guard(item, control) for item in value]
        if isinstance(value, dict):
            return {self._guard(key, control): self._guard(item, control) for key, item in value.items()}
        return value


class _Sandbox(ImmutableSandboxedEnvironment):
    """Templates may use a list as a queue, as those of Kimi K2 do: they get copies."""

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return (isinstance(obj, list) and attr in ("append", "pop")) or super().is_safe_attribute(
            obj, attr, value
        )


def template_environment() -> ImmutableSandboxedEnvironment:
    """Where chat templates are compiled: with the helpers that Hugging Face templates expect."""
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    return environment


class Generation(Extension):
    """`{% generation %}…{% endgeneration %}`, which marks the text of the model for training."""

    tags = {"generation"}  # noqa: RUF012  (as the base class has it)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _any_of(names: Iterable[str]) -> re.Pattern[str]:
    """A pattern that finds each of `names`, the longest first."""
    root: Trie = {}
    for name in names:
        node = root
        for char in name:
            node = node.setdefault(char, {})
        node[""] = {}
    return re.compile(_alternatives(root) if root else r"(?!)")


def _alternatives(node: Trie) -> str:
    """The pattern as a tree of characters: with a list of names a hostile megabyte takes half a second."""
    ways = [re.escape(char) + _alternatives(rest) for char, rest in node.items() if char]
    if not ways:
        return ""
    return f"(?:{'|'.join(ways)}){'?' if '' in node else ''}"


def _ended(content: Any, end: str) -> Any:
    """A content with `end` after its text."""
    if isinstance(content, list):
        return [*content[:-1], {**content[-1], "text": content[-1]["text"] + end}]
    return (content or "") + end


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Templates name earlier reasoning `reasoning_content`, clients of vLLM `reasoning`."""
    if "reasoning" in message and "reasoning_content" not in message:
        return {**message, "reasoning_content": message["reasoning"]}
    return message


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """The `tojson` of Hugging Face: not escaped for HTML, and with other options than jinja's own."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


_BETWEEN = "\n\n"  # between two messages in one turn
_SHORT_ID = 9


def fitted(
    messages: list[template_probe.Message],
    tools: list[template_probe.Message] | None,
    skills: template_probe.TemplateSkills,
) -> list[template_probe.Message]:
    """The messages for a template. Arguments of their calls are objects (`parsed`)."""
    turns = [_in_known_role(message, skills) for message in messages]
    turns = _with_calls(turns, skills)
    if tools is not None and skills.tools == template_probe.WRITTEN:
        turns = _with_instructions(turns, instructions(tools, skills.form))
    elif tools is not None and skills.tools == template_probe.OF_SYSTEM:
        turns = _with_key(turns, json.dumps([tool["function"] for tool in tools], ensure_ascii=False))
    turns = _merged(_with_systems(turns, skills), skills)
    return [_shaped(turn, skills) for turn in turns]


def instructions(tools: list[template_probe.Message], form: Format) -> str:
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
    form = form if template_probe.is_writable(form) else template_probe.written_form(form)
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


def _in_known_role(
    message: template_probe.Message, skills: template_probe.TemplateSkills
) -> template_probe.Message:
    role = message["role"]
    if role == "developer" and not skills.developer:
        role = "system"
    elif role == "function" and not skills.functions:
        role = "tool"
    content = message["content"]
    return {**message, "role": role, "content": content if role in skills.parts else joined(content)}


# ---- calls and results ---------------------------------------------------------------------------


def _with_calls(
    turns: list[template_probe.Message], skills: template_probe.TemplateSkills
) -> list[template_probe.Message]:
    fit: list[template_probe.Message] = []
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
            results: list[template_probe.Message] = []
            while rest and rest[-1]["role"] == "tool":
                results.append(rest.pop())
            rest += reversed(_one_by_one(turn, results))
        else:
            ids.add(calls)
            fit += _native(turn, ids, skills)
    return fit


def _one_by_one(
    turn: template_probe.Message, results: list[template_probe.Message]
) -> list[template_probe.Message]:
    """The calls of a turn, each followed by its result."""
    apart: list[template_probe.Message] = []
    for number, call in enumerate(turn["tool_calls"]):
        named = [each for each in results if each.get("tool_call_id") == call.get("id") is not None]
        mine = named or [each for each in results[:1] if each.get("tool_call_id") is None]
        results = [each for each in results if each not in mine]
        first = turn if number == 0 else {**turn, "content": "", "reasoning_content": ""}
        apart += [{**first, "tool_calls": [call]}, *mine]
    return [*apart, *results]


def _native(
    turn: template_probe.Message, ids: _Ids, skills: template_probe.TemplateSkills
) -> list[template_probe.Message]:
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


def _needs_text(turn: template_probe.Message, skills: template_probe.TemplateSkills) -> bool:
    """Whether a text beside calls can stand neither in their message nor in one before it."""
    return bool(joined(turn["content"])) and not skills.text_beside_calls and not skills.repeats


def _spelled(turn: template_probe.Message, form: Format) -> template_probe.Message:
    """A turn with its calls in its text."""
    functions = [call["function"] for call in turn["tool_calls"]]
    calls = [(each["name"], _as_json(each["arguments"])) for each in functions]
    texts = [text for text in (joined(turn["content"]), written(calls, form)) if text]
    return {**{k: v for k, v in turn.items() if k != "tool_calls"}, "content": "\n".join(texts)}


def _as_json(arguments: object) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _answered(turn: template_probe.Message) -> template_probe.Message:
    """The result of a call in a turn of the user, in the tags that Hermes gave it."""
    return {"role": "user", "content": f"<tool_response>\n{joined(turn['content'])}\n</tool_response>"}


def _result(
    turn: template_probe.Message, ids: _Ids, skills: template_probe.TemplateSkills
) -> template_probe.Message:
    turn = {**turn, **ids.id_of(turn, "tool_call_id")}
    if skills.named_results and "name" not in turn:
        turn["name"] = ids.name(turn.get("tool_call_id"))
    return turn


class _Ids:
    """The ids of calls as a template takes them, and the names of their functions."""

    def __init__(self, skills: template_probe.TemplateSkills) -> None:
        self._kind = skills.ids
        self._given: dict[str, str] = {}
        self._names: dict[str, str] = {}

    def add(self, calls: list[template_probe.Message]) -> None:
        """Calls of the conversation, in order."""
        for call in calls:
            name, given = call["function"]["name"], str(call.get("id"))
            self._names[given] = name
            self._given[given] = f"functions.{name}:{len(self._given)}"

    def name(self, given: object) -> str:
        return self._names.get(str(given), "")

    def id_of(self, message: template_probe.Message, key: str) -> template_probe.Message:
        """The key `key` of a message, if the template takes another id than it has."""
        given = message.get(key)
        if self._kind == template_probe.FUNCTION and str(given) in self._given:
            return {key: self._given[str(given)]}
        if self._kind != template_probe.SHORT or (
            isinstance(given, str) and len(given) == _SHORT_ID and given.isalnum()
        ):
            return {}
        return {key: hashlib.sha256(str(given).encode()).hexdigest()[:_SHORT_ID]}


# ---- system messages, and turns of one role ------------------------------------------------------


def _with_instructions(turns: list[template_probe.Message], text: str) -> list[template_probe.Message]:
    """The conversation with `text` in its first system message."""
    if turns and turns[0]["role"] == "system":
        return [{**turns[0], "content": joined(turns[0]["content"]) + _BETWEEN + text}, *turns[1:]]
    return [{"role": "system", "content": text}, *turns]


def _with_key(turns: list[template_probe.Message], tools: str) -> list[template_probe.Message]:
    if not turns or turns[0]["role"] != "system":
        turns = [{"role": "system", "content": ""}, *turns]
    return [{**turns[0], "tools": tools}, *turns[1:]]


def _with_systems(
    turns: list[template_probe.Message], skills: template_probe.TemplateSkills
) -> list[template_probe.Message]:
    fit: list[template_probe.Message] = []
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


def _merged(
    turns: list[template_probe.Message], skills: template_probe.TemplateSkills
) -> list[template_probe.Message]:
    """Turns that may not follow each other in one; a turn of the user after a result in the result."""
    fit: list[template_probe.Message] = []
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


def _both(first: template_probe.Message, second: template_probe.Message) -> template_probe.Message:
    """Two messages as one."""
    texts = [text for text in (joined(first["content"]), joined(second["content"])) if text]
    return {**first, **second, "role": first["role"], "content": _BETWEEN.join(texts)}


def _shaped(turn: template_probe.Message, skills: template_probe.TemplateSkills) -> template_probe.Message:
    if skills.only_parts and isinstance(turn["content"], str):
        return {**turn, "content": [{"type": "text", "text": turn["content"]}]}
    return turn


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
