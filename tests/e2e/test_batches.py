"""A batch whose fleet is killed as a whole; scripts/soak has the long form."""

from __future__ import annotations

import pytest

from loadtest import batches

LINES, KILLS = 150, 1
ROWS = 64  # of the simulated engine: what runs at a death is computed again


@pytest.mark.timeout(600)
async def test_each_line_is_answered_once_after_the_loss_of_every_process() -> None:
    result = await batches.run(LINES, KILLS, LINES, slots=ROWS)
    assert result.status == "completed", result
    assert result.counts == {"total": LINES, "completed": LINES, "failed": 0}
    assert result.once == LINES, result
    assert result.equal == result.compared == LINES, result
    again_tokens = len(result.killed_after) * ROWS * result.one_pass / LINES
    assert result.one_pass <= result.generated <= 1.05 * result.one_pass + again_tokens, result


@pytest.mark.timeout(240)
def test_the_gateway_and_the_keeper_hold_a_small_part_of_a_file() -> None:
    found = batches.upload(64 << 20)
    assert max(found["gateway_mib"], found["keeper_mib"]) < 48, found
