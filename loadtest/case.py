"""One configuration of the step benches."""

from __future__ import annotations

from dataclasses import dataclass

PROMPT_TOKENS = 32


@dataclass(frozen=True)
class Case:
    """A step time, a window, the rows of a step, and whether answers are streamed."""

    step_us: int
    window: int
    rows: int
    steps: int
    stream: bool = False
