"""Adapters on a GPU: their kernels in Triton's interpreter, with torch in place of the other kernels.

On a GPU `test_engine_on_a_gpu_...` runs the engine itself."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.executor.peft_folders import merged, write_adapter
from support.executor.plan_maker import PlanMaker, Row
from support.executor.tiny_models import VOCAB, random_tokens, save_tiny
from support.small_llama import write_small_llama

from kernels.elementwise import rms_norm, swiglu
from services.executor.adapters.device_places import DevicePlaces, size_bytes
from services.executor.checkpoint.loader import TorchOptions, load
from services.executor.cuda import model as cuda_model
from services.executor.engine import engine_of
from shared.errors import SetupError
from shared.messages import SlotOpen, ints

TOKENS, RANK, SLOTS = 24, 8, 3
CPU = torch.device("cpu")


def options(folder: Path, **more: Any) -> TorchOptions:
    common: dict[str, Any] = {"model_name": "m", "dtype": "f32", "device": "cpu", "blocks": 4, "slots": 1}
    return TorchOptions(model_path=folder, **{**common, **more})


class Attention:
    """Rotation and attention by torch's own functions, without a cache."""

    def __init__(self, heads: int, kv_heads: int, dim: int) -> None:
        self.heads, self.kv_heads, self.dim = heads, kv_heads, dim
        self.kept: tuple[torch.Tensor, torch.Tensor] | None = None

    def rope_write(self, qkv: Any, inputs: Any, norms: Any, kv: Any, layer: int, heads: int) -> Any:
        from kernels.elementwise import apply_rope

        query, key, value = qkv.view(len(qkv), -1, self.dim).split(
            [self.heads, self.kv_heads, self.kv_heads], 1
        )
        rotation = inputs.rotations[inputs.positions.long()]
        self.kept = apply_rope(key, rotation), value
        return apply_rope(query, rotation)

    def attend_prefill(self, query: Any, kv: Any, layer: int, tiles: Any, tuning: Any, out: Any) -> None:
        assert self.kept is not None
        q, k, v = (each.transpose(0, 1)[None] for each in (query, *self.kept))
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        out.copy_(found[0].transpose(0, 1))


def logits(folder: Path, tokens: list[int], places: DevicePlaces | None, slots: Any) -> torch.Tensor:
    """The logits of a prompt, by the order of operations on a GPU."""
    loaded = load(options(folder))
    layouts = SimpleNamespace(chained=False, decode=None)
    tuning: Any = SimpleNamespace(layouts_of=lambda rows: layouts, prefill=None, by_row=False)
    resolved: Any = SimpleNamespace(ids=torch.tensor(tokens), slot_mapping=None)
    step = cuda_model.ForwardStep(
        resolved,
        torch.arange(len(tokens), dtype=torch.int32),
        None,
        object(),
        (),
        slots,  # type: ignore[arg-type]
    )
    with torch.inference_mode():
        model = cuda_model.CudaModel(loaded, {}, tuning, len(tokens), places)
        return model.logits(model.hidden(step), torch.arange(len(tokens)))


