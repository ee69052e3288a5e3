"""Commands of a load without tools, ids or shared prefixes are those of `sessions=off`, byte for byte."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from loadtest.scenarios import synthetic
from loadtest.scenarios.definitions import H200, L1, Arm
from loadtest.scenarios.real_tier import RealTier
from loadtest.scenarios.run import limits_of
from loadtest.simulator.requests import Workload
from loadtest.simulator.world import Setup, World
from services.scheduler.state.requests import Send
from shared.codec import Envelope, encode_all

Commands = list[tuple[int, str, bytes]]  # time, kind, message


class Recorded(World):
    """A world that keeps its commands, with their times."""

    def __init__(self, setup: Setup, workload: Workload) -> None:
        self.commands: Commands = []
        super().__init__(setup, workload)

    def _carry_out(self, command: Send) -> None:
        packed = b"".join(encode_all(Envelope(command.to, 1, 0, command.message)))
        self.commands.append((self.now_us, type(command.message).__name__, packed))
        super()._carry_out(command)


def commands_of(policy: str, workload: Workload, tokens: int) -> Commands:
    machine = replace(H200, blocks=tokens // 16)
    tier = partial(RealTier, L1, machine.block_bytes)
    world = Recorded(Setup((machine,), limits_of(Arm(policy, policy)), tier=tier), workload)
    world.run()
    return world.commands


@pytest.mark.parametrize("tokens", [40_000, 6_000])
def test_sessions_change_no_command_of_a_load_without_them(tokens: int) -> None:
    """Blocks are copied down in both, and rows are preempted in 6,000 tokens."""
    workload = Workload(synthetic.chat(1).requests[:20])
    learned, off = (commands_of(f"sessions={name}", workload, tokens) for name in ("learned", "off"))
    assert len(learned) > 1_000
    assert any(what == "KvCopy" for _, what, _ in learned)
    assert learned == off
