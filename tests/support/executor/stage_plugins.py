"""Logits processors that the last stage of a pipeline, another process, can import."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

PLUGINS = "shift=support.executor.stage_plugins:Shift,gate=support.executor.stage_plugins:Gate"


class Shift:
    """Every token is another one's."""

    def __init__(self, args: dict[str, Any], prompt_tokens: Sequence[int]) -> None:
        self._by = args["by"]

    def process(self, generated: Sequence[int], logits: Tensor) -> Tensor:
        return logits.roll(self._by)


class Gate:
    """Waits until a file is there."""

    def __init__(self, args: dict[str, Any], prompt_tokens: Sequence[int]) -> None:
        self._file = Path(args["file"])

    def process(self, generated: Sequence[int], logits: Tensor) -> Tensor:
        while not self._file.exists():
            time.sleep(0.001)
        return logits
