"""Divides the GPUs of this machine among the executors of `up`.

An executor takes the first GPUs that it sees, as many as it has ranks. So several executors that see all GPUs
would share the first ones and leave the others idle.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from services.launcher.supervisor import ServiceSpec

VISIBLE = "CUDA_VISIBLE_DEVICES"


def seen(environment: Mapping[str, str], devices: Path = Path("/dev")) -> list[str]:
    """The GPUs that a process with this environment sees, as CUDA_VISIBLE_DEVICES names them."""
    if (named := environment.get(VISIBLE)) is not None:
        return [name.strip() for name in named.split(",") if name.strip()]
    files = [each for each in devices.glob("nvidia*") if each.name.removeprefix("nvidia").isdecimal()]
    return [str(index) for index in range(len(files))]


def placed(specs: Sequence[ServiceSpec], ranks: int, gpus: Sequence[str]) -> list[ServiceSpec]:
    """The services; of several executors each one sees `ranks` of these GPUs. Executors for which no GPUs are
    left share those of the first ones."""
    groups = len(gpus) // ranks
    executors = [spec.name for spec in specs if spec.kind == "executor"]
    if groups < 2 or len(executors) < 2:
        return list(specs)
    firsts = {name: at % groups * ranks for at, name in enumerate(executors)}
    return [
        replace(spec, env={**spec.env, VISIBLE: ",".join(gpus[first : first + ranks])})
        if (first := firsts.get(spec.name)) is not None
        else spec
        for spec in specs
    ]
