"""Requests of the Responses API as chats of the OpenAI API. Pure.

https://platform.openai.com/docs/api-reference/responses/create defines the fields. Items of `input` become
messages: calls of functions belong to the assistant's message before them, reasoning to the one after it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, NotRequired, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic.json_schema import SkipJsonSchema
from typing_extensions import TypedDict

from shared import api
from shared.errors import BadRequest
from shared.openai.call import Kept, thinking
from shared.session_hints import Retention, SessionFields

Body = dict[str, Any]

PATH = "/v1/responses"
LOGPROBS = "message.output_text.logprobs"  # the value of `include` that asks for them
MAX_METADATA, MAX_KEY_CHARS, MAX_VALUE_CHARS = 16, 64, 512  # as in OpenAI's API
# Fields that the chat has under the same name.
_SAME = (
    *api.SamplingFields.model_fields, *SessionFields.model_fields, "parallel_tool_calls", "user",
    "prompt_cache_key", "prompt_cache_retention", "stream", "seed", "stop", "ignore_eos", "min_tokens",
    "slo_class", "timeout_s", "chat_template_kwargs", "durable", "webhook",
)  # fmt: skip
_STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
_OPEN = ConfigDict(extra="ignore", strict=True)  # clients send items back with fields that are not for us
_AS_GIVEN = ("parameters", "schema", "metadata", "chat_template_kwargs", "nvext")  # null is a value there
_IDLE = Field(None, description=api.NO_EFFECT)
_REFUSED = Field(None, description=api.NOT_YET)


def _listed(what: str, kinds: Sequence[str], text: Callable[[str], Body], untyped: str = "") -> Any:
    """A validator of a list: a text becomes one entry, an entry without a type gets `untyped`, and one of
    another type is refused by its name."""

    def check(value: object) -> object:
        if isinstance(value, str):
            return [text(value)]
        if not isinstance(value, list):
            return value
        found = []
        for entry in value:
            if untyped and isinstance(entry, dict) and "type" not in entry:
                entry = {**entry, "type": untyped}
            kind = entry.get("type") if isinstance(entry, dict) else None
            if isinstance(kind, str) and kind not in kinds:
                raise ValueError(
                    f"{what} of type `{kind:.40}` are not supported here: send {', '.join(kinds)}"
                )
            found.append(entry)
        return found

    return check


@api.Extensible
class Text(TypedDict):
    """A text of the user or of an earlier answer."""

    type: Literal["input_text", "output_text", "text"]
    text: str


@api.Extensible
class Refusal(TypedDict):
    """A text, too."""

    type: Literal["refusal"]
    refusal: str


_Part = Annotated[Text | Refusal, Field(discriminator="type")]
_parts = _listed(
    "parts",
    ("input_text", "output_text", "text", "refusal"),
    lambda text: {"type": "input_text", "text": text},
)
Content = Annotated[list[_Part], BeforeValidator(_parts, str | list[_Part])]


class Message(BaseModel):
    """One message of the conversation."""

    model_config = ConfigDict(extra="ignore", strict=True, json_schema_extra=api.CONTENT_RULE)

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Content = Field(default_factory=list)

    @model_validator(mode="after")
    def _has_content(self) -> Self:
        if self.role not in api.WITHOUT_TEXT and "content" not in self.model_fields_set:
            raise ValueError("`content` is missing: a text is expected, or a list of parts")
        return self


class FunctionCall(BaseModel):
    """A call that the model has made."""

    model_config = _OPEN

    type: Literal["function_call"]
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str = ""


class FunctionCallOutput(BaseModel):
    """What a call has returned."""

    model_config = _OPEN

    type: Literal["function_call_output"]
    call_id: str
    output: Content = Field(default_factory=list)


@api.Extensible
class ReasoningText(TypedDict):
    """A part of the reasoning of an answer."""

    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(BaseModel):
    """The reasoning of an earlier answer; the chat template decides whether the model sees it."""

    model_config = _OPEN

    type: Literal["reasoning"]
    content: list[ReasoningText] | None = None


_Item = Annotated[Message | FunctionCall | FunctionCallOutput | ReasoningItem, Field(discriminator="type")]
_items = _listed(
    "items",
    ("message", "function_call", "function_call_output", "reasoning"),
    lambda text: {"type": "message", "role": "user", "content": text},
    untyped="message",
)


Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
_FUNCTIONS = ["function", "namespace"]
_A_FUNCTION: dict[str, Any] = {"contains": {"properties": {"type": {"const": "function"}}}}
_NO_FUNCTION: dict[str, Any] = {"not": {"properties": {"type": {"enum": _FUNCTIONS}}}}


class OtherTool(BaseModel):
    """A tool of OpenAI's servers or of the client itself: no model calls it here."""

    model_config = ConfigDict(extra="ignore", strict=True, json_schema_extra=_NO_FUNCTION)

    type: str


