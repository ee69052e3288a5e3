"""The engine of encoders: transformers' vectors in any step; models and requests that are refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.executor.gpu_side import DEVICE
from support.executor.plan_maker import GREEDY, PlanMaker, Row
from support.executor.tiny_encoders import CONTEXT, KINDS, encoder_folder, wanted_vector

from services.executor.checkpoint.loader import TorchOptions
from services.executor.encoder.engine import build
from services.executor.encoder.model import is_encoder
from services.executor.engine import sequence_error
from shared.errors import SetupError
from shared.messages import WHOLE_VECTOR, SlotOpen, ints

LENGTHS = (5, 17, 33, 33, 1, 60, 158)


def texts() -> list[list[int]]:
    torch.manual_seed(3)
    return [torch.randint(5, 60, (length,)).tolist() for length in LENGTHS]


def engine(folder: Path, **options: Any) -> PlanMaker:
    usual = {"dtype": "f32", "device": DEVICE, "slots": 20, "threads": 1}
    return PlanMaker(build(TorchOptions(model_path=folder, model_name="e", **{**usual, **options})))


def vectors(maker: PlanMaker, given: list[list[int]]) -> list[torch.Tensor]:
    for slot, ids in enumerate(given):
        maker.open(slot, ids, GREEDY, pooling=WHOLE_VECTOR)
    found = maker.run([Row(slot, 0, len(ids), feeds=(slot,)) for slot, ids in enumerate(given)])
    assert [row for row, _ in found.vectors] == [*range(len(given))]
    return [torch.frombuffer(bytearray(data), dtype=torch.float32).double() for _, data in found.vectors]


@pytest.mark.parametrize(
    ("kind", "options", "pooling", "least"),
    [
        *((kind, {}, "", 0.999999) for kind in KINDS),
        ("bert", {"deterministic": True}, "mean_tokens", 0.999999),
        ("bert", {}, "cls_token", 0.999999),
        ("xlm-roberta", {}, "lasttoken", 0.999999),
        ("bert", {"dtype": "bf16"}, "mean_tokens", 0.999),
        ("bert", {"dtype": "int8", "device": "cpu"}, "mean_tokens", 0.998),
    ],
)
def test_encoder_gives_the_vectors_of_transformers(
    tmp_path: Path, kind: str, options: dict[str, Any], pooling: str, least: float
) -> None:
    maker = engine(encoder_folder(kind, tmp_path, pooling), **options)
    maker.backend.warm_up()
    for ids, vector in zip(texts(), vectors(maker, texts()), strict=True):
        assert float(vector.norm()) == pytest.approx(1, abs=1e-6)
        assert float(vector @ wanted_vector(kind, ids, pooling or "mean_tokens")) > least


@pytest.mark.parametrize("prefix", ["", "bert."])
def test_old_names_and_buffers_of_a_checkpoint_are_read(tmp_path: Path, prefix: str) -> None:
    """BERT's first checkpoints, such as bert-base-uncased, call the parts of a norm gamma and beta."""
    folder = encoder_folder("bert", tmp_path)
    file = folder / "model.safetensors"

    def old(name: str) -> str:
        return prefix + name.replace("Norm.weight", "Norm.gamma").replace("Norm.bias", "Norm.beta")

    tensors = {old(name): tensor for name, tensor in load_file(file).items()}
    heads = {
        "cls.predictions.transform.LayerNorm.gamma": torch.ones(64),
        "cls.predictions.bias": torch.ones(9),
    }
    save_file({**tensors, **heads, f"{prefix}embeddings.position_ids": torch.arange(CONTEXT)[None]}, file)
    for ids, vector in zip(texts(), vectors(engine(folder), texts()), strict=True):
        assert float(vector @ wanted_vector("bert", ids)) > 0.999999


@pytest.mark.parametrize(
    ("name", "tensor", "named"),
    [
        ("embeddings.LayerNorm.gamma", torch.ones(64), r"'embeddings\.LayerNorm\.weight' twice"),
        ("embeddings.LayerNorm.weight", torch.ones(64, dtype=torch.int8), "is I8, not supported"),
    ],
)
def test_tensors_that_could_be_misread_are_refused(
    tmp_path: Path, name: str, tensor: torch.Tensor, named: str
) -> None:
    folder = encoder_folder("bert", tmp_path)
    save_file({**load_file(folder / "model.safetensors"), name: tensor}, folder / "model.safetensors")
    with pytest.raises(SetupError, match=named):
        engine(folder)


