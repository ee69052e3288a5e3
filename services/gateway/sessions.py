"""Sessions over HTTP: what a tenant's are, and wishes for their blocks. The table of headers is in shared/.

    GET    /v1/sessions                     those of the tenant, from all schedulers
    GET    /v1/sessions/{id}                one of them; DELETE: its blocks are needed no more
    POST   /v1/sessions/{id}/prefetch       its blocks come up; …/keep, with `ttl_s`: they stay
    POST   /close_session                   as DELETE, with `session_id` in the body, as SGLang has it

Each verb is one message to all schedulers. One that has the session answers for it; 404 is the answer of all.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from services.gateway import openapi as doc
from services.gateway.endpoints import Endpoints
from services.gateway.exchange import answer
from services.gateway.native_call import fields_of, read_body
from shared import bodies
from shared.client.client import error_of
from shared.errors import BadRequest, UnknownSession
from shared.nats import subjects
from shared.session_hints import AN_ID, ID, MAX_KEEP_S, bad_hint, is_id

MOST_BYTES = 65_536  # of a body, which names a session and a time
_YES_OR_NO = {"true": True, "false": False}

Body = dict[str, Any]


async def listed(endpoints: Endpoints, request: Request) -> Response:
    """`GET /v1/sessions`."""
    tenant = endpoints.tenant_of(request)
    found = await endpoints.fleet.ask_schedulers(subjects.sessions(tenant), tenant, bodies.Sessions)
    rows = [row for answered in found for row in answered["data"]]
    rows.sort(key=lambda row: float(row.get("idle_s", 0)))
    return answer({"object": "list", "data": rows})


async def of_path(endpoints: Endpoints, request: Request, *, verb: str) -> Response:
    """A verb for the session in the path."""
    fields = {}
    if request.method == "POST" and (data := await read_body(request, MOST_BYTES, untyped="")):
        fields = fields_of(data)
    if (tree := request.query_params.get("tree")) is not None:
        if tree not in _YES_OR_NO:
            raise BadRequest("`tree`: true or false is expected", param="tree")
        fields["tree"] = _YES_OR_NO[tree]
    return answer(await done(endpoints, request, str(request.path_params["id"]), {**fields, "do": verb}))


async def closed(endpoints: Endpoints, request: Request) -> Response:
    """`POST /close_session`."""
    fields = fields_of(await read_body(request, MOST_BYTES))
    return answer(await done(endpoints, request, fields.get("session_id"), {"do": "release"}))


async def done(endpoints: Endpoints, request: Request, session_id: object, asked: Body) -> Body:
    """The answer to a verb. Raises UnknownSession, BadRequest, Unavailable."""
    tenant = endpoints.tenant_of(request)
    if not isinstance(session_id, str) or not is_id(session_id):
        raise bad_hint("session_id", AN_ID)
    subject = subjects.session(tenant, session_id)
    found = await endpoints.fleet.ask_schedulers(
        subject, tenant, bodies.SessionState, asked, enough=lambda body: body.get("state") != "unknown"
    )
    if "error" in (last := found[-1]):
        raise error_of(last)
    if last["state"] == "unknown":
        raise UnknownSession(f"there is no session {session_id!r:.140} of yours now", param="id")
    return {name: value for name, value in last.items() if name not in ("scheduler", "tenant")}


def build() -> doc.Part:
    """Sessions."""
    finding = (*doc.LISTING, 400, 404)
    one = partial(doc.get, "SessionState", errors=finding)
    asking = (*finding, 408, 413, 415, 422)
    keep = {"required": True, "content": {"application/json": {"schema": doc.ref("SessionKeepRequest")}}}
    close = {"required": True, "content": {"application/json": {"schema": doc.ref("SessionCloseRequest")}}}
    tree = {"name": "tree", "in": "query", "schema": {"type": "boolean"}, "description": "its children, too"}
    session_id = {**doc.TEXT, "pattern": ID}
    named = {"name": "id", "in": "path", "required": True, "schema": session_id}
    post = partial(doc.get, "SessionState", errors=asking)
    path = "/v1/sessions/{id:path}"
    lines = (
        doc.Operation("GET", "/v1/sessions", listed, doc.get("Sessions", "the sessions", doc.LISTING)),
        doc.Operation("POST", f"{path}/prefetch", partial(of_path, verb="prefetch"), {
            **post(summary="the blocks of a session come up", operation="prefetchsession"),
            "parameters": [named]}),
        doc.Operation("POST", f"{path}/keep", partial(of_path, verb="keep"), {
            **post(summary="the blocks of a session stay", operation="keepsession"), "requestBody": keep,
            "parameters": [named]}),
        doc.Operation("GET", path, partial(of_path, verb="state"), {
            **one(summary="a session"), "parameters": [named]}),
        doc.Operation("DELETE", path, partial(of_path, verb="release"), {
            **one(summary="a session is over", operation="deletesession"), "parameters": [named, tree]}),
        doc.Operation("POST", "/close_session", closed, {
            **post(summary="the same, as SGLang has it", operation="closesession"), "requestBody": close}),
    )  # fmt: skip
    private = ("scheduler", "tenant")
    schemas = doc.schemas_of("SessionState", bodies.SessionState)
    state = schemas["SessionState"]
    state["properties"] = {name: each for name, each in state["properties"].items() if name not in private}
    row = {**state, "properties": {**state["properties"], "tenant": doc.TEXT}}
    ttl = {"type": "number", "exclusiveMinimum": 0, "maximum": MAX_KEEP_S}
    schemas |= {
        "Sessions": doc.object_of(object=doc.one_of("list"), data=doc.list_of(row)),
        "SessionKeepRequest": {"type": "object", "required": ["ttl_s"], "properties": {"ttl_s": ttl}},
        "SessionCloseRequest": {
            "type": "object", "required": ["session_id"], "properties": {"session_id": session_id},
        },
    }  # fmt: skip
    return doc.Part(lines, schemas)
