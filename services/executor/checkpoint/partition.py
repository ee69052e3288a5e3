"""Each of several ranks holds a part of a model: a run of layers (a Stage), or a `shard` of every layer, by
the units of its parts (model/description.py):

    q, k, v, gate, up   the rows of its heads and of its part of the MLP's width: no exchange
    out, down           the columns that read those rows: their products are parts of a sum over all ranks
    experts             some whole experts; every rank has all tokens and routes them, and its experts' result
                        is a part of a sum: no other exchange, and no expert is read twice
    head                the rows of its part of the vocabulary: the logits are gathered, so that every rank
                        has the same bits and chooses the same tokens
    embedding, norms    everything: to read an embedding row costs less than the sum that a split would need

Heads are whole: a KV head and the query heads that read it lie on one rank. If the KV heads do not divide
evenly, some ranks have one more (3 on 2 ranks: 2 and 1); so with experts. With more ranks than KV heads,
several ranks hold the same KV head and divide its query heads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from services.executor.checkpoint.stored import Cut
from services.executor.model.description import (
    EXPERTS,
    HEADS,
    KV_HEADS,
    VOCAB,
    WIDTH,
    describe,
    shared_numbers,
)
from services.executor.model.shapes import Shapes
from services.executor.parallel.ranks import Ranks
from shared.errors import SetupError

if TYPE_CHECKING:
    from torch.distributed import Work

_UNIT = 16  # matrix units compute multiples of it: a rank's part is one if the whole width is


_NOTHING = Cut(0, 0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """A rank's part. `shapes` has its heads, KV heads, MLP width and layers, and the whole vocabulary."""

    shapes: Shapes
    head_rows: int  # of the head, the same on every rank; rows after the vocabulary's end are zeros
    cuts: dict[str, Cut]  # by part; parts without a cut are whole
    first: bool = True  # else its parts of the units ONCE are zeros


ShardOf = Callable[[Shapes], Shard]  # which part of a model to load


class Stage:
    """Stage `index` of `count` of a pipeline; `index` is also its rank. A single stage sends nothing.

        stage 0: embedding, layers ── residual stream ──▶ stage 1: layers ── ··· ──▶ last: layers, norm, head

    A stage sends only the sum that the next layer's norm reads. It waits for the stage before in its own
    stream of work (gloo on CPUs, NCCL on GPUs). Sampled tokens return through the hosts, so no GPU waits for
    a later stage."""

    def __init__(self, index: int, count: int) -> None:
        self.index, self.count = index, count
        self.first, self.last = index == 0, index + 1 == count
        self._sent: Work | None = None  # on a CPU: it holds what it sends

    def receive(self, rows: Tensor) -> Tensor:
        """Fill `rows` with the rows from the stage before, and return it. On a GPU this is queued."""
        torch.distributed.recv(rows, self.index - 1)
        return rows

    def send(self, rows: Tensor) -> None:
        """Send `rows` to the next stage. On a GPU this is queued, and ends when the next stage receives. On a
        CPU it waits for the send before, and `rows` must not be changed."""
        if rows.is_cuda:
            torch.distributed.send(rows, self.index + 1)
            return
        if self._sent is not None:
            self._sent.wait()
        self._sent = torch.distributed.isend(rows, self.index + 1)


WHOLE = Stage(0, 1)


def whole_model(whole: Shapes) -> Shard:
    """The part of a single rank: everything."""
    return shard(whole, 0, 1)


