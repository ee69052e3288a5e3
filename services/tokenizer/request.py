"""The public request: OpenAI's field names, and a few of our own. Pydantic's only place on the path.

A wrong type or range is a 400 that names the field, and so is a field that nobody here knows (a
misspelt wish must not be dropped in silence) and a known one whose wish cannot be met yet. The limits
here are listed in docs/reference/limits.md.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Annotated, Any, Literal

import msgpack
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    field_validator,
    model_validator,
)

from services.tokenizer.structured_output import grammar_of
from shared.codec import MAX_PROCESSORS
from shared.errors import BadRequest
from shared.json_body import read_json, refuse_odd_values

REQUEST_ID = r"^[A-Za-z0-9._:-]{1,128}$"
MAX_STOPS, MAX_STOP_CHARS, MAX_STOP_IDS = 16, 256, 64
MAX_BIASES, MAX_CHOICES, MAX_LOGPROBS, MAX_MESSAGES = 1024, 64, 20, 4096
MAX_TIMEOUT_S = 86_400
MIN_REPETITION_PENALTY = 0.01  # logits are divided by it: in float32 a far smaller one makes infinity
MAX_TOP_K = 2**31 - 1  # beyond any vocabulary, and an int on every wire
MAX_ERROR_CHARS = 400  # an error rides in a header as well; what it quotes of a request may be long

# Fields of other servers that change nothing here.
_IGNORED = frozenset({"metadata", "store", "service_tier", "parallel_tool_calls", "safety_identifier"})

_JUDGED = frozenset({"prompt", "logits_processors"})  # of msgpack, where they are read: no byte passes there
# Known fields that are answered by 400, unless they ask for what happens anyway.
_NOT_YET: dict[str, tuple[object, ...]] = {
    "functions": ([],),
    "prompt_logprobs": (False, 0),
    "echo": (False,),
    "suffix": ("",),
    "best_of": (1,),
    "modalities": (["text"],),
    "audio": (),
}

TokenKey = Annotated[int, Field(strict=False)]  # JSON has text keys only
Bias = Annotated[float, Field(ge=-100, le=100)]
StopString = Annotated[str, StringConstraints(min_length=1, max_length=MAX_STOP_CHARS)]


class ChatMessage(BaseModel):
    """One turn. Further fields (`name`, …) reach the chat template as they are."""

    model_config = ConfigDict(extra="allow", strict=True)

    role: Annotated[str, StringConstraints(pattern=r"^[A-Za-z_-]{1,32}$")]
    content: str = ""

    @field_validator("content", mode="before")
    @classmethod
    def _only_text(cls, content: object) -> object:
        """Parts become one text; an assistant's null (it called tools) becomes an empty one."""
        if isinstance(content, list):
            texts = [part["text"] for part in content if _is_text(part)]
            if len(texts) < len(content):
                raise ValueError("only parts of type `text` are supported")
            return "".join(texts)
        return "" if content is None else content


class StreamOptions(BaseModel):
    """`stream_options`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool = True
    include_obfuscation: bool = False  # OpenAI's padding of frames: nothing is padded here


class ProcessorRequest(BaseModel):
    """An entry of `logits_processors`; a text is short for one without arguments."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: str
    args: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _name_alone(cls, entry: object) -> object:
        return {"name": entry} if isinstance(entry, str) else entry


