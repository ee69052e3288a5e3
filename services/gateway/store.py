"""`Store` is what a keeper has of one tenant: durable requests, and responses that the gateway has answered.

    submit     the native request, with `keep`: what the answer over HTTP needs and the tokenizer does not
    state      of the keeper: status, `keep`, `request`, and at the end `answer` or `error`
    frames     of the native stream, from the start of the text
    keep       a response that was answered already, so that it can be read and continued

An id of the gateway has the time in it (`timed_id`). An older one without a record is 410, any other 404:
both mean that there is none, and clocks choose between the two words alone.

Frames have the attempt of the text, the same for every reader: the number that a keeper gave to the run which
computes it. A request that is computed again after the loss of everything has a higher one; no clock counts.
So a reader that comes back with the attempt of another text gets the stream from its start.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from starlette.requests import Request

from services.gateway.endpoints import Endpoints
from services.gateway.exchange import Gone, NoKeeper, StoreAway
from shared.api import REQUEST_ID
from shared.client.client import Client, error_of
from shared.clock import SystemClock
from shared.errors import BadRequest, HeadraceError, Unavailable, UnknownModel, UnknownRequest
from shared.nats import subjects
from shared.nats.interface import NoResponders
from shared.openai.call import Body, Call, drawn_at, read_call
from shared.processes import Rarely

log = logging.getLogger("headrace.gateway")

KEPT_S = 86_400  # as long as a keeper has a record
KEEP_S = 2.0  # for a response to be stored: its client waits for that
PAUSE_S = 30.0
CANCEL_S, STATE_POLL_S = 2.0, 0.05  # for a cancelled request to end, and between two looks
COMPLETED, ENDED_BADLY = "completed", ("failed", "cancelled")
ENDED = (COMPLETED, *ENDED_BADLY)
_STREAM = ("stream", "stream_options")
_NO_KEEPER = "no keeper runs, so nothing is kept: start the fleet without `--no-durable`"

_DAMAGED = "the stored request is damaged, or not from a gateway: send it again"

_away = Rarely(log, SystemClock())


@dataclass(slots=True)
class Pause:
    """After a store that did not answer in time no response is kept for PAUSE_S: each would wait KEEP_S."""

    until_s: float = 0.0  # of the loop's clock


@dataclass(frozen=True, slots=True)
class Store:
    """The durable requests and the kept responses of one tenant."""

    client: Client

    async def submit(self, call: Call) -> Body:
        """Have the request of a call stored; returns its id and status. Raises the error of `submit`."""
        (body,) = call.bodies
        asked = {name: value for name, value in body.items() if name not in _STREAM}
        subject = subjects.submit(self.client.tenant, call.model)
        try:
            return await self.client.request(subject, {**asked, "keep": call.keep})
        except NoResponders:
            raise NoKeeper(f"{_NO_KEEPER}, or leave `background` and `Prefer` out") from None
        except Unavailable as error:
            raise StoreAway(error.message, retry_after_ms=error.retry_after_ms) from None

    async def state(self, request_id: str, path: str, now_s: float) -> Body:
        """The state of a request that was sent to `path`. Raises UnknownRequest, Gone, StoreAway."""
        try:
            found = await self.client.state(request_id)
        except NoResponders:
            raise UnknownRequest(f"there is no {request_id:.140}: {_NO_KEEPER}", param="id") from None
        except Unavailable as error:
            raise StoreAway(error.message, retry_after_ms=error.retry_after_ms) from None
        except (UnknownModel, UnknownRequest):
            found = {}
        if found.get("keep", {}).get("path") == path:
            return found
        none, drawn_s = f"there is no {request_id:.140} of yours at {path}", drawn_at(request_id)
        if drawn_s is not None and now_s - drawn_s > KEPT_S:
            why = "by the clocks of the gateways its id is over a day old, and requests are kept for a day"
            raise Gone(f"{none} now: {why}", param="id")
        raise UnknownRequest(none, param="id")

    async def frames(
        self, request_id: str, after: tuple[int, int] = (0, -1), *, waits: bool = False, fails: bool = False
    ) -> AsyncGenerator[Body]:
        """The frames of the native stream. `after`: attempt and number that the reader has. `waits`: start
        with a frame `queued`. `fails`: a request without an answer ends with a frame `failed`; else its error
        is raised. Raises like `Client.follow`."""
        if waits:
            yield {"type": "queued"}
        attempt, native = 0, 0
        try:
            async with aclosing(self.client.follow(request_id, quiet=True)) as frames:
                async for frame in frames:
                    if frame["type"] == "accepted":
                        text = attempt_of(frame)
                        if attempt and frame["attempt"] > native:  # the text starts over for this reader
                            attempt = max(text, attempt + 1)
                        else:
                            attempt = text if text == after[0] else max(text, after[0] + 1)
                        native = frame["attempt"]
                    yield {**frame, "attempt": attempt}
        except HeadraceError as error:
            ended = await self._failed(request_id) if fails else None
            if ended is None:
                raise error
            yield {"type": "failed", "status": ended["status"], "error": error_of(ended)}

    async def _failed(self, request_id: str) -> Body | None:
        """The record of a request that was not answered; None for any other, and without a keeper."""
        try:
            state = await self.client.state(request_id)
        except HeadraceError:
            return None
        return state if state["status"] in ENDED_BADLY else None

    async def keep_response(self, call: Call, native: Body, pause: Pause) -> None:
        """Have an answered response stored, if there is a keeper. A failure is logged: the client has its
        answer."""
        now_s = asyncio.get_running_loop().time()
        if now_s < pause.until_s:
            return
        request = {name: value for name, value in call.bodies[0].items() if name not in _STREAM}
        body = {"model": call.model, "request": request, "keep": call.keep, "answer": native}
        try:
            async with asyncio.timeout(KEEP_S):
                await self.client.request(subjects.keep(self.client.tenant, call.request_id), body)
        except NoResponders:
            pass
        except TimeoutError:
            pause.until_s = now_s + PAUSE_S
            _away.warning("responses are not kept for %g s: no keeper has answered in %g s", PAUSE_S, KEEP_S)
        except HeadraceError as error:
            _away.warning("a response was not kept: %s", error.message)

    async def delete(self, request_id: str, path: str, now_s: float) -> None:
        """Delete a request; one that waits or runs is cancelled. Raises like `state`."""
        await self.state(request_id, path, now_s)
        try:
            await self.client.request(subjects.delete(self.client.tenant, request_id))
        except (NoResponders, Unavailable):
            raise StoreAway("the keeper does not answer now: try again", retry_after_ms=1_000) from None

    async def cancel(self, request_id: str, path: str, now_s: float) -> Body:
        """Cancel a request; returns its state, which is the end of it unless that takes over CANCEL_S.
        Raises like `state`."""
        state = await self.state(request_id, path, now_s)
        if state["status"] not in ENDED:
            self.client.cancel(request_id)
        waited_s = 0.0
        while state["status"] not in ENDED and waited_s < CANCEL_S:
            await asyncio.sleep(STATE_POLL_S)
            waited_s += STATE_POLL_S
            state = await self.state(request_id, path, now_s)
        return state


def attempt_of(accepted: Mapping[str, Any]) -> int:
    """The attempt of a text, from its first frame."""
    return max(int(accepted.get("run", 0)), 1)


def call_of(state: Body) -> Call:
    """The call of a stored request. Raises BadRequest if another program has stored it."""
    keep = state["keep"]
    fields = {**state["request"], "model": state["model"]}
    if keep.get("echo"):
        fields["echo"] = True
    try:
        call = read_call(fields, chat=keep.get("chat", True), request_id=state["id"])
    except (LookupError, TypeError, AttributeError):
        raise BadRequest(_DAMAGED) from None
    if not isinstance(keep.get("response", {}), dict):
        raise BadRequest(_DAMAGED)
    return replace(call, keep={"response": {}, **keep})


async def found(endpoints: Endpoints, request: Request, path: str) -> tuple[Store, Body]:
    """The store of a request's tenant, and the state of the id in its path. Raises UnknownRequest, Gone."""
    endpoints.enter(request)
    store = Store(await endpoints.client_of(request))
    return store, await store.state(named_id(request), path, endpoints.clock.wall_us() / 1e6)


def named_id(request: Request) -> str:
    """The id in the path. Raises UnknownRequest."""
    given = str(request.path_params["id"])
    if not re.fullmatch(REQUEST_ID, given):
        raise UnknownRequest(f"{given!r:.140} is no id of a request", param="id")
    return given


def may_send_events(request: Request) -> bool:
    """Whether the client asks for a stream."""
    return "text/event-stream" in request.headers.get("accept", "")
