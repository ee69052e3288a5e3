"""The default model's file for tests that need the real thing."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from services.executor.cpu.engine import TorchBackend, TorchOptions, build

_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


@dataclass(frozen=True)
class Case:
    """A prompt and the greedy answer of transformers in float32."""

    prompt: list[int]
    output: list[int]


def model_path() -> Path:
    """The file in the cache; a test without it fails, naming the command that fetches it."""
    cache = Path(os.environ.get("HEADRACE_CACHE_DIR") or "~/.cache/headrace").expanduser()
    path = cache / "models" / _FILE
    if not path.is_file():
        pytest.fail(f"{path} is missing; fetch it with `headrace pull`")
    return path


def default_engine(**options: Any) -> TorchBackend:
    """The default model on a CPU, small cache. One thread: quick too where other tests hold the cores."""
    chosen = {
        "dtype": "f32",
        "device": "cpu",
        "threads": 1,
        "blocks": 200,
        "slots": 20,
        "max_context": 512,
        **options,
    }
    return build(TorchOptions(model_path=model_path(), model_name="smollm2-135m-instruct", **chosen))


def greedy_cases() -> list[Case]:
    """The five reference prompts."""
    data = json.loads((Path(__file__).parents[1] / "data" / "smollm2_greedy.json").read_text())
    return [Case(case["prompt_ids"], case["output_ids"]) for case in data["cases"]]
