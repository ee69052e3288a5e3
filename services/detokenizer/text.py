"""Token ids to text as they come: whole characters only, and nothing that may become a stop string."""

from __future__ import annotations

import codecs
from array import array

from shared.vocabulary import Vocabulary


class TextDecoder:
    """Incremental form of `Vocabulary.decode`: the pieces concatenate to the whole, exactly."""

    __slots__ = ("_rest", "_strip", "_table")

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._table = vocabulary.token_bytes
        self._rest = b""  # the beginning of a character
        self._strip = vocabulary.strips_leading_space

    def feed(self, ids: array[int]) -> str:
        """The text that `ids` complete. Ids outside the vocabulary (a padded output layer may
        produce them) have no text."""
        try:
            data = b"".join([self._table[i] for i in ids])
        except IndexError:
            size = len(self._table)
            data = b"".join([self._table[i] for i in ids if i < size])
        if self._strip and data:
            self._strip = False
            data = data.removeprefix(b" ")
        if not self._rest and data.isascii():
            return data.decode("ascii")
        data = self._rest + data
        text, used = codecs.utf_8_decode(data, "replace", False)
        self._rest = data[used:]
        return text

    def finish(self) -> str:
        """What an unfinished character at the end of the text becomes."""
        text, self._rest = self._rest.decode("utf-8", "replace"), b""
        return text


class StopFinder:
    """Finds the stop string that is complete first, across token borders.

    Holds back the longest end of the text that could still become a stop string, never more.
    """

    __slots__ = ("_begins", "_held", "_include", "_stops")

    def __init__(self, stops: tuple[str, ...], include: bool) -> None:
        self._stops = stops
        self._begins = frozenset(stop[0] for stop in stops)
        self._include = include
        self._held = ""

    def feed(self, piece: str) -> tuple[str, bool]:
        """(text that may go out, whether a stop string is complete). After a stop string nothing
        more may be fed."""
        if not self._held and self._begins.isdisjoint(piece):
            return piece, False
        text = self._held + piece
        ends = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if ends:
            end, start = min(ends)
            self._held = ""
            return text[: end if self._include else start], True
        cut = min((self._may_begin(stop, text) for stop in self._stops), default=len(text))
        self._held = text[cut:]
        return text[:cut], False

    def finish(self) -> str:
        """The text held back, once it is known that nothing follows."""
        text, self._held = self._held, ""
        return text

    @staticmethod
    def _may_begin(stop: str, text: str) -> int:
        """Where the longest end of `text` that begins `stop` starts; its length if there is none."""
        at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
        while at >= 0:
            if stop.startswith(text[at:]):
                return at
            at = text.find(stop[0], at + 1)
        return len(text)
