"""Ollama's API: requests as those of the OpenAI API, answers and lines of JSON from OpenAI's. Pure.

https://github.com/ollama/ollama/blob/main/docs/api.md defines the fields. A stream is one JSON object a line;
the last one has `done`, the reason and the durations in nanoseconds. `/api/generate` sends a prompt through
the chat template, and with `raw` as it is. Fields that are left out have Headrace's defaults, not ollama's.
As in ollama, unknown fields and options are ignored; `ignored` names them, and what has no effect here.
A request without a prompt or message loads a model: the answer is one object, also for a stream.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from hashlib import sha256
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, create_model
from starlette.requests import Request
from starlette.responses import Response

from services.gateway import openapi as doc
from services.gateway.endpoints import VERSION, Endpoints
from services.gateway.exchange import answer as sent
from services.gateway.native_call import served_model, served_models
from services.gateway.openai_response import Api, Body, ChunkBuilder, Chunks, idle_fields, to_text, valid
from shared import api
from shared.errors import HeadraceError
from shared.openai.call import MAX_INPUTS, Call, answer, read_vectors_call, thinking

UNTYPED = "application/x-www-form-urlencoded"  # of curl, as in the examples of ollama's API
LATEST = ":latest"  # ollama's tag of a name without one
_OPEN = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False)
_IDLE = Field(None, description=api.NO_EFFECT)
_NAMES = {"num_predict": "max_tokens", "repeat_penalty": "repetition_penalty"}  # the others are the same
_EFFORTS = {"max": "xhigh"}  # likewise
_OURS = {ours: theirs for theirs, ours in _NAMES.items()}
_sampling: dict[str, Any] = {
    _OURS.get(name, name): (field.annotation, field)
    for name, field in api.SamplingFields.model_fields.items()
}
_SamplingOptions = create_model("_SamplingOptions", **_sampling)


Text = Annotated[str, Field(min_length=1)]
Texts = Text | Annotated[list[Text], Field(min_length=1, max_length=MAX_INPUTS)]


def _message(value: object) -> object:
    return api.present(value, "arguments")


class Options(_SamplingOptions):  # type: ignore[misc,valid-type]  # made at run time
    """Sampling. Other options are ignored: ollama's samplers of its own, and what loads a model."""

    model_config = _OPEN
    _whole = api.whole_numbers()

    num_predict: int = Field(-1, description="most tokens of the answer; 0 and below: the context's rest")
    seed: int = Field(-1, ge=-(2**63), lt=2**64, description="-1: random")
    stop: api.Stop = Field(default_factory=list, description="texts that end the answer")


class OllamaMessage(BaseModel):
    """One message. Further fields reach the chat template unchanged."""

    model_config = ConfigDict(extra="allow", strict=True)

    role: api.Role
    content: str = ""
    thinking: str = ""
    images: Annotated[Any, api.only([])] = Field(None, description=api.NOT_YET)


class OllamaRequest(BaseModel):
    """The fields of both kinds of request."""

    model_config = _OPEN

    model: str | None = Field(None, min_length=1, description="may be left out if only one is served")
    options: Annotated[Options | None, BeforeValidator(api.present)] = Field(None, description="sampling")
    format: Literal["", "json"] | dict[str, Any] = Field("", description="JSON, or a schema of it")
    stream: bool = Field(True, description="send the answer in lines")
    think: bool | Literal["low", "medium", "high", "max"] | None = Field(  # a Literal of True would accept 1
        None, description="reasoning, if the chat template can turn it on and off, or its effort"
    )
    keep_alive: Any = Field(None, description="0: the answer to no prompt has the reason `unload`")
    truncate: Any = Field(None, description=f"{api.NO_EFFECT}: a conversation over the context is refused")
    shift: Any = Field(None, description=f"{api.NO_EFFECT}: the answer ends where the context does")
    logprobs: Annotated[Any, api.only(False)] = Field(None, description=api.NOT_YET)
    top_logprobs: Annotated[Any, api.only(0)] = Field(None, description=api.NOT_YET)


