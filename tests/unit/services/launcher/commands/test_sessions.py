"""`headrace sessions`: its words, to the character."""

from __future__ import annotations

from typing import Any

import pytest

from services.launcher.commands import sessions

ROW = {
    "state": "idle", "tokens": 41_216, "device": 41_216, "l1": 41_216, "l2": 0, "tenant": "acme",
    "session": "0f" * 14 + "a41f", "tool": "shell", "idle_s": 1.2, "returns_p50_s": 2.1,
    "returns_p90_s": 11.0, "load_s": 0.004,
}  # fmt: skip
BELOW = {
    "state": "below", "tokens": 38_400, "device": 0, "l1": 38_400, "l2": 0, "tenant": "acme",
    "session": "0f" * 14 + "77c0", "idle_s": 900, "load_s": 0.101, "compute_s": 1.19,
}  # fmt: skip
RUNS = {"state": "running", "tokens": 16, "device": 16, "l1": 0, "l2": 0, "tenant": "t", "session": "1" * 32}
SUMMARY = {
    "running": 9, "idle": 21, "below": 8, "kept": 3, "device": 412_000, "l1": 1_120_000, "lost_pm": 31,
    "tools": [
        {"tool": "read", "p50_us": 150_000, "pauses": 1_204},
        {"tool": "test", "p50_us": 15_000_000, "pauses": 240},
    ],
    "returns": {"device": 71, "l1": 28, "l2": 0, "computed": 1}, "released": 214, "superseded": 57,
    "wasted": 0,
}  # fmt: skip
TABLE = """
  tenant  session        state      idle  tokens  device      L1       returns within               next turn
  t       …1111          running              16      16       0
  acme    …a41f (shell)  idle      1.2 s  41,216  41,216  41,216  p50 2.1 s, p90 11 s                    4 ms
  acme    …77c0          below    15 min  38,400       0  38,400                       101 ms, computed 1.2 s
""".splitlines()[1:]


def test_the_sessions_of_a_scheduler_are_a_table_with_what_was_learned() -> None:
    answer = {"id": "3760bdf5", "data": [RUNS, ROW, BELOW], "count": 38, "summary": SUMMARY}
    assert sessions.draw(answer) == [
        "scheduler.3760bdf5  38 sessions: 9 running, 21 idle, 8 below; 412,000 tokens on the device, "
        "1,120,000 in L1 of the 3 least idle; 3 kept",
        *TABLE,
        "  and 35 more: --json has those that were idle least",
        "  tools learned: read p50 150 ms (1,204), test p50 15 s (240); 3.1 % never returned",
        "  100 returns: 71 % from the device, 28 % from L1, 1 % computed; 214 released, 57 superseded",
    ]


@pytest.mark.parametrize(
    "answer", [{"id": "s", "data": []}, {"id": "s", "data": [], "summary": {}, "count": 0}]
)
def test_a_scheduler_without_sessions_has_one_line(answer: dict[str, Any]) -> None:
    assert sessions.draw(answer) == ["scheduler.s  0 sessions"]


def test_whole_names_of_sessions_are_shown_on_request() -> None:
    (head, _, line) = sessions.draw({"id": "s", "data": [RUNS]}, ids=True)
    assert head.startswith("scheduler.s  1 session;")
    assert "1" * 32 in line
    many = sessions.draw({"id": "s", "data": [RUNS] * 30})
    assert (len(many), many[-1]) == (23, "  and 10 more: --json has those that were idle least")
