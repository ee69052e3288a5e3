"""Memory of tensors that leaves and comes back; on a CPU, since storages work alike."""

from __future__ import annotations

import torch

from services.executor.cuda.engine import DeviceStorage


def test_contents_come_back_and_dropped_ones_as_zeros() -> None:
    weights = [torch.randn(64, 32), torch.randn(1_000).bfloat16(), torch.arange(12)]
    tied, view = weights[0], weights[1][100:200]
    cache = torch.randn(8, 16)
    blocks = cache.view(-1).view(torch.uint8)
    before = [weight.clone() for weight in (*weights, tied, view)]
    storage = DeviceStorage([*weights, tied], [cache])
    for _ in range(2):
        storage.leave()
        assert all(tensor.untyped_storage().nbytes() == 0 for tensor in (*weights, view, cache, blocks))
        storage.come_back()
        after = [*weights, tied, view]
        assert all(a.equal(b) for a, b in zip(before, after, strict=True))
        assert cache.count_nonzero() == 0
        assert blocks.data_ptr() == cache.data_ptr(), "views follow"
        cache.fill_(3)
    assert tied.data_ptr() == weights[0].data_ptr()


def test_come_back_returns_whether_the_addresses_are_unchanged() -> None:
    storage = DeviceStorage([torch.randn(1 << 16)], [])
    (only,) = storage._storages
    storage.leave()
    only.address = 1  # no memory begins there
    assert not storage.come_back()
    assert only.address == only.device.data_ptr()
