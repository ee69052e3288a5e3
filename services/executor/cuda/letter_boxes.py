"""The letter boxes of one rank of several GPUs: memory that all of them have mapped, in which the sum between
ranks, the residual add and the norm are one kernel (kernels.rms_norm.spread). No NVLink multicast."""

from __future__ import annotations

import logging

import torch

from kernels.rms_norm.spread import EMPTY, Boxes

log = logging.getLogger("headrace.executor")

LIMIT_BYTES = 2 << 20  # of a sum: up to here it is quicker than a sum and a norm apart, as measured on H200
ONE_HOP_BYTES = 128 << 10  # of a sum: over them two hops are quicker
_ROWS = 1024  # each a program that waits for those of the other ranks: a GPU runs as many at once
_HALF_BYTES = 2 * LIMIT_BYTES + (1 << 18)  # norms, parts, and the rows by which these are rounded up


class LetterBoxes:
    """Owns the memory. Made by all ranks at once; raises what torch says where GPUs cannot map each other's.
    Whoever writes first must wait until all ranks have made theirs."""

    def __init__(self, rank: int, size: int, device: torch.device, half_bytes: int = _HALF_BYTES) -> None:
        import torch.distributed._symmetric_memory as symmetric

        group = torch.distributed.group.WORLD
        assert group is not None, "the ranks have joined"
        self._memory = symmetric.empty(half_bytes, dtype=torch.int16, device=device)  # two halves
        shared = symmetric.rendezvous(self._memory, group)
        self._memory.fill_(EMPTY)
        torch.cuda.synchronize(device)
        addresses = torch.tensor(shared.buffer_ptrs, dtype=torch.int64, device=device)
        self._boxes = Boxes(addresses, rank, size, half_bytes, ONE_HOP_BYTES)

    def of(self, rows: int, row_bytes: int) -> Boxes | None:
        """The boxes, for a sum of so many rows; None where it is not for them."""
        fits = rows <= _ROWS and rows * row_bytes <= LIMIT_BYTES and self._boxes.hold(rows, row_bytes)
        return self._boxes if fits else None


def letter_boxes(rank: int, size: int, device: torch.device) -> LetterBoxes | None:
    """None where there is no such memory: sum and norm are then apart."""
    try:
        return LetterBoxes(rank, size, device)
    except (RuntimeError, ImportError, AttributeError) as error:
        log.warning("sums between GPUs and norms are apart, and take longer: %s", error)
        return None
