"""Matrices in 4 bits: packing, what they stand for, quantising; and how the library's layouts are chosen."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kernels.quantised import Int4Groups, dequantise, gpu, pack, quantise_groups, unpack


def test_the_first_of_eight_numbers_lies_in_the_lowest_bits() -> None:
    words = pack(torch.tensor([[1, 2, 3, 4, 5, 6, 7, 15]], dtype=torch.uint8))
    assert words.dtype == torch.int32
    assert words.tolist() == [[0xF7654321 - 2**32]]
    assert unpack(words).tolist() == [[1, 2, 3, 4, 5, 6, 7, 15]]


def test_packing_can_be_undone() -> None:
    numbers = torch.randint(0, 16, (3, 5, 24), generator=torch.Generator().manual_seed(1)).to(torch.uint8)
    assert unpack(pack(numbers)).equal(numbers)


def test_an_element_is_its_number_less_the_zero_times_the_scale_of_its_group() -> None:
    generator = torch.Generator().manual_seed(2)
    numbers = torch.randint(0, 16, (4, 32), generator=generator)
    zeros = torch.randint(0, 16, (4, 2), generator=generator).to(torch.uint8)
    scales = torch.rand(4, 2, generator=generator).bfloat16()
    with_zeros = Int4Groups(pack(numbers), scales, zeros)
    symmetric = Int4Groups(pack(numbers), scales)
    assert (with_zeros.shape, with_zeros.group) == ((4, 32), 16)
    found, plain = dequantise(with_zeros), dequantise(symmetric)
    for row in range(4):
        for column in range(32):
            number, scale = int(numbers[row, column]), scales[row, column // 16].double().item()
            assert found[row, column] == (number - int(zeros[row, column // 16])) * scale
            assert plain[row, column] == (number - 8) * scale


def test_quantising_is_off_by_half_a_scale_at_most() -> None:
    x = torch.randn(6, 96, generator=torch.Generator().manual_seed(3))
    x[2, 32:64] = 0.0
    found = quantise_groups(x, 32)
    error = (dequantise(found) - x).view(6, 3, 32).abs().amax(-1)
    assert (error <= found.scales * 0.5001).all()
    assert dequantise(found)[2, 32:64].eq(0).all()


@pytest.mark.parametrize("experts", [0, 8])
@pytest.mark.parametrize("like", ["each its own", "all the same"])
def test_layouts_cover_all_numbers_of_rows_and_like_ones_are_joined(
    like: str, experts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def choose(config: Any, rows: int, *, gemm_type: str, device: torch.device) -> dict[str, int]:
        return {"tile": rows if like == "each its own" else 64}

    tune = SimpleNamespace(get_heuristics_config=choose)
    monkeypatch.setattr(gpu, "_library", lambda: SimpleNamespace(tune=tune))
    config = SimpleNamespace(num_experts=experts)
    found = gpu._choices(config, "dense", torch.device("cpu"))
    assert found[0][0] == 0
    assert found[-1][1] == gpu._MOST_ROWS
    assert [end for _, end, _ in found[:-1]] == [begin for begin, _, _ in found[1:]]
    counts = gpu._ROWS_OF_EXPERTS if experts else gpu._ROWS
    assert len(found) == (len(counts) if like == "each its own" else 1)


@pytest.mark.parametrize(
    ("shape", "programs", "rows", "kind", "changed"),
    [
        ((6144, 4096), 1, 8, (4, 128), {"block_shape": (8, 128, 256)}),
        ((28672, 4096), 2, 8, (4, 128), {"use_stream_k": False}),
        ((4096, 14336), 2, 8, (4, 128), {}),  # 32 tiles
        ((6144, 4096), 1, 16, (4, 128), {}),
        ((6144, 4096), 1, 8, (8, 128), {}),
        ((28672, 4096), 2, 8, (4, 32), {}),
        ((3072, 4096), 1, 8, (4, 128), {}),  # too little work for each program
        ((8192, 4224), 1, 8, (4, 128), {}),  # no whole number of deep tiles
    ],
)
def test_layouts_of_few_rows_are_chained_and_measured_layouts_changed(
    shape: tuple[int, int], programs: int, rows: int, kind: tuple[int, int], changed: dict[str, Any]
) -> None:
    layout = {"block_shape": (8, 128, 128), "num_ctas_per_sm": programs, "use_stream_k": True}
    config = SimpleNamespace(
        shape_n=shape[0], shape_k=shape[1], b_dtype=SimpleNamespace(num_bits=kind[0]),
        weight_scale_group_size=kind[1],
    )  # fmt: skip
    assert gpu._in_a_chain(layout, config, rows, 132) == layout | {"use_pdl": True} | changed
