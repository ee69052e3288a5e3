"""With how many threads an engine begins on a machine whose products have been timed."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as GgmlType
from support.executor.tiny_gguf import write_gguf

import kernels.cpu_jit
from services.executor import build
from services.executor.checkpoint import loader
from services.executor.cpu import autotune, engine
from services.executor.cpu.autotune import (
    ROWS,
    ThreadCount,
    Timing,
    are_undisturbed,
    best_threads,
    counts,
    timing_for,
)
from services.executor.engine import Alarm, GrammarNews
from services.executor.quantised import dtypes
from shared.config import Settings

ONE, TWO = [2.0, 8.0, 20.0], [1.0, 4.0, 10.0]


def times(part: float) -> list[float]:
    """`part` of those of one thread."""
    return [ms * part for ms in ONE]


@pytest.mark.parametrize(
    ("ms", "cores", "best"),
    [
        ({1: ONE}, 1, 1),
        ({1: ONE, 2: times(0.5)}, 2, 2),
        ({1: ONE, 2: times(1.04)}, 2, 2),  # a tie
        ({1: ONE, 2: times(1.06)}, 2, 1),
        ({1: ONE, 2: [1.0, 4.0, 45.0]}, 2, 2),  # each number of rows counts the same
        ({1: ONE, 4: times(0.4), 8: times(0.5)}, 8, 4),
        ({1: ONE, 4: times(0.49), 8: times(0.5)}, 8, 8),
        ({1: ONE, 2: times(0.5)}, 1.5, 2),  # as fast as 0.67
        ({1: ONE, 2: times(0.8)}, 1.5, 1),  # as slow as 1.07
        (
            {1: ONE, 2: times(0.55), 3: times(0.5)},
            2.5,
            2,
        ),  # a third one would be stopped for a sixth of the time
    ],
)
def test_the_threads_with_the_least_mean_time_unless_all_are_about_as_fast(
    ms: dict[int, list[float]], cores: float, best: int
) -> None:
    assert best_threads(ms, cores) == best


def test_thread_counts_to_time_follow_the_cores() -> None:
    found = {cores: counts(cores) for cores in (0.5, 1, 1.5, 2, 2.5, 3, 8, 64)}
    assert found == {
        0.5: [1], 1: [1], 1.5: [1, 2], 2: [1, 2], 2.5: [1, 2, 3], 3: [1, 3], 8: [1, 4, 8], 64: [1, 32, 64],
    }  # fmt: skip


def test_another_dtype_is_only_named_and_only_if_it_is_clearly_faster() -> None:
    def faster(part: float, *, steady: bool = True) -> tuple[str, float] | None:
        ms = {"f32": {1: ONE, 2: TWO}, "bf16": {2: [ms * part for ms in TWO]}}
        return Timing("f32", 2, ms, steady).faster()

    assert faster(0.96) is faster(1.5) is faster(0.5, steady=False) is None
    found = faster(0.5)
    assert found is not None
    assert found == ("bf16", pytest.approx(0.5))


def test_a_report_has_all_figures() -> None:
    ms = {"f32": {1: ONE, 2: TWO}, "bf16": {2: [0.75, 3.0, 14.6]}}
    figures = (
        "ms for products of 100M weights with 1/8/32 rows (threads): "
        "f32 1.0/4.0/10 (2), 2.0/8.0/20 (1), bf16 0.8/3.0/15"
    )
    assert str(Timing("f32", 2, ms)) == f"2 of 2 threads to begin with; {figures}"
    slow = {"f32": {1: ONE, 2: times(2)}}
    assert str(Timing("f32", 2, slow)).startswith("1 of 2 threads to begin with; ms")
    disturbed = Timing("f32", 2, slow, steady=False)
    assert disturbed.threads == 2
    assert str(disturbed).startswith(
        "2 of 2 threads to begin with, as other work disturbed the timing; ms for products"
    )


@pytest.mark.parametrize(
    ("times", "shares", "wanted"),
    [
        ([[1.0, 1.1, 1.15, 9.0]], [0.9], True),
        ([[9.0, 1.15, 1.1, 1.0], [2.0, 2.0, 2.0]], [1.0, 0.8], True),
        ([[0.9, 1.1, 1.15, 9.0]], [0.9], False),  # one of four was an accident
        ([[1.0, 1.1]], [0.9], False),
        ([[1.0, 1.0, 1.0]], [1.0, 0.5], False),  # two threads shared a core
    ],
)
def test_least_times_are_believed_if_others_agree_and_the_threads_had_their_cores(
    times: list[list[float]], shares: list[float], wanted: bool
) -> None:
    assert are_undisturbed(times, shares) == wanted


# ---- kept in a file -------------------------------------------------------------------------------------

Measure = Callable[..., tuple[dict[str, dict[int, list[float]]], bool]]


class Machine:
    """Two cores; each measurement gets the next outcome of `steady`, then True."""

    def __init__(self, *steady: bool) -> None:
        self.steady, self.measured = list(steady), 0

    def measure(self, products: dict[str, object], threads: list[int], cores: float) -> object:
        self.measured += 1
        first, *others = products
        ms = {first: {n: [1.0 / n + self.measured] * 3 for n in threads}}
        return ms | {other: {threads[-1]: [0.3] * 3} for other in others}, self.steady.pop(
            0
        ) if self.steady else True


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    found = Machine()
    monkeypatch.setattr(autotune, "usable_cores", lambda: 2.0)
    monkeypatch.setattr(autotune, "_product", lambda dtype, kind: None)
    monkeypatch.setattr(autotune, "_measured", found.measure)
    return found


def settings(folder: Path, **fields: object) -> Settings:
    return Settings.model_validate({"cache_dir": folder, "device": "cpu", "threads": 0, **fields})


def time_f32(folder: Path, *others: str, again: bool = False) -> Timing | None:
    return timing_for(settings(folder), folder, "f32", others, again=again)


def test_a_timing_is_made_once(machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = time_f32(tmp_path, "bf16")
    assert time_f32(tmp_path, "bf16") == first
    assert machine.measured == 1
    fewer = time_f32(tmp_path)
    assert first is not None
    assert fewer is not None
    assert fewer.ms == {"f32": first.ms["f32"]}
    assert machine.measured == 1
    time_f32(tmp_path, "bf16", "int8")  # has not been timed
    assert machine.measured == 2
    monkeypatch.setattr(autotune, "usable_cores", lambda: 1.5)  # another quota
    time_f32(tmp_path)
    assert machine.measured == 3
    monkeypatch.setattr(kernels.cpu_jit, "sources_digest", lambda: "others")
    time_f32(tmp_path)
    assert machine.measured == 4
    assert all(path.suffix == ".json" for path in (tmp_path / "timings").iterdir())  # no drafts


def test_disturbed_timing_is_repeated_an_hour_later_or_on_request(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.steady = [False, False, False]
    for _ in range(2):
        found = time_f32(tmp_path)
        assert found is not None
        assert (found.steady, found.threads, machine.measured) == (False, 2, 1)
    time_f32(tmp_path, again=True)
    assert machine.measured == 2
    now = autotune.time.time()
    monkeypatch.setattr(autotune.time, "time", lambda: now + autotune.RETRY_S + 1)
    for _ in range(2):
        time_f32(tmp_path)
    assert machine.measured == 3
    monkeypatch.setattr(autotune.time, "time", lambda: now - 2 * 86_400)
    machine.steady = [True]
    for _ in range(2):
        time_f32(tmp_path)
    assert machine.measured == 4, "the clock was set back"


def damaged(change: Callable[[dict[str, object]], object]) -> Callable[[bytes], bytes]:
    return lambda raw: json.dumps(change(json.loads(raw))).encode()


@pytest.mark.parametrize(
    "damage",
    [
        lambda raw: b"",
        lambda raw: raw[:-7],
        lambda raw: b"\xff\xfe" + raw,
        damaged(lambda kept: [kept]),
        damaged(lambda kept: kept | {"about": ["another machine"]}),
        damaged(lambda kept: kept | {"ms": {}}),
        damaged(lambda kept: kept | {"ms": {"f32": {"1": [1, 2, 3]}}}),
        damaged(lambda kept: kept | {"ms": {"f32": {"1": [1, 2, 3], "2": [1, 2]}}}),
        damaged(lambda kept: kept | {"ms": {"f32": {"1": [1, 2, 3], "2": [1, 2, -3]}}}),
        damaged(lambda kept: kept | {"ms": {"f32": {"1": [1, 2, 3], "2": [1, 2, float("nan")]}}}),
        damaged(lambda kept: kept | {"ms": {"f32": {"1": [1, 2, 3], "2": [1, 2, 3], "4": [1, 2, 3]}}}),
        damaged(lambda kept: kept | {"ms": {"f32": {"one": [1, 2, 3], "2": [1, 2, 3]}}}),
    ],
)
def test_a_damaged_or_foreign_file_is_ignored_and_written_again(
    machine: Machine, tmp_path: Path, damage: Callable[[bytes], bytes]
) -> None:
    time_f32(tmp_path)
    (file,) = (tmp_path / "timings").iterdir()
    whole = json.loads(file.read_bytes())
    file.write_bytes(damage(file.read_bytes()))
    assert time_f32(tmp_path) is not None
    assert machine.measured == 2
    assert json.loads(file.read_bytes()).keys() == whole.keys()
    time_f32(tmp_path)
    assert machine.measured == 2


def test_a_folder_that_cannot_be_written_costs_a_timing_a_start(machine: Machine, tmp_path: Path) -> None:
    (tmp_path / "timings").write_text("no folder")
    for starts in (1, 2):
        assert time_f32(tmp_path) is not None
        assert machine.measured == starts


def test_two_starts_at_once_do_not_disturb_each_other(machine: Machine, tmp_path: Path) -> None:
    (tmp_path / "timings").mkdir()
    other = os.open(tmp_path / "timings", os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    assert time_f32(tmp_path) is None
    assert machine.measured == 0
    os.close(other)
    assert time_f32(tmp_path) is not None


@pytest.mark.parametrize(
    "fields", [{"threads": 1}, {"deterministic": True}, {"device": "cpu/tp2"}, {"backend": "dummy"}]
)
def test_settings_that_decide_the_threads_are_not_timed(
    machine: Machine, tmp_path: Path, fields: dict[str, object]
) -> None:
    assert timing_for(settings(tmp_path, **fields), tmp_path, "f32", ("bf16",)) is None
    assert timing_for(settings(tmp_path), tmp_path, "fp8") is None  # an error of the load
    assert timing_for(settings(tmp_path), write_gguf("llama", tmp_path / "plain.gguf"), "packed") is None
    assert machine.measured == 0


def test_one_core_and_one_dtype_leave_nothing_to_choose(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(autotune, "usable_cores", lambda: 0.5)
    assert time_f32(tmp_path) is None
    assert time_f32(tmp_path, "bf16") is not None
    assert machine.measured == 1


# ---- for real -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["f32", "packed", "packed8", "int8"])
def test_products_of_this_machine_are_timed(
    tmp_path: Path, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if dtype != "f32" and not kernels.cpu_jit.has(*kernels.cpu_jit.BYTES):
        pytest.skip("kernels of packed weights and int8 need a CPU with AVX2 and F16C")
    monkeypatch.setattr(autotune, "BUDGET_S", 0.02)
    monkeypatch.setattr(autotune, "_BYTES", 1 << 18)
    monkeypatch.setattr(autotune, "usable_cores", lambda: 2.0)
    monkeypatch.setattr(dtypes, "type_of_blocks", lambda path: GgmlType.Q4_K)
    before = torch.get_num_threads()
    found = timing_for(settings(tmp_path), tmp_path / "model.gguf", dtype, ("f32", "bf16"))
    assert torch.get_num_threads() == before
    assert found is not None
    shape = {name: {n: len(ms) for n, ms in of.items()} for name, of in found.ms.items()}
    others = {other: {2: len(ROWS)} for other in ("f32", "bf16")}
    assert shape == others | {dtype: {1: len(ROWS), 2: len(ROWS)}}
    assert all(ms > 0 for of in found.ms.values() for times in of.values() for ms in times)
    assert found.threads in (1, 2)
    assert len(list((tmp_path / "timings").iterdir())) == 1


def test_thread_count_of_an_engine_starts_at_the_given_number() -> None:
    assert ThreadCount(8, 5).now == 5
    assert ThreadCount(8, 5)._ladder == [1, 2, 3, 4, 5, 6, 8]
    assert ThreadCount(8).now == 8


@pytest.mark.parametrize(
    ("dtype", "rule", "others"),
    [("auto", "f32", ("f32", "bf16")), ("auto", "packed", ()), ("f32", "packed", ())],
)
def test_an_executor_starts_with_the_threads_that_were_timed_and_its_log_names_a_faster_dtype(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    dtype: str,
    rule: str,
    others: tuple[str, ...],
) -> None:
    asked: list[object] = []

    def found(given: Settings, path: Path, name: str, beside: tuple[str, ...]) -> Timing:
        asked.append((name, beside))
        return Timing(name, 4, {name: {2: ONE, 4: times(2)}, **{each: {4: ONE} for each in beside[1:]}})

    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(autotune, "timing_for", found)
    monkeypatch.setattr(loader, "best_dtype", lambda *_: (rule, "a reason"))
    monkeypatch.setattr(engine, "build", lambda options: options)
    caplog.set_level("INFO", "headrace.executor")
    options = build._torch(
        settings(tmp_path, model=str(tmp_path), dtype=dtype, backend="torch"), Alarm(), GrammarNews()
    )
    name = dtype if dtype != "auto" else rule
    assert isinstance(options, loader.TorchOptions)
    assert (options.dtype, options.threads, options.first_threads) == (name, 0, 2)
    assert asked == [(name, others)]
    assert "2 of 4 threads to begin with; ms" in caplog.text
    assert ("products in bf16 take 0.50 of the time: --dtype bf16" in caplog.text) == bool(others)
