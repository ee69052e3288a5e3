"""Loads a model and allocates its KV cache from TorchOptions. The torch engines (cpu, cuda) call it."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import platform
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from pkgutil import resolve_name

import numpy as np
import torch

import kernels.cpu_jit
from kernels.attention import FP8
from services.executor.checkpoint.config import pooling_of, read_shapes
from services.executor.checkpoint.kv_cache import (
    KvCache,
    allocate,
    block_bytes,
    fingerprint,
    fitting_blocks,
    gpu_blocks,
    kv_format,
    size_bytes,
)
from services.executor.checkpoint.stored import (
    KEPT,
    FileStates,
    Stored,
    check_unchanged,
    scheme_in,
    states_of,
)
from services.executor.checkpoint.weights import (
    WHOLE,
    LoadPart,
    Stage,
    StoredTensor,
    Weights,
    format_of,
    load_dummy,
    partition,
    plain_part,
    stage_partition,
)
from services.executor.engine import (
    COMPILED,
    BackendInfo,
    MakeProcessor,
    ReportGrammar,
    adapters_of,
    ignore_grammar_news,
)
from services.executor.model.description import Shapes
from services.executor.parallel.ranks import SOLO, Ranks
from services.executor.sampling.grammar import Grammars, build_grammars
from services.executor.sampling.sampler import STOP_IDS
from shared.errors import EngineError, SetupError
from shared.kv_blocks import blocks_for
from shared.processes import usable_threads
from shared.vocab.files import ModelFiles
from shared.vocab.files import size_bytes as file_bytes
from shared.vocab.vocabulary import Vocabulary, load_vocabulary

log = logging.getLogger("headrace.executor")

_DIGEST, _DIGEST_CHARACTERS = "headrace-model-1", 32
_NO_TILES = "amx without tiles"  # a CPU of this kind whose tiles kernels may not use
_LOGIT_BYTES = 22  # of a token, a row: the model's dtype, float32, copies of torch, 5 for penalties
_GRAPHS_BYTES = 512 << 20
SMALL_BYTES = 256 << 20  # of weights in files, see _is_small
_PIECES, _PIECE_BYTES = 8192, 64  # samples of a model's bytes in its digest; more for models of many tensors

_NAMES = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32", FP8: "fp8"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchOptions:
    """What to serve and how. Zeros and "auto" are determined at start."""

    model_path: Path  # a .gguf file, or a folder with config.json and *.safetensors
    model_name: str
    dummy: bool = False  # random weights in the shapes of config.json
    dtype: str = "auto"  # one of DTYPES; auto: f32 on a CPU, as stored or bf16 on a GPU
    kv_dtype: str = "auto"  # fp8; auto: the model's dtype, f16 with packed weights
    device: str = "auto"  # cpu, cuda; auto: cuda if there is a GPU
    blocks: int = 0  # 0: as the free memory allows, 1 GiB on a CPU
    only_tier: bool = False  # no L1 beside the KV cache of a CPU: it has up to 2 GiB more
    gpu_memory: str = ""  # the most of a GPU: see shared.processes.memory_limit; empty: what is free
    block_tokens: int = 16
    slots: int = 64
    max_step_tokens: int = 256
    max_context: int = 0  # 0: the model's
    threads: int = 0  # 0: as many as usable cores, fewer while fewer are faster
    first_threads: int = 0  # with `threads` 0, those to begin with; 0: as many as usable cores
    pipeline: bool = False  # each of several ranks is a stage; else they share every layer
    overlap_comm: str = "auto"  # several ranks: off, two_stream; auto: measures the split threshold at start
    deterministic: bool = False  # a row's bits depend on neither its batch nor the chunks of its prompt
    max_drafts: int = 0  # of a row; 0: no step has drafts. Several GPUs have none
    lora_places: int = 0  # adapters of a step; 0: none
    lora_rank: int = 64  # most of an adapter
    processors: Mapping[str, MakeProcessor] = field(default_factory=dict)  # by name
    report_grammar: ReportGrammar = ignore_grammar_news


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A model or a rank's part of it, on its device, with its cache. `context`: tokens of the longest
    sequence; `ranks`: the ranks that share its layers."""

    shapes: Shapes
    weights: Weights
    cache: KvCache
    context: int
    fingerprint: str
    ranks: Ranks = SOLO
    stage: Stage = WHOLE
    files: FileStates  # as they were loaded
    threads: int  # of torch, to begin with
    kept_in: str = ""  # the weights of products, if not in the model's dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class Dtype:
    """What the weights of a model are in. `why_not`: why those of the options cannot be so on a device, empty
    if they can; `best`: the choice of so many ranks of a CPU for a model, and why, empty for other models;
    `sample`: the name of the type of a model's weights, and what makes a matrix of so many bytes of it, with
    so many columns."""

    computed: torch.dtype = torch.bfloat16  # between the products
    kv: torch.dtype = torch.bfloat16  # by default
    is_quantised: bool = True
    in_blocks: bool = False  # see FileFormat
    own_sums: bool = False  # of products on a CPU: no library, which differs by maker, adds them up
    why_not: Callable[[TorchOptions, torch.device], str] = lambda *_: ""
    load_part: Callable[[TorchOptions], LoadPart] = lambda _: plain_part
    best: Callable[[Path, int], tuple[str, str]] = lambda *_: ("", "")
    sample: Callable[[Path], tuple[str, Callable[[int, int], Stored]] | None] | None = None


