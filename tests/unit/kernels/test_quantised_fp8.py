"""Fp8 rows: the reference against a loop, the GPU's kernels against the reference.

Triton's interpreter rounds some numbers to e4m3 wrongly (15.9 to 8: a carry is lost), so some may differ
there."""

from __future__ import annotations

import pytest
import torch
from support.executor.gpu_side import DEVICE, far, normal
from support.executor.references import fp8_product

from kernels.elementwise import ref as norm_ref
from kernels.elementwise import ref as swiglu_ref
from kernels.elementwise.gpu import rms_norm_fp8, swiglu_fp8
from kernels.gemm.gpu import MatmulTuning, matmul
from kernels.quantised import Fp8Rows, dequantise_rows, gpu, quantise_rows

ON_GPU = DEVICE == "cuda"
KIND = torch.bfloat16 if ON_GPU else torch.float32


def same(found: Fp8Rows, wanted: Fp8Rows) -> None:
    torch.testing.assert_close(found.scales, wanted.scales, rtol=1e-6, atol=0.0)
    codes, others = (each.numbers.view(torch.uint8).int() for each in (found, wanted))
    if ON_GPU:  # another last bit of float32 may round to the neighbour
        assert (codes - others).abs().max() <= 1
    assert (codes != others).float().mean() < 0.08


def rows_of_all_sizes(rows: int, width: int) -> torch.Tensor:
    x = normal(rows, width) * torch.logspace(-6, 6, rows, device=DEVICE)[:, None]
    x[1] = 0.0
    return x


def test_a_row_has_the_nearest_numbers_over_its_own_scale() -> None:
    x = rows_of_all_sizes(5, 40)
    found = quantise_rows(x)
    assert found.scales[1] == 1.0
    for row, values in enumerate(x):
        if row == 1:
            assert not dequantise_rows(found)[row].any()
            continue
        largest = values.abs().max()
        assert found.scales[row] == largest / 448
        error = (dequantise_rows(found)[row] - values).abs()
        # Half a step: 2^-4 of a normal number, 2^-10 scales of a smaller one.
        assert (error <= torch.maximum(values.abs() * 2.0**-4, found.scales[row] * 2.0**-10) * 1.0001).all()
    poisoned = quantise_rows(torch.tensor([[1.0, torch.nan], [1.0, 2.0]]))
    assert dequantise_rows(poisoned).isnan().tolist() == [[True, True], [False, False]]


@pytest.mark.parametrize("width", [72, 1100])
def test_kernels_write_the_rows_of_the_reference(width: int) -> None:
    x, residual, weight = (
        rows_of_all_sizes(4, width).to(KIND),
        normal(4, width, seed=1).to(KIND),
        normal(width),
    )
    residual[1] = 0.0
    same(gpu.quantise_rows(x), quantise_rows(x))
    same(rms_norm_fp8(x, weight, 1e-5), quantise_rows(norm_ref.rms_norm(x.float(), weight, 1e-5)))
    wanted, total = norm_ref.add_rms_norm(x.float(), residual.float(), weight, 1e-5)
    total = total.to(KIND)
    wanted = norm_ref.rms_norm(total.float(), weight, 1e-5)
    for given in (x, torch.stack((x.float() * 0.25, x.float() * 0.75))):
        kept = residual.clone()
        same(rms_norm_fp8(given, weight, 1e-5, kept), quantise_rows(wanted))
        assert far(kept, total) < 1e-5


def test_swiglu_is_near_its_numbers() -> None:
    gate_up = normal(3, 2200, seed=4).to(KIND)
    gate_up[1] = 0.0
    found, wanted = swiglu_fp8(gate_up), swiglu_ref.swiglu(gate_up.float())
    largest = wanted.abs().amax(1)
    torch.testing.assert_close(found.scales[[0, 2]], largest[[0, 2]] / 448, rtol=2**-7, atol=0.0)
    assert found.scales[1] == 1.0
    # Half a step of e4m3, and two roundings to bf16 before it.
    near = torch.maximum(wanted.abs() * (2**-4 + 2**-7), found.scales[:, None] * 2.0**-9)
    wrong = (dequantise_rows(found) - wanted).abs() > near
    assert wrong.float().mean() < (0 if ON_GPU else 0.08) or not wrong.any()


def test_a_poisoned_row_is_nan_and_leaves_the_others() -> None:
    x = normal(3, 72)
    x[1, 5] = torch.nan
    found = dequantise_rows(gpu.quantise_rows(x))
    if ON_GPU:  # the interpreter has no NaN in e4m3
        assert found[1].isnan().any()
    assert found[[0, 2]].isfinite().all()


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("rows", [1, 3, 17])
def test_a_product_of_fp8_rows_is_that_of_its_numbers(splits: int, rows: int) -> None:
    x, weight = quantise_rows(normal(rows, 256)), quantise_rows(normal(128, 256, seed=1))
    found = matmul(x, weight, MatmulTuning(64, 64, splits))
    assert found.dtype == (torch.bfloat16 if splits == 1 else torch.float32)
    error = 2**-7 if splits == 1 else 2e-3 if ON_GPU else 1e-5  # of sums in the fast mode of a GPU
    assert far(found if splits == 1 else found.sum(0), fp8_product(x, weight)) < error


@pytest.mark.skipif(not ON_GPU, reason="the library has this product on GPUs")
@pytest.mark.parametrize("rows", [1, 5, 64, 300])
def test_the_library_computes_the_same(rows: int) -> None:
    x, weight = quantise_rows(normal(rows, 256)), quantise_rows(normal(128, 256, seed=1))
    for bias in (None, normal(128, seed=2).bfloat16()):
        assert far(gpu.scaled_mm(x, weight, bias), fp8_product(x, weight, bias)) < 2**-7
