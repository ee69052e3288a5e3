"""What counts as wrong, doubled, lost, silent and refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from loadtest.chaos.__main__ import table
from loadtest.chaos.cells import Cell, Counts, Span, judged, verdict_of
from loadtest.clients import Ask, Clients, Ended, Outcome

ASK = Ask({"seed": 7, "stream": True})
RIGHT = {"7": ({0: "one two", 1: "three"}, 4)}
ANSWER = {"end": "answer", "texts": {0: "one two", 1: "three"}, "tokens": 4, "accepted": True}
REFUSED = {"end": "error", "code": 503, "message": "no scheduler a1b2c3d4 answers"}


def ended(over: str = "nats", began_s: float = 10.0, ended_s: float = 12.0, **outcome: Any) -> Ended:
    return Ended(Outcome(ASK, seconds=ended_s - began_s, **outcome), over, began_s, ended_s)


@pytest.mark.parametrize(
    ("each", "verdict"),
    [
        (ended(**ANSWER), "right"),
        (ended(**{**ANSWER, "texts": {0: "one two", 1: "three", 2: ""}}), "right"),
        (ended(**{**ANSWER, "texts": {0: "one", 1: "three"}}), "wrong"),
        (ended(**{**ANSWER, "tokens": 3}), "wrong"),
        (ended(**{**ANSWER, "texts": {0: "one oneone two", 1: "three"}}), "doubled"),
        (ended(**REFUSED), "refused"),
        (ended(**{**REFUSED, "code": 499}), "odd"),
        (ended(**REFUSED, accepted=True), "lost"),
        (ended(end="silence"), "silent"),
        (ended(end="silence", accepted=True), "lost"),
        (ended("http", end="reset"), "odd"),
        (ended("http", end="reset", accepted=True), "lost"),
    ],
)
def test_the_verdict_over_one_request(each: Ended, verdict: str) -> None:
    assert verdict_of(each, RIGHT, Span(), gateway_fell=False) == verdict


def test_a_gateway_that_is_gone_resets_its_own_connections_alone() -> None:
    for over, accepted, verdict in (
        ("http", True, "reset"),
        ("http", False, "reset"),
        ("nats", True, "lost"),
    ):
        each = ended(over, end="reset", accepted=accepted)
        assert verdict_of(each, RIGHT, Span(), gateway_fell=True) == verdict


@pytest.mark.parametrize(
    ("began_s", "ended_s", "accepted", "verdict"),
    [
        (19.0, 21.0, False, "broker"),  # under way when it died
        (25.0, 35.0, False, "broker"),  # sent while it was down, ended 5 s after its return
        (25.0, 35.1, False, "silent"),
        (25.0, 31.0, True, "lost"),
        (18.0, 19.9, False, "silent"),  # over before
        (30.1, 31.0, False, "silent"),  # sent after its return
    ],
)
def test_requests_lost_with_a_broker_end_soon_after_its_return(
    began_s: float, ended_s: float, accepted: bool, verdict: str
) -> None:
    each = ended(began_s=began_s, ended_s=ended_s, end="silence", accepted=accepted)
    assert verdict_of(each, RIGHT, Span(20.0, 30.0), gateway_fell=False) == verdict


def test_cell_is_counted_and_printed() -> None:
    clients = Clients("", "", 1.0, repeated=2)
    clients.ended = [ended(**ANSWER)] * 37 + [ended(**REFUSED), ended(ended_s=15.1, **REFUSED)]
    clients.ended.append(ended(**{**REFUSED, "message": "no scheduler d4c3b2a1 answers"}))
    counts = judged(Cell(("tokenizer", "scheduler"), "kill"), clients, RIGHT, Span())
    assert (counts.requests, counts.right, counts.refused, counts.late) == (40, 37, 3, 1)
    assert (counts.longest_s, counts.refused_pct) == (5.1, 7.5)
    assert counts.flaws == ["doubled 2", "late 1", "refused 7.5 %"]
    assert counts.messages == {"refused over nats: 503 no scheduler … answers": 3}
    assert "| kill tokenizer+scheduler | 40 | 37 | 0 | 2 |" in table([counts])
    of_broker = judged(Cell(("nats-server",), "kill"), clients, RIGHT, Span())
    assert of_broker.doubled == 0, "answers come again after its return, for readers that it may have cut off"


def test_resource_held_at_the_end_is_a_flaw() -> None:
    counts = Counts("kill executor", requests=600, right=570, refused=30)
    assert counts.flaws == []
    assert dataclasses.replace(counts, held="2 slots are held").flaws == ["2 slots are held"]
    assert dataclasses.replace(counts, refused=31).flaws == ["refused 5.2 %"]
