"""`mode_of` chooses the overlap mode of an executor by cost: which rows may be in flight together.

    single      step n+1 is planned after the result of step n            period T + L
    run_ahead   the same device-fed rows in up to W steps at once         max(T, (T + L) / W)
    two_batch   every row is in A or B, steps alternate                   max(T_A + T_B, max(T_A, T_B) + L)

T is the time of a step. L is the loop: both messages and the host's work on the result. A row is host-fed if
its next input needs the host (logits processors): it is planned again only after its result, so run_ahead
takes such rows into every other step only. A row with an unforeseen end (a stop id, a stop string, a
cancel) is wasted in each step ahead; how often that happens is measured, in any mode. `auto` takes the mode
with the most predicted rows a second, and changes it for a gain of at least 1 %. Probes measure `single` from
time to time: a mode that is slower than it is banned for a while.

In two_batch a sequence keeps its micro-batch, A or B. `balance` keeps the micro-batches even by the KV they
read, plus a constant for each row: the longer one sets the period of both. The step planner calls both.

Plans the step after the one that runs late: shortly before that one is predicted to end. A request that
arrives meanwhile is in it, and waits for the rest of one step instead of two.

    executor   |███████ step n ███████|███ n+1 ...
    at once     ▸ plan n+1
    late                      ▸ plan n+1, the lead before the predicted end

The lead is learned from each plan: how long before the predicted end it had to come for the executor not to
wait. Its mean and four mean deviations count, as in TCP's timeout: they cover the way of the message, a late
timer and steps that end early, and a plan that came too late raises both. PREPARE_US comes on top. Steps that
are short against the lead, or not foreseeable, are planned ahead at once.
"""

from __future__ import annotations

from dataclasses import dataclass

from services.scheduler.state.cost_model import SETTLED, CostModel, Speed, StepPace
from services.scheduler.state.requests import Sequence
from services.scheduler.state.state import Executor, InFlight, State
from shared.messages import StepResult
from shared.step_model import StepShape

MODES = ("single", "run_ahead", "two_batch")
DWELL_STEPS = 16
MARGIN_PM = 10
MIN_SEEN = 16  # steps before the cost model is used
PROBE_EVERY, PROBE_STEPS = 4_096, 16
PROBE_US = 100_000  # at most, but at least two steps: a probe of long steps is short
WORSE_PM = 20
COMPARABLE_PM = 100  # two measurements are compared if their steps differ by no more

ROW_TOKENS = 256  # a row takes about as long as reading so many tokens of context
UNEVEN_PM = 150  # largest difference between the micro-batches, relative to both


@dataclass(frozen=True, slots=True)
class OverlapLoad:
    """The rows that run on an executor."""

    rows: int
    host_fed: int
    kv_tokens: int
    stages: int
    window: int
    early_end_share: float = 0.0  # rows with an unforeseen end: that share is wasted in each step ahead
    chunk_us: int = 0  # time of prompt chunks, each time that all rows advance


def mode_of(state: State, executor: Executor) -> tuple[str, int]:
    """The mode for the next step, and how many steps may be in flight."""
    limits = state.limits
    if limits.window == 1 or limits.overlap == "single":
        return "single", 1
    if limits.overlap == "run_ahead":
        return "run_ahead", limits.window
    mode = _auto(state, executor) if limits.overlap == "auto" else limits.overlap
    if mode == "run_ahead":
        return mode, depth(executor.pace.step_us, executor.cost_model.loop_us, limits.window)
    return mode, 1 if mode == "single" else 2


