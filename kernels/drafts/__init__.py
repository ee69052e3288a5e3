"""Drafts: tokens that may follow a sequence, from its own text, and which of them the sampler keeps."""

from kernels.drafts.ref import LEAST, MOST, accept, propose

__all__ = ["LEAST", "MOST", "accept", "propose"]
