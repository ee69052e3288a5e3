"""What commands share: flags, and output with colours on a terminal. NO_COLOR is respected."""

from __future__ import annotations

import errno
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Self, TextIO

from shared.errors import HeadraceError

if TYPE_CHECKING:
    import argparse

    from shared.config import Loaded

FLEET = ("nats_url", "fleet", "cache_dir")  # settings that are enough to find a fleet
_COLOURS = (36, 33, 32, 35, 34, 96)  # cyan, yellow, green, magenta, blue, bright cyan
_BOLD, _RED, _DIM = 1, 31, 2
_UNITS = ("B", "kB", "MB", "GB", "TB")


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


AGAIN = "[the answer starts over]"
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


def size(count: float) -> str:
    """Bytes with three digits and a unit."""
    for unit in _UNITS[:-1]:
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.3g} {_UNITS[-1]}"


class StatusLine:
    """The last line of a terminal, replaced by each `show` and empty after the block. Elsewhere nothing is
    shown."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream if is_terminal(stream) else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.clear()

    def show(self, text: str) -> None:
        """Show one line, cut to the width of the terminal."""
        if self._stream is not None:
            columns = shutil.get_terminal_size().columns - 1
            self._stream.write(f"\r\033[K{paint(text[:columns], _DIM, self._stream)}")
            self._stream.flush()

    def clear(self) -> None:
        """Show nothing."""
        self.show("")


class ServiceLines:
    """Prints the log lines of services, each after its service's name in that service's colour."""

    def __init__(self, names: list[str], stream: TextIO, *, bare: bool = False) -> None:
        self._stream, self._bare = stream, bare  # bare: JSON lines name their component themselves
        width = max(map(len, names), default=0)
        self._heads = {
            name: paint(f"{name:<{width}} |", _COLOURS[i % len(_COLOURS)], stream)
            for i, name in enumerate(names)
        }

    def __call__(self, name: str, line: str) -> None:
        _print(self.text(name, line), self._stream)

    def text(self, name: str, line: str) -> str:
        """The line as it is printed."""
        return line if self._bare else f"{self._heads[name]} {line}"


def add_setting_flags(
    parser: argparse.ArgumentParser, names: Sequence[str] | None, *, several_models: bool = False
) -> None:
    """Add a flag for each of these settings; None adds all."""
    import argparse
    from pathlib import Path

    from shared.config import PREFIX, Settings, metavar

    group = parser.add_argument_group("settings", "also as variables and in a TOML file, see --config")
    group.add_argument("--config", type=Path, metavar="FILE", help="TOML file with settings")
    for name in names or Settings.model_fields:
        field = Settings.model_fields[name]
        flag, text = f"--{name.replace('_', '-')}", f"{field.description} [{PREFIX}{name.upper()}]"
        text = text.replace("%", "%%")
        if field.annotation is bool:
            group.add_argument(flag, action=argparse.BooleanOptionalAction, default=None, help=text)
        elif name == "model" and several_models:
            text = text.replace("model to serve", "model to serve, may be repeated")
            group.add_argument(flag, dest=name, metavar=metavar(name), action="append", default=[], help=text)
        else:
            group.add_argument(flag, dest=name, metavar=metavar(name), help=text)


def actions_of(parser: argparse.ArgumentParser) -> Callable[[str, str], argparse.ArgumentParser]:
    """Adds the actions of a command, by name and line of help."""
    actions = parser.add_subparsers(required=True, metavar="ACTION", dest="action")

    def act(name: str, text: str) -> argparse.ArgumentParser:
        sub = actions.add_parser(name, help=text, description=text)
        add_setting_flags(sub, FLEET)
        return sub

    return act


def load(given: argparse.Namespace) -> Loaded:
    """The settings of a command line."""
    from shared.config import Settings
    from shared.config import load as load_settings

    return load_settings(given.config, {name: getattr(given, name, None) for name in Settings.model_fields})


def add_sampling_flags(parser: argparse.ArgumentParser, longest: str) -> None:
    """Add the flags of a question, see `options_of`."""
    parser.add_argument("--max-tokens", type=int, help=f"longest answer, tokens; default: {longest}")
    parser.add_argument("--temperature", type=float, help="0 is greedy; default: the model's")
    parser.add_argument("--seed", type=int, help="makes the answer repeatable")
    parser.add_argument("--system", default="", metavar="TEXT", help="instructions before the conversation")


def options_of(given: argparse.Namespace) -> dict[str, Any]:
    """The fields of a request that the flags of a question give."""
    named = {"max_tokens": given.max_tokens, "temperature": given.temperature, "seed": given.seed}
    return {name: value for name, value in named.items() if value is not None}


def load_test_module(program: str) -> Any:
    """The module `command` of a folder of loadtest/, loaded by name: services do not import loadtest."""
    from importlib import import_module

    from shared.errors import SetupError

    try:
        return import_module(f"loadtest.{program}.command")
    except ModuleNotFoundError as error:
        raise SetupError(f"loadtest.{program} is missing ({error}): run it from a source tree") from None
