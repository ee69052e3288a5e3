"""The driver of a group runs several ranks as one Backend; it sends commands to the workers (worker.py).

    device thread:    SlotOpen, StepPlan, ... ──▶ commands ──▶ workers        then the same here
    sampling thread:  ids chosen here         ──▶ SetSampled ──▶ workers      before the result is delivered

If ranks share the layers, only the driver chooses tokens that need the host (processors, grammars,
penalties); on a GPU every rank chooses the others, from the same bits. The driver sends commands in the order
of its own work, so the workers have the chosen tokens before any command that needs them.

If ranks are stages of a pipeline, the last stage chooses all tokens (worker.SampleThread):

    device thread:    StepPlan ──▶ commands ──▶ stages; the first layers here, then the next plan
    sampling thread:  waits    ◀── Sampled ── last stage
                      SetSampled ──▶ commands ──▶ stages between

Workers receive only the types of `Command`, and nothing from NATS. So all ranks have one sequence of plans,
slots and resets, also if messages to the driver are lost, repeated or refused.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import queue
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from enum import Enum
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from typing import NoReturn, Protocol

from services.executor import engine
from services.executor.checkpoint.loader import TorchOptions, device_of
from services.executor.parallel.ranks import DRIVER, Ranks, join, rendezvous
from shared.errors import EngineError, SetupError
from shared.messages import GrammarFailed, GrammarReady, Ints, SlotOpen, StepPlan, ints
from shared.processes import module_command, with_import_path

END_TIMEOUT_S = 5.0
LAST_ERROR_S = 2.0  # to wait for the LastError of a dying rank


@dataclass(frozen=True, slots=True)
class JoinGroup:
    """The first command: the worker's rank, the number of ranks, and the port of the driver's store."""

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
    """The tokens chosen in a step: columns as in StepResult."""

    step: int
    ids: Ints
    done: Ints
    counts: Ints = field(default_factory=ints)


@dataclass(frozen=True, slots=True)
class DropStep:
    """A step that all ranks refused, or that could not be sampled."""

    step: int


class Control(Enum):
    """Commands without arguments."""

    WARM_UP = "warm up"
    RESET = "reset"
    END = "end"


@dataclass(frozen=True, slots=True)
class AttachArena:
    """Map this arena; answered by CopyReply."""

    name: str
    generation: int


@dataclass(frozen=True, slots=True)
class MoveBlocks:
    """Copy this rank's part of blocks to or from the arena. `offsets` are those of the whole blocks."""

    to_arena: bool
    blocks: Sequence[int]
    offsets: Sequence[int]


class CopyControl(Enum):
    """Commands about copies without arguments; answered by CopyReply."""

    FINISH = "finish"
    DETACH = "detach"


CopyCommand = AttachArena | MoveBlocks | CopyControl
Command = JoinGroup | SlotOpen | CloseSlot | StepPlan | SetSampled | DropStep | Control | CopyCommand


@dataclass(frozen=True, slots=True)
class CopyReply:
    """A worker's answer to AttachArena or CopyControl: the time of Copier.finish, or an error."""

    took_us: int = 0
    error: str = ""


@dataclass(frozen=True, slots=True)
class Sampled:
    """A step's result from the last stage of a pipeline, or its error."""

    step: int
    output: engine.StepOutput | None
    error: str = ""


@dataclass(frozen=True, slots=True)
class LastError:
    """Why a worker ends."""

    why: str


class RankBackend(engine.Backend, Protocol):
    """An engine that can be one rank of several."""

    def record_choices(self, pending: engine.Pending, ids: Ints, done: Ints, counts: Ints) -> None:
        """In place of `sample`: record the tokens that another rank has chosen, columns as in StepResult.
        Does not wait for the device."""


BuildRank = Callable[[TorchOptions, Ranks], RankBackend]


def build_group(
    options: TorchOptions,
    size: int,
    lost: Callable[[str], None],
    environment: Mapping[str, str] | None = None,
) -> GroupBackend:
    """Start the other ranks, with `environment` added to this process's, and become their driver; takes
    seconds. `lost` is called on any thread when a rank dies: calls of the engine never return then. Raises
    SetupError."""
    device = device_of(options.device)
    store = rendezvous(size)
    workers = Workers(size - 1, environment or {}, lost, options.report_grammar)
    bare = replace(options, processors={}, device=device.type, report_grammar=engine.ignore_grammar_news)
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
        except RuntimeError as error:  # a collective fails when a rank dies
            if why := workers.why(LAST_ERROR_S):
                raise SetupError(why) from error
            raise
        undo.pop_all()
        return group


