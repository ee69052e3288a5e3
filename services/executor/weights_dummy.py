"""Random weights in the shapes of a config.json: for benchmarks of models that are not on this machine."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import torch
from torch import Tensor

from services.executor.shapes import Shapes, from_hf
from services.executor.shards import Cut, ShardOf, all_of_it
from services.executor.weights import Weights, assemble
from shared.errors import SetupError

_SPREAD = 0.02  # as models are initialised: activations stay in range
_SEED = 7


def load_dummy(
    folder: Path, dtype: torch.dtype, device: torch.device, shard_of: ShardOf = all_of_it
) -> tuple[Shapes, Weights]:
    """Shapes of a part of `folder`/config.json, and weights drawn on `device`, each tensor with a
    seed of its own: any part of the model is a part of the same; norms are ones. Raises
    SetupError for a model that is not supported or a folder without a config."""
    try:
        shapes = from_hf(json.loads((folder / "config.json").read_text()))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise SetupError(f"{folder} has no config.json, where dummy weights find their shapes") from error
    generator = torch.Generator(device)
    sizes = _sizes(shapes)

    def read(part: str, layer: int, cut: Cut | None) -> Tensor:
        if part.endswith("norm"):
            return torch.ones(sizes[part], dtype=dtype, device=device)
        generator.manual_seed(zlib.crc32(f"{_SEED} {layer} {part}".encode()))
        values = torch.empty(sizes[part], device=device)  # float32: the same numbers in every dtype
        values = values.normal_(0.0, _SPREAD, generator=generator).to(dtype)
        return values if cut is None else cut.of(values)

    shard = shard_of(shapes)
    return shard.shapes, assemble(shard, read, dtype, device)


def _sizes(shapes: Shapes) -> dict[str, tuple[int, ...]]:
    """The shape of every part that `assemble` asks for."""
    hidden, wide = shapes.hidden, shapes.intermediate
    queries, keys = shapes.heads * shapes.head_dim, shapes.kv_heads * shapes.head_dim
    experts: dict[str, tuple[int, ...]] = {}
    if shapes.experts is not None:
        count, narrow = shapes.experts.count, shapes.experts.width
        experts = {
            "router": (count, hidden),
            "experts_gate_up": (count, 2 * narrow, hidden),
            "experts_down": (count, hidden, narrow),
        }
    return experts | {
        "embedding": (shapes.vocab, hidden),
        "norm": (hidden,),
        "head": (shapes.vocab, hidden),
        "attention_norm": (hidden,),
        "mlp_norm": (hidden,),
        "q": (queries, hidden),
        "k": (keys, hidden),
        "v": (keys, hidden),
        "q_bias": (queries,),
        "k_bias": (keys,),
        "v_bias": (keys,),
        "q_norm": (shapes.head_dim,),
        "k_norm": (shapes.head_dim,),
        "out": (hidden, queries),
        "gate": (wide, hidden),
        "up": (wide, hidden),
        "down": (hidden, wide),
    }
