"""The table of answer formats: for each family of models the markers of reasoning and of calls, as data.

A format is found by the text of the checkpoint's chat template (`format_of`), or chosen by name. A template
without any known markers has the format `hermes`, which the system message then explains to the model.
`markers` has all of a family's markers: some are control tokens, which have no text otherwise.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

_HF = "https://huggingface.co"
_VLLM = "https://github.com/vllm-project/vllm/blob/main/examples"
_LLAMA_CPP = "https://github.com/ggml-org/llama.cpp/blob/master/models/templates"

NAME = r"(?P<name>[\w.-]{1,130})"  # 64 characters, and a namespace with as many before it
THINKING = "/thinking"  # after the name of a format: the prompt ends within the reasoning
AUTO, OFF = "auto", "off"


@dataclass(frozen=True, slots=True)
class Json:
    """Calls as JSON objects, alone or in a list. The arguments have the key `arguments` or `parameters`."""


@dataclass(frozen=True, slots=True)
class Keyed:
    """Calls as JSON objects in a list, each with the name as its one key and the arguments as its value."""


@dataclass(frozen=True, slots=True)
class Named:
    """The name, then the arguments as JSON. `head` is a pattern of the text before the arguments."""

    head: str


@dataclass(frozen=True, slots=True)
class Xml:
    """The name, then each argument with tags of its own. `head` and `key` are patterns. Values of text stand
    as they are, all others as JSON."""

    head: str
    head_begins: str  # the constant text at the start of a head
    key: str
    key_begins: str  # the constant text at the start of a key
    value_ends: str
    style: str  # of the rules in grammar.py; empty: without a grammar
    newlines: bool = False  # a value stands between line breaks that are not part of it


@dataclass(frozen=True, slots=True)
class Python:
    """Calls as Python, alone or in a list: `[f(a=1), g(b='x')]`."""


@dataclass(frozen=True, slots=True)
class Braces:
    """`call:f{a:1,b:TEXT}`, where `quote` stands before and after a text."""

    quote: str


@dataclass(frozen=True, slots=True)
class Channels:
    """Harmony: `<|channel|>NAME to=RECIPIENT<|message|>TEXT<|end|>`."""

    tokens: tuple[str, ...] = (
        "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>",
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Writes:
    """A call as the family writes it, around its arguments; `NAME` is its name."""

    before: str
    after: str
    first: str = ""  # before all calls
    last: str = ""  # after all calls
    between: str = ""

    @property
    def texts(self) -> str:
        return self.first + self.before + self.after + self.last


Notation = Json | Keyed | Named | Xml | Python | Braces | Channels


@dataclass(frozen=True, kw_only=True)
class Format:
    """How one family of models writes an answer."""

    name: str
    source: str  # where the family's own text shows it
    found_by: tuple[str, ...] = ()  # all of these are in the chat template; empty: chosen by name only
    think: tuple[str, str] | None = None  # around the reasoning
    calls_end_reasoning: bool = False  # the markers of calls are control tokens: reasoning cannot quote them
    section: tuple[str, str] = ("", "")  # around all calls
    call: tuple[str, str] = ("", "")  # around one call
    fences: tuple[str, ...] = ()  # more markers after a call
    notations: tuple[Notation, ...] = (Json(),)  # tried in this order; a grammar has the first
    bare: str = ""  # characters that start a call without a marker, as the first of an answer
    short_ids: bool = False  # its template takes ids of nine letters and digits only
    aliases: tuple[str, ...] = ()  # names that vLLM and SGLang have for it
    writes: Writes | None = None  # as the model shall write calls; None: without a grammar

    @cached_property
    def opens(self) -> tuple[str, ...]:
        """Markers that end the text for people; a call stands after the last of them."""
        return tuple(marker for marker in (self.section[0], self.call[0]) if marker)

    @cached_property
    def ends(self) -> tuple[str, ...]:
        """Markers after a call."""
        return tuple(marker for marker in (*self.fences, self.call[1], self.section[1]) if marker)

    @cached_property
    def markers(self) -> frozenset[str]:
        """Texts that are control tokens in checkpoints of the family, if the checkpoint has such tokens."""
        texts = [*(self.think or ()), *self.opens, *self.ends]
        texts += [self.writes.texts] if self.writes else []
        for each in self.notations:
            match each:
                case Braces(quote=quote):
                    texts.append(quote)
                case Channels(tokens=tokens):
                    texts += tokens
        return frozenset([*texts, *_TOKEN.findall("".join(texts))])


_TOKEN = re.compile(r"<[|｜][^<>]*[|｜]?>|<[^<>|]+\|>|\[[A-Z_]+\]")  # written like a control token
_THINK = ("<think>", "</think>")
_TOOL_CALL = ("<tool_call>", "</tool_call>")
_QWEN_XML = Xml(
    head=rf"\s*<function={NAME}>",
    head_begins="<function=",
    key=r"<parameter=(?P<key>[^>\n]{1,128})>",
    key_begins="<parameter=",
    value_ends="</parameter>",
    style="qwen_xml",
    newlines=True,
)
_GLM_XML = Xml(
    head=rf"\s*{NAME}[^\S\n]*(?:\n\s*|(?=<arg_key>|</tool_call>))",
    head_begins="",
    key=r"<arg_key>(?P<key>[^<\n]{1,128})</arg_key>\s*<arg_value>",
    key_begins="<arg_key>",
    value_ends="</arg_value>",
    style="glm_xml",
)


def _tags(head: str, key: str, value_ends: str) -> Xml:
    """Arguments in tags, without a grammar; `key` begins with a constant text, up to its first quote."""
    begin = key.partition('"')[0].replace("\\", "")
    return Xml(head, "", key, begin, value_ends, style="")


_KEY = r'(?P<key>[^"<>\n]{1,128})'
_INVOKE = _tags(rf'{NAME}"\s*>\s*', rf'<parameter name="{_KEY}"\s*>', "</parameter>")
_DSML = _tags(rf'{NAME}"\s*>\s*', rf'<｜DSML｜parameter name="{_KEY}"[^<>]{{0,40}}>', "</｜DSML｜parameter>")
_HUNYUAN = Xml(
    head=rf"\s*{NAME}<tool_sep:opensource>\s*",
    head_begins="",
    key=r"<arg_key:opensource>(?P<key>[^<\n]{1,128})</arg_key:opensource>\s*<arg_value:opensource>",
    key_begins="<arg_key:opensource>",
    value_ends="</arg_value:opensource>",
    style="",
)

_OBJECT = '{"name": "NAME", "arguments": '
_HERMES = Writes(f"<tool_call>\n{_OBJECT}", "}\n</tool_call>", between="\n")

# In the order of the search: a template may have the markers of a later one, too.
FORMATS = {
    each.name: each
    for each in (
        Format(
            name="harmony",
            source="https://developers.openai.com/cookbook/articles/openai-harmony",
            found_by=("<|channel|>", "<|message|>"),
            notations=(Channels(),),
            aliases=("openai", "gpt-oss", "openai_gptoss"),
        ),
        Format(
            name="deepseek_v32",
            source=f"{_LLAMA_CPP}/deepseek-ai-DeepSeek-V3.2.jinja",
            found_by=("｜DSML｜", "function_calls"),
            think=_THINK,
            section=("<｜DSML｜function_calls>", "</｜DSML｜function_calls>"),
            call=('<｜DSML｜invoke name="', "</｜DSML｜invoke>"),
            notations=(_DSML,),
        ),
        Format(
            name="deepseek_v4",
            source=f"{_LLAMA_CPP}/deepseek-ai-DeepSeek-V4.jinja",
            found_by=("｜DSML｜", "tool_calls"),
            think=_THINK,
            section=("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>"),
            call=('<｜DSML｜invoke name="', "</｜DSML｜invoke>"),
            notations=(_DSML,),
        ),
        Format(
            name="deepseek_v3",
            source=f"{_VLLM}/tool_chat_template_deepseekv3.jinja",
            found_by=("<｜tool▁calls▁begin｜>", "```json"),
            think=_THINK,
            calls_end_reasoning=True,
            section=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
            call=("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
            fences=("```",),
            notations=(Named(rf"\s*function<｜tool▁sep｜>{NAME}\s*```json\s*"),),
            aliases=("deepseek_r1", "deepseekv3", "deepseek-v3", "deepseek-r1"),
            writes=Writes(
                "<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\n",
                "\n```<｜tool▁call▁end｜>",
                "<｜tool▁calls▁begin｜>",
                "<｜tool▁calls▁end｜>",
                "\n",
            ),
        ),
        Format(
            name="deepseek_v31",
            source=f"{_LLAMA_CPP}/deepseek-ai-DeepSeek-V3.1.jinja",
            found_by=("<｜tool▁calls▁begin｜>",),
            think=_THINK,
            calls_end_reasoning=True,
            section=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
            call=("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
            notations=(Named(rf"\s*{NAME}<｜tool▁sep｜>\s*"),),
            writes=Writes(
                "<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>",
                "<｜tool▁call▁end｜>",
                "<｜tool▁calls▁begin｜>",
                "<｜tool▁calls▁end｜>",
            ),
        ),
        Format(
            name="kimi_k2",
            source=f"{_LLAMA_CPP}/moonshotai-Kimi-K2.jinja",
            found_by=("<|tool_calls_section_begin|>",),
            think=_THINK,
            calls_end_reasoning=True,
            section=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
            call=("<|tool_call_begin|>", "<|tool_call_end|>"),
            notations=(Named(rf"\s*(?:functions\.)?{NAME}:\d{{1,9}}\s*<\|tool_call_argument_begin\|>\s*"),),
        ),
        Format(
            name="kimi_k3",
            source=f"{_LLAMA_CPP}/Kimi-K3.jinja",
            found_by=("<|open|>", "<|sep|>"),
            think=("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
            section=("<|open|>tools<|sep|>", "<|close|>tools<|sep|>"),
            call=('<|open|>call tool="', "<|close|>call<|sep|>"),
            notations=(
                _tags(
                    rf'{NAME}"[^<]{{0,40}}<\|sep\|>\s*',
                    rf'<\|open\|>argument key="{_KEY}"[^<]{{0,40}}<\|sep\|>',
                    "<|close|>argument<|sep|>",
                ),
            ),
        ),
        Format(
            name="seed_oss",
            source=f"{_LLAMA_CPP}/ByteDance-Seed-OSS.jinja",
            found_by=("<seed:tool_call>",),
            think=("<seed:think>", "</seed:think>"),
            call=("<seed:tool_call>", "</seed:tool_call>"),
            fences=("</function>",),
            notations=(_QWEN_XML,),
            writes=Writes(
                "<seed:tool_call>\n<function=NAME>\n", "\n</function>\n</seed:tool_call>", between="\n"
            ),
        ),
        Format(
            name="minimax_m2",
            source=f"{_LLAMA_CPP}/MiniMax-M2.jinja",
            found_by=("<minimax:tool_call>",),
            think=_THINK,
            section=("<minimax:tool_call>", "</minimax:tool_call>"),
            call=('<invoke name="', "</invoke>"),
            notations=(_INVOKE,),
        ),
        Format(
            name="minicpm5",
            source=f"{_LLAMA_CPP}/openbmb-MiniCPM5-1B.jinja",
            found_by=("<function name=", "<param name="),
            think=_THINK,
            call=('<function name="', "</function>"),
            notations=(_tags(rf'{NAME}"\s*>\s*', rf'<param name="{_KEY}"\s*>', "</param>"),),
        ),
        Format(
            name="hunyuan",
            source=f"{_LLAMA_CPP}/tencent-Hy3.jinja",
            found_by=("<tool_sep", "<arg_key"),
            think=("<think:opensource>", "</think:opensource>"),
            section=("<tool_calls:opensource>", "</tool_calls:opensource>"),
            call=("<tool_call:opensource>", "</tool_call:opensource>"),
            notations=(_HUNYUAN,),
        ),
        Format(
            name="glm45",
            source=f"{_LLAMA_CPP}/glm_4_5.jinja",
            found_by=("<arg_key>",),
            think=_THINK,
            call=_TOOL_CALL,
            notations=(_GLM_XML,),
            aliases=("glm47", "glm"),
            writes=Writes("<tool_call>NAME", "</tool_call>", between="\n"),
        ),
        Format(
            name="qwen3_coder",
            source=f"{_HF}/Qwen/Qwen3-Coder-480B-A35B-Instruct/blob/main/chat_template.jinja",
            found_by=("<tool_call>", "<function=", "<parameter="),
            think=_THINK,
            call=_TOOL_CALL,
            fences=("</function>",),
            notations=(_QWEN_XML, Json()),
            aliases=("qwen3_xml", "nemotron_v3"),
            writes=Writes("<tool_call>\n<function=NAME>\n", "\n</function>\n</tool_call>", between="\n"),
        ),
        Format(
            name="gemma4",
            source=f"{_VLLM}/tool_chat_template_gemma4.jinja",
            found_by=("<|tool_call>",),
            think=("<|channel>thought", "<channel|>"),
            call=("<|tool_call>", "<tool_call|>"),
            notations=(Braces('<|"|>'),),
        ),
        Format(
            name="functiongemma",
            source="https://ai.google.dev/gemma/docs/functiongemma/formatting-and-best-practices",
            found_by=("<start_function_call>",),
            call=("<start_function_call>", "<end_function_call>"),
            notations=(Braces("<escape>"),),
        ),
        Format(
            name="phi4_mini",
            source=f"{_VLLM}/tool_chat_template_phi4_mini.jinja",
            found_by=("functools",),
            call=("functools", ""),
            aliases=("phi4_mini_json",),
            writes=Writes(_OBJECT, "}", "functools[", "]", ", "),
        ),
        Format(
            name="phi4",
            source=f"{_HF}/microsoft/Phi-4-mini-instruct/blob/main/README.md",
            found_by=("<|tool|>", "<|/tool|>"),
            call=("<|tool_call|>", "<|/tool_call|>"),
            writes=Writes(_OBJECT, "}", "<|tool_call|>[", "]<|/tool_call|>", ", "),
        ),
        Format(
            name="granite",
            source=f"{_HF}/ibm-granite/granite-3.1-8b-instruct/blob/main/tokenizer_config.json",
            found_by=("<|tool_call|>",),
            call=("<|tool_call|>", ""),
            writes=Writes(_OBJECT, "}", "<|tool_call|>[", "]", ", "),
        ),
        Format(
            name="mistral_v11",
            source="https://github.com/mistralai/mistral-common",
            found_by=("[TOOL_CALLS]", "[ARGS]"),
            think=("[THINK]", "[/THINK]"),
            call=("[TOOL_CALLS]", ""),
            notations=(
                Named(rf"\s*{NAME}(?:\[CALL_ID\]\w{{1,64}})?(?:\[ARGS\]\s*|(?={{))"),
                Json(),
            ),
            short_ids=True,
            aliases=("magistral",),
            writes=Writes("[TOOL_CALLS]NAME[ARGS]", ""),
        ),
        Format(
            name="mistral",
            source=f"{_VLLM}/tool_chat_template_mistral.jinja",
            found_by=("[TOOL_CALLS]",),
            think=("[THINK]", "[/THINK]"),
            call=("[TOOL_CALLS]", ""),
            notations=(
                Json(),
                Named(rf"\s*{NAME}(?:\[CALL_ID\]\w{{1,64}})?(?:\[ARGS\]\s*|(?={{))"),
            ),
            short_ids=True,
            writes=Writes(_OBJECT, "}", "[TOOL_CALLS][", "]", ", "),
        ),
        Format(
            name="nemotron",
            source=f"{_LLAMA_CPP}/NVIDIA-Nemotron-Nano-v2.jinja",
            found_by=("<TOOLCALL>",),
            think=_THINK,
            section=("<TOOLCALL>", "</TOOLCALL>"),
            aliases=("nemotron_json", "nemotron_nano_v2"),
            writes=Writes(_OBJECT, "}", "<TOOLCALL>[", "]</TOOLCALL>", ", "),
        ),
        Format(
            name="olmo3",
            source=f"{_VLLM}/tool_chat_template_olmo3.jinja",
            found_by=("<function_calls>",),
            think=_THINK,
            section=("<function_calls>", "</function_calls>"),
            notations=(Python(),),
        ),
        Format(
            name="xlam",
            source=f"{_VLLM}/tool_chat_template_xlam_llama.jinja",
            found_by=("xLAM",),
            think=_THINK,
            bare="[{",
            writes=Writes(_OBJECT, "}", "[", "]", ", "),
        ),
        Format(
            name="llama4_pythonic",
            source=f"{_VLLM}/tool_chat_template_llama4_pythonic.jinja",
            found_by=("<|header_start|>",),
            call=("<|python_start|>", "<|python_end|>"),
            notations=(Python(),),
            bare="[",
            aliases=("pythonic", "llama4"),
        ),
        Format(
            name="llama3",
            source="https://www.llama.com/docs/model-cards-and-prompt-formats/llama3_1/",
            found_by=("<|start_header_id|>", "parameters"),
            call=("<|python_tag|>", ""),
            notations=(Json(), Python()),
            bare="{",
            aliases=("llama3_json", "llama4_json", "llama"),
            writes=Writes('{"name": "NAME", "parameters": ', "}", between="; "),
        ),
        Format(
            name="functionary_v3",
            source=f"{_LLAMA_CPP}/meetkai-functionary-medium-v3.1.jinja",
            found_by=("<function=", "<|eom_id|>"),
            call=("<function=", "</function>"),
            notations=(Named(rf"{NAME}>\s*"),),
            writes=Writes("<function=NAME>", "</function>"),
        ),
        Format(
            name="apertus",
            source=f"{_LLAMA_CPP}/Apertus-8B-Instruct.jinja",
            found_by=("<|tools_prefix|>",),
            section=("<|tools_prefix|>", "<|tools_suffix|>"),
            notations=(Keyed(),),
            writes=Writes('{"NAME": ', "}", "<|tools_prefix|>[", "]<|tools_suffix|>", ", "),
        ),
        Format(
            name="command",
            source=f"{_LLAMA_CPP}/CohereForAI-c4ai-command-r7b-12-2024-tool_use.jinja",
            found_by=("<|START_ACTION|>",),
            think=("<|START_THINKING|>", "<|END_THINKING|>"),
            section=("<|START_ACTION|>", "<|END_ACTION|>"),
            aliases=("cohere2", "cohere_command3", "cohere_command4"),
        ),
        Format(
            name="command_r",
            source=f"{_LLAMA_CPP}/CohereForAI-c4ai-command-r-plus-tool_use.jinja",
            found_by=("Action:", "tool_name"),
            call=("Action:\n```json", "```"),
        ),
        Format(
            name="gigachat31",
            source=f"{_LLAMA_CPP}/GigaChat3.1-10B-A1.8B.jinja",
            found_by=("<|function_call|>",),
            call=("<|function_call|>", ""),
            writes=Writes(f"<|function_call|>{_OBJECT}", "}"),
        ),
        Format(
            name="gigachat3",
            source=f"{_LLAMA_CPP}/GigaChat3-10B-A1.8B.jinja",
            found_by=("function call<|role_sep|>",),
            call=("function call<|role_sep|>", ""),
            writes=Writes(f"function call<|role_sep|>\n{_OBJECT}", "}"),
        ),
        Format(
            name="solar_open",
            source=f"{_LLAMA_CPP}/upstage-Solar-Open-100B.jinja",
            found_by=("<|tool_call:begin|>",),
            section=("<|tool_calls|>", "<|calls|>"),
            call=("<|tool_call:begin|>", "<|tool_call:end|>"),
            notations=(Named(rf"\s*\w{{1,64}}<\|tool_call:name\|>{NAME}<\|tool_call:args\|>\s*"),),
        ),
        Format(
            name="minimax_m1",
            source=f"{_LLAMA_CPP}/MiniMax-M1.jinja",
            found_by=("<tool_calls>", "<end_of_sentence>"),
            section=("<tool_calls>", "</tool_calls>"),
            aliases=("minimax",),
            writes=Writes(_OBJECT, "}", "<tool_calls>\n", "\n</tool_calls>", "\n"),
        ),
        Format(
            name="apriel",
            source=f"{_LLAMA_CPP}/unsloth-Apriel-1.5.jinja",
            found_by=("<tool_calls>",),
            section=("<tool_calls>", "</tool_calls>"),
            writes=Writes(_OBJECT, "}", "<tool_calls>[", "]</tool_calls>", ", "),
        ),
        Format(
            name="lfm2",
            source=f"{_LLAMA_CPP}/LFM2-8B-A1B.jinja",
            found_by=("List of tools: ",),
            think=_THINK,
            call=("<|tool_call_start|>", "<|tool_call_end|>"),
            notations=(Python(), Json()),
        ),
        Format(
            name="qwen3",
            source="https://qwen.readthedocs.io/en/latest/framework/function_call.html",
            found_by=("<tool_call>", "<think>"),
            think=_THINK,
            call=_TOOL_CALL,
            notations=(Json(), _QWEN_XML),
            fences=("</function>",),
            aliases=("smollm3", "qwq", "ernie45"),
            writes=_HERMES,
        ),
        Format(
            name="hermes",
            source=f"{_HF}/NousResearch/Hermes-2-Pro-Llama-3-8B#prompt-format-for-function-calling",
            found_by=("<tool_call>",),
            call=_TOOL_CALL,
            aliases=("qwen25", "qwen2_5", "granite4", "kimi_linear"),
            writes=_HERMES,
        ),
        Format(
            name="think",
            source=f"{_HF}/deepseek-ai/DeepSeek-R1-Distill-Qwen-32B",
            found_by=("</think>",),
            think=_THINK,
            call=_TOOL_CALL,
            writes=_HERMES,
        ),
    )
}
HERMES = FORMATS["hermes"]
_BY_NAME = {alias: each for each in FORMATS.values() for alias in (each.name, *each.aliases)}


def format_of(template: str) -> Format:
    """The format of a checkpoint by the text of its chat template, which may be empty."""
    for each in FORMATS.values():
        if each.found_by and all(text in template for text in each.found_by):
            return each
    return HERMES


def named(name: str, template: str = "") -> Format | None:
    """The format of this name or alias; by the template for `auto`, None for `off`. Raises KeyError."""
    if name == AUTO:
        return format_of(template)
    return None if name == OFF else _BY_NAME[name]


def chosen(text: str) -> tuple[Format | None, bool]:
    """The format of a message's `answer_format`, or None; and whether the prompt opens the reasoning."""
    return FORMATS.get(text.removesuffix(THINKING)), text.endswith(THINKING)


def markers_of(text: str) -> frozenset[str]:
    """The markers of a message's `answer_format`."""
    form, _ = chosen(text)
    return frozenset() if form is None else form.markers
