"""`headrace chat` holds a conversation on the terminal.

Ctrl-C stops an answer, Ctrl-D ends the chat. A line that starts with a slash is a command: each public method
of `Commands` is one, and its docstring the line of `/help`. A saved conversation is the body of a request.
The connection runs on an event loop in a second thread, so that it answers the server's pings while the main
thread waits for the next line.

`headrace run MODEL [PROMPT]` answers a prompt, or chats, with a fleet that it starts if none runs.

The fleet stays in the background for the next call, see background.py. A model that is not on this machine is
fetched first. With the setting `nats_url` the fleet there is used, and nothing is started.

`Answer` prints an answer while it arrives: as rendered Markdown on a terminal, as it is elsewhere.

On a terminal the blocks of Markdown (paragraphs, lists, code) that are complete are printed for good. Only
the last one is drawn again with each piece of text; of a tall one its last lines are shown until it ends.
"""

from __future__ import annotations

import argparse
import asyncio
import inspect
import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Coroutine, Generator, Iterator, Sequence
from contextlib import AsyncExitStack, aclosing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TextIO, TypeVar

from pydantic import ValidationError

from services.launcher import background, console, session
from services.launcher.commands.pull import pull
from services.launcher.console import AGAIN, dim, is_terminal, kind_of
from services.launcher.session import Target, connected
from shared.api import ChatRequest
from shared.client.client import Client
from shared.config import Loaded, Settings
from shared.errors import BadRequest, HeadraceError, SetupError
from shared.nats import access
from shared.openai.call import CONTEXT_LENGTH
from shared.vocab.files import can_be_pulled, resolve, served_names

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

Message = dict[str, str]
T = TypeVar("T")

ANY: Message = {"role": "user", "content": "?"}  # a conversation without messages is no request
_OWN = ("model", "messages", "stream", "n")  # fields that a chat sets itself

LONGEST_TOKENS = 2_048  # of an answer without a limit of its own: a small model may repeat itself without end
_LIMITS = {"max_tokens", "max_completion_tokens", "n_predict"}
CUT = f"[cut at {LONGEST_TOKENS:,} tokens; for more: --max-tokens N, or /set max_tokens N in a chat]"

AGAIN_S = 0.5  # after a SIGTERM that had no effect
HISTORY_LINES = 1_000  # of what was typed, as many as a shell keeps


REDRAW_S = 0.05  # 20 a second look continuous; to render a long block takes some ms
_LINE_ENDS = re.compile(r"\r\n?|\n")  # as markdown-it counts lines


@contextmanager
def answer_on(stream: TextIO) -> Iterator[Answer]:
    """An answer on `stream` for the duration of a block."""
    answer = Answer(stream)
    try:
        yield answer
    finally:
        answer.end()


class Answer:
    """An answer that is being printed. `text` is all of it so far."""

    def __init__(self, stream: TextIO) -> None:
        self.text = ""
        self._stream = stream
        self._markdown = _Markdown(stream) if is_terminal(stream) else None

    def begin(self) -> None:
        """The answer begins, or begins again after a fault."""
        if self.text:
            self.end()
            print(dim(AGAIN), file=self._stream, flush=True)
            self.text = ""

    def add(self, text: str) -> None:
        """The next piece of text."""
        self.text += text
        if self._markdown is None:
            print(text, end="", file=self._stream, flush=True)
        elif self.text:
            self._markdown.draw(self.text)

    def end(self) -> None:
        """No text follows."""
        if not self.text:
            return
        if self._markdown is None:
            print(file=self._stream, flush=True)
        else:
            self._markdown.finish(self.text)


class _Markdown:
    """Draws a growing text as Markdown on a terminal."""

    def __init__(self, stream: TextIO) -> None:
        from markdown_it import MarkdownIt
        from rich.console import Console
        from rich.live import Live

        self._parser = MarkdownIt()
        self._console = Console(file=stream)
        self._live = Live(
            console=self._console, auto_refresh=False, transient=True, redirect_stdout=False,
            redirect_stderr=False,
        )  # fmt: skip
        self._printed = 0  # characters of the text, all in complete blocks
        self._redrawn_s = 0.0

    def draw(self, text: str) -> None:
        """Show the text so far, unless the last drawing is recent."""
        if not self._live.is_started:
            self._live.start()
        if (now_s := time.monotonic()) - self._redrawn_s >= REDRAW_S:
            self._redrawn_s = now_s
            self._print(text[: self._start_of_last_block(text)])
            self._live.update(_LastLines(text[self._printed :]), refresh=True)

    def finish(self, text: str) -> None:
        """Print the whole text. The next `draw` begins another one."""
        self._print(text[: self._start_of_last_block(text)])
        self._live.stop()
        self._print(text)
        self._printed = 0

    def _start_of_last_block(self, text: str) -> int:
        """Where the last block of the text begins: more text may change this one alone."""
        rest = text[self._printed :]
        blocks = [token.map[0] for token in self._parser.parse(rest) if token.map and not token.level]
        starts = [0, *(end.end() for end in _LINE_ENDS.finditer(rest))]
        return self._printed + (starts[blocks[-1]] if blocks else 0)

    def _print(self, text: str) -> None:
        """Print what of the text is not printed yet."""
        from rich.markdown import Markdown

        if block := text[self._printed :].strip("\n"):
            if self._printed:
                self._console.print()
            self._console.print(Markdown(block))
            self._printed = len(text)


