"""The engines that one contract holds for, and a device thread that plans can be given to."""

from __future__ import annotations

import queue
import random
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from support.executor.plan_maker import PlanMaker, Row
from support.executor.tiny_models import VOCAB

from services.executor.cpu.engine import TorchOptions
from services.executor.cpu.engine import build as build_torch
from services.executor.device_thread import DeviceThread
from services.executor.engine import Backend, MakeProcessor, Pending, StepOutput
from services.executor.sim.engine import SimBackend, SimOptions
from shared.clock import SystemClock
from shared.messages import SlotClose, SlotOpen, StepPlan, StepResult

ENGINES = ("sim", "torch", "torch/fp8", *(("cuda", "cuda/fp8") if torch.cuda.is_available() else ()))
KIND = "llama-9-3-tied"
PROMPT = random.Random(5).choices(range(VOCAB), k=27)
WITHIN_S = 90  # for what must happen; far above what it takes


def small_engine(engine: str, folder: Path, processors: Mapping[str, MakeProcessor]) -> Backend:
    """A `sim` engine that takes no time, or a `torch` one with the tiny model in `folder`, also on `cuda`;
    with `/fp8` after the name it keeps KV in fp8."""
    if engine == "sim":
        return SimBackend(
            SimOptions(
                vocab=1000, blocks=80, slots=8, max_context=256, timing="step=0", processors=processors
            )
        )
    build = build_torch
    engine, _, kv_dtype = engine.partition("/")
    if engine == "cuda":
        from services.executor.cuda.engine import build
    return build(
        TorchOptions(
            model_path=folder, model_name=KIND, device="cpu" if engine == "torch" else engine, dtype="f32",
            kv_dtype=kv_dtype or "auto", blocks=80, slots=8, threads=1, deterministic=engine == "torch",
            processors=processors, max_drafts=7,
        )
    )  # fmt: skip


class Watched:
    """An engine whose forwards are seen: `forwarded(step)` is set when that step's forward has begun."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._begun: dict[int, threading.Event] = {}
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def forwarded(self, step: int) -> threading.Event:
        with self._lock:
            return self._begun.setdefault(step, threading.Event())

    def forward(self, plan: StepPlan) -> Pending:
        self.forwarded(plan.step).set()
        return self._backend.forward(plan)

    def sample(self, pending: Pending) -> StepOutput:
        return self._backend.sample(pending)


class Driven:
    """A device thread over `backend`, driven by hand. `maker.open` opens slots on it."""

    def __init__(self, backend: Backend | Watched) -> None:
        self._results: queue.SimpleQueue[StepResult] = queue.SimpleQueue()
        self._device = DeviceThread(lambda: backend, SystemClock(), self._results.put)
        built: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._device.start(built.put)
        assert built.get(timeout=WITHIN_S) is backend
        self.info = backend.info
        self.maker = PlanMaker(self)

    def open_slot(self, opened: SlotOpen) -> None:
        self._device.put(opened)

    def close_slot(self, slot: int) -> None:
        self._device.put(SlotClose(slot=slot, generation=0, last_step=self.maker.step))

    def put(self, *rows: Row) -> int:
        """Give it a step of these rows; its number."""
        self._device.put(self.maker.plan(list(rows)))
        return self.maker.step

    def result(self) -> StepResult:
        """The next result."""
        return self._results.get(timeout=WITHIN_S)

    def end(self) -> None:
        self._device.join(WITHIN_S)


Make = Callable[[Mapping[str, MakeProcessor]], Backend]
