"""Streams of events: their shape, and that they can be cut anywhere and go on."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai import omit
from openai._models import construct_type
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import ResponseStreamEvent

from services.gateway.dialects.responses import START, Place, ResponseEvents, place_of
from shared.errors import Cancelled, EngineError
from shared.openai.call import Call, error_body, read_call
from shared.openai.responses.output import whole
from shared.openai.responses.request import read

ID = "resp_6b073829d5707f8dadaf2ca8884accf7"
USAGE = {
    "prompt_tokens": 7,
    "completion_tokens": 2,
    "total_tokens": 9,
    "prompt_tokens_details": {"cached_tokens": 0},
}
TOOL = {"type": "function", "name": "weather", "parameters": {"type": "object"}}
ANSWER = (
    "<think>\nhm, hm\n</think>\n\nSo be it:\n"
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>'
)
Frame = dict[str, Any]


def asked(**more: Any) -> Call:
    fields = {"model": "m", "input": "Hi", "tools": [TOOL], "stream": True, **more}
    return read_call(read(fields), chat=True, request_id=ID)


def frames(pieces: list[str], attempt: int = 1, reason: str | None = "stop") -> list[Frame]:
    """The frames of an attempt; without a reason it does not end."""
    accepted = {"type": "accepted", "attempt": attempt, "frame": 0, "answer_format": "qwen3"}
    deltas = [
        {"type": "delta", "attempt": attempt, "choices": [{"index": 0, "delta": {"content": piece}}]}
        for piece in pieces
    ]
    done = {"type": "done", "choices": [{"index": 0, "finish_reason": reason}], "usage": USAGE}
    return [accepted, *deltas, *([done] if reason else [])]


def cut(text: str, places: list[int]) -> list[str]:
    """The text in pieces, cut at these places."""
    ends = sorted({place % (len(text) + 1) for place in places} | {len(text)})
    return [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def sent(frames: list[Frame], after: Place = START, stored: bool = True, **more: Any) -> list[dict[str, Any]]:
    """The events of a stream, each with the place in its `id`."""
    stream = ResponseEvents(asked(**more), (), after, stored=stored)
    raw = b"".join(stream.write(stream.convert(0, frame)) for frame in frames).decode()
    found = []
    for event in raw.removesuffix("\n\n").split("\n\n") if raw else ():
        place, name, data = event.split("\n")
        fields = json.loads(data.removeprefix("data: "))
        assert name == f"event: {fields['type']}"
        at = Place(*map(int, place.removeprefix("id: ").split(".")))
        assert place_of(fields["sequence_number"]) == at
        found.append({**fields, "at": at})
    return found


def joined(events: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """The events with deltas in a row joined: what a reader has of them."""
    found: list[tuple[Any, ...]] = []
    for event in events:
        rest = {k: v for k, v in event.items() if k not in ("sequence_number", "at", "delta")}
        if "delta" in event and found and found[-1][0] == rest:
            found[-1] = (rest, found[-1][1] + event["delta"], event["at"].number)
        else:
            found.append((rest, event.get("delta", ""), event["at"].number))
    return found


cuts = st.lists(st.integers(0, len(ANSWER)), max_size=12)


@given(cuts, cuts, st.integers(-1, 160))
def test_any_pieces_of_a_text_give_the_same_stream_after_any_number(
    one: list[int], other: list[int], number: int
) -> None:
    first, second = frames(cut(ANSWER, one)), frames(cut(ANSWER, other))
    after = Place(1, number)
    assert joined(sent(first, after)) == joined(sent(second, after))
    events = sent(first)
    if number in [event["at"].number for event in events]:  # a reader that was cut off
        had = [event for event in events if event["at"].number <= number]
        assert joined(had + sent(second, after)) == joined(events)


@given(cuts, cuts, st.integers(0, len(ANSWER)))
def test_a_text_that_repeats_itself_goes_on_in_a_new_attempt(
    one: list[int], other: list[int], length: int
) -> None:
    """Also when the new attempt is lost, too, before it has caught up."""
    lost = frames(cut(ANSWER[:length], one), 1, None)
    again = frames(cut(ANSWER[: length // 2], other), 4, None)
    events = sent(lost + again + frames(cut(ANSWER, other), 7), stored=False)
    assert joined(events) == joined(sent(frames([ANSWER])))
    numbers = [event["sequence_number"] for event in events]
    assert numbers == sorted({*numbers})


def test_another_text_starts_a_stored_stream_over() -> None:
    lost = frames(["One ", "two"], 1, None)
    events = sent(lost + frames(["One ", "three"], 2))
    assert [e["at"].attempt for e in events if e["type"] == "response.created"] == [1, 2]
    over = [event for event in events if event["at"].attempt == 2]
    assert joined(over) == joined(sent(frames(["One three"], 2)))
    shorter = sent(lost + frames(["One "], 2))
    assert joined([e for e in shorter if e["at"].attempt == 2]) == joined(sent(frames(["One "], 2)))
    with pytest.raises(EngineError, match="was not the same again"):
        sent(lost + frames(["One ", "three"], 2), stored=False)
    with pytest.raises(EngineError, match="was not the same again"):
        sent(lost + frames(["One "], 2), stored=False)


def test_a_place_of_an_earlier_attempt_is_the_start() -> None:
    whole = frames(["Hello"], 3)
    assert joined(sent(whole, Place(2, 5))) == joined(sent(whole))
    assert sent(whole)[0]["sequence_number"] == 2 << 32
    assert joined(sent(whole, place_of((2 << 32) + 5))) == joined(sent(whole, Place(3, 5)))


def test_received_text_that_was_not_compared_is_sent_again() -> None:
    """The reader has ten characters; four have come again when the text starts over."""
    resumed = frames(["Hell"], 1, None) + frames(["Help, it is another"], 2)
    events = sent(resumed, Place(1, 13))
    assert joined(events) == joined(sent(frames(["Help, it is another"], 2)))


def test_the_client_reads_it() -> None:
    """Its state machine refuses events that do not follow each other as OpenAI's do."""
    state: Any = ResponseStreamState(input_tools=[], text_format=omit)
    events = sent(frames(cut(ANSWER, [*range(0, len(ANSWER), 3)])), stored=False)
    for event in events:
        fields = {name: value for name, value in event.items() if name != "at"}
        state.handle_event(construct_type(type_=ResponseStreamEvent, value=fields))
    final = state._completed_response
    assert final.output_text == "So be it:"
    assert [item.type for item in final.output] == ["reasoning", "message", *["function_call"] * 2]
    answer = {"index": 0, "message": {"content": ANSWER}, "finish_reason": "stop"}
    plain = whole(asked(), [{"choices": [answer], "usage": USAGE, "answer_format": "qwen3"}])
    assert events[-1]["response"] == plain


