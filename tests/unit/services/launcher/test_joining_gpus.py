"""Which GPUs the executors of one `up` see."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.launcher.joining import VISIBLE, placed, seen
from services.launcher.supervisor import ServiceSpec, service_specs


def shares(executors: int, ranks: int, gpus: list[str]) -> list[str | None]:
    """What each executor sees; None: all."""
    specs = service_specs(
        {"kv_offload": 1, "tokenizer": 2, "executor": executors}, env={"HEADRACE_MODEL": "m"}
    )
    found = placed(specs, ranks, gpus)
    others = [spec for spec in found if spec.kind != "executor"]
    assert others == [spec for spec in specs if spec.kind != "executor"]
    assert all(spec.env["HEADRACE_MODEL"] == "m" for spec in found)
    return [spec.env.get(VISIBLE) for spec in found if spec.kind == "executor"]


@pytest.mark.parametrize(
    ("executors", "ranks", "gpus", "wanted"),
    [
        (2, 1, ["0", "1"], ["0", "1"]),
        (2, 2, ["0", "1", "2", "3"], ["0,1", "2,3"]),
        (3, 1, ["0", "1"], ["0", "1", "0"]),  # no GPU is left for the third one
        (2, 2, ["0", "1", "2"], [None, None]),  # room for one group
        (1, 1, ["0", "1"], [None]),
        (2, 1, ["3", "GPU-5f"], ["3", "GPU-5f"]),
        (2, 1, ["0"], [None, None]),
        (2, 1, [], [None, None]),
    ],
)
def test_each_executor_sees_gpus_of_its_own_while_there_are_some(
    executors: int, ranks: int, gpus: list[str], wanted: list[str | None]
) -> None:
    assert shares(executors, ranks, gpus) == wanted


def test_executors_of_two_models_are_divided_like_executors_of_one() -> None:
    specs = [ServiceSpec(f"executor@{name}", "executor", ()) for name in ("a", "b")]
    assert [spec.env[VISIBLE] for spec in placed(specs, 1, ["0", "1"])] == ["0", "1"]


def test_gpus_are_found_by_the_variable_or_the_device_files(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    assert seen({}, tmp_path) == ["0", "1"]
    assert seen({VISIBLE: "1, GPU-5f"}, tmp_path) == ["1", "GPU-5f"]
    assert seen({VISIBLE: "MIG-1/0/0,MIG-GPU-5f/1/0"}, tmp_path) == ["MIG-1/0/0", "MIG-GPU-5f/1/0"]
    assert seen({VISIBLE: "0,-1,1"}, tmp_path) == ["0"]
    assert [seen({VISIBLE: none}, tmp_path) for none in ("", "-1", "NoDevFiles", "void")] == [[]] * 4
    assert seen({}, tmp_path / "absent") == []
