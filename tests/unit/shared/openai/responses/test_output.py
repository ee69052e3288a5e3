"""Text becomes items and numbered events; the numbers depend on the text alone."""

from __future__ import annotations

from typing import Any

from openai.types.responses import Response
from pydantic import TypeAdapter

from shared.api import Tool
from shared.errors import BadRequest, Overloaded
from shared.openai.call import Call, answer, read_call
from shared.openai.responses.output import Event, answer_turn, failure_of, of_state, output_of, whole
from shared.openai.responses.request import read

ID = "resp_6b073829d5707f8dadaf2ca8884accf7"
NAME = ID.removeprefix("resp_")
USAGE = {
    "prompt_tokens": 7,
    "completion_tokens": 2,
    "total_tokens": 9,
    "prompt_tokens_details": {"cached_tokens": 4},
}
TOOL = {"type": "function", "name": "weather", "parameters": {"type": "object"}}
THOUGHT = "<think>\nhm\n</think>\n\n"
CALLED = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>'


def asked(**more: Any) -> Call:
    return read_call(read({"model": "m", "input": "Hi", **more}), chat=True, request_id=ID)


def native(text: str, reason: str = "stop", **more: Any) -> dict[str, Any]:
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "logprobs": None}
    return {
        "created": 9, "model": "m", "choices": [{**choice, "finish_reason": reason}], "usage": USAGE, **more,
    }  # fmt: skip


