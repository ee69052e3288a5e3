"""The setting `sim`: how long the steps of the simulated engine take.

step=5000,token=20          µs for each step, and more for each of its tokens
h200-8b                     a preset of shared.step_model
h200-8b,stages=2,host_row=30    a pipeline of two; 30 µs of logits processors for each row that waits
"""

from __future__ import annotations

from dataclasses import dataclass

from shared.checks import MAX_STAGES
from shared.errors import SetupError
from shared.step_model import PRESETS, StepModel, StepShape

_KEYS = ("step", "token", "stages", "host_row")
_MOST_US = 60_000_000


@dataclass(frozen=True, slots=True)
class SimTiming:
    """A step model, with time by the token on top, and the number of pipeline stages."""

    model: StepModel
    token_us: int = 0
    stages: int = 1
    host_row_us: int = 0

    def step_us(self, shape: StepShape) -> int:
        """The time of a step through all stages."""
        return self.model.step_us(shape) + self.token_us * shape.tokens


def sim_timing(setting: str) -> SimTiming:
    """Read the setting. Raises SetupError."""
    names, numbers = [], {}
    for entry in filter(None, (part.strip() for part in setting.split(","))):
        key, equals, value = (part.strip() for part in entry.partition("="))
        if not equals and key in PRESETS:
            names.append(key)
        elif key in _KEYS and value.isascii() and value.isdigit() and int(value) <= _MOST_US:
            numbers[key] = int(value)
        else:
            raise SetupError(
                f"sim: {entry!r:.60} is neither a preset ({', '.join(PRESETS)}) nor one of "
                f"{', '.join(_KEYS)} with a number; write for example step=5000,token=20"
            )
    if len(names) > 1 or (names and "step" in numbers):
        raise SetupError("sim: give one preset, or step=..., not both")
    model = PRESETS[names[0]] if names else StepModel(weights_us=numbers.get("step", 0), token_ns=0)
    stages = numbers.get("stages", 1)
    if not 1 <= stages <= MAX_STAGES:
        raise SetupError(f"sim: stages={stages} is not from 1 to {MAX_STAGES}")
    host_row_us = numbers.get("host_row", model.host_row_ns // 1_000)
    return SimTiming(model, numbers.get("token", 0), stages, host_row_us)
