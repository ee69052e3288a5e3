"""The torch engine implements Backend: it joins weights, paged KV, slots, forward pass and sampler.

services/executor/build.py builds it for one rank, group/ for several. It also runs on a GPU, as the tests'
reference for the CUDA engine.

The forward pass on a CPU: the embedding, the steps of a model's description, the head of the sampled rows.

On each of several ranks the head computes some of the logits. A stage of a pipeline has some of the layers
and receives the residual from the stage before.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from pkgutil import resolve_name
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import kernels.cpu_jit
from kernels.attention import FP8
from services.executor.checkpoint.kv_cache import KvCache
from services.executor.checkpoint.loader import Loaded, TorchOptions, device_of, grammars_of, info_of, load
from services.executor.checkpoint.weights import gathered_logits
from services.executor.cpu.batch import Batch, BatchBuilder, Slots
from services.executor.cpu.layers import Operators, StepValues, TorchOperators, table
from services.executor.cpu.linear import ROW_TILE, Products
from services.executor.engine import (
    COMPILED,
    WARM_ROWS,
    BackendInfo,
    Copier,
    Drafts,
    Pending,
    Speculation,
    StepOutput,
    adapters_of,
    speculation_of,
    thread_count,
    warm_up_steps,
)
from services.executor.kv_transfer.copiers import CudaCopier, HostCopier
from services.executor.model.description import describe
from services.executor.model.program import (
    REFERENCE,
    Step,
    embedded,
    placed,
    rotations,
    run,
    shaped,
    steps_of,
)
from services.executor.parallel.coroutines import CommThread, ForwardPass, HostSegmentTimer, run_alone
from services.executor.parallel.ranks import SOLO, Ranks
from services.executor.parallel.step_split import NEVER, MicroBatches, split
from services.executor.sampling.grammar import GRAMMARS, HostRows
from services.executor.sampling.sampler import (
    NO_TOKEN,
    Sampler,
    append_sampled,
    end_slots,
    prompt_scores,
    record_choices,
)
from shared.errors import EngineError
from shared.kv_blocks import blocks_for
from shared.messages import AT_DEVICE, Ints, PromptTokens, SlotOpen, StepPlan, ints
from shared.processes import give_back_memory, importing


def build(options: TorchOptions, ranks: Ranks = SOLO) -> TorchBackend:
    """Load the model and allocate the cache; takes seconds. Raises SetupError for options that cannot
    work."""
    if device_of(options.device).type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)  # it plans anew for each context length: 82 ms, not 4
    elif kernels.cpu_jit.available():
        # Numba's import takes a third of a second, while the weights load; `operators_for` waits for its end.
        threading.Thread(target=_import_kernels, daemon=True).start()
    return TorchBackend(options, load(options, ranks))


def _import_kernels() -> None:
    with importing():
        [*map(resolve_name, COMPILED.values())]


class TorchBackend:
    """See services.executor.engine.Backend. Made by `build`."""

    def __init__(self, options: TorchOptions, loaded: Loaded) -> None:
        shapes, weights, cache, context = loaded.shapes, loaded.weights, loaded.cache, loaded.context
        device, exact, follows = weights.norm.device, options.deterministic, bool(GRAMMARS)
        self._options, self._files = options, loaded.files
        alone = device.type == "cpu" and loaded.ranks.size * loaded.stage.count == 1
        self.info: BackendInfo = replace(
            info_of(options, loaded),
            sleeps=alone,
            follows_grammars=follows,
            reports_grammars=follows,
            scores_prompts=loaded.ranks.size * loaded.stage.count == 1,
        )
        self._scored: dict[int, SlotOpen] = {}  # slots whose prompts have log probabilities
        self._samples = loaded.stage.last
        self._comm_thread = CommThread() if options.overlap_comm != "off" and loaded.ranks.size > 1 else None
        if self._comm_thread is not None:  # collectives use the computing cores: split only where a plan asks
            self.info = replace(self.info, two_stream_tokens=NEVER)
        self._cache = cache
        kinds = operators_for(cache, deterministic=exact)
        places = options.lora_places if alone else 0
        self.adapters = adapters_of(
            "cpu", places, shapes, weights.norm.dtype, places, options.lora_rank, options.slots
        )
        if self.adapters is not None:
            self.info = replace(self.info, adapter_places=places)
        self._model = Model(loaded, kinds, deterministic=exact, adapters=self.adapters)
        torch.set_num_threads(loaded.threads)  # they compute; fewer may have laid out the weights
        self._slots = Slots(options.slots, blocks_for(context, cache.block_tokens), cache.spare, context)
        self._sampler = Sampler(options.slots, shapes.vocab, device, deterministic=exact)
        self._host_rows = HostRows(options.processors, grammars_of(options, self.info), device)
        forced = partial(self._host_rows.forced, self._slots.tokens) if alone else None
        self._speculation = speculation_of(self._slots.tokens, forced) if options.max_drafts else None
        if self._speculation is not None:
            self.info = replace(self.info, max_drafts=min(options.max_drafts, self._speculation.max_drafts))
        self._batches = BatchBuilder(
            self._slots, cache, deterministic=exact, sequences=kinds.sequences, adapters=self.adapters
        )
        self._computed: torch.cuda.Event | None = None  # the end of the last forward, on a GPU
        on_gpu = device.type == "cuda"
        fixed = on_gpu or options.threads or exact or loaded.ranks.size * loaded.stage.count > 1
        fixed = fixed or isinstance(kinds, TorchOperators)  # its attention's bits depend on the threads
        self._threads = None if fixed else thread_count()
        self.copier: Copier = CudaCopier(cache, lambda: self._computed) if on_gpu else HostCopier(cache)

    def warm_up(self) -> None:
        self._model.compile_products(min(WARM_ROWS, self.info.max_step_tokens))
        for opened, plans in warm_up_steps(self.info):
            self.open_slot(opened)
            for plan in plans:
                pending = self.forward(plan)
                if self._samples:
                    self.sample(pending)
        self.reset()

    def open_slot(self, opened: SlotOpen) -> None:
        self._slots.open(opened)
        self._scored.pop(opened.slot, None)
        if opened.prompt_logprobs:
            self._scored[opened.slot] = opened
        self._sampler.open(opened)
        self._host_rows.open(opened)
        if self.adapters is not None:
            self.adapters.open(opened)
        if self._speculation is not None:
            self._speculation.open(opened)

    def close_slot(self, slot: int) -> None:
        if self._speculation is not None:
            self._speculation.close(slot)
        self._scored.pop(slot, None)
        self._slots.close(slot)
        self._sampler.close(slot)
        self._host_rows.close(slot)

    def forward(self, plan: StepPlan) -> Pending:
        began_ns = time.monotonic_ns()
        pending = self._forward(plan)
        if self._threads is not None and plan.slots:
            self._threads.observe(sum(pending.plan.counts), (time.monotonic_ns() - began_ns) // 1000)
            if torch.get_num_threads() != self._threads.now:
                torch.set_num_threads(self._threads.now)
        return pending

    @torch.inference_mode()
    def _forward(self, plan: StepPlan) -> Pending:
        self._slots.apply_tables(plan)
        self._cache.copy(plan.copy_from, plan.copy_to)
        if not plan.slots:
            return Pending(plan=plan, forwarded=self._host_rows.forwarded())
        drafts = None
        if self._speculation is not None and AT_DEVICE in plan.from_device:
            plan, drafts = self._speculation.spread(plan, lambda slot: bool(self._slots.done[slot]))
        whole = drafts is not None or not plan.two_stream
        if not whole and self._comm_thread is not None and (parts := split(plan)) is not None:
            return self._forward_micro_batches(plan, parts, self._comm_thread)
        batch = self._batches.build(plan, drafts)
        logits, hidden, rows = self._model.forward(batch, self._cache.tensor)
        prompts: tuple[PromptTokens, ...] = ()
        if self._scored and rows is not None and not self._scored.keys().isdisjoint(plan.slots):
            prompts = prompt_scores(
                plan, batch.first, self._scored, lambda some: self._model.logits(rows[some])
            )
        return Pending(
            plan=plan,
            logits=logits,
            hidden=hidden,
            padding_rows=batch.padding,
            forwarded=self._host_rows.forwarded(),
            drafts=drafts,
            prompts=prompts,
        )

    def _forward_micro_batches(self, plan: StepPlan, parts: MicroBatches, comm_thread: CommThread) -> Pending:
        batches = [self._batches.build(micro_batch) for micro_batch in (parts.first, parts.second)]
        order, timer = torch.tensor(parts.order, dtype=torch.int64), HostSegmentTimer()
        kv = self._cache.tensor
        logits, hidden = self._model.forward_micro_batches(
            batches, order, kv, lambda forward_passes: comm_thread.run_interleaved(forward_passes, timer)
        )
        padding = sum(batch.padding for batch in batches)
        return Pending(plan=plan, logits=logits, hidden=hidden, padding_rows=padding, segments=timer.segments)

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
        positions = pending.positions
        with self._host_rows.overlapping(pending.forwarded):
            if pending.drafts is not None and self._speculation is not None:
                return self._sample_drafts(self._speculation, pending, pending.drafts, logits)
            chosen, host_us, failures = self._host_rows.choose(
                self._sampler, logits, slots, positions, self._slots.tokens
            )
            end_slots(self._slots.done, [slots[row] for row in failures])
            ids, done, flaws = self._slots.advance(slots, chosen, positions)
            output = StepOutput(
                ids=ids,
                done=done,
                padding_rows=pending.padding_rows,
                host_us=host_us,
                row_errors=tuple((flaws | failures).items()),
                segments=pending.segments(),
            )
            output = self._sampler.with_vectors(output, pending.hidden, slots)
            return self._sampler.with_logprobs(output, logits, chosen, slots)

    def _sample_drafts(
        self, speculation: Speculation, pending: Pending, drafts: Drafts, logits: Tensor
    ) -> StepOutput:
        """Sample a step whose `pending.plan` has a row for each draft."""
        slots, positions, host_us = list(pending.plan.sample_slots), pending.positions, 0
        at_once: Tensor | None = None  # without work that needs the tokens before
        if not (self._host_rows.has_work(slots) or self._sampler.has_penalties(slots)):
            at_once = self._sampler.choose(logits, slots, positions)
        kept, tokens = list[int](), list[int]()  # rows with a token

        def choose(rows: list[int], first: bool) -> tuple[Ints, Ints, dict[int, str]]:
            nonlocal host_us
            its, places = [slots[row] for row in rows], [positions[row] for row in rows]
            failures: dict[int, str] = {}
            if at_once is not None:
                chosen = at_once[rows]
            else:
                chosen, took_us, failures = self._host_rows.choose(
                    self._sampler, logits[rows], its, places, self._slots.tokens
                )
                host_us += took_us
            if first:
                end_slots(self._slots.done, [its[at] for at in failures])
            failures |= (
                {} if first else {at: "later" for at, token in enumerate(chosen.tolist()) if token < 0}
            )
            sound = [at for at in range(len(rows)) if first or at not in failures]
            ids, done = ints([NO_TOKEN]) * len(rows), ints([2]) * len(rows)
            found, ended, flaws = self._slots.advance(
                [its[at] for at in sound], chosen[sound], [places[at] for at in sound]
            )
            for at, token, end in zip(sound, found, ended, strict=True):
                ids[at], done[at] = token, end
                kept.append(rows[at])
                tokens.append(token)
            return ids, done, {sound[at]: why for at, why in flaws.items()} | failures

        runs = speculation.choose(drafts, choose)
        output = StepOutput(
            ids=ints([token for run in runs.ids for token in run]),
            done=runs.done,
            padding_rows=pending.padding_rows,
            host_us=host_us,
            row_errors=tuple(runs.errors.items()),
            counts=ints([len(run) for run in runs.ids]),
            drafted=drafts.counts,
        )
        order = sorted(range(len(kept)), key=kept.__getitem__)
        kept, tokens = [kept[at] for at in order], [tokens[at] for at in order]
        return self._sampler.with_logprobs(
            output, logits[kept], torch.tensor(tokens), [slots[row] for row in kept]
        )

    def record_choices(self, pending: Pending, ids: Ints, done: Ints, counts: Ints) -> None:
        """See services.executor.group.driver.RankBackend."""
        self._computed = pending.forwarded
        slots, positions = list(pending.plan.sample_slots), pending.positions
        if not slots:
            return
        of_rows, last_ids = slots, ids
        if (
            counts and pending.drafts is not None
        ):  # a row for each draft, of which the first `counts` are kept
            begins = [0, *accumulate(1 + drafts for drafts in pending.drafts.counts)]
            kept = [begin + nth for begin, count in zip(begins, counts, strict=False) for nth in range(count)]
            of_rows = [slots[begin] for begin in begins[:-1]]
            last_ids = ints([ids[end - 1] for end in accumulate(counts)])
            slots, positions = [slots[row] for row in kept], [positions[row] for row in kept]
        last, ended = torch.from_numpy(self._slots.last_token), torch.from_numpy(self._slots.done)
        record_choices(last, ended, of_rows, last_ids, done)
        append_sampled(map(self._slots.tokens, slots), ids, positions)

    def reset(self) -> None:
        for slot in range(self.info.slots):
            self.close_slot(slot)
        self._computed = self._host_rows.forwarded()
        if self.adapters is not None:
            self.adapters.reset()

    def sleep(self) -> None:
        """Drops the weights, which the model's file has, and the memory of the blocks. Compiled kernels and
        imports stay."""
        self.__dict__.pop("_model")
        self._cache.drop()
        give_back_memory()

    def wake(self) -> None:
        """Reads the weights again, most often from the page cache of the operating system."""
        loaded, exact = load(self._options), self._options.deterministic
        if (loaded.fingerprint, loaded.files) != (self.info.fingerprint, self._files):
            raise EngineError(f"the weights of {self.info.model} have changed while it was asleep")
        kinds = operators_for(self._cache, deterministic=exact)
        self._model = Model(loaded, kinds, deterministic=exact, adapters=self.adapters)
        torch.set_num_threads(loaded.threads if self._threads is None else self._threads.now)
        self._model.compile_products(min(WARM_ROWS, self.info.max_step_tokens))

    def close(self) -> None:
        if (rows := self.__dict__.get("_host_rows")) is not None:  # None: closed before
            rows.end()
        if self._comm_thread is not None:
            self._comm_thread.close()
        for name in ("_model", "_cache", "_batches", "_slots", "_sampler", "_host_rows", "copier"):
            self.__dict__.pop(name, None)  # frees the memory


log = logging.getLogger("headrace.executor")

RunInterleaved = Callable[[Sequence[ForwardPass]], list[Tensor]]


class Model:
    """A model on its device, for one thread in `torch.inference_mode`."""

    def __init__(
        self, loaded: Loaded, operators: Operators, *, deterministic: bool = False, adapters: Any = None
    ) -> None:
        """`deterministic`: on a CPU the bits of a row's logits do not depend on the other rows. `adapters`:
        those of the slots. Takes the layers out of `loaded.weights`."""
        shapes, weights, stage = loaded.shapes, loaded.weights, loaded.stage
        self._shapes, self._ranks, self._stage = shapes, loaded.ranks, stage
        self._like, device = weights.norm, weights.norm.device
        products = Products(weights.norm.dtype, device, deterministic=deterministic, kept_in=loaded.kept_in)
        self._head = None
        if stage.last:
            self._head = products.linear(weights.head, dtype=torch.float32, sensitive=True)
        operations = placed(describe(shapes), weights.layers, weights.norms)
        takes = table(products, operators, deterministic=deterministic, adapters=adapters)
        self._steps = steps_of(operations, takes, REFERENCE)
        self._at_once: Step | None = None  # all steps but the first norm in one call, if the kernels can
        if loaded.ranks.size == 1:
            self._at_once = operators.at_once(
                [step for step, _ in self._steps[1:]], shapes.layers, self._head
            )
        self._embedding = weights.embedding.for_rows()
        self._deterministic = deterministic
        self._products = products
        self._rotations = rotations(shapes, loaded.context, device)

    def compile_products(self, most_rows: int) -> None:
        """Compile the kernels of the products for up to `most_rows` rows, so that no step waits for them."""
        self._products.compile(most_rows, self._like)

    def forward(self, batch: Batch, kv: Tensor) -> tuple[Tensor, Tensor, Tensor] | tuple[None, None, None]:
        """Writes the KV of all rows. Returns the logits of the sampled rows, `[samples, vocab]` float32,
        their hidden states, `[samples, hidden]`, and those of all token rows, which the next step
        overwrites; None on any stage but the last."""
        values = self._inputs(batch, kv)
        x = run_alone(self._layers(values))
        if not self._stage.last:
            self._stage.send(values.residual.clone())  # while it is sent, the next step overwrites it
            return None, None, None
        found = x[batch.sampled]
        if values.logits is None:
            return self.logits(found), found, x
        return shaped(values.logits, self._shapes), found, x

    def forward_micro_batches(
        self, micro_batches: Sequence[Batch], order: Tensor, kv: Tensor, run_interleaved: RunInterleaved
    ) -> tuple[Tensor, Tensor]:
        """The same for a split step, in the `order` of parallel/step_split.py."""
        computed = run_interleaved([self._layers(self._inputs(batch, kv)) for batch in micro_batches])
        rows = [x[batch.sampled] for x, batch in zip(computed, micro_batches, strict=True)]
        found = torch.cat(rows)[order]
        return self.logits(found), found

    def _inputs(self, batch: Batch, kv: Tensor) -> StepValues:
        """The embedding of the tokens, or what the stage before has computed."""
        shapes = self._shapes
        if self._stage.first:
            residual = embedded(self._embedding.rows(batch.ids).values, shapes)
        else:
            residual = self._stage.receive(self._like.new_empty(len(batch.ids), shapes.hidden))
        turns = [table[batch.positions] for table in self._rotations]
        return StepValues(residual, residual, turns, batch, kv)

    def _layers(self, values: StepValues) -> ForwardPass:
        """The head's input for all rows."""
        if self._at_once is not None:
            self._steps[0][0](values)
            self._at_once(values)
        else:
            yield from run(self._steps, values, self._ranks, self._ranks.size)
        return values.x

    def logits(self, chosen: Tensor) -> Tensor:
        """The logits of hidden states, `[rows, vocab]` float32."""
        assert self._head is not None, "only the last stage has it"
        samples = len(chosen)
        if self._deterministic:
            chosen = F.pad(chosen, (0, 0, 0, -samples % ROW_TILE))
        found = gathered_logits(self._head(chosen)[:samples], self._shapes.vocab, self._ranks).float()
        return shaped(found, self._shapes)


def operators_for(cache: KvCache, *, deterministic: bool) -> Operators:
    """The fastest operators that work on this cache."""
    on_cpu = cache.tensor.device.type == "cpu"
    if on_cpu and cache.tensor.dtype != FP8:  # no kernel here reads fp8
        if not kernels.cpu_jit.available():
            log.warning("no Numba: torch's operators compute attention and norms, several times slower")
            return TorchOperators(deterministic=deterministic)
        for kind in map(resolve_name, COMPILED.values()):
            if kind.can_attend(cache.tensor, cache.activations):
                return kind()  # type: ignore[no-any-return]  # found by its name
    return TorchOperators(deterministic=deterministic)
