"""Figures that only some scenarios have."""

from __future__ import annotations

from loadtest.scenarios.synthetic import ALONE_US
from loadtest.simulator.readers import Record
from loadtest.simulator.report import Figures, spread
from loadtest.simulator.world import FIRST_US, World

W_IN, W_OUT = 1, 2  # what a token of input and of output counts, as in the VTC paper
SAMPLE_US = 100_000


def classes(world: World) -> Figures:
    """TTFT and time of the last end, by class."""
    made: Figures = {}
    for slo_class in sorted({record.asked.slo_class for record in world.readers.records}):
        records = [r for r in world.readers.records if r.asked.slo_class == slo_class and r.served]
        made |= spread(f"ttft_ms_{slo_class}", [record.ttft_us for record in records])
        made[f"done_s_{slo_class}"] = round((max(r.ended_us for r in records) - FIRST_US) / 1e6, 2)
    return made


def beside_batch(world: World) -> Figures:
    """TTFT of synthetic.beside_batch by case, the ratio of its p99 beside the batch and alone, and tokens/s
    from the start of the batch on."""
    made: Figures = {}
    for case in ("one", "burst"):
        for beside in ("alone", "beside"):
            name = f"{case}_{beside}"
            records = [r for r in world.readers.records if r.asked.request.startswith(name)]
            made |= spread(f"{name}_ms", [record.ttft_us for record in records])
        made[f"{case}_p99_ratio"] = round(made[f"{case}_beside_ms_p99"] / made[f"{case}_alone_ms_p99"], 3)
    readers, since_us = world.readers, FIRST_US + ALONE_US
    tokens = sum(r.tokens for r in (*readers.records, *readers.open.values()) if r.arrival_us >= since_us)
    return made | {"tok_s_beside": round(tokens / ((world.now_us - since_us) / 1e6), 1)}


def fairness(world: World) -> Figures:
    """Service of two clients while both are backlogged, and how far apart it ever was: |served(a, t) -
    served(b, t)|, which VTC (Sheng et al. 2024, theorem 4.4) keeps below 2 max(w_in L_in, w_out M), M
    being the tokens that fit in the running batch."""
    records = [*world.readers.records, *world.readers.open.values()]
    tenants = sorted({record.asked.tenant for record in records})
    until_us = world.setup.until_us + FIRST_US
    gap_most = 0
    for at_us in range(FIRST_US, until_us + 1, SAMPLE_US):
        served = [sum(_service(r, at_us) for r in records if r.asked.tenant == t) for t in tenants]
        gap_most = max(gap_most, max(served) - min(served))
    longest = max(record.prompt_tokens for record in records)
    machine = world.setup.machines[0]
    held = machine.blocks * machine.block_tokens
    return {
        **{
            f"served_{t}": sum(_service(r, until_us) for r in records if r.asked.tenant == t) for t in tenants
        },
        "gap_most": gap_most,
        "gap_bound": 2 * max(W_IN * longest, W_OUT * held),
    }


def _service(record: Record, at_us: int) -> int:
    """What a request has been served by then. Its input counts with the first token; its output is taken
    as even between the first token and the last."""
    if not record.first_us or record.first_us > at_us:
        return 0
    span_us = max(record.last_us - record.first_us, 1)
    share = min(at_us - record.first_us, span_us)
    return W_IN * record.prompt_tokens + W_OUT * (1 + (record.tokens - 1) * share // span_us)
