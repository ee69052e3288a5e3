"""Adapters over HTTP, as vLLM has them: an operator adds and removes them by a folder where executors run.

POST /v1/load_lora_adapter      {"lora_name", "lora_path", "load_inplace", "model"}
POST /v1/unload_lora_adapter    {"lora_name"}

The answer is a sentence in plain text, as there. `GET /v1/models` lists them.
"""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from services.gateway import exchange as exchanges
from services.gateway import openapi as doc
from services.gateway.endpoints import Endpoints
from services.gateway.native_call import fields_of, read_body
from shared import bodies
from shared.client.client import error_of
from shared.errors import BadRequest, Unavailable
from shared.nats import subjects
from shared.nats.interface import NoResponders, RequestTimeout

MOST_BYTES = 65_536
WAIT_US = 70_000_000  # an executor reads the folder first
_TYPES = {"lora_name": str, "lora_path": str, "load_inplace": bool, "model": str, "lora_int_id": int}


async def load(endpoints: Endpoints, request: Request) -> Response:
    """`POST /v1/load_lora_adapter`."""
    fields = await _fields(endpoints, request, ("lora_name", "lora_path"))
    body = bodies.AdapterSet(path=fields["lora_path"], replace=fields.get("load_inplace", False))
    if "model" in fields:
        body["model"] = fields["model"]
    await _change(endpoints, request, fields["lora_name"], body)
    return PlainTextResponse(f"Success: LoRA adapter '{fields['lora_name']}' added successfully.")


async def unload(endpoints: Endpoints, request: Request) -> Response:
    """`POST /v1/unload_lora_adapter`."""
    fields = await _fields(endpoints, request, ("lora_name",))
    await _change(endpoints, request, fields["lora_name"], bodies.AdapterSet())
    return PlainTextResponse(f"Success: LoRA adapter '{fields['lora_name']}' removed successfully.")


async def _fields(endpoints: Endpoints, request: Request, needed: tuple[str, ...]) -> dict[str, Any]:
    """The fields of an operator's request. Raises NotAuthorized, Forbidden, BadRequest."""
    endpoints.keys.only_operator(exchanges.credential(request))
    fields = fields_of(await read_body(request, MOST_BYTES))
    for name, value in fields.items():
        if (kind := _TYPES.get(name)) is None:
            raise BadRequest(f"`{name:.40}` is not a field of an adapter: leave it out", param=name[:40])
        if type(value) is not kind:
            raise BadRequest(f"`{name}` is not a {kind.__name__}", param=name)
    for name in needed:
        if not fields.get(name):
            raise BadRequest(f"`{name}` is missing", param=name)
    return fields


async def _change(endpoints: Endpoints, request: Request, name: str, body: bodies.AdapterSet) -> None:
    """Add an adapter, or remove it. Raises the error of the tokenizer that makes the change."""
    client = await endpoints.client_of(request)
    try:
        subject = subjects.adapter(name)
    except (ValueError, UnicodeEncodeError):
        raise BadRequest(f"{name!r:.80} cannot be a name", param="lora_name") from None
    try:
        reply = await client.bus.request(subject, bodies.encode(body), timeout_us=WAIT_US)
    except (NoResponders, RequestTimeout):
        raise Unavailable("no tokenizer has made the change: see `headrace status`") from None
    answer = bodies.decode(bodies.Change, reply.data)
    if "error" in answer:
        raise error_of(answer)


def build() -> doc.Part:
    """The two paths."""
    errors = (400, 401, 403, 404, 408, 413, 415, 422, 429, 499, 500, 503)
    lines = []
    for path, handler, kind, summary in (
        ("/v1/load_lora_adapter", load, "AdapterLoad", "add a LoRA adapter from a folder of the executors"),
        ("/v1/unload_lora_adapter", unload, "AdapterUnload", "remove a LoRA adapter; what runs goes on"),
    ):
        described = doc.post(kind, summary, errors)
        described["responses"]["200"] = doc.content("text/plain", "a sentence")
        lines.append(doc.Operation("POST", path, handler, described))
    word: doc.Schema = {**doc.TEXT, "minLength": 1}
    name: dict[str, doc.Schema] = {"lora_name": word}
    more = {"lora_path": word, "load_inplace": {"type": "boolean"}, "model": word}
    schemas: dict[str, doc.Schema] = {
        "AdapterLoadRequest": {
            "type": "object", "properties": {**name, **more}, "required": ["lora_name", "lora_path"],
        },
        "AdapterUnloadRequest": {"type": "object", "properties": name, "required": ["lora_name"]},
    }  # fmt: skip
    return doc.Part(tuple(lines), schemas)
