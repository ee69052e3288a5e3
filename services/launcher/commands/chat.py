"""`headrace chat` holds a conversation on the terminal, and `headrace request` sends one request.

In a chat Ctrl-C stops an answer and Ctrl-D ends the chat. The connection runs on an event loop in a second
thread, so that it answers the server's pings while the main thread waits for the next line. A request is read
as JSON and its answer printed as JSON, with --stream one line for each frame.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Coroutine
from contextlib import AsyncExitStack, aclosing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeVar

from services.launcher.console import dim, kind_of
from services.launcher.session import Target, connected
from shared.client import Client
from shared.errors import BadRequest, HeadraceError
from shared.nats import access

Message = dict[str, str]
T = TypeVar("T")


@dataclass(slots=True)
class Chat:
    """A conversation with one model; `messages` is its history."""

    client: Client
    model: str
    options: dict[str, Any]  # more fields of each request: max_tokens, temperature, ...
    timeout_s: float
    messages: list[Message] = field(default_factory=list)

    async def send(self, text: str) -> None:
        """Send `text` and print the answer as it arrives. Raises the request's error. A question without any
        answer is not kept."""
        question: Message = {"role": "user", "content": text}
        body = {"model": self.model, "messages": [*self.messages, question], **self.options}
        deltas: list[str] = []
        try:
            async with aclosing(self.client.stream(body, timeout_s=self.timeout_s)) as frames:
                async for frame in frames:
                    _show(frame, deltas)
        finally:
            if deltas:
                print(flush=True)
                self.messages += [question, {"role": "assistant", "content": "".join(deltas)}]


def _show(frame: dict[str, Any], deltas: list[str]) -> None:
    if frame["type"] == "accepted" and deltas:
        print(dim("\n[the answer starts over]"), flush=True)
        deltas.clear()
    for choice in frame.get("choices", ()):
        delta = choice.get("delta", {}).get("content", "")
        deltas.append(delta)
        print(delta, end="", flush=True)


async def ask_once(target: Target, question: str, options: dict[str, Any], timeout_s: float) -> None:
    """`headrace chat -q`: one question, one answer on stdout."""
    async with connected(target.nats_url) as bus:
        await Chat(await Client.open(bus, target.tenant), target.model, options, timeout_s).send(question)


def converse(target: Target, options: dict[str, Any], timeout_s: float) -> None:
    """Answer questions from the keyboard until Ctrl-D, Ctrl-C at the prompt, or /bye. Raises SetupError."""
    with suppress(ImportError):
        import readline  # noqa: F401 - gives input() a history and line editing
    with LoopThread() as loop, suppress(EOFError):
        stack = AsyncExitStack()
        bus = loop.run(stack.enter_async_context(connected(target.nats_url)))
        chat = Chat(loop.run(Client.open(bus, target.tenant)), target.model, options, timeout_s)
        where = f"{target.model} at {access.shown(target.nats_url)}"
        print(dim(f"{where}; Ctrl-C stops an answer, Ctrl-D or /bye ends"))
        try:
            while (line := input("> ").strip()) != "/bye":
                if line:
                    _answer(loop, chat, line)
        finally:
            loop.run(stack.aclose())


def _answer(loop: LoopThread, chat: Chat, line: str) -> None:
    try:
        loop.run(chat.send(line))
    except KeyboardInterrupt:
        print(dim("[stopped]"))
    except HeadraceError as error:
        print(f"error ({kind_of(error)}): {error.message}")


class LoopThread:
    """An event loop in a thread; `run` waits for a coroutine on it and cancels the coroutine on Ctrl-C."""

    def __enter__(self) -> Self:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="bus", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
            self._settle()
            raise

    def _settle(self) -> None:
        """Wait until all cancelled tasks have ended."""

        async def others() -> None:
            tasks = [t for t in asyncio.all_tasks() if t is not asyncio.current_task() and t.cancelling()]
            await asyncio.gather(*tasks, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(others(), self._loop).result()


def read_body(text: str | None, file: Path | None) -> dict[str, Any]:
    """The request from the argument, a file, or stdin (if neither is given, or `-`). Raises BadRequest."""
    if text is not None and file is not None:
        raise BadRequest("give the request as an argument or with --file, not both")
    if file is not None and str(file) != "-":
        try:
            text = file.read_text()
        except OSError as error:
            raise BadRequest(f"{file} cannot be read: {error.strerror}") from None
    elif text is None or text == "-":
        text = sys.stdin.read()
    try:
        body = json.loads(text)
    except ValueError as error:
        raise BadRequest(f"the request is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise BadRequest("the request is not a JSON object like " + '{"prompt": "Hello"}')
    return body


async def request(target: Target, body: dict[str, Any], *, stream: bool, timeout_s: float) -> None:
    """Send `body` and print the answer. Raises the request's error. An interrupt cancels the request."""
    filled = {"model": target.model, **body}
    async with connected(target.nats_url) as bus:
        client = await Client.open(bus, target.tenant)
        if not (stream or filled.get("stream")):
            _print(await client.complete(filled, timeout_s=timeout_s), indent=2)
            return
        async with aclosing(client.stream(filled, timeout_s=timeout_s)) as frames:
            async for frame in frames:
                _print(frame)


def _print(body: dict[str, Any], indent: int | None = None) -> None:
    print(json.dumps(body, ensure_ascii=False, indent=indent), flush=True)
