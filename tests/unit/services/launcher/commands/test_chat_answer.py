"""An answer on a terminal: the Markdown that is left on the screen, for every way of cutting the stream."""

from __future__ import annotations

import io
import re
import subprocess
import sys

import pytest
from rich.console import Console
from rich.markdown import Markdown

from services.launcher.commands import chat as module
from services.launcher.commands.chat import answer_on

TEXT = """# Title

Some *text* over\u2028
two lines.

* one
* two

  still two

```python
def f():

    return 1
```
> quoted

1. first
2. last
"""


class Tty(io.StringIO):
    """A terminal of 80 columns, and what stays on it."""

    def isatty(self) -> bool:
        return True

    def shown(self) -> list[str]:
        """The lines at the end, after cursor movements and deletions."""
        lines, row = [""], 0
        for piece in re.findall(r"\x1b\[[\d;?]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", self.getvalue()):
            if piece == "\n":
                row += 1
                lines += [""] * (row + 1 - len(lines))
            elif piece == "\x1b[2K":
                lines[row] = ""
            elif re.fullmatch(r"\x1b\[\d+A", piece):
                row -= int(piece[2:-1])
                assert row >= 0
            elif piece[0] not in "\x1b\r":
                lines[row] += piece
        return [line.rstrip() for line in lines]


@pytest.fixture(autouse=True)
def _terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("TERM", "xterm"), ("COLUMNS", "80"), ("LINES", "30"), ("NO_COLOR", "1")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(module, "REDRAW_S", 0)


def rendered(text: str) -> list[str]:
    screen = Tty()
    Console(file=screen).print(Markdown(text))
    return [line for line in screen.shown() if line]


@pytest.mark.parametrize("size", [1, 2, 7, 40, 1000])
def test_the_screen_ends_with_the_whole_answer_once(size: int) -> None:
    screen = Tty()
    with answer_on(screen) as answer:
        answer.begin()
        for i in range(0, len(TEXT), size):
            answer.add(TEXT[i : i + size])
    assert answer.text == TEXT
    assert [line for line in screen.shown() if line] == rendered(TEXT)


def test_a_block_taller_than_the_screen_is_printed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LINES", "8")
    screen, text = Tty(), "".join(f"* item {i}\n" for i in range(50))
    with answer_on(screen) as answer:
        for i in range(0, len(text), 5):
            answer.add(text[i : i + 5])
            drawn = screen.getvalue().rpartition("\x1b[2K")[2]
            assert drawn.count("\n") < 8
    assert [line for line in screen.shown() if line] == rendered(text)


def test_restart_of_an_answer_is_printed() -> None:
    screen = Tty()
    with answer_on(screen) as answer:
        answer.begin()
        answer.add("one *half*")
        answer.begin()
        answer.add("two")
    assert answer.text == "two"
    assert [line for line in screen.shown() if line] == ["one half", "[the answer starts over]", "two"]


def test_no_text_prints_nothing() -> None:
    for screen in (Tty(), io.StringIO()):
        with answer_on(screen) as answer:
            answer.begin()
        assert screen.getvalue() == ""


def test_elsewhere_the_text_is_printed_as_it_is() -> None:
    screen = io.StringIO()
    with answer_on(screen) as answer:
        answer.add("# Title\n")
        answer.add("*text*")
    assert screen.getvalue() == "# Title\n*text*\n"


def test_rich_is_not_imported_without_a_terminal() -> None:
    code = (
        "import sys; from services.launcher.commands.chat import answer_on\n"
        "with answer_on(sys.stdout) as answer: answer.add('x')\n"
        "print('rich' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "x\nFalse\n"
