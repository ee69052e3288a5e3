"""What counts as right, refused and a flaw when the host of a fleet has a fault."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from loadtest.chaos.cells import Span, Target
from loadtest.clients import Ask, Ended, Outcome
from loadtest.host_faults.__main__ import flaws, kept
from loadtest.host_faults.cases import CASES, Case
from loadtest.host_faults.place import Place
from loadtest.host_faults.watch import Traffic

ASK = Ask({"seed": 7, "stream": True})
FIRST, OTHER = {"7": ({0: "one two"}, 2)}, {"7": ({0: "three"}, 2)}


def ended(**outcome: Any) -> Ended:
    return Ended(Outcome(ASK, **outcome), "nats", 10.0, 12.0)


@pytest.mark.parametrize(
    ("outcome", "verdict"),
    [
        ({"end": "answer", "texts": {0: "one two"}, "tokens": 2}, "right"),
        ({"end": "answer", "texts": {0: "three"}, "tokens": 2}, "right"),
        ({"end": "answer", "texts": {0: "one"}, "tokens": 2}, "wrong"),
        ({"end": "answer", "texts": {0: "one three"}, "tokens": 2}, "doubled"),
        ({"end": "error", "code": 503, "message": "other weights", "accepted": True}, "refused"),
        ({"end": "silence", "accepted": True}, "lost"),
        ({"end": "silence"}, "silent"),
    ],
)
def test_an_answer_of_one_whole_model_is_right_and_a_typed_error_is_a_refusal(
    outcome: dict[str, Any], verdict: str
) -> None:
    traffic = Traffic(Target(0, "", "", 90.0))
    traffic.clients.ended = [ended(**outcome)]
    counts = traffic.counts("c", (), [FIRST, OTHER], Span())
    assert (counts.requests, getattr(counts, verdict)) == (1, 1)


def row(**more: Any) -> dict[str, Any]:
    usual = {"wrong": 0, "doubled": 0, "lost": 0, "silent": 0, "messages": {}, "held": "", "recovery_s": 1.0}
    return {**usual, "durable": {}, **more}


REFUSED = {"refused over nats: 503 no executor serves m": 2, "refused over http: 503 try again": 1}


@pytest.mark.parametrize(
    ("case", "found", "wanted"),
    [
        ({}, {}, []),
        ({}, {"wrong": 2, "recovery_s": None}, ["wrong 2", "no answer within 120 s of its end"]),
        ({}, {"messages": REFUSED}, [f"{count} × {why}" for why, count in REFUSED.items()]),
        (
            {"refuses": True, "causes": ("executor",)},
            {"messages": REFUSED},
            ["without the cause, 1 × refused over http: 503 try again"],
        ),
        ({}, {"durable": {"wrong": 1, "lost": 0, "silent": 0}}, ["durable wrong 1"]),
        ({"logged": "cut off"}, {}, ["the log has not 'cut off'"]),
        ({"logged": "is ready"}, {}, []),
    ],
)
def test_flaws_are_what_a_case_does_not_allow(
    case: dict[str, Any], found: dict[str, Any], wanted: list[str], tmp_path: Path
) -> None:
    async def nothing(place: Place) -> dict[str, Any]:
        return {}

    (tmp_path / "log").write_text("executor | executor.a is ready\n")
    place = Place(tmp_path, tmp_path / "log")
    assert flaws(Case("c", nothing, **case), row(**found), place) == wanted


def test_rows_of_an_earlier_run_stay_except_rows_that_run_again(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    assert kept(out, {"b"}) == []
    out.write_text('{"cases": [{"cell": "a"}, {"cell": "b"}, {"cell": "of an earlier version"}]}')
    assert kept(out, {"b"}) == [{"cell": "b"}]


def test_each_case_has_a_name_of_its_own() -> None:
    assert len({case.name for case in CASES}) == len(CASES) > 40
