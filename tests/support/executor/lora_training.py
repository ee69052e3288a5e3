"""Trains an adapter in plain torch, on weights that the engine's own reader has loaded: no engine's operator
takes part. For tests that need an adapter with an effect that a reader sees."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from support.executor.peft_folders import save_adapter
from torch import Tensor

from services.executor.checkpoint.weights import format_of, plain_part, whole_model

MODULES = {
    "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "out": "self_attn.o_proj",
    "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj",
}  # fmt: skip


class Trained:
    """A Llama in float32 with an A and a B beside each matrix of its layers."""

    def __init__(self, path: Path, rank: int, alpha: float) -> None:
        cpu = torch.device("cpu")
        shapes, weights = format_of(path).load(path, torch.float32, cpu, whole_model, plain_part)
        self.shapes, self.scale, self.rank, self.alpha = shapes, alpha / rank, rank, alpha
        self.embedding, self.norm, self.head = weights.embedding.values, weights.norm, weights.head.values
        self.layers = [{name: each.values for name, each in layer.items()} for layer in weights.layers]
        random = torch.Generator().manual_seed(11)
        heads, kv = shapes.heads * shapes.head_dim, shapes.kv_heads * shapes.head_dim
        hidden, wide = shapes.hidden, shapes.intermediate
        self.sizes = {
            "q": (heads, hidden), "k": (kv, hidden), "v": (kv, hidden), "out": (hidden, heads),
            "gate": (wide, hidden), "up": (wide, hidden), "down": (hidden, wide),
        }  # fmt: skip
        self.matrices = {
            (layer, name): (
                torch.randn(rank, width, generator=random).div_(width**0.5).requires_grad_(),
                torch.zeros(height, rank, requires_grad=True),
            )
            for layer in range(shapes.layers)
            for name, (height, width) in self.sizes.items()
        }

    def train(self, prompt: Sequence[int], answer: Sequence[int], steps: int, rate: float = 4e-3) -> float:
        """Learn the answer to a prompt; the last loss."""
        ids = torch.tensor([*prompt, *answer])
        parameters = [matrix for pair in self.matrices.values() for matrix in pair]
        adam, loss = torch.optim.Adam(parameters, lr=rate), torch.zeros(())
        for _ in range(steps):
            logits = self.logits(ids[:-1])[len(prompt) - 1 :]
            loss = F.cross_entropy(logits, ids[len(prompt) :])
            adam.zero_grad()
            loss.backward()
            adam.step()
        return loss.item()

    def logits(self, ids: Tensor) -> Tensor:
        """`[tokens, vocab]`."""
        x, dim = self.embedding[ids], self.shapes.head_dim
        angles = torch.arange(len(ids))[:, None] * torch.tensor(self.shapes.inverse_frequencies())
        cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)

        def rotated(t: Tensor) -> Tensor:  # [heads, tokens, dim]
            low, high = t.chunk(2, -1)
            return t * cos + torch.cat((-high, low), -1) * sin

        for layer, weights in enumerate(self.layers):
            normed = self._norm(x, weights["attention_norm"])
            begins = [self.sizes[name][0] for name in ("q", "k", "v")]
            q, k, v = (
                self._product(layer, name, normed, matrix).view(len(ids), -1, dim).transpose(0, 1)
                for name, matrix in zip("qkv", weights["qkv"].split(begins), strict=True)
            )
            group = self.shapes.heads // self.shapes.kv_heads
            k, v = rotated(k).repeat_interleave(group, 0), v.repeat_interleave(group, 0)
            mixed = F.scaled_dot_product_attention(rotated(q), k, v, is_causal=True)
            mixed = mixed.transpose(0, 1).reshape(len(ids), -1)
            x = x + self._product(layer, "out", mixed, weights["out"])
            normed = self._norm(x, weights["mlp_norm"])
            gate, up = weights["gate_up"].split(self.shapes.intermediate)
            gated = F.silu(self._product(layer, "gate", normed, gate))
            x = x + self._product(
                layer, "down", gated * self._product(layer, "up", normed, up), weights["down"]
            )
        return self._norm(x, self.norm) @ self.head.T

    def save(self, folder: Path) -> Path:
        """In PEFT's format."""
        tensors = {}
        for (layer, name), (a, b) in self.matrices.items():
            key = f"base_model.model.model.layers.{layer}.{MODULES[name]}"
            tensors[f"{key}.lora_A.weight"] = a.detach()
            tensors[f"{key}.lora_B.weight"] = b.detach()
        return save_adapter(folder, tensors, rank=self.rank, alpha=self.alpha)

    def _product(self, layer: int, name: str, x: Tensor, weight: Tensor) -> Tensor:
        a, b = self.matrices[layer, name]
        return x @ weight.T + self.scale * (x @ a.T) @ b.T

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.shapes.norm_eps) * weight
