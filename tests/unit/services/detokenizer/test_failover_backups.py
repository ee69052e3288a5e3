"""Copies of requests that are open at another detokenizer."""

from __future__ import annotations

from dataclasses import fields

import pytest
from support.wire_samples import SAMPLES

from services.detokenizer.failover import DONE_US, ONE_LOST_US, Backups, key_of
from services.detokenizer.response import opened_of
from shared.messages import Claims, Open, Tokenized, longs

S, D = "scheduler.s", "detokenizer.d"
BOTH = {S, D}.__contains__
DAY_US = 86_400_000_000


def asked(request: str = "r", **more: object) -> Tokenized:
    fields = {"attempt": 1, "tenant": "t", "model": "m", "inbox": "in", "shard": "d", "timeout_us": 1_000}
    return Tokenized(request=request, **{**fields, **more})  # type: ignore[arg-type]


@pytest.fixture
def copies() -> Backups:
    copies = Backups()
    copies.on_backup(S, asked(), "trace", 10)
    return copies


@pytest.mark.parametrize("order", [(S, D), (D, S)])
@pytest.mark.parametrize("void", [False, True])
def test_a_copy_is_ours_when_both_have_gone(copies: Backups, order: tuple[str, str], void: bool) -> None:
    """Dead, or started again without what they knew."""
    first, second = order
    lives = {S, D} if void else {second}
    assert copies.on_gone(first, lives.__contains__, 20, void=void) == []
    (copy,) = copies.on_gone(second, set().__contains__ if not void else lives.__contains__, 20, void=void)
    assert (copy.tokenized.request, copy.trace, len(copies)) == ("r", "trace", 0)


def test_one_that_is_back_has_lost_nothing(copies: Backups) -> None:
    assert copies.on_gone(S, {D}.__contains__, 20, void=False) == []
    assert copies.on_gone(D, {S}.__contains__, 20, void=False) == []
    assert copies.on_gone("scheduler.other", set().__contains__, 20, void=True) == []
    assert len(copies) == 1


def test_request_answered_or_opened_here_or_late_is_forgotten(copies: Backups) -> None:
    copies.on_claims(Claims(done=longs([key_of(asked(inbox="another")), key_of(asked("q"))])), 10)
    assert len(copies) == 1, "an earlier request with its id, and another one"
    copies.on_claims(Claims(done=longs([key_of(asked())])), 10)
    assert len(copies) == 0
    copies.on_backup(S, asked("o"), "", 10)
    copies.on_opened(opened_of(asked("o"), 0))
    assert len(copies) == 0
    copies.on_backup(S, asked("late"), "", 10)
    copies.expire(1_010, BOTH)
    assert len(copies) == 1
    copies.expire(1_011, BOTH)
    assert len(copies) == 0


def test_request_that_ends_here_is_reported_once(copies: Backups) -> None:
    assert not copies.has_unsent
    copies.on_answered(opened_of(asked("q"), 0), 10)
    assert copies.has_unsent
    assert copies.report() == Claims(done=longs([key_of(asked("q"))]))
    assert not copies.has_unsent


def test_newcomer_gets_the_requests_answered_within_the_last_minute(copies: Backups) -> None:
    copies.on_answered(opened_of(asked("q"), 0), 10)
    copies.on_claims(Claims(done=longs([key_of(asked())])), 20)
    copies.report()
    assert copies.known == Claims(done=longs([key_of(asked("q")), key_of(asked())]))
    copies.expire(10 + DONE_US, BOTH)
    assert copies.known == Claims(done=longs([key_of(asked("q")), key_of(asked())]))
    copies.expire(11 + DONE_US, BOTH)
    assert copies.known == Claims(done=longs([key_of(asked())]))


def test_answered_requests_are_remembered_up_to_a_bound(
    copies: Backups, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.detokenizer.failover.MAX_DONE", 3)
    copies.on_claims(Claims(done=longs(range(5))), 10)
    assert copies.known == Claims(done=longs([2, 3, 4]))


def test_copy_that_arrives_after_the_answer_is_not_kept(copies: Backups) -> None:
    copies.on_claims(Claims(done=longs([key_of(asked("q"))])), 10)
    copies.on_backup(S, asked("q"), "", 10)
    assert len(copies) == 1
    copies.on_opened(opened_of(asked("q"), 0))
    copies.on_backup(S, asked("q"), "", 10)
    assert len(copies) == 2, "it was asked once more since"


@pytest.mark.parametrize(("gone", "left"), [(S, D), (D, S)])
@pytest.mark.parametrize("void", [False, True])
def test_a_copy_of_which_one_has_gone_is_kept_until_the_other_has_found_another(
    copies: Backups, gone: str, left: str, void: bool
) -> None:
    """The owner of a new one announces it, and a request that is not announced any more was answered
    before."""
    copies.on_backup(S, asked(timeout_us=DAY_US), "", 10)
    copies.on_backup(S, asked("renewed", timeout_us=DAY_US), "", 10)
    assert copies.on_gone(gone, {left}.__contains__, 100, void=void) == []
    copies.on_backup("scheduler.other", asked("renewed", shard="other", timeout_us=DAY_US), "", 200)
    copies.expire(100 + ONE_LOST_US, {left}.__contains__)
    assert len(copies) == 2
    copies.expire(101 + ONE_LOST_US, {left}.__contains__)
    assert len(copies) == 1


@pytest.mark.parametrize("void", [False, True])
def test_one_that_was_only_silent_goes_on_and_its_copies_stay(copies: Backups, void: bool) -> None:
    copies.on_backup(S, asked(timeout_us=DAY_US), "", 10)
    copies.on_gone(S, {D}.__contains__, 100, void=void)
    copies.expire(200, BOTH)
    copies.expire(DAY_US, BOTH)
    assert len(copies) == (not void)


def test_a_cancel_is_remembered(copies: Backups) -> None:
    copies.on_backup(S, asked("q"), "", 10)
    copies.on_claims(Claims(done=longs([key_of(asked("q"))])), 10)
    copies.on_cancelled("t", "q")
    copies.on_cancelled("t", "r")
    (copy,) = copies.on_gone(S, set().__contains__, 20, void=False)
    assert copy.cancelled


def test_an_open_of_a_copy_has_the_fields_of_its_request() -> None:
    asked = SAMPLES["Tokenized"]
    assert isinstance(asked, Tokenized)
    opened = opened_of(asked, 1)
    same = {field.name for field in fields(Open)} & {field.name for field in fields(Tokenized)}
    left = {"part", "parts", "tokens", "echo"}
    assert {name for name in same if getattr(opened, name) != getattr(asked, name)} <= left