class FunctionTool(BaseModel):
    """A function that the model may call. Its arguments always follow `parameters`."""

    model_config = _OPEN

    type: Literal["function"]
    name: Name
    namespace: SkipJsonSchema[Name | None] = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamespaceTool(BaseModel):
    """Functions under a common name. The model calls them as `<namespace>__<name>`, and answers name both."""

    model_config = _OPEN

    type: Literal["namespace"]
    name: Name
    tools: Annotated[list[FunctionTool | OtherTool], Field(json_schema_extra=_A_FUNCTION)]


_AnyTools = Annotated[  # one of them a function
    list[FunctionTool | NamespaceTool | OtherTool],
    Field(
        max_length=api.MAX_TOOLS,
        json_schema_extra={
            "anyOf": [{"maxItems": 0}, {"contains": {"properties": {"type": {"enum": _FUNCTIONS}}}}]
        },
    ),
]


def _functions(tools: object) -> object:
    """The functions, also those of namespaces, without other tools. Refused if there is none."""
    if not isinstance(tools, list):
        return tools
    kept = [each for tool in tools for each in _of_namespace(tool) if not _is_other(each)]
    if tools and not kept:
        kind = next((tool["type"] for tool in tools if _is_other(tool)), "namespace")
        raise ValueError(f"tools of type `{kind:.40}` do not run here: send functions")
    return kept


def _of_namespace(tool: Any) -> list[Any]:
    if (
        not isinstance(tool, dict)
        or tool.get("type") != "namespace"
        or not isinstance(tool.get("tools"), list)
    ):
        return [tool]
    return [{**each, "namespace": tool.get("name", "")} for each in tool["tools"] if isinstance(each, dict)]


def _is_other(tool: Any) -> bool:
    kind = tool.get("type") if isinstance(tool, dict) else None
    return isinstance(kind, str) and kind not in ("function", "namespace")


def left_out(fields: Body) -> list[str]:
    """The tools of a valid request that are no functions, by name or type."""
    tools = [each for tool in fields.get("tools", ()) for each in _of_namespace(tool)]
    return [f"tools.{tool.get('name') or tool['type']}" for tool in tools if _is_other(tool)]


def called(name: str, namespace: str | None) -> str:
    """The name by which the model calls a function."""
    return f"{namespace}__{name}" if namespace else name


@api.Extensible
class NamedFunction(TypedDict):
    """This function."""

    type: Literal["function"]
    name: str
    namespace: NotRequired[str]


