"""An 8B engine with random weights and random KV, driven in this process: no scheduler, no messages."""

from __future__ import annotations

import json
import tempfile
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from loadtest.gpu.shape import LLAMA_8B
from services.executor.backend import Pending
from services.executor.cuda.backend import CudaBackend, build
from services.executor.loading import TorchOptions
from shared.messages import Sampling, SlotOpen, StepPlan, ints

IN_FLIGHT = 2


@dataclass(frozen=True, slots=True)
class Built:
    """An engine, and how long it took."""

    backend: CudaBackend
    load_s: float
    warm_up_s: float

    @property
    def weight_bytes(self) -> int:
        """Read in a decode step: all but the embedding."""
        weights: Any = self.backend._passes._model
        layers = sum(
            tensor.numel() * tensor.element_size()
            for layer in weights._layers
            for tensor in (layer.qkv, layer.out, layer.gate_up, layer.down)
        )
        head = weights._head
        return int(layers + head.numel() * head.element_size())


def llama_8b(step_tokens: int, config: dict[str, Any] | None = None, **options: Any) -> Built:
    """The engine; its blocks hold random numbers: zeros draw less power, and run faster. `options` go to
    TorchOptions."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config or LLAMA_8B))
        began_s = time.monotonic()
        backend = build(
            TorchOptions(
                model_path=Path(folder), model_name="dummy-8b", dummy=True, device="cuda", dtype="bf16",
                slots=256, max_step_tokens=step_tokens, max_context=16_384,
                **options,
            )
        )  # fmt: skip
    loaded_s = time.monotonic()
    backend.warm_up()
    torch.cuda.synchronize()
    warm_s = time.monotonic()
    cache = backend._cache
    for block in cache.tensor.split(256):
        block.copy_(torch.randn(block.shape, dtype=cache.activations, device=block.device))
    return Built(backend, loaded_s - began_s, warm_s - loaded_s)


class Driver:
    """Opens sequences with blocks in shuffled order, and runs plans with two steps in flight."""

    def __init__(self, backend: CudaBackend, seed: int = 0) -> None:
        self._backend = backend
        self._free = torch.randperm(
            backend.info.blocks, generator=torch.Generator().manual_seed(seed)
        ).tolist()
        self._step = 0
        self._lengths: dict[int, int] = {}

    def open(
        self, slot: int, length: int, room: int, sampling: Sampling | None = None
    ) -> tuple[int, list[int]]:
        """A sequence of `length` tokens with blocks for `room`; the slot and its blocks."""
        tokens = [(slot * 7919 + i * 31) % 1000 + 300 for i in range(length)]
        return self.open_with(slot, tokens, room, sampling)

    def open_with(
        self, slot: int, tokens: list[int], room: int, sampling: Sampling | None = None
    ) -> tuple[int, list[int]]:
        """The same with tokens given; greedy unless told."""
        self._backend.open_slot(
            SlotOpen(
                slot=slot, generation=0, seq=slot, prompt_tokens=len(tokens), tokens=ints(tokens),
                sampling=sampling or Sampling(temperature=0.0),
            )
        )  # fmt: skip
        count = -(-room // self._backend.info.block_tokens)
        return slot, [self._free.pop() for _ in range(count)]

    def plan(
        self, rows: list[tuple[int, int, int, bool]], tables: dict[int, list[int]], samples: bool = True
    ) -> StepPlan:
        """A step of rows (slot, start, count, fed by the device), each sampled; `tables` are set before."""
        self._step += 1
        slots = [slot for slot, *_ in rows]
        return StepPlan(
            exec_epoch=0, step=self._step, mode="single", micro_batch=0,
            slots=ints(slots), starts=ints(r[1] for r in rows), counts=ints(r[2] for r in rows),
            from_device=ints(int(r[3]) for r in rows),
            sample_rows=ints(range(len(rows)) if samples else ()),
            sample_slots=ints(slots if samples else ()),
            table_slots=ints(tables), table_first=ints([0] * len(tables)),
            table_counts=ints(len(blocks) for blocks in tables.values()),
            table_blocks=ints(block for blocks in tables.values() for block in blocks),
        )  # fmt: skip

    def run(self, plans: list[StepPlan]) -> list[float]:
        """Run the plans, two in flight; when each one's ids were there, in seconds from the start."""
        pending: deque[Pending] = deque()
        ends_s, began_s = [], time.monotonic()
        for plan in plans:
            pending.append(self._backend.forward(plan))
            if len(pending) == IN_FLIGHT:
                self._backend.sample(pending.popleft())
                ends_s.append(time.monotonic() - began_s)
        while pending:
            self._backend.sample(pending.popleft())
            ends_s.append(time.monotonic() - began_s)
        return ends_s

    def close(self) -> None:
        """Forget all sequences."""
        self._backend.reset()
