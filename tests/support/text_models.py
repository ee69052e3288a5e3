"""Tiny models for the text tests, written with the gguf library, and a BPE encoder in plain Python."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import gguf
import regex
from tokenizers import AddedToken, Tokenizer, decoders, trainers
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from services.tokenizer.chat_template import ChatTemplate
from services.tokenizer.prepare import ServedModel
from shared.vocab.files import ModelFiles
from shared.vocab.vocabulary import load_vocabulary

TEXT = (
    "The quick brown fox jumps over the lazy dog. 1234567890 prices rose 12.5% in 2024!\n"
    "def main(args):\n    return args[0]\n\nIt's we'll they've; naïve café, Größe, señor.\n"
    "日本語のテキスト 漢字 中文 한국어 русский ελληνικά 🎉🚀👩‍💻 ½ Ⅳ ٣٤\n"
) * 3
CONTROLS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CONTEXT = 128
GPT2_WORDS = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")


def trained() -> tuple[list[str], list[tuple[str, str]]]:
    """(tokens, merges) of a small byte-level BPE; the control tokens are ids 0 to 2."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=CONTROLS, initial_alphabet=ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    return tokens, [tuple(merge) for merge in model["merges"]]


def write_bpe_gguf(
    path: Path,
    pre: str = "smollm",
    *,
    kinds: dict[str, int] | None = None,
    template: str = TEMPLATE,
    eos_id: int = 2,
    bos_id: int = 1,
    add_bos: bool | None = None,
) -> Path:
    """A GGUF file with the trained vocabulary and no tensors. `kinds` are llama.cpp's token types, of its
    tokens or of further ones."""
    tokens, merges = trained()
    typed = dict.fromkeys(CONTROLS, 3) | (kinds or {})
    tokens += [token for token in typed if token not in tokens]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(CONTEXT)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([typed.get(token, 1) for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in merges])
    writer.add_bos_token_id(bos_id)
    writer.add_eos_token_id(eos_id)
    if add_bos is not None:
        writer.add_add_bos_token(add_bos)
    writer.add_chat_template(template)
    return _finish(writer, path)


def write_sentencepiece_gguf(path: Path, pieces: dict[str, float]) -> Path:
    """A GGUF file of the Llama 2 family: unk, bos, eos, 256 byte tokens, then `pieces` with scores."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * 259 + list(pieces.values()))
    writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * len(pieces))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    return _finish(writer, path)


def write_hf_folder(folder: Path, added: tuple[AddedToken, ...] = (), template: str = TEMPLATE) -> Path:
    """The trained vocabulary as a Hugging Face model folder; `added` replaces or follows its controls."""
    tokens, merges = trained()
    tokenizer = Tokenizer(BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    named = {token: AddedToken(token, special=True) for token in CONTROLS} | {t.content: t for t in added}
    for token in named.values():  # one by one: their ids follow this order
        (tokenizer.add_special_tokens if token.special else tokenizer.add_tokens)([token])
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    files = {
        "config.json": {"max_position_embeddings": CONTEXT},
        "generation_config.json": {"eos_token_id": [2, 0]},
        "tokenizer_config.json": {
            "bos_token": {"content": "<|im_start|>"},
            "eos_token": "<|im_end|>",
            "chat_template": [{"name": "other", "template": "x"}, {"name": "default", "template": template}],
        },
    }
    for name, body in files.items():
        (folder / name).write_text(json.dumps(body))
    return folder


def plain_bpe(text: str, tokens: list[str], merges: list[tuple[str, str]], single_digits: bool) -> list[int]:
    """Byte-level BPE as the GPT-2 paper has it, in plain Python: words, bytes, lowest rank first.
    Bytes that have no token are dropped."""
    ids = {token: i for i, token in enumerate(tokens)}
    ranks = {pair: rank for rank, pair in enumerate(merges)}
    parts = regex.findall(r"\p{N}|\P{N}+", text) if single_digits else [text]
    found = []
    for word in (word for part in parts for word in GPT2_WORDS.findall(part)):
        symbols = [gpt2_char(byte) for byte in word.encode()]
        while True:
            pairs = [(ranks.get(pair, len(ranks)), i) for i, pair in enumerate(itertools.pairwise(symbols))]
            rank, at = min(pairs, default=(len(ranks), 0))
            if rank == len(ranks):
                break
            symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
        found += [ids[symbol] for symbol in symbols if symbol in ids]
    return found


def gpt2_char(byte: int) -> str:
    """`bytes_to_unicode` of the GPT-2 source, for one byte."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return (
        chr(byte) if byte in visible else chr(256 + [b for b in range(256) if b not in visible].index(byte))
    )


def _finish(writer: gguf.GGUFWriter, path: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def served(folder: Path) -> ServedModel:
    vocabulary = load_vocabulary(ModelFiles("m", write_bpe_gguf(folder / "m.gguf")))
    return ServedModel("tiny", vocabulary, ChatTemplate(vocabulary), 128, 60_000_000)
