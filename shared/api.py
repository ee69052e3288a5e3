"""The models of the public request: OpenAI's fields and a few of Headrace's, with types, bounds and meanings.

This is the only definition of a field: the tokenizer validates requests with these models, and the gateway's
OpenAPI document is their JSON schema. Wrong types, values out of bounds and unknown fields are refused. A
null field counts as absent: readers of a body drop it. docs/reference/limits.md lists the bounds.

Reads a JSON body from a client: UTF-8, without lone surrogates.

JSON may spell half a character (`\ud800`), and Python keeps it in a string. Writing that string to a header
or a frame would fail later, so the gateway and the tokenizer refuse it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, NotRequired

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
    WrapValidator,
    create_model,
    model_validator,
    with_config,
)
from pydantic.json_schema import SkipJsonSchema
from typing_extensions import TypedDict

from shared.codec import MAX_PROCESSORS
from shared.errors import BadRequest
from shared.session_hints import Retention, SessionFields

REQUEST_ID = r"^[A-Za-z0-9._:-]{1,128}$"
MAX_STOPS, MAX_STOP_CHARS, MAX_STOP_IDS = 16, 256, 64
MAX_BIASES, MAX_CHOICES, MAX_LOGPROBS, MAX_MESSAGES, MAX_TOOLS = 1024, 64, 20, 4096, 512
MAX_TIMEOUT_S = 86_400
MIN_REPETITION_PENALTY = 0.01  # logits are divided by it: a far smaller one gives infinity in float32
MAX_TOP_K = 2**31 - 1  # above any vocabulary, and an int32

RUN_HEADER = "Headrace-Run"  # of a message from a keeper: Tokenized.run of its request
MAX_RUN = 2**20 - 1

MAX_ERROR_CHARS = 400  # an error is also a header, and may quote long parts of a request

NOT_YET = "not supported yet"
KEEPS = "a wish: the blocks of the session stay so long: docs/guides/sessions.md"
NO_EFFECT = "accepted, without effect"
OLD = "the old name of vLLM for `structured_outputs` with "

Extensible = with_config(ConfigDict(extra="ignore", strict=True))  # unknown keys are ignored


def run_of(headers: Mapping[str, str]) -> int:
    """The number of a run, from the headers of a request; 0 without one."""
    given = headers.get(RUN_HEADER, "")
    return min(int(given), MAX_RUN) if re.fullmatch(r"[0-9]{1,9}", given) else 0


def bad_field(error: ValidationError) -> BadRequest:
    """The error for the first field that is wrong, with its name: of at most 80 characters, as an answer has
    less room than a request. A text that begins with a name is about the field of that name."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    path = ".".join(str(step) for step in first["loc"])[:80]
    text = first["msg"].removeprefix("Value error, ")[:MAX_ERROR_CHARS]
    if first["type"] == "extra_forbidden":
        return BadRequest(
            f"`{path}` is not a field of a request; leave it out", param=str(first["loc"][0])[:80]
        )
    if text.startswith("`"):
        return BadRequest(text, param=re.split(r"[`.\[]", text, maxsplit=2)[1])
    return BadRequest(f"`{path}`: {text}", param=str(first["loc"][0])[:80])


def only(*values: object) -> PlainValidator:
    """Accepts only these values, as JSON compares them: `1` is `1.0`, and `true` is not `1`."""

    def check(value: object, info: ValidationInfo) -> object:
        if not any(isinstance(value, bool) is isinstance(v, bool) and value == v for v in values):
            raise ValueError(f"`{info.field_name}` is {NOT_YET}; leave it out")
        return value

    # The type keeps [true] apart from [1], which are equal for the cache of `Annotated`.
    boolean = {"type": "boolean"} if all(isinstance(v, bool) for v in values) else {}
    return PlainValidator(check, Annotated[Any, WithJsonSchema({"enum": [*values], **boolean})])


def as_given(expected: str, *nothing: object) -> WrapValidator:
    """Checks a value and keeps it unchanged: chat templates print its keys in their order. Any error inside
    becomes "`expected` is expected". The values `nothing` become None."""

    def check(value: object, inner: Callable[[object], object]) -> object:
        if value in nothing:
            return None
        try:
            inner(value)
        except ValidationError:
            raise ValueError(f"{expected} is expected") from None
        return value

    return WrapValidator(check)


