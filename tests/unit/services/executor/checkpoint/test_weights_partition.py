"""Parts of a model: they cover it, and ranks that hold them give one rank's logits."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
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
from support.executor.tiny_models import DENSE, KINDS, save_tiny

from services.executor.checkpoint.loader import TorchOptions, load
from services.executor.checkpoint.stored import Cut
from services.executor.checkpoint.weights import Weights, load_dummy, load_hf, partition
from services.executor.cpu.engine import TorchBackend
from services.executor.model.description import ExpertShapes, Shapes
from services.executor.parallel.ranks import SOLO, Ranks
from services.executor.quantised.gguf import load_gguf
from shared.errors import SetupError


def mixture(count: int) -> Shapes:
    experts = ExpertShapes(count=count, per_token=2, width=32, renormalise=True)
    return replace(shapes(64, 64, 1024), experts=experts)


@given(st.integers(2, 40), st.integers(1, 40))
def test_every_expert_is_on_one_rank(count: int, size: int) -> None:
    whole = mixture(count)
    if size > count:
        with pytest.raises(SetupError, match=f"{size} ranks are too many for {count} experts: use fewer"):
            partition(whole, 0, size)
        return
    held = []
    for rank in range(size):
        part = partition(whole, rank, size)
        experts = part.shapes.experts
        assert experts is not None
        some = part.cuts.get("experts_down", Cut(0, 0, count))
        assert part.cuts.get("experts_gate_up", some) == some
        assert (experts.first, experts.count) == (some.begin, count)  # tokens are routed to all
        held.append(range(some.begin, some.end))
    assert [expert for some in held for expert in some] == list(range(count))
    assert {len(some) for some in held} <= {count // size, count // size + 1}
    assert "router" not in part.cuts


@given(
    kv_heads=st.integers(1, 8),
    group=st.integers(1, 6),
    size=st.integers(2, 16),
    width=st.integers(16, 300),
    vocab=st.integers(1, 500),
)
def test_parts_cover_the_model_once_and_heads_stay_whole(
    kv_heads: int, group: int, size: int, width: int, vocab: int
) -> None:
    whole = shapes(kv_heads * group, kv_heads, width, vocab)
    if size > min(whole.heads, width // 16 if width % 16 == 0 else width):
        with pytest.raises(SetupError, match="ranks are too many"):
            partition(whole, 0, size)
        return
    parts = [partition(whole, rank, size) for rank in range(size)]
    for name, dim, total in (
        ("q", 0, whole.heads * 8),
        ("out", 1, whole.heads * 8),
        ("up", 0, width),
        ("down", 1, width),
        ("head", 0, vocab),
    ):
        cuts = [part.cuts[name] for part in parts]
        assert {cut.dim for cut in cuts} == {dim}
        assert [n for cut in cuts for n in range(cut.begin, cut.end)] == list(range(total))
    for part in parts:
        local, q, k = part.shapes, part.cuts["q"], part.cuts["k"]
        assert (q.end - q.begin, k.end - k.begin) == (local.heads * 8, local.kv_heads * 8)
        reads = {head // group for head in range(q.begin // 8, q.end // 8)}
        assert reads == set(range(k.begin // 8, k.end // 8))  # the KV heads that its queries read, no other
        assert local.heads % local.kv_heads == 0
        assert part.head_rows * size >= vocab
        assert part.cuts["head"].end - part.cuts["head"].begin <= part.head_rows


def test_three_kv_heads_on_two_ranks_and_on_four() -> None:
    nine = shapes(9, 3, 144)

    def held(size: int) -> list[tuple[int, int]]:
        return [(s.heads, s.kv_heads) for s in (partition(nine, rank, size).shapes for rank in range(size))]

    assert held(1) == [(9, 3)]
    assert held(2) == [(6, 2), (3, 1)]
    assert held(3) == [(3, 1)] * 3
    assert held(4) == [(2, 1), (1, 1), (3, 1), (3, 1)]  # the first KV head lies on two ranks
    assert held(9) == [(1, 1)] * 9


@pytest.mark.parametrize("kind", ["llama-9-3-tied", "qwen2"])
@pytest.mark.parametrize("source", ["hf", "gguf", "dummy"])
def test_ranks_load_the_weights_of_one_rank_in_parts(kind: str, source: str, tmp_path: Path) -> None:
    folder = save_tiny(kind, tmp_path)
    load_from = {"hf": load_hf, "gguf": load_gguf, "dummy": load_dummy}[source]
    path = write_gguf(kind, tmp_path / "m.gguf") if source == "gguf" else folder
    whole, weights = load_from(path, torch.float32, CPU)
    shards = [functools.partial(partition, rank=rank, size=2) for rank in range(2)]
    parts = [load_from(path, torch.float32, CPU, each) for each in shards]
    group, dim = whole.heads // whole.kv_heads, whole.head_dim
    for i, layer in enumerate(weights.layers):
        held = [part.layers[i] for _, part in parts]
        assert torch.equal(torch.cat([each["out"].values for each in held], 1), layer["out"].values)
        assert torch.equal(torch.cat([each["down"].values for each in held], 1), layer["down"].values)
        gates, ups = zip(*(each["gate_up"].values.chunk(2) for each in held), strict=True)
        assert torch.equal(torch.cat([*gates, *ups]), layer["gate_up"].values)
        sizes = [[s.kv_heads * group * dim, s.kv_heads * dim, s.kv_heads * dim] for s, _ in parts]
        triples = [torch.split(each["qkv"].values, size) for each, size in zip(held, sizes, strict=True)]
        assert torch.equal(
            torch.cat([part for parts in zip(*triples, strict=True) for part in parts]), layer["qkv"].values
        )
        assert all(
            torch.equal(each["attention_norm"].values, layer["attention_norm"].values) for each in held
        )
    heads = [part.head.values for _, part in parts]
    assert heads[0].shape == heads[1].shape
    assert torch.equal(torch.cat(heads)[: whole.vocab], weights.head.values)
    assert not torch.cat(heads)[whole.vocab :].any()


@pytest.mark.parametrize("kind", ["mixtral", "qwen3-moe-mixed"])
@pytest.mark.parametrize("load_from", [load_hf, load_dummy])
def test_ranks_load_the_experts_of_one_rank_in_parts(
    kind: str, load_from: Callable[..., tuple[Shapes, Weights]], tmp_path: Path
) -> None:
    folder = save_tiny(kind, tmp_path)
    whole, weights = load_from(folder, torch.float32, CPU)
    parts = [
        load_from(folder, torch.float32, CPU, functools.partial(partition, rank=rank, size=2))[1]
        for rank in range(2)
    ]
    sparse = [i for i in range(whole.layers) if whole.is_sparse(i)]
    assert len(sparse) == (2 if kind == "qwen3-moe-mixed" else 3)
    for i in sparse:
        held = [part.layers[i] for part in parts]
        assert torch.equal(
            torch.cat([each["gate_up"].values for each in held]), weights.layers[i]["gate_up"].values
        )
        assert torch.equal(
            torch.cat([each["down"].values for each in held]), weights.layers[i]["down"].values
        )
        for router in (each["router"].values for each in (*held, weights.layers[i])):
            assert torch.equal(router, held[0]["router"].values)


Logits = dict[str, list[torch.Tensor]]


def all_logits(ranks: Ranks, folder: Path, kinds: tuple[str, ...]) -> Logits:
    """The logits of a chunk with nothing before it, one with a prefix beside a decode, and decodes, by kind
    of model."""
    split = [(each, *each.partition("/")) for each in kinds]
    return {each: list(logits_of(ranks, folder / kind, extra)) for each, kind, _, extra in split}


def logits_of(ranks: Ranks, folder: Path, extra: str) -> Iterator[torch.Tensor]:
    options = TorchOptions(
        model_path=folder, model_name="m", device="cpu", dtype="f32", kv_dtype=extra or "auto", blocks=16,
        slots=4, threads=1,
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
        pending = backend.forward(maker.plan(rows))
        assert pending.logits is not None
        yield pending.logits


# Sinks, biases of experts, rows of norms by head, parallel branches, shared experts, sums before a norm.
OPTIONED = ("gemma2", "gpt-oss", "cohere", "stablelm-parallel", "glm4-moe")
OF_TWO = (
    *(*KINDS, "llama-bias", *OPTIONED),
    *(f"{kind}/fp8" for kind in (*DENSE, "qwen3-moe", "gemma2", "cohere", "gpt-oss")),
)
# What four ranks cut otherwise than two: heads that do not divide, KV heads and their biases that two ranks
# or all of them hold, five experts, layers with and without experts.
OF_FOUR = (
    *("llama", "llama-9-3-tied", "llama-9-3-tied/fp8", "qwen2", "mistral", "phi3", "mixtral"),
    "qwen3-moe-mixed",
)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Logits]:
    """A folder of models, and what one rank computes with them."""
    folder = tmp_path_factory.mktemp("models")
    for kind in (*KINDS, "llama-bias", *OPTIONED):
        save_tiny(kind, folder / kind)
    return folder, all_logits(SOLO, folder, OF_TWO)


@pytest.mark.parametrize(("size", "kinds"), [(2, OF_TWO), (4, OF_FOUR)], ids=["2", "4"])
def test_ranks_give_the_logits_of_one(size: int, kinds: tuple[str, ...], alone: tuple[Path, Logits]) -> None:
    folder, wanted = alone[0], {kind: alone[1][kind] for kind in kinds}
    answers = on_ranks(size, all_logits, folder, kinds)
    for found in answers:
        for kind, steps in wanted.items():
            for logits, expected in zip(found[kind], steps, strict=True):
                assert logits.shape == expected.shape
                limit = LIMIT if "/" not in kind else 0.05  # a rounding of KV may fall to the other side
                torch.testing.assert_close(logits, expected, atol=limit, rtol=limit, msg=kind)
        assert all(
            torch.equal(mine, theirs)
            for kind in wanted
            for mine, theirs in zip(found[kind], answers[0][kind], strict=True)
        )  # bit for bit: every rank may choose tokens from them


def test_a_family_that_norms_all_heads_at_once_has_one_rank(tmp_path: Path) -> None:
    folder = save_tiny("olmo2", tmp_path)
    with pytest.raises(SetupError, match="olmo2 norms all heads at once: use one rank, or pipeline stages"):
        load_hf(folder, torch.float32, CPU, functools.partial(partition, rank=0, size=2))
