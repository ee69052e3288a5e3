"""What the scheduler tells about itself: beats and `headrace status`."""

from __future__ import annotations

from services.scheduler.records import Phase
from services.scheduler.state import Executor, State


def load(state: State) -> tuple[tuple[str, int], ...]:
    """Numbers for the beat."""
    running = sum(len(e.running) for e in state.executors.values())
    return (("requests", len(state.requests)), ("running", running), ("waiting", len(state.waiting)))


def status(state: State) -> dict[str, object]:
    """Everything that must be back at zero, or all free, when nothing runs."""
    phases = [s.phase for s in state.sequences.values()]
    return {
        "requests": len(state.requests),
        "waiting": phases.count(Phase.WAITING),
        "running": phases.count(Phase.RUNNING),
        "closing": phases.count(Phase.CLOSING),
        "detokenizers": sorted(state.detokenizers),
        "executors": {name: _executor(e) for name, e in sorted(state.executors.items())},
    }


def _executor(executor: Executor) -> dict[str, object]:
    ledger, hello = executor.ledger, executor.hello
    held = executor.running
    used = sum(s.computed for s in held)
    return {
        "model": hello.model,
        "backend": hello.backend,
        "dtype": hello.dtype,
        "epoch": executor.epoch,
        "blocks": ledger.blocks,
        "free_blocks": ledger.free_blocks,
        "reserved_blocks": ledger.reserved,
        "fenced_blocks": ledger.fenced_blocks,
        "block_tokens": ledger.block_tokens,
        "slots": ledger.slots,
        "free_slots": ledger.free_slots,
        "running": len(held),
        "computed_tokens": used,
        "steps": executor.steps_done,
        "in_flight": len(executor.in_flight),
    }
