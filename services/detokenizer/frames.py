"""The bytes a client gets. Shapes follow the OpenAI API; a stream frame adds what NATS needs.

    accepted  {"type":"accepted","request_id","attempt","frame","model","created"}
    delta     {"type":"delta","request_id","attempt","frame","choices":[
                  {"index","first","count","delta":{"role"?,"content"},"finish_reason":null}]}
    done      {"type":"done","request_id","attempt","frame","model","created","choices":[
                  {"index","tokens","finish_reason"}],"usage","timings"}
    error     {"type":"error","request_id","attempt","frame","error":{…}}

A completion has `"text"` in the place of `"delta"`; choices that asked for it have `"logprobs"`. The
concatenated texts of a choice are its whole answer. `done` and `error` carry the header
`Headrace-End: 1`. Deltas are the hot path, so their JSON is put together by hand around the escaped
text.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from json.encoder import encode_basestring as quote
from typing import Any

from services.detokenizer.stream import Delta
from shared.errors import HeadraceError
from shared.messages import Open, Timings
from shared.replies import error_reply, to_json

REPLAYS = 1_000  # attempts that one detokenizer may begin: the next one's are higher than all of them


class FrameMaker:
    """Numbers and builds the frames of one request's stream."""

    __slots__ = ("_attempt", "_chat", "_created", "_frame", "_model", "_prefix", "_request", "_role_sent")

    def __init__(self, opened: Open) -> None:
        self._request = opened.request
        self._attempt = (opened.attempt - 1) * REPLAYS + 1
        self._model = opened.model
        self._created = opened.received_wall_us // 1_000_000
        self._chat = opened.format == "chat"
        self._frame = 0
        self._role_sent: set[int] = set()
        self._prefix = self._delta_prefix()

    def start_over(self) -> None:
        """Begin a new attempt."""
        self._attempt += 1
        self._frame = 0
        self._prefix = self._delta_prefix()

    def rewind(self) -> None:
        """What was built since `accepted` has not been sent."""
        self._frame = 1
        self._role_sent.clear()

    def _delta_prefix(self) -> str:
        head = f'"request_id":{quote(self._request)},"attempt":{self._attempt},"frame":'
        return f'{{"type":"delta",{head}'

    def accepted(self) -> bytes:
        """The first frame: the request is queued."""
        return to_json({**self._head("accepted"), "model": self._model, "created": self._created})

    def delta(self, choices: Iterable[tuple[int, Delta]]) -> bytes:
        """New text of one or more choices."""
        number, self._frame = self._frame, self._frame + 1
        parts = [self._choice(index, delta) for index, delta in choices]
        return f'{self._prefix}{number},"choices":[{",".join(parts)}]}}'.encode()

    def _choice(self, index: int, delta: Delta) -> str:
        text = quote(delta.text)
        if not self._chat:
            body = f'"text":{text}'
        elif index in self._role_sent:
            body = f'"delta":{{"content":{text}}}'
        else:
            self._role_sent.add(index)
            body = f'"delta":{{"role":"assistant","content":{text}}}'
        if delta.logprobs is not None:
            body = f'{body},"logprobs":{to_json(delta.logprobs).decode()}'
        return f'{{"index":{index},"first":{delta.first},"count":{delta.count},{body},"finish_reason":null}}'

    def done(self, choices: list[dict[str, Any]], facts: Mapping[str, Any]) -> bytes:
        """The last frame of an answer; `facts` holds usage and timings."""
        head = {**self._head("done"), "model": self._model, "created": self._created}
        return to_json({**head, "choices": choices, **facts})

    def error(self, error: HeadraceError, trace: str) -> bytes:
        """The last frame of a failed request."""
        return error_reply(error, self._request, trace, self._head("error"))

    def _head(self, kind: str) -> dict[str, Any]:
        number, self._frame = self._frame, self._frame + 1
        return {"type": kind, "request_id": self._request, "attempt": self._attempt, "frame": number}


def answer(opened: Open, whole: list[tuple[Delta, str]], facts: Mapping[str, Any]) -> bytes:
    """The one reply of a request that does not stream; `whole` is (text, finish reason) by choice."""
    chat = opened.format == "chat"

    def choice(index: int, delta: Delta, reason: str) -> dict[str, Any]:
        text = delta.text
        body = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        return {"index": index, **body, "logprobs": delta.logprobs, "finish_reason": reason}

    return to_json(
        {
            "id": opened.request,
            "object": "chat.completion" if chat else "text_completion",
            "created": opened.received_wall_us // 1_000_000,
            "model": opened.model,
            "choices": [choice(i, delta, reason) for i, (delta, reason) in enumerate(whole)],
            **facts,
        }
    )


def usage_body(prompt: int, completion: int, cached: int) -> dict[str, Any]:
    """OpenAI's `usage`."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def timings_body(timings: Timings, prompt: int, completion: int) -> dict[str, float]:
    """Where the time went, in milliseconds and tokens per second. The first token comes out of the
    prefill, so decoding made one token less."""
    waited_us = timings.received_us + timings.tokenize_us + timings.transit_us + timings.queue_us
    first_us = waited_us + timings.prefill_us
    return {
        "tokenize_ms": _ms(timings.tokenize_us),
        "queue_ms": _ms(timings.queue_us),
        "prefill_ms": _ms(timings.prefill_us),
        "ttft_ms": _ms(first_us),
        "decode_ms": _ms(timings.decode_us),
        "total_ms": _ms(first_us + timings.decode_us),
        "prompt_per_second": _rate(prompt, timings.prefill_us),
        "predicted_per_second": _rate(completion - 1, timings.decode_us),
    }


def _ms(us: int) -> float:
    return round(us / 1000, 3)


def _rate(tokens: int, us: int) -> float:
    return round(tokens * 1e6 / us, 1) if us > 0 and tokens > 0 else 0.0
