"""A random Llama, quick to run. Every token depends on all before it: wrong KV shows at once."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from support.text_models import write_hf_folder

VOCAB = 460  # of the vocabulary that is trained for the text tests
SHAPE = {
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
HEAD_DIM, KV_HEADS, LAYERS, HIDDEN = 64, 2, 8, 256
BLOCK_BYTES = 16 * LAYERS * 2 * KV_HEADS * HEAD_DIM * 4  # of 16 tokens, f32


def write_small_llama(folder: Path, hidden: int = HIDDEN, layers: int = LAYERS, seed: int = 5) -> Path:
    """A Hugging Face folder with it; the same weights each time."""
    write_hf_folder(folder)
    random = torch.Generator().manual_seed(seed)
    inner, kv = 2 * hidden, KV_HEADS * hidden // 4

    def matrix(out: int, into: int) -> torch.Tensor:
        return torch.randn(out, into, generator=random) * (2.0 / into**0.5)

    tensors = {
        "model.embed_tokens.weight": torch.randn(VOCAB, hidden, generator=random),
        "lm_head.weight": matrix(VOCAB, hidden),
        "model.norm.weight": torch.ones(hidden),
    }
    for layer in range(layers):
        tensors |= {
            f"model.layers.{layer}.{name}.weight": weight
            for name, weight in (
                ("input_layernorm", torch.ones(hidden)),
                ("post_attention_layernorm", torch.ones(hidden)),
                ("self_attn.q_proj", matrix(hidden, hidden)),
                ("self_attn.k_proj", matrix(kv, hidden)),
                ("self_attn.v_proj", matrix(kv, hidden)),
                ("self_attn.o_proj", matrix(hidden, hidden)),
                ("mlp.gate_proj", matrix(inner, hidden)),
                ("mlp.up_proj", matrix(inner, hidden)),
                ("mlp.down_proj", matrix(hidden, inner)),
            )
        }
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers}
    tensors = {name: tensor.bfloat16().float() for name, tensor in tensors.items()}  # the same in each dtype
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(SHAPE | sizes))
    return folder
