"""The public traces, replayed on a real server: their times and lengths, scaled, and their shared prefixes.

A Mooncake hash id stands for a block of 512 tokens; scaled to `length_scale`, for that share of 512. Equal
ids give equal tokens, drawn anew from the id, so prompts share exactly the blocks that the trace says.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from pathlib import Path

from loadtest.bench.asked import Conversation, Prompt, Turn
from loadtest.bench.shape import Shape
from loadtest.sim.traces import (
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


def replay(name: str, path: Path | None, cut: Cut, shape: Shape, ids: tuple[int, int]) -> list[Conversation]:
    """The first `shape.prompts` requests of a trace, each at its own time. Raises BadRequest."""
    read, sample = TRACES[name]
    trace, made = path or sample, list[Conversation]()
    if not trace.is_file():
        raise BadRequest(f"{trace} is no file: give a trace with --trace (a sample lies in the source tree)")
    for row in read(trace, cut):
        if len(made) == shape.prompts:
            break
        tokens, output = shape.scaled(row.prompt_tokens), shape.scaled(row.output_tokens)
        block_tokens = shape.scaled(MOONCAKE_BLOCK)
        blocks = row.hash_ids or [f"azure {row.number} {i}" for i in range(-(-tokens // block_tokens))]
        prompt = hashed([str(block) for block in blocks], tokens, block_tokens, ids)
        made.append(Conversation((Turn(prompt, output),), at_us=row.at_us))
    return made


def hashed(blocks: list[str], tokens: int, block_tokens: int, ids: tuple[int, int]) -> Callable[[], Prompt]:
    """A prompt of `tokens` ids, each block of them drawn from its name."""

    def make() -> Prompt:
        prompt: list[int] = []
        for name in blocks:
            most = min(block_tokens, tokens - len(prompt))
            prompt += random.Random(name).choices(range(*ids), k=block_tokens)[:most]
        # what rounding has left over is the last block's own
        prompt += random.Random(f"{blocks[-1]} rest").choices(range(*ids), k=tokens - len(prompt))
        return prompt

    return make
