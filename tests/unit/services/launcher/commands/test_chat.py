"""The commands of a chat, and what a conversation keeps."""

from __future__ import annotations

import signal
import sys
import time
import weakref
from pathlib import Path
from typing import Any

import pytest

from services.launcher.commands.chat import (
    CUT,
    LONGEST_TOKENS,
    Chat,
    Commands,
    Conversation,
    LoopThread,
    _answer,
    _ended_by_sigterm,
)
from services.launcher.commands.submit import read_body
from shared.api import ChatRequest
from shared.errors import BadRequest, Unavailable

HI = {"role": "user", "content": "Hi"}
HO = {"role": "assistant", "content": "Ho"}


@pytest.fixture
def commands() -> Commands:
    return Commands("m", Conversation({"temperature": 0.0}, [HI, HO]))


def test_help_lists_every_command(commands: Commands, capsys: pytest.CaptureFixture[str]) -> None:
    commands.run("/help")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [
        "/help", "/system", "/set", "/reset", "/save", "/load", "/bye",
    ]  # fmt: skip
    assert all(len(line) <= 120 for line in lines)


def test_the_system_text_stays_when_the_conversation_is_forgotten(
    commands: Commands, capsys: pytest.CaptureFixture[str]
) -> None:
    system = {"role": "system", "content": "Be short."}
    commands.run("/system Be long.")
    commands.run("/system Be short.")
    assert commands.conversation.messages == [system, HI, HO]
    commands.run("/reset")
    assert commands.conversation.messages == [system]
    commands.run("/system")
    assert capsys.readouterr().out.endswith("system: Be short.\n")
    commands.run("/system -")
    assert commands.conversation.messages == []


def test_a_field_is_set_and_taken_back(commands: Commands, capsys: pytest.CaptureFixture[str]) -> None:
    commands.run("/set temperature 0.7")
    commands.run('/set stop ["a", "b"]')
    commands.run("/set slo_class batch")
    assert commands.conversation.options == {"temperature": 0.7, "stop": ["a", "b"], "slo_class": "batch"}
    assert capsys.readouterr().out.endswith('temperature 0.7, stop ["a", "b"], slo_class "batch"\n')
    for name in ("temperature", "stop", "slo_class"):
        commands.run(f"/set {name}")
    assert commands.conversation.options == {}


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("/sing", "there is no command /sing: /help lists them"),
        ("/run x", "there is no command /run"),
        ("/_all", "there is no command /_all"),
        ("/set temperature hot", "temperature: Input should be a valid number"),
        ("/set temperature 3", "temperature: Input should be less than or equal to 2"),
        ("/set heat 3", "heat: no such field"),
        ("/set n 2", "n is not for /set"),
        ("/save", "name a file"),
        ("/save /none/x", "/none/x cannot be written: No such file"),
        ("/load /none/x", "/none/x cannot be read: No such file"),
    ],
)
def test_a_command_that_cannot_be_done_changes_nothing(commands: Commands, line: str, shown: str) -> None:
    with pytest.raises(BadRequest) as refused:
        commands.run(line)
    assert refused.value.message.startswith(shown)
    assert commands.conversation == Conversation({"temperature": 0.0}, [HI, HO])


def test_a_saved_conversation_is_a_request_and_can_be_loaded(commands: Commands, tmp_path: Path) -> None:
    file = tmp_path / "my chat.json"
    commands.run(f"/save {file}")
    body = read_body(None, file)
    assert body == {"model": "m", "messages": [HI, HO], "temperature": 0.0}
    ChatRequest.model_validate(body)
    other = Commands("n", Conversation({"top_p": 0.5}))
    other.run(f"/load {file}")
    assert other.conversation == commands.conversation


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("{", "is not JSON"),
        ("[]", "has no `messages`"),
        ('{"messages": [{"content": "x"}]}', "messages.0.role: Field required"),
        ('{"messages": [], "heat": 1}', "heat: no such field"),
    ],
)
def test_a_file_that_is_no_conversation_is_refused(
    commands: Commands, tmp_path: Path, text: str, shown: str
) -> None:
    file = tmp_path / "x.json"
    file.write_text(text)
    with pytest.raises(BadRequest, match=shown):
        commands.run(f"/load {file}")
    assert commands.conversation.messages == [HI, HO]


class Scripted:
    """A client with one answer."""

    def __init__(self, *frames: Any) -> None:
        self._frames, self.asked = frames, list[dict[str, Any]]()

    async def stream(self, body: dict[str, Any], *, timeout_s: float) -> Any:
        self.asked.append(body)
        for frame in self._frames:
            if isinstance(frame, Exception):
                raise frame
            yield frame


def delta(text: str) -> dict[str, Any]:
    return {"type": "delta", "choices": [{"delta": {"content": text}}]}


