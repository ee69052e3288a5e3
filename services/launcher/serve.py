"""`headrace serve KIND` runs one service as one process; `headrace up` starts its services the same way.

The service's module is imported here, after the environment that its libraries read has been set.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING

from services.launcher.heartbeats import HeartbeatFile, runtime_path
from services.launcher.supervisor import leave
from shared.errors import SetupError
from shared.processes import ensure_home, importing

if TYPE_CHECKING:
    from shared.actor.runtime import Actor
    from shared.config import Settings
    from shared.nats.interface import Bus

# In the order of the pipeline, which is also the order in which they drain.
BUILDERS = {
    "gateway": "services.gateway.actor:build",
    "tokenizer": "services.tokenizer.actor:build",
    "scheduler": "services.scheduler.actor:build",
    "executor": "services.executor.actor:build",
    "kv_offload": "services.kv_offload.actor:build",
    "detokenizer": "services.detokenizer.actor:build",
    "keeper": "services.keeper.actor:build",
}
KINDS = tuple(BUILDERS)
# Variables that a kind's libraries read at import. Without them LMCache reports its use, logs each discard
# and allocates memory on the device, which belongs to the executor.
ENVIRONMENT = {
    "kv_offload": {
        "LMCACHE_TRACK_USAGE": "false",
        "DO_NOT_TRACK": "1",
        "LMCACHE_LOG_LEVEL": "ERROR",
        "CUDA_VISIBLE_DEVICES": "",
    }
}

log = logging.getLogger("headrace.process")

# A torch thread that waits for the others spins this many times (2 ms), then sleeps. OpenMP's default of
# 300,000 spins holds a core for up to 18 ms, which the awaited thread may need: on a busy machine a step of
# 40 ms took 700 ms. With 2,000 threads sleep between two steps and start the next one late: a token of a 135M
# model took 8.2 ms, not 6.8.
OPENMP_SPINS = "40000"


def builder(kind: str) -> Callable[[Settings], Actor]:
    """The function that builds an actor of this kind from the settings. Raises SetupError for an unknown kind
    or a missing package."""
    if kind not in BUILDERS:
        raise SetupError(f"there is no service {kind!r}: choose one of {', '.join(KINDS)}")
    try:
        with importing():
            build: Callable[[Settings], Actor] = resolve_name(BUILDERS[kind])
    except ModuleNotFoundError as error:
        raise SetupError(f"the {kind} needs the package {error.name}: pip install 'headrace[all]'") from error
    return build


def check_settings(settings: Settings) -> None:
    """Raise SetupError for settings that a service refuses at its start, if its package has a `check`."""
    for target in BUILDERS.values():
        package = importlib.import_module(target.rpartition(".")[0])
        if (refuse := getattr(package, "check", None)) is not None:
            refuse(settings)


def serve(kind: str, settings: Settings, *, name: str = "", heartbeats: str = "") -> int:
    """Run one service until a signal drains it. Returns the exit status. `name` is the service's name in the
    log; `up` passes one and prefixes each line with it. `heartbeats` is the file in which to note each
    heartbeat; the default is the file that the health check reads. Raises SetupError."""
    from shared import processes
    from shared.actor.process import ProcessOptions, run
    from shared.config import DEFAULT_NATS_URL

    prefixed_by_up = bool(name) and not settings.log_json
    processes.setup(
        "" if prefixed_by_up else name or kind, level=settings.log_level, as_json=settings.log_json
    )
    os.environ.update(environment(kind, os.environ))
    processes.ensure_folder()
    os.umask(0o077)  # only the owner may read files that hold prompts: event logs, KV in a folder
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
    """Variables to add to the environment `given` before a kind's libraries are imported. If `given` already
    sets how OpenMP threads wait, the executor adds nothing."""
    if kind == "executor" and not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & given.keys():
        return {"GOMP_SPINCOUNT": OPENMP_SPINS}
    return ENVIRONMENT.get(kind, {})


async def _connect(url: str, name: str) -> Bus:
    from shared.nats.bus import NatsBus

    return await NatsBus.connect(url, name=name)


def _heartbeat_file(path: str, interval_s: float) -> HeartbeatFile | None:
    """The file in which to note the heartbeats; None, after a warning, if it cannot be written."""
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        return HeartbeatFile(path, interval_s)
    except OSError as error:
        log.warning("%s: a hang of this service will not be detected", error)
        return None


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m services.launcher.serve KIND`: reads settings only from the environment."""
    from services.launcher.console import fail
    from shared.config import load

    parser = argparse.ArgumentParser(prog="python -m services.launcher.serve", description=__doc__)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--name", default="", help="the service's name in the log")
    parser.add_argument("--heartbeats", default="", help="the file in which to note each heartbeat")
    given = parser.parse_args(argv)
    try:
        ensure_home()
        return serve(given.kind, load().settings, name=given.name, heartbeats=given.heartbeats)
    except SetupError as error:
        return fail(error)


if __name__ == "__main__":
    raise SystemExit(main())
