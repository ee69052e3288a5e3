"""These kernels choose tokens from logits, with counter-based random numbers."""

from kernels.sampling.ref import GROUP_TOKENS, INVALID, draw, gumbel, keep_likely, penalize, philox

__all__ = ["GROUP_TOKENS", "INVALID", "draw", "gumbel", "keep_likely", "penalize", "philox"]
