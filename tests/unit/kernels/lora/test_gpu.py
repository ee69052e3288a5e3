"""The kernels of a GPU for adapters, beside float64; on a CPU in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from support.executor.gpu_side import DEVICE, normal, words

from kernels.lora.gpu import PlacedMatrices, adapt

WIDTH, LAYERS, PLACES, RANK = 200, 2, 3, 16
ENDS = {1: (144,), 2: (64, 144), 3: (80, 112, 144)}
TYPES = [torch.float32, torch.float16] if DEVICE == "cpu" else [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("segments", [1, 2, 3])
@pytest.mark.parametrize("rows", [1, 37])
def test_rows_get_what_the_adapter_of_their_slot_adds(rows: int, segments: int, dtype: torch.dtype) -> None:
    ends, height = ENDS[segments], 144
    a = normal(PLACES, LAYERS, segments * RANK, WIDTH, seed=1).to(dtype)
    b = normal(PLACES, LAYERS, RANK, height, seed=2).to(dtype)
    scales = torch.tensor([0.5, 0.25, 2.0], device=DEVICE)
    bounds = (ends[0], ends[1] if segments > 1 else height)
    x, out = normal(rows, WIDTH, seed=3).to(dtype) / WIDTH**0.5, normal(rows, height, seed=4).to(dtype)
    slots, of_slot = words(*((5 * row + 1) % 6 for row in range(rows))), words(0, 2, 0, 1, 3, 2)
    exact, places = out.double(), of_slot[slots.long()].tolist()
    for row, place in enumerate(places):
        for segment, (begin, end) in enumerate(zip((0, *ends), ends, strict=False)):
            if place:
                lines = slice(segment * RANK, (segment + 1) * RANK)
                low = scales[place - 1].double() * (a[place - 1, 1, lines].double() @ x[row].double())
                exact[row, begin:end] += low @ b[place - 1, 1, :, begin:end].double()
    before = out.clone()
    adapt(x, out, PlacedMatrices(a, b, scales, bounds), 1, slots, of_slot)
    error = 1e-5 if dtype == torch.float32 else 2**-7  # between the two products, values have this type, too
    torch.testing.assert_close(out.double(), exact, rtol=error, atol=8 * error)
    for row, place in enumerate(places):
        assert place or out[row].equal(before[row])
    if rows > 1:
        alone = before[:1].clone()
        adapt(x[:1], alone, PlacedMatrices(a, b, scales, bounds), 1, slots[:1], of_slot)
        assert alone[0].equal(out[0])