class _LastLines:
    """The last lines of rendered Markdown, as many as the terminal has."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.markdown import Markdown
        from rich.segment import Segment

        for line in console.render_lines(Markdown(self._text), options)[1 - console.height :]:
            yield from line
            yield Segment.line()


@dataclass(slots=True)
class Conversation:
    """The messages so far, and further fields of each request: max_tokens, temperature, ..."""

    options: dict[str, Any] = field(default_factory=dict)
    messages: list[Message] = field(default_factory=list)

    @property
    def system(self) -> str:
        """The text of the system message, empty without one."""
        first = self.messages[0] if self.messages else {}
        return str(first.get("content", "")) if first.get("role") == "system" else ""

    @system.setter
    def system(self, text: str) -> None:
        turns = self.messages[1:] if self.system else self.messages
        self.messages = ([{"role": "system", "content": text}] if text else []) + turns


@dataclass(slots=True)
class Chat:
    """A conversation with one model."""

    client: Client
    model: str
    timeout_s: float
    conversation: Conversation

    async def send(self, text: str) -> None:
        """Send `text` and print the answer as it arrives. Raises the request's error. A question without any
        answer is not kept."""
        question: Message = {"role": "user", "content": text}
        messages = [*self.conversation.messages, question]
        body = {"model": self.model, "messages": messages, **self.conversation.options}
        limit = {} if _LIMITS & body.keys() else {"max_tokens": LONGEST_TOKENS}
        with answer_on(sys.stdout) as answer:
            try:
                try:
                    end = await self._print({**body, **limit}, answer)
                except BadRequest as error:
                    if not limit or not _is_about_room(error):
                        raise
                    limit, end = {}, await self._print(body, answer)  # what is left of the context is less
            finally:
                if answer.text:
                    self.conversation.messages = [*messages, {"role": "assistant", "content": answer.text}]
        if limit and end == "length":
            print(dim(CUT), file=sys.stderr, flush=True)

    async def _print(self, body: dict[str, Any], answer: Answer) -> str | None:
        """Print the answer to a request. Why it ended."""
        end = None
        async with aclosing(self.client.stream(body, timeout_s=self.timeout_s)) as frames:
            async for frame in frames:
                if frame["type"] == "accepted":
                    answer.begin()
                for choice in frame.get("choices", ()):
                    answer.add(choice.get("delta", {}).get("content") or "")
                    end = choice.get("finish_reason")
        return end


def _is_about_room(error: BadRequest) -> bool:
    """True if a shorter answer would have been accepted."""
    return error.param == "max_tokens" and error.message.startswith(CONTEXT_LENGTH)


async def ask_once(target: Target, question: str, conversation: Conversation, timeout_s: float) -> None:
    """`headrace chat -q`: one question, one answer on stdout."""
    async with connected(target.nats_url) as bus:
        await Chat(await Client.open(bus, target.tenant), target.model, timeout_s, conversation).send(
            question
        )


def converse(target: Target, conversation: Conversation, timeout_s: float) -> None:
    """Answer lines from stdin until its end, /bye or SIGTERM. Raises SetupError."""
    with _ended_by_sigterm(), LoopThread() as loop, _editing():
        stack = AsyncExitStack()
        bus = loop.run(stack.enter_async_context(connected(target.nats_url)))
        chat = Chat(loop.run(Client.open(bus, target.tenant)), target.model, timeout_s, conversation)
        if sys.stdin.isatty():
            where = f"{target.model} at {access.shown(target.nats_url)}"
            print(dim(f"{where}; /help lists commands, Ctrl-C stops an answer, Ctrl-D ends"))
            if not _LIMITS & conversation.options.keys():
                print(dim(f"an answer has at most {LONGEST_TOKENS:,} tokens: /set max_tokens N changes it"))
        try:
            while (line := _read_line()) not in (None, "/bye"):
                if line:
                    _answer(loop, chat, line)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            loop.run(stack.aclose())


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """SIGTERM ends the chat; elsewhere it is a Ctrl-C, which ends no more than an answer here."""

    def end(*_: object) -> None:  # and again: Python drops what is raised in the callback of a weak reference
        signal.setitimer(signal.ITIMER_REAL, AGAIN_S)
        raise SystemExit(128 + signal.SIGTERM)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGALRM)}
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)


def _read_line() -> str | None:
    """The next line, None at the end of the input, empty after Ctrl-C."""
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return None
    except KeyboardInterrupt:
        print(dim("\n[Ctrl-D or /bye ends]"))
        return ""


@contextmanager
def _editing() -> Iterator[None]:
    """Line editing for `input`, with the lines of earlier chats, if stdin is a terminal."""
    if not sys.stdin.isatty():
        yield
        return
    import readline

    # https://specifications.freedesktop.org/basedir-spec: the state folder is the place of histories
    state = Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser()
    history = state / "headrace" / "chat_history"
    readline.set_auto_history(True)
    readline.set_history_length(HISTORY_LINES)
    with suppress(OSError):
        history.parent.mkdir(parents=True, exist_ok=True)
        history.touch(0o600)  # prompts are their writer's alone
        readline.read_history_file(history)
    try:
        yield
    finally:
        with suppress(OSError):
            readline.write_history_file(history)


def _answer(loop: LoopThread, chat: Chat, line: str) -> None:
    try:
        if line.startswith("/"):
            Commands(chat.model, chat.conversation).run(line)
        else:
            loop.run(chat.send(line))
    except KeyboardInterrupt:
        print(dim("[stopped]"))
    except HeadraceError as error:
        print(f"error ({kind_of(error)}): {error.message}")
        if error.message.startswith(CONTEXT_LENGTH):
            print(dim("/reset forgets the conversation; /set max_tokens N asks for a shorter answer"))


@dataclass(slots=True)
class Commands:
    """The commands of a chat."""

    model: str
    conversation: Conversation

    def run(self, line: str) -> None:
        """Run `/NAME ARGUMENT`. Raises BadRequest."""
        name, _, argument = line[1:].partition(" ")
        if name not in self._all():
            raise BadRequest(f"there is no command /{name}: /help lists them")
        getattr(self, name)(argument.strip())

    def _all(self) -> dict[str, str]:
        """The commands and what each does."""
        public = (name for name in vars(type(self)) if not name.startswith("_") and name != "run")
        found = {name: inspect.getdoc(getattr(type(self), name)) for name in public}
        return {name: doc for name, doc in found.items() if doc and ": " in doc}

    def help(self, _: str) -> None:
        """/help: this list"""
        for doc in (*self._all().values(), "/bye: end the chat"):
            usage, _, text = doc.partition(": ")
            print(f"  {usage:<18}{text}")

    def system(self, text: str) -> None:
        """/system TEXT: instructions before the conversation; without TEXT: show them; -: none"""
        if text:
            self.conversation.system = "" if text == "-" else text
        print(dim(f"system: {self.conversation.system or 'none'}"))

    def set(self, words: str) -> None:
        """/set NAME VALUE: a field of each request, like temperature 0.7; without VALUE: the default"""
        name, _, value = words.partition(" ")
        options = {known: set_ for known, set_ in self.conversation.options.items() if known != name}
        if name in _OWN:
            raise BadRequest(f"{name} is not for /set: the chat sets it itself")
        if value:
            options[name] = _value(value)
        self.conversation.options = self._checked(options, self.conversation.messages).options
        print(dim(", ".join(f"{name} {json.dumps(value)}" for name, value in options.items()) or "defaults"))

    def reset(self, _: str) -> None:
        """/reset: forget the conversation, keep the system text"""
        self.conversation.messages = self.conversation.messages[: bool(self.conversation.system)]
        print(dim("[a new conversation]"))

    def save(self, file: str) -> None:
        """/save FILE: the conversation as JSON, also for `headrace request -f FILE`"""
        body = {"model": self.model, "messages": self.conversation.messages, **self.conversation.options}
        try:
            _path(file).write_text(json.dumps(body, ensure_ascii=False, indent=2) + "\n")
        except OSError as error:
            raise BadRequest(f"{file} cannot be written: {error.strerror}") from None
        print(dim(f"{len(self.conversation.messages)} messages in {file}"))

    def load(self, file: str) -> None:
        """/load FILE: go on with a saved conversation"""
        try:
            body = json.loads(_path(file).read_text())
        except OSError as error:
            raise BadRequest(f"{file} cannot be read: {error.strerror}") from None
        except ValueError as error:
            raise BadRequest(f"{file} is not JSON: {error}") from None
        if not isinstance(body, dict) or not isinstance(body.get("messages"), list):
            raise BadRequest(f"{file} has no `messages`: write it with /save")
        options = {name: value for name, value in body.items() if name not in _OWN}
        loaded = self._checked(options, body["messages"])
        self.conversation.options, self.conversation.messages = loaded.options, loaded.messages
        print(dim(f"{len(loaded.messages)} messages from {file}"))

    @staticmethod
    def _checked(options: dict[str, Any], messages: list[Message]) -> Conversation:
        """The conversation if the API takes it. Raises BadRequest."""
        try:
            ChatRequest.model_validate({"messages": messages or [ANY], **options})
        except ValidationError as error:
            first = error.errors()[0]
            name = ".".join(map(str, first["loc"]))
            why = "no such field" if first["type"] == "extra_forbidden" else first["msg"]
            raise BadRequest(f"{name}: {why}") from None
        return Conversation(options, messages)


def _value(text: str) -> Any:
    """A JSON value, or else the text itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _path(file: str) -> Path:
    if not file:
        raise BadRequest("name a file, like /save chat.json")
    return Path(file).expanduser()


