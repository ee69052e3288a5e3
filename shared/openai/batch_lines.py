"""The lines of a batch, in and out, as OpenAI's Batch API has them. Pure.

Input: `{"custom_id", "method": "POST", "url", "body"}`
(https://platform.openai.com/docs/api-reference/batch/request-input). Output: the answer to one line, in any
order (https://platform.openai.com/docs/api-reference/batch/request-output).
"""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shared.api import read_json
from shared.errors import BadRequest, HeadraceError
from shared.openai.call import Call, answer, error_body, error_status, read_call
from shared.openai.responses.output import whole as response
from shared.openai.responses.request import PATH, read

MAX_FILE_BYTES = 209_715_200  # 200 MB, as OpenAI has it for a batch
COMPLETED, FAILED, CANCELLED, EXPIRED = "completed", "failed", "cancelled", "expired"  # how one ends
URLS = {"/v1/chat/completions": True, "/v1/completions": False, PATH: True}  # whether it is a chat

Body = dict[str, Any]


@dataclass(frozen=True, slots=True)
class BatchLine:
    """One request of an input file. `body` has no null fields."""

    custom_id: str
    url: str
    body: Body

    def call(self, request_id: str, defaults: Mapping[str, Any]) -> Call:
        """Its native requests; `defaults` are for fields that it leaves out. Raises BadRequest."""
        fields = read({**self.body, "store": False}) if self.url == PATH else self.body
        return read_call({**defaults, **fields}, chat=URLS[self.url], request_id=request_id)


def read_line(raw: bytes) -> BatchLine:
    """The request in a line. Raises BadRequest."""
    try:
        fields = read_json(raw.removeprefix(codecs.BOM_UTF8))  # as some editors begin a file
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"it is not JSON: {error!s:.120}") from None
    if not isinstance(fields, dict):
        raise BadRequest("a JSON object is expected")
    custom_id, body = fields.get("custom_id"), fields.get("body")
    if not isinstance(custom_id, str) or not custom_id:
        raise BadRequest("`custom_id`: a text is expected that no other line has", param="custom_id")
    if fields.get("method", "POST") != "POST":
        raise BadRequest("`method`: POST is expected", param="method")
    if fields.get("url") not in [*URLS]:  # it may be of any type
        raise BadRequest(f"`url`: one of {', '.join(URLS)} is expected", param="url")
    if not isinstance(body, dict):
        raise BadRequest("`body`: a JSON object is expected", param="body")
    if body.get("stream"):
        raise BadRequest("`body.stream`: the answers of a batch are whole; leave it out", param="body.stream")
    if body.get("durable"):
        why = "`body.durable`: a line of a batch starts over; leave it out"
        raise BadRequest(why, param="body.durable")
    if body.get("echo"):
        raise BadRequest("`body.echo` is not supported in a batch; leave it out", param="body.echo")
    for name in ("background", "previous_response_id") if fields["url"] == PATH else ():
        if body.get(name):
            why = f"`body.{name}` is not supported in a batch, whose answers are in its files; leave it out"
            raise BadRequest(why, param=f"body.{name}")
    line = BatchLine(custom_id, fields["url"], {n: v for n, v in body.items() if v is not None})
    line.call("any", {"model": "any"})
    return line


@dataclass(slots=True)
class InputCheck:
    """Reads the lines of a file in their order."""

    line: int = 0  # number of the line read last
    requests: int = 0
    _known: dict[str, int] = field(default_factory=dict)  # line numbers by custom_id

    def read(self, raw: bytes) -> BatchLine | None:
        """The request in the next line, None for a blank one. Raises BadRequest, with the line's number in
        its message."""
        self.line += 1
        if not raw.strip():
            return None
        try:
            line = read_line(raw)
        except HeadraceError as error:
            raise BadRequest(f"line {self.line}: {error.message}", param=error.param) from None
        if (first := self._known.setdefault(line.custom_id, self.line)) != self.line:
            why = f"its custom_id {line.custom_id!r:.80} is that of line {first}"
            raise BadRequest(f"line {self.line}: {why}", param="custom_id")
        self.requests += 1
        return line


def answered(call: Call, natives: Sequence[Body], custom_id: str) -> Body:
    """The output line of a request with an answer."""
    whole = response if call.keep.get("path") == PATH else answer
    return _output(custom_id, 200, call.request_id, whole(call, natives, ()))


def refused(error: HeadraceError, request_id: str, custom_id: str) -> Body:
    """The output line of a request that ended with an error."""
    return _output(custom_id, error_status(error), request_id, error_body(error, request_id))


def _output(custom_id: str, status: int, request_id: str, body: Body) -> Body:
    response = {"status_code": status, "request_id": request_id, "body": body}
    return {"custom_id": custom_id, "response": response, "error": None}
