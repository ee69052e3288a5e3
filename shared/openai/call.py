"""`read_call` turns the fields of an OpenAI request into native requests. Pure.

Fields have the same names in both and pass unchanged: the tokenizer validates them. Differences: a completion
may have several prompts, each of which becomes a request; `stream_options` is only for streams, which end
with usage only on request.

`answer` turns the native answers of one call into one answer, as a JSON object.

The shape of an error of the OpenAI API: status and body. Pure.

    native 408 (a time limit passed)     504, since the client was not the slow one
    others                               the same code

Programs test `error.code` (`model_not_found`, `overloaded`, …); it is null for invalid fields.
"""

from __future__ import annotations

import re
import secrets
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from itertools import accumulate
from typing import Any

from shared.api import REQUEST_ID
from shared.errors import BadRequest, HeadraceError
from shared.nats.subjects import MAX_NAME_CHARS
from shared.openai.answer_parts import Functions, functions_of, reader_of

MAX_PROMPTS = 64  # of one completion
MAX_INPUTS = 2_048  # of one call for vectors, as in the OpenAI API
_LONG_CHARS, _DIGEST_CHARS = 96, 24  # of a long id and its digest, when prompts get numbered ids

_ID_BYTES = 12
_TIMED = rf"[a-z]+_([0-9a-f]{{8}})[0-9a-f]{{{2 * _ID_BYTES}}}"

Body = dict[str, Any]


class Kept(Body):
    """What an answer repeats of its request. A class of its own: no JSON of a client can be one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One HTTP request: a native body for each prompt, and the form of its answer."""

    chat: bool
    request_id: str
    bodies: tuple[Body, ...]
    stream: bool = False
    include_usage: bool = False  # of a stream
    continuous_usage: bool = False  # in each of its chunks
    n: int = 1  # choices of each prompt
    echo: bool = False  # the text starts with the prompt
    echo_scores: bool = False  # and its log probabilities with those of the prompt
    prompt_scores: bool = False  # the answer has `prompt_logprobs`
    drops_answer: bool = False  # the one token that is generated to have the scores is not shown
    functions: Functions | None = None  # that its text may call
    keep: Body = field(default_factory=dict)  # what an answer needs later, beside the native request

    @property
    def is_prompt_only(self) -> bool:
        """The answer is the echoed prompt and no token."""
        limit = self.bodies[0].get("max_tokens")
        return self.echo and not self.stream and limit == 0 and type(limit) is int

    def keeping(self, keep: Kept) -> Call:
        """The same call, of which a keeper has `keep`."""
        return replace(self, keep=keep)

    def of_model(self, model: str) -> Call:
        """The same call, for the model that an alias stands for."""
        return replace(self, bodies=tuple({**body, "model": model} for body in self.bodies))

    @property
    def model(self) -> str:
        """The model of all its prompts."""
        return str(self.bodies[0]["model"])


def read_call(fields: Body, *, chat: bool, request_id: str) -> Call:
    """The call of `fields`, which include a model. `request_id` is for fields without one. Raises
    BadRequest."""
    wanted = "messages" if chat else "prompt"
    if wanted not in fields:
        raise BadRequest(f"`{wanted}` is missing", param=wanted)
    if (other := "prompt" if chat else "messages") in fields:
        path = "/v1/completions" if chat else "/v1/chat/completions"
        raise BadRequest(f"`{other}` is not for this path: send it to {path}", param=other)
    stream = fields.get("stream", False)
    if not isinstance(stream, bool):
        raise BadRequest("`stream`: true or false is expected", param="stream")
    if "stream_options" in fields and not stream:
        raise BadRequest("`stream_options` is for `stream: true` alone", param="stream_options")
    usage, native = _usage(fields, stream=stream)
    keep = native.pop("keep") if isinstance(native.get("keep"), Kept) else {}
    echo, asked = not chat and native.get("echo") is True, native.get("prompt_logprobs")
    scores = native.get("logprobs")
    echo_scores = echo and scores is not None and scores is not False
    if echo:
        native.pop("echo")
    if echo_scores and asked in (None, False):
        native["prompt_logprobs"] = 0 if scores is True else scores
    limit, drops_answer = native.get("max_tokens"), False
    if (
        echo
        and not stream
        and limit == 0
        and type(limit) is int
        and native.get("prompt_logprobs") is not None
    ):
        native["max_tokens"], drops_answer = 1, True
    n, named = fields.get("n", 1), native.setdefault("request_id", request_id)
    return Call(
        chat=chat,
        request_id=str(named),
        bodies=tuple(_bodies(native, "prompt", MAX_PROMPTS)),
        stream=stream,
        include_usage=usage,
        continuous_usage=usage and native["stream_options"].get("continuous_usage_stats") is True,
        n=n if type(n) is int else 1,  # the tokenizer will refuse any other
        echo=echo,
        echo_scores=echo_scores,
        prompt_scores=asked is not None and asked is not False,
        drops_answer=drops_answer,
        functions=functions_of(fields) if chat else None,
        keep=keep,
    )


