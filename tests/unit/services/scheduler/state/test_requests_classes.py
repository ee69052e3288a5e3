"""Service classes: how they are written, and the error of a wrong setting."""

from __future__ import annotations

import pytest

from services.scheduler.state.requests import CLASS_NAMES, SloClass, level_of, parse
from shared.errors import SetupError


def test_the_defaults_have_every_class_in_order() -> None:
    assert [c.name for c in parse("")] == list(CLASS_NAMES) == ["interactive", "standard", "batch"]
    assert parse("")[1] == SloClass("standard", 60_000_000, 100_000, 20_000_000)


def test_unnamed_class_field_keeps_its_default() -> None:
    interactive, standard, batch = parse(" standard=5/6/7 ,")
    assert standard == SloClass("standard", 5_000, 6_000, 7_000)
    assert (interactive, batch) == (parse("")[0], parse("")[2])


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("standard=1/2", "is not name=ttft/tbt/age"),
        ("standard=1/two/3", "is not name=ttft/tbt/age"),
        ("gold=1/2/3", "names no class: interactive, standard, batch"),
        ("batch=1/0/3", "no time between tokens"),
        ("batch=-1/2/3", "below zero"),
        ("batch=1/2/3,batch=4/5/6", "second time"),
    ],
)
def test_wrong_class_setting_is_an_error_that_names_the_flaw(text: str, why: str) -> None:
    with pytest.raises(SetupError, match=why):
        parse(text)


def test_levels_order_the_classes() -> None:
    assert [level_of(name) for name in (*CLASS_NAMES, "unheard of")] == [0, 1, 2, 1]
