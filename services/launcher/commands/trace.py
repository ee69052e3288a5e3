"""`headrace trace ID` shows where the time of one request went, from the scheduler's own record.

It needs neither OpenTelemetry nor a viewer. The trace is drawn as a waterfall, with `--overlap` as one row of
steps for each place that works on them, or written as a timeline for a viewer. The drawing is pure.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from services.launcher.console import bold, dim, load, paint
from services.launcher.session import Target, connected, find_target
from shared.client.client import request_all
from shared.errors import BadRequest, Unavailable, UnknownRequest
from shared.messages import SEGMENT_LANES
from shared.nats import subjects
from shared.nats.interface import Bus, NoResponders
from shared.telemetry.traces import covered_us

WAIT_S = 1.0  # for an answer from the scheduler that has the request

Body = dict[str, Any]
Span = dict[str, Any]
Event = dict[str, Any]
Interval = tuple[int, int]

# The waterfall.
MIN_BAR, MAX_BAR = 20, 100
_COLOURS = {"received": 33, "tokenize": 33, "transit": 2, "queue": 35, "prefill wait": 2, "decode": 32}
_CYAN, _RED = 36, 31
_SHOWN = (("tokens", "tokens"), ("step", "step"), ("tokens_per_second", "tokens/s"))

# The timeline.
REQUEST_PID = 1
MICRO_BATCH_LANE, WAIT_LANE = 90, 99

# The rows of `--overlap`.
STEPS = 8  # drawn
RAN = ("prefill", "decode")  # the spans in which a request takes part in steps
TRANSPORT, HOST = "transport", "host"
COMPUTE = ("compute A", "compute B")
LANES = (TRANSPORT, *COMPUTE, HOST)
MIN_WIDTH, LABEL = 40, 11
_MARKS = {
    "plan": "▸",
    "result": "◂",
    "forward": "█",
    "sample": "▓",
    "queued": "·",
    "host A": "A",
    "host B": "B",
    **dict(zip(SEGMENT_LANES, "██▒▒", strict=True)),
}
_BOTH = {frozenset("▸◂"): "◆", frozenset("AB"): "#"}


@dataclass(frozen=True, slots=True)
class Form:
    """How to show a trace."""

    as_json: bool = False
    overlap: bool = False  # the rows of some steps instead of the waterfall
    perfetto: Path | None = None  # a file to which a timeline is written, too


async def trace(target: Target, request: str, form: Form) -> None:
    """Print the waterfall of a request, or its data. Raises UnknownRequest, Unavailable, BadRequest."""
    perfetto, as_json = form.perfetto, form.as_json
    async with connected(target.nats_url) as bus:
        body = await find(bus, request, steps=as_json or form.overlap or perfetto is not None)
    if perfetto is not None:
        _write(perfetto, json.dumps(timeline(body)))
    if form.overlap:
        found = overlap(body)
        for line in [json.dumps(found, indent=2)] if as_json else draw_overlap(found, _width()):
            print(line)
        return
    if as_json:
        print(json.dumps(body, indent=2))
        return
    for line in draw_trace(body, _width()):
        print(line)
    if perfetto is not None:
        steps = sum(len(columns["step"]) for columns in body["steps"].values())
        print(f"\n{perfetto} has the timeline with {steps} steps: open it at https://ui.perfetto.dev")


async def find(bus: Bus, request: str, *, steps: bool = False, wait_s: float = WAIT_S) -> Body:
    """The trace of a request, from the scheduler that has it. Raises UnknownRequest if no scheduler has it,
    Unavailable if no scheduler answers, and BadRequest for an invalid id."""
    if not 0 < len(request) <= subjects.MAX_NAME_CHARS:
        raise BadRequest(f"a request id has 1 to {subjects.MAX_NAME_CHARS} characters", param="request_id")
    wanted = subjects.TRACE_STEPS if steps else b""
    try:
        answers = await request_all(bus, subjects.trace(request), wait_s, _is_known, body=wanted)
    except NoResponders:
        raise Unavailable("no scheduler runs on this server: start one with `headrace up`") from None
    if not answers:
        raise Unavailable("no scheduler answers: see `headrace status`")
    for answer in filter(_is_known, answers):
        return answer
    raise UnknownRequest(
        f"no request {request!r} is running or among the last 1000: the id is `request_id` in the frames and "
        "`id` in a plain answer; refused requests have no trace"
    )


def _is_known(answer: Body) -> bool:
    return bool(answer["state"] != "unknown")


def _width() -> int:
    return shutil.get_terminal_size().columns


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise BadRequest(f"{path} cannot be written: {error.strerror}") from None


def draw_trace(body: dict[str, Any], width: int) -> list[str]:
    """The lines for a terminal of `width` columns: a bar for each span, then the decisions with reasons."""
    spans: list[Span] = body["spans"]
    rows = [(depth, span) for depth, span in _tree(spans) if span["parent"] is not None]
    labels = [f"{'  ' * (depth - 1)}{span['name']}" for depth, span in rows]
    widest = max((len(label) for label in labels), default=0)
    bar = min(max(width - widest - 40, MIN_BAR), MAX_BAR)
    start, total = spans[0]["start_us"], max(spans[0]["end_us"] - spans[0]["start_us"], 1)
    lines = [*_head(body, total), ""]
    for label, (_, span) in zip(labels, rows, strict=True):
        took = span["end_us"] - span["start_us"]
        drawn = paint(_bar(span, start, total, bar), _colour(span), sys.stdout)
        lines.append(f"{label:<{widest}} {drawn} {_ms(took):>10}  {dim(_facts(span))}".rstrip())
    return [*lines, *_decisions(spans, start)]


def _head(body: dict[str, Any], total_us: int) -> list[str]:
    root, choices = body["spans"][0], body["choices"]
    tokens = sum(choice["tokens"] for choice in choices)
    reasons = ", ".join(choice["reason"] for choice in choices)
    where = [f"executor {choices[0]['executor'] or 'none yet'}", body["detokenizer"].replace(".", " ")]
    trace = [f"trace {body['trace_id']}"] if body["trace_id"] else []
    prompt = f"prompt {choices[0]['prompt_tokens']} tokens ({choices[0]['cached_tokens']} cached)"
    counts = [prompt, f"answer {tokens} tokens"]
    if len(choices) > 1:
        counts.append(f"{len(choices)} choices")
    if (first := root["attributes"].get("gen_ai.response.time_to_first_chunk")) is not None:
        counts.append(f"first text after {_ms(first * 1e6)}")
    counts.append(f"{_ms(total_us)} in all" if body["state"] == "ended" else f"{_ms(total_us)} so far")
    lines = [
        f"{bold(body['request_id'])}  {root['name']}  tenant {body['tenant']}  {body['state']}: {reasons}",
        f"  {', '.join([*where, *trace])}",
        f"  {', '.join(counts)}",
    ]
    if root["error"]:
        lines.append(f"  {paint(root['error'], _RED, sys.stdout)}")
    return lines


def _tree(spans: list[Span]) -> list[tuple[int, Span]]:
    """(depth, span) pairs: children after their parent, ordered by start."""
    children: dict[int | None, list[int]] = defaultdict(list)
    for i, span in enumerate(spans):
        children[span["parent"]].append(i)

    def below(parent: int | None, depth: int) -> list[tuple[int, Span]]:
        found: list[tuple[int, Span]] = []
        for i in sorted(children[parent], key=lambda i: spans[i]["start_us"]):
            found += [(depth, spans[i]), *below(i, depth + 1)]
        return found

    return below(None, 0)


def _bar(span: Span, start_us: int, total_us: int, width: int) -> str:
    """The span as a bar in `width` columns; a span shorter than a column is a thin line."""
    begin = min((span["start_us"] - start_us) * width // total_us, width - 1)
    end = min(-(-(span["end_us"] - start_us) * width // total_us), width)
    thin = (span["end_us"] - span["start_us"]) * width < total_us
    mark = "▏" if thin else "█" * max(end - begin, 1)
    return f"{' ' * max(begin, 0)}{mark}".ljust(width)


def _colour(span: Span) -> int:
    return _COLOURS.get(span["name"], _CYAN)


def _facts(span: Span) -> str:
    attributes = span["attributes"]
    return ", ".join(
        f"{text} {attributes[name]}" if name == "step" else f"{attributes[name]} {text}"
        for name, text in _SHOWN
        if name in attributes
    )


def _decisions(spans: list[Span], start_us: int) -> list[str]:
    events = sorted((event for span in spans for event in span["events"]), key=lambda event: event["at_us"])
    lines = ["", "decisions"] if events else []
    for event in events:
        numbers = dict(event["attributes"])
        why, choice = numbers.pop("why", ""), numbers.pop("choice", 0)
        facts = ", ".join(f"{name} {value}" for name, value in numbers.items())
        head = f"choice {choice}: " if choice else ""
        lines.append(
            f"  {_ms(event['at_us'] - start_us):>10}  {head}{event['name']}: {why} {dim(f'({facts})')}"
        )
    return lines


def _ms(us: float) -> str:
    return f"{us / 1000:.1f} ms"


def timeline(body: dict[str, Any]) -> dict[str, Any]:
    """A trace with its steps as Chrome's trace-event JSON, a timeline in ui.perfetto.dev and vizviewer.

        request r1      stages | prefill chunks …
        executor e      in flight A:0 | queued ··· forward ████ sample █ returned ·|
                        in flight A:1 |       queued ······ forward ████ sample █ returned ·|
                        waiting for a plan        ░
                        compute A, comm A, …      of steps in micro-batches, their first segments

    A step occupies the row `step % window` of its executor from the sending of its plan until its result is
    applied, so the rows are the steps in flight. Format: "Trace Event Format", Google, 2016.
    """
    origin_us = body["spans"][0]["start_us"]
    events = [*_request(body, origin_us)]
    for pid, (executor, columns) in enumerate(body.get("steps", {}).items(), REQUEST_PID + 1):
        events += _executor(pid, executor, columns, body["window"], origin_us)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _request(body: dict[str, Any], origin_us: int) -> Iterator[Event]:
    """Each span in the first row that is free during its time, because slices of a row must not cross."""
    yield _name("process_name", REQUEST_PID, 0, f"request {body['request_id']}")
    rows: list[int] = []  # the end of the last span in each
    for span in sorted(body["spans"], key=lambda s: (s["start_us"], -s["end_us"])):
        row = next((i for i, until in enumerate(rows) if until <= span["start_us"]), len(rows))
        if row == len(rows):
            rows.append(0)
            yield _name("thread_name", REQUEST_PID, row, "stages" if row else "request")
        rows[row] = span["end_us"]
        args = {**span["attributes"], **({"error": span["error"]} if span["error"] else {})}
        track = (REQUEST_PID, row)
        yield _slice(span["name"], track, span["start_us"] - origin_us, span["end_us"] - origin_us, args)
        for event in span["events"]:
            at_us = event["at_us"] - origin_us
            args = event["attributes"]
            yield {"ph": "i", "s": "t", "name": event["name"], **_at(track), "ts": at_us, "args": args}


def _executor(
    pid: int, name: str, columns: dict[str, list[Any]], window: int, origin_us: int
) -> Iterator[Event]:
    yield _name("process_name", pid, 0, f"executor {name}")
    for lane in range(window):
        yield _name("thread_name", pid, lane, f"in flight {lane}")
    yield _name("thread_name", pid, WAIT_LANE, "waiting for a plan")
    if any(columns.get("segments", ())):
        for lane, name in enumerate(SEGMENT_LANES, MICRO_BATCH_LANE):
            yield _name("thread_name", pid, lane, name)
    for row in zip(*columns.values(), strict=True):
        step = dict(zip(columns, row, strict=True))
        track = (pid, step["step"] % window)
        planned, start, end, result = (
            step[key] - origin_us for key in ("planned_us", "start_us", "end_us", "result_us")
        )
        forwarded = start + step["forward_us"]
        shown = ("step", "rows", "tokens", "prefill_tokens", "micro_batch", "wait_us")
        args = {key: step[key] for key in shown} | {"micro_batch": "AB"[step["micro_batch"] % 2]}
        yield _slice("queued", track, planned, max(start, planned), args)
        yield _slice(f"forward {step['step']}", track, start, forwarded, args)
        yield _slice(f"sample {step['step']}", track, forwarded, forwarded + step["sample_us"], args)
        yield _slice("returned", track, end, max(result, end), args)
        flat = step.get("segments", ())
        for lane, from_us, took_us in zip(flat[::3], flat[1::3], flat[2::3], strict=True):
            began = start + from_us
            yield _slice(SEGMENT_LANES[lane], (pid, MICRO_BATCH_LANE + lane), began, began + took_us, args)
        if step["wait_us"]:
            yield _slice("wait", (pid, WAIT_LANE), start - step["wait_us"], start, args)


def _slice(name: str, track: tuple[int, int], start_us: int, end_us: int, args: Event) -> Event:
    took_us = max(end_us - start_us, 0)
    return {"ph": "X", "name": name, **_at(track), "ts": start_us, "dur": took_us, "args": args}


def _at(track: tuple[int, int]) -> Event:
    return {"pid": track[0], "tid": track[1]}


def _name(kind: str, pid: int, tid: int, name: str) -> Event:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a step with a start and an end, on one row (`lane`)."""

    lane: str
    kind: str
    step: int
    start_us: int
    end_us: int


