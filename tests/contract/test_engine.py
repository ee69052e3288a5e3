"""What every engine must do, on the simulated one and on a tiny random model: see backend.Backend."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from pathlib import Path

import pytest
from support.executor.engine_pair import ENGINES, KIND, PROMPT, small_engine
from support.executor.plan_maker import PlanMaker, Row
from support.executor.tiny_models import VOCAB, save_tiny

from services.executor.engine import Backend, StepOutput
from shared.messages import WHOLE_VECTOR, Sampling, ints

HOT = Sampling(temperature=1.5)
Make = Callable[[], Backend]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(KIND, tmp_path_factory.mktemp("tiny"))


@pytest.fixture(params=ENGINES)
def make(request: pytest.FixtureRequest, folder: Path) -> Make:
    return lambda: small_engine(request.param, folder, {})


@pytest.fixture
def maker(make: Make) -> PlanMaker:
    return PlanMaker(make())


def lists(output: StepOutput) -> tuple[list[int], list[int]]:
    return list(output.ids), list(output.done)


def alone(make: Make, slot: int, steps: int, seed: int, prompt: list[int] = PROMPT) -> list[int]:
    """The first token and `steps` more of one sequence in a fresh engine."""
    maker = PlanMaker(make())
    maker.open(slot, prompt, HOT, seed=seed)
    first = maker.prefill({slot: len(prompt)}).ids[0]
    return [first, *maker.decode({slot: len(prompt) + 1}, steps)[slot]]


def test_the_facts_are_complete(make: Make) -> None:
    info = make().info
    assert (info.blocks, info.slots, info.block_tokens, info.max_context) == (80, 8, 16, 256)
    assert info.vocab >= VOCAB
    assert info.max_step_tokens >= info.slots
    assert all((info.backend, info.model, info.dtype, info.fingerprint, info.vocab_digest))


def test_ids_depend_on_prompt_and_seed_not_on_slot_batch_or_chunks(make: Make, maker: PlanMaker) -> None:
    for slot in range(5):
        maker.open(slot, PROMPT[slot:], HOT, seed=slot)
    maker.run([Row(slot, 0, 10 + slot) for slot in range(5)])  # a first chunk of each samples nothing
    rows = [Row(slot, 10 + slot, len(PROMPT) - 10 - 2 * slot, feeds=(slot,)) for slot in range(5)]
    firsts = maker.run(rows).ids
    rest = maker.decode({slot: len(PROMPT) - slot + 1 for slot in range(5)}, 6)
    for slot in range(5):
        wanted = alone(make, 7 - slot, 6, slot, PROMPT[slot:])
        assert [firsts[slot], *rest[slot]] == wanted
        assert alone(make, slot, 6, slot + 50, PROMPT[slot:]) != wanted


def test_a_chunk_that_is_not_the_last_samples_nothing(maker: PlanMaker) -> None:
    maker.open(0, PROMPT)
    assert lists(maker.run([Row(0, 0, 10)])) == ([], [])


def test_one_prompt_row_feeds_two_slots(make: Make, maker: PlanMaker) -> None:
    maker.open(0, PROMPT, HOT, seed=5)
    maker.open(1, PROMPT, HOT, seed=6)
    firsts = maker.run([Row(0, 0, len(PROMPT), feeds=(0, 1))]).ids
    full, tail = maker.tables[0]
    copy = maker.free.pop()
    maker.set_table(1, [full, copy])
    rows = [Row(slot, len(PROMPT), 1, True, (slot,)) for slot in (0, 1)]
    seconds = maker.run(rows, copies=((tail, copy),)).ids
    for slot in (0, 1):
        assert [firsts[slot], seconds[slot]] == alone(make, 3, 1, 5 + slot)


def test_length_ends_a_slot_and_later_rows_are_no_ops(maker: PlanMaker) -> None:
    maker.open(0, PROMPT, HOT, seed=1, max_length=len(PROMPT) + 2)
    assert lists(maker.prefill({0: len(PROMPT)}))[1] == [0]
    steps = [maker.run([Row(0, len(PROMPT) + i, 1, True, (0,))]) for i in range(3)]
    assert [list(step.done) for step in steps] == [[1], [2], [2]]
    assert [list(step.ids) for step in steps[1:]] == [[-1], [-1]]


def test_a_stop_id_ends_a_slot_and_is_returned(make: Make, maker: PlanMaker) -> None:
    ids = alone(make, 0, 3, 11)
    assert ids[2] not in ids[:2]
    maker.open(0, PROMPT, HOT, seed=11, stop_ids=ints([ids[2]]))
    maker.prefill({0: len(PROMPT)})
    steps = [lists(maker.run([Row(0, len(PROMPT) + i, 1, True, (0,))])) for i in range(3)]
    assert steps == [([ids[1]], [0]), ([ids[2]], [1]), ([-1], [2])]


def test_no_stop_id_ends_a_slot_before_min_tokens(make: Make, maker: PlanMaker) -> None:
    prompt_and_answer = [*PROMPT, *alone(make, 0, 6, 11)]
    third = prompt_and_answer[len(PROMPT) + 2]
    for reopened in (0, 2):  # the same after a preemption: the prompt is as long as before
        tokens = prompt_and_answer[: len(PROMPT) + reopened]
        maker.open(0, tokens, HOT, seed=11, stop_ids=ints([third]), min_tokens=5, prompt_tokens=len(PROMPT))
        ended = [*lists(maker.prefill({0: len(tokens)}))[1]]
        for done in range(4 - reopened):
            ended += lists(maker.run([Row(0, len(tokens) + done, 1, True, (0,))]))[1]
        assert not any(ended)


def test_a_sequence_opened_again_with_its_tokens_goes_on(make: Make, maker: PlanMaker) -> None:
    ids = alone(make, 0, 8, 3)
    maker.open(4, PROMPT + ids[:4], HOT, seed=3, prompt_tokens=len(PROMPT))
    fifth = maker.run([Row(4, 0, len(PROMPT) + 4, feeds=(4,))]).ids[0]
    assert [fifth, *maker.decode({4: len(PROMPT) + 5}, 4)[4]] == ids[4:9]


def test_a_slot_is_new_after_close_and_after_reset(make: Make, maker: PlanMaker) -> None:
    wanted = alone(make, 0, 4, 8)
    maker.open(0, PROMPT, HOT, seed=9, max_length=len(PROMPT) + 1)
    maker.prefill({0: len(PROMPT)})  # the slot is done
    for forget in (lambda: maker.backend.close_slot(0), maker.backend.reset):
        forget()
        maker.backend.close_slot(0)  # unknown now
        maker.open(0, PROMPT, HOT, seed=8)
        first = maker.prefill({0: len(PROMPT)}).ids[0]
        assert [first, *maker.decode({0: len(PROMPT) + 1}, 4)[0]] == wanted


def test_warm_up_leaves_no_trace_and_closing_twice_is_closing(make: Make) -> None:
    backend = make()
    backend.warm_up()
    maker = PlanMaker(backend)
    maker.open(0, PROMPT, HOT, seed=2)
    assert maker.prefill({0: len(PROMPT)}).ids[0] == alone(make, 1, 0, 2)[0]
    backend.close()
    backend.close()


def test_a_row_that_pools_gives_a_vector_and_changes_no_other_row(make: Make) -> None:
    def answers(*, pooled: bool) -> tuple[list[list[int]], dict[int, bytes]]:
        maker, count = PlanMaker(make()), len(PROMPT)
        for slot in range(3):
            maker.open(slot, PROMPT, HOT, seed=slot)
        ids = [list(maker.run([Row(slot, 0, count, feeds=(slot,)) for slot in range(3)]).ids)]
        decodes = [Row(slot, count, 1, True, (slot,)) for slot in range(3)]
        if not pooled:
            return [*ids, list(maker.run(decodes).ids)], {}
        for slot, numbers in ((5, WHOLE_VECTOR), (6, 4), (7, WHOLE_VECTOR)):
            maker.open(slot, PROMPT[slot:], pooling=numbers, max_length=count - slot + 1)
        assert not maker.run([Row(6, 0, 5)]).vectors  # a chunk that is not the prompt's last
        starts = {5: 0, 6: 5, 7: 0}
        prompts = [Row(s, start, count - s - start, feeds=(s,)) for s, start in starts.items()]
        found = maker.run([*decodes, *prompts])
        assert list(found.done[3:]) == [1, 1, 1]
        return [*ids, list(found.ids[:3])], dict(found.vectors)

    plain, _ = answers(pooled=False)
    beside, vectors = answers(pooled=True)
    assert beside == plain
    assert sorted(vectors) == [3, 4, 5]
    assert len(vectors[3]) == len(vectors[5]) == 4 * make().info.hidden
    assert len(vectors[4]) == 4 * 4
    for data in vectors.values():
        assert sum(x * x for x in array("f", data)) == pytest.approx(1)


def test_the_vector_of_a_prompt_is_the_same_for_all_engines_with_weights(make: Make, folder: Path) -> None:
    if make().info.backend == "sim":
        return  # it has none
    found = []
    for engine in (make(), small_engine("torch", folder, {})):
        maker = PlanMaker(engine)
        maker.open(0, PROMPT, pooling=WHOLE_VECTOR)
        ((_, data),) = maker.prefill({0: len(PROMPT)}).vectors
        found.append(array("f", data))
    least = 0.99999 if make().info.dtype == "f32" else 0.99  # keys and values in fp8
    assert sum(x * y for x, y in zip(*found, strict=True)) > least


def test_drafts_change_no_token(make: Make, maker: PlanMaker) -> None:
    wanted = alone(make, 3, 9, 7)
    maker.open(2, PROMPT, HOT, seed=7, prediction=ints(wanted))
    first = maker.prefill({2: len(PROMPT)}).ids[0]
    found = maker.decode_with_drafts({2: len(PROMPT) + 1}, 9, 3)
    assert [first, *found.ids[2]] == wanted
    assert found.kept[2] > 0 or not maker.backend.info.max_drafts
