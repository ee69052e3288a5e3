"""What a template shows is found by rendering it, and the form of its calls by reading them back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from jinja2 import TemplateError
from support import template_shapes as shapes

from services.tokenizer.chat_template import (
    NOT_READ,
    OF_SYSTEM,
    READ,
    SHOWS_ALL,
    SPELLED,
    UNKNOWN,
    WRITTEN,
    Render,
    TemplateSkills,
    template_environment,
)
from services.tokenizer.template_probe import probe
from shared.answer_formats.formats import FORMATS

ONE_AT_A_TIME = {"system": False, "several_systems": False, "late_system": False, "repeats": False}
UNTOLD = {"tools": WRITTEN, "calls": False, "calls_are": SPELLED}
WANTED: dict[str, dict[str, Any]] = {
    "three roles": {**UNTOLD, "results": False},
    "alternating": {**UNTOLD, **ONE_AT_A_TIME, "results": False},
    "system in user": {**UNTOLD, **ONE_AT_A_TIME, "system": True, "results": False},
    "no system": {**UNTOLD, **ONE_AT_A_TIME, "results": False},
    "any role": {**UNTOLD, "results": False},
    "key of system": {**UNTOLD, "tools": OF_SYSTEM, "form": FORMATS["phi4"]},
    "calls beside null": {
        "tools": WRITTEN,
        "text_arguments": True,
        "null_content": True,
        "text_beside_calls": False,
        "form": FORMATS["deepseek_v3"],
    },
    "arguments to json": {
        **ONE_AT_A_TIME,
        "repeats": True,
        "text_beside_calls": False,
        "form": FORMATS["deepseek_v3"],
    },
    "function and param": {"form": FORMATS["minicpm5"]},
    "hermes": {},
    "one call": {"text_beside_calls": False, "parallel": False, "form": FORMATS["llama3"]},
    "short ids": {
        **ONE_AT_A_TIME,
        "ids": "short",
        "text_beside_calls": False,
        "user_after_result": False,
        "form": FORMATS["mistral"],
    },
    "id is name": {"ids": "function", "form": FORMATS["kimi_k2"]},
    "lists of parts": {
        **UNTOLD,
        "results": False,
        "only_parts": frozenset({"system", "user", "assistant", "tool"}),
    },
}


def renderer(source: str) -> Render:
    template = template_environment().from_string(source)

    def render(messages: Sequence[Any], tools: Any, add_generation_prompt: bool) -> str | None:
        given = {"bos_token": "<s>", "eos_token": "</s>", "add_generation_prompt": add_generation_prompt}
        try:
            return template.render(messages=[*messages], tools=tools, **given)
        except (TemplateError, TypeError):
            return None

    return render


def skills_of(source: str, form: str = "", *, with_tools: bool = True) -> TemplateSkills:
    return probe(renderer(source), source, FORMATS.get(form), with_tools=with_tools)


@pytest.mark.parametrize("shape", shapes.SHAPES)
def test_probe_finds_the_skills_of_a_template(shape: str) -> None:
    skills = skills_of(shapes.SHAPES[shape])
    wanted = {"calls_are": READ, "developer": False, "functions": False, **WANTED[shape]}
    assert skills == replace(SHOWS_ALL, parts=skills.parts, **wanted)


def test_lists_of_parts_are_for_templates_that_go_through_them() -> None:
    assert skills_of(shapes.THREE_ROLES).parts == frozenset()
    both = "{% for m in messages %}{{ m.role }}: {% if m.content is string %}{{ m.content }}{% else %}" + (
        "{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}{% endfor %}"
    )
    assert skills_of(both).parts == {"system", "user", "assistant", "tool"}
    assert skills_of(
        both.replace("m.content is string", "m.content is string or m.role != 'user'")
    ).parts == {"user"}


def test_a_role_is_known_if_it_is_not_printed_as_any_other_name_would_be() -> None:
    knows = (
        "{% for m in messages %}<{{ m.role if m.role != 'developer' else 'dev' }}>{{ m.content }}{% endfor %}"
    )
    assert skills_of(knows).developer
    assert not skills_of(knows.replace("'dev'", "'developer'")).developer
    drops = "{% for m in messages %}{% if m.role != 'developer' %}{{ m.content }}{% endif %}{% endfor %}"
    assert not skills_of(drops).developer


def test_the_call_that_is_shown_has_the_form_that_is_read() -> None:
    """Not the form whose markers stand somewhere in the template."""
    misleading = shapes.HERMES + "{# <｜tool▁calls▁begin｜> ```json #}"
    assert skills_of(misleading).form.name == "qwen3"  # whose reasoning is that of the markers
    unknown = shapes.HERMES.replace("<tool_call>", "<<call").replace('"name"', '"n"')
    assert (skills_of(unknown).calls_are, skills_of(unknown).form.name) == (NOT_READ, "hermes")


def test_a_configured_format_stays() -> None:
    skills = skills_of(shapes.HERMES, "mistral")
    assert (skills.form.name, skills.calls_are) == ("mistral", NOT_READ)
    found = skills_of(shapes.THREE_ROLES, "mistral")
    assert (found.form.name, found.tools, found.calls_are) == ("mistral", WRITTEN, SPELLED)


def test_template_without_tools_gets_a_form_that_can_be_written() -> None:
    for marker, name in {
        "<|channel|><|message|>": "hermes",
        "<arg_key>": "think",
        "</think>": "think",
    }.items():
        assert skills_of(shapes.ANY_ROLE + f"{{# {marker} #}}").form.name == name


def test_a_template_that_wants_a_list_of_tools_gets_an_empty_one() -> None:
    skills = skills_of(shapes.HERMES.replace("{% if tools %}", "{% set n = tools | length %}{% if tools %}"))
    assert (skills.empty_tools, skills.tools) == (True, SHOWS_ALL.tools)


def test_probe_finds_no_skills_of_a_template_that_shows_no_question() -> None:
    skills = skills_of("{{ raise_exception('no') }}")
    assert skills == SHOWS_ALL
    assert skills.calls_are == UNKNOWN