class LoopThread:
    """An event loop in a thread; `run` waits for a coroutine on it and cancels the coroutine on Ctrl-C
    and SIGTERM."""

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
        except (KeyboardInterrupt, SystemExit):
            signal.setitimer(signal.ITIMER_REAL, 0)  # of `_ended_by_sigterm`
            future.cancel()
            self._settle()
            raise

    def _settle(self) -> None:
        """Wait until all cancelled tasks have ended."""

        async def others() -> None:
            tasks = [t for t in asyncio.all_tasks() if t is not asyncio.current_task() and t.cancelling()]
            await asyncio.gather(*tasks, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(others(), self._loop).result()


def run(loaded: Loaded, words: Sequence[str], conversation: Conversation) -> None:
    """Answer the prompt: `words`, then stdin if it is not a terminal. Without a prompt on a terminal: a chat.
    An empty prompt only starts the fleet. Raises SetupError, and the request's error."""
    timeout_s = loaded.settings.request_timeout_s
    interactive = sys.stdin is not None and sys.stdin.isatty()
    piped = "" if interactive or sys.stdin is None else sys.stdin.read().strip()
    prompt = "\n\n".join(filter(None, (" ".join(words), piped)))
    with _target(loaded) as target:
        if prompt:
            asyncio.run(ask_once(target, prompt, conversation, timeout_s))
        elif interactive and not words:
            converse(target, conversation, timeout_s)


@contextmanager
def _target(loaded: Loaded) -> Generator[Target]:
    settings = loaded.settings
    name = served_names(settings)[0]
    if settings.nats_url:
        yield Target(settings.nats_url, name)
        return
    status = console.StatusLine(sys.stderr)
    with status, background.fleet_of(loaded, lambda: _fetch(settings), status.show) as fleet:
        status.clear()
        if name not in fleet.models:
            raise SetupError(
                f"fleet {fleet.fleet} serves {', '.join(fleet.models)}, not {name}: end it with "
                f"`headrace stop`, or start {name} beside it with --fleet NAME"
            )
        yield Target(fleet.nats_url, name)


def _fetch(settings: Settings) -> None:
    """Fetch the model unless it is here. Raises SetupError."""
    try:
        resolve(settings.model, settings.cache_dir)
    except SetupError:
        if not can_be_pulled(settings.model) or Path(settings.model).exists():
            raise
        pull(settings.model, settings.cache_dir, lambda text: print(text, file=sys.stderr, flush=True))


def run_command(parser: argparse.ArgumentParser) -> None:
    """Its arguments."""
    add = parser.add_argument
    add("model", metavar="MODEL", help="a known name, a hub id, a GGUF file or a folder")
    add("prompt", nargs="*", default=[], metavar="PROMPT", help="and stdin, if piped; neither: a chat")
    console.add_sampling_flags(parser, "2048")
    parser.set_defaults(run=lambda given: run(console.load(given), given.prompt, _conversation(given)))


def command(parser: argparse.ArgumentParser) -> None:
    """Its arguments."""
    parser.add_argument("-q", "--question", help="send one question, print the answer, exit")
    console.add_sampling_flags(parser, "2048")
    parser.set_defaults(run=_on_chat)


def _on_chat(given: argparse.Namespace) -> None:
    loaded = console.load(given)
    target, timeout_s = session.find_target(loaded, wait=True), loaded.settings.request_timeout_s
    if given.question is not None:
        asyncio.run(ask_once(target, given.question, _conversation(given), timeout_s))
    else:
        converse(target, _conversation(given), timeout_s)


def _conversation(given: argparse.Namespace) -> Conversation:
    conversation = Conversation(console.options_of(given))
    conversation.system = given.system
    return conversation
