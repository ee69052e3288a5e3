"""Every scenario of the bench: a workload, a machine, and the arms that are compared.

An arm names its differences from the scheduler's defaults: parts of the setting `policy`, the overlap mode.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from loadtest.scenarios import many_executors, synthetic, traces
from loadtest.scenarios.extras import beside_batch, classes, fairness
from loadtest.simulator.copies import Link
from loadtest.simulator.engine import Machine
from loadtest.simulator.hops import Hop
from loadtest.simulator.report import Bounds, Figures, steady
from loadtest.simulator.requests import SimRequest, Workload
from loadtest.simulator.tiers import TierSpec
from loadtest.simulator.world import World
from shared.step_model import PRESETS, StepModel

H200 = Machine(  # 896k tokens, as vLLM has there; 128 KiB of KV a token; PCIe as measured
    PRESETS["h200-8b"], blocks=56_000, hop=Hop(500, 200), block_bytes=2 << 20, link=Link()
)
CPU = Machine(  # 45 KiB of KV a token; the copies are of memory to memory
    PRESETS["smollm2-cpu"],
    blocks=4_096,
    slots=32,
    max_step_tokens=512,
    max_context=8_192,
    hop=Hop(500, 200),
    block_bytes=16 * 46_080,
    link=Link(5_000_000_000, 5_000_000_000),
)


@dataclass(frozen=True)
class Options:
    """What the command line chooses of a workload."""

    trace: Path | None = None
    minutes: float = 1e9
    speed: float = 1.0
    seed: int = 1


@dataclass(frozen=True)
class Arm:
    """One way to run the scheduler."""

    name: str
    policy: str = ""  # parts of the setting, the others as by default
    overlap: str = "auto"
    slo: str = ""  # as the setting `slo`
    limits: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class Scenario:
    """One table."""

    title: str
    why: str
    workload: Callable[[Options], Workload]
    machine: Machine
    arms: tuple[Arm, ...]
    columns: tuple[str, ...]
    bounds: Bounds = field(default_factory=Bounds)
    seeds: int = 1
    until_us: int = 0
    replicas: int = 1  # of the machine
    others: tuple[Machine, ...] = ()  # beside them
    extra: Callable[[World], Figures] | None = None
    tier: TierSpec | None = None  # below every machine


LATENCY = ("output_tok_s", "in_slo_pct", "ttft_ms_p50", "ttft_ms_p99", "tpot_ms_p50", "tpot_ms_p99")
STALLS = ("itl_ms_p99", "itl_ms_max", "stall_ms_p99")
MEMORY = ("preemptions", "recomputed_tokens", "recomputed_pct", "moved_gb", "l2_gb", "makespan_s")
OURS = "loadtest.policies:"
FILL = (
    Arm("static", f"batching={OURS}static"),
    *(Arm(name, f"batching={name}") for name in ("mixed", "prefill_first", "decode_first")),
)
KV = (
    Arm("reserve", f"reservation=reserve,tier={OURS}recompute"),
    *(Arm(t, f"tier={OURS}{t}") for t in ("recompute", "swap")),
    Arm("tiered", "tier=tiered"),
)
VLLM = (  # admits by the chunk, keeps no room for growth; without prefix caching a pause loses all
    Arm("recompute, vLLM", f"reservation={OURS}by_chunk,tier={OURS}forget"),
    Arm("recompute, vLLM with prefix cache", f"reservation={OURS}by_chunk,tier={OURS}recompute"),
)
L1 = TierSpec(l1_bytes=128 << 30)  # 1M tokens
TOKEN_BYTES = 128 << 10
ROUTING = tuple(
    Arm(n, f"routing={p}") for n, p in (("ttft", "ttft"), ("prefix", f"{OURS}prefix"), ("room", "room"))
)
PATIENT = "standard=0/100/0"  # no request is refused or ages: the rank alone decides
ROOM = (("max_waiting", 10_000), ("max_waiting_tokens", 100_000_000))
ALL = "interactive=0/50/0,standard=0/100/0,batch=0/500/0"  # the classes, but no request is refused
VICTIMS = tuple(Arm(name, f"victim={name}", slo=ALL, limits=ROOM) for name in ("latest", "cheapest"))
MODES = tuple(Arm(mode, overlap=mode) for mode in ("single", "run_ahead", "two_batch", "auto"))
OVERLAP = (
    "steady_tok_s",
    "steady_idle_pct",
    "single_pct",
    "run_ahead_pct",
    "two_batch_pct",
    "wasted_rows_pct",
    "itl_ms_p50",
    "itl_ms_p99",
)


def _azure(options: Options, **cut: object) -> Workload:
    made = traces.Cut(options.minutes, options.speed)
    return traces.azure(options.trace or traces.AZURE_SAMPLE, replace(made, **cut))  # type: ignore[arg-type]  # fields of Cut


def _mooncake(options: Options) -> Workload:
    made = traces.Cut(options.minutes, options.speed, max_tokens=2_000)
    return traces.mooncake(options.trace or traces.MOONCAKE_SAMPLE, made)


def _pressure(
    letter: str, what: str, made: Callable[[int], Workload], tokens: int, tier: TierSpec = L1
) -> Scenario:
    return Scenario(
        title=f"Scenario {letter}: {what}",
        why="Memory is short: what admission, preemption and the tiers below make of it. `reserve` promises "
        "each request all it may need; the others pause, and what they had is computed again (recompute), "
        "copied down and back (swap), or whichever costs less (tiered).",
        workload=lambda options: made(options.seed),
        machine=replace(H200, blocks=tokens // 16),
        arms=KV,
        columns=(*LATENCY[:4], "stall_ms_p99", *MEMORY),
        seeds=3,
        tier=tier,
    )


def _slower(machine: Machine, times: int) -> Machine:
    model = replace(
        machine.model,
        weights_us=machine.model.weights_us * times,
        token_ns=machine.model.token_ns * times,
        row_ns=machine.model.row_ns * times,
        kv_token_ps=machine.model.kv_token_ps * times,
        pair_ps=machine.model.pair_ps * times,
    )
    return replace(machine, model=model)


def _routing(title: str, *parts: Callable[[int], Iterator[SimRequest]], slow: int = 0) -> Scenario:
    return Scenario(
        title=f"Four executors: {title}",
        why="Which executor a request gets: by its predicted time to the first token, by the cached part of "
        "its prompt, or by room.",
        workload=lambda options: many_executors.workload(*(part(options.seed) for part in parts)),
        machine=H200,
        replicas=4 - slow,
        others=(_slower(H200, 4),) * slow,
        arms=ROUTING,
        columns=(*LATENCY, "cached_pct", "busiest_to_mean"),
        seeds=2,
        extra=many_executors.balance,
    )


MAKESPAN = Scenario(
    title="A fast executor and one four times slower: more documents than both can do",
    why="The time until all is done, as a multiple of that of the best fixed split of the requests.",
    workload=lambda options: many_executors.overload(options.seed),
    machine=H200,
    others=(_slower(H200, 4),),
    arms=tuple(replace(arm, slo=ALL, limits=ROOM) for arm in ROUTING),
    columns=("makespan_s", "ideal_s", "of_ideal", "ttft_ms_p50", "ttft_ms_p99", "tpot_ms_p99"),
    seeds=3,
    extra=many_executors.of_ideal,
)


def _victims(what: str, tokens: int, tier: TierSpec | None, machine: Machine = H200) -> Scenario:
    return Scenario(
        title=f"Which sequence is paused: contexts of 100 to 32,000 tokens, {what}",
        why="The latest arrival, or the one whose pause costs least for each block that it frees.",
        workload=lambda options: synthetic.contexts(options.seed),
        machine=replace(machine, blocks=tokens // 16),
        arms=VICTIMS,
        columns=(*LATENCY, "stall_ms_p99", *MEMORY),
        seeds=5,
        extra=classes,
        tier=tier,
    )


def _two_classes(scenario: Scenario) -> Scenario:
    return replace(
        scenario,
        why=f"{scenario.why} `vLLM` admits a request whose next chunk has room and keeps none for growth, as "
        "vLLM V1 does: without prefix caching, so that a pause loses all, and with it. None is refused.",
        arms=tuple(replace(arm, slo=ALL, limits=ROOM) for arm in (*VLLM, *scenario.arms)),
        extra=classes,
    )


def _slow_link(scenario: Scenario, bytes_s: int) -> Scenario:
    return replace(scenario, machine=replace(scenario.machine, link=Link(bytes_s, bytes_s)))


def _beside(name: str, slo_class: str, fill: tuple[Arm, ...]) -> Scenario:
    return Scenario(
        title=f"Prompts of 4k beside 32 {name} decodes",
        why="A chunk budget keeps the time between tokens; without one the decodes wait for a whole prompt.",
        workload=lambda _: synthetic.long_prompt(4_096, slo_class),
        machine=H200,
        arms=fill,
        columns=("output_tok_s", "ttft_ms_p99", "itl_ms_p50", "itl_ms_p99", "itl_ms_max"),
    )


def _rows(rows: int, *, host_fed: bool = False, stages: int = 1) -> Scenario:
    fed = "host-fed, 30 µs a row on the host" if host_fed else "device-fed"
    return Scenario(
        title=f"{rows} rows at 1k context, {fed}, {stages} pipeline stage{'s' * (stages > 1)}",
        why="What two batches in flight gain or lose against one.",
        workload=lambda _: synthetic.batch(rows, 800, 600, host_fed=host_fed),
        machine=replace(H200, stages=stages, hop=Hop(500)),
        arms=MODES,
        columns=OVERLAP,
        extra=steady,
    )


SCENARIOS: dict[str, Scenario] = {
    "azure": Scenario(
        title="Continuous against static batching, and the order of prompt chunks and decodes (Azure)",
        why="The same requests at the same times; only the rule that fills a step differs.",
        workload=_azure,
        machine=H200,
        arms=FILL,
        columns=(*LATENCY, *STALLS, "makespan_s"),
        bounds=Bounds(ttft_us=2_000_000, tpot_us=50_000, stall_us=500_000),
    ),
    "azure_closed": Scenario(
        title="The same requests from 128 clients that never pause: what each rule can serve",
        why="Saturation shows in throughput what an open loop shows in waiting.",
        workload=lambda options: replace(_azure(options, minutes=min(options.minutes, 5.0)), clients=128),
        machine=H200,
        arms=FILL[:3],
        columns=(*LATENCY, *STALLS, "makespan_s"),
        bounds=Bounds(ttft_us=2_000_000, tpot_us=50_000, stall_us=500_000),
    ),
    "azure_cpu": Scenario(
        title="The same on SmolLM2 and two cores, at a hundredth of the rate",
        why="A machine on which every token of a prompt is dear.",
        workload=lambda options: _azure(replace(options, speed=options.speed / 100), minutes=1.5),
        machine=CPU,
        arms=FILL,
        columns=(*LATENCY, *STALLS),
    ),
    "azure_overlap": Scenario(
        title="Steps in flight on the Azure trace",
        why="What hiding the way between scheduler and executor brings on a real mix of requests.",
        workload=_azure,
        machine=H200,
        arms=MODES,
        columns=(*LATENCY, "device_idle_pct", *OVERLAP[2:6]),
    ),
    "mooncake": Scenario(
        title="The Mooncake conversation trace: shared prefixes",
        why="Long prompts whose beginnings repeat: what the prefix cache saves.",
        workload=_mooncake,
        machine=H200,
        replicas=4,
        arms=ROUTING,
        columns=(*LATENCY, "cached_pct", "prefill_tokens"),
    ),
    "routing_prefixes": _routing(
        "40 system prompts", lambda seed: many_executors.shared_prefixes(seed, 30.0)
    ),
    "routing_chats": _routing("conversations", lambda seed: many_executors.conversations(seed, 300)),
    "routing_documents": _routing("long prompts", lambda seed: many_executors.documents(seed, 8.0)),
    "routing_mixed": _routing("all three at once", many_executors.mixed),
    "routing_speeds": _routing(
        "all three at once, two of them four times slower", many_executors.mixed, slow=2
    ),
    "routing_hot": _routing("one prefix", many_executors.one_hot),
    "makespan_documents": MAKESPAN,
    "long_prompt": _beside(
        "interactive",
        "interactive",
        (
            Arm("mixed"),
            Arm("mixed, steps of up to 8192", limits=(("step_tokens", 8_192),)),
            Arm("whole prompts", "batching=prefill_first"),
            Arm("decode_first", "batching=decode_first"),
        ),
    ),
    "beside_batch": Scenario(
        title="First tokens of interactive requests beside a batch that fills all 64 slots, steps of 20 ms",
        why="What one request, and 16 in one instant, wait for rows of class batch and for steps in flight.",
        workload=lambda options: synthetic.beside_batch(options.seed),
        machine=Machine(StepModel(weights_us=20_000, token_ns=0), slots=64, hop=Hop(500, 200)),
        arms=tuple(Arm(f"window {window}", slo=ALL, limits=(*ROOM, ("window", window))) for window in (1, 2)),
        columns=(
            *(f"{case}_{beside}_ms_p99" for case in ("one", "burst") for beside in ("alone", "beside")),
            *("one_p99_ratio", "burst_p99_ratio", "tok_s_beside", "preemptions"),
        ),
        until_us=synthetic.ALONE_US + 70 * synthetic.SECOND_US,
        extra=beside_batch,
    ),
    "fairness": Scenario(
        title="Two backlogged clients, one sending ten times as fast",
        why="Served tokens (input + 2 x output) of each while both wait, and the largest difference ever.",
        workload=lambda options: synthetic.two_clients(options.seed),
        machine=replace(H200, blocks=4_000),
        arms=tuple(
            Arm(
                f"{rank}",
                f"order={rank}",
                slo="standard=0/100/0",
                limits=(("max_waiting", 10_000), ("max_waiting_tokens", 10**8)),
            )
            for rank in ("fcfs", "vtc")
        ),
        columns=("served_greedy", "served_modest", "gap_most", "gap_bound", "output_tok_s"),
        until_us=30 * synthetic.SECOND_US,
        extra=fairness,
    ),
    "A": _pressure("A", "reasoning, a pool of 40k tokens", synthetic.reasoning, 40_000),
    "B": _pressure("B", "chat in bursts, 70k tokens", synthetic.chat, 70_000),
    "C": _two_classes(
        _pressure(
            "C", "50 batch jobs beside interactive, 400k tokens", synthetic.batch_beside_interactive, 400_000
        )
    ),
    "D": _pressure(
        "D",
        "B with an L1 of 20k tokens and an L2 of 5 GB/s",
        synthetic.chat,
        70_000,
        TierSpec(20_000 * TOKEN_BYTES, l2_bytes_s=5_000_000_000),
    ),
    "E": _slow_link(
        _pressure(
            "E",
            "B with PCIe at 3 GB/s and an L2 of 1 GB/s",
            synthetic.chat,
            70_000,
            replace(L1, l2_bytes_s=1_000_000_000),
        ),
        3_000_000_000,
    ),
    "F": _pressure("F", "B with memory enough, 400k tokens", synthetic.chat, 400_000),
    "victims_l1": _victims("L1 of 1M tokens", 120_000, L1),
    "victims_small_l1": _victims(
        "L1 of 40k tokens, L2 of 1 GB/s", 120_000, TierSpec(40_000 * TOKEN_BYTES, l2_bytes_s=1_000_000_000)
    ),
    "victims_slow_link": _victims(
        "PCIe of 3 GB/s, L1 of 1M tokens", 120_000, L1, replace(H200, link=Link(3_000_000_000, 3_000_000_000))
    ),
    "victims_no_tier": _victims("no tier", 120_000, None),
    "host_256": _rows(256, host_fed=True),
    "host_64": _rows(64, host_fed=True),
    "device_256": _rows(256),
    "stages_256": _rows(256, stages=2),
}
