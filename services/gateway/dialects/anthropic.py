"""Anthropic's Messages API: requests as chats of the OpenAI API, answers and streams from OpenAI's. Pure.

https://docs.claude.com/en/api/messages defines the fields, https://docs.claude.com/en/api/messages-streaming
the events of a stream:

    message_start, ping
    content_block_start, content_block_delta…, content_block_stop      for each block, one after the other
    message_delta (stop reason, usage), message_stop

A block is `text`, `thinking` or `tool_use`. Text blocks of one message are joined by a line break, and so are
messages of the same role that follow each other.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, NotRequired

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import TypedDict

from services.gateway import openapi as doc
from services.gateway.endpoints import Endpoints
from services.gateway.exchange import answer as sent
from services.gateway.openai_response import Api, Body, ChunkBuilder, Chunks, idle_fields, to_text, valid
from shared import api
from shared.errors import BadRequest, HeadraceError
from shared.openai.call import CONTEXT_LENGTH, Call, answer, error_status, thinking
from shared.session_hints import A_TIME, SessionFields, bad_hint, seconds_of

_ERRORS = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error",
}  # fmt: skip
_STOPS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
# The words of services/tokenizer/prepare.py
_OVER_CONTEXT = re.compile(
    rf"{CONTEXT_LENGTH}: This model's maximum context length is (?P<context>\d+) tokens: "
    r"(?=the prompt has (?P<prompt>\d+) (?P<unit>\w+)(?: and `\w+` is (?P<asked>\d+))?)"
)
_SAME = ("model", "max_tokens", "temperature", "top_p", "top_k", "stream")  # under the same name in both


def _blocks(*kinds: str, what: str = "blocks") -> Callable[[object], object]:
    """A validator for content: a text becomes a block, and a block of another kind is refused by its name."""

    def check(content: object) -> object:
        if isinstance(content, str):
            return [{"type": "text", "text": content}]
        for kind in _kinds(content):
            if kind not in kinds:
                raise ValueError(
                    f"{what} of type `{kind:.40}` are not supported here: send {', '.join(kinds)}"
                )
        return content

    return check


def _kinds(listed: object) -> list[str]:
    """The types of the entries of a list."""
    kinds = (
        [each.get("type") for each in listed if isinstance(each, dict)] if isinstance(listed, list) else []
    )
    return [kind for kind in kinds if isinstance(kind, str)]


Texts = Annotated[list[api.TextPart], BeforeValidator(_blocks("text"), str | list[api.TextPart])]


@api.Extensible
class ToolUse(TypedDict):
    """A call that the model has made."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: NotRequired[
        Annotated[
            dict[str, Any], BeforeValidator(lambda given: {} if given == "" else given, dict | Literal[""])
        ]
    ]


@api.Extensible
class ToolResult(TypedDict):
    """What a call has returned."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: NotRequired[Texts | None]
    is_error: NotRequired[bool | None]


@api.Extensible
class Thinking(TypedDict):
    """The reasoning of an earlier answer; the chat template decides whether the model sees it."""

    type: Literal["thinking"]
    thinking: str


@api.Extensible
class RedactedThinking(TypedDict):
    """Ignored."""

    type: Literal["redacted_thinking"]


_Asked = Annotated[api.TextPart | ToolResult, Field(discriminator="type")]
_Answered = Annotated[api.TextPart | ToolUse | Thinking | RedactedThinking, Field(discriminator="type")]
_STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class UserMessage(BaseModel):
    """Texts of the user, and results of calls."""

    model_config = _STRICT

    role: Literal["user"]
    content: Annotated[list[_Asked], BeforeValidator(_blocks("text", "tool_result"), str | list[_Asked])]


class AssistantMessage(BaseModel):
    """An answer; as the last message the start of one."""

    model_config = _STRICT

    role: Literal["assistant"]
    content: Annotated[
        list[_Answered],
        BeforeValidator(_blocks("text", "tool_use", "thinking", "redacted_thinking"), str | list[_Answered]),
    ] = Field(default_factory=list)


class SystemMessage(BaseModel):
    """Instructions within the conversation."""

    model_config = _STRICT

    role: Literal["system"]
    content: Texts


_CLIENT_TYPE: dict[str, Any] = {"properties": {"type": {"enum": ["custom", None]}}}


class ClientTool(BaseModel):
    """A function that the model may call. Further keys are ignored."""

    model_config = ConfigDict(extra="ignore", strict=True)

    type: Literal["custom"] | None = None
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,128}$")]
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None


class ServerTool(BaseModel):
    """A tool of Anthropic's servers, or one whose schema its models know: no model calls it here."""

    model_config = ConfigDict(extra="ignore", strict=True, json_schema_extra={"not": _CLIENT_TYPE})

    type: str