def test_an_error_before_the_text_has_a_status_and_a_later_one_an_event() -> None:
    stream = ResponseEvents(asked())
    assert stream.convert(0, frames([])[0]) == []
    (opening, *_) = stream.convert(0, frames(["Hello"])[1])
    assert "response.created" in opening
    last = stream.end(error_body(EngineError("it broke"))).decode()
    fields = json.loads(last.partition("data: ")[2])
    assert (fields["type"], fields["response"]["error"]["message"]) == ("response.failed", "it broke")
    assert stream.end(None) == b""


def test_background_stream_has_a_queued_event() -> None:
    queued = {"type": "queued"}
    events = sent([queued, *frames(["Hi"])], background=True)
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "queued", "in_progress", "output_item.added"]
    assert [e["response"]["status"] for e in events[:3]] == ["queued", "queued", "in_progress"]
    assert joined(events) == joined(sent(frames(["Hi"]), background=True))
    later = sent([queued, *frames(["Hi"], 2)], background=True)
    assert [e["at"] for e in later[:3]] == [(1, 0), (1, 1), (2, 2)]


def test_a_stored_failure_is_an_event_that_every_reader_gets() -> None:
    gone = {"type": "failed", "status": "cancelled", "error": Cancelled("x")}
    assert [e["at"].number for e in sent([gone])] == [0, 1, 2]
    (last,) = sent([gone], Place(2, 500))
    assert (last["at"], last["type"], last["response"]["status"]) == (
        (2, 501),
        "response.failed",
        "cancelled",
    )
    (late,) = sent([*frames(["Hello"], 1, None), {**gone, "status": "failed"}], Place(1, 50))
    assert (late["at"], late["response"]["error"]) == (
        (1, 51),
        {"code": "server_error", "message": "x"},
    )


def test_a_reader_without_text_goes_on_with_any_attempt() -> None:
    """It read that its response waits; the text came later, under another attempt."""
    events = sent(frames(["Hi"], 300), Place(1, 1), background=True)
    assert [e["type"] for e in events[:2]] == ["response.in_progress", "response.output_item.added"]


def test_a_stored_response_outlives_the_error_of_its_stream() -> None:
    stream = ResponseEvents(asked(), (), START, stored=True)
    stream.convert(0, frames([])[0])
    data = stream.end(error_body(EngineError("cut"))).decode()
    fields = json.loads(data.partition("data: ")[2])
    assert (fields["type"], fields["message"], fields["sequence_number"]) == ("error", "cut", 1)
    assert "id:" not in data
