"""An 8B engine with random weights and random KV, in this process (loadtest.driver drives it)."""

from __future__ import annotations

import gc
import json
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from loadtest.gpu.shape import LLAMA_8B
from services.executor.checkpoint.loader import TorchOptions
from services.executor.cuda.engine import CudaBackend, build
from services.executor.group.driver import GroupBackend, build_group

MATRICES = ("qkv", "out", "gate_up", "down")  # of a layer, as services.executor.model names them


@dataclass(frozen=True, slots=True)
class Built:
    """An engine, or a group of one on each GPU, and how long it took."""

    backend: CudaBackend | GroupBackend
    load_s: float
    warm_up_s: float
    ranks: int = 1

    @property
    def own(self) -> CudaBackend:
        """The part of it in this process."""
        own: Any = self.backend._own if isinstance(self.backend, GroupBackend) else self.backend
        assert isinstance(own, CudaBackend)
        return own

    @property
    def weight_bytes(self) -> int:
        """Read on this GPU in a decode step: all but the embedding."""
        weights: Any = self.own._runner._model
        read = [layer[name] for layer in weights._layers for name in MATRICES]
        tensors = (getattr(weight, "tensors", (weight,)) for weight in (*read, weights._head))
        return int(sum(tensor.nbytes for each in tensors for tensor in each))


def llama_8b(step_tokens: int, config: dict[str, Any] | None = None, ranks: int = 1, **options: Any) -> Built:
    """The engine; its blocks hold random numbers (those of other ranks zeros): zeros draw less power, and run
    faster. `options` go to TorchOptions."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config or LLAMA_8B))
        began_s = time.monotonic()
        wanted = TorchOptions(
            model_path=Path(folder), model_name="dummy-8b", dummy=True, device="cuda",
            **{
                "dtype": "bf16", "slots": 256, "max_context": 16_384,
                "max_step_tokens": step_tokens, **options,
            },
        )  # fmt: skip
        backend: CudaBackend | GroupBackend = (
            build(wanted) if ranks == 1 else build_group(wanted, ranks, _give_up)
        )
    loaded_s = time.monotonic()
    backend.warm_up()
    torch.cuda.synchronize()
    warm_s = time.monotonic()
    built = Built(backend, loaded_s - began_s, warm_s - loaded_s, ranks)
    cache: Any = built.own._cache
    for block in cache.tensor.split(256):
        block.copy_(torch.randn(block.shape, dtype=cache.activations, device=block.device))
    return built


def end(built: Built | None) -> None:
    """Give an engine's memory back."""
    if built is not None:
        built.backend.close()
    gc.collect()
    torch.cuda.empty_cache()


def _give_up(why: str) -> None:
    print(why, flush=True)
    os._exit(1)
