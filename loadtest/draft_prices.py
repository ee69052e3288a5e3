"""Measures how near the number of drafts that the scheduler chooses is to the best number.

    python -m loadtest.draft_prices [--models h200-8b] [--rows 1 8] [--kept 10 50] [--steps 300] [--out OUT]

The scheduler plans the steps of an engine that takes the time of a model, and keeps each draft with a set
probability, in percent. A figure is tokens/s relative to the best number of drafts for each row that stays
the same: 0.97 is asked of each. Tokens are expected ones, so that luck counts in what the scheduler learns
and not in the figure; the first 100 steps count for nothing.

    h200-8b, smollm2-cpu    the models of the simulated engine: each draft is a row more
    h200-8b graphs          all rows of a step have 1, 3 or 7 drafts or none, which read KV once
    tiles graphs            the same, and the products take 1.3 times as long from 65 tokens on, as an H200's
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from loadtest.command_line import parser_of, report
from services.scheduler.core import Scheduler
from services.scheduler.state.requests import Arrived, Event, PeerReady
from services.scheduler.state.state import Limits
from shared.messages import AT_DEVICE, ExecHello, StepPlan, StepResult, Tokenized, ints
from shared.step_model import H200_8B, SMOLLM2_CPU, StepShape

ROWS, KEPT = (1, 2, 4, 8, 16, 32, 64, 128, 256), tuple(range(10, 100, 10))
GRAPHS, WARM_STEPS, PROMPT_TOKENS, MOST = (0, 1, 3, 7), 100, 64, 7
TILES = ((64, 1_000), (128, 1_300), (256, 1_750), (512, 3_000), (1_024, 5_600), (4_096, 20_000))


def _tiles_us(shape: StepShape) -> int:
    times = next(times for tokens, times in TILES if shape.tokens <= tokens)
    return 3_900 * times // 1_000 + shape.rows * 10 + shape.kv_tokens * H200_8B.kv_token_ps // 1_000_000


MODELS: dict[str, tuple[Callable[[StepShape], int], bool]] = {  # the time of a step, and: has it graphs?
    "h200-8b": (H200_8B.step_us, False),
    "smollm2-cpu": (SMOLLM2_CPU.step_us, False),
    "h200-8b graphs": (H200_8B.step_us, True),
    "tiles graphs": (_tiles_us, True),
}


@dataclass
class Played:
    """A scheduler, and an engine of this time that keeps drafts with this probability."""

    model: str
    rows: int
    kept: float
    dice: random.Random = field(default_factory=lambda: random.Random(7))
    plans: deque[StepPlan] = field(default_factory=deque)
    now_us: int = 0
    tokens: float = 0.0  # expected ones
    took_us: int = 0
    fixed_us: dict[int, int] = field(default_factory=dict)  # of the same steps, with so many drafts a row
    steps: int = 0
    places: dict[int, int] = field(default_factory=dict)  # of slots: the device's lengths

    def __post_init__(self) -> None:
        self.step_us, self.graphs = MODELS[self.model]
        self.scheduler = Scheduler(Limits(step_tokens=32_768, max_waiting=10_000, overlap="single"))
        self.fixed_us = dict.fromkeys(GRAPHS if self.graphs else range(MOST + 1), 0)
        self._handle(PeerReady("detokenizer", "d", 1))
        self._handle(Arrived("executor.e", self._hello()))
        for number in range(self.rows):
            self._handle(Arrived("tokenizer.t", _asked(number)))

    def run(self, steps: int) -> float:
        """Tokens/s of so many steps, relative to the best number of drafts that stays the same."""
        for step in range(WARM_STEPS + steps):
            if step == WARM_STEPS:
                self.tokens, self.took_us, self.steps = 0.0, 0, 0
                self.fixed_us = dict.fromkeys(self.fixed_us, 0)
            self._answer(self.plans.popleft())
        return self.tokens / self.took_us / max(map(self.fixed_rate, self.fixed_us))

    def fixed_rate(self, drafts: int) -> float:
        """Tokens for each us with so many drafts."""
        return self.steps * self.rows * self._expected(drafts) / self.fixed_us[drafts]

    @property
    def best(self) -> int:
        """The best number of drafts that stays the same."""
        return max(self.fixed_us, key=self.fixed_rate)

    def _expected(self, drafts: int) -> float:
        return sum(self.kept**nth for nth in range(drafts + 1))

    def _answer(self, plan: StepPlan) -> None:
        ids, counts, drafted = ints(), ints(), ints()
        shape, chunks, most = StepShape(0, 0, 0, 0), [], 0
        for row, slot in enumerate(plan.slots):
            count, drafts = plan.counts[row], 0
            if plan.from_device[row]:
                drafts = count - 1 if plan.from_device[row] == AT_DEVICE else 0
                shape = shape.with_chunk(self.places[slot], 1)
            else:
                self.places[slot] = plan.starts[row] + count
                chunks.append((plan.starts[row], count))
            if row not in plan.sample_rows:
                continue
            kept = 0
            while kept < drafts and self.dice.random() < self.kept:
                kept += 1
            ids.extend([7] * (kept + 1))
            counts.append(kept + 1)
            drafted.append(drafts)
            most = max(most, drafts)
            self.places[slot] += kept + 1 if plan.from_device[row] else 0
            self.tokens += self._expected(drafts)
        took_us = self.step_us(self._with(shape, sum(drafted), most).with_chunks(chunks))
        for drafts in self.fixed_us:
            self.fixed_us[drafts] += self.step_us(self._with(shape, drafts * self.rows, drafts))
        self.now_us, self.took_us, self.steps = self.now_us + took_us, self.took_us + took_us, self.steps + 1
        result = StepResult(
            exec_epoch=1, step=plan.step, ids=ids, done=ints([0]) * len(counts), forward_us=took_us,
            start_wall_us=self.now_us - took_us, end_wall_us=self.now_us, counts=counts, drafted=drafted,
        )  # fmt: skip
        self._handle(Arrived("executor.e", result))

    def _with(self, shape: StepShape, drafts: int, most: int) -> StepShape:
        if not self.graphs:
            return shape.with_drafts(drafts, again=True)
        recorded = min(size for size in GRAPHS if size >= most)
        return shape.with_drafts(recorded * shape.rows, again=False)

    def _handle(self, event: Event) -> None:
        for command in self.scheduler.handle(event, self.now_us):
            if isinstance(command.message, StepPlan):
                self.plans.append(command.message)

    def _hello(self) -> ExecHello:
        return ExecHello(
            executor="e", exec_epoch=1, host_id="h", model="m", fingerprint="f", vocab_digest="v",
            vocab=32_000, blocks=65_536, block_tokens=16, slots=256, max_step_tokens=32_768,
            max_context=32_768, max_drafts=MOST, max_draft_rows=256 if self.graphs else 0,
        )  # fmt: skip


def _asked(number: int) -> Tokenized:
    tokens = ints((number * 31 + at) % 30_000 for at in range(PROMPT_TOKENS))
    return Tokenized(
        request=f"r{number}", attempt=1, tenant="t", model="m", inbox="i", slo_class="batch",
        timeout_us=10**12, max_tokens=20_000, tokens=tokens,
    )  # fmt: skip


def main() -> None:
    """The program."""
    parser = parser_of("draft_prices", __doc__)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS)
    parser.add_argument("--kept", nargs="+", type=int, default=KEPT, help="percent")
    parser.add_argument("--steps", type=int, default=300)
    given = parser.parse_args()
    found: dict[str, Any] = {}
    for model in given.models:
        for rows in given.rows:
            played = [(kept, Played(model, rows, kept / 100)) for kept in given.kept]
            of_rows = {kept: (round(each.run(given.steps), 3), each.best) for kept, each in played}
            found.setdefault(model, {})[rows] = of_rows
            print(
                f"{model:16}{rows:4}", *(f"{rate:.3f}/{best}" for rate, best in of_rows.values()), flush=True
            )
    least = {
        model: min(rate for row in rows.values() for rate, _ in row.values()) for model, rows in found.items()
    }
    report({"figures": found, "least": least}, given.out, least)


if __name__ == "__main__":
    main()