def test_plain_answer_has_the_responses_form() -> None:
    body = whole(asked(metadata={"a": "b"}), [native("Hello")])
    Response.model_validate(body, strict=True)
    text = {"type": "output_text", "text": "Hello", "annotations": [], "logprobs": []}
    assert body["output"] == [
        {
            "id": f"msg_{NAME}_0",
            "type": "message",
            "status": "completed",
            "content": [text],
            "role": "assistant",
        }
    ]
    assert (body["id"], body["created_at"], body["status"]) == (ID, 0x6B073829, "completed")
    assert (body["metadata"], body["error"], body["incomplete_details"]) == ({"a": "b"}, None, None)
    assert body["usage"] == {
        "input_tokens": 7,
        "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
        "output_tokens": 2,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 9,
    }
    cut = whole(asked(), [native("", "length")])
    assert (cut["status"], cut["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert [item["content"][0]["text"] for item in cut["output"]] == [""]


def test_reasoning_text_and_calls_are_items() -> None:
    call = asked(tools=[TOOL])
    usage = {**USAGE, "completion_tokens_details": {"reasoning_tokens": 4}}
    answered = native(f"{THOUGHT}So:\n{CALLED}\n{CALLED}", answer_format="qwen3", usage=usage)
    body = whole(call, [answered])
    Response.model_validate(body, strict=True)
    assert body["usage"]["output_tokens_details"] == {"reasoning_tokens": 4}
    assert answer(call, [answered], ())["usage"]["completion_tokens_details"] == {"reasoning_tokens": 4}
    reasoning, message, first, second = body["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "hm"}]
    assert (reasoning["summary"], reasoning["status"]) == ([], "completed")
    assert message["content"][0]["text"].startswith("So:")
    assert {name: first[name] for name in ("id", "type", "name", "arguments", "status")} == {
        "id": f"fc_{NAME}_2",
        "type": "function_call",
        "name": "weather",
        "arguments": '{"city": "Ulm"}',
        "status": "completed",
    }
    assert first["call_id"] != second["call_id"]
    turn = answer_turn(call, answered)
    assert (turn["reasoning_content"], [c["id"] for c in turn["tool_calls"]]) == (
        "hm",
        [first["call_id"], second["call_id"]],
    )


def test_a_call_of_a_function_in_a_namespace_names_both() -> None:
    call = asked(tools=[{"type": "namespace", "name": "sky", "tools": [TOOL]}, {**TOOL, "name": "sky__x"}])
    text = CALLED.replace("weather", "sky__weather") + "\n" + CALLED.replace("weather", "sky__x")
    body = whole(call, [native(text, answer_format="hermes")])
    Response.model_validate(body, strict=True)
    assert [(item["name"], item.get("namespace")) for item in body["output"]] == [
        ("weather", "sky"),
        ("sky__x", None),
    ]
    output = output_of(call, "hermes")
    events = [*output.feed(text), *output.finish("stop")]
    done = next(event for event in events if event.type.endswith("arguments.done"))
    assert done.fields["name"] == "weather"
    long = "n" * 64
    call = asked(tools=[{"type": "namespace", "name": long, "tools": [{**TOOL, "name": long}]}])
    assert TypeAdapter(list[Tool]).validate_python(call.bodies[0]["tools"])  # as a native request has it
    (item,) = whole(call, [native(CALLED.replace("weather", f"{long}__{long}"), answer_format="hermes")])[
        "output"
    ]
    assert (item["name"], item["namespace"]) == (long, long)


def test_a_delta_takes_a_number_for_each_character() -> None:
    output = output_of(asked(), "")
    opening = [output.event("created"), output.event("in_progress")]
    events = [*opening, *output.feed("Hé"), *output.feed(""), *output.feed("llo"), *output.finish("stop")]
    assert [(e.type.removeprefix("response."), e.number) for e in events] == [
        ("created", 0),
        ("in_progress", 1),
        ("output_item.added", 2),
        ("content_part.added", 3),
        ("output_text.delta", 5),
        ("output_text.delta", 8),
        ("output_text.done", 9),
        ("content_part.done", 10),
        ("output_item.done", 11),
    ]


def test_a_delta_is_cut_after_any_of_its_numbers() -> None:
    entries = [{"token": "He"}, {"token": "l"}, {"token": "lo"}]
    delta = Event("d", 8, {"delta": "Hello", "logprobs": entries})  # of the numbers 4 to 8
    assert [None if (e := delta.after(n)) is None else e.fields["delta"] for n in (3, 4, 7, 8)] == [
        "Hello",
        "ello",
        "o",
        None,
    ]
    cut = delta.after(5)
    assert cut is not None
    assert (cut.number, cut.fields["logprobs"]) == (8, entries[1:])
    one = Event("s", 4, {})
    assert (one.after(3), one.after(4)) == (one, None)


def test_log_probabilities_wait_for_their_text() -> None:
    output = output_of(asked(top_logprobs=1), "")
    events = [*output.feed("", [{"token": ""}]), *output.feed("é", [{"token": "é"}]), *output.finish("stop")]
    (delta,) = (e.fields for e in events if e.type.endswith(".delta"))
    assert delta["logprobs"] == [{"token": ""}, {"token": "é"}]
    assert output.items[0]["content"][0]["logprobs"] == delta["logprobs"]


def test_state_of_a_durable_request_becomes_a_response() -> None:
    call, ended = asked(background=True), {"ended_at": 0x6B07382A}
    for status, shown in (("queued", "queued"), ("running", "in_progress")):
        body = of_state(call, {"status": status})
        Response.model_validate(body, strict=True)
        assert (body["status"], body["output"]) == (shown, [])
    done = of_state(call, {**ended, "status": "completed", "answer": native("Hello")})
    assert (done["status"], done["completed_at"]) == ("completed", 0x6B07382A)
    cut = of_state(call, {**ended, "status": "completed", "answer": native("Hello", "length")})
    assert (cut["status"], "completed_at" in cut) == ("incomplete", False)
    error = {"error": {"code": 500, "message": "it broke"}}
    broken = of_state(call, {**ended, "status": "failed", **error})
    Response.model_validate(broken, strict=True)
    assert (broken["status"], broken["error"]) == ("failed", {"code": "server_error", "message": "it broke"})
    gone = of_state(call, {**ended, "status": "cancelled", **error})
    assert (gone["status"], gone["error"]) == ("cancelled", None)
    assert failure_of(BadRequest("x"))["code"] == "invalid_prompt"
    assert failure_of(Overloaded("x"))["code"] == "rate_limit_exceeded"
