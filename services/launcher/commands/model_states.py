"""`headrace model load|unload|sleep|wake` changes what the executors of a model hold.

sleep, wake     requests to the model's schedulers, which drain first: the processes stay
load, unload    requests to each `headrace up` that has executors of the model: it starts or ends processes
"""

from __future__ import annotations

import asyncio
import json

from services.launcher.commands.status import Facts, services_of
from services.launcher.console import print_line
from services.launcher.session import Target, connected
from shared.client import request_all
from shared.errors import Unavailable
from shared.nats import subjects
from shared.nats.interface import Bus, NoResponders, RequestTimeout

WAIT_S = 5.0  # a step's result may be decided upon first: milliseconds
ANSWER_S = 1.0  # for the answers of all hosts


async def sleep(target: Target, fleet: str, what: str, model: str) -> int:
    """Request from the schedulers of a model that its executors `sleep` or `wake`; print their states.
    Returns 1 if a scheduler has not answered. Raises Unavailable without one."""
    services = await services_of(target, fleet)
    ids = [str(s["id"]) for s in services if s.get("kind") == "scheduler" and s.get("model") == model]
    if not ids:
        raise Unavailable(f"no scheduler of {model} answers: see `headrace status`")
    async with connected(target.nats_url) as bus:
        answers = await asyncio.gather(*(_ask(bus, scheduler, what) for scheduler in ids))
    for scheduler, answer in zip(ids, answers, strict=True):
        if not answer:
            print_line(f"scheduler {scheduler}: no answer: `headrace status` shows whether it has changed")
        elif not answer["executors"]:
            print_line(f"scheduler {scheduler}: it has no executor")
        for executor, state in answer.get("executors", {}).items():
            print_line(f"{executor}: {state}")
    return 0 if all(answers) else 1


async def load(target: Target, fleet: str, what: str, model: str) -> int:
    """Request from every `headrace up` with this model to `load` or `unload` it; print its state on each
    host. Returns 1 if one has refused. Raises Unavailable if none answers."""
    async with connected(target.nats_url) as bus:
        answers = await _ask_hosts(bus, model, what)
    if not answers:
        raise Unavailable(
            f"no `headrace up` with a model {model!r:.80} answers: processes that a container engine has "
            "started are loaded and unloaded there"
        )
    for answer in answers:
        error = answer.get("error")
        print_line(f"{answer['host']}: {answer['state'] if error is None else error['message']}")
    return 1 if any("error" in answer for answer in answers) else 0


async def _ask(bus: Bus, scheduler: str, what: str) -> Facts:
    try:
        reply = await bus.request(subjects.sleep(scheduler), what.encode(), timeout_us=int(WAIT_S * 1e6))
    except (NoResponders, RequestTimeout):
        return {}
    answer: Facts = json.loads(reply.data)
    return answer


async def _ask_hosts(bus: Bus, model: str, what: str) -> list[Facts]:
    try:
        return await request_all(bus, subjects.load(model), ANSWER_S, body=what.encode())
    except NoResponders:
        return []
