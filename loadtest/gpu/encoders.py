"""Vectors of texts by the engine of encoders and by transformers, on one device, in turn.

    python -m loadtest.gpu.encoders [--device cuda] [--dtype f32 bf16 int8] [--sizes minilm] > encoders.txt

Random models in the sizes of MiniLM, BERT base and BERT large. transformers computes each batch padded to its
longest text, as sentence-transformers does, in the same dtype (int8: bf16), with as many threads. Each figure
is the least of `--rounds` times in ms; without tokenizers, services and queue.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from services.executor.checkpoint.loader import TorchOptions
from services.executor.encoder.engine import build
from shared.processes import usable_threads

SIZES: dict[str, tuple[int, int, int, int]] = {  # hidden, layers, heads, intermediate
    "minilm": (384, 6, 12, 1536),
    "base": (768, 12, 12, 3072),
    "large": (1024, 24, 16, 4096),
}
KEYS = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
VOCAB = 30_522


def batches(device: str) -> dict[str, list[int]]:
    """The lengths of the texts in each batch."""
    many = 64 if device == "cuda" else 16
    choices = (8, 20, 40, 90, 200, 400)
    mixed = [random.Random(i).choice(choices) for i in range(many)]
    return {
        "1 x 20": [20],
        f"{many} x 128": [128] * many,
        f"{many} of 8 to 400": mixed,
        f"{many // 4} x 512": [512] * (many // 4),
    }


def least_ms(run: Callable[[], Any], rounds: int) -> float:
    times = []
    for _ in range(rounds + 2):
        began = time.perf_counter()
        run()
        times.append(1e3 * (time.perf_counter() - began))
    return min(times[2:])


def measure(size: str, dtype: str, device: str, rounds: int) -> None:
    shape: dict[str, Any] = dict(zip(KEYS, SIZES[size], strict=True))
    peer = transformers.BertModel(transformers.BertConfig(vocab_size=VOCAB, **shape)).eval()
    with tempfile.TemporaryDirectory() as folder:
        peer.save_pretrained(folder)
        options = TorchOptions(model_path=Path(folder), model_name=size, device=device, dtype=dtype)
        engine = build(options)
    engine.warm_up()
    peer = peer.to(device, torch.float32 if dtype == "f32" else torch.bfloat16)
    for name, lengths in batches(device).items():
        texts = [torch.randint(5, VOCAB, (length,)).tolist() for length in lengths]
        ids = torch.zeros(len(texts), max(lengths), dtype=torch.int64)
        mask = ids.clone()
        for row, text in enumerate(texts):
            ids[row, : len(text)], mask[row, : len(text)] = torch.tensor(text), 1

        def padded(ids: torch.Tensor = ids, mask: torch.Tensor = mask) -> torch.Tensor:
            at = mask.to(device)
            found = peer(ids.to(device), attention_mask=at).last_hidden_state
            pooled: torch.Tensor = (found * at[..., None]).sum(1) / at.sum(1, keepdim=True)
            return pooled.float().cpu()

        with torch.inference_mode():
            ours = least_ms(lambda texts=texts: engine.vectors(texts).cpu(), rounds)  # type: ignore[misc]  # mypy infers no type of a default
            theirs = least_ms(padded, rounds)
        rate = sum(lengths) / ours * 1e3
        print(
            f"{size:7} {dtype:5} {name:15} {ours:8.2f} ms  transformers {theirs:8.2f}  {ours / theirs:.2f}  "
            f"{rate:11,.0f} tokens/s",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", nargs="+", default=["f32", "bf16"])
    parser.add_argument("--sizes", nargs="+", default=[*SIZES], choices=[*SIZES])
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args()
    torch.manual_seed(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    name = torch.cuda.get_device_name() if given.device == "cuda" else f"{usable_threads(1)} threads"
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {name}")
    for size in given.sizes:
        for dtype in given.dtype:
            measure(size, dtype, given.device, given.rounds)


if __name__ == "__main__":
    main()