def _listed(stop: object) -> object:
    return [stop] if isinstance(stop, str) else stop


def _named(processor: object) -> object:
    return {"name": processor} if isinstance(processor, str) else processor


def _text_or_ids(prompt: object) -> object:
    if isinstance(prompt, str) or (isinstance(prompt, list) and all(type(token) is int for token in prompt)):
        return prompt
    raise ValueError("one text or one list of token ids is expected")


def present(value: Any, *kept: str) -> Any:
    """Without null fields at any depth: clients send them for absent values. The fields `kept` stay as
    they are."""
    if isinstance(value, dict):
        return {k: v if k in kept else present(v, *kept) for k, v in value.items() if v is not None}
    return [present(each, *kept) for each in value] if isinstance(value, list) else value


def _dumped(message: object) -> object:
    """A message of an earlier answer as clients dump it, with all its fields: null and an empty list mean
    none. The text of a refusal is its content."""
    if not isinstance(message, dict):
        return message
    held = {k: v for k, v in message.items() if v is not None and (v != [] or k == "content")}
    refusal = held.pop("refusal", None)
    return {**held, "content": refusal} if isinstance(refusal, str) and not held.get("content") else held


def _given(content: object, info: ValidationInfo) -> object:
    """A text, or text parts if there are several. The message of a role in WITHOUT_TEXT may have none: an
    empty text."""
    role = info.data.get("role")
    if content is None and role not in WITHOUT_TEXT:
        raise ValueError("a text is expected, or a list of parts of type `text`")
    if not isinstance(content, list):
        return "" if content is None else content
    texts = []
    for part in content:
        match part:
            case {"type": "text", "text": str(text)}:
                texts.append(text)
            case {"type": "refusal", "refusal": str(text)}:
                texts.append(text)
            case _:
                raise ValueError("only parts of type `text` are supported")
    return [{"type": "text", "text": text} for text in texts] if len(texts) > 1 else "".join(texts)


def joined(content: str | Sequence[Mapping[str, Any]] | None) -> str:
    """The text of a content: its parts of type `text`, joined by a line break, as vLLM and llama.cpp do."""
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part["text"] for part in content if "text" in part)


def _yes_or_number(value: object) -> object:
    if type(value) is bool or (type(value) is int and 0 <= value <= MAX_LOGPROBS):
        return value
    raise ValueError(f"a number from 0 to {MAX_LOGPROBS} is expected")


def _beside_logprobs(value: object, info: ValidationInfo) -> object:
    """`top_logprobs`; a number in `logprobs` replaces it."""
    asked = info.data.get("logprobs")
    if value and asked is False:
        raise ValueError("`top_logprobs` needs `logprobs` to be true")
    return asked if type(asked) is int else value


def _digits(key: object) -> object:
    if isinstance(key, str) and not re.fullmatch(BIAS_ID, key):  # int() takes " 5" and "1_0"
        raise ValueError("a token id in digits is expected")
    return key


def _one_rule(asked: StructuredOutputs) -> StructuredOutputs:
    if len(asked) != 1 or asked.get("json_object") is False:
        raise ValueError("one rule is expected")
    return asked


def _without_fractions(fields: object) -> object:
    if not isinstance(fields, dict):
        return fields
    return {k: int(v) if type(v) is float and v.is_integer() else v for k, v in fields.items()}


def whole_numbers() -> Any:
    """A model's validator: an integer may be written as `4.0`. JSON Schema counts that as an integer."""
    return model_validator(mode="before")(_without_fractions)


def _without_default(schema: dict[str, Any]) -> None:
    """A model may state another, which a client that fills in the document's defaults would override."""
    del schema["default"]


