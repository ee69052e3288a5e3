"""`read_call` turns the body of an HTTP request into native requests. Pure.

Fields have the same names in both and pass unchanged: the tokenizer validates them. Differences: a completion
may have several prompts, each of which becomes a request; `stream_options` is only for streams, which end
with usage only on request; the model may be left out if only one is served.

A model writes tool calls into its text. `ToolText` finds them:

    whole     one object {"name": …, "arguments": …} and no other text: a call was required
    tagged    text with <tool_call>…</tool_call> around such objects
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

from services.gateway.errors import Unprocessable
from services.gateway.exchange import given_id
from shared.errors import BadRequest
from shared.json_body import read_json
from shared.nats.subjects import MAX_NAME_CHARS

MAX_PROMPTS = 64  # of one completion
_LONG_CHARS, _DIGEST_CHARS = 96, 24  # of a long id and its digest, when prompts get numbered ids

BEGIN, END = "<tool_call>", "</tool_call>"
WHOLE, TAGGED = "whole", "tagged"
_CALL = re.compile(re.escape(BEGIN) + r"(.*?)" + re.escape(END), re.DOTALL)

Body = dict[str, Any]


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
    tools: str = ""  # form of tool calls in its text: see `how_called`

    @property
    def prompt_only(self) -> bool:
        """The answer is the echoed prompt and no token."""
        limit = self.bodies[0].get("max_tokens")
        return self.echo and not self.stream and limit == 0 and type(limit) is int

    @property
    def model(self) -> str:
        """The model of all its prompts."""
        return str(self.bodies[0]["model"])


def fields_of(data: bytes) -> Body:
    """The fields of a JSON body, without null fields. Raises BadRequest, Unprocessable."""
    try:
        fields = read_json(data)
    except RecursionError:
        raise BadRequest("the body is nested too deeply: send flat values") from None
    except ValueError as error:
        raise BadRequest(f"the body is not JSON: {error!s:.200}") from None
    if not isinstance(fields, dict):
        raise Unprocessable(f"the body is a JSON {type(fields).__name__}, an object with fields is expected")
    return {name: value for name, value in fields.items() if value is not None}


def model_of(fields: Body, served: list[str]) -> str:
    """The model of a request; without one, the only model of `served`. Raises BadRequest."""
    model = fields.get("model")
    if model is None and len(served) == 1:
        return served[0]
    if not isinstance(model, str) or not model:
        there = ", ".join(served)
        raise BadRequest(f"`model`: the name of a model is expected; there is {there:.200}", param="model")
    return model


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
    echo = not chat and native.get("echo") is True and not native.get("logprobs")
    if echo:
        native.pop("echo")
    n, named = fields.get("n", 1), native.setdefault("request_id", request_id)
    return Call(
        chat=chat,
        request_id=str(named),
        bodies=tuple(_bodies(native)),
        stream=stream,
        include_usage=usage,
        continuous_usage=usage and native["stream_options"].get("continuous_usage_stats") is True,
        n=n if type(n) is int else 1,  # the tokenizer will refuse any other
        echo=echo,
        tools=how_called(fields) if chat else "",
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


def _bodies(native: Body) -> list[Body]:
    """One body for each prompt; a list of numbers is one prompt."""
    prompts = native.get("prompt")
    if not isinstance(prompts, list) or not prompts or not isinstance(prompts[0], str | list):
        return [native]
    if len(prompts) > MAX_PROMPTS:
        raise BadRequest(f"`prompt`: {len(prompts)} prompts are over {MAX_PROMPTS}", param="prompt")
    if len(prompts) == 1:
        return [{**native, "prompt": prompts[0]}]
    stem = _short(native["request_id"])
    return [{**native, "prompt": p, "request_id": f"{stem}:{i}"} for i, p in enumerate(prompts)]


def _short(request_id: str) -> str:
    """An id with room for the number of a prompt: a longer one is cut and stays unique by its digest. An
    invalid id stays, for the tokenizer to refuse."""
    if not isinstance(request_id, str) or not given_id(request_id):
        return request_id
    if len(request_id) <= MAX_NAME_CHARS - len(f":{MAX_PROMPTS}"):
        return request_id
    return request_id[:_LONG_CHARS] + "." + sha256(request_id.encode()).hexdigest()[:_DIGEST_CHARS]


def how_called(fields: dict[str, Any]) -> str:
    """WHOLE, TAGGED, or empty for a request without tool calls; the tokenizer validates the fields."""
    choice = fields.get("tool_choice", "auto")
    if not fields.get("tools") or choice == "none":
        return ""
    return TAGGED if choice == "auto" else WHOLE


@dataclass(slots=True)
class ToolText:
    """Splits the text of one choice into content and tool calls in OpenAI's form."""

    how: str
    name: str  # of the choice, part of the ids of its calls
    _held: list[str] = field(default_factory=list)  # may be a call, or is one

    def feed(self, piece: str) -> str:
        """The new content, up to a possible call."""
        if self.how == WHOLE:
            self._held.append(piece)
            return ""
        text = "".join([*self._held, piece])
        at = text.find(BEGIN)
        cut = at if at >= 0 else len(text) - _begun(text)
        self._held = [text[cut:]]
        return text[:cut]

    def finish(self) -> tuple[str, list[dict[str, Any]]]:
        """The rest of the content, and the calls. An incomplete call is content."""
        text = "".join(self._held)
        self._held.clear()
        if self.how == WHOLE:
            found = [_read(text)]
            return (text, []) if found[0] is None else ("", self._named(found))
        found = [_read(match[1]) for match in _CALL.finditer(text)]
        if not found or None in found:
            return text, []
        return _CALL.sub("", text).strip("\n"), self._named(found)

    def _named(self, found: list[dict[str, str] | None]) -> list[dict[str, Any]]:
        return [
            {"id": f"call_{self.name}_{i}", "type": "function", "function": function}
            for i, function in enumerate(found)
        ]


def _read(text: str) -> dict[str, str] | None:
    try:
        call = json.loads(text, strict=False)  # accepts bare control characters; json.dumps escapes them
    except ValueError:
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str) or "arguments" not in call:
        return None
    return {"name": call["name"], "arguments": json.dumps(call["arguments"], ensure_ascii=False)}


def _begun(text: str) -> int:
    """The number of characters at the end of `text` that may be the start of a call."""
    most = min(len(text), len(BEGIN) - 1)
    return next((n for n in range(most, 0, -1) if BEGIN.startswith(text[-n:])), 0)
