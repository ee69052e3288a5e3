"""Writes a GGUF model of the Llama kind again, in float32 and with widths that K-quants need.

    python -m loadtest.eval.wider SmolLM2-135M-Instruct.Q4_1.gguf wide-f32.gguf

A K-quant's block has 256 columns, and SmolLM2 has 576: `llama-quantize` takes other types there. With zeros
up to 768 columns, and heads of zeros, the model computes the same, and every matrix can be a K-quant. Norms
divide by the mean over all columns, so their weights and epsilon are scaled.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from services.executor.checkpoint.gguf import GgufTensors

_COLUMNS = 256


def write_wider(source: Path, target: Path) -> None:
    """Write `target`. Raises SetupError for a file that cannot be read."""
    tensors, fields = GgufTensors(source), gguf.GGUFReader(source).fields

    def told(key: str) -> Any:
        return fields[f"llama.{key}"].contents()

    hidden, heads, inner = (
        told(key) for key in ("embedding_length", "attention.head_count", "feed_forward_length")
    )
    wide, head_dim, group = _up(hidden), hidden // heads, heads // told("attention.head_count_kv")
    new = {
        "llama.embedding_length": wide,
        "llama.feed_forward_length": _up(inner),
        "llama.attention.head_count": wide // head_dim,
        "llama.attention.head_count_kv": wide // head_dim // group,
        "llama.attention.layer_norm_rms_epsilon": told("attention.layer_norm_rms_epsilon") * hidden / wide,
    }
    sizes = {hidden: wide, hidden // group: wide // group, inner: _up(inner)}
    writer = gguf.GGUFWriter(target, "llama")
    for name, field in fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            kind, of_array = field.types[0], field.types[-1]
            value = new.get(name, field.contents())
            writer.add_key_value(name, value, kind, of_array if kind == gguf.GGUFValueType.ARRAY else None)
    for name in sorted(tensors.entries):
        values = tensors.read(name).numpy()
        wider = np.zeros([sizes.get(size, size) for size in values.shape], np.float32)
        norm = name.endswith("norm.weight")
        wider[tuple(map(slice, values.shape))] = values * (math.sqrt(hidden / wide) if norm else 1)
        writer.add_tensor(name, wider)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _up(columns: int) -> int:
    return -(-columns // _COLUMNS) * _COLUMNS


if __name__ == "__main__":
    write_wider(Path(sys.argv[1]), Path(sys.argv[2]))
