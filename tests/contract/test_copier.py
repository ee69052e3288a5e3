"""What every engine's copier must do, against the engine's own memory: see backend.Copier."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.executor.engine_pair import ENGINES, KIND, PROMPT, small_engine
from support.executor.plan_maker import PlanMaker, Row
from support.executor.tiny_models import save_tiny
from support.shm import ABSENT, Segment, segment

from services.executor.engine import Arena, Backend
from services.executor.kv_transfer import copiers
from services.executor.sim.engine import SIGNATURE_BYTES
from shared.messages import Sampling

HOT = Sampling(temperature=1.5)
ROOM = 5  # blocks in the arena
PIN_BYTES = 20_480
Make = Callable[[], Backend]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(KIND, tmp_path_factory.mktemp("tiny"))


@pytest.fixture(params=ENGINES)
def make(request: pytest.FixtureRequest, folder: Path) -> Make:
    return lambda: small_engine(request.param, folder, {})


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes of the arena that a GPU pins at a time: some blocks lie across two."""
    monkeypatch.setattr(copiers, "PIN_BYTES", PIN_BYTES)


class Attached:
    """An engine with a segment attached to its copier."""

    def __init__(self, backend: Backend, file: Segment) -> None:
        self.backend, self.file = backend, file
        self.copier = backend.copier
        self.size = backend.info.bytes_per_block
        self.moved = SIGNATURE_BYTES if backend.info.backend == "sim" else self.size  # of a block
        self.arena = Arena(file.name, file.generation)
        self.copier.attach(self.arena)

    def block(self, block: int) -> bytes:
        """What lies in a block, read from the engine itself."""
        engine: Any = self.backend
        if engine.info.backend == "sim":
            return engine._blocks.signatures[block].tobytes()
        return engine._cache.tensor[block].cpu().view(torch.uint8).numpy().tobytes()

    def blocks(self) -> list[bytes]:
        return [self.block(block) for block in range(self.backend.info.blocks)]

    def place(self, index: int) -> bytes:
        """The bytes of the arena's place that a block goes to."""
        return self.file.read()[index * self.size : index * self.size + self.moved]

    def end(self) -> None:
        self.copier.detach()
        self.arena.close()  # raises where the copier keeps a view of it


@pytest.fixture
def attached(make: Make) -> Iterator[Attached]:
    backend = make()
    with segment(ROOM * backend.info.bytes_per_block) as file:
        made = Attached(backend, file)
        yield made
        made.end()


def prefilled(backend: Backend, seed: int = 3) -> PlanMaker:
    """An engine that has computed PROMPT, of two blocks, in slot 0."""
    maker = PlanMaker(backend, seed=seed)
    maker.open(0, PROMPT, HOT, seed=seed)
    maker.prefill({0: len(PROMPT)})
    return maker


def test_a_stored_block_is_in_the_arena_and_nothing_else_is(attached: Attached) -> None:
    maker = prefilled(attached.backend)
    first, second = maker.tables[0]
    before = attached.blocks()
    assert before[first] != before[second]
    attached.copier.store([second, first], [0, (ROOM - 1) * attached.size])  # the last place, too
    assert (attached.place(0), attached.place(ROOM - 1)) == (before[second], before[first])
    between = attached.file.read()[attached.size : (ROOM - 1) * attached.size]
    assert set(between) == {ABSENT}
    assert attached.blocks() == before


def test_a_loaded_block_is_what_was_stored_and_nothing_else_changes(attached: Attached) -> None:
    maker = prefilled(attached.backend)
    table = maker.tables[0]
    kept = [attached.block(block) for block in table]
    attached.copier.store(table, [0, 2 * attached.size])
    attached.copier.finish()
    again = [Row(0, 0, len(PROMPT), feeds=(0,))]
    maker.open(0, PROMPT[::-1], HOT)
    maker.set_table(0, table)  # other tokens in the same blocks
    maker.run(again)
    assert [attached.block(block) for block in table] != kept
    before = attached.blocks()
    others = maker.free[:2]
    attached.copier.load([others[1], others[0]], [2 * attached.size, 0])
    attached.copier.finish()
    assert [attached.block(block) for block in others] == kept
    wanted = {**dict(enumerate(before)), **dict(zip(others, kept, strict=True))}
    assert attached.blocks() == list(wanted.values())


