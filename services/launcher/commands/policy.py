"""`headrace policy` prints the policy of each scheduler; `headrace policy set kind=name,...` changes it.

A scheduler applies a change between two steps, and keeps it until the next change or its own end: a scheduler
that starts has the setting `policy`.
"""

from __future__ import annotations

import asyncio
import json

from services.launcher.commands.status import Facts, services_of
from services.launcher.session import Target, connected
from shared.errors import BadRequest, Unavailable
from shared.nats import subjects
from shared.nats.interface import Bus, NoResponders, RequestTimeout

WAIT_S = 5.0  # a step's result may be decided upon first: milliseconds


async def policy(target: Target, fleet: str, change: str | None, model: str) -> int:
    """Print a line for each scheduler of `fleet`, or only of `model`; with `change` after that. Returns 1 if
    a scheduler has refused it or has not answered. Raises Unavailable without a scheduler, BadRequest."""
    if change is not None and not change.strip():
        raise BadRequest("name a policy: headrace policy set kind=name,...")
    services = await services_of(target, fleet)
    schedulers = [s for s in services if s.get("kind") == "scheduler" and model in ("", s.get("model"))]
    if not schedulers:
        raise Unavailable(f"no scheduler of {model or 'the fleet'} answers: see `headrace status`")
    if change is None:
        for scheduler in schedulers:
            print(f"{_named(scheduler)}: {scheduler.get('policy', 'unknown')}")
        return 0
    async with connected(target.nats_url) as bus:
        return await set_policy(bus, schedulers, change)


async def set_policy(bus: Bus, schedulers: list[Facts], change: str) -> int:
    """Change the policy of these schedulers, print what each answers, and return 1 unless all have agreed."""
    asked = (ask(bus, subjects.policy(str(scheduler["id"])), change) for scheduler in schedulers)
    answers = await asyncio.gather(*asked)
    for scheduler, answer in zip(schedulers, answers, strict=True):
        if (error := answer.get("error")) is not None:
            print(f"{_named(scheduler)}: unchanged: {error['message']}")
        elif "after" in answer:
            lines = f"before {answer['before']}\n  after  {answer['after']}"
            print(f"{_named(scheduler)}:\n  {lines}")
        else:
            print(f"{_named(scheduler)}: no answer: `headrace policy` shows whether it has changed")
    return 0 if all("after" in answer for answer in answers) else 1


async def ask(bus: Bus, subject: str, body: str) -> Facts:
    """The answer of a scheduler; empty without one."""
    try:
        reply = await bus.request(subject, body.encode("utf-8", "replace"), timeout_us=int(WAIT_S * 1e6))
    except (NoResponders, RequestTimeout):
        return {}
    answer: Facts = json.loads(reply.data)
    return answer


def _named(scheduler: Facts) -> str:
    return f"scheduler {scheduler['id']}, model {scheduler.get('model', '?')}"
