"""`ChatTemplate` turns messages into the text and ids of a prompt, with the model's own jinja template.

It runs in jinja's sandbox with the helpers that Hugging Face templates expect. Control tokens that a *user*
writes inside a message stay ordinary text: marks replace them before the template is rendered. In the result
the template's own control tokens get secret names, the only ones that the vocabulary reads as control tokens,
and the marks become text again. So one pass of the model's tokenizer encodes the whole prompt.

`TemplateSkills` has what a template shows; a template that shows all gets the messages unchanged. The
functions of TURNS find that, and write the rest into turns that it does show (template_probe.py).
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import lru_cache
from pkgutil import resolve_name
from typing import Any, ClassVar, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from shared.answer_formats.formats import HERMES, Format, format_of
from shared.api import Tool, joined, present
from shared.errors import NO_TEMPLATE, BadRequest, SetupError
from shared.vocab.vocabulary import Vocabulary

Trie = dict[str, Any]  # by character; "" where a name ends

_TRUSTED_WITH_MARKUP = ("assistant", "system", "developer")  # roles of the model and of the chat's developer
_MARKED_UP = ("content", "reasoning_content")
_SHOWN = ("system", "user", "assistant")  # roles that each template shows, or refuses by itself
OWN_TEMPLATES = 16  # of requests, kept compiled
TURNS = {  # finds what a template shows; writes the rest into turns that it does
    "probe": "services.tokenizer.template_probe:probe",
    "fit": "services.tokenizer.template_probe:fitted",
}
Message = dict[str, Any]
# (messages, tools, add_generation_prompt) to the prompt; None if the template raises.
Render = Callable[[Sequence[Message], Any, bool], str | None]
ANY, SHORT, FUNCTION = "any", "short", "function"
VARIABLE, OF_SYSTEM, WRITTEN = "variable", "key of the system message", "written"
READ, NOT_READ, SPELLED, UNKNOWN = "read back", "not read back", "written by headrace", "unknown"


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
        self._fit = resolve_name(TURNS["fit"]) if "fit" in TURNS else plain_turns

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
        turns = self._fit(guarded, given, skills)
        if options.continue_final:
            turns[-1] = {**turns[-1], "content": _ended(turns[-1]["content"], self._end)}
        if given is None or skills.tools != VARIABLE:
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

    def skills(self, source: str = "", *, with_tools: bool) -> TemplateSkills:
        """What the template shows, of a request's own `source` or the model's. Raises BadRequest."""
        return self._skills(source, with_tools)

    def _probed(self, source: str, with_tools: bool) -> TemplateSkills:
        options = TemplateOptions(source)
        if source:
            self._own(source)

        def render(messages: Sequence[Any], tools: Any, add_generation_prompt: bool) -> str | None:
            try:
                return self._render(deepcopy([*messages]), deepcopy(tools), add_generation_prompt, 0, options)
            except BadRequest:
                return None

        source = source or self._source
        if "probe" not in TURNS:
            return replace(SHOWS_ALL, form=format_of(source) if self._form is None else self._form)
        found: TemplateSkills = resolve_name(TURNS["probe"])(
            render, source, self._form, with_tools=with_tools
        )
        return found

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


# ---- calls and results ---------------------------------------------------------------------------


# ---- system messages, and turns of one role ------------------------------------------------------


def plain_turns(messages: list[Message], tools: list[Message] | None, _: TemplateSkills) -> list[Message]:
    """The messages where nothing fits them to a template. Raises BadRequest for tools, and for roles and
    calls that a template may leave out."""
    if tools is not None or any(each["role"] not in _SHOWN or each.get("tool_calls") for each in messages):
        raise BadRequest(
            "`messages`: tools, calls and other roles than system, user and assistant need "
            "services/tokenizer/template_probe.py, which this installation lacks: install headrace with it",
            param="messages",
        )
    return [{**each, "content": joined(each["content"])} for each in messages]


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