def rank_builder(device: str) -> BuildRank:
    """The function that builds a rank's engine on a device of this type."""
    return engine.engine_of(device)


class GroupBackend:
    """See services.executor.engine.Backend. Made by `build_group`.

    The ranks of a pipeline are stages: the driver is the first, and the last one samples. As many steps as
    stages may be between `forward` and `sample`, each in another stage."""

    def __init__(self, own: RankBackend, workers: Workers, ranks: Ranks, *, pipeline: bool) -> None:
        self._own, self._workers, self._ranks, self._pipeline = own, workers, ranks, pipeline
        sizes = ranks.exchange(own.info.bytes_per_block)
        stages = ranks.size if pipeline else own.info.stages
        self.info: engine.BackendInfo = replace(own.info, bytes_per_block=sum(sizes), stages=stages)
        self.copier: engine.Copier = GroupCopier(own.copier, workers, ranks.size)

    def warm_up(self) -> None:
        self._workers.send(Control.WARM_UP)
        self._own.warm_up()
        self.info = replace(self.info, two_stream_tokens=self._own.info.two_stream_tokens)

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

    def forward(self, plan: StepPlan) -> engine.Pending:
        self._workers.send(plan)
        try:
            return self._own.forward(plan)
        except EngineError:  # an error of the plan: every rank refuses it
            self._workers.send(DropStep(plan.step))
            raise
        except Exception as error:  # noqa: BLE001 - the other ranks wait for this one
            self._workers.give_up(f"step {plan.step} failed on the driver: {type(error).__name__}: {error}")

    def sample(self, pending: engine.Pending) -> engine.StepOutput:
        command: Command = DropStep(pending.plan.step)
        try:
            output = self._chosen(pending)
            command = SetSampled(pending.plan.step, output.ids, output.done, output.counts)
        finally:
            self._workers.send(command)
        return output

    def _chosen(self, pending: engine.Pending) -> engine.StepOutput:
        if not self._pipeline:
            return self._own.sample(pending)
        found = self._workers.sampled()
        assert found.step == pending.plan.step, "the last stage answers each step, in order"
        if found.output is None:
            raise EngineError(found.error)
        output = found.output
        self._own.record_choices(pending, output.ids, output.done, output.counts)
        return output

    def reset(self) -> None:
        self._workers.send(Control.RESET)
        self._own.reset()

    def close(self) -> None:
        self._workers.end()
        self._own.close()
        self._ranks.close()


def for_workers(opened: SlotOpen) -> SlotOpen:
    """A slot without processors and grammar, which only the sampling rank runs. With `logprobs` its rows
    still are rows that the kernel does not sample."""
    if not (opened.processors or opened.grammar):
        return opened
    return replace(opened, processors=(), grammar="", logprobs=max(1, opened.logprobs))


