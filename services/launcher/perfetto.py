"""A trace as Chrome's trace-event JSON, which ui.perfetto.dev and vizviewer show as a timeline. Pure.

    request r1      stages | prefill chunks …
    executor e      in flight A:0 | queued ··· forward ████ sample █ returned ·|
                    in flight A:1 |       queued ······ forward ████ sample █ returned ·|
                    waiting for a plan        ░
                    compute A, comm A, …      of steps in halves, their first pieces

A step occupies the lane `step % window` of its executor from the sending of its plan until its result is
applied, so the lanes are the micro-batches in flight. Format: "Trace Event Format", Google, 2016.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from shared.messages.steps import PIECE_LANES

Event = dict[str, Any]

REQUEST_PID = 1
HALVES_LANE, WAIT_LANE = 90, 99


def timeline(body: dict[str, Any]) -> dict[str, Any]:
    """The document for a trace with its steps."""
    origin_us = body["spans"][0]["start_us"]
    events = [*_request(body, origin_us)]
    for pid, (executor, columns) in enumerate(body.get("steps", {}).items(), REQUEST_PID + 1):
        events += _executor(pid, executor, columns, body["window"], origin_us)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _request(body: dict[str, Any], origin_us: int) -> Iterator[Event]:
    """Each span in the highest row that is free in its time: slices of a row nest or follow, never cross."""
    yield _name("process_name", REQUEST_PID, 0, f"request {body['request_id']}")
    rows: list[int] = []  # until when each is taken
    for span in sorted(body["spans"], key=lambda s: (s["start_us"], -s["end_us"])):
        row = next((i for i, until in enumerate(rows) if until <= span["start_us"]), len(rows))
        if row == len(rows):
            rows.append(0)
            yield _name("thread_name", REQUEST_PID, row, "stages" if row else "request")
        rows[row] = span["end_us"]
        args = {**span["attributes"], **({"error": span["error"]} if span["error"] else {})}
        place = (REQUEST_PID, row)
        yield _slice(span["name"], place, span["start_us"] - origin_us, span["end_us"] - origin_us, args)
        for event in span["events"]:
            at_us = event["at_us"] - origin_us
            args = event["attributes"]
            yield {"ph": "i", "s": "t", "name": event["name"], **_at(place), "ts": at_us, "args": args}


def _executor(
    pid: int, name: str, columns: dict[str, list[Any]], window: int, origin_us: int
) -> Iterator[Event]:
    yield _name("process_name", pid, 0, f"executor {name}")
    for lane in range(window):
        yield _name("thread_name", pid, lane, f"in flight {lane}")
    yield _name("thread_name", pid, WAIT_LANE, "waiting for a plan")
    if any(columns.get("pieces", ())):
        for lane, name in enumerate(PIECE_LANES, HALVES_LANE):
            yield _name("thread_name", pid, lane, name)
    for row in zip(*columns.values(), strict=True):
        step = dict(zip(columns, row, strict=True))
        place = (pid, step["step"] % window)
        planned, start, end, result = (
            step[key] - origin_us for key in ("planned_us", "start_us", "end_us", "result_us")
        )
        forwarded = start + step["forward_us"]
        shown = ("step", "rows", "tokens", "prefill_tokens", "micro_batch", "wait_us")
        args = {key: step[key] for key in shown} | {"micro_batch": "AB"[step["micro_batch"] % 2]}
        yield _slice("queued", place, planned, max(start, planned), args)
        yield _slice(f"forward {step['step']}", place, start, forwarded, args)
        yield _slice(f"sample {step['step']}", place, forwarded, forwarded + step["sample_us"], args)
        yield _slice("returned", place, end, max(result, end), args)
        flat = step.get("pieces", ())
        for lane, from_us, took_us in zip(flat[::3], flat[1::3], flat[2::3], strict=True):
            began = start + from_us
            yield _slice(PIECE_LANES[lane], (pid, HALVES_LANE + lane), began, began + took_us, args)
        if step["wait_us"]:
            yield _slice("wait", (pid, WAIT_LANE), start - step["wait_us"], start, args)


def _slice(name: str, place: tuple[int, int], start_us: int, end_us: int, args: Event) -> Event:
    took_us = max(end_us - start_us, 0)
    return {"ph": "X", "name": name, **_at(place), "ts": start_us, "dur": took_us, "args": args}


def _at(place: tuple[int, int]) -> Event:
    return {"pid": place[0], "tid": place[1]}


def _name(kind: str, pid: int, tid: int, name: str) -> Event:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}
