"""Choosing tokens from logits, by counter-based random numbers."""

from kernels.sampling.ref import FLAWED, GROUP_TOKENS, draw, gumbel, keep_likely, penalize, philox

__all__ = ["FLAWED", "GROUP_TOKENS", "draw", "gumbel", "keep_likely", "penalize", "philox"]
