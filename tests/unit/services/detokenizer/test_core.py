"""The detokenizer's core: exact frames, the ends of requests, races, and a model-based state test."""

from __future__ import annotations

import json
from array import array
from base64 import b64encode
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.text_models import write_sentencepiece_gguf

from services.detokenizer.core import MOST_ASKED, DetokenizerCore
from services.detokenizer.response import Command, Fault, Publish, SendTo
from shared.codec import Envelope, encode
from shared.errors import NO_VECTOR
from shared.messages import (
    EMBEDDING,
    EMBEDDING_BASE64,
    Close,
    Detached,
    Ended,
    Message,
    Open,
    StopFound,
    StreamAt,
    Timings,
    Tokenized,
    Tokens,
    Usage,
    floats,
    ints,
)
from shared.vocab.files import ModelFiles
from shared.vocab.vocabulary import Vocabulary, load_vocabulary

SCHEDULER = "scheduler.a"
TRACE = "00-0123456789abcdef0123456789abcdef-0123456789abcdef-01"
TIMINGS = Timings(
    received_wall_us=5_000_000, tokenize_us=1_000, transit_us=500, queue_us=2_000, prefill_us=10_000,
    decode_us=20_000, prefill_chunks=1, steps=3,
)  # fmt: skip


@pytest.fixture(scope="module")
def letters(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    """Tokens 3 to 258 are the bytes 0 to 255; 0 to 2 are control tokens."""
    path = write_sentencepiece_gguf(tmp_path_factory.mktemp("core") / "l.gguf", {})
    return load_vocabulary(ModelFiles("l", path))


@pytest.fixture
def core(letters: Vocabulary) -> DetokenizerCore:
    return DetokenizerCore(letters)


def opened(seq: int = 7, **more: Any) -> Open:
    fields = {
        "request": "r1", "attempt": 1, "tenant": "t", "model": "tiny", "inbox": "in", "stream": True,
        "received_wall_us": 5_000_000, "prompt_tokens": 4,
    }  # fmt: skip
    return Open(seq=seq, **{**fields, **more})


def tokens(first: int, text: str | bytes, seq: int = 7) -> Tokens:
    data = text.encode() if isinstance(text, str) else text
    return Tokens(
        executor="e",
        step=1,
        seqs=ints([seq]),
        first=ints([first]),
        counts=ints([len(data)]),
        ids=ints(3 + byte for byte in data),
    )


def close(final: int, reason: str = "stop", seq: int = 7, **more: Any) -> Close:
    usage = Usage(prompt_tokens=4, completion_tokens=final, cached_tokens=more.pop("cached", 0))
    return Close(seq=seq, final=final, reason=reason, usage=usage, timings=TIMINGS, **more)


def frames(commands: list[Command]) -> list[dict[str, Any]]:
    return [json.loads(c.data) for c in commands if isinstance(c, Publish)]


def sent_to_scheduler(commands: list[Command]) -> list[Message]:
    return [c.message for c in commands if isinstance(c, SendTo)]


def run(core: DetokenizerCore, *messages: Message) -> list[Command]:
    out: list[Command] = []
    for message in messages:
        out += core.handle(SCHEDULER, message, TRACE)
        out += core.flush()
    return out


@pytest.mark.parametrize("stream", [True, False])
def test_the_usage_counts_the_reasoning_of_all_choices(core: DetokenizerCore, stream: bool) -> None:
    """Up to where each choice ends; a token is a byte here."""
    options = {"stream": stream, "choices": 2, "answer_format": "qwen3"}
    out = run(
        core,
        opened(7, choice=0, **options),
        opened(8, choice=1, **options),
        tokens(0, "<think>\nh\u00e9</think>yes", 7),
        tokens(0, "<think>one two", 8),
        close(22, seq=7),
        close(10, "length", seq=8),
    )
    usage = frames(out)[-1]["usage"]
    assert (usage["completion_tokens"], usage["completion_tokens_details"]) == (32, {"reasoning_tokens": 6})


@pytest.mark.parametrize(
    ("most_calls", "reason", "named"), [(2, "stop", ("shell",)), (2, "length", ()), (0, "stop", ())]
)
def test_ended_names_the_functions_of_an_answer_that_may_call_some_when_it_is_whole(
    core: DetokenizerCore, most_calls: int, reason: str, named: tuple[str, ...]
) -> None:
    text = '<tool_call>\n{"name": "shell", "arguments": {"command": "ls"}}\n</tool_call>'
    out = run(
        core,
        opened(answer_format="hermes", most_calls=most_calls),
        tokens(0, text),
        close(len(text), reason),
    )
    assert sent_to_scheduler(out) == [Ended(seq=7, index=len(text), reason=reason, calls=named)]


def test_ended_names_few_functions_and_cuts_their_names(core: DetokenizerCore) -> None:
    names = [f"{number}{'n' * 99}" for number in range(10)]
    text = "".join(f'<tool_call>{{"name": "{name}", "arguments": {{}}}}</tool_call>' for name in names)
    out = run(core, opened(answer_format="hermes", most_calls=2), tokens(0, text), close(len(text)))
    (ended,) = sent_to_scheduler(out)
    assert isinstance(ended, Ended)
    assert ended.calls == tuple(name[:64] for name in names[:8])


def test_function_whose_name_no_message_holds_is_named_with_a_mark(core: DetokenizerCore) -> None:
    """Models can write half of a surrogate pair as an escape in JSON."""
    text = '<tool_call>\n{"name": "a\\ud800", "arguments": {}}\n</tool_call>'
    out = run(core, opened(answer_format="hermes", most_calls=2), tokens(0, text), close(len(text)))
    (ended,) = sent_to_scheduler(out)
    assert isinstance(ended, Ended)
    assert ended.calls == ("a?",)
    assert encode(Envelope("detokenizer.d", 1, 1, ended))


def test_a_streamed_chat_byte_for_byte(core: DetokenizerCore) -> None:
    out = run(core, opened(), tokens(0, 'a"'), tokens(2, "é\n"), close(5, "length", cached=3))
    published = [c for c in out if isinstance(c, Publish)]
    head = b'"request_id":"r1","attempt":1,"frame":'
    assert [c.data for c in published] == [
        b'{"type":"accepted",' + head + b'0,"model":"tiny","created":5,"prompt_tokens":4}',
        b'{"type":"delta",' + head + b'1,"choices":[{"index":0,"first":0,"count":2,'
        b'"delta":{"role":"assistant","content":"a\\""},"finish_reason":null}]}',
        b'{"type":"delta",'
        + head
        + '2,"choices":[{"index":0,"first":2,"count":3,'
        '"delta":{"content":"é\\n"},"finish_reason":null}]}'.encode(),
        b'{"type":"done",' + head + b'3,"model":"tiny","created":5,'
        b'"choices":[{"index":0,"tokens":5,"finish_reason":"length"}],'
        b'"timings":{"tokenize_ms":1.0,"queue_ms":2.0,"prefill_ms":10.0,"ttft_ms":13.5,"decode_ms":20.0,'
        b'"total_ms":33.5,"prompt_per_second":400.0,"predicted_per_second":200.0},'
        b'"usage":{"prompt_tokens":4,"completion_tokens":5,"total_tokens":9,'
        b'"prompt_tokens_details":{"cached_tokens":3}}}',
    ]
    assert [c.number for c in published] == [1, 1, 1, 1]
    assert [dict(c.headers) for c in published[:3]] == [{}, {}, {}]
    assert published[3].headers == {"Headrace-End": "1", "traceparent": TRACE}
    assert sent_to_scheduler(out) == [Ended(seq=7, index=5, reason="length")]
    assert core.is_idle
    assert core.status() == {
        "sequences": 0,
        "requests": 0,
        "failover": 0,
        "backups": 0,
        "unconfirmed": 0,
        "frames": 4,
        "tokens": 5,
    }


def test_a_plain_chat_is_one_reply(core: DetokenizerCore) -> None:
    out = run(core, opened(stream=False), tokens(0, "héllo"), close(6))
    (body,) = frames(out)
    assert {**body, "usage": None, "timings": None} == {
        "id": "r1",
        "object": "chat.completion",
        "created": 5,
        "model": "tiny",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "héllo"},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": None,
        "timings": None,
    }
    assert body["usage"]["total_tokens"] == 10


