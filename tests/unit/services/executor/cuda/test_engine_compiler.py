"""What Triton needs is looked for at the start, and a kernel that is compiled under a request is reported."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from triton import knobs

from services.executor.cuda.engine import CompileWatch, check_compiler
from shared.errors import SetupError


class Source:
    """What Triton names a kernel by."""

    def __init__(self, name: str) -> None:
        self.name, self.signature = name, {"x": "*bf16", "WIDTH": "constexpr"}


def compile_one(name: str) -> None:
    """What Triton does after a compilation."""
    if (listener := knobs.compilation.listener) is not None:
        metadata: dict[str, Any] = {"num_warps": 4}
        listener(src=Source(name), metadata=metadata, metadata_group={}, times=None, cache_hit=False)  # type: ignore[arg-type]


def test_compile_watch_reports_only_kernels_compiled_while_serving(caplog: pytest.LogCaptureFixture) -> None:
    watch = CompileWatch()
    compile_one("_norm")
    watch.start()
    with caplog.at_level(logging.WARNING, "headrace.executor"):
        compile_one("_attend")
    watch.stop()
    compile_one("_merge")
    assert watch.kernels == ["_attend[num_warps=4](x: *bf16)"]
    (warning,) = (record.getMessage() for record in caplog.records)
    assert "compiled under a request" in warning
    assert "_attend" in warning


def test_the_hook_of_a_later_engine_stays() -> None:
    first, second = CompileWatch(), CompileWatch()
    first.start()
    second.start()
    first.stop()
    compile_one("_choose")
    second.stop()
    assert (first.kernels, second.kernels) == ([], ["_choose[num_warps=4](x: *bf16)"])


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without a compiler, whose cache is not there yet."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "kernels" / "of triton"))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    return tmp_path / "kernels" / "of triton"


def test_machine_without_a_compiler_gets_an_error_that_names_the_package(cache: Path) -> None:
    with pytest.raises(SetupError, match="install gcc"):
        check_compiler()


@pytest.mark.parametrize("has", ["gcc", "CC", "a cache from elsewhere"])
def test_a_compiler_or_what_it_has_made_is_enough(
    cache: Path, has: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if has == "gcc":
        monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/gcc" if name == "gcc" else None)
    elif has == "CC":
        monkeypatch.setenv("CC", "cc")
    else:
        (cache / "digest").mkdir(parents=True)
        (cache / "digest" / "launcher.so").touch()
    check_compiler()


def test_a_cache_from_which_nothing_may_run_is_named(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_flag=os.ST_NOEXEC | os.ST_NOSUID))
    with pytest.raises(SetupError, match=r"of triton.* noexec.*TRITON_CACHE_DIR"):
        check_compiler()


def test_a_cache_of_another_user_is_named(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(SetupError, match=r"of triton.* cannot be written.*TRITON_CACHE_DIR"):
        check_compiler()
