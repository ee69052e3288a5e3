"""The sum over ranks with the norm after it, by mail, and logits that ranks hand out to each other: on gloo
ranks with memory in files, each of which runs the kernels in Triton's interpreter."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.executor.host_memory import HostMemory
from support.executor.rank_side import on_ranks
from torch import Tensor

from kernels.elementwise import ref
from services.executor.checkpoint.weights import gathered_logits
from services.executor.parallel.ranks import DistributedRanks, Ranks

WIDTH, CALLS = 48, 2
ROWS = (5, 1)  # of passes that follow each other, of CALLS calls each
VOCAB, HEAD_ROWS = 37, 16


def _parts(rank: int, rows: int, call: int, splits: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * rows + 10 * call + rank)
    found = torch.randn(splits, rows, WIDTH, generator=generator)
    found[:, :, 0] = -0.0  # looks like an empty box in 16 bits
    return found if splits > 1 else found[0].to(dtype)


def _start(rows: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(rows)).to(dtype)


def _host_side(ranks: Ranks) -> None:
    """Memory of files in the place of GPUs'."""
    import torch.distributed._symmetric_memory as symmetric

    memories: dict[int, HostMemory] = {}

    def empty(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        memory = HostMemory(count * dtype.itemsize)
        found = memory.view(ranks.rank, torch.Size([count]), dtype)
        memories[found.data_ptr()] = memory
        return found

    def rendezvous(mine: Tensor, _: object) -> Any:
        memory = memories[mine.data_ptr()]
        every = [memory.view(rank, mine.shape, mine.dtype) for rank in range(ranks.size)]
        return SimpleNamespace(buffer_ptrs=[each.data_ptr() for each in every])

    symmetric.empty, symmetric.rendezvous = empty, rendezvous  # type: ignore[assignment]
    torch.cuda.synchronize = lambda device=None: None  # type: ignore[assignment]


def _on_rank(ranks: DistributedRanks, dtype: torch.dtype, splits: int, one_hop_bytes: int) -> list[Tensor]:
    """The norms of every call, and the rows of the residual that this rank owns, by pass."""
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton
    from kernels.collectives.gpu import EMPTY
    from services.executor.cuda.model import _ResidualAdd
    from services.executor.parallel import symmetric_memory
    from services.executor.parallel.coroutines import run_alone

    _host_side(ranks)
    symmetric_memory.ONE_HOP_BYTES = one_hop_bytes
    ranks.symmetric = symmetric_memory.SymmetricBuffers(ranks.rank, ranks.size, torch.device("cpu"))
    ranks.exchange(None)  # all have boxes
    found, weight = [], torch.linspace(0.5, 1.5, WIDTH).to(dtype)
    for rows in ROWS:
        residual = _start(rows, dtype)
        adding = _ResidualAdd(ranks, None, residual, 1e-5, chained=False)
        assert not adding.whole
        for call in range(CALLS):
            x = _parts(ranks.rank, rows, call, splits, dtype)
            found.append(run_alone(adding.add(x, weight, turn=call % 2)))
        short = rows * WIDTH * dtype.itemsize <= one_hop_bytes
        found.append(residual if short else residual[ranks.rank :: ranks.size])
    ranks.exchange(None)  # all are through
    assert bool((ranks.symmetric._memory == EMPTY).all()), "a letter is left"
    too_long = _ResidualAdd(
        ranks, None, torch.zeros(symmetric_memory.LIMIT_BYTES // WIDTH, WIDTH), 1e-5, chained=False
    )
    assert too_long.whole, "a sum and a norm apart"
    return found


def _wanted(size: int, dtype: torch.dtype, splits: int) -> list[tuple[list[Tensor], Tensor]]:
    """By pass: the norms of its calls, and the residual after the last."""
    passes, weight = [], torch.linspace(0.5, 1.5, WIDTH).to(dtype)
    for rows in ROWS:
        residual, norms = _start(rows, dtype), []
        for call in range(CALLS):
            parts = [_parts(rank, rows, call, splits, dtype).float() for rank in range(size)]
            rounded = [(part.sum(0) if splits > 1 else part).to(dtype).float() for part in parts]
            normed, residual = ref.add_rms_norm(torch.stack(rounded).sum(0).to(dtype), residual, weight, 1e-5)
            norms.append(normed)
        passes.append((norms, residual))
    return passes


@pytest.mark.parametrize(
    ("size", "dtype", "splits", "one_hop_rows"),
    [(2, torch.float32, 1, 0), (3, torch.float16, 2, 1)],
)
def test_every_rank_has_the_norm_of_the_sum(
    size: int, dtype: torch.dtype, splits: int, one_hop_rows: int
) -> None:
    wanted, near = _wanted(size, dtype, splits), 1e-5 if dtype == torch.float32 else 4e-3
    answers = on_ranks(size, _on_rank, dtype, splits, one_hop_rows * WIDTH * dtype.itemsize)
    for rank, found in enumerate(answers):
        at = 0
        for norms, residual in wanted:
            for normed in norms:
                torch.testing.assert_close(found[at], normed, atol=near, rtol=near)
                assert torch.equal(found[at], answers[0][at]), "ranks have other bits"
                at += 1
            mine = residual if len(residual) <= one_hop_rows else residual[rank::size]
            torch.testing.assert_close(found[at], mine, atol=near, rtol=near)
            at += 1
        assert at == len(found)


def test_boxes_hold_what_fits_and_can_be_stored_at_once() -> None:
    from kernels.collectives.gpu import MappedBuffers

    boxes = MappedBuffers(torch.zeros(4, dtype=torch.int64), 0, 4, 4096)
    assert boxes.has_room(14, 128)  # and 16 rows of parts
    assert not boxes.has_room(16, 144)
    assert not boxes.has_room(2, 24)
    short = MappedBuffers(torch.zeros(4, dtype=torch.int64), 0, 4, 4096, one_hop_bytes=1536)
    assert short.has_room(8, 128)
    assert not short.has_room(12, 128)  # the parts of four ranks
    assert short.has_room(14, 128)


def _logits(ranks: DistributedRanks) -> list[Tensor]:
    """Pairs: handed out, and gathered."""
    os.environ["TRITON_INTERPRET"] = "1"
    from services.executor.cuda import model

    model.SymmetricMemory = lambda size_bytes, device: HostMemory(size_bytes)  # type: ignore[assignment, misc]
    shared = model.SharedLogits(ranks, torch.zeros(0), 4, VOCAB)
    found = []
    for rows in (4, 1):
        generator = torch.Generator().manual_seed(10 * rows + ranks.rank)
        own = torch.randn(rows, HEAD_ROWS, generator=generator)
        found += [shared.gather(own).clone(), gathered_logits(own, VOCAB, ranks)]
        ranks.exchange(None)
    return found


def test_logits_are_handed_out_as_they_are_gathered() -> None:
    for found in on_ranks(3, _logits):
        assert [each.shape for each in found[::2]] == [(4, VOCAB), (1, VOCAB)]
        for handed, gathered in zip(found[::2], found[1::2], strict=True):
            assert torch.equal(handed, gathered)
