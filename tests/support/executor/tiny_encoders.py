"""Small random encoders, made by transformers, with tokenizers of their kinds."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import torch
import transformers
from support.text_models import TEXT
from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers, processors, trainers
from tokenizers.models import BPE, Unigram, WordPiece

KINDS = {"bert": ("[CLS]", "[SEP]"), "roberta": ("<s>", "</s>"), "xlm-roberta": ("<s>", "</s>")}
CONTEXT = 160
_PARTS = {  # model, trainer, pre-tokenizer, decoder, normalizer
    "bert": (
        WordPiece(unk_token="[UNK]"), trainers.WordPieceTrainer, pre_tokenizers.BertPreTokenizer(),
        decoders.WordPiece(), normalizers.BertNormalizer(lowercase=True),
    ),
    "roberta": (
        BPE(), trainers.BpeTrainer, pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(), None,
    ),
    "xlm-roberta": (
        Unigram(), trainers.UnigramTrainer, pre_tokenizers.Metaspace(), decoders.Metaspace(),
        normalizers.NFKC(),
    ),
}  # fmt: skip


@functools.cache
def tokenizer_of(kind: str) -> Tokenizer:
    """Trained on a short text, which gives other tokens in each process. The control tokens of the kind are
    around each text."""
    model, trainer, splits, decoder, normalizer = _PARTS[kind]
    begin, end = KINDS[kind]
    unknown = "[UNK]" if kind == "bert" else "<unk>"
    special = [begin, "[PAD]" if kind == "bert" else "<pad>", end, unknown, "<mask>"]
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer, tokenizer.decoder = splits, decoder
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    more = {"unk_token": unknown} if kind == "xlm-roberta" else {}
    made = trainer(vocab_size=300, special_tokens=special, show_progress=False, **more)
    tokenizer.train_from_iterator([TEXT], made)
    around = [(begin, tokenizer.token_to_id(begin)), (end, tokenizer.token_to_id(end))]
    tokenizer.post_processor = processors.TemplateProcessing(f"{begin} $A {end}", special_tokens=around)
    return tokenizer


@functools.cache
def encoder(kind: str) -> transformers.PreTrainedModel:
    """The model of a kind, float32; every parameter random, norms around one."""
    torch.manual_seed(5)
    config = transformers.CONFIG_MAPPING[kind](
        vocab_size=tokenizer_of(kind).get_vocab_size(),
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=112,
        max_position_embeddings=CONTEXT,
        pad_token_id=1,
    )
    model = transformers.AutoModel.from_config(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            parameter.copy_(1 + 0.2 * noise if name.endswith("LayerNorm.weight") else 0.2 * noise)
    return model


def encoder_folder(kind: str, folder: Path, pooling: str = "") -> Path:
    """The model of a kind and its tokenizer as a Hugging Face folder; with a `pooling` as the library
    sentence-transformers writes one."""
    encoder(kind).save_pretrained(folder)
    tokenizer_of(kind).save(str(folder / "tokenizer.json"))
    begin, end = KINDS[kind]
    names = {"cls_token": begin, "sep_token": end}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    if pooling:
        kinds = ("Transformer", "Pooling", "Normalize")
        library = "sentence_transformers.models"
        modules = [
            {"path": f"{i}_{each}" if i else "", "type": f"{library}.{each}"} for i, each in enumerate(kinds)
        ]
        (folder / "modules.json").write_text(json.dumps(modules))
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(json.dumps({f"pooling_mode_{pooling}": True}))
    return folder


def wanted_vector(kind: str, ids: list[int], pooling: str = "mean_tokens") -> torch.Tensor:
    """transformers' last hidden states, pooled, of length 1, in float64."""
    with torch.no_grad():
        states = encoder(kind)(torch.tensor([ids])).last_hidden_state[0].double()
    state = {"mean_tokens": states.mean(0), "cls_token": states[0], "lasttoken": states[-1]}[pooling]
    return state / state.norm()
