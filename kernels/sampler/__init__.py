"""Choosing tokens from logits."""

from kernels.sampler.ref import GROUP_TOKENS, draw, keep_likely, penalize

__all__ = ["GROUP_TOKENS", "draw", "keep_likely", "penalize"]
