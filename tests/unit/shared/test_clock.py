"""How a task is ended."""

from __future__ import annotations

import asyncio

from shared.clock import end_task


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
