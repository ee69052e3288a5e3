"""Steps with drafts on an engine whose model is played by hand: the ids are those without drafts.

The kernels are the real ones but for attention (tests/unit/kernels/drafts has that), on a CPU in Triton's
interpreter. The model sees the last token alone, and most often counts up, so that some drafts are kept."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.executor.gpu_side import DEVICE
from support.executor.plan_maker import PlanMaker, Row
from support.structured import grammar_of

from kernels.drafts.gpu import COLUMNS, accept, propose
from kernels.elementwise.gpu import Resolved, resolve
from kernels.sampling.gpu import choose, scratch
from loadtest.gpu.structured import vocabulary
from services.executor.cuda.engine import CudaBackend, DeviceSampling, LateSampling
from services.executor.cuda.input_batch import (
    DRAFTS,
    NO_TILES,
    ArrangedStep,
    CudaSlots,
    Layout,
    Words,
    arrange,
    arrange_drafts,
    can_have_drafts,
    fill,
)
from services.executor.parallel.step_split import Chunk
from services.executor.sampling.grammar import HostRows, build_grammars
from services.executor.sim.engine import SimBackend, SimOptions
from shared.messages import AT_DEVICE, FROM_DEVICE, Sampling, SlotOpen, ints

VOCAB, SLOTS, CONTEXT, TOKENS = 130, 5, 90, 12
ON = torch.device(DEVICE)
PROMPT = [1, 2, 3, 4, 5, 6, 0, 1, 2, 3]
VOCABULARY = vocabulary(VOCAB)


def logits_of(slot: int, position: int, token: int) -> torch.Tensor:
    seed = 1 + slot + 100 * position + 10_000 * token
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed))
    logits[(token + 1) % 7] += 5
    return logits


class Event:
    """An event of a device that works at once."""

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


class Device:
    """GraphRunner's part."""

    apart, split_graphs = True, None

    def __init__(self, slots: CudaSlots) -> None:
        self._slots = slots

    def drafts_of(self, rows: int, wanted: int) -> int:
        return min(count for count in DRAFTS if count >= wanted)

    def queue(self, step: ArrangedStep, updates: tuple[Words, Words], *, adapted: bool) -> None:
        assert not adapted
        places, values = updates
        self._slots.words[torch.from_numpy(places).long().to(ON)] = torch.from_numpy(values).to(ON)
        room = step.samples.shape[1] + 3
        self._layout = layout = Layout(room, step.tokens + 2 * step.queries, 0, queries=step.queries)
        buffer = torch.zeros(layout.words, dtype=torch.int32)
        fill(buffer.numpy(), layout, step, NO_TILES, self._slots.spare_slot)
        self._words, state = buffer.to(ON), self._slots.state
        columns = self._words[layout.token_at :]
        if step.queries > 1:
            assert state.drafts is not None
            propose(columns[: layout.tokens], step.queries, state.done, state.drafts)
        found = Resolved(*(torch.zeros(layout.tokens, dtype=torch.int32, device=ON) for _ in range(3)))
        resolve(columns, state, 99, 16, found, step.queries)
        rows = columns[: 2 * layout.tokens].view(2, -1).T.tolist()
        self._all = torch.stack(
            [logits_of(slot, at, token) for (slot, at), token in zip(rows, found.ids.tolist(), strict=True)]
        ).to(ON)

    def answer(self, rows: int, queries: int) -> tuple[torch.Tensor, Event]:
        shape = (2, rows) if queries == 1 else (queries + COLUMNS, rows)
        return torch.full(shape, -9, dtype=torch.int32, device=ON), Event()

    def logits(self, count: int) -> torch.Tensor:
        return self._all[self._words[:count].long()]

    def sample(self, count: int, answer: torch.Tensor, ready: Event) -> None:
        layout, queries = self._layout, self._layout.queries
        named, slots, positions = self._words[: layout.token_at].view(3, -1)[:, : count * queries]
        logits, room = self._all[named.long()], scratch(count * queries, VOCAB, ON)
        if queries == 1:
            choose(logits, slots, positions, self._slots.choices, room, answer)
            return
        tried = torch.full((2, count * queries), -9, dtype=torch.int32, device=ON)
        choose(logits, slots, positions, self._slots.choices, room, tried, verifies=True)
        ids = self._words[layout.token_at :][2 * layout.tokens : 3 * layout.tokens]
        accept((named.contiguous(), slots.contiguous()), tried, ids, self._slots.choices, answer)