@api.Extensible
class AllowedFunctions(TypedDict):
    """Only these functions."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedFunction], Field(min_length=1)]


@api.Extensible
class PlainForm(TypedDict):
    """Any text, or a JSON object."""

    type: Literal["text", "json_object"]


@api.Extensible
class SchemaForm(TypedDict):
    """JSON that follows the schema."""

    type: Literal["json_schema"]
    name: NotRequired[str]
    schema: dict[str, Any]


class TextConfig(BaseModel):
    """The form of the answer."""

    model_config = _STRICT

    format: Annotated[PlainForm | SchemaForm, Field(discriminator="type")] | None = None
    verbosity: Any = _IDLE


class Reasoning(BaseModel):
    """Variables for the chat template."""

    model_config = _STRICT

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    summary: Any = _IDLE
    generate_summary: Any = _IDLE


Metadata = Annotated[
    dict[Annotated[str, Field(max_length=MAX_KEY_CHARS)], Annotated[str, Field(max_length=MAX_VALUE_CHARS)]],
    Field(max_length=MAX_METADATA),
]


class ResponseRequest(api.SamplingFields, SessionFields):
    """A conversation to answer."""

    model_config = _STRICT
    _whole = api.whole_numbers()

    model: str | None = Field(None, min_length=1, description="may be left out if only one is served")
    input: Annotated[
        Annotated[list[_Item], Field(min_length=1, max_length=api.MAX_MESSAGES)],
        BeforeValidator(
            _items, str | Annotated[list[_Item], Field(min_length=1, max_length=api.MAX_MESSAGES)]
        ),
    ] = Field(description="a text of the user, or the items of the conversation")
    instructions: str | None = Field(None, description="a system message, of this answer alone")
    previous_response_id: Annotated[str, Field(pattern=api.REQUEST_ID)] | None = Field(
        None, description="the conversation continues that of a stored response"
    )
    max_output_tokens: int | None = Field(None, ge=1, description="most tokens of the answer")
    tools: Annotated[
        Annotated[list[FunctionTool], Field(max_length=api.MAX_TOOLS)], BeforeValidator(_functions, _AnyTools)
    ] = Field(default_factory=list, description="functions that the model may call")
    tool_choice: Annotated[
        Literal["none", "auto", "required"] | NamedFunction | AllowedFunctions,
        api.as_given(
            'none, auto, required, {"type": "function", "name": …} of one of `tools`, or {"type": '
            '"allowed_tools", "mode": "auto" or "required", "tools": [{"type": "function", "name": …}]}'
        ),
    ] = Field("auto", description="calls: none, any number, at least one, this function, or of these alone")
    parallel_tool_calls: bool = Field(True, description="false: at most one call")
    text: TextConfig = Field(default_factory=TextConfig, description="the form of the answer")
    reasoning: Reasoning = Field(
        default_factory=Reasoning, description="reasoning, if the chat template can turn it on and off"
    )
    include: list[str] = Field(
        default_factory=list, description=f"`{LOGPROBS}`: log probabilities; others are without effect"
    )
    top_logprobs: int = Field(
        0, ge=0, le=api.MAX_LOGPROBS, description="number of likeliest alternatives for each token"
    )
    stream: bool = Field(False, description="send the answer as events")
    background: bool = Field(False, description="answer at once, and keep the request until it is answered")
    webhook: str | None = Field(
        None, description="with `background`: a URL that gets a signed event when the response has ended"
    )
    store: bool = Field(True, description="keep the response for a day, where a keeper runs")
    metadata: Metadata = Field(default_factory=dict, description="returned as it is")
    user: str = Field("", description=api.NO_EFFECT)
    truncation: Literal["auto", "disabled"] = Field("disabled", description=api.NO_EFFECT)
    service_tier: Any = _IDLE
    safety_identifier: Any = _IDLE
    prompt_cache_key: str = Field("", description="requests with an equal one share a prefix cache")
    prompt_cache_retention: Retention | None = Field(None, description=api.KEEPS)
    prompt_cache_options: Any = _IDLE
    client_metadata: Any = _IDLE
    max_tool_calls: Any = _IDLE
    stream_options: Any = _IDLE
    conversation: Annotated[Any, api.only()] = _REFUSED
    prompt: Annotated[Any, api.only()] = _REFUSED
    context_management: Annotated[Any, api.only([])] = _REFUSED
    # of Headrace, as in a chat
    seed: int | None = Field(None, ge=-(2**63), lt=2**64, description="random if absent")
    stop: api.Stop = Field(default_factory=list, description="texts that end an answer")
    ignore_eos: bool = Field(False, description="do not stop at the model's own end tokens")
    min_tokens: int = Field(0, ge=0, description="least tokens of an answer: until then nothing ends it")
    slo_class: api.SloClass = Field("standard", description="latency class: docs/design/scheduler.md")
    timeout_s: float | None = Field(None, gt=0, le=api.MAX_TIMEOUT_S, description="time limit, seconds")
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="variables for the template"
    )
    durable: Literal["tokens"] | None = Field(
        None, description="with `background`: it goes on after its last token kept (docs/durability.md)"
    )


def read(fields: Body) -> Body:
    """The fields of a chat of the OpenAI API, with `keep`: what the answer repeats. Raises BadRequest."""
    try:
        asked = ResponseRequest.model_validate(api.present(fields, *_AS_GIVEN))
    except ValidationError as error:
        raise api.bad_field(error) from error
    if asked.background and not asked.store:
        raise BadRequest("`background: true` and `store: false` exclude each other", param="store")
    if asked.webhook is not None and not asked.background:
        raise BadRequest("`webhook` is for `background: true` alone: leave it out", param="webhook")
    turns = _turns(asked.input)
    if not turns:
        raise BadRequest("`input` has no message: add one", param="input")
    system = [{"role": "system", "content": asked.instructions}] if asked.instructions else []
    body: Body = {"messages": [*system, *turns]}
    body |= {name: fields[name] for name in _SAME if name in fields}
    if asked.model:
        body["model"] = asked.model
    if asked.max_output_tokens is not None:
        body["max_completion_tokens"] = asked.max_output_tokens
    if asked.tools:
        choice = _choice(asked.tool_choice, _names(asked.tools))
        body |= {"tools": [_tool(tool) for tool in asked.tools], "tool_choice": choice}
    elif isinstance(asked.tool_choice, dict) or asked.tool_choice == "required":
        raise BadRequest("`tool_choice`: a function of one of `tools` is expected", param="tool_choice")
    if asked.top_logprobs or LOGPROBS in asked.include:
        body |= {"logprobs": True, "top_logprobs": asked.top_logprobs}
    if (form := asked.text.format) is not None and form["type"] == "json_schema":
        named = {"name": "answer", "schema": form["schema"]}
        body["response_format"] = {"type": "json_schema", "json_schema": named}
    elif form is not None and form["type"] == "json_object":
        body["response_format"] = {"type": "json_object"}
    if (effort := asked.reasoning.effort) is not None:
        variables = {**thinking(effort != "none")["chat_template_kwargs"], **asked.chat_template_kwargs}
        body |= {"reasoning_effort": effort, "chat_template_kwargs": variables}
    if asked.stream:
        body["stream_options"] = {"include_usage": True}
    return {**body, "keep": Kept({"path": PATH, "response": _repeated(asked, fields)})}


def _names(tools: Sequence[FunctionTool]) -> dict[str, str]:
    """The names by which the model calls functions, also by their names within a namespace."""
    inside = {tool.name: called(tool.name, tool.namespace) for tool in reversed(tools)}
    return inside | {name: name for name in (called(tool.name, tool.namespace) for tool in tools)}


def _choice(asked: str | NamedFunction | AllowedFunctions, names: Mapping[str, str]) -> str | Body:
    if isinstance(asked, str):
        return asked
    if asked["type"] == "function":
        name = called(asked["name"], asked.get("namespace"))
        return {"type": "function", "function": {"name": names.get(name, name)}}
    allowed = {"mode": asked["mode"], "tools": [_choice(tool, names) for tool in asked["tools"]]}
    return {"type": "allowed_tools", "allowed_tools": allowed}


def _repeated(asked: ResponseRequest, fields: Body) -> Body:
    """The fields of the request that its answer has, too."""
    return {
        "background": asked.background,
        "instructions": asked.instructions,
        "max_output_tokens": asked.max_output_tokens,
        "metadata": asked.metadata,
        "parallel_tool_calls": asked.parallel_tool_calls,
        "previous_response_id": asked.previous_response_id,
        "reasoning": {"effort": asked.reasoning.effort, "summary": None},
        "service_tier": "default",
        "store": asked.store,
        "temperature": fields.get("temperature"),  # without one the model's, which a gateway does not have
        "text": {"format": asked.text.format or {"type": "text"}},
        "tool_choice": asked.tool_choice,
        "tools": [tool.model_dump(exclude=None if tool.namespace else {"namespace"}) for tool in asked.tools],
        "top_logprobs": asked.top_logprobs,
        "top_p": fields.get("top_p"),
        "truncation": asked.truncation,
        "user": fields.get("user"),
    }


def _turns(items: Sequence[BaseModel]) -> list[Body]:
    turns: list[Body] = []
    reasoning: list[str] = []

    def assistant(**more: Any) -> None:
        thought = {"reasoning_content": "\n".join(reasoning)} if reasoning else {}
        turns.append({"role": "assistant", **more, **thought})
        reasoning.clear()

    for item in items:
        if isinstance(item, ReasoningItem):
            reasoning += [part["text"] for part in item.content or ()]
        elif isinstance(item, FunctionCall):
            if not turns or turns[-1]["role"] != "assistant" or reasoning:
                assistant(content="")
            function = {"name": called(item.name, item.namespace), "arguments": item.arguments}
            call = {"id": item.call_id, "type": "function", "function": function}
            turns[-1].setdefault("tool_calls", []).append(call)
        elif isinstance(item, FunctionCallOutput):
            turns.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})
        elif isinstance(item, Message) and item.role == "assistant":
            assistant(content=_text(item.content))
        elif isinstance(item, Message):
            turns.append({"role": item.role, "content": _text(item.content)})
    return turns


def _text(content: Sequence[Mapping[str, Any]]) -> str:
    return "\n".join(part.get("text") or part.get("refusal", "") for part in content)


def _tool(tool: FunctionTool) -> Body:
    about = {"description": tool.description} if tool.description else {}
    schema: Body = {"parameters": tool.parameters} if tool.parameters is not None else {}
    strict = {"strict": True} if tool.strict else {}
    function = {"name": called(tool.name, tool.namespace), **about, **schema, **strict}
    return {"type": "function", "function": function}