SloClass = Literal["interactive", "standard", "batch"]
TokenId = Annotated[int, Field(ge=0)]
Alternatives = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
OF_MODEL = Field(json_schema_extra=_without_default)
Repetition = Annotated[float, Field(ge=MIN_REPETITION_PENALTY, le=10)]
BIAS_ID = "^(0|[1-9][0-9]{0,8})$"
BiasId = Annotated[int, Field(strict=False), BeforeValidator(_digits)]  # JSON has text keys only
Bias = Annotated[float, Field(ge=-100, le=100)]
Biases = Annotated[
    dict[BiasId, Bias],
    Field(max_length=MAX_BIASES, json_schema_extra={"propertyNames": {"pattern": BIAS_ID}}),
]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
StopStrings = Annotated[list[StopString], Field(max_length=MAX_STOPS)]
SomeText, SomeIds = Annotated[str, Field(min_length=1)], Annotated[list[TokenId], Field(min_length=1)]
Choices = Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)]
StopIds = Annotated[list[TokenId], Field(max_length=MAX_STOP_IDS)]
Stop = Annotated[StopStrings, BeforeValidator(_listed, StopString | StopStrings)]


@Extensible
class TextPart(TypedDict):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


@Extensible
class RefusalPart(TypedDict):
    """A part of an assistant's content: a text, too."""

    type: Literal["refusal"]
    refusal: str


@Extensible
class Prediction(TypedDict):
    """A text that the answer is likely to repeat in large part."""

    type: Literal["content"]
    content: str | list[TextPart]


Role = Literal["system", "developer", "user", "assistant", "tool", "function"]
ASSISTANT = "assistant"
WITHOUT_TEXT = (ASSISTANT, "tool", "function")  # it may have calls alone; a function may return nothing
CONTENT_RULE: dict[str, Any] = {  # of `_given`
    "anyOf": [
        {"properties": {"role": {"enum": [*WITHOUT_TEXT]}}},
        {"properties": {"content": {"type": ["string", "array"]}}, "required": ["content"]},
    ]
}


class ChatMessage(BaseModel):
    """One message. Further fields (`name`, `tool_calls`, …) reach the chat template unchanged, but for null
    and empty lists."""

    model_config = ConfigDict(extra="allow", strict=True, json_schema_extra=CONTENT_RULE)
    _without_nulls = model_validator(mode="before")(_dumped)

    role: Role
    content: Annotated[
        str | list[TextPart], BeforeValidator(_given, str | list[TextPart | RefusalPart] | None)
    ] = Field(None, validate_default=True)

    @property
    def text(self) -> str:
        """Its text; parts are joined by a line break."""
        return joined(self.content)


class StreamOptions(BaseModel):
    """Options of a stream."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    include_usage: bool = Field(default=True, description="with the usage; over HTTP the default is false")
    continuous_usage_stats: bool = Field(
        default=False,
        description="over HTTP, with `include_usage`: each chunk has the usage of its choice so far",
    )
    include_obfuscation: bool = Field(default=False, description=NO_EFFECT)


class LogitsProcessor(BaseModel):
    """A logits processor of this fleet and its arguments."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: str
    args: dict[str, Any] = Field(default_factory=dict)


Processor = Annotated[LogitsProcessor, BeforeValidator(_named, str | LogitsProcessor)]


class PlainFormat(TypedDict):
    """The answer is any text, or a JSON object."""

    type: Literal["text", "json_object"]


@Extensible
class NamedSchema(TypedDict):
    """`name`, `strict` and `description` have no effect."""

    schema: Annotated[Any, Field(description="a JSON schema")]


class SchemaFormat(TypedDict):
    """The answer is JSON that follows the schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


@with_config(
    ConfigDict(extra="forbid", strict=True, json_schema_extra={"minProperties": 1, "maxProperties": 1})
)
class StructuredOutputs(TypedDict, total=False):
    """One rule for the answer."""

    json: Annotated[Any, Field(description="a JSON schema, or the text of one")]
    json_object: Annotated[bool, Field(json_schema_extra={"const": True})]
    regex: str
    choice: Choices
    grammar: Annotated[str, Field(description="EBNF with a rule `root`")]


@Extensible
class Function(TypedDict):
    """A function that the model may call."""

    # OpenAI allows 64 characters, and a namespace with as many before it.
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,130}$")]
    parameters: NotRequired[Annotated[Any, Field(description="the JSON schema of its arguments")]]


@Extensible
class Tool(TypedDict):
    """A function in OpenAI's form."""

    type: Literal["function"]
    function: Function


