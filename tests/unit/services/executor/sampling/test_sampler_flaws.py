"""Rows whose logits are not finite have no token, and no other row sees them; and wishes too small."""

from __future__ import annotations

import math

import pytest
import torch

from kernels.sampling.ref import COLUMN, PARAMETERS
from services.executor.engine import StepOutput
from services.executor.sampling.sampler import BY_MODEL, BY_REQUEST, Sampler, slot_row
from shared.messages import Sampling, SlotOpen, floats, ints

VOCAB = 700
DRAWS: list[dict[str, float]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 7, "top_p": 0.5},
    {"temperature": 1.0, "top_k": 300},
    {"temperature": 0.3, "min_p": 0.1},
]


def sampler(*wishes: dict[str, object], deterministic: bool = False) -> Sampler:
    """One slot for each, which has seen tokens 0 to 9."""
    made = Sampler(len(wishes), VOCAB, torch.device("cpu"), deterministic=deterministic)
    for slot, wish in enumerate(wishes):
        opened = SlotOpen(
            slot=slot, generation=0, seq=slot, prompt_tokens=4, seed=slot, sampling=Sampling(**wish),
            tokens=ints(range(10)),
        )  # fmt: skip
        made.open(opened)
    return made


def table(rows: int) -> torch.Tensor:
    return 2 * torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(3))


def spoilt(kind: str) -> torch.Tensor:
    row = table(1)[0]
    match kind:
        case "one NaN":
            row[321] = math.nan
        case "all NaN":
            row[:] = math.nan
        case "infinity":
            row[5] = math.inf
        case "both":
            row[5], row[600] = math.inf, -math.inf
        case "nothing left":
            row[:] = -math.inf
    return row


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("kind", ["one NaN", "all NaN", "infinity", "both", "nothing left"])
@pytest.mark.parametrize("draw", DRAWS, ids=str)
def test_a_row_that_is_not_finite_has_no_token_and_its_neighbours_keep_theirs(
    draw: dict[str, float], kind: str, deterministic: bool
) -> None:
    wishes = [*DRAWS, draw, *DRAWS]
    logits, slots = table(len(wishes)), list(range(len(wishes)))
    wanted = sampler(*wishes, deterministic=deterministic).choose(logits, slots, [40] * len(slots)).tolist()
    logits[len(DRAWS)] = spoilt(kind)
    wanted[len(DRAWS)] = BY_MODEL
    found = sampler(*wishes, deterministic=deterministic).choose(logits, slots, [40] * len(slots))
    assert found.tolist() == wanted


@pytest.mark.parametrize("draw", DRAWS, ids=str)
def test_options_that_leave_no_finite_logits_are_that_requests_fault(draw: dict[str, float]) -> None:
    plain = {"temperature": 1.0, "top_p": 0.9}
    wishes = [plain, {**draw, "repetition_penalty": 1e-40}, {**plain, "frequency_penalty": 0.5}]
    chooser, logits = sampler(*wishes), table(3)
    alone = sampler(*wishes)
    wanted = [int(alone.choose(logits[i : i + 1], [i], [40])) for i in (0, 2)]
    for _ in range(2):  # what was counted for it does no harm either
        found = chooser.choose(logits, [0, 1, 2], [40] * 3).tolist()
        assert found[1] == BY_REQUEST
    assert found[0] == wanted[0]
    assert chooser.choose(logits[:1], [0], [40]).tolist() == wanted[:1]


def test_log_probabilities_beside_a_row_without_a_token() -> None:
    logits = table(2)
    logits[0] = math.nan
    chooser = Sampler(2, VOCAB, torch.device("cpu"), deterministic=False)
    for slot in range(2):
        asked = SlotOpen(slot=slot, generation=0, seq=slot, prompt_tokens=1, logprobs=3, tokens=ints([1]))
        chooser.open(asked)
    output = StepOutput(ids=ints([-1, 3]), done=ints([2, 0]))
    found = chooser.with_logprobs(output, logits, torch.tensor([BY_MODEL, 3]), [0, 1])
    assert found.logprobs[1] == pytest.approx(logits[1].log_softmax(-1)[3].item())


def test_value_that_float32_rounds_to_zero_becomes_its_limit() -> None:
    logits = table(1)
    likeliest = int(logits.argmax())
    for wish in (
        {"temperature": 1.0, "top_p": 1e-50},
        {"temperature": 1.0, "top_p": 1e-40},
        {"temperature": 1.0, "top_p": 1e-50, "top_k": 50},
        {"temperature": 1e-50, "top_p": 0.9, "min_p": 0.5},
        {"temperature": 1e-40, "top_p": 0.9},
        {"temperature": 1e-37, "top_k": 3, "min_p": 1e-37},
    ):
        chooser = sampler(wish)
        found = {int(chooser.choose(logits, [0], [position])) for position in range(100)}
        assert found == {likeliest}, wish
    free, tiny = sampler({"temperature": 1.0}), sampler({"temperature": 1.0, "min_p": 1e-50})
    for position in range(30):
        assert free.choose(logits, [0], [position]).equal(tiny.choose(logits, [0], [position]))


def test_filters_are_finite_and_on_the_right_side_of_zero() -> None:
    least = Sampling(temperature=5e-324, top_p=5e-324, min_p=5e-324, top_k=2**31 - 1)
    names = ("temperature", "top_k", "top_p", "min_p")
    temperature, top_k, top_p, min_p = (float(slot_row(least)[COLUMN[name]]) for name in names)
    assert (temperature, min_p) == (0.0, 0.0)
    assert 0 < top_p < 1e-37
    assert top_k == 1 << 24
    assert slot_row(Sampling()).tolist() == [each.off for each in PARAMETERS]


def test_a_bias_of_the_whole_range_bans_and_promotes_beside_tiny_penalties() -> None:
    wish: dict[str, object] = {
        "temperature": 1.0, "presence_penalty": 1e-50, "frequency_penalty": -1e-50,
        "repetition_penalty": 1e-6, "bias_ids": ints([1, 2]), "bias_values": floats([-100, 100]),
    }  # fmt: skip
    assert 0 <= int(sampler(wish).choose(table(1), [0], [3])) < VOCAB
