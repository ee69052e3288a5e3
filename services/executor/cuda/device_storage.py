"""`DeviceStorage` takes the memory of tensors off the device and puts it back; the CUDA engine sleeps by it.

    leave      weights ──▶ pinned host memory; KV cache: dropped; the freed memory goes back to the driver
    come_back  the other way; the KV cache is zeros

Every tensor and view stays the same object: only the memory of its storage goes. The driver may give the
same addresses again, and CUDA graphs with these stay valid; `come_back` returns whether it did.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, UntypedStorage


@dataclass(slots=True)
class _Storage:
    """The memory of one or several tensors; `host` has its bytes while it is away, if they are kept."""

    device: UntypedStorage
    kept: bool
    bytes: int
    address: int
    host: Tensor | None = None


class DeviceStorage:
    """The memory of `kept` tensors, whose contents come back, and of `dropped` ones, which come back as
    zeros. For one thread."""

    def __init__(self, kept: Iterable[Tensor], dropped: Iterable[Tensor]) -> None:
        found: dict[int, _Storage] = {}
        for keep, tensors in ((True, kept), (False, dropped)):
            for storage in (tensor.untyped_storage() for tensor in tensors):
                address = storage.data_ptr()
                found.setdefault(address, _Storage(storage, keep, storage.nbytes(), address))
        self._storages = [found[address] for address in sorted(found)]

    def leave(self) -> None:
        """Free the memory. Pinned memory is kept from one sleep to the next: to pin takes longer than to
        copy."""
        for each in self._storages:
            if each.kept:
                on_gpu = each.device.device.type == "cuda"
                if each.host is None:
                    each.host = torch.empty(each.bytes, dtype=torch.uint8, pin_memory=on_gpu)
                each.host.copy_(_bytes(each.device), non_blocking=True)
        _wait()
        for each in self._storages:
            each.device.resize_(0)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def come_back(self) -> bool:
        """Take the memory again, and return whether all of it has its old addresses. Raises torch's error if
        there is too little."""
        for each in self._storages:
            each.device.resize_(each.bytes)
        for each in self._storages:
            view = _bytes(each.device)
            if each.host is None:
                view.zero_()
            else:
                view.copy_(each.host, non_blocking=True)
        _wait()
        moved = [each for each in self._storages if each.device.data_ptr() != each.address]
        for each in moved:
            each.address = each.device.data_ptr()
        return not moved


def _bytes(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
