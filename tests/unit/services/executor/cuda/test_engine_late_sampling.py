"""Steps with grammars on an engine whose device is played by hand. The kernel that chooses is the real one,
on a CPU in Triton's interpreter, and reads masks when the step's sampling is queued."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from support.executor.gpu_side import DEVICE
from support.executor.plan_maker import PlanMaker, Row
from support.structured import grammar_of

from kernels.sampling.gpu import choose, scratch
from loadtest.gpu.structured import vocabulary
from services.executor.cuda.engine import Answered, CudaBackend, DeviceSampling, LateSampling
from services.executor.cuda.input_batch import ArrangedStep, CudaSlots, Words
from services.executor.engine import Late, Pending, StepOutput
from services.executor.sampling.grammar import HostRows, build_grammars
from services.executor.sampling.sampler import Sampler
from services.executor.sim.engine import SimBackend, SimOptions
from shared.answer_formats import grammar as answer_grammar
from shared.messages import Sampling, SlotOpen, ints

VOCAB, SLOTS, STEPS = 1300, 5, 6
ON = torch.device(DEVICE)
PROMPT = [1, 2, 3]
VOCABULARY = vocabulary(VOCAB)
DIGITS = grammar_of({"structured_outputs": {"regex": "[0-9]{3,40}"}})
LETTERS = grammar_of({"structured_outputs": {"regex": "[a-f]{3,40}"}})
SHORT = grammar_of({"structured_outputs": {"regex": "[xy]"}})
WRONG = answer_grammar.packed(answer_grammar.whole(None, {"text": "nothing"}, thinking=False), frozenset())
WISHES = [
    (DIGITS, Sampling(temperature=0.0)),
    ("", Sampling(temperature=1.0)),
    (LETTERS, Sampling(temperature=1.0)),
    (SHORT, Sampling(temperature=0.8, top_k=5)),
    (LETTERS, Sampling(temperature=1.2, top_p=0.9, min_p=0.01)),
]


def logits_of(slot: int, position: int, token: int) -> torch.Tensor:
    """The logits of a model that sees the last token alone."""
    seed = 1 + slot + 100 * position + 10_000 * token
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


@dataclass
class Event:
    """An event of a device that works at once: what is recorded has come."""

    recorded: bool = False

    def record(self) -> None:
        self.recorded = True

    def synchronize(self) -> None:
        assert self.recorded, "an event that is not recorded yet is not waited for: the answer would be empty"


class Device:
    """GraphRunner's part: a forward leaves its sample rows, and sampling reads them, slots and masks."""

    apart, split_graphs = True, None

    def __init__(self, slots: CudaSlots) -> None:
        self._slots, self._step = slots, torch.empty(3, 0)
        self.unsampled = 0

    def queue(self, step: ArrangedStep, updates: tuple[Words, Words], *, adapted: bool) -> None:
        assert not adapted
        assert not self.unsampled, "a forward overwrites what the step before it still has to sample"
        places, values = updates
        self._slots.words[torch.from_numpy(places).long().to(ON)] = torch.from_numpy(values).to(ON)
        self._step = torch.from_numpy(step.samples).int().to(ON)
        self.unsampled = step.samples.shape[1]
        self._last = self._slots.choices.last_tokens.clone()

    def answer(self, rows: int, queries: int) -> tuple[torch.Tensor, Event]:
        assert queries == 1, "this device has no drafts"
        return torch.full((2, SLOTS), -9, dtype=torch.int32, device=ON), Event()

    def sample(self, count: int, answer: torch.Tensor, ready: Event) -> None:
        assert count == self.unsampled
        self.unsampled = 0
        slots, positions = self._step[1, :count], self._step[2, :count]
        rows = zip(slots.tolist(), positions.tolist(), strict=True)
        logits = torch.stack([logits_of(slot, at, int(self._last[slot])) for slot, at in rows]).to(ON)
        choose(logits, slots, positions, self._slots.choices, scratch(SLOTS, VOCAB, ON), answer[:, :count])
        ready.record()


