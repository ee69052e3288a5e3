"""What an engine must do to run plans. SimBackend and TorchBackend pass the same contract tests.

Every method is called from one thread, the device thread, in the order of the messages, but `sample`: it
may run on the host lane, of one step at a time and in step order, while the device thread goes on. Whatever
the device thread then forwards, opens or closes is of other slots than those sampled: both threads write
entries of their own slots in state that they share. Plans are strictly ordered by step. The methods of its
copier belong to a third thread, the copy lane (services.executor.copies).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from services.executor.arena import Arena
from services.executor.pieces import Piece
from shared.messages import Floats, Ints, SlotOpen, StepPlan, floats, ints

if TYPE_CHECKING:
    from torch import Tensor
    from torch.cuda import Event


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendInfo:
    """The facts about an engine that the scheduler plans with."""

    backend: str  # torch, sim
    model: str
    dtype: str
    fingerprint: str  # hex digest of everything that makes KV bytes interchangeable
    vocab_digest: str
    vocab: int
    blocks: int
    block_tokens: int
    bytes_per_block: int
    slots: int
    max_step_tokens: int
    max_context: int
    stages: int = 1  # of a pipeline: so many steps are computed at once
    two_stream_tokens: int = 0  # see ExecHello


@dataclass(frozen=True, slots=True, kw_only=True)
class Pending:
    """A step between its forward and its sampling: what `forward` returns and `sample` takes, once."""

    plan: StepPlan
    logits: Tensor | None = None  # [samples, vocab]
    padding_rows: int = 0
    forwarded: Event | None = None  # marks the forward's end on a GPU; with an answer, the sampling's
    answer: Tensor | None = None  # ids and done [2, rows]: sampling is queued already, `sample` only waits
    tokens: tuple[Ints, ...] = ()  # with an answer: the host records of its slots
    due_s: float = 0.0  # sim: when the forward ends, on the monotonic clock
    pieces: Callable[[], tuple[Piece, ...]] = tuple  # of a step in halves, once it has ended


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """Sampled ids of one step, row for row as `StepPlan.sample_slots`. See StepResult."""

    ids: Ints
    done: Ints
    padding_rows: int = 0
    logprobs: Floats = field(default_factory=floats)
    top_counts: Ints = field(default_factory=ints)
    top_ids: Ints = field(default_factory=ints)
    top_logprobs: Floats = field(default_factory=floats)
    host_us: int = 0  # logits processors
    row_errors: tuple[tuple[int, str], ...] = ()
    pieces: tuple[Piece, ...] = ()  # of a step in halves


@dataclass(slots=True)
class Alarm:
    """Why an engine is gone, empty while it is there: set once, on any thread. Its steps then never end."""

    why: str = ""

    def ring(self, why: str) -> None:
        """The engine is gone."""
        self.why = self.why or why


class Copier(Protocol):
    """Moves whole KV blocks between an engine and the host's arena, while steps run. Nobody else writes or
    reads the blocks of a load, or writes those of a store, until `finish` returns."""

    piece_bytes: int  # to copy in one call: about a millisecond's work, so that a stop need not wait longer

    def attach(self, arena: Arena) -> None:
        """Copy from and to this arena from now on. May take seconds. Errors leave nothing attached."""

    def detach(self) -> None:
        """Let go of the mapping; without one it does nothing."""

    def store(self, blocks: Sequence[int], offsets: Sequence[int]) -> None:
        """Copy block `blocks[i]` to the arena's bytes from `offsets[i]` on, as the steps whose results are
        delivered left it. Returns when what was asked before is done, or later."""

    def load(self, blocks: Sequence[int], offsets: Sequence[int]) -> None:
        """Copy the arena's bytes from `offsets[i]` on to block `blocks[i]`, after the steps whose results
        are delivered. Returns when what was asked before is done, or later."""

    def finish(self) -> int:
        """Return when all that was asked is done: what was stored is in the arena, and every later forward
        reads what was loaded. The time since the last `finish` in which bytes were on their way, by the
        device's clock, in us; 0 where the caller's clock tells as much."""


class Backend(Protocol):
    """An engine. Errors in `forward` or `sample` fail the step, not the process."""

    @property
    def info(self) -> BackendInfo:
        """Facts, known once the engine is built."""

    def warm_up(self) -> None:
        """Run every code path once, so that the first request pays for nothing."""

    def open_slot(self, opened: SlotOpen) -> None:
        """Set a slot up from scratch: tokens, sampling, seed, stops. Its block table is empty."""

    def close_slot(self, slot: int) -> None:
        """Forget a slot. Closing an unknown slot does nothing."""

    def forward(self, plan: StepPlan) -> Pending:
        """Apply table deltas, then block copies, then compute the forward rows. Rows of a slot that
        is done (stop id seen, or `max_length` reached) are no-ops and write no KV. On return the
        work is queued or done. The slots of forwards that are not sampled yet are not in this plan, but
        for those that have their `answer` queued."""

    def sample(self, pending: Pending) -> StepOutput:
        """Choose a token for each sample row of that forward, remember it as the slot's last token
        (so the next plan may be device-fed), and wait for the ids to reach the host. Logits processors
        run first; a row whose processor fails gets a row error, id -1 and done 2, and its slot is done."""

    def copier(self) -> Copier:
        """The one that moves this engine's blocks; always the same."""

    def reset(self) -> None:
        """Forget every slot and block table; keep the weights, and what lies in the blocks."""

    def close(self) -> None:
        """Free everything. A second call does nothing."""
