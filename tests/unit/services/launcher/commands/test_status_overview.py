"""What people read of a fleet: each line and each problem to the character, at any width."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from services.launcher.commands import status
from services.launcher.commands.status import Fleet

M = "smollm2"
RECENT = {
    "gateway": {"requests": 12}, "tokenizer": {"requests": 12, "prompt_tokens": 51_200},
    "scheduler": {"waiting": 0, "refused_429": 0, "refused_503": 0, "prefilled": 51_200, "generated": 12_345,
                  "prefix_lookups": 1000, "prefix_hits": 450, "preemptions": 3},
    "executor": {"steps": 1900, "failed_steps": 0}, "kv_offload": {"lookups": 8, "hits": 1},
    "detokenizer": {"frames": 9, "tokens": 12_345},
}  # fmt: skip
POOL = {"kv_used_pct": 34.4, "step_p50_ms": 5.24, "slots": 256, "free_slots": 128}
FACTS: dict[str, dict[str, Any]] = {
    "gateway": {"url": "http://127.0.0.1:8000", "health": "ok", "active": 3},
    "tokenizer": {"model": M, "pending": 0},
    "scheduler": {"model": M, "running": 128, "waiting": 64, "executors": {"exec0001": POOL},
                  "detokenizers": ["deto0001"], "kept_out": {}},
    "executor": {"model": M, "backend": "torch", "dtype": "f32", "scheduler": "scheduler.sche0001"},
    "kv_offload": {"tiers": {"l1": {"used_bytes": 1.2e9, "capacity_bytes": 2.147e9},
                             "l2": {"breaker": "none"}}, "l2_url": "", "l2_error": "", "stuck_calls": 0},
    "detokenizer": {"model": M, "requests": 128, "failover": 0},
}  # fmt: skip


def answer(kind: str, actor: str = "", state: str = "ready", **more: Any) -> dict[str, Any]:
    recent = {"seconds": 10.0, **RECENT[kind]} | more.pop("recent", {})
    about = {"kind": kind, "id": actor or f"{kind[:4]}0001", "state": state, "age_s": 750, "wire_errors": 0}
    return copy.deepcopy({**about, "last_10_s": recent, **FACTS[kind], **more})


def fleet(*changed: dict[str, Any], without: str = "") -> Fleet:
    """One service of each kind, some in another way."""
    kinds = {a["kind"] for a in changed} | {without}
    services = [*(answer(kind) for kind in FACTS if kind not in kinds), *changed]
    return Fleet("default", "nats://h:4222", sorted(services, key=lambda a: list(FACTS).index(a["kind"])))


def problems(*changed: dict[str, Any], without: str = "") -> list[str]:
    return list(status.problems(fleet(*changed, without=without)))


def test_drafts_are_shown_where_there_were_any() -> None:
    drafted = {"draft_tokens": 200, "accepted_tokens": 150}
    shown = status.lines(fleet(answer("scheduler", recent=drafted)))
    assert any(line.endswith("3 preempted  drafts kept 75.0 %") for line in shown)


def test_one_line_for_each_service() -> None:
    assert status.lines(fleet()) == [
        "fleet default at nats://h:4222, smollm2: no problems",
        "",
        "gateway.gate      ready  12m  3 open  1.2 requests/s  http://127.0.0.1:8000",
        "tokenizer.toke    ready  12m  0 in work  1.2 requests/s  5,120 tok/s",
        "scheduler.sche    ready  12m  128 running  64 waiting  in 5,120  out 1,234 tok/s  prefix hits 45.0 %"
        "  3 preempted",
        "executor.exec     ready  12m  KV 34 %  step 5.2 ms  128 of 256 slots  torch f32  smollm2",
        "kv_offload.kv_o   ready  12m  L1 1.2 GB of 2.15 GB  no L2  hits 12.5 %",
        "detokenizer.deto  ready  12m  128 in work  1,234 tok/s",
        "",
        status.FOOT,
    ]


@pytest.mark.parametrize("width", [80, 100, 120])
def test_no_line_is_wider_than_the_terminal_and_no_figure_is_cut(width: int) -> None:
    store = answer("kv_offload", wire_errors=1)
    whole, narrow = status.lines(fleet(store)), status.lines(fleet(store), width)
    assert max(map(len, narrow)) <= width
    (scheduler,) = [line for line in narrow if line.startswith("scheduler")]
    assert "128 running  64 waiting  in 5,120  out 1,234 tok/s" in scheduler
    assert any(f"{line}  ".startswith(f"{scheduler}  ") for line in whole)
    assert narrow[2].startswith("  "), "a long problem goes on in the next line"


@pytest.mark.parametrize("width", [20, 40])
def test_a_narrow_headline_keeps_its_verdict(width: int) -> None:
    head, *_ = status.lines(fleet(), width)
    assert head == "fleet default at nats://h:4222, smollm2"[: width - 13] + ": no problems"


def test_services_of_a_kind_stand_in_columns_and_ids_are_as_long_as_it_takes() -> None:
    two = [
        answer("detokenizer", "deto1x"),
        answer("detokenizer", "deto1yz", requests=7, recent={"tokens": 90_000}),
    ]
    scheduler = answer("scheduler", detokenizers=["deto1x", "deto1yz"])
    assert status.lines(fleet(*two, scheduler))[-4:-2] == [
        "detokenizer.deto1x  ready  12m  128 in work  1,234 tok/s",
        "detokenizer.deto1y  ready  12m    7 in work  9,000 tok/s",
    ]


def test_the_model_is_on_each_line_where_there_are_several() -> None:
    other = answer("tokenizer", "t2", model="qwen")
    lines = status.lines(fleet(other, answer("tokenizer")))
    assert lines[0].startswith("fleet default at nats://h:4222, qwen, smollm2: 3 problems")
    assert [line.split()[-1] for line in lines if line.startswith("tokenizer")] == ["qwen", "smollm2"]


def test_a_service_without_facts_and_one_of_another_kind() -> None:
    bare = {"kind": "scheduler", "id": "s", "state": "starting", "last_10_s": {}}
    other = {"kind": "other", "id": "o", "state": "ready", "last_10_s": {}}
    lines = status.lines(Fleet("f", "nats://h", [bare, other]))
    assert (
        lines[1]
        == "! scheduler.s has been starting for 0s: requests wait for it. Its log shows how far it is."
    )
    assert lines[3:5] == ["scheduler.s  starting   0s", "other.o      ready      0s"]


def test_figures_before_the_first_second_and_without_an_engine() -> None:
    idle = answer("scheduler", recent={"prefix_lookups": 0, "prefix_hits": 0, "seconds": 0.0}, executors={})
    sim = answer("executor", backend="sim", dtype="none")
    off = answer("kv_offload", tiers={"l1": {"capacity_bytes": 0}, "l2": {"breaker": "none"}})
    lines = status.lines(fleet(idle, sim, off))
    assert [line[30:] for line in lines if line.startswith(("scheduler", "executor", "kv_offload"))] == [
        "128 running  64 waiting  in -  out - tok/s  prefix hits -  3 preempted", "sim  smollm2", "off",
    ]  # fmt: skip


def test_overview_has_the_size_of_the_kv_cache_and_warns_of_an_unshared_l1() -> None:
    large = answer("executor", kv_bytes=3_221_000_000)
    alone = answer(
        "kv_offload", tiers={"l1": {"capacity_bytes": 0}, "l2": {"breaker": "none"}}, not_shared=True
    )
    lines = status.lines(fleet(large, alone))
    assert [line[30:] for line in lines if line.startswith(("executor", "kv_offload"))] == [
        "KV 34 % of 3.22 GB  step 5.2 ms  128 of 256 slots  torch f32  smollm2",
        "no L1: nothing shares it",
    ]


def test_every_fact_of_a_service_and_what_its_scheduler_counts() -> None:
    found = fleet(answer("executor", wire_errors=2))
    (executor,) = found.find("executor")
    assert status.every_fact(found, executor) == [
        "executor.exec0001",
        "! executor.exec has dropped 2 messages that it could not read (wire errors): is a service of another"
        " version in this fleet? Its log has the details.",
        "  kind                        executor",
        "  id                          exec0001",
        "  state                       ready",
        "  age_s                       750",
        "  wire_errors                 2",
        "  last_10_s.seconds           10.0",
        "  last_10_s.steps             1900",
        "  last_10_s.failed_steps      0",
        "  model                       smollm2",
        "  backend                     torch",
        "  dtype                       f32",
        "  scheduler                   scheduler.sche0001",
        "  scheduler.sche.kv_used_pct  34.4",
        "  scheduler.sche.step_p50_ms  5.24",
        "  scheduler.sche.slots        256",
        "  scheduler.sche.free_slots   128",
    ]


def test_lists_and_empty_facts_are_printed() -> None:
    found = fleet(
        answer("scheduler", detokenizers=["a", "b"], measured={"rejected": {}}, late=None, two=[[1]])
    )
    facts = status.every_fact(found, found.find("sche0001")[0])
    assert {tuple(line.split(maxsplit=1)) for line in facts if line.startswith("  ")} >= {
        ("detokenizers", "a, b"), ("measured.rejected", "{}"), ("late", "null"), ("two", "[[1]]"),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("wanted", "kinds"),
    [
        ("", list(FACTS)),
        ("scheduler", ["scheduler"]),
        ("executor.exec", ["executor"]),
        ("exec0001", ["executor"]),
        ("tokenizer", ["tokenizer"]),
        ("deto", ["detokenizer"]),
        ("gpu", []),
    ],
)
def test_a_service_by_its_kind_its_id_or_how_one_begins(wanted: str, kinds: list[str]) -> None:
    assert [service["kind"] for service in fleet().find(wanted)] == kinds


def open_l2(error: str) -> dict[str, Any]:
    tiers = {"l1": {"used_bytes": 0, "capacity_bytes": 8}, "l2": {"breaker": "open"}}
    return answer("kv_offload", tiers=tiers, l2_url="redis://r", l2_error=error)


def l2_with(corrupt: int = 0, refusal: str = "") -> dict[str, Any]:
    tiers = {"l1": {"used_bytes": 0, "capacity_bytes": 8}, "l2": {"breaker": "closed", "corrupt": corrupt}}
    return answer("kv_offload", tiers=tiers, l2_url="redis://r", l2_error="", l2_refusal=refusal)


FULL = {**POOL, "kv_used_pct": 99.0}
PROBLEMS = [
    (
        answer("executor", state="starting"),
        "executor.exec has been starting for 12m: it loads its model, and requests wait for it. "
        "Its log shows how far it is.",
    ),
    (
        answer("kv_offload", state="starting"),
        "kv_offload.kv_o has been starting for 12m: until it is ready, KV blocks that leave device memory "
        "are computed again. Its log shows how far it is.",
    ),
    (
        answer("gateway", state="draining"),
        "gateway.gate drains: it takes no new requests, and ends after its last one or drain_timeout_s.",
    ),
    (
        answer("gateway", state="failed"),
        "gateway.gate has failed: its log has the reason. `headrace up` starts it again.",
    ),
    (
        answer("scheduler", executors={"exec0001": POOL, "exec0002": POOL}),
        "executor.exec0002 has not answered within 0.5 s, and scheduler.sche counts on it: it is busy, "
        "stopped or cut off. Try again; its log has the reason.",
    ),
    (
        l2_with(refusal="OOM"),
        "kv_offload.kv_o cannot write to its L2 redis://r (OOM): it reads what is there, and what leaves L1 "
        "is computed again. Give it memory or an eviction policy, or make it writable.",
    ),
    (
        answer("scheduler", executors={}),
        "scheduler.sche has no executor yet: it serves nothing until one joins it.",
    ),
    (
        answer("executor", kept_out="its tokens are not those of tokenizer.a"),
        "executor.exec serves nothing: its tokens are not those of tokenizer.a.",
    ),
    (
        answer("scheduler", kept_out={"exec0001": {"why": "other weights"}}),
        "executor.exec serves nothing, scheduler.sche keeps it out: other weights.",
    ),
    (
        answer("scheduler", recent={"waiting": 10}),
        "scheduler.sche has 64 requests waiting, 10 more than 10 s ago: they come faster than its executors "
        "serve them. Add an executor, or send less.",
    ),
    (
        answer("scheduler", recent={"waiting": 10}, executors={"exec0001": {**POOL, "free_slots": 0}}),
        "scheduler.sche has 64 requests waiting, 10 more than 10 s ago: all slots of its executors are in "
        "use. Add an executor, or send less.",
    ),
    (
        answer("scheduler", recent={"waiting": 10}, executors={"exec0001": FULL}),
        "scheduler.sche has 64 requests waiting, 10 more than 10 s ago: the KV cache of its executors is "
        "full. Add an executor, or send less.",
    ),
    (
        answer("scheduler", recent={"refused_429": 2}),
        "scheduler.sche has refused 2 requests with 429 in the last 10 s: its queue is full, or its wait "
        "too long. Add an executor, send less, or raise max_waiting.",
    ),
    (
        answer("scheduler", recent={"refused_503": 1}),
        "scheduler.sche has refused 1 request with 503 in the last 10 s: no executor has come in time.",
    ),
    (
        answer("tokenizer", recent={"refused_503": 2}),
        "tokenizer.toke has refused 2 requests with 503 in the last 10 s: no scheduler has answered, or none "
        "had an executor and a detokenizer.",
    ),
    (
        answer("gateway", health="waiting for: executor"),
        "gateway.gate is not healthy, and /health answers 503: waiting for: executor.",
    ),
    (answer("kv_offload", why_off="no room"), "kv_offload.kv_o is off: no room."),
    (
        open_l2("refused"),
        "kv_offload.kv_o does not reach its L2 redis://r (refused): what leaves L1 is computed again. Start "
        "that server or repair the connection; kv_offload tries it once a second.",
    ),
    (
        l2_with(corrupt=2),
        "kv_offload.kv_o has deleted 2 damaged values from its L2 redis://r since it started, and computes "
        "them again: check that server's memory and disk, and what else writes to it.",
    ),
    (
        answer("kv_offload", stuck_calls=2, l2_url="redis://r"),
        "kv_offload.kv_o waits for 2 calls that do not end: check redis://r.",
    ),
    (
        answer("tokenizer", wire_errors=1_000),
        "tokenizer.toke has dropped 1,000 messages that it could not read (wire errors): is a service of "
        "another version in this fleet? Its log has the details.",
    ),
    (
        answer("executor", recent={"failed_steps": 3}),
        "executor.exec has failed 3 steps in the last 10 s: its log has the reason.",
    ),
    (
        answer("detokenizer", failover=4),
        "detokenizer.deto has 4 requests without a scheduler: start a scheduler.",
    ),
]


@pytest.mark.parametrize(("changed", "words"), PROBLEMS, ids=[words[:60] for _, words in PROBLEMS])
def test_problem_is_printed_in_words(changed: dict[str, Any], words: str) -> None:
    assert problems(changed) == [words]


@pytest.mark.parametrize("kind", ["tokenizer", "scheduler", "executor", "detokenizer"])
def test_a_model_without_a_kind_of_service(kind: str) -> None:
    start = f"Start one: `headrace serve {kind} --model {M}`."
    scheduler = answer("scheduler", executors={}, detokenizers=[])  # what it counts on would only be silent
    changed = () if kind == "scheduler" else (scheduler,)
    assert f"{M} has no {kind}: new requests for it are refused. {start}" in problems(*changed, without=kind)
    assert problems(without="kv_offload") == problems(without="gateway") == []


def test_a_store_that_takes_no_writes_is_a_problem_of_the_keeper() -> None:
    failing = {
        "headrace.store.work": {"for_s": 240.0, "tried_ago_s": 3.0, "why": "no answer"},
        "headrace.store.record": {"for_s": 7.0, "tried_ago_s": 5.0, "why": "no space"},
    }
    keeper = {"kind": "keeper", "id": "keep", "state": "ready", "last_10_s": {}, "unwritten": failing}
    assert list(status.problems(Fleet("f", "nats://h", [keeper]))) == [
        "keeper.keep cannot store durable requests or answers: JetStream has taken no write to "
        "headrace.store.record, headrace.store.work for 4m, the last try was 3s ago (no answer). The disk of "
        "that nats-server may be full: look at its log and at the folder of durable requests."
    ]
    assert not list(status.problems(Fleet("f", "nats://h", [{**keeper, "unwritten": {}, "removed": {}}])))


def test_a_removed_stream_is_a_problem() -> None:
    keeper = {"kind": "keeper", "id": "keep", "state": "ready", "last_10_s": {}, "removed": {"HR_DONE": 65.0}}
    (problem,) = status.problems(Fleet("f", "nats://h", [keeper]))
    assert "keep found stream HR_DONE removed, " in problem
    assert "and made it again: what it held is gone" in problem
    tokenizer = {**keeper, "kind": "tokenizer", "id": "tok", "removed": {"HR_ALIASES": 5.0}}
    problems = [*status.problems(Fleet("f", "nats://h", [tokenizer]))]
    assert any(
        "tok found stream HR_ALIASES removed, 5s ago, and made it again: it has all" in p for p in problems
    )


def test_receiver_whose_events_were_dropped_is_a_problem_of_the_keeper() -> None:
    dropped = {"https://a.example": 1_200}
    keeper = {"kind": "keeper", "id": "keep", "state": "ready", "last_10_s": {}, "webhooks_dropped": dropped}
    assert list(status.problems(Fleet("f", "nats://h", [keeper]))) == [
        "keeper.keep has dropped 1,200 events for https://a.example, the oldest of tenants with more than "
        "their share: it takes none, or too few of them. Look at that receiver."
    ]


def test_a_copy_of_the_work_queue_is_a_problem_of_the_keeper() -> None:
    keeper = {"kind": "keeper", "id": "keep", "state": "ready", "last_10_s": {}, "taken_by": "stream BACKUP"}
    assert list(status.problems(Fleet("f", "nats://h", [keeper]))) == [
        "keeper.keep refuses new durable requests: stream BACKUP takes them out of their stream. Delete "
        "it, and back up the folder of the nats-server instead."
    ]


def test_a_service_that_a_scheduler_counts_on_is_not_missed_too() -> None:
    (words,) = problems(without="executor")
    assert words.startswith("executor.exec0001 has not answered within 0.5 s")


def test_requests_without_an_executor_are_a_problem() -> None:
    queue = answer("scheduler", recent={"waiting": 10}, executors={})
    words = problems(queue, without="executor")
    assert [w.partition(": ")[2].partition(". ")[0] for w in words] == [
        "new requests for it are refused", "it has no executor",
    ]  # fmt: skip


def test_a_service_that_starts_is_not_missed_too() -> None:
    starting = {"kind": "executor", "id": "exec0001", "state": "starting", "age_s": 3, "last_10_s": {}}
    scheduler = answer("scheduler", executors={})
    assert [words.partition(":")[0] for words in problems(starting, scheduler)] == [
        "executor.exec has been starting for 3s"
    ]


def test_a_queue_that_grew_and_is_empty_again_is_none() -> None:
    assert problems(answer("scheduler", waiting=0, recent={"waiting": 10})) == []
    assert problems(answer("scheduler", recent={"waiting": 9})) == []


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (59, "59s"), (60, "1m"), (3599, "59m"), (7200, "2h"), (90_000, "1d"), (1e7, "115d")],
)
def test_ages_are_printed_with_units(seconds: float, text: str) -> None:
    assert status.age(seconds) == text
