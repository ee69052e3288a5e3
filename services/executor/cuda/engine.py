"""The CUDA engine implements Backend: it queues a step's forward and its sampling together.

    forward: device-state updates, forward graph, sample graph, copy of the ids ──▶ returns at once
    sample:  waits for the ids                                         (the next step is queued already)

A row with a grammar has a mask, which the kernel reads: see engine.py.

A step that has a row with penalties, bias, processors or log probabilities is sampled outside the graph, all
its rows: torch does what the kernel does not take, the kernel chooses, and the next step waits. With several
GPUs this holds for grammars, too: only one of them has the masks. Such a step has no drafts.
services/executor/build.py builds it for one rank, group/ for several.

`DeviceStorage` takes the memory of tensors off the device and puts it back; the CUDA engine sleeps by it.

    leave      weights ──▶ pinned host memory; KV cache: dropped; the freed memory goes back to the driver
    come_back  the other way; the KV cache is zeros

Every tensor and view stays the same object: only the memory of its storage goes. The driver may give the
same addresses again, and CUDA graphs with these stay valid; `come_back` returns whether it did.

LateSampling queues the sampling of steps with grammars once their masks are made, beside their forward.

    device:  forward n-1, sample n-1 ──▶ forward n ────────────────────────▶ sample n ──▶ forward n+1
    host:           tokens n-1 are known ──▶ masks n ──▶ queue sample n ──▶ queue forward n+1

A mask depends on the token before, so sampling cannot be queued with its forward. All later work of the
device comes after it: the thread that samples a step calls `answer`, and the thread that queues forwards and
changes slots calls `flush` before either. The first of the two makes the masks. The CUDA engine owns it.
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
from torch import Tensor, UntypedStorage

from kernels.attention import FP8
from kernels.attention.decode import decode_work
from kernels.sampling.gpu import TAKEN, Choices, choose, scratch
from kernels.sampling.ref import INVALID
from services.executor import engine
from services.executor.checkpoint.loader import Loaded, TorchOptions, grammars_of, info_of, load
from services.executor.cuda.comm_overlap import two_streams
from services.executor.cuda.graph_runner import GraphRunner
from services.executor.cuda.input_batch import (
    DRAFTS,
    MAX_DRAFT_ROWS,
    CudaSlots,
    arrange,
    arrange_drafts,
    can_have_drafts,
)
from services.executor.cuda.kernel_configs import Choice, Computed, choices, tuning_for
from services.executor.cuda.model import CudaModel
from services.executor.kv_transfer.copiers import CudaCopier
from services.executor.model.description import Shapes
from services.executor.parallel.ranks import SOLO, Ranks
from services.executor.parallel.step_split import CUT_TOKENS, LEAST, split, two_stream_tokens
from services.executor.sampling.grammar import GRAMMARS, HostRows
from services.executor.sampling.sampler import Sampler, append_sampled, end_slots, record_choices, row_errors
from shared.errors import EngineError, SetupError
from shared.kv_blocks import blocks_for
from shared.messages import AT_DEVICE, Ints, SlotOpen, StepPlan, ints

log = logging.getLogger("headrace.executor")


def build(options: TorchOptions, ranks: Ranks = SOLO) -> CudaBackend:
    """Load the model and allocate the cache; takes seconds. Raises SetupError for options that cannot
    work."""
    check_compiler()
    loaded = load(options, ranks)
    plain = loaded.cache.activations == torch.bfloat16 and not options.deterministic
    if loaded.shapes.experts is not None and not plain:
        raise SetupError(
            "on a GPU experts are computed in bf16, and not in deterministic mode; use device cpu for either"
        )
    if loaded.shapes.experts is not None and loaded.shapes.has_options:  # their tests on a GPU do not hold
        raise SetupError(
            f"a GPU does not compute the experts of {options.model_name} yet, which differ from those of "
            "Qwen and Mixtral; use device cpu"
        )
    return CudaBackend(options, loaded)


def report(
    shapes: Shapes, *, block_tokens: int, ranks: int, dtype: str, fp8_kv: bool, deterministic: bool
) -> tuple[Choice, ...]:
    """The kernels of an engine on the first GPU. Raises SetupError where Triton cannot start kernels."""
    check_compiler()
    return choices(
        Computed(
            device=torch.cuda.get_device_name(0), head_dim=shapes.head_dim, block_tokens=block_tokens,
            ranks=ranks, wide=dtype == "f32", fp8_kv=fp8_kv, deterministic=deterministic,
            kept_in=dtype if dtype in ("fp8", "int4") else "", options=shapes.has_options,
        )
    )  # fmt: skip


class CudaBackend:
    """See services.executor.engine.Backend. Made by `build`."""

    adapters: Any = None  # of its slots, if it has places for some

    def __init__(self, options: TorchOptions, loaded: Loaded) -> None:
        shapes, cache = loaded.shapes, loaded.cache
        device, ranks = cache.tensor.device, loaded.ranks
        _check_alike(shapes, ranks)
        alone = ranks.size == loaded.stage.count == 1
        drafts = options.max_drafts > 0 and alone
        self.info: engine.BackendInfo = replace(
            info_of(options, loaded),
            sleeps=alone,
            follows_grammars=bool(GRAMMARS),
            reports_grammars=bool(GRAMMARS),
            max_drafts=DRAFTS[-1] if drafts else 0,
            max_draft_rows=MAX_DRAFT_ROWS if drafts else 0,
        )
        properties = torch.cuda.get_device_properties(device)
        computed = Computed(
            device=properties.name, head_dim=shapes.head_dim, block_tokens=cache.block_tokens,
            ranks=ranks.size, wide=cache.activations == torch.float32,
            fp8_kv=cache.tensor.dtype == FP8, deterministic=options.deterministic, kept_in=loaded.kept_in,
            options=shapes.has_options,
        )  # fmt: skip
        tuning = tuning_for(computed)
        log.info("kernels on %s, torch %s, Triton %s", properties.name, torch.__version__, triton.__version__)
        for choice in choices(computed):
            (log.warning if choice.faster else log.info)("%s", choice)
        most = max(options.max_step_tokens, options.slots)
        queries, processors = 1 + self.info.max_drafts, properties.multi_processor_count
        works = {
            layouts.decode: decode_work(
                cache.tensor, shapes.heads, options.slots, processors, layouts.decode, queries
            )
            for layouts in tuning.all()
        }
        self._cache, self._stage = cache, loaded.stage
        self._splits_steps = options.overlap_comm == "two_stream"
        self._alone = alone
        self._ranks = ranks
        streams = None
        overlaps = options.overlap_comm
        if loaded.kept_in == "int4":  # two products with one matrix in 4 bits must not run at once
            if overlaps == "two_stream":
                raise SetupError("with dtype int4 steps cannot be split: use overlap_comm auto or off")
            overlaps = "off"
        if overlaps != "off" and ranks.size > 1:
            streams = two_streams(loaded, most, deterministic=options.deterministic)
        self._least = 2 * (tuning.few_rows + CUT_TOKENS)  # tokens: no micro-batch is a step of few rows
        self._slots = CudaSlots(
            options.slots, blocks_for(loaded.context, cache.block_tokens), cache.spare, loaded.context,
            device, shapes.vocab, drafts=drafts,
        )  # fmt: skip
        self.adapters = engine.adapters_of(
            "cuda", options.lora_places, shapes, cache.activations, options.lora_places, options.lora_rank,
            options.slots + 1, device,
        )  # fmt: skip
        if self.adapters is not None:
            self.info = replace(self.info, adapter_places=options.lora_places)
        model = CudaModel(loaded, works, tuning, options.slots, self.adapters)
        self._storage = DeviceStorage(model.tensors(), [cache.tensor])
        self._runner = GraphRunner(loaded, model, self._slots, tuning, most, streams)
        self._sampling = DeviceSampling(options.slots, shapes.vocab, self._slots.choices, cache.activations)
        self._host_rows = HostRows(options.processors, grammars_of(options, self.info), device)
        self._masks = self._slots.choices.masks.numpy().view(np.int32)
        self._late = LateSampling(self._sample_masked)
        self._no_ids = torch.empty(2, 0, dtype=torch.int32)
        self._computed: torch.cuda.Event | None = None  # the end of the last sampled forward
        self.copier = CudaCopier(cache, lambda: self._computed)
        self._compiles = CompileWatch()

    @torch.inference_mode()
    def warm_up(self) -> None:
        began_s = time.monotonic()
        self._capture(began_s)
        for opened, plans in self._warm_up_steps():
            self.open_slot(opened)
            for plan in plans:
                pending = self.forward(plan)
                if self._stage.last:
                    self.sample(pending)
        if (micro_batches := self._runner.split_graphs) is not None:
            since = two_stream_tokens(self, self._ranks, micro_batches.capture)
            micro_batches.capture_from(LEAST if self._splits_steps else since)
            self.info = replace(self.info, two_stream_tokens=since)
            log.info("captured the graphs of split steps, %.1f s in all", time.monotonic() - began_s)
        self.reset()
        self._compiles.start()

    def _capture(self, began_s: float) -> None:
        def progress(done: int, of: int) -> None:
            if done % 16 == 0 or done == of:
                log.info("captured %d of %d graphs in %.1f s", done, of, time.monotonic() - began_s)

        self._runner.capture(progress, alone=self._alone)

    def _warm_up_steps(self) -> Iterator[engine.WarmUp]:
        """The steps of any engine; the same with rows that the kernel samples and with a block copied; and
        the longest steps, which may have no graph."""
        copied = ints([self._cache.spare])
        for opened, plans in engine.warm_up_steps(self.info):
            yield opened, plans
            plain = replace(opened, logprobs=0, sampling=replace(opened.sampling, frequency_penalty=0.0))
            yield plain, [replace(plan, copy_from=copied, copy_to=copied) for plan in plans]
        yield from engine.long_steps(self.info)

    def open_slot(self, opened: SlotOpen) -> None:
        self._late.flush()
        self._slots.open(opened)
        self._host_rows.open(opened)
        self._sampling.open(opened)
        if self.adapters is not None:
            self.adapters.open(opened)

    def close_slot(self, slot: int) -> None:
        self._late.flush()
        self._slots.close(slot)
        self._sampling.close(slot)
        self._host_rows.close(slot)

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> engine.Pending:
        self._late.flush()
        samples = len(plan.sample_slots)
        outside = self._sampling.is_outside_graph(plan.sample_slots)
        plan, drafts = (plan, 0) if outside else self._with_drafts(plan)
        segments = self._queue(plan, drafts)
        if not samples:  # no ids to wait for, but the step ends with its forward
            forwarded = self._host_rows.forwarded()
            return engine.Pending(plan=plan, forwarded=forwarded, answer=self._no_ids, segments=segments)
        if not self._stage.last:
            return engine.Pending(plan=plan, forwarded=self._host_rows.forwarded())
        masked = self._host_rows.has_grammar(plan.sample_slots)
        if outside or (masked and not self._alone):
            logits, pools = self._runner.logits(samples), self._sampling.sampler.has_pooled(plan.sample_slots)
            hidden = self._runner.hidden(samples) if pools else None
            forwarded = self._host_rows.forwarded()
            return engine.Pending(
                plan=plan, logits=logits, hidden=hidden, forwarded=forwarded, segments=segments
            )
        answer, ready = self._runner.answer(samples, 1 + drafts)
        tokens = tuple(self._slots.tokens(slot) for slot in plan.sample_slots)
        late = engine.Late() if masked else None
        pending = engine.Pending(
            plan=plan, forwarded=ready, answer=answer, tokens=tokens, segments=segments, late=late
        )
        if masked:
            self._late.put(pending)
        else:
            self._runner.sample(samples, answer, ready)
        return pending

    def _with_drafts(self, plan: StepPlan) -> tuple[StepPlan, int]:
        """A plan without drafts for rows with a grammar, whose mask is that of one place, and the drafts of
        each row of its graph."""
        if not self.info.max_drafts or not can_have_drafts(plan):
            return plan, 0
        counts = ints(
            1 if self._host_rows.has_grammar([slot]) else count
            for slot, count in zip(plan.slots, plan.counts, strict=True)
        )
        wanted = max(counts) - 1
        return replace(plan, counts=counts), self._runner.drafts_of(len(counts), wanted) if wanted else 0

    def _queue(self, plan: StepPlan, drafts: int = 0) -> Callable[[], tuple[engine.Segment, ...]]:
        """Queue a plan's forward, whole or in micro-batches; the segments of the micro-batches."""
        updates = self._slots.take_updates(plan)
        self._cache.copy(plan.copy_from, plan.copy_to)
        runner, slots = self._runner, self._slots
        adapted = self.adapters is not None and self.adapters.is_any_in(plan.slots)
        if drafts:
            slots.copy_histories(plan.slots)
            runner.queue(arrange_drafts(plan, drafts, apart=runner.apart), updates, adapted=adapted)
            return tuple
        parts = None
        if plan.two_stream and runner.split_graphs is not None and sum(plan.counts) >= self._least:
            parts = split(plan)
        if parts is None or runner.split_graphs is None:
            runner.queue(arrange(plan, slots, apart=runner.apart), updates, adapted=adapted)
            return tuple
        first = arrange(parts.first, slots, apart=runner.apart)
        second = arrange(parts.second, slots, apart=False)
        return runner.split_graphs.queue((first, second), parts.order, updates)

    @torch.inference_mode()
    def sample(self, pending: engine.Pending) -> engine.StepOutput:
        if pending.answer is None:
            self._computed = pending.forwarded
            return self._sample_outside(pending)
        found, (host_us, failures) = self._late.answer(pending)
        self._computed = pending.forwarded  # only now: a copy must not wait for a step without a result
        flaws = row_errors(found.done) | failures
        return engine.StepOutput(
            ids=ints(found.ids),
            done=ints(found.done),
            host_us=host_us,
            row_errors=tuple(flaws.items()),
            segments=pending.segments(),
            counts=ints(found.counts),
            drafted=ints(found.drafted),
        )

    @torch.inference_mode()
    def _sample_masked(self, pending: engine.Pending) -> engine.Masked:
        slots, answer, ready = list(pending.plan.sample_slots), pending.answer, pending.forwarded
        assert answer is not None
        assert ready is not None
        host_us, failures = self._host_rows.write_masks(slots, self._slots.tokens, self._masks)
        end_slots(self._slots.choices.done, [slots[row] for row in failures])
        self._runner.sample(len(slots), answer, ready)
        return host_us, failures

    def _sample_outside(self, pending: engine.Pending) -> engine.StepOutput:
        slots, logits = list(pending.plan.sample_slots), pending.logits
        positions = positions_of(pending, [self._slots.tokens(slot) for slot in slots])
        if logits is None:
            raise EngineError(f"step {pending.plan.step} samples rows that its forward pass did not compute")
        with self._host_rows.overlapping(pending.forwarded):
            processed, host_us, failures = self._host_rows.process(
                logits, slots, self._slots.tokens, self._masks
            )
            end_slots(self._slots.choices.done, [slots[row] for row in failures])
            answer = self._sampling.choose(processed, slots, positions)
            ids, done = answer.tolist()
            failures = row_errors(done) | failures
            append_sampled(map(self._slots.tokens, slots), ids, positions)
            output = engine.StepOutput(
                ids=ints(ids),
                done=ints(done),
                host_us=host_us,
                row_errors=tuple(failures.items()),
                segments=pending.segments(),
            )
            output = self._sampling.sampler.with_vectors(output, pending.hidden, slots)
            return self._sampling.sampler.with_logprobs(output, logits, answer[0].long(), slots)

    @torch.inference_mode()
    def record_choices(self, pending: engine.Pending, ids: Ints, done: Ints, counts: Ints) -> None:
        """See services.executor.group.driver.RankBackend. `counts` is empty: ranks have no drafts here."""
        self._computed, answer, slots = pending.forwarded, pending.answer, list(pending.plan.sample_slots)
        if not self._stage.last:
            self._slots.record_sampled(slots, ids, done)
        elif answer is None:
            record_choices(self._slots.choices.last_tokens, self._slots.choices.done, slots, ids, done)
        elif slots:
            _check_same(pending, ids)
        known = pending.tokens or map(self._slots.tokens, slots)
        append_sampled(known, ids, pending.positions)

    def reset(self) -> None:
        for slot in range(self.info.slots):
            self.close_slot(slot)
        self._slots.reset()
        if self.adapters is not None:
            self.adapters.reset()
        self._computed = self._host_rows.forwarded()

    def sleep(self) -> None:
        """Weights go to pinned host memory, the KV cache goes; the CUDA context, the graphs and their
        activations stay."""
        torch.cuda.synchronize()
        self._storage.leave()

    @torch.inference_mode()
    def wake(self) -> None:
        """Copies the weights back. The graphs stay if the driver has given the same addresses, else they are
        captured again, which takes longer than the copy."""
        began_s = time.monotonic()
        if not self._storage.come_back():
            self._runner.forget()
            self._capture(began_s)

    def close(self) -> None:
        self._compiles.stop()
        if (rows := self.__dict__.get("_host_rows")) is not None:  # None: closed before
            rows.end()
        held = (
            "_cache",
            "_slots",
            "_runner",
            "_storage",
            "_sampling",
            "_host_rows",
            "_masks",
            "_late",
            "copier",
        )
        for name in held:
            self.__dict__.pop(name, None)  # frees the memory


