"""A mixture of experts on several ranks, each with some of the experts: it answers what one rank answers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.executor.engine_pair import PROMPT
from support.executor.groups import Watched, go_down_and_come_back, life, options
from support.executor.plan_maker import GREEDY, PlanMaker
from support.executor.stage_plugins import Shift
from support.executor.tiny_models import save_tiny

from services.executor.cpu.engine import build

LENGTH = len(PROMPT)


@pytest.fixture(
    scope="module", params=[("qwen3-moe-mixed", 2), ("mixtral", 2)], ids=lambda made: f"{made[0]}/tp{made[1]}"
)
def made(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Watched, Path]]:
    """A group and the folder of its model: 12 experts and 5, on two ranks."""
    kind, size = request.param
    folder = save_tiny(kind, tmp_path_factory.mktemp(kind))
    watched = Watched(options(folder, processors={"shift": Shift}), size)
    watched.group.warm_up()
    yield watched, folder
    watched.group.close()
    assert watched.lost.empty()


def test_ranks_choose_the_tokens_of_one(made: tuple[Watched, Path]) -> None:
    watched, folder = made
    watched.group.reset()
    alone = build(options(folder, processors={"shift": Shift}))
    assert life(PlanMaker(watched.group)) == life(PlanMaker(alone))


def test_ranks_give_the_greedy_ids_of_one(made: tuple[Watched, Path]) -> None:
    watched, folder = made
    watched.group.reset()
    found = []
    for engine in (watched.group, build(options(folder))):
        maker = PlanMaker(engine)
        prompts = {slot: PROMPT[slot:] for slot in range(4)}
        for slot, prompt in prompts.items():
            maker.open(slot, prompt, GREEDY)
        firsts = maker.prefill({slot: len(prompt) for slot, prompt in prompts.items()}).ids
        found.append([list(firsts), maker.decode({slot: LENGTH - slot + 1 for slot in prompts}, 24)])
    assert found[0] == found[1]


def test_blocks_go_down_and_come_back(made: tuple[Watched, Path]) -> None:
    made[0].group.reset()
    go_down_and_come_back(made[0].group)