def test_a_sequence_goes_on_with_the_blocks_that_another_engine_stored(make: Make) -> None:
    writer = make()
    with segment(ROOM * writer.info.bytes_per_block) as file:
        maker = prefilled(writer)
        rest = maker.decode({0: len(PROMPT) + 1}, 12)[0]  # into a third block
        ended = Attached(writer, file)
        offsets = [ended.size * place for place in (3, 0, 1)]
        ended.copier.store(maker.tables[0], offsets)
        ended.copier.finish()
        ended.end()

        reader = Attached(make(), file)
        maker = PlanMaker(reader.backend, seed=9)
        blocks = maker.free[:3]
        reader.copier.load(blocks, offsets)
        reader.copier.finish()
        tokens = [*PROMPT, *alone(make, 11)]
        assert tokens[len(PROMPT) + 1 :] == rest[:11]
        maker.open(4, tokens, HOT, seed=3, prompt_tokens=len(PROMPT))
        maker.set_table(4, blocks)
        last = len(tokens) - 1
        assert maker.run([Row(4, last, 1, feeds=(4,))]).ids[0] == rest[11]
        reader.end()


def alone(make: Make, steps: int) -> list[int]:
    """The first token of PROMPT and `steps` more in a fresh engine."""
    maker = PlanMaker(make(), seed=3)
    maker.open(0, PROMPT, HOT, seed=3)
    first = maker.prefill({0: len(PROMPT)}).ids[0]
    return [first, *maker.decode({0: len(PROMPT) + 1}, steps)[0]]


def test_a_store_waits_for_the_steps_before_it(attached: Attached) -> None:
    """A step that samples nothing is over for the host when a GPU has hardly begun it."""
    backend = attached.backend
    maker = PlanMaker(backend)
    maker.open(0, PROMPT)
    if torch.cuda.is_available():
        torch.cuda._sleep(200_000_000)  # cycles: a tenth of a second
    maker.run([Row(0, 0, len(PROMPT))])
    attached.copier.store(maker.tables[0], [0, attached.size])
    attached.copier.finish()
    stored = [attached.place(0), attached.place(1)]
    assert any(stored[0])
    assert stored == [attached.block(block) for block in maker.tables[0]]


def test_a_load_waits_for_the_steps_before_it(attached: Attached) -> None:
    """They wrote its blocks for a sequence that has left."""
    maker = prefilled(attached.backend)
    table = maker.tables[0]
    kept = [attached.block(block) for block in table]
    attached.copier.store(table, [0, attached.size])
    attached.copier.finish()
    maker.open(1, PROMPT[::-1])
    maker.set_table(1, table)
    if torch.cuda.is_available():
        torch.cuda._sleep(200_000_000)
    maker.run([Row(1, 0, len(PROMPT))])
    attached.copier.load(table, [0, attached.size])
    attached.copier.finish()
    assert [attached.block(block) for block in table] == kept


def test_attached_again_it_copies_through_the_new_mapping(attached: Attached) -> None:
    maker = prefilled(attached.backend)
    with segment(ROOM * attached.size) as other:
        attached.end()
        again = Attached(attached.backend, other)
        again.copier.store(maker.tables[0][:1], [0])
        again.copier.finish()
        assert again.place(0) == again.block(maker.tables[0][0])
        assert set(attached.file.read()) == {ABSENT}
        again.end()
        attached.arena = Arena(attached.file.name, attached.file.generation)


def test_a_piece_is_at_least_a_megabyte(make: Make) -> None:
    """Below that the calls cost more than the bytes; see docs/benchmarks/kv_copies.md."""
    assert make().copier.piece_bytes >= 1 << 20


def test_copy_across_two_pinned_pieces_is_split_in_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copiers, "PIN_BYTES", 100)
    host, device = [0, 60, 90, 130], [1000, 2000, 3000, 4000]
    arena, blocks = [0, 60, 90, 130, 100], [1000, 2000, 3000, 4000, 3010]
    store = copiers.within_pieces(device, host, 40, host)
    assert [part.tolist() for part in store] == [blocks, arena, [40, 40, 10, 40, 30]]
    load = copiers.within_pieces(host, device, 40, host)
    assert [part.tolist() for part in load] == [arena, blocks, [40, 40, 10, 40, 30]]
