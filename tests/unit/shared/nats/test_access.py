"""Whose inbox an answer may go to, and where a service that acts in others' names receives it."""

from __future__ import annotations

import pytest
from support.memory_bus import MemoryBroker

from shared.nats import access, permissions, subjects
from shared.nats.interface import Delivery

GENERATE = subjects.generate("acme", "m")


def may_go(user: str, subject: str, reply: str) -> bool:
    return access.can_answer(MemoryBroker().connect(user), Delivery(subject, b"", reply))


@pytest.mark.parametrize("user", ["", "acme", "anybody"])
@pytest.mark.parametrize("reply", ["_INBOX.bob.1", "my.answers", "_INBOX.x"])
def test_any_inbox_is_accepted_without_credentials_of_ours(user: str, reply: str) -> None:
    assert may_go(user, GENERATE, reply)
    assert not may_go(user, GENERATE, "hr.default.scheduler.1.in.Tokenized")


@pytest.mark.parametrize(
    ("subject", "place"),
    [
        (GENERATE, "acme"), (subjects.tokenize("a.b", "m"), "a=2Eb"), (subjects.models("acme"), "acme"),
        (subjects.detokenize("acme", "m"), "acme"), (subjects.MODELS, "headrace-operator"),
        (subjects.STATUS, "headrace-gateway"), (subjects.trace("acme"), "headrace-operator"),
        (subjects.events_snapshot("acme"), "headrace-operator"), ("$SRV.PING", "headrace-scheduler"),
    ],
)  # fmt: skip
def test_inbox_lies_below_that_of_the_permitted_requester_with_credentials(subject: str, place: str) -> None:
    assert may_go("headrace-tokenizer", subject, f"_INBOX.{place}.1.2")
    near = () if place.startswith("headrace-") else (place, f"{place}2.1", "headrace-gateway.1")
    for other in ("bob.1.2", "1", "bob.headrace-gateway.1.2", f"bob.{place}.1", *near):
        assert not may_go("headrace-tokenizer", subject, f"_INBOX.{other}")
    assert not may_go("headrace-tokenizer", subject, "my.answers")
    assert not may_go("headrace-tokenizer", subject, "")


@pytest.mark.parametrize(
    ("subject", "reply", "place"),
    [
        (GENERATE, "_INBOX.abc.1", "_INBOX.acme.headrace-account.abc.1"),
        (subjects.models("acme"), "_INBOX.abc", "_INBOX.acme.headrace-account.abc"),
        (subjects.tokenize("a.b", "m"), "_INBOX.a.b.1", "_INBOX.a=2Eb.headrace-account.a.b.1"),
        (GENERATE, "_INBOX.bob.1.2", "_INBOX.acme.headrace-account.bob.1.2"),  # in its own account
        (GENERATE, "_INBOX.acme.1.2", "_INBOX.acme.1.2"),
        (GENERATE, "_INBOX.acme.headrace-gateway.1.2", "_INBOX.acme.headrace-gateway.1.2"),
        (subjects.STATUS, "_INBOX.headrace-operator.1.2", "_INBOX.headrace-operator.1.2"),
        (subjects.trace("acme"), "_INBOX.headrace-operator.1.2", "_INBOX.headrace-operator.1.2"),
    ],
)
def test_any_inbox_of_a_tenant_has_a_place_below_its_own_with_accounts(
    subject: str, reply: str, place: str
) -> None:
    asked = access.mapped(Delivery(subject, b"", reply))
    assert asked.reply == place
    assert access.can_answer(MemoryBroker().connect("headrace-tokenizer"), asked)


@pytest.mark.parametrize("reply", ["", "my.answers", "hr.default.scheduler.1.in.Tokenized", "_INBOX", "_R.1"])
def test_invalid_inbox_gets_no_answer_with_accounts(reply: str) -> None:
    asked = access.mapped(Delivery(GENERATE, b"", reply))
    assert asked.reply == reply
    assert not access.can_answer(MemoryBroker().connect("headrace-tokenizer"), asked)


def test_service_that_acts_in_others_names_receives_the_answers_below_theirs() -> None:
    """So one rule holds for all, and the service's permission covers each of them."""
    own = "_INBOX.headrace-gateway.abc"
    inbox = access.reply_inbox("headrace-gateway", "acme", own)
    assert inbox == "_INBOX.acme.headrace-gateway.abc"
    assert may_go("headrace-tokenizer", GENERATE, f"{inbox}.1")
    assert access.reply_inbox("acme", "acme", "_INBOX.acme.abc") == "_INBOX.acme.abc"
    assert access.reply_inbox("", "public", "_INBOX.abc") == "_INBOX.abc"
    for allowed in (permissions.of_service("gateway", "f"), permissions.of_operator("f")):
        assert sum(pattern.startswith("_INBOX.*.headrace-") for pattern in allowed.subscribe) == 1
