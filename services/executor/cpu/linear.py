"""Chooses the fastest matrix product for each weight on this machine. In deterministic mode a row's bits do
not depend on the other rows.

Float32 on a CPU uses oneDNN's product with weights packed once at load: F.linear and torch.mm (MKL) pack them
in every call, which dominates a step of few rows. Measured on 2 Zen 3 cores (AVX2, no bf16 instructions), all
products of a 135M model, ms by rows (head not included above 32):

    rows                                    1    2    4    8   16   20   32   64  128  464
    f32   F.linear                         39   73   78   74   89   96  121  133  218  761
          weight @ x.T                     38   38   36   69   76  100  113  133  226  793
          MKL packed (mkl._mkl_linear)     36   56   92  100  106  108  144
          oneDNN packed                    28   31   34   44   59   67   90  118  210  730
    bf16  F.linear                         17   34       110            430
          widened in slices                40   40        77             99

oneDNN compiles a kernel for each shape at first use and keeps it: 4 to 5 ms and 2.5 MB for each number of
rows of this model. Above 32, rows are therefore padded (by 3 % on average) to one of 56 numbers up to 256.
The numbers of decode steps and of the last tokens of a cached prompt are compiled at start.

Without bf16 instructions F.linear on bf16 computes one row at a time, and weights are widened in slices. GPUs
use F.linear. With Numba our own kernels (kernels/cpu_jit) are used where they fit: with AVX-512 they
replace all of the above.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

import kernels.cpu_jit
from services.executor.checkpoint.stored import Stored
from shared.errors import SetupError

Linear = Callable[[Tensor], Tensor]  # [rows, in] -> [rows, out]

ROW_TILE = 16  # rows of every product in deterministic mode
_SLICE_ELEMENTS = 1 << 20  # 4 MiB of float32: stays in the cache between widening and use
_EXACT_ROWS = 32  # up to here each number of rows has its kernel: padding 23 rows by one takes 8 % more time
_SIZES = 8  # kernels from each power of two to the next, above _EXACT_ROWS
_NARROW_ROWS = 2  # up to here F.linear on bf16 is faster than widening


class Products:
    """Makes the products of one model. They share a scratch buffer, so they run on one thread."""

    def __init__(
        self, dtype: torch.dtype, device: torch.device, *, deterministic: bool, kept_in: str = ""
    ) -> None:
        """`kept_in`, on a CPU with the instructions: `int8` keeps the weights in int8 with a scale for each
        row; with `packed8` inputs of weights in blocks have 8 bits, else 16."""
        self._dtype, self._kept_in = dtype, kept_in
        self._deterministic = deterministic
        self._on_cpu = device.type == "cpu"
        self._widen = (
            self._on_cpu and dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported()
        )
        self._packs = self._on_cpu and torch._C._has_mkldnn and not self._widen
        self._compiled = self._on_cpu and kernels.cpu_jit.available()
        self._any_packed = False
        self._by_shape: dict[tuple[int, ...], Linear] = {}  # one of each, but the head
        self._scratch = torch.empty(_SLICE_ELEMENTS if self._widen else 0)

    def kernel_sizes(self, most_rows: int) -> list[int]:
        """The numbers of rows up to `most_rows` for which a product compiles a kernel at first use."""
        if not self._any_packed:
            return []
        if self._deterministic:
            return [ROW_TILE]
        return sorted({kernel_rows(rows) for rows in range(1, most_rows + 1)})

    @torch.inference_mode()
    def compile(self, most_rows: int, like: Tensor) -> None:
        """Compile the kernels of the products, of inputs like `like`, for up to `most_rows` rows. One product
        of each shape stands for all."""
        for rows in self.kernel_sizes(most_rows):
            for (_, width), product in self._by_shape.items():
                product(like.new_zeros(rows, width))

    def linear(
        self,
        stored: Stored,
        bias: Tensor | None = None,
        dtype: torch.dtype | None = None,
        *,
        sensitive: bool = False,
    ) -> Linear:
        """The product with the weight `[out, in]`, plus `bias`. The result has the input's dtype; our own
        kernels round it to `dtype` if given. `sensitive`: inputs of weights in blocks have 16 bits. With
        `deterministic` a row's result does not depend on the other rows: those of our kernels never do, and
        torch's run in tiles of ROW_TILE rows, which all have one shape and one order of summation; the number
        of rows must then be a multiple of ROW_TILE."""
        product = self._in_bytes(stored, dtype, sensitive=sensitive) if self._compiled else None
        if product is None:
            product = self._of_numbers(stored.values, dtype)
        if dtype is None:
            self._by_shape.setdefault(stored.shape, product)
        return product if bias is None else lambda x: product(x) + bias

    def _of_numbers(self, weight: Tensor, dtype: torch.dtype | None) -> Linear:
        if self._compiled and (product := self._compiled_product(weight, dtype)):
            return product
        product = self._of_torch(weight)
        return _tiled(product) if self._deterministic else product

    def _in_bytes(self, stored: Stored, dtype: torch.dtype | None, *, sensitive: bool) -> Linear | None:
        """The product with a matrix that stays in the blocks of its file, or in int8 if asked. Raises
        SetupError for scales that are not finite: a row of -inf would hide from the check of the logits."""
        from kernels.cpu_jit.block_weights import can_pack, in_int8, pack
        from kernels.cpu_jit.packed_weights import PackedProduct

        if matrices := stored.blocks():
            scales = (each for blocks in matrices for each in (blocks.scales, blocks.minima))
            if not all(each is None or each.isfinite().all() for each in scales):
                raise SetupError(
                    "a matrix of the model has scales that are not finite, or too large for float16: fetch "
                    "the model again, or use dtype f32"
                )
        elif self._kept_in == "int8" and can_pack(*stored.shape):
            matrices = [in_int8(stored.values)]
        else:
            return None
        if not all(can_pack(*each.numbers.shape) for each in matrices):
            return None
        terms = 1 if self._kept_in == "packed8" and not sensitive else 2
        return PackedProduct(pack(matrices, dtype or self._dtype, terms), dtype)

    def _compiled_product(self, weight: Tensor, dtype: torch.dtype | None) -> Linear | None:
        from kernels.cpu_jit.gemm_few_rows import by_rows
        from kernels.cpu_jit.packed_weights import packed_product

        if product := packed_product(weight, dtype=dtype):
            return product
        wide = weight.dtype != torch.bfloat16  # a plain copy would be large
        return None if wide or self._deterministic else by_rows(weight, self._of_torch(weight))

    def _of_torch(self, weight: Tensor) -> Linear:
        if self._widen:
            return self._widened(weight)
        self._any_packed |= self._packs
        return _packed(weight) if self._packs else _plain(weight)

    def _widened(self, weight: Tensor) -> Linear:
        height = max(1, min(weight.shape[0], _SLICE_ELEMENTS // weight.shape[1]))
        slices = torch.split(weight, height)
        scratch = self._scratch
        if weight.shape[1] > _SLICE_ELEMENTS:
            return _plain(weight)

        def product(x: Tensor) -> Tensor:
            if x.shape[0] <= _NARROW_ROWS:
                return F.linear(x, weight)
            columns = x.float().t()
            out = torch.empty(weight.shape[0], x.shape[0])
            for narrow, target in zip(slices, torch.split(out, height), strict=True):
                wide = scratch[: narrow.numel()].view(narrow.shape).copy_(narrow)
                torch.mm(wide, columns, out=target)
            return out.t().to(x.dtype, memory_format=torch.contiguous_format)

        return product


def _plain(weight: Tensor) -> Linear:
    return lambda x: F.linear(x, weight)


def _packed(weight: Tensor) -> Linear:
    # A copy in oneDNN's own layout: the caller may free `weight`.
    packed = torch.ops.mkldnn._reorder_linear_weight(weight)
    multiply: Callable[..., Tensor] = torch.ops.mkldnn._linear_pointwise.default

    def product(x: Tensor) -> Tensor:
        rows = x.shape[0]
        if extra := kernel_rows(rows) - rows:
            return multiply(F.pad(x, (0, 0, 0, extra)), packed, None, "none", [], "")[:rows]
        return multiply(x, packed, None, "none", [], "")

    return product


def kernel_rows(rows: int) -> int:
    """`rows` rounded up to a number that has a kernel: any up to _EXACT_ROWS, above it _SIZES numbers from
    each power of two to the next."""
    if rows <= _EXACT_ROWS:
        return rows
    step = (1 << (rows - 1).bit_length()) // (2 * _SIZES)
    return -(-rows // step) * step


def _tiled(product: Linear) -> Linear:
    # A tile is copied to its own buffer: the same alignment for every tile.
    return lambda x: torch.cat([product(tile.clone()) for tile in torch.split(x, ROW_TILE)])
