"""Compares the engine's logits in bf16 with those of transformers.

Random small models of six kinds; every position of a sequence, through the decode path (one token at a
time) and the prefill path (chunks). The reference is transformers in float32, beside transformers' own bf16.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from loadtest.eval.divergence import kl_divergence, log_probs, same_top
from loadtest.eval.logits import by_steps
from services.executor.checkpoint.loader import TorchOptions
from services.executor.cuda.engine import CudaBackend, build

VOCAB = 4096
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}  # fmt: skip
_EXPERTS = {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 512, "norm_topk_prob": True}
_FACTORS = {"short_factor": [1.0] * 48, "long_factor": [1 + i * i / 72 for i in range(48)]}
_MAKE = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**_SIZES)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**_SIZES)),
    "qwen3_moe": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**_SIZES, **_EXPERTS)),
    "llama_bias": lambda: LlamaForCausalLM(LlamaConfig(**_SIZES, attention_bias=True)),
    "llama_yarn": lambda: LlamaForCausalLM(LlamaConfig(**_SIZES, rope_parameters=_rope("yarn", factor=32.0))),
    "phi3_longrope": lambda: Phi3ForCausalLM(
        Phi3Config(
            **_SIZES, pad_token_id=0, eos_token_id=0, partial_rotary_factor=0.75,
            original_max_position_embeddings=_ORIGINAL, rope_parameters=_rope("longrope", **_FACTORS),
        )
    ),
}  # fmt: skip
TOKENS, CHUNK = 300, 64
_ORIGINAL = 128  # positions before a rotation is stretched: TOKENS go beyond them


def _rope(kind: str, **options: Any) -> dict[str, Any]:
    return {
        "rope_type": kind, "rope_theta": 10000.0, "original_max_position_embeddings": _ORIGINAL, **options,
    }  # fmt: skip


def exact() -> list[dict[str, Any]]:
    """KL divergence and agreement of the likeliest token, by model and path."""
    return [found for kind in _MAKE for found in compare(kind)]


def small_model(kind: str) -> PreTrainedModel:
    """A random model of 8 layers in float32: a kind of `_MAKE`."""
    torch.manual_seed(3)
    model = _MAKE[kind]().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            parameter.copy_(1 + 0.2 * noise if "norm" in name else 0.04 * noise)
    return model


def compare(kind: str, *kept: str, dtype: str = "bf16") -> list[dict[str, Any]]:
    """The rows of one model, beside transformers' own. `kept`: each KV dtype to try; none: auto alone."""
    model = small_model(kind)
    tokens = torch.randint(0, VOCAB, (TOKENS,), generator=torch.Generator().manual_seed(5)).tolist()
    with tempfile.TemporaryDirectory() as folder:
        model.to(torch.bfloat16).save_pretrained(folder)
        engines = {each: build(_options(kind, Path(folder), each, dtype)) for each in kept or ("auto",)}
        same = type(model)  # loaded anew: to() would round its rotation frequencies, too
        wanted = _by_transformers(same.from_pretrained(folder, dtype=torch.float32), tokens)
        own = _by_transformers(same.from_pretrained(folder, dtype=torch.bfloat16), tokens)
    at = list(range(CHUNK - 1, TOKENS, CHUNK))
    found = [_row(kind, "transformers bf16", own, wanted)]
    found.append(_row(kind, "transformers bf16, same as prefill", own[at], wanted[at]))
    for name, backend in engines.items():
        behind = ", weights in fp8" * (dtype == "fp8") + ("" if name == "auto" else f", KV in {name}")
        backend.warm_up()
        found.append(_row(kind, "decode" + behind, _by_steps(backend, tokens, 1), wanted))
        found.append(_row(kind, "prefill" + behind, _by_steps(backend, tokens, CHUNK)[: len(at)], wanted[at]))
        backend.close()
    return found


def kept_and_dequantised(kind: str, quantise: Callable[[Path, Path], None]) -> list[dict[str, Any]]:
    """The rows of one model in 4 bits, kept so and dequantised to bf16. `quantise` writes the model of the
    first folder in 4 bits to the second, and what its numbers stand for to the first."""
    model = small_model(kind)
    tokens = torch.randint(0, VOCAB, (TOKENS,), generator=torch.Generator().manual_seed(5)).tolist()
    at, rows = list(range(CHUNK - 1, TOKENS, CHUNK)), []
    with tempfile.TemporaryDirectory() as plain, tempfile.TemporaryDirectory() as packed:
        model.to(torch.bfloat16).save_pretrained(plain)
        quantise(Path(plain), Path(packed))
        wanted = _by_transformers(type(model).from_pretrained(plain, dtype=torch.float32), tokens)
        for dtype in ("int4", "bf16"):
            backend = build(_options(kind, Path(packed), "auto", dtype))
            backend.warm_up()
            rows.append(_row(kind, f"{backend.info.dtype}, decode", _by_steps(backend, tokens, 1), wanted))
            chunks = _by_steps(backend, tokens, CHUNK)[: len(at)]
            rows.append(_row(kind, f"{backend.info.dtype}, prefill", chunks, wanted[at]))
            backend.close()
    return rows


def _options(kind: str, folder: Path, kept: str, dtype: str) -> TorchOptions:
    return TorchOptions(
        model_path=folder, model_name=kind, device="cuda", dtype=dtype, kv_dtype=kept, blocks=200, slots=8,
        max_step_tokens=256,
    )  # fmt: skip


@torch.no_grad()
def _by_transformers(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    logits = model.to("cuda")(torch.tensor([tokens], device="cuda")).logits[0]
    return log_probs(logits).cpu()


def _by_steps(backend: CudaBackend, tokens: list[int], each: int) -> torch.Tensor:
    """Log probabilities after each step of so many tokens: `[steps, vocab]`."""
    return torch.cat([log_probs(logits).cpu() for logits in by_steps(backend, [tokens], each, each)])


def _row(kind: str, path: str, found: torch.Tensor, wanted: torch.Tensor) -> dict[str, Any]:
    kl, top = kl_divergence(wanted, found), same_top(wanted, found).mean()
    row = {
        "model": kind,
        "path": path,
        "kl_mean": kl.mean().item(),
        "kl_max": kl.max().item(),
        "top1": top.item(),
    }
    print("exact", row, flush=True)
    return row
