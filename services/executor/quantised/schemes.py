"""How a Hugging Face folder is quantised, and its weights in e4m3.

`scheme_of` reads `quantization_config` in config.json; the table SCHEMES of checkpoint/stored.py names it.

    fp8                  weight (e4m3), weight_scale or weight_scale_inv: of the tensor, rows, or blocks
    compressed-tensors   float-quantized: weight, weight_scale: of the tensor, rows, or blocks
                         pack-quantized, mxfp4-pack-quantized: 4 bits, in groups of columns (int4.py)
    awq, gptq            the same in other layouts
    mxfp4                of gpt-oss: all experts of a layer in one tensor, dequantised when they are read

With weights in e4m3 activations are quantised as they come ("dynamic"), here with a scale for each token,
also where the authors had one for 128 columns; with weights in 4 bits they stay plain. Which modules stay
plain (`ignore`) is visible in the types and names of the tensors. Anything else is refused by name.

Weights in e4m3 come from a checkpoint in fp8, or are quantised at load (`--dtype fp8`, on a GPU).

    in a file    plain numbers, or `InFp8`: e4m3 with a scale for the tensor, each row, or each block
    in memory    `ScaledFp8`: e4m3 with a scale for each row (output channel), which the products take

The projections of attention and of dense MLPs are in fp8; embedding, norms, biases and head stay plain. With
any other dtype a checkpoint in fp8 is dequantised at load.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from kernels.attention import FP8
from kernels.quantised import Fp8Rows, dequantise_rows, quantise_rows, widen_e2m1
from services.executor.checkpoint.config import shown
from services.executor.checkpoint.stored import Cut, Dense, Scheme, Stored
from services.executor.model.description import HEADS, KV_HEADS, WIDTH, Part
from services.executor.quantised.int4 import Int4Format
from shared.errors import SetupError

STORED = "F8_E4M3"  # as safetensors names the type
_SCALES = ("_scale", "_scale_inv")  # after the name of a weight; both are multiplied with
_INSTEAD = (
    "supported are fp8 and compressed-tensors float-quantized with dynamic activations, and in 4 bits awq, "
    "gptq and compressed-tensors pack-quantized and mxfp4-pack-quantized with plain ones; use such a "
    "checkpoint, or the unquantised model (on a GPU with dtype fp8), or on a CPU a GGUF file of it"
)
_FP8_KEYS = frozenset((
    "quant_method", "activation_scheme", "fmt", "weight_block_size", "modules_to_not_convert",
    "ignored_layers", "dequantize", "scale_fmt",
))  # fmt: skip
_COMPRESSED_KEYS = frozenset((
    "quant_method", "format", "quantization_status", "global_compression_ratio", "config_groups", "ignore",
    "kv_cache_scheme", "sparsity_config", "transform_config", "version",
))  # fmt: skip
_GPTQ_KEYS = frozenset((  # how a checkpoint was made is no part of what it computes
    "quant_method", "bits", "group_size", "sym", "desc_act", "checkpoint_format", "format", "lm_head",
    "act_group_aware", "backend", "batch_size", "block_name_to_quantize", "cache_block_outputs",
    "damp_auto_increment", "damp_percent", "dataset", "exllama_config", "is_marlin_format", "mcts",
    "max_input_length", "meta", "model_file_base_name", "model_name_or_path", "model_seqlen",
    "module_name_preceding_first_block", "modules_in_block_to_quantize", "mse", "pack_dtype", "pad_token_id",
    "quantizer", "static_groups", "tokenizer", "true_sequential", "use_cuda_fp16", "use_exllama",
    "disable_exllama", "modules_to_not_convert",
))  # fmt: skip
_AWQ_KEYS = _GPTQ_KEYS | {"zero_point", "version", "do_fuse", "fuse_max_seq_len", "modules_to_fuse"}
_GROUP_KEYS = frozenset(("targets", "weights", "input_activations", "output_activations", "format"))
_FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True}
_STRATEGIES = ("tensor", "channel", "block")


@dataclass(frozen=True, slots=True)
class InBlocksOfFp8(Scheme):
    """A folder with weights in fp8.

    `block`: the rows and columns that share a scale; None: a scale for the tensor, or for each row."""

    kept_in: ClassVar[str] = "fp8"
    block: tuple[int, int] | None

    def scales_of(self, name: str, kind: str, names: Mapping[str, Any]) -> str | None:
        """See Scheme."""
        return next((name + suffix for suffix in _SCALES if kind == STORED and name + suffix in names), None)

    def stored(self, weight: str, names: Mapping[str, Any], read: Callable[[str], Dense]) -> Stored:
        """See Scheme."""
        found = read(weight)
        scales = self.scales_of(weight, found.source.kind, names)
        return found if scales is None else with_scales(weight, found, read(scales).values, self.block)


@dataclass(frozen=True, slots=True)
class ExpertsInMxfp4(Scheme):
    """All experts of a layer in 4 bits (gpt-oss), which become plain when they are read: `_blocks` `[experts,
    out, in / 32, 16]` have two numbers (e2m1) in a byte, `_scales` `[experts, out, in / 32]` an exponent
    each (OCP Microscaling Formats 1.0)."""

    def weight_of(self, name: str, names: Mapping[str, Any]) -> str | None:
        """See Scheme."""
        weight, _, end = name.rpartition("_")
        return weight if end in ("blocks", "scales") and f"{weight}_blocks" in names else None

    def stored(self, weight: str, names: Mapping[str, Any], read: Callable[[str], Dense]) -> Stored:
        """See Scheme: `[experts, in, out]`. Raises SetupError for tensors that are missing or do not fit."""
        if weight in names:
            return read(weight)
        if f"{weight}_scales" not in names:
            raise SetupError(f"tensor {weight + '_scales'!r} is missing; fetch the model again")
        blocks, scales = read(f"{weight}_blocks"), read(f"{weight}_scales")
        if len(blocks.shape) != 4 or blocks.shape[3] != 16 or scales.shape != blocks.shape[:3]:
            raise SetupError(
                f"tensor {weight + '_blocks'!r} is {list(blocks.shape)} with scales {list(scales.shape)}: no "
                "experts in blocks of 32 numbers; fetch the model again"
            )
        experts, out, groups = scales.shape
        return Dense.of(_Mxfp4(blocks, scales), (experts, 32 * groups, out))


@dataclass(frozen=True, slots=True)
class _Mxfp4:
    blocks: Dense
    scales: Dense

    def __getitem__(self, at: tuple[slice, ...]) -> Tensor:
        some = Cut(0, at[0].start, at[0].stop)
        pairs, exponents = self.blocks.cut(some).values, self.scales.cut(some).values
        numbers = widen_e2m1(torch.stack((pairs & 15, pairs >> 4), -1))
        found = torch.ldexp(numbers, exponents.int()[..., None, None] - 127)
        return found.flatten(2).mT[:, at[1], at[2]]


def scheme_of(config: Mapping[str, Any]) -> InBlocksOfFp8 | Int4Format | ExpertsInMxfp4 | None:
    """How the weights beside a config.json are quantised; None: they are plain. Raises SetupError for a
    `quantization_config` that is not supported."""
    given = config.get("quantization_config")
    if not given:
        return None
    if not isinstance(given, Mapping):
        raise SetupError("quantization_config in config.json is not an object; fetch the model again")
    method = given.get("quant_method")
    if method == "fp8":
        return InBlocksOfFp8(_plain(given))
    if method == "compressed-tensors" and given.get("format") in _PACKED:
        return _packed(given)
    if method == "compressed-tensors":
        return InBlocksOfFp8(_compressed(given))
    if method == "awq":
        return _awq(given)
    if method == "gptq":
        return _gptq(given)
    if method == "mxfp4":
        _only_keys(given, frozenset(("quant_method", "modules_to_not_convert", "dequantize")))
        return ExpertsInMxfp4()
    raise _refused("quant_method", method)


def _plain(given: Mapping[str, Any]) -> tuple[int, int] | None:
    _only_keys(given, _FP8_KEYS)
    if given.get("activation_scheme", "dynamic") != "dynamic":
        raise _refused("activation_scheme", given["activation_scheme"])
    if str(given.get("fmt", "e4m3")).removeprefix("float8_") not in ("e4m3", "e4m3fn"):
        raise _refused("fmt", given["fmt"])
    block = given.get("weight_block_size")
    return None if block is None else _block(block)


def _awq(given: Mapping[str, Any]) -> Int4Format:
    _only_keys(given, _AWQ_KEYS)
    for key in ("version", "format"):
        if str(given.get(key) or "gemm").lower() != "gemm":
            raise _refused(key, given[key])
    if given.get("backend") == "llm-awq":
        raise _refused("backend", given["backend"])
    if given.get("desc_act"):
        raise _refused("desc_act", given["desc_act"])
    return Int4Format("awq", _four_bits(given))


def _gptq(given: Mapping[str, Any]) -> Int4Format:
    _only_keys(given, _GPTQ_KEYS)
    kind = next((given[key] for key in ("checkpoint_format", "format") if given.get(key) is not None), "gptq")
    if kind not in ("gptq", "gptq_v2"):
        raise _refused("checkpoint_format", kind)
    if given.get("is_marlin_format"):
        raise _refused("is_marlin_format", given["is_marlin_format"])
    if given.get("pack_dtype", "int32") != "int32":
        raise _refused("pack_dtype", given["pack_dtype"])
    symmetric, reordered = bool(given.get("sym", True)), bool(given.get("desc_act"))
    return Int4Format("gptq", _four_bits(given), symmetric, kind == "gptq", reordered)


def _four_bits(given: Mapping[str, Any]) -> int:
    """Columns of a group; 0: a whole row. Raises SetupError for another number of bits."""
    if given.get("bits") != 4:
        raise _refused("bits", given.get("bits"))
    return _group_size(given.get("group_size"), "group_size")


def _group_size(group: Any, where: str) -> int:
    if type(group) is not int or group < -1 or group == 0:
        raise _refused(where, group)
    return max(0, group)


def _packed(given: Mapping[str, Any]) -> Int4Format:
    groups = _groups(given)
    of_group = _PACKED[given["format"]]
    found = {of_group(f"config_groups.{name}", group) for name, group in groups.items()}
    if len(found) > 1:
        raise _refused("config_groups", groups)
    return found.pop()


def _packed_group(name: str, group: Any) -> Int4Format:
    weights = _weights(name, group, "pack-quantized")
    if group.get("input_activations") is not None:
        raise _refused(f"{name}.input_activations", group["input_activations"])
    wanted = {"num_bits": 4, "type": "int", "dynamic": False}
    _check(f"{name}.weights", {**wanted, **weights}, wanted)
    strategy, symmetric = weights.get("strategy"), bool(weights.get("symmetric", True))
    if strategy == "channel":
        return Int4Format("compressed-tensors", 0, symmetric)
    if strategy != "group":
        raise _refused(f"{name}.weights.strategy", strategy)
    size = _group_size(weights.get("group_size"), f"{name}.weights.group_size")
    reordered = weights.get("actorder") not in (None, False, "weight", "static")
    return Int4Format("compressed-tensors", size, symmetric, reordered=reordered)


def _mxfp4_group(name: str, group: Any) -> Int4Format:
    """Inputs that would be rounded to 4 bits as they come stay plain, which is more exact."""
    weights, inputs = _weights(name, group, "mxfp4-pack-quantized"), group.get("input_activations") or {}
    wanted = {"num_bits": 4, "type": "float", "group_size": 32, "symmetric": True, "strategy": "group"}
    for where, part in (("weights", weights), ("input_activations", inputs)):
        if not isinstance(part, Mapping) or (part and bool(part.get("dynamic")) != (part is inputs)):
            raise _refused(f"{name}.{where}", part)
        if part:
            _check(f"{name}.{where}", part, wanted)
    if not weights:
        raise _refused(f"{name}.weights", weights)
    return Int4Format("mxfp4", 32, symmetric=True)


_PACKED = {"pack-quantized": _packed_group, "mxfp4-pack-quantized": _mxfp4_group}  # by format


def _compressed(given: Mapping[str, Any]) -> tuple[int, int] | None:
    if given.get("format") != "float-quantized":
        _only_keys(given, _COMPRESSED_KEYS)
        raise _refused("format", given.get("format"))
    groups = _groups(given)
    blocks = {_group(f"config_groups.{name}", group) for name, group in groups.items()} - {None}
    if len(blocks) > 1:
        raise _refused("config_groups", groups)
    return blocks.pop() if blocks else None


def _groups(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """The groups of modules, of which there is one at least. Raises SetupError for what changes a checkpoint
    beside them."""
    _only_keys(given, _COMPRESSED_KEYS)
    for key in ("kv_cache_scheme", "transform_config"):
        if given.get(key):
            raise _refused(key, given[key])
    sparsity = given.get("sparsity_config") or {}
    if not isinstance(sparsity, Mapping) or sparsity.get("format", "dense") != "dense":
        raise _refused("sparsity_config", sparsity)
    groups = given.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise _refused("config_groups", groups)
    return groups


def _weights(name: str, group: Any, kind: str) -> Mapping[str, Any]:
    """How a group's weights are quantised."""
    if not isinstance(group, Mapping):
        raise _refused(name, group)
    _only_keys(group, _GROUP_KEYS, name)
    if group.get("output_activations") is not None or group.get("format") not in (None, kind):
        raise _refused(name, group)
    weights = group.get("weights") or {}
    if not isinstance(weights, Mapping):
        raise _refused(f"{name}.weights", weights)
    return weights


