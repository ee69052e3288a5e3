"""Reading, writing and copying blocks of the paged KV cache."""

from kernels.kv_blocks.ref import FP8, FP8_MAX, as_stored, copy_blocks, gather_kv, write_kv, write_rows

__all__ = ["FP8", "FP8_MAX", "as_stored", "copy_blocks", "gather_kv", "write_kv", "write_rows"]
