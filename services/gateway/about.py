"""The endpoints that say something about this gateway; they need no key."""

from __future__ import annotations

from importlib import metadata

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from services.gateway.desk import Desk
from services.gateway.openapi import document
from services.gateway.respond import answer
from shared.exposition import CONTENT_TYPE, to_prometheus


def about(desk: Desk) -> list[Route]:
    """Health, readiness, metrics, version, and the description of all there is."""
    version = _version()
    described = document(version)

    async def health(_: Request) -> Response:
        return _state(desk.health.why)

    async def ready(_: Request) -> Response:
        return _state(desk.health.unready)

    async def metrics(_: Request) -> Response:
        return Response(to_prometheus(desk.meter.readings()), headers={"Content-Type": CONTENT_TYPE})

    async def tell_version(_: Request) -> Response:
        return answer({"version": version})

    async def openapi(_: Request) -> Response:
        return answer(described)

    return [
        Route("/health", health, methods=["GET"]),
        Route("/ready", ready, methods=["GET"]),
        Route("/metrics", metrics, methods=["GET"]),
        Route("/version", tell_version, methods=["GET"]),
        Route("/openapi.json", openapi, methods=["GET"]),
    ]


def _state(why: str) -> Response:
    if why:
        return answer({"status": "unavailable", "reason": why}, 503, {"Retry-After": "1"})
    return answer({"status": "ok"})


def _version() -> str:
    try:
        return metadata.version("headrace")
    except metadata.PackageNotFoundError:
        return "0"
