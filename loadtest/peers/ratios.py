"""Computes the table from turns: medians of each server, and ratios by round with their spread."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import product
from typing import Any

from loadtest.peers.server import Peer
from loadtest.peers.turns import Turn

FIGURES = ("output_throughput", "median_ttft_ms", "p99_ttft_ms", "median_itl_ms", "p99_itl_ms")
Row = dict[str, Any]


def rows(turns: Sequence[Turn]) -> list[Row]:
    """One for each point, server and figure: the value of each round, the median and the spread, and those of
    the ratio of the first server's figure to this one's, round by round. A figure that is 0 has no ratio."""
    peers = list(dict.fromkeys(turn.peer for turn in turns))
    made = []
    for point in turns[0].runs():
        for peer, figure in product(peers, FIGURES):
            first, own = (_values(turns, name, point, figure) for name in (peers[0], peer))
            row = {"point": point, "peer": peer, "figure": figure, "values": own, **_spread("value", own)}
            if all(own):
                row |= _spread("ratio", [a / b for a, b in zip(first, own, strict=True)])
            made.append(row)
    return made


def starts(turns: Sequence[Turn]) -> list[Row]:
    """For each server: seconds to the first answer, memory after its load, cores kept busy meanwhile."""
    peers = dict.fromkeys(turn.peer for turn in turns)
    return [
        {"peer": peer}
        | _spread("ready_s", [turn.ready_s for turn in turns if turn.peer == peer])
        | _spread("memory_mib", [turn.memory_bytes / 2**20 for turn in turns if turn.peer == peer])
        | _spread("cores", [turn.cores for turn in turns if turn.peer == peer])
        for peer in peers
    ]


def table(turns: Sequence[Turn]) -> str:
    """As Markdown; the ratio is the first server's figure by this one's."""
    first = turns[0].peer
    lines = [f"| load | figure | server | median | spread | {first} / this | spread |", "|---" * 7 + "|"]
    for row in sorted(rows(turns), key=lambda row: (row["point"], FIGURES.index(row["figure"]))):
        cells = [row["point"], row["figure"], row["peer"], f"{row['value']:,.1f}"]
        cells += [f"{row['value_least']:,.1f} to {row['value_most']:,.1f}"]
        ratio = ["", ""]
        if row["peer"] != first and "ratio" in row:
            ratio = [f"{row['ratio']:.2f}", f"{row['ratio_least']:.2f} to {row['ratio_most']:.2f}"]
        lines.append("| " + " | ".join([*cells, *ratio]) + " |")
    lines += ["", "| server | s to the first answer | memory, MiB | cores busy |", "|---" * 4 + "|"]
    lines += [
        f"| {row['peer']} | {row['ready_s']:.1f} | {row['memory_mib']:,.0f} | {row['cores']:.2f} |"
        for row in starts(turns)
    ]
    return "\n".join(lines)


def settings(peers: Sequence[Peer]) -> str:
    """What each server was started with, as Markdown."""
    lines = ["| server | command | environment |", "|---" * 3 + "|"]
    for peer in peers:
        added = " ".join(f"{name}={value}" for name, value in sorted(peer.env.items()))
        command = " ".join(peer.command.split())
        cells = [peer.name, f"`{command}`", f"`{added}`" if added else ""]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def _values(turns: Sequence[Turn], peer: str, point: str, figure: str) -> list[float]:
    """By round."""
    own = sorted((turn for turn in turns if turn.peer == peer), key=lambda turn: turn.round)
    return [float(turn.runs()[point]["figures"][figure]) for turn in own]


def _spread(name: str, values: Sequence[float]) -> Row:
    return {name: statistics.median(values), f"{name}_least": min(values), f"{name}_most": max(values)}
