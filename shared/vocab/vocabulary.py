"""A `Vocabulary` turns text into token ids and back, for one model.

Decoding is defined on bytes: each token is a byte string, empty for special tokens. A text is the
concatenation decoded as UTF-8, with U+FFFD for invalid bytes (the maximal-subpart rule of Unicode 3.9, which
both Python and Hugging Face's decoder follow). So decoding token by token equals decoding the whole.

`hf_parts` reads a Hugging Face folder, the functions of FILES a model that is one file (gguf.py).
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from tokenizers import AddedToken, Tokenizer, normalizers
from tokenizers.pre_tokenizers import ByteLevel

from shared.errors import SetupError
from shared.vocab.files import ModelFiles, VectorSettings, json_object, unreadable, vector_settings

FILES = {  # the vocabulary of a model that is one file, by its suffix
    ".gguf": "shared.vocab.gguf:gguf_parts",
}
_FILLS = re.compile(r"\[PAD\d+\]")  # of llama.cpp's converter
_LOOKS_CONTROL = re.compile(r"<[|｜].+[|｜]>")
_MARKUP = re.compile(r"</?[a-z_]+>")
# Special for any entry in tokenizer.json, in transformers' order; absent ones get the next ids.
_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_TO_LETTERS = str.maketrans("0123456789", "ghijklmnop")
_TO_DIGITS = str.maketrans("ghijklmnop", "0123456789")
# Classes of tokenizers; without one, of a model.
_OF_BERT = ("BertTokenizer", "BertTokenizerFast", "bert")
_OF_ROBERTA = ("RobertaTokenizer", "RobertaTokenizerFast", "roberta")
_FLAGS = ("lstrip", "rstrip", "normalized", "single_word", "special")  # of an added token


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabularyParts:
    """The parts of a vocabulary. `tokens[i]` is the stored form of token i: byte-level BPE writes each byte
    as one printable character (GPT-2's table), SentencePiece a space as U+2581 and a lone byte as
    `<0xAB>`, WordPiece `##` where a word goes on."""

    tokens: list[str]  # "" for an id without a token
    special: frozenset[int]  # control tokens: they have no text
    added: frozenset[int]  # matched whole in a text before BPE; includes the special ones
    byte_level: bool  # else SentencePiece, or
    word_pieces: bool = False  # of encoders
    space_before: bool  # a space precedes the first word, which decoding removes (most of SentencePiece)
    # Builds a new one (0.1 s), which a detokenizer does not need. The tokens of the argument get other names
    # and match only these, neither their old names nor merges; all ids stay.
    build: Callable[[Mapping[str, str]], Tokenizer]
    prefix_ids: tuple[int, ...]  # put before a completion prompt: BOS, or nothing
    suffix_ids: tuple[int, ...] = ()  # put after a text whose vector is wanted: an end token, or nothing
    bos_id: int | None
    eos_ids: tuple[int, ...]
    chat_template: str  # jinja source, "" if the model has none
    named: Mapping[str, str] = field(default_factory=dict)  # special tokens by their names in templates
    context_tokens: int  # the model's longest sequence, 0 if unknown
    vectors: VectorSettings = field(default_factory=VectorSettings)
    cuts_begin: bool = False  # a text over `vectors.most_tokens` loses its first tokens, and not its last


def load_vocabulary(files: ModelFiles) -> Vocabulary:
    """The vocabulary of a model. Raises SetupError if it is missing or of an unknown family."""
    read = resolve_name(FILES[files.path.suffix]) if files.is_gguf else hf_parts
    return Vocabulary(read(files.path))


class Vocabulary:
    """One model's tokens. The encoder is built at its first use."""

    def __init__(self, parts: VocabularyParts) -> None:
        if not parts.tokens:
            raise SetupError("the vocabulary is empty; fetch the model again")
        self._parts = parts
        self.size = len(parts.tokens)
        self.special_ids = parts.special
        self.prefix_ids, self.suffix_ids = parts.prefix_ids, parts.suffix_ids
        self.eos_ids = parts.eos_ids
        self.chat_template, self.named = parts.chat_template, parts.named
        self.context_tokens = parts.context_tokens
        self.vectors = parts.vectors
        self._tables: dict[frozenset[str], list[bytes]] = {}  # by markers: one for each answer format in use
        # Never in an id or an answer. Small letters alone: no normalizer changes them.
        self.secret = secrets.token_hex(8).translate(_TO_LETTERS)
        self._core = re.compile(f"{self.secret}n([a-p]+)x")  # of a secret name

    @cached_property
    def controls(self) -> dict[str, int]:
        """Text and id of the tokens that give a prompt its form, which users must not be able to write:
        control tokens, end tokens that are no plain words, and other added tokens that look like a control
        token or occur in the chat template (fine-tunes do not mark all of theirs)."""
        tokens, template = self._parts.tokens, self.chat_template
        ends = (i for i in self.eos_ids if i in self._parts.added or _LOOKS_CONTROL.fullmatch(tokens[i]))
        chosen = {*self.special_ids, *ends}
        for i in self._parts.added - chosen:
            name = tokens[i].strip()
            if _LOOKS_CONTROL.fullmatch(name) or (name and not name.isalnum() and name in template):
                chosen.add(i)
        return {tokens[i]: i for i in sorted(chosen) if tokens[i]}

    @cached_property
    def markup(self) -> frozenset[str]:
        """The `controls` that a model writes within its answer, such as `<think>` and `</think>`."""
        ends = {self._parts.tokens[i] for i in (*self.special_ids, *self.eos_ids)}
        found = {name for name in self.controls if _MARKUP.fullmatch(name)} - ends
        return frozenset(
            name for name in found if {f"<{name.strip('</>')}>", f"</{name.strip('</>')}>"} <= found
        )

    @property
    def bos_token(self) -> str:
        """Text of the BOS token, "" if there is none."""
        return "" if self._parts.bos_id is None else self._parts.tokens[self._parts.bos_id]

    @property
    def eos_token(self) -> str:
        """Text of the first end token, "" if there is none."""
        return self._parts.tokens[self.eos_ids[0]] if self.eos_ids else ""

    @cached_property
    def digest(self) -> str:
        """Hex digest of all tokens in order: with equal digests equal ids mean equal text."""
        special = ",".join(map(str, sorted(self.special_ids)))
        return hashlib.sha256("\0".join([*self._parts.tokens, special]).encode()).hexdigest()[:32]

    @cached_property
    def tokens_digest(self) -> str:
        """`digest` without what formats of one model differ in: which tokens are special, and those that fill
        the ids up to the width of the logits."""
        tokens = list(self._parts.tokens)
        while tokens and (not tokens[-1] or _FILLS.fullmatch(tokens[-1])):
            tokens.pop()
        return hashlib.sha256("\0".join(tokens).encode()).hexdigest()[:32]

    @cached_property
    def token_bytes(self) -> list[bytes]:
        """The bytes of each id; empty for special tokens."""
        words = _word_piece_table if self._parts.word_pieces else _sentencepiece_table
        found = (_byte_level_table if self._parts.byte_level else words)(self._parts.tokens)
        for i in self.special_ids:
            found[i] = b""
        return found

    def bytes_with(self, markers: frozenset[str]) -> list[bytes]:
        """`token_bytes`, where the special tokens among `markers` have their names as text."""
        if markers not in self._tables:
            shown = {i: self._parts.tokens[i] for i in self.special_ids if self._parts.tokens[i] in markers}
            table = [*self.token_bytes] if shown else self.token_bytes
            for i, name in shown.items():
                table[i] = name.encode()
            self._tables[markers] = table
        return self._tables[markers]

    @property
    def must_strip_space(self) -> bool:
        """Whether decoding removes a space before the first word."""
        return self._parts.space_before

    @cached_property
    def longest_token_bytes(self) -> int:
        """The length of the longest token's text: a text of n bytes has at least n divided by this tokens."""
        names = (len(self._parts.tokens[i].encode()) for i in self.special_ids)
        return max((*names, *map(len, self.token_bytes)))

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Token ids of `text`, without `prefix_ids`. With `special`, `controls` in the text become their ids;
        without it only their `secret_names` do. Where the tokenizer does not find a control token, because of
        the text around it, its secret name is read as its own. Thread-safe after the first use of each form.
        Raises ValueError for a lone surrogate."""
        if special:
            return _ids(self._with_controls, text)
        while True:
            ids = _ids(self._tokenizer, text)
            named = self._core.findall(text)
            if not named or len(named) == sum(map(self._control_ids.__contains__, ids)):
                return ids
            shown = self._lost_as_text(text)
            if shown == text:
                return ids
            text = shown

    def encode_for_vector(self, text: str, most_tokens: int) -> list[int]:
        """Token ids of a text whose vector is wanted, with what the tokenizer puts around it. Over
        `most_tokens` (0: no limit) the text itself is cut, as sentence-transformers does."""
        ids = self.encode(text, special=True)
        room = most_tokens - len(self.prefix_ids) - len(self.suffix_ids)
        if most_tokens and len(ids) > room:
            ids = ids[len(ids) - room :] if self._parts.cuts_begin else ids[: max(room, 0)]
        return [*self.prefix_ids, *ids, *self.suffix_ids]

    def leading(self, text: str, chars: int) -> str:
        """The characters of a long text that a cut leaves: the first ones, or the last."""
        return text[-chars:] if self._parts.cuts_begin else text[:chars]

    def _lost_as_text(self, text: str) -> str:
        """`text` with the own names of the control tokens that the tokenizer does not find in it: flags such
        as `single_word` and a normalizer that changes a name with its neighbours decide where it does."""
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        pairs = zip(encoding.ids, encoding.offsets, strict=True)
        cores = (self._core.search(text, *span) for i, span in pairs if i in self._control_ids)
        found = {core.start() for core in cores if core}
        parts, end = [], 0
        for core in self._core.finditer(text):
            if core.start() not in found:
                name = self._parts.tokens[int(core[1].translate(_TO_DIGITS))]
                left, right = _halves(name)
                parts += [text[end : core.start() - len(left)], name]
                end = core.end() + len(right)
        return "".join([*parts, text[end:]])

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`. Raises IndexError for an id outside the vocabulary."""
        table = self.token_bytes
        data = b"".join([table[i] for i in ids])
        return data.removeprefix(b" " if self.must_strip_space else b"").decode("utf-8", "replace")

    def token_text(self, token: int) -> str:
        """The readable form of one token: its text, or the name of a control token. An id outside the
        vocabulary, possible with a padded output layer, has no text."""
        if token >= self.size:
            return ""
        if token in self.special_ids:
            return self._parts.tokens[token]
        return self.token_bytes[token].decode("utf-8", "replace")

    @cached_property
    def secret_names(self) -> dict[str, str]:
        """A random name for each of `controls`, which no client can write. It begins and ends as the token
        does: a normalizer and the flags of the token treat both alike beside any text."""

        def secret(name: str, i: int) -> str:
            left, right = _halves(name)
            return f"{left}{self.secret}n{str(i).translate(_TO_LETTERS)}x{right}"

        return {token: secret(token, i) for token, i in self.controls.items()}

    @cached_property
    def _control_ids(self) -> frozenset[int]:
        return frozenset(self.controls.values())

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        """The tokenizer that reads control tokens in a text as text."""
        return self._parts.build(self.secret_names)

    @cached_property
    def _with_controls(self) -> Tokenizer:
        return self._parts.build({})


def _ids(tokenizer: Tokenizer, text: str) -> list[int]:
    try:
        # The fastest function of the library, and the one that releases the GIL.
        (encoding,) = tokenizer.encode_batch_fast([text], add_special_tokens=False)
    except TypeError as error:
        raise ValueError("the text holds a lone surrogate") from error
    found: list[int] = encoding.ids
    return found


def _halves(name: str) -> tuple[str, str]:
    """The two halves of a token's name; of one character each, if it has only one."""
    return name[: max(1, len(name) // 2)], name[len(name) // 2 :]


def _byte_level_table(tokens: list[str]) -> list[bytes]:
    """The inverse of GPT-2's table. A token with a character outside the table is its own text, as in Hugging
    Face's decoder (added tokens may have spaces)."""
    back = {ord(char): byte for byte, char in enumerate(byte_characters())}
    # Other characters below 256 must not pass as bytes: map them out of latin-1's range.
    back |= {code: 0x100 for code in range(256) if code not in back}

    def to_bytes(token: str) -> bytes:
        try:
            return token.translate(back).encode("latin-1")
        except UnicodeEncodeError:
            return token.encode("utf-8")

    return [to_bytes(token) for token in tokens]


def byte_characters() -> list[str]:
    """The printable character that stands for each byte in byte-level BPE (GPT-2)."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("ÿ") + 1)} - {0xAD}
    moved = (code for code in range(256) if code not in printable)
    shifted = {code: chr(256 + i) for i, code in enumerate(moved)}
    return [shifted.get(code, chr(code)) for code in range(256)]


_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _sentencepiece_table(tokens: list[str]) -> list[bytes]:
    def to_bytes(token: str) -> bytes:
        byte = _BYTE_TOKEN.fullmatch(token)
        return bytes.fromhex(byte[1]) if byte else token.replace("▁", " ").encode("utf-8")

    return [to_bytes(token) for token in tokens]


def _word_piece_table(tokens: list[str]) -> list[bytes]:
    return [(t[2:] if t.startswith("##") else f" {t}").encode() for t in tokens]


def hf_parts(folder: Path) -> VocabularyParts:
    """Read the vocabulary of a model folder (tokenizer.json, tokenizer_config.json, ...). Raises SetupError
    if tokenizer.json is missing or of a family that cannot be decoded token by token."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise SetupError(f"{folder} has no tokenizer.json; Headrace reads no other tokenizer format there")
    source = file.read_text("utf-8")
    config = json_object(folder / "tokenizer_config.json")
    if "added_tokens_decoder" not in config:
        config |= json_object(folder / "special_tokens_map.json")
    try:
        stated, more = _added_later(config, json_object(folder / "added_tokens.json"))
        template = _chat_template(folder, config)
    except (LookupError, AttributeError, TypeError, ValueError) as error:
        raise unreadable(folder / "tokenizer_config.json", "a tokenizer's configuration", error) from error
    ends = {_text_of(config.get(name)) for name in ("bos_token", "eos_token")}
    vectors, model = vector_settings(folder), json_object(folder / "config.json")
    side = config.get("truncation_side")

    def read() -> Tokenizer:
        tokenizer = Tokenizer.from_str(source)
        _normalize_as_configured(tokenizer, config, model, lower_case=vectors.lower_case)
        tokenizer.no_truncation()  # both are left over from a training
        tokenizer.no_padding()
        tokenizer.add_tokens(stated)
        known = {each.content for each in tokenizer.get_added_tokens_decoder().values()}
        plain = [each for each in more if each.content not in known]
        add = (each for each in plain if each.content in ends or tokenizer.token_to_id(each.content) is None)
        tokenizer.add_tokens(list(add))
        return tokenizer

    try:
        tokenizer = read()
    except Exception as error:  # the library raises nothing narrower
        raise unreadable(file, "a tokenizer", error) from error
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    tokens = [""] * (max(vocab.values()) + 1)
    for token, i in vocab.items():
        tokens[i] = token
    added = tokenizer.get_added_tokens_decoder()
    bos = vocab.get(_text_of(config.get("bos_token")))
    kinds = _decoders(json.loads(source), file)
    byte_level, word_pieces = "ByteLevel" in kinds, "WordPiece" in kinds
    named = {name: _text_of(config[name]) for name in _NAMED if config.get(name)}
    context = model.get("max_position_embeddings")
    if side is None:
        side = (json.loads(source).get("truncation") or {}).get("direction")
    return VocabularyParts(
        tokens=tokens,
        special=frozenset(i for i, each in added.items() if each.special or each.content in named.values()),
        added=frozenset(added),
        byte_level=byte_level,
        word_pieces=word_pieces,
        space_before=word_pieces or (not byte_level and tokenizer.decoder.decode(["▁a"]) == "a"),
        build=lambda names: _renamed(read(), names),
        prefix_ids=_prefix_ids(tokenizer, config, bos),
        suffix_ids=_suffix_ids(tokenizer, config, vocab),
        bos_id=bos,
        eos_ids=_eos_ids(folder, config, vocab),
        chat_template=template,
        named=named,
        context_tokens=context if isinstance(context, int) else 0,  # an executor names one that is no number
        vectors=vectors,
        cuts_begin=str(side).lower() == "left",
    )


def _normalize_as_configured(
    tokenizer: Tokenizer, config: Mapping[str, Any], model: Mapping[str, Any], *, lower_case: bool
) -> None:
    """transformers' tokenizers of BERT and RoBERTa take some settings from tokenizer_config.json, not from
    tokenizer.json. `lower_case`: sentence-transformers puts a step before all others."""
    normalizer, kind = tokenizer.normalizer, str(config.get("tokenizer_class") or model.get("model_type"))
    if kind in _OF_ROBERTA and isinstance(tokenizer.pre_tokenizer, ByteLevel):
        spaced = bool(config.get("add_prefix_space", False))
        tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=spaced)
    if kind in _OF_BERT and isinstance(normalizer, normalizers.BertNormalizer):
        lower, chinese = config.get("do_lower_case", True), config.get("tokenize_chinese_chars", True)
        tokenizer.normalizer = normalizer = normalizers.BertNormalizer(
            lowercase=normalizer.lowercase if lower is None else bool(lower),
            strip_accents=config.get("strip_accents"),
            handle_chinese_chars=normalizer.handle_chinese_chars if chinese is None else bool(chinese),
        )
    if lower_case:
        steps = [normalizers.Lowercase(), *([] if normalizer is None else [normalizer])]
        tokenizer.normalizer = normalizers.Sequence(steps)


def _added_later(
    config: Mapping[str, Any], numbered: Mapping[str, Any]
) -> tuple[list[AddedToken], list[AddedToken]]:
    """The tokens that other files of a folder add to tokenizer.json, as transformers does: those of
    `added_tokens_decoder`, which also change how tokens of tokenizer.json match, and those to add if absent.
    `numbered`: added_tokens.json, which that key replaces."""
    more = config.get("extra_special_tokens") or config.get("additional_special_tokens") or ()
    more = (*map(config.get, _NAMED), *(more.values() if isinstance(more, dict) else more))
    special = [_added(each, special=True) for each in more if _text_of(each)]
    stated = config.get("added_tokens_decoder")
    if stated is not None:
        return [_added(stated[i], special=False) for i in sorted(stated, key=int)], special
    names = {token.content for token in special}
    ordered = sorted(numbered, key=lambda name: numbered[name])
    return [], [_added(name, special=name in names) for name in ordered] + special


def _added(token: object, special: bool) -> AddedToken:
    given = token if isinstance(token, dict) else {}
    flags = {"special": special, **{name: bool(given[name]) for name in _FLAGS if name in given}}
    return AddedToken(_text_of(token), **{"normalized": not flags["special"], **flags})


def _decoders(source: dict[str, Any], file: Path) -> set[str]:
    """The types of a tokenizer's decoders. Raises SetupError if none of them is known."""
    decoder = source.get("decoder") or {}
    kinds = {step.get("type") for step in [decoder, *decoder.get("decoders", [])]}
    if not kinds & {"ByteLevel", "ByteFallback", "Metaspace", "WordPiece"}:
        raise SetupError(
            f"{file} decodes with {sorted(map(str, kinds))}; Headrace reads byte-level BPE, SentencePiece "
            "and WordPiece only"
        )
    return kinds


def _eos_ids(folder: Path, config: dict[str, Any], vocab: dict[str, int]) -> tuple[int, ...]:
    """The end token of the tokenizer, and those of generation_config.json (a chat model may have several), or
    else those of config.json. Ids without a token, left over from another vocabulary, end nothing."""
    ids: list[Any] = [vocab.get(_text_of(config.get("eos_token")))]
    for name in ("generation_config.json", "config.json"):
        listed = json_object(folder / name).get("eos_token_id")
        if listed is not None:
            ids += listed if isinstance(listed, list) else [listed]
            break
    size = max(vocab.values()) + 1
    return tuple(dict.fromkeys(i for i in ids if isinstance(i, int) and 0 <= i < size))


def _prefix_ids(tokenizer: Tokenizer, config: dict[str, Any], bos: int | None) -> tuple[int, ...]:
    """The ids that the tokenizer puts before a text. As in transformers `add_bos_token` decides, if set."""
    asked = config.get("add_bos_token")
    if asked is not None:
        return (bos,) if asked and bos is not None else ()
    around = tokenizer.encode("a")
    put = takewhile(lambda pair: pair[1], zip(around.ids, around.special_tokens_mask, strict=True))
    return tuple(i for i, _ in put)


def _suffix_ids(tokenizer: Tokenizer, config: dict[str, Any], vocab: dict[str, int]) -> tuple[int, ...]:
    """The ids that the tokenizer puts after a text: those of its post-processor, else what `add_eos_token`
    asks for."""
    around = tokenizer.encode("a")
    pairs = zip(reversed(around.ids), reversed(around.special_tokens_mask), strict=True)
    put = tuple(i for i, _ in takewhile(lambda pair: pair[1], pairs))[::-1]
    eos = vocab.get(_text_of(config.get("eos_token")))
    return put or ((eos,) if config.get("add_eos_token") and eos is not None else ())


def _chat_template(folder: Path, config: dict[str, Any]) -> str:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text("utf-8")
    template = config.get("chat_template") or ""
    if isinstance(template, list):  # several named ones
        template = {entry["name"]: entry["template"] for entry in template}
    if isinstance(template, dict):
        template = template.get("default", "")
    return str(template)


def _text_of(token: object) -> str:
    """Special tokens stand as text or as an object with the text inside."""
    return str(token.get("content", "")) if isinstance(token, dict) else str(token or "")


def kept_merges(names: Mapping[str, str], merges: Iterable[Iterable[str]]) -> list[tuple[str, str]]:
    """The merges from and to other tokens than those with other names."""
    return [(left, right) for left, right in merges if names.keys().isdisjoint((left, right, left + right))]


def _renamed(tokenizer: Tokenizer, names: Mapping[str, str]) -> Tokenizer:
    """A copy in which some tokens have other names: see VocabularyParts.build."""
    if not names:
        return tokenizer
    source = json.loads(tokenizer.to_str())
    model = source["model"]
    if isinstance(model["vocab"], dict):
        model["vocab"] = {names.get(token, token): i for token, i in model["vocab"].items()}
    else:  # Unigram
        model["vocab"] = [[names.get(token, token), score] for token, score in model["vocab"]]
    if "merges" in model:
        model["merges"] = kept_merges(names, model["merges"])
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    for token in source["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    source["post_processor"] = None  # it adds tokens by name around a text, which no caller needs
    return Tokenizer.from_str(json.dumps(source))
