"""`headrace serve KIND` runs one service as one process; `headrace up` starts its services so, too."""

from __future__ import annotations

import argparse
import importlib
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from services.launcher.heartbeats import HeartbeatFile, runtime_path
from services.launcher.supervisor import leave
from shared.errors import SetupError
from shared.processes import ensure_home

if TYPE_CHECKING:
    from shared.actor.runtime import Actor
    from shared.config import Settings
    from shared.nats.interface import Bus

# In the order of the pipeline, which is also the order in which they drain.
BUILDERS = {
    "gateway": "services.gateway.actor",
    "tokenizer": "services.tokenizer.actor",
    "scheduler": "services.scheduler.actor",
    "executor": "services.executor.actor",
    "kv_offload": "services.kv_offload.actor",
    "detokenizer": "services.detokenizer.actor",
}
KINDS = tuple(BUILDERS)
# What a kind's libraries read when they are imported. LMCache would report its use, log each discard, and
# take a share of the device, which belongs to the executor.
ENVIRONMENT = {
    "kv_offload": {
        "LMCACHE_TRACK_USAGE": "false",
        "DO_NOT_TRACK": "1",
        "LMCACHE_LOG_LEVEL": "ERROR",
        "CUDA_VISIBLE_DEVICES": "",
    },
}

log = logging.getLogger("headrace.process")

# A thread of torch that waits for the others looks for them this often (a tenth of a millisecond), and then
# sleeps. OpenMP's own 300,000 keep a core for up to 18 ms from the very thread, or process, it waits for:
# beside other work a step of 40 ms took 700.
OPENMP_SPINS = "2000"


def builder(kind: str) -> Callable[[Settings], Actor]:
    """The function that builds an actor of this kind from the settings. Raises SetupError."""
    if kind not in BUILDERS:
        raise SetupError(f"there is no service {kind!r}: choose one of {', '.join(KINDS)}")
    try:
        module = importlib.import_module(BUILDERS[kind])
    except ModuleNotFoundError as error:
        raise SetupError(f"the {kind} needs the package {error.name}: pip install 'headrace[all]'") from error
    build: Callable[[Settings], Actor] = module.build
    return build


def serve(kind: str, settings: Settings, *, name: str = "", heartbeats: str = "") -> int:
    """Run one service until a signal drains it. Returns the exit status. `name` is how the log calls it; `up`
    gives one and puts it before each line itself. `heartbeats`: the file in which to note each heartbeat,
    else that of the health check. Raises SetupError."""
    from shared import processes
    from shared.actor.runtime import ProcessOptions, run
    from shared.config import DEFAULT_NATS_URL

    prefixed_by_up = bool(name) and not settings.log_json
    processes.setup(
        "" if prefixed_by_up else name or kind, level=settings.log_level, as_json=settings.log_json
    )
    os.environ.update(environment(kind, os.environ))
    os.umask(0o077)  # event logs, KV in a folder: what holds prompts is for its owner alone
    url = settings.nats_url or DEFAULT_NATS_URL
    path = heartbeats or runtime_path(kind)
    noted = _heartbeat_file(path, settings.heartbeat_interval_ms / 1000) if path else None
    options = ProcessOptions(
        fleet=settings.fleet,
        host_id=settings.host_id,
        heartbeat_interval_us=settings.heartbeat_interval_ms * 1000,
        drain_timeout_s=settings.drain_timeout_s,
        on_heartbeat=noted.note if noted is not None else None,
    )
    return leave(run(builder(kind)(settings), partial(_connect, url), options))


def environment(kind: str, given: Mapping[str, str]) -> Mapping[str, str]:
    """What a kind's libraries shall find in the environment beside what is `given`, before they are imported.
    How threads of the executor wait is left as it is given."""
    if kind == "executor" and not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & given.keys():
        return {"GOMP_SPINCOUNT": OPENMP_SPINS}
    return ENVIRONMENT.get(kind, {})


async def _connect(url: str, name: str) -> Bus:
    from shared.nats.bus import NatsBus

    return await NatsBus.connect(url, name=name)


def _heartbeat_file(path: str, interval_s: float) -> HeartbeatFile | None:
    """Where to note the heartbeats; None, and a warning, where that cannot be written."""
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        return HeartbeatFile(path, interval_s)
    except OSError as error:
        log.warning("%s: nobody can see whether this service hangs", error)
        return None


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m services.launcher.serve KIND`: settings from the environment alone."""
    from services.launcher.console import fail
    from shared.config import load

    parser = argparse.ArgumentParser(prog="python -m services.launcher.serve", description=__doc__)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--name", default="", help="how the log calls it")
    parser.add_argument("--heartbeats", default="", help="the file in which to note each beat")
    given = parser.parse_args(argv)
    try:
        ensure_home()
        return serve(given.kind, load().settings, name=given.name, heartbeats=given.heartbeats)
    except SetupError as error:
        return fail(error)


if __name__ == "__main__":
    raise SystemExit(main())
