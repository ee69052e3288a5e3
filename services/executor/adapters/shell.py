"""Loads adapters beside steps, for an executor's actor.

    AdapterLoad ──▶ a copy in host memory, or the files, read on a thread
                    ──▶ device thread, between two steps: into the place ──▶ AdapterLoaded

Copies stay in host memory up to a share of it, those that were used last: an adapter that comes back to a
place is not read again, and goes on although its files have changed. The subject of an operator's check has
the facts of a folder, so that what cannot be used is refused before a request names it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from services.executor.engine import Adapters, HeldAdapter
from shared import bodies
from shared.actor.mailbox import Mailbox
from shared.errors import EngineError, HeadraceError
from shared.messages import AdapterLoad, AdapterLoaded
from shared.nats import access, subjects
from shared.nats.interface import Delivery
from shared.replies import error_reply, to_json

log = logging.getLogger("headrace.executor")

HOST_SHARE = 8  # of the memory of this machine, for copies


class AdapterLoads:
    """The loads of one executor. All calls are on the event loop; files are read on one thread."""

    def __init__(
        self,
        adapters: Adapters,
        mailbox: Mailbox,
        model: str,
        between_steps: Callable[[Callable[[], None]], None],
    ) -> None:
        """`between_steps` calls a function on the device thread, after what was queued there before."""
        self._adapters, self._mailbox, self._model = adapters, mailbox, model
        self._between_steps = between_steps
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="adapters")
        self._copies: dict[str, HeldAdapter] = {}  # by digest, that used last is last
        self._most_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // HOST_SHARE
        self._incarnation = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Answer checks."""
        await self._mailbox.bus.subscribe(
            subjects.adapter_check(self._model), self._on_check, queue="executor"
        )

    def begin(self) -> None:
        """A new incarnation: its places are empty, and loads of the one before are not reported."""
        self._incarnation += 1

    def load(self, scheduler: str, asked: AdapterLoad) -> None:
        """Put an adapter into its place, and send its end to the scheduler."""
        self._call(self._load(scheduler, asked, self._incarnation))

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def status(self) -> dict[str, object]:
        """The copies in host memory."""
        held = self._copies.values()
        return {"adapters": len(held), "adapter_bytes": sum(each.size_bytes for each in held)}

    async def _load(self, scheduler: str, asked: AdapterLoad, incarnation: int) -> None:
        began_s, error, size_bytes = time.monotonic(), "", 0
        try:
            adapter = self._copies.pop(asked.digest, None) or await self._read(asked.path)
            if adapter.digest != asked.digest:
                self._keep(adapter)
                raise EngineError(f"the files in {asked.path} have changed since it was added: add it again")
            self._keep(adapter)
            if incarnation == self._incarnation:
                await self._bind(asked.place, adapter)
            size_bytes = adapter.size_bytes
        except HeadraceError as failed:
            error = failed.message
        except Exception as failed:  # a bug, or no memory: its requests fail, and not the process
            log.exception("the adapter in %.200s is not loaded", asked.path)
            error = f"{type(failed).__name__}: {failed!s:.200}"
        if incarnation == self._incarnation:
            took_us = int((time.monotonic() - began_s) * 1e6)
            done = AdapterLoaded(
                place=asked.place, digest=asked.digest, error=error, bytes=size_bytes, took_us=took_us
            )
            self._mailbox.send(scheduler, done)

    async def _read(self, path: str) -> HeldAdapter:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._adapters.read, path)

    async def _bind(self, place: int, adapter: HeldAdapter) -> None:
        loop = asyncio.get_running_loop()
        bound: asyncio.Future[None] = loop.create_future()

        def bind() -> None:
            self._adapters.bind(place, adapter)
            loop.call_soon_threadsafe(_settle, bound)

        self._between_steps(bind)
        await bound

    def _keep(self, adapter: HeldAdapter) -> None:
        """Keep a copy, and drop those unused for longest over the share. What is in a place stays there."""
        self._copies.pop(adapter.digest, None)
        self._copies[adapter.digest] = adapter
        left_bytes = sum(each.size_bytes for each in self._copies.values()) - self._most_bytes
        for digest in [*self._copies][:-1]:
            if left_bytes <= 0:
                break
            left_bytes -= self._copies.pop(digest).size_bytes

    def _on_check(self, delivery: Delivery) -> None:
        if access.can_answer(self._mailbox.bus, delivery):
            self._call(self._check(delivery))

    async def _check(self, delivery: Delivery) -> None:
        try:
            path = bodies.asked(bodies.AdapterNamed, delivery.data)["path"]
            adapter = await self._read(path)
            self._keep(adapter)
            facts = bodies.AdapterFacts(digest=adapter.digest, rank=adapter.rank, bytes=adapter.size_bytes)
            answer = to_json({**facts})
        except HeadraceError as error:
            answer = error_reply(error, "", "")
        except Exception:  # a bug is a 500 for the operator, never silence
            log.exception("an adapter is not read")
            answer = error_reply(EngineError("the executor failed on this adapter: see its log"), "", "")
        self._mailbox.bus.publish(delivery.reply, answer)

    def _call(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _settle(bound: asyncio.Future[None]) -> None:
    if not bound.done():
        bound.set_result(None)
