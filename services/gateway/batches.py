"""`BatchApi`: the paths of OpenAI's Files and Batches, each a request or more to a keeper.

    POST /v1/files ──pieces──▶ UploadForm ──chunks──▶ keeper        GET …/content, the other way

The gateway holds the chunks on their way, and needs no permission for a stream: the keeper checks tenants,
limits and fields (services/keeper/batches/).

`UploadForm` reads the form of an upload as it arrives: the file leaves in pieces, and is nowhere whole.

The parser of starlette's own forms, which keep a file on disk, is the same: python-multipart.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, Callable
from functools import partial
from typing import Any

from python_multipart.exceptions import MultipartParseError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse

from services.gateway import openapi as doc
from services.gateway.endpoints import Endpoints
from services.gateway.exchange import SlowRequest, answer
from services.gateway.native_call import BODY_TIMEOUT_S, check_coding, fields_of, read_body
from shared import bodies
from shared.client.file_client import FileClient, asked
from shared.errors import BadRequest, Cancelled, Overloaded
from shared.nats import subjects
from shared.openai.batch_lines import URLS

MAX_UPLOADS = 32  # of one gateway at a time: each holds up to 2 MB
MAX_BATCH_BYTES = 65_536  # of the request that makes a batch: metadata is its longest part
MOST_LIMIT = 999_999_999  # of a list; a page has 100 at most
PRIVATE = ("chunks", "sha256")  # fields of a file that OpenAI's object does not have

Body = dict[str, Any]


class BatchApi:
    """The endpoints."""

    def __init__(self, endpoints: Endpoints) -> None:
        self._client_of, self._clock = endpoints.client_of, endpoints.clock
        self._uploads = 0

    async def upload(self, request: Request) -> Response:
        """`POST /v1/files`."""
        files = await self._files(request)
        if self._uploads >= MAX_UPLOADS:
            raise Overloaded("too many uploads to this gateway at a time: try again", retry_after_ms=5_000)
        check_coding(request)
        form = UploadForm(request.headers.get("content-type", ""))
        self._uploads += 1
        try:
            found = await files.upload(form.pieces(_pieces(request)), lambda: _described(form))
        except ClientDisconnect:
            raise Cancelled("the client went away") from None
        finally:
            self._uploads -= 1
        return answer(_public(found))

    async def content(self, request: Request) -> Response:
        """`GET /v1/files/{id}/content`."""
        content, chunks = await (await self._files(request)).read(request.path_params["id"])
        headers = {"Content-Length": str(content.bytes)}
        return StreamingResponse(chunks, headers=headers, media_type="application/octet-stream")

    async def create(self, request: Request) -> Response:
        """`POST /v1/batches`."""
        client = await self._client_of(request)
        fields = fields_of(await read_body(request, MAX_BATCH_BYTES))
        return answer(await asked(client, subjects.batches(client.tenant, "create"), fields))

    async def ask(self, request: Request, *, of: Callable[[str, str], str], verb: str) -> Response:
        """What a keeper answers about files or batches; `of` has its subject."""
        client = await self._client_of(request)
        body = _query(request) if verb == "list" else {"id": request.path_params["id"]}
        found = _public(await asked(client, of(client.tenant, verb), body))
        return answer({**found, "data": [*map(_public, found["data"])]} if verb == "list" else found)

    async def _files(self, request: Request) -> FileClient:
        return FileClient(await self._client_of(request), self._clock)


async def _pieces(request: Request) -> AsyncGenerator[bytes]:
    """The body. Raises SlowRequest if nothing of it comes for BODY_TIMEOUT_S."""
    parts = request.stream()
    while True:
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                part = await anext(parts)
        except StopAsyncIteration:
            return
        except TimeoutError:
            why = f"nothing of the body came for {BODY_TIMEOUT_S:g} s"
            raise SlowRequest(f"{why}: send it again") from None
        yield part


def _described(form: UploadForm) -> Body:
    """What the fields of a form have about its file. Raises BadRequest."""
    fields = form.fields
    described: Body = {"filename": form.filename, "purpose": fields.get("purpose")}
    if (seconds := fields.get("expires_after[seconds]")) is not None:
        if fields.get("expires_after[anchor]", "created_at") != "created_at":
            raise BadRequest("`expires_after[anchor]`: created_at is expected", param="expires_after")
        if not seconds.isdecimal() or len(seconds) > 9:
            raise BadRequest("`expires_after[seconds]`: a number is expected", param="expires_after")
        described["expires_s"] = int(seconds)
    return described


def _public(meta: Body) -> Body:
    return {name: value for name, value in meta.items() if name not in PRIVATE}


def _query(request: Request) -> Body:
    """The parameters of a list. Raises BadRequest."""
    body: Body = dict(request.query_params)
    if "limit" in body:
        given = body["limit"]
        if not given.isdecimal() or len(given) > len(f"{MOST_LIMIT}"):
            raise BadRequest(f"`limit`: a number up to {MOST_LIMIT} is expected", param="limit")
        body["limit"] = int(given)
    return body


_NAME: doc.Schema = {**doc.TEXT, "minLength": 1, "maxLength": 128}
_TIME: doc.Schema = {"type": ["integer", "null"], "description": "seconds since 1970"}
_METADATA: doc.Schema = {
    "type": ["object", "null"],
    "maxProperties": 16,
    "propertyNames": {"maxLength": 64},
    "additionalProperties": {**doc.TEXT, "maxLength": 512},
}
_PURPOSE = doc.one_of("batch")
_FILE = doc.object_of(
    id=doc.TEXT, object=doc.one_of("file"), bytes=doc.COUNT, created_at=doc.COUNT, expires_at=doc.COUNT,
    filename=doc.TEXT, purpose=doc.one_of("batch", "batch_output"), status=doc.one_of("processed"),
)  # fmt: skip
_STATES = (
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled",
)  # fmt: skip
_TIMES = (
    "in_progress_at", "finalizing_at", "completed_at", "failed_at", "expired_at", "cancelling_at",
    "cancelled_at",
)  # fmt: skip
_WRONG = doc.object_of(code=doc.TEXT, message=doc.TEXT, param=doc.WORD, line={"type": ["integer", "null"]})
_WRONGS = doc.object_of(object=doc.one_of("list"), data=doc.list_of(_WRONG))
_BATCH = doc.object_of(
    id=doc.TEXT, object=doc.one_of("batch"), endpoint=doc.one_of(*URLS), errors=doc.or_null(_WRONGS),
    input_file_id=doc.TEXT, completion_window=doc.TEXT, status=doc.one_of(*_STATES),
    output_file_id=doc.WORD, error_file_id=doc.WORD, created_at=doc.COUNT, expires_at=doc.COUNT,
    **dict.fromkeys(_TIMES, _TIME),
    request_counts=doc.object_of(total=doc.COUNT, completed=doc.COUNT, failed=doc.COUNT), metadata=_METADATA,
)  # fmt: skip


def _list_of(schema: str) -> doc.Schema:
    return doc.object_of(
        object=doc.one_of("list"), data=doc.list_of(doc.ref(schema)), first_id=doc.WORD,
        last_id=doc.WORD, has_more={"type": "boolean"},
    )  # fmt: skip


_LIMIT = {"type": "integer", "minimum": 1, "maximum": MOST_LIMIT}


def _lines() -> tuple[doc.Operation, ...]:
    errors = (400, 404, *doc.LISTING)
    listed = {
        "parameters": [
            {"name": name, "in": "query", "required": False, "schema": schema}
            for name, schema in {"after": _NAME, "limit": _LIMIT}.items()
        ]
    }
    sending = (400, 401, 408, 413, 429, 499, 500, 503, 504)
    upload = doc.get("File", "store a file for a batch", sending, operation="upload")
    form = {"multipart/form-data": {"schema": doc.ref("FileRequest")}}
    upload["requestBody"] = {"required": True, "content": form}
    content = doc.get("File", "the content of a file", errors, operation="content")
    content["responses"]["200"] = doc.content("application/octet-stream", "the file")
    create = doc.post("Batch", "answer a file of requests", (*doc.ASKING, 409, 429))
    read, cancel = (
        doc.get("Batch", f"{verb} a batch", errors, operation=f"{verb}batch") for verb in ("read", "cancel")
    )
    files, batches = (
        {**doc.get(name, f"your {name.lower()}", errors), **listed} for name in ("Files", "Batches")
    )
    delete = doc.get("FileDeleted", "delete a file", errors)
    file, batch = (partial(BatchApi.ask, of=of) for of in (subjects.files, subjects.batches))
    return (
        doc.Operation("POST", "/v1/files", BatchApi.upload, upload),
        doc.Operation("GET", "/v1/files", partial(file, verb="list"), files),
        doc.Operation(
            "GET", "/v1/files/{id}", partial(file, verb="show"), doc.get("File", "one file", errors)
        ),
        doc.Operation("DELETE", "/v1/files/{id}", partial(file, verb="delete"), delete),
        doc.Operation("GET", "/v1/files/{id}/content", BatchApi.content, content),
        doc.Operation("POST", "/v1/batches", BatchApi.create, create),
        doc.Operation("GET", "/v1/batches", partial(batch, verb="list"), batches),
        doc.Operation("GET", "/v1/batches/{id}", partial(batch, verb="show"), read),
        doc.Operation("POST", "/v1/batches/{id}/cancel", partial(batch, verb="cancel"), cancel),
    )


def build() -> doc.Part:
    """Files and batches."""
    hook = "a URL that gets a signed event when the batch has ended"
    schemas: dict[str, doc.Schema] = {
        "FileRequest": {
            "type": "object",
            "required": ["file", "purpose"],
            "properties": {"file": {**doc.TEXT, "format": "binary", "minLength": 1}, "purpose": _PURPOSE},
        },
        "File": _FILE,
        "Files": _list_of("File"),
        "FileDeleted": doc.object_of(id=doc.TEXT, object=doc.one_of("file"), deleted=doc.one_of(True)),
        **doc.schemas_of("BatchRequest", bodies.BatchCreated, webhook={**doc.TEXT, "description": hook}),
        "BatchAnswer": doc.ref("Batch"),
        "Batch": _BATCH,
        "Batches": _list_of("Batch"),
    }
    return doc.Part(_lines(), schemas, owner=BatchApi)


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
