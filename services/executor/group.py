"""An engine of several ranks behind the Backend protocol: the leader's part, and the orders to the others.

    device thread:  SlotOpen, StepPlan, ... ──▶ orders ──▶ followers        then the same here
    who samples:    ids chosen here         ──▶ Took   ──▶ followers        before the result is delivered

Where ranks share the layers only the leader chooses tokens that need the host (processors, grammars,
penalties); on a GPU the others are chosen on every rank at once, from the same bits. What was chosen always
reaches the followers' records before anything that builds on it, for the leader sends in the order in which
it does things itself.

Where they are stages the last one chooses all tokens (LastStage), and the leader hears of them:

    device thread:  StepPlan ──▶ orders ──▶ stages; the first layers here, and on to the next plan
    who samples:    waits    ◀── Sampled ── last stage
                    Took     ──▶ orders ──▶ stages between
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Protocol

from services.executor.backend import Backend, BackendInfo, Copier, Pending, StepOutput
from services.executor.group_copies import GroupCopier
from services.executor.loading import TorchOptions, device_of
from services.executor.members import Members
from services.executor.orders import Close, Do, Failed, Join, Order, Took
from services.executor.ranks import LEADER, Ranks, join, meeting
from shared.errors import EngineError
from shared.messages import Ints, SlotOpen, StepPlan


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
    members = Members(size - 1, environment or {}, lost)
    bare = replace(options, processors={}, device=device.type)
    members.tell_each([Join(bare, rank, size, store.port) for rank in range(1, size)])
    with ExitStack() as undo:
        undo.callback(members.end)
        ranks = join(LEADER, size, store, device, ordered=options.deterministic, sums=not options.pipeline)
        undo.callback(ranks.close)
        kind = PipelineBackend if options.pipeline else GroupBackend
        group = kind(rank_builder(device.type)(options, ranks), members, ranks)
        undo.pop_all()
        return group


def rank_builder(device: str) -> BuildRank:
    """The function that builds a rank's engine on such a device."""
    if device == "cuda":
        from services.executor.cuda.backend import build as build_cuda

        return build_cuda
    from services.executor.torch_backend import build

    return build


class GroupBackend:
    """See services.executor.backend.Backend. Made by `build_group`."""

    def __init__(self, own: RankBackend, members: Members, ranks: Ranks) -> None:
        self._own, self._members, self._ranks = own, members, ranks
        sizes = ranks.exchange(own.info.bytes_per_block)
        self._info = replace(own.info, bytes_per_block=sum(sizes))
        self._copier: Copier = GroupCopier(own.copier(), members, ranks.size)

    @property
    def info(self) -> BackendInfo:
        return self._info

    def warm_up(self) -> None:
        self._members.tell(Do.WARM_UP)
        self._own.warm_up()
        self._info = replace(self._info, two_stream_tokens=self._own.info.two_stream_tokens)

    def open_slot(self, opened: SlotOpen) -> None:
        self._members.tell(for_followers(opened))
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
        return self._own.sample(pending)

    def copier(self) -> Copier:
        return self._copier

    def reset(self) -> None:
        self._members.tell(Do.RESET)
        self._own.reset()

    def close(self) -> None:
        self._members.end()
        self._own.close()
        self._ranks.close()


class PipelineBackend(GroupBackend):
    """Of ranks that are stages, the leader the first. As many steps as stages may be between `forward` and
    `sample`, each in another stage."""

    def __init__(self, own: RankBackend, members: Members, ranks: Ranks) -> None:
        super().__init__(own, members, ranks)
        self._info = replace(self._info, stages=ranks.size)

    def open_slot(self, opened: SlotOpen) -> None:
        self._members.tell(opened)
        self._own.open_slot(opened)

    def _chosen(self, pending: Pending) -> StepOutput:
        found = self._members.sampled()
        assert found.step == pending.plan.step, "steps leave the last stage in order, and each one leaves"
        if found.output is None:
            raise EngineError(found.error)
        self._own.take(pending, found.output.ids, found.output.done)
        return found.output


def for_followers(opened: SlotOpen) -> SlotOpen:
    """A slot without what only the leader runs. Its rows stay such as a kernel does not sample."""
    if not (opened.processors or opened.grammar):
        return opened
    return replace(opened, processors=(), grammar="", logprobs=max(1, opened.logprobs))