def why_not_on_cpu(options: TorchOptions, device: torch.device) -> str:
    """Why products with bytes of weights cannot run on `device`; empty if they can."""
    if device.type != "cpu":
        return f"dtype {options.dtype} is for CPUs; use bf16 or fp8"
    if not kernels.cpu_jit.has(*kernels.cpu_jit.BYTES):
        return f"dtype {options.dtype} needs a CPU with AVX2 and F16C, and Numba; use bf16"
    return ""


_OWN = {
    "bf16": Dtype(is_quantised=False),
    "f32": Dtype(computed=torch.float32, kv=torch.float32, is_quantised=False),
    "int8": Dtype(why_not=why_not_on_cpu),
}
DTYPES = (*_OWN, *KEPT)


def dtype_named(name: str) -> Dtype:
    """One of DTYPES."""
    found: Dtype = resolve_name(KEPT[name]) if name in KEPT else _OWN[name]
    return found


def load(options: TorchOptions, ranks: Ranks = SOLO) -> Loaded:
    """Load this rank's weights and allocate its cache; takes seconds. Raises SetupError for options that
    cannot work."""
    device, files = device_of(options.device, ranks.rank), states_of(options.model_path)
    if options.gpu_memory and device.type != "cuda":
        raise SetupError("gpu_memory is for GPUs, and this engine computes on the CPU: use kv_blocks there")
    if any(files != others for others in ranks.exchange(files)):
        raise SetupError(f"{options.model_path} changes while its ranks load it: wait until it is whole")
    threads = options.threads or options.first_threads or usable_threads(ranks.size)
    torch.set_num_threads(1 if _is_small(options) and device.type == "cpu" else threads)
    name = _dtype_name(options, device)
    how = dtype_named(name)
    dtype, load_part = how.computed, how.load_part(options)
    stage = Stage(ranks.rank, ranks.size) if options.pipeline else WHOLE
    sharing = SOLO if options.pipeline else ranks
    partition_of = functools.partial(partition, rank=ranks.rank, size=ranks.size)
    if options.pipeline:
        partition_of = functools.partial(stage_partition, stage=stage)
    files_of = format_of(options.model_path)
    read = files_of.load_in_blocks if how.in_blocks else files_of.load
    shapes, weights = (load_dummy if options.dummy else read)(
        options.model_path, dtype, device, partition_of, load_part
    )
    if device.type == "cuda" and (ranks.size > 1 or how.is_quantised):
        torch.cuda.empty_cache()  # other ranks' parts, plain numbers: fitting_blocks measures the free memory
    wanted = _context_tokens(shapes, options.max_context)
    shapes = shapes.for_context(wanted)
    kv = kv_format(options.kv_dtype, how.kv, shapes, weights, sharing, stage)
    size = block_bytes(shapes, options.block_tokens, kv.dtype)
    most = options.slots * blocks_for(wanted, options.block_tokens)
    if device.type == "cuda":
        beside = beside_bytes(shapes, options, wanted)
        places = options.lora_places
        beside += adapters_of("bytes", places, shapes, weights.norm.dtype, places, options.lora_rank) or 0
        blocks = gpu_blocks(size, device, most, beside, options.gpu_memory, options.blocks)
    else:
        blocks = options.blocks or fitting_blocks(size, most, only_tier=options.only_tier)
    blocks = min(ranks.exchange(blocks))
    context = min(wanted, blocks * options.block_tokens)
    if context < options.max_context:
        raise SetupError(
            f"{blocks} KV blocks of {options.block_tokens} tokens hold no sequence of {options.max_context}; "
            "raise kv_blocks or lower max_context"
        )
    cache = allocate(shapes, blocks, options.block_tokens, kv.dtype, weights.norm)
    log.info(
        "%d KV blocks of %d tokens and %d bytes in %s: %.2f GiB, %d tokens; sequences up to %d",
        blocks, options.block_tokens, size, kv.name, blocks * size / 2**30, blocks * options.block_tokens,
        context,
    )  # fmt: skip
    kept_in = name if how.is_quantised else ""
    by_row = " row by row" * options.deterministic  # "deterministic": older blocks, with other bits on CPUs
    arithmetic = f" in {kept_in}" * bool(kept_in) + by_row
    if device.type == "cpu":
        arithmetic += f" by {cpu_arithmetic(name)}"
    digest = fingerprint(options.model_name + arithmetic, shapes, weights, cache.block_tokens, kv, ranks)
    return Loaded(
        shapes=shapes, weights=weights, cache=cache, context=context, fingerprint=digest, ranks=sharing,
        stage=stage, files=files, threads=threads, kept_in=kept_in,
    )  # fmt: skip


