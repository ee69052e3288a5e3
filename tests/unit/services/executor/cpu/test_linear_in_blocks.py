"""An engine whose matrices stay in the blocks of a GGUF file (dtype packed)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as GgmlType
from support.executor.plan_maker import PlanMaker, Row
from support.executor.tiny_gguf import tiny_vocabulary, write_gguf, write_model
from support.executor.tiny_models import VOCAB

import kernels.cpu_jit
from kernels.cpu_jit.block_weights import BlockMatrix
from kernels.cpu_jit.packed_weights import PackedProduct
from services.executor.checkpoint.loader import TorchOptions
from services.executor.checkpoint.stored import Cut, Dense
from services.executor.cpu.engine import TorchBackend, build
from services.executor.cpu.linear import Products
from services.executor.quantised.gguf import load_gguf
from services.executor.quantised.gguf_blocks import InBlocks
from shared.errors import SetupError

MIXED = {
    "attn_q.weight": GgmlType.Q4_0,
    "attn_k.weight": GgmlType.Q8_0,
    "attn_v.weight": GgmlType.Q5_1,
    "attn_output.weight": GgmlType.Q4_1,
    "ffn_gate.weight": GgmlType.Q5_0,
    "ffn_up.weight": GgmlType.Q4_1,
    "token_embd.weight": GgmlType.Q8_0,
    "output.weight": GgmlType.Q8_0,
}  # `ffn_down` has 112 columns, no whole blocks: it stays float32, as in files of llama.cpp
TOKENS = 40
CPU = torch.device("cpu")

pytestmark = pytest.mark.skipif(not kernels.cpu_jit.has(*kernels.cpu_jit.BYTES), reason="no AVX2")


def file_of(folder: Path) -> Path:
    return write_gguf("llama", folder / "mixed.gguf", types=MIXED)


def engine(path: Path, dtype: str, **options: object) -> TorchBackend:
    given = {"model_name": "mixed", "device": "cpu", "blocks": 64, "slots": 4, "dtype": dtype, **options}
    return build(TorchOptions(model_path=path, **given))


def logits(backend: TorchBackend, counts: tuple[int, ...] = (TOKENS,), company: int = 0) -> torch.Tensor:
    """After each chunk of a prompt in chunks of these sizes, and after a decode, beside so many tokens of
    another prompt."""
    maker = PlanMaker(backend)
    maker.open(0, [7 * i % VOCAB for i in range(sum(counts) + 1)])
    maker.open(1, [11 * i % VOCAB for i in range(100)])
    found, start = [], 0
    for step, count in enumerate((*counts, 1)):
        beside = [Row(1, step * company, company)] if company else []
        pending = backend.forward(maker.plan([Row(0, start, count, feeds=(0,)), *beside]))
        assert pending.logits is not None
        found.append(pending.logits.clone())
        backend.sample(pending)
        start += count
    return torch.cat(found)


def test_blocks_give_the_logits_of_the_dequantised_file(tmp_path: Path) -> None:
    path = file_of(tmp_path)
    packed, plain = engine(path, "packed"), engine(path, "f32")
    wanted = logits(plain).double().log_softmax(-1)
    found = logits(packed).double().log_softmax(-1)
    assert ((wanted.exp() * (wanted - found)).sum(-1) < 1e-5).all()
    assert not found.equal(wanted)
    assert packed.info.dtype == "packed/f16"
    assert packed.info.fingerprint != engine(path, "bf16").info.fingerprint
    assert packed.info.memory_bytes < plain.info.memory_bytes


def test_inputs_in_8_bits_cost_little_and_are_another_engine(tmp_path: Path) -> None:
    """Mean KL below 0.005. Its KV mixes with that of no other engine."""
    path = file_of(tmp_path)
    eight, packed, plain = (engine(path, dtype) for dtype in ("packed8", "packed", "f32"))
    exact, found, wanted = (logits(each).double().log_softmax(-1) for each in (packed, eight, plain))
    assert 1e-6 < (wanted.exp() * (wanted - found)).sum(-1).mean() < 0.005
    assert not found.equal(exact)
    assert eight.info.dtype == "packed8/f16"
    assert eight.info.fingerprint != packed.info.fingerprint
    assert eight.info.model_digest != packed.info.model_digest


@pytest.mark.parametrize(("kept_in", "sensitive", "terms"), [
    ("packed", False, 2), ("packed8", False, 1), ("packed8", True, 2)
])  # fmt: skip
def test_inputs_have_8_bits_for_these_block_formats(
    kept_in: str, sensitive: bool, terms: int, tmp_path: Path
) -> None:
    _, weights = load_gguf(file_of(tmp_path), torch.float32, CPU, packed=True)
    products = Products(torch.float32, CPU, deterministic=False, kept_in=kept_in)
    product = products.linear(weights.layers[0]["qkv"], sensitive=sensitive)
    assert isinstance(product, PackedProduct)
    assert isinstance(product.matrix, BlockMatrix)
    assert product.matrix.terms == terms


@pytest.mark.parametrize("dtype", ["packed", "packed8"])
def test_all_layers_in_one_call_give_the_bits_of_single_calls(dtype: str, tmp_path: Path) -> None:
    backend = engine(file_of(tmp_path), dtype)
    together = logits(backend)
    assert backend._model._at_once is not None or not kernels.cpu_jit.has("avx512f")  # for `ffn_down`
    backend.reset()
    backend._model._at_once = None
    assert together.equal(logits(backend))


@pytest.mark.parametrize("dtype", ["packed", "packed8"])
@pytest.mark.parametrize("counts", [(TOKENS - 7, 7), (1, 1, 1, TOKENS - 3)])
def test_bits_depend_neither_on_chunks_nor_on_company(
    tmp_path: Path, counts: tuple[int, ...], dtype: str
) -> None:
    """So a request that was interrupted goes on with the same tokens."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = transformers.LlamaConfig(
        **sizes, num_key_value_heads=2, vocab_size=VOCAB, max_position_embeddings=256
    )
    types = dict.fromkeys(("_q.weight", "_v.weight", "_gate.weight"), GgmlType.Q4_1)
    types |= dict.fromkeys(("_k.weight", "_output.weight", "_up.weight", "_down.weight"), GgmlType.Q4_0)
    types |= dict.fromkeys(("embd.weight", "output.weight"), GgmlType.Q8_0)
    torch.manual_seed(3)
    model = transformers.LlamaForCausalLM(config).float().eval()
    path = write_model(model, tmp_path / "all.gguf", tiny_vocabulary, types=types)
    backend = engine(path, dtype)
    whole = logits(backend)
    backend.reset()
    assert whole[-1].equal(logits(backend, counts, company=9)[-1])


