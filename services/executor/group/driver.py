"""The leader of a group drives several ranks as one engine behind the Backend protocol, by orders.

    device thread:  SlotOpen, StepPlan, ... ──▶ orders ──▶ followers        then the same here
    who samples:    ids chosen here         ──▶ Took   ──▶ followers        before the result is delivered

Where ranks share the layers only the leader chooses tokens that need the host (processors, grammars,
penalties); on a GPU the others are chosen on every rank at once, from the same bits. What was chosen always
reaches the followers' records before anything that builds on it, for the leader sends in the order in which
it does things itself.

Where ranks are stages the last one chooses all tokens (worker.SampleThread), and the leader hears of them:

    device thread:  StepPlan ──▶ orders ──▶ stages; the first layers here, and on to the next plan
    who samples:    waits    ◀── Sampled ── last stage
                    Took     ──▶ orders ──▶ stages between

The orders are the types of `Order`, the scheduler's SlotOpen and StepPlan among them. A follower is told
nothing else, and hears neither NATS nor the scheduler, so that all ranks see one sequence of plans, slots and
resets, whatever is lost, repeated or refused on the way to the leader.
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
    GiveWay,
    Pending,
    StepOutput,
    TellGrammar,
    at_once,
    nobody,
)
from services.executor.parallel.ranks import LEADER, Ranks, join, meeting
from shared.errors import EngineError, SetupError
from shared.messages import GrammarFailed, GrammarReady, Ints, SlotOpen, StepPlan
from shared.processes import module_command, with_import_path

log = logging.getLogger("headrace.executor")

END_WITHIN_S = 5.0
LAST_WORDS_S = 2.0  # for those of a rank that is at its end


@dataclass(frozen=True, slots=True)
class Join:
    """The first order: which rank to be, of how many, and the port of the store where they meet."""

    options: TorchOptions
    rank: int
    size: int
    port: int


@dataclass(frozen=True, slots=True)
class Close:
    """Forget a slot."""

    slot: int


@dataclass(frozen=True, slots=True)
class Took:
    """What was chosen in a step: columns as in StepResult."""

    step: int
    ids: Ints
    done: Ints


@dataclass(frozen=True, slots=True)
class Failed:
    """A step that the leader could not compute, before any rank needed another, or could not sample."""

    step: int


class Do(Enum):
    """Orders without more to say."""

    WARM_UP = "warm up"
    RESET = "reset"
    END = "end"


@dataclass(frozen=True, slots=True)
class Attach:
    """Map this arena, and answer."""

    name: str
    generation: int


@dataclass(frozen=True, slots=True)
class Move:
    """Copy this rank's part of blocks to or from the arena, where the whole blocks begin at `offsets`."""

    to_arena: bool
    blocks: Sequence[int]
    offsets: Sequence[int]


class Copies(Enum):
    """Orders about copies without more to say. Each is answered."""

    FINISH = "finish"
    DETACH = "detach"


CopyOrder = Attach | Move | Copies
Order = Join | SlotOpen | Close | StepPlan | Took | Failed | Do | CopyOrder


@dataclass(frozen=True, slots=True)
class Answer:
    """Of one follower to Attach or Copies: the time as Copier.finish gives it, or what went wrong."""

    took_us: int = 0
    error: str = ""


@dataclass(frozen=True, slots=True)
class Sampled:
    """Of the last stage of a pipeline, unasked: what it chose in a step, or what went wrong."""

    step: int
    output: StepOutput | None
    error: str = ""


@dataclass(frozen=True, slots=True)
class Gone:
    """A follower's last words."""

    why: str


class RankBackend(Backend, Protocol):
    """An engine that can be one rank of several."""

    def take(self, pending: Pending, ids: Ints, done: Ints) -> None:
        """Instead of `sample`: remember what the leader has chosen, columns as in StepResult. Does not wait
        for the device."""


BuildRank = Callable[[TorchOptions, Ranks], RankBackend]


