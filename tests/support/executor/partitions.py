"""Shapes of models that do not divide evenly, and what logits may differ by."""

from __future__ import annotations

import random

import torch
from support.executor.tiny_models import VOCAB

from services.executor.model.description import Shapes

CPU = torch.device("cpu")
LIMIT = 1e-4


def shapes(heads: int, kv_heads: int, intermediate: int = 96, vocab: int = VOCAB) -> Shapes:
    return Shapes(
        architecture="llama", layers=1, hidden=heads * 8, heads=heads, kv_heads=kv_heads, head_dim=8,
        intermediate=intermediate, vocab=vocab, norm_eps=1e-6, rope_theta=1e4,
    )  # fmt: skip


def tokens(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=count)
