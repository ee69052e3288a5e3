"""An engine whose ranks are stages answers what one rank answers, with steps in all stages at once."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.default_model import model_path
from support.executor.empty_plans import plan
from support.executor.engine_pair import KIND, PROMPT
from support.executor.groups import (
    DEFAULT,
    HOT,
    PENALISED,
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
from support.executor.stage_plugins import PLUGINS
from support.executor.tiny_models import save_tiny

from services.executor.cpu.engine import build
from services.executor.engine import Pending
from services.executor.group.driver import DropStep, GroupBackend, Sampled, build_group
from services.executor.parallel.ranks import Solo
from services.executor.sampling.logits_processors import load_processors
from shared.errors import EngineError, SetupError

TESTS = str(Path(__file__).parents[4])
STAGES = {"pipeline": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(KIND, tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def watched(folder: Path) -> Iterator[Watched]:
    """Three stages of one layer each: a first, one between and a last."""
    path = os.pathsep.join((TESTS, os.environ.get("PYTHONPATH", "")))
    made = Watched(options(folder, **STAGES), 3, HEADRACE_LOGITS_PROCESSORS=PLUGINS, PYTHONPATH=path)
    made.group.warm_up()
    yield made
    made.group.close()
    assert made.lost.empty()


@pytest.fixture
def group(watched: Watched) -> GroupBackend:
    watched.group.reset()
    return watched.group


def test_drafts_change_no_token_of_stages(group: GroupBackend) -> None:
    drafts_change_no_token(group)


def test_stages_choose_the_tokens_of_one_rank(group: GroupBackend, folder: Path) -> None:
    alone = build(options(folder, processors=load_processors(PLUGINS)))
    assert life(PlanMaker(group)) == life(PlanMaker(alone))
    group.reset()
    assert life(PlanMaker(group, seed=5)) == life(PlanMaker(alone, seed=6))


def test_stages_give_the_vectors_of_one_rank(group: GroupBackend, watched: Watched, folder: Path) -> None:
    gives_the_vectors_of(watched, build(options(folder)))


def test_group_facts_combine_the_facts_of_all_stages(group: GroupBackend, folder: Path) -> None:
    alone = build(options(folder)).info
    assert group.info.bytes_per_block == alone.bytes_per_block
    assert (group.info.blocks, group.info.vocab, group.info.stages) == (80, alone.vocab, 3)
    assert group.info.fingerprint != alone.fingerprint


def test_steps_are_under_way_in_several_stages(group: GroupBackend, folder: Path, tmp_path: Path) -> None:
    """The tokens of the first wait for a file that comes when the others have been given away."""
    found = []
    for engine in (group, build(options(folder))):
        maker = PlanMaker(engine)
        gate = ('{"name": "gate", "args": {"file": "%s"}}' % (tmp_path / "open"),) if engine is group else ()
        maker.open(0, PROMPT, HOT, seed=1, processors=gate)
        maker.open(1, PROMPT[2:], PENALISED, seed=2, logprobs=2)
        maker.open(2, PROMPT[4:], GREEDY)
        plans = [maker.plan([Row(s, 0, len(PROMPT) - 2 * s, feeds=(s,))]) for s in range(3)]
        pending = [engine.forward(plan) for plan in plans]
        (tmp_path / "open").touch()
        outputs = [engine.sample(each) for each in pending]
        found.append([(list(o.ids), list(o.done), list(o.top_ids)) for o in outputs])
    assert found[0] == found[1]


def test_a_chunk_without_a_sample_goes_through_all_stages(group: GroupBackend) -> None:
    maker = PlanMaker(group)
    maker.open(0, PROMPT, GREEDY)
    firsts = [group.forward(maker.plan([Row(0, 5 * i, 5)])) for i in range(3)]
    assert [len(group.sample(each).ids) for each in firsts] == [0, 0, 0]
    cut = maker.run([Row(0, 15, len(PROMPT) - 15, feeds=(0,))]).ids
    whole = PlanMaker(group, seed=2)
    whole.open(1, PROMPT, GREEDY)
    assert list(whole.prefill({1: len(PROMPT)}).ids) == list(cut)


def test_a_plan_that_every_stage_refuses_costs_a_step(group: GroupBackend, watched: Watched) -> None:
    maker = PlanMaker(group)
    maker.open(0, PROMPT, GREEDY)
    first = maker.prefill({0: len(PROMPT)}).ids[0]
    maker.tables[5] = []
    with pytest.raises(EngineError, match="slot 5, which is not open"):
        maker.run([Row(0, len(PROMPT), 1, True, (0,)), Row(5, 0, 1)])
    again = PlanMaker(group, seed=1)
    again.open(1, PROMPT, GREEDY)
    assert again.prefill({1: len(PROMPT)}).ids[0] == first
    assert watched.lost.empty()


def test_blocks_of_all_stages_go_down_and_come_back(group: GroupBackend) -> None:
    go_down_and_come_back(group)


def test_sampling_error_of_the_last_stage_fails_the_step_on_the_driver(folder: Path) -> None:
    sent: list[object] = []

    class Played:
        """The workers of a pipeline, its first stage and its copier."""

        info = build(options(folder)).info
        sampled = staticmethod(lambda: Sampled(3, None, "KeyError: 7"))
        send = staticmethod(sent.append)
        copier = SimpleNamespace(piece_bytes=1)

    played: Any = Played()
    pipeline = GroupBackend(played, played, Solo(), pipeline=True)
    with pytest.raises(EngineError, match="KeyError: 7"):
        pipeline.sample(Pending(plan=plan(3)))
    assert sent == [DropStep(3)]


def test_a_pipeline_dies_as_one(group: GroupBackend, watched: Watched) -> None:
    """The last test of the module that needs the first group: only one can be in a process."""
    dies_as_one(watched)


def test_more_stages_than_layers_are_refused(folder: Path, tmp_path: Path) -> None:
    config = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(SetupError, match="2 stages are too many for 1 layers: use fewer"):
        build_group(options(tmp_path, dummy=True, **STAGES), 2, lambda why: None)
    assert not torch.distributed.is_initialized()


def test_the_default_model_in_two_stages_gives_the_reference_ids() -> None:
    gives_the_reference_ids(Watched(options(model_path(), **STAGES, **DEFAULT)))
