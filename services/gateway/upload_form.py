"""`UploadForm` reads the form of an upload as it arrives: the file leaves in pieces, and is nowhere whole.

The parser of starlette's own forms, which keep a file on disk, is the same: python-multipart.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable
from typing import Any

from python_multipart.exceptions import MultipartParseError
from python_multipart.multipart import MultipartParser, parse_options_header

from shared.errors import BadRequest

MAX_FIELD_BYTES = 4_096  # of a field that is no file, and of a part's headers
MAX_FIELDS = 32


class UploadForm:
    """One form with a file. `fields` and `filename` are whole after the last piece."""

    def __init__(self, content_type: str) -> None:
        """Raises BadRequest for a body that is no form."""
        kind, options = parse_options_header(content_type)
        if kind != b"multipart/form-data" or b"boundary" not in options:
            raise BadRequest("the body is no form: send `multipart/form-data` with `file` and `purpose`")
        self.fields: dict[str, str] = {}
        self.filename = ""
        self._name = ""  # of the current part
        self._headers: dict[bytes, bytes] = {}
        self._header, self._value = bytearray(), bytearray()
        self._pieces: list[bytes] = []
        self._found = False
        self._ended = False
        self._parser: Any = MultipartParser(
            options[b"boundary"],
            {
                "on_part_begin": self._headers.clear,
                "on_header_field": self._on_header_field,
                "on_header_value": self._on_header_value,
                "on_header_end": self._on_header_end,
                "on_headers_finished": self._on_headers_finished,
                "on_part_data": self._on_part_data,
                "on_end": self._on_end,
            },
        )

    async def pieces(self, body: AsyncIterable[bytes]) -> AsyncGenerator[bytes]:
        """The content of the file. Raises BadRequest for a form without one, or that is cut off."""
        async for part in body:
            try:
                self._parser.write(part)
            except MultipartParseError as error:
                raise BadRequest(f"the form is damaged: {error!s:.200}") from None
            for piece in self._pieces:
                yield piece
            self._pieces.clear()
        if not self._found:
            raise BadRequest("the form has no `file`", param="file")
        if not self._ended:
            raise BadRequest("the form is cut off")

    def _on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]
        self._bounded(self._header)

    def _on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]
        self._bounded(self._value)

    def _on_header_end(self) -> None:
        self._headers[bytes(self._header).lower()] = bytes(self._value)
        self._bounded(b"".join(self._headers.values()))
        self._header.clear()
        self._value.clear()

    def _on_headers_finished(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        self._name = options.get(b"name", b"").decode(errors="replace")
        if self._name == "file":
            if self._found:
                raise BadRequest("the form has two files: send one at a time", param="file")
            self._found = True
            self.filename = options.get(b"filename", b"file").decode(errors="replace")
        elif len(self.fields) >= MAX_FIELDS:
            raise BadRequest(f"the form has over {MAX_FIELDS} fields")
        else:
            self.fields[self._name] = ""

    def _on_part_data(self, data: bytes, start: int, end: int) -> None:
        if self._name == "file":
            self._pieces.append(data[start:end])
        else:
            self.fields[self._name] += data[start:end].decode(errors="replace")
            self._bounded(self.fields[self._name])

    def _on_end(self) -> None:
        self._ended = True

    def _bounded(self, value: bytes | bytearray | str) -> None:
        if len(value) > MAX_FIELD_BYTES:
            raise BadRequest(f"a field or a header of the form is longer than {MAX_FIELD_BYTES} bytes")
