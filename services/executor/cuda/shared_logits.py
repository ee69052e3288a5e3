"""The logits of a group of GPUs: every rank computes those of its part of the vocabulary, and stores them to
all ranks' memory itself. No NVLink multicast."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from kernels.hand_out.gpu import hand_out
from services.executor.cuda.peers import PeerMemory
from services.executor.ranks import Ranks

log = logging.getLogger("headrace.executor")


class SharedLogits:
    """Room for `[rows, vocab]` on every rank. The next `gather` of any rank writes over what it held: between
    two of them all ranks wait for each other in some sum, which is later than what reads the first."""

    def __init__(self, ranks: Ranks, like: Tensor, rows: int, vocab: int) -> None:
        """All ranks do this at once, for logits of the dtype and device of `like`. Raises what torch says
        where GPUs cannot map each other's memory."""
        group = torch.distributed.group.WORLD
        assert group is not None, "the ranks have joined"
        self._memory = PeerMemory(rows * vocab * like.element_size(), like.device, group)
        self._rank, self._vocab, self._dtype = ranks.rank, vocab, like.dtype
        one = torch.Size([1])
        addresses = [self._memory.of(rank, one, like.dtype).data_ptr() for rank in range(ranks.size)]
        self._addresses = torch.tensor(addresses, dtype=torch.int64, device=like.device)

    def gather(self, own: Tensor) -> Tensor:
        """Logits `[rows, vocab]` from every rank's `[rows, head rows]`, which end with those of padding."""
        hand_out(own, self._addresses, self._rank, self._vocab)
        self._memory.meet()
        return self._memory.of(self._rank, torch.Size([len(own), self._vocab]), self._dtype)


def shared_logits(ranks: Ranks, like: Tensor, rows: int, vocab: int) -> SharedLogits | None:
    """None, on all ranks, where there is no such memory: NCCL then gathers."""
    found = None
    try:
        found = SharedLogits(ranks, like, rows, vocab)
    except (RuntimeError, ImportError, AttributeError) as error:
        log.warning("logits go through NCCL, and take longer: %s", error)
    return found if all(ranks.exchange(found is not None)) else None