def test_chunks_and_prefix_hits_and_other_texts_change_nothing(tmp_path: Path) -> None:
    maker, ids = engine(encoder_folder("bert", tmp_path), deterministic=True), texts()[-1]
    (alone,) = vectors(maker, [ids])
    assert torch.equal(vectors(maker, texts())[-1], alone)
    maker.open(9, ids, GREEDY, pooling=WHOLE_VECTOR, computed=16)
    assert not maker.run([Row(9, 16, 64)]).vectors
    ((_, found),) = maker.run([Row(9, 80, len(ids) - 80, feeds=(9,))]).vectors
    assert found == alone.float().numpy().tobytes()


def test_a_request_for_text_is_refused_and_harms_no_vector(tmp_path: Path) -> None:
    maker = engine(encoder_folder("bert", tmp_path))
    assert maker.backend.info.hidden == 64
    opened = SlotOpen(slot=0, generation=0, seq=0, prompt_tokens=1, tokens=ints([7]))
    assert "encoder" in sequence_error(opened, maker.backend.info)
    maker.open(0, [7], GREEDY)
    maker.open(1, [7, 8], GREEDY, pooling=8)
    found = maker.run([Row(0, 0, 1, feeds=(0,)), Row(1, 0, 2, feeds=(1,))])
    assert [(row, len(data)) for row, data in found.vectors] == [(1, 32)]


def test_a_vector_that_is_not_finite_fails_its_row_alone(tmp_path: Path) -> None:
    folder = encoder_folder("bert", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["embeddings.word_embeddings.weight"][50] = torch.nan
    save_file(tensors, folder / "model.safetensors")
    maker = engine(folder)
    for slot, ids in enumerate(([7, 8], [50, 9])):
        maker.open(slot, ids, GREEDY, pooling=WHOLE_VECTOR)
    found = maker.run([Row(slot, 0, 2, feeds=(slot,)) for slot in range(2)])
    assert [row for row, _ in found.vectors] == [0]
    assert [row for row, _ in found.row_errors] == [1]
    assert (list(found.ids), list(found.done)) == ([0, -1], [1, 2])


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"hidden_act": "relu"}, "relu"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ({"is_decoder": True}, "is_decoder"),
        ({"architectures": ["BertForSequenceClassification"]}, "BertForSequenceClassification"),
        ({"surprise": 3}, "surprise"),
        ({"num_attention_heads": 7}, "fit no model"),
        ({"num_hidden_layers": 10**9}, "fit no model"),
        ({"intermediate_size": 96}, "intermediate.dense"),
        ({"hidden_size": None}, "encoder's configuration"),
    ],
)
def test_another_model_is_refused_by_name(tmp_path: Path, change: dict[str, Any], named: str) -> None:
    folder = encoder_folder("bert", tmp_path)
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    assert is_encoder(folder)
    with pytest.raises(SetupError, match=named):
        engine(folder)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"dtype": "packed"}, "dtype packed"),
        ({"kv_dtype": "fp8"}, "no KV cache"),
        ({"max_context": CONTEXT + 1}, "max_context"),
    ],
)
def test_options_that_cannot_work_are_named(tmp_path: Path, options: dict[str, Any], named: str) -> None:
    with pytest.raises(SetupError, match=named):
        engine(encoder_folder("bert", tmp_path), **options)


def test_damaged_weights_and_other_poolings_are_named(tmp_path: Path) -> None:
    folder = encoder_folder("bert", tmp_path, "max_tokens")
    with pytest.raises(SetupError, match="max_tokens"):
        engine(folder)
    (folder / "sentence_bert_config.json").write_text('{"surprise": 3}')
    with pytest.raises(SetupError, match=r"surprise = 3 in sentence_bert_config\.json is not supported"):
        engine(folder)
    (folder / "modules.json").unlink()
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(SetupError, match="safetensors"):
        engine(folder)
