"""Attached readers: with any messages lost, and attached at any time, what they put together is the
answer."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.text_models import write_sentencepiece_gguf

from services.detokenizer.core import DetokenizerCore
from services.detokenizer.durable.attach import MAX_BYTES, Attachments
from services.detokenizer.response import Command, Publish, SendTo
from shared.messages import Close, Detached, Message, Open, Tokenized, Tokens, Usage, floats, ints
from shared.vocab.files import ModelFiles
from shared.vocab.vocabulary import Vocabulary, load_vocabulary

SCHEDULER = "scheduler.a"


@pytest.fixture(scope="module")
def letters(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    """Tokens 3 to 258 are the bytes 0 to 255."""
    path = write_sentencepiece_gguf(tmp_path_factory.mktemp("attach") / "l.gguf", {})
    return load_vocabulary(ModelFiles("l", path))


def digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()[:16]


@dataclass
class Reader:
    """What one reader has, from the frames in its inbox."""

    texts: dict[int, str] = field(default_factory=dict)
    scores: dict[int, list[float]] = field(default_factory=dict)
    attempt: int = 0
    next: int = 0
    begun: int = 0  # how often the text began
    end: dict[str, Any] | None = None

    def body(self, **wrong: str) -> bytes:
        choices = {
            str(i): {"chars": len(text), "hash": wrong.get("hash") or digest(text)}
            for i, text in self.texts.items()
        }
        return json.dumps({"choices": choices, "attempt": self.attempt}).encode()

    def read(self, frame: dict[str, Any]) -> None:
        assert self.end is None, "a frame after the last one"
        if frame["type"] == "accepted":
            if frame["attempt"] > self.attempt:
                if self.attempt:
                    self.texts, self.scores = {}, {}
                self.attempt = frame["attempt"]
                self.begun += 1
            self.next = 0
        assert (frame["attempt"], frame["frame"]) == (self.attempt, self.next)
        self.next += 1
        if frame["type"] in ("done", "error"):
            self.end = frame
        elif frame["type"] == "delta":
            for choice in frame["choices"]:
                index, before = choice["index"], self.texts.get(choice["index"], "")
                assert choice["at"] == len(before)
                assert ("role" in choice["delta"]) == (not before)
                self.texts[index] = before + choice["delta"]["content"]
                scored = (choice.get("logprobs") or {}).get("content", [])
                self.scores.setdefault(index, []).extend(score["logprob"] for score in scored)


class World:
    """A detokenizer with one request of two choices; all frames by inbox."""

    def __init__(self, letters: Vocabulary, *, stream: bool = False, **more: Any) -> None:
        self.core = DetokenizerCore(letters)
        self.attachments = Attachments(self.core.table, self.core.reconnect)
        self.scheduler = SCHEDULER
        self.inboxes: dict[str, list[dict[str, Any]]] = {}
        self.published: list[Publish] = []
        self.messages: list[Message] = []
        self.sent = [0, 0]  # tokens
        self.scored = bool(more.get("logprobs"))
        fields = {
            "request": "r",
            "tenant": "t",
            "model": "m",
            "inbox": "in",
            "attempt": 1,
            "choices": 2,
            **more,
        }
        for seq in (0, 1):
            self.send(Open(seq=seq, choice=seq, stream=stream, **fields))

    def send(self, *messages: Message) -> None:
        for message in messages:
            self.carry(self.core.handle(self.scheduler, message))

    def carry(self, commands: list[Command]) -> None:
        for command in commands:
            if isinstance(command, SendTo):
                self.messages.append(command.message)
            elif isinstance(command, Publish):
                self.published.append(command)
                self.inboxes.setdefault(command.inbox, []).append(json.loads(command.data))

    def tokens(self, seq: int, data: bytes) -> None:
        scores = floats(-byte for byte in data) if self.scored else floats()
        first, self.sent[seq] = self.sent[seq], self.sent[seq] + len(data)
        ids, counts = ints(3 + byte for byte in data), ints([len(data)])
        self.send(
            Tokens(
                executor="e", step=1, seqs=ints([seq]), first=ints([first]), counts=counts, ids=ids,
                logprobs=scores,
            )
        )  # fmt: skip

    def flush(self) -> None:
        self.carry(self.core.flush())

    def attach(self, inbox: str, body: bytes = b"", *, full: bool = False) -> list[dict[str, Any]]:
        commands = self.attachments.attach("t", "r", inbox, body, full=full)
        self.core.frames += len(commands)
        self.carry(commands)
        return self.inboxes.get(inbox, [])

    def close(self, **more: Any) -> None:
        for seq in (0, 1):
            usage = Usage(prompt_tokens=1, completion_tokens=self.sent[seq])
            self.send(Close(seq=seq, final=self.sent[seq], reason="length", usage=usage, **more))

    def numbers(self, inbox: str) -> list[int]:
        return [frame.number for frame in self.published if frame.inbox == inbox]


# A step: tokens of a choice in bytes, a flush, or an attach after the reader lost its last frames.
steps = st.lists(
    st.one_of(
        st.tuples(st.just("tokens"), st.integers(0, 1), st.integers(1, 9)),
        st.tuples(st.just("flush"), st.just(0), st.just(0)),
        st.tuples(st.just("attach"), st.integers(0, 1), st.integers(0, 4)),
    ),
    max_size=40,
)
texts = st.text(alphabet="abcé€😀 .", min_size=1, max_size=40)


@given(steps=steps, one=texts, two=texts, stream=st.booleans(), scored=st.booleans(), stop=st.booleans())
def test_any_sequence_of_attaches_gives_the_answer(
    letters: Vocabulary, steps: list[tuple[str, int, int]], one: str, two: str, stream: bool, scored: bool,
    stop: bool,
) -> None:  # fmt: skip
    more: dict[str, Any] = {"logprobs": int(scored), "stop": ("b.", "€€") if stop else ()}
    world, plain = World(letters, stream=stream, **more), World(letters, **more)
    data, reader, inbox = [one.encode(), two.encode()], Reader(), ""
    for kind, which, amount in [*steps, ("attach", 0, 0)]:
        if kind == "tokens":
            at = world.sent[which]
            for each in (world, plain):
                each.tokens(which, data[which][at : at + amount])
        elif kind == "flush":
            world.flush()
        else:
            got = world.inboxes.get(inbox, [])
            for frame in got[: max(len(got) - amount, 0)]:
                reader.read(frame)
            has, before = any(reader.texts.values()), reader.attempt
            wrong = {"hash": "0" * 16} if which and has else {}
            inbox = f"reader {len(world.inboxes)}"
            (first, *_) = world.attach(inbox, reader.body(**wrong))
            starts_over = has and (wrong or scored)
            assert (
                first["attempt"] > before if starts_over else first["attempt"] == (before or first["attempt"])
            )
    for each in (world, plain):
        for seq in (0, 1):
            each.tokens(seq, data[seq][each.sent[seq] :])
        each.flush()
        each.close()
    (answer,) = plain.inboxes["in"]
    if not stream:
        assert world.inboxes["in"] == [answer], "the reply of a plain request has changed"
    for frame in world.inboxes[inbox]:
        reader.read(frame)
    assert reader.end is not None
    for choice, end in zip(answer["choices"], reader.end["choices"], strict=True):
        index, scores = choice["index"], reader.scores.get(choice["index"], [])
        assert reader.texts.get(index, "") == choice["message"]["content"]
        assert (end["index"], end["finish_reason"]) == (index, choice["finish_reason"])
        if scored:  # tokens without text at the end have no frame, as in any stream
            assert scores == [s["logprob"] for s in choice["logprobs"]["content"]][: len(scores)]
    assert reader.end["usage"] == answer["usage"]
    assert world.core.is_idle
    assert world.core.status()["frames"] == len(world.published)


def begun(letters: Vocabulary, **more: Any) -> World:
    world = World(letters, **more)
    world.tokens(0, b"river ")
    world.flush()
    return world


@pytest.mark.parametrize("stream", [True, False])
def test_more_than_there_is_starts_over(letters: Vocabulary, stream: bool) -> None:
    world = begun(letters, stream=stream)
    reader = Reader({0: "river delta"}, attempt=3)
    first, delta = world.attach("a", reader.body())
    assert (first["attempt"], first["frame"], first["prompt_tokens"]) == (4, 0, 0)
    assert (delta["attempt"], delta["choices"][0]["at"]) == (4, 0)
    assert delta["choices"][0]["delta"]["content"] == "river "


@pytest.mark.parametrize("stream", [True, False])
def test_a_newer_reader_replaces_an_older_one(letters: Vocabulary, stream: bool) -> None:
    world = begun(letters, stream=stream)
    world.attach("a")
    world.attach("b")
    moved = world.inboxes["a"][-1]
    assert (moved["type"], moved["frame"], moved["error"]["type"], moved["error"]["code"]) == (
        "error", 2, "moved", 409,
    )  # fmt: skip
    assert [f.headers.get("Headrace-End") for f in world.published if f.inbox == "a"] == [None, None, "1"]
    world.attach("b")
    assert [f["type"] for f in world.inboxes["b"]] == ["accepted", "delta"] * 2, "it replaces itself"
    count = len(world.inboxes["a"])
    world.tokens(0, b"mill")
    world.flush()
    world.close()
    assert len(world.inboxes["a"]) == count
    assert [f["type"] for f in world.inboxes["b"][4:]] == ["delta", "done"]
    if stream:
        assert world.inboxes["in"][-1]["error"]["type"] == "moved"


def test_a_reader_of_a_plain_request_that_has_gone_is_dropped_alone(letters: Vocabulary) -> None:
    world = begun(letters)
    world.attach("a")
    (number, *_) = world.numbers("a")
    world.carry(world.core.on_client_gone(number))
    world.carry(world.core.on_client_gone(number))
    world.tokens(0, b"mill")
    world.flush()
    world.close()
    assert len(world.inboxes["a"]) == 2
    assert world.inboxes["in"][0]["choices"][0]["message"]["content"] == "river mill"
    assert not [m for m in world.messages if isinstance(m, Detached)]


def test_the_client_of_a_moved_stream_is_its_reader(letters: Vocabulary) -> None:
    """A 503 for a frame to the client before it is late, and of no concern."""
    world = begun(letters, stream=True)
    world.attach("a", Reader({0: "river "}).body())
    assert [f["type"] for f in world.inboxes["a"]] == ["accepted"], "nothing is new to it"
    for number in world.numbers("in"):
        world.carry(world.core.on_client_gone(number))
    assert not [m for m in world.messages if isinstance(m, Detached)]
    world.carry(world.core.on_client_gone(world.numbers("a")[0]))
    assert world.messages[-1] == Detached(seqs=ints([0, 1]))


def test_reader_that_leaves_gets_no_more(letters: Vocabulary) -> None:
    world = begun(letters)
    world.attach("a")
    world.attach("b", b'{"leave": true}')
    world.tokens(0, b"mill ")
    world.flush()
    assert len(world.inboxes["a"]) == 3, "only the reader itself leaves"
    world.attach("a", b'{"leave": true}')
    world.tokens(0, b"wheel")
    world.flush()
    world.close()
    assert (len(world.inboxes["a"]), "b" in world.inboxes) == (3, False)
    assert world.inboxes["in"][0]["choices"][0]["message"]["content"] == "river mill wheel"


def test_only_the_tenant_of_an_open_request_has_an_answer(letters: Vocabulary) -> None:
    world = begun(letters)
    assert world.attachments.attach("u", "r", "a", b"", full=False) == []
    assert world.attachments.attach("t", "q", "a", b"", full=False) == []
    world.close()
    assert world.attach("a") == []


@pytest.mark.parametrize(
    "body",
    [
        b"x", b"[]", b"7", b'{"choices": []}', b'{"choices": {"0": 5}}', b'{"choices": {"a": {"chars": 1}}}',
        b'{"choices": {"0": {"chars": 1}}}', b'{"choices": {"0": {"chars": -1, "hash": "0123456789abcdef"}}}',
        b'{"choices": {"0": {"chars": true, "hash": "0123456789abcdef"}}}', b'{"attempt": 1e300}',
        b'{"attempt": -1}', b'{"choices": {"0": {"chars": 1, "hash": 7}}}', b'{"x": "\\ud800"}',
        b"[" * 60_000, b" " * (MAX_BYTES + 1),
    ],
)  # fmt: skip
def test_a_wrong_body_is_refused_and_the_request_goes_on(letters: Vocabulary, body: bytes) -> None:
    world = begun(letters)
    (refusal,) = world.attach("a", body)
    assert (refusal["type"], "attempt" in refusal) == ("error", False)
    assert refusal["error"]["code"] == (413 if len(body) > MAX_BYTES else 400)
    assert world.published[-1].headers["Headrace-End"] == "1"
    world.close()
    assert world.inboxes["in"][0]["choices"][0]["message"]["content"] == "river "


def test_a_backlog_refuses_for_now(letters: Vocabulary) -> None:
    world = begun(letters, stream=True)
    (refusal,) = world.attach("a", full=True)
    assert (refusal["error"]["code"], refusal["error"]["retryable"]) == (429, True)
    world.tokens(0, b"mill")
    world.flush()
    assert [f["type"] for f in world.inboxes["in"]] == ["accepted", "delta", "delta"], "nothing has moved"


@pytest.mark.parametrize("stream", [True, False])
def test_a_failure_reaches_the_reader(letters: Vocabulary, stream: bool) -> None:
    world = begun(letters, stream=stream)
    world.attach("a")
    world.send(Close(seq=0, final=6, reason="error", code=500, message="the engine broke"))
    assert world.inboxes["a"][-1]["error"]["message"] == "the engine broke"
    assert world.inboxes["a"][-1]["frame"] == 2
    assert world.inboxes["in"][-1]["error"]["message"] == (
        "another reader has attached to this request: it gets the rest of the answer"
        if stream
        else "the engine broke"
    )
    assert world.core.status()["requests"] == 0


def test_moved_stream_starts_over_in_its_new_inbox_after_an_outage(letters: Vocabulary) -> None:
    world = begun(letters, stream=True)
    reader = Reader()
    world.attach("a")
    for frame in world.inboxes.pop("a"):
        reader.read(frame)
    world.core.on_broker_lost()
    assert world.attach("b") == [], "an answer would be lost"
    world.core.reconnect.on_broker_back(world.core.streams)
    world.tokens(0, b"mill")
    for _ in range(2):
        world.carry(world.core.advance_reconnect())
    for frame in world.inboxes["a"]:
        reader.read(frame)
    assert (reader.begun, reader.texts) == (2, {0: "river mill"})


def test_an_attach_ends_the_doubt_about_a_client(letters: Vocabulary) -> None:
    world = begun(letters, stream=True)
    world.core.on_broker_lost()
    world.core.reconnect.on_broker_back(world.core.streams)
    reader = Reader()
    world.attach("a", reader.body())
    world.tokens(0, b"mill")
    world.flush()
    for _ in range(3):
        world.carry(world.core.advance_reconnect())
    world.close()
    for frame in world.inboxes["a"]:
        reader.read(frame)
    assert (reader.begun, reader.texts, reader.end is None) == (1, {0: "river mill"}, False)


def test_reader_of_a_plain_request_attaches_again_after_an_outage(letters: Vocabulary) -> None:
    world = begun(letters)
    world.attach("a")
    world.core.on_broker_lost()
    world.core.reconnect.on_broker_back(world.core.streams)
    world.tokens(0, b"mill")
    world.flush()
    assert len(world.inboxes["a"]) == 2, "the frames on the way are lost: one more would hide it"
    _, delta = world.attach("b", Reader({0: "river "}, attempt=1).body())
    assert (delta["choices"][0]["at"], delta["choices"][0]["delta"]["content"]) == (6, "mill")


def test_another_scheduler_goes_on_with_the_reader(letters: Vocabulary) -> None:
    world, reader = begun(letters), Reader()
    kept = Tokenized(
        request="r", attempt=1, tenant="t", model="m", inbox="in", timeout_us=10**9, max_tokens=20,
        stream=False, seed=7, n=2, tokens=ints([11]),
    )  # fmt: skip
    world.send(kept)
    world.attach("a")
    world.carry(world.core.on_lost(SCHEDULER, "it has gone", lambda source: False, void=True))
    world.carry(world.core.failover.advance(["b"], 1_000))
    asked = world.messages[-1]
    assert isinstance(asked, Tokenized)
    assert [*asked.generated] == [6, 0]
    fields: dict[str, Any] = {"request": "r", "tenant": "t", "model": "m", "inbox": "in", "attempt": 1}
    world.scheduler = "scheduler.b"
    world.send(*(Open(seq=seq, choice=seq, choices=2, stream=False, **fields) for seq in (0, 1)))
    world.tokens(0, b"mill")
    world.flush()
    world.close()
    for frame in world.inboxes["a"]:
        reader.read(frame)
    assert (reader.begun, reader.texts, reader.end is None) == (1, {0: "river mill"}, False)
    assert world.core.status()["requests"] == 0
