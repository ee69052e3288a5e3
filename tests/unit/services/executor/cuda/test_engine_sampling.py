"""Rows outside the graph: the reference, then the kernel. On a CPU in Triton's interpreter."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from support.executor.gpu_side import DEVICE
from support.executor.plan_maker import PlanMaker, Row

from kernels.sampling import INVALID
from kernels.sampling.gpu import TAKEN, choose, scratch
from kernels.sampling.ref import FILTERS, LOGITS
from services.executor.cuda.engine import DeviceSampling
from services.executor.cuda.input_batch import CudaSlots
from services.executor.engine import StepOutput
from services.executor.sampling.sampler import (
    BY_MODEL,
    BY_REQUEST,
    ROW_ERRORS,
    Sampler,
    end_slots,
    record_choices,
    row_errors,
)
from services.executor.sim.engine import SimBackend, SimOptions
from shared.messages import WHOLE_VECTOR, Sampling, SlotOpen, floats, ints

VOCAB, CONTEXT = 1000, 90
PROMPT = [1, 2, 3]
# Settings with one that changes logits, and the same settings without.
CHANGED = [
    {"temperature": 0.0, "repetition_penalty": 1.2},
    {"temperature": 1.0, "frequency_penalty": 0.7},
    {"temperature": 0.8, "presence_penalty": 1.0, "top_k": 40},
    {"temperature": 1.2, "repetition_penalty": 1.3, "top_p": 0.9},
    {"temperature": 1.0, "frequency_penalty": -0.5, "min_p": 0.05, "top_k": 300},
    {"temperature": 1.0, "bias_ids": ints([5, 6]), "bias_values": floats([4.0, -4.0])},
]
PLAIN = [
    {"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.7, "top_k": 5},
    {"temperature": 1.0, "top_k": 40, "top_p": 0.9, "min_p": 0.01}, {"temperature": 1.3, "top_p": 0.8},
    {"temperature": 1.0, "min_p": 0.1},
]  # fmt: skip
Wishes = list[dict[str, object]]


def opened(slot: int, tokens: list[int] | None = None, **more: object) -> SlotOpen:
    have = tokens or PROMPT
    seen = {"prompt_tokens": len(have), "generation": 0, "seq": 0, "seed": 77 * slot}
    return SlotOpen(**{"slot": slot, **seen, **more}, tokens=ints(have))


def made(*slots: SlotOpen, dtype: torch.dtype = torch.float32) -> tuple[DeviceSampling, CudaSlots]:
    state = CudaSlots(len(slots), 6, 99, CONTEXT, torch.device(DEVICE), VOCAB)
    sampling = DeviceSampling(len(slots), VOCAB, state.choices, dtype)
    maker = PlanMaker(SimBackend(SimOptions(timing="step=0", blocks=50, slots=64)))
    for each in slots:
        state.open(each)
        sampling.open(each)
        maker.tables[each.slot] = []
    places, values = state.take_updates(maker.plan([Row(0, 0, len(PROMPT))]))
    state.words[torch.from_numpy(places).long().to(DEVICE)] = torch.from_numpy(values).to(DEVICE)
    return sampling, state


def wishing(wishes: Wishes, dtype: torch.dtype = torch.float32) -> tuple[DeviceSampling, CudaSlots]:
    return made(*(opened(i, sampling=Sampling(**wish)) for i, wish in enumerate(wishes)), dtype=dtype)


def logits_of(rows: int, seed: int = 0) -> torch.Tensor:
    """As a model in bfloat16 gives them."""
    normal = torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed))
    return (normal * 3).bfloat16().float().to(DEVICE)


def sharp(*tokens: int) -> torch.Tensor:
    logits = torch.zeros(len(tokens), VOCAB, device=DEVICE)
    logits[torch.arange(len(tokens)), torch.tensor(tokens)] = 9.0
    return logits


def test_the_kernel_after_the_reference_draws_what_the_reference_draws() -> None:
    """Every setting in one batch, step after step, so that counts follow. Exponentials and sums round
    differently, which shows only where two scores are equal but for rounding: see test_ref_draw.py."""
    wishes: Wishes = [*CHANGED, *PLAIN]
    rows = list(range(len(wishes)))
    sampling, _ = wishing(wishes)
    torch_alone = Sampler(len(wishes), VOCAB, torch.device(DEVICE), deterministic=False)
    for i, wish in enumerate(wishes):
        torch_alone.open(opened(i, sampling=Sampling(**wish)))
    for step in range(2):
        logits, positions = logits_of(len(wishes), step), [len(PROMPT) + step] * len(wishes)
        wanted = torch_alone.pick(torch_alone.adjusted(logits, rows, positions), logits, rows, positions)
        found = sampling.choose(logits, rows, positions)[0]
        assert found.tolist() == wanted.tolist()
        torch_alone.remember(rows, found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_row_gets_the_token_of_the_graph_beside_rows_with_any_options(dtype: torch.dtype) -> None:
    wishes: Wishes = [wish for pair in zip(PLAIN, CHANGED, strict=True) for wish in pair]
    logits, positions = logits_of(len(wishes)), list(range(10, 10 + len(wishes)))
    sampling, state = wishing(wishes, dtype)
    mixed = sampling.choose(logits, list(range(len(wishes))), positions)
    plain = list(range(0, len(wishes), 2))
    _, state = wishing(wishes, dtype)
    columns = torch.tensor([plain, plain], dtype=torch.int32, device=DEVICE)
    columns[1] += 10
    graph = torch.empty_like(columns)
    room = scratch(len(plain), VOCAB, torch.device(DEVICE))
    choose(logits[plain].to(dtype), columns[0], columns[1], state.choices, room, graph)
    assert mixed[:, plain].tolist() == graph.tolist()


def test_masks_of_grammars_leave_only_their_tokens() -> None:
    """Most logits are minus infinity: fewer tokens than top-k, than the groups tried, or only one."""
    allowed = [[7], [3, 900], list(range(0, VOCAB, 9))]
    logits = torch.full((len(PLAIN) * 3, VOCAB), -math.inf, device=DEVICE)
    for i in range(len(logits)):
        logits[i, allowed[i % 3]] = logits_of(1, i)[0, allowed[i % 3]]
    wishes: Wishes = [wish for wish in PLAIN for _ in allowed]
    rows, positions = list(range(len(wishes))), [10] * len(wishes)
    found = wishing(wishes, torch.bfloat16)[0].choose(logits, rows, positions)[0].tolist()
    assert all(token in allowed[i % 3] for i, token in enumerate(found))
    reference = Sampler(len(wishes), VOCAB, torch.device(DEVICE), deterministic=False)
    for i, wish in enumerate(wishes):
        reference.open(opened(i, sampling=Sampling(**wish)))
    assert found == reference.choose(logits, rows, positions).tolist()


def test_rows_with_a_mask_get_the_token_of_masked_logits_and_keep_theirs() -> None:
    """Also those whose logits change first."""
    wishes: Wishes = [wish for pair in zip(PLAIN, CHANGED, strict=True) for wish in pair]
    rows, positions = list(range(len(wishes))), [10] * len(wishes)
    under = [opened(i, sampling=Sampling(**wish), grammar="g" * (i % 3 > 0)) for i, wish in enumerate(wishes)]
    sampling, state = made(*under, dtype=torch.bfloat16)
    state.choices.masks[:] = 0b00010001  # every fourth token
    logits = logits_of(len(wishes))
    before, masked = logits.clone(), logits.clone()
    tokens = torch.arange(VOCAB, device=DEVICE)
    for row in rows:
        masked[row, (tokens % 4 > 0) & (row % 3 > 0)] = -math.inf
    wanted = wishing(wishes, torch.bfloat16)[0].choose(masked, rows, positions).tolist()
    assert sampling.choose(logits, rows, positions).tolist() == wanted
    assert torch.equal(logits, before)  # log probabilities are of these


def test_slots_end_in_the_kernel() -> None:
    wishes: Wishes = [CHANGED[0], PLAIN[0], CHANGED[0], PLAIN[0]]
    slots = [
        opened(i, sampling=Sampling(**wish), stop_ids=ints([7]), max_length=0 if i else 5)
        for i, wish in enumerate(wishes)
    ]
    sampling, state = made(*slots)
    end_slots(state.choices.done, [3])
    ids, done = sampling.choose(sharp(5, 6, 7, 8), [0, 1, 2, 3], [4] * 4).tolist()
    assert (ids, done) == ([5, 6, 7, -1], [1, 0, 1, 2])
    assert state.choices.last_tokens[:4].tolist() == [5, 6, 7, 3]


def test_rows_without_a_token_end_and_name_the_cause() -> None:
    tiny = {"temperature": 1.0, "repetition_penalty": 1e-40}
    sampling, state = wishing([CHANGED[1], PLAIN[0], tiny, PLAIN[1], tiny])
    logits = sharp(5, 6, 1, 8, 9)
    logits[0], logits[4, 500] = math.nan, math.inf
    end_slots(state.choices.done, [3])
    ids, done = sampling.choose(logits, list(range(5)), [4] * 5).tolist()
    assert (ids, done) == ([-1, 6, -1, -1, -1], [INVALID, 0, INVALID + 1, 2, INVALID])
    assert state.choices.done[:5].tolist() == [1, 0, 1, 1, 1]
    assert state.choices.last_tokens[:5].min() >= 0  # read though they are done
    assert row_errors(done) == {0: ROW_ERRORS[BY_MODEL], 2: ROW_ERRORS[BY_REQUEST], 4: ROW_ERRORS[BY_MODEL]}
    assert done == [2, 0, 2, 2, 2]


def test_a_slot_is_opened_again_without_what_it_had() -> None:
    asked = opened(0, sampling=Sampling(temperature=0.0, frequency_penalty=100.0), tokens=[1, 7, 7])
    sampling, _ = made(dataclasses.replace(asked, prompt_tokens=1))
    assert sampling.choose(sharp(7), [0], [3])[0].tolist() != [7]
    sampling.open(opened(0, sampling=Sampling(temperature=0.0)))
    assert sampling.choose(sharp(7), [0], [3])[0].tolist() == [7]


def test_graph_cannot_sample_these_rows() -> None:
    for more in ({"processors": ("{}",)}, {"logprobs": 1}, {"min_tokens": 4}, {}):
        sampling, _ = made(opened(0), opened(1, **more))
        assert not sampling.is_outside_graph([0])
        assert sampling.is_outside_graph([0, 1]) == bool(more)
        sampling.close(1)
        assert not sampling.is_outside_graph([1])


def test_tokens_chosen_by_another_rank_leave_the_same_state() -> None:
    more = [{}, {"stop_ids": ints([7])}, {"max_length": 4}, {}]
    slots = [opened(i, sampling=Sampling(temperature=0.0), **each) for i, each in enumerate(more)]
    (sampling, state), (_, other) = made(*slots), made(*slots)
    for each in (state, other):
        end_slots(each.choices.done, [3])
    ids, done = sampling.choose(sharp(5, 6, 7, 8), [2, 0, 1, 3], [3] * 4).tolist()
    assert done == [1, 0, 1, 2]
    record_choices(other.choices.last_tokens, other.choices.done, [2, 0, 1, 3], ints(ids), ints(done))
    assert torch.equal(other.words, state.words)
    assert other.choices.last_tokens.tolist()[:3] == [6, 7, 5]


def test_a_kernel_takes_the_end_of_the_pipeline() -> None:
    for taken in (LOGITS, (*TAKEN, *LOGITS), (*FILTERS, *FILTERS)):
        with pytest.raises(ValueError, match="only take the last filters"):
            Sampler(1, VOCAB, torch.device("cpu"), deterministic=False, taken=taken)


def test_a_slot_that_pools_is_sampled_outside_and_its_row_has_a_vector() -> None:
    sampling, _ = made(opened(0, pooling=3), opened(1), opened(2, pooling=WHOLE_VECTOR))
    assert [sampling.is_outside_graph([slot]) for slot in range(3)] == [True, False, True]
    logits = torch.randn(3, VOCAB, device=DEVICE)
    plain, _ = made(opened(0), opened(1), opened(2))
    ids, wanted_ids = (each.choose(logits, [2, 1, 0], [3, 3, 3])[0].tolist() for each in (sampling, plain))
    assert ids == wanted_ids
    hidden = torch.randn(3, 8, device=DEVICE).bfloat16()
    output = sampling.sampler.with_vectors(StepOutput(ids=ints(), done=ints()), hidden, [2, 1, 0])
    vectors = {row: torch.frombuffer(bytearray(data), dtype=torch.float32) for row, data in output.vectors}
    assert sorted(vectors) == [0, 2]
    for row, vector in vectors.items():
        wanted = hidden[row, : len(vector)].double().cpu()
        assert torch.allclose(vector.double(), wanted / wanted.norm(), atol=1e-6)
    assert (len(vectors[0]), len(vectors[2])) == (8, 3)
    sampling.close(0)
    assert not sampling.is_outside_graph([0])
