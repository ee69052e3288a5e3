"""Collectives of ranks against what one process computes."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading

import pytest
import torch
from support.executor.rank_side import on_ranks
from torch import Tensor

from services.executor.parallel import ranks as ranks_module
from services.executor.parallel.ranks import DistributedRanks, Ranks, Solo, rendezvous


def _numbers(rank: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank))


def _everything(ranks: Ranks) -> dict[str, object]:
    found: dict[str, object] = {}
    for dtype in (torch.float32, torch.bfloat16):
        x = _numbers(ranks.rank, 5, 7).to(dtype)
        assert ranks.all_reduce(x) is x
        found[str(dtype)] = x
    found["gathered"] = ranks.all_gather(_numbers(ranks.rank, 6, 3).t())  # not contiguous
    found["exchanged"] = [ranks.exchange({"rank": ranks.rank}), ranks.exchange(ranks.rank**2)]
    return found


@pytest.mark.parametrize("ordered", [False, True])
def test_collectives_give_every_rank_the_same_right_values(ordered: bool) -> None:
    answers = on_ranks(3, _everything, ordered=ordered)
    for found in answers:
        wide = torch.stack([_numbers(rank, 5, 7) for rank in range(3)])
        torch.testing.assert_close(found["torch.float32"], wide.sum(0))
        torch.testing.assert_close(found["torch.bfloat16"], wide.bfloat16().sum(0))
        assert torch.equal(found["torch.float32"], answers[0]["torch.float32"])  # the same bits everywhere
        if ordered:
            assert torch.equal(found["torch.float32"], wide.sum(0))
        assert torch.equal(found["gathered"], torch.stack([_numbers(rank, 6, 3).t() for rank in range(3)]))
        assert found["exchanged"] == [[{"rank": 0}, {"rank": 1}, {"rank": 2}], [0, 1, 4]]


def test_one_rank_has_all_there_is() -> None:
    solo, x = Solo(), _numbers(0, 2, 3)
    assert solo.all_reduce(x) is x
    assert torch.equal(solo.all_gather(x), x[None])
    assert solo.exchange("mine") == ["mine"]
    solo.close()


def test_one_rank_starts_no_process_group() -> None:
    """In a process of its own: what a test imported before must not matter. torch itself imports the package
    torch.distributed, but not what makes a group of processes."""
    code = "\n".join(
        (
            "import torch",
            "from services.executor.parallel.ranks import Solo",
            "Solo().all_reduce(torch.zeros(1))",
            "print(torch.distributed.is_initialized())",
        )
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_a_rank_leaves_even_if_its_library_does_not(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    over = threading.Event()
    group = torch.distributed.distributed_c10d
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_backend", lambda: "nccl")
    monkeypatch.setattr(ranks_module, "LEAVE_TIMEOUT_S", 0.01)
    rank = DistributedRanks(0, 1, rendezvous(1), ordered=False, gone=str)
    with caplog.at_level(logging.WARNING, "headrace.executor"):
        monkeypatch.setattr(group, "_abort_process_group", over.wait)
        rank.close()
        over.set()
        assert caplog.messages == ["NCCL has not ended in 0 s: it is left as it is"]
        monkeypatch.setattr(ranks_module, "LEAVE_TIMEOUT_S", 60.0)
        monkeypatch.setattr(group, "_abort_process_group", lambda: None)
        rank.close()
    assert len(caplog.messages) == 1
