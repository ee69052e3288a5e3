"""Every family with options against transformers, through paged KV; and that each option matters."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from support.executor.plan_maker import GREEDY, PlanMaker, Row
from support.executor.tiny_gguf import write_gguf
from support.executor.tiny_models import (
    OPTIONED,
    VOCAB,
    full_logprobs,
    random_tokens,
    reference_logprobs,
    save_tiny,
)

from services.executor.checkpoint import weights
from services.executor.checkpoint.config import read_shapes
from services.executor.cpu.engine import TorchOptions, build
from services.executor.model.description import Options, Shapes
from shared.errors import SetupError

LIMIT = 1e-6


def engine(kind: str, folder: Path, **options: object) -> PlanMaker:
    chosen = {"dtype": "f32", "device": "cpu", "blocks": 64, "slots": 20, "threads": 1, **options}
    path = chosen.pop("model_path", None) or save_tiny(kind, folder)
    return PlanMaker(build(TorchOptions(model_path=path, model_name=kind, **chosen)))


def divergence(reference: torch.Tensor, found: torch.Tensor) -> float:
    """Kullback-Leibler, nats, the worst row."""
    return float((reference.exp() * (reference - found)).sum(-1).max())


@pytest.mark.parametrize("kind", OPTIONED)
def test_logits_equal_transformers_across_windows(kind: str, tmp_path: Path) -> None:
    maker = engine(kind, tmp_path)
    texts = {0: random_tokens(61, 1), 7: random_tokens(50, 2)}
    reference = {slot: reference_logprobs(kind, tokens) for slot, tokens in texts.items()}
    for slot, tokens in texts.items():
        maker.open(slot, tokens, GREEDY, logprobs=VOCAB + 1)

    def check(rows: list[Row]) -> None:
        found = full_logprobs(maker.run(rows))
        wanted = torch.stack([reference[row.slot][row.start + row.count - 1] for row in rows])
        assert divergence(wanted, found) < LIMIT

    check([Row(0, 0, 37, feeds=(0,)), Row(7, 0, 1, feeds=(7,))])  # whole prompt beside a single token
    check([Row(7, 1, 18, feeds=(7,)), Row(0, 37, 1, feeds=(0,))])  # chunk with a prefix beside a decode row
    check([Row(0, 38, 10, feeds=(0,)), Row(7, 19, 23, feeds=(7,))])  # two chunks across block edges
    for i in range(8):
        check([Row(0, 48 + i, 1, feeds=(0,)), Row(7, 42 + i, 1, feeds=(7,))])
    check([Row(0, 56, 5, feeds=(0,))])


@pytest.mark.parametrize("kind", OPTIONED)
def test_a_model_without_one_of_its_options_is_another_or_refused(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder with a tensor too many or too few is refused by its name."""
    tokens, shapes = random_tokens(61, 1), read_shapes(save_tiny(kind, tmp_path))
    wanted, usual = reference_logprobs(kind, tokens)[-1:], Options()
    changed = [each.name for each in fields(Options) if each.name != "local_rope"]
    changed = [name for name in changed if getattr(shapes.options, name) != getattr(usual, name)]
    others = [
        replace(shapes, options=replace(shapes.options, **{name: getattr(usual, name)})) for name in changed
    ]
    others += [replace(shapes, sliding_window=0)] * (shapes.sliding_window > 0 and not shapes.options.windows)
    if shapes.options.local_rope is not None:
        others.append(replace(shapes, options=replace(shapes.options, local_rope=None)))
    assert others
    for other in others:
        found = _divergence_of(other, kind, tmp_path, wanted, monkeypatch)
        assert found is None or found > 100 * LIMIT, other.options.marks