@dataclass
class World:
    """An engine, its slots' ids, and the bounds that a scheduler keeps of their places."""

    engine: Any
    maker: PlanMaker
    ids: dict[int, list[int]] = field(default_factory=dict)
    upper: dict[int, int] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)
    drafted: int = 0
    kept: int = 0
    in_flight: deque[Any] = field(default_factory=deque)

    def open(self, slot: int, sampling: Sampling, **more: object) -> None:
        self.maker.open(slot, PROMPT, sampling, seed=77 * slot, **more)
        self.ids[slot], self.upper[slot] = [], len(PROMPT)

    def forward(self, rows: list[Row]) -> None:
        self.in_flight.append((rows, self.engine.forward(self.maker.plan(rows))))

    def step(self, drafts: dict[int, int]) -> None:
        """A decode of the slots that go on, with so many drafts."""
        rows = []
        for slot in self.ids:
            if slot not in self.ended:
                count, fed = 1 + drafts.get(slot, 0), AT_DEVICE if drafts else FROM_DEVICE
                rows.append(Row(slot, self.upper[slot], count, fed, (slot,)))
                self.upper[slot] += count
        self.forward(rows)

    def sample(self) -> None:
        rows, pending = self.in_flight.popleft()
        output = self.engine.sample(pending)
        assert output.row_errors == ()
        ids, counts = list(output.ids), output.counts or ints([1]) * len(rows)
        for row, count, done in zip(rows, counts, output.done, strict=True):
            its, ids = ids[:count], ids[count:]
            if row.slot in self.ended:
                assert (its, done) == ([-1], 2)
                continue
            self.ids[row.slot] += its
            if row.start >= len(PROMPT):
                self.upper[row.slot] -= row.count - count
            if done:
                self.ended.add(row.slot)
        assert not ids
        self.drafted += sum(output.drafted)
        self.kept += sum(counts) - len(counts)

    def run(self, drafts: dict[int, int], flight: int = 2) -> dict[int, list[int]]:
        """The ids of all slots until each has TOKENS or has ended."""
        self.forward([Row(slot, 0, len(PROMPT), feeds=(slot,)) for slot in self.ids])
        while any(len(ids) < TOKENS for slot, ids in self.ids.items() if slot not in self.ended):
            if len(self.in_flight) >= flight or len(self.ended) == len(self.ids):
                self.sample()
            else:
                self.step(drafts)
        while self.in_flight:
            self.sample()
        return {slot: ids[:TOKENS] for slot, ids in self.ids.items()}


def made() -> World:
    engine: Any = object.__new__(CudaBackend)
    slots = CudaSlots(SLOTS, 8, 99, CONTEXT, ON, VOCAB, drafts=True)
    engine._slots, engine._runner = slots, Device(slots)
    engine._host_rows = HostRows({}, build_grammars(lambda: VOCABULARY, VOCAB), ON)
    engine._sampling = DeviceSampling(SLOTS, VOCAB, slots.choices, torch.float32)
    engine._stage, engine._alone = SimpleNamespace(last=True), True
    engine._cache = SimpleNamespace(copy=lambda source, target: None)
    engine._masks = slots.choices.masks.numpy().view("int32")
    engine._late = LateSampling(engine._sample_masked)
    engine.info = SimBackend(SimOptions(timing="step=0", blocks=60, slots=SLOTS)).info
    object.__setattr__(engine.info, "max_drafts", DRAFTS[-1])
    return World(engine, PlanMaker(engine))


def filled(world: World, **of_first: object) -> World:
    world.open(3, Sampling(temperature=0.0), **of_first)
    world.open(0, Sampling(temperature=0.6))
    world.open(4, Sampling(temperature=0.8, top_k=20), max_length=len(PROMPT) + 9, stop_ids=ints([7]))
    return world


@pytest.fixture(scope="module")
def wanted() -> dict[int, list[int]]:
    """The ids without drafts."""
    return filled(made()).run({})


@pytest.mark.parametrize(("count", "flight"), [(1, 2), (3, 3)])
def test_drafts_change_no_token(count: int, flight: int, wanted: dict[int, list[int]]) -> None:
    world = filled(made())
    assert world.run({3: count, 0: max(count - 1, 1), 4: count}, flight) == wanted
    assert world.drafted >= world.kept > 1
    assert world.ended == {4}
    known = [*PROMPT, *world.ids[0]]
    assert list(world.engine._slots.tokens(0)) == known
    assert world.engine._slots.state.drafts.history[0, : len(known)].tolist() == known