class GenerateRequest(BaseModel):
    """A request for one prompt: `messages` for a chat, `prompt` (text or token ids) to go on with."""

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False, protected_namespaces=())

    model: str | None = None
    messages: list[ChatMessage] | None = Field(None, min_length=1, max_length=MAX_MESSAGES)
    prompt: str | list[int] | None = None
    add_generation_prompt: bool = True
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1, le=MAX_TOP_K)
    min_p: float = Field(0.0, ge=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    stop: list[StopString] = Field(default_factory=list, max_length=MAX_STOPS)
    stop_token_ids: list[int] = Field(default_factory=list, max_length=MAX_STOP_IDS)
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    repetition_penalty: float = Field(1.0, ge=MIN_REPETITION_PENALTY, le=10)
    logit_bias: dict[TokenKey, Bias] = Field(default_factory=dict, max_length=MAX_BIASES)
    logprobs: int = Field(0, ge=0, le=MAX_LOGPROBS + 1)  # 0 = none, else 1 + number of alternatives
    stream: bool = False
    stream_options: StreamOptions = Field(default_factory=StreamOptions)
    user: str = ""
    request_id: Annotated[str, StringConstraints(pattern=REQUEST_ID)] = ""
    timeout_s: float | None = Field(None, gt=0, le=MAX_TIMEOUT_S)
    slo_class: Literal["interactive", "standard", "batch"] = "standard"
    finish_detached: bool = False
    logits_processors: list[ProcessorRequest] = Field(default_factory=list, max_length=MAX_PROCESSORS)
    response_format: Any = None  # these five become one grammar: see structured_output.py
    structured_outputs: Any = None
    grammar: str = ""
    tools: Any = None
    tool_choice: Any = None

    @model_validator(mode="after")
    def _one_prompt(self) -> GenerateRequest:
        if (self.messages is None) == (self.prompt is None):
            raise ValueError("give either `messages` or `prompt`")
        return self

    @field_validator("stop", mode="before")
    @classmethod
    def _one_or_more(cls, stop: object) -> object:
        return [stop] if isinstance(stop, str) else stop

    @field_validator("prompt", mode="before")
    @classmethod
    def _text_or_ids(cls, prompt: object) -> object:
        if isinstance(prompt, str) or (
            isinstance(prompt, list) and all(type(token) is int for token in prompt)
        ):
            return prompt
        raise ValueError("one text or one list of token ids is expected")


def read_body(body: bytes) -> dict[str, Any]:
    """The fields of a request: JSON if it begins with `{`, else a msgpack map. Null means absent.

    Raises BadRequest."""
    try:
        if body.lstrip()[:1] == b"{":
            fields = read_json(body)
        else:
            fields = msgpack.unpackb(body, strict_map_key=False, object_pairs_hook=_map)
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise BadRequest(
            f"the body is neither a JSON object nor a msgpack map: {error!s:.200}; send for example "
            '{"messages":[{"role":"user","content":"Hi"}]}'
        ) from error
    if not isinstance(fields, dict) or not all(isinstance(name, str) for name in fields):
        raise BadRequest("the body must be a JSON object or a msgpack map with field names")
    if body.lstrip()[:1] != b"{":
        refuse_odd_values({name: value for name, value in fields.items() if name not in _JUDGED})
    return {name: value for name, value in fields.items() if value is not None}


def _map(pairs: Iterable[tuple[Any, Any]]) -> dict[Any, Any]:
    """A map of msgpack with keys that JSON could have. Raises ValueError for any other."""
    fields = {}
    for key, value in pairs:
        if type(key) not in (str, int):
            raise ValueError(f"a key of a map is {key!r:.40}, a text is expected")
        fields[key] = value
    return fields


def _logprobs(fields: dict[str, Any]) -> int:
    """0 for none, else 1 + the number of alternatives. A chat says `"logprobs": true` and
    `"top_logprobs": n`, a completion `"logprobs": n`."""
    asked, tops = fields.get("logprobs", False), fields.get("top_logprobs", 0)
    chat = "messages" in fields
    if type(asked) is not bool and (chat or type(asked) is not int):
        raise BadRequest(
            f"`logprobs`: {'true or false' if chat else 'a number'} is expected", param="logprobs"
        )
    if type(asked) is int:
        asked, tops = True, asked
    if type(tops) is not int or not 0 <= tops <= MAX_LOGPROBS:
        param = "top_logprobs" if chat else "logprobs"
        raise BadRequest(f"`{param}`: a number from 0 to {MAX_LOGPROBS} is expected", param=param)
    if tops and not asked:
        raise BadRequest("`top_logprobs` needs `logprobs` to be true", param="top_logprobs")
    return 1 + tops if asked else 0


def read_request(fields: dict[str, Any]) -> GenerateRequest:
    """The validated request. Raises BadRequest that names the field."""
    for name, harmless in _NOT_YET.items():
        if name in fields and not any(_same(fields[name], value) for value in harmless):
            raise BadRequest(f"`{name}` is not supported yet; leave it out", param=name)
    unknown = next((name for name in fields if name not in _KNOWN), None)
    if unknown is not None:
        raise _unknown(unknown)
    try:
        read = {"logprobs": _logprobs(fields), "grammar": grammar_of(fields)}
        return GenerateRequest.model_validate({**fields, **read})
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        path = ".".join(str(step) for step in first["loc"])[:80]
        message = first["msg"].removeprefix("Value error, ")[:MAX_ERROR_CHARS]
        if not path:
            raise BadRequest(message) from error
        raise BadRequest(f"`{path}`: {message}", param=str(first["loc"][0])) from error


def _is_text(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _same(value: object, other: object) -> bool:
    return type(value) is type(other) and value == other


_KNOWN = GenerateRequest.model_fields.keys() | _NOT_YET.keys() | _IGNORED | {"top_logprobs"}


def _unknown(name: str) -> BadRequest:
    near = difflib.get_close_matches(name[:40], sorted(_KNOWN), 1)
    mend = f"did you mean `{near[0]}`?" if near else "leave it out"
    return BadRequest(f"`{name:.40}` is not a field of a request; {mend}", param=name[:40])
