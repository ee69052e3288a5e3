"""Any bytes as blocks of a GGUF file, with scales of a usual size."""

from __future__ import annotations

import numpy as np
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as GgmlType
from numpy.typing import NDArray

SCALES = {  # where a block has its float16 numbers
    GgmlType.Q4_0: [0], GgmlType.Q4_1: [0, 2], GgmlType.Q5_0: [0], GgmlType.Q5_1: [0, 2],
    GgmlType.Q8_0: [0], GgmlType.Q4_K: [0, 2], GgmlType.Q5_K: [0, 2], GgmlType.Q6_K: [208],
}  # fmt: skip


def random_blocks(kind: GgmlType, rows: int, columns: int) -> NDArray[np.uint8]:
    """A matrix, `[rows, bytes]`."""
    random = np.random.default_rng(kind.value)
    each, size = GGML_QUANT_SIZES[kind]
    raw = random.integers(0, 256, (rows * columns // each, size), dtype=np.uint8)
    for start in SCALES[kind]:
        scales = random.uniform(-0.02, 0.02, (len(raw), 1)).astype(np.float16)
        raw[:, start : start + 2] = scales.view(np.uint8)
    return raw.reshape(rows, -1)
