"""A burst of three times what L1 holds, as fast as kv_offload takes it, while blocks are pinned."""

from __future__ import annotations

from support.kv_offload.one_process import burst


async def test_a_burst_of_three_times_l1_finds_room_and_leaves_alone_what_is_pinned() -> None:
    found = await burst(3, l1_mib=16)
    assert found["offered"] == 3 * found["blocks_of_l1"]
    assert found["accepted_pct"] >= 95
    assert found["pinned_intact"]
