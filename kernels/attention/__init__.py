"""Attention over the paged KV cache, and the reads, writes and copies of its blocks."""

from kernels.attention.ref import (
    FP8,
    FP8_MAX,
    PLAIN,
    Scoring,
    as_stored,
    attend_decode,
    attend_prefill,
    copy_blocks,
    gather_kv,
    weigh,
    write_kv,
)

__all__ = [
    "FP8",
    "FP8_MAX",
    "PLAIN",
    "Scoring",
    "as_stored",
    "attend_decode",
    "attend_prefill",
    "copy_blocks",
    "gather_kv",
    "weigh",
    "write_kv",
]