def beside_bytes(shapes: Shapes, options: TorchOptions, context: int) -> int:
    """What an engine on a GPU needs beside weights and KV, about: the logits of all slots, in the model's
    dtype and as torch samples rows outside a graph; their block tables and, for drafts, their tokens; the
    activations of the longest step; graphs."""
    rows, tokens = options.slots + 1, max(options.max_step_tokens, options.slots)
    logits = rows * shapes.vocab * _LOGIT_BYTES
    state = rows * 4 * (blocks_for(context, options.block_tokens) + (context if options.max_drafts else 0))
    experts = shapes.experts
    wide = shapes.intermediate if experts is None else experts.per_token * experts.width
    activations = tokens * 4 * (6 * shapes.hidden + 3 * wide + 2 * shapes.heads * shapes.head_dim)
    return logits + state + activations + _GRAPHS_BYTES


def _is_small(options: TorchOptions) -> bool:
    """Whether one thread lays out the weights. Several gain nothing with matrices of a megabyte, and beside
    another busy process they wait for each other after every copy of one."""
    return not options.dummy and file_bytes(ModelFiles("", options.model_path)) < SMALL_BYTES


def cpu_arithmetic(dtype: str) -> str:
    """What decides the order of sums on this CPU, in words: its kind, torch's choice of instructions, and
    the maker where torch's libraries multiply, too."""
    kind = kernels.cpu_jit.cpu_kind()
    words = [kind.name if kind else platform.machine(), f"torch {torch.backends.cpu.get_cpu_capability()}"]
    if words[0] == "amx" and not kernels.cpu_jit.has_amx():  # Linux or ONEDNN_MAX_CPU_ISA forbids them
        words[0] = _NO_TILES
    if kind is None or not dtype_named(dtype or "f32").own_sums:
        with contextlib.suppress(OSError):
            found = re.search(r"^vendor_id\s*:\s*(\S+)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
            words += [found[1]] if found else []
    words += [] if COMPILED else ["torch's operators"]  # attention and norms round differently there
    return ", ".join(words)


def model_digest(options: TorchOptions, dtype: str, kv_dtype: str, arithmetic: str | None = None) -> str:
    """Hex digest of everything that decides which tokens are chosen: weights, shapes with rope, dtype, KV
    format, deterministic mode, the instructions of a CPU; not the number of ranks or the layout of KV.

    Weights count by the names, types and shapes of their tensors, and by evenly spread samples of the
    tensors' bytes in the file: about 512 kB in 0.1 s, where all bytes take seconds for each GB. So a change
    of one row may be missed, and the same weights in another file format have another digest."""
    stored: Iterable[StoredTensor] = ()
    if options.dummy:
        shapes = read_shapes(options.model_path)
    else:
        shapes, stored = format_of(options.model_path).stored(options.model_path)
    shapes = shapes.for_context(_context_tokens(shapes, options.max_context))
    modes = f"dummy {options.dummy} deterministic {options.deterministic}"
    facts = [_DIGEST, repr(shapes), repr(shapes.experts), dtype, kv_dtype, modes]
    if device_of(options.device).type == "cpu":
        facts.append(cpu_arithmetic(dtype) if arithmetic is None else arithmetic)
    if shapes.rope_gain != 1.0:
        facts.append(f"rope gain {shapes.rope_gain!r}")
    facts += shapes.options.marks
    if fact := scheme_in(options.model_path).fact:
        facts.append(fact)
    return sampled_digest(facts, stored)


def sampled_digest(facts: Iterable[str], stored: Iterable[StoredTensor]) -> str:
    """Hex digest of `facts` and of samples of the tensors' bytes, see model_digest."""
    digest = hashlib.sha256()
    for fact in facts:
        digest.update(fact.encode() + b"\0")
    tensors = list(stored)
    segments = max(4, _PIECES // max(1, len(tensors)))
    for name, kind, data in tensors:
        digest.update(f"{name} {kind}\0".encode())
        starts = np.linspace(0, max(0, len(data) - _PIECE_BYTES), segments).astype(np.int64)
        for start in dict.fromkeys(starts.tolist()):
            digest.update(data[start : start + _PIECE_BYTES].tobytes())
    return digest.hexdigest()[:_DIGEST_CHARACTERS]


def check_digest(options: TorchOptions, wanted: str) -> None:
    """Raise SetupError unless the engine of these options would have the model digest `wanted`. Reads little
    of the weights, and loads none."""
    dtype = _dtype_name(options, device_of(options.device))
    own_kv = _NAMES[dtype_named(dtype).kv] if options.kv_dtype == "auto" else options.kv_dtype
    own = model_digest(options, dtype, own_kv)
    if own == wanted:
        return
    for computed, kv, mode in product(DTYPES, ("", "/fp8"), (False, True)):
        kept_kv = kv.removeprefix("/") or _NAMES[dtype_named(computed).kv]
        if model_digest(replace(options, deterministic=mode), computed, kept_kv) == wanted:
            flags = " ".join(_flags(computed, kept_kv, deterministic=mode))
            raise SetupError(f"the executors that serve this model compute otherwise: start with {flags}")
    if other := _arithmetic_of(options, dtype, own_kv, wanted):
        raise SetupError(
            f"the executors that serve this model compute with {other}, this CPU with "
            f"{cpu_arithmetic(dtype)}: last bits would differ; see CPUs of several kinds in docs/guides"
        )
    raise SetupError(
        f"the weights of {options.model_name} in {options.model_path} are not those of the executors that "
        f"serve it, or these compute in another dtype and on another kind of CPU: their model digest is "
        f"{wanted}, not {own}"
    )


def _arithmetic_of(options: TorchOptions, dtype: str, kv_dtype: str, wanted: str) -> str:
    """The CPU arithmetic with which this engine has the model digest `wanted`; empty if none has it."""
    if device_of(options.device).type != "cpu":
        return ""
    kinds, instructions = [*(kind.name for kind in kernels.cpu_jit.CPU_KINDS), _NO_TILES], ("AVX2", "AVX512")
    makers = (", AuthenticAMD", ", GenuineIntel")
    found = product(kinds, instructions, [""] if dtype_named(dtype).own_sums else makers)
    without_kind = product(["x86_64"], (*instructions, "DEFAULT"), makers)  # if Numba is missing
    for kind, used, maker in (*found, *without_kind):
        words = f"{kind}, torch {used}{maker}"
        if model_digest(options, dtype, kv_dtype, words) == wanted:
            return words
    return ""


def _flags(computed: str, kept: str, *, deterministic: bool) -> tuple[str, ...]:
    """The flags that decide which tokens are chosen."""
    kv = "" if kept == _NAMES[dtype_named(computed).kv] else f"/{kept}"
    return f"--dtype {computed}{kv}", f"--{'' if deterministic else 'no-'}deterministic"


def info_of(options: TorchOptions, loaded: Loaded) -> BackendInfo:
    """The facts of an engine with the loaded model. Raises SetupError if its files have changed since the
    load began: what was read of them may be of two models."""
    cache = loaded.cache
    kv = _NAMES[cache.tensor.dtype]
    computed = loaded.kept_in or _NAMES[cache.activations]
    vocab, tokens = vocab_digests(options)
    info = BackendInfo(
        backend="torch",
        model=options.model_name,
        dtype=computed if computed == kv and not loaded.kept_in else f"{computed}/{kv}",
        fingerprint=loaded.fingerprint,
        vocab_digest=vocab,
        tokens_digest=tokens,
        vocab=loaded.shapes.vocab,
        blocks=cache.blocks,
        block_tokens=cache.block_tokens,
        bytes_per_block=cache.bytes_per_block,
        slots=options.slots,
        max_step_tokens=options.max_step_tokens,
        max_context=loaded.context,
        max_stop_ids=STOP_IDS,
        reports_grammars=True,
        follows_grammars=True,
        model_digest=model_digest(options, computed, kv),
        weights=model_digest(replace(options, deterministic=False), "", ""),
        flags=_flags(computed, kv, deterministic=options.deterministic),
        memory_bytes=cache.tensor.nbytes + size_bytes(loaded.weights),
        only_tier=options.only_tier,
        hidden=loaded.shapes.hidden,
        pooling=pooling_of(options.model_path),
    )
    check_unchanged(options.model_path, loaded.files)
    return info


def grammars_of(options: TorchOptions, info: BackendInfo) -> Grammars:
    """The grammars of an engine. The vocabulary is read at the first grammar."""
    files = ModelFiles(options.model_name, options.model_path)

    def read() -> Vocabulary:
        found = load_vocabulary(files)
        if found.digest != info.vocab_digest:
            raise EngineError(
                f"the vocabulary in {files.path} has changed since this executor was started: start it again"
            )
        return found

    return build_grammars(read, info.vocab, options.report_grammar)


def device_of(name: str, rank: int = 0) -> torch.device:
    """The device of the setting `name`; with several GPUs, the one at index `rank`. Raises SetupError for
    cuda without that GPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise SetupError(
            "device is cuda, but torch sees no GPU; install a CUDA build of torch or use device cpu"
        )
    if name == "cuda" and rank >= torch.cuda.device_count():
        raise SetupError(
            f"there are {torch.cuda.device_count()} GPUs, too few for rank {rank}: use fewer ranks"
        )
    return torch.device(name, rank) if name == "cuda" and rank else torch.device(name)


def best_dtype(path: Path, device: str, ranks: int) -> tuple[str, str]:
    """What a server computes in if no dtype is chosen, and why: on a CPU the `best` of a dtype of KEPT,
    `bf16` for a checkpoint in bfloat16 with AMX, else `f32`; on a GPU `auto`."""
    if device_of(device).type != "cpu":
        return "auto", "on a GPU fp8 or int4 if the checkpoint is so, int4 for a GGUF file, else bf16"
    for name in KEPT:
        if (found := dtype_named(name).best(path, ranks))[0]:
            return found
    if _is_in_bf16(path) and kernels.cpu_jit.has_amx():
        return "bf16", "the checkpoint is in bf16, which AMX multiplies"
    return "f32", "no GGUF file: int8 and bf16 are faster, with other near ties"


def kept_on_gpu(path: Path) -> str:
    """The dtype that keeps the weights of a model as they are stored on a GPU; bf16: of plain ones."""
    return scheme_in(path).kept_in or format_of(path).kept_in or "bf16"


def _is_in_bf16(folder: Path) -> bool:
    """Whether the config of a checkpoint names bfloat16."""
    try:
        config = json.loads((folder / "config.json").read_text())
        return "bfloat16" in (config.get("dtype"), config.get("torch_dtype"))
    except (OSError, ValueError, AttributeError):
        return False  # the loader names what is wrong


def _dtype_name(options: TorchOptions, device: torch.device) -> str:
    """The dtype that `auto` stands for, or the given one. Raises SetupError for one that cannot be here."""
    name, path = options.dtype, options.model_path
    if name == "auto":
        if device.type == "cpu":
            return "f32"
        name = kept_on_gpu(path)
        if (why := dtype_named(name).why_not(options, device)) and not scheme_in(path).is_larger_plain:
            return "bf16"
    elif name not in DTYPES:
        raise SetupError(f"dtype {name!r} is not supported; use one of {', '.join(DTYPES)}")
    else:
        why = dtype_named(name).why_not(options, device)
    if why:
        raise SetupError(why)
    return name


def _context_tokens(shapes: Shapes, asked: int) -> int:
    """Tokens of the longest sequence: `asked`, or the most that the model can."""
    most = shapes.max_context
    if asked > most:
        raise SetupError(f"max_context {asked} is over {most} tokens, its context; lower max_context")
    return asked or most


def vocab_digests(options: TorchOptions) -> tuple[str, str]:
    """The digests of the vocabulary beside the weights: of all, or "none", and of its tokens, or empty."""
    path = options.model_path
    if path.is_dir() and not (path / "tokenizer.json").is_file():
        return "none", ""  # weights without a tokenizer
    found = load_vocabulary(ModelFiles(options.model_name, path))
    return found.digest, found.tokens_digest
