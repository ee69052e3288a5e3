"""Attention over the paged KV cache."""

from kernels.paged_attention.ref import attend_decode, attend_prefill

__all__ = ["attend_decode", "attend_prefill"]
