"""How a task is ended, and when timers fire."""

from __future__ import annotations

import asyncio

import pytest
import uvloop

from shared.clock import end_task, timer_s


async def test_a_task_that_loses_a_cancellation_is_cancelled_again() -> None:
    lost = 0

    async def deaf() -> None:
        nonlocal lost
        while True:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                lost += 1
                if lost == 3:
                    raise

    task = asyncio.create_task(deaf())
    await asyncio.sleep(0)
    await end_task(task, 0.001)
    assert task.cancelled()
    assert lost == 3


async def test_a_task_that_has_ended_stays_as_it_is() -> None:
    task = asyncio.create_task(asyncio.sleep(0, "result"))
    await task
    await end_task(task)
    assert task.result() == "result"


@pytest.mark.parametrize(
    ("wait_us", "delay_s"), [(-5, 0), (0, 0), (1, 0.001), (499, 0.001), (1_000, 0.001), (1_001, 0.002)]
)
def test_a_timer_does_not_fire_early(wait_us: int, delay_s: float) -> None:
    assert timer_s(wait_us) == pytest.approx(delay_s, abs=1e-9)


def test_a_timer_for_less_than_half_a_millisecond_fires_once_when_it_is_due() -> None:
    """With a rest that uvloop rounds to zero the timer came back some hundred times."""
    times = 0

    async def wait() -> None:
        nonlocal times
        loop, due = asyncio.get_running_loop(), asyncio.Event()
        until_s = loop.time() + 0.0104

        def look() -> None:
            nonlocal times
            times += 1
            if loop.time() < until_s:
                loop.call_later(timer_s((until_s - loop.time()) * 1e6), look)
            else:
                due.set()

        look()
        await due.wait()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(wait())
    assert times <= 3  # now, when it is due, and once more if the clock of the loop lagged
