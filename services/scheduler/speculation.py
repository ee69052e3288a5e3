"""Gives the decodes of a step their drafts: tokens that the executor foresees, and computes in the same step.

A draft is kept where the sampler chooses it, so drafts change the time of a step, and never a token.

    step n      row of 1 + 3 tokens, from place p at most     computed: p + 4
    step n + 1  row at the device's own place                  computed: p + 5, planned before the result of n
    result n    2 tokens: one draft was kept, two refused      computed: p + 3

So `Sequence.computed` is an upper bound while drafts are in flight, and exact otherwise. A row has blocks up
to that bound. KV after the device's length is written again before a row reads it.

How many: by price, unless `Limits.speculate` is a number. A draft is worth its place in a step while it
brings more tokens for its part of the step's time than the step has for all of its time: of a row whose
drafts are kept with probability a, the j-th draft brings a^j tokens (DSpark's rule, vllm-project/vllm#47808).
Where no draft pays, a row tries one now and then, and another one at once while they are kept.

An engine that computes its steps as recorded graphs pays for as many drafts in each row as one row has.
Others pay only for the drafts that they find. All numbers are integers, so that a replay finds the same.
"""

from __future__ import annotations

from services.scheduler.state.requests import Drafting, Sequence
from services.scheduler.state.state import AUTO, DraftPace, Executor, State
from services.scheduler.step_planner import StepColumns
from shared.messages import AT_DEVICE
from shared.step_model import StepShape

MARGIN_PM = 30  # that drafts must gain
TRY_EVERY = 64  # steps after a refused draft until a row tries another one
TRY_NEAR = 8  # if it would nearly pay
TRY_FIRST = 8  # steps of a sequence until it tries one
TRY_STEPS = 2  # of TRY_EVERY, in which rows of recorded steps try one
QUIET = 2  # rows of a sequence without a draft that was found: then it is asked in turn
IN_TURN = 2  # rows of a step that are asked in turn,
MANY, SELDOM_PPM = 32, 250_000  # and of every eighth step with more rows, if fewer found drafts lately;
NEW = 4  # so few of those that have found none yet are asked in such a step
BARE_EVERY = 256  # steps: one without drafts shows what they cost
LEAST_PM = 5  # of a draft's probability
PREDICTED_PM = 900  # drafts that are kept with a prediction or a grammar, until it is learned
GRAPHS = (1, 3, 7)  # drafts of a row for which engines record graphs


def add_drafts(
    state: State, executor: Executor, columns: StepColumns, rows: list[Sequence], alone: bool
) -> None:
    """Give the first rows of `columns`, decodes of these sequences, their drafts. `alone`: no prompts follow,
    whose computation they would delay."""
    hello, wanted = executor.hello, dict[Sequence, int]()
    if alone and len(rows) <= (hello.max_draft_rows or len(rows)):
        wanted = _wanted(state, executor, columns, rows)
    for flight in executor.in_flight:  # where these rows are, the device alone knows
        for row in flight.drafts:
            s, placement = flight.rows[row]
            if s.placement == placement:
                wanted.setdefault(s, 0)
    if not wanted:
        return  # the step is the same as without speculation
    places = dict(zip(columns.slots, range(len(rows)), strict=True))
    left, expected_pm = hello.max_step_tokens - len(rows), 0
    for s, count in wanted.items():
        if (at := places.get(s.slot)) is None:
            continue
        if count:
            count = min(count, hello.max_drafts, left, s.max_length - 1 - s.computed)
            count = _with_blocks(executor, columns, s, count)
        if not (count or s.drafting.in_flight):
            continue
        columns.from_device[at] = AT_DEVICE
        if not count:
            continue
        columns.counts[at] += count
        columns.drafts[at] = count
        s.computed += count
        s.steps -= count  # see Sequence.steps_planned
        s.drafting.in_flight += count
        left -= count
        expected_pm += count * s.drafting.found_pm
    if columns.drafts:
        drafts = sum(columns.drafts.values())
        executor.count_decodes(drafts)
        columns.found_drafts = drafts if executor.has_graphs else expected_pm // 1_000


