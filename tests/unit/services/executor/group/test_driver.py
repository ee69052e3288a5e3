"""An engine of two ranks, each a process: what it answers is what one rank answers, until a rank dies."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue

import pytest
import torch
from support.default_model import model_path
from support.executor.engine_pair import KIND, PROMPT
from support.executor.groups import (
    DEFAULT,
    Watched,
    dies_as_one,
    drafts_change_no_token,
    gives_the_reference_ids,
    gives_the_vectors_of,
    go_down_and_come_back,
    life,
    options,
)
from support.executor.plan_maker import GREEDY, PlanMaker, Row
from support.executor.stage_plugins import Shift
from support.executor.tiny_models import save_tiny
from support.shm import segment

from services.executor.checkpoint.loader import TorchOptions
from services.executor.cpu.engine import build
from services.executor.engine import Arena
from services.executor.group import driver
from services.executor.group.driver import GroupBackend, RankBackend, build_group
from services.executor.parallel.ranks import Ranks
from shared.errors import EngineError, SetupError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(KIND, tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def watched(folder: Path) -> Iterator[Watched]:
    made = Watched(options(folder, processors={"shift": Shift}))
    made.group.warm_up()
    yield made
    made.group.close()
    made.group.close()  # a second call does nothing
    assert made.lost.empty()


@pytest.fixture
def group(watched: Watched) -> GroupBackend:
    watched.group.reset()
    return watched.group


def test_drafts_change_no_token_of_ranks(group: GroupBackend) -> None:
    assert group.info.max_drafts == 8
    drafts_change_no_token(group)


def test_ranks_give_the_vectors_of_one(group: GroupBackend, watched: Watched, folder: Path) -> None:
    gives_the_vectors_of(watched, build(options(folder)))


def test_two_ranks_choose_the_tokens_of_one(group: GroupBackend, folder: Path) -> None:
    alone = build(options(folder, processors={"shift": Shift}))
    assert life(PlanMaker(group)) == life(PlanMaker(alone))
    group.reset()
    assert life(PlanMaker(group, seed=5)) == life(PlanMaker(alone, seed=6))


def test_group_facts_combine_the_facts_of_both_ranks(group: GroupBackend, folder: Path) -> None:
    alone = build(options(folder)).info
    assert group.info.bytes_per_block == alone.bytes_per_block  # 2 KV heads here, 1 there: 3
    assert (group.info.blocks, group.info.vocab, group.info.slots) == (80, alone.vocab, 8)
    assert group.info.fingerprint != alone.fingerprint  # its blocks hold the same in another order


def test_a_plan_that_every_rank_refuses_costs_a_step(group: GroupBackend, watched: Watched) -> None:
    maker = PlanMaker(group)
    maker.open(0, PROMPT, GREEDY)
    first = maker.prefill({0: len(PROMPT)}).ids[0]
    maker.tables[5] = []
    with pytest.raises(EngineError, match="slot 5, which is not open"):
        maker.run([Row(0, len(PROMPT), 1, True, (0,)), Row(5, 0, 1)])
    with pytest.raises(EngineError, match="slot 99 is not one of 8"):
        maker.open(99, PROMPT)
    again = PlanMaker(group, seed=1)
    again.open(1, PROMPT, GREEDY)
    assert again.prefill({1: len(PROMPT)}).ids[0] == first
    assert watched.lost.empty()


def test_blocks_of_both_ranks_go_down_and_come_back(group: GroupBackend) -> None:
    go_down_and_come_back(group)


def test_an_arena_that_one_rank_cannot_have_no_rank_has(group: GroupBackend) -> None:
    copier = group.copier
    with segment(group.info.bytes_per_block) as file:
        arena = Arena(file.name, file.generation)
    with pytest.raises(EngineError, match="cannot open the arena"):
        copier.attach(arena)  # its file is gone: mapped here already, not there
    arena.close()  # raises where the copier keeps a view of it


def test_a_copy_that_fails_on_one_rank_fails(group: GroupBackend) -> None:
    size, copier = group.info.bytes_per_block, group.copier
    with segment(size) as file:
        arena = Arena(file.name, file.generation)
        copier.attach(arena)
        copier.store([0], [size // 4])  # the first rank's part lies in the arena, the second's beyond its end
        with pytest.raises(EngineError, match="ValueError"):
            copier.finish()
        copier.store([0], [0])
        copier.finish()
        copier.detach()
        arena.close()


def test_a_group_dies_as_one(group: GroupBackend, watched: Watched) -> None:
    """The last test of the module that needs the first group: only one can be in a process."""
    dies_as_one(watched)


def test_a_model_that_cannot_be_loaded_leaves_no_group(tmp_path: Path) -> None:
    lost: SimpleQueue[str] = SimpleQueue()
    with pytest.raises(SetupError, match=r"has no config.json"):
        build_group(options(tmp_path), 2, lost.put)
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize("when", ["before it joins", "after it has joined", "in a sum"])
def test_a_rank_that_fails_at_the_start_fails_the_start_with_its_words(
    folder: Path, tmp_path: Path, when: str
) -> None:
    """sitecustomize is imported at the start of each rank but the driver."""
    fails = {
        "before it joins": "worker.join",
        "after it has joined": "engine.build",
        "in a sum": "engine.build",
    }
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "if any('group.worker' in word for word in sys.orig_argv):\n"
        "    import services.executor.cpu.engine as engine, services.executor.parallel.ranks as worker\n"
        "    def fail(*_, **__): raise RuntimeError('this rank has no memory')\n"
        f"    {fails[when]} = fail\n"
    )
    lost: SimpleQueue[str] = SimpleQueue()

    def sums(made: TorchOptions, ranks: Ranks) -> RankBackend:
        ranks.all_reduce(torch.ones(3))
        raise AssertionError("there was no rank to add to")

    with pytest.MonkeyPatch.context() as patched:
        if when == "in a sum":
            patched.setattr(driver, "rank_builder", lambda _: sums)
        with pytest.raises(SetupError, match="rank 1 is gone: RuntimeError: this rank has no memory"):
            build_group(options(folder), 2, lost.put, {"PYTHONPATH": str(tmp_path)})
    assert "this rank has no memory" in lost.get(timeout=60)
    assert not torch.distributed.is_initialized()


def test_the_default_model_on_two_ranks_gives_the_reference_ids() -> None:
    """9 heads and 3 KV heads, which do not divide: 6 and 2 on the one, 3 and 1 on the other."""
    gives_the_reference_ids(Watched(options(model_path(), **DEFAULT)))