async def test_an_answer_joins_the_conversation(capsys: pytest.CaptureFixture[str]) -> None:
    client = Scripted({"type": "accepted"}, delta("Ho"), delta("!"), {"type": "done", "choices": []})
    chat = Chat(client, "m", 9, Conversation({"seed": 1}))  # type: ignore[arg-type]
    await chat.send("Hi")
    assert client.asked == [{"model": "m", "messages": [HI], "seed": 1, "max_tokens": LONGEST_TOKENS}]
    assert chat.conversation.messages == [HI, {"role": "assistant", "content": "Ho!"}]
    assert capsys.readouterr().out == "Ho!\n"


async def test_an_answer_that_starts_over_replaces_the_first(capsys: pytest.CaptureFixture[str]) -> None:
    accepted = {"type": "accepted"}
    client = Scripted(accepted, delta("one"), accepted, delta("two"))
    chat = Chat(client, "m", 9, Conversation())  # type: ignore[arg-type]
    await chat.send("Hi")
    assert chat.conversation.messages[-1]["content"] == "two"
    assert capsys.readouterr().out == "one\n[the answer starts over]\ntwo\n"


@pytest.mark.parametrize(
    ("options", "limit", "cut"),
    [
        ({}, {"max_tokens": 2_048}, f"{CUT}\n"),
        ({"max_tokens": 7}, {"max_tokens": 7}, ""),
        ({"max_completion_tokens": 7}, {"max_completion_tokens": 7}, ""),
        ({"n_predict": -1}, {"n_predict": -1}, ""),
    ],
)
async def test_an_answer_has_a_limit_which_is_shown_where_it_cuts(
    capsys: pytest.CaptureFixture[str], options: dict[str, Any], limit: dict[str, Any], cut: str
) -> None:
    """A small model may repeat itself without end."""
    client = Scripted(delta("a"), {"type": "done", "choices": [{"finish_reason": "length"}]})
    await Chat(client, "m", 9, Conversation(options)).send("Hi")  # type: ignore[arg-type]
    assert client.asked == [{"model": "m", "messages": [HI], **limit}]
    assert capsys.readouterr() == ("a\n", cut)
    ends = Scripted(delta("a"), {"type": "done", "choices": [{"finish_reason": "stop"}]})
    await Chat(ends, "m", 9, Conversation(options)).send("Hi")  # type: ignore[arg-type]
    assert capsys.readouterr() == ("a\n", "")


async def test_a_default_limit_refuses_no_question_that_the_context_has_room_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Full(Scripted):
        async def stream(self, body: dict[str, Any], *, timeout_s: float) -> Any:
            self.asked.append(dict(body))
            if "max_tokens" in body:
                raise BadRequest("context_length_exceeded: ask for at most 9", param="max_tokens")
            yield delta("a")
            yield {"type": "done", "choices": [{"finish_reason": "length"}]}

    client = Full()
    await Chat(client, "m", 9, Conversation()).send("Hi")  # type: ignore[arg-type]
    assert [each.get("max_tokens") for each in client.asked] == [LONGEST_TOKENS, None]
    assert capsys.readouterr() == ("a\n", "")
    with pytest.raises(BadRequest):
        await Chat(client, "m", 9, Conversation({"max_tokens": 99})).send("Hi")  # type: ignore[arg-type]


async def test_a_question_without_an_answer_is_not_kept(capsys: pytest.CaptureFixture[str]) -> None:
    chat = Chat(Scripted(Unavailable("away")), "m", 9, Conversation())  # type: ignore[arg-type]
    with pytest.raises(Unavailable):
        await chat.send("Hi")
    assert (chat.conversation.messages, capsys.readouterr().out) == ([], "")
    cut = Chat(Scripted(delta("Ho"), Unavailable("away")), "m", 9, Conversation())  # type: ignore[arg-type]
    with pytest.raises(Unavailable):
        await cut.send("Hi")
    assert cut.conversation.messages == [HI, HO]


def test_full_context_prints_how_to_go_on(capsys: pytest.CaptureFixture[str]) -> None:
    """Every further question has the same error."""
    full = BadRequest("context_length_exceeded: the maximum is 128 tokens: ask for at most 7")
    with LoopThread() as loop:
        for error in (full, BadRequest("`seed` is wrong")):
            _answer(loop, Chat(Scripted(error), "m", 9, Conversation()), "Hi")  # type: ignore[arg-type]
    shown = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in shown] == [
        "error (invalid request)",
        "/reset forgets the conversation; /set max_tokens N asks for a shorter answer",
        "error (invalid request)",
    ]


def test_sigterm_ends_a_chat_when_it_comes_in_a_callback_of_a_weak_reference(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Python drops what such a callback raises."""
    dropped = list[object]()
    monkeypatch.setattr(sys, "unraisablehook", dropped.append)
    thing = {1}
    reference = weakref.ref(thing, lambda _: signal.raise_signal(signal.SIGTERM))
    before = signal.getsignal(signal.SIGALRM)
    with pytest.raises(SystemExit) as ended, _ended_by_sigterm():
        del thing
        time.sleep(30)
    assert (ended.value.code, len(dropped), reference()) == (128 + signal.SIGTERM, 1, None)
    assert (signal.getitimer(signal.ITIMER_REAL), signal.getsignal(signal.SIGALRM)) == ((0.0, 0.0), before)