def _client_tools(tools: object) -> object:
    """Without server tools, which the answer may do without. Refused if there is no other tool."""
    if not isinstance(tools, list):
        return tools
    kept = [tool for tool in tools if not _is_server_tool(tool)]
    if tools and not kept:
        kind = _kinds(tools)[0]
        raise ValueError(f"tools of type `{kind:.40}` do not run here: send tools with an `input_schema`")
    return kept


def _is_server_tool(tool: object) -> bool:
    return any(kind != "custom" for kind in _kinds([tool]))


Tools = Annotated[list[ClientTool], Field(max_length=api.MAX_TOOLS)]
_AnyTools = Annotated[  # one of them is the client's
    list[ClientTool | ServerTool],
    Field(
        max_length=api.MAX_TOOLS, json_schema_extra={"anyOf": [{"maxItems": 0}, {"contains": _CLIENT_TYPE}]}
    ),
]


class ToolChoice(BaseModel):
    """Calls: any number (`auto`), at least one (`any`), the one named (`tool`), or none."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        json_schema_extra={
            "anyOf": [
                {"properties": {"type": {"enum": ["auto", "any", "none"]}}},
                {"properties": {"name": {"type": "string"}}, "required": ["name"]},
            ]
        },
    )

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


@api.Extensible
class ThinkingConfig(TypedDict):
    """Variables for the chat template; `budget_tokens` has no effect."""

    type: Literal["enabled", "disabled", "adaptive"]


@api.Extensible
class Metadata(TypedDict):
    """`user_id` is the `user` of the OpenAI API."""

    user_id: NotRequired[str | None]


@api.Extensible
class JsonFormat(TypedDict):
    """JSON that follows the schema."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(BaseModel):
    """The form of the answer."""

    model_config = _STRICT

    format: JsonFormat | None = None
    effort: Any = Field(None, description=api.NO_EFFECT)
    task_budget: Any = Field(None, description=api.NO_EFFECT)


@api.Extensible
class AllThinking(TypedDict):
    """All of it."""

    type: Literal["all"]


@api.Extensible
class ClearThinking(TypedDict):
    """Keeps all reasoning of earlier answers, as it is without this edit."""

    type: Literal["clear_thinking_20251015"]
    keep: Literal["all"] | AllThinking


class ContextManagement(BaseModel):
    """Edits of the conversation; only one that changes nothing is accepted."""

    model_config = _STRICT

    edits: Annotated[
        list[ClearThinking],
        BeforeValidator(_blocks("clear_thinking_20251015", what="edits"), list[ClearThinking]),
    ] = Field(default_factory=list)


class CountTokensRequest(BaseModel):
    """A prompt to count."""

    model_config = _STRICT
    _whole = api.whole_numbers()

    model: str | None = Field(None, min_length=1, description="may be left out if only one is served")
    messages: list[Annotated[UserMessage | AssistantMessage | SystemMessage, Field(discriminator="role")]] = (
        Field(min_length=1, max_length=api.MAX_MESSAGES, description="the conversation so far")
    )
    system: Texts = Field(default_factory=list, description="instructions")
    tools: Annotated[Tools, BeforeValidator(_client_tools, _AnyTools)] = Field(
        default_factory=list, description="functions that the model may call"
    )
    tool_choice: ToolChoice | None = Field(None, description="whether the model calls functions")
    thinking: ThinkingConfig | None = Field(
        None, description="reasoning, if the chat template can turn it on and off"
    )
    output_config: OutputConfig | None = Field(None, description="the form of the answer")
    output_format: JsonFormat | None = Field(None, description="the old name of `output_config.format`")
    context_management: ContextManagement | None = Field(None, description="edits that change nothing")
    mcp_servers: Annotated[Any, api.only([])] = Field(None, description=api.NOT_YET)
    cache_control: Any = Field(None, description="`ttl`: the blocks of the session stay so long, if they can")
    speed: Any = Field(None, description=api.NO_EFFECT)
    billing_policy: Any = Field(None, description=api.NO_EFFECT)
    user_profile_id: Any = Field(None, description=api.NO_EFFECT)
    workspace_id: Any = Field(None, description=api.NO_EFFECT)


