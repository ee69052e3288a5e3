"""Reads how a Hugging Face folder is quantised: `quantization_config` in config.json, and scales of tensors.
weights.py calls it.

    fp8                  weight (e4m3), weight_scale or weight_scale_inv: of the tensor, rows, or blocks
    compressed-tensors   float-quantized: weight, weight_scale: of the tensor, rows, or blocks

Weights are in e4m3, and activations are quantised as they come ("dynamic"), here with a scale for each token,
also where the authors had one for 128 columns. Which modules stay plain (`ignore`) is visible in the types of
the tensors. Anything else is refused by name.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from services.executor.checkpoint.fp8 import InFp8
from services.executor.checkpoint.stored import Dense
from shared.errors import SetupError

STORED = "F8_E4M3"  # as safetensors names the type
_SCALES = ("_scale", "_scale_inv")  # after the name of a weight; both are multiplied with
_INSTEAD = (
    "supported are fp8 and compressed-tensors float-quantized, with dynamic activations; use such a "
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
_GROUP_KEYS = frozenset(("targets", "weights", "input_activations", "output_activations", "format"))
_FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True}
_STRATEGIES = ("tensor", "channel", "block")


def is_quantised(folder: Path) -> bool:
    """Whether a folder has a quantised checkpoint; False for a folder that cannot be read."""
    try:
        config = json.loads((folder / "config.json").read_text("utf-8"))
        return bool(config.get("quantization_config"))
    except (OSError, ValueError, AttributeError):
        return False


def block_of(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Rows and columns of the blocks that have a scale; None: there are none. Raises SetupError for a
    `quantization_config` that is not supported."""
    given = config.get("quantization_config")
    if not given:
        return None
    if not isinstance(given, Mapping):
        raise SetupError("quantization_config in config.json is not an object; fetch the model again")
    method = given.get("quant_method")
    if method == "fp8":
        return _plain(given)
    if method == "compressed-tensors":
        return _compressed(given)
    raise _refused("quant_method", method)


def _plain(given: Mapping[str, Any]) -> tuple[int, int] | None:
    _only_keys(given, _FP8_KEYS)
    if given.get("activation_scheme", "dynamic") != "dynamic":
        raise _refused("activation_scheme", given["activation_scheme"])
    if str(given.get("fmt", "e4m3")).removeprefix("float8_") not in ("e4m3", "e4m3fn"):
        raise _refused("fmt", given["fmt"])
    block = given.get("weight_block_size")
    return None if block is None else _block(block)


def _compressed(given: Mapping[str, Any]) -> tuple[int, int] | None:
    _only_keys(given, _COMPRESSED_KEYS)
    if given.get("format") != "float-quantized":
        raise _refused("format", given.get("format"))
    for key in ("kv_cache_scheme", "transform_config"):
        if given.get(key):
            raise _refused(key, given[key])
    sparsity = given.get("sparsity_config") or {}
    if not isinstance(sparsity, Mapping) or sparsity.get("format", "dense") != "dense":
        raise _refused("sparsity_config", sparsity)
    groups = given.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise _refused("config_groups", groups)
    blocks = {_group(f"config_groups.{name}", group) for name, group in groups.items()} - {None}
    if len(blocks) > 1:
        raise _refused("config_groups", groups)
    return blocks.pop() if blocks else None


def _group(name: str, group: Any) -> tuple[int, int] | None:
    if not isinstance(group, Mapping):
        raise _refused(name, group)
    _only_keys(group, _GROUP_KEYS, name)
    if group.get("output_activations") is not None or group.get("format") not in (None, "float-quantized"):
        raise _refused(name, group)
    weights, inputs = group.get("weights") or {}, group.get("input_activations") or {}
    for where, part, dynamic in (("weights", weights, False), ("input_activations", inputs, True)):
        if not isinstance(part, Mapping):
            raise _refused(f"{name}.{where}", part)
        found = {**{key: part.get(key) for key in _FLOAT8}, "dynamic": bool(part.get("dynamic"))}
        for key, value in {**_FLOAT8, "dynamic": dynamic}.items():
            if found[key] != value:
                raise _refused(f"{name}.{where}.{key}", part.get(key))
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


def _only_keys(given: Mapping[str, Any], known: frozenset[str], where: str = "") -> None:
    for key in sorted(given.keys() - known):
        if given[key] is not None:
            raise _refused(f"{where}.{key}" if where else key, given[key])


def _refused(what: str, value: object) -> SetupError:
    shown = repr(value)
    shown = shown if len(shown) <= 80 else shown[:80] + "…"
    return SetupError(f"{what} = {shown} in quantization_config of config.json is not supported; {_INSTEAD}")


def scale_name(weight: str, names: Mapping[str, Any]) -> str | None:
    """The tensor with the scales of a weight."""
    return next((weight + suffix for suffix in _SCALES if weight + suffix in names), None)


def with_scales(name: str, numbers: Dense, scales: Tensor, block: tuple[int, int] | None) -> InFp8:
    """A weight in e4m3 and the tensor of its scales. Raises SetupError for scales of a shape that is neither
    one number, nor one a row, nor one for each of the configuration's blocks, and for impossible numbers."""
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
