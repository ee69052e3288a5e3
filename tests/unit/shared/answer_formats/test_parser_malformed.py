"""Malformed answers from public reports: text is never lost, and the result is the same at every split."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from support.recorded_answers import Read, read

_GH = "https://github.com"


@dataclass(frozen=True)
class Report:
    name: str
    source: str
    form: str
    text: str
    result: Read
    opened: bool = False


REPORTS = [
    Report(
        "a missing end tag is no loss",
        f"{_GH}/ai-dynamo/dynamo/pull/8208",
        "deepseek_v3",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"a": 1}\n```'
        '<｜tool▁call▁end｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>g\n```json\n{"b": 2}',
        Read(calls=[("f", '{"a": 1}'), ("g", '{"b": 2}')]),
    ),
    Report(
        "an answer that ends within arguments is a call with the arguments so far",
        f"{_GH}/vllm-project/vllm/issues/53269",
        "hermes",
        '<tool_call>\n{"name": "f", "arguments": {"path": "/tmp/a", "content": "Half',
        Read(calls=[("f", '{"path": "/tmp/a", "content": "Half')]),
    ),
    Report(
        "an answer that ends within an argument between tags is incomplete JSON",
        f"{_GH}/vllm-project/vllm/pull/47963",
        "qwen3_coder",
        "<tool_call>\n<function=get_time>\n<parameter=zone>\nEurope/Be",
        Read(calls=[("get_time", '{"zone": "Europe/Be')]),
    ),
    Report(
        "an answer that ends within a name is content",
        f"{_GH}/vllm-project/vllm/issues/9053",
        "mistral",
        '[TOOL_CALLS][{"name": "get_curr',
        Read(content='[TOOL_CALLS][{"name": "get_curr'),
    ),
    Report(
        "a tag in a sentence is content",
        f"{_GH}/unslothai/unsloth/pull/5620",
        "mistral",
        "See [TOOL_CALLS] docs for <tool_call>.",
        Read(content="See [TOOL_CALLS] docs for <tool_call>."),
    ),
    Report(
        "an end tag within a string does not end the call",
        f"{_GH}/vllm-project/vllm/pull/45310",
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"text": "a </tool_call> b"}}</tool_call>',
        Read(calls=[("f", '{"text": "a </tool_call> b"}')]),
    ),
    Report(
        "two objects in one tag are two calls",
        f"{_GH}/ollama/ollama/pull/5753",
        "hermes",
        '<tool_call>\n{"name": "f", "arguments": {}}\n{"name": "g", "arguments": {"a": 1}}\n</tool_call>',
        Read(calls=[("f", "{}"), ("g", '{"a": 1}')]),
    ),
    Report(
        "an object with single quotes is content",
        f"{_GH}/NousResearch/atropos/pull/479",
        "hermes",
        "<tool_call>\n{'name': 'f', 'arguments': {'a': 1}}\n</tool_call>",
        Read(content="<tool_call>\n{'name': 'f', 'arguments': {'a': 1}}\n</tool_call>"),
    ),
    Report(
        "an apostrophe in a string is a character",
        f"{_GH}/NousResearch/atropos/issues/478",
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"query": "what\'s the weather"}}</tool_call>',
        Read(calls=[("f", '{"query": "what\'s the weather"}')]),
    ),
    Report(
        "a Python literal between tags becomes JSON",
        f"{_GH}/waybarrios/vllm-mlx/issues/63",
        "qwen3_coder",
        "<tool_call>\n<function=f>\n<parameter=settings>\n{'theme': 'dark', 'on': True}\n</parameter>\n"
        "</function>\n</tool_call>",
        Read(calls=[("f", '{"settings": {"theme": "dark", "on": true}}')]),
    ),
    Report(
        "a comma in a Python string does not end it",
        f"{_GH}/ml-explore/mlx-lm/issues/1785",
        "llama4_pythonic",
        "<|python_start|>[write(path='/tmp/hello.py', content='# Hello, \"world\"!')]<|python_end|>",
        Read(calls=[("write", '{"path": "/tmp/hello.py", "content": "# Hello, \\"world\\"!"}')]),
    ),
    Report(
        "no arguments are an empty object",
        f"{_GH}/vllm-project/vllm/issues/28806",
        "hermes",
        '<tool_call>\n{"name": "f"}\n</tool_call><tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'
        '<tool_call>\n{"name": "h", "arguments": null}\n</tool_call>',
        Read(calls=[("f", "{}"), ("g", "{}"), ("h", "{}")]),
    ),
    Report(
        "closing braces of nested arguments stay",
        f"{_GH}/vllm-project/vllm/pull/32518",
        "hermes",
        '<tool_call>\n{"name": "f", "arguments": {"a": {"b": {"n": 1}}}}\n</tool_call>',
        Read(calls=[("f", '{"a": {"b": {"n": 1}}}')]),
    ),
    Report(
        "a JSON object that is no call is content",
        f"{_GH}/sgl-project/sglang/issues/35562",
        "llama3",
        '{"a": 1} is a dict',
        Read(content='{"a": 1} is a dict'),
    ),
    Report(
        "an empty object is content",
        f"{_GH}/sgl-project/sglang/issues/35562",
        "llama3",
        "{}",
        Read(content="{}"),
    ),
    Report(
        "text after a call without a marker is content",
        f"{_GH}/vllm-project/vllm/pull/19024",
        "llama3",
        '{"type": "function", "name": "get_time", "parameters": {}} \n\nWould you like to know more?',
        Read(content="Would you like to know more?", calls=[("get_time", "{}")]),
    ),
    Report(
        "JSON without a marker that names no function is content",
        f"{_GH}/openai/openai-agents-python/issues/3709",
        "llama3",
        '{"name": "Ada", "parameters": {"age": 36}}',
        Read(content='{"name": "Ada", "parameters": {"age": 36}}'),
    ),
    Report(
        "an end tag without a start is content",
        f"{_GH}/NousResearch/hermes-agent/pull/35129",
        "hermes",
        'leton\n{"name": "f", "arguments": {}}\n</tool_call>',
        Read(content='leton\n{"name": "f", "arguments": {}}\n</tool_call>'),
    ),
    Report(
        "a call without its first tag is content",
        f"{_GH}/ollama/ollama/issues/16686",
        "qwen3_coder",
        "I look.\n\n<function=Glob>\n<parameter=p>\n*.md\n</parameter>\n</function>\n</tool_call>",
        Read(
            content="I look.\n\n<function=Glob>\n<parameter=p>\n*.md\n</parameter>\n</function>\n</tool_call>"
        ),
    ),
    Report(
        "a stray end tag after a call is content",
        f"{_GH}/QwenLM/Qwen3.8/issues/178",
        "qwen3_coder",
        "<tool_call>\n<function=f>\n<parameter=a>\nx\n</parameter>\n</function>\n</function_invocation>\n</tool_call>",
        Read(content="</function_invocation>\n</tool_call>", calls=[("f", '{"a": "x"}')]),
    ),
    Report(
        "control tokens of a call end the reasoning",
        f"{_GH}/vllm-project/vllm/pull/32216",
        "deepseek_v3",
        "<think>I list it. <｜tool▁calls▁begin｜> <｜tool▁call▁begin｜> function<｜tool▁sep｜>ls "
        '```json {"path": "/"} ``` <｜tool▁call▁end｜> <｜tool▁calls▁end｜></think>',
        Read(reasoning="I list it.", content="</think>", calls=[("ls", '{"path": "/"}')]),
    ),
    Report(
        "reasoning that the prompt opened has no start tag",
        f"{_GH}/vllm-project/vllm/issues/13125",
        "think",
        "So 2 and 2.\n</think>\n\n4",
        Read(reasoning="So 2 and 2.", content="4"),
        opened=True,
    ),
    Report(
        "an answer without reasoning is content",
        f"{_GH}/sgl-project/sglang/issues/4711",
        "qwen3",
        '{"sum": 4}',
        Read(content='{"sum": 4}'),
    ),
    Report(
        "a name in other tags is no call",
        f"{_GH}/madroidmaq/mlx-omni-server/issues/126",
        "qwen3",
        '<tool_call>\n<function>terminal</function>\n{"command": "ls"}\n</tool_call>',
        Read(content='<tool_call>\n<function>terminal</function>\n{"command": "ls"}\n</tool_call>'),
    ),
    Report(
        "a malformed block does not take the next one with it",
        f"{_GH}/Neroued/ninfer/issues/158",
        "qwen3_coder",
        "<tool_call>\nnothing\n</tool_call>\n<tool_call>\n<function=f>\n</function>\n</tool_call>",
        Read(content="<tool_call>\nnothing\n</tool_call>", calls=[("f", "{}")]),
    ),
]


@pytest.mark.parametrize("report", REPORTS, ids=lambda report: report.name)
def test_malformed_answer_has_the_reported_result(report: Report) -> None:
    text = report.text
    assert read(report.form, text, thinking=report.opened) == report.result
    assert read(report.form, *text, thinking=report.opened) == report.result
    for at in range(1, len(text)):
        assert read(report.form, text[:at], text[at:], thinking=report.opened) == report.result, at


def test_bare_control_characters_in_strings_are_escaped() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": "b\x01\nc"}}</tool_call>'
    assert read("hermes", *text).calls == [("f", '{"a": "b\\u0001\\nc"}')]


def test_arguments_as_a_json_text_are_the_object_in_it() -> None:
    text = '<TOOLCALL>[{"name": "f", "arguments": "{\\"a\\": 1}"}]</TOOLCALL>'
    assert read("nemotron", *text).calls == [("f", '{"a": 1}')]


def test_keys_are_read_in_any_order() -> None:
    text = '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>'
    assert read("hermes", *text).calls == [("f", '{"a": 1}')]


def test_further_keys_are_left_out() -> None:
    text = '<tool_call>{"id": "c1", "name": "f", "arguments": {"a": 1}, "why": "{"}</tool_call> ok'
    found = read("hermes", *text)
    assert (found.calls, found.content) == ([("f", '{"a": 1}')], "ok")
