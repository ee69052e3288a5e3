"""Low-rank adapters: what a row's adapter adds to a product, beside the product of all rows."""

from kernels.lora.ref import Adapted, adapt

__all__ = ["Adapted", "adapt"]