def build_group(
    options: TorchOptions,
    size: int,
    lost: Callable[[str], None],
    environment: Mapping[str, str] | None = None,
) -> GroupBackend:
    """Start the other ranks, with `environment` besides this process's, and become their leader; takes
    seconds. `lost` is called on some thread when one is gone: nothing returns then. Raises SetupError."""
    device = device_of(options.device)
    store = meeting(size)
    members = Members(size - 1, environment or {}, lost, options.tell)
    bare = replace(options, processors={}, device=device.type, tell=nobody)
    members.tell_each([Join(bare, rank, size, store.port) for rank in range(1, size)])
    with ExitStack() as undo:
        undo.callback(members.end)
        ordered, sums = options.deterministic, not options.pipeline
        try:
            ranks = join(
                LEADER, size, store, device, ordered=ordered, sums=sums, gone=lambda: members.why_gone
            )
            undo.callback(ranks.close)
            own = rank_builder(device.type)(options, ranks)
            group = GroupBackend(own, members, ranks, pipeline=options.pipeline)
        except RuntimeError as error:  # a sum without one of them
            if why := members.why(LAST_WORDS_S):
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

    The ranks of a pipeline are stages, the leader the first, and the last one samples. As many steps as there
    are stages may be between `forward` and `sample`, each in another stage."""

    def __init__(self, own: RankBackend, members: Members, ranks: Ranks, *, pipeline: bool) -> None:
        self._own, self._members, self._ranks, self._pipeline = own, members, ranks, pipeline
        sizes = ranks.exchange(own.info.bytes_per_block)
        stages = ranks.size if pipeline else own.info.stages
        self._info = replace(own.info, bytes_per_block=sum(sizes), stages=stages)
        self._copier: Copier = GroupCopier(own.copier(), members, ranks.size)

    @property
    def info(self) -> BackendInfo:
        return self._info

    def warm_up(self) -> None:
        self._members.tell(Do.WARM_UP)
        self._own.warm_up()
        self._info = replace(self._info, two_stream_tokens=self._own.info.two_stream_tokens)

    def open_slot(self, opened: SlotOpen) -> None:
        bare = for_followers(opened)
        if self._pipeline:
            self._members.tell_each([*[bare] * (self._ranks.size - 2), opened])
            self._own.open_slot(bare)
        else:
            self._members.tell(bare)
            self._own.open_slot(opened)

    def close_slot(self, slot: int) -> None:
        self._members.tell(Close(slot))
        self._own.close_slot(slot)

    def forward(self, plan: StepPlan) -> Pending:
        self._members.tell(plan)
        try:
            return self._own.forward(plan)
        except EngineError:  # of the plan itself: every rank has refused it
            self._members.tell(Failed(plan.step))
            raise
        except Exception as error:  # noqa: BLE001 - wherever it was, the others wait there
            self._members.give_up(f"step {plan.step} failed on the leader: {type(error).__name__}: {error}")

    def sample(self, pending: Pending) -> StepOutput:
        told: Order = Failed(pending.plan.step)
        try:
            output = self._chosen(pending)
            told = Took(pending.plan.step, output.ids, output.done)
        finally:
            self._members.tell(told)
        return output

    def _chosen(self, pending: Pending) -> StepOutput:
        if not self._pipeline:
            return self._own.sample(pending)
        found = self._members.sampled()
        assert found.step == pending.plan.step, "steps leave the last stage in order, and each one leaves"
        if found.output is None:
            raise EngineError(found.error)
        self._own.take(pending, found.output.ids, found.output.done)
        return found.output

    def copier(self) -> Copier:
        return self._copier

    def reset(self) -> None:
        self._members.tell(Do.RESET)
        self._own.reset()

    def close(self) -> None:
        self._members.end()
        self._own.close()
        self._ranks.close()


def for_followers(opened: SlotOpen) -> SlotOpen:
    """A slot without what only the rank that samples runs. Its rows stay such as a kernel does not sample."""
    if not (opened.processors or opened.grammar):
        return opened
    return replace(opened, processors=(), grammar="", logprobs=max(1, opened.logprobs))


class Members:
    """The followers of one leader: their processes, what they are told, and their end.

        leader ── orders ──▶ rank 1, rank 2, ...      one pipe each; a closed pipe ends the follower
               ◀─ answers ──                          its end, however it comes, is the end of the group

    A group lives and dies as one. A rank that is gone cannot be replaced: the KV of every sequence is cut
    across all ranks, and the others may be waiting for that rank in the middle of a sum, on a GPU for ever.

    `tell` may be called by any thread, `answers` by one at a time."""

    def __init__(
        self,
        count: int,
        environment: Mapping[str, str],
        lost: Callable[[str], None],
        tell_grammar: TellGrammar = nobody,
    ) -> None:
        """Start them. `lost` is called once, on a thread of its own, when one is gone before `end`;
        `tell_grammar` there, too, with what the last stage says of grammars."""
        self._lost, self._tell_grammar = lost, tell_grammar
        self._over = False  # lost or ended
        self.why_gone = ""  # one of them, before `end`
        self._is_gone = threading.Event()
        self._telling = threading.Lock()
        self._answers: queue.SimpleQueue[Answer | EngineError] = queue.SimpleQueue()
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

    def tell(self, order: Order) -> None:
        """Send an order to all; they have those of one thread in order."""
        data = ForkingPickler.dumps(order)
        with self._telling:
            for pipe in self._pipes:
                self._send(pipe, data)

    def tell_each(self, orders: list[Order]) -> None:
        """Send each follower its own order."""
        with self._telling:
            for pipe, order in zip(self._pipes, orders, strict=True):
                self._send(pipe, ForkingPickler.dumps(order))

    def answers(self) -> int:
        """Wait for an answer of each; the longest time of them. Raises EngineError for an error in any, or
        once one is gone."""
        found = [self._answer() for _ in self._pipes]
        if errors := [answer.error for answer in found if answer.error]:
            raise EngineError(errors[0])
        return max(answer.took_us for answer in found)

    def sampled(self) -> Sampled:
        """Wait for the last stage's next step. Never returns once one is gone, as `give_up`."""
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
        self.tell(Do.END)
        for process in self._processes:
            try:
                process.wait(END_WITHIN_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _answer(self) -> Answer:
        answer = self._answers.get()
        if isinstance(answer, EngineError):
            self._answers.put(answer)  # for whoever asks next
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
                    said = pipe.recv()
                except (EOFError, OSError):
                    said = Gone("its process has ended")
                if isinstance(said, Answer):
                    self._answers.put(said)
                elif isinstance(said, Sampled):
                    self._sampled.put(said)
                elif isinstance(said, GrammarReady | GrammarFailed):
                    self._tell_grammar(said)
                else:
                    self._gone(f"rank {ranks[pipe]} is gone: {said.why}")
                    return

    def _gone(self, why: str) -> None:
        if self._over:
            return
        self._over, self.why_gone = True, why
        self._is_gone.set()
        for process in self._processes:
            process.kill()
        self._answers.put(EngineError(why))
        self._lost(why)


class GroupCopier:
    """The leader's copier: every rank copies its part of each block to and from the arena. See
    services.executor.engine.Copier.

        a block in the arena:  [rank][layer][K|V][token][kv_head of that rank][head_dim]

    For the tiers a block is one thing, of the bytes of all ranks: a copy has ended when it has on every rank,
    and failed if it has on any. So a block is in a tier whole or not at all."""

    def __init__(self, own: Copier, members: Members, size: int) -> None:
        self._own, self._members = own, members
        self.piece_bytes = size * own.piece_bytes

    def attach(self, arena: Arena, give_way: GiveWay = at_once) -> None:
        self._members.tell(Attach(arena.name, arena.generation))
        try:
            self._with_all(lambda: self._own.attach(arena, give_way))
        except Exception:
            self.detach()
            raise

    def detach(self) -> None:
        self._members.tell(Copies.DETACH)
        self._with_all(self._own.detach)

    def store(self, blocks: Sequence[int], offsets: Sequence[int]) -> None:
        self._members.tell(Move(True, blocks, offsets))
        self._own.store(blocks, offsets)

    def load(self, blocks: Sequence[int], offsets: Sequence[int]) -> None:
        self._members.tell(Move(False, blocks, offsets))
        self._own.load(blocks, offsets)

    def finish(self) -> int:
        self._members.tell(Copies.FINISH)
        return self._with_all(self._own.finish)

    def _with_all(self, here: Callable[[], int | None]) -> int:
        """Do it here, too, and wait for all; the longest time. An error here must not leave answers behind,
        which would be taken for those of the next order."""
        try:
            own_us = here()
        finally:
            others_us = self._members.answers()
        return max(own_us or 0, others_us)


class PartCopier:
    """A follower's copier: its part lies `before` bytes into each block in the arena."""

    def __init__(self, own: Copier, before: int) -> None:
        self._own, self._before = own, before
        self._arena: Arena | None = None
        self._flaw = ""  # of a move since the last finish; an error itself would keep a view of the arena

    def attach(self, name: str, generation: int, give_way: GiveWay = at_once) -> None:
        """Map an arena. Raises ArenaError, or what the device's driver says."""
        arena = Arena(name, generation)
        try:
            self._own.attach(arena, give_way)
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

    def move(self, order: Move) -> None:
        """Copy; what goes wrong is kept for `finish`."""
        try:
            copy = self._own.store if order.to_arena else self._own.load
            copy(order.blocks, [offset + self._before for offset in order.offsets])
        except Exception as error:  # noqa: BLE001 - the leader asks for it
            self._flaw = f"{type(error).__name__}: {error}"

    def finish(self) -> int:
        """As Copier.finish. Raises EngineError for what a move since the last one has met."""
        took_us = self._own.finish()
        flaw, self._flaw = self._flaw, ""
        if flaw:
            raise EngineError(flaw)
        return took_us
