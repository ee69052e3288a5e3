"""`headrace usage` prints what each tenant has used of each model, from the schedulers' counters.

The counters start with their scheduler. For longer periods collect `headrace_scheduler_usage_…` of /metrics.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict

from services.launcher.commands.status import Facts, services_of
from services.launcher.session import Target

COLUMNS = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens")
_HEAD = ("tenant", "model", "requests", "prompt tokens", "of them cached", "completion tokens")

Usage = dict[tuple[str, str], Counter[str]]  # by tenant and model


async def usage(target: Target, fleet: str, *, as_json: bool) -> None:
    """Print the usage in `fleet`. Raises Unavailable if no service answers."""
    services = await services_of(target, fleet)
    found = by_tenant(services)
    if as_json:
        rows = [{"tenant": tenant, "model": model, **used} for (tenant, model), used in found.items()]
        print(json.dumps({"fleet": fleet, "usage": rows}, indent=2))
        return
    ages = [int(service.get("age_s", 0)) for service in services if service.get("kind") == "scheduler"]
    print(f"ended requests of the last {max(ages, default=0) / 3600:.1f} h, since the schedulers started")
    print("\n".join(table(found)))


def by_tenant(services: list[Facts]) -> Usage:
    """The counts by tenant and model: the sum over all schedulers."""
    found: Usage = defaultdict(Counter)
    for service in services:
        for tenant, counts in service.get("usage", {}).items():
            found[tenant, str(service.get("model", ""))].update(counts)
    return dict(sorted(found.items()))


def table(found: Usage) -> list[str]:
    """Aligned lines, with a sum if there are several."""
    counts = dict(found)
    if len(found) > 1:
        counts["all", ""] = sum(found.values(), Counter[str]())
    rows = [_HEAD, *((*names, *(f"{used[name]:,}" for name in COLUMNS)) for names, used in counts.items())]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    aligned = [str.ljust, str.ljust, *[str.rjust] * len(COLUMNS)]
    return ["  ".join(map(lambda align, *cell: align(*cell), aligned, row, widths)) for row in rows]
