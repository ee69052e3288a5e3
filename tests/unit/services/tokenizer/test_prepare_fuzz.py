"""The public request, fuzzed: through the real cores of tokenizer, scheduler and detokenizer, by wire
bytes in between, to an engine that checks every block.

At any bytes of a client: no core raises, each request has exactly one end, and when all have ended every
block, slot and sequence is free and every inbox forgotten.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.hostile_values import any_json, as_response_format, as_tool, schemas
from support.scheduler.world import World
from support.text_models import write_bpe_gguf

from services.detokenizer.core import DetokenizerCore
from services.detokenizer.response import Publish, SendTo
from services.scheduler.state.requests import Arrived, Send, Ticked
from services.tokenizer.chat_template import ChatTemplate
from services.tokenizer.core import Fail, Schedulers, TokenizerCore
from services.tokenizer.core import Send as ToScheduler
from services.tokenizer.prepare import ServedModel, Submission
from shared import codec
from shared.codec import Assembler, Envelope
from shared.messages import Accepted, Cancel, Close, Message, Open, Rejected, Tokens
from shared.replies import END_HEADER
from shared.vocab.files import ModelFiles
from shared.vocab.vocabulary import load_vocabulary

CONTEXT = 128
DAY_US = 86_400_000_000  # later than any deadline or tombstone


def ask(response_format: dict[str, Any]) -> bytes:
    return json.dumps({"prompt": "x", "response_format": response_format}).encode()


@dataclass
class Client:
    """What came back to one inbox."""

    stream: bool
    frames: list[dict[str, Any]] = field(default_factory=list)
    ends: int = 0

    def take(self, data: bytes, last: bool) -> None:
        assert not self.ends, "a message after the last one"
        self.frames.append(json.loads(data))
        self.ends += last


@dataclass
class House(World):
    """The world of the scheduler with a real tokenizer before it and a real detokenizer after it."""

    model: ServedModel = field(kw_only=True)
    clients: dict[str, Client] = field(default_factory=dict)
    errors: list[Fail] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.assemblers = {"up": Assembler(), "down": Assembler()}
        self.tokenizer = TokenizerCore(self.model)
        self.detokenizer = DetokenizerCore(self.model.vocabulary)
        self.tokenizer.handle(Schedulers(("s1",)), 0)
        super().__post_init__()
        self.add_engine(blocks=64, slots=8, max_context=CONTEXT)

    def submit(self, name: str, body: bytes) -> None:
        """A client sends `body` and listens to inbox `name`."""
        self.clients[name] = Client(b'"stream": true' in body)
        self.now_us += 1_000
        submission = Submission("public", name, body, f"fresh-{name}", 7, 1_700_000_000_000_000)
        self._from_tokenizer(self.tokenizer.handle(submission, self.now_us))

    def cancel(self, request: str) -> None:
        self._from_tokenizer(self.tokenizer.handle(Cancel(tenant="public", request=request), self.now_us))
        self.handle(Arrived("client", Cancel(tenant="public", request=request)))

    def finish(self) -> None:
        """Run to rest; deadlines and tombstones pass."""
        self.run()
        for _ in range(2):
            self._publish(self.detokenizer.flush())
            self.tick(DAY_US)
        self.handle(Ticked())

    def _from_tokenizer(self, commands: list[Any]) -> None:
        for command in commands:
            if isinstance(command, Fail):
                self.errors.append(command)
                assert command.error.message
                self.clients[command.inbox].take(b"{}", last=True)
            elif isinstance(command, ToScheduler):
                for whole in self._wired("up", command.message):
                    self.handle(Arrived("tokenizer.t1", whole))

    def _carry_out(self, command: Send) -> None:
        match command.message:
            case Accepted() | Rejected() as answer:
                self._from_tokenizer(self.tokenizer.handle(answer, self.now_us))
            case Open() | Tokens() | Close() as message:
                for whole in self._wired("down", message):
                    self._publish(self.detokenizer.handle("scheduler.s1", whole))
            case _:
                super()._carry_out(command)

    def _publish(self, commands: list[Any]) -> None:
        for command in commands:
            if isinstance(command, Publish):
                self.clients[command.inbox].take(command.data, END_HEADER in command.headers)
            elif isinstance(command, SendTo):
                self.handle(Arrived("detokenizer.d1", command.message))

    def _wired(self, way: str, message: Message) -> list[Message]:
        parts = [codec.decode(codec.encode(Envelope("a.b", 1, 1, part))) for part in codec.split(message)]
        found = (self.assemblers[way].add(part.message) for part in parts)
        return [whole for whole in found if whole is not None]

    def assert_all_ended(self) -> None:
        for name, client in self.clients.items():
            assert client.ends == 1, f"{name} has {client.ends} ends"
        self.assert_idle()
        counts = self.detokenizer.status()
        assert counts["requests"] == counts["sequences"] == 0
        assert self.tokenizer.pending == 0
        assert not self.scheduler.state.tombstones


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    path: Path = write_bpe_gguf(tmp_path_factory.mktemp("fuzz") / "m.gguf")
    vocabulary = load_vocabulary(ModelFiles("m", path))
    return ServedModel("m", vocabulary, ChatTemplate(vocabulary), CONTEXT, 60_000_000)


text = st.text(max_size=30)
anything = any_json()
message = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system", "tool"]), "content": text | st.none()},
    optional={"name": anything, "tool_calls": anything},
)
# A right value of each field; `mutated` puts anything in the place of some.
RIGHT: dict[str, st.SearchStrategy[Any]] = {
    "prompt": st.text(min_size=1, max_size=60) | st.lists(st.integers(0, 400), min_size=1, max_size=60),
    "messages": st.lists(message, min_size=1, max_size=3),
    "model": st.just("m"),
    "max_tokens": st.integers(1, 40),
    "max_completion_tokens": st.integers(1, 40),
    "n": st.integers(1, 4),
    "temperature": st.floats(0, 2),
    "top_p": st.floats(0.1, 1),
    "top_k": st.integers(-1, 100),
    "min_p": st.floats(0, 1),
    "seed": st.integers(-(2**63), 2**64 - 1),
    "stop": st.text(min_size=1, max_size=3) | st.lists(st.text(min_size=1, max_size=3), max_size=4),
    "stop_token_ids": st.lists(st.integers(0, 400), max_size=4),
    "ignore_eos": st.booleans(),
    "include_stop_str_in_output": st.booleans(),
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2),
    "repetition_penalty": st.floats(0.1, 10),
    "logit_bias": st.dictionaries(st.integers(0, 400).map(str), st.floats(-100, 100), max_size=4),
    "logprobs": st.booleans() | st.integers(0, 20),
    "stream": st.booleans(),
    "stream_options": st.fixed_dictionaries({}, optional={"include_usage": st.booleans()}),
    "user": text,
    "request_id": st.sampled_from(["a", "b", "a:b.c"]),
    "timeout_s": st.floats(1e-6, 100),
    "slo_class": st.sampled_from(["interactive", "standard", "batch"]),
    "finish_detached": st.booleans(),
    "add_generation_prompt": st.booleans(),
    "continue_final_message": st.booleans(),
    "chat_template_kwargs": st.dictionaries(text, anything, max_size=2),
    "reasoning_effort": st.sampled_from(["none", "low", "high"]),
    "min_tokens": st.integers(0, 40),
    "n_predict": st.just(-1) | st.integers(1, 40),
    "guided_json": schemas(),
    "cache_prompt": anything,
    "typical_p": st.sampled_from([0.5, 1]),
    "tools": st.just([]) | st.lists(st.builds(as_tool, schemas()), max_size=2),
    "tool_choice": st.sampled_from(["none", "auto", "required"]),
    "response_format": st.builds(as_response_format, schemas()),
    "structured_outputs": st.builds(lambda value: {"json": value}, schemas())
    | st.builds(lambda value: {"regex": value}, text),
}


@st.composite
def bodies(draw: st.DrawFn) -> bytes:
    names = draw(st.lists(st.sampled_from(sorted(RIGHT)), max_size=6, unique=True))
    body = {name: draw(RIGHT[name]) for name in names}
    if draw(st.integers(0, 7)):  # mostly one prompt, and logprobs in the form that goes with it
        chat = body.pop("messages", None)
        body |= {"prompt": "Hello", **body} if chat is None or "prompt" in body else {"messages": chat}
        if "logprobs" in body:
            body["logprobs"] = draw(st.booleans() if "messages" in body else st.integers(0, 20))
    for name in draw(st.lists(st.sampled_from([*sorted(RIGHT), "top_logprobs", "grammar", "x"]), max_size=2)):
        if draw(st.integers(0, 3)) == 0:
            body[name] = draw(anything)
    if draw(st.booleans()):
        return json.dumps(body, ensure_ascii=draw(st.booleans())).encode("utf-8", "surrogatepass")
    try:
        packed: bytes = msgpack.packb(draw(st.sampled_from([body, {**body, "metadata": b"\xff"}])))
    except (ValueError, OverflowError):  # a surrogate, a big integer: msgpack has no form for them
        return json.dumps(body).encode()
    return packed


event = st.tuples(st.just("submit"), bodies() | st.binary(max_size=80)) | st.tuples(
    st.sampled_from(["cancel", "deliver"]), st.sampled_from([b"a", b"b", b"fresh-0", b"fresh-1"])
)


@given(st.lists(event, min_size=1, max_size=6))
@example([("submit", b'{"prompt": "x", "top_k": 1' + b"0" * 400 + b"}")])
@example([("submit", rb'{"messages":[{"role":"user","content":"x","name":"\ud800"}]}')])
@example([("submit", b"\x81\x90\x01")])
@example([("submit", b'{"prompt": "x", "request_id": "\xed\xa0\x80"}')])
@example([("submit", '{"prompt": "x", "user": "\\ud800"}'.encode("utf-16-le"))])
@example([("submit", ask(as_response_format({"$ref": []})))])
@example([("submit", ask(as_response_format({"$ref": {"$ref": "#"}})))])
@example([("submit", msgpack.packb({"prompt": "x", "response_format": as_response_format({"const": b"x"})}))])
@example([("submit", msgpack.packb({"messages": [{"role": "user", "content": "x", "name": b"x"}]}))])
@example([("submit", msgpack.packb({"prompt": "x", "metadata": msgpack.Timestamp(1)}))])
def test_every_request_has_one_end_and_nothing_is_held(
    model: ServedModel, events: list[tuple[str, bytes]]
) -> None:
    house = House(model=model)
    for number, (what, data) in enumerate(events):
        match what:
            case "submit":
                house.submit(str(number), data)
            case "cancel":
                house.cancel(data.decode())
            case "deliver":
                house.deliver()
    house.finish()
    house.assert_all_ended()
    assert {fail.error.code for fail in house.errors} <= {400, 408, 409, 499}


@given(bodies())
def test_accepted_request_is_answered_and_a_refused_one_gets_the_reason(
    model: ServedModel, body: bytes
) -> None:
    house = House(model=model)
    house.submit("only", body)
    house.finish()
    house.assert_all_ended()
    for fail in house.errors:
        assert fail.error.code in (400, 408, 499)
        assert fail.error.type in ("invalid_request_error", "timeout", "cancelled")
