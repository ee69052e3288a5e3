"""Parses server-sent events as OpenAI servers write them: one line of data each, split at any byte."""

from __future__ import annotations

from collections.abc import Iterator

DONE = b"[DONE]"


class Events:
    """Cuts a stream of bytes into the data of its events. Comments and other fields are left out."""

    __slots__ = ("_rest",)

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The data of each event whose line has ended."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()