def _group(name: str, group: Any) -> tuple[int, int] | None:
    weights, inputs = _weights(name, group, "float-quantized"), group.get("input_activations") or {}
    for where, part, dynamic in (("weights", weights, False), ("input_activations", inputs, True)):
        if not isinstance(part, Mapping):
            raise _refused(f"{name}.{where}", part)
        _check(f"{name}.{where}", part, _FLOAT8)
        if bool(part.get("dynamic")) != dynamic:
            raise _refused(f"{name}.{where}.dynamic", part.get("dynamic"))
    if weights.get("strategy") not in _STRATEGIES:
        raise _refused(f"{name}.weights.strategy", weights.get("strategy"))
    return _block(weights.get("block_structure")) if weights["strategy"] == "block" else None


def _block(given: Any) -> tuple[int, int]:
    sizes = given.split("x") if isinstance(given, str) else given
    try:
        rows, columns = (int(size) for size in sizes)
    except (TypeError, ValueError, OverflowError) as error:
        raise _refused("the size of blocks", given) from error
    if min(rows, columns) < 1:
        raise _refused("the size of blocks", given)
    return rows, columns


def _check(where: str, given: Mapping[str, Any], wanted: Mapping[str, object]) -> None:
    for key, value in wanted.items():
        if given.get(key) != value:
            raise _refused(f"{where}.{key}", given.get(key))


