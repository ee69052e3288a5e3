"""What an engine must do to run plans. SimBackend and TorchBackend pass the same contract tests.

Every method is called from one thread, the device thread, in the order of the messages. Plans are
strictly ordered by step. Forward and sample are two calls, so that a token mask can come late
without stopping run-ahead.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from shared.messages import Floats, Ints, SlotOpen, StepPlan, floats, ints


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

    def forward(self, plan: StepPlan) -> None:
        """Apply table deltas, then block copies, then compute the forward rows. Rows of a slot that
        is done (stop id seen, or `max_length` reached) are no-ops and write no KV. On return the
        work is queued or done; at most one forward is outstanding before its `sample`."""

    def sample(self, plan: StepPlan) -> StepOutput:
        """Choose a token for each sample row of the forward before, remember it as the slot's last
        token (so the next plan may be device-fed), and wait for the ids to reach the host."""

    def reset(self) -> None:
        """Forget every slot and block table; keep the weights."""

    def close(self) -> None:
        """Free everything. A second call does nothing."""
