"""What a rank on a GPU has mapped of the others, played by its own memory: of a group of one, and of none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed._symmetric_memory as symmetric
from torch import Tensor

from kernels.collectives.gpu import EMPTY
from kernels.elementwise import ref
from kernels.elementwise import ref as swiglu_ref
from services.executor.cuda import model as logits
from services.executor.cuda.kernel_configs import Layouts
from services.executor.cuda.model import _ResidualAdd, gated
from services.executor.parallel import coroutines
from services.executor.parallel.ranks import SOLO, DistributedRanks, if_mapped, rendezvous
from services.executor.parallel.symmetric_memory import LIMIT_BYTES, SymmetricBuffers

CPU = torch.device("cpu")
ROWS, WIDTH = 3, 32


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> DistributedRanks:
    """The only rank of a group that maps memory."""

    def empty(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.zeros(count, dtype=dtype)

    def mapped(mine: Tensor, group: object) -> Any:
        return SimpleNamespace(buffer_ptrs=[mine.data_ptr()])

    monkeypatch.setattr(symmetric, "empty", empty)
    monkeypatch.setattr(symmetric, "rendezvous", mapped)
    monkeypatch.setattr(torch.distributed, "group", SimpleNamespace(WORLD=object()))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    return DistributedRanks(0, 1, rendezvous(1), ordered=False, gone=str)


def _normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_a_short_sum_goes_with_its_norm_and_leaves_the_boxes_empty(alone: DistributedRanks) -> None:
    alone.symmetric = SymmetricBuffers(0, 1, CPU)
    residual, part, weight = (
        _normal(ROWS, WIDTH),
        _normal(2, ROWS, WIDTH, seed=1),
        _normal(WIDTH, seed=2),
    )
    wanted, total = ref.add_rms_norm(part.sum(0), residual, weight, 1e-5)
    adding = _ResidualAdd(alone, None, residual, 1e-5, chained=False)
    assert not adding.whole
    torch.testing.assert_close(coroutines.run_alone(adding.add(part, weight, turn=0)), wanted)
    torch.testing.assert_close(residual, total)
    assert bool((alone.symmetric._memory == EMPTY).all())


def test_long_rows_and_ranks_without_boxes_are_not_for_them(alone: DistributedRanks) -> None:
    boxes = SymmetricBuffers(0, 1, CPU)
    assert boxes.for_rows(1, LIMIT_BYTES) is not None
    assert boxes.for_rows(2, LIMIT_BYTES) is None
    assert boxes.for_rows(1024, 64) is not None
    assert boxes.for_rows(1025, 64) is None
    residual, part, weight = _normal(ROWS, WIDTH), _normal(ROWS, WIDTH, seed=1), _normal(WIDTH, seed=2)
    wanted, _ = ref.add_rms_norm(part, residual, weight, 1e-5)
    adding = _ResidualAdd(SOLO, None, residual, 1e-5, chained=False)
    assert not adding.whole, "one rank takes a product in splits"
    torch.testing.assert_close(coroutines.run_alone(adding.add(part, weight, turn=0)), wanted)


def test_gpus_that_cannot_map_memory_do_without(
    alone: DistributedRanks, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_memory(*_: object, **__: object) -> Tensor:
        raise RuntimeError("no peer access")

    monkeypatch.setattr(symmetric, "empty", no_memory)
    monkeypatch.setattr(logits, "SymmetricMemory", no_memory)
    assert if_mapped(alone, lambda: SymmetricBuffers(0, 1, CPU), "sums and norms") is None
    assert if_mapped(alone, lambda: logits.SharedLogits(alone, torch.zeros(1), ROWS, 5), "logits") is None
    assert [message.split(": ")[1:] for message in caplog.messages] == [
        ["sums and norms", "no peer access"], ["logits", "no peer access"],
    ]  # fmt: skip


def test_the_logits_of_one_rank_lose_their_padding(
    alone: DistributedRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = torch.zeros(1024, dtype=torch.uint8)
    met: list[bool] = []

    def view(rank: int, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        return memory[: shape.numel() * dtype.itemsize].view(dtype).view(shape)

    peers = SimpleNamespace(view=view, barrier=lambda: met.append(True))
    monkeypatch.setattr(logits, "SymmetricMemory", lambda *_: peers)
    shared = logits.SharedLogits(alone, torch.zeros(1), ROWS, 5)
    own = _normal(2, 16)
    assert torch.equal(shared.gather(own), own[:, :5])
    assert met == [True]


def test_a_gate_without_a_layout_of_its_own_follows_its_product() -> None:
    x, weight = _normal(ROWS, 8), _normal(12, 8, seed=1)

    def product(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, whole: bool = False) -> Tensor:
        return x @ weight.T

    found = gated(product, Layouts(), x, weight, chained=False)
    torch.testing.assert_close(found, swiglu_ref.swiglu(x @ weight.T))