def overlap(body: Body) -> Body:
    """The steps in the middle of a request as segments, and how much of the host's work and of transport the
    device's work hides. Times are wall-clock times of scheduler and executor, from the start of the first
    segment. Raises UnknownRequest if none of the request's steps is kept any more."""
    whole, *stages = body["spans"]
    ran = [span for span in stages if span["name"] in RAN] or [whole]
    middle_us = (min(span["start_us"] for span in ran) + max(span["end_us"] for span in ran)) // 2
    executor, steps = _steps(body)
    if not steps:
        raise UnknownRequest(f"no step of {body['request_id']!r} is kept any more: trace it sooner")
    nearest = min(range(len(steps)), key=lambda i: abs(steps[i]["start_us"] - middle_us))
    first = max(0, min(nearest - STEPS // 2, len(steps) - STEPS))
    shown = steps[first : first + STEPS]
    segments = [segment for step in shown for segment in _segments(step)]
    origin_us = min(segment.start_us for segment in segments)
    moved = [Segment(p.lane, p.kind, p.step, p.start_us - origin_us, p.end_us - origin_us) for p in segments]
    return {
        "request_id": body["request_id"],
        "executor": executor,
        "modes": sorted({step["mode"] for step in shown}),
        "start_wall_us": origin_us,
        "took_us": max(segment.end_us for segment in moved),
        "segments": [asdict(segment) for segment in moved],
        **_hidden(moved),
        "two_streams": _two_streams([step for step in steps if step.get("segments")], middle_us),
    }


def draw_overlap(found: Body, width: int) -> list[str]:
    """The lines for a terminal of `width` columns: one row for each place, so that overlap is visible.

        transport  ▸▸    ◂◂▸▸           ▸ a plan on its way  ◂ a result  ◆ both
        compute A  ████▓▓      ████▓▓   █ forward  ▓ sample  · the plan waits for the device
        compute B  ··    ████▓▓
        host             AAAA  BBBB     logits processors of A, of B; # both

    A step on several ranks may be split into micro-batches, so that one's collectives overlap the other's
    compute; one such step is drawn below:

        compute A  ████    ████
        compute B      ████    ████
        comm A         ▒▒▒     ▒▒▒
        comm B             ▒▒▒
    """
    columns, took_us = max(width - LABEL, MIN_WIDTH), max(found["took_us"], 1)
    steps = sorted({segment["step"] for segment in found["segments"]})
    lines = [
        f"{found['request_id']}  steps {steps[0]} to {steps[-1]} of executor {found['executor']}, "
        f"{', '.join(found['modes'])}, {took_us / 1000:.2f} ms",
        "",
    ]
    lines += _rows(LANES, found["segments"], columns, took_us)
    busy, host, transport = found["device_busy_us"], found["host_us"], found["transport_us"]
    return [
        *lines,
        "",
        "▸ plan  ◂ result  █ forward  ▓ sample  · waits for the device  A B logits processors",
        f"the device works {_share(busy, took_us)} of the time; hidden under it: "
        f"{_share(found['hidden_host_us'], host)} of the host's {host / 1000:.2f} ms, "
        f"{_share(found['hidden_transport_us'], transport)} of the transport's {transport / 1000:.2f} ms",
        *_draw_streams(found["two_streams"], columns),
    ]


def _rows(lanes: Sequence[str], segments: Sequence[Body], columns: int, took_us: int) -> Iterator[str]:
    """A line for each lane."""
    for lane in lanes:
        row = [" "] * columns
        for segment in segments:
            if segment["lane"] == lane:
                _mark(row, segment, took_us)
        yield f"{lane:<{LABEL}}{''.join(row)}".rstrip()


def _two_streams(split: list[Body], middle_us: int) -> Body | None:
    """The split step nearest to `middle_us`: its first segments, the time of their collectives, and how much
    of that time was hidden under compute."""
    if not split:
        return None
    step = min(split, key=lambda step: abs(step["start_us"] - middle_us))
    flat = step["segments"]
    segments = [
        Segment(SEGMENT_LANES[lane], SEGMENT_LANES[lane], step["step"], from_us, from_us + took_us)
        for lane, from_us, took_us in zip(flat[::3], flat[1::3], flat[2::3], strict=True)
    ]
    compute, comm = _of_kinds(segments, *SEGMENT_LANES[:2]), _of_kinds(segments, *SEGMENT_LANES[2:])
    return {
        "step": step["step"],
        "tokens": step["tokens"],
        "took_us": max(segment.end_us for segment in segments),
        "segments": [asdict(segment) for segment in segments],
        "comm_us": covered_us(comm),
        "hidden_comm_us": _common_us(comm, compute),
    }


def _draw_streams(found: Body | None, columns: int) -> list[str]:
    if found is None:
        return []
    took_us = max(found["took_us"], 1)
    shown = f"in micro-batches, its first {took_us / 1000:.2f} ms"
    lines = ["", f"step {found['step']} of {found['tokens']} tokens {shown}"]
    lines += _rows(SEGMENT_LANES, found["segments"], columns, took_us)
    hidden = _share(found["hidden_comm_us"], found["comm_us"])
    return [*lines, "", f"collectives take {found['comm_us'] / 1000:.2f} ms of it, {hidden} under compute"]


def _steps(body: Body) -> tuple[str, list[Body]]:
    """The executor with most of the request's steps, and these steps in order."""
    found = {
        executor: [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        for executor, columns in body.get("steps", {}).items()
    }
    if not found:
        return "", []
    return max(found.items(), key=lambda item: len(item[1]))


def _segments(step: Body) -> Iterable[Segment]:
    """The segments of a step. Sampling comes last, right after the logits processors."""
    number, batch = step["step"], step["micro_batch"] % 2
    start, end, compute = step["start_us"], step["end_us"], COMPUTE[batch]
    sampling = end - step["sample_us"]
    arrived = start - step["queued_us"]
    for lane, kind, began, ended in (
        (TRANSPORT, "plan", min(step["planned_us"], arrived), arrived),
        (compute, "queued", arrived, start),
        (compute, "forward", start, start + step["forward_us"]),
        (HOST, f"host {'AB'[batch]}", sampling - step["host_us"], sampling),
        (compute, "sample", sampling, end),
        (TRANSPORT, "result", end, max(step["result_us"], end)),
    ):
        if ended > began:
            yield Segment(lane, kind, number, began, ended)


def _mark(row: list[str], segment: Body, took_us: int) -> None:
    """Draw a segment: at least one column, with a special mark where two segments meet."""
    mark, columns = _MARKS[segment["kind"]], len(row)
    begin = min(segment["start_us"] * columns // took_us, columns - 1)
    for at in range(begin, max(segment["end_us"] * columns // took_us, begin + 1)):
        if row[at] in (" ", "·", mark):
            row[at] = mark
        elif mark != "·":
            row[at] = _BOTH.get(frozenset((row[at], mark)), mark)


def _hidden(segments: list[Segment]) -> dict[str, int]:
    """The time of the device, the host and the transport, and how much of it the device's work hides."""
    device = _of_kinds(segments, "forward", "sample")
    host, transport = _of_kinds(segments, "host A", "host B"), _of_kinds(segments, "plan", "result")
    return {
        "device_busy_us": covered_us(device),
        "host_us": covered_us(host),
        "hidden_host_us": _common_us(host, device),
        "transport_us": covered_us(transport),
        "hidden_transport_us": _common_us(transport, device),
    }


def _of_kinds(segments: list[Segment], *kinds: str) -> list[Interval]:
    return [(segment.start_us, segment.end_us) for segment in segments if segment.kind in kinds]


def _common_us(some: list[Interval], others: list[Interval]) -> int:
    return covered_us(some) + covered_us(others) - covered_us([*some, *others])


def _share(part: int, whole: int) -> str:
    return f"{100 * part / max(whole, 1):.0f} %"


def command(parser: argparse.ArgumentParser) -> None:
    """Its arguments."""
    add = parser.add_argument
    add("request", help="its id: `request_id` in the frames, `id` in a plain answer")
    add("--json", action="store_true", help="the data, with the steps during the request")
    add(  # `overlap` is the name of a setting
        "--overlap", dest="draw_overlap", action="store_true", help="some of its steps, as rows of A and B"
    )
    add("--perfetto", type=Path, metavar="FILE", help="write a timeline of requests and steps")
    parser.set_defaults(run=_run)


def _run(given: argparse.Namespace) -> None:
    form = Form(as_json=given.json, overlap=given.draw_overlap, perfetto=given.perfetto)
    asyncio.run(trace(find_target(load(given)), given.request, form))
