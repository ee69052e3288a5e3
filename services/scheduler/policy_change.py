"""Changes the policy between two steps: `PolicySet`, which `core` applies, and the operator's request for it.

Each decision reads its policy again, so a change needs no more than what is kept between decisions: the heaps
and counters of `order`, the tiers in use, and what admission saw when the first group had to wait. A running
sequence keeps the blocks that its `reservation` gave it, as a pinned one does under any policy.
"""

from __future__ import annotations

from dataclasses import replace

from services.scheduler.kv_tiers import hosts
from services.scheduler.state import policies
from services.scheduler.state.policies import BASELINES, Policy
from services.scheduler.state.state import State
from shared.errors import SetupError


def apply(state: State, text: str) -> None:
    """Put `kind=name,...` in force; kinds that are not named stay. Raises SetupError before any change."""
    before, policy = state.limits.policy, policies.parse(text, state.limits.policy)
    state.limits = replace(state.limits, policy=policy)
    state.waiting.set_policy(policy)
    state.blocked_on = ()
    if policy.no_tiers != before.no_tiers:
        hosts.use_tiers(state, not policy.no_tiers)


def asked_for(text: str, now: Policy, at_start: Policy) -> Policy:
    """The policy after the change `text` that an operator requests. Raises SetupError for a kind or name that
    does not exist, and for a function of your own that the setting `policy` has not loaded: a message must
    not choose the code that a scheduler imports."""
    for part in (part.strip() for part in text.split(",")):
        _, _, name = part.partition("=")
        own = ":" in name and not name.startswith(f"{BASELINES}:")
        if own and part not in f"{now},{at_start}".split(","):
            raise SetupError(f"{part}: a function of your own is loaded at the start only: setting policy")
    return policies.parse(text, now)
