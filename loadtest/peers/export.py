"""Exports the dequantised weights of a model as a Hugging Face folder, for servers that do not read GGUF.

    python -m loadtest.peers.export ~/peers/smollm2-hf

In bf16, so that every server computes with the same numbers. For models of the Llama kind without biases,
norms of q and k, or scaled rotations.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shared.config import load
from shared.errors import SetupError
from shared.vocab.files import ModelFiles, resolve
from shared.vocab.gguf import gguf_parts
from shared.vocab.vocabulary import load_vocabulary

if TYPE_CHECKING:
    from torch import Tensor

    from services.executor.checkpoint.weights import Weights
    from services.executor.model.description import Shapes


def export(files: ModelFiles, folder: Path) -> None:
    """Write config.json, model.safetensors and the tokenizer. Raises SetupError for another kind of model."""
    import torch
    from safetensors.torch import save_file

    from services.executor.quantised.gguf import load_gguf

    shapes, weights = load_gguf(files.path, torch.bfloat16, torch.device("cpu"))
    vocabulary = load_vocabulary(files)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(_named(shapes, weights), folder / "model.safetensors", metadata={"format": "pt"})
    ends = {"eos_token_id": list(vocabulary.eos_ids)}
    (folder / "config.json").write_text(json.dumps(_config(shapes) | ends, indent=1))
    gguf_parts(files.path).build({}).save(str(folder / "tokenizer.json"))
    facts = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": vocabulary.eos_token,
        "bos_token": vocabulary.bos_token,
        "chat_template": vocabulary.chat_template,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(facts, indent=1))


def _config(shapes: Shapes) -> dict[str, Any]:
    if shapes.qkv_bias or shapes.qk_norm or shapes.rope_factors:
        raise SetupError(f"a {shapes.architecture} model cannot be exported: only the plain Llama kind")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shapes.vocab,
        "hidden_size": shapes.hidden,
        "intermediate_size": shapes.intermediate,
        "num_hidden_layers": shapes.layers,
        "num_attention_heads": shapes.heads,
        "num_key_value_heads": shapes.kv_heads,
        "head_dim": shapes.head_dim,
        "max_position_embeddings": shapes.max_context,
        "rms_norm_eps": shapes.norm_eps,
        "rope_theta": shapes.rope_theta,
        "tie_word_embeddings": shapes.tied,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
    }


def _named(shapes: Shapes, weights: Weights) -> dict[str, Tensor]:
    """Every tensor by its name in a Hugging Face file; what is joined here is apart there."""
    from torch import split

    queries, keys = shapes.heads * shapes.head_dim, shapes.kv_heads * shapes.head_dim
    named = {"model.embed_tokens.weight": weights.embedding.values, "model.norm.weight": weights.norm}
    if not shapes.tied:
        named["lm_head.weight"] = weights.head.values
    for i, layer in enumerate(weights.layers):
        q, k, v = split(layer["qkv"].values, [queries, keys, keys])
        gate, up = layer["gate_up"].values.chunk(2)
        parts = {
            "input_layernorm": layer["attention_norm"].values,
            "post_attention_layernorm": layer["mlp_norm"].values,
            **{"self_attn.q_proj": q, "self_attn.k_proj": k, "self_attn.v_proj": v},
            **{"self_attn.o_proj": layer["out"].values, "mlp.down_proj": layer["down"].values},
            **{"mlp.gate_proj": gate, "mlp.up_proj": up},
        }
        named |= {f"model.layers.{i}.{name}.weight": part.contiguous() for name, part in parts.items()}
    return named


def main() -> None:
    """Export the model that the settings name."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path)
    given = parser.parse_args()
    settings = load().settings
    export(resolve(settings.model, settings.cache_dir), given.folder.expanduser())


if __name__ == "__main__":
    main()
