"""An actor as a process: `run` brings its event loop (uvloop), NATS, signals, exporters, garbage collector.

The first signal drains the actor, a second one ends the drain, a third one ends the process at once.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import secrets
import signal
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from shared.actor.runtime import Actor, OnHeartbeat, Runtime
from shared.clock import end_task
from shared.nats.interface import Bus
from shared.processes import give_back_memory
from shared.telemetry.export import meter_sink_from_env, tracer_from_env
from shared.telemetry.metrics import scrape_point

log = logging.getLogger("headrace.process")
GC_THRESHOLDS = (50_000, 20, 10)  # objects allocated minus freed, then collections of the younger generation
FORCED = 130  # exit status after a second signal
FORCED_END_S = 1.5  # from the second signal to a hard exit
FLUSH_S = 2.0  # for the last spans and metrics
SETTLED_S = 2.0  # from ready to the return of memory that only the start needed: first requests go first
Connect = Callable[[str], Coroutine[Any, Any, Bus]]  # connection name -> bus


@dataclass(frozen=True, slots=True)
class ProcessOptions:
    """How to run an actor as a process."""

    fleet: str
    host_id: str
    actor_id: str = ""  # empty: drawn at random
    heartbeat_interval_us: int = 1_000_000
    drain_timeout_s: float = 30.0
    on_heartbeat: OnHeartbeat | None = None  # see Runtime


def run(actor: Actor, connect: Connect, options: ProcessOptions) -> int:
    """Run until SIGTERM or SIGINT drains the actor. A second signal ends the drain; a third one, or
    FORCED_END_S, ends the process at once. `connect` takes the connection's name and returns a bus. Returns
    the exit status: 0 drained, 1 failed, 130 forced."""
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
    tracer = tracer_from_env(actor.kind, actor_id) if actor.traced else None
    metrics = meter_sink_from_env(actor.kind, actor_id)
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
            heartbeat_interval_us=options.heartbeat_interval_us,
            tracer=tracer,
            metric_sink=metrics,
            settle=settle_garbage_collector,
            on_heartbeat=options.on_heartbeat,
        )
        return await _live_on(runtime, options)
    finally:
        if metrics is not None:
            metrics.stop(FLUSH_S)
        if tracer is not None:
            tracer.stop(FLUSH_S)


async def _live_on(runtime: Runtime, options: ProcessOptions) -> int:
    page = await scrape_point(runtime.collect_metrics)
    signalled, hurried = _catch_signals()
    started = asyncio.create_task(runtime.start())
    stopping = asyncio.create_task(signalled.wait())
    failing = asyncio.create_task(runtime.failed())
    await asyncio.wait({started, stopping, failing}, return_when=asyncio.FIRST_COMPLETED)
    if started.done() and (error := started.exception()) is not None:
        runtime.fail(error)
    elif started.done() and not failing.done():
        loop = asyncio.get_running_loop()
        loop.call_later(SETTLED_S, loop.run_in_executor, None, give_back_memory)
        log.info("%s is ready", runtime.mailbox.source)
        await asyncio.wait({stopping, failing}, return_when=asyncio.FIRST_COMPLETED)
    for task in (started, stopping, failing):
        if not task.done():
            await end_task(task)
            if not task.cancelled():
                task.result()
    await runtime.finish(options.drain_timeout_s, hurried)
    if runtime.metric_sink is not None:
        runtime.metric_sink.put(runtime.collect_metrics())
    if page is not None:
        await page.stop()
    if hurried.is_set():
        return FORCED
    return 1 if runtime.failure is not None else 0


def settle_garbage_collector() -> None:
    """Exempt the objects of start-up from collection, and collect rarely: a full collection stops a
    scheduler with 2,000 requests for tens of milliseconds. Reference counts free most later objects. This
    collection stops an executor that has imported torch for more than 0.1 s, so it comes before `ready`."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)


def _catch_signals() -> tuple[asyncio.Event, asyncio.Event]:
    """Two events, set by the first and by the second signal."""
    signalled, hurried = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        if hurried.is_set():
            _end()
        if signalled.is_set():
            hurried.set()
            limit = threading.Timer(FORCED_END_S, _end)
            limit.daemon = True
            limit.start()
        signalled.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    return signalled, hurried


def _end() -> None:
    logging.shutdown()
    os._exit(FORCED)  # at once: an orderly exit would wait for threads