@pytest.fixture
def _torch(monkeypatch: pytest.MonkeyPatch) -> None:
    attention = Attention(4, 4, 16)
    monkeypatch.setattr(cuda_model, "rope_write", attention.rope_write)
    monkeypatch.setattr(cuda_model, "attend_prefill", attention.attend_prefill)
    monkeypatch.setattr(cuda_model, "rms_norm", lambda x, weight, eps, **_: rms_norm(x, weight, eps))
    monkeypatch.setattr(
        cuda_model,
        "add_rms_norm_",
        lambda x, residual, weight, eps, out, **_: rms_norm(residual.add_(x), weight, eps),
    )
    monkeypatch.setattr(cuda_model, "swiglu", lambda wide, *_, **__: swiglu(wide))
    monkeypatch.setattr(
        cuda_model, "gated", lambda product, layouts, x, gate_up, **_: swiglu(F.linear(x, gate_up))
    )
    monkeypatch.setattr(
        cuda_model,
        "products_of",
        lambda *_: lambda x, weight, bias=None, *, whole=False: F.linear(x, weight, bias),
    )


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="Triton's interpreter computes it, with tensors of a CPU"
)
@pytest.mark.usefixtures("_torch")
def test_logits_on_a_gpu_equal_the_merged_model(tmp_path: Path) -> None:
    base = save_tiny("llama", tmp_path / "base")
    folders = [
        write_adapter(base, tmp_path / "a", rank=5, seed=1),
        write_adapter(base, tmp_path / "b", rank=8, seed=2, targets=("q_proj", "v_proj", "up_proj")),
    ]
    shapes = load(options(base)).shapes
    places = DevicePlaces(shapes, torch.float32, 2, RANK, SLOTS, CPU)
    for place, folder in enumerate(folders, 1):
        places.bind(place, places.read(str(folder)))
    tokens = random_tokens(TOKENS, 3)
    for slot in (1, 2):
        places.open(
            SlotOpen(slot=slot, generation=0, seq=slot, prompt_tokens=1, tokens=ints([1]), adapter=slot)
        )
    assert not places.is_any_in([0])
    assert places.is_any_in([0, 2])
    plain = logits(base, tokens, None, None)
    assert plain.equal(logits(base, tokens, places, torch.zeros(TOKENS, dtype=torch.int32)))
    for slot, folder in enumerate(folders, 1):
        found = logits(base, tokens, places, torch.full((TOKENS,), slot, dtype=torch.int32))
        wanted = logits(merged(base, folder, tmp_path / f"m{slot}"), tokens, None, None)
        size = wanted.abs().max().item()
        torch.testing.assert_close(found, wanted, rtol=0, atol=2e-5 * size)
        assert (found - plain).abs().max() > 1e-2 * size
    places.reset()
    assert not places.is_any_in([1, 2])
    assert plain.equal(logits(base, tokens, places, torch.full((TOKENS,), 2, dtype=torch.int32)))


def test_the_size_of_places_is_what_they_take(tmp_path: Path) -> None:
    shapes = load(options(save_tiny("llama", tmp_path))).shapes
    places = DevicePlaces(shapes, torch.bfloat16, 3, 20, SLOTS, CPU)
    held = sum(each.a.nbytes + each.b.nbytes for each in places._placed.values())
    assert held == size_bytes(shapes, torch.bfloat16, 3, 20)


def test_places_beside_weights_that_are_not_plain_are_refused(tmp_path: Path) -> None:
    from dataclasses import replace

    loaded = load(options(save_tiny("llama", tmp_path)))
    tuning: Any = None
    with pytest.raises(SetupError, match="plain weights"):
        cuda_model.CudaModel(replace(loaded, kept_in="fp8"), {}, tuning, 1, object())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("dtype", "least"), [("f32", 0.95), ("bf16", 0.4)])  # near ties part bf16
def test_engine_on_a_gpu_computes_rows_of_adapters_as_the_merged_models(
    dtype: str, least: float, tmp_path: Path
) -> None:
    base = write_small_llama(tmp_path / "base", hidden=256, layers=4)
    folders = [write_adapter(base, tmp_path / f"a{i}", seed=i, size=0.3, rank=4 + i) for i in range(8)]

    def engine(folder: Path, places: int) -> Any:
        build = engine_of("cuda")
        given = {"dtype": dtype, "device": "cuda", "blocks": 200, "slots": 9, "max_context": 256}
        made = build(options(folder, **given, lora_places=places, lora_rank=16))
        made.warm_up()
        return made

    def ids(backend: Any, places: list[int]) -> dict[int, list[int]]:
        maker, lengths = PlanMaker(backend), {}
        for slot, place in enumerate(places):
            prompt = [(7 * slot + 3 * i) % VOCAB for i in range(5 + slot)]
            maker.open(slot, prompt, adapter=place, max_length=200, logprobs=0)
            lengths[slot] = len(prompt)
        first = maker.run([Row(slot, 0, length, feeds=(slot,)) for slot, length in lengths.items()]).ids
        later = maker.decode({slot: length + 1 for slot, length in lengths.items()}, 12)
        for slot in lengths:
            backend.close_slot(slot)
        return {slot: [first[slot], *later[slot]] for slot in lengths}

    backend = engine(base, 8)
    for place, folder in enumerate(folders, 1):
        backend.adapters.bind(place, backend.adapters.read(str(folder)))
    mixed = ids(backend, [*range(9)])
    again = ids(backend, [*range(9)])
    assert mixed == again
    plain = ids(engine(base, 0), [0] * 9)
    assert mixed[0] == plain[0]
    same = 0
    for place, folder in enumerate(folders, 1):
        exact = ids(engine(merged(base, folder, tmp_path / f"m{place}"), 0), [0] * 9)[place]
        same += sum(a == b for a, b in zip(mixed[place], exact, strict=True))
        assert mixed[place] != plain[place]
    assert same > least * 8 * 13
