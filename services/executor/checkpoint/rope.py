"""How a checkpoint scales its rotations, read as numbers of Shapes: a divisor of each frequency, and a gain.

    default, linear, llama3    divisors alone
    yarn                       (arXiv:2309.00071) fast pairs stay, slow ones are divided by `factor`, pairs
                               between are interpolated; a gain
    longrope                   (arXiv:2402.13753) two lists of divisors, for contexts up to the original one
                               and for longer ones; a gain

A partial rotation gives the rest of a head infinite divisors. known_keys.py has the keys of each form.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from services.executor.checkpoint.known_keys import rope_type
from services.executor.checkpoint.quantised import shown
from shared.errors import SetupError

_PARTIAL, _ORIGINAL = "partial_rotary_factor", "original_max_position_embeddings"
_GGUF = {  # by llama.cpp's name of a rope.scaling key
    "type": "rope_type", "factor": "factor", "original_context_length": _ORIGINAL,
    "yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow",
}  # fmt: skip


def rope_fields(rope: Mapping[str, Any], theta: float, head_dim: int, context: int) -> dict[str, Any]:
    """The fields of Shapes that the rope settings of a config.json decide, beside theta. `context`: its
    max_position_embeddings. Raises SetupError, with the name, for an absent or an impossible field."""
    kind, dim = rope_type(rope), int(head_dim * _positive(rope, _PARTIAL, 1.0))
    if dim != head_dim and (dim % 2 or not 0 < dim < head_dim):
        raise _wrong(_PARTIAL, rope[_PARTIAL], f"an even part of {head_dim} numbers")

    def of_head(divisors: tuple[float, ...]) -> tuple[float, ...]:
        """The divisors of theta^(-2i/head_dim), from those of theta^(-2i/dim)."""
        moved = (each * theta ** (2 * i / dim - 2 * i / head_dim) for i, each in enumerate(divisors))
        return (*moved, *[math.inf] * (head_dim // 2 - dim // 2))

    fields: dict[str, Any] = {"max_context": context}
    if kind == "default":
        return fields if dim == head_dim else {**fields, "rope_factors": of_head((1.0,) * (dim // 2))}
    if kind == "linear":
        return {**fields, "rope_factors": of_head((_positive(rope, "factor"),) * (dim // 2))}
    original = _positive(rope, _ORIGINAL)
    factor = _positive(rope, "factor", context / original if kind == "longrope" else None)
    if kind == "llama3":
        return {**fields, "rope_factors": of_head(_llama3(rope, theta, dim, factor, original))}
    if kind == "yarn":
        gain = _yarn_gain(rope, factor)
        factors = _yarn(rope, theta, dim, factor, original)
        fields["max_context"] = max(context, int(original * factor))
    else:
        gain = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
        short, factors = (_list(rope, key, dim // 2) for key in ("short_factor", "long_factor"))
        fields["short_rope"] = (int(original), of_head(short))
    fields["rope_gain"] = _positive(rope, "attention_factor", gain)
    return {**fields, "rope_factors": of_head(factors)}


def hf_rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """The rope settings of a config.json, with two that may stand beside them: a partial rotation, if they
    have none, and the original context, which counts first (as in transformers)."""
    given = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    if _PARTIAL in config:
        given.setdefault(_PARTIAL, config[_PARTIAL])
    if _ORIGINAL in config:
        given[_ORIGINAL] = config[_ORIGINAL]
    return given


def gguf_rope(metadata: Mapping[str, Any], kind: str, context: int) -> dict[str, Any]:
    """The rope settings of a GGUF file as a config.json has them. As in llama.cpp a factor without a type is
    linear, and a type without a factor changes nothing. Raises SetupError for an unsupported type."""
    given = {own: metadata.get(f"{kind}.rope.scaling.{name}") for name, own in _GGUF.items()}
    given["rope_type"] = given["rope_type"] or "linear"
    if given["rope_type"] not in ("none", "linear", "yarn"):
        raise SetupError(f"rope scaling {given['rope_type']!r} in a GGUF file is not supported; use another")
    if given["rope_type"] == "none" or given["factor"] in (None, 0.0, 1.0):
        return {}
    return {**given, _ORIGINAL: given[_ORIGINAL] or context}


def _llama3(
    rope: Mapping[str, Any], theta: float, head_dim: int, factor: float, original: float
) -> tuple[float, ...]:
    """Llama 3.1: short waves stay, long waves slow down by `factor`, waves between are interpolated."""
    low, high = _positive(rope, "low_freq_factor"), _positive(rope, "high_freq_factor")
    lengths = (2 * math.pi / theta ** (-2 * i / head_dim) for i in range(head_dim // 2))
    return tuple(_between((original / each - low) / (high - low), factor) for each in lengths)


def _yarn(
    rope: Mapping[str, Any], theta: float, head_dim: int, factor: float, original: float
) -> tuple[float, ...]:
    def pair(turns: float) -> float:
        """The pair that turns so often in the original context."""
        return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair(_positive(rope, "beta_fast", 32.0)), pair(_positive(rope, "beta_slow", 1.0))
    truncate = rope.get("truncate", True)
    if not isinstance(truncate, bool):
        raise _wrong("truncate", truncate, "true or false")
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low > high:
        raise SetupError(
            f"beta_fast, beta_slow and {_ORIGINAL} of the rope settings leave no pair to interpolate; fetch "
            "the model again"
        )
    width = high - low or 0.001  # as transformers
    return tuple(_between(1 - (i - low) / width, factor) for i in range(head_dim // 2))


def _yarn_gain(rope: Mapping[str, Any], factor: float) -> float:
    slope = 0.1 * math.log(max(factor, 1.0))
    if not rope.get("mscale") or not rope.get("mscale_all_dim"):
        return slope + 1
    return (_positive(rope, "mscale") * slope + 1) / (_positive(rope, "mscale_all_dim") * slope + 1)


def _between(kept: float, factor: float) -> float:
    """The divisor of a frequency of which `kept`, cut to 0 … 1, stays and the rest is divided by `factor`."""
    kept = min(max(kept, 0.0), 1.0)
    return 1.0 / ((1.0 - kept) / factor + kept)


def _positive(rope: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """A positive number; without it `default`, which None requires."""
    value = default if rope.get(key) is None else rope[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise _wrong(key, value, "a positive number")
    return float(value)


def _list(rope: Mapping[str, Any], key: str, count: int) -> tuple[float, ...]:
    given = rope.get(key)
    if not isinstance(given, list) or len(given) != count:
        raise _wrong(key, given, f"a list of {count} positive numbers")
    return tuple(_positive({key: each}, key) for each in given)


def _wrong(key: str, value: object, what: str) -> SetupError:
    return SetupError(
        f"{key} of the rope settings is {shown(value)}, and must be {what}; fetch the model again"
    )
