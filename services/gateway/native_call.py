"""Talk makes the native requests of one HTTP request: their answers together, or their frames as they come.

`read_body` reads the body of the HTTP request within bounds of size and time. `unless_gone` works for an HTTP
client that may go away: when it does the work is cancelled, and the native request with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

from services.gateway.errors import SlowRequest, WrongMediaType
from services.gateway.openai_request import Body, Call
from shared.client import Client
from shared.errors import Cancelled, PayloadTooLarge

GRACE_S = 5.0  # beyond a request's own time limit, whose end the services tell themselves

BODY_TIMEOUT_S = 30.0
HEADROOM_BYTES = 4_096  # of the server's limit: for what a native request says besides

Tagged = tuple[int, Body]  # number of the prompt, frame

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Talk:
    """How to ask: as whom, how long, in which trace."""

    client: Client
    timeout_s: float  # of a request that names none
    trace: str = ""

    async def answers(self, call: Call) -> list[Body]:
        """The native answer to each prompt. Raises the first error of any, and cancels the others."""
        if len(call.bodies) == 1:
            return [await self._complete(call.bodies[0])]
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._complete(body)) for body in call.bodies]
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        return [task.result() for task in tasks]

    async def frames(self, call: Call) -> AsyncGenerator[Tagged]:
        """The frames of every prompt in the order of their arrival. Raises like `answers`. Leaving the
        iteration early cancels what runs."""
        streams = [
            self.client.stream(body, timeout_s=self._patience_s(body), trace=self.trace)
            for body in call.bodies
        ]
        if len(streams) > 1:
            async with aclosing(_merged(streams)) as tagged:
                async for number, frame in tagged:
                    yield number, frame
            return
        async with aclosing(streams[0]) as frames:
            async for frame in frames:
                yield 0, frame

    async def _complete(self, body: Body) -> Body:
        return await self.client.complete(body, timeout_s=self._patience_s(body), trace=self.trace)

    def _patience_s(self, body: Body) -> float:
        asked: Any = body.get("timeout_s")
        limited = type(asked) in (int, float) and asked > 0
        return (float(asked) if limited else self.timeout_s) + GRACE_S


async def _merged(streams: Sequence[AsyncGenerator[Body]]) -> AsyncGenerator[Tagged]:
    """Frames of several streams; an error of one ends all."""
    came: asyncio.Queue[Tagged | Exception | None] = asyncio.Queue(1)

    async def feed(number: int, stream: AsyncGenerator[Body]) -> None:
        try:
            async with aclosing(stream) as frames:
                async for frame in frames:
                    await came.put((number, frame))
        except Exception as error:  # noqa: BLE001 - raised where the frames are read
            await came.put(error)
        else:
            await came.put(None)

    tasks = [asyncio.create_task(feed(number, stream)) for number, stream in enumerate(streams)]
    try:
        left = len(tasks)
        while left:
            item = await came.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                left -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, once the body of the request has been read. Raises Cancelled when the client
    disconnects before."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise Cancelled("the client went away")
    finally:
        for each in (task, watch):
            each.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue


async def read_body(request: Request, most: int) -> bytes:
    """At most `most` bytes of JSON. Raises WrongMediaType, PayloadTooLarge, SlowRequest, Cancelled when the
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
        raise SlowRequest(f"the body did not come within {BODY_TIMEOUT_S:g} s: send it again") from None
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
