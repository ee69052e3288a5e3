"""The memory of a model by its tensors' shapes, against numbers counted by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.small_llama import write_small_llama

from services.launcher.cli import main
from services.launcher.commands.doctor import EXECUTOR_BYTES, OTHERS_BYTES, Sizing, lines, sizing
from shared.config import Settings
from shared.errors import BadRequest


def settings(model: Path, **fields: object) -> Settings:
    return Settings.model_validate({"model": str(model), "device": "cpu", **fields})


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_small_llama(tmp_path / "small")


def numbers_of(model: Path) -> int:
    """By the size of the file, which has float32."""
    (file,) = model.glob("*.safetensors")
    header = int.from_bytes(file.read_bytes()[:8], "little")
    return (file.stat().st_size - 8 - header) // 4


@pytest.mark.parametrize(
    ("dtype", "weight_bytes", "kv_bytes"), [("f32", 4, 4), ("bf16", 2, 2), ("int8", 1, 2), ("f32/fp8", 4, 1)]
)
def test_weights_and_kv_are_counted_by_the_dtype(
    model: Path, dtype: str, weight_bytes: int, kv_bytes: int
) -> None:
    config = json.loads((model / "config.json").read_text())
    found = sizing(settings(model, dtype=dtype), 100, 3)
    assert found.weights_bytes == numbers_of(model) * weight_bytes
    head = config["hidden_size"] // config["num_attention_heads"]
    of_token = config["num_hidden_layers"] * 2 * config["num_key_value_heads"] * head
    assert found.kv_token_bytes == of_token * kv_bytes
    assert found.kv_blocks == 3 * 7, "100 tokens are 7 blocks of 16"
    assert found.kv_bytes == 22 * 16 * found.kv_token_bytes


def test_numbers_out_of_range_are_refused(model: Path) -> None:
    for context, users in ((-1, 1), (10, 0), (10**9, 1)):
        with pytest.raises(BadRequest):
            sizing(settings(model), context, users)


def test_executors_share_the_users_and_each_has_the_weights() -> None:
    found = Sizing(
        dtype="packed", weights_bytes=98_000_000, kv_token_bytes=23_040, users=8, context=2_048,
        max_context=8_192, block_tokens=16, executors=2,
    )  # fmt: skip
    assert found.kv_blocks == 4 * 128
    kv = 513 * 16 * 23_040
    assert found.total_bytes == 2 * (98_000_000 + kv + EXECUTOR_BYTES) + OTHERS_BYTES
    assert lines(found, "m", 10**10) == [
        "m, 8 users at once with 2,048 tokens each",
        "  weights      0.10 GB  in packed, of each of 2 executors",
        "  KV           0.19 GB  23,040 bytes a token: --kv-blocks 512, of each of 2 executors",
        "  processes    1.05 GB",
        "  all          1.62 GB  this machine has 10.00 GB free",
    ]


def test_memory_of_the_host_is_not_compared_on_a_gpu(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_DEVICE", "cuda")
    monkeypatch.setattr("services.launcher.commands.doctor.available_bytes", lambda: 0)
    assert main(["doctor", "--model", str(model), "--users", "2"]) == 0
    output = capsys.readouterr().out
    assert "in bf16" in output
    assert output.endswith("weights and KV on GPUs\n")


def test_the_command_prints_it_and_fails_without_the_memory(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for free, status in ((10**12, 0), (10**6, 1)):
        monkeypatch.setattr("services.launcher.commands.doctor.available_bytes", lambda free=free: free)
        assert main(["doctor", "--model", str(model), "--users", "2"]) == status
        first, *_, last = capsys.readouterr().out.splitlines()
        assert first.startswith("small, 2 users at once with ")
        assert last.startswith("  all ")
