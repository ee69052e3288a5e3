"""Fixtures for every test: one real nats-server for the session, and a fleet name for each test."""

from __future__ import annotations

import gc
import itertools
import os
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterator
from contextlib import AsyncExitStack
from operator import itemgetter
from pathlib import Path

import pytest
from hypothesis import settings
from support.children import ended_on_failure
from support.memory_bus import MemoryBroker

from services.launcher import nats_server as servers
from services.launcher.nats_server import NatsServer
from shared.nats.bus import NatsBus
from shared.nats.interface import Bus

# Kernels run in Triton's interpreter where there is no GPU; it must be known before anything imports Triton.
if shutil.which("nvidia-smi") is None:
    os.environ.setdefault("TRITON_INTERPRET", "1")

# The same examples in every run, and no time limits: a busy machine is not a failure.
settings.register_profile("steady", deadline=None, derandomize=True)
# `HYPOTHESIS_PROFILE=soak pytest -k fuzz`: new examples each time, and many.
settings.register_profile(
    "soak", deadline=None, max_examples=int(os.environ.get("FUZZ_EXAMPLES", "20000")), print_blob=True
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "steady"))

_FLEETS = itertools.count()

Connect = Callable[[], Awaitable[Bus]]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None]:
    """A million objects stand when all tests are collected, for as long as the session lasts: the garbage
    collector passes over them once, not again and again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Workers take files in this order: those of real processes, which wait half of their time, among those
    that compute, and the last tenth of the run without them, as one of them may take a minute."""
    files: dict[bool, dict[Path, list[pytest.Item]]] = {True: {}, False: {}}
    for item in items:
        files["e2e" in item.path.parts].setdefault(item.path, []).append(item)
    placed = [
        ((0.9 if waits else 1) * number / len(of_kind), file)
        for waits, of_kind in files.items()
        for number, file in enumerate(of_kind.values())
    ]
    items[:] = [item for _, file in sorted(placed, key=itemgetter(0)) for item in file]


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    """A failure ends the test's processes."""
    with ended_on_failure():
        return (yield)


@pytest.fixture(scope="session")
def nats_server() -> Iterator[NatsServer]:
    """A real server, shared by the session: isolate by `fleet`."""
    server = servers.start()
    yield server
    server.stop()


@pytest.fixture
def fleet() -> str:
    """A name no other test of the session uses."""
    return f"t{next(_FLEETS)}"


@pytest.fixture(params=["memory", "nats"])
async def connect(request: pytest.FixtureRequest) -> AsyncIterator[Connect]:
    """Opens connections to one broker, of both kinds in turn, and drains them at the end."""
    broker = MemoryBroker() if request.param == "memory" else None
    url = "" if broker else request.getfixturevalue("nats_server").url
    async with AsyncExitStack() as stack:

        async def open_bus() -> Bus:
            bus: Bus = broker.connect() if broker else await NatsBus.connect(url, timeout_s=30)
            stack.push_async_callback(bus.drain)
            return bus

        yield open_bus
