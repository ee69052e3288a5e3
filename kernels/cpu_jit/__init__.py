"""Kernels for a CPU, compiled by Numba and run on torch's threads.

They are compiled for a kind of CPU, not for a CPU: all machines of a kind run the same instructions, and so
compute the same bits. `NUMBA_CPU_FEATURES=+avx2,+fma,+f16c` makes them those of an AVX2 machine on any other.
"""

import hashlib
import os
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

BYTES = ("avx2", "f16c")  # CPU features that products of bytes and half bytes need


@dataclass(frozen=True, slots=True)
class CpuKind:
    """What kernels are compiled for. `llvm_cpu`: a CPU by LLVM's name, whose features all machines of the
    kind have; `features`: those that distinguish the kind, by LLVM's names."""

    name: str
    llvm_cpu: str
    features: tuple[str, ...]

    @property
    def llvm_features(self) -> str:
        """As LLVM takes them. It would use half of AVX-512's registers in loops of its own choice."""
        return ",".join([*(f"+{feature}" for feature in self.features), "-prefer-256-bit"])


# What both CPUs of LLVM's have beside: a virtual machine may hide some of it from an AVX2 CPU.
_BESIDE = ("bmi", "bmi2", "cx16", "lzcnt", "movbe", "popcnt", "sahf", "sse4.2", "xsave")
_AVX2 = ("avx2", "fma", "f16c")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd")
_VNNI = (*_AVX512, "avx512vnni")
_BF16 = (*_VNNI, "avx512bf16")
CPU_KINDS = (  # the best first
    CpuKind("amx", "x86-64-v4", (*_BF16, "amx-tile", "amx-int8", "amx-bf16")),
    CpuKind("avx512bf16", "x86-64-v4", _BF16),
    CpuKind("avx512vnni", "x86-64-v4", _VNNI),
    CpuKind("avx512", "x86-64-v4", _AVX512),
    CpuKind("avx2", "x86-64-v3", _AVX2),
)


def available() -> bool:
    """Whether Numba is installed."""
    return find_spec("numba") is not None


@cache
def cpu_kind() -> CpuKind | None:
    """What kernels are compiled for here. None without Numba, and on a CPU that is of no kind: Numba compiles
    for what it has."""
    found = _features()
    beside = () if os.environ.get("NUMBA_CPU_FEATURES") else _BESIDE  # the variable names a kind
    return next((kind for kind in CPU_KINDS if found.issuperset((*kind.features, *beside))), None)


def has(*features: str) -> bool:
    """Whether Numba is installed and kernels may use all these features, by LLVM's names: `avx512bf16`."""
    kind = cpu_kind()
    return frozenset(kind.features if kind else _features()).issuperset(features)


def _features() -> frozenset[str]:
    """The features of the CPU, or those in NUMBA_CPU_FEATURES. Empty without Numba."""
    if not available():
        return frozenset()
    if named := os.environ.get("NUMBA_CPU_FEATURES"):
        return frozenset(each[1:] for each in named.split(",") if each.startswith("+"))
    from llvmlite.binding import get_host_cpu_features

    return frozenset(feature for feature, there in get_host_cpu_features().items() if there)


def sources_digest() -> str:
    """Hex digest of the sources of all kernels here."""
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def has_amx() -> bool:
    """Whether products in bfloat16 run in AMX's tiles."""
    return available() and bool(import_module("kernels.cpu_jit.amx").usable())  # it imports this module
