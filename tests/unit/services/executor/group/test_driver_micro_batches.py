"""Prefill steps in halves on gloo ranks give what whole steps give."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.executor.groups import HOT, Watched, options
from support.executor.partitions import LIMIT
from support.executor.plan_maker import GREEDY, PlanMaker, Row
from support.executor.rank_side import on_ranks
from support.executor.stage_plugins import Shift
from support.executor.tiny_models import VOCAB, save_tiny

from services.executor.checkpoint.loader import load
from services.executor.cpu.engine import TorchBackend, build
from services.executor.engine import COMM, COMPUTE, Segment, StepOutput
from services.executor.parallel.ranks import SOLO, Ranks
from services.executor.parallel.step_split import NEVER
from shared.messages import AT_DEVICE, ints

KINDS = ("llama-9-3-tied", "qwen3-moe-mixed", "mixtral")


def tokens(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=count)


def steps(*, samples: bool = True) -> Iterator[list[Row]]:
    """A cut through the first prompt; a decode beside a chunk with a prefix; a chunk that feeds no row; and a
    step too short to be halved."""
    yield [Row(0, 0, 120, feeds=(0,)), Row(1, 0, 60, feeds=(1,) if samples else ())]
    yield [Row(1, 60, 1, feeds=(1,)), Row(0, 120, 100), Row(2, 0, 90, feeds=(2,))]
    yield [Row(2, 90, 129)]
    yield [Row(2, 219, 1, feeds=(2,)), Row(0, 220, 6, feeds=(0,))]


def opened(backend: TorchBackend) -> PlanMaker:
    maker = PlanMaker(backend)
    for slot in range(3):
        maker.open(slot, tokens(slot, 230), GREEDY)
    return maker


Found = list[tuple[torch.Tensor, tuple[Segment, ...]]]


def all_logits(ranks: Ranks, folder: Path, *, two_stream: bool, deterministic: bool) -> dict[str, Found]:
    """By kind of model: logits and pieces of each step."""
    found: dict[str, Found] = {kind: [] for kind in KINDS}
    for kind in KINDS:
        made = options(folder / kind, deterministic=deterministic)
        backend = TorchBackend(made, load(made, ranks))
        maker = opened(backend)
        for rows in steps():
            pending = backend.forward(replace(maker.plan(rows), two_stream=two_stream))
            assert pending.logits is not None
            found[kind].append((pending.logits, pending.segments()))
        backend.close()
    return found


def on_a_rank(ranks: Ranks, folder: Path, deterministic: bool) -> tuple[dict[str, Found], dict[str, Found]]:
    return (
        all_logits(ranks, folder, two_stream=False, deterministic=deterministic),
        all_logits(ranks, folder, two_stream=True, deterministic=deterministic),
    )


@pytest.mark.parametrize(("size", "deterministic"), [(2, False), (4, True)])
def test_micro_batches_give_the_logits_of_whole_steps(size: int, deterministic: bool, tmp_path: Path) -> None:
    for kind in KINDS:
        save_tiny(kind, tmp_path / kind)
    alone = all_logits(SOLO, tmp_path, two_stream=True, deterministic=deterministic)
    for whole, halved in on_ranks(size, on_a_rank, tmp_path, deterministic, ordered=deterministic):
        for kind in KINDS:
            for step, ((wanted, nothing), (found, pieces)) in enumerate(
                zip(whole[kind], halved[kind], strict=True)
            ):
                assert found.shape == wanted.shape
                assert not nothing
                assert {piece.lane for piece in pieces} == ({*COMPUTE, *COMM} if step < 3 else set())
                if deterministic:
                    assert torch.equal(found, wanted)
                torch.testing.assert_close(found, wanted, atol=LIMIT, rtol=LIMIT)
                if len(found):
                    torch.testing.assert_close(found, alone[kind][step][0], atol=LIMIT, rtol=LIMIT)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("qwen3-moe", tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def watched(folder: Path) -> Iterator[Watched]:
    made = Watched(options(folder, processors={"shift": Shift}))
    made.group.warm_up()
    yield made
    made.group.close()
    assert made.lost.empty()


def answers(backend: object, *, two_stream: bool) -> list[StepOutput]:
    """What is chosen: greedily, at random, with log probabilities and by a processor on the host."""
    maker = PlanMaker(backend)  # type: ignore[arg-type]  # of either kind
    maker.open(0, tokens(0, 230), HOT, seed=1, logprobs=2)
    maker.open(1, tokens(1, 230), HOT, seed=2, processors=('{"name": "shift", "args": {"by": 7}}',))
    maker.open(2, tokens(2, 230), GREEDY)
    found = []
    for rows in steps(samples=False):
        plan = replace(maker.plan(rows), two_stream=two_stream)
        found.append(maker.backend.sample(maker.backend.forward(plan)))
    lengths = {2: 220, 0: 226}
    rows = [Row(slot, length, 1, False, (slot,)) for slot, length in lengths.items()]
    found.append(maker.run(rows))
    return found


def test_a_group_chooses_the_same_in_micro_batches(watched: Watched, folder: Path) -> None:
    assert watched.group.info.two_stream_tokens == NEVER  # of itself a CPU does it never
    alone = build(options(folder, processors={"shift": Shift}))
    assert alone.info.two_stream_tokens == 0
    wanted = answers(alone, two_stream=True)
    for two_stream in (False, True):
        watched.group.reset()
        found = answers(watched.group, two_stream=two_stream)
        assert [(each.ids, each.done, each.top_ids) for each in found] == [
            (each.ids, each.done, each.top_ids) for each in wanted
        ]
        assert [bool(each.segments) for each in found] == [two_stream] * 3 + [False] * 2
    assert not any(each.segments for each in wanted)


def test_micro_batches_have_a_decode_at_the_place_of_its_device(watched: Watched) -> None:
    """Its drafts of the step before are in flight: the plan's start of the row is an upper bound."""
    found = []
    for at_device in (False, True):
        watched.group.reset()
        maker = PlanMaker(watched.group)
        maker.open(0, tokens(0, 60), HOT, seed=1)
        maker.open(1, tokens(1, 230), GREEDY)
        first = maker.prefill({0: 60})
        plan = maker.plan([Row(0, 60, 1, True, (0,)), Row(1, 0, 200)])
        if at_device:
            plan = replace(plan, starts=ints([63, 0]), from_device=ints([AT_DEVICE, 0]), two_stream=True)
        output = maker.backend.sample(maker.backend.forward(plan))
        assert bool(output.segments) == at_device
        then = maker.run([Row(0, 61, 1, True, (0,)), Row(1, 200, 30, feeds=(1,))])
        found.append((first.ids, output.ids, then.ids))
    assert found[0] == found[1]


def split_forbidden(ranks: Ranks, folder: Path) -> tuple[int, tuple[Segment, ...]]:
    made = options(folder, overlap_comm="off")
    backend = TorchBackend(made, load(made, ranks))
    pending = backend.forward(replace(opened(backend).plan(next(steps())), two_stream=True))
    found = backend.info.two_stream_tokens, pending.segments()
    backend.close()
    return found


def test_ranks_do_not_split_steps_when_the_setting_forbids_it(folder: Path) -> None:
    assert on_ranks(2, split_forbidden, folder) == [(0, ())] * 2
