"""One service as one process: `headrace serve KIND`, and what `headrace up` starts for each of its own."""

from __future__ import annotations

import argparse
import importlib
import os
import secrets
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from services.launcher.processes import leave
from shared.errors import SetupError

if TYPE_CHECKING:
    from shared.actor import Actor
    from shared.bus import Bus
    from shared.config import Settings

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


def serve(kind: str, settings: Settings, *, name: str = "") -> int:
    """Run one service until a signal drains it. Returns the exit status. `name` is how the log calls it; `up`
    gives one and puts it before each line itself. Raises SetupError."""
    from services.launcher.health import leave_note
    from shared import logs
    from shared.config import DEFAULT_NATS_URL
    from shared.process import ProcessOptions, run

    prefixed_by_up = bool(name) and not settings.log_json
    logs.setup("" if prefixed_by_up else name or kind, level=settings.log_level, as_json=settings.log_json)
    os.environ.update(ENVIRONMENT.get(kind, {}))
    url = settings.nats_url or DEFAULT_NATS_URL
    actor_id = secrets.token_hex(4)
    if not name:
        leave_note(kind, actor_id)
    options = ProcessOptions(
        fleet=settings.fleet,
        host_id=settings.host_id,
        actor_id=actor_id,
        beat_interval_us=settings.beat_interval_ms * 1000,
        drain_timeout_s=settings.drain_timeout_s,
    )
    return leave(run(builder(kind)(settings), partial(_connect, url), options))


async def _connect(url: str, name: str) -> Bus:
    from shared.nats_bus import NatsBus

    return await NatsBus.connect(url, name=name)


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m services.launcher.serve KIND`: settings from the environment alone."""
    from services.launcher.console import fail
    from shared.config import load

    parser = argparse.ArgumentParser(prog="python -m services.launcher.serve", description=__doc__)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--name", default="", help="how the log calls it")
    given = parser.parse_args(argv)
    try:
        return serve(given.kind, load().settings, name=given.name)
    except SetupError as error:
        return fail(error)


if __name__ == "__main__":
    raise SystemExit(main())