def _only_keys(given: Mapping[str, Any], known: frozenset[str], where: str = "") -> None:
    for key in sorted(given.keys() - known):
        if given[key] is not None:
            raise _refused(f"{where}.{key}" if where else key, given[key])


def _refused(what: str, value: object) -> SetupError:
    return SetupError(
        f"{what} = {shown(value)} in quantization_config of config.json is not supported; {_INSTEAD}"
    )


def with_scales(name: str, numbers: Dense, scales: Tensor, block: tuple[int, int] | None) -> InFp8:
    """A weight of a file in e4m3, `[rows, columns]`, with its scales: one number, one for each row, or one
    for each `block` of the configuration. Raises SetupError for scales of another shape, and for impossible
    numbers."""
    if len(numbers.shape) != 2:
        raise SetupError(f"tensor {name!r} is {list(numbers.shape)} in fp8: only matrices are supported")
    rows, columns = numbers.shape
    found = tuple(scales.shape)
    blocks = None if block is None else (math.ceil(rows / block[0]), math.ceil(columns / block[1]))
    if math.prod(found) == 1:
        grid, size = (1, 1), (rows, columns)
    elif found in ((rows,), (rows, 1)):
        grid, size = (rows, 1), (1, columns)
    elif block is not None and found == blocks:
        grid, size = found, block
    else:
        in_blocks = f", nor {list(blocks)} of blocks" if blocks else ""
        raise SetupError(
            f"the scales of tensor {name!r} {[rows, columns]} are {list(found)}: neither one number, nor one "
            f"for each row{in_blocks}; fetch the model again"
        )
    wide = scales.float()
    if not (wide.isfinite() & (wide >= 0)).all():
        raise SetupError(
            f"the scales of tensor {name!r} are not finite and positive: damaged; fetch it again"
        )
    return InFp8(name, numbers, wide.reshape(grid), size)


