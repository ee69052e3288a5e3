"""Logits processors: how they are loaded, and the one that ships."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.executor.plan_maker import PlanMaker
from support.executor.tiny_models import save_tiny

from services.executor.build import engine_builder
from services.executor.cpu.engine import TorchOptions, build
from services.executor.sampling.logits_processors import Wait, load_processors
from shared.config import Settings
from shared.errors import SetupError
from shared.processes import processor_targets

WAIT = "services.executor.sampling.logits_processors:Wait"


class Upper:
    """Inside a class, so that an attribute has a dot."""

    class Inner:
        def __init__(self, args: dict[str, Any], prompt_tokens: Sequence[int]) -> None:
            pass

        def process(self, generated: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
            return logits


NOT_CALLABLE = 5


def test_a_setting_lists_names_and_where_they_come_from() -> None:
    assert processor_targets("") == {}
    assert processor_targets(" a = m.n:C , b=m:D.E,") == {"a": "m.n:C", "b": "m:D.E"}


@pytest.mark.parametrize(
    "setting", ["a", "a=", "a=m", "=m:C", "a b=m:C", "a=m:", "a=:C", "a=m:C:D", "a=../m:C"]
)
def test_a_malformed_entry_is_named_with_an_example(setting: str) -> None:
    with pytest.raises(
        SetupError, match="is not name=module:attribute; write for example no_digits=my_package"
    ):
        processor_targets(setting)


def test_a_name_can_be_given_once() -> None:
    with pytest.raises(SetupError, match="'a' is listed twice; rename one"):
        processor_targets("a=m:C,a=m:D")


def test_processors_are_imported_by_name() -> None:
    found = load_processors(f"wait={WAIT},inner={__name__}:Upper.Inner")
    assert found == {"wait": Wait, "inner": Upper.Inner}


@pytest.mark.parametrize(
    ("target", "why"),
    [
        (
            "no_such_module_here:C",
            "cannot be loaded: ModuleNotFoundError: No module named 'no_such_module_here'",
        ),
        (
            "services.executor.sampling.logits_processors:Weight",
            "cannot be loaded: AttributeError: .*'Weight'",
        ),
        (
            "services.executor.sampling.logits_processors:MAX_WAIT_MS",
            "is no logits processor: a class with a method `process`",
        ),
        ("json:JSONDecoder", "is no logits processor"),
    ],
)
def test_processor_that_cannot_be_loaded_stops_the_executor_with_the_mend(target: str, why: str) -> None:
    with pytest.raises(SetupError, match=rf"^logits_processors: bad={target} {why}") as caught:
        load_processors(f"bad={target}")
    assert (
        "take it out of the setting" in caught.value.message
        or "docs/design/processors.md" in caught.value.message
    )


def test_a_module_that_raises_while_it_is_imported_is_a_setup_error(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "breaks_on_import.py").write_text("raise RuntimeError('no licence')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SetupError, match="RuntimeError: no licence; install the module where the executor"):
        load_processors("bad=breaks_on_import:C")


def test_the_engine_is_not_built_with_processors_that_cannot_be_loaded() -> None:
    settings = Settings(backend="sim", logits_processors="bad=no_such_module_here:C")
    with pytest.raises(SetupError, match="bad=no_such_module_here:C cannot be loaded"):
        engine_builder(settings)()


@pytest.mark.parametrize(("args", "slept_s"), [({"ms": 20}, 0.02), ({"ms": 0.5}, 0.0005), ({}, 0.0)])
def test_wait_waits_and_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, args: dict[str, Any], slept_s: float
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    logits = torch.zeros(4)
    assert Wait(args, [1]).process([], logits) is logits
    assert slept == [slept_s]
    assert not logits.any()


@pytest.mark.parametrize("ms", [-1, 10_001, "20", True, float("nan")])
def test_wait_refuses_what_is_no_time(ms: object) -> None:
    with pytest.raises(ValueError, match="`ms`: a number from 0 to 10000 is expected, not"):
        Wait({"ms": ms}, [])


def test_the_example_of_the_page_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[5] / "docs" / "design" / "processors.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.S)
    (setting,) = re.findall(r"HEADRACE_LOGITS_PROCESSORS=(\S+)", page)
    (tmp_path / "my_processors.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    processors = load_processors(setting)
    folder = save_tiny("llama-9-3-tied", tmp_path / "tiny")
    options = TorchOptions(
        model_path=folder, model_name="m", device="cpu", blocks=8, slots=1, threads=1, processors=processors
    )
    maker = PlanMaker(build(options))
    found = []
    for args in ({"ids": []}, {"ids": [0], "allowed": 0}, {"ids": [0], "allowed": 1}):
        args["ids"] = args["ids"] and found[0][:1]  # the token that comes first without the processor
        asked = json.dumps({"name": "no_digits", "args": args})
        maker.open(0, [5, 6, 7], processors=(asked,))
        found.append([maker.prefill({0: 3}).ids[0], *maker.decode({0: 4}, 3)[0]])
        maker.backend.close_slot(0)
    free, none, one = found
    assert free[0] not in none
    assert one.count(free[0]) == 1
    assert one[0] == free[0]
