"""All layers from one call of machine code, beside the same kernels started one by one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.executor.plan_maker import PlanMaker, Row
from support.executor.tiny_models import VOCAB, save_tiny

import kernels.cpu_jit
from kernels.cpu_jit import thread_team
from services.executor.checkpoint.loader import cpu_arithmetic
from services.executor.cpu.engine import TorchBackend, TorchOptions, build, operators_for
from services.executor.cpu.layers import TorchOperators
from services.executor.engine import COMPILED

# For one call. The tiny model's down product is too narrow for int8 and stays in bf16.
NEEDS = {"f32": ("avx512f",), "bf16": ("avx512bf16",), "int8": (*kernels.cpu_jit.BYTES, "avx512bf16")}
WIDE = 70  # tokens: several tiles of rows, several pieces of every kernel


def engine(kind: str, folder: Path, dtype: str) -> TorchBackend:
    return build(
        TorchOptions(
            model_path=save_tiny(kind, folder), model_name=kind, dtype=dtype, device="cpu", blocks=64, slots=4
        )
    )


def logits(backend: TorchBackend) -> torch.Tensor:
    """The logits of several steps: a prompt, decodes beside chunks of prompts, then decodes alone, some
    in as many rows as a step before."""
    maker = PlanMaker(backend)
    for slot, tokens in ((0, 5), (1, WIDE), (2, 20)):
        maker.open(slot, [(slot + 7 * i) % VOCAB for i in range(tokens + 6)])
    steps = (
        [Row(0, 0, 5, feeds=(0,))],
        [Row(0, 5, 1, feeds=(0,)), Row(1, 0, WIDE, feeds=(1,)), Row(2, 0, 9)],
        [Row(0, 6, 1, feeds=(0,)), Row(1, WIDE, 1, feeds=(1,)), Row(2, 9, 11, feeds=(2,))],
        [Row(0, 7, 1, feeds=(0,)), Row(1, WIDE + 1, 1, feeds=(1,)), Row(2, 20, 1, feeds=(2,))],
        [Row(2, 21, 1, feeds=(2,)), Row(0, 8, 1, feeds=(0,))],
        [Row(0, 9, 1, feeds=(0,)), Row(1, WIDE + 2, 1, feeds=(1,)), Row(2, 22, 1, feeds=(2,))],
        [Row(0, 10, 1, feeds=(0,)), Row(1, WIDE + 3, 1, feeds=(1,))],
    )
    found = []
    for rows in steps:
        pending = backend.forward(maker.plan(rows))
        assert pending.logits is not None
        found.append(pending.logits.clone())
        backend.sample(pending)
    return torch.cat(found)


@pytest.mark.parametrize("dtype", ["f32", "bf16", "int8"])
def test_compiled_kernels_give_the_same_bits(dtype: str, tmp_path: Path) -> None:
    if dtype == "int8" and not kernels.cpu_jit.has(*kernels.cpu_jit.BYTES):
        return  # refused at the start: see test_weights_hf
    backend = engine("llama", tmp_path, dtype)
    at_once = logits(backend)
    assert (backend._model._at_once is not None) == kernels.cpu_jit.has(*NEEDS[dtype])
    backend.reset()
    backend._model._at_once = None
    assert at_once.equal(logits(backend))


def test_compiled_kernels_give_the_same_bits_on_one_thread_and_without_torchs_team(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = engine("llama", tmp_path, "f32")
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        together = logits(backend)
        torch.set_num_threads(1)
        backend.reset()
        assert together.equal(logits(backend))
        torch.set_num_threads(2)
        monkeypatch.setattr(thread_team, "openmp", lambda: None)
        backend.reset()
        assert together.equal(logits(backend))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "mixtral"])
def test_shapes_without_kernels_run_one_by_one(kind: str, tmp_path: Path) -> None:
    assert engine(kind, tmp_path, "f32")._model._at_once is None


def test_torch_computes_the_layers_when_the_table_has_no_machine_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = logits(engine("llama-9-3-tied", tmp_path / "usual", "f32"))
    monkeypatch.delitem(COMPILED, "numba")
    plain = engine("llama-9-3-tied", tmp_path / "plain", "f32")
    assert isinstance(operators_for(plain._cache, deterministic=False), TorchOperators)
    torch.testing.assert_close(logits(plain), usual, atol=1e-4, rtol=1e-4)


def test_operators_of_torch_are_another_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    """KV blocks of an installation without machine code are not taken for those of one with it."""
    compiled = cpu_arithmetic("f32")
    monkeypatch.delitem(COMPILED, "numba")
    assert cpu_arithmetic("f32") == f"{compiled}, torch's operators"
