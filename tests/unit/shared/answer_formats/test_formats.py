"""The table, and which format a checkpoint gets from its chat template."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.recorded_answers import ANSWERS, read

from shared.answer_formats.formats import FORMATS, Xml, format_of, named

# Parts of the chat templates of these families (the URL is Format.source).
# ruff: noqa: E501  (as they stand there)
TEMPLATES = {
    "harmony": "{{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}",
    "deepseek_v3": "'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + '\\n' + '```json'",
    "glm45": "<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>\n<arg_value>{arg-value-1}</arg_value>",
    "qwen3_coder": "<tool_call>\\n<function=example_function_name>\\n<parameter=example_parameter_1>\\n<think>",
    "gemma4": "{{- '<|tool_call>call:' + function['name'] + '{' -}}",
    "phi4_mini": 'formatted as functools[{"name": [function name], "arguments": [function arguments as JSON]}',
    "phi4": "'<|' + message['role'] + '|>' + message['content'] + '<|tool|>' + message['tools'] + '<|/tool|>'",
    "granite": "When a tool is required to answer the user's query, respond with <|tool_call|> followed by",
    "mistral": "{{- '[TOOL_CALLS][' }}",
    "mistral_v11": "{{- '[TOOL_CALLS]' + tool_call.function.name + '[ARGS]' }}",
    "nemotron": '{{- \'<TOOLCALL>[{{"name": "tool_name1", "arguments": "tool_args1"}}, \' -}}',
    "xlam": '"You are a helpful assistant. You are developed by Salesforce xLAM team."',
    "llama3": '\'<|start_header_id|>\' Respond in the format {"name": function name, "parameters": ',
    "qwen3": "{{- '<tool_call>\\n{\"name\": \"' }}{{- '<think>\\n' + reasoning_content.strip('\\n') }}",
    "hermes": '{{- \'<tool_call>\\n{"name": "\' }}',
    "think": "{% set content = content.split('</think>')[-1] %}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_has_the_format_of_its_family(name: str) -> None:
    assert format_of(TEMPLATES[name]).name == name


def test_a_template_without_markers_gets_the_format_that_the_system_message_explains() -> None:
    assert format_of("{% for m in messages %}{{ m.content }}{% endfor %}").name == "hermes"
    assert format_of("").name == "hermes"


def test_names_and_the_names_of_vllm() -> None:
    assert named("off") is None
    assert named("llama3_json") is FORMATS["llama3"]
    assert named("deepseek_r1") is FORMATS["deepseek_v3"]
    with pytest.raises(KeyError):
        named("nothing")
    names = [alias for each in FORMATS.values() for alias in (each.name, *each.aliases)]
    assert len(names) == len(set(names))


def test_each_format_has_a_source_and_a_parser_for_what_it_writes() -> None:
    for each in FORMATS.values():
        assert each.source.startswith("https://"), each.name
        if each.writes is None:
            continue
        before = each.writes.before.replace("NAME", "get_time")
        arguments = "" if isinstance(each.notations[0], Xml) else "{}"
        text = each.writes.first + before + arguments + each.writes.after + each.writes.last
        assert read(each.name, *text).calls == [("get_time", "{}")], each.name


def test_control_tokens_are_among_the_markers() -> None:
    assert {"<|channel|>", "<|message|>", "<|constrain|>"} <= FORMATS["harmony"].markers
    assert {"[TOOL_CALLS]", "[ARGS]", "[THINK]"} <= FORMATS["mistral_v11"].markers
    assert "<｜tool▁sep｜>" in FORMATS["deepseek_v3"].markers
    assert {answer.form for answer in ANSWERS} <= FORMATS.keys()


def test_the_page_has_a_line_for_each_family() -> None:
    page = (Path(__file__).parents[4] / "docs/design/answer_formats.md").read_text()
    rows = re.findall(r"^\| \[`(\w+)`\]\((\S+)\) .* (yes|no) \|$", page, flags=re.MULTILINE)
    found = [(each.name, each.source, "yes" if each.writes else "no") for each in FORMATS.values()]
    assert rows == found
