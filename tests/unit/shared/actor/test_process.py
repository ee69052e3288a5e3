"""An actor as a process: the event loop's class, signals, exit status."""

from __future__ import annotations

import asyncio
import builtins
import gc
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import uvloop
from support.memory_bus import MemoryBroker

from shared.actor import process
from shared.actor.mailbox import Mailbox
from shared.actor.process import ProcessOptions
from shared.actor.runtime import Actor
from shared.nats.interface import Bus

OPTIONS = ProcessOptions(fleet="f", host_id="h", actor_id="a", drain_timeout_s=1.0)


class Scripted(Actor):
    """Does one thing at its start; remembers its loop and its end."""

    kind = "executor"

    def __init__(self, *, kill: int = 0, error: BaseException | None = None, later: bool = False) -> None:
        self.kill, self.error, self.later = kill, error, later
        self.loop: asyncio.AbstractEventLoop | None = None
        self.ended: list[str] = []
        self.frozen_objects = 0

    def on_ready(self) -> None:
        self.frozen_objects = gc.get_freeze_count()

    async def start(self, mailbox: Mailbox) -> None:
        self.loop = asyncio.get_running_loop()
        self.name = mailbox.source
        if self.later:
            self.loop.call_later(0.01, self.act, mailbox)
        else:
            self.act(mailbox)
            if self.kill:
                await asyncio.Event().wait()

    def act(self, mailbox: Mailbox) -> None:
        if self.kill:
            os.kill(os.getpid(), self.kill)
        elif self.error is not None and not self.later:
            raise self.error
        elif self.error is not None:
            mailbox.bus.publish("hr.f.executor.a.in.Cancel", FAILING)

    def receive(self, *_: object) -> None:
        assert self.error is not None
        raise self.error

    async def drain(self) -> None:
        self.ended.append("drain")

    async def stop(self) -> None:
        self.ended.append("stop")


def _failing() -> bytes:
    from shared import codec
    from shared.messages import Cancel

    return codec.encode(codec.Envelope("client.c", 1, 0, Cancel(tenant="t", request="r")))


FAILING = _failing()


def run(actor: Actor, options: ProcessOptions = OPTIONS) -> int:
    names: list[str] = []
    thresholds = gc.get_threshold()

    async def connect(name: str) -> Bus:
        names.append(name)
        return MemoryBroker().connect()

    try:
        status = process.run(actor, connect, options)
    finally:
        gc.unfreeze()
        gc.set_threshold(*thresholds)
    assert names[0].startswith("headrace-executor-")
    return status


def test_the_loop_is_uvloop() -> None:
    actor = Scripted(kill=signal.SIGTERM, later=True)
    assert run(actor) == 0
    assert isinstance(actor.loop, uvloop.Loop)
    assert actor.ended == ["drain", "stop"]


def test_garbage_is_collected_before_the_actor_requests_work() -> None:
    gc.unfreeze()
    actor = Scripted(kill=signal.SIGTERM, later=True)
    assert run(actor) == 0
    assert actor.frozen_objects > 1_000


def test_asyncio_serves_with_a_warning_where_uvloop_is_missing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = builtins.__import__

    def without_uvloop(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "uvloop":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_uvloop)
    actor = Scripted(kill=signal.SIGINT, later=True)
    assert run(actor) == 0
    assert isinstance(actor.loop, asyncio.BaseEventLoop)
    assert "uvloop is missing: asyncio serves" in caplog.text


def test_a_signal_during_start_ends_it() -> None:
    actor = Scripted(kill=signal.SIGTERM)
    assert run(actor) == 0
    assert actor.ended == ["drain", "stop"]


@pytest.mark.parametrize("later", [False, True])
def test_a_failure_is_exit_status_1_without_a_drain(later: bool) -> None:
    actor = Scripted(error=RuntimeError("device lost"), later=later)
    assert run(actor) == 1
    assert actor.ended == ["stop"]


def test_an_actor_without_a_name_gets_one() -> None:
    actor = Scripted(kill=signal.SIGTERM, later=True)
    assert run(actor, ProcessOptions(fleet="f", host_id="h")) == 0
    assert len(actor.name.removeprefix("executor.")) == 8


def test_objects_built_by_start_are_never_scanned_again() -> None:
    class Frozen(Scripted):
        async def drain(self) -> None:
            self.frozen = gc.get_freeze_count()

    actor = Frozen(kill=signal.SIGTERM, later=True)
    run(actor)
    assert actor.frozen > 1000


ROOT = Path(__file__).parents[4]
SECOND_SIGNAL = """
import asyncio, os, signal, sys, time
sys.path.append("tests")
from shared.actor.process import ProcessOptions, run
from shared.actor.runtime import Actor
from support.memory_bus import MemoryBroker

class Slow(Actor):
    kind = "executor"

    async def start(self, port):
        os.kill(os.getpid(), signal.SIGTERM)

    async def drain(self):
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.Event().wait()

    async def stop(self):
        print("stopped", flush=True)
        STOP

async def connect(name):
    return MemoryBroker().connect()

raise SystemExit(run(Slow(), connect, ProcessOptions(fleet="f", host_id="h")))
"""


@pytest.mark.parametrize(
    "stop",
    ["pass", "await asyncio.Event().wait()", "time.sleep(60)", "os.kill(os.getpid(), signal.SIGINT)"],
    ids=["in order", "hangs", "blocks", "third signal"],
)
def test_a_second_signal_ends_the_drain(stop: str) -> None:
    """And it ends after any later message."""
    code = SECOND_SIGNAL.replace("STOP", stop)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, timeout=120, check=False, capture_output=True, text=True
    )
    assert (done.stdout, done.returncode) == ("stopped\n", 130)
