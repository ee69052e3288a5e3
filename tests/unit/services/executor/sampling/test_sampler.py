"""The sampler's slots: mixed batches, penalties that follow the output, bias, and greedy ties."""

from __future__ import annotations

import dataclasses

import torch

from services.executor.sampling.sampler import Sampler
from shared.messages import Sampling, SlotOpen, floats, ints

VOCAB = 700


def opened(slot: int, tokens: list[int], prompt: int, seed: int = 0, **sampling: object) -> SlotOpen:
    return SlotOpen(
        slot=slot,
        generation=0,
        seq=slot,
        prompt_tokens=prompt,
        seed=seed,
        sampling=Sampling(**sampling),
        tokens=ints(tokens),
    )


def sampler() -> Sampler:
    return Sampler(20, VOCAB, torch.device("cpu"), deterministic=False)


def test_seeded_draws_are_the_same_alone_and_in_a_batch_of_16_in_any_slot() -> None:
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(8))
    draws = {"temperature": 0.9, "top_p": 0.95, "seed": (1 << 64) - 3}
    alone, crowd = sampler(), sampler()
    alone.open(opened(2, [1], 1, **draws))
    crowd.open(opened(13, [1], 1, **draws))
    others = [slot for slot in range(16) if slot != 13]
    for slot in others:
        crowd.open(opened(slot, [1], 1, seed=slot, temperature=slot / 8, top_k=slot, min_p=slot / 100))
    table = torch.randn(16, VOCAB, generator=torch.Generator().manual_seed(9))
    table[5] = logits
    slots = [*others[:5], 13, *others[5:]]
    for position in range(50, 90):
        wanted = alone.choose(logits[None], [2], [position]).item()
        assert crowd.choose(table, slots, [position] * 16)[5] == wanted


def test_stop_ids_are_forbidden_until_min_tokens_at_any_bias() -> None:
    logits = torch.zeros(2, VOCAB)
    logits[:, [7, 9]] = torch.tensor([5.0, 4.0])
    chooser, bias = sampler(), {"bias_ids": ints([7]), "bias_values": floats([100.0])}
    for slot, least in ((0, 0), (1, 3)):
        asked = opened(slot, [1, 2, 8], 2, temperature=0.0, **bias)  # one token is generated already
        chooser.open(dataclasses.replace(asked, stop_ids=ints([7, VOCAB]), min_tokens=least))
    ids = [chooser.choose(logits, [0, 1], [position] * 2).tolist() for position in (3, 4, 5)]
    assert ids == [[7, 9], [7, 9], [7, 7]]
    assert chooser.has_logit_changes(1)
    chooser.open(opened(1, [1], 1, temperature=0.0))
    assert not chooser.has_logit_changes(1)


def test_greedy_and_random_rows_share_a_batch() -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(8))
    mixed = sampler()
    mixed.open(opened(0, [1], 1, temperature=0.0))
    mixed.open(opened(1, [1], 1, temperature=1.0, top_k=1))
    mixed.open(opened(2, [1], 1, temperature=1e-30))
    assert mixed.choose(logits, [0, 1, 2], [4, 5, 6]).tolist() == logits.argmax(-1).tolist()


def test_frequency_counts_start_with_the_output_and_follow_it() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, :4] = torch.tensor([3.0, 2.5, 2.2, 1.6])
    chooser = sampler()
    # Token 0 is in the prompt only: no penalty. Token 1 was generated twice.
    chooser.open(opened(6, [0, 0, 1, 1], 2, temperature=0.0, frequency_penalty=1.0))
    chosen = [int(chooser.choose(logits, [6], [4 + i])) for i in range(6)]
    assert chosen == [0, 2, 0, 3, 2, 0]  # 3.0, 2.2, 2.0, 1.6, 1.2, 1.0
    chooser.open(opened(6, [0], 1, temperature=0.0, frequency_penalty=1.0))
    assert chooser.choose(logits, [6], [1]).item() == 0


def test_repetition_penalty_covers_prompt_and_output_and_leaves_other_rows() -> None:
    logits = torch.zeros(2, VOCAB)
    logits[:, :3] = torch.tensor([4.0, 3.0, 2.5])
    chooser = sampler()
    chooser.open(opened(0, [0], 1, temperature=0.0, repetition_penalty=1.5))
    chooser.open(opened(1, [0], 1, temperature=0.0))
    assert chooser.choose(logits, [0, 1], [1, 1]).tolist() == [1, 0]  # 2.67 < 3
    assert chooser.choose(logits, [0, 1], [2, 2]).tolist() == [0, 0]  # 3 / 1.5 = 2 < 2.5 < 2.67
    assert logits[0, 0] == 4.0


def test_bias_bans_and_promotes() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 7] = 5.0
    chooser = sampler()
    bias = {"bias_ids": ints([7, 9]), "bias_values": floats([-100.0, 1.0])}
    chooser.open(opened(3, [1], 1, temperature=0.0, **bias))
    assert chooser.choose(logits, [3], [1]).item() == 9
    chooser.open(opened(3, [1], 1, temperature=0.0))
    assert chooser.choose(logits, [3], [1]).item() == 7


def test_a_slot_opens_after_the_warm_up_which_is_in_inference_mode() -> None:
    warmed = sampler()
    with torch.inference_mode():
        warmed.open(opened(0, [1, 2], 1, frequency_penalty=0.1))
    warmed.open(opened(0, [3, 4, 4], 1, temperature=0.0, frequency_penalty=100.0))
    logits = torch.zeros(1, VOCAB)
    logits[0, 4], logits[0, 9] = 5.0, 1.0
    assert warmed.choose(logits, [0], [3]).item() == 9