class MessagesRequest(CountTokensRequest, SessionFields):
    """A conversation to answer."""

    max_tokens: int = Field(ge=1, description="most tokens of the answer")
    stop_sequences: api.StopStrings = Field(default_factory=list, description="texts that end the answer")
    temperature: Annotated[float, api.OF_MODEL] = Field(1.0, ge=0, le=2, description="0 is greedy")
    top_p: Annotated[float, api.OF_MODEL] = Field(
        1.0, gt=0, le=1, description="total probability of the tokens to draw from"
    )
    top_k: Annotated[int, api.OF_MODEL] = Field(
        0, ge=0, le=api.MAX_TOP_K, description="tokens to draw from; 0: all"
    )
    stream: bool = Field(False, description="send the answer as events")
    metadata: Metadata = Field(default_factory=Metadata, description="who asks")
    service_tier: Any = Field(None, description=api.NO_EFFECT)
    inference_geo: Any = Field(None, description=api.NO_EFFECT)
    diagnostics: Any = Field(None, description=api.NO_EFFECT)
    fallbacks: Any = Field(None, description=f"{api.NO_EFFECT}: no request is refused for its content")
    fallback_credit_token: Any = Field(None, description=api.NO_EFFECT)


def read(fields: Body, kind: type[CountTokensRequest] = MessagesRequest) -> Body:
    """The fields of a chat of the OpenAI API. Raises BadRequest."""
    asked = valid(kind, api.present(fields, "input", "input_schema", "schema"))
    body: Body = {name: fields[name] for name in _SAME if name in fields}
    body["messages"] = _turns(asked)
    if asked.tools:
        body["tools"] = [_tool(tool) for tool in asked.tools]
    if asked.messages[-1].role == "assistant":  # the answer continues it
        body |= {"continue_final_message": True, "add_generation_prompt": False}
    if asked.tool_choice is not None:
        choice = asked.tool_choice
        if choice.type == "tool" and choice.name is None:
            raise BadRequest("`tool_choice.name`: the name of a tool is expected", param="tool_choice")
        named = {"type": "function", "function": {"name": choice.name}}
        body["tool_choice"] = _CHOICES.get(choice.type, named)
        if choice.disable_parallel_tool_use:
            body["parallel_tool_calls"] = False
    form = asked.output_config.format if asked.output_config is not None else None
    if (form := form or asked.output_format) is not None:
        named = {"name": "answer", "schema": form["schema"]}
        body["response_format"] = {"type": "json_schema", "json_schema": named}
    if asked.thinking is not None:
        body |= thinking(asked.thinking["type"] != "disabled")
    if isinstance(asked, MessagesRequest):
        body |= {"stop": asked.stop_sequences, "user": asked.metadata.get("user_id") or ""}
        body |= {name: fields[name] for name in SessionFields.model_fields if fields.get(name) is not None}
        body |= _kept(fields)
        if asked.stream:
            body["stream_options"] = {"include_usage": True}
    return body


def _kept(fields: Body) -> Body:
    """The longest `ttl` of a `cache_control`: of the request, a tool, a block. Raises BadRequest."""
    longest = 0
    for path, marked in _marked(fields):
        control = marked.get("cache_control")
        ttl = control.get("ttl") if isinstance(control, dict) else None
        if ttl is None:
            continue
        if not (seconds := seconds_of(ttl)):
            raise bad_hint(f"{path}cache_control.ttl", A_TIME)
        longest = max(longest, seconds)
    return {"prompt_cache_retention": f"{longest}s"} if longest else {}


def _marked(fields: Body) -> Iterator[tuple[str, Body]]:
    """What may have a `cache_control`, with its path, in a valid request."""
    yield "", fields
    lists = {"tools": fields.get("tools"), "system": fields.get("system")}
    lists |= {f"messages.{i}.content": turn.get("content") for i, turn in enumerate(fields["messages"])}
    for path, listed in lists.items():
        if isinstance(listed, list):
            yield from ((f"{path}.{i}.", each) for i, each in enumerate(listed) if isinstance(each, dict))


def ignored(fields: Body, kind: type[CountTokensRequest] = MessagesRequest) -> list[str]:
    """The fields and tools of a valid request that change nothing."""
    left_out = [tool for tool in fields.get("tools", ()) if _is_server_tool(tool)]
    return idle_fields(fields, kind) + [f"tools.{tool.get('name') or tool['type']}" for tool in left_out]


