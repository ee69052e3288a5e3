"""Measures what the device can do: the floors of all other figures."""

from __future__ import annotations

import time

import torch
import torch.nn.functional as F

from loadtest.gpu.timing import eager_ms, graph_us

_READ_WORDS = 1 << 30  # of 8 bytes
_HOST_BYTES = 256 << 20
_SQUARE = 8192


def limits() -> dict[str, float]:
    """Bandwidths in GB/s, the matrix product in TFLOP/s, times in µs."""
    device = torch.device("cuda")
    found = _memory(device)
    host = torch.empty(_HOST_BYTES, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(_HOST_BYTES, dtype=torch.uint8, device=device)
    found["h2d_gb_s"] = _HOST_BYTES / eager_ms(lambda: there.copy_(host, non_blocking=True)) / 1e6
    found["d2h_gb_s"] = _HOST_BYTES / eager_ms(lambda: host.copy_(there, non_blocking=True)) / 1e6
    a, b = (torch.randn(_SQUARE, _SQUARE, dtype=torch.bfloat16, device=device) for _ in range(2))
    found["bf16_tflop_s"] = 2 * _SQUARE**3 / eager_ms(lambda: F.linear(a, b)) / 1e9
    small = torch.zeros(16, device=device)
    found["launch_in_graph_us"] = graph_us(lambda i: small.add_(1.0), 320)
    began_s = time.monotonic()
    for _ in range(320):
        small.add_(1.0)
    torch.cuda.synchronize()
    found["launch_eager_us"] = (time.monotonic() - began_s) / 320 * 1e6
    return found


def _memory(device: torch.device) -> dict[str, float]:
    words = torch.randint(0, 100, (_READ_WORDS,), dtype=torch.int64, device=device)
    other, size = torch.empty_like(words), words.numel() * 8
    return {
        "read_gb_s": size / eager_ms(words.sum) / 1e6,
        "copy_gb_s": 2 * size / eager_ms(lambda: other.copy_(words)) / 1e6,
    }
