"""The model digest: equal where the same tokens are chosen, another where weights or modes are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType as GgmlType
from safetensors.torch import save_file
from support.executor.tiny_gguf import write_gguf
from support.executor.tiny_models import save_tiny, tiny_model

import kernels.cpu_jit
from services.executor.build import engine_builder
from services.executor.checkpoint import loader
from services.executor.checkpoint.loader import TorchOptions, check_digest, model_digest
from services.executor.cpu.engine import build
from shared.config import load
from shared.errors import SetupError


def digest(path: Path, **more: Any) -> str:
    fields = {"model_name": "m", "device": "cpu", "blocks": 8, "slots": 2, **more}
    return build(TorchOptions(model_path=path, **fields)).info.model_digest


def test_digest_ignores_options_that_do_not_change_answers(tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path / "a")
    wanted = digest(folder)
    assert len(wanted) == 32
    same: tuple[dict[str, Any], ...] = (
        {"model_name": "other"}, {"block_tokens": 8}, {"blocks": 16}, {"slots": 4}, {"max_context": 32},
    )  # fmt: skip
    assert {digest(folder, **change) for change in same} == {wanted}
    assert digest(save_tiny("llama", tmp_path / "b", max_shard_size="200KB")) == wanted


def test_weights_and_modes_change_it(tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path / "a")
    modes: tuple[dict[str, Any], ...] = (
        {}, {"dtype": "bf16"}, {"kv_dtype": "fp8"}, {"deterministic": True}, {"dummy": True},
    )  # fmt: skip
    found = {digest(folder, **mode) for mode in modes}
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-5}))
    found.add(digest(folder))
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("model.layers.1.mlp.down_proj.weight", "model.norm.weight"):
        state = tiny_model("llama").state_dict()
        state[name] = state[name] * 1.01
        save_file(state, folder / "model.safetensors")
        found.add(digest(folder))
    file = write_gguf("llama", tmp_path / "m.gguf")
    found |= {
        digest(file),
        digest(write_gguf("llama3-rope", tmp_path / "n.gguf")),
        digest(file, dtype="bf16"),
    }
    assert len(found) == 11


def test_the_instructions_of_a_cpu_change_it_and_the_error_names_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kinds of CPU add up numbers in another order."""
    options = TorchOptions(
        model_path=save_tiny("llama", tmp_path), model_name="m", device="cpu", dtype="bf16"
    )
    monkeypatch.setattr(loader, "cpu_arithmetic", lambda dtype: "avx512, torch AVX512, GenuineIntel")
    check_digest(options, model_digest(options, "bf16", "bf16"))
    for other in (
        "avx2, torch AVX2, GenuineIntel",
        "avx512, torch AVX512, AuthenticAMD",
        "amx without tiles, torch AVX512, GenuineIntel",
        "x86_64, torch AVX2, AuthenticAMD",  # without Numba
    ):
        with pytest.raises(
            SetupError, match=f"compute with {other}, this CPU with avx512, torch AVX512, Gen"
        ):
            check_digest(options, model_digest(options, "bf16", "bf16", other))


def test_a_cpu_with_amx_computes_otherwise_where_its_tiles_are_forbidden(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By Linux, or by ONEDNN_MAX_CPU_ISA."""
    monkeypatch.setattr(kernels.cpu_jit, "cpu_kind", lambda: kernels.cpu_jit.CPU_KINDS[0])
    for usable, begin in ((True, "amx, torch "), (False, "amx without tiles, torch ")):
        monkeypatch.setattr(kernels.cpu_jit, "has_amx", lambda usable=usable: usable)
        assert loader.cpu_arithmetic("packed").startswith(begin)


def test_kv_of_another_kind_of_cpu_is_other_kv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, found = save_tiny("llama", tmp_path), set()
    for name in ("avx2", "avx512"):
        monkeypatch.setattr(loader, "cpu_arithmetic", lambda dtype, name=name: name)
        options = TorchOptions(model_path=folder, model_name="m", device="cpu", blocks=8, slots=2)
        found.add(build(options).info.fingerprint)
    assert len(found) == 2


def test_digest_depends_on_the_routing_of_tokens(tmp_path: Path) -> None:
    folder = save_tiny("qwen3-moe", tmp_path)
    before = digest(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_experts_per_tok": 2}))
    assert digest(folder) != before


def test_digest_is_checked_before_weights_are_loaded(tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path / "a")
    usual = TorchOptions(model_path=folder, model_name="m", device="cpu")
    modes: tuple[dict[str, Any], ...] = (
        {}, {"dtype": "bf16"}, {"dtype": "bf16", "kv_dtype": "fp8"}, {"deterministic": True},
    )  # fmt: skip
    flags = ("f32 --no", "bf16 --no", "bf16/fp8 --no", "f32 --")
    for mode, flag in zip(modes, flags, strict=True):
        wanted = digest(folder, **mode)
        check_digest(TorchOptions(model_path=folder, model_name="m", device="cpu", **mode), wanted)
        other = usual if mode else TorchOptions(model_path=folder, model_name="m", device="cpu", dtype="bf16")
        with pytest.raises(SetupError, match=f"--dtype {flag}-?deterministic"):
            check_digest(other, wanted)
    with pytest.raises(SetupError, match="are not those of the executors that serve it"):
        check_digest(usual, digest(write_gguf("llama", tmp_path / "m.gguf")))


@pytest.mark.skipif(not kernels.cpu_jit.has(*kernels.cpu_jit.BYTES), reason="no AVX2: packed weights need it")
@pytest.mark.parametrize(
    ("first", "second", "flags", "kv"),
    [("cpu", "cpu/tp2", "packed", "f16"), ("cpu/tp2", "cpu", "f32", "f32")],
)
def test_second_rank_with_another_dtype_gets_an_error_that_names_both(
    first: str, second: str, flags: str, kv: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `auto` the weights of a GGUF file stay in blocks on one rank alone. Nothing is loaded here."""
    types = dict.fromkeys(
        ("attn_q.weight", "attn_v.weight", "ffn_gate.weight", "ffn_up.weight"), GgmlType.Q4_0
    )
    path = write_gguf("llama", tmp_path / "m.gguf", types=types)
    loaded: list[TorchOptions] = []
    monkeypatch.setattr("services.executor.cpu.engine.build", loaded.append)
    monkeypatch.setattr(
        "services.executor.group.driver.build_group", lambda options, *more: loaded.append(options)
    )

    def start(device: str, **more: object) -> TorchOptions:
        flags = {"model": str(path), "device": device, "slots": 2, **more}
        engine_builder(load(flags=flags).settings)()
        return loaded.pop()

    serving = start(first)
    wanted = model_digest(serving, serving.dtype, kv)
    with pytest.raises(SetupError, match=f"compute otherwise: start with --dtype {flags} --no-deterministic"):
        start(second, model_digest=wanted)
    assert not loaded
    assert start(second, model_digest=wanted, dtype=flags).dtype == flags == serving.dtype
    assert start(second, model_digest=wanted, accept_mixed=True).dtype != flags