@dataclass
class World:
    """An engine of `build` without a model."""

    engine: Any
    maker: PlanMaker
    pending: deque[Pending] = field(default_factory=deque)

    def open(self, slot: int, grammar: str, sampling: Sampling, **more: object) -> None:
        self.maker.tables.pop(slot, None)
        self.maker.open(slot, PROMPT, sampling, seed=77 * slot, grammar=grammar, **more)

    def forward(self, rows: list[Row]) -> None:
        self.pending.append(self.engine.forward(self.maker.plan(rows)))

    def sample(self) -> StepOutput:
        return cast("StepOutput", self.engine.sample(self.pending.popleft()))


def rows_at(step: int, slots: range | list[int] = range(SLOTS)) -> list[Row]:
    if not step:
        return [Row(slot, 0, len(PROMPT), feeds=(slot,)) for slot in slots]
    return [Row(slot, len(PROMPT) + step - 1, 1, from_device=True, feeds=(slot,)) for slot in slots]


@pytest.fixture
def world() -> Iterator[World]:
    engine: Any = object.__new__(CudaBackend)
    grammars = build_grammars(lambda: VOCABULARY, VOCAB)
    slots = CudaSlots(SLOTS, 8, 99, 90, ON, VOCAB)
    engine._slots, engine._runner, engine._host_rows = slots, Device(slots), HostRows({}, grammars, ON)
    engine._sampling = DeviceSampling(SLOTS, VOCAB, slots.choices, torch.float32)
    engine._stage, engine._alone = SimpleNamespace(last=True), True
    engine._cache = SimpleNamespace(copy=lambda source, target: None)
    engine._masks = slots.choices.masks.numpy().view("int32")
    engine._late = LateSampling(engine._sample_masked)
    engine.info = SimBackend(SimOptions(timing="step=0", blocks=60, slots=SLOTS)).info
    yield World(engine, PlanMaker(engine))
    grammars.end()


def by_definition(wishes: list[tuple[str, Sampling]]) -> list[list[int]]:
    """Each slot's tokens: its logits, masked, then chosen by the sampler in torch."""
    grammars, sampler = (
        build_grammars(lambda: VOCABULARY, VOCAB),
        Sampler(SLOTS, VOCAB, torch.device("cpu"), deterministic=False),
    )
    known = [[*PROMPT] for _ in wishes]
    for slot, (grammar, sampling) in enumerate(wishes):
        opened = SlotOpen(
            slot=slot, generation=0, seq=slot, seed=77 * slot, prompt_tokens=len(PROMPT), grammar=grammar,
            sampling=sampling, tokens=ints(PROMPT), stop_ids=ints(VOCABULARY.eos_ids),
        )  # fmt: skip
        sampler.open(opened)
        grammars.open(opened)
        while len(known[slot]) < len(PROMPT) + STEPS and known[slot][-1] not in VOCABULARY.eos_ids:
            logits = logits_of(slot, len(known[slot]), known[slot][-1])[None]
            assert not grammar or grammars.mask(logits, [0], [slot], lambda of: known[of]) == {}
            known[slot] += sampler.choose(logits, [slot], [len(known[slot])]).tolist()
    grammars.end()
    return [tokens[len(PROMPT) :] for tokens in known]


@pytest.mark.parametrize("in_flight", [1, 2, 3])
def test_late_sampling_gives_the_tokens_of_the_definition_at_any_number_of_steps_in_flight(
    world: World, in_flight: int
) -> None:
    for slot, (grammar, sampling) in enumerate(WISHES):
        world.open(slot, grammar, sampling, stop_ids=ints(VOCABULARY.eos_ids))
    found: list[list[int]] = [[] for _ in WISHES]
    outputs = []
    for step in range(STEPS):
        world.forward(rows_at(step))
        if len(world.pending) == in_flight:
            outputs.append(world.sample())
    while world.pending:
        outputs.append(world.sample())
    for output in outputs:
        assert output.row_errors == ()
        for slot, token in enumerate(output.ids):
            found[slot] += [token] if token >= 0 else []
    assert found == by_definition(WISHES)
    assert len(found[3]) == 2  # a letter and the end, though it was planned on