class Workers:
    """The worker processes of one driver.

        driver ── commands ──▶ rank 1, rank 2, ...      one pipe each; a closed pipe ends the worker
               ◀─ answers ──                            a worker's end is the end of the group

    A dead rank cannot be replaced: every rank has a part of each sequence's KV, and the others may wait for
    the dead rank in a collective, on a GPU for ever.

    Any thread may call `send`, one thread at a time `replies`."""

    def __init__(
        self,
        count: int,
        environment: Mapping[str, str],
        lost: Callable[[str], None],
        report_grammar: engine.ReportGrammar = engine.ignore_grammar_news,
    ) -> None:
        """Start the processes. `lost` is called once, on another thread, when a worker dies before `end`;
        `report_grammar` there, too, with the last stage's reports."""
        self._lost, self._report_grammar = lost, report_grammar
        self._over = False  # lost or ended
        self.why_gone = ""  # why a worker died before `end`
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

    def send(self, command: Command) -> None:
        """Send a command to all workers. They receive the commands of one thread in order."""
        data = ForkingPickler.dumps(command)
        with self._send_lock:
            for pipe in self._pipes:
                self._send(pipe, data)

    def send_each(self, commands: list[Command]) -> None:
        """Send each worker its own command."""
        with self._send_lock:
            for pipe, command in zip(self._pipes, commands, strict=True):
                self._send(pipe, ForkingPickler.dumps(command))

    def replies(self) -> int:
        """Wait for an answer from each worker; their longest time. Raises EngineError for an error in any
        answer, or if a worker dies."""
        found = [self._reply() for _ in self._pipes]
        if errors := [answer.error for answer in found if answer.error]:
            raise EngineError(errors[0])
        return max(answer.took_us for answer in found)

    def sampled(self) -> Sampled:
        """Wait for the last stage's next step. Never returns if a worker dies, like `give_up`."""
        return self._sampled.get()

    def give_up(self, why: str) -> NoReturn:
        """Report that the group cannot continue, and never return: a failed step would end its sequences, but
        those of a dead executor continue on another one."""
        self._on_gone(why)
        threading.Event().wait()
        raise AssertionError("nothing sets that event")

    def why(self, timeout_s: float) -> str:
        """Why a worker died, after at most so long a wait for it; empty if all live."""
        self._is_gone.wait(timeout_s)
        return self.why_gone

    def end(self) -> None:
        """End the workers, and kill those that do not end in time."""
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
            self._replies.put(answer)  # for the next caller
            raise answer
        return answer

    def _send(self, pipe: Connection, data: memoryview) -> None:
        with contextlib.suppress(OSError):  # _listen notices a dead worker
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
                    self._on_gone(f"rank {ranks[pipe]} is gone: {done.why}")
                    return

    def _on_gone(self, why: str) -> None:
        if self._over:
            return
        self._over, self.why_gone = True, why
        self._is_gone.set()
        for process in self._processes:
            process.kill()
        self._replies.put(EngineError(why))
        self._lost(why)


class GroupCopier:
    """The driver's copier: every rank copies its part of each block. See services.executor.engine.Copier.

        a block in the arena:  [rank][layer][K|V][token][kv_head of that rank][head_dim]

    A copy has ended when it has ended on every rank, and has failed if it failed on any. So a tier has whole
    blocks only."""

    def __init__(self, own: engine.Copier, workers: Workers, size: int) -> None:
        self._own, self._workers = own, workers
        self.piece_bytes = size * own.piece_bytes

    def attach(self, arena: engine.Arena, yield_device: engine.YieldDevice = engine.keep_device) -> None:
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
        """Call `here` and wait for all workers; the longest time. The answers are read also after an error
        here: they must not be taken for those of the next command."""
        try:
            own_us = here()
        finally:
            others_us = self._workers.replies()
        return max(own_us or 0, others_us)


class RankCopier:
    """A worker's copier: its part starts `before` bytes into each block in the arena."""

    def __init__(self, own: engine.Copier, before: int) -> None:
        self._own, self._before = own, before
        self._arena: engine.Arena | None = None
        self._error = ""  # of a move since the last finish; an exception would keep a view of the arena

    def attach(
        self, name: str, generation: int, yield_device: engine.YieldDevice = engine.keep_device
    ) -> None:
        """Map an arena. Raises ArenaError, or an error of the device's driver."""
        arena = engine.Arena(name, generation)
        try:
            self._own.attach(arena, yield_device)
        except Exception:
            arena.close()
            raise
        self._arena = arena

    def detach(self) -> None:
        """Unmap the arena, if there is one."""
        arena, self._arena = self._arena, None
        if arena is not None:
            self._own.detach()
            arena.close()

    def move(self, blocks: MoveBlocks) -> None:
        """Copy blocks; `finish` raises the error."""
        try:
            copy = self._own.store if blocks.to_arena else self._own.load
            copy(blocks.blocks, [offset + self._before for offset in blocks.offsets])
        except Exception as error:  # noqa: BLE001 - finish raises it
            self._error = f"{type(error).__name__}: {error}"

    def finish(self) -> int:
        """Like Copier.finish. Raises EngineError for an error of a move since the last finish."""
        took_us = self._own.finish()
        error, self._error = self._error, ""
        if error:
            raise EngineError(error)
        return took_us
