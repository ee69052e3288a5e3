"""Which kernels an engine runs by its device, its model and the release of Triton."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import triton

from services.executor.cuda.kernel_configs import (
    Choice,
    Computed,
    DeviceTuning,
    choices,
    device_tuning,
    tuning_for,
    with_tma,
)

H200 = Computed(device="NVIDIA H200", head_dim=128, block_tokens=16)


def test_kv_is_fetched_by_tma_where_the_kernel_takes_the_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    h200 = device_tuning("NVIDIA H200")
    assert with_tma(h200, 128, 16).prefill == h200.prefill_tma
    assert with_tma(device_tuning("NVIDIA H200", 4), 64, 128).prefill == h200.prefill_tma
    for head_dim, block_tokens in ((96, 16), (256, 16), (128, 24), (128, 256)):
        assert with_tma(h200, head_dim, block_tokens) == h200
    assert with_tma(DeviceTuning(), 128, 16) == DeviceTuning()
    assert not h200.prefill.tma  # of float32 and deterministic mode
    for release in ("3.6.0", "3.7.1"):
        monkeypatch.setattr(triton, "__version__", release)
        assert with_tma(h200, 128, 16).prefill.tma
    monkeypatch.setattr(triton, "__version__", "3.8.0")
    assert with_tma(h200, 128, 16) == h200


def test_choices_name_the_kernels_of_an_engine_with_nothing_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "__version__", "3.7.1")
    assert [str(choice) for choice in choices(H200)] == [
        "attention of prompts: Gluon, K and V by TMA",
        "attention of decodes: Triton",
        "products: Triton for few rows, else the library's",
        "sampling: Triton",
    ]


@pytest.mark.parametrize(
    ("facts", "release", "why"),
    [
        ({}, "3.8.0", "it is written for Triton 3.6 and 3.7, and 3.8.0 is installed"),
        ({"head_dim": 256}, "3.7.1", "it takes heads of 64 or 128, and the model's are 256 wide"),
        (
            {"block_tokens": 24},
            "3.6.0",
            "it takes blocks of 8, 16, 32, 64 or 128 tokens, and --block-tokens is 24",
        ),
        ({"deterministic": True}, "3.7.1", "not in deterministic mode"),
        ({"wide": True}, "3.7.1", "only with activations in bf16 (--dtype bf16)"),
    ],
    ids=str,
)
def test_choices_give_the_reason_why_a_faster_kernel_does_not_run(
    monkeypatch: pytest.MonkeyPatch, facts: dict[str, Any], release: str, why: str
) -> None:
    monkeypatch.setattr(triton, "__version__", release)
    computed = replace(H200, **facts)
    assert not tuning_for(computed).prefill.tma
    wanted = Choice("attention of prompts", "Triton, any GPU", f"Gluon, K and V by TMA: {why}")
    assert choices(computed)[0] == wanted


def test_choices_name_the_products_and_what_is_not_measured() -> None:
    def products(**facts: Any) -> Choice:
        return choices(replace(H200, **{"device": "NVIDIA L4", **facts}))[2]

    unmeasured = "layouts of its own: none is measured on NVIDIA L4"
    assert products() == Choice("products", "the library's", unmeasured)
    assert products(kept_in="int4") == Choice("products", "humming-kernels")
    assert products(deterministic=True) == Choice("products", "Triton, one order of summation")
    assert products(device="NVIDIA H200", wide=True) == Choice("products", "the library's")
