"""An engine that shows what it computes: the logits that each token was chosen from, and the bytes of its
blocks. It also spoils blocks, so that a reader of one that was not filled again gets wrong tokens."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from services.executor.cpu.engine import TorchBackend
from services.executor.engine import Pending, StepOutput
from services.executor.group.driver import GroupBackend
from shared.messages import SlotOpen

GARBAGE = 448.0  # the largest number of fp8


class Recording:
    """See services.executor.engine.Backend: a TorchBackend on a CPU, or a group of them, watched."""

    def __init__(self, engine: TorchBackend | GroupBackend) -> None:
        self._engine = engine
        self._opened: dict[int, SlotOpen] = {}
        self.logits: dict[int, dict[int, list[Tensor]]] = defaultdict(lambda: defaultdict(list))
        """By sequence and position of the token that is chosen: `[vocab]`, each time it was chosen."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def open_slot(self, opened: SlotOpen) -> None:
        self._opened[opened.slot] = opened
        self._engine.open_slot(opened)

    def sample(self, pending: Pending) -> StepOutput:
        plan = pending.plan
        for at, (slot, row) in enumerate(zip(plan.sample_slots, plan.sample_rows, strict=True)):
            if slot in self._opened and pending.logits is not None:
                position = plan.starts[row] + plan.counts[row]
                self.logits[self._opened[slot].seq][position].append(pending.logits[at].clone())
        return self._engine.sample(pending)

    def digests(self, block: int) -> tuple[bytes, ...]:
        """The digests of the bytes of a block's first token, of its first two, and so on."""
        kv = self._block(block)  # [layer][K|V][token][kv_head][head_dim]
        parts = (kv[:, :, : tokens + 1].contiguous().view(torch.uint8) for tokens in range(kv.shape[2]))
        return tuple(blake2b(part.numpy().tobytes()).digest() for part in parts)

    def spoil(self, blocks: Iterable[int]) -> None:
        """Fill blocks, which no sequence uses now, with a number that attention cannot overlook."""
        for block in blocks:
            self._block(block).fill_(GARBAGE)

    def _block(self, block: int) -> Tensor:
        """The blocks of the leader's part, where there are several ranks."""
        engine: Any = getattr(self._engine, "_own", self._engine)
        part: Tensor = engine._cache.tensor[block]  # white box
        return part
