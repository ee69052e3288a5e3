"""Stages of a model: they cover it, and what goes through them is what one rank computes."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.executor.partitions import CPU, LIMIT, shapes, tokens
from support.executor.plan_maker import GREEDY, PlanMaker, Row
from support.executor.rank_side import on_ranks
from support.executor.tiny_gguf import write_gguf
from support.executor.tiny_models import KINDS, save_tiny

from services.executor.checkpoint.loader import TorchOptions, load
from services.executor.checkpoint.weights import WHOLE, Stage, layers_of, load_dummy, load_hf, stage_partition
from services.executor.cpu.engine import TorchBackend
from services.executor.model.description import ExpertShapes
from services.executor.parallel.ranks import SOLO, Ranks
from services.executor.quantised.gguf import load_gguf
from shared.errors import SetupError


@given(layers=st.integers(1, 80), count=st.integers(1, 16), vocab=st.integers(1, 200_000))
def test_stages_hold_every_layer_once(layers: int, count: int, vocab: int) -> None:
    whole = replace(shapes(8, 4, vocab=vocab), layers=layers)
    if layers < count:
        with pytest.raises(SetupError, match=f"{count} stages are too many for {layers} layers"):
            layers_of(whole, 0, count)
        return
    runs = [layers_of(whole, index, count) for index in range(count)]
    assert [n for begin, end in runs for n in range(begin, end)] == list(range(layers))
    assert all(begin < end for begin, end in runs)


def test_the_head_counts_as_layers() -> None:
    llama = replace(
        shapes(32, 8, 14336, 128_256), layers=32, hidden=4096, head_dim=128
    )  # of 2.4 layers' weights
    assert [layers_of(llama, index, 2) for index in range(2)] == [(0, 17), (17, 32)]
    assert [layers_of(replace(llama, vocab=1), index, 4) for index in range(4)] == [
        (0, 8), (8, 16), (16, 24), (24, 32),
    ]  # fmt: skip
    experts = ExpertShapes(count=128, per_token=8, width=768, renormalise=True)
    assert layers_of(replace(llama, experts=experts), 1, 2) == (16, 32)  # heavier layers, the same head


def test_the_only_stage_is_the_model() -> None:
    whole = shapes(8, 4)
    assert stage_partition(whole, WHOLE).shapes is whole


@pytest.mark.parametrize("kind", ["llama-9-3-tied", "qwen2", "qwen3-moe-mixed"])
@pytest.mark.parametrize("source", ["hf", "gguf", "dummy"])
def test_stages_load_the_weights_of_one_rank_in_parts(kind: str, source: str, tmp_path: Path) -> None:
    if (kind, source) == ("qwen3-moe-mixed", "gguf"):
        source = "hf"  # no experts in GGUF files
    folder = save_tiny(kind, tmp_path)
    load_from = {"hf": load_hf, "gguf": load_gguf, "dummy": load_dummy}[source]
    path = write_gguf(kind, tmp_path / "m.gguf") if source == "gguf" else folder
    whole, weights = load_from(path, torch.float32, CPU)
    stages = [functools.partial(stage_partition, stage=Stage(index, 3)) for index in range(3)]
    parts = [load_from(path, torch.float32, CPU, each)[1] for each in stages]
    layers = [layer for part in parts for layer in part.layers]
    assert len(layers) == whole.layers
    for found, expected in zip(layers, weights.layers, strict=True):
        assert found.keys() == expected.keys()
        for name, wanted in expected.items():
            assert torch.equal(found[name].values, wanted.values), name
    assert torch.equal(parts[0].embedding.values, weights.embedding.values)
    assert torch.equal(parts[2].head.values, weights.head.values)
    assert [part.embedding.shape[0] for part in parts[1:]] == [0, whole.vocab if whole.tied else 0]
    assert [part.head.shape[0] for part in parts[:2]] == [0, 0]


def all_logits(ranks: Ranks, folder: Path) -> dict[str, list[torch.Tensor]]:
    """The logits of a chunk with nothing before it, one with a prefix beside a decode, and decodes, by kind
    of model."""
    return {
        kind + extra: list(logits_of(ranks, folder / kind, extra)) for kind in KINDS for extra in ("", "/fp8")
    }


def logits_of(ranks: Ranks, folder: Path, extra: str) -> Iterator[torch.Tensor]:
    options = TorchOptions(
        model_path=folder, model_name="m", device="cpu", dtype="f32", kv_dtype=extra[1:] or "auto", blocks=16,
        slots=4, threads=1, pipeline=True,
    )  # fmt: skip
    backend = TorchBackend(options, load(options, ranks))
    maker = PlanMaker(backend)
    maker.open(0, tokens(1, 40), GREEDY)
    maker.open(1, tokens(2, 40), GREEDY)
    for rows in (
        [Row(0, 0, 30, feeds=(0,)), Row(1, 0, 1, feeds=(1,))],
        [Row(0, 30, 1, feeds=(0,)), Row(1, 1, 25, feeds=(1,))],
        [Row(0, 31, 1, feeds=(0,)), Row(1, 26, 1, feeds=(1,))],
    ):
        logits = backend.forward(maker.plan(rows)).logits
        assert (logits is None) == (ranks.rank + 1 < ranks.size)
        if logits is not None:
            yield logits
    ranks.exchange("received")  # a stage that is gone takes what it still sends with it


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[torch.Tensor]]]:
    """A folder of models, and what one rank computes with them."""
    folder = tmp_path_factory.mktemp("models")
    for kind in KINDS:
        save_tiny(kind, folder / kind)
    return folder, all_logits(SOLO, folder)


@pytest.mark.parametrize("size", [2, 3])
def test_stages_give_the_logits_of_one_rank(
    size: int, alone: tuple[Path, dict[str, list[torch.Tensor]]]
) -> None:
    folder, wanted = alone
    *others, last = on_ranks(size, all_logits, folder)
    assert not any(steps for found in others for steps in found.values())
    for kind, steps in wanted.items():
        assert len(steps) == 3
        limit = LIMIT if "/" not in kind else 0.05  # a rounding of KV may fall to the other side
        for logits, expected in zip(last[kind], steps, strict=True):
            torch.testing.assert_close(logits, expected, atol=limit, rtol=limit, msg=kind)
