"""The driver of a group drives several ranks as one engine behind the Backend protocol, by commands.

    device thread:  SlotOpen, StepPlan, ... ──▶ commands ──▶ workers        then the same here
    who samples:    ids chosen here         ──▶ SetSampled ──▶ workers        before the result is delivered

Where ranks share the layers only the driver chooses tokens that need the host (processors, grammars,
penalties); on a GPU the others are chosen on every rank at once, from the same bits. What was chosen always
reaches the workers' records before anything that builds on it, for the driver sends in the order in which
it does things itself.

Where ranks are stages the last one chooses all tokens (worker.SampleThread), and the driver gets them:

    device thread:  StepPlan ──▶ commands ──▶ stages; the first layers here, and on to the next plan
    who samples:    waits    ◀── Sampled ── last stage
                    SetSampled ──▶ commands ──▶ stages between

The commands are the types of `Command`, the scheduler's SlotOpen and StepPlan among them. A worker is told
nothing else, and hears neither NATS nor the scheduler, so that all ranks see one sequence of plans, slots and
resets, whatever is lost, repeated or refused on the way to the driver.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import queue
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from enum import Enum
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from typing import NoReturn, Protocol

from services.executor.arena import Arena
from services.executor.checkpoint.loader import TorchOptions, device_of
from services.executor.engine import (
    Backend,
    BackendInfo,
    Copier,
    Pending,
    ReportGrammar,
    StepOutput,
    YieldDevice,
    ignore_grammar_news,
    no_yield,
)
from services.executor.parallel.ranks import DRIVER, Ranks, join, rendezvous
from shared.errors import EngineError, SetupError
from shared.messages import GrammarFailed, GrammarReady, Ints, SlotOpen, StepPlan
from shared.processes import module_command, with_import_path

log = logging.getLogger("headrace.executor")

END_TIMEOUT_S = 5.0
LAST_ERROR_S = 2.0  # for those of a rank that is at its end


@dataclass(frozen=True, slots=True)
class JoinGroup:
    """The first order: which rank to be, of how many, and the port of the store where they meet."""

    options: TorchOptions
    rank: int
    size: int
    port: int


@dataclass(frozen=True, slots=True)
class CloseSlot:
    """Forget a slot."""

    slot: int


@dataclass(frozen=True, slots=True)
class SetSampled:
    """What was chosen in a step: columns as in StepResult."""

    step: int
    ids: Ints
    done: Ints


@dataclass(frozen=True, slots=True)
class DropStep:
    """A step that the driver could not compute, before any rank needed another, or could not sample."""

    step: int


class Control(Enum):
    """Commands without more to say."""

    WARM_UP = "warm up"
    RESET = "reset"
    END = "end"


@dataclass(frozen=True, slots=True)
class AttachArena:
    """Map this arena, and answer."""

    name: str
    generation: int


@dataclass(frozen=True, slots=True)
class MoveBlocks:
    """Copy this rank's part of blocks to or from the arena, where the whole blocks begin at `offsets`."""

    to_arena: bool
    blocks: Sequence[int]
    offsets: Sequence[int]


class CopyControl(Enum):
    """Commands about copies without more to say. Each is answered."""

    FINISH = "finish"
    DETACH = "detach"


CopyCommand = AttachArena | MoveBlocks | CopyControl
Command = JoinGroup | SlotOpen | CloseSlot | StepPlan | SetSampled | DropStep | Control | CopyCommand


@dataclass(frozen=True, slots=True)
class CopyReply:
    """Of one worker to Attach or Copies: the time as Copier.finish gives it, or what went wrong."""

    took_us: int = 0
    error: str = ""


@dataclass(frozen=True, slots=True)
class Sampled:
    """Of the last stage of a pipeline, unasked: what it chose in a step, or what went wrong."""

    step: int
    output: StepOutput | None
    error: str = ""


@dataclass(frozen=True, slots=True)
class LastError:
    """A worker's last words."""

    why: str


class RankBackend(Backend, Protocol):
    """An engine that can be one rank of several."""

    def take(self, pending: Pending, ids: Ints, done: Ints) -> None:
        """Instead of `sample`: remember what the driver has chosen, columns as in StepResult. Does not wait
        for the device."""


