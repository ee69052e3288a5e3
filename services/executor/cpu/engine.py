"""The torch engine implements Backend: it joins weights, paged KV, slots, forward pass and sampler.

services/executor/actor.py builds it for one rank, group/ for several. It also runs on a GPU, as the tests'
reference for the CUDA engine."""

from __future__ import annotations

import time
from dataclasses import replace

import torch

from services.executor.checkpoint.loader import Loaded, TorchOptions, device_of, grammars_of, info_of, load
from services.executor.cpu.batch import BatchBuilder, Slots
from services.executor.cpu.model import Model, operators_for
from services.executor.cpu.thread_count import ThreadCount
from services.executor.engine import (
    WARM_ROWS,
    BackendInfo,
    Copier,
    HostSegmentTimer,
    Pending,
    StepOutput,
    warm_up_steps,
)
from services.executor.kv_transfer.copiers import CudaCopier, HostCopier
from services.executor.parallel.coroutines import CommThread
from services.executor.parallel.ranks import SOLO, Ranks
from services.executor.parallel.step_split import NEVER, MicroBatches, split
from services.executor.sampling.host_sampling import HostRows
from services.executor.sampling.sampler import Sampler, logprobs
from shared.errors import EngineError
from shared.kv_blocks import blocks_for
from shared.messages import Ints, SlotOpen, StepPlan, ints


def build(options: TorchOptions, ranks: Ranks = SOLO) -> TorchBackend:
    """Load the model and allocate the cache; takes seconds. Raises SetupError for options that cannot
    work."""
    if device_of(options.device).type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)  # it plans anew for each context length: 82 ms, not 4
    return TorchBackend(options, load(options, ranks))


