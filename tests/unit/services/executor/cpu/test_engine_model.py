"""The forward pass against transformers, through paged KV with shuffled block tables."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.executor.plan_maker import GREEDY, PlanMaker, Row
from support.executor.tiny_models import (
    KINDS,
    MORE_KINDS,
    VOCAB,
    full_logprobs,
    random_tokens,
    reference_logprobs,
    save_tiny,
)

from services.executor.cpu.engine import TorchOptions, build

LIMIT = 1e-6


def engine(kind: str, folder: Path, **options: object) -> PlanMaker:
    return PlanMaker(
        build(
            TorchOptions(
                model_path=save_tiny(kind, folder),
                model_name=kind,
                **{"dtype": "f32", "device": "cpu", "blocks": 64, "slots": 20, "threads": 1, **options},
            )
        )
    )


def divergence(reference: torch.Tensor, found: torch.Tensor) -> float:
    """Kullback-Leibler, nats, the worst row."""
    return float((reference.exp() * (reference - found)).sum(-1).max())


@pytest.mark.parametrize("kind", [*KINDS, *MORE_KINDS])
def test_logits_equal_transformers_in_prefill_chunks_and_decode(kind: str, tmp_path: Path) -> None:
    maker = engine(kind, tmp_path)
    texts = {0: random_tokens(61, 1), 7: random_tokens(40, 2)}
    reference = {slot: reference_logprobs(kind, tokens) for slot, tokens in texts.items()}
    for slot, tokens in texts.items():
        maker.open(slot, tokens, GREEDY, logprobs=VOCAB + 1)

    def check(rows: list[Row]) -> None:
        found = full_logprobs(maker.run(rows))
        wanted = torch.stack([reference[row.slot][row.start + row.count - 1] for row in rows])
        assert divergence(wanted, found) < LIMIT

    check([Row(0, 0, 37, feeds=(0,)), Row(7, 0, 1, feeds=(7,))])  # whole prompt beside a single token
    check([Row(7, 1, 18, feeds=(7,)), Row(0, 37, 1, feeds=(0,))])  # chunk with a prefix beside a decode row
    check([Row(0, 38, 10, feeds=(0,)), Row(7, 19, 13, feeds=(7,))])  # two chunks across block edges
    for i in range(8):
        check([Row(0, 48 + i, 1, feeds=(0,)), Row(7, 32 + i, 1, feeds=(7,))])
    check([Row(0, 56, 5, feeds=(0,))])


def test_a_cache_within_the_original_context_has_the_short_longrope(tmp_path: Path) -> None:
    short, long = (engine("phi3-longrope", tmp_path, max_context=each) for each in (32, 33))
    tokens = random_tokens(32, 1)
    wanted = reference_logprobs("phi3-longrope", tokens)[-1:]  # transformers goes by the length
    found = []
    for maker in (short, long):
        maker.open(0, tokens, GREEDY, logprobs=VOCAB + 1)
        found.append(divergence(wanted, full_logprobs(maker.run([Row(0, 0, 32, feeds=(0,))]))))
    assert found[0] < LIMIT < found[1]
    infos = [maker.backend.info for maker in (short, long)]
    assert len({info.fingerprint for info in infos}) == len({info.model_digest for info in infos}) == 2


@pytest.mark.parametrize("kind", ["llama-9-3-tied", "qwen3"])
def test_a_greedy_device_fed_run_equals_transformers(kind: str, tmp_path: Path) -> None:
    maker = engine(kind, tmp_path)
    prompt = random_tokens(21, 3)
    tokens = list(prompt)
    for _ in range(12):
        tokens.append(int(reference_logprobs(kind, tokens)[-1].argmax()))
    maker.open(4, prompt)
    first = maker.prefill({4: len(prompt)}).ids[0]
    assert [first, *maker.decode({4: len(prompt) + 1}, 11)[4]] == tokens[len(prompt) :]


def test_bf16_stays_near_transformers_in_float32(tmp_path: Path) -> None:
    maker = engine("llama-9-3-tied", tmp_path, dtype="bf16")
    tokens = random_tokens(50, 5)
    maker.open(0, tokens, GREEDY, logprobs=VOCAB + 1)
    reference = reference_logprobs("llama-9-3-tied", tokens)
    assert divergence(reference[39:40], full_logprobs(maker.run([Row(0, 0, 40, feeds=(0,))]))) < 0.02
    assert divergence(reference[40:41], full_logprobs(maker.run([Row(0, 40, 1, feeds=(0,))]))) < 0.02


def test_a_deterministic_engine_has_kv_of_its_own(tmp_path: Path) -> None:
    modes = True, False, True
    first, other, again = (engine("llama", tmp_path / "m", deterministic=each).backend.info for each in modes)
    assert first.fingerprint == again.fingerprint != other.fingerprint


def test_a_sharded_folder_gives_the_same_fingerprint_and_ids(tmp_path: Path) -> None:
    prompt = random_tokens(21, 3)
    outputs = []
    for folder, options in (("one", {}), ("many", {"max_shard_size": "40KB"})):
        save_tiny("qwen2", tmp_path / folder, **options)
        backend = build(
            TorchOptions(
                model_path=tmp_path / folder, model_name="m", dtype="f32", device="cpu", blocks=8, slots=1
            )
        )
        maker = PlanMaker(backend)
        maker.open(0, prompt)
        outputs.append((backend.info.fingerprint, list(maker.prefill({0: 21}).ids)))
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 1
    assert outputs[0] == outputs[1]
