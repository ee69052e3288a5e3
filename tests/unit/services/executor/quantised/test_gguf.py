"""GGUF files, written here with the gguf library as llama.cpp's converter would."""

from __future__ import annotations

import weakref
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from support.executor.plan_maker import PlanMaker
from support.executor.tiny_gguf import write_gguf
from support.executor.tiny_models import reference_logprobs, save_tiny, tiny_model

from services.executor.checkpoint.stored import Cut
from services.executor.checkpoint.weights import load_hf
from services.executor.cpu.engine import TorchOptions, build
from services.executor.quantised.gguf import GgufTensors, load_gguf
from shared.errors import SetupError
from shared.vocab.files import ModelFiles
from shared.vocab.vocabulary import load_vocabulary

CPU = torch.device("cpu")


@pytest.mark.parametrize("kind", ["llama", "llama-9-3-tied", "llama-bias", "mistral", "qwen2", "qwen3"])
def test_a_gguf_file_holds_the_same_model_as_its_folder(kind: str, tmp_path: Path) -> None:
    shapes, weights = load_gguf(write_gguf(kind, tmp_path / "m.gguf"), torch.float32, CPU)
    hf_shapes, hf_weights = load_hf(save_tiny(kind, tmp_path), torch.float32, CPU)
    for name in ("layers", "hidden", "heads", "kv_heads", "head_dim", "vocab", "tied", "qkv_bias", "qk_norm"):
        assert getattr(shapes, name) == getattr(hf_shapes, name)
    assert torch.equal(weights.head.values, hf_weights.head.values)
    for ours, theirs in zip(weights.layers, hf_weights.layers, strict=True):
        assert ours.keys() == theirs.keys()
        for name, stored in ours.items():
            assert torch.equal(stored.values, theirs[name].values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q8_0"])
def test_rows_of_an_embedding_are_read_from_the_file_and_take_no_memory(
    kind: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    types = {"token_embd.weight": gguf.GGMLQuantizationType[kind]}
    path = write_gguf("llama", tmp_path / "m.gguf", types={} if kind == "F32" else types)
    _, weights = load_gguf(path, dtype, CPU)
    embedding = weights.embedding
    whole, shape = weakref.ref(embedding.values), embedding.shape
    wanted, ids = embedding.values.clone(), torch.tensor([3, 130, 3])
    assert torch.equal(embedding.rows(ids).values, wanted[ids])
    assert torch.equal(embedding.cut(Cut(0, 2, 9)).values, wanted[2:9])
    embedding = embedding.for_rows()
    del weights
    assert whole() is None
    assert (embedding.shape, embedding.rows(ids).shape) == (shape, (3, shape[1]))
    rows = embedding.rows(ids).values
    assert (rows.dtype, embedding.data[0].dtype) == (dtype, dtype)
    assert torch.equal(rows, wanted[ids])
    assert torch.equal(embedding.values, wanted)
    assert torch.equal(embedding.join([embedding]).values, torch.cat([wanted, wanted]))


def test_an_embedding_of_a_type_that_takes_long_to_read_stays_in_memory(tmp_path: Path) -> None:
    types = {"token_embd.weight": gguf.GGMLQuantizationType.Q5_0}
    _, weights = load_gguf(write_gguf("llama", tmp_path / "m.gguf", types=types), torch.float32, CPU)
    before = weights.embedding.values
    assert weights.embedding.for_rows().values is before


def test_biases_of_q_and_k_are_put_back_like_their_weights(tmp_path: Path) -> None:
    """llama.cpp's converter permutes both where it writes the architecture llama."""
    _, weights = load_gguf(write_gguf("qwen2", tmp_path / "m.gguf", architecture="llama"), torch.float32, CPU)
    _, hf_weights = load_hf(save_tiny("qwen2", tmp_path), torch.float32, CPU)
    for ours, theirs in zip(weights.layers, hf_weights.layers, strict=True):
        assert torch.equal(ours["qkv"].values, theirs["qkv"].values)
        assert torch.equal(ours["qkv_bias"].values, theirs["qkv_bias"].values)


def test_a_bias_of_one_layer_alone_is_refused(tmp_path: Path) -> None:
    extra = {"blk.1.attn_q.bias": np.zeros(64, dtype=np.float32)}
    path = write_gguf("llama", tmp_path / "m.gguf", extra=extra)
    with pytest.raises(SetupError, match=r"does not compute: blk\.1\.attn_q\.bias"):
        load_gguf(path, torch.float32, CPU)


def test_tensors_of_another_shape_are_refused(tmp_path: Path) -> None:
    path = write_gguf("llama", tmp_path / "m.gguf", more={"tokenizer.ggml.tokens": ["a"] * 140})
    with pytest.raises(SetupError, match=r"'token_embd.weight' is \[131, 64\], where .* gives \[140, 64\]"):
        load_gguf(path, torch.float32, CPU)


def test_scaled_frequencies_come_from_the_rope_tensor(tmp_path: Path) -> None:
    """llama.cpp stores Llama 3's scaling as divisors of the frequencies."""
    model = tiny_model("llama3-rope")
    plain = 10000.0 ** (-np.arange(0, 16, 2) / 16)
    factors = (plain / model.model.rotary_emb.inv_freq.double().numpy()).astype(np.float32)
    path = write_gguf("llama3-rope", tmp_path / "m.gguf", extra={"rope_freqs.weight": factors})
    maker = PlanMaker(build(TorchOptions(model_path=path, model_name="m", device="cpu", blocks=8, slots=1)))
    prompt = list(range(60))
    maker.open(0, prompt)
    assert maker.prefill({0: 60}).ids[0] == int(reference_logprobs("llama3-rope", prompt)[-1].argmax())
    assert max(factors) > 7.9


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_1"])
def test_tensor_types_equal_the_gguf_library_bit_for_bit(kind: str, tmp_path: Path) -> None:
    values = np.random.default_rng(1).standard_normal((6, 96)).astype(np.float32)
    packed = gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind])
    writer = gguf.GGUFWriter(tmp_path / "t.gguf", "llama")
    writer.add_tensor("t", packed, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    wanted = gguf.quants.dequantize(packed, gguf.GGMLQuantizationType[kind])
    found = GgufTensors(tmp_path / "t.gguf").read("t")
    assert found.shape == (6, 96)
    assert np.array_equal(found.numpy(), wanted)


def test_another_architecture_is_refused_by_name(tmp_path: Path) -> None:
    path = write_gguf("llama", tmp_path / "m.gguf", architecture="gemma4")
    with pytest.raises(
        SetupError, match=r"architecture 'gemma4' is not supported; .* llama, mistral, qwen2, qwen3"
    ):
        load_gguf(path, torch.float32, CPU)


def test_a_tensor_we_would_not_compute_is_refused(tmp_path: Path) -> None:
    extra = {"blk.0.ffn_gate_inp.weight": np.zeros((4, 64), dtype=np.float32)}
    path = write_gguf("llama", tmp_path / "m.gguf", extra=extra)
    with pytest.raises(SetupError, match=r"does not compute: blk\.0\.ffn_gate_inp\.weight"):
        load_gguf(path, torch.float32, CPU)


def test_a_file_cut_short_is_refused(tmp_path: Path) -> None:
    path = write_gguf("llama", tmp_path / "m.gguf")
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(SetupError, match=r"not a whole GGUF file .*past the end.*fetch the model again"):
        load_gguf(path, torch.float32, CPU)


def test_equal_numbers_for_each_layer_are_one_number(tmp_path: Path) -> None:
    """As llama.cpp's converters write them for models whose layers may differ."""
    plain, weights = load_gguf(write_gguf("llama", tmp_path / "a.gguf"), torch.float32, CPU)
    layers = plain.layers
    more = {
        "llama.attention.head_count": [plain.heads] * layers,
        "llama.attention.head_count_kv": [plain.kv_heads] * layers,
        "llama.feed_forward_length": [plain.intermediate] * layers,
    }
    types = dict.fromkeys(("attn_norm.weight", "ffn_norm.weight"), gguf.GGMLQuantizationType.F16)
    found, same = load_gguf(
        write_gguf("llama", tmp_path / "b.gguf", more=more, types=types), torch.float32, CPU
    )
    assert found == plain
    assert torch.equal(same.layers[-1]["qkv"].values, weights.layers[-1]["qkv"].values)


@pytest.mark.parametrize(
    ("numbers", "reason"),
    [
        (
            [112, 112, 96],
            r"feed_forward_length with layers of different sizes, \[112, 112, 96\], is not supported",
        ),
        ([112] * 2, "feed_forward_length has 2 numbers, and not one for each layer"),
    ],
)
def test_numbers_that_differ_between_layers_are_refused(
    numbers: list[int], reason: str, tmp_path: Path
) -> None:
    path = write_gguf("llama", tmp_path / "m.gguf", more={"llama.feed_forward_length": numbers})
    with pytest.raises(SetupError, match=rf"m\.gguf.*{reason}"):
        load_gguf(path, torch.float32, CPU)


def test_a_file_of_the_other_byte_order_is_refused_for_that_reason(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama", endianess=gguf.GGUFEndian.BIG)
    writer.add_tensor("token_embd.weight", np.ones((2, 32), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    for read in (lambda: load_gguf(path, torch.float32, CPU), lambda: load_vocabulary(ModelFiles("m", path))):
        with pytest.raises(
            SetupError, match=r"m\.gguf is .* big-endian order.*gguf-convert-endian FILE little"
        ):
            read()


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        (
            {"split.no": 1, "split.count": 3},
            "one part of several.*--merge",
        ),  # the first one has the model's keys
        ({"general.type": "adapter", "general.architecture": "llama"}, "of type 'adapter'.*give a model"),
        ({"general.type": "mmproj", "general.architecture": "clip"}, "of type 'mmproj'.*give a model"),
    ],
)
def test_a_file_that_holds_no_whole_model_is_refused_for_that_reason(
    keys: dict[str, object], reason: str, tmp_path: Path
) -> None:
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.kv_data[0].clear()
    for key, value in keys.items():
        writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    for read in (lambda: load_gguf(path, torch.float32, CPU), lambda: load_vocabulary(ModelFiles("m", path))):
        with pytest.raises(SetupError, match=rf"m\.gguf: .*{reason}"):
            read()


@pytest.mark.parametrize(
    ("before", "new", "reason"),
    [
        (b"output_norm.weight\1\0\0\0\x40" + bytes(7), b"\x0c", "not in whole blocks of Q4_K"),
        (b"blk.1.attn_", b"k", "two tensors have one name"),
        (b"general.alignment\5\0\0\0", b"\0", "an alignment of 0 bytes"),
        (b"llama.block_count\4\0\0\0", b"\xff\xff\xff\x7f", "no model has these numbers"),
    ],
)
def test_changed_bytes_of_a_header_are_an_error_that_names_the_file(
    before: bytes, new: bytes, reason: str, tmp_path: Path
) -> None:
    path = write_gguf("llama", tmp_path / "m.gguf", more={"general.alignment": 32})
    data = bytearray(path.read_bytes())
    at = data.index(before) + len(before)
    data[at : at + len(new)] = new
    path.write_bytes(data)
    with pytest.raises(SetupError, match=rf"m\.gguf is not .*{reason}.*fetch the model again"):
        load_gguf(path, torch.float32, CPU, packed=True)