class OllamaChatRequest(OllamaRequest):
    """A conversation to answer."""

    messages: list[Annotated[OllamaMessage, BeforeValidator(_message)]] = Field(
        default_factory=list,
        max_length=api.MAX_MESSAGES,
        description="the conversation so far; empty: no answer",
    )
    tools: list[api.Tool] = Field(
        default_factory=list, max_length=api.MAX_TOOLS, description="functions that the model may call"
    )


class OllamaGenerateRequest(OllamaRequest):
    """A prompt to answer, or with `raw` to continue."""

    prompt: str = Field("", description="the text of the user; empty: no answer")
    system: str = Field("", description="instructions")
    raw: bool = Field(False, description="continue the prompt, without the chat template")
    suffix: Annotated[Any, api.only("")] = Field(None, description=api.NOT_YET)
    template: Annotated[Any, api.only("")] = Field(None, description=api.NOT_YET)
    context: Annotated[Any, api.only([])] = Field(None, description=api.NOT_YET)
    images: Annotated[Any, api.only([])] = Field(None, description=api.NOT_YET)


RequestType = type[OllamaChatRequest] | type[OllamaGenerateRequest]


class OllamaEmbedRequest(BaseModel):
    """Texts to turn into vectors."""

    model_config = _OPEN
    _whole = api.whole_numbers()

    model: str | None = Field(None, min_length=1, description="may be left out if only one is served")
    input: Texts = Field(description="one text or several")
    dimensions: int | None = Field(None, ge=1, le=api.MAX_TOP_K, description="leading numbers of each vector")
    truncate: bool | None = Field(None, description="as in embeddings")
    options: Any = _IDLE
    keep_alive: Any = _IDLE


class OllamaShowRequest(BaseModel):
    """A model to describe."""

    model_config = _OPEN

    model: str | None = Field(None, min_length=1, description="may be left out if only one is served")
    name: str | None = Field(None, min_length=1, description="the same, under its old name")
    verbose: Any = _IDLE


def read(fields: Body, kind: RequestType) -> Body:
    """The fields of a chat or a completion of the OpenAI API; `done_reason` if there is nothing to answer.
    Raises BadRequest."""
    asked = valid(kind, fields)
    body: Body = {"stream": asked.stream}
    if asked.stream:
        body["stream_options"] = {"include_usage": True}
    if asked.model:
        body["model"] = asked.model.removesuffix(LATEST)
    for name in asked.options.model_fields_set if asked.options is not None else ():
        value = getattr(asked.options, name)
        if not (name == "num_predict" and value <= 0) and (name, value) != ("seed", -1):
            body[_NAMES.get(name, name)] = value
    if asked.format == "json":
        body["response_format"] = {"type": "json_object"}
    elif isinstance(asked.format, dict):
        named = {"name": "answer", "schema": asked.format}
        body["response_format"] = {"type": "json_schema", "json_schema": named}
    if not (asked.messages if isinstance(asked, OllamaChatRequest) else asked.prompt):
        digits = {*filter(str.isdigit, str(asked.keep_alive))}  # a number, or a duration like "0s"
        return {**body, "done_reason": "unload" if digits == {"0"} else "load"}
    if asked.think is not None and not (isinstance(asked, OllamaGenerateRequest) and asked.raw):
        body |= thinking(asked.think is not False)
        if isinstance(asked.think, str):
            body["reasoning_effort"] = _EFFORTS.get(asked.think, asked.think)
    if isinstance(asked, OllamaChatRequest):
        tools = {"tools": fields["tools"]} if asked.tools else {}
        return {**body, **tools, "messages": [_native_message(each) for each in asked.messages]}
    if asked.raw:
        return {**body, "prompt": asked.prompt}
    system = [{"role": "system", "content": asked.system}] if asked.system else []
    return {**body, "messages": [*system, {"role": "user", "content": asked.prompt}]}


