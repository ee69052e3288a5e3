"""Which engine the configuration asks for. torch is imported only here, and only when needed."""

from __future__ import annotations

from collections.abc import Callable

from services.executor.backend import Alarm, Backend
from services.executor.processors import load_processors
from services.executor.sim import SimBackend, SimOptions
from shared.config import Settings
from shared.errors import SetupError
from shared.model_files import resolve

SIM_SLOTS, TORCH_SLOTS, CUDA_SLOTS = 256, 64, 256


def engine_builder(settings: Settings, alarm: Alarm | None = None) -> Callable[[], Backend]:
    """A function that builds the engine; it runs on the device thread and may take seconds. An engine that
    can be gone while this process lives rings the alarm."""
    if settings.backend == "sim":
        return lambda: _sim(settings)
    return lambda: _torch(settings, alarm or Alarm())


def _sim(settings: Settings) -> Backend:
    from shared.vocabulary import load_vocabulary

    processors = load_processors(settings.logits_processors)
    files = resolve(settings.model, settings.cache_dir)
    usual = SimOptions()
    options = SimOptions(
        model=settings.model_name or files.name,
        vocab=load_vocabulary(files).size,
        blocks=settings.kv_blocks or usual.blocks,
        block_tokens=settings.block_tokens,
        slots=settings.slots or SIM_SLOTS,
        max_context=settings.max_context or usual.max_context,
        timing=settings.sim,
        processors=processors,
    )
    return SimBackend(options)


def _torch(settings: Settings, alarm: Alarm) -> Backend:
    device, ranks = settings.device_and_ranks
    try:
        from services.executor.loading import TorchOptions, device_of

        build: Callable[[TorchOptions], Backend]
        if on_gpu := device_of(device).type == "cuda":
            from services.executor.cuda.backend import build
        else:
            from services.executor.torch_backend import build
    except ModuleNotFoundError as error:
        raise SetupError(
            f"the torch engine needs {error.name}: pip install 'headrace[executor]', "
            "or run without weights: --backend sim"
        ) from error
    processors = load_processors(settings.logits_processors)
    files = resolve(settings.model, settings.cache_dir)
    slots = settings.slots or (CUDA_SLOTS if on_gpu else TORCH_SLOTS)
    dtype, _, kv_dtype = settings.dtype.partition("/")
    options = TorchOptions(
        model_path=files.path,
        model_name=settings.model_name or files.name,
        dummy=settings.backend == "dummy",
        dtype=dtype,
        kv_dtype=kv_dtype or "auto",
        device=device,
        blocks=settings.kv_blocks,
        block_tokens=settings.block_tokens,
        slots=slots,
        max_step_tokens=max(settings.step_tokens, slots),
        max_context=settings.max_context,
        threads=settings.threads,
        pipeline=settings.pipeline,
        overlap_comm=settings.overlap_comm,
        deterministic=settings.deterministic,
        processors=processors,
    )
    if ranks == 1:
        return build(options)
    from services.executor.group import build_group

    return build_group(options, ranks, alarm.ring, settings.to_env())
