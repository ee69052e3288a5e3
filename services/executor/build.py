"""Builds the engine of an executor: which one, with which dtype, threads and slots, its settings mean."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING

from services.executor.engine import Alarm, Backend, GrammarNews, engine_of, timing_of
from services.executor.sampling.logits_processors import load_processors
from services.executor.sim.engine import SimBackend, SimOptions
from shared.config import MOST_DRAFTS, Settings
from shared.errors import SetupError
from shared.processes import importing
from shared.step_model import PROMPT_PART
from shared.vocab.files import resolve, served_names

if TYPE_CHECKING:
    from services.executor.checkpoint.loader import TorchOptions

log = logging.getLogger("headrace.executor")

THREADS_A_CORE = 4  # at most: more are a mistake, and 1,000 of them need minutes for a start
SIM_SLOTS, TORCH_SLOTS, CUDA_SLOTS = 256, 64, 256
OF_MODELS = {  # what builds the engine of a model; None: another engine is for it
    "encoder": "services.executor.encoder.engine:of_model",
}
GROUPS = {  # what runs several ranks
    "ranks": "services.executor.group.driver:build_group",
}
Build = Callable[["TorchOptions"], Backend]


def engine_builder(
    settings: Settings, alarm: Alarm | None = None, news: GrammarNews | None = None
) -> Callable[[], Backend]:
    """A function that builds the engine; it runs on the device thread and may take seconds. An engine of
    several processes rings `alarm` when one of them dies. Raises SetupError, before it loads weights if they
    or the modes are not those of the setting `model_digest`."""
    if settings.backend == "sim":
        return lambda: _sim(settings)
    return lambda: _torch(settings, alarm or Alarm(), news or GrammarNews())


def _sim(settings: Settings) -> Backend:
    from shared.vocab.vocabulary import load_vocabulary

    processors = load_processors(settings.logits_processors)
    files = resolve(settings.model, settings.cache_dir)
    usual = SimOptions()
    options = SimOptions(
        model=served_names(settings)[0],
        vocab=load_vocabulary(files).size,
        blocks=settings.kv_blocks or usual.blocks,
        block_tokens=settings.block_tokens,
        slots=settings.slots or SIM_SLOTS,
        max_context=settings.max_context or usual.max_context,
        timing=settings.sim,
        processors=processors,
        lora_places=settings.lora_places,
        lora_rank=settings.lora_rank,
    )
    return _of_digest(SimBackend(options), _wanted_digest(settings))


def _of_digest(engine: Backend, wanted: str) -> Backend:
    """The engine. Raises SetupError if the executors that serve its model have another digest."""
    if wanted not in ("", digest := engine.info.model_digest):
        raise SetupError(f"the engine of {engine.info.model} has the model digest {digest}, not {wanted}")
    return engine


def _wanted_digest(settings: Settings) -> str:
    return "" if settings.accept_mixed else settings.model_digest


def _torch(settings: Settings, alarm: Alarm, news: GrammarNews) -> Backend:
    with importing():
        build, options, encodes = _chosen(settings, news)
    wanted, ranks = _wanted_digest(settings), settings.device_and_ranks[1]
    if encodes:
        return _of_digest(build(options), wanted)
    if wanted:
        from services.executor.checkpoint.loader import check_digest

        check_digest(options, wanted)
    if ranks == 1:
        return build(options)
    for name in GROUPS.values():
        group: Backend = resolve_name(name)(options, ranks, alarm.ring, settings.to_env())
        return group
    raise SetupError(f"no engine here runs {ranks} ranks: give `device` one GPU")


def _chosen(settings: Settings, news: GrammarNews) -> tuple[Build, TorchOptions, bool]:
    """What builds the engine, its options, and whether it is an encoder. It imports the libraries."""
    device, ranks = settings.device_and_ranks
    try:
        from services.executor.checkpoint.loader import TorchOptions, best_dtype, device_of

        if not (on_gpu := device_of(device).type == "cuda"):
            _check_threads(settings.threads)
        files = resolve(settings.model, settings.cache_dir)
        of_model = [*filter(None, (resolve_name(name)(files.path) for name in OF_MODELS.values()))]
        encodes = bool(of_model)
        build: Build = of_model[0] if encodes else engine_of("cuda" if on_gpu else "cpu")
    except ModuleNotFoundError as error:
        raise SetupError(
            f"the torch engine needs {error.name}: pip install 'headrace[executor]', "
            "or run without weights: --backend sim"
        ) from error
    if encodes and ranks > 1:
        raise SetupError(
            f"{files.name} is an encoder, which {ranks} ranks cannot share: start more executors"
        )
    processors = load_processors(settings.logits_processors)
    if settings.lora_places and (encodes or ranks > 1):
        raise SetupError("lora_places: an encoder, or several ranks, have no adapters; set it to 0 here")
    log.info("loading %s …", files.name)
    slots = settings.slots or (CUDA_SLOTS if on_gpu else TORCH_SLOTS)
    dtype, _, kv_dtype = settings.dtype.partition("/")
    if dtype == "auto" and settings.backend != "dummy":
        dtype, why = best_dtype(files.path, device, ranks)
        log.info("dtype %s: %s", dtype, why)
    first_threads = 0
    if not on_gpu and not encodes:
        first_threads = _timed_threads(settings, files.path, dtype)
    options = TorchOptions(
        model_path=files.path,
        model_name=served_names(settings)[0],
        dummy=settings.backend == "dummy",
        dtype=dtype,
        kv_dtype=kv_dtype or "auto",
        device=device,
        blocks=settings.kv_blocks,
        gpu_memory=settings.gpu_memory,
        only_tier=not on_gpu and ranks == 1 and _needs_no_l1(settings),
        block_tokens=settings.block_tokens,
        slots=slots,
        max_step_tokens=max(settings.step_tokens, slots + settings.step_tokens // PROMPT_PART),
        max_context=settings.max_context,
        threads=settings.threads,
        first_threads=first_threads,
        pipeline=settings.is_pipeline,
        overlap_comm=settings.overlap_comm,
        deterministic=settings.deterministic,
        processors=processors,
        max_drafts=MOST_DRAFTS if settings.most_drafts else 0,
        lora_places=settings.lora_places,
        lora_rank=settings.lora_rank,
        report_grammar=lambda of_grammar: news.report(of_grammar),
    )
    return build, options, encodes


def _check_threads(asked: int) -> None:
    """Raise SetupError for more threads than this machine has cores for."""
    if asked > (most := THREADS_A_CORE * (os.cpu_count() or 1)):
        raise SetupError(
            f"--threads {asked}: all threads wait for each other, and this machine has cores for {most} at "
            "most; take fewer, or 0 for what is fastest"
        )


def _timed_threads(settings: Settings, path: Path, dtype: str) -> int:
    """The threads to begin with on a CPU; 0: not timed. Logs the times, and where another dtype would be
    faster than the f32 or bf16 that a rule chose."""
    others = ("f32", "bf16") if settings.dtype.partition("/")[0] == "auto" else ()
    timing = timing_of(settings, path, dtype, others if dtype in others else ())
    if timing is None:
        return 0
    log.info("%s", timing)
    if found := timing.faster():
        log.info("products in %s take %.2f of the time: --dtype %s", found[0], found[1], found[0])
    return int(timing.threads)


def _needs_no_l1(settings: Settings) -> bool:
    """Whether L1 would only be a copy of the KV cache of one CPU executor, in the same memory. With a size of
    either, an L2, other executors here, or models that share memory, the cache has its own size beside L1."""
    sized = settings.l1 != "auto" or settings.kv_blocks > 0 or settings.awake_gib > 0
    return not sized and not settings.l2 and settings.executors == 1