def test_a_mask_is_not_that_of_the_slot_s_sequence_before(world: World) -> None:
    """Neither for a sequence without a grammar nor for one whose grammar fails."""
    greedy = Sampling(temperature=0.0)
    for slot in range(4):
        world.open(slot, DIGITS, greedy)
    world.forward(rows_at(0, [0, 1, 2, 3]))
    for slot in range(4):  # the sampling of that step is queued before its slots change
        world.engine.close_slot(slot)
    assert world.engine._runner.unsampled == 0
    digits = {VOCABULARY.bytes_with(())[token] for token in world.sample().ids}
    assert all(text.isdigit() for text in digits)
    world.open(0, "", greedy)
    world.open(1, LETTERS, greedy)
    world.open(2, WRONG, greedy)
    world.forward(rows_at(0, [0, 1, 2]))
    output = world.sample()
    best = [int(logits_of(slot, 3, PROMPT[-1]).argmax()) for slot in range(3)]
    assert output.ids[0] == best[0]
    assert set(VOCABULARY.bytes_with(())[output.ids[1]]) <= set(b"abcdef")
    assert output.ids[1] != best[1]
    assert (output.ids[2], output.done[2]) == (-1, 2)
    assert [row for row, _ in output.row_errors] == [2]
    assert [*world.engine._slots.tokens(2)] == PROMPT


def test_a_step_is_sampled_once_though_two_threads_come_for_it() -> None:
    begun, go = threading.Event(), threading.Event()
    queued = []

    def queue(pending: Pending) -> tuple[int, dict[int, str]]:
        begun.set()
        assert go.wait(10)
        queued.append(pending.plan.step)
        cast("Event", pending.forwarded).record()
        return 7, {}

    late = LateSampling(queue)
    first, second = pending_of(1), pending_of(2)
    late.put(first)
    other = threading.Thread(target=late.flush)
    other.start()
    assert begun.wait(10)
    answers: list[Any] = []
    sampling = threading.Thread(target=lambda: answers.append(late.answer(first)))
    sampling.start()
    go.set()
    other.join(10)
    late.put(second)
    late.flush(first)  # the result of a step waits for no masks of the next
    sampling.join(10)
    assert answers == [(Answered([4], [0]), (7, {}))]
    assert queued == [1]
    assert late.answer(second) == (Answered([4], [0]), (7, {}))
    assert queued == [1, 2]


def test_error_belongs_to_the_step_whose_masks_failed() -> None:
    def queue(pending: Pending) -> tuple[int, dict[int, str]]:
        if pending.plan.step == 1:
            raise ValueError("no memory")
        cast("Event", pending.forwarded).record()
        return 0, {}

    late = LateSampling(queue)
    first, second = pending_of(1), pending_of(2)
    late.put(first)
    late.flush()  # the next forward
    late.put(second)
    with pytest.raises(ValueError, match="no memory"):
        late.answer(first)
    assert late.answer(second)[0].ids == [4]


def pending_of(step: int) -> Pending:
    """A step of one row that samples token 4."""
    maker = PlanMaker(SimBackend(SimOptions(timing="step=0", blocks=9, slots=2)), step=step - 1)
    maker.tables[0] = []
    ready: Any = Event()
    return Pending(
        plan=maker.plan([Row(0, 0, 3, feeds=(0,))]), forwarded=ready, answer=torch.tensor([[4], [0]]),
        tokens=(ints(PROMPT),), late=Late(),
    )  # fmt: skip
