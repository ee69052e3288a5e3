"""llama.cpp as an engine of `headrace eval kl`: `llama.cpp,model=FILE.gguf`, beside ours on the same tokens.

It needs the package llama-cpp-python, of another build with LLAMA_CPP_LIB_PATH (docs/benchmarks/peers.md).
Settings are those of llama-server: flash attention, K and V in float16.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shared.errors import SetupError
from shared.processes import usable_threads


@dataclass(frozen=True, slots=True)
class Info:
    """The fields of BackendInfo that it has."""

    model: str
    backend: str = "llama.cpp"
    dtype: str = "as stored"
    fingerprint: str = ""


class LlamaCpp:
    """A GGUF file in llama.cpp, with room for a window of `context` tokens."""

    def __init__(self, path: Path, context: int) -> None:
        """Load it. Raises SetupError without the package or for a file that it does not load."""
        try:
            from llama_cpp import Llama
        except (ImportError, OSError) as error:
            raise SetupError(f"llama.cpp needs the package llama-cpp-python: {error}") from None
        threads = {"n_threads": usable_threads(), "n_threads_batch": usable_threads()}
        sizes = {"n_ctx": context, "n_batch": context, "n_ubatch": context}
        try:
            self._model: Any = Llama(
                str(path), **sizes, **threads, logits_all=True, flash_attn=True, verbose=False
            )
        except ValueError as error:
            raise SetupError(f"llama.cpp does not load {path}: {error}") from None
        self.info = Info(path.name)

    def logits(self, tokens: Sequence[int]) -> Tensor:
        """`[len(tokens), vocab]` float32, of a prompt in one batch."""
        self._model.reset()
        self._model.eval(tokens)
        return torch.from_numpy(self._model.scores[: len(tokens)].copy())

    def close(self) -> None:
        """Free its memory."""
        self._model.close()