def ignored(fields: Body, kind: type[BaseModel]) -> list[str]:
    """The fields and options of a valid request that change nothing."""
    names = idle_fields(fields, kind)
    if (options := fields.get("options")) and "options" not in names:
        given = {name: value for name, value in options.items() if value is not None}
        names += [f"options.{name}" for name in idle_fields(given, Options)]
        names += ["options.num_predict"] if given.get("num_predict") == 0 else []
    return names


def _native_message(message: OllamaMessage) -> Body:
    turn: Body = {"role": message.role, "content": message.content, **(message.model_extra or {})}
    return {**turn, "reasoning_content": message.thinking} if message.thinking else turn


def whole_answer(call: Call, natives: Sequence[Body], echoed: Sequence[str], *, chat: bool) -> Body:
    """The answer to a plain request, of `/api/chat` or `/api/generate`."""
    whole = answer(call, natives, echoed)
    (choice,) = whole["choices"]
    turn = choice.get("message") or {"content": choice["text"]}
    calls = [_call(each["function"]) for each in turn.get("tool_calls", ())]
    content = _content(chat, turn["content"] or "", turn.get("reasoning_content", ""), calls)
    return {**_head(whole), **content, **_ending(choice["finish_reason"], whole)}


def loaded(fields: Body, created: int, *, chat: bool) -> Body:
    """The answer to a request that loads a model, which every served model is."""
    head = _head({"model": fields["model"], "created": created})
    return {**head, **_content(chat, ""), "done": True, "done_reason": fields["done_reason"]}


def _head(whole: Body) -> Body:
    return {"model": whole["model"], "created_at": _date(whole["created"])}


