"""Terminal output of the commands: colours on a terminal, plain lines elsewhere. NO_COLOR is respected."""

from __future__ import annotations

import errno
import os
import sys
from typing import TextIO

from shared.errors import HeadraceError

_COLOURS = (36, 33, 32, 35, 34, 96)  # cyan, yellow, green, magenta, blue, bright cyan
_BOLD, _RED, _DIM = 1, 31, 2


def is_terminal(stream: TextIO) -> bool:
    """Whether a person with a screen reads this stream."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def has_colour(stream: TextIO) -> bool:
    """Whether to use colours on this stream (no-color.org)."""
    return is_terminal(stream) and not os.environ.get("NO_COLOR")


def paint(text: str, code: int, stream: TextIO) -> str:
    """`text` in an ANSI colour where the stream has colours."""
    return f"\033[{code}m{text}\033[0m" if has_colour(stream) else text


def bold(text: str) -> str:
    """For stdout."""
    return paint(text, _BOLD, sys.stdout)


def red(text: str) -> str:
    """For stdout."""
    return paint(text, _RED, sys.stdout)


def dim(text: str) -> str:
    """For stdout."""
    return paint(text, _DIM, sys.stdout)


def print_line(text: str) -> None:
    """Print one line of the launcher on stdout and flush it."""
    _print(text, sys.stdout)


PROGRESS = "…"  # a line with this end is a progress line: on a terminal the next line replaces it
_shown = {"progress": False}  # the terminal's last line is one; stdout and stderr share the terminal


def _print(text: str, stream: TextIO) -> None:
    """Print one line. A closed reader or a full disk loses the line and raises nothing."""
    first, last = "", "\n"
    try:
        if is_terminal(stream):
            first = "\r\033[K" if _shown["progress"] else ""
            _shown["progress"] = text.endswith(PROGRESS)
            last = "" if _shown["progress"] else "\n"
        print(first + text, end=last, file=stream, flush=True)
    except OSError as error:
        if error.errno in (errno.EPIPE, errno.EIO):
            silence(stream)


def silence(stream: TextIO) -> None:
    """Discard all further output of a stream with a closed pipe or terminal."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def fail(error: HeadraceError) -> int:
    """Print an error on stderr. Returns the exit status."""
    _print(f"{paint('error', _RED, sys.stderr)} ({kind_of(error)}): {error.message}", sys.stderr)
    return 1


def kind_of(error: HeadraceError) -> str:
    """The kind of an error in words."""
    return error.type.removesuffix("_error").replace("_", " ")


class ServiceLines:
    """Prints the log lines of services on stderr, each after its service's name in that service's colour."""

    def __init__(self, names: list[str], *, bare: bool = False) -> None:
        self._bare = bare  # JSON lines name their component themselves
        width = max(map(len, names), default=0)
        self._heads = {
            name: paint(f"{name:<{width}} |", _COLOURS[i % len(_COLOURS)], sys.stderr)
            for i, name in enumerate(names)
        }

    def __call__(self, name: str, line: str) -> None:
        _print(line if self._bare else f"{self._heads[name]} {line}", sys.stderr)