@Extensible
class AllowedTools(TypedDict):
    """Some of `tools`, and whether the model must call one."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[Tool], Field(min_length=1)]


@Extensible
class AllowedChoice(TypedDict):
    """Only these functions."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


NOTHING = ("", {"type": "text"})  # values of clients for "no structured output"

# Fields of OpenAI, vLLM and llama.cpp's server that change no answer here.
IGNORED = (
    "metadata", "store", "service_tier", "safety_identifier",
    "verbosity", "spaces_between_special_tokens", "kv_hints", "agent_hint",
    "guided_decoding_backend",
    "cache_prompt", "id_slot", "n_keep", "n_discard", "dry_allowed_length", "dry_base", "dry_penalty_last_n",
    "dry_sequence_breakers", "dynatemp_exponent", "mirostat_eta", "mirostat_tau", "xtc_threshold",
)  # fmt: skip
# Fields that may be sent with the values that turn them off.
UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "functions": ([],), "function_call": ("none", "auto"), "echo": (False,),
    "suffix": ("",), "best_of": (1,), "modalities": (["text"],), "audio": (None,),
    "skip_special_tokens": (True,), "use_beam_search": (False,), "length_penalty": (1,), "priority": (0,),
    "early_stopping": (False,), "bad_words": ([],), "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "return_tokens": (False,), "return_progress": (False,), "timings_per_token": (False,),
    "post_sampling_probs": (False,), "n_probs": (0,), "min_keep": (0, 1), "n_indent": (0,),
    "t_max_predict_ms": (0, -1), "lora": ([],), "repeat_penalty": (1,), "repeat_last_n": (-1,),
    "typical_p": (1,), "tfs_z": (1,), "top_n_sigma": (-1,), "mirostat": (0,), "dynatemp_range": (0,),
    "xtc_probability": (0,), "dry_multiplier": (0,),
}  # fmt: skip
_without_effect: dict[str, Any] = {
    **{name: (Any, Field(None, description=NO_EFFECT)) for name in IGNORED},
    **{
        name: (Annotated[Any, only(*off)], Field(None, description=NOT_YET))
        for name, off in UNSUPPORTED.items()
    },
}
_WithoutEffect = create_model("_WithoutEffect", **_without_effect)


class SamplingFields(BaseModel):
    """The numbers of shared.messages.Sampling: every API has them."""

    temperature: Annotated[float, OF_MODEL] = Field(
        1.0, ge=0, le=2, description="0 is greedy; default: the model's, else 1"
    )
    top_p: Annotated[float, OF_MODEL] = Field(
        1.0, gt=0, le=1, description="total probability of the tokens to draw from"
    )
    top_k: Annotated[int, OF_MODEL] = Field(
        0, ge=-1, le=MAX_TOP_K, description="tokens to draw from; 0 and -1: all"
    )
    min_p: Annotated[float, OF_MODEL] = Field(
        0.0, ge=0, le=1, description="least probability, as a share of the greatest"
    )
    presence_penalty: Penalty = Field(0.0, description="for each token that occurs in the answer so far")
    frequency_penalty: Penalty = Field(0.0, description="the same, times the number of occurrences")
    repetition_penalty: Annotated[Repetition, OF_MODEL] = Field(
        1.0, description="divides logits of tokens in prompt and answer"
    )


