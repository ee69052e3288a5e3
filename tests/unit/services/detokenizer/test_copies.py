"""Copies of requests that are open at another detokenizer."""

from __future__ import annotations

import pytest

from services.detokenizer.copies import Copies, key_of
from services.detokenizer.open_requests import opened_of
from shared.messages import Claims, Tokenized, longs

S, D = "scheduler.s", "detokenizer.d"


def asked(request: str = "r", **more: object) -> Tokenized:
    fields = {"attempt": 1, "tenant": "t", "model": "m", "inbox": "in", "shard": "d", "timeout_us": 1_000}
    return Tokenized(request=request, **{**fields, **more})  # type: ignore[arg-type]


@pytest.fixture
def copies() -> Copies:
    copies = Copies()
    copies.keep(S, asked(), "trace", 10)
    return copies


@pytest.mark.parametrize("order", [(S, D), (D, S)])
@pytest.mark.parametrize("void", [False, True])
def test_a_copy_is_ours_when_both_have_gone(copies: Copies, order: tuple[str, str], void: bool) -> None:
    """Dead, or started again without what they knew."""
    first, second = order
    lives = {S, D} if void else {second}
    assert copies.gone(first, lives.__contains__, void=void) == []
    (copy,) = copies.gone(second, set().__contains__ if not void else lives.__contains__, void=void)
    assert (copy.asked.request, copy.trace, len(copies)) == ("r", "trace", 0)


def test_one_that_is_back_has_lost_nothing(copies: Copies) -> None:
    assert copies.gone(S, {D}.__contains__, void=False) == []
    assert copies.gone(D, {S}.__contains__, void=False) == []
    assert copies.gone("scheduler.other", set().__contains__, void=True) == []
    assert len(copies) == 1


def test_what_is_answered_opened_here_or_late_is_forgotten(copies: Copies) -> None:
    copies.told(Claims(done=longs([key_of(asked(inbox="another")), key_of(asked("q"))])))
    assert len(copies) == 1, "an earlier request with its id, and another one"
    copies.told(Claims(done=longs([key_of(asked())])))
    copies.keep(S, asked(), "", 10)
    copies.opened(opened_of(asked(), 0))
    copies.keep(S, asked(), "", 10)
    copies.expire(1_010)
    assert len(copies) == 1
    copies.expire(1_011)
    assert len(copies) == 0


def test_what_ends_here_is_told_once(copies: Copies) -> None:
    assert not copies.unsent
    copies.answered(opened_of(asked("q"), 0))
    assert copies.unsent
    assert copies.report() == Claims(done=longs([key_of(asked("q"))]))
    assert not copies.unsent


def test_a_cancel_is_remembered(copies: Copies) -> None:
    copies.cancelled("t", "q")
    copies.cancelled("t", "r")
    (copy,) = copies.gone(S, set().__contains__, void=False)
    assert copy.cancelled
