"""Copies of requests: which tokenizer takes over which, and when."""

from __future__ import annotations

import pytest

from services.tokenizer import intake, standby
from services.tokenizer.intake import PendingRequest, key_of
from services.tokenizer.standby import DONE_US, SILENT_US, STOPPED_US, TURN_US, UNOWNED_US, Standby
from shared.messages import ATTEMPTS, Claims, longs
from shared.nats.interface import Delivery

OTHER, IDS = "tokenizer.b", ["a", "b"]


def pending(name: str = "one", body: bytes = b"{}") -> PendingRequest:
    delivery = Delivery("headrace.v1.generate.t.m", body, f"_INBOX.{name}")
    return PendingRequest(delivery, key_of(delivery), received_us=1, received_wall_us=2)


def claims(taken: dict[int, str] | None = None, done: tuple[int, ...] = ()) -> Claims:
    taken = taken or {}
    return Claims(taken=longs(taken), ids=tuple(taken.values()), done=longs(done))


def late(copies: Standby, now_us: int) -> list[PendingRequest]:
    """In turns, as they are taken; `a` looks."""
    return [
        each
        for at_us in range(now_us % TURN_US, now_us + 1, TURN_US)
        for each in copies.overdue("a", IDS, at_us)
    ]


def kept(*requests: PendingRequest) -> Standby:
    copies = Standby()
    for each in requests:
        copies.copy(each, 0)
    return copies


def test_key_distinguishes_requests() -> None:
    large = b"x" * intake.HASHED_BYTES
    keys = [
        pending("i").key,
        pending("j").key,
        pending("i", b"{ }").key,
        pending("i", large).key,
        pending("i", large + b"y").key,
    ]
    assert len(set(keys)) == len(keys)
    assert pending("i").key == keys[0]


def test_unclaimed_request_is_taken_over() -> None:
    """The places of the tokenizers might differ by request, so that not all come at once."""
    requests = [pending(str(i)) for i in range(8)]
    copies = kept(*requests)
    assert late(copies, SILENT_US - TURN_US) == []
    first = copies.overdue("a", IDS, SILENT_US)
    then = copies.overdue("a", IDS, SILENT_US + TURN_US)
    assert 0 < len(first) < 8
    assert {each.key for each in first + then} == {each.key for each in requests}
    assert len(copies) == 0
    assert {(each.owners, each.attempt) for each in first} == {(0, 1)}


def test_owner_keeps_its_request_while_it_sends_anything() -> None:
    one = pending()
    copies = kept(one)
    copies.on_claims(OTHER, claims({one.key: "drawn"}), 100)
    for now_us in range(TURN_US, 60 * SILENT_US, TURN_US):
        copies.on_claims(OTHER, claims(), now_us)
        assert copies.overdue("a", IDS, now_us) == []
    silent_us = now_us
    (found,) = late_from(copies, silent_us)
    assert (found.owner, found.request_id, found.attempt) == (OTHER, "drawn", 1 + ATTEMPTS)


def late_from(copies: Standby, silent_us: int) -> list[PendingRequest]:
    """What is taken over once no tokenizer announces it any more, and not before SILENT_US."""
    found = []
    for now_us in range(silent_us, silent_us + SILENT_US + 2 * TURN_US, TURN_US):
        found += copies.overdue("a", IDS, now_us)
        assert now_us >= silent_us + SILENT_US or not found
    return found


def test_unclaimed_request_may_wait_at_a_busy_tokenizer() -> None:
    """While another one sends anything it is left alone for longer, and not for ever."""
    one = pending()
    copies = kept(one)
    found = []
    for now_us in range(TURN_US, UNOWNED_US + 2 * TURN_US, TURN_US):
        copies.on_claims(OTHER, claims(), now_us)
        found += copies.overdue("a", IDS, now_us)
        assert now_us >= UNOWNED_US or not found
    assert found == [one]
    copies = kept(pending())
    copies.on_claims(OTHER, claims(), TURN_US)
    copies.on_gone(OTHER)
    assert len(late_from(copies, 0)) == 1, "the word of one that has gone means nothing"


def test_one_that_is_taken_over_from_a_busy_owner_has_one_id() -> None:
    """It has waited there unseen for longer than the other one is patient."""
    one, same = pending(), pending()
    copies = Standby()
    copies.on_claims(OTHER, claims({one.key: "theirs"}), one.received_us + SILENT_US - 1)
    assert (copies.is_done_elsewhere(same), same.request_id) == (False, ""), "the client has sent it twice"
    copies = Standby()
    copies.on_claims(OTHER, claims({one.key: "theirs"}), one.received_us + SILENT_US)
    assert (copies.is_done_elsewhere(one), one.request_id) == (False, "theirs")
    copies.on_claims(OTHER, claims(done=(one.key,)), one.received_us + SILENT_US + 1)
    assert copies.is_done_elsewhere(one), "and its client has been answered, perhaps"
    now_us = one.received_us + SILENT_US + 2 + DONE_US
    copies.overdue("a", IDS, now_us)
    assert not copies.is_done_elsewhere(pending())


def test_tokenizer_that_has_read_nothing_yet_reports_that_it_lives() -> None:
    assert Standby().report(busy=True) == Claims()