class DeviceSampling:
    """Samples the rows of a step outside its graph: torch does what the kernel does not take, then the kernel
    chooses. A row whose logits are unchanged is read in the model's dtype: it gets the token that the graph
    would draw.

    It has its own scratch memory, since a graph may sample another step at the same time. One thread samples;
    another opens and closes slots."""

    def __init__(self, rows: int, vocab: int, choices: Choices, dtype: torch.dtype) -> None:
        """`dtype`: of the logits as the model gives them."""
        device = choices.seeds.device
        self._choices, self._dtype = choices, dtype
        self.sampler = Sampler(rows, vocab, device, deterministic=False, taken=TAKEN)
        self._outside: dict[int, bool] = {}  # whether logits change, of slots that the graph cannot sample
        self._scratch = scratch(rows, vocab, device)

    def open(self, opened: SlotOpen) -> None:
        """Take over a slot."""
        self.close(opened.slot)
        self.sampler.open(opened)
        changes = self.sampler.has_logit_changes(opened.slot) or bool(opened.processors)
        if changes or opened.logprobs or opened.pooling:
            self._outside[opened.slot] = changes

    def close(self, slot: int) -> None:
        """Forget a slot. Closing an unknown slot does nothing."""
        self.sampler.close(slot)
        self._outside.pop(slot, None)

    def is_outside_graph(self, slots: Iterable[int]) -> bool:
        """Whether a step with these rows is sampled outside its graph."""
        return not self._outside.keys().isdisjoint(slots)

    def choose(self, logits: Tensor, slots: list[int], positions: list[int]) -> Tensor:
        """Columns `ids` and `done` of a StepResult, `[2, rows]` int32; done also has the codes of
        `row_errors`. Row i of `logits` `[rows, vocab]` float32 belongs to `slots[i]`, its token to position
        `positions[i]`."""
        answer = torch.empty(2, len(slots), dtype=torch.int32, device=logits.device)
        prepared = self.sampler.prepare(logits, slots, positions)
        for changed in (False, True):
            rows = [row for row, slot in enumerate(slots) if self._outside.get(slot, False) is changed]
            if not rows:
                continue
            at, spare = _moved(rows, torch.int64, logits.device), [0] * (-len(rows) % 4)
            read = prepared[at] if changed else prepared[at].to(self._dtype)
            # Both columns start at a multiple of 16 bytes: the kernels were compiled for that.
            columns = [[each[row] for row in rows] + spare for each in (slots, positions)]
            named = _moved(columns, torch.int32, logits.device)
            found = torch.empty_like(named)
            choose(read, named[0], named[1], self._choices, self._scratch, found)
            answer[:, at] = found[:, : len(rows)]
            if changed:  # the request's fault if the logits were finite before
                answer[1, at] += (answer[1, at] == INVALID) & logits[at].amax(-1).isfinite()
        self.sampler.remember(slots, answer[0].long())
        return answer


