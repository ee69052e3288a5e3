"""Declares every counter, gauge and histogram, each once: its name, unit, kind, meaning and places.

    a service ── Counted ──▶ points()     metrics: the gateway's page, Prometheus, OTLP
                         ├─▶ in_load()    the load of a heartbeat
                         ├─▶ lately()     `last_10_s` of a status: the change within the last seconds
                         └─▶ in_status()  the status; a dotted key is a group in a group

`headrace status`, `top` and `kv`, the page and the gateway read a status by the same declarations, and
docs/reference/metrics.md lists them. A service counts in plain attributes, and needs this only to report.
What is measured is plain data, MetricPoint and HistogramPoint, before any export.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from pydantic import ConfigDict, TypeAdapter, ValidationError

from shared.errors import WireError

Facts = Mapping[str, Any]  # a status, or a part of one
RECENT, SECONDS = "last_10_s", "seconds"
Attributes = tuple[tuple[str, str], ...]
WINDOW_US = 10_000_000
SAMPLE_US = 900_000  # just less than a heartbeat interval of a second


@dataclass(frozen=True, slots=True)
class MetricPoint:
    """The current value of a counter or a gauge."""

    name: str
    value: float
    unit: str  # UCUM: "1", "s", "{token}"
    attributes: Attributes = ()
    is_counter: bool = False


@dataclass(frozen=True, slots=True)
class HistogramPoint:
    """A histogram since the start: `counts[i]` values in (bounds[i-1], bounds[i]], the last above them."""

    name: str
    bounds: Sequence[float]
    counts: Sequence[int]
    total: float
    unit: str
    attributes: Attributes = ()


Metrics = Sequence[MetricPoint | HistogramPoint]
Report = tuple[str, list[MetricPoint | HistogramPoint]]  # an actor `kind.id` and its metrics


@cache
def _reports() -> TypeAdapter[Report]:
    return TypeAdapter(Report, config=ConfigDict(ser_json_inf_nan="constants"))


def pack(source: str, metrics: Metrics) -> bytes:
    """The metrics of the actor `source` as a message."""
    return _reports().dump_json((source, list(metrics)))


def unpack(data: bytes) -> Report:
    """Read a message of `pack`. Raises WireError."""
    try:
        return _reports().validate_json(data)
    except ValidationError as error:
        raise WireError(f"damaged metrics: {error.error_count()} errors") from None


class Recent:
    """The change of counts within the last WINDOW_US, from a sample at each heartbeat."""

    def __init__(self) -> None:
        self._samples: deque[tuple[int, Mapping[str, int]]] = deque()

    def sample(self, now_us: int, counts: Mapping[str, int]) -> None:
        """Keep the current counts, unless the last sample is younger than SAMPLE_US."""
        samples = self._samples
        if not counts or (samples and now_us - samples[-1][0] < SAMPLE_US):
            return
        samples.append((now_us, counts))
        while len(samples) > 1 and samples[1][0] <= now_us - WINDOW_US:
            samples.popleft()

    def change(self, now_us: int, counts: Mapping[str, int]) -> dict[str, float]:
        """The increase of each count within the last `seconds`; empty before the first sample."""
        if not self._samples:
            return {}
        since_us, before = self._samples[0]
        grown = {name: count - before.get(name, 0) for name, count in counts.items()}
        return {"seconds": round((now_us - since_us) / 1e6, 1), **grown}


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Counter:
    """One declaration. An empty name: it does not occur there."""

    metric: str = ""
    unit: str = "1"  # UCUM
    kind: Literal["counter", "gauge", "histogram"] = "counter"
    about: str = ""  # a line for the documentation, where the name needs one
    attributes: tuple[str, ...] = ()
    vllm: str = ""  # name of vLLM's metric, which Prometheus gets instead
    status: str = ""  # key in a status
    recent: str = ""  # key in RECENT of a status
    load: str = ""  # key in a heartbeat's load
    per: float = 1  # counted in so many parts of the metric's unit

    def of(self, facts: Facts) -> Any:
        """The value in a status, or in the part of one with this key; 0 if it is not there."""
        found: Any = facts
        for key in self.status.split("."):
            found = found.get(key, 0) if found else 0
        return found

    def grown(self, facts: Facts) -> Any:
        """The growth within the last seconds, in a status."""
        return facts.get(RECENT, {}).get(self.recent, 0)

    def loaded(self, load: Iterable[tuple[str, int]]) -> int:
        """The value in the load of a heartbeat."""
        return dict(load).get(self.load, 0)

    def point(self, value: float, *attributes: str) -> MetricPoint:
        """The metric, with the values of `attributes` in their order."""
        labels = tuple(zip(self.attributes, attributes, strict=True))
        counts = self.kind == "counter"
        return MetricPoint(
            self.metric, value / self.per if self.per != 1 else value, self.unit, labels, counts
        )

    def histogram(
        self, bounds: Iterable[float], counts: Iterable[int], total: float, *attributes: str
    ) -> HistogramPoint:
        """The metric of a histogram, likewise."""
        labels = tuple(zip(self.attributes, attributes, strict=True))
        upper = [bound / self.per for bound in bounds]
        return HistogramPoint(self.metric, upper, [*counts], total / self.per, self.unit, labels)


Counted = Mapping[Counter, Any]


def points(counted: Counted) -> list[MetricPoint]:
    """Those that are metrics without attributes."""
    return [each.point(value) for each, value in counted.items() if each.metric]


def in_load(counted: Counted) -> tuple[tuple[str, int], ...]:
    """Those in a heartbeat."""
    return tuple((each.load, value) for each, value in counted.items() if each.load)


def lately(counted: Counted) -> dict[str, int]:
    """Those of which a status shows the growth."""
    return {each.recent: value for each, value in counted.items() if each.recent}


def in_status(counted: Counted) -> dict[str, Any]:
    """Those in a status."""
    found: dict[str, Any] = {}
    for each, value in counted.items():
        *groups, key = each.status.split(".")
        group = found
        for name in groups:
            group = group.setdefault(name, {})
        if key:
            group[key] = value
    return found


def counter(metric: str = "", unit: str = "1", about: str = "", **more: Any) -> Counter:
    """A count that only grows."""
    return Counter(metric=metric, unit=unit, about=about, **more)


def gauge(metric: str = "", unit: str = "1", about: str = "", **more: Any) -> Counter:
    """A value of now."""
    return Counter(metric=metric, unit=unit, about=about, kind="gauge", **more)


def histogram(metric: str, unit: str, about: str = "", **more: Any) -> Counter:
    """How often which values came; counted in µs, or per mille of a share, unless `per` is given."""
    return Counter(
        metric=metric,
        unit=unit,
        about=about,
        kind="histogram",
        **{"per": 1e6 if unit == "s" else 1e3, **more},
    )


# ---- what each service counts -------------------------------------------------------------------
# fmt: off


class ProcessCounter:
    """Every process."""

    UP = gauge("headrace.up", about="on the gateway's page: 0 if the service did not answer")
    READY = gauge("headrace.ready", about="1 when it is")
    WIRE_ERRORS = counter("headrace.wire_errors", "{message}", "dropped, unreadable", status="wire_errors")
    AGE = gauge(unit="s", status="age_s")
    CPU = counter("process.cpu", "s")
    START = gauge("process.start_time", "s")
    MEMORY = gauge("process.resident_memory", "By")
    FILES = gauge("process.open_fds")


class GatewayCounter:
    """Gateways."""

    ACTIVE = gauge("http.server.active_requests", "{request}", status="active", load="active")
    LINES = gauge(unit="{connection}", status="lines")
    PORT = gauge(unit="{port}", load="http_port")
    REQUESTS = counter(unit="{request}", status="requests", recent="requests")
    CHUNKS = counter("headrace.gateway.chunks", "{chunk}", "events sent", status="chunks")
    SLOW_READERS = counter("headrace.gateway.slow_readers", "{stream}", "ended: their reader was too slow",
        status="slow_readers")
    HINTS = counter("headrace.gateway.hints", "{header}",
        "headers that name a [session](../guides/sessions.md): used, passed over, malformed",
        attributes=("name", "fate"))
    DURATION = histogram("http.server.request.duration", "s", "first byte to last; 499: its client left",
        per=1, attributes=("http.route", "http.response.status_code"))
    FIRST_CHUNK = histogram("headrace.gateway.time_to_first_chunk", "s", "of streams", per=1,
        attributes=("http.route",))


_T = "headrace.tokenizer."


class TokenizerCounter:
    """Tokenizers."""

    PENDING = gauge(f"{_T}pending", "{request}", "no scheduler has accepted them yet", status="pending")
    COPIES = gauge(f"{_T}copies", "{request}", "of other tokenizers, in case they die", status="copies")
    TAKEN_OVER = counter(f"{_T}taken_over", "{request}", "of tokenizers that died", status="taken_over")
    REQUESTS = counter(f"{_T}requests", "{request}", status="requests", recent="requests")
    FAILED = counter(f"{_T}failed", "{request}", status="failed")
    UNAVAILABLE = counter(f"{_T}unavailable", "{request}", "of the failed ones, those with 503",
        status="unavailable", recent="refused_503")
    PROMPT_TOKENS = counter(f"{_T}prompt_tokens", "{token}", status="prompt_tokens", recent="prompt_tokens")


_S = "headrace.scheduler."
_OF_EXECUTOR = ("executor",)
_OF_LINK = ("executor", "direction")
_OF_TENANT = ("tenant", "model")
_GEN_AI = ("gen_ai.operation.name", "gen_ai.provider.name")
_ERROR = "\\|real - predicted\\| / predicted"


class SchedulerCounter:
    """Schedulers."""

    TTFT = histogram("gen_ai.server.time_to_first_token", "s", "arrival at the scheduler to the first token",
        attributes=_GEN_AI, vllm="time_to_first_token_seconds")
    TPOT = histogram("gen_ai.server.time_per_output_token", "s",
        "of a sequence that ended by itself: first to last token / tokens after the first",
        attributes=_GEN_AI, vllm="request_time_per_output_token_seconds")
    E2E = histogram("gen_ai.server.request.duration", "s",
        "of a sequence that ended by itself: arrival to its end", attributes=_GEN_AI,
        vllm="e2e_request_latency_seconds")
    INTER_TOKEN = histogram(f"{_S}inter_token.duration", "s",
        "between two tokens of a sequence, preemptions included", vllm="inter_token_latency_seconds")
    QUEUE_TIME = histogram(f"{_S}queue.duration", "s", "arrival to first admission",
        vllm="request_queue_time_seconds")
    STEP_TIME = histogram(f"{_S}step.duration", "s", "forward and sampling")
    STEP_ERROR = histogram(f"{_S}step.prediction_error", "1", _ERROR)
    REQUESTS = gauge(unit="{request}", status="requests", load="requests")
    CLOSING = gauge(unit="{sequence}", status="closing")
    WAITING = gauge(unit="{sequence}", status="waiting")
    WAITING_REQUESTS = gauge(unit="{request}", recent="waiting", load="waiting")
    QUEUED = gauge(f"{_S}queue.requests", "{request}", "waiting requests", attributes=("slo.class",),
        vllm="num_requests_waiting")
    AWAITING_EXECUTOR = gauge(f"{_S}queue.awaiting_executor", "{request}",
        "waiting requests of models without an executor", status="awaiting_executor")
    RUNNING = gauge(f"{_S}running", "{sequence}", attributes=_OF_EXECUTOR, status="running", load="running",
        vllm="num_requests_running")
    SLOTS = gauge(unit="{slot}", status="slots")
    FREE_SLOTS = gauge(unit="{slot}", status="free_slots")
    KV_USED = gauge(unit="%", status="kv_used_pct")
    STEP_P50 = gauge(unit="ms", status="step_p50_ms")
    BLOCKS_USED = gauge(f"{_S}blocks_used", about="HBM blocks held by running sequences / all",
        attributes=_OF_EXECUTOR, vllm="kv_cache_usage_perc")
    BLOCKS = gauge(f"{_S}blocks", "{block}",
        "free, cached, held, fenced, dirty (no tier has a copy), copying; reserved: of free and cached",
        attributes=("executor", "state"))
    WASTE = gauge(f"{_S}waste_tokens", "{token}", "allocated token slots that hold no token",
        attributes=_OF_EXECUTOR, status="waste_tokens")
    BUDGET = gauge(f"{_S}step.budget_tokens", "{token}", "chunk budget of the last step",
        status="measured.steps.budget_tokens")
    HIT_RATIO = gauge(f"{_S}prefix.hit_ratio", about="hits / looked up", per=1e3)
    RECOMPUTE_OVERHEAD = gauge(f"{_S}recompute_overhead", about="recomputed / prefilled tokens", per=1e3)
    PREFIX_LOOKUPS = counter(f"{_S}prefix.lookup_tokens", "{token}",
        "prompt tokens that were looked up in a prefix cache", vllm="prefix_cache_queries_total",
        recent="prefix_lookups")
    PREFIX_HITS = counter(f"{_S}prefix.hit_tokens", "{token}", "of these, found there and not computed",
        vllm="prefix_cache_hits_total", status="measured.tokens.prefix_hits", recent="prefix_hits")
    GENERATED = counter(f"{_S}generated_tokens", "{token}", "sampled tokens that were applied",
        vllm="generation_tokens_total", status="measured.tokens.generated", recent="generated")
    PREFILLED = counter(f"{_S}prefill_tokens", "{token}",
        "prompt tokens that steps computed, including recomputed ones", status="measured.tokens.prefilled",
        recent="prefilled")
    RECOMPUTED = counter(f"{_S}recomputed_tokens", "{token}", "whose KV a preemption or requeue lost",
        status="measured.tokens.recomputed")
    WASTED_ROWS = counter(f"{_S}wasted_rows", "{row}", "computed for sequences that had ended",
        status="measured.steps.wasted_rows")
    DRAFTS = counter(f"{_S}drafts", "{row}", "that had drafts", vllm="spec_decode_num_drafts_total",
        status="measured.drafts.rows", recent="draft_rows")
    DRAFT_TOKENS = counter(f"{_S}draft_tokens", "{token}", "computed [ahead](../design/speculation.md)",
        vllm="spec_decode_num_draft_tokens_total", status="measured.drafts.tokens", recent="draft_tokens")
    ACCEPTED_TOKENS = counter(f"{_S}accepted_tokens", "{token}", "of these, kept as tokens of answers",
        vllm="spec_decode_num_accepted_tokens_total", status="measured.drafts.accepted",
        recent="accepted_tokens")
    PREEMPTIONS = counter(f"{_S}preemptions", "{preemption}", "of sequences", vllm="num_preemptions_total",
        status="measured.tokens.preemptions", recent="preemptions")
    MOVES = counter(f"{_S}moves", "{move}", "sequences that [moved](../design/moves.md) to another executor",
        status="measured.tokens.moves")
    ADAPTER_LOADS = counter(f"{_S}adapter_loads", "{load}",
        "of [adapters](../guides/adapters.md) into places", status="measured.adapter_loads")
    ADAPTERS = gauge(f"{_S}adapters", "{place}", "places for adapters; the labels name them",
        attributes=("max.lora", "waiting.lora.adapters", "running.lora.adapters"), vllm="lora_requests_info")
    ROLE_CHANGES = counter(f"{_S}role_changes", "{change}",
        "of [roles](../design/prefill_decode.md) of executors")
    PREDICTED_TIME = counter(f"{_S}step.predicted_duration", "s",
        "to compare with the sum of `step.duration`", per=1e6)
    STEPS = counter(f"{_S}steps", "{step}", attributes=("overlap.mode",))
    REJECTED = counter(f"{_S}rejected", "{request}",
        "refused, but for 503s of schedulers: tokenizers try again, then count `unavailable`",
        attributes=("error.type",))
    REFUSED_429 = counter(unit="{request}", recent="refused_429")
    REFUSED_503 = counter(unit="{request}", recent="refused_503")
    FINISHED = counter(f"{_S}finished", "{sequence}", "sequences that have ended", attributes=("reason",))
    USED_REQUESTS = counter(f"{_S}usage.requests", "{request}", "that have ended", attributes=_OF_TENANT,
        status="requests")
    USED_PROMPT_TOKENS = counter(f"{_S}usage.prompt_tokens", "{token}", attributes=_OF_TENANT,
        status="prompt_tokens")
    USED_CACHED_TOKENS = counter(f"{_S}usage.cached_tokens", "{token}", "of the prompts",
        attributes=_OF_TENANT, status="cached_tokens")
    USED_COMPLETION_TOKENS = counter(f"{_S}usage.completion_tokens", "{token}", attributes=_OF_TENANT,
        status="completion_tokens")
    WANTED = gauge("headrace.scale_wanted", "{executor}",
        "that the demand needs, the largest term ([autoscaling](../guides/kubernetes.md#autoscaling))",
        attributes=("term", "model"))


class SchedulerSessionCounter:
    """[Sessions](../guides/sessions.md), as the scheduler follows them."""

    SESSIONS = gauge(f"{_S}sessions", "{session}", "running, idle; kept: of the idle ones",
        attributes=("state",))
    FOLLOWED = gauge(unit="{session}", status="sessions")
    PAUSE = gauge(f"{_S}session_pause", "s", "half of the pauses are shorter; of the most frequent functions",
        per=1e6, attributes=("tool",))
    RETURNS = counter(f"{_S}session_returns", "{request}",
        "that continue one, by where most of its blocks were: device, l1, l2, computed", attributes=("tier",))
    ENDED = counter(f"{_S}sessions.ended", "{session}",
        "released by a client, superseded by a new prompt, over: hardly ever back, or its parent went on",
        attributes=("cause",))
    PREFETCHED = counter(f"{_S}prefetched_blocks", "{block}", "that came up ahead of their request")
    WASTED = counter(f"{_S}prefetch_wasted_blocks", "{block}", "of these, not needed in time")


def _tier(key: str, unit: str, about: str, **more: Any) -> Counter:
    """A counter of the KV tiers as a scheduler sees them; its attribute of the state has the same name."""
    name = f"{_S}tiers.{key.removeprefix('tier_')}"
    return counter(name, unit, about, status=f"measured.tiers.{key}", **more)


class SchedulerTierCounter:
    """KV tiers, as the scheduler sees them."""

    LOADS = _tier("loads", "{load}", "of blocks")
    DECLINED = _tier("loads_declined", "{load}", "not made: computing was cheaper")
    LOADS_FAILED = _tier("loads_failed", "{load}", "the blocks did not come")
    L1_HITS = _tier("l1_hit_blocks", "{block}", "that loads brought from L1")
    L2_HITS = _tier("l2_hit_blocks", "{block}", "that loads brought from L2, through L1")
    RESTORED = _tier("restored_tokens", "{token}", "of both")
    STORED = _tier("stored_blocks", "{block}", "copied to L1")
    STORED_AHEAD = _tier("stored_ahead_blocks", "{block}", "copied ahead of a preemption")
    STORES_FAILED = _tier("stores_failed", "{store}", "failed copies")
    DROPPED = _tier("dropped_blocks", "{block}", "given up without a copy")
    DROPPED_PREEMPTED = _tier("dropped_preempted_blocks", "{block}", "of these, of preempted sequences")
    BACKOFFS = _tier("tier_backoffs", "{rest}",
        "a kv_offload was left alone for a second because it did not answer")


class SchedulerLinkCounter:
    """Copies between the tiers, as the scheduler sees them."""

    LOOKUPS_OPEN = gauge(unit="{lookup}", status="measured.tiers.lookups_open")
    JOBS = gauge(f"{_S}tiers.jobs", "{job}", "open stores and loads", status="measured.tiers.jobs_open")
    RATE = gauge(f"{_S}tiers.rate", "By/s", "learned; `up` and `down`", attributes=_OF_LINK)
    PENDING = gauge(f"{_S}tiers.pending", "By", attributes=_OF_LINK)
    MOVED = counter(f"{_S}tiers.moved", "By", attributes=_OF_LINK)
    RESTORE_TIME = histogram(f"{_S}tiers.restore.duration", "s",
        "lookup of the blocks to blocks on the device")
    RESTORE_ERROR = histogram(f"{_S}tiers.restore.prediction_error", "1", _ERROR)
    RECOMPUTE_ERROR = histogram(f"{_S}tiers.recompute.prediction_error", "1", _ERROR)
    RESTORE_P50 = gauge(unit="ms", status="measured.tiers.restore_p50_ms")
    RESTORE_P99 = gauge(unit="ms", status="measured.tiers.restore_p99_ms")
    RESTORE_ERROR_P50 = gauge(unit="%", status="measured.tiers.restore_error_p50_pct")
    RECOMPUTE_ERROR_P50 = gauge(unit="%", status="measured.tiers.recompute_error_p50_pct")
    UP_RATE = gauge(unit="By/s", status="up_bytes_per_s")
    UP_MOVED = counter(unit="By", status="up_moved_bytes")
    UP_PENDING = gauge(unit="{job}", status="up_pending")
    DOWN_RATE = gauge(unit="By/s", status="down_bytes_per_s")
    DOWN_MOVED = counter(unit="By", status="down_moved_bytes")
    DOWN_PENDING = gauge(unit="{job}", status="down_pending")


_K = "headrace.kv_offload."
_ASKED, _MOVED, _L1, _L2 = "keys.asked.", "keys.moved.", "tiers.l1.", "tiers.l2."


class KvOffloadCounter:
    """KV tiers, as kv_offload sees them. A key is a block in a message of a scheduler."""

    LOOKUPS_OPEN = gauge(unit="{lookup}", status="lookups")
    LOADS_OPEN = gauge(unit="{load}", status="loads")
    READS = gauge(unit="{lease}", status="reads")
    WRITES = gauge(unit="{lease}", status="writes")
    QUARANTINE = gauge(unit="{range}", status="quarantine")
    L1_BYTES = gauge(unit="By", status=f"{_L1}capacity_bytes", load="l1_bytes")
    L1_USED = gauge(unit="By", status=f"{_L1}used_bytes", load="l1_used")
    L1_ENTRIES = gauge(unit="{block}", status=f"{_L1}entries")
    L1_READ = gauge(unit="By", status=f"{_L1}read_bytes")
    L1_WRITTEN = gauge(unit="By", status=f"{_L1}written_bytes")
    L1_QUARANTINED = gauge(unit="By", status=f"{_L1}quarantined_bytes")
    LEASED = gauge(unit="By", load="leased")
    HITS = counter(unit="{key}", load="hits", recent="hits")
    LOOKUPS = counter(f"{_K}lookup_keys", "{key}", "blocks looked up", status=f"{_ASKED}lookups",
        recent="lookups")
    HIT_KEYS = counter(f"{_K}hit_keys", "{key}", "found in `l1`, `l2`, or at a `peer`", attributes=("tier",))
    HITS_L1 = counter(unit="{key}", status=f"{_ASKED}hits_l1")
    HITS_L2 = counter(unit="{key}", status=f"{_ASKED}hits_l2")
    MISSES = counter(unit="{key}", status=f"{_ASKED}misses")
    HIT_RATE = gauge(status=f"{_ASKED}hit_rate")
    LOADED = counter(f"{_K}loaded_keys", "{key}", "leased to be read", status=f"{_ASKED}loaded")
    LOADS_LATE = counter(f"{_K}loads_late", about="answered incomplete at the deadline",
        status=f"{_ASKED}loads_late")
    ABSENT = counter(unit="{key}", status=f"{_ASKED}absent")
    STORED = counter(f"{_K}stored_keys", "{key}", "made readable", status=f"{_MOVED}stored")
    NO_ROOM = counter(f"{_K}no_room_keys", "{key}", "no room", status=f"{_MOVED}no_room")
    LATE_COMMITS = counter(unit="{commit}", status=f"{_MOVED}late_commits")
    EXPIRED = counter(f"{_K}leases.expired", about="leases not ended by their scheduler",
        status=f"{_MOVED}expired_leases")
    PROMOTIONS = counter(f"{_K}promoted_keys", "{key}", "fetched from L2", status=f"{_MOVED}promotions")
    L2_PUTS = counter(unit="{key}", status=f"{_MOVED}l2_puts")
    L2_GETS = counter(unit="{key}", status=f"{_MOVED}l2_gets")
    EVICTED = counter(f"{_K}evicted_keys", "{key}", "evicted from L1", status=f"{_L1}evictions")
    CORRUPT = counter(f"{_K}corrupt_keys", "{key}", "damaged values of L2")
    FAILURES = counter(f"{_K}l2.failures", "{call}", "errors, timeouts, values refused by a full L2",
        attributes=("how",))
    SIZE = gauge(f"{_K}l1.size", "By", "capacity, used, read (pinned), written (reserved), quarantined",
        attributes=("state",))


class KvOffloadLinkCounter:
    """L2 and the peers, as kv_offload sees them."""

    BREAKER = gauge(status=f"{_L2}breaker")  # none, open, closed
    BREAKER_OPEN = gauge(f"{_K}l2.breaker_open", about="1 while the breaker is open")
    OPENED = counter(unit="{opening}", status=f"{_L2}opened")
    KNOWN = gauge(f"{_K}l2.known_keys", "{key}", "that this process wrote to L2 or found there",
        status=f"{_L2}known")
    IN_FLIGHT = gauge(unit="{call}", status=f"{_L2}in_flight")
    QUEUED = gauge(unit="{call}", status=f"{_L2}queued")
    RATE = gauge(f"{_K}l2.rate", "By/s", attributes=("direction",))
    PUT_RATE = gauge(unit="By/s", status=f"{_L2}put_bytes_per_s")
    GET_RATE = gauge(unit="By/s", status=f"{_L2}get_bytes_per_s")
    ANSWER_TIME = gauge(unit="us", status=f"{_L2}answer_us")
    ERRORS = counter(unit="{call}", status=f"{_L2}errors")
    TIMEOUTS = counter(unit="{call}", status=f"{_L2}timeouts")
    REFUSED = counter(unit="{call}", status=f"{_L2}refused")
    DAMAGED = counter(unit="{value}", status=f"{_L2}corrupt")
    STUCK = gauge(unit="{call}", status="stuck_calls")
    PEER_KEYS = counter(f"{_K}peer.keys", "{key}",
        "blocks `read` from L1 of other hosts, `leased` to them, `corrupt`", attributes=("what",))
    PEERS_READABLE = gauge(unit="{peer}", status="peers.readable")
    PEERS_OPEN = gauge(unit="{question}", status="peers.open")
    PEERS_KNOWN = gauge(unit="{key}", status="peers.known")
    PEERS_ANSWER = gauge(unit="us", status="peers.answer_us")
    PEER_HITS = counter(unit="{key}", status="peers.hits")
    PEER_GETS = counter(unit="{key}", status="peers.gets")
    PEER_BYTES = counter(f"{_K}peer.read", "By", "read from peers", status="peers.bytes")
    PEER_ABSENT = counter(unit="{key}", status="peers.absent")
    PEER_CORRUPT = counter(unit="{key}", status="peers.corrupt")
    PEER_FAILURES = counter(f"{_K}peer.failures", "{call}",
        "lookups and reads that a peer did not answer in time, or failed", status="peers.failures")
    PEER_LEASED = counter(unit="{key}", status="peers.leased")


_X = "headrace.executor."


class ExecutorCounter:
    """Executors."""

    STEPS = counter(f"{_X}steps", "{step}", status="steps", recent="steps", load="steps")
    FAILED = counter(f"{_X}failed_steps", "{step}", status="failed_steps", recent="failed_steps")
    OPEN_SLOTS = gauge(f"{_X}open_slots", "{slot}", status="open_slots", load="slots")
    QUEUED = gauge(f"{_X}plans_queued", "{plan}", status="queued")
    BUSY = counter(f"{_X}device.busy", "s", "device thread: in a step", status="device_busy_us", per=1e6)
    IDLE = counter(f"{_X}device.idle", "s",
        "it waited for the plan that has come; idle / (idle + busy) is the idle share under load",
        status="device_idle_us", per=1e6)
    COPIES_QUEUED = gauge(f"{_X}copies_queued", "{copy}", status="copies_queued")
    COPIES = counter(f"{_X}copies", "{copy}", "to L1 `store`, from it `load`", attributes=("direction",))
    COPIED = counter(f"{_X}copied", "By", attributes=("direction",))
    KV_BYTES = gauge(unit="By", status="kv_bytes")


_D = "headrace.detokenizer."


class DetokenizerCounter:
    """Detokenizers."""

    SEQUENCES = gauge(f"{_D}sequences", "1", status="sequences", load="sequences")
    REQUESTS = gauge(f"{_D}requests", "1", status="requests", load="requests")
    FAILOVER = gauge(f"{_D}failover", "1", "requests of a dead scheduler", status="failover", load="failover")
    BACKUPS = gauge(f"{_D}backups", "1", "requests of other detokenizers, kept in case both die",
        status="backups", load="backups")
    UNCONFIRMED = gauge(f"{_D}unconfirmed", "1", "streams that may have lost their reader",
        status="unconfirmed", load="unconfirmed")
    FRAMES = counter(f"{_D}frames", "1", status="frames", recent="frames", load="frames")
    TOKENS = counter(f"{_D}tokens", "1", status="tokens", recent="tokens", load="tokens")
    BACKLOG = gauge(f"{_D}backlog", "By", "bytes not sent yet")
    SAVEPOINTS = counter(f"{_D}checkpoints", "{checkpoint}", "stored")
    SAVEPOINTS_FAILED = counter(f"{_D}checkpoints_failed", "{checkpoint}")


_P = "headrace.keeper."


class KeeperCounter:
    """Keepers."""

    QUEUED = gauge(f"{_P}queued", "{request}", "requests and batches of all keepers that have not ended",
        status="queued")
    IN_FLIGHT = gauge(f"{_P}in_flight", "{request}", status="in_flight")
    FORWARDED = gauge(f"{_P}forwarded", "{request}", "for the centre of an edge", status="forwarded")
    SUBMITTED = counter(f"{_P}submitted", "{request}", status="submitted", recent="submitted")
    KEPT = counter(f"{_P}kept", "{response}", "responses that were answered at once")
    STORED = counter(f"{_P}stored", "{request}", "records", status="stored", recent="stored")
    REFUSED = counter(f"{_P}refused", "{request}", "to be tried again", status="refused")
    HELD_BACK = gauge(unit="{request}", status="held_back")
    HOOKS = counter(f"{_P}webhooks", "{event}", "that were taken")
    HOOKS_FAILED = counter(f"{_P}webhooks_failed", "{try}")
    HOOKS_GIVEN_UP = counter(f"{_P}webhooks_given_up", "{event}")
    HOOKS_DROPPED = counter(f"{_P}webhooks_dropped", "{event}", "too many waited for one receiver")
    BATCHES = gauge(f"{_P}batches", "{batch}", status="batches")
    BATCH_LINES = gauge(f"{_P}batch_lines", "{request}", status="lines_in_flight")


# fmt: on
DECLARED = (
    SchedulerCounter,
    SchedulerTierCounter,
    SchedulerSessionCounter,
    SchedulerLinkCounter,
    KvOffloadCounter,
    KvOffloadLinkCounter,
    ExecutorCounter,
    TokenizerCounter,
    DetokenizerCounter,
    KeeperCounter,
    GatewayCounter,
    ProcessCounter,
)  # fmt: skip


def declared(service: type) -> Iterator[Counter]:
    """The counters of one of DECLARED."""
    return (each for each in vars(service).values() if isinstance(each, Counter))


# ---- one line of a service, for `headrace status`, `top` and the page ---------------------------

Cell = Callable[[Facts], str]


def now(text: str, count: Counter) -> Cell:
    """The value of now; `text` has a place for it."""
    return lambda facts: text.format(count.of(facts))


def some(text: str, count: Counter) -> Cell:
    """The same; nothing for 0."""
    return lambda facts: text.format(value) if (value := count.of(facts)) else ""


def lately_many(text: str, count: Counter) -> Cell:
    """The growth within the last seconds."""
    return lambda facts: text.format(count.grown(facts))


def per_second(text: str, count: Counter) -> Cell:
    """The growth per second; a dash within the first second."""

    def shown(facts: Facts) -> str:
        seconds = facts.get(RECENT, {}).get(SECONDS)
        per_s = count.grown(facts) / seconds if seconds else 0
        return text.format("-" if not seconds else f"{per_s:.1f}" if 0 < per_s < 10 else f"{per_s:,.0f}")

    return shown


def share(text: str, part: Counter, whole: Counter) -> Cell:
    """A part of what has grown within the last seconds."""
    return lambda facts: text.format(percent(part.grown(facts), whole.grown(facts)))


def share_if_any(text: str, part: Counter, whole: Counter) -> Cell:
    """The same; nothing where `whole` has not grown."""
    shown = share(text, part, whole)
    return lambda facts: shown(facts) if whole.grown(facts) else ""


def percent(part: float, whole: float) -> str:
    """A share in percent; a dash if `whole` is 0."""
    return f"{100 * part / whole:.1f} %" if whole else "-"


CELLS: dict[str, tuple[Cell, ...]] = {
    "gateway": (
        now("{:,} open", GatewayCounter.ACTIVE),
        per_second("{} requests/s", GatewayCounter.REQUESTS),
    ),
    "tokenizer": (
        now("{:,} in work", TokenizerCounter.PENDING),
        per_second("{} requests/s", TokenizerCounter.REQUESTS),
        per_second("{} tok/s", TokenizerCounter.PROMPT_TOKENS),
    ),
    "scheduler": (
        now("{:,} running", SchedulerCounter.RUNNING),
        now("{:,} waiting", SchedulerCounter.WAITING),
        per_second("in {}", SchedulerCounter.PREFILLED),
        per_second("out {} tok/s", SchedulerCounter.GENERATED),
        share("prefix hits {}", SchedulerCounter.PREFIX_HITS, SchedulerCounter.PREFIX_LOOKUPS),
        lately_many("{:,} preempted", SchedulerCounter.PREEMPTIONS),
        some("{:,} sessions", SchedulerSessionCounter.FOLLOWED),
        share_if_any("drafts kept {}", SchedulerCounter.ACCEPTED_TOKENS, SchedulerCounter.DRAFT_TOKENS),
    ),
    "executor": (per_second("{} steps/s", ExecutorCounter.STEPS),),
    "kv_offload": (
        now("{:,} blocks in L1", KvOffloadCounter.L1_ENTRIES),
        share("hits {}", KvOffloadCounter.HITS, KvOffloadCounter.LOOKUPS),
    ),
    "detokenizer": (
        now("{:,} in work", DetokenizerCounter.REQUESTS),
        per_second("{} tok/s", DetokenizerCounter.TOKENS),
    ),
    "keeper": (
        now("{:,} in flight", KeeperCounter.IN_FLIGHT),
        per_second("{} answers/s", KeeperCounter.STORED),
    ),
}  # by kind of service


def cells(facts: Facts) -> list[str]:
    """The cells of a service's line; none if it starts or has failed: then its answer has no facts."""
    there = facts.get("state") in ("ready", "draining") and RECENT in facts
    return [text for cell in CELLS.get(facts["kind"], ()) if (text := cell(facts))] if there else []
