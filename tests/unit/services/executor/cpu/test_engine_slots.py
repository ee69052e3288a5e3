"""Plans that a scheduler can make: forks, ends that a plan in flight does not know, reuse, bad plans."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from support.executor.plan_maker import GREEDY, PlanMaker, Row
from support.executor.tiny_models import VOCAB, save_tiny

from services.executor.cpu.engine import TorchBackend, TorchOptions, build
from shared.errors import EngineError
from shared.messages import Sampling, ints

KIND = "llama-9-3-tied"
PROMPT = [random.Random(2).randrange(VOCAB) for _ in range(27)]
HOT = Sampling(temperature=1.5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(KIND, tmp_path_factory.mktemp("tiny"))


def engine(folder: Path, *, deterministic: bool = False) -> TorchBackend:
    options = TorchOptions(
        model_path=folder,
        model_name=KIND,
        device="cpu",
        blocks=80,
        slots=18,
        threads=1,
        deterministic=deterministic,
    )
    return build(options)


@pytest.fixture
def maker(folder: Path) -> PlanMaker:
    return PlanMaker(engine(folder))


def generate(maker: PlanMaker, slot: int, steps: int, **opened: object) -> list[int]:
    """The ids of one request alone: first token and `steps` more."""
    maker.open(slot, PROMPT, **opened)
    first = maker.prefill({slot: len(PROMPT)}).ids[0]
    return [first, *maker.decode({slot: len(PROMPT) + 1}, steps)[slot]]


def test_seeded_sampling_gives_the_same_ids_alone_and_in_a_batch_of_16(folder: Path) -> None:
    alone = generate(PlanMaker(engine(folder, deterministic=True)), 3, 20, sampling=HOT, seed=77)
    maker = PlanMaker(engine(folder, deterministic=True), seed=9)
    for slot in range(16):
        tokens = PROMPT if slot == 12 else PROMPT[slot:] + PROMPT[: slot // 2]
        maker.open(slot, tokens, HOT, seed=77 if slot == 12 else slot)
    lengths = {slot: len(PROMPT) - slot + slot // 2 if slot != 12 else len(PROMPT) for slot in range(16)}
    first = maker.prefill(lengths).ids[12]
    rest = maker.decode({slot: length + 1 for slot, length in lengths.items()}, 20)[12]
    assert [first, *rest] == alone
    assert len(set(alone)) > 10  # hot enough that a constant would not pass


def test_one_prompt_row_feeds_two_slots_with_a_copy_of_the_tail_block(maker: PlanMaker, folder: Path) -> None:
    wanted = [generate(PlanMaker(engine(folder)), 0, 10, sampling=HOT, seed=seed) for seed in (5, 6)]
    maker.open(0, PROMPT, HOT, seed=5)
    maker.open(1, PROMPT, HOT, seed=6)
    firsts = maker.run([Row(0, 0, len(PROMPT), feeds=(0, 1))]).ids
    full, tail = maker.tables[0]  # 27 tokens: one full block to share, one partial to copy
    copy = maker.free.pop()
    maker.set_table(1, [full, copy])
    rows = [Row(slot, len(PROMPT), 1, True, (slot,)) for slot in (0, 1)]
    seconds = maker.run(rows, copies=((tail, copy),)).ids
    rest = maker.decode({0: len(PROMPT) + 2, 1: len(PROMPT) + 2}, 9)
    assert [[firsts[i], seconds[i], *rest[i]] for i in (0, 1)] == wanted
    assert wanted[0] != wanted[1]


def test_rows_of_a_finished_slot_are_no_ops_and_write_no_kv(maker: PlanMaker) -> None:
    ids = generate(maker, 0, 4, sampling=HOT, seed=21)
    maker.backend.reset()
    maker = PlanMaker(maker.backend, seed=3)
    maker.open(0, PROMPT, HOT, seed=21, stop_ids=ints([500, ids[2]]))
    maker.open(1, PROMPT, HOT, seed=21, max_length=len(PROMPT) + 2)
    output = maker.prefill({0: len(PROMPT), 1: len(PROMPT)})
    assert (list(output.ids), list(output.done)) == ([ids[0]] * 2, [0, 0])
    seen = []
    for step in range(4):
        if step == 2:
            before = maker.backend._cache.tensor[:-1].clone()
        output = maker.run([Row(slot, len(PROMPT) + step, 1, True, (slot,)) for slot in (0, 1)])
        seen.append((list(output.ids), list(output.done)))
    assert ids[2] not in ids[:2]
    assert seen == [
        ([ids[1], ids[1]], [0, 1]),
        ([ids[2], -1], [1, 2]),
        ([-1, -1], [2, 2]),
        ([-1, -1], [2, 2]),
    ]
    assert maker.backend._cache.tensor[:-1].equal(before)


def test_a_sequence_moved_to_another_slot_goes_on_with_the_same_ids(maker: PlanMaker) -> None:
    wanted = generate(maker, 0, 12, sampling=HOT, seed=4)
    maker.open(5, PROMPT + wanted[:6], HOT, seed=4, prompt_tokens=len(PROMPT))
    maker.run([Row(5, 0, 20)])
    seventh = maker.run([Row(5, 20, len(PROMPT) - 14, feeds=(5,))]).ids[0]
    assert [seventh, *maker.decode({5: len(PROMPT) + 7}, 5)[5]] == wanted[6:12]


def test_host_fed_decode_equals_device_fed(maker: PlanMaker) -> None:
    ids = generate(maker, 0, 3)
    again = maker.run([Row(0, len(PROMPT) + 3, 1, False, (0,))]).ids[0]
    fed = maker.run([Row(0, len(PROMPT) + 3, 1, True, (0,))]).ids[0]
    assert again == fed
    assert ids[3] == maker.backend._slots.tokens(0)[len(PROMPT) + 3]


def test_logprobs_go_to_the_rows_that_requested_them(maker: PlanMaker) -> None:
    for slot, asked in enumerate((0, 3, 1)):
        maker.open(slot, PROMPT, GREEDY, logprobs=asked)
    output = maker.prefill(dict.fromkeys(range(3), len(PROMPT)))
    assert list(output.top_counts) == [0, 2, 0]
    assert len(output.top_ids) == len(output.top_logprobs) == 2
    assert output.top_ids[0] == output.ids[1]
    assert output.logprobs[0] == 0.0
    assert output.logprobs[1] == output.top_logprobs[0] == output.logprobs[2] < 0
    maker.open(3, PROMPT)
    quiet = maker.prefill({3: len(PROMPT)})
    assert (len(quiet.logprobs), len(quiet.top_counts)) == (0, 0)


def test_a_step_that_samples_nothing_returns_nothing(maker: PlanMaker) -> None:
    maker.open(0, PROMPT)
    output = maker.run([Row(0, 0, 10)])
    assert (list(output.ids), list(output.done)) == ([], [])


def test_bad_plans_are_engine_errors_that_name_the_slot(maker: PlanMaker) -> None:
    with pytest.raises(EngineError, match="slot 4, which is not open"):
        maker.tables[4] = []
        maker.run([Row(4, 0, 3)])
    maker.open(2, PROMPT)
    with pytest.raises(EngineError, match="slot 2 has 27 tokens; the plan wants 20 to 30"):
        maker.run([Row(2, 20, 10)])
    with pytest.raises(EngineError, match="slot 18 is not one of 18 slots"):
        maker.open(18, PROMPT)


def test_warm_up_leaves_no_trace_and_close_may_be_called_twice(folder: Path) -> None:
    cold, warm = engine(folder), engine(folder)
    warm.warm_up()
    assert generate(PlanMaker(warm), 0, 5) == generate(PlanMaker(cold), 0, 5)
    warm.close()
    warm.close()
