"""The stages of a pipeline: each rank holds a run of the layers, and rows go through one after the other.

    stage 0: embedding, layers ── residual stream ──▶ stage 1: layers ── ··· ──▶ last: layers, norm, head

What goes from one stage to the next is the sum that the next layer's norm reads, no more. A stage waits for
the one before it in its own stream of work (gloo on CPUs, NCCL on GPUs). Nothing ever goes back that way:
tokens come back through the hosts, so that no GPU waits for a stage behind.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from services.executor.shapes import Shapes
from services.executor.shards import Cut, Shard, all_of_it
from shared.errors import SetupError

if TYPE_CHECKING:
    from torch.distributed import Work

_NOTHING = Cut(0, 0, 0)


class Stage:
    """Stage `index` of `count`, which is also its rank. One that is alone sends and receives nothing."""

    def __init__(self, index: int, count: int) -> None:
        self.index, self.count = index, count
        self.first, self.last = index == 0, index + 1 == count
        self._sent: Work | None = None  # on a CPU: it holds what it sends

    def receive(self, rows: Tensor) -> Tensor:
        """Fill `rows` with what the stage before has sent; `rows` itself. On a GPU it is queued."""
        torch.distributed.recv(rows, self.index - 1)
        return rows

    def send(self, rows: Tensor) -> None:
        """Give `rows` to the stage behind. On a GPU it is queued, and ends when that one receives; on a CPU
        `rows` is not to be changed, and the send before must have ended first."""
        if rows.is_cuda:
            torch.distributed.send(rows, self.index + 1)
            return
        if self._sent is not None:
            self._sent.wait()
        self._sent = torch.distributed.isend(rows, self.index + 1)


WHOLE = Stage(0, 1)


def layers_of(whole: Shapes, index: int, count: int) -> tuple[int, int]:
    """The layers of a stage, from the first to behind the last. Stages have as many weights to read as can
    be; those of the head, which the last one has, count as layers. Raises SetupError for fewer layers than
    stages."""
    if whole.layers < count:
        raise SetupError(f"{count} stages are too many for {whole.layers} layers: use fewer")
    head = whole.vocab * whole.hidden / _layer_weights(whole)

    def begin(stage: int) -> int:
        even = round((whole.layers + head) * stage / count)
        return min(max(even, stage), whole.layers - (count - stage))

    return begin(index), begin(index + 1)


def stage_shard(whole: Shapes, stage: Stage) -> Shard:
    """What a stage holds: the first one the embedding, the last one the head (which may be the embedding),
    each its layers. Raises SetupError as `layers_of`."""
    if stage.count == 1:
        return all_of_it(whole)
    first, end = layers_of(whole, stage.index, stage.count)
    cuts = {}
    if not (stage.first or (stage.last and whole.tied)):
        cuts["embedding"] = _NOTHING
    if not stage.last:
        cuts["head"] = _NOTHING
    local = replace(whole, layers=end - first)
    return Shard(shapes=local, head_rows=whole.vocab if stage.last else 0, cuts=cuts, first_layer=first)


def _layer_weights(whole: Shapes) -> int:
    """Of one layer, those that a step of many rows reads."""
    attention = 2 * (whole.heads + whole.kv_heads) * whole.head_dim
    width = 3 * whole.intermediate
    if whole.experts is not None:
        width = 3 * whole.experts.count * whole.experts.width
    return (attention + width) * whole.hidden
