"""Blocks of a GGUF file against the gguf library, on any bytes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as GgmlType
from gguf.quants import dequantize
from support.executor.gguf_raw import SCALES, random_blocks

import kernels.cpu_jit
from services.executor.cpu.linear import Products
from services.executor.quantised.gguf_blocks import InBlocks, blocks_of, can_stay_in_blocks
from shared.errors import SetupError

ROUNDED = (GgmlType.Q4_K, GgmlType.Q5_K, GgmlType.Q6_K)  # a product of two numbers becomes float16


@pytest.mark.parametrize("kind", SCALES, ids=lambda kind: kind.name)
def test_dequantised_values_equal_the_librarys(kind: GgmlType) -> None:
    raw = random_blocks(kind, 64, 512)
    wanted = torch.from_numpy(dequantize(raw, kind))
    found = blocks_of(raw, kind).values()
    if kind in ROUNDED:
        assert torch.allclose(found, wanted, rtol=2**-10, atol=2**-10 * float(wanted.abs().max()))
    else:
        assert found.equal(wanted)


def test_the_size_of_joined_matrices_is_that_of_their_blocks() -> None:
    four, eight = (
        InBlocks.of(random_blocks(kind, 64, 512), kind, 64) for kind in (GgmlType.Q4_1, GgmlType.Q8_0)
    )
    joined = four.join([eight])
    assert joined.size_bytes == 64 * 512 // 32 * (20 + 34)
    assert joined.size_bytes == joined.data[0].nbytes


def test_other_types_are_left_to_the_library() -> None:
    assert all(can_stay_in_blocks(kind) for kind in SCALES)
    assert not any(can_stay_in_blocks(kind) for kind in (GgmlType.F16, GgmlType.Q2_K, GgmlType.IQ4_XS))


@pytest.mark.skipif(not kernels.cpu_jit.available(), reason="no Numba: matrices do not stay in blocks")
@pytest.mark.parametrize(
    ("kind", "scale"),
    [(GgmlType.Q8_0, np.inf), (GgmlType.Q4_1, np.nan), (GgmlType.Q4_K, 6e4)],
    ids=lambda each: str(each),
)
def test_scales_that_are_not_finite_are_refused(kind: GgmlType, scale: float) -> None:
    """Also a product of two numbers that float16 does not hold."""
    columns, size = GGML_QUANT_SIZES[kind]
    raw = np.ones((64, 256 // columns * size), dtype=np.uint8)
    products = Products(torch.float32, torch.device("cpu"), deterministic=False)
    products.linear(InBlocks.of(raw, kind, 64))
    raw[5, 4 * (kind == GgmlType.Q4_K) : 16 if kind == GgmlType.Q4_K else 0] = 63
    raw[5, :2] = np.frombuffer(np.float16(scale).tobytes(), dtype=np.uint8)
    with pytest.raises(SetupError, match="scales that are not finite, or too large for float16"):
        products.linear(InBlocks.of(raw, kind, 64))
