"""`headrace attach` prints the answer of a request while it is made, a durable one or any that runs."""

from __future__ import annotations

import sys
from contextlib import aclosing

from services.launcher.commands.answer import AGAIN
from services.launcher.console import dim
from services.launcher.session import Target, connected
from shared.client import Client
from shared.follow import text_of


async def attach(target: Target, request_id: str) -> None:
    """Print the first choice as it comes, the others at the end. A line on stderr marks a text that starts
    over. Raises the error of the request, UnknownRequest, Moved for another reader."""
    texts: dict[int, str] = {}
    async with connected(target.nats_url) as bus:
        client = await Client.open(bus, target.tenant)
        try:
            async with aclosing(client.follow(request_id)) as frames:
                async for frame in frames:
                    if frame["type"] == "accepted" and texts:
                        _end(texts)
                        print(dim(AGAIN), file=sys.stderr, flush=True)
                        texts.clear()
                    for choice in frame["choices"] if frame["type"] == "delta" else ():
                        index, text = int(choice["index"]), text_of(choice)
                        texts[index] = texts.get(index, "") + text
                        if index == 0:
                            print(text, end="", flush=True)
        finally:
            _end(texts)
    for index in sorted(texts.keys() - {0}):
        print(texts[index])


def _end(texts: dict[int, str]) -> None:
    """End the line of the first choice."""
    if texts.get(0):
        print(flush=True)
