"""An Open carries the fields of its request, under the names of Tokenized."""

from __future__ import annotations

import dataclasses

from support.wire_samples import SAMPLES

from shared.codec import open_of
from shared.messages import Open, Tokenized, ints

OF_A_CHOICE = {"attempt", "tokens", "part", "parts", "echo"}


def test_open_has_each_field_of_its_request_that_no_choice_has_for_itself() -> None:
    tokenized = SAMPLES["Tokenized"]
    assert isinstance(tokenized, Tokenized)
    opened = open_of(tokenized, seq=7, attempt=9, choice=2, prompt_tokens=3, tokens=ints([5]))
    names = {each.name for each in dataclasses.fields(Open)} & {
        each.name for each in dataclasses.fields(Tokenized)
    }
    wanted = {name: getattr(tokenized, name) for name in names - OF_A_CHOICE}
    assert {name: getattr(opened, name) for name in wanted} == wanted
    assert wanted["min_tokens"] != 0
    assert wanted["stop"] != ()
    own = (opened.seq, opened.attempt, opened.choice, opened.choices, opened.prompt_tokens, opened.tokens)
    assert own == (7, 9, 2, tokenized.n, 3, ints([5]))
    assert (opened.part, opened.parts, opened.echo) == (0, 1, False)