class GenerateRequest(_WithoutEffect, SamplingFields, SessionFields, BaseModel):  # type: ignore[misc,valid-type]  # made at run time
    """The fields of both kinds of request."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())
    _whole = whole_numbers()

    model: str | None = Field(None, min_length=1, description="may be left out if only one is served")
    add_generation_prompt: bool = Field(True, description="a chat's prompt ends with the start of the answer")
    max_tokens: int | None = Field(None, ge=1, description="most tokens of an answer")
    max_completion_tokens: int | None = Field(None, ge=1, description="the same; wins over `max_tokens`")
    n_predict: Annotated[
        Literal[-1] | Annotated[int, Field(ge=1)] | None, as_given("-1 or a number of tokens")
    ] = Field(None, description="llama.cpp's name of `max_tokens`; -1: no limit")
    min_tokens: int = Field(0, ge=0, description="least tokens of an answer: until then nothing ends it")
    n: int = Field(1, ge=1, le=MAX_CHOICES, description="answers to the prompt")
    seed: int | None = Field(None, ge=-(2**63), lt=2**64, description="random if absent")
    stop: Stop = Field(default_factory=list, description="texts that end an answer")
    stop_token_ids: StopIds = Field(default_factory=list, description="tokens that end an answer")
    ignore_eos: bool = Field(False, description="do not stop at the model's own end tokens")
    include_stop_str_in_output: bool = Field(False, description="the answer includes the text that ended it")
    logit_bias: Biases = Field(default_factory=dict, description="added to the logits of these token ids")
    logprobs: bool | int = False
    top_logprobs: SkipJsonSchema[Annotated[Alternatives, BeforeValidator(_beside_logprobs)]] = 0
    prompt_logprobs: Annotated[bool | int, PlainValidator(_yes_or_number, bool | Alternatives)] = Field(
        False, description="log probabilities of the prompt's tokens; a number: with so many alternatives"
    )
    stream: bool = Field(False, description="send the answer in pieces")
    stream_options: StreamOptions = StreamOptions()
    user: str = Field("", description=NO_EFFECT)
    prompt_cache_key: str = Field("", description="requests with an equal one share a prefix cache")
    prompt_cache_retention: Retention | None = Field(None, description=KEEPS)
    request_id: str | None = Field(None, pattern=REQUEST_ID, description="unique among running requests")
    timeout_s: float | None = Field(None, gt=0, le=MAX_TIMEOUT_S, description="time limit, seconds")
    slo_class: SloClass = Field("standard", description="latency class: docs/design/scheduler.md")
    finish_detached: bool = Field(False, description="continue after the client has gone")
    durable: Literal["tokens"] | None = Field(
        None, description="of a submitted request: it goes on after its last token kept (docs/durability.md)"
    )
    logits_processors: list[Processor] = Field(
        default_factory=list, max_length=MAX_PROCESSORS, description="applied in this order"
    )
    # These become one grammar, see services/tokenizer/structured_output.py.
    response_format: Annotated[
        PlainFormat | SchemaFormat | None,
        as_given(
            '{"type": "text"}, {"type": "json_object"} or {"type": "json_schema", "json_schema": {"name": …, '
            '"schema": …}}',
            *NOTHING,
        ),
    ] = Field(None, description="the form of the answer")
    structured_outputs: Annotated[
        Annotated[StructuredOutputs, AfterValidator(_one_rule)] | None,
        as_given("one of `json`, `json_object`, `regex`, `choice`, `grammar`", *NOTHING),
    ] = Field(None, description="the form of the answer, under vLLM's names")
    grammar: Annotated[str | None, as_given("EBNF with a rule `root ::= …`", *NOTHING)] = Field(
        None, description="EBNF with a rule `root`"
    )
    guided_json: Any = Field(None, description=f"{OLD}`json`")
    guided_regex: str | None = Field(None, description=f"{OLD}`regex`")
    guided_choice: Choices | None = Field(None, description=f"{OLD}`choice`")
    guided_grammar: str | None = Field(None, description=f"{OLD}`grammar`")
    tools: Annotated[
        Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None,
        as_given(
            f"a list of at most {MAX_TOOLS} functions "
            '{"type": "function", "function": {"name": …, "parameters": …}} with a name of letters, digits, '
            "_ and -"
        ),
    ] = Field(None, description="functions that the model may call")
    tool_choice: Annotated[
        Literal["none", "auto", "required"] | Tool | AllowedChoice,
        as_given(
            'none, auto, required, {"type": "function", "function": {"name": …}} of one of `tools`, or '
            '{"type": "allowed_tools", "allowed_tools": {"mode": "auto" or "required", "tools": […]}}'
        ),
    ] = Field("auto", description="calls: none, any number, at least one, this function, or of these alone")
    parallel_tool_calls: bool | None = Field(None, description="false: at most one call")
    speculate: bool = Field(True, description="tokens may be drafted: docs/design/speculation.md")
    prediction: Prediction | None = Field(None, description="a text that the answer repeats in large part")

    @property
    def limit(self) -> tuple[str, int | None]:
        """The field that limits the answer, and its tokens; None without a limit."""
        named = (("max_completion_tokens", self.max_completion_tokens), ("max_tokens", self.max_tokens))
        return next((pair for pair in named if pair[1]), ("n_predict", max(self.n_predict or 0, 0) or None))


class ChatRequest(GenerateRequest):
    """A conversation to answer."""

    messages: list[ChatMessage] = Field(min_length=1, max_length=MAX_MESSAGES, description="the chat so far")
    continue_final_message: bool = Field(False, description="the answer continues the last message")
    chat_template: str | None = Field(None, description="replaces the model's, if the fleet trusts requests")
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="variables for the template"
    )
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = Field(
        None, description="a variable for the chat template"
    )
    logprobs: bool = Field(False, description="log probabilities of the answer's tokens")
    top_logprobs: Annotated[Alternatives, BeforeValidator(_beside_logprobs)] = Field(
        0, description="number of likeliest alternatives for each token; needs `logprobs`"
    )


class EmbeddingRequest(BaseModel):
    """A text to turn into a vector."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())
    _whole = whole_numbers()

    model: str | None = Field(None, min_length=1, description="may be left out if only one is served")
    input: Annotated[str | list[int], PlainValidator(_text_or_ids, SomeText | SomeIds)] = Field(
        description="a text, or token ids"
    )
    encoding_format: Literal["float", "base64"] = Field(
        "float", description="numbers, or the bytes of little-endian float32"
    )
    dimensions: int | None = Field(
        None, ge=1, le=MAX_TOP_K, description="leading numbers of the vector, which gets the length 1 again"
    )
    truncate: bool = Field(
        True, description="cut a text over the limit that the model's files state; false: it is a 400"
    )
    stream: Annotated[Any, only(False)] = Field(None, description=NOT_YET)
    user: str = Field("", description=NO_EFFECT)
    prompt_cache_key: str = Field("", description="requests with an equal one share a prefix cache")
    request_id: str | None = Field(None, pattern=REQUEST_ID, description="unique among running requests")
    timeout_s: float | None = Field(None, gt=0, le=MAX_TIMEOUT_S, description="time limit, seconds")
    slo_class: SloClass = Field("standard", description="latency class: docs/design/scheduler.md")


