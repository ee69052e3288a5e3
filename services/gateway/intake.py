"""The body of an HTTP request, read within bounds of size and time."""

from __future__ import annotations

import asyncio

from starlette.requests import ClientDisconnect, Request

from services.gateway.refusals import SlowBody, WrongMediaType
from shared.errors import Cancelled, PayloadTooLarge

BODY_TIMEOUT_S = 30.0
HEADROOM_BYTES = 4_096  # of the server's limit: for what a native request says besides


async def read_body(request: Request, most: int) -> bytes:
    """At most `most` bytes of JSON. Raises WrongMediaType, PayloadTooLarge, SlowBody, Cancelled when the
    client leaves."""
    media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media and media != "application/json" and not media.endswith("+json"):
        raise WrongMediaType(
            f"the body says it is {media:.80}: send JSON with `Content-Type: application/json`"
        )
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > most:
        raise _too_large(int(length), most)
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            return await _read(request, most)
    except TimeoutError:
        raise SlowBody(f"the body did not come within {BODY_TIMEOUT_S:g} s: send it again") from None
    except ClientDisconnect:
        raise Cancelled("the client went away") from None


async def _read(request: Request, most: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > most:
            raise _too_large(size, most)
        parts.append(part)
    return b"".join(parts)


def _too_large(size: int, most: int) -> PayloadTooLarge:
    return PayloadTooLarge(
        f"a body of {size} bytes is over the limit of {most}: send less, or raise the server's max_payload"
    )