BuildRank = Callable[[TorchOptions, Ranks], RankBackend]


def build_group(
    options: TorchOptions,
    size: int,
    lost: Callable[[str], None],
    environment: Mapping[str, str] | None = None,
) -> GroupBackend:
    """Start the other ranks, with `environment` besides this process's, and become their driver; takes
    seconds. `lost` is called on some thread when one is gone: nothing returns then. Raises SetupError."""
    device = device_of(options.device)
    store = rendezvous(size)
    workers = Workers(size - 1, environment or {}, lost, options.report_grammar)
    bare = replace(options, processors={}, device=device.type, report_grammar=ignore_grammar_news)
    workers.send_each([JoinGroup(bare, rank, size, store.port) for rank in range(1, size)])
    with ExitStack() as undo:
        undo.callback(workers.end)
        ordered, sums = options.deterministic, not options.pipeline
        try:
            ranks = join(
                DRIVER, size, store, device, ordered=ordered, sums=sums, gone=lambda: workers.why_gone
            )
            undo.callback(ranks.close)
            own = rank_builder(device.type)(options, ranks)
            group = GroupBackend(own, workers, ranks, pipeline=options.pipeline)
        except RuntimeError as error:  # a sum without one of them
            if why := workers.why(LAST_ERROR_S):
                raise SetupError(why) from error
            raise
        undo.pop_all()
        return group


def rank_builder(device: str) -> BuildRank:
    """The function that builds a rank's engine on such a device."""
    if device == "cuda":
        from services.executor.cuda.engine import build as build_cuda

        return build_cuda
    from services.executor.cpu.engine import build

    return build


class GroupBackend:
    """See services.executor.engine.Backend. Made by `build_group`.

    The ranks of a pipeline are stages, the driver the first, and the last one samples. As many steps as there
    are stages may be between `forward` and `sample`, each in another stage."""

    def __init__(self, own: RankBackend, workers: Workers, ranks: Ranks, *, pipeline: bool) -> None:
        self._own, self._workers, self._ranks, self._pipeline = own, workers, ranks, pipeline
        sizes = ranks.exchange(own.info.bytes_per_block)
        stages = ranks.size if pipeline else own.info.stages
        self._info = replace(own.info, bytes_per_block=sum(sizes), stages=stages)
        self._copier: Copier = GroupCopier(own.copier(), workers, ranks.size)

    @property
    def info(self) -> BackendInfo:
        return self._info

    def warm_up(self) -> None:
        self._workers.send(Control.WARM_UP)
        self._own.warm_up()
        self._info = replace(self._info, two_stream_tokens=self._own.info.two_stream_tokens)

    def open_slot(self, opened: SlotOpen) -> None:
        bare = for_workers(opened)
        if self._pipeline:
            self._workers.send_each([*[bare] * (self._ranks.size - 2), opened])
            self._own.open_slot(bare)
        else:
            self._workers.send(bare)
            self._own.open_slot(opened)

    def close_slot(self, slot: int) -> None:
        self._workers.send(CloseSlot(slot))
        self._own.close_slot(slot)

    def forward(self, plan: StepPlan) -> Pending:
        self._workers.send(plan)
        try:
            return self._own.forward(plan)
        except EngineError:  # of the plan itself: every rank has refused it
            self._workers.send(DropStep(plan.step))
            raise
        except Exception as error:  # noqa: BLE001 - wherever it was, the others wait there
            self._workers.give_up(f"step {plan.step} failed on the driver: {type(error).__name__}: {error}")

    def sample(self, pending: Pending) -> StepOutput:
        command: Command = DropStep(pending.plan.step)
        try:
            output = self._chosen(pending)
            command = SetSampled(pending.plan.step, output.ids, output.done)
        finally:
            self._workers.send(command)
        return output

    def _chosen(self, pending: Pending) -> StepOutput:
        if not self._pipeline:
            return self._own.sample(pending)
        found = self._workers.sampled()
        assert found.step == pending.plan.step, "steps leave the last stage in order, and each one leaves"
        if found.output is None:
            raise EngineError(found.error)
        self._own.take(pending, found.output.ids, found.output.done)
        return found.output

    def copier(self) -> Copier:
        return self._copier

    def reset(self) -> None:
        self._workers.send(Control.RESET)
        self._own.reset()

    def close(self) -> None:
        self._workers.end()
        self._own.close()
        self._ranks.close()


