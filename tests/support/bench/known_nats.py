"""The known server's NATS side: the frames of the native API."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from support.bench.known_http import Answer, Body, usage

from shared.client.client import END_HEADER
from shared.nats import subjects
from shared.nats.interface import Bus, Delivery


async def serve_nats(answer: Answer, bus: Bus, model: str) -> None:
    """Answer the requests for `model`."""
    running: set[asyncio.Task[None]] = set()

    def on_request(delivery: Delivery) -> None:
        task = asyncio.create_task(_stream(bus, delivery.reply, answer, json.loads(delivery.data)))
        running.add(task)
        task.add_done_callback(running.discard)

    await bus.subscribe(subjects.generate_any_tenant(model), on_request, queue="tokenizers")
    await bus.flush()


async def _stream(bus: Bus, reply: str, answer: Answer, body: Body) -> None:
    def frame(number: int, kind: str, **more: Any) -> bytes:
        head = {"type": kind, "request_id": body["request_id"], "attempt": 1, "frame": number}
        return json.dumps({**head, **more}).encode()

    bus.publish(reply, frame(0, "accepted"))
    tokens = 0
    async for number in answer(body):
        text = {"delta": {"content": f"w{number} "}} if "messages" in body else {"text": f"w{number} "}
        bus.publish(
            reply, frame(number + 1, "delta", choices=[{"index": 0, "first": number, "count": 1, **text}])
        )
        tokens += 1
    done = frame(tokens + 1, "done", choices=[], usage=usage(body, tokens))
    bus.publish(reply, done, headers={END_HEADER: "1"})
