"""Simulates the arrivals of a log under another policy, and labels the result as a simulation.

happened     measured from the log
same         simulated with the log's own policy, and its changes: how far the model is from reality
changed      simulated with the other policy: to be compared with `same`
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from loadtest.simulator.readers import Readers, Record
from loadtest.simulator.replay.fit import Fit, fit
from loadtest.simulator.replay.history import History, read_history
from loadtest.simulator.replay.rerun import open_log
from loadtest.simulator.report import Figures, spread
from loadtest.simulator.requests import SimRequest, Workload
from loadtest.simulator.world import Setup, World
from services.scheduler.reports import event_log
from services.scheduler.reports.event_log import LogError
from services.scheduler.state import policies
from services.scheduler.state.counters import Counters
from services.scheduler.state.requests import SloClass, level_of
from services.scheduler.state.state import Limits

Classes = tuple[SloClass, ...]
Changes = tuple[tuple[int, str], ...]  # of the policy: when, to what


@dataclass(frozen=True, slots=True)
class Counterfactual:
    """Three columns of the same figures, and what they stand on."""

    policies: tuple[str, str]  # the log's, and the other
    requests: int
    left_out: int  # they ran already when the log began
    machines: dict[str, dict[str, float]]
    happened: Figures
    same: Figures
    changed: Figures

    @property
    def body(self) -> dict[str, Any]:
        """For JSON."""
        return {"simulation": True, **asdict(self)}


def compare_file(path: Path, policy: str) -> Counterfactual:
    """See `compare`. Raises LogError, and SetupError for a policy that does not exist."""
    with open_log(path) as stream:
        return compare(event_log.read(stream), policy)


def compare(records: Iterable[event_log.Record], policy: str) -> Counterfactual:
    """The log as it was, simulated, and simulated with `policy` (`kind=name,...`)."""
    history = read_history(records)
    limits, changes = history.limits, tuple(history.policies)
    other = replace(limits, policy=policies.parse(policy, limits.policy))
    fits = {name: fit(past) for name, past in sorted(history.executors.items()) if past.steps}
    if not fits:
        raise LogError("the log has no step with its time")
    workload = Workload(tuple(_requests(history)))
    others = tuple((at_us, str(policies.parse(policy, policies.parse(text)))) for at_us, text in changes)
    then = [f", then {text} after {at_us / 1e6:.1f} s" for at_us, text in changes]
    meter = history.core.state.counters
    recomputed = meter.recomputed_tokens - history.recomputed_before
    return Counterfactual(
        policies=("".join([str(limits.policy), *then]), str(other.policy)),
        requests=len(workload.requests),
        left_out=history.left_out,
        machines={name: _about(fitted) for name, fitted in fits.items()},
        happened=_column(history.readers, recomputed, limits.classes),
        same=_simulated(fits, workload, limits, changes),
        changed=_simulated(fits, workload, other, others),
    )


def _requests(history: History) -> list[SimRequest]:
    """The requests of the log with the lengths that their answers really had. What was cancelled ends where
    it was; what was refused gets the mean of the others."""
    lengths: dict[str, list[int]] = {}
    for record in [*history.readers.records, *history.readers.open.values()]:
        if record.tokens:
            lengths.setdefault(record.asked.request, []).append(record.tokens)
    means = {name: sum(each) // len(each) for name, each in lengths.items()}
    usual = sum(means.values()) // max(len(means), 1)
    return [
        replace(asked, output_tokens=max(means.get(asked.request, min(usual, asked.max_tokens)), 1))
        for asked in history.asked.values()
    ]


def _simulated(fits: dict[str, Fit], workload: Workload, limits: Limits, changes: Changes) -> Figures:
    machines = tuple(fitted.machine for fitted in fits.values())
    setup = Setup(machines=machines, limits=limits, policies=changes)
    world = World(setup, workload)
    readers = world.run()
    meter: Counters = world.scheduler.state.counters
    return _column(readers, meter.recomputed_tokens, limits.classes)


def _column(readers: Readers, recomputed_tokens: int, classes: Classes) -> Figures:
    records = readers.records
    served = [record for record in records if record.served]
    began_us = min((record.arrival_us for record in records), default=0)
    seconds = max(max((record.ended_us for record in records), default=0) - began_us, 1) / 1e6
    ttft = spread("ttft_ms", [record.ttft_us for record in served])
    tpot = spread("tpot_ms", [record.tpot_us for record in served if record.tokens > 1])
    stall = spread("stall_ms", [record.stall_us for record in served])
    return {
        "served": len(served),
        "rejected": sum(record.reason == "rejected" for record in records),
        **{name: row[name] for row in (ttft, tpot) for name in row if name.endswith(("p50", "p99"))},
        **{name: stall[name] for name in ("stall_ms_p99", "stall_ms_max")},
        "preemptions": sum(record.preemptions for record in records),
        "recomputed_tokens": recomputed_tokens,
        "output_tok_s": round(sum(record.tokens for record in served) / seconds, 1),
        "goodput_req_s": round(sum(_is_good(record, classes) for record in served) / seconds, 3),
    }


def _is_good(record: Record, classes: Classes) -> bool:
    """It kept its class's time to the first token and time per token."""
    promise = classes[level_of(record.asked.slo_class)]
    in_time = not promise.ttft_us or record.ttft_us <= promise.ttft_us
    return in_time and record.tpot_us <= promise.tbt_us


def _about(fitted: Fit) -> dict[str, float]:
    hop = fitted.machine.hop
    return {"steps": fitted.steps, "error_pct": fitted.error_pct, "hop_us": hop.delay_us}
