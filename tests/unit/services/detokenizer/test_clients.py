"""Clients that still wait for a plain answer: probed beside the inbox, believed only where the probe
arrives."""

from __future__ import annotations

import pytest

from services.detokenizer.clients import ABSENT_TURNS, ClientLiveness, Probe
from services.detokenizer.response import ResponseText
from shared.messages import Open


def plain(number: int, inbox: str = "_INBOX.client.7") -> ResponseText:
    opened = Open(seq=number, request=f"r{number}", attempt=1, tenant="t", model="m", inbox=inbox)
    return ResponseText(opened, number, "")


def test_liveness_probe_goes_to_a_sibling_of_the_inbox_and_never_to_the_inbox() -> None:
    presence, request = ClientLiveness(), plain(5)
    assert presence.next_probes([request]) == [Probe("_INBOX.client.headrace-probe", "f5")]
    assert presence.next_probes([request]) == [Probe("_INBOX.client.headrace-probe", "p5")]


def test_a_client_that_was_there_and_is_absent_for_three_turns_has_gone() -> None:
    presence, request = ClientLiveness(), plain(5)
    presence.next_probes([request])
    sent = []
    for _ in range(ABSENT_TURNS):
        presence.next_probes([request])
        sent.append(presence.no_responder("p5"))
    assert sent == [None, None, 5]


def test_a_client_that_comes_back_is_counted_anew() -> None:
    presence, request = ClientLiveness(), plain(5)
    presence.next_probes([request])
    for absent in (True, True, False, True, True):
        presence.next_probes([request])
        assert not absent or presence.no_responder("p5") is None


def test_client_with_one_exact_inbox_is_probed_once_and_never_taken_for_gone() -> None:
    presence, request = ClientLiveness(), plain(5)
    presence.next_probes([request])
    assert presence.no_responder("f5") is None
    assert presence.next_probes([request]) == []
    assert [presence.no_responder("p5") for _ in range(5)] == [None] * 5


@pytest.mark.parametrize("inbox", ["my.answers.7", "_INBOX.alone", "_INBOX.a.b.c.d", "x"])
def test_a_subject_of_another_form_is_left_alone(inbox: str) -> None:
    assert ClientLiveness().next_probes([plain(1, inbox)]) == []


def test_ended_request_is_forgotten_and_a_malformed_probe_is_ignored() -> None:
    presence = ClientLiveness()
    presence.next_probes([plain(5), plain(6)])
    presence.next_probes([plain(6)])
    for _ in range(ABSENT_TURNS + 1):
        assert [presence.no_responder(name) for name in ("p5", "f5", "", "p", "px", "q6", "p-6")] == [
            None
        ] * 7
    assert presence.next_probes([plain(5)]) == [Probe("_INBOX.client.headrace-probe", "f5")]


def test_user_with_an_inbox_of_its_own_is_probed_in_it() -> None:
    for own in ("acme.client", "acme.headrace-gateway.client"):
        inbox, probe = f"_INBOX.{own}.7", Probe(f"_INBOX.{own}.headrace-probe", "f5")
        assert ClientLiveness().next_probes([plain(5, inbox)]) == [probe]