def shard(whole: Shapes, rank: int, size: int) -> Shard:
    """The part of rank `rank` of `size`. Raises SetupError with too few heads or experts."""
    if size == 1:
        return Shard(shapes=whole, head_rows=whole.vocab, cuts={})
    width = _UNIT if whole.intermediate % _UNIT == 0 else 1
    units = whole.intermediate // width
    if size > min(whole.heads, units):
        raise SetupError(
            f"{size} ranks are too many for {whole.heads} heads and an MLP of {whole.intermediate}: use fewer"
        )
    keys, queries = _heads(whole, rank, size)
    begin, end = (share * width for share in _share(units, rank, size))
    rows = -(-whole.vocab // (_UNIT * size)) * _UNIT
    held = {
        HEADS: (queries[0] * whole.head_dim, queries[1] * whole.head_dim),
        KV_HEADS: (keys[0] * whole.head_dim, keys[1] * whole.head_dim),
        WIDTH: (begin, end),
        VOCAB: (min(rank * rows, whole.vocab), min((rank + 1) * rows, whole.vocab)),
    }
    local = replace(
        whole, heads=queries[1] - queries[0], kv_heads=keys[1] - keys[0], intermediate=end - begin
    )
    if whole.experts is not None:
        if size > whole.experts.count:
            raise SetupError(f"{size} ranks are too many for {whole.experts.count} experts: use fewer")
        held[EXPERTS] = _share(whole.experts.count, rank, size)
        local = replace(local, experts=replace(whole.experts, first=held[EXPERTS][0]))
    description = describe(whole)
    parts = (*description.head.parts, *(part for part, _ in description.parts()))
    cuts = {part.name: Cut(part.dim, *held[part.units]) for part in parts if part.units in held}
    return Shard(shapes=local, head_rows=rows, cuts=cuts, first=rank == 0)


def stage_shard(whole: Shapes, stage: Stage) -> Shard:
    """The part of a stage: its layers, on the first stage also the embedding, on the last also the head
    (which may be the embedding). Raises SetupError as `layers_of`."""
    if stage.count == 1:
        return whole_model(whole)
    first, end = layers_of(whole, stage.index, stage.count)
    cuts = {}
    if not (stage.first or (stage.last and whole.tied)):
        cuts["embedding"] = _NOTHING
    if not stage.last:
        cuts["head"] = _NOTHING
    local = replace(whole, layers=end - first, first_layer=first)
    return Shard(shapes=local, head_rows=whole.vocab if stage.last else 0, cuts=cuts)


def layers_of(whole: Shapes, index: int, count: int) -> tuple[int, int]:
    """The layers of a stage, from the first to one after the last. Stages read about the same number of
    weights; the head's weights count for the last stage. Raises SetupError for fewer layers than stages."""
    if whole.layers < count:
        raise SetupError(f"{count} stages are too many for {whole.layers} layers: use fewer")
    head = whole.vocab * whole.hidden / max(map(shared_numbers, describe(whole).layers))

    def begin(stage: int) -> int:
        even = round((whole.layers + head) * stage / count)
        return min(max(even, stage), whole.layers - (count - stage))

    return begin(index), begin(index + 1)


def gathered_logits(own: Tensor, vocab: int, ranks: Ranks) -> Tensor:
    """Logits `[samples, vocab]` from every rank's `[samples, head_rows]`, without the padding at the end."""
    if ranks.size == 1 or not len(own):
        return own[:, :vocab]
    found = ranks.all_gather(own).transpose(0, 1).reshape(len(own), -1)
    return found[:, :vocab].contiguous()


def _heads(whole: Shapes, rank: int, size: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """The KV heads and query heads of a rank, each from the first to one after the last."""
    group = whole.heads // whole.kv_heads
    if size <= whole.kv_heads:
        first, end = _share(whole.kv_heads, rank, size)
        return (first, end), (first * group, end * group)
    head = rank * whole.kv_heads // size
    sharing = [other for other in range(size) if other * whole.kv_heads // size == head]
    first, end = _share(group, rank - sharing[0], len(sharing))
    return (head, head + 1), (head * group + first, head * group + end)


def _share(units: int, rank: int, size: int) -> tuple[int, int]:
    """The units of a rank, from the first to one after the last: even, with the remainder on the first
    ranks."""
    each, more = divmod(units, size)
    begin = rank * each + min(rank, more)
    return begin, begin + each + (rank < more)
