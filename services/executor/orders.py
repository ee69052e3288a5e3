"""What the leader of a group tells its followers, in the order in which it does the same itself.

Besides these, SlotOpen and StepPlan go as they came. Nobody else is told anything: a follower hears neither
NATS nor the scheduler, so that all ranks see one sequence of plans, slots and resets, whatever is lost,
repeated or refused on the way to the leader.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from services.executor.backend import StepOutput
from services.executor.loading import TorchOptions
from shared.messages import Ints, SlotOpen, StepPlan


@dataclass(frozen=True, slots=True)
class Join:
    """The first order: which rank to be, of how many, and the port of the store where they meet."""

    options: TorchOptions
    rank: int
    size: int
    port: int


@dataclass(frozen=True, slots=True)
class Close:
    """Forget a slot."""

    slot: int


@dataclass(frozen=True, slots=True)
class Took:
    """What was chosen in a step: columns as in StepResult."""

    step: int
    ids: Ints
    done: Ints


@dataclass(frozen=True, slots=True)
class Failed:
    """A step that the leader could not compute, before any rank needed another, or could not sample."""

    step: int


class Do(Enum):
    """Orders without more to say."""

    WARM_UP = "warm up"
    RESET = "reset"
    END = "end"


@dataclass(frozen=True, slots=True)
class Attach:
    """Map this arena, and answer."""

    name: str
    generation: int


@dataclass(frozen=True, slots=True)
class Move:
    """Copy this rank's part of blocks to or from the arena, where the whole blocks begin at `offsets`."""

    to_arena: bool
    blocks: Sequence[int]
    offsets: Sequence[int]


class Copies(Enum):
    """Orders about copies without more to say. Each is answered."""

    FINISH = "finish"
    DETACH = "detach"


CopyOrder = Attach | Move | Copies
Order = Join | SlotOpen | Close | StepPlan | Took | Failed | Do | CopyOrder


@dataclass(frozen=True, slots=True)
class Answer:
    """Of one follower to Attach or Copies: the time as Copier.finish gives it, or what went wrong."""

    took_us: int = 0
    error: str = ""


@dataclass(frozen=True, slots=True)
class Sampled:
    """Of the last stage of a pipeline, unasked: what it chose in a step, or what went wrong."""

    step: int
    output: StepOutput | None
    error: str = ""


@dataclass(frozen=True, slots=True)
class Gone:
    """A follower's last words."""

    why: str