def _usage(fields: Body, *, stream: bool) -> tuple[bool, Body]:
    """Whether a stream ends with its usage, and the native fields: the gateway always reads the usage."""
    options = fields.get("stream_options", {})
    if not stream or not isinstance(options, dict):
        return False, dict(fields)
    options = {k: v for k, v in options.items() if v is not None}
    wanted = options.get("include_usage", False)
    if isinstance(wanted, bool):  # else the tokenizer refuses it
        options["include_usage"] = True
    return wanted is True, {**fields, "stream_options": options}


def read_vectors_call(fields: Body, *, chat: bool, request_id: str) -> Call:
    """The call of `fields` for the vectors of `input`, likewise; it is no `chat`."""
    if "input" not in fields:
        raise BadRequest("`input` is missing", param="input")
    if other := {"messages", "prompt"} & fields.keys():
        raise BadRequest(f"`{min(other)}` is not for this path: leave it out", param=min(other))
    if fields.get("stream", False) is not False:
        raise BadRequest("`stream`: vectors come at once; leave it out", param="stream")
    native = {"request_id": request_id, **fields}
    bodies = tuple(_bodies(native, "input", MAX_INPUTS))
    return Call(chat=chat, request_id=str(native["request_id"]), bodies=bodies)


def _bodies(native: Body, name: str, most: int) -> list[Body]:
    """One body for each prompt, the field `name`; a list of numbers is one prompt."""
    prompts = native.get(name)
    if not isinstance(prompts, list) or not prompts or not isinstance(prompts[0], str | list):
        return [native]
    if len(prompts) > most:
        raise BadRequest(f"`{name}`: {len(prompts)} {name}s are over {most}", param=name)
    if len(prompts) == 1:
        return [{**native, name: prompts[0]}]
    stem = _short(native["request_id"])
    return [{**native, name: p, "request_id": f"{stem}:{i}"} for i, p in enumerate(prompts)]


def _short(request_id: str) -> str:
    """An id with room for the number of a prompt: a longer one is cut and stays unique by its digest. An
    invalid id stays, for the tokenizer to refuse."""
    if not isinstance(request_id, str) or not re.fullmatch(REQUEST_ID, request_id):
        return request_id
    if len(request_id) <= MAX_NAME_CHARS - len(f":{MAX_INPUTS}"):
        return request_id
    return request_id[:_LONG_CHARS] + "." + sha256(request_id.encode()).hexdigest()[:_DIGEST_CHARS]


def thinking(wanted: bool) -> Body:
    """The fields that turn reasoning on or off, under the two names that chat templates have for it: Qwen3's
    (https://huggingface.co/Qwen/Qwen3-0.6B) and DeepSeek's (https://huggingface.co/deepseek-ai/DeepSeek-V3.1).
    """
    return {"chat_template_kwargs": {"enable_thinking": wanted, "thinking": wanted}}


def timed_id(prefix: str, now_s: int) -> str:
    """A unique id with the time in it: one that is not found may then be known to be too old."""
    return f"{prefix}{now_s:08x}{secrets.token_hex(_ID_BYTES)}"


def drawn_at(request_id: str) -> int | None:
    """When an id of `timed_id` was drawn, seconds; None for any other id."""
    found = re.fullmatch(_TIMED, request_id)
    return int(found[1], 16) if found else None


CONTEXT_LENGTH = "context_length_exceeded"
_TIMEOUTS = {408: 504}
_INVALID, _SERVER = "invalid_request_error", "server_error"
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


def error_status(error: HeadraceError) -> int:
    """The HTTP status."""
    return int(getattr(error, "status", 0)) or _TIMEOUTS.get(error.code, error.code)


def error_body(error: HeadraceError, request_id: str = "") -> dict[str, Any]:
    """The OpenAI error object, with the request's id as a further field."""
    status = error_status(error)
    fields: dict[str, Any] = {
        "message": error.message,
        "type": _TYPES.get(status, _INVALID if status < 500 else _SERVER),
        "param": error.param,
        "code": _word(error),
    }
    if request_id:
        fields["request_id"] = request_id
    return {"error": fields}


def _word(error: HeadraceError) -> str | None:
    if isinstance(error, BadRequest):
        return CONTEXT_LENGTH if error.message.startswith(CONTEXT_LENGTH) else None
    return error.type