def _date(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def _content(chat: bool, text: str, thinking: str = "", calls: Sequence[Body] = ()) -> Body:
    more: Body = {"thinking": thinking} if thinking else {}
    if not chat:
        return {"response": text, **more}
    if calls:
        more["tool_calls"] = calls
    return {"message": {"role": "assistant", "content": text, **more}}


def _call(function: Body) -> Body:
    """A call with its arguments as an object; none if `num_predict` has cut them."""
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:
        arguments = {}
    return {"function": {"name": function["name"], "arguments": arguments}}


def _ending(reason: str, whole: Body) -> Body:
    times, usage = whole["timings"], whole["usage"]
    ns = {name: int(times[f"{name}_ms"] * 1e6) for name in ("total", "prefill", "decode")}
    return {
        "done": True,
        "done_reason": "length" if reason == "length" else "stop",
        "total_duration": ns["total"],
        "load_duration": 0,
        "prompt_eval_count": usage["prompt_tokens"],
        "prompt_eval_duration": ns["prefill"],
        "eval_count": usage["completion_tokens"],
        "eval_duration": ns["decode"],
    }


class Lines(Chunks):
    """The lines of one stream, from the chunks of the OpenAI API."""

    media_type: ClassVar = b"application/x-ndjson"
    ping: ClassVar = b" "  # before the object of the next line; clients fail on an empty line

    def __init__(self, call: Call, echoed: Sequence[str] = (), *, chat: bool) -> None:
        self._chunks = ChunkBuilder(call, echoed)
        self._chat = chat
        self._calls: dict[int, Body] = {}  # functions with the arguments so far, by index
        self._reason = ""

    def convert(self, prompt: int, frame: Body) -> list[str]:
        """The lines for a frame of the native stream. Raises EngineError."""
        chunks = [json.loads(chunk) for chunk in self._chunks.convert(prompt, frame)]
        return [_line({**_head(chunk), **line}) for chunk in chunks if (line := self._taken(chunk))]

    def end(self, error: Body | None) -> bytes:
        """A line with the error that ended the stream."""
        return b"" if error is None else self.write([_line(error)])

    def _taken(self, chunk: Body) -> Body:
        """The fields of a line; empty for a chunk without text."""
        if not chunk["choices"]:
            return {**_content(self._chat, ""), **_ending(self._reason, chunk)}
        (choice,) = chunk["choices"]
        self._reason = choice["finish_reason"] or self._reason
        delta = choice.get("delta") or {"content": choice.get("text")}
        for call in delta.get("tool_calls", ()):
            function = self._calls.setdefault(call["index"], {"name": "", "arguments": ""})
            function["name"] = call["function"].get("name") or function["name"]
            function["arguments"] += call["function"].get("arguments") or ""
        calls = [*map(_call, self._calls.values())] if choice["finish_reason"] else []
        text, thinking = delta.get("content") or "", delta.get("reasoning_content") or ""
        shown = text or thinking or calls
        return {**_content(self._chat, text, thinking, calls), "done": False} if shown else {}


def _line(fields: Body) -> str:
    return to_text(fields) + "\n"


def error_body(error: HeadraceError, request_id: str = "") -> Body:
    """Ollama's errors are a text."""
    return {"error": error.message}


def tags(models: Sequence[Body]) -> Body:
    """The body of `/api/tags` and `/api/ps`, from OpenAI's list of models."""
    return {"models": [_tag(model) for model in models]}


def _tag(model: Body) -> Body:
    return {
        "name": model["id"],
        "model": model["id"],
        "modified_at": _date(model["created"]),
        "size": 0,
        "size_vram": 0,
        "digest": sha256(model["id"].encode()).hexdigest(),
        "details": _DETAILS,
        "context_length": model["max_model_len"],
    }


_DETAILS: Body = {
    "format": "", "family": "headrace", "families": ["headrace"], "parameter_size": "",
    "quantization_level": "",
}  # fmt: skip


def shown(model: Body) -> Body:
    """The body of `/api/show`."""
    info = {"general.architecture": "headrace", "headrace.context_length": model["max_model_len"]}
    return {
        "modified_at": _date(model["created"]),
        "details": _DETAILS,
        "model_info": info,
        "capabilities": ["completion", "tools", "embedding"],
    }


def read_show(fields: Body) -> Body:
    """The model of `/api/show`. Raises BadRequest."""
    asked = valid(OllamaShowRequest, fields)
    name = asked.model or asked.name
    return {"model": name.removesuffix(LATEST)} if name else {}


def read_embed(fields: Body) -> Body:
    """The fields of a call for vectors. Raises BadRequest."""
    asked = valid(OllamaEmbedRequest, fields)
    body = asked.model_dump(include={"model", "input", "dimensions", "truncate"}, exclude_none=True)
    return {**body, "model": asked.model.removesuffix(LATEST)} if asked.model else body


def embedded(call: Call, natives: Sequence[Body], _: Sequence[str]) -> Body:
    """The answer of `/api/embed`."""
    took_ms = max(each["timings"]["total_ms"] for each in natives)
    return {
        "model": call.model,
        "embeddings": [each["embedding"] for each in natives],
        "total_duration": int(took_ms * 1e6),
        "load_duration": 0,
        "prompt_eval_count": sum(each["usage"]["prompt_tokens"] for each in natives),
    }


def _api(kind: RequestType, *, chat: bool) -> Api:
    chunks: Callable[..., Any] = partial(Lines, chat=chat)
    whole = partial(whole_answer, chat=chat)
    some = partial(ignored, kind=kind)
    return Api(whole, chunks, partial(read, kind=kind), ignored=some, untyped=UNTYPED)


CHAT = _api(OllamaChatRequest, chat=True)
GENERATE = _api(OllamaGenerateRequest, chat=False)
EMBED = Api(
    embedded, read=read_embed, to_call=read_vectors_call, untyped=UNTYPED,
    ignored=partial(ignored, kind=OllamaEmbedRequest),
)  # fmt: skip
SHOW = Api(read=read_show, ignored=partial(ignored, kind=OllamaShowRequest), untyped=UNTYPED)


async def ask(endpoints: Endpoints, request: Request, *, chat: bool) -> Response:
    """A chat, or an answer to a prompt."""
    api = CHAT if chat else GENERATE
    fields, client = await endpoints.asked(request, api)
    if "done_reason" in fields:
        await served_model(client, fields["model"])
        return sent(loaded(fields, endpoints.clock.wall_us() // 1_000_000, chat=chat))
    return await endpoints.answered(request, client, endpoints.call_of(request, fields, api), api)


async def tagged(endpoints: Endpoints, request: Request) -> Response:
    """The models served, all of which are loaded."""
    return sent(tags((await served_models(await endpoints.client_of(request)))["data"]))


async def show(endpoints: Endpoints, request: Request) -> Response:
    """One of them."""
    fields, client = await endpoints.read_request(request, SHOW)
    return sent(shown(await served_model(client, fields["model"])))


async def version(_: Endpoints, request: Request) -> Response:
    """The version of Headrace."""
    return sent({"version": VERSION})


_COUNTS = (
    "total_duration", "load_duration", "prompt_eval_count", "prompt_eval_duration", "eval_count",
    "eval_duration",
)  # fmt: skip


def _schema(*optional: str, **content: doc.Schema) -> doc.Schema:
    """The schema of an answer; the counts are absent if a model was only loaded."""
    return doc.object_of(
        *optional, *_COUNTS, model=doc.TEXT, created_at=doc.TEXT, **content, done=doc.one_of(True),
        done_reason=doc.one_of("stop", "length", "load", "unload"), **dict.fromkeys(_COUNTS, doc.COUNT),
    )  # fmt: skip


def build() -> doc.Part:
    """Ollama's API."""
    post, models = partial(doc.post, api="Ollama"), partial(doc.get, "OllamaModels", api="Ollama")
    many, embed = doc.GENERATING, partial(Endpoints.generate, chat=False, api=EMBED)
    chat = post("OllamaChat", "answer a conversation (ollama)", many, stream="application/x-ndjson")
    generate = post("OllamaGenerate", "answer a prompt (ollama)", many, stream="application/x-ndjson")
    lines = (
        doc.Operation("POST", "/api/chat", partial(ask, chat=True), chat),
        doc.Operation("POST", "/api/generate", partial(ask, chat=False), generate),
        doc.Operation("POST", "/api/embed", embed, post("OllamaEmbed", "vectors of texts (ollama)", many)),
        doc.Operation("GET", "/api/tags", tagged, models("the models served (ollama)", doc.LISTING)),
        doc.Operation("GET", "/api/ps", tagged, models("the models loaded (ollama)", doc.LISTING)),
        doc.Operation("POST", "/api/show", show, post("OllamaShow", "one served model (ollama)", doc.ASKING)),
        doc.Operation("GET", "/api/version", version, doc.version("the version (ollama)")),
    )  # fmt: skip
    numbers = {"type": "array", "items": {"type": "number"}}
    schemas = {
        "OllamaEmbedAnswer": doc.object_of(
            model=doc.TEXT,
            embeddings=doc.list_of(numbers),
            **dict.fromkeys(("total_duration", "load_duration", "prompt_eval_count"), doc.COUNT),
        ),
        "OllamaChatAnswer": _schema(message={"type": "object"}),
        "OllamaGenerateAnswer": _schema("thinking", response=doc.TEXT, thinking=doc.TEXT),
        "OllamaModels": doc.object_of(models=doc.list_of({"type": "object"})),
        "OllamaShowAnswer": doc.object_of(
            modified_at=doc.TEXT, details={"type": "object"}, model_info={"type": "object"},
            capabilities=doc.list_of(doc.TEXT),
        ),
        "OllamaError": doc.object_of(error=doc.TEXT),
    }  # fmt: skip
    requests: list[Any] = [OllamaChatRequest, OllamaGenerateRequest, OllamaShowRequest, OllamaEmbedRequest]
    return doc.Part(lines, schemas, requests, error_body=error_body)