def test_a_row_with_a_grammar_has_no_drafts_and_its_neighbours_do() -> None:
    digits = grammar_of({"structured_outputs": {"regex": "[0-9]{60}"}})
    world = filled(made(), grammar=digits)
    masked = filled(made(), grammar=digits).run({})
    assert world.run(dict.fromkeys(range(SLOTS), 3)) == masked
    assert all(48 <= ord(VOCABULARY.bytes_with(frozenset())[token]) <= 57 for token in masked[3])
    assert world.kept > 3


def test_a_step_outside_the_graph_has_no_drafts_and_goes_on_at_the_place(
    wanted: dict[int, list[int]],
) -> None:
    """A slot with penalties is computed outside of it; steps with drafts are before and after."""
    world = filled(made())
    world.forward([Row(slot, 0, len(PROMPT), feeds=(slot,)) for slot in world.ids])
    world.sample()
    drafted = []
    for turn in range(4):
        if turn == 1:
            world.open(2, Sampling(temperature=0.6, frequency_penalty=0.4))
            world.forward([Row(2, 0, len(PROMPT), feeds=(2,))])
            world.sample()
        if turn == 2:
            world.engine.close_slot(2)
            del world.ids[2]
        before = world.drafted
        world.step({0: 3, 3: 3})
        world.sample()
        drafted.append(world.drafted > before)
    assert drafted == [True, False, True, True]
    assert world.kept > 1
    for slot in (0, 3, 4):
        have = world.ids[slot][:TOKENS]
        assert have == wanted[slot][: len(have)]


def test_a_step_with_a_prompt_has_no_drafts_and_goes_on_at_the_place() -> None:
    maker = PlanMaker(SimBackend(SimOptions(timing="step=0", blocks=50, slots=8)))
    maker.tables = {1: [], 2: []}
    decode: Any = Row(1, 12, 4, AT_DEVICE, (1,))
    slots = CudaSlots(4, 6, 99, CONTEXT, torch.device("cpu"), 100, drafts=True)
    tokens = ints([1, 2, 3])
    slots.open(SlotOpen(slot=2, generation=0, seq=2, prompt_tokens=3, tokens=tokens))
    plan = maker.plan([Row(2, 0, 3, feeds=(2,)), decode])
    assert not can_have_drafts(plan)
    step = arrange(plan, slots)
    assert (step.tokens, step.decode_rows, step.chunks) == (4, 1, (Chunk(2, 1, 0, 3),))
    assert step.columns[:, 0].tolist() == [1, -1_000_000, -1]
    assert step.samples.tolist() == [[3, 0], [2, 1], [3, -1]]
    step = arrange(plan, slots, apart=False)
    assert step.chunks == (Chunk(2, 0, 0, 3), Chunk(1, 3, -1_000_000, 1))


def test_rows_of_a_step_with_drafts() -> None:
    maker = PlanMaker(SimBackend(SimOptions(timing="step=0", blocks=50, slots=8)))
    maker.tables = {1: [], 2: [], 3: []}
    rows: list[Any] = [Row(2, 9, 3, AT_DEVICE, (2,)), Row(1, 7, 1, FROM_DEVICE, (1,))]
    plan = maker.plan(rows)
    assert can_have_drafts(plan)
    step = arrange_drafts(plan, 3)
    at, none = -1_000_000, -1_000
    assert (step.tokens, step.decode_rows, step.chunks, step.queries) == (8, 2, (), 4)
    assert step.columns.tolist() == [
        [2, 2, 2, 2, 1, 1, 1, 1], [at, at, at, at, 7, 7, 7, 7], [-1, -2, -3, none, -1, none, none, none]
    ]  # fmt: skip
    assert step.samples.tolist() == [
        [0, 1, 2, 3, 4, 5, 6, 7], [2, 2, 2, 2, 1, 1, 1, 1], [-1, -2, -3, -4, 8, 9, 10, 11]
    ]  # fmt: skip
    chunks = arrange_drafts(plan, 3, apart=False).chunks
    assert chunks == (Chunk(2, 0, at, 4), Chunk(1, 4, at, 4))
    assert not can_have_drafts(maker.plan([Row(1, 8, 1, True, (1,))]))  # none is asked for
    unsampled: Any = [Row(2, 9, 3, AT_DEVICE, (2,)), Row(1, 9, 1, FROM_DEVICE)]
    assert not can_have_drafts(maker.plan(unsampled))
