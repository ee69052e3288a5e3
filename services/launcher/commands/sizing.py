"""The memory that a model takes with so many users: `headrace doctor --model PATH --context N --users M`.

    weights + users x context x bytes of KV per token + processes

Reads names and shapes of the tensors alone. The formula and its worked examples: docs/guides/sizing.md.
"""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass
from pathlib import Path

from services.launcher.serve import environment
from shared.config import Settings
from shared.errors import BadRequest
from shared.kv_blocks import blocks_for
from shared.processes import available_bytes
from shared.vocab.files import resolve

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
    from services.executor.checkpoint.config import read_shapes
    from services.executor.checkpoint.gguf import stored_gguf
    from services.executor.checkpoint.loader import best_dtype, device_of
    from services.executor.checkpoint.quantised import stored_in
    from services.executor.checkpoint.weights import stored_hf

    if context < 0 or users < 1:
        raise BadRequest("--context is 0 (the model's) or more tokens, --users is 1 or more")
    path, (device, ranks) = resolve(settings.model, settings.cache_dir).path, settings.device_and_ranks
    shapes, stored = stored_gguf(path) if path.suffix == ".gguf" else (read_shapes(path), stored_hf(path))
    if context > shapes.max_context:
        raise BadRequest(f"--context {context}: the model has at most {shapes.max_context} tokens")
    dtype, _, kv = settings.dtype.partition("/")
    on_gpu = device == "cuda" or device_of(device).type == "cuda"
    if dtype == "auto" and not on_gpu:
        dtype, _ = best_dtype(path, device, ranks)
    if dtype == "auto":
        dtype = stored_in(path) or ("int4" if path.suffix == ".gguf" else "bf16")
    file_bytes = numbers = 0
    for _, kind, data in stored:
        file_bytes += len(data)
        numbers += math.prod(map(int, re.findall(r"\d+", kind.partition(" ")[2])))
    if stored_in(path) == "int4":
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
