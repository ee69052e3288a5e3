"""Reads the shapes of a model (one dataclass) from GGUF metadata or from a Hugging Face config.json.

The supported kinds are in families.py. Unknown keys are refused by name (known_keys.py), so a model that
loads is computed as its authors intended.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from services.executor.checkpoint.families import FAMILIES, Family
from services.executor.checkpoint.known_keys import check_gguf, check_hf
from services.executor.checkpoint.rope import gguf_rope, hf_rope, rope_fields
from services.executor.engine import LAST_TOKEN
from services.executor.model.shapes import ExpertShapes, Shapes
from shared.errors import SetupError
from shared.vocab.files import unreadable
from shared.vocab.gguf import read_metadata
from shared.vocab.vector_settings import vector_settings

_COUNTS = ("layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate", "vocab", "max_context")
SUPPORTED = tuple(FAMILIES)
# Far above any model's: with a damaged number the description or the rotations would take minutes.
MOST_LAYERS, _MOST_DIM = 4096, 65_536
_BIASES: Mapping[str, Any] = {"qkv_bias": True, "out_bias": True}
_GGUF_POOLING = {0: LAST_TOKEN, 1: "pooling mean", 2: "pooling cls", 3: LAST_TOKEN, 4: "a head for ranks"}
_BY_LAYER = ("attention.head_count", "attention.head_count_kv", "feed_forward_length")  # as in llama.cpp
IN_GGUF = tuple(kind for kind, family in FAMILIES.items() if family.in_gguf)


def refuse(what: str, kinds: Sequence[str] = SUPPORTED) -> SetupError:
    """The error for an unsupported model."""
    return SetupError(f"{what} is not supported; supported are models of the kinds {', '.join(kinds)}")


def read_shapes(folder: Path) -> Shapes:
    """The shapes of a Hugging Face folder. Raises SetupError if config.json is absent or damaged, or the
    model is not supported."""
    file = folder / "config.json"
    try:
        config = json.loads(file.read_text("utf-8"))
        if not isinstance(config, dict):
            raise ValueError("not an object")
        return from_hf(config)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise SetupError(f"{folder} has no config.json: it is not a Hugging Face model folder") from error
    except KeyError as error:
        raise SetupError(f"{file} lacks {error}; fetch the model again") from error
    except SetupError as error:
        raise SetupError(f"{folder}: {error.message}") from error
    except (OSError, ValueError, TypeError, AttributeError, ArithmeticError) as error:
        raise unreadable(file, "a model's configuration", error) from error


def from_hf(config: Mapping[str, Any]) -> Shapes:
    """Shapes from a Hugging Face config.json. Raises SetupError for an unsupported model; KeyError,
    TypeError, ValueError or ArithmeticError for a damaged file."""
    kind = str(config.get("model_type", "(none)"))
    if kind not in SUPPORTED:
        raise refuse(f"model type {kind!r}")
    family = FAMILIES[kind]
    check_hf(config, kind, family)
    config = {**family.defaults, **config}
    heads = int(config["num_attention_heads"])
    head_dim = _rotated(int(config.get("head_dim") or int(config["hidden_size"]) // heads))
    rope = hf_rope(config)
    theta = float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0)
    return _plausible(Shapes(
        architecture=kind,
        layers=int(config["num_hidden_layers"]),
        hidden=int(config["hidden_size"]),
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=head_dim,
        intermediate=int(config["intermediate_size"]),
        vocab=int(config["vocab_size"]),
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope_theta=theta,
        **rope_fields(rope, theta, head_dim, int(config.get("max_position_embeddings", 2048))),
        sliding_window=_hf_window(family, config),
        tied=bool(config.get("tie_word_embeddings", False)),
        experts=_hf_experts(family, config),
        **family.options,
        **(_BIASES if config.get("attention_bias") else {}),
    ))  # fmt: skip


def pooling_of(path: Path, usual: str = LAST_TOKEN) -> str:
    """How the model's authors make a vector of a text: LAST_TOKEN, or what an engine may lack for it. A
    folder of sentence-transformers names it; without a name it is the `usual`. Raises SetupError for a
    damaged file."""
    if path.suffix == ".gguf":
        data = read_metadata(path)
        kind = int(data.get(f"{data.get('general.architecture')}.pooling_type", 0))
        return _GGUF_POOLING.get(kind, f"pooling of type {kind}")
    found = vector_settings(path)
    if found.refused or not found.pooling:
        return found.refused or usual
    return LAST_TOKEN if found.pooling == (LAST_TOKEN,) else f"pooling {'+'.join(found.pooling)}"


def _rotated(head_dim: int) -> int:
    """`head_dim`. Raises ValueError for one whose frequencies no list can hold."""
    if head_dim > _MOST_DIM:
        raise ValueError(f"no model has heads of {head_dim} numbers")
    return head_dim


def _plausible(shapes: Shapes) -> Shapes:
    """`shapes`. Raises ValueError for impossible numbers."""
    counts = {name: getattr(shapes, name) for name in _COUNTS}
    fit = min(counts.values()) > 0 and shapes.layers <= MOST_LAYERS
    if not fit or shapes.heads % shapes.kv_heads or shapes.head_dim % 2:
        raise ValueError(f"no model has these numbers: {counts}")
    return shapes


def _hf_window(family: Family, config: Mapping[str, Any]) -> int:
    """The attention window in tokens of the layers with a window, 0 without any. Up to that many tokens
    layers with and without a window compute the same."""
    kinds = {*(config.get("layer_types") or ())}
    if not kinds <= {"full_attention", "sliding_attention"}:
        raise refuse(f"attention of the types {sorted(kinds)}")
    window = int(config.get("sliding_window") or 0)
    if family.window_switch and not config.get("use_sliding_window"):
        window = 0
    if "sliding_attention" in kinds and not window:
        raise refuse("sliding attention (layer_types) without a sliding_window")
    if "max_window_layers" not in family.defaults:
        return window
    if kinds:
        return window if "sliding_attention" in kinds else 0
    return window if int(config["max_window_layers"]) < int(config["num_hidden_layers"]) else 0


def _hf_experts(family: Family, config: Mapping[str, Any]) -> ExpertShapes | None:
    if family.experts is None:
        return None
    step, dense = int(config.get("decoder_sparse_step", 1)), config.get("mlp_only_layers") or ()
    return ExpertShapes(
        count=int(config["num_local_experts"] if "num_local_experts" in config else config["num_experts"]),
        per_token=int(config["num_experts_per_tok"]),
        width=int(config[family.experts.width]),
        renormalise=bool(config.get("norm_topk_prob", False)),
        dense_layers=tuple(
            layer for layer in range(int(config["num_hidden_layers"])) if layer in dense or (layer + 1) % step
        ),
    )


def from_gguf(metadata: Mapping[str, Any], tensors: Collection[str]) -> Shapes:
    """Shapes from GGUF metadata (keys: the GGUF specification) and the set of tensor names. Raises SetupError
    for an unsupported model; KeyError, TypeError or ValueError for damaged metadata. The loader (gguf.py)
    reads factors that differ by frequency from the tensor `rope_freqs.weight`."""
    kind = str(metadata.get("general.architecture", "(none)"))
    if kind not in IN_GGUF:
        raise refuse(f"GGUF architecture {kind!r}", IN_GGUF)
    check_gguf(metadata, kind)
    metadata = {**metadata, **_of_all_layers(metadata, kind)}
    heads = int(metadata[f"{kind}.attention.head_count"])
    hidden = int(metadata[f"{kind}.embedding_length"])
    head_dim = _rotated(int(metadata.get(f"{kind}.attention.key_length", hidden // heads)))
    for key in ("attention.value_length", "rope.dimension_count"):
        if int(metadata.get(f"{kind}.{key}", head_dim)) != head_dim:
            raise refuse(f"{key} {metadata[f'{kind}.{key}']} with heads of {head_dim}", IN_GGUF)
    theta = float(metadata.get(f"{kind}.rope.freq_base", 10000.0))
    context = int(metadata[f"{kind}.context_length"])
    return _plausible(Shapes(
        architecture=kind,
        layers=int(metadata[f"{kind}.block_count"]),
        hidden=hidden,
        heads=heads,
        kv_heads=int(metadata.get(f"{kind}.attention.head_count_kv", heads)),
        head_dim=head_dim,
        intermediate=int(metadata[f"{kind}.feed_forward_length"]),
        vocab=len(metadata["tokenizer.ggml.tokens"]),
        norm_eps=float(metadata[f"{kind}.attention.layer_norm_rms_epsilon"]),
        rope_theta=theta,
        **rope_fields(gguf_rope(metadata, kind, context), theta, head_dim, context),
        sliding_window=int(metadata.get(f"{kind}.attention.sliding_window", 0)),
        tied="output.weight" not in tensors,
        qkv_bias="blk.0.attn_q.bias" in tensors,
        out_bias="blk.0.attn_output.bias" in tensors,
        qk_norm="blk.0.attn_q_norm.weight" in tensors,
    ))  # fmt: skip


def _of_all_layers(metadata: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """The number of all layers for keys that have one for each layer. Raises SetupError if layers differ, and
    ValueError for another count of them."""
    found = {}
    for key in (f"{kind}.{name}" for name in _BY_LAYER):
        if isinstance(numbers := metadata.get(key), list):
            if len(numbers) != metadata[f"{kind}.block_count"]:
                raise ValueError(f"{key} has {len(numbers)} numbers, and not one for each layer")
            if len({*numbers}) > 1:
                raise refuse(f"{key} with layers of different sizes, {numbers!r:.60},", IN_GGUF)
            found[key] = numbers[0]
    return found
