"""The page for people at `/`: chat, the fleet's state, the last requests with their waterfalls, the KV tiers.

The page is static and open to all; the calls for its data need the key, where there are keys. A tenant sees
its own requests, the operator those of all tenants and the fleet.

    /, /page/…        HTML, scripts, style: from `static`, no CDN
    /docs             the API: /openapi.json, readable, with a form for each path
    /fleet            the states of all services
    /requests         the last requests of this gateway, and those that run
    /requests/{id}    where the time of one of them went; `?tenant=` names one of several with this id

"""

from __future__ import annotations

from collections import deque
from importlib import resources
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from services.gateway import openapi as doc
from services.gateway.endpoints import Endpoints
from services.gateway.exchange import Exchange, NoRoute, access_line, answer, credential
from services.gateway.native_call import Fleet
from services.gateway.visitors import Keys
from shared.clock import Clock, SystemClock

KEPT = 200  # requests in the list, and at most as many that run
_TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css"}
_FOLDERS = ("static", "static/marked")  # marked reads Markdown: its version and licence are beside it
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


class Page:
    """The page of one gateway, and the list of its last requests."""

    def __init__(self, fleet: Fleet, access: Keys, clock: Clock | None = None) -> None:
        self._fleet, self._access, self._clock = fleet, access, clock or SystemClock()
        self._running: dict[int, Exchange] = {}  # by id(): a request gets its own id later
        self._recent: deque[dict[str, Any]] = deque(maxlen=KEPT)
        self._files = _files()

    def begin(self, exchange: Exchange) -> None:
        """A request has arrived. It is in the list once it is one for an answer."""
        self._running[id(exchange)] = exchange

    def end(self, exchange: Exchange) -> None:
        """A request has ended."""
        del self._running[id(exchange)]
        if exchange.is_generation:
            why = {"message": exchange.error.message} if exchange.error is not None else {}
            self._recent.appendleft({**access_line(exchange), **why})

    async def file(self, request: Request) -> Response:
        """A file of the page."""
        return self._sent(request.path_params.get("name", "index.html"))

    async def docs(self, _: Request) -> Response:
        """The API, readable."""
        return self._sent("docs.html")

    def _sent(self, name: str) -> Response:
        if name not in self._files:
            raise NoRoute(f"the page has no file {name!r:.80}")
        media_type = _TYPES[name.rpartition(".")[2]]
        return Response(self._files[name], headers=_HEADERS, media_type=media_type)

    async def states(self, request: Request) -> Response:
        """The states of all services."""
        self._access.only_operator(credential(request))
        return answer({"services": await self._fleet.states()})

    async def requests(self, request: Request) -> Response:
        """The last requests."""
        return answer({"requests": self._seen_by(request)})

    async def trace(self, request: Request) -> Response:
        """Where the time of one of them went."""
        wanted, tenant = request.path_params["id"], request.query_params.get("tenant")
        seen = [each["tenant"] for each in self._seen_by(request) if each["request_id"] == wanted]
        if tenant not in (None, *seen) or not seen:
            raise NoRoute(f"{wanted!r:.140} is not among the last {KEPT} requests of this gateway")
        if (found := await self._fleet.trace(tenant or seen[0], wanted)) is None:
            raise NoRoute(f"no scheduler knows the request {wanted!r:.140} any more")
        return answer(found)

    def _seen_by(self, request: Request) -> list[dict[str, Any]]:
        viewer = self._access.viewer_of(credential(request))
        run, now_us = [each for each in self._running.values() if each.is_generation], self._clock.wall_us()
        lines = [{**access_line(each, now_us), "running": True} for each in run[-KEPT:]]
        seen = [line for line in (*lines, *self._recent) if viewer is None or line["tenant"] == viewer]
        return sorted(seen, key=lambda line: str(line["time"]), reverse=True)


def _files() -> dict[str, bytes]:
    """The files that are sent, by name."""
    folders = [resources.files("services.gateway").joinpath(name) for name in _FOLDERS]
    files = [each for folder in folders for each in folder.iterdir()]
    return {each.name: each.read_bytes() for each in files if each.name.rpartition(".")[2] in _TYPES}


def page_of(endpoints: Endpoints) -> Page:
    """A page that sees every exchange."""
    page = Page(endpoints.fleet, endpoints.keys, endpoints.clock)
    endpoints.observers.append(page)
    return page


def build() -> doc.Part:
    """The page; it is no part of the API, so the document does not have it."""
    lines = {
        "/": Page.file, "/docs": Page.docs, "/page/{name}": Page.file, "/fleet": Page.states,
        "/requests": Page.requests, "/requests/{id}": Page.trace,
    }  # fmt: skip
    return doc.Part([doc.Operation("GET", *line) for line in lines.items()], owner=page_of)
