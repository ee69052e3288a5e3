"""Weights as a checkpoint stores them, the tables of their formats, and files that may change under a reader.

`Stored`: each format is a class, and engines choose a product for it. Only `loaded` reads: before it a weight
is a place in a file, so that a rank reads no more than its part.

FILES, SCHEMES and KEPT: the formats beside plain numbers in safetensors, by file, by how a folder stores its
matrices, and by the dtype in which weights stay quantised. The loader asks them, and names no format.

`check_unchanged`: the states of all files before and after a load are the same, or the start fails; a change
under a reader is never other weights.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from shared.errors import SetupError

if TYPE_CHECKING:
    from kernels.cpu_jit.block_weights import Blocks

FILES = {  # by suffix: a FileFormat (weights.py)
    ".gguf": "services.executor.quantised.gguf:FORMAT",
}
SCHEMES = {  # by key of config.json: gives the Scheme of its value
    "quantization_config": "services.executor.quantised.schemes:scheme_of",
}
KEPT = {  # by name: a Dtype (loader.py)
    "packed": "services.executor.quantised.dtypes:PACKED",
    "packed8": "services.executor.quantised.dtypes:PACKED",
    "fp8": "services.executor.quantised.dtypes:FP8",
    "int4": "services.executor.quantised.dtypes:INT4",
}


@dataclass(frozen=True, slots=True)
class Cut:
    """Indices `begin` to `end` of a weight along dimension `dim`."""

    dim: int
    begin: int
    end: int


class Stored(Protocol):
    """A matrix `[out, in]`, a vector, or experts' matrices `[experts, out, in]`.

    A format overrides what it does in a way of its own; the rest is done with its plain numbers."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def values(self) -> Tensor:
        """As plain numbers of `shape`."""

    @property
    def data(self) -> tuple[Tensor, ...]:
        """What is in memory, for digests."""
        return (self.values,)

    @property
    def size_bytes(self) -> int:
        """Its bytes in memory."""
        return sum(part.nbytes for part in self.data)

    def rows(self, order: Tensor) -> Stored:
        """The rows at the indices `order`."""
        return Dense.of(self.values[order])

    def cut(self, cut: Cut) -> Stored:
        """That part."""

    def join(self, below: Sequence[Stored]) -> Stored:
        """This weight and others of the same width, below each other."""
        return Dense.of(torch.cat([self.values, *(each.values for each in below)])) if below else self

    def scaled(self, factors: Tensor) -> Stored:
        """Times powers of two that broadcast: `[rows, 1]` or `[columns]`."""
        return Dense.of(self.values * factors)

    def loaded(self, dtype: torch.dtype, device: torch.device) -> Stored:
        """In the memory of `device`, for a computation in `dtype`; it keeps no memory of a larger whole."""

    def for_rows(self) -> Stored:
        """This weight for `rows` alone: what can be read again from a file takes no memory."""
        return self

    def blocks(self) -> list[Blocks]:
        """The matrices that products of a CPU take as they are; none: they take `values`."""
        return []

    @property
    def operand(self) -> Any:
        """What products of a GPU take: plain numbers, or a matrix of kernels.quantised."""
        return self.values


@dataclass(frozen=True, slots=True)
class Dense(Stored):
    """Plain numbers. `source[slice, ...]` reads them: a tensor, or a tensor in a file."""

    source: Any
    ranges: tuple[range, ...]  # of the source, by dimension

    @classmethod
    def of(cls, source: Any, shape: Sequence[int] | None = None) -> Dense:
        """All of a source of `shape`; None: of a tensor's own."""
        return cls(source, tuple(map(range, source.shape if shape is None else shape)))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(map(len, self.ranges))

    @property
    def values(self) -> Tensor:
        if isinstance(self.source, Tensor) and self.source.shape == self.shape:
            return self.source
        values: Tensor = self.source[tuple(slice(each.start, each.stop) for each in self.ranges)]
        return values

    def cut(self, cut: Cut) -> Dense:
        before, after = self.ranges[: cut.dim], self.ranges[cut.dim + 1 :]
        return Dense(self.source, (*before, self.ranges[cut.dim][cut.begin : cut.end], *after))

    def loaded(self, dtype: torch.dtype, device: torch.device) -> Dense:
        if not isinstance(self.source, Tensor):
            return Dense.of(in_memory(self.values, device, dtype))
        values = self.values.to(device=device, dtype=dtype)
        part = values.numel() < self.source.numel()
        return Dense.of(values.clone() if part and values._is_view() else values)