def for_workers(opened: SlotOpen) -> SlotOpen:
    """A slot without what only the rank that samples runs. Its rows stay such as a kernel does not sample."""
    if not (opened.processors or opened.grammar):
        return opened
    return replace(opened, processors=(), grammar="", logprobs=max(1, opened.logprobs))


class Workers:
    """The workers of one driver: their processes, what they are told, and their end.

        driver ── commands ──▶ rank 1, rank 2, ...      one pipe each; a closed pipe ends the worker
               ◀─ answers ──                          its end, however it comes, is the end of the group

    A group lives and dies as one. A rank that is gone cannot be replaced: the KV of every sequence is cut
    across all ranks, and the others may be waiting for that rank in the middle of a sum, on a GPU for ever.

    `tell` may be called by any thread, `replies` by one at a time."""

    def __init__(
        self,
        count: int,
        environment: Mapping[str, str],
        lost: Callable[[str], None],
        report_grammar: ReportGrammar = ignore_grammar_news,
    ) -> None:
        """Start them. `lost` is called once, on a thread of its own, when one is gone before `end`;
        `report_grammar` there, too, with what the last stage says of grammars."""
        self._lost, self._report_grammar = lost, report_grammar
        self._over = False  # lost or ended
        self.why_gone = ""  # one of them, before `end`
        self._is_gone = threading.Event()
        self._send_lock = threading.Lock()
        self._replies: queue.SimpleQueue[CopyReply | EngineError] = queue.SimpleQueue()
        self._sampled: queue.SimpleQueue[Sampled] = queue.SimpleQueue()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._pipes: list[Connection] = []
        for rank in range(1, count + 1):
            ours, theirs = multiprocessing.Pipe()
            process = subprocess.Popen(
                module_command("services.executor.group.worker", str(theirs.fileno()), str(rank)),
                env=with_import_path({**os.environ, **environment}),
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
            )
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)
        threading.Thread(target=self._listen, name="members", daemon=True).start()

    def send(self, order: Command) -> None:
        """Send an order to all; they have those of one thread in order."""
        data = ForkingPickler.dumps(order)
        with self._send_lock:
            for pipe in self._pipes:
                self._send(pipe, data)

    def send_each(self, commands: list[Command]) -> None:
        """Send each worker its own order."""
        with self._send_lock:
            for pipe, order in zip(self._pipes, commands, strict=True):
                self._send(pipe, ForkingPickler.dumps(order))

    def replies(self) -> int:
        """Wait for an answer of each; the longest time of them. Raises EngineError for an error in any, or
        once one is gone."""
        found = [self._reply() for _ in self._pipes]
        if errors := [answer.error for answer in found if answer.error]:
            raise EngineError(errors[0])
        return max(answer.took_us for answer in found)

    def sampled(self) -> Sampled:
        """Wait for the last stage's next step. Never returns once one is gone, as `fail_all`."""
        return self._sampled.get()

    def give_up(self, why: str) -> NoReturn:
        """The group cannot go on: say so, and never return. What the ranks were at has no answer, and a
        sequence whose step fails would be told so, where one whose executor dies goes on elsewhere."""
        self._gone(why)
        threading.Event().wait()
        raise AssertionError("nothing sets that event")

    def why(self, timeout_s: float) -> str:
        """Wait so long for one to be gone; empty when none is."""
        self._is_gone.wait(timeout_s)
        return self.why_gone

    def end(self) -> None:
        """Have them end; kill who does not."""
        if self._over:
            return
        self._over = True
        self.send(Control.END)
        for process in self._processes:
            try:
                process.wait(END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _reply(self) -> CopyReply:
        answer = self._replies.get()
        if isinstance(answer, EngineError):
            self._replies.put(answer)  # for whoever asks next
            raise answer
        return answer

    def _send(self, pipe: Connection, data: memoryview) -> None:
        with contextlib.suppress(OSError):  # whoever is gone is noticed by its end of the pipe
            pipe.send_bytes(data)

    def _listen(self) -> None:
        ranks: dict[object, int] = {pipe: rank for rank, pipe in enumerate(self._pipes, 1)}
        while True:
            for pipe in wait(self._pipes):
                assert isinstance(pipe, Connection), "only pipes are waited for"
                try:
                    done = pipe.recv()
                except (EOFError, OSError):
                    done = LastError("its process has ended")
                if isinstance(done, CopyReply):
                    self._replies.put(done)
                elif isinstance(done, Sampled):
                    self._sampled.put(done)
                elif isinstance(done, GrammarReady | GrammarFailed):
                    self._report_grammar(done)
                else:
                    self._gone(f"rank {ranks[pipe]} is gone: {done.why}")
                    return

    def _gone(self, why: str) -> None:
        if self._over:
            return
        self._over, self.why_gone = True, why
        self._is_gone.set()
        for process in self._processes:
            process.kill()
        self._replies.put(EngineError(why))
        self._lost(why)


class GroupCopier:
    """The driver's copier: every rank copies its part of each block to and from the arena. See
    services.executor.engine.Copier.

        a block in the arena:  [rank][layer][K|V][token][kv_head of that rank][head_dim]

    For the tiers a block is one thing, of the bytes of all ranks: a copy has ended when it has on every rank,
    and failed if it has on any. So a block is in a tier whole or not at all."""

    def __init__(self, own: Copier, workers: Workers, size: int) -> None:
        self._own, self._workers = own, workers
        self.piece_bytes = size * own.piece_bytes

    def attach(self, arena: Arena, yield_device: YieldDevice = no_yield) -> None:
        self._workers.send(AttachArena(arena.name, arena.generation))
        try:
            self._with_all(lambda: self._own.attach(arena, yield_device))
        except Exception:
            self.detach()
            raise

    def detach(self) -> None:
        self._workers.send(CopyControl.DETACH)
        self._with_all(self._own.detach)

    def store(self, blocks: Sequence[int], offsets: Sequence[int]) -> None:
        self._workers.send(MoveBlocks(True, blocks, offsets))
        self._own.store(blocks, offsets)

    def load(self, blocks: Sequence[int], offsets: Sequence[int]) -> None:
        self._workers.send(MoveBlocks(False, blocks, offsets))
        self._own.load(blocks, offsets)

    def finish(self) -> int:
        self._workers.send(CopyControl.FINISH)
        return self._with_all(self._own.finish)

    def _with_all(self, here: Callable[[], int | None]) -> int:
        """Do it here, too, and wait for all; the longest time. An error here must not leave answers behind,
        which would be taken for those of the next order."""
        try:
            own_us = here()
        finally:
            others_us = self._workers.replies()
        return max(own_us or 0, others_us)


class RankCopier:
    """A worker's copier: its part lies `before` bytes into each block in the arena."""

    def __init__(self, own: Copier, before: int) -> None:
        self._own, self._before = own, before
        self._arena: Arena | None = None
        self._error = ""  # of a move since the last finish; an error itself would keep a view of the arena

    def attach(self, name: str, generation: int, yield_device: YieldDevice = no_yield) -> None:
        """Map an arena. Raises ArenaError, or what the device's driver says."""
        arena = Arena(name, generation)
        try:
            self._own.attach(arena, yield_device)
        except Exception:
            arena.close()
            raise
        self._arena = arena

    def detach(self) -> None:
        """Unmap it, if there is one."""
        arena, self._arena = self._arena, None
        if arena is not None:
            self._own.detach()
            arena.close()

    def move(self, order: MoveBlocks) -> None:
        """Copy; what goes wrong is kept for `finish`."""
        try:
            copy = self._own.store if order.to_arena else self._own.load
            copy(order.blocks, [offset + self._before for offset in order.offsets])
        except Exception as error:  # noqa: BLE001 - the driver asks for it
            self._error = f"{type(error).__name__}: {error}"

    def finish(self) -> int:
        """As Copier.finish. Raises EngineError for what a move since the last one has met."""
        took_us = self._own.finish()
        error, self._error = self._error, ""
        if error:
            raise EngineError(error)
        return took_us
