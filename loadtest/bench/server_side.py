"""What the schedulers counted during a run: the recompute overhead, preemptions, tokens by tier.

Read over NATS from the status that `headrace status` shows. A tenant's credentials cannot read it, and other
servers do not have it: then these figures are missing.
"""

from __future__ import annotations

from typing import Any

from shared.client.client import request_all
from shared.nats import subjects
from shared.nats.interface import Bus, NoResponders

STATUS_WAIT_S = 0.5
TOKENS = ("generated", "prefilled", "prefix_hits", "preemptions", "recomputed")
TIERS = ("l1_hit_blocks", "l2_hit_blocks", "restored_tokens", "stored_blocks")
Counts = dict[str, int]


async def counts(bus: Bus, model: str) -> Counts | None:
    """The sums over every scheduler that has an executor of this model, since their start."""
    try:
        answers = await request_all(bus, subjects.STATUS, STATUS_WAIT_S)
    except NoResponders:
        return None
    measured = [answer["measured"] for answer in answers if _serves(answer, model)]
    if not measured:
        return None
    tokens = {name: sum(int(each["tokens"][name]) for each in measured) for name in TOKENS}
    return tokens | {name: sum(int(each["tiers"][name]) for each in measured) for name in TIERS}


def between(before: Counts | None, after: Counts | None) -> dict[str, Any] | None:
    """What was counted in between. The recompute overhead is the share of recomputed among all prefilled
    tokens."""
    if before is None or after is None:
        return None
    counted = {name: after[name] - before[name] for name in after}
    return counted | {"recompute_overhead_pct": 100 * counted["recomputed"] / max(counted["prefilled"], 1)}


def _serves(answer: dict[str, Any], model: str) -> bool:
    executors = answer.get("executors", {})
    listed = executors.values() if isinstance(executors, dict) else executors
    return answer.get("kind") == "scheduler" and any(each.get("model") == model for each in listed)
