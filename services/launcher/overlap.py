"""`headrace trace --overlap`: some steps of a request's time as lanes, so that what runs under what is seen.

    transport  ▸▸    ◂◂▸▸           ▸ a plan on its way  ◂ a result  ◆ both
    compute A  ████▓▓      ████▓▓   █ forward  ▓ sample  · the plan waits for the device
    compute B  ··    ████▓▓
    host             AAAA  BBBB     logits processors of A, of B; # both

A step of several ranks may come in halves that talk under each other's compute; one such step is drawn below:

    compute A  ████    ████
    compute B      ████    ████
    comm A         ▒▒▒     ▒▒▒
    comm B             ▒▒▒

From the stamps of each step, executor's and scheduler's, by wall clock. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from shared.errors import UnknownRequest
from shared.messages.steps import PIECE_LANES
from shared.spans import covered_us

STEPS = 8  # drawn
RAN = ("prefill", "decode")  # spans of a request while it has steps of its own: in the queue it has none
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
    **dict(zip(PIECE_LANES, "██▒▒", strict=True)),
}
_BOTH = {frozenset("▸◂"): "◆", frozenset("AB"): "#"}

Body = dict[str, Any]
Interval = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Piece:
    """Something that lasted, on a lane."""

    lane: str
    kind: str
    step: int
    start_us: int
    end_us: int


def overlap(body: Body, most: int = STEPS) -> Body:
    """The steps in the middle of a request, as pieces on lanes, and how much was hidden; times count from
    the first piece. Raises UnknownRequest when none of its steps is kept any more."""
    whole, *stages = body["spans"]
    ran = [span for span in stages if span["name"] in RAN] or [whole]
    middle_us = (min(span["start_us"] for span in ran) + max(span["end_us"] for span in ran)) // 2
    executor, steps = _steps(body)
    if not steps:
        raise UnknownRequest(f"no step of {body['request_id']!r} is kept any more: ask sooner")
    nearest = min(range(len(steps)), key=lambda i: abs(steps[i]["start_us"] - middle_us))
    first = max(0, min(nearest - most // 2, len(steps) - most))
    shown = steps[first : first + most]
    pieces = [piece for step in shown for piece in _pieces(step)]
    origin_us = min(piece.start_us for piece in pieces)
    moved = [Piece(p.lane, p.kind, p.step, p.start_us - origin_us, p.end_us - origin_us) for p in pieces]
    return {
        "request_id": body["request_id"],
        "executor": executor,
        "modes": sorted({step["mode"] for step in shown}),
        "start_wall_us": origin_us,
        "took_us": max(piece.end_us for piece in moved),
        "pieces": [asdict(piece) for piece in moved],
        **_hidden(moved),
        "two_streams": _two_streams([step for step in steps if step.get("pieces")], middle_us),
    }


def draw(found: Body, width: int) -> list[str]:
    """The lines for a terminal of `width` columns."""
    columns, took_us = max(width - LABEL, MIN_WIDTH), max(found["took_us"], 1)
    steps = sorted({piece["step"] for piece in found["pieces"]})
    lines = [
        f"{found['request_id']}  steps {steps[0]} to {steps[-1]} of executor {found['executor']}, "
        f"{', '.join(found['modes'])}, {took_us / 1000:.2f} ms",
        "",
    ]
    lines += _rows(LANES, found["pieces"], columns, took_us)
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


def _rows(lanes: Sequence[str], pieces: Sequence[Body], columns: int, took_us: int) -> Iterator[str]:
    """A line for each lane."""
    for lane in lanes:
        row = [" "] * columns
        for piece in pieces:
            if piece["lane"] == lane:
                _mark(row, piece, took_us)
        yield f"{lane:<{LABEL}}{''.join(row)}".rstrip()


def _two_streams(halved: list[Body], middle_us: int) -> Body | None:
    """Of the steps in halves the one nearest to the middle: its first pieces from its begin on, how long its
    ranks talked, and how much of that was under compute."""
    if not halved:
        return None
    step = min(halved, key=lambda step: abs(step["start_us"] - middle_us))
    flat = step["pieces"]
    pieces = [
        Piece(PIECE_LANES[lane], PIECE_LANES[lane], step["step"], from_us, from_us + took_us)
        for lane, from_us, took_us in zip(flat[::3], flat[1::3], flat[2::3], strict=True)
    ]
    compute, comm = _of(pieces, *PIECE_LANES[:2]), _of(pieces, *PIECE_LANES[2:])
    return {
        "step": step["step"],
        "tokens": step["tokens"],
        "took_us": max(piece.end_us for piece in pieces),
        "pieces": [asdict(piece) for piece in pieces],
        "comm_us": covered_us(comm),
        "hidden_comm_us": _common_us(comm, compute),
    }


def _draw_streams(found: Body | None, columns: int) -> list[str]:
    if found is None:
        return []
    took_us = max(found["took_us"], 1)
    lines = [
        "",
        f"step {found['step']} of {found['tokens']} tokens in halves, its first {took_us / 1000:.2f} ms",
    ]
    lines += _rows(PIECE_LANES, found["pieces"], columns, took_us)
    hidden = _share(found["hidden_comm_us"], found["comm_us"])
    return [*lines, "", f"the ranks talk {found['comm_us'] / 1000:.2f} ms of it, {hidden} under compute"]


def _steps(body: Body) -> tuple[str, list[Body]]:
    """The executor with most of the request's steps, and these in their order."""
    found = {
        executor: [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        for executor, columns in body.get("steps", {}).items()
    }
    if not found:
        return "", []
    return max(found.items(), key=lambda item: len(item[1]))


def _pieces(step: Body) -> Iterable[Piece]:
    """What a step did and where. Sampling ends it, and the logits processors work just before."""
    number, half = step["step"], step["micro_batch"] % 2
    start, end, compute = step["start_us"], step["end_us"], COMPUTE[half]
    sampling = end - step["sample_us"]
    arrived = start - step["queued_us"]
    for lane, kind, began, ended in (
        (TRANSPORT, "plan", min(step["planned_us"], arrived), arrived),
        (compute, "queued", arrived, start),
        (compute, "forward", start, start + step["forward_us"]),
        (HOST, f"host {'AB'[half]}", sampling - step["host_us"], sampling),
        (compute, "sample", sampling, end),
        (TRANSPORT, "result", end, max(step["result_us"], end)),
    ):
        if ended > began:
            yield Piece(lane, kind, number, began, ended)


def _mark(row: list[str], piece: Body, took_us: int) -> None:
    """Draw a piece: at least one column, and a sign of its own where two meet."""
    mark, columns = _MARKS[piece["kind"]], len(row)
    begin = min(piece["start_us"] * columns // took_us, columns - 1)
    for at in range(begin, max(piece["end_us"] * columns // took_us, begin + 1)):
        if row[at] in (" ", "·", mark):
            row[at] = mark
        elif mark != "·":
            row[at] = _BOTH.get(frozenset((row[at], mark)), mark)


def _hidden(pieces: list[Piece]) -> dict[str, int]:
    """How long the device, the host and the transport worked, and how much of it under the device's work."""
    device = _of(pieces, "forward", "sample")
    host, transport = _of(pieces, "host A", "host B"), _of(pieces, "plan", "result")
    return {
        "device_busy_us": covered_us(device),
        "host_us": covered_us(host),
        "hidden_host_us": _common_us(host, device),
        "transport_us": covered_us(transport),
        "hidden_transport_us": _common_us(transport, device),
    }


def _of(pieces: list[Piece], *kinds: str) -> list[Interval]:
    return [(piece.start_us, piece.end_us) for piece in pieces if piece.kind in kinds]


def _common_us(some: list[Interval], others: list[Interval]) -> int:
    return covered_us(some) + covered_us(others) - covered_us([*some, *others])


def _share(part: int, whole: int) -> str:
    return f"{100 * part / max(whole, 1):.0f} %"
