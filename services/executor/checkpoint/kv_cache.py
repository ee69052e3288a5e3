"""The paged KV cache is one block-major tensor; this module has its formats and fingerprint, too.

    kv [block][layer][K|V][token][kv_head][head_dim]

A block of all layers is contiguous, so that a copy between tiers is one transfer. After the scheduler's
blocks comes the spare block: rows of finished sequences and padding write there.
"""

from __future__ import annotations

import hashlib
import logging
import math
import mmap
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.attention import FP8, FP8_MAX, PLAIN, Scoring, copy_blocks, weigh
from kernels.elementwise import apply_rope
from services.executor.checkpoint.weights import WHOLE, Stage, Weights
from services.executor.model import program
from services.executor.model.description import Attention, Rope, Shapes, describe
from services.executor.parallel.coroutines import run_alone
from services.executor.parallel.ranks import SOLO, Ranks
from shared.errors import SetupError
from shared.messages import Ints
from shared.processes import available_bytes, memory_limit

log = logging.getLogger("headrace.executor")

LAYOUT = "block.layer.kv.token.head.dim"
_CPU_BYTES = 1 << 30  # at most, and at most a quarter of the free memory
_CPU_L1_BYTES = 2 << 30  # at most; what L1 takes beside the cache of a CPU, here in the cache itself
_GPU_SHARE = 0.9  # of the free memory after the weights are loaded; the rest is for activations
_CONTEXT_BYTES = 600 << 20  # of CUDA and its libraries in a process, which torch does not count
TOKENS = 128  # of the pass that finds the scales of fp8
_STRIDE = 7919  # a prime: spreads the tokens of that pass over the vocabulary
HEADROOM = (
    2.0  # over the largest number of that pass, before rounding up to a power of two; above it saturates
)
_LEAST_CAPABILITY = (8, 9)  # GPUs that convert e4m3
_FORMAT = "headrace-kv-1"  # of the fingerprint
_SAMPLES = 1024  # of each tensor, evenly spread, for the fingerprint
_CHARACTERS = 32  # of a fingerprint


class KvCache:
    """Owns the device memory of the blocks. They start as zeros: masked scores must not be NaN."""

    def __init__(
        self, tensor: Tensor, activations: torch.dtype | None = None, pages: mmap.mmap | None = None
    ) -> None:
        """`tensor` is `[blocks + 1, layers, 2, block_tokens, kv_heads, head_dim]`; `activations` is the dtype
        of the computation, if it is not the tensor's; `pages` is the memory of a tensor on a CPU."""
        self.tensor = tensor
        self._pages = pages
        self.activations = activations or tensor.dtype
        self.blocks = tensor.shape[0] - 1
        self.spare = self.blocks
        self.block_tokens = tensor.shape[3]
        self.bytes_per_block = tensor[0].numel() * tensor.element_size()

    def drop(self) -> None:
        """Give the memory of a CPU's cache back: the blocks are zeros from now on, at the same addresses, and
        a page takes memory again when it is used."""
        assert self._pages is not None, "made by `allocate`, for a CPU"
        self._pages.madvise(mmap.MADV_DONTNEED)

    def copy(self, source: Ints, target: Ints) -> None:
        """Copy whole blocks: `source[i]` to `target[i]`."""
        if len(source):
            device = self.tensor.device
            copy_blocks(self.tensor, torch.tensor(source, device=device), torch.tensor(target, device=device))


