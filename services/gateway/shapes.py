"""Answers of the native protocol in the exact shapes of the OpenAI API. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from services.gateway.calls import Call
from services.gateway.tools import ToolText

Body = dict[str, Any]


def answer(call: Call, native: Sequence[Body], echoed: Sequence[str]) -> Body:
    """One answer from the native ones of each prompt; `echoed` are the texts they begin with."""
    first = native[0]
    choices = [
        _choice(call, prompt * call.n + choice["index"], choice, echoed[prompt] if echoed else "")
        for prompt, whole in enumerate(native)
        for choice in whole["choices"]
    ]
    body: Body = {
        "id": call.request_id,
        "object": "chat.completion" if call.chat else "text_completion",
        "created": first["created"],
        "model": first["model"],
        "choices": choices,
        "usage": total([whole["usage"] for whole in native]),
    }
    if len(native) == 1 and "timings" in first:
        body["timings"] = first["timings"]
    return body


def total(usages: Sequence[Body]) -> Body:
    """The usage of several prompts."""
    names = ("prompt_tokens", "completion_tokens", "total_tokens")
    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    return {
        **{name: sum(usage[name] for usage in usages) for name in names},
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def _choice(call: Call, index: int, choice: Body, echoed: str) -> Body:
    tail = {"logprobs": choice["logprobs"], "finish_reason": choice["finish_reason"]}
    if not call.chat:
        return {"index": index, "text": echoed + choice["text"], **tail}
    message = {**choice["message"], "refusal": None}
    if call.tools:
        text = ToolText(call.tools, f"{call.request_id}_{index}")
        shown = text.feed(message["content"])
        rest, calls = text.finish()
        message["content"] = shown + rest
        if calls:
            message |= {"content": message["content"] or None, "tool_calls": calls}
            tail["finish_reason"] = "tool_calls"
    return {"index": index, "message": message, **tail}
