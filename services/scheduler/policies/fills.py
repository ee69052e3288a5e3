"""Policies of kind `fill`: what the next step of an executor is made of.

mixed          decodes, and prompt chunks as long as the strictest class keeps its time between tokens
prefill_first  prompts whole and alone, until the decodes have stood still for STALL_US
decode_first   decodes; a prompt goes on by one block a step while anything decodes
static         request-level batching: nobody joins a batch that has begun (see `joins`). The baseline
Signature: (view: View) -> Share.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

STALL_US = 1_000_000


class View(NamedTuple):
    """What a fill policy sees of an executor. A tuple, since one is made for each step."""

    decodes: int  # rows that could decode now
    prompts: int  # sequences with prompt tokens to compute
    stalled_us: int  # since the last step that decoded, 0 when nothing decodes


class Share(NamedTuple):
    """The parts of a step. `prompts`: none; one block; the chunk budget; or as much as the step holds."""

    decodes: bool
    prompts: Literal["none", "block", "budget", "whole"]


def mixed(view: View) -> Share:
    """Stall-free batching (Sarathi-Serve, Agrawal et al. 2024)."""
    return Share(True, "budget")


def prefill_first(view: View) -> Share:
    """Best time to first token, worst time between tokens."""
    if view.prompts and view.stalled_us < STALL_US:
        return Share(not view.prompts, "whole")
    return Share(True, "none" if view.decodes else "whole")


def decode_first(view: View) -> Share:
    """Best time between tokens, worst time to first token."""
    return Share(True, "block" if view.decodes else "whole")


def static(view: View) -> Share:
    """All prompts of the batch, then all its tokens."""
    return Share(not view.prompts, "whole")


def joins(fill: str, begun: bool) -> bool:
    """True when a unit may join an executor that has (not) begun on those it runs."""
    return fill != "static" or not begun
