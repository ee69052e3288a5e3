"""A GPU's drafts are those of a CPU: the definition of kernels.drafts beside PromptDrafts."""

from __future__ import annotations

import random

import torch

from kernels.drafts import LEAST, MOST, propose
from kernels.drafts.ref import WINDOW
from services.executor.speculation import prompt_drafts
from services.executor.speculation.prompt_drafts import PromptDrafts
from shared.messages import SlotOpen, ints


def test_gpu_proposes_the_drafts_of_a_cpu() -> None:
    assert (LEAST, MOST, WINDOW) == (prompt_drafts.LEAST, prompt_drafts.MOST, prompt_drafts.WINDOW)
    chance = random.Random(5)
    for _ in range(300):
        letters, prompt = chance.choice((2, 3, 6)), chance.randrange(1, 20)
        tokens = chance.choices(range(letters), k=prompt + chance.randrange(1, 20))
        prediction = chance.choices(range(letters), k=chance.choice((0, 3, 15)))
        drafter = PromptDrafts(lambda _, tokens=tokens: ints(tokens))
        drafter.open(SlotOpen(slot=0, generation=0, seq=0, prompt_tokens=prompt, prediction=ints(prediction)))
        wanted = drafter.draft([0], 7)[0].tolist()
        found = propose(torch.tensor(tokens), 7, torch.tensor(prediction), prompt)
        assert found.tolist() == wanted, (tokens, prediction, prompt)
