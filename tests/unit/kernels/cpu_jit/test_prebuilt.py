"""The machine code that comes with the package: it is of these sources, and a first start needs no other."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import llvmlite
import llvmlite.binding as llvm
import numba
import pytest
import torch
from support.default_model import model_path

import kernels.cpu_jit
from kernels.cpu_jit import CPU_KINDS, cpu_kind, prebuilt, rowwise, sources_digest
from kernels.cpu_jit.thread_team import Kernel

ROOT = Path(__file__).parents[4]
KINDS = [kind.name for kind in CPU_KINDS]
NEEDED = {"attention._f16", "batched_launch._run", "block_weights._nibbles_minimum_f32", "rowwise._norm_f32"}
HERE = cpu_kind()


@pytest.fixture
def anew() -> Iterator[None]:
    """The archive is chosen again, before and after."""
    prebuilt._archive.cache_clear()
    yield
    prebuilt._archive.cache_clear()


@pytest.mark.parametrize("kind", KINDS)
def test_the_code_of_each_kind_is_made_of_these_sources(kind: str) -> None:
    """If not: scripts/build_kernels."""
    with zipfile.ZipFile(prebuilt.FOLDER / f"{kind}.zip") as archive:
        sources, _, compilers = archive.comment.decode().partition(" ")
        assert (sources, compilers) == (sources_digest(), prebuilt.compilers())
        assert {*archive.namelist()} >= NEEDED


def test_building_again_gives_the_same_code(tmp_path: Path) -> None:
    command = [ROOT / "scripts" / "build_kernels", "avx2", "--count", "3", "--folder", tmp_path]
    subprocess.run([sys.executable, *command], check=True, capture_output=True)
    built, kept = instructions(tmp_path / "avx2.zip"), instructions(prebuilt.FOLDER / "avx2.zip")
    assert len(built) == 3
    assert all(built.values())
    assert built == {name: kept[name] for name in built}


def instructions(path: Path) -> dict[str, bytes]:
    """The machine instructions of each kernel in an archive. The names of symbols may differ."""
    with zipfile.ZipFile(path) as archive:
        return {name: instructions_in(archive.read(name)) for name in archive.namelist()}


def instructions_in(code: bytes) -> bytes:
    sections = llvm.ObjectFileRef.from_data(code).sections()
    return b"".join(section.data() for section in sections if section.is_text())


@pytest.mark.skipif(HERE is None, reason="this CPU is of no kind")
def test_prebuilt_code_is_for_the_kind_of_cpu_and_not_for_this_cpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert HERE is not None
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))  # code that is kept has no object
    compiled = Kernel(rowwise._norm_f32).compiled_by_numba()._library._get_compiled_object()
    kept = instructions(prebuilt.FOLDER / f"{HERE.name}.zip")
    assert instructions_in(compiled) == kept["rowwise._norm_f32"]


@pytest.mark.skipif(HERE is None, reason="this CPU is of no kind")
def test_the_first_start_with_default_settings_compiles_nothing(tmp_path: Path) -> None:
    """What is compiled is kept in a folder, which does not appear. Nor does Numba compile a function that
    Python calls, which it would keep nowhere."""
    code = (
        "from numba.core.dispatcher import Dispatcher; Dispatcher.compile = None; "
        "from pathlib import Path; import sys; from services.executor.build import engine_builder; "
        "from shared.config import load; "
        "engine = engine_builder(load(flags={'model': sys.argv[1], 'slots': 2}).settings)(); "
        "engine.warm_up(); print(engine.info.dtype)"
    )
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "HOME": str(tmp_path)}
    ran = subprocess.run(
        [sys.executable, "-c", code, str(model_path())], env=env, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "packed/f16\n"
    assert not [*tmp_path.rglob("*.nbi")]


@pytest.mark.skipif(HERE is None, reason="this CPU is of no kind")
def test_built_code_and_code_compiled_here_give_the_same_bits() -> None:
    x, residual, weight = torch.randn(3, 96), torch.randn(3, 96), torch.randn(96)
    found = [rowwise.add_rms_norm(x, residual.clone(), weight, 1e-5)[0]]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prebuilt, "load", lambda name: None)
        patch.setitem(rowwise._NORM, torch.float32, Kernel(rowwise._norm_f32))
        found.append(rowwise.add_rms_norm(x, residual.clone(), weight, 1e-5)[0])
    assert found[0].equal(found[1])
    assert prebuilt.load("rowwise._of_another_name") is None


def test_code_of_other_sources_compilers_or_an_unknown_cpu_or_damaged_is_not_used(
    anew: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(prebuilt, "sources_digest", lambda: "others")
        assert prebuilt.load("rowwise._norm_f32") is None
    with monkeypatch.context() as patch:
        prebuilt._archive.cache_clear()
        patch.setattr(prebuilt, "compilers", lambda: "numba 9.9 llvmlite 9.9")
        assert prebuilt.load("rowwise._norm_f32") is None
        here = f"numba {numba.__version__} llvmlite {llvmlite.__version__}"
        why = f"the package has them of {here}, installed is numba 9.9 llvmlite 9.9"
        assert [why in line for line in caplog.messages] == [True] * (HERE is not None)
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    for kind in KINDS:
        (damaged / f"{kind}.zip").write_bytes(b"PK")
    for name, value in (("cpu_kind", lambda: None), ("FOLDER", tmp_path), ("FOLDER", damaged)):
        prebuilt._archive.cache_clear()
        with monkeypatch.context() as patch:
            patch.setattr(prebuilt, name, value)
            assert prebuilt.load("rowwise._norm_f32") is None


@pytest.mark.parametrize(
    ("features", "kind"),
    [
        ("+avx2,+fma,+f16c", "avx2"),
        ("+avx2,+fma", None),
        ("+avx2,+fma,+f16c,+avx512f,+avx512bw,+avx512dq,+avx512vl,+avx512cd", "avx512"),
        (kernels.cpu_jit.CPU_KINDS[0].llvm_features, "amx"),
    ],
)
def test_the_kind_of_a_cpu_is_the_best_that_it_has_all_features_of(
    monkeypatch: pytest.MonkeyPatch, features: str, kind: str | None
) -> None:
    monkeypatch.setenv("NUMBA_CPU_FEATURES", features)
    cpu_kind.cache_clear()
    try:
        found = cpu_kind()
        assert (found.name if found else None) == kind
        assert kernels.cpu_jit.has("avx2")
        assert kernels.cpu_jit.has("avx512f") == (kind in ("avx512", "amx"))
    finally:
        cpu_kind.cache_clear()


@pytest.mark.parametrize("hidden", ["", "bmi", "bmi2", "lzcnt", "movbe", "fma", "f16c"])
def test_a_cpu_without_a_feature_that_its_kind_is_compiled_with_is_of_no_kind(
    monkeypatch: pytest.MonkeyPatch, hidden: str
) -> None:
    """A virtual machine may hide some: LLVM's own list of what x86-64-v3 has."""
    monkeypatch.delenv("NUMBA_CPU_FEATURES", raising=False)
    v3 = (
        "avx avx2 bmi bmi2 cmov crc32 cx16 cx8 f16c fma fxsr lzcnt mmx movbe popcnt sahf sse sse2 sse3 "
        "sse4.1 sse4.2 ssse3 xsave"
    )
    found = {feature: feature != hidden for feature in v3.split()}
    monkeypatch.setattr(llvm, "get_host_cpu_features", lambda: found)
    cpu_kind.cache_clear()
    try:
        kind = cpu_kind()
        assert (kind.name if kind else None) == (None if hidden else "avx2")
    finally:
        cpu_kind.cache_clear()
