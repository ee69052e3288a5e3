"""How text is cut into words before BPE merges, by llama.cpp's name in `tokenizer.ggml.pre`.

Each entry is the pipeline of the model's own tokenizer.json (llama.cpp's `llama-vocab.cpp` holds
the same patterns).
"""

from __future__ import annotations

from collections.abc import Callable

from tokenizers import Regex, pre_tokenizers
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence, Split

from shared.errors import SetupError

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def pre_tokenizer(pre: str) -> PreTokenizer:
    """The pre-tokenizer of a byte-level BPE model. Raises SetupError for a name not known here."""
    make = _BY_NAME.get(pre)
    if make is None:
        known = ", ".join(sorted(_BY_NAME))
        raise SetupError(
            f"this GGUF file asks for the pre-tokenizer {pre!r}, which Headrace does not know "
            f"(it knows {known}); use the model's Hugging Face folder with its tokenizer.json"
        )
    return make()


def skips_merges_for_whole_words(pre: str) -> bool:
    """True where a word that is itself a token is taken without merging (Llama 3)."""
    return pre in ("llama-bpe", "llama3", "llama-v3")


def _gpt2() -> PreTokenizer:
    return ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm() -> PreTokenizer:
    return Sequence([Digits(individual_digits=True), _gpt2()])


def _words(digits: str) -> Callable[[], PreTokenizer]:
    def make() -> PreTokenizer:
        split = Split(Regex(_WORDS % digits), behavior="isolated")
        return pre_tokenizers.Sequence([split, ByteLevel(add_prefix_space=False, use_regex=False)])

    return make


_BY_NAME: dict[str, Callable[[], PreTokenizer]] = {
    "gpt-2": _gpt2,
    "smollm": _smollm,
    "llama-bpe": _words("{1,3}"),
    "llama3": _words("{1,3}"),
    "llama-v3": _words("{1,3}"),
    "qwen2": _words(""),
    "deepseek-r1-qwen": _words(""),
}