def test_deterministic_bits_do_not_depend_on_chunks(tmp_path: Path) -> None:
    backend = engine(file_of(tmp_path), "packed", deterministic=True)
    whole = logits(backend)
    backend.reset()
    assert whole[-1].equal(logits(backend, (TOKENS - 7, 7))[-1])


def test_matrices_stay_as_they_are_in_the_file(tmp_path: Path) -> None:
    _, weights = load_gguf(file_of(tmp_path), torch.bfloat16, CPU, packed=True)
    _, plain = load_gguf(file_of(tmp_path), torch.bfloat16, CPU)
    for layer, wanted in zip(weights.layers, plain.layers, strict=True):
        assert isinstance(layer["qkv"], InBlocks)
        assert [kind for _, kind in layer["qkv"].matrices] == [GgmlType.Q4_0, GgmlType.Q8_0, GgmlType.Q5_1]
        assert isinstance(layer["down"], Dense)
        assert all(layer[name].values.equal(stored.values) for name, stored in wanted.items())
    ids = torch.tensor([3, 130, 3])
    assert weights.embedding.rows(ids).values.equal(plain.embedding.values[ids])


def test_a_part_of_a_matrix(tmp_path: Path) -> None:
    _, weights = load_gguf(file_of(tmp_path), torch.float32, CPU, packed=True)
    out = weights.layers[0]["out"]
    for cut in (Cut(0, 8, 40), Cut(1, 32, 64)):
        wanted = Dense.of(out.values).cut(cut)
        assert out.cut(cut).shape == wanted.shape
        assert out.cut(cut).values.equal(wanted.values)
    with pytest.raises(SetupError, match=r"cannot share columns of Q4_1 at 0 and 16: its blocks have 32"):
        out.cut(Cut(1, 0, 16))
    plain = Dense.of(torch.ones(2, 64))
    assert out.join([plain]).values.equal(torch.cat((out.values, plain.values)))
