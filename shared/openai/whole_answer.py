"""Turns the native answers of one call into one answer of the OpenAI API, as a JSON object. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from shared.openai.answer_parts import reader_of
from shared.openai.call import Call

Body = dict[str, Any]


def answer(call: Call, native: Sequence[Body], echoed: Sequence[str]) -> Body:
    """One answer from the native answers to all prompts; `echoed` holds the texts that they start with."""
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
        return {"index": index, "text": echoed + choice["text"], **tail}
    message = choice["message"]
    reader = reader_of(whole.get("answer_format", ""), call.functions, f"{call.request_id}_{index}")
    if reader is not None:
        message = reader.message(message["content"])
        tail["finish_reason"] = reader.reason(tail["finish_reason"])
    return {"index": index, "message": {**message, "refusal": None}, **tail}


def stop_reason(choice: Body) -> dict[str, str]:
    """The stop string that ended a choice, under vLLM's name for it."""
    return {"stop_reason": choice["stop_reason"]} if "stop_reason" in choice else {}