LEAST_CAPABILITY = (9, 0)  # before it torch's product with a scale for each row may hang (pytorch#177651)
_MULTIPLE = 16  # of both sizes of a weight, for torch's product
# Blocks of a row get one scale if their own scales differ by less: e4m3 has 2^14 between its largest number
# and its smallest with all bits, so each block still has 2^10.
_SPREAD = 16.0


@dataclass(frozen=True, slots=True)
class ScaledFp8(Stored):
    """A matrix in the memory of a device, with a scale for each row; see Stored."""

    matrix: Fp8Rows
    dtype: torch.dtype  # of `values`

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.matrix.shape)

    @property
    def values(self) -> Tensor:
        return dequantise_rows(self.matrix).to(self.dtype)

    @property
    def data(self) -> tuple[Tensor, ...]:
        return self.matrix.numbers, self.matrix.scales

    @property
    def operand(self) -> Fp8Rows:
        return self.matrix

    def rows(self, order: Tensor) -> ScaledFp8:
        return replace(self, matrix=Fp8Rows(self.matrix.numbers[order], self.matrix.scales[order]))

    def cut(self, cut: Cut) -> ScaledFp8:
        part = slice(cut.begin, cut.end)
        if cut.dim == 0:
            return replace(self, matrix=Fp8Rows(self.matrix.numbers[part], self.matrix.scales[part]))
        return replace(self, matrix=Fp8Rows(self.matrix.numbers[:, part].contiguous(), self.matrix.scales))

    def join(self, below: Sequence[Stored]) -> Stored:
        """As Stored has it; plain numbers if one of them is plain."""
        found = [self.matrix]
        for each in below:
            if not isinstance(each, ScaledFp8):
                return Dense.of(self.values).join(below)
            found.append(each.matrix)
        numbers, scales = (
            torch.cat([getattr(each, name) for each in found]) for name in ("numbers", "scales")
        )
        return replace(self, matrix=Fp8Rows(numbers, scales)) if below else self

    def scaled(self, factors: Tensor) -> ScaledFp8:
        """As Stored has it. With factors of columns the largest one goes into the scales: the numbers can
        only shrink, and lose bits where they become subnormal."""
        numbers, scales = self.matrix.numbers, self.matrix.scales
        if factors.dim() == 2:
            return replace(self, matrix=Fp8Rows(numbers, scales * factors[:, 0].float()))
        largest = factors.float().max()
        return replace(
            self, matrix=Fp8Rows((numbers.float() * (factors / largest)).to(FP8), scales * largest)
        )

    def loaded(self, dtype: torch.dtype, device: torch.device) -> ScaledFp8:
        numbers, scales = (each.to(device) for each in self.data)
        return ScaledFp8(Fp8Rows(numbers, scales), dtype)


