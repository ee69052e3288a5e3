"""Drafts from a tenant's other answers: never from another tenant's, and of a bounded number."""

from __future__ import annotations

import numpy as np

from services.executor.engine import NO_DRAFT
from services.executor.speculation.answers import LEAST, TENANTS, TOKENS, Answers
from services.executor.speculation.prompt_drafts import PromptDrafts
from shared.messages import Ints, SlotOpen, ints

PROMPT = [*range(20, 30)]
ANSWER = [*range(100, 112)]


class Slots:
    """The tokens of slots, and the drafts of a slot."""

    def __init__(self, *, alone: bool = True) -> None:
        self.tokens: dict[int, Ints] = {}
        self.drafter = PromptDrafts(self.tokens.__getitem__, (lambda slot, most: ()) if alone else None)

    def open(self, slot: int, tenant: str, prompt: list[int]) -> None:
        self.tokens[slot] = ints(prompt)
        self.drafter.open(
            SlotOpen(
                slot=slot, generation=1, seq=1, prompt_tokens=len(prompt), tokens=ints(prompt), tenant=tenant
            )
        )

    def answered(self, slot: int, tenant: str, prompt: list[int], answer: list[int]) -> None:
        self.open(slot, tenant, prompt)
        self.tokens[slot].extend(answer)
        self.drafter.close(slot)

    def drafts(self, slot: int, most: int = 8) -> list[int]:
        return [token for token in self.drafter.draft([slot], most)[0].tolist() if token != NO_DRAFT]


def test_an_answer_is_drafted_again_for_its_tenant() -> None:
    slots = Slots()
    slots.answered(0, "a", PROMPT, ANSWER)
    slots.open(1, "a", PROMPT)
    assert slots.drafts(1) == ANSWER[:8]
    slots.tokens[1].extend(ANSWER[:8])
    assert slots.drafts(1) == ANSWER[8:]  # none goes beyond its end
    slots.tokens[1].extend([*ANSWER[8:], 7])
    assert slots.drafts(1) == []


def test_an_answer_is_never_drafted_for_another_tenant_or_on_one_of_several_ranks() -> None:
    slots = Slots()
    slots.answered(0, "a", PROMPT, ANSWER)
    slots.open(1, "b", PROMPT)
    assert slots.drafts(1) == []
    ranks = Slots(alone=False)
    ranks.answered(0, "a", PROMPT, ANSWER)
    ranks.open(1, "a", PROMPT)
    assert ranks.drafts(1) == []


def test_own_tokens_win_where_as_many_occur() -> None:
    slots = Slots()
    slots.answered(0, "a", PROMPT, ANSWER)
    slots.open(1, "a", [*PROMPT, 5, 6, *PROMPT])
    assert slots.drafts(1)[:2] == [5, 6]


def test_the_same_end_of_two_prompts_alone_gives_no_drafts() -> None:
    slots, end = Slots(), [*range(50, 50 + LEAST - 1)]
    slots.answered(0, "a", [1, 2, 3, *end], ANSWER)
    slots.open(1, "a", [4, 5, 6, *end])
    assert slots.drafts(1) == []


def test_answers_are_bounded_by_tenants_and_tokens() -> None:
    answers, end = Answers(), np.arange(LEAST, dtype=np.int32)
    for number in range(TENANTS + 1):
        answers.add(f"t{number}", end)
    assert answers.of("t0", end) is None
    assert answers.of("t1", end) is not None
    answers.add("t1", np.zeros(TOKENS, np.int32))
    text = answers.of("t1", np.zeros(LEAST, np.int32))
    assert text is not None
    assert len(text) == TOKENS
    assert answers.of("t1", end) is None
