"""The native requests of one HTTP request: their answers together, or their frames as they come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from services.gateway.calls import Body, Call
from shared.client import Client

GRACE_S = 5.0  # beyond a request's own time limit, whose end the services tell themselves

Tagged = tuple[int, Body]  # number of the prompt, frame


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
