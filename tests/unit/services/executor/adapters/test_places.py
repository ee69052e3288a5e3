"""Adapters beside the base on a CPU: the oracle is the base with W + s B A in place of W."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.executor.peft_folders import merged, write_adapter
from support.executor.plan_maker import PlanMaker, Row
from support.executor.tiny_models import VOCAB, save_tiny
from support.small_llama import write_small_llama

from services.executor.checkpoint.loader import TorchOptions
from services.executor.cpu.engine import TorchBackend, build
from shared.errors import BadRequest, SetupError

PROMPTS = [[(7 * slot + 3 * i) % VOCAB for i in range(5 + slot)] for slot in range(9)]


def engine(folder: Path, dtype: str = "f32", places: int = 8, deterministic: bool = False) -> TorchBackend:
    return build(
        TorchOptions(
            model_path=folder,
            model_name="tiny",
            dtype=dtype,
            device="cpu",
            blocks=96,
            slots=9,
            lora_places=places,
            lora_rank=16,
            deterministic=deterministic,
        )
    )


def logits(backend: TorchBackend, slots: list[int], places: dict[int, int]) -> dict[int, torch.Tensor]:
    """The logits of a prompt and two decodes of each slot, `[3, vocab]`: all slots in each step."""
    maker, found = PlanMaker(backend), {slot: list[torch.Tensor]() for slot in slots}
    for slot in slots:
        maker.open(slot, PROMPTS[slot] + [slot + 1, slot + 2], adapter=places.get(slot, 0))
    for step in range(3):
        rows = []
        for slot in slots:
            length = len(PROMPTS[slot])
            start, count = (0, length) if step == 0 else (length + step - 1, 1)
            rows.append(Row(slot, start, count, feeds=(slot,)))
        pending = backend.forward(maker.plan(rows))
        assert pending.logits is not None
        for slot, row in zip(slots, pending.logits, strict=True):
            found[slot].append(row.clone())
        backend.sample(pending)
    for slot in slots:
        backend.close_slot(slot)
    return {slot: torch.stack(rows) for slot, rows in found.items()}


def adapters_for(base: Path, folder: Path) -> list[Path]:
    """Eight adapters of different ranks, targets, scales and types."""
    every: list[dict[str, object]] = [
        {}, {"rank": 1, "alpha": 0.5}, {"targets": ("q_proj", "v_proj")}, {"rank": 8, "use_rslora": True},
        {"targets": ("down_proj",)}, {"dtype": torch.bfloat16}, {"rank": 16}, {"dtype": torch.float16},
    ]  # fmt: skip
    return [write_adapter(base, folder / f"a{i}", seed=i, **each) for i, each in enumerate(every)]  # type: ignore[arg-type]


def bind(backend: TorchBackend, folders: list[Path]) -> None:
    for place, folder in enumerate(folders, 1):
        backend.adapters.bind(place, backend.adapters.read(str(folder)))


@pytest.mark.parametrize("kind", ["llama", "qwen2", "phi3"])
def test_logits_of_eight_adapters_and_of_none_equal_merged_models(kind: str, tmp_path: Path) -> None:
    targets = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj") if kind == "phi3" else None
    base = save_tiny(kind, tmp_path / "base")
    if targets is None:
        folders = adapters_for(base, tmp_path)
    else:
        folders = [write_adapter(base, tmp_path / f"a{i}", seed=i, targets=targets) for i in range(8)]
    backend = engine(base)
    bind(backend, folders)
    mixed = logits(backend, [*range(9)], {slot: slot for slot in range(9)})

    plain = logits(engine(base, places=0), [0], {})
    assert mixed[0].equal(plain[0])  # beside adapters the base is what it is without them
    for place, folder in enumerate(folders, 1):
        alone = logits(backend, [place], {place: place})
        assert mixed[place].equal(alone[place])
        oracle = logits(engine(merged(base, folder, tmp_path / f"m{place}"), places=0), [place], {})
        size = oracle[place].abs().max().item()
        torch.testing.assert_close(mixed[place], oracle[place], rtol=0, atol=2e-5 * size)
        unlike = logits(backend, [place], {})[place]
        assert (unlike - oracle[place]).abs().max() > 1e-2 * size  # the adapter changes what is compared


@pytest.mark.parametrize("dtype", ["bf16", "int8"])
def test_logits_equal_merged_models_in_other_dtypes(dtype: str, tmp_path: Path) -> None:
    base = write_small_llama(tmp_path / "base", hidden=256, layers=3)
    folders = [write_adapter(base, tmp_path / f"a{i}", seed=i, size=0.3) for i in range(8)]
    try:
        backend = engine(base, dtype)
    except SetupError:
        return  # int8 on a CPU without the instructions
    bind(backend, folders)
    mixed = logits(backend, [*range(9)], {slot: slot for slot in range(9)})
    assert mixed[0].equal(logits(engine(base, dtype, places=0), [0], {})[0])
    exact_base = engine(base, places=0)
    for place in (1, 8):
        alone = logits(backend, [place], {place: place})[place]
        assert mixed[place].equal(alone)
        exact = logits(
            engine(merged(base, folders[place - 1], tmp_path / f"m{place}"), places=0), [place], {}
        )[place]
        without, plain = (logits(each, [place], {})[place] for each in (backend, exact_base))
        rounding = (without - plain).norm() / plain.norm()  # of the base in this dtype
        assert (alone - exact).norm() / exact.norm() < 2 * rounding + 0.01
        assert (without - exact).norm() / exact.norm() > 0.3


def test_deterministic_mode_pads_rows_that_have_no_adapter(tmp_path: Path) -> None:
    base = save_tiny("llama", tmp_path / "base")
    backend = engine(base, deterministic=True)
    bind(backend, adapters_for(base, tmp_path)[:2])
    mixed = logits(backend, [0, 1, 2], {1: 1, 2: 2})
    for slot in range(3):
        assert mixed[slot].equal(logits(backend, [slot], {slot: slot})[slot])


def test_torchs_operators_add_the_same_without_numba(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = save_tiny("llama", tmp_path / "base")
    backend = engine(base)
    folders = adapters_for(base, tmp_path)
    bind(backend, folders)
    found = logits(backend, [0, 3, 6], {3: 3, 6: 6})
    monkeypatch.setattr("kernels.cpu_jit.available", lambda: False)
    other = engine(base, deterministic=True)
    bind(other, folders)
    again = logits(other, [0, 3, 6], {3: 3, 6: 6})
    for slot in (0, 3, 6):
        torch.testing.assert_close(found[slot], again[slot], rtol=1e-4, atol=1e-4)
        assert again[slot].equal(logits(other, [slot], {slot: slot})[slot])


def test_a_place_has_the_adapter_that_was_bound_last(tmp_path: Path) -> None:
    base = save_tiny("llama", tmp_path / "base")
    backend = engine(base)
    one, two = (backend.adapters.read(str(folder)) for folder in adapters_for(base, tmp_path)[:2])
    found = []
    for adapter in (one, two, one, None):
        backend.adapters.bind(1, adapter)
        found.append(logits(backend, [1], {1: 1})[1])
    assert found[0].equal(found[2])
    assert not found[0].equal(found[1])
    assert found[3].equal(logits(backend, [1], {})[1])


def test_info_has_the_number_of_places(tmp_path: Path) -> None:
    base = save_tiny("llama", tmp_path / "base")
    assert engine(base, places=3).info.adapter_places == 3
    without = engine(base, places=0)
    assert without.info.adapter_places == 0
    assert without.adapters is None


WRONG: list[tuple[dict[str, object], str]] = [
    ({"use_dora": True}, "`use_dora` is True: not supported (DoRA)"),
    ({"bias": "all"}, "`bias` is 'all'"),
    ({"modules_to_save": ["lm_head"]}, "not supported (whole modules)"),
    ({"rank_pattern": {"q_proj": 2}}, "`rank_pattern`"),
    ({"alpha_pattern": {"q_proj": 2}}, "`alpha_pattern`"),
    ({"init_lora_weights": "pissa"}, "whose base has other weights"),
    ({"fan_in_fan_out": True}, "transposed weights"),
    ({"a_new_field": 3}, "`a_new_field` is 3"),
    ({"peft_type": "IA3"}, "`peft_type` is 'IA3'"),
    ({"task_type": "SEQ_CLS"}, "`task_type` is 'SEQ_CLS'"),
    ({"r": 17}, "`r` is 17, over the 16 of --lora-rank"),
    ({"r": "4"}, "`r` is '4'"),
    ({"lora_alpha": None}, "`lora_alpha` is None"),
    ({"lora_alpha": 10**400}, "`lora_alpha` is 1000"),
    ({"r": 5}, "layers.0.mlp.down_proj.lora_A.weight is [4, 112], and [5, 112] is expected"),
]


@pytest.mark.parametrize(("config", "why"), WRONG)
def test_config_is_refused_by_name_for_each_unsupported_field(
    config: dict[str, object], why: str, tmp_path: Path, base: TorchBackend
) -> None:
    folder = write_adapter(base._options.model_path, tmp_path / "a")
    before = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(before | config))
    with pytest.raises(BadRequest) as error:
        base.adapters.read(str(folder))
    assert why in error.value.message
    assert error.value.param == "lora_path"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> TorchBackend:
    return engine(save_tiny("llama", tmp_path_factory.mktemp("base")))


def test_wrong_tensors_are_refused_by_name(tmp_path: Path, base: TorchBackend) -> None:
    folder = write_adapter(base._options.model_path, tmp_path / "a")
    file, layer = folder / "adapter_model.safetensors", "base_model.model.model.layers.0."
    whole = load_file(file)
    key = f"{layer}self_attn.q_proj.lora_B.weight"

    def why(tensors: dict[str, torch.Tensor]) -> str:
        save_file(tensors, file)
        with pytest.raises(BadRequest) as error:
            base.adapters.read(str(folder))
        return error.value.message

    assert f"{key} is [64, 3], and [64, 4] is expected" in why({**whole, key: torch.zeros(64, 3)})
    assert "self_attn.q_proj has no lora_B" in why({n: t for n, t in whole.items() if n != key})
    assert "'lm_head' is no linear layer" in why(
        {**whole, "base_model.model.lm_head.lora_A.weight": torch.zeros(4, 64)}
    )
    assert "magnitude_vector" in why({**whole, f"{layer}mlp.up_proj.lora_magnitude_vector": torch.ones(3)})
    assert "not finite" in why({**whole, key: torch.full((64, 4), torch.nan)})
    assert "it has no matrix" in why({})


def test_missing_and_damaged_files_are_named(tmp_path: Path, base: TorchBackend) -> None:
    def why(path: object) -> str:
        with pytest.raises(BadRequest) as error:
            base.adapters.read(str(path))
        return error.value.message

    assert "is not an absolute path" in why("adapters/a")
    assert "adapter_config.json is missing where the executor runs" in why(tmp_path)
    folder = write_adapter(base._options.model_path, tmp_path / "a")
    weights = folder / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-5])
    assert "not a whole safetensors file" in why(folder)
    weights.unlink()
    (folder / "adapter_model.bin").write_bytes(b"pickle")
    assert "is a pickle: save it with safe_serialization=True" in why(folder)
    (folder / "adapter_config.json").write_text("[]")
    weights.touch()
    assert "is not a JSON object" in why(folder)


def test_the_digest_follows_config_and_weights_and_not_the_path(tmp_path: Path, base: TorchBackend) -> None:
    path = base._options.model_path
    same = [base.adapters.read(str(write_adapter(path, tmp_path / name))).digest for name in ("a", "b")]
    other = [
        base.adapters.read(str(write_adapter(path, tmp_path / "c", seed=2))).digest,
        base.adapters.read(str(write_adapter(path, tmp_path / "d", alpha=7.0))).digest,
    ]
    assert same[0] == same[1]
    assert len({same[0], *other}) == 3
