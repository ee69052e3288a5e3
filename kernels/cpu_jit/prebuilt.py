"""Machine code of kernels that comes with the package, so that the first start on a machine compiles nothing.

machine_code/ has an archive for each kind of CPU, with the kernels that default settings use;
`scripts/build_kernels` makes it. It has the digest of the sources and the versions of the compilers, and is
not used with others: then kernels are compiled.
"""

from __future__ import annotations

import importlib.metadata
import logging
import zipfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm

from kernels.cpu_jit import cpu_kind, sources_digest

log = logging.getLogger("headrace.kernels")

FOLDER = Path(__file__).parent / "machine_code"


@dataclass(frozen=True, slots=True)
class MachineCode:
    """A function in memory. `engine` keeps the memory."""

    address: int
    engine: Any


def load(kernel: str) -> MachineCode | None:
    """The code of a kernel, by its name, for this kind of CPU. None where the package has none."""
    archive = _archive()
    if archive is None or kernel not in archive.NameToInfo:
        return None
    symbol = archive.getinfo(kernel).comment.decode()
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), _machine())
    engine.add_object_file(llvm.ObjectFileRef.from_data(archive.read(kernel)))
    engine.finalize_object()
    return MachineCode(engine.get_function_address(symbol), engine)


def compilers() -> str:
    """What compiles kernels here: other versions may give other instructions, and so other bits."""
    return " ".join(f"{name} {importlib.metadata.version(name)}" for name in ("numba", "llvmlite"))


@cache
def _archive() -> zipfile.ZipFile | None:
    kind = cpu_kind()
    if kind is None:
        return None
    try:
        archive = zipfile.ZipFile(FOLDER / f"{kind.name}.zip")
    except (OSError, zipfile.BadZipFile):  # not there, or damaged
        return None
    sources, _, by = archive.comment.decode().partition(" ")
    if sources != sources_digest():
        return None
    if by != (here := compilers()):
        log.warning(
            "kernels are compiled, once: the package has them of %s, installed is %s", by or "others", here
        )
        return None
    return archive


def _machine() -> Any:
    return llvm.Target.from_default_triple().create_target_machine()