def test_completions_have_text(core: DetokenizerCore) -> None:
    out = run(core, opened(stream=False, format="completion", include_usage=False), tokens(0, "x"), close(1))
    (body,) = frames(out)
    assert body["object"] == "text_completion"
    assert body["choices"][0]["text"] == "x"
    assert "usage" not in body
    streamed = run(core, opened(format="completion"), tokens(0, "y"), close(1))
    assert frames(streamed)[1]["choices"][0]["text"] == "y"


def test_two_choices_end_together_and_share_frames(core: DetokenizerCore) -> None:
    both = Tokens(
        executor="e", step=2, seqs=ints([7, 8]), first=ints([0, 0]), counts=ints([1, 2]),
        ids=ints([3 + 65, 3 + 66, 3 + 67]),
    )  # fmt: skip
    out = run(core, opened(7, choices=2), opened(8, choice=1, choices=2), both)
    assert [f["type"] for f in frames(out)] == ["accepted", "delta"]
    assert [(c["index"], c["count"], c["delta"]["content"]) for c in frames(out)[1]["choices"]] == [
        (0, 1, "A"),
        (1, 2, "BC"),
    ]
    first = run(core, close(1, "length", cached=2))
    assert frames(first) == []
    assert sent_to_scheduler(first) == [Ended(seq=7, index=1, reason="length")]
    (done,) = frames(run(core, close(2, "stop", seq=8, cached=4)))
    assert done["choices"] == [
        {"index": 0, "tokens": 1, "finish_reason": "length"},
        {"index": 1, "tokens": 2, "finish_reason": "stop"},
    ]
    assert done["usage"]["completion_tokens"] == 3
    assert done["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}


def test_a_lagging_reader_gets_one_merged_frame(core: DetokenizerCore) -> None:
    run(core, opened())
    for index, char in enumerate("abc"):
        assert core.handle(SCHEDULER, tokens(index, char)) == []
    (frame,) = frames(core.flush())
    assert frame["choices"][0] | {"delta": frame["choices"][0]["delta"]["content"]} == {
        "index": 0, "first": 0, "count": 3, "delta": "abc", "finish_reason": None,
    }  # fmt: skip
    assert core.flush() == []


def test_text_that_waits_goes_out_before_the_end(core: DetokenizerCore) -> None:
    run(core, opened())
    core.handle(SCHEDULER, tokens(0, "abc"))
    out = core.handle(SCHEDULER, close(3))
    assert [f["type"] for f in frames(out)] == ["delta", "done"]


def test_a_plain_answer_names_the_stop_string_that_ended_it(core: DetokenizerCore) -> None:
    (body,) = frames(run(core, opened(stream=False, stop=("no", "END")), tokens(0, "abEND"), close(5)))
    (choice,) = body["choices"]
    assert (choice["message"]["content"], choice["stop_reason"]) == ("ab", "END")


def test_the_stop_string_wins_over_a_close_on_its_way(core: DetokenizerCore) -> None:
    out = run(core, opened(stop=("END",)), tokens(0, "ab EN"), tokens(5, "Dxy"))
    assert sent_to_scheduler(out) == [StopFound(seq=7, index=6)]
    assert "".join(c["delta"]["content"] for f in frames(out)[1:] for c in f["choices"]) == "ab "
    late = run(core, tokens(8, "zz"), close(10, "length"))
    assert sent_to_scheduler(late) == [Ended(seq=7, index=6, reason="stop")]
    done = frames(late)[-1]
    assert done["choices"] == [{"index": 0, "tokens": 6, "finish_reason": "stop", "stop_reason": "END"}]
    assert done["usage"]["completion_tokens"] == 6


def test_a_reopened_stream_starts_over_as_a_new_attempt(core: DetokenizerCore) -> None:
    run(core, opened(), tokens(0, "ab"))
    again = run(core, opened(9, attempt=2, tokens=ints(3 + b for b in b"abc")), tokens(3, "d", seq=9))
    assert [(f["type"], f["attempt"], f["frame"]) for f in frames(again)] == [
        ("accepted", 1001, 0),
        ("delta", 1001, 1),
        ("delta", 1001, 2),
    ]
    assert [(f["choices"][0]["first"], f["choices"][0]["count"]) for f in frames(again)[1:]] == [
        (0, 3),
        (3, 1),
    ]
    assert run(core, opened(7)) == []  # the earlier attempt, late
    assert run(core, opened(9, attempt=2)) == []  # a duplicate
    assert run(core, tokens(2, "x")) == []  # tokens of the earlier attempt
    assert frames(run(core, close(4, seq=9)))[-1]["type"] == "done"
    assert core.is_idle


def test_an_error_close_ends_all_choices_at_once(core: DetokenizerCore) -> None:
    run(core, opened(7, choices=2), opened(8, choice=1, choices=2), tokens(0, "A"))
    out = run(core, close(1, "error", code=408, message="not done\nwithin 1 s", retry_after_ms=5))
    (frame,) = frames(out)
    assert frame == {
        "type": "error", "request_id": "r1", "attempt": 1, "frame": 2,
        "error": {
            "code": 408, "type": "timeout", "message": "not done\nwithin 1 s", "param": None,
            "retryable": True,
            "retry_after_ms": 5, "request_id": "r1", "trace_id": "0123456789abcdef0123456789abcdef",
        },
    }  # fmt: skip
    assert next(c for c in out if isinstance(c, Publish)).headers == {
        "Headrace-End": "1", "Nats-Service-Error": "not done within 1 s", "Nats-Service-Error-Code": "408",
        "traceparent": TRACE,
    }  # fmt: skip
    assert sent_to_scheduler(out) == [Ended(seq=7, index=1, reason="error")]
    other = run(core, close(0, "error", seq=8, code=408, message="not done"))
    assert frames(other) == []
    assert sent_to_scheduler(other) == [Ended(seq=8, index=0, reason="error")]
    assert core.is_idle


def test_a_plain_request_fails_with_the_same_body(core: DetokenizerCore) -> None:
    out = run(core, opened(stream=False), close(0, "error", code=499, message="cancelled"))
    (body,) = frames(out)
    assert (body["type"], body["error"]["code"], body["error"]["request_id"]) == ("error", 499, "r1")


@pytest.mark.parametrize("lost", [tokens(3, "x"), close(9)])
def test_lost_tokens_are_a_typed_error(core: DetokenizerCore, lost: Message) -> None:
    run(core, opened(), tokens(0, "a"))
    out = run(core, lost)
    assert isinstance(out[0], Fault)
    assert "r1" in out[0].detail
    assert sent_to_scheduler(out)[0] == Detached(seqs=ints([7]))
    assert frames(out)[-1]["error"]["code"] == 500
    assert core.is_idle
    assert sent_to_scheduler(run(core, close(9)))[-1] == Ended(seq=7, index=9, reason="stop")


def test_a_client_that_has_gone_is_reported(core: DetokenizerCore) -> None:
    out = run(core, opened(7, choices=2), opened(8, choice=1, choices=2))
    number = next(c.number for c in out if isinstance(c, Publish))
    assert core.on_client_gone(number) == [SendTo(SCHEDULER, Detached(seqs=ints([7, 8])))]
    assert core.on_client_gone(99) == []


def test_a_lost_scheduler_fails_only_its_own_requests_where_nothing_was_kept(core: DetokenizerCore) -> None:
    run(core, opened())
    core.handle("scheduler.b", opened(request="r2", inbox="in2"))
    out = core.failover.on_lost(SCHEDULER, "the scheduler has gone")
    (frame,) = frames(out)
    assert (frame["error"]["code"], frame["error"]["message"]) == (
        503,
        "the scheduler has gone; send the request again",
    )
    assert core.status()["requests"] == 1


def test_lost_part_of_a_stream_is_reported_when_nothing_is_open(core: DetokenizerCore) -> None:
    """The Open of a request may be among it: only the scheduler knows of that one."""
    assert core.on_stream_lost(SCHEDULER) == [SendTo(SCHEDULER, Detached(seqs=ints()))]


@pytest.mark.parametrize("stream", [True, False])
def test_a_lost_part_of_a_stream_costs_no_answer(core: DetokenizerCore, stream: bool) -> None:
    """The scheduler opens all again. What is on its way until then has a hole before it."""
    seen = run(
        core, opened(stream=stream), tokens(0, "ab"), opened(9, stream=stream, request="r2", inbox="b")
    )
    assert sent_to_scheduler(core.on_stream_lost(SCHEDULER)) == [Detached(seqs=ints())]
    assert run(core, tokens(4, "e"), close(5), close(0, "moved", seq=9)) == []
    assert core.status()["requests"] == 1, "one was moved elsewhere meanwhile"
    out = run(core, opened(stream=stream, attempt=2, tokens=ints(3 + b for b in b"abcde")), close(5))
    *_, last = frames(out)
    if stream:
        attempts = [frame["attempt"] for frame in frames(seen) + frames(out) if frame["request_id"] == "r1"]
        assert attempts == sorted(attempts)
        assert len(set(attempts)) == 2
        assert frames(out)[1]["choices"][0]["delta"]["content"] == "abcde"
        assert (last["type"], last["choices"][0]["tokens"]) == ("done", 5)
    else:
        assert [frame["choices"][0]["message"]["content"] for frame in frames(out)] == ["abcde"]
    assert sent_to_scheduler(out) == [Ended(seq=7, index=5, reason="stop")]
    assert core.is_idle


def test_request_that_is_not_opened_again_is_requested_again(core: DetokenizerCore) -> None:
    """The word about the loss may be lost itself."""
    run(core, opened())
    core.on_stream_lost(SCHEDULER)
    assert core.upkeep() == []
    assert sent_to_scheduler(core.upkeep()) == [Detached(seqs=ints())]
    assert core.upkeep() == []
    run(core, opened(attempt=2))
    assert [core.upkeep() for _ in range(3)] == [[]] * 3


def test_a_request_with_a_hole_goes_on_elsewhere_when_its_scheduler_dies(core: DetokenizerCore) -> None:
    asked = Tokenized(
        request="r1", attempt=1, tenant="t", model="tiny", inbox="in", stream=True, tokens=ints([9])
    )
    run(core, opened(), tokens(0, "ab"), asked)
    core.on_stream_lost(SCHEDULER)
    core.failover.on_lost(SCHEDULER, "gone")
    (resumed,) = sent_to_scheduler(core.failover.advance(["b"], 0))
    assert isinstance(resumed, Tokenized)
    assert list(resumed.generated) == [2]
    out = core.handle("scheduler.b", opened(70))
    out += core.handle("scheduler.b", tokens(2, "c", seq=70)) + core.flush()
    assert frames(out)[-1]["choices"][0]["delta"]["content"] == "c"


def test_a_request_that_is_never_opened_again_is_taken_over(core: DetokenizerCore) -> None:
    """Its scheduler has forgotten it: it goes on there or elsewhere, after the last token before the hole.
    One whose copy was lost, too, ends with an error. Those that it does open go on."""
    asked = Tokenized(request="r2", attempt=1, tenant="t", model="tiny", inbox="in", tokens=ints([9]))
    run(core, opened(7), opened(8, request="r2"), opened(9, request="r3"), tokens(0, "a"), tokens(0, "a", 8))
    run(core, asked)
    core.on_stream_lost(SCHEDULER)
    run(core, opened(7, attempt=2))
    out = [core.upkeep(1_000_000 * heartbeat) for heartbeat in range(20)]
    late_messages = [message for commands in out for message in sent_to_scheduler(commands)]
    assert late_messages == [Detached(seqs=ints())] * (MOST_ASKED - 1) + [Detached(seqs=ints([9]))]
    (error,) = [frame for commands in out for frame in frames(commands)]
    assert (error["type"], error["request_id"], error["error"]["code"]) == ("error", "r3", 503)
    (resumed,) = sent_to_scheduler(core.failover.advance(["a"], 0))
    assert isinstance(resumed, Tokenized)
    assert (resumed.request, list(resumed.generated)) == ("r2", [1])
    run(core, opened(70, request="r2", attempt=1), tokens(1, "b", 70))
    assert [core.upkeep(heartbeat) for heartbeat in range(20)] == [[]] * 20
    assert [request.opened.request for request in core.streams] == ["r1", "r2"]


def test_silent_scheduler_gets_no_request_to_open_again(core: DetokenizerCore) -> None:
    """Another one will go on with its requests."""
    run(core, opened())
    core.on_stream_lost(SCHEDULER)
    assert [core.upkeep(heartbeat, {"scheduler.b"}.__contains__) for heartbeat in range(20)] == [[]] * 20
    assert len(core.streams) == 1


def test_other_messages_are_faults(core: DetokenizerCore) -> None:
    (fault,) = core.handle(SCHEDULER, StreamAt(last_seq=1))
    assert fault == Fault("StreamAt of scheduler.a is not for a detokenizer")


def scored(core: DetokenizerCore, form: str, **more: Any) -> list[dict[str, Any]]:
    """Two sequences in one step, of which the second asked: "a" -0.5 and control token 2 -0.25."""
    step = Tokens(
        executor="e", step=1, seqs=ints([7, 8]), first=ints([0, 0]), counts=ints([1, 2]),
        ids=ints([3 + 66, 3 + 97, 2]), logprobs=floats([0, -0.5, -0.25]), top_counts=ints([0, 3, 1]),
        top_ids=ints([3 + 97, 3 + 0xC3, 3 + 0xC4, 2]), top_logprobs=floats([-0.5, -1.5, -2.5, -0.25]),
    )  # fmt: skip
    run(core, opened(7, request="other"))
    out = run(core, opened(8, format=form, logprobs=3, **more), step, close(2, seq=8))
    return [frame for frame in frames(out) if frame.get("request_id", frame.get("id")) == "r1"]


def test_logprobs_of_a_chat_have_its_form(core: DetokenizerCore) -> None:
    delta = scored(core, "chat")[1]
    first = {"token": "a", "logprob": -0.5, "bytes": [97]}
    halves = [{"token": "\ufffd", "logprob": p, "bytes": [byte]} for p, byte in ((-1.5, 0xC3), (-2.5, 0xC4))]
    assert delta["choices"][0]["logprobs"]["content"] == [
        {**first, "top_logprobs": [first, *halves]},
        {
            "token": "</s>", "logprob": -0.25, "bytes": list(b"</s>"),
            "top_logprobs": [{"token": "</s>", "logprob": -0.25, "bytes": list(b"</s>")}],
        },
    ]  # fmt: skip


def test_logprobs_of_a_completion_have_its_form(core: DetokenizerCore) -> None:
    """Two alternatives are halves of characters, with one text: the more probable one counts."""
    (body,) = scored(core, "completion", stream=False)
    assert body["choices"][0]["logprobs"] == {
        "tokens": ["a", "</s>"],
        "token_logprobs": [-0.5, -0.25],
        "top_logprobs": [{"a": -0.5, "\ufffd": -1.5}, {"</s>": -0.25}],
        "text_offset": [0, 1],
    }


def test_ids_outside_the_vocabulary_have_no_text_in_logprobs(core: DetokenizerCore) -> None:
    """A padded output layer may choose one, or name one as an alternative."""
    far = 10**6
    step = Tokens(
        executor="e", step=1, seqs=ints([8]), first=ints([0]), counts=ints([1]), ids=ints([far]),
        logprobs=floats([-0.5]), top_counts=ints([1]), top_ids=ints([far]), top_logprobs=floats([-0.5]),
    )  # fmt: skip
    shapes = []
    for form in ("chat", "completion"):
        asked = opened(8, format=form, logprobs=2, request=form, stream=False)
        (answer,) = frames(run(core, asked, step, close(1, seq=8)))
        shapes.append(answer["choices"][0]["logprobs"])
    nothing = {"token": "", "logprob": -0.5, "bytes": []}
    assert shapes[0] == {"content": [{**nothing, "top_logprobs": [nothing]}]}
    assert (shapes[1]["tokens"], shapes[1]["top_logprobs"]) == ([""], [{"": -0.5}])


EVENTS = st.lists(
    st.tuples(st.integers(0, 2), st.sampled_from(["tokens", "again", "flush", "close"])), max_size=40
)
ANSWERS = st.lists(st.binary(max_size=12), min_size=3, max_size=3)


@given(ANSWERS, EVENTS, st.booleans())
def test_any_order_of_events_gives_whole_texts(
    letters: Vocabulary, answers: list[bytes], events: list[tuple[int, str]], chat: bool
) -> None:
    """Three streams, tokens one by one, repeats, flushes and closes at any time."""
    core = DetokenizerCore(letters)
    sent, closed, out = [0, 0, 0], set[int](), list[Command]()
    for seq in range(3):
        form = "chat" if chat else "completion"
        out += core.handle(SCHEDULER, opened(seq, request=f"r{seq}", inbox=f"in{seq}", format=form))
    for seq, what in [*events, *((seq, "close") for seq in range(3))]:
        if what == "flush":
            out += core.flush()
        elif seq in closed:
            continue
        elif what == "close":
            closed.add(seq)
            out += core.handle(SCHEDULER, close(sent[seq], seq=seq))
        else:
            at = sent[seq] if what == "tokens" else max(0, sent[seq] - 2)
            out += core.handle(SCHEDULER, tokens(at, answers[seq][at : sent[seq] + 1], seq))
            sent[seq] = min(sent[seq] + 1, len(answers[seq]))
    assert core.is_idle
    for seq in range(3):
        got = [json.loads(c.data) for c in out if isinstance(c, Publish) and c.inbox == f"in{seq}"]
        assert [frame["frame"] for frame in got] == list(range(len(got)))
        choices = [choice for frame in got if frame["type"] == "delta" for choice in frame["choices"]]
        text = "".join(c["delta"]["content"] if chat else c["text"] for c in choices)
        assert text == letters.decode([3 + byte for byte in answers[seq][: sent[seq]]])
        ends = [c["first"] + c["count"] for c in choices]
        assert [c["first"] for c in choices] == [0, *ends][: len(choices)]
        assert got[-1]["choices"] == [{"index": 0, "tokens": sent[seq], "finish_reason": "stop"}]


def test_a_request_that_moved_to_another_shard_is_dropped_without_a_word(core: DetokenizerCore) -> None:
    run(core, opened(7, choices=2), opened(8, choice=1, choices=2), tokens(0, "A"))
    assert run(core, close(0, "moved"), close(0, "moved", seq=8)) == []
    assert core.is_idle
    assert core.flush() == []


@pytest.mark.parametrize("base64", [False, True])
def test_a_vector_is_the_whole_reply_and_an_executor_without_vectors_an_error(
    core: DetokenizerCore, base64: bool
) -> None:
    form = EMBEDDING_BASE64 if base64 else EMBEDDING
    data = floats([0.6, -0.8]).tobytes()
    out = run(core, opened(stream=False, format=form), close(0, vector=data), close(0, vector=data))
    (reply,) = frames(out)
    assert (reply["object"], reply["id"], reply["model"]) == ("embedding", "r1", "tiny")
    given = reply["embedding"]
    assert given == b64encode(data).decode() if base64 else array("f", given).tobytes() == data
    assert base64 or given == [0.600000024, -0.800000012], "no more digits than a float32 has"
    assert reply["usage"]["total_tokens"] == reply["usage"]["prompt_tokens"] == 4
    assert sent_to_scheduler(out) == [Ended(seq=7, index=0, reason="stop")] * 2
    out = run(core, opened(8, stream=False, format=form, request="r2"), tokens(0, "a", 8), close(1, seq=8))
    (reply,) = frames(out)
    assert (reply["error"]["code"], reply["error"]["message"]) == (503, NO_VECTOR)
    assert sent_to_scheduler(out) == [Ended(seq=8, index=1, reason="error")]


def test_a_vector_comes_after_its_scheduler_was_replaced(core: DetokenizerCore) -> None:
    kept = Tokenized(
        request="r1", attempt=1, tenant="t", model="tiny", inbox="in", format=EMBEDDING, pooling=-1
    )
    run(core, opened(stream=False, format=EMBEDDING), kept)
    core.on_lost(SCHEDULER, "it is gone", lambda source: False, void=True)
    (again,) = [c.message for c in core.failover.advance(["b"], 1) if isinstance(c, SendTo)]
    assert isinstance(again, Tokenized)
    assert (again.pooling, again.format, list(again.generated)) == (-1, EMBEDDING, [0])
    out = core.handle("scheduler.b", opened(1, stream=False, format=EMBEDDING), TRACE)
    out += core.handle("scheduler.b", close(0, seq=1, vector=bytes(4)), TRACE)
    assert [frame["embedding"] for frame in frames(out)] == [[0.0]]
