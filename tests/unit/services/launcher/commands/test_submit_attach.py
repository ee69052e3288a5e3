"""`headrace attach` on scripted frames: what goes to stdout, and what to stderr."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from services.launcher.commands import submit as command
from services.launcher.session import Target
from shared.client.client import Client
from shared.errors import EngineError
from shared.nats.interface import Bus

Frame = dict[str, Any]


def delta(*texts: tuple[int, str]) -> Frame:
    return {"type": "delta", "choices": [{"index": index, "text": text} for index, text in texts]}


@pytest.fixture
def script(
    monkeypatch: pytest.MonkeyPatch, connect: Callable[[], Awaitable[Bus]]
) -> list[Frame | EngineError]:
    """The frames that every request has."""
    frames: list[Frame | EngineError] = []

    @asynccontextmanager
    async def connected(url: str) -> AsyncGenerator[Bus]:
        yield await connect()

    async def follow(client: Client, request_id: str) -> AsyncGenerator[Frame]:
        for frame in frames:
            if isinstance(frame, EngineError):
                raise frame
            yield frame

    monkeypatch.setattr(command, "connected", connected)
    monkeypatch.setattr(Client, "follow", follow)
    return frames


async def test_a_text_that_starts_over_is_printed_again(
    script: list[Frame | EngineError], capsys: pytest.CaptureFixture[str]
) -> None:
    begin, end = {"type": "accepted"}, {"type": "done", "choices": []}
    script += [
        begin,
        delta((0, "The ri"), (1, "x")),
        begin,
        delta((0, "The "), (1, "A mill")),
        delta((0, "sea")),
        end,
    ]
    await command.attach(Target("nats://127.0.0.1:4222", "m"), "r")
    printed = capsys.readouterr()
    assert printed.out == "The ri\nThe sea\nA mill\n"
    assert printed.err == "[the answer starts over]\n"


async def test_an_error_follows_a_whole_line(
    script: list[Frame | EngineError], capsys: pytest.CaptureFixture[str]
) -> None:
    script += [{"type": "accepted"}, delta((0, "The ri")), EngineError("the engine broke")]
    with pytest.raises(EngineError):
        await command.attach(Target("nats://127.0.0.1:4222", "m"), "r")
    assert capsys.readouterr().out == "The ri\n"
