"""Reads the shapes of a model (one dataclass) from a Hugging Face config.json.

Unknown keys are refused by name, so a model that loads is computed as its authors intended.

How a checkpoint scales its rotations, read as numbers of Shapes: a divisor of each frequency, and a gain.

    default, linear, llama3    divisors alone
    yarn                       (arXiv:2309.00071) fast pairs stay, slow ones are divided by `factor`, pairs
                               between are interpolated; a gain
    longrope                   (arXiv:2402.13753) two lists of divisors, for contexts up to the original one
                               and for longer ones; a gain

A partial rotation gives the rest of a head infinite divisors.

A key that is not listed here may change what the model computes, so the model is refused with that key's
name. The listed keys are read here, or harmless at any value
(training, generation, bookkeeping), or harmless at one value. A key with the value null is ignored.

families.py has what distinguishes the checkpoints of each family, quantised/gguf.py reads GGUF metadata.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kernels.sampling.ref import PARAMETERS
from services.executor.checkpoint.families import FAMILIES, Family, layer_kinds
from services.executor.checkpoint.stored import scheme_of
from services.executor.engine import LAST_TOKEN
from services.executor.model.description import ExpertShapes, Options, Shapes
from shared.errors import SetupError
from shared.vocab.files import read_metadata, unreadable, vector_settings

_COUNTS = ("layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate", "vocab", "max_context")
SUPPORTED = tuple(FAMILIES)
# Far above any model's: with a damaged number the description or the rotations would take minutes.
MOST_LAYERS, _MOST_DIM = 4096, 65_536
_GGUF_POOLING = {0: LAST_TOKEN, 1: "pooling mean", 2: "pooling cls", 3: LAST_TOKEN, 4: "a head for ranks"}


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
    head_dim = rotated_dim(int(config.get("head_dim") or int(config["hidden_size"]) // heads))
    rope, local = hf_rope(config, own_local=family.local_rope)
    theta = float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0)
    context = int(config.get("max_position_embeddings", 2048))
    rotation = rope_fields(rope, theta, head_dim, context)
    local_rope = None if local is None else _local_rope(local, config, head_dim)
    if local_rope == (theta, rotation.get("rope_factors", ())) and "rope_gain" not in rotation:
        local_rope = None
    windows = _hf_windows(family, config)
    options = Options(
        windows=windows if len({*windows}) > 1 else (),
        local_rope=local_rope,
        **{"act": family.acts.get(str(config.get(family.act, "silu")), ""), **family.computes(config)},
    )
    window = 0 if family.full_each and options.windows else max(windows, default=0)
    if window and not family.windows:  # up to which both compute the same
        rotation["max_context"] = min(rotation["max_context"], window)
    biases = (fields for key, fields in family.biases.items() if config.get(key))
    return plausible(Shapes(
        architecture=kind,
        layers=int(config["num_hidden_layers"]),
        hidden=int(config["hidden_size"]),
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=head_dim,
        intermediate=int(config["intermediate_size"]),
        vocab=int(config["vocab_size"]),
        norm_eps=float(config.get(family.eps, 1e-6)),
        rope_theta=theta,
        **rotation,
        sliding_window=window,
        tied=bool(config.get("tie_word_embeddings", False)),
        experts=_hf_experts(family, config),
        options=options,
        **{name: value for each in (family.options, *biases) for name, value in each.items()},
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


def rotated_dim(head_dim: int) -> int:
    """`head_dim`. Raises ValueError for one whose frequencies no list can hold."""
    if head_dim > _MOST_DIM:
        raise ValueError(f"no model has heads of {head_dim} numbers")
    return head_dim


def plausible(shapes: Shapes) -> Shapes:
    """`shapes`. Raises ValueError for impossible numbers."""
    counts = {name: getattr(shapes, name) for name in _COUNTS}
    fit = min(counts.values()) > 0 and shapes.layers <= MOST_LAYERS
    if not fit or shapes.heads % shapes.kv_heads or shapes.head_dim % 2:
        raise ValueError(f"no model has these numbers: {counts}")
    return shapes


def _hf_windows(family: Family, config: Mapping[str, Any]) -> tuple[int, ...]:
    """The attention window of each layer in tokens, 0 without one; without a window in the model, none.
    Raises SetupError for other types of layers, and for those of which the family knows nothing."""
    kinds = config.get("layer_types") or ()
    if not {*kinds} <= {"full_attention", "sliding_attention"}:
        raise refuse(f"attention of the types {sorted({*kinds})}")
    window, layers = int(config.get("sliding_window") or 0), int(config["num_hidden_layers"])
    if family.window_switch and not config.get("use_sliding_window"):
        window = 0
    if "sliding_attention" in kinds and not window:
        raise refuse("sliding attention (layer_types) without a sliding_window")
    if kinds and len(kinds) != layers:
        raise ValueError(f"layer_types has {len(kinds)} types for {layers} layers")
    if not window:
        return ()
    if family.full_each:
        return tuple(window * windowed for windowed in layer_kinds(config, family.full_each))
    if "max_window_layers" in family.defaults:
        first = int(config["max_window_layers"])
        return tuple(
            window * (kinds[i] == "sliding_attention" if kinds else i >= first) for i in range(layers)
        )
    if "full_attention" in kinds and family.windows and not family.window_switch:
        raise refuse("full attention (layer_types) beside a sliding_window in such a model")
    return (window,) * layers


def _local_rope(
    local: Mapping[str, Any], config: Mapping[str, Any], head_dim: int
) -> tuple[float, tuple[float, ...]]:
    """Theta and factors of the layers with a window. Raises SetupError for a rotation with a gain."""
    theta = float(local.get("rope_theta") or config.get("rope_theta") or 10000.0)
    fields = rope_fields(local, theta, head_dim, int(config.get("max_position_embeddings", 2048)))
    if rope_type(local) not in ("default", "linear", "llama3"):
        raise refuse(f"rope scaling {rope_type(local)!r} in layers with a sliding window")
    return theta, fields.get("rope_factors", ())


def _hf_experts(family: Family, config: Mapping[str, Any]) -> ExpertShapes | None:
    if family.experts is None:
        return None
    step, dense = int(config.get("decoder_sparse_step", 1)), config.get("mlp_only_layers") or ()
    dense = dense or range(int(config.get("first_k_dense_replace", 0)))
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    return ExpertShapes(
        count=int(config[next((name for name in names if name in config), names[1])]),
        per_token=int(config["num_experts_per_tok"]),
        width=int(config[family.experts.width]),
        renormalise=bool(config.get("norm_topk_prob", False)),
        dense_layers=tuple(
            layer for layer in range(int(config["num_hidden_layers"])) if layer in dense or (layer + 1) % step
        ),
    )


_BY_KIND = {"full_attention", "sliding_attention"}  # of layers
_PARTIAL, ORIGINAL = "partial_rotary_factor", "original_max_position_embeddings"


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
    original = _positive(rope, ORIGINAL)
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


def hf_rope(
    config: Mapping[str, Any], *, own_local: bool = False
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """The rope settings of a config.json, with two that may stand beside them: a partial rotation, if they
    have none, and the original context, which counts first (as in transformers). Then those of layers with a
    window, if these have their own; `own_local`: they always do. Raises SetupError for rope_parameters
    of all layers then, which transformers leaves out."""
    scaling, given = config.get("rope_scaling") or {}, dict(config.get("rope_parameters") or {})
    local: dict[str, Any] | None = None
    if _BY_KIND & given.keys():
        local = dict(given.get("sliding_attention") or {})
        given = dict(given.get("full_attention") or {})
    elif own_local:
        if given:
            raise SetupError(
                f"rope_parameters for all layers, {shown(given)}, are not supported in such a model: put "
                "them under full_attention, those of layers with a window under sliding_attention"
            )
        local = {}
    if local is not None and "rope_local_base_freq" in config:
        local.setdefault("rope_theta", config["rope_local_base_freq"])
    given = {**scaling, **given}
    if _PARTIAL in config:
        given.setdefault(_PARTIAL, config[_PARTIAL])
    if ORIGINAL in config:
        given[ORIGINAL] = config[ORIGINAL]
    return given, local


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
            f"beta_fast, beta_slow and {ORIGINAL} of the rope settings leave no pair to interpolate; fetch "
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


_READ = frozenset((
    "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
    "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings",
    "rms_norm_eps", "tie_word_embeddings", "rope_theta", "rope_parameters", "rope_scaling",
    "sliding_window", "use_sliding_window", "max_window_layers", "layer_types",
))  # fmt: skip
HARMLESS = frozenset((
    # names and versions
    "_name_or_path", "name_or_path", "_commit_hash", "transformers_version", "transformers.js_config",
    "tokenizer_class", "is_llama_config", "unsloth_fixed", "unsloth_version", "finetuning_task",
    # storage, and settings of other programs
    "dtype", "torch_dtype", "use_cache", "use_bfloat16", "torchscript", "return_dict", "output_attentions",
    "output_hidden_states", "output_router_logits", "chunk_size_feed_forward", "pretraining_tp",
    "attn_implementation", "_attn_implementation", "_attn_implementation_autoset",
    "_experts_implementation", "use_flash_attention_2", "gradient_checkpointing", "is_decoder",
    "max_sequence_length", "model_max_length", "tokenizer_model_max_length", "tokenizer_padding_side",
    # training
    "initializer_range", "attention_dropout", "hidden_dropout", "attn_pdrop", "resid_pdrop", "embd_pdrop",
    "classifier_dropout", "router_aux_loss_coef", "router_jitter_noise", "neftune_noise_alpha",
    # unused heads; their tensors are refused by name
    "num_labels", "id2label", "label2id", "problem_type", "task_specific_params", "tf_legacy_loss",
    # generation: read elsewhere, or set by requests
    *(each.field for each in PARAMETERS),
    "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "sep_token_id", "cls_token_id",
    "mask_token_id", "decoder_start_token_id", "prefix", "max_length", "min_length", "max_new_tokens",
    "do_sample", "early_stopping", "num_beams", "num_beam_groups", "diversity_penalty", "typical_p",
    "length_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids",
    "num_return_sequences", "return_dict_in_generate", "output_scores", "forced_bos_token_id",
    "forced_eos_token_id", "remove_invalid_values", "exponential_decay_length_penalty", "suppress_tokens",
    "begin_suppress_tokens",
))  # fmt: skip
_ONE_VALUE: Mapping[str, object] = {
    "attention_bias": False,
    "mlp_bias": False,
    "partial_rotary_factor": 1.0,
    "rope_interleaved": False,
    "use_mrope": False,
    "full_attn_mod": 1,
    "interpolate_factor": 1,
    "lm_head_bias": False,
    "is_encoder_decoder": False,
    "add_cross_attention": False,
    "tie_encoder_decoder": False,
    "pruned_heads": {},
}
_ROPE = frozenset(("type", "rope_type", "rope_theta", "partial_rotary_factor", "factor",
                   "original_max_position_embeddings"))  # fmt: skip
_SCALINGS = ("default", "linear", "llama3", "yarn", "longrope")
_ROPE_OF_TYPE = {
    "llama3": frozenset(("low_freq_factor", "high_freq_factor")),
    "longrope": frozenset(("attention_factor", "long_factor", "short_factor")),
    "yarn": frozenset((
        "attention_factor", "beta_fast", "beta_slow", "finetuned", "mscale", "mscale_all_dim", "truncate",
    )),
}  # fmt: skip


def check_hf(config: Mapping[str, Any], kind: str, family: Family) -> None:
    """Raises SetupError for the first key of a config.json that may change what a model of this kind
    computes."""
    given = {key: value for key, value in config.items() if value is not None}
    scheme_of(given)
    for key in ("compression_config", "quantization"):
        if key in given:
            raise SetupError(
                f"{key} in config.json ({shown(given[key])}): folders quantised so are not supported; use "
                "the unquantised model or a GGUF file of it"
            )
    act = str(given.get(family.act, family.defaults.get(family.act, "silu")))
    if act not in family.acts:
        usual = ", ".join(map(repr, family.acts))
        raise SetupError(f"activation {act!r} is not supported; use a model with {usual}")
    plain = kind.replace("_", "")
    for name in given.get("architectures", ()):
        named = (f"{plain}forcausallm", f"{plain}model", family.architecture)  # the second: for vectors
        if str(name).lower() not in named:
            raise SetupError(
                f"config.json has model_type {kind!r}, but architectures {shown(name)}, which is not "
                "supported; use a model that generates text in the plain architecture"
            )
    parameters = given.get("rope_parameters", {})
    by_kind = [each or {} for key, each in parameters.items() if key in _BY_KIND and family.full_each]
    for rope in by_kind or [{**given.get("rope_scaling", {}), **parameters}]:
        if "partial_rotary_factor" not in family.reads:
            only(rope, "partial_rotary_factor", 1.0, "config.json")
        known_rope = _ROPE | _ROPE_OF_TYPE.get(rope_type(rope), frozenset())
        for key in sorted(rope.keys() - known_rope):
            if rope[key] is not None:
                raise unknown_key(f"{key} of the rope settings", rope[key], "config.json")
    known = _READ | family.reads | HARMLESS
    known |= {"architectures", "quantization_config"}
    one_value = {**_ONE_VALUE, **family.fixed}
    for key, value in given.items():
        if key in one_value and key not in family.reads:
            only(given, key, one_value[key], "config.json")
        elif key not in known:
            raise unknown_key(key, value, "config.json")


def rope_type(rope: Mapping[str, Any]) -> str:
    """How rotation frequencies are scaled. Raises SetupError for an unsupported type."""
    kind = str(rope.get("rope_type") or rope.get("type") or "default")
    kind = "longrope" if kind == "su" else kind  # its first name
    if kind not in _SCALINGS:
        raise SetupError(
            f"rope scaling {kind!r} is not supported; supported are {', '.join(_SCALINGS)}. Some models "
            "are meant to work without it up to their original context: see the model's page"
        )
    return kind


def shown(value: object) -> str:
    """A value of a configuration for an error, cut to 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else text[:80] + "…"


def only(given: Mapping[str, Any], key: str, value: object, where: str) -> None:
    if given.get(key) is not None and given[key] != value:
        raise SetupError(
            f"{key} = {shown(given[key])} in {where} is not supported, only {value!r}; use another model"
        )


def unknown_key(key: str, value: object, where: str) -> SetupError:
    how = "delete it from config.json"
    if where != "config.json":
        how = f"write a copy without it: gguf-new-metadata --remove-metadata {key} OLD NEW"
    return SetupError(
        f"{key} = {shown(value)} in {where} is not known here and may change what the model computes: "
        f"not supported; if its authors document that the key changes nothing, {how}"
    )
