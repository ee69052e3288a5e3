"""The blocks of the simulated engine: which step wrote them last, and how long they are copied."""

from __future__ import annotations

import random
import time

import pytest
from support.executor.plan_maker import PlanMaker, Row
from support.shm import segment

from services.executor.engine import Arena
from services.executor.sim.engine import PRESET_COPIES, SimBackend, SimCopies, SimOptions, sim_timing
from shared.errors import SetupError

BLOCK = 16


def engine(timing: str = "step=0") -> SimBackend:
    return SimBackend(SimOptions(blocks=64, block_tokens=BLOCK, slots=8, max_context=512, timing=timing))


def written(backend: SimBackend) -> dict[int, tuple[int, ...]]:
    """Block -> signature, of those that were written."""
    found = enumerate(backend._blocks.signatures.tolist())
    return {block: tuple(words) for block, words in found if any(words)}


def test_each_block_has_the_signature_of_its_last_writer() -> None:
    """Against a plain loop over tokens."""
    rng = random.Random(3)
    backend = engine()
    maker = PlanMaker(backend)
    wanted: dict[int, tuple[int, ...]] = {}
    lengths = dict.fromkeys(range(6), 0)
    for slot in lengths:
        maker.open(slot, [300] * 200, seq=70 + slot)
    for _ in range(30):
        chosen = rng.sample(sorted(lengths), rng.randint(1, 6))
        rows = [Row(slot, lengths[slot], rng.choice([1, 1, 1, 5, 40])) for slot in chosen]
        rows = [row for row in rows if row.start + row.count <= 160]
        maker.run(rows)
        for row in rows:
            lengths[row.slot] = row.start + row.count
            for position in range(row.start, row.start + row.count):
                block = maker.tables[row.slot][position // BLOCK]
                wanted[block] = (70 + row.slot, position // BLOCK, position + 1, maker.step)
    assert written(backend) == wanted


def test_a_row_of_a_slot_that_is_done_writes_nothing() -> None:
    backend = engine()
    maker = PlanMaker(backend)
    maker.open(0, [300] * 3, seq=9, max_length=4)
    maker.prefill({0: 3})
    before = written(backend)
    maker.run([Row(0, 3, 1, True, (0,))])
    assert written(backend) == before


def test_a_forked_tail_is_copied_before_it_is_written() -> None:
    backend = engine()
    maker = PlanMaker(backend)
    maker.open(0, [300] * 5, seq=9)
    maker.open(1, [300] * 5, seq=10)
    maker.run([Row(0, 0, 5, feeds=(0, 1))])
    tail, copy, other = maker.tables[0][0], maker.free.pop(), maker.free.pop()
    maker.set_table(1, [copy])
    maker.run([Row(1, 5, 1, True, (1,))], copies=((tail, copy), (tail, other)))
    assert written(backend) == {tail: (9, 0, 5, 1), copy: (10, 0, 6, 2), other: (9, 0, 5, 1)}


def test_copies_take_the_time_of_their_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "monotonic", lambda: 50.0)
    monkeypatch.setattr(time, "sleep", slept.append)
    backend = engine("step=0,block=4096,d2h=512,h2d=1024")
    copier = backend.copier
    assert copier.piece_bytes == 512_000  # a millisecond's
    with segment(4 * 4_096) as file:
        arena = Arena(file.name, file.generation)
        copier.attach(arena)
        copier.store([1, 2], [0, 4_096])
        copier.load([1], [0])
        assert slept == pytest.approx([2 * 4_096 / 512e6, 4_096 / 1024e6])
        copier.detach()
        arena.close()


def test_the_setting_gives_the_copies() -> None:
    assert sim_timing("step=1").copies == SimCopies(65_536, 0, 0)
    assert sim_timing("h200-8b").copies == PRESET_COPIES["h200-8b"] == SimCopies(2 << 20, 50_700, 50_900)
    assert sim_timing("smollm2-cpu, d2h=7").copies.d2h_mb_s == 7
    assert sim_timing("block=0").copies.block_bytes == 0
    with pytest.raises(SetupError, match="block=31 is less than 32 bytes; 0 for no copies"):
        sim_timing("block=31")


def test_engines_of_other_blocks_do_not_share_their_bytes() -> None:
    prints = {engine(timing).info.fingerprint for timing in ("step=0", "step=9", "block=32", "h200-8b")}
    assert len(prints) == 3
    assert all(len(bytes.fromhex(name)) == 16 for name in prints)
    assert [engine(timing).info.bytes_per_block for timing in ("step=0", "block=32")] == [65_536, 32]