def test_unannounced_request_is_found_by_its_drawn_id() -> None:
    one, copies = pending(), Standby()
    one.request_id = "drawn"
    copies.own(one)
    assert copies.is_unannounced(one.key, "drawn")
    assert not copies.is_unannounced(one.key, "of its client")
    copies.report()
    assert not copies.is_unannounced(one.key, "drawn")


def test_done_request_is_forgotten_in_any_order_of_messages() -> None:
    one, two = pending("one"), pending("two")
    copies = kept(one)
    copies.on_claims(OTHER, claims({two.key: "", one.key: ""}, done=(one.key, two.key)), 1)
    copies.copy(two, 2)  # the copy comes last
    assert len(copies) == 0
    assert late(copies, DONE_US) == []
    for now_us in range(DONE_US, DONE_US + 3 * TURN_US, TURN_US):
        copies.overdue("a", IDS, now_us)
    copies.copy(two, DONE_US + 3 * TURN_US)  # a client may send the same again
    assert len(copies) == 1


def test_a_claim_may_come_before_its_copy() -> None:
    one = pending()
    copies = kept()
    copies.on_claims(OTHER, claims({one.key: "drawn"}), 1)
    copies.copy(one, 2)
    assert (one.owner, one.request_id, one.owners) == (OTHER, "drawn", 1)


def test_the_requests_of_one_that_has_gone_are_anybodys_a_second_after_its_last_word() -> None:
    one, two = pending("one"), pending("two")
    copies = kept(one)
    copies.on_claims(OTHER, claims({one.key: "", two.key: ""}), 5 * TURN_US)
    copies.on_gone(OTHER)
    copies.copy(two, 6 * TURN_US)
    assert (one.owner, two.owner) == ("", "")
    assert {each.key for each in late_from(copies, 5 * TURN_US)} <= {one.key, two.key}


def test_third_owner_starts_after_the_second() -> None:
    """A reader may have seen frames of its attempt."""
    one = pending()
    copies = kept(one)
    copies.on_claims(OTHER, claims({one.key: ""}), 1)
    copies.on_claims("tokenizer.c", claims({one.key: ""}), 2)
    assert one.attempt == 1 + 2 * ATTEMPTS


def test_own_request_is_announced_once_and_again_when_it_is_done() -> None:
    one, same = pending(), pending()
    copies = kept(one)
    assert copies.report() is None
    one.request_id = "drawn"
    copies.own(one)
    copies.own(same)
    copies.copy(pending(), 3)  # our own copy comes after it
    assert len(copies) == 0
    claimed = copies.report()
    assert claimed is not None
    assert (list(claimed.taken), len(claimed.ids)) == ([one.key], 1)
    assert copies.report() == Claims(), "a word that we live"
    copies.on_done(one.key, 4)
    assert copies.report() == Claims(), "the client has sent it twice"
    copies.on_done(one.key, 5)
    assert copies.report() == claims(done=(one.key,))
    assert copies.report() is None
    copies.copy(one, 6)
    copies.on_done(99, 7)  # not ours
    assert (len(copies), copies.report()) == (0, None)


def test_stopped_tokenizer_doubts_that_the_next_request_is_its_own() -> None:
    one, two = pending("one"), pending("two")
    copies = Standby()
    copies.overdue("a", IDS, TURN_US)
    copies.own(one)
    assert not copies.give_way(one, TURN_US + STOPPED_US)
    back_us = TURN_US + STOPPED_US + 1
    assert copies.give_way(one, back_us)
    assert copies.give_way(two, back_us)
    assert (len(copies), copies.report()) == (2, None)
    copies.on_claims(OTHER, claims({one.key: ""}, done=(one.key,)), back_us + 1)
    assert [each.key for each in late_from(copies, back_us)] == [two.key]
    assert not copies.give_way(two, back_us + SILENT_US), "others would have announced it by now"


def test_tokenizer_that_could_not_receive_takes_nothing_over() -> None:
    copies = kept(pending())
    for now_us in range(0, 10 * SILENT_US, TURN_US):
        copies.pardon(now_us)
        assert copies.overdue("a", IDS, now_us) == []
    assert len(late_from(copies, now_us)) == 1
    copies = kept(pending())
    copies.overdue("a", IDS, TURN_US)
    assert copies.overdue("a", IDS, 10 * SILENT_US) == [], "it was stopped"


@pytest.mark.parametrize("limit", ["MAX_COPIES", "MAX_COPY_BYTES"])
def test_copies_are_bounded_and_the_oldest_go_first(monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    monkeypatch.setattr(standby, limit, 3 if limit == "MAX_COPIES" else 6)
    copies = kept(*(pending(str(i)) for i in range(9)))
    assert len(copies) == 3
    assert {each.delivery.reply for each in late_from(copies, 0)} == {"_INBOX.6", "_INBOX.7", "_INBOX.8"}


@pytest.mark.parametrize("first", ["copy", "forwarded"])
def test_a_copy_of_a_request_to_an_alias_is_sure_once_it_was_forwarded(first: str) -> None:
    alone, both = pending("i"), [pending("j"), pending("j")]
    alone.unsure = both[first == "forwarded"].unsure = "chat"
    found = {each.key: each.unsure for each in late(kept(alone, *both), UNOWNED_US)}
    assert found == {alone.key: "chat", both[0].key: ""}