def _moved(values: Sequence[object], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Values on the device. A copy from memory that is not pinned would wait for the forward that is queued
    there, and what samples its rows would be queued only then."""
    return torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda").to(device, non_blocking=True)


def _check_alike(shapes: Shapes, ranks: Ranks) -> None:
    """Raises SetupError for ranks with different numbers of heads: they would choose different graphs and
    wait for each other for ever."""
    heads = ranks.exchange((shapes.heads, shapes.kv_heads))
    if len({*heads}) > 1:
        raise SetupError(
            f"{ranks.size} GPUs would have {heads} query and KV heads each: use a number that divides them"
        )


def _check_same(pending: engine.Pending, ids: Ints) -> None:
    """Raises EngineError if this rank has already chosen other tokens than the driver: it must not continue
    with them."""
    answer, event = pending.answer, pending.forwarded
    if answer is None or event is None or not event.query():  # type: ignore[no-untyped-call]  # torch's
        return
    if (here := answer[0, : len(ids)].tolist()) != list(ids):
        raise EngineError(f"step {pending.plan.step}: the driver chose {list(ids)}, this rank {here}")


def check_compiler() -> None:
    """Raises SetupError if Triton cannot start kernels. It needs a C compiler and maps the compiled module
    from its cache."""
    from triton import knobs

    cache = Path(knobs.cache.dir)
    there = next(folder for folder in (cache, *cache.parents) if folder.exists())
    if os.statvfs(there).f_flag & os.ST_NOEXEC:
        raise SetupError(
            f"Triton's cache {cache} lies on a file system that is mounted noexec, and its kernels cannot be "
            "started from there: set TRITON_CACHE_DIR to a folder on another one"
        )
    if not os.access(there, os.W_OK):
        raise SetupError(
            f"Triton's cache {cache} cannot be written: set TRITON_CACHE_DIR to a folder of this user"
        )
    if not (
        os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang") or any(cache.glob("*/*.so"))
    ):
        raise SetupError(
            "the GPU engine needs a C compiler, with which Triton starts kernels: install gcc and libc6-dev, "
            "or name one in CC"
        )


class CompileWatch:
    """Logs a warning for each kernel that Triton compiles from `start` to `stop`. One a process.

    A request waits a second or more for a compilation. So the warm-up must meet every kernel in every form
    (types, alignments, constants). A kernel from Triton's cache takes milliseconds, but it is reported as
    well: a new machine would have to compile it."""

    def __init__(self) -> None:
        self.kernels: list[str] = []  # in the order of their compilation

    def start(self) -> None:
        """Call it after the warm-up."""
        from triton import knobs

        knobs.compilation.listener = self._on_compiled

    def stop(self) -> None:
        """Call it when the engine ends. The watch of another engine stays."""
        from triton import knobs

        if knobs.compilation.listener == self._on_compiled:
            knobs.compilation.listener = None

    def _on_compiled(self, *, src: Any, metadata: Mapping[str, Any], **more: Any) -> None:
        types = ", ".join(f"{name}: {kind}" for name, kind in src.signature.items() if kind != "constexpr")
        kernel = f"{src.name}[num_warps={metadata.get('num_warps')}]({types})"
        self.kernels.append(kernel)
        log.warning("compiled under a request, the warm-up missed it: %s", kernel)


@dataclass(slots=True)
class _Storage:
    """The memory of one or several tensors; `host` has its bytes while it is away, if they are kept."""

    device: UntypedStorage
    kept: bool
    bytes: int
    address: int
    host: Tensor | None = None


class DeviceStorage:
    """The memory of `kept` tensors, whose contents come back, and of `dropped` ones, which come back as
    zeros. For one thread."""

    def __init__(self, kept: Iterable[Tensor], dropped: Iterable[Tensor]) -> None:
        found: dict[int, _Storage] = {}
        for keep, tensors in ((True, kept), (False, dropped)):
            for storage in (tensor.untyped_storage() for tensor in tensors):
                address = storage.data_ptr()
                found.setdefault(address, _Storage(storage, keep, storage.nbytes(), address))
        self._storages = [found[address] for address in sorted(found)]

    def leave(self) -> None:
        """Free the memory. Pinned memory is kept from one sleep to the next: to pin takes longer than to
        copy."""
        for each in self._storages:
            if each.kept:
                on_gpu = each.device.device.type == "cuda"
                if each.host is None:
                    each.host = torch.empty(each.bytes, dtype=torch.uint8, pin_memory=on_gpu)
                each.host.copy_(_bytes(each.device), non_blocking=True)
        _wait()
        for each in self._storages:
            each.device.resize_(0)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def come_back(self) -> bool:
        """Take the memory again, and return whether all of it has its old addresses. Raises torch's error if
        there is too little."""
        for each in self._storages:
            each.device.resize_(each.bytes)
        for each in self._storages:
            view = _bytes(each.device)
            if each.host is None:
                view.zero_()
            else:
                view.copy_(each.host, non_blocking=True)
        _wait()
        moved = [each for each in self._storages if each.device.data_ptr() != each.address]
        for each in moved:
            each.address = each.device.data_ptr()
        return not moved


def _bytes(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class LateSampling:
    """The steps of one engine that have an `answer`."""

    def __init__(self, queue: Callable[[engine.Pending], engine.Masked]) -> None:
        """`queue` makes the masks of a step and queues its sampling."""
        self._queue = queue
        self._late: engine.Pending | None = None
        self._queued: engine.Pending | None = None  # the last one that was late
        self._one = threading.Lock()  # held while masks are made
        self._recording = threading.Lock()

    def put(self, pending: engine.Pending) -> None:
        """Take over a step whose forward is queued. `flush` comes before the next forward."""
        self._late = pending

    def flush(self, of: engine.Pending | None = None) -> None:
        """Queue the sampling of the step that waits for masks, if there is one, and if it is `of` or that is
        None. An error becomes that step's."""
        with self._one:
            pending = self._late
            if pending is None or pending.late is None or (of is not None and pending is not of):
                return
            self._late, before = None, self._queued
            try:
                if before is not None and before.late is not None and not before.late.recorded.is_set():
                    self._record(before)
                masked = self._queue(pending)
            except Exception as error:  # noqa: BLE001 - `answer` raises it
                pending.late.masked.set_exception(error)
                return
            self._queued = pending
            pending.late.masked.set_result(masked)

    def answer(self, pending: engine.Pending) -> tuple[Answered, engine.Masked]:
        """Wait for a step's ids and append them to its slots' tokens. Returns them, and what the masks took.
        Raises the error of `queue`."""
        if pending.late is None:
            return self._record(pending), (0, {})
        self.flush(pending)
        masked = pending.late.masked.result()
        return self._record(pending), masked

    def _record(self, pending: engine.Pending) -> Answered:
        answer, ready, late = pending.answer, pending.forwarded, pending.late
        assert answer is not None
        assert ready is not None
        ready.synchronize()
        found = Answered.of(answer[:, : len(pending.plan.sample_rows)].tolist())
        with self._recording:
            if late is None or not late.recorded.is_set():
                known, positions = pending.tokens, positions_of(pending, pending.tokens)
                if found.counts:
                    own = [*zip(known, positions, found.counts, strict=True)]
                    known = tuple(tokens for tokens, _, count in own for _ in range(count))
                    positions = [position + i for _, position, count in own for i in range(count)]
                append_sampled(known, found.ids, positions)
            if late is not None:
                late.recorded.set()
        return found


@dataclass(frozen=True, slots=True)
class Answered:
    """The columns of a StepOutput, as the device gives them."""

    ids: list[int]
    done: list[int]
    counts: Sequence[int] = ()
    drafted: Sequence[int] = ()

    @classmethod
    def of(cls, answer: list[list[int]]) -> Answered:
        """The answer of a step: ids and done, or what kernels.drafts.gpu.accept gives."""
        if len(answer) == 2:
            return cls(*answer)
        *columns, counts, done, drafted = answer
        rows = zip(zip(*columns, strict=True), counts, strict=True)
        return cls([token for row, count in rows for token in row[:count]], done, counts, drafted)


def positions_of(pending: engine.Pending, known: Iterable[Sequence[int]]) -> list[int]:
    """The position of the first new token of each sample row. A row at the device's place goes on from the
    tokens that its slot has, which is true when the steps before are recorded."""
    fed, positions = pending.plan.from_device, pending.positions
    if AT_DEVICE not in fed:
        return positions
    rows = zip(pending.plan.sample_rows, positions, known, strict=True)
    return [len(tokens) if fed[row] == AT_DEVICE else position for row, position, tokens in rows]
