"""Patterns of operations, and an operation that an engine has no kernel for."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.executor.plan_maker import PlanMaker, Row
from support.executor.tiny_models import VOCAB, save_tiny

from services.executor.cpu import engine as cpu_model
from services.executor.cpu.engine import TorchBackend, TorchOptions, build
from services.executor.model.description import Add, Description, Norm, Weight
from services.executor.model.program import REFERENCE, Placed, Table, Values, steps_of

SOME = Weight("w", ())


def makes(name: str, *, only: int = -1) -> Callable[..., Any]:
    """A kernel that takes operations of the layer `only` (-1: of any), as a step with its `name`."""

    def make(*placed: Placed) -> Any:
        def step(values: Values) -> None: ...

        step.__name__ = f"{name}{len(placed)}"
        return step if only in (-1, placed[0].layer) else None

    return make


def names(table: Table) -> list[str]:
    operations = [Placed(op, i, {}) for i in range(2) for op in (Norm(SOME, 1.0), Add())]
    steps = steps_of([*operations, Placed(Norm(SOME, 1.0), 2, {})], table, {(Norm,): makes("torch")})
    assert [summed for _, summed in steps] == [step.__name__.startswith("add") for step, _ in steps]  # type: ignore[attr-defined]  # a function
    return [step.__name__ for step, _ in steps]  # type: ignore[attr-defined]  # a function


def test_the_longest_pattern_that_a_kernel_accepts_is_taken() -> None:
    norm, add = makes("norm"), makes("add")
    assert names({(Norm,): norm, (Add,): add}) == ["norm1", "add1", "norm1", "add1", "norm1"]
    assert names({(Norm,): norm, (Add,): add, (Add, Norm): add}) == ["norm1", "add2", "add2"]
    refusing = makes("add", only=1)
    assert names({(Norm,): norm, (Add,): add, (Add, Norm): refusing}) == ["norm1", "add1", "norm1", "add2"]


def test_torch_computes_the_rest_and_the_log_names_it_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert names({(Add,): makes("add")}) == ["torch1", "add1", "torch1", "add1", "torch1"]
    assert [record.getMessage() for record in caplog.records] == [
        "this engine has no kernels for Norm: torch computes them"
    ]


@dataclass(frozen=True, slots=True)
class Halve:
    """An operation of this test: a dataclass, its place in a layer, and its definition in torch."""


def halve(placed: Placed) -> Any:
    def step(values: Values) -> None:
        values.x = values.x * 0.5

    return step


def logits(backend: TorchBackend) -> torch.Tensor:
    maker = PlanMaker(backend)
    maker.open(0, [7 * i % VOCAB for i in range(30)])
    found = []
    for row in (Row(0, 0, 21, feeds=(0,)), Row(0, 21, 8, feeds=(0,)), Row(0, 29, 1, feeds=(0,))):
        pending = backend.forward(maker.plan([row]))
        assert pending.logits is not None
        found.append(pending.logits)
        backend.sample(pending)
    return torch.cat(found)


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_new_operation_touches_its_description_and_its_reference(
    deterministic: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Two files, and two more for its option in Shapes and the key of config.json. No engine changes: half of
    what each block adds is what a model with halves of the last matrices adds."""
    folder = save_tiny("llama", tmp_path)
    chosen = TorchOptions(
        model_path=folder, model_name="m", dtype="f32", device="cpu", blocks=8, slots=2, threads=1,
        deterministic=deterministic,
    )  # fmt: skip
    plain = logits(build(chosen))
    describe = cpu_model.describe

    def with_halves(shapes: Any) -> Description:
        found = describe(shapes)
        layers = (
            tuple(each for op in layer for each in ((Halve(), op) if isinstance(op, Add) else (op,)))
            for layer in found.layers
        )
        return replace(found, layers=tuple(layers))

    monkeypatch.setattr(cpu_model, "describe", with_halves)
    monkeypatch.setitem(REFERENCE, (Halve,), halve)  # type: ignore[arg-type]  # a dict
    with caplog.at_level(logging.WARNING):
        found = logits(build(chosen))
    assert sum("no kernels for Halve" in record.getMessage() for record in caplog.records) == 1
    monkeypatch.undo()
    halved = halves_of(folder, tmp_path / "halved")
    wanted = logits(build(replace(chosen, model_path=halved)))
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(found, plain, atol=0.1)


def halves_of(folder: Path, to: Path) -> Path:
    """The model with half of every matrix that a block ends with."""
    from safetensors.torch import load_file, save_file

    to.mkdir()
    state = load_file(folder / "model.safetensors")
    last = ("o_proj.weight", "down_proj.weight")
    save_file(
        {name: each * 0.5 if name.endswith(last) else each for name, each in state.items()},
        to / "model.safetensors",
    )
    (to / "config.json").write_bytes((folder / "config.json").read_bytes())
    return to
