"""Makes the scheduler's limits from an arm."""

from __future__ import annotations

from loadtest.sim.scenarios import Arm
from services.scheduler.state import policies, requests
from services.scheduler.state.state import Limits


def limits_of(arm: Arm) -> Limits:
    """The limits that an arm asks for: the defaults, but for what it names. Raises SetupError for a policy
    or class that does not exist."""
    return Limits(
        overlap=arm.overlap,
        policy=policies.parse(arm.policy),
        classes=requests.parse(arm.slo),
        **dict(arm.limits),
    )
