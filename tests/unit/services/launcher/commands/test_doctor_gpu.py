"""What `headrace doctor` prints about the GPUs of an executor, with answers of torch for one H200."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton

from services.executor.cuda import engine
from services.launcher.commands import doctor
from shared.config import Loaded, Settings
from shared.errors import SetupError

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 2,
    "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 1000,
    "rms_norm_eps": 1e-5, "rope_theta": 5e5, "max_position_embeddings": 8192, "torch_dtype": "bfloat16",
}  # fmt: skip


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with one H200."""
    properties = SimpleNamespace(name="NVIDIA H200", major=9, minor=0)
    answers: dict[str, Callable[..., Any]] = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "get_device_properties": lambda index: properties,
        "get_device_name": lambda index: properties.name,
        "mem_get_info": lambda index: (100 << 30, 140 << 30),
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(triton, "__version__", "3.7.1")
    version = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata, "version", lambda name: "3.7.1" if name == "triton" else version(name)
    )
    done = subprocess.CompletedProcess([], 0, "580.159.04\n", "")
    monkeypatch.setattr(subprocess, "run", lambda command, **how: done)
    monkeypatch.setattr(engine, "check_compiler", lambda: None)


def findings(folder: Path, **fields: object) -> list[tuple[str, str, str]]:
    (folder / "config.json").write_text(json.dumps(LLAMA))
    settings = Settings.model_validate({"model": str(folder), "backend": "dummy", **fields})
    loaded = Loaded(settings, {}, ())
    found = [*doctor._gpus(loaded), *doctor._gpu_kernels(loaded)]
    return [(each.level, each.what, each.mend) for each in found]


@pytest.mark.usefixtures("h200")
def test_doctor_names_gpu_driver_memory_releases_and_kernels(tmp_path: Path) -> None:
    assert findings(tmp_path) == [
        ("ok", "GPU 0: NVIDIA H200 (9.0), 140 GiB, 100 GiB free, driver 580.159.04", ""),
        ("ok", "torch for CUDA 13.0, triton 3.7.1", ""),
        ("ok", "attention of prompts: Gluon, K and V by TMA", ""),
        ("ok", "attention of decodes: Triton", ""),
        ("ok", "products: Triton for few rows, else the library's", ""),
        ("ok", "sampling: Triton", ""),
    ]


@pytest.mark.usefixtures("h200")
def test_doctor_names_what_would_be_faster(tmp_path: Path) -> None:
    slow = findings(tmp_path, block_tokens=256, dtype="auto/fp8")[2]
    assert slow == (
        "warn",
        "attention of prompts: Triton, any GPU",
        "faster: Gluon, K and V by TMA: it takes blocks of 8, 16, 32, 64 or 128 tokens, and --block-tokens "
        "is 256",
    )


@pytest.mark.usefixtures("h200")
def test_doctor_fails_without_the_gpus_or_the_compiler(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def missing() -> None:
        raise SetupError("install gcc")

    monkeypatch.setattr(engine, "check_compiler", missing)
    assert findings(tmp_path)[2:] == [("fail", "compiler", "install gcc")]
    too_few = "there are 1 GPUs, too few for rank 1: use fewer ranks"
    assert findings(tmp_path, device="cuda/tp2")[0] == ("fail", "GPU", too_few)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert [level for level, *_ in findings(tmp_path, device="cuda")] == ["fail"]
    for fields in ({}, {"device": "cpu"}, {"backend": "sim"}):
        assert findings(tmp_path, **fields) == []