def _with_blocks(executor: Executor, columns: StepColumns, s: Sequence, count: int) -> int:
    """As many of these drafts as have blocks. No other row goes without a block for them."""
    end = s.computed + count
    if end > s.table_capacity and executor.pool.unreserved_blocks > len(executor.running):
        unsent = len(s.table) - s.table_sent
        if not unsent or columns.has_table_room(unsent):
            columns.grow(executor, s, end)
    return max(min(count, s.table_capacity - s.computed), 0)


def _wanted(
    state: State, executor: Executor, columns: StepColumns, rows: list[Sequence]
) -> dict[Sequence, int]:
    """How many drafts rows are to have. Rows without any are left out."""
    if state.limits.speculate != AUTO:
        return {s: state.limits.speculate for s in rows if s.request.tokenized.speculate}
    pace, step = executor.drafting, executor.step + 1
    size = len(rows).bit_length()
    if step - pace.bare_step.get(size, -BARE_EVERY) >= max(BARE_EVERY // len(rows), BARE_EVERY // 4):
        pace.bare_step[size] = step
        return {}
    wanted = (
        _together(executor, columns.shape, rows) if executor.has_graphs else _asked(executor, columns.shape)
    )
    if not wanted:
        pace.bare_step[size] = step
    return wanted


def _together(executor: Executor, shape: StepShape, rows: list[Sequence]) -> dict[Sequence, int]:
    """How many drafts rows are to have of an engine with graphs."""
    pace, step = executor.drafting, executor.step + 1
    # a draft costs as much as one in each row: all rows have as many, and try in the same steps
    if step - pace.chosen_step > len(rows) // 4:
        pace.together = _best(executor, shape, rows)
        pace.chosen_step = step
    count = pace.together or int(step % TRY_EVERY < TRY_STEPS)
    if not count and step - pace.last_step <= TRY_STEPS:  # those that were tried may pay
        count = int(1_000 + pace.last_pm > _times_pm(executor, shape, len(rows)) + MARGIN_PM)
    return {s: count for s in rows if s.request.tokenized.speculate} if count else {}


def _asked(executor: Executor, shape: StepShape) -> dict[Sequence, int]:
    """How many drafts rows are to have of an engine without graphs: those that have found some lately, and
    some of the others in turn."""
    pace, step = executor.drafting, executor.step + 1
    most, chosen = executor.hello.max_drafts, step - pace.chosen_step > shape.rows // 4
    if chosen:
        pace.least_pm, pace.chosen_step = _least_pm(executor, shape), step
    wanted, asked, pace.asked = dict[Sequence, int](), pace.asked, []
    seldom = shape.rows > MANY and pace.found_ppm < SELDOM_PPM
    room = NEW if seldom else len(asked)
    for row in asked:
        s, placement = row
        if s.placement != placement:
            continue
        drafting = s.drafting
        if drafting.count < 0:
            _begin(executor, s)
        elif chosen:
            drafting.choose(pace.least_pm, most)
        is_new = not (drafting.accepted or drafting.rejected)
        room -= is_new
        # a grammar forces tokens now and then
        is_quiet = (drafting.quiet >= QUIET and not s.request.tokenized.grammar) or (is_new and room < 0)
        if is_quiet or not (drafting.count or _can_try(pace, drafting, step)):
            pace.ask_in_turn(row)
        else:
            pace.asked.append(row)
            wanted[s] = drafting.count or 1
    for s in pace.next_in_turn(0 if seldom and step % 8 else IN_TURN):
        s.drafting.choose(pace.least_pm, most)
        if s.drafting.count or _can_try(pace, s.drafting, step):
            wanted[s] = s.drafting.count or 1
    return wanted


def _can_try(pace: DraftPace, drafting: Drafting, step: int) -> bool:
    """Whether a row tries a draft that does not pay by what is known."""
    near = 4 * drafting.kept_pm > 3 * pace.least_pm and pace.least_pm <= 1_000  # refused by chance, it may be
    return step - drafting.tried_step >= (TRY_NEAR if near else TRY_EVERY)


def _begin(executor: Executor, s: Sequence) -> None:
    """A new sequence begins with what its executor has learned."""
    pace, drafting = executor.drafting, s.drafting
    drafting.found_pm, drafting.kept_pm = pace.found_ppm // 1_000, pace.kept_ppm // 1_000
    if s.request.tokenized.prediction or s.request.tokenized.grammar:
        drafting.found_pm, drafting.kept_pm = PREDICTED_PM, max(PREDICTED_PM, drafting.kept_pm)
    drafting.tried_step = executor.step + 1 - TRY_EVERY + TRY_FIRST
    drafting.choose(pace.least_pm, executor.hello.max_drafts)


def _best(executor: Executor, shape: StepShape, rows: list[Sequence]) -> int:
    """The number of drafts of each row with which the step has the most tokens for its time."""
    most = executor.hello.max_drafts
    for s in rows:
        if s.drafting.count < 0:
            _begin(executor, s)
    best, tokens, times_pm = 0, len(rows) * (1_000 + MARGIN_PM), 1_000
    able = [s.drafting for s in rows if s.request.tokenized.speculate]
    chances, gained, done = [drafting.found_pm for drafting in able], 1_000 * len(rows), 0
    for size in [k for k in GRAPHS if k <= most]:
        for _ in range(size - done):
            chances = [chance * d.kept_pm // 1_000 for chance, d in zip(chances, able, strict=True)]
            gained += sum(chances)
        done = size
        its_pm = max(_times_pm(executor, shape, size * len(rows)), 1)
        if gained * times_pm > tokens * its_pm:
            best, tokens, times_pm = size, gained, its_pm
    return best


def _least_pm(executor: Executor, shape: StepShape) -> int:
    """The probability from which a draft pays, where only drafts that are found cost something: that of the
    last draft of the step with the most tokens for its time, or what one more draft would cost, in tokens."""
    rows_pm = 1_000 * shape.rows
    chances = _chances(executor)
    best, tokens, times_pm = 0, rows_pm, 1_000
    margin_pm = MARGIN_PM * shape.rows
    for size in _sizes(len(chances)):
        gained = rows_pm + sum(chances[:size])
        its_pm = max(_times_pm(executor, shape, size), 1)
        if (gained - margin_pm) * times_pm > tokens * its_pm:
            best, tokens, times_pm, margin_pm = size, gained, its_pm, 0
    more_pm = _times_pm(executor, shape, best + shape.rows) - times_pm  # a draft more in each row
    least_pm = tokens * more_pm // (times_pm * shape.rows)
    if best:
        return max(min(least_pm, chances[best - 1]), LEAST_PM)
    return max(least_pm + MARGIN_PM, LEAST_PM, 1 + max(chances, default=0))


def _times_pm(executor: Executor, shape: StepShape, drafts: int) -> int:
    return executor.drafting.times.times_pm(executor.cost_model, shape, drafts, again=not executor.has_graphs)


def _chances(executor: Executor) -> list[int]:
    """The probability per mille of each draft that a row may have which is asked in each step, the likeliest
    first."""
    chances = list[int]()
    for s, _ in executor.drafting.asked:
        chance = 1_000
        for _ in range(executor.hello.max_drafts):
            chance = chance * s.drafting.kept_pm // 1_000
            if chance < LEAST_PM:
                break
            chances.append(chance)
    chances.sort(reverse=True)
    return chances


def _sizes(most: int) -> list[int]:
    """Numbers up to `most`: 1, 2, 3, 4, 6, 8, 12, ..., and `most` itself."""
    sizes = {most}
    size = 1
    while size < most:
        sizes |= {size, min(most, size * 3 // 2)}
        size *= 2
    return sorted(sizes - {0})
