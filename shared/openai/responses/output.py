"""The output of a response: native text -> items and their events, with numbers; the response object. Pure.

    response.created, [response.queued,] response.in_progress
    response.output_item.added                                      for each item, one after the other
        response.content_part.added                                 of a message or of reasoning
        response.output_text.delta… .done                           or reasoning_text, function_call_arguments
        response.content_part.done
    response.output_item.done
    response.completed, .incomplete or .failed

The number of an event depends on the text alone and not on the pieces in which it came: a delta counts its
characters, any other event one. The number of a delta is that of its last character, so a delta can be cut
anywhere. Ids of items come from the id of the response.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shared.client.client import error_of
from shared.errors import BadRequest, HeadraceError
from shared.openai.answer_parts import AnswerReader, reader_of
from shared.openai.call import Call, answer, drawn_at, error_status
from shared.openai.responses.request import called

Body = dict[str, Any]

_FIRST_NUMBER = 0
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}
_STATUSES = {"running": "in_progress"}  # of the keeper; the others have the same name
_TEXTS = {"message": "output_text", "reasoning": "reasoning_text", "function_call": "function_call_arguments"}


@dataclass(frozen=True, slots=True)
class Event:
    """One event, without its attempt. `number`: its place; of a delta that of its last character."""

    type: str
    number: int
    fields: Body

    def after(self, number: int) -> Event | None:
        """The part of this event after `number`; a delta is cut."""
        if self.number <= number:
            return None
        delta, wanted = self.fields.get("delta", ""), self.number - number
        if len(delta) <= wanted:
            return self
        rest = {**self.fields, "delta": delta[-wanted:]}
        if entries := self.fields.get("logprobs"):
            rest["logprobs"] = _of_last_chars(entries, wanted)
        return replace(self, fields=rest)


def _of_last_chars(entries: Sequence[Body], chars: int) -> list[Body]:
    """The entries of the tokens that have the last characters."""
    kept: list[Body] = []
    for entry in reversed(entries):
        if chars <= 0:
            break
        kept.append(entry)
        chars -= len(entry["token"])
    return kept[::-1]


class Output:
    """The output of one response, from its first character on."""

    def __init__(self, name: str, reader: AnswerReader | None, tools: Sequence[Body] = ()) -> None:
        """`name`: the id of the response. `tools`: those that its answer repeats."""
        self.items: list[Body] = []
        self._name = name.removeprefix("resp_")
        self._reader = reader
        self._names = {  # of functions in namespaces, by the name that the model calls
            called(tool["name"], space): {"name": tool["name"], "namespace": space}
            for tool in tools
            if (space := tool.get("namespace"))
        }
        self._number = _FIRST_NUMBER  # of the next event, or of the next character
        self._text: list[str] = []  # of the open item
        self._open: Body | None = None
        self._waiting: list[Body] = []  # log probabilities without text so far
        self._entries: list[Body] = []  # log probabilities of the open item

    def event(self, kind: str, **fields: Any) -> Event:
        """An event that counts one."""
        self._number += 1
        return Event(f"response.{kind}", self._number - 1, fields)

    def skip(self, number: int) -> None:
        """The next event has a higher number than this."""
        self._number = max(self._number, number + 1)

    def feed(self, text: str, entries: Sequence[Body] = ()) -> Iterator[Event]:
        """The events of a piece of text; `entries`: the log probabilities of its tokens."""
        self._waiting += entries
        if self._reader is None:
            if text:
                yield from self._add("message", text)
            return
        yield from self._read(self._reader.feed(text))

    def finish(self, reason: str) -> Iterator[Event]:
        """The last events of the items; `reason` is the `finish_reason`."""
        if self._reader is not None:
            yield from self._read(self._reader.finish())
        if self._open is None and not self.items:
            yield from self._begin("message", content=[])
        yield from self._close("incomplete" if reason == "length" else "completed")

    def _read(self, deltas: Sequence[Body]) -> Iterator[Event]:
        for delta in deltas:
            if text := delta.get("reasoning_content"):
                yield from self._add("reasoning", text)
            if text := delta.get("content"):
                yield from self._add("message", text)
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    name = call["function"]["name"]
                    named = self._names.get(name, {"name": name})
                    yield from self._begin("function_call", call_id=call["id"], **named, arguments="")
                if arguments := call["function"].get("arguments"):
                    yield self._delta(arguments)
        if deltas and "content" not in deltas[-1]:
            self._waiting.clear()  # of tokens that are no text of a message

    def _add(self, kind: str, text: str) -> Iterator[Event]:
        if self._open is None or self._open["type"] != kind:
            yield from self._begin(kind, content=[], **({"summary": []} if kind == "reasoning" else {}))
        yield self._delta(text)

    def _begin(self, kind: str, **content: Any) -> Iterator[Event]:
        yield from self._close("completed")
        item: Body = {
            "id": f"{_PREFIXES[kind]}_{self._name}_{len(self.items)}",
            "type": kind,
            "status": "in_progress",
            **content,
        }
        if kind == "message":
            item["role"] = "assistant"
        self._open = item
        yield self.event("output_item.added", output_index=len(self.items), item={**item})
        if kind != "function_call":
            yield self.event("content_part.added", **self._place(), part=self._part(""))

    def _place(self) -> Body:
        """Which text of which item."""
        assert self._open is not None
        place = {"item_id": self._open["id"], "output_index": len(self.items)}
        return place if self._open["type"] == "function_call" else {**place, "content_index": 0}

    def _part(self, text: str) -> Body:
        assert self._open is not None
        part: Body = {"type": _TEXTS[self._open["type"]], "text": text}
        if self._open["type"] == "message":
            part |= {"annotations": [], "logprobs": [*self._entries]}
        return part

    def _delta(self, text: str) -> Event:
        assert self._open is not None
        self._text.append(text)
        fields = {**self._place(), "delta": text}
        if self._open["type"] == "message":
            fields["logprobs"], self._waiting = self._waiting, []
            self._entries += fields["logprobs"]
        self._number += len(text)
        return Event(f"response.{_TEXTS[self._open['type']]}.delta", self._number - 1, fields)

    def _close(self, status: str) -> Iterator[Event]:
        if (item := self._open) is None:
            return
        text, kind = "".join(self._text), item["type"]
        if kind == "message":
            self._entries += self._waiting
        place, item["status"] = self._place(), status
        if kind == "function_call":
            item["arguments"] = text
            yield self.event("function_call_arguments.done", **place, name=item["name"], arguments=text)
        else:
            item["content"] = [part := self._part(text)]
            about = {"logprobs": part["logprobs"]} if kind == "message" else {}
            yield self.event(f"{_TEXTS[kind]}.done", **place, text=text, **about)
            yield self.event("content_part.done", **place, part=part)
        yield self.event("output_item.done", output_index=len(self.items), item=item)
        self.items.append(item)
        self._open, self._text, self._entries, self._waiting = None, [], [], []


def output_of(call: Call, answer_format: str) -> Output:
    """The output of a call, before its first character."""
    reader = reader_of(answer_format, call.functions, f"{call.request_id}_0")
    return Output(call.request_id, reader, call.keep["response"].get("tools", ()))


def response(call: Call, status: str, output: Sequence[Body] = (), **more: Any) -> Body:
    """The response object."""
    return {
        "id": call.request_id,
        "object": "response",
        "created_at": drawn_at(call.request_id) or 0,
        "status": status,
        "error": None,
        "incomplete_details": None,
        "model": call.model,
        "output": [*output],
        "usage": None,
        **call.keep["response"],
        **more,
    }


def ended(call: Call, output: Sequence[Body], reason: str, usage: Body) -> Body:
    """The response object at the end of its text."""
    cut = reason == "length"
    return response(
        call,
        "incomplete" if cut else "completed",
        output,
        incomplete_details={"reason": "max_output_tokens"} if cut else None,
        usage=_usage(usage),
    )


def whole(call: Call, natives: Sequence[Body], echoed: Sequence[str] = ()) -> Body:
    """The answer to a plain request."""
    (native,) = natives
    (choice,) = native["choices"]
    output = output_of(call, native.get("answer_format", ""))
    entries = (choice.get("logprobs") or {}).get("content") or ()
    reason = choice["finish_reason"]
    for _ in (*output.feed(choice["message"]["content"], entries), *output.finish(reason)):
        pass
    body = ended(call, output.items, reason, native["usage"])
    return {**body, "created_at": body["created_at"] or native["created"]}


def failure_of(error: HeadraceError) -> Body:
    """The `error` of a response."""
    status = error_status(error)
    word = "invalid_prompt" if isinstance(error, BadRequest) else "server_error"
    return {"code": "rate_limit_exceeded" if status == 429 else word, "message": error.message}


def of_state(call: Call, state: Mapping[str, Any]) -> Body:
    """The response object of a durable request, from the keeper's state."""
    status = _STATUSES.get(state["status"], state["status"])
    if status == "completed":
        body = whole(call, [state["answer"]])
        return {**body, "completed_at": state["ended_at"]} if body["status"] == status else body
    if status == "failed":
        return response(call, status, error=failure_of(error_of(state)))
    return response(call, status)


def answer_turn(call: Call, native: Body) -> Body:
    """The message of an answer, for the conversation that continues it."""
    message: Body = answer(call, [native], ())["choices"][0]["message"]
    kept = ("role", "content", "reasoning_content", "tool_calls")
    return {name: message[name] for name in kept if message.get(name) is not None}


def _usage(usage: Body) -> Body:
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {
            "reasoning_tokens": usage.get("completion_tokens_details", {}).get("reasoning_tokens", 0)
        },
        "total_tokens": usage["total_tokens"],
    }