def _turns(asked: CountTokensRequest) -> list[Body]:
    turns: list[Body] = [{"role": "system", "content": _text(asked.system)}] if asked.system else []
    for message in asked.messages:
        for turn in _results(message.content) + _messages_of(message.role, message.content):
            if turns and turns[-1]["role"] == turn["role"] != "tool":
                before = turns.pop()
                texts = [each["content"] for each in (before, turn) if each["content"]]
                calls = before.get("tool_calls", []) + turn.get("tool_calls", [])
                turn = {**before, **turn, "content": "\n".join(texts)} | (
                    {"tool_calls": calls} if calls else {}
                )
            turns.append(turn)
    return turns


def _results(content: Sequence[Mapping[str, Any]]) -> list[Body]:
    """The results of calls in a message, as messages."""
    return [
        {
            "role": "tool",
            "tool_call_id": block["tool_use_id"],
            "content": "Error: " * bool(block.get("is_error")) + _text(block.get("content") or ()),
        }
        for block in content
        if block["type"] == "tool_result"
    ]


def _messages_of(role: str, content: Sequence[Mapping[str, Any]]) -> list[Body]:
    """A message without its results of calls; none if it holds nothing else."""
    kept = [block for block in content if block["type"] != "tool_result"]
    if content and not kept:
        return []
    turn: Body = {"role": role, "content": _text(kept)}
    if reasoning := "\n".join(block["thinking"] for block in kept if block["type"] == "thinking"):
        turn["reasoning_content"] = reasoning
    calls = [
        {
            "id": block["id"],
            "type": "function",
            "function": {"name": block["name"], "arguments": block.get("input") or {}},
        }
        for block in kept
        if block["type"] == "tool_use"
    ]
    return [{**turn, "tool_calls": calls}] if calls else [turn]


def _text(content: Sequence[Mapping[str, Any]]) -> str:
    return "\n".join(block["text"] for block in content if block["type"] == "text")


def _tool(tool: ClientTool) -> Body:
    about: Body = {"description": tool.description} if tool.description else {}
    strict = {"strict": True} if tool.strict else {}
    function = {"name": tool.name, **about, "parameters": tool.input_schema, **strict}
    return {"type": "function", "function": function}


def message(call: Call, natives: Sequence[Body], echoed: Sequence[str]) -> Body:
    """The answer to a plain request."""
    whole = answer(call, natives, echoed)
    (choice,) = whole["choices"]
    answered = choice["message"]
    content: list[Body] = []
    if reasoning := answered.get("reasoning_content"):
        content.append({"type": "thinking", "thinking": reasoning, "signature": ""})
    if answered["content"]:
        content.append({"type": "text", "text": answered["content"]})
    content += [
        {"type": "tool_use", "id": each["id"], "name": each["function"]["name"], "input": _input(each)}
        for each in answered.get("tool_calls", ())
    ]
    return {**_message(whole, content), **_ending(choice), "usage": _usage(whole["usage"])}


def _message(whole: Body, content: list[Body]) -> Body:
    return {
        "id": whole["id"],
        "type": "message",
        "role": "assistant",
        "model": whole["model"],
        "content": content,
    }


def _input(call: Body) -> Body:
    """The arguments of a call; none if `max_tokens` has cut them."""
    try:
        value = json.loads(call["function"]["arguments"])
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _ending(choice: Body) -> Body:
    stop = choice.get("stop_reason")
    reason = _STOPS[choice["finish_reason"]] if stop is None else "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": stop}


def _usage(usage: Body) -> Body:
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"] - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage["completion_tokens"],
    }


