"""One actor as one process: uvloop, NATS, signals, garbage collector."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import secrets
import signal
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from shared import metering, tracing
from shared.actor import Actor, Runtime
from shared.bus import Bus

log = logging.getLogger("headrace.process")

GC_THRESHOLDS = (50_000, 20, 10)  # objects made beyond those freed, then rounds of each generation
FORCED = 130  # exit status behind a second signal
HURRY_S = 1.5  # from it to the end, whatever still runs
FLUSH_S = 2.0  # for the last spans and the last metrics, once nothing else is left to do

Connect = Callable[[str], Coroutine[Any, Any, Bus]]  # connection name -> bus


@dataclass(frozen=True, slots=True)
class ProcessOptions:
    """How to run an actor as a process."""

    fleet: str
    host_id: str
    actor_id: str = ""  # empty: drawn at random
    beat_interval_us: int = 1_000_000
    drain_timeout_s: float = 30.0


def run(actor: Actor, connect: Connect, options: ProcessOptions) -> int:
    """Run until SIGTERM or SIGINT drains it; a second signal cuts that short, and a third one, or HURRY_S,
    ends it at once. `connect` takes the actor's name and returns its bus. Returns the exit status: 0 drained,
    1 failed, 130 forced."""
    with _runner() as runner:
        return runner.run(_live(actor, connect, options))


def _runner() -> asyncio.Runner:
    try:
        import uvloop
    except ImportError:
        log.warning("uvloop is missing: asyncio serves, at about half the speed; pip install uvloop")
        return asyncio.Runner()
    return asyncio.Runner(loop_factory=uvloop.new_event_loop)


async def _live(actor: Actor, connect: Connect, options: ProcessOptions) -> int:
    actor_id = options.actor_id or secrets.token_hex(4)
    tracer = tracing.from_env(actor.kind, actor_id) if actor.traced else None
    metrics = metering.from_env(actor.kind, actor_id)
    if tracer is not None:
        tracer.test()
    try:
        bus = await connect(f"headrace-{actor.kind}-{actor_id}")
        runtime = Runtime(
            actor,
            bus,
            options.fleet,
            actor_id,
            host_id=options.host_id,
            beat_interval_us=options.beat_interval_us,
            tracer=tracer,
            metrics=metrics,
        )
        return await _live_on(runtime, options)
    finally:
        if metrics is not None:
            metrics.stop(FLUSH_S)
        if tracer is not None:
            tracer.stop(FLUSH_S)


async def _live_on(runtime: Runtime, options: ProcessOptions) -> int:
    page = await metering.scrape_point(runtime.readings)
    signalled, hurried = _catch_signals()
    started = asyncio.create_task(runtime.start())
    stopping = asyncio.create_task(signalled.wait())
    failing = asyncio.create_task(runtime.failed())
    await asyncio.wait({started, stopping, failing}, return_when=asyncio.FIRST_COMPLETED)
    if started.done() and (error := started.exception()) is not None:
        runtime.fail(error)
    elif started.done() and not failing.done():
        settle_garbage_collector()
        log.info("%s is ready", runtime.port.source)
        await asyncio.wait({stopping, failing}, return_when=asyncio.FIRST_COMPLETED)
    for task in (started, stopping, failing):
        if not task.done():
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
    await runtime.finish(options.drain_timeout_s, hurried)
    if runtime.metrics is not None:
        runtime.metrics.put(runtime.readings())
    if page is not None:
        await page.stop()
    if hurried.is_set():
        return FORCED
    return 1 if runtime.failure is not None else 0


def settle_garbage_collector() -> None:
    """What start-up built lives as long as the process: never scan it again. What comes later goes as its
    last reference does; the search for circles is rare, since a full one stops a scheduler with 2,000
    requests for tens of milliseconds."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)


def _catch_signals() -> tuple[asyncio.Event, asyncio.Event]:
    """Set by the first and by the second signal."""
    signalled, hurried = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        if hurried.is_set():
            _end()
        if signalled.is_set():
            hurried.set()
            limit = threading.Timer(HURRY_S, _end)
            limit.daemon = True
            limit.start()
        signalled.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    return signalled, hurried


def _end() -> None:
    logging.shutdown()
    os._exit(FORCED)  # at once: an orderly exit would wait for threads
