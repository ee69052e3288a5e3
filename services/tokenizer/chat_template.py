"""Chat template: messages to the text (and ids) of a prompt, by the model's own jinja source.

Runs in jinja's sandbox with the helpers that Hugging Face templates expect. Control tokens written
by a *user* inside a message stay ordinary text: while the template is rendered they are replaced by
marks, and where marks are left the text is cut at the template's own control tokens and encoded
piece by piece.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from services.tokenizer.structured_output import Tools, parsed, spelled, told
from shared.errors import NO_TEMPLATE, BadRequest, SetupError
from shared.vocab.vocabulary import Vocabulary

# Noncharacters of Unicode, meant for a program's own use; text from outside does not hold them.
_MARK = "\ufdd0{}\ufdd1"
_MARKS = re.compile("\ufdd0(\\d+)\ufdd1")


class ChatTemplate:
    """The compiled template of one model. Raises SetupError when its source is not jinja."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._controls = list(vocabulary.special_tokens)
        longest_first = sorted(self._controls, key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        try:
            source = vocabulary.chat_template
            self._knows_tools = "tools" in (source or "")
            self._template = environment.from_string(source) if source else None
        except TemplateError as error:
            raise SetupError(f"the model's chat template is not valid jinja: {error}") from error

    def encode(
        self, messages: list[dict[str, Any]], tools: Tools | None, add_generation_prompt: bool, wall_us: int
    ) -> list[int]:
        """Prompt ids of a conversation, with the functions that may be called in it. `wall_us` is the date
        that the template may ask for. Raises BadRequest with the template's message."""
        given = None
        if self._knows_tools:
            messages = [parsed(message) for message in messages]
            given = None if tools is None else self._guard(list(tools.given))
        else:
            messages = [spelled(message) for message in messages]
            messages = messages if tools is None else told(messages, tools)
        text = self._render(self._guard(messages), given, add_generation_prompt, wall_us)
        if _MARKS.search(text) is None:
            return self._vocabulary.encode(text, special=True)
        return self._encode_marked(text)

    def render(self, messages: list[dict[str, Any]], add_generation_prompt: bool, wall_us: int) -> str:
        """The prompt as text, for people to read. Raises BadRequest."""
        return self._render(messages, None, add_generation_prompt, wall_us)

    def _render(self, messages: list[Any], tools: Any, add_generation_prompt: bool, wall_us: int) -> str:
        if self._template is None:
            raise BadRequest(NO_TEMPLATE, param="messages")
        try:
            return self._template.render(
                messages=messages,
                add_generation_prompt=add_generation_prompt,
                bos_token=self._vocabulary.bos_token,
                eos_token=self._vocabulary.eos_token,
                strftime_now=_calendar(wall_us),
                tools=tools,
                documents=None,
            )
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:
            # The last four are what templates run into on messages they do not expect.
            raise BadRequest(f"chat template: {error}", param="messages") from error

    def _guard(self, value: Any) -> Any:
        """`value` with each control token in its strings replaced by a mark."""
        if isinstance(value, str):
            return self._control.sub(lambda found: _MARK.format(self._controls.index(found[0])), value)
        if isinstance(value, list):
            return [self._guard(item) for item in value]
        if isinstance(value, dict):
            return {key: self._guard(item) for key, item in value.items()}
        return value

    def _encode_marked(self, text: str) -> list[int]:
        ids: list[int] = []
        at = 0
        for found in self._control.finditer(text):
            ids += self._plain(text[at : found.start()])
            ids.append(self._vocabulary.special_tokens[found[0]])
            at = found.end()
        return ids + self._plain(text[at:])

    def _plain(self, text: str) -> list[int]:
        return self._vocabulary.encode(_MARKS.sub(self._unmark, text))

    def _unmark(self, mark: re.Match[str]) -> str:
        number = int(mark[1])
        return self._controls[number] if number < len(self._controls) else mark[0]


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(value: Any, **options: Any) -> str:
    """Hugging Face's: not escaped for HTML, unlike jinja's own."""
    return json.dumps(value, **{"ensure_ascii": False, **options})


def _calendar(wall_us: int) -> Callable[[str], str]:
    return lambda form: datetime.fromtimestamp(wall_us / 1e6, UTC).strftime(form)
