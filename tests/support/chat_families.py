"""Small chat models of each family that is read, in both formats: a folder written by transformers, a GGUF
file by the gguf library, of the same random weights and the same tokens.

Templates, control tokens, pre-tokenizers and what precedes a text are the family's own; words and weights are
not.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import torch
import transformers  # its models are imported when one is made
from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers, processors, trainers
from tokenizers.models import BPE

from shared.vocab.gguf import merges_from_scores, pre_tokenizer
from support.executor.tiny_gguf import write_model
from support.text_models import TEXT

_LLAMA3 = (
    "{% for m in messages %}{% set c = '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' + "
    "m['content'] | trim + '<|eot_id|>' %}{% if loop.first %}{% set c = bos_token + c %}{% endif %}{{ c }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
    "{% endif %}"
)
_QWEN2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_QWEN3 = (
    "{%- for m in messages %}\n{%- set content = m.content %}\n"
    "{%- if m.role == 'assistant' and '</think>' in content %}\n"
    "{%- set content = content.split('</think>')[-1].lstrip('\\n') %}\n{%- endif %}\n"
    "{{- '<|im_start|>' + m.role + '\\n' + content + '<|im_end|>\\n' }}\n{%- endfor %}\n"
    "{%- if add_generation_prompt %}\n{{- '<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n' }}\n"
    "{%- endif %}"
)
_MISTRAL = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% elif m['role'] == 'assistant' %}{{ ' ' + m['content'] + eos_token }}"
    "{% else %}{{ m['content'] + '\n' }}{% endif %}{% endfor %}"
)
_SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True, kw_only=True)
class Family:
    """What distinguishes a family; `controls` begin with bos and eos ("" where there is none)."""

    make: Callable[[int], transformers.PreTrainedModel]  # by the size of its vocabulary
    controls: tuple[str, ...]
    template: str
    pre: str = ""  # of byte-level BPE by llama.cpp's name; "" = SentencePiece
    markup: tuple[str, ...] = ()  # added, and not special
    begins: bool = False  # its tokenizer puts bos before a text
    spaces: str = "always"  # SentencePiece: a space before each piece, or before the "first" one


def _model(name: str, **config: Any) -> transformers.PreTrainedModel:
    made = getattr(transformers, f"{name}Config")(**_SIZES, **config)
    return getattr(transformers, f"{name}ForCausalLM")(made)


FAMILIES = {
    "llama 3": Family(
        make=lambda n: _model("Llama", vocab_size=n),
        controls=("<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"),
        template=_LLAMA3,
        pre="llama-bpe",
        begins=True,
    ),
    "qwen2": Family(
        make=lambda n: _model("Qwen2", vocab_size=n),
        controls=("", "<|im_end|>", "<|im_start|>", "<|endoftext|>"),
        template=_QWEN2,
        pre="qwen2",
    ),
    "qwen3": Family(
        make=lambda n: _model("Qwen3", vocab_size=n, head_dim=16),
        controls=("", "<|im_end|>", "<|im_start|>", "<|endoftext|>"),
        markup=("<think>", "</think>", "<tool_call>", "</tool_call>"),
        template=_QWEN3,
        pre="qwen2",
    ),
    "smollm": Family(
        make=lambda n: _model("Llama", vocab_size=n),
        controls=("<|im_start|>", "<|im_end|>", "<|endoftext|>"),
        template=_QWEN2,
        pre="smollm",
    ),
    "llama 2": Family(
        make=lambda n: _model("Llama", vocab_size=n),
        controls=("<s>", "</s>", "<unk>"),
        template=_MISTRAL,
        begins=True,
    ),
    "mistral": Family(
        make=lambda n: _model("Mistral", vocab_size=n, sliding_window=None),
        controls=("<s>", "</s>", "<unk>", "[INST]", "[/INST]"),
        template=_MISTRAL,
        begins=True,
        spaces="first",
    ),
}


@functools.cache
def tokenizer_of(name: str) -> Tokenizer:
    """The tokenizer that the family's folder holds."""
    family = FAMILIES[name]
    controls = [token for token in family.controls if token]
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizer(family.pre) if family.pre else pre_tokenizers.Metaspace()
    alphabet = pre_tokenizers.ByteLevel.alphabet() if family.pre else []
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=controls, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    if family.pre:
        tokenizer.decoder = decoders.ByteLevel()
        if "qwen" in family.pre:
            tokenizer.normalizer = normalizers.NFC()
    else:
        tokenizer = _sentencepiece(tokenizer.get_vocab(), controls, family.spaces)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in controls])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in family.markup])
    if family.begins:
        bos = controls[0]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
    return tokenizer


def _sentencepiece(trained: dict[str, int], controls: list[str], spaces: str) -> Tokenizer:
    words = sorted(set(trained) - set(controls), key=lambda token: trained[token])
    tokens = [*controls, *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    vocab = {token: i for i, token in enumerate(tokens)}
    merges = merges_from_scores(tokens, scores_of(tokens))
    model = BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    if spaces == "first":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return tokenizer


def scores_of(tokens: list[str]) -> list[float]:
    """SentencePiece's: the earlier it was learned, the higher."""
    return [0.0 if token.startswith("<") else -float(i) for i, token in enumerate(tokens)]


@functools.cache
def model_of(name: str) -> transformers.PreTrainedModel:
    """The family's model in float32, every parameter random."""
    torch.manual_seed(7)
    model = FAMILIES[name].make(tokenizer_of(name).get_vocab_size()).float().eval()
    with torch.no_grad():
        for part, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            parameter.copy_(1 + 0.2 * noise if "norm" in part else 0.3 * noise)
    family = FAMILIES[name]
    ends = [tokenizer_of(name).token_to_id(t) for t in (family.controls[1], "<|endoftext|>")]
    model.generation_config.eos_token_id = [i for i in ends if i is not None]
    model.generation_config.pad_token_id = ends[0]
    return model


def write_folder(name: str, folder: Path) -> Path:
    """The family's model as transformers writes it."""
    family = FAMILIES[name]
    bos, eos = family.controls[:2]
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer_of(name),
        bos_token=bos or None,
        eos_token=eos,
        unk_token="<unk>" if "<unk>" in family.controls else None,
        chat_template=family.template,
        clean_up_tokenization_spaces=False,
    )
    model_of(name).save_pretrained(folder)
    fast.save_pretrained(folder)
    return folder


def write_gguf(name: str, path: Path) -> Path:
    """The same as llama.cpp's converter writes it."""
    family, tokenizer = FAMILIES[name], tokenizer_of(name)
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    tokens = sorted(vocab, key=lambda token: vocab[token])
    kinds = dict.fromkeys(family.controls, 3) | dict.fromkeys(family.markup, 4) | {"<unk>": 2}
    kinds |= {f"<0x{byte:02X}>": 6 for byte in range(256)}

    def vocabulary(writer: gguf.GGUFWriter) -> None:
        writer.add_token_list(tokens)
        if family.pre:
            writer.add_tokenizer_model("gpt2")
            writer.add_tokenizer_pre(family.pre)
            merges = json.loads(tokenizer.to_str())["model"]["merges"]
            writer.add_token_merges([" ".join(merge) for merge in merges])
        else:
            writer.add_tokenizer_model("llama")
            writer.add_token_scores(scores_of(tokens))
        writer.add_token_types([kinds.get(token, 1) for token in tokens])
        bos, eos = family.controls[:2]
        if bos:
            writer.add_bos_token_id(vocab[bos])
        writer.add_eos_token_id(vocab[eos])
        writer.add_chat_template(family.template)

    return write_model(model_of(name), path, vocabulary)
