"""The setting `sim`: how long the steps and the copies of the simulated engine take.

step=5000,token=20          µs for each step, and more for each of its tokens
h200-8b                     a preset of shared.step_model
h200-8b,stages=2,host_row=30    a pipeline of two; 30 µs of logits processors for each row that waits
step=5000,block=65536,d2h=5000,h2d=5000     bytes of a KV block; MB/s from the device, and to it (0: no time)
"""

from __future__ import annotations

from dataclasses import dataclass, field

from shared.checks import MAX_STAGES
from shared.errors import SetupError
from shared.step_model import PRESETS, StepModel, StepShape

_KEYS = ("step", "token", "stages", "host_row", "block", "d2h", "h2d")
_MOST_US = 60_000_000  # the most of any number here
_LEAST_BLOCK_BYTES = 32  # what a simulated block holds


@dataclass(frozen=True, slots=True)
class SimCopies:
    """Blocks of so many bytes, copied at these rates."""

    block_bytes: int = 65_536  # small, so that many fit into a small arena; 0: nothing can be copied
    d2h_mb_s: int = 0  # from the device to the arena; 0: copies take no time
    h2d_mb_s: int = 0

    def store_s(self, blocks: int) -> float:
        """The time to copy so many blocks to the arena."""
        return blocks * self.block_bytes / (self.d2h_mb_s * 1e6) if self.d2h_mb_s else 0.0

    def load_s(self, blocks: int) -> float:
        """The time to copy so many blocks from the arena."""
        return blocks * self.block_bytes / (self.h2d_mb_s * 1e6) if self.h2d_mb_s else 0.0


# Blocks of 16 tokens, at the rates of docs/benchmarks/kv_copies.md.
PRESET_COPIES = {
    "h200-8b": SimCopies(16 * 131_072, 50_700, 50_900),
    "smollm2-cpu": SimCopies(16 * 46_080, 3_300, 3_200),
}


@dataclass(frozen=True, slots=True)
class SimTiming:
    """A step model, with time by the token on top, and the number of pipeline stages."""

    model: StepModel
    token_us: int = 0
    stages: int = 1
    host_row_us: int = 0
    copies: SimCopies = field(default_factory=SimCopies)

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
    copies = _copies(numbers, PRESET_COPIES[names[0]] if names else SimCopies())
    return SimTiming(model, numbers.get("token", 0), stages, host_row_us, copies)


def _copies(numbers: dict[str, int], usual: SimCopies) -> SimCopies:
    block_bytes = numbers.get("block", usual.block_bytes)
    if 0 < block_bytes < _LEAST_BLOCK_BYTES:
        raise SetupError(f"sim: block={block_bytes} is less than {_LEAST_BLOCK_BYTES} bytes; 0 for no copies")
    rates = numbers.get("d2h", usual.d2h_mb_s), numbers.get("h2d", usual.h2d_mb_s)
    return SimCopies(block_bytes, *rates)