def allocate(shapes: Shapes, blocks: int, block_tokens: int, kept: torch.dtype, like: Tensor) -> KvCache:
    """A cache of `blocks` blocks and the spare one in dtype `kept`, on the device and for the activations of
    `like`. Raises SetupError without enough memory."""
    shape = (blocks + 1, shapes.layers, 2, block_tokens, shapes.kv_heads, shapes.head_dim)
    try:
        if like.device.type != "cpu":
            return KvCache(torch.zeros(shape, dtype=kept, device=like.device), like.dtype)
        # Pages that the kernel makes at their first use, 0.3 ms for each block of 0.7 MB: the start does not
        # spend 0.4 s on 1 GiB. (NumPy's zeros ask for large pages, which took 2 to 3 s for 1 GiB.)
        pages = mmap.mmap(-1, math.prod(shape) * kept.itemsize, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return KvCache(torch.frombuffer(pages, dtype=kept).view(shape), like.dtype, pages)
    except (RuntimeError, MemoryError, OSError, OverflowError) as error:  # each may mean: out of memory
        raise SetupError(
            f"no memory for {blocks} KV blocks on {like.device} ({error}); lower kv_blocks"
        ) from error


def block_bytes(shapes: Shapes, block_tokens: int, dtype: torch.dtype) -> int:
    return shapes.layers * 2 * block_tokens * shapes.kv_heads * shapes.head_dim * dtype.itemsize


def fitting_blocks(size_bytes: int, most: int, *, only_tier: bool = False) -> int:
    """How many blocks of `size_bytes` fit into the free memory of a CPU, at most `most`. `only_tier`: the
    cache takes the share of L1, too."""
    quarter = available_bytes() // 4
    budget = min(quarter, _CPU_BYTES) + (min(quarter, _CPU_L1_BYTES) if only_tier else 0)
    return max(1, min(budget // size_bytes - 1, most))


def gpu_blocks(
    size_bytes: int, device: torch.device, most: int, beside_bytes: int, limit: str, asked: int = 0
) -> int:
    """How many blocks of `size_bytes` fit on a GPU once the weights are there, at most `most`; or `asked`.

        limit  = weights and what torch holds | CUDA's context | activations and slots | KV
        (free)                                                   beside_bytes or a tenth of the rest

    `limit`: see `memory_limit`; empty: all that is free, which other programs leave. `beside_bytes`: what
    steps and slots need at least. Raises SetupError where they do not fit."""
    free, total = torch.cuda.mem_get_info(device)
    held = torch.cuda.memory_reserved(device) + _CONTEXT_BYTES
    room = min(free, memory_limit(limit, total) - held) if limit else free
    beside = max(room - int(room * _GPU_SHARE), beside_bytes)
    if limit and asked:  # the numbers are given: what is left beside them must do
        beside = beside_bytes
    log.info(
        "memory of the GPU: %.1f GiB, %.1f free, %.1f held with the weights; left%s: %.1f, of them %.1f for "
        "activations and slots",
        total / 2**30, free / 2**30, held / 2**30, f" within gpu_memory {limit}" if limit else "",
        max(room, 0) / 2**30, beside / 2**30,
    )  # fmt: skip
    found = (room - beside) // size_bytes - 1
    if asked and (not limit or asked <= found):
        return asked
    if found < max(asked, 1):
        within = f" within gpu_memory {limit}" if limit else ""
        raise SetupError(
            f"{max(room, 0) / 2**30:.1f} GiB of the GPU are left{within}, and activations and slots take "
            f"{beside / 2**30:.1f}: {asked or 1} KV blocks of {size_bytes / 2**20:.2f} MiB do not fit; raise "
            "gpu_memory, or lower kv_blocks, slots or step_tokens"
        )
    return min(found, most)


@dataclass(frozen=True, slots=True)
class KvFormat:
    """The dtype of KV: the model's, float16 where the model computes in float32 from packed weights, or fp8
    (e4m3), half the size of bf16 in every tier. `scales`
    `[layers, K|V, kv_heads]` float32: the true number over the stored number; None: 1.

    fp8 needs one scale for K and one for V of each layer and KV head. One short pass over fixed tokens finds
    them at load, and they never change: a block has the same meaning on any engine with the same fingerprint,
    which covers the scales. They are powers of two: finer scales give a floating point format no finer
    resolution, and a product with a power of two is exact. So the scales go into the weights, and no kernel
    reads them: the rows that compute K and V are divided, the readers of K and V (queries, `out`) multiplied.
    Results change only by the rounding of K and V. With normed keys (Qwen3) all heads of a layer have one
    scale of K, because they share the norm's weight."""

    dtype: torch.dtype
    scales: Tensor | None = None

    @property
    def name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    def marks(self) -> tuple[str, ...]:
        """The parts that a fingerprint must distinguish; none for KV in the model's dtype."""
        if self.scales is None:
            return (self.name,) if self.dtype == torch.float16 else ()
        return self.name, hashlib.sha256(self.scales.cpu().numpy().tobytes()).hexdigest()


def kv_format(
    wanted: str,
    auto: torch.dtype,
    shapes: Shapes,
    weights: Weights,
    ranks: Ranks = SOLO,
    stage: Stage = WHOLE,
) -> KvFormat:
    """The format `auto`, of that dtype, or `fp8`, which puts scales into `weights`. Raises SetupError for
    another format and for a GPU without fp8."""
    device = weights.norm.device
    if wanted == "auto":
        return KvFormat(auto)
    if wanted != "fp8":
        raise SetupError(f"KV cannot be kept in {wanted!r}; use auto or fp8")
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < _LEAST_CAPABILITY:
        raise SetupError(
            f"{torch.cuda.get_device_name(device)} has no fp8, which begins with compute capability 8.9; "
            "leave /fp8 out of dtype"
        )
    scales = fp8_scales(shapes, weights, ranks, stage)
    put_scales(scales, shapes, weights)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # fitting_blocks measures the free memory
    return KvFormat(FP8, scales)


def fp8_scales(shapes: Shapes, weights: Weights, ranks: Ranks = SOLO, stage: Stage = WHOLE) -> Tensor:
    """The powers of two above `largest * HEADROOM / FP8_MAX`, `[layers, K|V, kv_heads]` float32."""
    _, exponents = torch.frexp(largest_kv(shapes, weights, ranks, stage) * (HEADROOM / FP8_MAX))
    scales = ((exponents + 127) << 23).view(torch.float32)  # 2^exponent as bits: pow may round
    if shapes.qk_norm:
        scales[:, 0] = scales[:, 0].amax(-1, keepdim=True)
    return scales


@dataclass(slots=True)
class _Rows:
    """See services.executor.model.program.Values."""

    x: Tensor
    residual: Tensor
    kept: Tensor | None = None


@torch.no_grad()
def largest_kv(shapes: Shapes, weights: Weights, ranks: Ranks = SOLO, stage: Stage = WHOLE) -> Tensor:
    """The largest magnitudes of K and V over the fixed tokens, `[layers, K|V, kv_heads]` float32. K's hold
    for every position: a rotation moves a pair of numbers on a circle, and the circle's radius is measured.

    Everything is float32 and eager, so all devices find the same powers of two."""
    count = min(TOKENS, shapes.max_context)
    ids = torch.arange(count, device=weights.norm.device) * _STRIDE % shapes.vocab
    rotations = program.rotations(shapes, count, ids.device)
    if stage.first:
        residual = program.embedded(weights.embedding.rows(ids).values.float(), shapes)
    else:
        residual = stage.receive(torch.empty(count, shapes.hidden, device=ids.device))
    found = []

    def measured(rope: program.Placed, attention: program.Placed) -> program.Step:
        def step(values: program.Values) -> None:
            query, key, value = program.split_heads(values.x, attention.op.heads, attention.op.kv_heads)
            radius = torch.hypot(*key.chunk(2, -1)) * max(1.0, shapes.rope_gain)
            found.append(torch.stack((radius.amax((0, 2)), value.abs().amax((0, 2)))))
            query, key = (apply_rope(each, rotations[rope.op.table]) for each in (query, key))
            values.x = _attend(query, key, value, program.scoring_of(attention))

        return step

    operations = program.placed(describe(shapes), weights.layers, weights.norms, keep=True)
    steps = program.steps_of(
        operations, {**program.REFERENCE, (Rope, Attention): measured}, program.REFERENCE
    )
    values = _Rows(residual, residual)
    run_alone(program.run(steps, values, ranks, ranks.size))
    if not stage.last:
        stage.send(values.residual)
    return torch.stack(found)


def _attend(query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
    """Causal attention of one sequence, `[tokens, heads, head_dim]` each, to `[tokens, heads * head_dim]`.
    torch's attention is not used: its algorithm differs by device."""
    tokens, heads, dim = query.shape
    shared = heads // key.shape[1]
    q, k, v = (each.transpose(0, 1) for each in (query, key, value))
    k, v = k.repeat_interleave(shared, 0), v.repeat_interleave(shared, 0)
    later = torch.ones(tokens, tokens, dtype=torch.bool, device=query.device).triu(1)
    if scoring is not PLAIN:
        mask = torch.zeros(later.shape, device=query.device).masked_fill_(later, -torch.inf)
        attended = weigh(q[:, None], k[:, None], v[:, None], mask, scoring)[:, 0]
        return attended.transpose(0, 1).reshape(tokens, heads * dim)
    scores = (q @ k.mT * dim**-0.5).masked_fill(later, -torch.inf)
    attended = torch.matmul(scores.softmax(-1), v)
    return attended.transpose(0, 1).reshape(tokens, heads * dim)


def put_scales(scales: Tensor, shapes: Shapes, weights: Weights) -> None:
    """Change `weights` so that K and V come out divided by `scales`, and the logits stay the same."""
    group = shapes.heads // shapes.kv_heads
    for i, layer in enumerate(weights.layers):
        key, value = scales[i].to(weights.norm.dtype)
        read = key.repeat_interleave(group)
        factors = {}
        if shapes.qk_norm:  # the norm would undo scaled rows of qkv
            factors = {"q_norm": key[0], "k_norm": 1 / key[0]}
            read, key = torch.ones_like(read), torch.ones_like(key)
        rows = torch.cat((read, 1 / key, 1 / value)).repeat_interleave(shapes.head_dim)
        factors |= {"qkv": rows[:, None], "out": value.repeat_interleave(group * shapes.head_dim)}
        if shapes.qkv_bias:
            factors["qkv_bias"] = rows
        for name, factor in factors.items():
            layer[name] = layer[name].scaled(factor)


def fingerprint(
    model: str, shapes: Shapes, weights: Weights, block_tokens: int, kept: KvFormat, ranks: Ranks = SOLO
) -> str:
    """Hex digest of everything that makes KV bytes interchangeable between engines: model name, weights,
    dtype, shapes with rope, block size, layout and KV format.

    Weights count by their shapes and a sample of the loaded values of every tensor, so the digest does not
    depend on the number of files, but on any quantisation or finetune. Several ranks have one digest of all
    their digests in order: a block has a part on each, and fits only as many ranks."""
    digest = hashlib.sha256()
    parts = (_FORMAT, model, repr(shapes), str(weights.norm.dtype), str(block_tokens), LAYOUT)
    experts = () if shapes.experts is None else (repr(shapes.experts),)
    gain = () if shapes.rope_gain == 1.0 else (f"rope gain {shapes.rope_gain!r}",)
    for part in (*parts, *experts, *gain, *shapes.options.marks, *kept.marks()):
        digest.update(part.encode() + b"\0")
    for tensor in tensors_of(weights):
        flat = tensor.flatten()
        sample = flat[:: max(1, flat.numel() // _SAMPLES)].float().cpu()
        digest.update(repr(tuple(tensor.shape)).encode() + sample.numpy().tobytes())
    found = ranks.exchange(digest.hexdigest()[:_CHARACTERS])
    if len(found) == 1:
        return found[0]
    return hashlib.sha256("".join(found).encode()).hexdigest()[:_CHARACTERS]


def size_bytes(weights: Weights) -> int:
    """The size of a model in memory. A tied head counts once."""
    of_layers = (stored for layer in weights.layers for stored in layer.values())
    stored = {id(each): each for each in (weights.embedding, weights.head, *of_layers)}
    return weights.norm.nbytes + sum(each.size_bytes for each in stored.values())


def tensors_of(weights: Weights) -> Iterator[Tensor]:
    """All tensors of a model. Tied ones occur twice."""
    biases = () if weights.norm_bias is None else (weights.norm_bias,)
    yield from (*weights.embedding.data, weights.norm, *biases, *weights.head.data)
    for layer in weights.layers:
        yield from (part for stored in layer.values() for part in stored.data)
