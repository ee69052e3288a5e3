"""Plans the step after the one that runs late: shortly before that one is predicted to end. A request that
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

from services.scheduler.state.cost_model import SETTLED
from services.scheduler.state.state import Executor, InFlight, State
from shared.messages import StepResult

SHORT_US = 18_000  # of a step: decodes of an 8B model on a GPU take up to 15 ms, and were not measured late
PREPARE_US = 4_000  # of a step: the time that a GPU takes to launch it is in no result
DEVIATIONS = 4
ERRORS = 3  # mean errors of the cost model by which a step may end early


def can_wait(state: State, executor: Executor) -> bool:
    """True if the next step is not to be planned before `executor.due_us`. Some step is in flight."""
    running, pace, costs = executor.in_flight[0], executor.pace, executor.cost_model
    if executor.due_us or len(executor.in_flight) > 1 or executor.hello.stages > 1 or not pace.lead_us:
        return False
    if costs.seen < SETTLED or running.predicted_us < SHORT_US or not costs.knows(running.shape):
        return False
    lead_us = pace.lead_us + DEVIATIONS * pace.lead_spread_us
    lead_us = PREPARE_US + max(lead_us, ERRORS * costs.error_pm * running.predicted_us // 1_000)
    due_us = _end_us(executor) - lead_us
    if due_us - state.now_us < lead_us:
        return False  # little would be gained
    executor.due_us, executor.due_lead_us = due_us, lead_us
    return True


def next_due_us(state: State) -> int:
    """When the scheduler needs a Ticked, to plan a step in time; 0: it needs none."""
    return min((e.due_us for e in state.executors.values() if e.due_us > state.now_us), default=0)


def lead_us(state: State, executor: Executor) -> int:
    """How long before the predicted end of the step that runs the one that is planned now was due; 0 if none
    runs, or several. Where a step has just ended before the next one was due, that one counts."""
    if executor.due_us and (executor.in_flight or executor.pace.last_us == state.now_us):
        return executor.due_lead_us
    if len(executor.in_flight) != 1 or not executor.in_flight[0].predicted_us:
        return 0
    return max(_end_us(executor) - state.now_us, 0)


def in_flight_us(state: State, executor: Executor) -> int:
    """How long the steps in flight will still take."""
    if not executor.in_flight:
        return 0
    later_us = sum(flight.predicted_us for flight in executor.in_flight) - executor.in_flight[0].predicted_us
    return max(_end_us(executor) - state.now_us, 0) + later_us


def learn(executor: Executor, flight: InFlight, result: StepResult) -> None:
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
