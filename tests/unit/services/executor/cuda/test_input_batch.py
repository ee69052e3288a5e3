"""What the host prepares for the GPU: slot words, plans in token order, the buffer that a graph reads."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.executor.plan_maker import PlanMaker, Row

from kernels.sampling.ref import COLUMN
from services.executor.cuda.input_batch import (
    STOP_IDS,
    CudaSlots,
    Layout,
    arrange,
    fill,
    samples_of,
    split_dense,
    tiles_of,
)
from services.executor.cuda.kernel_configs import (
    WIDE,
    DeviceTuning,
    device_tuning,
    for_fp8_kv,
    for_large_heads,
    row_by_row,
)
from services.executor.parallel.step_split import Chunk, split
from services.executor.sampling.sampler import slot_row
from services.executor.sim.engine import SimBackend, SimOptions
from shared.errors import EngineError
from shared.messages import Sampling, SlotOpen, ints

SPARE, CONTEXT = 99, 90


@pytest.fixture
def slots() -> CudaSlots:
    return CudaSlots(4, 6, SPARE, CONTEXT, torch.device("cpu"), 100)


def opened(slot: int, tokens: list[int], **more: object) -> SlotOpen:
    return SlotOpen(
        **{"slot": slot, "generation": 0, "seq": 0, "prompt_tokens": len(tokens), **more}, tokens=ints(tokens)
    )


def maker() -> PlanMaker:
    return PlanMaker(SimBackend(SimOptions(timing="step=0", blocks=50, slots=8)))


def settle(slots: CudaSlots, made: PlanMaker, rows: list[Row]) -> None:
    places, values = slots.take_updates(made.plan(rows))
    slots.words[torch.from_numpy(places).long()] = torch.from_numpy(values)


def test_words_of_a_slot_land_where_the_kernels_read(slots: CudaSlots) -> None:
    made = maker()
    hot = Sampling(temperature=0.5, top_k=3, top_p=0.25, min_p=0.125, presence_penalty=-0.5)
    slots.open(opened(2, [1, 2, 3], sampling=hot, seed=2**64 - 3, stop_ids=ints([7, 8])))
    slots.open(opened(1, [4], max_length=12))
    made.tables = {1: [], 2: []}
    settle(slots, made, [Row(2, 0, 3), Row(1, 0, 1)])
    choices = slots.choices
    assert choices.parameters[2].tolist() == slot_row(hot).tolist()  # one layout on host and device
    assert choices.parameters[2, [COLUMN["top_p"], COLUMN["presence_penalty"]]].tolist() == [0.25, -0.5]
    assert choices.seeds[2].item() == -3
    assert choices.stop_ids[2].tolist() == [7, 8, *[-1] * (STOP_IDS - 2)]
    assert choices.max_lengths[:4].tolist() == [0, 12, CONTEXT, 0]
    assert (choices.last_tokens[1].item(), choices.last_tokens[2].item()) == (4, 3)
    assert choices.done.tolist() == [0, 0, 0, 0, 1]  # the last one belongs to no slot
    assert slots.state.tables[2].tolist() == [*made.tables[2], *[SPARE] * 5]
    assert slots.take_updates(made.plan([]))[0].size == 0  # sent once


def test_a_slot_opened_twice_before_a_step_has_the_words_of_the_second_opening(slots: CudaSlots) -> None:
    made = maker()
    for tokens, limit in (([9, 9, 9], 30), ([4], 12)):
        slots.open(opened(1, tokens, max_length=limit, sampling=Sampling(temperature=limit / 60)))
    made.tables = {1: []}
    places, values = slots.take_updates(made.plan([Row(1, 0, 1)]))
    assert len({*places.tolist()}) == len(places)
    slots.words[torch.from_numpy(places).long()] = torch.from_numpy(values)
    assert (slots.choices.max_lengths[1].item(), slots.choices.last_tokens[1].item()) == (12, 4)
    assert slots.choices.parameters[1, COLUMN["temperature"]].item() == pytest.approx(0.2)
    assert slots.state.tables[1].tolist() == [*made.tables[1], *[SPARE] * 5]


def test_history_of_a_slot_is_copied_once_with_its_prediction_at_the_end() -> None:
    slots, made = CudaSlots(4, 6, SPARE, CONTEXT, torch.device("cpu"), 100, drafts=True), maker()
    foreseen = [*range(10, 10 + CONTEXT), 5, 6, 7, 8]
    slots.open(opened(2, [1, 2, 3], prompt_tokens=2, max_length=CONTEXT, prediction=ints([7, 8])))
    slots.open(opened(1, [4], max_length=CONTEXT - 2, prediction=ints(foreseen)))
    made.tables = {1: [], 2: []}
    settle(slots, made, [Row(1, 0, 1), Row(2, 0, 3)])
    drafts = slots.state.drafts
    assert drafts is not None
    assert drafts.places[:4].tolist() == [0, 0, 2, 0]
    assert drafts.prompts[:4].tolist() == [0, 1, 2, 0]
    # After the longest answer there is room for so many, also where the answer may fill the context.
    assert drafts.predicted[:4].tolist() == [0, CONTEXT + 3, 2, 0]
    assert not drafts.history.any()
    slots.copy_histories(ints([2, 1]))
    assert drafts.history[2].tolist() == [1, 2, 3, *[0] * (2 * CONTEXT - 4), 7, 8]
    assert drafts.history[1].tolist() == [4, *[0] * (CONTEXT - 3), *foreseen[: CONTEXT + 3]]
    drafts.history[2, 3] = 9  # chosen by a kernel
    slots.copy_histories(ints([2, 1]))
    assert drafts.history[2, :4].tolist() == [1, 2, 3, 9]


def test_tokens_chosen_by_another_stage_are_set_with_the_next_step(slots: CudaSlots) -> None:
    made = maker()
    for slot in range(4):
        slots.open(opened(slot, [slot]))
    made.tables = {slot: [] for slot in range(4)}
    settle(slots, made, [Row(slot, 0, 1) for slot in range(4)])
    slots.record_sampled([0, 1, 3], ints([7, 8, -1]), ints([0, 1, 2]))
    slots.record_sampled([2], ints([9]), ints([0]))
    slots.open(opened(1, [5]))  # what was sent before is of another sequence
    settle(slots, made, [Row(0, 1, 1, True)])
    assert slots.choices.last_tokens[:3].tolist() == [7, 5, 9]
    assert slots.choices.done[:4].tolist() == [0, 0, 0, 1]
    assert slots.take_updates(made.plan([]))[0].size == 0  # sent once
    slots.record_sampled([0], ints([7]), ints([0]))
    slots.reset()
    assert slots.take_updates(made.plan([]))[0].size == 0


def test_slot_with_impossible_options_is_refused(slots: CudaSlots) -> None:
    with pytest.raises(EngineError, match="slot 4 is not one of 4 slots"):
        slots.open(opened(4, [1]))
    with pytest.raises(EngineError, match="slot 0 has 129 stop ids; at most 128"):
        slots.open(opened(0, [1], stop_ids=ints(range(129))))
    with pytest.raises(EngineError, match="slot 3, which is not open"):
        slots.tokens(3)


def test_decodes_come_first_and_padding_belongs_to_no_slot(slots: CudaSlots) -> None:
    made = maker()
    slots.open(opened(2, [1, 2, 3, 4, 5]))
    slots.open(opened(1, [8, 9]))
    made.tables = {1: [], 2: []}
    rows = [Row(2, 0, 5, feeds=(2,)), Row(1, 2, 1, True, (1,))]
    step = arrange(made.plan(rows), slots)
    assert (step.tokens, step.decode_rows, step.chunks) == (6, 1, (Chunk(2, 1, 0, 5),))
    assert step.columns.tolist() == [[1, 2, 2, 2, 2, 2], [2, 0, 1, 2, 3, 4], [-1, 1, 2, 3, 4, 5]]
    assert step.samples.tolist() == [[5, 0], [2, 1], [5, 3]]
    tiles = tiles_of(step.chunks, 2)
    assert tiles.tolist() == [[2, 2, 2], [5, 3, 1], [4, 2, 0], [1, 2, 2]]
    layout = Layout(4, 8, 4)
    buffer = np.full(layout.words, -5, dtype=np.int32)
    fill(buffer, layout, step, tiles, slots.spare_slot)
    assert buffer[:12].tolist() == [5, 0, 0, 0, 2, 1, 4, 4, 5, 3, 0, 0]
    assert buffer[12:36].reshape(3, 8)[:, 5:].tolist() == [[2, 4, 4], [4, 0, 0], [5, 0, 0]]
    assert buffer[36] == 1
    assert buffer[40:].reshape(4, 4).tolist() == [[2, 2, 2, 0], [5, 3, 1, 0], [4, 2, 0, 0], [1, 2, 2, 0]]


def test_decodes_that_do_not_stand_apart_are_chunks_of_one(slots: CudaSlots) -> None:
    made = maker()
    slots.open(opened(2, [1, 2, 3, 4, 5]))
    slots.open(opened(1, [8, 9]))
    made.tables = {1: [], 2: []}
    rows = [Row(2, 3, 2, feeds=(2,)), Row(1, 2, 1, True, (1,))]
    step = arrange(made.plan(rows), slots, apart=False)
    assert (step.tokens, step.decode_rows) == (3, 0)
    assert step.chunks == (Chunk(2, 0, 3, 2), Chunk(1, 2, 2, 1))
    assert step.columns.tolist() == [[2, 2, 1], [3, 4, 2], [4, 5, -1]]
    assert step.samples.tolist() == [[1, 2], [2, 1], [5, 3]]


def test_tokens_that_the_host_does_not_have_fail_the_step(slots: CudaSlots) -> None:
    made = maker()
    slots.open(opened(1, [8, 9]))
    made.tables = {1: []}
    with pytest.raises(EngineError, match="slot 1 has 2 tokens; the plan wants 0 to 3"):
        arrange(made.plan([Row(1, 0, 3)]), slots)


def test_long_first_chunks_go_to_the_library_but_for_their_ends() -> None:
    chunks = (
        Chunk(0, 0, 0, 1500),
        Chunk(1, 1500, 0, 1023),
        Chunk(2, 2523, 16, 2048),
        Chunk(3, 4571, 0, 1024),
    )
    dense, rest = split_dense(chunks)
    assert dense == (Chunk(0, 0, 0, 1024), Chunk(3, 4571, 0, 1024))
    assert rest == (Chunk(0, 1024, 1024, 476), chunks[1], chunks[2])


def test_layouts_by_device_and_tokens() -> None:
    h200 = device_tuning("NVIDIA H200")
    assert h200.layouts_of(32).chained
    assert not h200.layouts_of(33).chained
    assert h200.layouts_of(1).product(4096, 4096, 16) != h200.layouts_of(1).product(4096, 4096, 17)
    assert h200.layouts_of(256).product(4096, 4096, 256) is None
    assert h200.layouts_of(16).decode != h200.layouts_of(17).decode
    assert h200.all() == (h200.layouts_of(1), h200.layouts_of(32), h200.layouts_of(33))
    assert device_tuning("another").layouts_of(1).product(4096, 4096, 1) is None
    assert device_tuning("another") == DeviceTuning()
    assert WIDE.few.decode.tile_tokens == 32
    shared = device_tuning("NVIDIA H200", 4)
    assert shared.layouts_of(256).chained
    assert not shared.layouts_of(257).chained
    assert shared.many == h200.many
    assert shared.layouts_of(1) == shared.few
    assert device_tuning("NVIDIA H200", 1) == h200
    gate_up = shared.layouts_of(64).product(7168, 4096, 64)
    assert gate_up is not None
    assert gate_up.gated
    assert shared.layouts_of(256).product(7168, 4096, 65) is None


def test_kv_in_fp8_has_layouts_of_its_own_where_they_were_measured() -> None:
    h200, shared = device_tuning("NVIDIA H200"), device_tuning("NVIDIA H200", 4)
    narrow = for_fp8_kv(h200)
    assert [each.decode for each in narrow.all()] == [each.decode_fp8 for each in h200.all()]
    assert (narrow.few.products, narrow.prefill) == (h200.few.products, h200.prefill)
    assert for_fp8_kv(shared).few == shared.few
    assert for_fp8_kv(DeviceTuning()) == DeviceTuning()
    h100 = device_tuning("NVIDIA H100 80GB HBM3")
    assert for_fp8_kv(h100).few.decode == narrow.few.decode
    assert for_fp8_kv(h100).many.decode == h100.many.decode_fp8 != narrow.many.decode


def test_large_heads_are_attended_in_smaller_tiles() -> None:
    h200 = device_tuning("NVIDIA H200")
    large = for_large_heads(h200)
    assert (large.prefill, large.layouts_of(1).decode, large.layouts_of(64).decode) == (
        WIDE.prefill,
        *[WIDE.few.decode] * 2,
    )
    assert large.layouts_of(1).product(4096, 4096, 16) == h200.layouts_of(1).product(4096, 4096, 16)
    assert row_by_row(large).many.decode == WIDE.few.decode


def test_micro_batches_sample_the_tokens_of_the_whole_step(slots: CudaSlots) -> None:
    made = maker()
    for slot in range(4):
        slots.open(opened(slot, list(range(100 * slot, 100 * slot + 60))))
    made.tables = {slot: [] for slot in range(4)}
    rows = [
        Row(0, 60, 1, True, (0,)),
        Row(1, 0, 50, feeds=(1,)),
        Row(3, 10, 40, feeds=(3,)),
        Row(2, 7, 1, feeds=(2,)),
    ]
    plan = made.plan(rows)
    parts = split(plan, cut=16)
    assert parts is not None
    assert list(parts.first.counts) == [1, 47]  # the second row is cut
    whole = arrange(plan, slots)
    first, second = arrange(parts.first, slots), arrange(parts.second, slots, apart=False)
    assert (first.decode_rows, second.decode_rows) == (1, 0)
    after = 64
    tokens = np.full((3, after + second.tokens), -1)
    tokens[:, : first.tokens], tokens[:, after:] = first.columns, second.columns
    samples = samples_of(first, second, after, parts.order)
    assert samples[1:].tolist() == whole.samples[1:].tolist()
    assert tokens[:, samples[0]].tolist() == whole.columns[:, whole.samples[0]].tolist()
