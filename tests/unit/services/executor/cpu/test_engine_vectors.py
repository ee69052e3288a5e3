"""The vector of a prompt: the last token's hidden state of transformers, from every format and way to compute
it."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.executor.plan_maker import GREEDY, PlanMaker, Row
from support.executor.tiny_models import VOCAB, random_tokens, save_tiny, tiny_model

from services.executor.cpu.engine import TorchOptions, build
from services.executor.engine import sequence_error
from shared.errors import SetupError
from shared.messages import WHOLE_VECTOR, Sampling, SlotOpen, ints

KIND = "qwen3"
HOT = Sampling(temperature=1.2, top_k=30)
PROMPTS = {0: random_tokens(61, 1), 3: random_tokens(16, 2), 5: random_tokens(1, 3)}


def engine(folder: Path, **options: Any) -> PlanMaker:
    usual = {"dtype": "f32", "device": "cpu", "blocks": 64, "slots": 20, "threads": 1}
    return PlanMaker(build(TorchOptions(model_path=folder, model_name=KIND, **{**usual, **options})))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(KIND, tmp_path_factory.mktemp("tiny"))


def wanted(tokens: list[int], kind: str = KIND) -> torch.Tensor:
    """transformers' last hidden state, after the final norm, of length 1."""
    with torch.no_grad():
        state = tiny_model(kind).model(torch.tensor([tokens])).last_hidden_state[0, -1].double()
    return state / state.norm()


def vectors(maker: PlanMaker, rows: list[Row]) -> list[torch.Tensor]:
    found = maker.run(rows)
    assert [index for index, _ in found.vectors] == list(range(len(found.ids)))
    return [torch.frombuffer(bytearray(data), dtype=torch.float32) for _, data in found.vectors]


def one(maker: PlanMaker, tokens: list[int], slot: int = 0) -> torch.Tensor:
    maker.open(slot, tokens, GREEDY, pooling=WHOLE_VECTOR)
    (vector,) = vectors(maker, [Row(slot, 0, len(tokens), feeds=(slot,))])
    return vector


@pytest.mark.parametrize(
    ("options", "least"),
    [
        ({"deterministic": True}, 0.999999),
        ({}, 0.999999),
        ({"dtype": "bf16"}, 0.9995),
        ({"dtype": "int8"}, 0.998),
    ],
    ids=["reference", "compiled", "bf16", "int8"],
)
def test_vector_equals_the_last_hidden_state_of_transformers(
    folder: Path, options: dict[str, Any], least: float
) -> None:
    maker = engine(folder, **options)
    for slot, tokens in PROMPTS.items():
        maker.open(slot, tokens, GREEDY, pooling=WHOLE_VECTOR)
    found = vectors(maker, [Row(slot, 0, len(tokens), feeds=(slot,)) for slot, tokens in PROMPTS.items()])
    for vector, tokens in zip(found, PROMPTS.values(), strict=True):
        assert float(vector.double().norm()) == pytest.approx(1, abs=1e-6)
        assert float(vector.double() @ wanted(tokens)) > least


@pytest.mark.parametrize("kind", ["llama-9-3-tied", "qwen2", "qwen3-moe"])
def test_other_families_have_one_too(kind: str, tmp_path: Path) -> None:
    tokens = PROMPTS[0]
    assert float(one(engine(save_tiny(kind, tmp_path)), tokens).double() @ wanted(tokens, kind)) > 0.9999


@pytest.mark.parametrize("deterministic", [True, False])
def test_chunks_and_prefix_hits_give_the_same_vector(folder: Path, deterministic: bool) -> None:
    maker, tokens = engine(folder, deterministic=deterministic), PROMPTS[0]
    whole = one(maker, tokens)
    maker.open(1, tokens, GREEDY, pooling=WHOLE_VECTOR)
    for start in range(0, 60, 15):
        assert not maker.run([Row(1, start, 15)]).vectors
    (chunked,) = vectors(maker, [Row(1, 60, 1, feeds=(1,))])
    maker.open(2, tokens, GREEDY, pooling=WHOLE_VECTOR, computed=48)
    maker.set_table(2, [*maker.tables[0][:3], maker.free.pop()])
    (hit,) = vectors(maker, [Row(2, 48, 13, feeds=(2,))])
    for vector in (chunked, hit):
        assert torch.equal(vector, whole) if deterministic else torch.allclose(vector, whole, atol=1e-6)


def test_leading_numbers_have_the_length_1_again(folder: Path) -> None:
    maker, tokens = engine(folder), PROMPTS[0]
    whole = one(maker, tokens)
    maker.open(1, tokens, GREEDY, pooling=8)
    (cut,) = vectors(maker, [Row(1, 0, len(tokens), feeds=(1,))])
    assert len(cut) == 8
    assert torch.allclose(cut, whole[:8] / whole[:8].norm(), atol=1e-6)


