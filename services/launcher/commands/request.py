"""`headrace request` sends one request: JSON in, JSON out, with --stream one line for each frame."""

from __future__ import annotations

import json
import sys
from contextlib import aclosing
from pathlib import Path
from typing import Any

from services.launcher.session import Target, connected
from shared.client import Client
from shared.errors import BadRequest


def read_body(text: str | None, file: Path | None) -> dict[str, Any]:
    """The request from the argument, a file, or stdin (if neither is given, or `-`). Raises BadRequest."""
    if text is not None and file is not None:
        raise BadRequest("give the request as an argument or with --file, not both")
    if file is not None and str(file) != "-":
        try:
            text = file.read_text()
        except OSError as error:
            raise BadRequest(f"{file} cannot be read: {error.strerror}") from None
    elif text is None or text == "-":
        text = sys.stdin.read()
    try:
        body = json.loads(text)
    except ValueError as error:
        raise BadRequest(f"the request is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise BadRequest("the request is not a JSON object like " + '{"prompt": "Hello"}')
    return body


async def request(target: Target, body: dict[str, Any], *, stream: bool, timeout_s: float) -> None:
    """Send `body` and print the answer. Raises the request's error. An interrupt cancels the request."""
    filled = {"model": target.model, **body}
    async with connected(target.nats_url) as bus:
        client = await Client.open(bus, target.tenant)
        if not (stream or filled.get("stream")):
            _print(await client.complete(filled, timeout_s=timeout_s), indent=2)
            return
        async with aclosing(client.stream(filled, timeout_s=timeout_s)) as frames:
            async for frame in frames:
                _print(frame)


def _print(body: dict[str, Any], indent: int | None = None) -> None:
    print(json.dumps(body, ensure_ascii=False, indent=indent), flush=True)
