"""Engines with weights: a sequence whose numbers are not finite ends alone, and leaves nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from support.executor.engine_pair import ENGINES, PROMPT, small_engine
from support.executor.plan_maker import GREEDY, PlanMaker, Row
from support.executor.tiny_models import save_tiny

from services.executor.engine import Backend
from services.executor.sampling.sampler import BY_MODEL, BY_REQUEST, ROW_ERRORS
from shared.messages import Sampling

ROTTEN = 99  # a token whose embedding is NaN, as that of one that was never trained may be
CLEAN = [token for token in PROMPT if token != ROTTEN]
HOT = Sampling(temperature=1.5, top_p=0.9)
BIASED = Sampling(temperature=0.0, frequency_penalty=0.2)  # sampled in torch on a GPU, too
WILD = Sampling(temperature=1.0, top_p=0.9, repetition_penalty=1e-40)
Make = Callable[[], Backend]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The head is not tied to the embedding: else the token would spoil the logits of all rows."""
    saved = save_tiny("llama", tmp_path_factory.mktemp("tiny"))
    (file,) = saved.glob("*.safetensors")
    tensors = load_file(file)
    tensors["model.embed_tokens.weight"][ROTTEN] = math.nan
    save_file(tensors, file, metadata={"format": "pt"})
    return saved


@pytest.fixture(params=[engine for engine in ENGINES if engine != "sim"])
def make(request: pytest.FixtureRequest, folder: Path) -> Make:
    return lambda: small_engine(request.param, folder, {})


PROMPTS = [CLEAN[:18], CLEAN + CLEAN[:13], 2 * CLEAN + CLEAN[:6]]  # read in one go with another's padding
SAMPLINGS = [GREEDY, HOT, BIASED]


def answer(make: Make, slot: int, steps: int) -> list[int]:
    """The answer to the slot's prompt where no other slot is open."""
    maker, prompt = PlanMaker(make()), PROMPTS[slot]
    maker.open(slot, prompt, SAMPLINGS[slot], seed=slot)
    first = maker.prefill({slot: len(prompt)}).ids[0]
    return [first, *maker.decode({slot: len(prompt) + 1}, steps)[slot]]


def answers(maker: PlanMaker, steps: int) -> list[list[int]]:
    """The same of all together."""
    for slot, prompt in enumerate(PROMPTS):
        maker.open(slot, prompt, SAMPLINGS[slot], seed=slot)
    firsts = maker.prefill({slot: len(prompt) for slot, prompt in enumerate(PROMPTS)}).ids
    rest = maker.decode({slot: len(prompt) + 1 for slot, prompt in enumerate(PROMPTS)}, steps)
    return [[firsts[slot], *rest[slot]] for slot in range(len(PROMPTS))]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "hot", "penalised"])
def test_a_sequence_of_nans_ends_alone(make: Make, sampling: Sampling) -> None:
    wanted = [answer(make, slot, 4) for slot in range(3)]
    maker = PlanMaker(make())
    for slot, prompt in enumerate(PROMPTS):
        maker.open(slot, prompt, SAMPLINGS[slot], seed=slot)
    maker.open(3, [ROTTEN, *CLEAN[:20]], sampling)
    lengths = {slot: len(prompt) for slot, prompt in enumerate(PROMPTS)}
    output = maker.prefill({**lengths, 3: 21})
    assert (output.ids[3], output.done[3], output.row_errors) == (-1, 2, ((3, ROW_ERRORS[BY_MODEL]),))
    found = [[token] for token in output.ids[:3]]
    for step in range(4):  # its rows of plans made before its end was known do nothing
        rows = [Row(slot, length + step, 1, True, (slot,)) for slot, length in lengths.items()]
        output = maker.run([*rows, Row(3, 21 + step, 1, True, (3,))])
        assert (output.ids[3], output.done[3], output.row_errors) == (-1, 2, ())
        for slot in range(3):
            found[slot].append(output.ids[slot])
    assert found == wanted


def test_nans_in_a_sequences_blocks_do_no_harm_to_later_sequences(make: Make) -> None:
    wanted = [answer(make, slot, 4) for slot in range(3)]
    maker = PlanMaker(make())
    maker.open(3, [ROTTEN] * 160)
    for start in range(0, 160, 32):
        maker.run([Row(3, start, 32, feeds=(3,) if start == 128 else ())])
    maker.run([Row(3, 160, 1, True, (3,))])  # to the spare block
    maker.backend.close_slot(3)
    maker.free += maker.tables[3]  # the next ones get them
    assert answers(maker, 4) == wanted


def test_request_whose_options_overflow_ends_alone(make: Make) -> None:
    wanted = [answer(make, slot, 4) for slot in range(3)]
    maker = PlanMaker(make())
    maker.open(3, CLEAN, WILD)
    output = maker.prefill({3: len(CLEAN)})
    assert (list(output.ids), list(output.done)) == ([-1], [2])
    assert output.row_errors == ((0, ROW_ERRORS[BY_REQUEST]),)
    assert answers(maker, 4) == wanted