class CompletionRequest(GenerateRequest):
    """A prompt to continue."""

    prompt: Annotated[str | list[int], PlainValidator(_text_or_ids, str | list[TokenId])] = Field(
        description="a text, or token ids"
    )
    logprobs: Annotated[bool | int, PlainValidator(_yes_or_number, bool | Alternatives)] = Field(
        False, description="log probabilities of the answer's tokens; a number: with so many alternatives"
    )


_HALF = re.compile(rb"\\u[dD][89a-fA-F]")  # most bodies have none and need no second check


def read_json(body: bytes) -> Any:
    """The value. Raises ValueError for a body that is not JSON in UTF-8, RecursionError, and BadRequest for a
    field with half a character."""
    value = json.loads(body.decode())  # from bytes json.loads would accept UTF-16, and halves in UTF-8
    if _HALF.search(body) and isinstance(value, dict):
        refuse_odd_values(value)
    return value


def refuse_odd_values(fields: dict[str, Any]) -> None:
    """Raises BadRequest with the name of the first field that JSON in UTF-8 cannot carry."""
    for name, value in fields.items():
        try:
            json.dumps([name, value], ensure_ascii=False).encode()
        except RecursionError:
            raise BadRequest(
                f"`{name:.40}` is nested too deeply; send a flat value", param=name[:40]
            ) from None
        except UnicodeEncodeError:
            shown = name.encode("utf-8", "replace").decode()
            raise BadRequest(
                f"`{shown:.40}` holds a lone surrogate, one half of a UTF-16 pair: send whole characters",
                param=shown[:40],
            ) from None
        except TypeError as error:
            raise BadRequest(f"`{name:.40}` is no JSON: {error!s:.80}", param=name[:40]) from None