class MessageEvents(Chunks):
    """The events of one stream, from the chunks of the OpenAI API."""

    ping: ClassVar = b'event: ping\ndata: {"type":"ping"}\n\n'

    def __init__(self, call: Call, echoed: Sequence[str] = ()) -> None:
        self._chunks = ChunkBuilder(call, echoed)
        self._prompt_tokens = 0
        self._started = False
        self._open = ""  # type of the open block
        self._index = -1  # of the newest block
        self._ending: Body = {}

    def convert(self, prompt: int, frame: Body) -> list[str]:
        """The events for a frame of the native stream. Raises EngineError."""
        if frame["type"] == "accepted":
            self._prompt_tokens = frame.get("prompt_tokens", 0)
        chunks = self._chunks.convert(prompt, frame)
        return [event for chunk in chunks for event in self._events(json.loads(chunk))]

    def end(self, error: Body | None) -> bytes:
        """An event with the error that ended the stream."""
        return b"" if error is None else self.write([_event(**error)])

    def _events(self, chunk: Body) -> Iterator[str]:
        if not self._started:
            self._started = True
            usage = {"input_tokens": self._prompt_tokens, "output_tokens": 0}
            begun = {**_message(chunk, []), "stop_reason": None, "stop_sequence": None, "usage": usage}
            yield _event("message_start", message=begun)
            yield _event("ping")
        for choice in chunk["choices"]:
            delta = choice["delta"]
            if text := delta.get("reasoning_content"):
                yield from self._begin("thinking", thinking="", signature="")
                yield self._delta("thinking_delta", thinking=text)
            if text := delta.get("content"):
                yield from self._begin("text", text="")
                yield self._delta("text_delta", text=text)
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    yield from self._close()
                    yield from self._begin("tool_use", id=call["id"], name=call["function"]["name"], input={})
                if arguments := call["function"].get("arguments"):
                    yield self._delta("input_json_delta", partial_json=arguments)
            if choice["finish_reason"] is not None:
                self._ending = _ending(choice)
        if not chunk["choices"]:
            yield from self._close()
            yield _event("message_delta", delta=self._ending, usage=_usage(chunk["usage"]))
            yield _event("message_stop")

    def _begin(self, kind: str, **content: Any) -> Iterator[str]:
        """Start a block, unless one of this type is open."""
        if self._open != kind:
            yield from self._close()
            self._open = kind
            self._index += 1
            block = {"type": kind, **content}
            yield _event("content_block_start", index=self._index, content_block=block)

    def _delta(self, kind: str, **content: str) -> str:
        return _event("content_block_delta", index=self._index, delta={"type": kind, **content})

    def _close(self) -> Iterator[str]:
        if self._open:
            self._open = ""
            yield _event("content_block_stop", index=self._index)


def _event(type: str, **fields: Any) -> str:
    data = to_text({"type": type, **fields})
    return f"event: {type}\ndata: {data}\n\n"


def error_body(error: HeadraceError, request_id: str = "") -> Body:
    """Anthropic's error object: https://docs.claude.com/en/api/errors."""
    status = error_status(error)
    kind = _ERRORS.get(status, "invalid_request_error" if status < 500 else "api_error")
    fields = {"type": kind, "message": _worded(error.message)}
    return {"type": "error", "error": fields, "request_id": request_id}


def _worded(message: str) -> str:
    """An error over the context, first in Anthropic's words: by their numbers clients shorten a conversation
    or ask for fewer tokens."""
    if not (found := _OVER_CONTEXT.match(message)):
        return message
    context, prompt, unit, asked = found.groups()
    if asked:
        head = f"input length and `max_tokens` exceed context limit: {prompt} + {asked} > {context}"
    else:
        head = f"prompt is too long: {prompt} {unit} > {context} tokens maximum"
    return f"{head}; {message[found.end() :]}"


MESSAGES = Api(message, MessageEvents, read, ignored=ignored)
COUNT = Api(read=partial(read, kind=CountTokensRequest), ignored=partial(ignored, kind=CountTokensRequest))


async def count_tokens(endpoints: Endpoints, request: Request) -> Response:
    """The size of a prompt."""
    return sent({"input_tokens": (await endpoints.tokenized(request, COUNT))["count"]})


def build() -> doc.Part:
    """Anthropic's API."""
    post = partial(doc.post, api="Anthropic")
    whole = post("Messages", "answer a conversation (Anthropic)", doc.GENERATING, stream=doc.EVENTS)
    count = post("CountTokens", "the size of a prompt (Anthropic)", doc.ASKING)
    lines = (
        doc.Operation("POST", "/v1/messages", partial(Endpoints.generate, api=MESSAGES), whole),
        doc.Operation("POST", "/v1/messages/count_tokens", count_tokens, count),
    )
    counts = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens", "output_tokens")
    usage = doc.object_of(**dict.fromkeys(counts, doc.COUNT))
    error = doc.object_of(type=doc.TEXT, message=doc.TEXT)
    schemas = {
        "MessagesAnswer": doc.object_of(
            id=doc.TEXT, type=doc.one_of("message"), role=doc.one_of("assistant"), model=doc.TEXT,
            content=doc.list_of({"type": "object"}),
            stop_reason=doc.one_of("end_turn", "max_tokens", "stop_sequence", "tool_use"),
            stop_sequence=doc.WORD, usage=usage,
        ),
        "CountTokensAnswer": doc.object_of(input_tokens=doc.COUNT),
        "AnthropicError": doc.object_of(type=doc.one_of("error"), error=error, request_id=doc.TEXT),
    }  # fmt: skip
    return doc.Part(lines, schemas, [MessagesRequest, CountTokensRequest], error_body=error_body)
