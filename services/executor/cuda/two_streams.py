"""The two halves of a step on GPUs, each one's talk under the other's compute; and how they talk then.

    dense models         NCCL with few thread blocks, each of which holds a processor
    of experts           copies between GPUs, which hold none, where these map each other's memory: a grouped
                         product has a program for each processor, and runs twice as long where one must wait

Measured on four H200 (docs/benchmarks/multi-gpu.md): 8,192 tokens of a dense 8B 1.17 x with NCCL; of experts
1.02 x with NCCL, 1.12 x with copies.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
import torch.distributed as distributed
from torch import Tensor

from services.executor.collectives import Collectives
from services.executor.cuda.lanes import Lanes
from services.executor.cuda.peers import PeerMemory
from services.executor.cuda.pieces import Noting
from services.executor.cuda.spare import spare
from services.executor.exchange import Copies
from services.executor.halves import CUT_TOKENS
from services.executor.loading import Loaded
from services.executor.programs import Program, Sums
from services.executor.ranks import Ranks

log = logging.getLogger("headrace.executor")

BLOCKS = 16  # of a collective that has a limit
MEETING = 2  # processors that are left for the programs with which copies wait for each other


class TwoStreams:
    """One for an engine. `sums`: what the halves say."""

    def __init__(self, sums: Sums, spared: int, device: torch.device) -> None:
        """`spared`: processors that the products leave free."""
        self.sums, self._spared = sums, spared
        self._lanes = Lanes(device)

    def together(self, programs: Sequence[Program], notes: Noting) -> list[Tensor]:
        """Queue both programs to their ends; what they return."""
        with spare(self._spared):
            return self._lanes.together(programs, notes)


def two_streams(loaded: Loaded, most_tokens: int, *, deterministic: bool) -> TwoStreams:
    """For an engine of several ranks, made by all of them at once; `most_tokens` in a step."""
    ranks, device, shapes = loaded.ranks, loaded.cache.tensor.device, loaded.shapes
    if deterministic:  # by rank, wherever a number stands
        return TwoStreams(ranks, 0, device)
    if shapes.experts is not None and shapes.hidden % ranks.size == 0:
        rows = most_tokens // 2 + 2 * CUT_TOKENS
        copies = _copies(ranks, device, rows * shapes.hidden * loaded.cache.activations.itemsize)
        if copies is not None:
            return TwoStreams(copies, MEETING, device)
    return TwoStreams(few_blocks(), 0, device)


def few_blocks() -> Collectives:
    """Collectives of at most BLOCKS thread blocks, made by every rank at once."""
    options = distributed.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options.config.max_ctas = BLOCKS
    return Collectives(distributed.new_group(pg_options=options))


def _copies(ranks: Ranks, device: torch.device, most_bytes: int) -> Copies | None:
    """None, on all ranks, where one cannot have such memory."""
    copies = None
    try:
        assert distributed.group.WORLD is not None, "the ranks have joined"
        copies = Copies(PeerMemory(most_bytes, device, distributed.group.WORLD))
    except (RuntimeError, ImportError, AttributeError, OSError) as error:
        log.warning("halves of steps talk through NCCL, and gain less: %s", error)
    return copies if all(ranks.exchange(copies is not None)) else None