def test_the_tokens_beside_it_are_the_same(folder: Path) -> None:
    """Chats, some with penalties and log probabilities, alone and with prompts for vectors in their steps."""

    def answers(maker: PlanMaker, *, beside: bool) -> list[list[int]]:
        for slot in range(4):
            penalty = {"frequency_penalty": 0.5} if slot == 1 else {}
            sampling = Sampling(temperature=1.2, top_k=30, **penalty)
            maker.open(slot, PROMPTS[0][slot:], sampling, seed=slot, logprobs=2 * (slot == 2))
        ids = [maker.run([Row(s, 0, 61 - s, feeds=(s,)) for s in range(4)]).ids]
        for turn in range(8):
            rows = [Row(s, 61 - s + turn, 1, True, (s,)) for s in range(4)]
            if beside:
                tokens = random.Random(turn).choices(range(VOCAB), k=20)
                maker.open(9, tokens, GREEDY, pooling=WHOLE_VECTOR, max_length=21)
                rows.append(Row(9, 0, 20, feeds=(9,)))
            found = maker.run(rows)
            assert [index for index, _ in found.vectors] == [4] * beside
            ids.append(found.ids[:4])
        return [list(each) for each in ids]

    assert answers(engine(folder), beside=True) == answers(engine(folder), beside=False)


def test_the_slot_is_plain_when_it_is_opened_again(folder: Path) -> None:
    maker = engine(folder)
    one(maker, PROMPTS[0])
    maker.open(0, PROMPTS[0], GREEDY)
    assert not maker.run([Row(0, 0, 61, feeds=(0,))]).vectors


def refusal(maker: PlanMaker, pooling: int = WHOLE_VECTOR) -> str:
    opened = SlotOpen(slot=0, generation=0, seq=0, prompt_tokens=1, tokens=ints([1]), pooling=pooling)
    return sequence_error(opened, maker.backend.info)


def sentence_transformers(folder: Path, pooling: dict[str, Any], *more: str) -> Path:
    """The folder of a model, as sentence-transformers writes it: names without a prefix."""
    save_tiny(KIND, folder)
    tensors = load_file(folder / "model.safetensors")
    del tensors["lm_head.weight"]
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    save_file({n.removeprefix("model."): t for n, t in tensors.items()}, folder / "model.safetensors")
    kinds = ["Transformer", "Pooling", *more, "Normalize"]
    modules = [
        {"idx": i, "path": f"{i}_{kind}" if i else "", "type": f"sentence_transformers.models.{kind}"}
        for i, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 36, **pooling}))
    return folder


def test_a_folder_of_sentence_transformers_pools_its_last_token(tmp_path: Path) -> None:
    modes = {"pooling_mode_cls_token": False, "pooling_mode_lasttoken": True}
    maker = engine(sentence_transformers(tmp_path, modes))
    assert refusal(maker) == ""
    assert float(one(maker, PROMPTS[0]).double() @ wanted(PROMPTS[0])) > 0.999999


@pytest.mark.parametrize(
    ("pooling", "more", "named"),
    [
        ({"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": False}, (), "pooling mean_tokens"),
        ({"pooling_mode_cls_token": True}, (), "pooling cls_token"),
        ({"pooling_mode_cls_token": True, "pooling_mode_lasttoken": True}, (), "cls_token.lasttoken"),
        ({"pooling_mode": "mean"}, (), "pooling mean"),
        ({"pooling_mode_lasttoken": True}, ("Dense",), "a module Dense"),
    ],
)
def test_other_ways_are_refused_by_name(
    tmp_path: Path, pooling: dict[str, Any], more: tuple[str, ...], named: str
) -> None:
    maker = engine(sentence_transformers(tmp_path, pooling, *more))
    assert named.replace(".", "+") in refusal(maker)
    assert "the last token" in refusal(maker)
    assert refusal(maker, 0) == ""  # it generates all the same


def test_more_numbers_than_there_are_is_refused(folder: Path) -> None:
    hidden = tiny_model(KIND).config.hidden_size
    assert refusal(engine(folder), hidden) == ""
    assert f"have {hidden} numbers, and not {hidden + 1}" in refusal(engine(folder), hidden + 1)


def test_a_damaged_configuration_is_named(tmp_path: Path) -> None:
    folder = sentence_transformers(tmp_path, {"pooling_mode_lasttoken": True})
    (folder / "1_Pooling" / "config.json").write_text("{")
    with pytest.raises(SetupError, match="1_Pooling"):
        engine(folder)
