"""Digest of everything that makes KV bytes interchangeable between engines.

The weights go in as shapes and as a sample of the loaded values of every tensor, so that the same model
gives the same digest from one file or many, and any other quantisation or finetune another one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from services.executor.kv_cache import LAYOUT
from services.executor.kv_format import KvFormat
from services.executor.ranks import SOLO, Ranks
from services.executor.shapes import Shapes
from services.executor.weights import Weights

_FORMAT = "headrace-kv-1"
_SAMPLES = 1024  # of each tensor, evenly spread
_CHARACTERS = 32


def fingerprint(
    model: str, shapes: Shapes, weights: Weights, block_tokens: int, kept: KvFormat, ranks: Ranks = SOLO
) -> str:
    """Hex digest of model name, weights, dtype, shapes with rope, block size, layout, and how KV is kept.
    Several ranks have one, of all their digests in order: their blocks go together, and to as many ranks."""
    digest = hashlib.sha256()
    parts = (_FORMAT, model, repr(shapes), str(weights.embedding.dtype), str(block_tokens), LAYOUT)
    experts = () if shapes.experts is None else (repr(shapes.experts),)
    for part in (*parts, *experts, *kept.marks()):
        digest.update(part.encode() + b"\0")
    for tensor in _tensors(weights):
        flat = tensor.flatten()
        sample = flat[:: max(1, flat.numel() // _SAMPLES)].float().cpu()
        digest.update(repr(tuple(tensor.shape)).encode() + sample.numpy().tobytes())
    found = ranks.exchange(digest.hexdigest()[:_CHARACTERS])
    if len(found) == 1:
        return found[0]
    return hashlib.sha256("".join(found).encode()).hexdigest()[:_CHARACTERS]


def _tensors(weights: Weights) -> Iterator[Tensor]:
    yield from (weights.embedding, weights.norm, weights.head)
    for layer in weights.layers:
        parts: Iterable[object] = (getattr(layer, name) for name in layer.__slots__)
        yield from (part for part in parts if isinstance(part, torch.Tensor))
