"""Reading, writing and copying blocks of the paged KV cache."""

from kernels.kv_blocks.ref import copy_blocks, gather_kv, write_kv, write_rows

__all__ = ["copy_blocks", "gather_kv", "write_kv", "write_rows"]
