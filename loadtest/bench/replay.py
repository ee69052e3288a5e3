"""Replays the public traces on a real server: their times, lengths (scaled) and shared prefixes.

A Mooncake hash id stands for a block of 512 tokens, with `length_scale` for that share of 512. Equal ids give
equal tokens, drawn from the id, so prompts share exactly the blocks of the trace, and each request has the
number of its repeated tokens. Other parts of a run (a later point, the warm-up) have other tokens.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from loadtest.bench.asked import Conversation, Prompt, Turn
from loadtest.bench.repeats import Known, Piece, pieces
from loadtest.bench.shape import Shape
from loadtest.scenarios.traces import (
    AZURE_SAMPLE,
    MOONCAKE_BLOCK,
    MOONCAKE_SAMPLE,
    Cut,
    Row,
    azure_rows,
    mooncake_rows,
)
from shared.errors import BadRequest

TRACES: dict[str, tuple[Callable[[Path, Cut], Iterable[Row]], Path]] = {
    "azure": (azure_rows, AZURE_SAMPLE),
    "mooncake": (mooncake_rows, MOONCAKE_SAMPLE),
}


@dataclass(frozen=True, slots=True)
class Replay:
    """A trace to be replayed: the first `shape.prompts` requests of `cut`, each at its own time."""

    name: str
    path: Path | None
    cut: Cut
    shape: Shape
    ids: tuple[int, int]

    def conversations(self, part: object) -> list[Conversation]:
        """One for each request. Raises BadRequest."""
        read, sample = TRACES[self.name]
        trace, shape = self.path or sample, self.shape
        if not trace.is_file():
            raise BadRequest(
                f"{trace} is no file: give a trace with --trace (a sample lies in the source tree)"
            )
        known, piece_tokens = Known(shape.block_tokens), shape.scaled(MOONCAKE_BLOCK)
        made: list[Conversation] = []
        for row in islice(read(trace, self.cut), shape.prompts):
            tokens, output = shape.scaled(row.prompt_tokens), shape.scaled(row.output_tokens)
            own = [f"azure {row.number} {i}" for i in range(-(-tokens // piece_tokens))]
            names = [f"{part} {each}" for each in row.hash_ids or own]
            prompt = pieces(names, tokens, piece_tokens)
            turn = Turn(drawn(prompt, self.ids), output, repeated_tokens=known.add(prompt))
            made.append(Conversation((turn,), at_us=row.at_us))
        return made


def drawn(prompt: Sequence[Piece], ids: tuple[int, int]) -> Callable[[], Prompt]:
    """The tokens of a prompt, those of a piece drawn from its name."""

    def make() -> Prompt:
        return [
            token for name, tokens in prompt for token in random.Random(name).choices(range(*ids), k=tokens)
        ]

    return make
