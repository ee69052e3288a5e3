"""Answers of families of models, written as the family's chat template or documentation writes them, and
malformed ones from public reports. No model has written these words; markers, line breaks and order are the
family's own."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from shared.answer_formats.formats import FORMATS
from shared.answer_formats.parser import AnswerParser
from shared.answer_formats.reader import Part

# Unicode, braces, quotes, line breaks, and markers of several families in one text.
ODD = 'Zürich 東京 🌧 {"a": [1]} } "q" \\ line\nnext <tool_call> </tool_call> [TOOL_CALLS] <think> </think>'
FIRST: dict[str, Any] = {"city": ODD, "options": {"units": ["C", "F"], "depth": {"n": 3, "on": True}}}
SECOND: dict[str, Any] = {"zone": "Europe/Berlin"}
TOOLS = {
    "get_weather": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "options": {"type": "object"}},
    },
    "get_time": {"type": "object", "properties": {"zone": {"type": "string"}}},
}
THOUGHT = "The user wants {both}.\nI call two functions."
TEXT = "I look it up."


def _dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _object(name: str, arguments: Any, key: str = "arguments") -> str:
    return f'{{"name": "{name}", "{key}": {_dumps(arguments)}}}'


A, B = _object("get_weather", FIRST), _object("get_time", SECOND)
_QWEN_XML = "".join(
    f"<tool_call>\n<function={name}>\n"
    + "".join(
        f"<parameter={k}>\n{v if isinstance(v, str) else _dumps(v)}\n</parameter>\n" for k, v in of.items()
    )
    + "</function>\n</tool_call>\n"
    for name, of in (("get_weather", FIRST), ("get_time", SECOND))
).rstrip("\n")
_GLM = "\n".join(
    f"<tool_call>{name}\n"
    + "\n".join(
        f"<arg_key>{k}</arg_key>\n<arg_value>{v if isinstance(v, str) else _dumps(v)}</arg_value>"
        for k, v in of.items()
    )
    + "\n</tool_call>"
    for name, of in (("get_weather", FIRST), ("get_time", SECOND))
)


def _gemma(value: Any) -> str:
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, dict):
        return "{" + ",".join(f'<|"|>{k}<|"|>:{_gemma(v)}' for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_gemma, value)) + "]"
    return _dumps(value)


def _gemma_call(name: str, of: dict[str, Any]) -> str:
    inside = ",".join(f"{k}:{_gemma(v)}" for k, v in of.items())
    return f"<|tool_call>call:{name}{{{inside}}}<tool_call|>"


def _tagged(call: str, argument: str) -> str:
    """Both calls in tags: `call` has NAME and BODY, `argument` KEY, KIND (whether it is a text) and VALUE."""
    texts = []
    for name, of in (("get_weather", FIRST), ("get_time", SECOND)):
        body = ""
        for key, value in of.items():
            text, kind = (value, "true") if isinstance(value, str) else (_dumps(value), "false")
            body += argument.replace("KEY", key).replace("KIND", kind).replace("VALUE", text)
        texts.append(call.replace("NAME", name).replace("BODY", body))
    return "\n".join(texts)


_DSML = _tagged(
    '<｜DSML｜invoke name="NAME">\nBODY</｜DSML｜invoke>',
    '<｜DSML｜parameter name="KEY" string="KIND">VALUE</｜DSML｜parameter>\n',
)


@dataclass(frozen=True)
class Answer:
    """An answer of one family; its calls are those with FIRST and SECOND."""

    form: str
    text: str
    thinks: bool = False  # it has THOUGHT
    has_text: bool = True  # it has TEXT
    opened: bool = False  # the prompt ends with the marker of reasoning

    @property
    def source(self) -> str:
        return FORMATS[self.form].source


_DS = "<｜tool▁call▁begin｜>{}<｜tool▁call▁end｜>"
_V3 = "function<｜tool▁sep｜>{}\n```json\n{}\n```"
_THINK = f"<think>\n{THOUGHT}\n</think>\n\n"
ANSWERS = [
    Answer("hermes", f"{TEXT}\n<tool_call>\n{A}\n</tool_call>\n<tool_call>\n{B}\n</tool_call>"),
    Answer(
        "qwen3",
        f"{_THINK}{TEXT}\n<tool_call>\n{A}\n</tool_call>\n<tool_call>\n{B}\n</tool_call>",
        thinks=True,
    ),
    Answer("qwen3_coder", f"{TEXT}\n{_QWEN_XML}"),
    Answer("qwen3_coder", f"{THOUGHT}\n</think>\n\n{TEXT}\n{_QWEN_XML}", thinks=True, opened=True),
    Answer(
        "llama3",
        f"{_object('get_weather', FIRST, 'parameters')}; {_object('get_time', SECOND, 'parameters')}",
        has_text=False,
    ),
    Answer(
        "llama3",
        f"<|python_tag|>{_object('get_weather', FIRST, 'parameters')}; "
        f"{_object('get_time', SECOND, 'parameters')}",
        has_text=False,
    ),
    Answer("mistral", f"[TOOL_CALLS][{A}, {B}]", has_text=False),
    Answer(
        "mistral_v11",
        f"[THINK]{THOUGHT}[/THINK]{TEXT}[TOOL_CALLS]get_weather[ARGS]{_dumps(FIRST)}"
        f"[TOOL_CALLS]get_time[ARGS]{_dumps(SECOND)}",
        thinks=True,
    ),
    Answer(
        "deepseek_v3",
        f"<think>\n{THOUGHT}\n</think>\n\n{TEXT}<｜tool▁calls▁begin｜>"
        + _DS.format(_V3.format("get_weather", _dumps(FIRST)))
        + "\n"
        + _DS.format(_V3.format("get_time", _dumps(SECOND)))
        + "<｜tool▁calls▁end｜>",
        thinks=True,
    ),
    Answer("glm45", f"\n<think>{THOUGHT}</think>\n{TEXT}\n{_GLM}", thinks=True),
    Answer(
        "harmony",
        f"<|channel|>analysis<|message|>{THOUGHT}<|end|>"
        f"<|start|>assistant<|channel|>commentary<|message|>{TEXT}<|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
        f"{_dumps(FIRST)}<|call|>"
        "<|start|>assistant to=functions.get_time<|channel|>commentary json<|message|>"
        f"{_dumps(SECOND)}<|call|>",
        thinks=True,
    ),
    Answer(  # the prompt ends with the first header
        "harmony",
        f" to=functions.get_weather<|channel|>commentary json<|message|>{_dumps(FIRST)}<|call|>"
        "<|start|>assistant to=functions.get_time<|channel|>commentary json<|message|>"
        f"{_dumps(SECOND)}<|call|>",
        has_text=False,
    ),
    Answer(
        "deepseek_v31",
        f"{TEXT}<｜tool▁calls▁begin｜>"
        + _DS.format(f"get_weather<｜tool▁sep｜>{_dumps(FIRST)}")
        + _DS.format(f"get_time<｜tool▁sep｜>{_dumps(SECOND)}")
        + "<｜tool▁calls▁end｜>",
    ),
    Answer(
        "deepseek_v32",
        f"{_THINK}{TEXT}\n\n<｜DSML｜function_calls>\n{_DSML}\n</｜DSML｜function_calls>",
        thinks=True,
    ),
    Answer("deepseek_v4", f"{TEXT}\n\n<｜DSML｜tool_calls>\n{_DSML}\n</｜DSML｜tool_calls>"),
    Answer(
        "kimi_k2",
        f"{TEXT}<|tool_calls_section_begin|>"
        f"<|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{_dumps(FIRST)}<|tool_call_end|>"
        f"<|tool_call_begin|>functions.get_time:1<|tool_call_argument_begin|>{_dumps(SECOND)}<|tool_call_end|>"
        "<|tool_calls_section_end|>",
    ),
    Answer(
        "kimi_k3",
        f"{TEXT}<|open|>tools<|sep|>"
        + _tagged(
            '<|open|>call tool="NAME" index="1"<|sep|>BODY<|close|>call<|sep|>',
            '<|open|>argument key="KEY" type="x"<|sep|>VALUE<|close|>argument<|sep|>',
        )
        + "<|close|>tools<|sep|>",
    ),
    Answer(
        "seed_oss",
        f"{TEXT}\n"
        + _tagged(
            "<seed:tool_call>\n<function=NAME>\nBODY</function>\n</seed:tool_call>",
            "<parameter=KEY>\nVALUE\n</parameter>\n",
        ),
    ),
    Answer(
        "minimax_m2",
        f"{TEXT}\n<minimax:tool_call>\n"
        + _tagged('<invoke name="NAME">\nBODY</invoke>', '<parameter name="KEY">VALUE</parameter>\n')
        + "\n</minimax:tool_call>",
    ),
    Answer(
        "minicpm5",
        f"{_THINK}{TEXT}\n"
        + _tagged('<function name="NAME">BODY</function>', '<param name="KEY">VALUE</param>'),
        thinks=True,
    ),
    Answer(
        "hunyuan",
        f"{TEXT}<tool_calls:opensource>\n"
        + _tagged(
            "<tool_call:opensource>NAME<tool_sep:opensource>\nBODY</tool_call:opensource>",
            "<arg_key:opensource>KEY</arg_key:opensource>\n<arg_value:opensource>VALUE</arg_value:opensource>\n",
        )
        + "\n</tool_calls:opensource>",
    ),
    Answer(
        "functionary_v3",
        f"<function=get_weather>{_dumps(FIRST)}</function><function=get_time>{_dumps(SECOND)}</function>",
        has_text=False,
    ),
    Answer(
        "apertus",
        f'{TEXT}<|tools_prefix|>[{{"get_weather": {_dumps(FIRST)}}}, {{"get_time": {_dumps(SECOND)}}}]'
        "<|tools_suffix|>",
    ),
    Answer(
        "command",
        f"<|START_THINKING|>{THOUGHT}<|END_THINKING|><|START_ACTION|>[\n"
        f'    {{"tool_call_id": "0", "tool_name": "get_weather", "parameters": {_dumps(FIRST)}}},\n'
        f'    {{"tool_call_id": "1", "tool_name": "get_time", "parameters": {_dumps(SECOND)}}}\n]'
        "<|END_ACTION|>",
        thinks=True,
        has_text=False,
    ),
    Answer(
        "command_r",
        f'Action:\n```json\n[\n{{"tool_name": "get_weather", "parameters": {_dumps(FIRST)}}},\n'
        f'{{"tool_name": "get_time", "parameters": {_dumps(SECOND)}}}\n]```',
        has_text=False,
    ),
    Answer(
        "solar_open",
        f"{TEXT}<|tool_calls|>"
        f"<|tool_call:begin|>a1<|tool_call:name|>get_weather<|tool_call:args|>{_dumps(FIRST)}<|tool_call:end|>"
        f"<|tool_call:begin|>b2<|tool_call:name|>get_time<|tool_call:args|>{_dumps(SECOND)}<|tool_call:end|>"
        "<|calls|>",
    ),
    Answer("apriel", f"{TEXT}\n<tool_calls>[{A}, {B}]</tool_calls>"),
    Answer("minimax_m1", f"{TEXT}\n<tool_calls>\n{A}\n{B}\n</tool_calls>"),
    Answer(
        "lfm2",
        f"<|tool_call_start|>[get_weather(city={FIRST['city']!r}, options={FIRST['options']!r}), "
        f"get_time(zone={SECOND['zone']!r})]<|tool_call_end|>{TEXT}",
    ),
    Answer("granite", f"<|tool_call|>[{A}, {B}]", has_text=False),
    Answer("phi4", f"<|tool_call|>[{A}, {B}]<|/tool_call|>", has_text=False),
    Answer("phi4_mini", f"functools[{A}, {B}]", has_text=False),
    Answer(
        "gemma4",
        f"<|channel>thought\n{THOUGHT}\n<channel|>{_gemma_call('get_weather', FIRST)}"
        f"{_gemma_call('get_time', SECOND)}",
        thinks=True,
        has_text=False,
    ),
    Answer(
        "nemotron",
        f"{THOUGHT}\n</think>\n\n{TEXT}\n\n<TOOLCALL>[{A}, {B}]</TOOLCALL>",
        thinks=True,
        opened=True,
    ),
    Answer("xlam", f"[{A}, {B}]", has_text=False),
    Answer(
        "llama4_pythonic",
        f"<|python_start|>[get_weather(city={FIRST['city']!r}, options={FIRST['options']!r}), "
        f"get_time(zone='Europe/Berlin')]<|python_end|>{TEXT}",
    ),
]


@dataclass
class Read:
    """What a parser made of an answer."""

    reasoning: str = ""
    content: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)  # name, arguments


def joined(parts: list[Part]) -> Read:
    """The parts of an answer in one piece each."""
    read = Read()
    for kind, text, call in parts:
        if kind == "call":
            assert call == len(read.calls)
            read.calls.append((text, ""))
        elif kind == "arguments":
            name, before = read.calls[call]
            read.calls[call] = (name, before + text)
        elif kind == "content":
            read.content += text
        else:
            read.reasoning += text
    return read


def parts_of(form: str, pieces: list[str], **options: Any) -> list[list[Part]]:
    """The parts after each piece and after the end."""
    parser = AnswerParser(FORMATS[form], **{"tools": TOOLS, **options})
    return [*map(parser.feed, pieces), parser.finish()]


def read(form: str, *pieces: str, **options: Any) -> Read:
    """An answer in these pieces, read."""
    return joined([part for parts in parts_of(form, list(pieces), **options) for part in parts])