def depth(step_us: int, loop_us: int, window: int) -> int:
    """The smallest window that leaves the device no gap, (T + L) / W <= T; 2 while T is not known."""
    return min(window, max(2, -(-(step_us + loop_us) // step_us))) if step_us else min(2, window)


def choose_mode(load: OverlapLoad, costs: CostModel, present: str) -> str:
    """The mode with the most rows a second; the present one unless another gains MARGIN_PM."""
    if load.stages > 1 and load.rows > 1:
        return "two_batch"
    if costs.seen < MIN_SEEN or not load.rows:
        return "single" if load.host_fed else "run_ahead"
    # Two batches hide the host's work on their results. Without any they only read the weights twice, and a
    # wrong prediction for all rows would never be corrected, since no step of all rows would be seen.
    useless = "run_ahead" if load.host_fed == load.rows else "two_batch" if not load.host_fed else ""
    modes = [mode for mode in MODES if mode != useless]
    rates = {mode: rate(mode, load, costs) for mode in modes}
    best = max(rates, key=lambda mode: rates[mode])
    if present in rates and rates[best] * 1000 < rates[present] * (1000 + MARGIN_PM):
        return present
    return best


def rate(mode: str, load: OverlapLoad, costs: CostModel) -> int:
    """Rows per 1000 s in a mode."""
    rows, hosted, loop_us = load.rows, load.host_fed, costs.loop_us
    if mode == "single":
        return _rate(rows, _step_us(costs, load, rows) + loop_us + costs.host_us(hosted))
    if mode == "two_batch":
        a, b = rows - rows // 2, rows // 2
        a_us, b_us = _step_us(costs, load, a, 2), _step_us(costs, load, b, 2)
        latency_us = a_us + loop_us + costs.host_us(hosted - hosted // 2)
        return _rate(rows, max((a_us + b_us) // load.stages, latency_us, costs.host_us(hosted)))
    alternating = hosted - hosted // 2
    in_step = rows - hosted + alternating
    step_us, host_us = _step_us(costs, load, in_step), costs.host_us(alternating)
    steps = 2 if hosted else depth(step_us, loop_us, load.window)
    gained = _rate(in_step, max(step_us, (step_us + loop_us + host_us) // steps, host_us))
    return int(gained / (1.0 + load.early_end_share * (steps - 1)))


def _auto(state: State, executor: Executor) -> str:
    pace, step = executor.pace, executor.step
    if step < pace.probe_until:
        return "single"
    rows, hosted = len(executor.running), executor.host_fed > 0
    alike = hosted == pace.had_host_fed and rows <= 2 * pace.since_rows <= 4 * rows  # a burst is another load
    if pace.before is not None:
        _judge(pace, step)
    elif pace.mode and alike and step - pace.since_step < DWELL_STEPS:
        return pace.mode
    elif pace.mode not in ("", "single") and pace.rows and step - pace.probed_step >= PROBE_EVERY:
        steps = min(PROBE_STEPS, max(2, PROBE_US // max(pace.step_us, 1)))
        pace.before, pace.probe_until = pace.speed, step + steps
        pace.measure_from = step + max(steps // 4, 1)  # the first results are from the mode before
        return "single"
    mode = choose_mode(_load(state, executor), executor.cost_model, pace.mode)
    if mode == pace.banned and step < pace.banned_until:
        mode = "single"
    if mode != pace.mode:
        pace.restart()
    pace.mode, pace.since_step, pace.since_rows, pace.had_host_fed = mode, step, rows, hosted
    return mode


def _judge(pace: StepPace, step: int) -> None:
    """End a probe: ban the mode if it is slower than single."""
    before, pace.before, pace.probed_step = pace.before, None, step
    if before is not None and is_slower(pace.mode, before, pace.speed):
        pace.banned, pace.banned_until = pace.mode, step + PROBE_EVERY
    pace.restart()


def is_slower(mode: str, of_mode: Speed, of_single: Speed) -> bool:
    """True if a mode is slower than single by WORSE_PM, and both were measured under a similar load.

    Run-ahead computes the same steps, so the time between them is compared. Two-batch has smaller steps, so
    rows a second are compared, if the number of rows was similar.
    """
    if not (of_mode.steps and of_single.steps and of_single.took_us and of_mode.took_us):
        return False
    if mode == "run_ahead":
        if not _are_comparable(of_mode.took_us * of_single.steps, of_single.took_us * of_mode.steps):
            return False
        return of_mode.us * of_single.took_us * (1000 - WORSE_PM) > of_single.us * of_mode.took_us * 1000
    mine, other = 2 * of_mode.rows * of_single.steps, of_single.rows * of_mode.steps
    if not _are_comparable(mine, other):
        return False
    return of_mode.rows * of_single.us * 1000 < of_single.rows * of_mode.us * (1000 - WORSE_PM)


def _are_comparable(mine: int, other: int) -> bool:
    return abs(mine - other) * 1_000 <= other * COMPARABLE_PM


def _load(state: State, executor: Executor) -> OverlapLoad:
    running, pace = executor.running, executor.pace
    return OverlapLoad(
        rows=len(running),
        host_fed=executor.host_fed,
        kv_tokens=sum(s.computed for s in running),
        stages=executor.hello.stages,
        window=state.limits.window,
        early_end_share=pace.early_ends / max(pace.sampled, 1.0),
        chunk_us=pace.chunk_us * (2 if pace.mode == "two_batch" else 1),
    )


def _step_us(costs: CostModel, load: OverlapLoad, rows: int, parts: int = 1) -> int:
    """Time of a step with `rows` of the rows, and 1/`parts` of the chunks."""
    kv_tokens = load.kv_tokens * rows // max(load.rows, 1)
    return costs.predict_us(StepShape(rows, rows, kv_tokens, kv_tokens)) + load.chunk_us // parts


def _rate(rows: int, period_us: int) -> int:
    return rows * 1_000_000_000 // max(period_us, 1)


def balance(executor: Executor, micro_batch: int, ready: list[Sequence]) -> list[Sequence]:
    """The rows of the micro-batch that is planned now. If it is too heavy, its last rows move to the other
    one, and miss this step."""
    mine, other = weights(executor.running)[:: -1 if micro_batch else 1]
    excess = (mine - other) // 2
    if excess * 2000 <= (mine + other) * UNEVEN_PM:
        return ready
    stay = list(ready)
    while len(stay) > 1 and excess >= (weight := _weight(stay[-1])):
        moved = stay.pop()
        moved.micro_batch = 1 - micro_batch
        executor.micro_batch_rows[micro_batch] -= 1
        executor.micro_batch_rows[1 - micro_batch] += 1
        excess -= weight
    return stay


def weights(running: list[Sequence]) -> tuple[int, int]:
    """The weights of micro-batches A and B, in tokens."""
    both = [0, 0]
    for sequence in running:
        both[sequence.micro_batch] += _weight(sequence)
    return both[0], both[1]


def _weight(sequence: Sequence) -> int:
    return sequence.computed + ROW_TOKENS


SHORT_US = 18_000  # of a step: decodes of an 8B model on a GPU take up to 15 ms, and were not measured late
PREPARE_US = 4_000  # of a step: the time that a GPU takes to launch it is in no result
DEVIATIONS = 4
ERRORS = 3  # mean errors of the cost model by which a step may end early


def can_plan_later(state: State, executor: Executor) -> bool:
    """True if the next step is not to be planned before `late_plan.due_us`. Some step is in flight."""
    running, pace, costs = executor.in_flight[0], executor.pace, executor.cost_model
    if (
        executor.late_plan.due_us
        or len(executor.in_flight) > 1
        or executor.hello.stages > 1
        or not pace.lead_us
    ):
        return False
    if costs.seen < SETTLED or running.predicted_us < SHORT_US or not costs.can_predict(running.shape):
        return False
    lead_us = pace.lead_us + DEVIATIONS * pace.lead_spread_us
    lead_us = PREPARE_US + max(lead_us, ERRORS * costs.error_pm * running.predicted_us // 1_000)
    due_us = _end_us(executor) - lead_us
    if due_us - state.now_us < lead_us:
        return False  # little would be gained
    executor.late_plan.due_us, executor.late_plan.lead_us = due_us, lead_us
    return True


def plan_due_us(state: State) -> int:
    """When the scheduler needs a Ticked, to plan a step in time; 0: it needs none."""
    return min(
        (e.late_plan.due_us for e in state.executors.values() if e.late_plan.due_us > state.now_us), default=0
    )


def plan_lead_us(state: State, executor: Executor) -> int:
    """How long before the predicted end of the step that runs the one that is planned now was due; 0 if none
    runs, or several. Where a step has just ended before the next one was due, that one counts."""
    if executor.late_plan.due_us and (executor.in_flight or executor.pace.last_us == state.now_us):
        return executor.late_plan.lead_us
    if len(executor.in_flight) != 1 or not executor.in_flight[0].predicted_us:
        return 0
    return max(_end_us(executor) - state.now_us, 0)


def in_flight_us(state: State, executor: Executor) -> int:
    """How long the steps in flight will still take."""
    if not executor.in_flight:
        return 0
    later_us = sum(flight.predicted_us for flight in executor.in_flight) - executor.in_flight[0].predicted_us
    return max(_end_us(executor) - state.now_us, 0) + later_us


def learn_lead(executor: Executor, flight: InFlight, result: StepResult) -> None:
    """Update the lead with a step that was planned while another one ran."""
    if not flight.lead_us:
        return
    pace, needed_us = executor.pace, flight.lead_us - (result.queued_us or -result.wait_us)
    if not pace.lead_us:
        pace.lead_us = max(needed_us, 1)
    pace.lead_spread_us += (abs(needed_us - pace.lead_us) - pace.lead_spread_us) // 4
    pace.lead_us += (needed_us - pace.lead_us) // 8


def _end_us(executor: Executor) -> int:
    """The predicted end of the step that runs. The ways of its plan and of the result before it are not in
    it: so they become part of the lead."""
    running = executor.in_flight[0]
    return max(executor.pace.last_us, running.planned_us) + running.predicted_us
