"""Policies of kind `tier`: what becomes of an unheld block that no tier below has a copy of.

tiered     stays until its place is wanted; then it is copied down, where that is cheaper than computing it
           again, or given up. What others are likely to want is copied before, while the link is idle
swap       the blocks of a paused sequence are copied at once and leave the device. A baseline
recompute  nothing is copied or asked for; what a paused sequence had stays cached until its place is taken.
           A baseline
forget     nor does it stay cached: all of it is computed again, as in vLLM without prefix caching. A baseline
Signature: (view: View) -> str, one of copy, drop, keep.
"""

from __future__ import annotations

from dataclasses import dataclass

EAGER_PM = 250  # likely enough to be wanted by another: less, and a copy would push better ones out below


@dataclass(frozen=True, slots=True)
class View:
    """A block, and how things are."""

    paused: bool  # its sequence will be back; else it has ended
    pressed: bool  # its place is wanted
    idle: bool  # no copy is under way
    chance_pm: int  # that somebody wants what it holds, per mille
    copy_us: int  # with half of what it would wait for
    recompute_us: int  # 0: not known yet


def tiered(view: View) -> str:
    """By cost."""
    known = view.recompute_us > 0
    worth = view.recompute_us * view.chance_pm > 1000 * view.copy_us
    if view.pressed:
        likely = view.chance_pm >= EAGER_PM
        return "copy" if (worth and likely) or (view.paused and not known) else "drop"
    eager = view.idle and not view.paused and view.chance_pm >= EAGER_PM
    return "copy" if eager and (worth or not known) else "keep"


def swap(view: View) -> str:
    """Whatever it costs."""
    if view.paused:
        return "copy"
    return "drop" if view.pressed else "keep"


def recompute(view: View) -> str:
    """Never."""
    return "drop"


def forget(view: View) -> str:
    """Never; preempt.py sees to the rest."""
    return "drop"