@dataclass(frozen=True, slots=True)
class InFp8(Stored):
    """A matrix of e4m3 in a file; see Stored.

    `scales`, `[rows / block rows, columns / block columns]` float32, are those of the whole tensor. `block`
    may be the whole tensor, or a row. `name` is the tensor's, for errors."""

    name: str
    numbers: Dense
    scales: Tensor
    block: tuple[int, int]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.numbers.shape

    @property
    def values(self) -> Tensor:
        return self._values(torch.device("cpu"))

    @property
    def data(self) -> tuple[Tensor, ...]:
        return self.numbers.values, self.scales

    def cut(self, cut: Cut) -> InFp8:
        return replace(self, numbers=self.numbers.cut(cut))

    def loaded(self, dtype: torch.dtype, device: torch.device) -> Dense:
        return Dense.of(self._values(device).to(dtype))

    def in_fp8(self, dtype: torch.dtype, device: torch.device) -> ScaledFp8:
        """With a scale for each row: as they are in the file, or quantised again from blocks. Raises
        SetupError for blocks in a row whose scales differ too much for one scale."""
        scales = self._scales()
        if scales.shape[1] == 1:
            numbers = self.numbers.loaded(FP8, device).values.contiguous()
            return ScaledFp8(Fp8Rows(numbers, scales[:, 0].contiguous().to(device)), dtype)
        least = torch.where(scales == 0, torch.inf, scales).amin(1)  # blocks of zeros may have any scale
        worst = (scales.amax(1) / least).max().item()
        if worst >= _SPREAD:
            raise SetupError(
                f"tensor {self.name!r} has blocks of {self.block[0]} x {self.block[1]} with scales that vary "
                f"by a factor of {worst:.0f} in one row: one scale a row would lose small numbers; use dtype "
                "bf16, which dequantises them"
            )
        return ScaledFp8(quantise_rows(self._values(device)), dtype)

    def _scales(self) -> Tensor:
        """The scales of each row and the blocks of its columns: `[rows, blocks]`."""
        down, across = ([*range(each.start, each.stop, 1)] for each in self.numbers.ranges)
        columns = sorted({column // self.block[1] for column in across})
        return self.scales[torch.tensor(down, dtype=torch.int64) // self.block[0]][:, columns]

    def _values(self, device: torch.device) -> Tensor:
        scales = self._scales().to(device)
        if scales.shape[1] > 1:
            across = self.numbers.ranges[1]
            blocks = torch.arange(across.start, across.stop, device=device) // self.block[1]
            scales = scales[:, blocks - blocks[0]]
        return self.numbers.values.to(device).float() * scales


def part_in_fp8(part: Part, stored: Stored, dtype: torch.dtype, device: torch.device) -> Stored:
    """A part of a weight in the memory of `device`, in fp8 if it is a matrix of a layer that products can
    read so. Raises SetupError as `InFp8.in_fp8`."""
    fits = len(stored.shape) == 2 and not any(size % _MULTIPLE for size in stored.shape)
    if part.units not in (HEADS, KV_HEADS, WIDTH) or not fits:
        return stored.loaded(dtype, device)
    if isinstance(stored, InFp8):
        return stored.in_fp8(dtype, device)
    return ScaledFp8(quantise_rows(stored.loaded(dtype, device).values), dtype)
