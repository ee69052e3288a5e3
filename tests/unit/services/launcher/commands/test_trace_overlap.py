"""`headrace trace --overlap` on steps made by hand: two halves of 10 ms with 8 ms of host work each."""

from __future__ import annotations

from typing import Any

import pytest

from services.launcher.commands.trace import draw_overlap, overlap
from services.scheduler.reports.status import STEP_COLUMNS
from shared.errors import UnknownRequest

MS = 1_000


def step(number: int, start: int, **more: Any) -> dict[str, Any]:
    """A step that forwards from `start` ms for 9 ms; then its processors work 8 ms and it samples 1 ms, while
    the next one forwards. Its plan was 2 ms on its way and lay there 1 ms, its result takes 1 ms."""
    values = {
        "step": number, "planned_us": (start - 3) * MS, "start_us": start * MS, "end_us": (start + 18) * MS,
        "result_us": (start + 19) * MS, "forward_us": 9 * MS, "sample_us": MS, "wait_us": 0, "rows": 8,
        "tokens": 8, "prefill_tokens": 0, "micro_batch": number % 2, "host_us": 8 * MS, "queued_us": MS,
        "mode": "two_batch", "segments": (),
    }  # fmt: skip
    assert set(values) == set(STEP_COLUMNS)
    return {**values, **more}


def body(*steps: dict[str, Any], start_us: int = 0, end_us: int = 60 * MS) -> dict[str, Any]:
    columns = {name: [s[name] for s in steps] for name in STEP_COLUMNS}
    spans = [{"name": "request", "start_us": start_us, "end_us": end_us}]
    return {"request_id": "r", "spans": spans, "steps": {"e1": columns}, "window": 2}


def test_two_micro_batches_are_drawn_as_they_ran() -> None:
    """One column a millisecond, from the first plan at 0 to the last result at 40: B forwards under A's
    processors and the other way round."""
    found = overlap(body(step(4, 3), step(5, 12), step(6, 21)))
    assert (found["took_us"], found["modes"], found["executor"]) == (40 * MS, ["two_batch"], "e1")
    lines = draw_overlap(found, 51)
    assert lines[2:6] == [
        #                      1111111111222222222233333333334
        #            01234567890123456789012345678901234567890
        "transport  ▸▸       ▸▸       ▸▸ ◂        ◂        ◂",
        "compute A    ·█████████        ▓█████████        ▓",
        "compute B             ·█████████        ▓",
        "host                   AAAAAAAA BBBBBBBB AAAAAAAA",
    ]
    assert lines[0] == "r  steps 4 to 6 of executor e1, two_batch, 40.00 ms"


def test_hidden_time_is_the_common_time() -> None:
    found = overlap(body(step(4, 3), step(5, 12), step(6, 21)))
    # device: 3-30 without a gap, 38-39, and sample of 5 at 29-30; host: 12-20, 21-29, 30-38
    assert found["device_busy_us"] == 28 * MS
    assert (found["host_us"], found["hidden_host_us"]) == (24 * MS, 16 * MS)
    # transport: 0-2, 9-11, 18-20, 21-22, 30-31, 39-40
    assert (found["transport_us"], found["hidden_transport_us"]) == (9 * MS, 5 * MS)
    assert draw_overlap(found, 51)[-1] == (
        "the device works 70 % of the time; hidden under it: 67 % of the host's 24.00 ms, "
        "56 % of the transport's 9.00 ms"
    )


def test_pieces_that_meet_have_a_sign_of_their_own() -> None:
    one = step(1, 10, host_us=0, queued_us=0, planned_us=0)
    two = step(
        2, 20, host_us=0, queued_us=0, planned_us=28 * MS, start_us=29 * MS, end_us=40 * MS, result_us=40 * MS
    )
    found = overlap(body(one, two))
    transport = draw_overlap(found, 51)[2]
    assert transport == "transport  " + "▸" * 10 + " " * 18 + "◆"


def test_drawn_steps_are_from_the_middle_of_the_request() -> None:
    steps = [step(i, 10 * i) for i in range(1, 101)]
    shown = {p["step"] for p in overlap(body(*steps, start_us=0, end_us=1_000 * MS))["segments"]}
    assert shown == set(range(46, 54))
    shown = {p["step"] for p in overlap(body(*steps, start_us=0, end_us=40 * MS))["segments"]}
    assert shown == set(range(1, 9))
    late = overlap(body(*steps, start_us=900 * MS, end_us=2_000 * MS))
    assert {p["step"] for p in late["segments"]} == set(range(93, 101))


def test_the_time_in_the_queue_has_no_steps_of_the_request() -> None:
    steps = [step(i, 10 * i) for i in range(1, 101)]
    asked = body(*steps, start_us=0, end_us=1_000 * MS)
    asked["spans"] += [
        {"name": "queue", "start_us": 0, "end_us": 800 * MS},
        {"name": "prefill", "start_us": 800 * MS, "end_us": 820 * MS},
        {"name": "decode", "start_us": 820 * MS, "end_us": 1_000 * MS},
    ]
    assert {p["step"] for p in overlap(asked)["segments"]} == set(range(86, 94))


def test_the_executor_with_most_steps_is_shown() -> None:
    asked = body(step(1, 10))
    asked["steps"]["e2"] = body(step(7, 20), step(8, 30))["steps"]["e1"]
    assert overlap(asked)["executor"] == "e2"


def test_overlap_draws_nothing_without_steps() -> None:
    with pytest.raises(UnknownRequest, match="trace it sooner"):
        overlap(body())


def test_micro_batches_of_a_step_communicate_under_each_other() -> None:
    """One column 100 us: A computes 1 ms, then B, then A again from when its collective has ended; the last
    one is under nothing."""
    pieces = (0, 0, 1_000, 2, 1_000, 800, 1, 1_000, 1_000, 0, 2_000, 1_000, 3, 2_000, 700, 2, 3_000, 1_000)
    found = overlap(
        body(step(4, 3), step(5, 12, tokens=4_096, segments=pieces), step(6, 60, segments=pieces))
    )
    streams = found["two_streams"]
    assert (streams["step"], streams["took_us"]) == (5, 4 * MS)  # the one nearest to the middle
    assert (streams["comm_us"], streams["hidden_comm_us"]) == (2_500, 1_500)
    lines = draw_overlap(found, 51)
    assert lines[-8:] == [
        "",
        "step 5 of 4096 tokens in micro-batches, its first 4.00 ms",
        "compute A  ██████████          ██████████",
        "compute B            ██████████",
        "comm A               ▒▒▒▒▒▒▒▒            ▒▒▒▒▒▒▒▒▒▒",
        "comm B                         ▒▒▒▒▒▒▒",
        "",
        "collectives take 2.50 ms of it, 60 % under compute",
    ]


def test_whole_steps_have_no_micro_batches_to_draw() -> None:
    found = overlap(body(step(4, 3)))
    assert found["two_streams"] is None
    assert not any("micro-batches" in line for line in draw_overlap(found, 51))
