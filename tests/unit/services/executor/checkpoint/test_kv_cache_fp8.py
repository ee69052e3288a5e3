"""KV kept in fp8: rounding against a float64 oracle, scales that change nothing else, and what it costs."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from support.executor.plan_maker import GREEDY, PlanMaker, Row
from support.executor.references import write_rows
from support.executor.tiny_models import (
    VOCAB,
    full_logprobs,
    random_tokens,
    reference_logprobs,
    save_tiny,
    tiny_model,
)

from kernels.attention import (
    FP8,
    as_stored,
    attend_decode,
    attend_prefill,
    copy_blocks,
    gather_kv,
    write_kv,
)
from services.executor.checkpoint.kv_cache import (
    KvFormat,
    fingerprint,
    fp8_scales,
    kv_format,
    largest_kv,
    put_scales,
)
from services.executor.checkpoint.loader import TorchOptions, cpu_arithmetic, load
from services.executor.checkpoint.weights import Weights
from services.executor.cpu import engine as cpu_engine
from services.executor.cpu import layers as cpu_layers
from services.executor.cpu.engine import TorchBackend, build
from shared.errors import SetupError

DENSE = ("llama-9-3-tied", "qwen2", "qwen3")  # plain, with a bias, with norms on each head
KINDS = (*DENSE, "mixtral")
NUMBERS = np.array(
    [(c & 7) * 2.0**-9 if c < 8 else (8 + (c & 7)) * 2.0 ** ((c >> 3) - 10) for c in range(127)]
)


def options(folder: Path, **more: Any) -> TorchOptions:
    usual = {"dtype": "f32", "device": "cpu", "blocks": 24, "slots": 4, "threads": 1, "deterministic": True}
    return TorchOptions(model_path=folder, model_name="m", **{**usual, **more})


def nearest_codes(values: np.ndarray) -> np.ndarray:
    """The byte of each number: the nearest of `NUMBERS`, of two as near the even one; the sign in front."""
    size = np.minimum(np.abs(values), 448.0)
    above = np.minimum(np.searchsorted(NUMBERS, size), 126)
    below = np.maximum(above - 1, 0)
    up, down = NUMBERS[above] - size, size - NUMBERS[below]
    lower = (down < up) | ((down == up) & (below % 2 == 0))
    return np.where(lower, below, above) + 128 * np.signbit(values)


def test_numbers_are_rounded_to_the_nearest_and_saturated() -> None:
    between = (NUMBERS[1:] + NUMBERS[:-1]) / 2  # halfway: to even
    draw = np.random.default_rng(3)
    wide = draw.normal(size=4000) * 2.0 ** draw.integers(-12, 12, 4000)
    edges = [448.0, 449.0, 463.9, 464.0, 465.0, 1e9, np.inf]
    values = np.concatenate([NUMBERS, between, wide, edges]).astype(np.float32)
    values = np.concatenate([values, -values])
    stored = as_stored(torch.from_numpy(values), FP8)
    assert stored.view(torch.uint8).tolist() == nearest_codes(values.astype(np.float64)).tolist()
    assert stored.float().abs().max() == 448.0
    assert as_stored(stored.bfloat16(), FP8).view(torch.uint8).equal(stored.view(torch.uint8))


def test_blocks_in_fp8_are_written_read_copied_and_attended() -> None:
    def normal(*shape: int, seed: int) -> torch.Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed))

    kv = torch.zeros(6, 2, 2, 4, 3, 8, dtype=FP8)
    key, value = normal(8, 3, 8, seed=1), normal(8, 3, 8, seed=2) * 400
    blocks = torch.tensor([5, 5, 5, 5, 2, 2, 2, 2])
    write_kv(kv, write_rows(kv, blocks, torch.arange(8) % 4)[1], key, value)
    found = gather_kv(kv, 1, torch.tensor([[5, 2]]))
    for part, wanted in zip(found, (key, value), strict=True):
        assert part.dtype == FP8
        assert part[0].float().equal(as_stored(wanted, FP8).float().transpose(0, 1))
    before = kv.float()
    copy_blocks(kv, torch.tensor([5, 1]), torch.tensor([1, 3]))
    assert kv[1].float().equal(before[5])
    assert kv[3].float().equal(before[1])
    query, wide = normal(2, 6, 8, seed=3), kv.double()
    mask = torch.where(torch.arange(7) < torch.tensor([[7], [3]]), 0.0, -torch.inf)
    tables = torch.tensor([[5, 2], [2, 5]])
    decoded = attend_decode(query, kv, 1, tables, mask[:, None, None])
    wanted = attend_decode(query.double(), wide, 1, tables, mask[:, None, None].double())
    torch.testing.assert_close(decoded.double(), wanted, rtol=1e-5, atol=1e-5)
    chunk = attend_prefill(query, kv, 1, tables[0], mask)
    wanted = attend_prefill(query.double(), wide, 1, tables[0], mask.double())
    torch.testing.assert_close(chunk.double(), wanted, rtol=1e-5, atol=1e-5)


def logits_and_cache(engine: TorchBackend) -> tuple[torch.Tensor, torch.Tensor]:
    """A prompt in two chunks and two tokens after it: the logits of each step, and all blocks."""
    maker, found = PlanMaker(engine), []
    maker.open(1, random_tokens(31, 4))
    for row in (
        Row(1, 0, 11, feeds=(1,)),
        Row(1, 11, 18, feeds=(1,)),
        *(Row(1, 29 + i, 1, feeds=(1,)) for i in (0, 1)),
    ):
        pending = engine.forward(maker.plan([row]))
        assert pending.logits is not None
        found.append(pending.logits)
        engine.sample(pending)
    return torch.cat(found), engine._cache.tensor.float()


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("kind", KINDS)
def test_scales_divide_kv_and_change_no_bit_of_the_logits(kind: str, dtype: str, tmp_path: Path) -> None:
    chosen = options(save_tiny(kind, tmp_path), dtype=dtype)
    plain, scaled = load(chosen), load(chosen)
    shapes = scaled.shapes
    scales = 2.0 ** torch.arange(-5.0, shapes.layers * 2 * shapes.kv_heads - 5).view(shapes.layers, 2, -1)
    if shapes.qk_norm:
        scales[:, 0] = scales[:, 0, :1]
    put_scales(scales, scaled.shapes, scaled.weights)
    wanted, kv = logits_and_cache(TorchBackend(chosen, plain))
    found, kv_scaled = logits_and_cache(TorchBackend(chosen, scaled))
    assert found.equal(wanted)
    assert (kv_scaled * scales[:, :, None, :, None]).equal(kv)
    assert kv.count_nonzero() > 1000


@pytest.mark.parametrize("kind", KINDS)
def test_scales_are_powers_of_two_over_what_the_engine_computes(kind: str, tmp_path: Path) -> None:
    chosen = options(save_tiny(kind, tmp_path))
    loaded = load(chosen)
    shapes = loaded.shapes
    largest, scales = largest_kv(shapes, loaded.weights), fp8_scales(shapes, loaded.weights)
    engine = TorchBackend(chosen, loaded)
    maker, tokens = PlanMaker(engine), [i * 7919 % VOCAB for i in range(128)]
    maker.open(0, tokens)
    maker.prefill({0: len(tokens)})
    kv = engine._cache.tensor[maker.tables[0]].double()
    assert scales.log2().equal(scales.log2().round())
    of_value = kv[:, :, 1].abs().amax((0, 2, 4))
    of_key = kv[:, :, 0].unflatten(-1, (2, -1)).square().sum(-2).sqrt().amax((0, 2, 4))
    torch.testing.assert_close(largest.double(), torch.stack((of_key, of_value), 1), rtol=1e-4, atol=0)
    wanted = 2.0 ** torch.floor(torch.log2(torch.stack((of_key, of_value), 1) / 224) + 1)
    if shapes.qk_norm:
        wanted[:, 0] = wanted[:, 0].amax(-1, keepdim=True)
    assert scales.double().equal(wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_in_fp8_is_one_that_rounds_kv_by_its_scales(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit by bit. The other one has its weights untouched and the scales by hand, before KV is written."""
    chosen = options(save_tiny(kind, tmp_path))
    found, kept = logits_and_cache(build(replace(chosen, kv_dtype="fp8")))
    loaded = load(chosen)
    scales = fp8_scales(loaded.shapes, loaded.weights)
    monkeypatch.setattr(cpu_engine, "operators_for", lambda *_, **__: cpu_layers.TorchOperators())
    engine, layers = TorchBackend(chosen, loaded), itertools.cycle(scales)

    def rounding(kv: torch.Tensor, rows: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        pair = [
            as_stored(each / own[:, None], FP8).float() * own[:, None]
            for each, own in zip((key, value), next(layers), strict=True)
        ]
        write_kv(kv, rows, *pair)

    monkeypatch.setattr(cpu_layers, "write_kv", rounding)
    wanted, kv = logits_and_cache(engine)
    assert found.equal(wanted)
    assert (kept * scales[:, :, None, :, None]).equal(kv)


@pytest.mark.parametrize("kind", DENSE)  # of experts a token with other KV may see others, and jump
def test_fp8_stays_near_transformers_in_chunks_and_decode(kind: str, tmp_path: Path) -> None:
    maker = PlanMaker(build(options(save_tiny(kind, tmp_path), kv_dtype="fp8", deterministic=False)))
    tokens = random_tokens(60, 5)
    wanted = reference_logprobs(kind, tokens)
    maker.open(0, tokens, GREEDY, logprobs=VOCAB + 1)
    rows = [
        Row(0, 0, 37, feeds=(0,)),
        Row(0, 37, 13, feeds=(0,)),
        *(Row(0, 50 + i, 1, feeds=(0,)) for i in range(10)),
    ]
    found = torch.cat([full_logprobs(maker.run([row])) for row in rows])
    last = [row.start + row.count - 1 for row in rows]
    lost = (wanted[last].exp() * (wanted[last] - found)).sum(-1)
    assert lost.min() > 1e-5
    assert lost.mean() < 0.06  # f32 1e-8, bf16 2e-3
    assert (found.argmax(-1) == wanted[last].argmax(-1)).sum() >= 7


def test_magnitudes_do_not_matter(tmp_path: Path) -> None:
    """V of one head 2^14 times as large, far over what fp8 holds, `out` as much smaller: the same bytes."""
    plain = save_tiny("llama", tmp_path / "plain")
    state = {name: tensor.clone() for name, tensor in tiny_model("llama").state_dict().items()}
    state["model.layers.1.self_attn.v_proj.weight"][16:32] *= 2.0**14
    state["model.layers.1.self_attn.o_proj.weight"][:, 16:32] *= 2.0**-14
    other = save_tiny("llama", tmp_path / "other")
    save_file(state, other / "model.safetensors")
    wanted, found = (logits_and_cache(build(options(each, kv_dtype="fp8"))) for each in (plain, other))
    assert found[0].equal(wanted[0])
    assert found[1].equal(wanted[1])
    assert 0 < wanted[1].abs().max() <= 448


def test_a_chunk_or_a_token_at_a_time_gives_the_same_bytes(tmp_path: Path) -> None:
    folder, tokens, seen = save_tiny("qwen3", tmp_path), random_tokens(40, 6), []
    for size in (40, 7, 1):
        engine = build(options(folder, kv_dtype="fp8"))
        maker = PlanMaker(engine)
        maker.open(0, tokens)
        for start in range(0, 40, size):
            maker.run([Row(0, start, min(size, 40 - start))])
        seen.append([engine._cache.tensor[block].view(torch.uint8) for block in maker.tables[0]])
    for blocks in seen[1:]:
        assert all(map(torch.equal, blocks, seen[0]))


def test_a_block_has_half_the_bytes_and_another_fingerprint(tmp_path: Path) -> None:
    folder = save_tiny("qwen2", tmp_path)
    wide, narrow = (build(options(folder, dtype="bf16", kv_dtype=kept)).info for kept in ("auto", "fp8"))
    assert (wide.dtype, narrow.dtype) == ("bf16", "bf16/fp8")
    assert narrow.bytes_per_block * 2 == wide.bytes_per_block
    assert narrow.fingerprint != wide.fingerprint
    assert (
        build(options(folder, dtype="bf16", kv_dtype="fp8", threads=2)).info.fingerprint == narrow.fingerprint
    )
    loaded = load(options(folder))
    ones = torch.ones(3, 2, 2)
    twos = ones.clone()
    twos[2, 1, 1] = 2.0
    plain = (KvFormat(torch.float32), KvFormat(torch.float16))
    formats = (*plain, KvFormat(FP8, ones), KvFormat(FP8, twos))
    name = f"m row by row by {cpu_arithmetic('f32')}"
    prints = [fingerprint(name, loaded.shapes, loaded.weights, 16, each) for each in formats]
    assert len(set(prints)) == 4
    assert prints[0] == loaded.fingerprint


def test_impossible_fp8_cache_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load(options(save_tiny("llama", tmp_path)))
    with pytest.raises(SetupError, match="KV cannot be kept in 'int4'; use auto or fp8"):
        kv_format("int4", torch.float32, loaded.shapes, loaded.weights)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "an older GPU")
    there = SimpleNamespace(norm=SimpleNamespace(device=torch.device("cuda"), dtype=torch.bfloat16))
    with pytest.raises(SetupError, match=r"an older GPU has no fp8.*leave /fp8 out of dtype"):
        kv_format("fp8", torch.bfloat16, loaded.shapes, cast(Weights, there))
    assert kv_format("auto", torch.float16, loaded.shapes, cast(Weights, there)).dtype == torch.float16
