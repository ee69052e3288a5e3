"""`headrace trace ID`: where the time of one request went, from the scheduler's own record. Needs neither
OpenTelemetry nor any viewer."""

from __future__ import annotations

import asyncio
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.launcher import overlap as lanes
from services.launcher.connect import Target, connected
from services.launcher.console import say
from services.launcher.perfetto import timeline
from services.launcher.waterfall import draw
from shared import subjects
from shared.bus import Bus, Delivery
from shared.errors import BadRequest, Unavailable, UnknownRequest

WAIT_S = 1.0  # for a scheduler that knows the request; those that do not answer as fast

Body = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Form:
    """How to show a trace."""

    as_json: bool = False
    overlap: bool = False  # some steps as lanes, in place of the waterfall
    perfetto: Path | None = None  # write a timeline there, too


async def trace(target: Target, request: str, form: Form) -> None:
    """Print the waterfall of a request, or its data. Raises UnknownRequest, Unavailable, BadRequest."""
    perfetto, as_json = form.perfetto, form.as_json
    async with connected(target.nats_url) as bus:
        body = await find(bus, request, steps=as_json or form.overlap or perfetto is not None)
    if perfetto is not None:
        _write(perfetto, json.dumps(timeline(body)))
    if form.overlap:
        found = lanes.overlap(body)
        for line in [json.dumps(found, indent=2)] if as_json else lanes.draw(found, _width()):
            say(line)
        return
    if as_json:
        say(json.dumps(body, indent=2))
        return
    for line in draw(body, _width()):
        say(line)
    if perfetto is not None:
        steps = sum(len(columns["step"]) for columns in body["steps"].values())
        say(f"\n{perfetto} has the timeline with {steps} steps: open it at https://ui.perfetto.dev")


async def find(bus: Bus, request: str, *, steps: bool = False, wait_s: float = WAIT_S) -> Body:
    """The trace of a request from whichever scheduler knows it. Raises UnknownRequest when those that
    answered do not, Unavailable when there is none, BadRequest for what is no id."""
    if not 0 < len(request) <= subjects.MAX_NAME_CHARS:
        raise BadRequest(f"a request id has 1 to {subjects.MAX_NAME_CHARS} characters", param="request_id")
    inbox, answers = bus.new_inbox(), asyncio.Queue[Delivery]()
    subscription = await bus.subscribe(inbox, answers.put_nowait)
    bus.publish(subjects.trace(request), subjects.TRACE_STEPS if steps else b"", reply=inbox)
    asked = 0
    try:
        async with asyncio.timeout(wait_s):
            while True:
                delivery = await answers.get()
                if delivery.no_responders:
                    raise Unavailable("no scheduler runs on this server: start one with `headrace up`")
                body: Body = json.loads(delivery.data)
                if body["state"] != "unknown":
                    return body
                asked += 1
    except TimeoutError:
        if not asked:
            raise Unavailable("no scheduler answers: see `headrace status`") from None
    finally:
        await subscription.cancel()
    raise UnknownRequest(
        f"no request {request!r} is running or among the last 1000: the id is `request_id` in the frames and "
        "`id` in a plain answer; a request that was refused leaves no trace here"
    )


def _width() -> int:
    return shutil.get_terminal_size().columns


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise BadRequest(f"{path} cannot be written: {error.strerror}") from None
