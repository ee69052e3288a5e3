"""Prints an answer while it arrives: as rendered Markdown on a terminal, as it is elsewhere.

On a terminal the blocks of Markdown (paragraphs, lists, code) that are complete are printed for good. Only
the last one is drawn again with each piece of text; of a tall one its last lines are shown until it ends.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

from services.launcher.console import dim, is_terminal

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

REDRAW_S = 0.05  # 20 a second look continuous; to render a long block takes some ms
_LINE_ENDS = re.compile(r"\r\n?|\n")  # as markdown-it counts lines
AGAIN = "[the answer starts over]"


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