def _divergence_of(
    shapes: Shapes, kind: str, folder: Path, wanted: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> float | None:
    """None: the folder is refused by a tensor."""
    monkeypatch.setattr(weights, "read_shapes", lambda folder: shapes)
    try:
        maker = engine(kind, folder)
    except SetupError as error:
        if "tensor" in error.message:
            return None
        raise
    maker.open(0, random_tokens(61, 1), GREEDY, logprobs=VOCAB + 1)
    return divergence(wanted, full_logprobs(maker.run([Row(0, 0, 61, feeds=(0,))])))


@pytest.mark.parametrize("kind", ["mistral-window", "gemma3", "gpt-oss"])
def test_a_prefix_and_copied_blocks_serve_a_sequence_beyond_the_window(kind: str, tmp_path: Path) -> None:
    """A prefix hit reads blocks of another sequence; a fork and a restored sequence read copies."""
    maker, shared = engine(kind, tmp_path), random_tokens(48, 1)
    texts = {
        0: shared + random_tokens(9, 2),
        1: shared + random_tokens(9, 3),
        2: shared + random_tokens(9, 4),
    }
    reference = {slot: reference_logprobs(kind, tokens) for slot, tokens in texts.items()}
    for slot, tokens in texts.items():
        maker.open(slot, tokens, GREEDY, logprobs=VOCAB + 1)
    maker.run([Row(0, 0, 57, feeds=(0,))])
    maker.set_table(1, [*maker.tables[0][:3], maker.free.pop()])
    maker.set_table(2, [maker.free.pop() for _ in range(4)])
    copies = tuple(zip(maker.tables[0][:3], maker.tables[2], strict=False))
    found = full_logprobs(maker.run([Row(1, 48, 8, feeds=(1,)), Row(2, 48, 8, feeds=(2,))], copies))
    assert divergence(torch.stack([reference[slot][55] for slot in (1, 2)]), found) < LIMIT
    found = full_logprobs(maker.run([Row(1, 56, 1, feeds=(1,)), Row(2, 56, 1, feeds=(2,))]))
    assert divergence(torch.stack([reference[slot][56] for slot in (1, 2)]), found) < LIMIT


@pytest.mark.parametrize("chunks", [(61,), (30, 31), (19, 1, 41)])
def test_gemma3_in_a_gguf_file_equals_transformers(chunks: tuple[int, ...], tmp_path: Path) -> None:
    kind, tokens = "gemma3-six", random_tokens(61, 1)
    maker = engine(kind, tmp_path, model_path=write_gguf(kind, tmp_path / "m.gguf"))
    maker.open(0, tokens, GREEDY, logprobs=VOCAB + 1)
    reference, end = reference_logprobs(kind, tokens), 0
    for count in chunks:
        found = full_logprobs(maker.run([Row(0, end, count, feeds=(0,))]))
        end += count
        assert divergence(reference[end - 1 : end], found) < LIMIT


@pytest.mark.parametrize("kind", ["gemma2", "gpt-oss", "cohere2", "starcoder2"])
@pytest.mark.parametrize(
    "options", [{"deterministic": True}, {"dtype": "bf16"}], ids=["deterministic", "bf16"]
)
def test_other_modes_of_an_engine_compute_the_options(
    kind: str, options: dict[str, object], tmp_path: Path
) -> None:
    tokens, limit = random_tokens(61, 1), 5e-3 if options.get("dtype") == "bf16" else LIMIT
    maker = engine(kind, tmp_path, **options)
    maker.open(0, tokens, GREEDY, logprobs=VOCAB + 1)
    reference = reference_logprobs(kind, tokens)
    for start, count in ((0, 44), (44, 17)):
        found = full_logprobs(maker.run([Row(0, start, count, feeds=(0,))]))
        assert divergence(reference[start + count - 1 : start + count], found) < limit


@pytest.mark.parametrize("kind", OPTIONED)
def test_torch_operators_compute_the_options_as_well(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.executor.cpu.engine.COMPILED", {})
    tokens, maker = random_tokens(61, 1), engine(kind, tmp_path)
    reference = reference_logprobs(kind, tokens)
    maker.open(0, tokens, GREEDY, logprobs=VOCAB + 1)
    for start, count in ((0, 40), (40, 20), (60, 1)):
        found = full_logprobs(maker.run([Row(0, start, count, feeds=(0,))]))
        assert divergence(reference[start + count - 1 : start + count], found) < LIMIT
