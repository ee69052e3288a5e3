"""Chunks of durable chats and completions: any reader goes on anywhere, at any pieces of the text."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.dialects.later import LastId, NumberedChunks, read_last_id
from shared.errors import BadRequest, EngineError
from shared.openai.call import Call, read_call

TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
ANSWER = (
    "<think>\nhm, hm\n</think>\n\nSo be it:\n"
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>'
)
USAGE = {
    "prompt_tokens": 7,
    "completion_tokens": 2,
    "total_tokens": 9,
    "prompt_tokens_details": {"cached_tokens": 0},
}
Frame = dict[str, Any]


def chat(**more: Any) -> Call:
    return read_call({"model": "m", "messages": [], "tools": [TOOL], **more}, chat=True, request_id="r")


def frames(*pieces: tuple[int, str], attempt: int = 1, n: int = 1, end: bool = True) -> list[Frame]:
    """The frames of pieces, each of a choice."""
    head = {"created": 9, "model": "m", "attempt": attempt}
    deltas = [
        {
            "type": "delta",
            "choices": [{"index": i, "first": 0, "count": 1, "delta": {"content": text}}],
        }
        for i, text in pieces
    ]
    ends = [{"index": i, "tokens": 1, "finish_reason": "stop"} for i in range(n)]
    done = {"type": "done", "choices": ends, "usage": USAGE, "timings": {}}
    return [{**head, "type": "accepted", "answer_format": "qwen3"}, *deltas, *([done] if end else [])]


def cut(text: str, places: list[int]) -> list[tuple[int, str]]:
    ends = sorted({place % (len(text) + 1) for place in places} | {len(text)})
    return [(0, text[start:end]) for start, end in zip([0, *ends], ends, strict=False)]


def sent(call: Call, frames: list[Frame], last: str = "") -> list[tuple[str, dict[str, Any]]]:
    """Ids and chunks."""
    stream = NumberedChunks(call, (), read_last_id(last))
    raw = b"".join(stream.write(stream.convert(0, frame)) for frame in frames).decode()
    found = []
    for event in raw.removesuffix("\n\n").split("\n\n") if raw else ():
        place, data = event.split("\n")
        found.append((place.removeprefix("id: "), json.loads(data.removeprefix("data: "))))
    return found


def read(chunks: list[tuple[str, dict[str, Any]]], choice: int = 0) -> tuple[Any, ...]:
    """What a reader has of one choice: each text, the calls, the ends."""
    found: dict[str, Any] = {"reasoning_content": "", "content": "", "arguments": "", "calls": [], "ends": []}
    for _, chunk in chunks:
        for each in chunk["choices"]:
            if each["index"] != choice:
                continue
            delta = each["delta"]
            for name in ("reasoning_content", "content"):
                found[name] += delta.get(name) or ""
            assert delta.get("reasoning") == delta.get("reasoning_content")
            for call in delta.get("tool_calls", ()):
                found["arguments"] += call["function"].get("arguments") or ""
                found["calls"] += [call["id"]] if "id" in call else []
            found["ends"] += [each["finish_reason"]] if each["finish_reason"] else []
    return tuple(found.values())


cuts = st.lists(st.integers(0, len(ANSWER)), max_size=12)


@given(cuts, cuts, st.data())
def test_a_reader_goes_on_after_any_chunk(one: list[int], other: list[int], data: st.DataObject) -> None:
    first, second = (sent(chat(), frames(*cut(ANSWER, places))) for places in (one, other))
    assert read(first) == read(second)
    assert first[-1] == second[-1]
    at = data.draw(st.integers(0, len(first)))
    last = first[at - 1][0] if at else ""
    rest = sent(chat(), frames(*cut(ANSWER, other)), last)
    assert read(first[:at] + rest) == read(first)
    assert sent(chat(), frames(*cut(ANSWER, other)), first[-1][0]) == []


def test_each_choice_has_a_number() -> None:
    pieces = [(0, "one"), (1, "ab"), (0, " two"), (1, "c")]
    call = chat(n=2, tools=[])
    events = sent(call, frames(*pieces, n=2))
    assert [place for place, _ in events[:4]] == ["1.0,-1", "1.0,0", "1.3,0", "1.3,2"]
    for at, (last, _) in enumerate(events):
        turned = frames((1, "abc"), (0, "one two"), n=2)
        rest = events[: at + 1] + sent(call, turned, last)
        assert [read(rest, choice) for choice in (0, 1)] == [read(events, choice) for choice in (0, 1)]


def test_another_attempt_starts_over_unless_the_reader_has_no_text() -> None:
    whole = sent(chat(), frames((0, "Hello"), attempt=3))
    assert sent(chat(), frames((0, "Hello"), attempt=3), "2.4") == whole
    assert sent(chat(), frames((0, "Hello"), attempt=3), "2.0") == whole[1:]
    completion = read_call({"model": "m", "prompt": "x"}, chat=False, request_id="r")
    assert completion.n == 1
    text = {"type": "delta", "choices": [{"index": 0, "first": 0, "count": 1, "text": "Hello"}]}
    accepted, done = frames(attempt=3)
    assert [c["choices"][0]["text"] for _, c in sent(completion, [accepted, text], "2.0")] == ["Hello"]
    assert [c["choices"][0]["text"] for _, c in sent(completion, [accepted, text, done], "3.0")[:1]] == [
        "ello"
    ]


def test_a_text_that_starts_over_before_the_reader_has_caught_up_is_an_error() -> None:
    lost = frames((0, "Hel"), end=False)
    with pytest.raises(EngineError, match="was not the same again"):
        sent(chat(), lost + frames((0, "Hello, you"), attempt=2), "1.5")
    again = sent(chat(), lost + frames((0, "Hello, you"), attempt=2))
    assert read(again)[1] == "Hello, you"
    assert [place for place, _ in again][-1].startswith("2.")


def test_log_probabilities_wait_for_their_text() -> None:
    accepted, done = frames()
    accepted["answer_format"] = ""
    head = {"index": 0, "count": 1}
    empty = {**head, "first": 0, "delta": {"content": ""}, "logprobs": {"content": [{"token": "a"}]}}
    full = {**head, "first": 1, "delta": {"content": "é"}, "logprobs": {"content": [{"token": "b"}]}}
    deltas = [{"type": "delta", "choices": [each]} for each in (empty, full)]
    chunks = sent(chat(tools=[]), [accepted, *deltas, done])
    assert [c["choices"][0]["delta"] for _, c in chunks[:2]] == [
        {"role": "assistant", "content": ""},
        {"content": "é"},
    ]
    assert chunks[1][1]["choices"][0]["logprobs"] == {"content": [{"token": "a"}, {"token": "b"}]}


def test_last_id_has_the_place_of_each_choice() -> None:
    assert read_last_id("") == LastId()
    assert read_last_id("2.10,-1") == LastId(2, (10, -1))
    assert [LastId(2, (10,)).number_of(choice) for choice in (0, 1)] == [10, -1]
    for wrong in ("2", "x.1", "1.", "1.2,", "-1.2", "1.-2"):
        with pytest.raises(BadRequest, match="an id of this stream is expected"):
            read_last_id(wrong)