class TorchBackend:
    """See services.executor.engine.Backend. Made by `build`."""

    def __init__(self, options: TorchOptions, loaded: Loaded) -> None:
        shapes, weights, cache, context = loaded.shapes, loaded.weights, loaded.cache, loaded.context
        device, exact = weights.embedding.device, options.deterministic
        self._info, self._samples = info_of(options, loaded), loaded.stage.last
        self._comm_thread = CommThread() if options.overlap_comm != "off" and loaded.ranks.size > 1 else None
        if self._comm_thread is not None:  # collectives use the computing cores: split only where a plan asks
            self._info = replace(self._info, two_stream_tokens=NEVER)
        self._cache = cache
        kinds = operators_for(cache, deterministic=exact)
        self._model = Model(loaded, kinds, deterministic=exact)
        self._slots = Slots(
            options.slots, blocks_for(context, cache.block_tokens), cache.spare, context, device
        )
        self._sampler = Sampler(options.slots, shapes.vocab, device, deterministic=exact)
        self._batches = BatchBuilder(self._slots, cache, deterministic=exact, ragged=kinds.ragged)
        self._host_rows = HostRows(options.processors, grammars_of(options, loaded), device)
        self._logprobs: dict[int, int] = {}  # SlotOpen.logprobs by slot
        self._computed: torch.cuda.Event | None = None  # the end of the last forward, on a GPU
        on_gpu = device.type == "cuda"
        fixed = on_gpu or options.threads or exact or loaded.ranks.size * loaded.stage.count > 1
        self._threads = None if fixed else ThreadCount(torch.get_num_threads())
        self._copier: Copier = CudaCopier(cache, lambda: self._computed) if on_gpu else HostCopier(cache)

    @property
    def info(self) -> BackendInfo:
        return self._info

    def warm_up(self) -> None:
        self._model.compile_products(min(WARM_ROWS, self._info.max_step_tokens))
        for opened, plans in warm_up_steps(self._info):
            self.open_slot(opened)
            for plan in plans:
                pending = self.forward(plan)
                if self._samples:
                    self.sample(pending)
        self.reset()

    def open_slot(self, opened: SlotOpen) -> None:
        self._slots.open(opened)
        self._sampler.open(opened)
        self._host_rows.open(opened)
        self._logprobs[opened.slot] = opened.logprobs

    def close_slot(self, slot: int) -> None:
        self._slots.close(slot)
        self._sampler.close(slot)
        self._host_rows.close(slot)

    def forward(self, plan: StepPlan) -> Pending:
        began_ns = time.monotonic_ns()
        pending = self._forward(plan)
        if self._threads is not None and plan.slots:
            self._threads.observe(sum(plan.counts), (time.monotonic_ns() - began_ns) // 1000)
            if torch.get_num_threads() != self._threads.now:
                torch.set_num_threads(self._threads.now)
        return pending

    @torch.inference_mode()
    def _forward(self, plan: StepPlan) -> Pending:
        self._slots.apply_tables(plan)
        self._cache.copy(plan.copy_from, plan.copy_to)
        if not plan.slots:
            return Pending(plan=plan, forwarded=self._host_rows.forwarded())
        if plan.two_stream and self._comm_thread is not None and (parts := split(plan)) is not None:
            return self._forward_micro_batches(plan, parts, self._comm_thread)
        batch = self._batches.build(plan)
        logits = self._model.forward(batch, self._cache.tensor)
        forwarded = self._host_rows.forwarded()
        return Pending(plan=plan, logits=logits, padding_rows=batch.padding, forwarded=forwarded)

    def _forward_micro_batches(self, plan: StepPlan, parts: MicroBatches, comm_thread: CommThread) -> Pending:
        batches = [self._batches.build(micro_batch) for micro_batch in (parts.first, parts.second)]
        order, timer = torch.tensor(parts.order, dtype=torch.int64), HostSegmentTimer()
        kv = self._cache.tensor
        logits = self._model.forward_micro_batches(
            batches, order, kv, lambda forward_passes: comm_thread.run_interleaved(forward_passes, timer)
        )
        padding = sum(batch.padding for batch in batches)
        return Pending(plan=plan, logits=logits, padding_rows=padding, segments=timer.segments)

    @torch.inference_mode()
    def sample(self, pending: Pending) -> StepOutput:
        plan, logits, slots = pending.plan, pending.logits, list(pending.plan.sample_slots)
        self._computed = pending.forwarded
        if not slots:
            return StepOutput(
                ids=ints(), done=ints(), padding_rows=pending.padding_rows, segments=pending.segments()
            )
        if logits is None or len(logits) != len(slots):
            raise EngineError(f"step {plan.step} samples rows that its forward pass did not compute")
        positions = [plan.starts[row] + plan.counts[row] for row in plan.sample_rows]
        with self._host_rows.overlapping(pending.forwarded):
            chosen = self._host_rows.choose(self._sampler, logits, slots, positions, self._slots.tokens)
            self._slots.end([slots[row] for row in chosen.failures])
            ids, done, flaws = self._slots.advance(slots, chosen.ids, positions)
            found = logprobs(logits, chosen.ids, [self._logprobs[slot] for slot in slots])
        return StepOutput(
            ids=ids,
            done=done,
            padding_rows=pending.padding_rows,
            logprobs=found.chosen,
            top_counts=found.top_counts,
            top_ids=found.top_ids,
            top_logprobs=found.top_values,
            host_us=chosen.host_us,
            row_errors=tuple((flaws | chosen.failures).items()),
            segments=pending.segments(),
        )

    def take(self, pending: Pending, ids: Ints, done: Ints) -> None:
        """See services.executor.group.driver.RankBackend."""
        plan = pending.plan
        self._computed = pending.forwarded
        if slots := list(plan.sample_slots):
            self._slots.take(slots, ids, done, [plan.starts[i] + plan.counts[i] for i in plan.sample_rows])

    def copier(self) -> Copier:
        return self._copier

    def reset(self) -> None:
        for slot in range(self._info.slots):
            self.close_slot(slot)
        self._computed = self._host_rows.forwarded()

    def close(self) -> None:
        if (rows := self.__dict__.get("_host_rows")) is not None:  # None: closed before
            rows.end()
        if self._comm_thread is not None:
            self._comm_thread.close()
        for name in ("_model", "_cache", "_batches", "_slots", "_sampler", "_host_rows", "_copier"):
            self.__dict__.pop(name, None)  # frees the memory
