"""What each arm asks of the engine, recorded while it is served and then run by engines in turn.

A machine's speed drifts by up to 10 % from one minute to the next, and the arms are served one after the
other: so their latencies tell no difference that is smaller. Their plans can be run side by side: a few steps
of one arm, a few of the next, each on an engine of its own, until all are done. Then all meet one machine.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from loadtest.fleet import MODEL
from loadtest.real.served import ANSWER_S, served
from loadtest.tax.measured import BLOCK_TOKENS, Size, latencies_of, rank, settings_of, warming
from loadtest.tax.protocol import Arm, Point
from services.executor.cpu.engine import TorchOptions, build
from services.executor.engine import Backend
from shared import codec
from shared.client import ask_all
from shared.config import load
from shared.messages import SlotClose, SlotOpen, StepPlan
from shared.nats import subjects
from shared.nats.interface import Delivery
from shared.vocab.files import resolve

FEW = 5  # steps of an arm, then the next one's turn

Asked = SlotOpen | SlotClose | StepPlan


@dataclass(slots=True)
class Recorded:
    """One arm as it was served: what its scheduler sent to the engine, in order."""

    asked: list[Asked] = field(default_factory=list)
    p99_s: float = 0.0
    idle_s: float = 0.0  # of the device, between steps

    @property
    def plans(self) -> list[StepPlan]:
        return [message for message in self.asked if isinstance(message, StepPlan)]

    @property
    def tokens(self) -> int:
        """Computed, of prompts and answers, some of them again."""
        return sum(sum(plan.counts) for plan in self.plans)


async def record(size: Size, lengths: list[tuple[int, int]], point: Point, arm: Arm) -> Recorded:
    """Serve an arm."""
    found = Recorded()

    def heard(delivery: Delivery) -> None:
        message = codec.decode(delivery.data).message
        if isinstance(message, SlotOpen | SlotClose | StepPlan):
            found.asked.append(message)

    async with served(settings_of(size, point, arm)) as fleet:
        await fleet.bus.subscribe("hr.bench.executor.*.in.*", heard)
        await fleet.all(warming())

        async def idle_us() -> float:
            answers = await ask_all(fleet.bus, subjects.STATUS, ANSWER_S)
            return sum(answer["device_idle_us"] for answer in answers if answer["kind"] == "executor")

        before_us, found.asked = await idle_us(), []
        found.p99_s = rank(await latencies_of(fleet, lengths), 99)
        found.idle_s = (await idle_us() - before_us) / 1e6
    return found


def replay(size: Size, point: Point, arms: Sequence[Recorded], rounds: int) -> Iterator[list[float]]:
    """Of each round the device time of each arm, in seconds. Who is first changes, and the engines do."""
    engines = [_engine(size, point) for _ in arms]
    for number in range(rounds):
        for engine in engines:
            engine.reset()
        order = [(number + i) % len(arms) for i in range(len(arms))]
        steps = {arm: _steps(engines[(arm + number) % len(arms)], arms[arm].asked) for arm in order}
        took_s = [0.0] * len(arms)
        while steps:
            for arm in order:
                for _ in range(FEW if arm in steps else 0):
                    step_s = next(steps[arm], None)
                    if step_s is None:
                        del steps[arm]
                        break
                    took_s[arm] += step_s
        yield took_s


def ratios(rounds: Sequence[Sequence[float]], arm: int, other: int) -> tuple[float, float, float]:
    """Device time of an arm over another's, round by round: the median, the least, the most."""
    found = [took_s[arm] / took_s[other] for took_s in rounds]
    return statistics.median(found), min(found), max(found)


def _steps(engine: Backend, asked: Sequence[Asked]) -> Iterator[float]:
    """Run what was asked; the seconds of each step. Blocks that a tier brought hold what lies there: the time
    of a step does not depend on it."""
    for message in asked:
        if isinstance(message, SlotOpen):
            engine.open_slot(message)
        elif isinstance(message, SlotClose):
            engine.close_slot(message.slot)
        else:
            yield _clocked(lambda plan=message: engine.sample(engine.forward(plan)))


def _clocked(run: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    run()
    return time.perf_counter() - began_s


def _engine(size: Size, point: Point) -> Backend:
    tokens = point.pool_blocks * BLOCK_TOKENS
    engine = build(
        TorchOptions(
            model_path=resolve(MODEL, load().settings.cache_dir).path, model_name=MODEL, dtype="f32",
            threads=size.threads, slots=size.slots, blocks=point.pool_blocks, block_tokens=BLOCK_TOKENS,
            max_context=tokens, max_step_tokens=tokens,
        )
    )  # fmt: skip
    engine.warm_up()
    return engine
