"""Rows with drafts as engines compute them: a row of one token for each draft, all in one step.

    planned     slot 5, AT_DEVICE, up to 3 drafts
    computed    slot 5 at 40: its last token | at 41: a draft | at 42: another draft (no third one is found)
    chosen      x                             y                z
    kept        x; y if x is the first draft; z if y is the second one, too

`spread` makes these rows. Each of them is a decode like any other, so its logits are the same bits as without
drafts. `choose` goes from place to place: a row is chosen only if all drafts before it were right, so with
the penalties, processors and grammar that the tokens before it leave.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate

import numpy as np

from services.executor.engine import NO_DRAFT, ChooseRows, Drafter, Drafts, Forced, Runs
from services.executor.speculation.prompt_drafts import PromptDrafts
from shared.messages import AT_DEVICE, FROM_DEVICE, Ints, StepPlan, ints

MOST_DRAFTS = 8  # of a row


def drafting(tokens: Callable[[int], Ints], forced: Forced | None) -> DraftRows:
    """See services.executor.engine.speculation_of."""
    return DraftRows(PromptDrafts(tokens, forced), tokens)


class DraftRows:
    """See services.executor.engine.Speculation."""

    max_drafts = MOST_DRAFTS

    def __init__(self, drafter: Drafter, tokens: Callable[[int], Ints]) -> None:
        self._drafter, self._tokens = drafter, tokens
        self.open, self.close = drafter.open, drafter.close

    def spread(self, plan: StepPlan, done: Callable[[int], bool]) -> tuple[StepPlan, Drafts | None]:
        """The plan with a row for each draft, and the drafts; None if there are none. Each row AT_DEVICE
        starts where its slot is. `done`: the slot has ended."""
        at_device = [row for row, fed in enumerate(plan.from_device) if fed == AT_DEVICE]
        asked = [row for row in at_device if plan.counts[row] > 1 and not done(plan.slots[row])]
        found: dict[int, list[int]] = {}
        if asked:
            most = max(plan.counts[row] for row in asked) - 1
            drafts = self._drafter.draft([plan.slots[row] for row in asked], most)
            for row, ids in zip(asked, drafts, strict=True):
                known = ids[: plan.counts[row] - 1]
                ends = np.flatnonzero(known == NO_DRAFT)
                found[row] = known[: ends[0] if len(ends) else None].tolist()
        places = plan.starts[:]
        for row in at_device:
            places[row] = len(self._tokens(plan.slots[row])) - 1
        if not any(found.values()):
            fed, counts = plan.from_device[:], plan.counts[:]
            for row in at_device:
                fed[row], counts[row] = FROM_DEVICE, 1
            return replace(plan, starts=places, counts=counts, from_device=fed), None
        return _spread(plan, places, [found.get(row, []) for row in range(len(plan.slots))])

    def choose(self, drafts: Drafts, choose: ChooseRows) -> Runs:
        """Choose the tokens of a step with drafts. `choose` is called for the first rows of all slots, then
        for the second rows of those whose first draft was right, and so on."""
        counts = drafts.counts
        first = [0, *accumulate(1 + count for count in counts)]  # of each sample row, its first row here
        draft_at = [0, *accumulate(counts)]
        runs = Runs([[] for _ in counts], ints([0]) * len(counts), {})
        going = list(range(len(counts)))
        for nth in range(1 + max(counts, default=0)):
            ids, done, errors = choose([first[row] + nth for row in going], nth == 0)
            on = []
            for at, row in enumerate(going):
                if nth and (at in errors or ids[at] < 0):
                    continue  # the next step begins at this place, and fails there
                runs.ids[row].append(ids[at])
                runs.done[row] = done[at]
                if at in errors:
                    runs.errors[row] = errors[at]
                elif not done[at] and nth < counts[row] and drafts.ids[draft_at[row] + nth] == ids[at]:
                    on.append(row)
            going = on
            if not going:
                break
        return runs


def _spread(plan: StepPlan, places: Sequence[int], found: list[list[int]]) -> tuple[StepPlan, Drafts]:
    slots, starts, counts, fed, ids = ints(), ints(), ints(), ints(), ints()
    first = list[int]()  # of each planned row, its first one here
    for row, drafts in enumerate(found):
        first.append(len(slots))
        at_device = plan.from_device[row] == AT_DEVICE
        slots.extend([plan.slots[row]] * (1 + len(drafts)))
        starts.extend(range(places[row], places[row] + 1 + len(drafts)))
        counts.extend([1 if at_device else plan.counts[row], *[1] * len(drafts)])
        fed.extend([FROM_DEVICE if at_device else plan.from_device[row], *[AT_DEVICE] * len(drafts)])
        ids.extend(drafts)
    sampled, of_slots, drafted = ints(), ints(), ints()
    for row, slot in zip(plan.sample_rows, plan.sample_slots, strict=True):
        sampled.extend(range(first[row], first[row] + 1 + len(found[row])))
        of_slots.extend([slot] * (1 + len(found[row])))
        drafted.append(len(found[row]))
    spread = replace(
        plan,
        slots=slots,
        starts=starts,
        counts=counts,
        from_device=fed,
        sample_rows=sampled,
        sample_slots=of_slots,
    )
    return spread, Drafts(ids, drafted)
