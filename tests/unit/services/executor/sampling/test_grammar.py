"""An engine without a kind of grammars follows none, and reports that it follows none."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.executor.engine_pair import KIND, PROMPT, small_engine
from support.executor.plan_maker import GREEDY, PlanMaker
from support.executor.tiny_models import save_tiny

from services.executor.sampling.grammar import GRAMMARS, build_grammars
from shared.messages import SlotOpen, ints
from shared.vocab.vocabulary import Vocabulary

NONE = "refused: this engine follows no grammar: ask one that does"


@pytest.fixture
def _without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(GRAMMARS, "llguidance")


def no_vocabulary() -> Vocabulary:
    raise AssertionError("no grammar is compiled")


@pytest.mark.usefixtures("_without")
def test_an_engine_refuses_the_rows_with_a_grammar_alone_when_it_follows_none(tmp_path: Path) -> None:
    engine = small_engine("torch", save_tiny(KIND, tmp_path), {})
    assert (engine.info.follows_grammars, engine.info.reports_grammars) == (False, False)
    maker = PlanMaker(engine)
    maker.open(0, PROMPT, GREEDY)
    alone = maker.prefill({0: len(PROMPT)}).ids[0]
    maker.open(1, PROMPT, GREEDY, grammar="{}")
    maker.open(2, PROMPT, GREEDY)
    output = maker.prefill({1: len(PROMPT), 2: len(PROMPT)})
    assert output.row_errors == ((0, NONE),)
    assert output.ids[1] == alone


def test_an_engine_follows_grammars_when_the_table_has_a_kind(tmp_path: Path) -> None:
    info = small_engine("torch", save_tiny(KIND, tmp_path), {}).info
    assert (info.follows_grammars, info.reports_grammars) == (True, True)


@pytest.mark.usefixtures("_without")
def test_masks_allow_all_in_rows_that_are_refused() -> None:
    grammars = build_grammars(no_vocabulary, 64)
    grammars.open(
        SlotOpen(
            slot=3, generation=0, seq=3, prompt_tokens=1, sampling=GREEDY, tokens=ints([1]), grammar="{}"
        )
    )
    masks = np.zeros((2, 2), np.int32)
    assert grammars.rows_of([5, 3]) == [1]
    assert grammars.write_masks(masks, {1: 0}, [5, 3], lambda _: PROMPT) == {1: NONE}
    assert masks.tolist() == [[-1, -1], [0, 0]]
    grammars.close(3)
    assert grammars.rows_of([5, 3]) == []
