"""`Reader` is the text of an answer as far as it has arrived, and the parts that it has been separated into.

Its steps are generators, which yield while more text must come. A step that finds nothing passes over
nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from functools import lru_cache
from typing import NamedTuple

MAX_HEAD = 512  # characters before a call's arguments: a name of 128 with all markers of the longest head
MAX_HELD = 65_536  # characters of a call that is read whole: a file of 16k tokens in an argument
MAX_SPACES = 1_024  # characters of white space that may precede a marker or another call
NO_LIMIT = 2**62
CONTENT, REASONING, CALL, ARGUMENTS = "content", "reasoning", "call", "arguments"

_SPACES, _SEPARATOR = re.compile(r"\s*"), re.compile(r"\s*[,;]?\s*")

Truth = Generator[None, None, bool]
Text = Generator[None, None, str]
Match = Generator[None, None, re.Match[str] | None]
Scan = Callable[[str, int], tuple[str, int, bool]]  # text, from where: the part, its end, whether it ends


class Part(NamedTuple):
    """A part of an answer: text of its kind. The text of a CALL is the name of the function."""

    kind: str
    text: str
    call: int = 0  # index of the call, for CALL and ARGUMENTS


@lru_cache(256)
def _markers(markers: tuple[str, ...]) -> tuple[re.Pattern[str], frozenset[str], int]:
    """A pattern for the markers, the proper starts of markers, and the longest of these."""
    longest_first = sorted(markers, key=len, reverse=True)
    starts = frozenset(marker[:n] for marker in markers for n in range(1, len(marker)))
    return re.compile("|".join(map(re.escape, longest_first))), starts, max(map(len, starts), default=0)


def _begun(text: str, at: int, markers: tuple[str, ...]) -> int:
    """The number of characters at the end of `text`, from `at` on, that may be the start of a marker."""
    _, starts, longest = _markers(markers)
    return next((n for n in range(min(longest, len(text) - at), 0, -1) if text[-n:] in starts), 0)


class Reader:
    """The text from `at` on is not read yet. Places count the characters of the whole answer."""

    def __init__(self) -> None:
        self.text, self.at, self.ended = "", 0, False
        self.since: int | None = None  # the place from which text may be a call or content
        self.content: list[tuple[int, int]] = []  # the places of content: begin, end
        self._cut = 0  # characters before `text`
        self.parts: list[Part] = []
        self.calls = 0
        self.spaces = ""  # held back from content or reasoning
        self._trim = False  # white space that comes next is dropped

    def add(self, piece: str, *, last: bool = False) -> None:
        """More text has arrived."""
        self._cut += self.at
        self.text, self.at, self.ended = self.text[self.at :] + piece, 0, last

    @property
    def place(self) -> int:
        """The place of `at`."""
        return self._cut + self.at

    # ---- parts -----------------------------------------------------------------------------------

    def add_text(self, kind: str, text: str, since: int | None = None) -> None:
        """Add text of content or reasoning: that which stands at `at`, or the text from the place `since` up
        to `at`. White space at its end is held back: it may precede a marker."""
        begin, end = (self.place, self.place + len(text)) if since is None else (since, self.place)
        if self._trim:
            begin += len(text)
            text = text.lstrip()
            begin -= len(text)
            self._trim = not text
        if kind == CONTENT and begin < end:
            if self.content and self.content[-1][1] == begin:
                begin, _ = self.content.pop()
            self.content.append((begin, end))
        text = self.spaces + text
        shown = text.rstrip() if len(text) < MAX_SPACES or not text.isspace() else text
        self.spaces = text[len(shown) :]
        self.emit(kind, shown)

    def change_kind(self) -> None:
        """Text of another kind follows: white space around it is dropped."""
        self.spaces, self._trim = "", True

    def emit(self, kind: str, text: str) -> None:
        """Add a part."""
        call = self.calls - 1 if kind in (CALL, ARGUMENTS) else 0
        if text and self.parts and kind != CALL and self.parts[-1][::2] == (kind, call):
            self.parts[-1] = Part(kind, self.parts[-1].text + text, call)
        elif text:
            self.parts.append(Part(kind, text, call))

    def start(self, name: str) -> None:
        """A call of the function `name` begins."""
        self.change_kind()
        self.since = None
        self.calls += 1
        self.emit(CALL, name)

    # ---- steps -----------------------------------------------------------------------------------

    def until(self, markers: tuple[str, ...], show: Callable[[str], None], most: int = NO_LIMIT) -> Text:
        """Pass text to `show` up to one of the markers, and step over it; "" at the end, and after `most`
        characters without a marker."""
        while True:
            found = _markers(markers)[0].search(self.text, self.at) if markers else None
            if found:
                end = found.start()
            else:
                end = len(self.text) - (0 if self.ended else _begun(self.text, self.at, markers))
            last = self.at + most
            show(self.text[self.at : min(end, last)])
            if end > last:
                self.at = last
                return ""
            most -= end - self.at
            self.at = found.end() if found else end
            if found or self.ended:
                return found[0] if found else ""
            yield

    def collect(self, scan: Scan) -> Generator[None, None, tuple[str, bool]]:
        """The text up to where `scan` sees its end, and whether it did within MAX_HELD characters."""
        held, room = list[str](), MAX_HELD
        while True:
            part, used, done = scan(self.text[self.at : self.at + room], 0)
            held.append(part)
            self.at, room = self.at + used, room - used
            if done or self.ended or not room:
                return "".join(held), done
            yield

    def match(
        self, pattern: re.Pattern[str], most: int = MAX_HEAD
    ) -> Generator[None, None, re.Match[str] | None]:
        """Step over the pattern, which must match within `most` characters; else None."""
        while True:
            found = pattern.match(self.text, self.at, self.at + most)
            if found:
                self.at = found.end()
                return found
            if self.ended or len(self.text) - self.at >= most:
                return None
            yield

    def peek(self) -> Text:
        """The next character that is no white space; "" at the end. Passes over nothing."""
        while True:
            start = _spaces(self.text, self.at)
            if start < len(self.text) or self.ended or start - self.at > MAX_SPACES:
                return self.text[start : start + 1]
            yield

    def another(self) -> Truth:
        """Step over what separates two objects, if another one follows."""
        while True:
            found = _SEPARATOR.match(self.text, self.at)
            end = found.end() if found else self.at
            if end < len(self.text) or self.ended or end - self.at > MAX_SPACES:
                there = self.text[end : end + 1] == "{"
                self.at = end if there else self.at
                return there
            yield

    def literal(self, *texts: str, step: bool = True) -> Text:
        """Step over white space and the first of the texts that stands there; "" and no step if none does."""
        longest = max(map(len, texts), default=0)
        while texts:
            start = _spaces(self.text, self.at)
            rest = self.text[start : start + longest]
            found = next((text for text in texts if rest.startswith(text)), "")
            if found:
                self.at = start + len(found) if step else self.at
                return found
            if self.ended or start - self.at > MAX_SPACES or not any(text.startswith(rest) for text in texts):
                return ""
            yield
        return ""


def _spaces(text: str, at: int) -> int:
    found = _SPACES.match(text, at)
    return found.end() if found else at
