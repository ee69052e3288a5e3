"""Reads the folder of an adapter as PEFT saves it: adapter_config.json and adapter_model.safetensors.

What would change an answer and is not computed here is refused by its name: DoRA, biases, whole modules, a
base whose weights differ. Its digest is over the bytes of both files, so the digest names the weights.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.executor.engine import MOST_FLOAT32
from shared import bodies
from shared.errors import BadRequest, WireError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PARAM = "lora_path"
MOST_BYTES = 8 << 30
_PREFIX = "base_model.model."
# Fields of the config that change no answer: names, how it was trained, and what the weights show.
_HARMLESS = frozenset((
    "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config",
    "exclude_modules", "inference_mode", "layers_pattern", "layers_to_transform", "lora_alpha",
    "lora_dropout", "megatron_config", "megatron_core", "peft_type", "peft_version", "qalora_group_size", "r",
    "revision", "runtime_config", "target_modules", "task_type", "use_rslora",
))  # fmt: skip
_PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")  # others start from another base
_NAMED = {
    "bias": "trained biases", "use_dora": "DoRA", "modules_to_save": "whole modules",
    "rank_pattern": "ranks by module",
    "alpha_pattern": "scales by module", "lora_bias": "a bias in B", "fan_in_fan_out": "transposed weights",
    "target_parameters": "parameters that are no modules", "layer_replication": "replicated layers",
    "trainable_token_indices": "trained embeddings", "alora_invocation_tokens": "an activated adapter",
    "use_qalora": "QA-LoRA",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Folder:
    """The bytes of an adapter, with the numbers of its config."""

    digest: str
    rank: int
    scale: float
    weights: bytes


def read_folder(path: str, most_rank: int) -> Folder:
    """Read both files, each once: the digest is that of the bytes that are used. Raises BadRequest with what
    is wrong and where."""
    folder = Path(path).expanduser()
    if not folder.is_absolute():
        raise refusal(f"{path!r:.200} is not an absolute path: executors do not start in your folder")
    config = _bytes(folder / CONFIG)
    rank, scale = read_config(config, folder / CONFIG, most_rank)
    weights = _bytes(folder / WEIGHTS)
    return Folder(digest_of(config, weights), rank, scale, weights)


def digest_of(config: bytes, weights: bytes) -> str:
    """Hex digest of an adapter."""
    digest = hashlib.blake2b(len(config).to_bytes(8, "little"), digest_size=16)
    digest.update(config)
    digest.update(weights)
    return digest.hexdigest()


def refusal(why: str) -> BadRequest:
    """The error of an adapter that cannot be used."""
    return BadRequest(f"the adapter is refused: {why}", param=PARAM)


def _bytes(file: Path) -> bytes:
    try:
        if file.stat().st_size > MOST_BYTES:
            raise refusal(f"{file} has over {MOST_BYTES >> 30} GiB")
        return file.read_bytes()
    except FileNotFoundError:
        other = file.with_suffix(".bin")
        saved = f"; {other.name} is a pickle: save it with safe_serialization=True" if other.exists() else ""
        raise refusal(f"{file} is missing where the executor runs{saved}") from None
    except OSError as error:
        raise refusal(f"{file} cannot be read: {error.strerror or error}") from None


def read_config(data: bytes, file: Path, most_rank: int) -> tuple[int, float]:
    """Rank and scale of adapter_config.json. Raises BadRequest."""
    try:
        config = bodies.decode(bodies.Json, data)
    except WireError as error:
        raise refusal(f"{file} is not a JSON object: {error.message}") from None
    if (kind := config.get("peft_type")) != "LORA":
        raise refusal(f"`peft_type` is {kind!r:.40}, and only LORA is supported")
    if (task := config.get("task_type")) not in (None, "CAUSAL_LM"):
        raise refusal(f"`task_type` is {task!r:.40}, and only CAUSAL_LM is supported")
    for name, value in config.items():
        _check_field(name, value)
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if type(rank) is not int or rank < 1:
        raise refusal(f"`r` is {rank!r:.40}, and a rank from 1 on is expected")
    if rank > most_rank:
        raise refusal(f"`r` is {rank}, over the {most_rank} of --lora-rank: start the executors with more")
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not abs(alpha) <= MOST_FLOAT32:
        raise refusal(f"`lora_alpha` is {alpha!r:.40}, and a number is expected")
    return rank, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _check_field(name: str, value: Any) -> None:
    if name in _HARMLESS or not value:
        return
    if name == "bias" and value == "none":
        return
    if name == "init_lora_weights" and value in _PLAIN_STARTS:
        return
    if name == "init_lora_weights":
        raise refusal(f"`{name}` is {value!r:.40}, whose base has other weights: convert it to plain LoRA")
    raise refusal(f"`{name:.60}` is {value!r:.60}: not supported ({_NAMED.get(name, 'not known')})")


Shape = Callable[[str], Sequence[int]]


def modules_of(tensors: Mapping[str, Any]) -> dict[tuple[str, str], str]:
    """The names of all matrices, by module and `lora_A` or `lora_B`. Raises BadRequest for any other
    tensor."""
    found: dict[tuple[str, str], str] = {}
    for name in tensors:
        module, dot, kind = name.removeprefix(_PREFIX).removesuffix(".weight").rpartition(".")
        if not (
            dot and kind in ("lora_A", "lora_B") and name.startswith(_PREFIX) and name.endswith("weight")
        ):
            raise refusal(f"the tensor {name!r:.120} is no matrix A or B of a linear layer")
        found[module, kind] = name
    return found


def check_targets(
    found: Mapping[tuple[str, str], str], known: Mapping[str, Sequence[int]], shape_of: Shape, rank: int
) -> None:
    """Raise BadRequest unless each module is one of `known` projections, `[out, in]`, with an A and a B that
    fit."""
    if not found:
        raise refusal("it has no matrix")
    for module, _ in sorted(found):
        if (sizes := known.get(module)) is None:
            raise refusal(f"{module!r:.120} is no linear layer of the model that takes adapters")
        expected = {"lora_A": (rank, sizes[1]), "lora_B": (sizes[0], rank)}
        for kind, shape in expected.items():
            name = found.get((module, kind))
            if name is None:
                raise refusal(f"{module} has no {kind}")
            if (given := tuple(shape_of(name))) != shape:
                raise refusal(f"{name} is {list(given)}, and {list(shape)} is expected")