def answer(call: Call, native: Sequence[Body], echoed: Sequence[str]) -> Body:
    """One answer from the native answers to all prompts; `echoed` holds the texts that they start with."""
    native = [_without_answer(whole) for whole in native] if call.drops_answer else native
    first = native[0]
    choices = [
        _choice(call, prompt * call.n + choice["index"], choice, whole, echoed[prompt] if echoed else "")
        for prompt, whole in enumerate(native)
        for choice in whole["choices"]
    ]
    body: Body = {
        "id": call.request_id,
        "object": "chat.completion" if call.chat else "text_completion",
        "created": first["created"],
        "model": call.model,
        "choices": choices,
        "usage": total([whole["usage"] for whole in native]),
    }
    if call.chat and call.prompt_scores:
        body["prompt_logprobs"] = as_in_vllm(first["prompt_logprobs"])
    if len(native) == 1 and "timings" in first:
        body["timings"] = first["timings"]
    return body


def vectors(call: Call, native: Sequence[Body], _: Sequence[str]) -> Body:
    """The answer of `/v1/embeddings` from the native vectors of all inputs."""
    usage = total([each["usage"] for each in native])
    return {
        "object": "list",
        "data": [
            {"object": "embedding", "index": index, "embedding": each["embedding"]}
            for index, each in enumerate(native)
        ],
        "model": call.model,
        "usage": {name: usage[name] for name in ("prompt_tokens", "total_tokens")},
    }


def total(usages: Sequence[Body]) -> Body:
    """The total usage of several prompts."""
    names = ("prompt_tokens", "completion_tokens", "total_tokens")
    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    details = Counter[str]()
    for usage in usages:
        details.update(usage.get("completion_tokens_details", {}))
    return {
        **{name: sum(usage[name] for usage in usages) for name in names},
        "prompt_tokens_details": {"cached_tokens": cached},
        **({"completion_tokens_details": dict(details)} if details else {}),
    }


def _choice(call: Call, index: int, choice: Body, whole: Body, echoed: str) -> Body:
    tail = {"logprobs": choice["logprobs"], "finish_reason": choice["finish_reason"], **stop_reason(choice)}
    if not call.chat:
        prompt = whole.get("prompt_logprobs", ())
        if call.echo_scores:
            before = of_prompt(prompt, call.bodies[0]["prompt_logprobs"])
            its = placed_after(len("".join(before["tokens"])), tail["logprobs"])
            tail["logprobs"] = {name: before[name] + [*its[name]] for name in before}
        if call.prompt_scores:
            tail["prompt_logprobs"] = as_in_vllm(prompt)
        return {"index": index, "text": echoed + choice["text"], **tail}
    message = choice["message"]
    reader = reader_of(whole.get("answer_format", ""), call.functions, f"{call.request_id}_{index}")
    if reader is not None:
        message = reader.message(message["content"])
        tail["finish_reason"] = reader.reason(tail["finish_reason"])
    return {"index": index, "message": {**message, "refusal": None}, **tail}


def _without_answer(whole: Body) -> Body:
    """A completion without its generated tokens."""
    nothing = {"text": "", "finish_reason": "length"}
    choices = [
        {**choice, **nothing, "logprobs": choice["logprobs"] and dict.fromkeys(choice["logprobs"], ())}
        for choice in whole["choices"]
    ]
    usage = {**whole["usage"], "completion_tokens": 0, "total_tokens": whole["usage"]["prompt_tokens"]}
    return {**whole, "choices": choices, "usage": usage}


def as_in_vllm(prompt: Sequence[Body]) -> list[Body | None]:
    """The log probabilities of a prompt from the native form: vLLM has null for the first token."""
    return [None, *prompt[1:]]


def of_prompt(prompt: Sequence[Body], alternatives: int) -> dict[str, list[Any]]:
    """The same as `logprobs` of a completion with so many alternatives. The first token has none."""
    own = [next(iter(each.values())) for each in prompt]
    texts = [each["decoded_token"] for each in own]
    tops: list[Body | None] = [None]
    for each in prompt[1:]:
        found: dict[str, float] = {}
        for entry in sorted(each.values(), key=lambda entry: int(entry["rank"])):
            if entry["rank"] <= alternatives:
                found.setdefault(entry["decoded_token"], entry["logprob"])
        tops.append(found)
    return {
        "tokens": texts,
        "token_logprobs": [each["logprob"] for each in own],
        "top_logprobs": tops,
        "text_offset": [*accumulate(map(len, texts[:-1]), initial=0)],
    }


def placed_after(chars: int, logprobs: Body) -> Body:
    """The log probabilities of an answer whose text follows so many characters."""
    return {**logprobs, "text_offset": [chars + offset for offset in logprobs["text_offset"]]}


def stop_reason(choice: Body) -> dict[str, str]:
    """The stop string that ended a choice, under vLLM's name for it."""
    return {"stop_reason": choice["stop_reason"]} if "stop_reason" in choice else {}