def in_memory(read: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """What was read from a file, in the memory of `device`. safetensors gives views of a mapping: a file that
    is written to, or cut off, would change the weights, or end the process."""
    found = read.to(device=device, dtype=dtype or read.dtype)
    return found.clone() if found is read else found


class Scheme(Protocol):
    """How a folder stores its matrices. A method that a scheme leaves out is that of plain tensors.

    `names`, in each method: the tensors of the folder, by name."""

    kept_in: ClassVar[str] = ""  # the dtype that keeps them as they are stored
    is_larger_plain: ClassVar[bool] = False  # so they get plain only if asked for
    has_empty_biases: ClassVar[bool] = False  # matrices may have a bias of zeros that the model does not have

    @property
    def fact(self) -> str:
        """For digests, if the same bytes are other numbers in another scheme."""
        return ""

    def weight_of(self, name: str, names: Mapping[str, Any]) -> str | None:
        """The weight that has this tensor, among others, in its place."""
        return None

    def scales_of(self, name: str, kind: str, names: Mapping[str, Any]) -> str | None:
        """The tensor beside a weight of a type, as safetensors names it, that has its scales."""
        return None

    def stored(self, weight: str, names: Mapping[str, Any], read: Callable[[str], Dense]) -> Stored:
        """A weight, not yet read, of tensors that `read` gives; their source has their type as `kind`. Raises
        SetupError for tensors that do not fit."""
        return read(weight)


class PlainTensors(Scheme):
    """See Scheme."""


def scheme_of(config: Mapping[str, Any]) -> Scheme:
    """How the weights beside a config.json are stored. Raises SetupError for a scheme that is not
    supported."""
    found = (resolve_name(name)(config) for key, name in SCHEMES.items() if config.get(key))
    if (scheme := next(found, None)) is None and config.get("quantization_config"):
        raise absent("quantization_config in config.json")
    return scheme or PlainTensors()


def scheme_in(path: Path) -> Scheme:
    """`scheme_of` of a folder; a plain one also for what cannot be read or is not supported: loading it gives
    the reason."""
    try:
        return scheme_of(json.loads((path / "config.json").read_text("utf-8")))
    except (OSError, ValueError, AttributeError, SetupError):
        return PlainTensors()


def absent(what: str) -> SetupError:
    """The error for weights in a format of which this installation has no reader."""
    return SetupError(
        f"{what}: this installation has no reader of quantised weights (services/executor/quantised/): "
        "install headrace with it, or use an unquantised folder of safetensors"
    )


_READ = (".safetensors", ".json", ".jinja")  # files of a model's folder; others may change
CURE = "give a new model a name of its own, or rename it over the old one"


class FileState(NamedTuple):
    """What changes when a file is written or another one takes its name. Not its mode or its links."""

    name: str
    device: int
    inode: int
    written_ns: int
    size_bytes: int


FileStates = tuple[FileState, ...]


def states_of(path: Path) -> FileStates:
    """The states of a model's file, or of those of its folder that are read; without those that are gone."""
    found, inside = [], path.is_dir()
    for each in sorted(file for file in path.iterdir() if file.suffix in _READ) if inside else [path]:
        try:
            found.append(state_of(each.name, each.stat()))
        except OSError:  # gone, or a link to nothing: the reader of the model names it
            continue
    return tuple(found)


def check_unchanged(path: Path, before: FileStates) -> None:
    """Raise SetupError if the files of the model at `path` have changed since `before`."""
    if changed := {each.name for each in {*states_of(path)} ^ {*before}}:
        where = path / min(changed) if path.is_dir() else path
        raise SetupError(f"{where} has changed while it was loaded; wait until it is whole, or {CURE}")


def state_of(name: str, about: os.stat_result) -> FileState:
    return FileState(name, about.st_dev, about.st_ino, about.st_mtime_ns, about.st_size)
