"""`headrace kv`: its words for each state of the tiers, to the character, from the status of a real core."""

from __future__ import annotations

import json
from typing import Any

import pytest

from loadtest.simulator.kv_virtual import VirtualKv, VirtualL2
from services.kv_offload import actor
from services.kv_offload.actor import build
from services.kv_offload.backends.arena import Arena
from services.launcher.commands import kv
from services.launcher.commands.status import Fleet, every_fact, size
from services.launcher.session import Target
from services.scheduler.reports import status as scheduler_status
from services.scheduler.state.state import Limits, State
from shared.config import Settings
from shared.messages import KvCommit, KvLookup, KvPrefetch, KvRelease, KvReserve, ints
from shared.telemetry.counters import MetricPoint

SCHEDULER, MIB = "scheduler.s", 1 << 20
KEYS = [bytes([i]) * 32 for i in range(8)]


def joined(*numbers: int) -> bytes:
    return b"".join(KEYS[i] for i in numbers)


def used(l2: VirtualL2 | None = None) -> VirtualKv:
    """Eight blocks of room: three stored, one reserved, two of the three being read."""
    tiers = VirtualKv(Arena(8 * MIB), l2)
    tiers.arrive(SCHEDULER, 1, KvReserve(
        job=1, owner="executor.e", keys=joined(0, 1, 2), value_bytes=MIB, lease_us=10**6, fingerprint="f",
    ), 0)  # fmt: skip
    tiers.arrive(SCHEDULER, 1, KvCommit(job=1, written=ints([1, 1, 1])), 10)
    tiers.arrive(SCHEDULER, 1, KvReserve(
        job=2, owner="executor.e", keys=joined(3), value_bytes=MIB, lease_us=10**6, fingerprint="f",
    ), 20)  # fmt: skip
    tiers.arrive(SCHEDULER, 1, KvLookup(job=3, keys=joined(0, 1, 4), fingerprint="f"), 30)
    tiers.tick(10**5)
    tiers.arrive(SCHEDULER, 1, KvPrefetch(
        job=4, owner="executor.e", keys=joined(0, 1), deadline_us=1000, lease_us=10**6, fingerprint="f",
    ), 10**5 + 1)  # fmt: skip
    return tiers


def store(tiers: VirtualKv, **more: Any) -> dict[str, Any]:
    about = {"kind": "kv_offload", "id": "k", "state": "ready", "epoch": 1, "fleet": "f"}
    return {**about, **actor.status(tiers.core.state), **more}


def test_kv_command_prints_the_contents_of_a_tier() -> None:
    assert kv.draw([store(used())], []) == [
        "kv_offload.k  ready",
        "  L1     4.19 MB of 8.39 MB (50.0 %) in 3 blocks; 0 evicted",
        "  leases 1 reads of 2.1 MB, 1 writes of 1.05 MB",
        "  L2     none: what leaves L1 is gone. --l2 redis://host:port or file:///folder adds one",
        "  hits   66.7 % of 3 blocks looked up: 2 in L1, 0 in L2",
        "  moved  3 blocks stored (0 did not fit), 2 leased to be read, 0 brought from L2",
        "  late   0 loads, 0 commits, 0 leases",
    ]


def test_an_expired_reservation_is_in_quarantine() -> None:
    tiers = used()
    tiers.tick(2 * 10**6)
    lines = kv.draw([store(tiers)], [])
    assert lines[2] == "  leases 0 reads of 0 B, 0 writes of 0 B; 1.05 MB in quarantine"
    assert lines[-1] == "  late   0 loads, 0 commits, 2 leases"
    tiers.arrive(SCHEDULER, 1, KvRelease(jobs=ints([2])), 2 * 10**6)
    assert kv.draw([store(tiers)], [])[2] == "  leases 0 reads of 0 B, 0 writes of 0 B"


def test_a_remote_tier_and_its_breaker() -> None:
    tiers = used(VirtualL2())
    state = tiers.core.state
    lines = kv.draw([store(tiers, l2_url="redis://h:1")], [])
    known, copies = len(state.l2.presence), len(state.l2.calls)
    assert lines[3] == f"  L2     redis://h:1 answers; {known} blocks known there; {copies} calls out, 0 wait"
    assert lines[4].endswith("; 0 errors, 0 timeouts, 0 refused, 0 damaged values, breaker opened 0 times")
    for at in range(3):
        state.l2.breaker.on_failed(at)
    lines = kv.draw([store(tiers)], [])
    assert lines[3].startswith(
        "  L2     remote does not answer: breaker open, no calls but a probe about once a second; "
    )
    assert lines[4].endswith("breaker opened 1 times")
    assert actor.tiers(state) == ("l1",)


def test_peers_are_shown_once_there_are_some() -> None:
    peers = {"readable": 0, "open": 0, "hits": 1, "gets": 1, "bytes": 2**20, "absent": 4, "corrupt": 5}
    peers |= {"failures": 6, "leased": 3}
    alone = kv.draw([store(used(), peers=peers)], [])
    assert not [line for line in alone if line.startswith("  peers")]
    lines = kv.draw([store(used(), peers={**peers, "readable": 2}, peer_error="it hangs")], [])
    assert lines[4:7] == [
        "  peers  L1 of 2 other hosts can be read; 1 blocks (1.05 MB) came from there, 3 were leased to them;"
        " 4 were gone, 5 damaged, 6 failures",
        "         it hangs",
        "  hits   100.0 % of 3 blocks looked up: 2 in L1, 0 in L2, 1 in L1 of other hosts",
    ]


def test_words_where_there_is_no_tier() -> None:
    assert kv.draw([], []) == list(kv.NO_STORE)
    off = store(VirtualKv(Arena(0)))
    assert kv.draw([off], []) == [f"kv_offload.k  ready  {kv.OFF}"]
    assert kv.draw([{**off, "not_shared": True}], []) == [f"kv_offload.k  ready  {kv.NOT_SHARED}"]
    assert kv.draw([{**off, "why_off": "no room"}], []) == ["kv_offload.k  ready  off: no room"]
    assert kv.draw([{**off, "state": "starting"}], [{"id": "s", "state": "starting"}]) == [
        "kv_offload.k  starting",
        "scheduler.s  starting",
    ]


def test_kv_command_prints_the_schedulers_use_of_a_tier() -> None:
    link = {"up_bytes_per_s": 8.1e9, "up_moved_bytes": 2e9, "up_pending": 1, "host": "h"}
    link |= {"down_bytes_per_s": 0, "down_moved_bytes": 0, "down_pending": 0}
    answer = {"id": "s", "state": "ready", **scheduler_status.status(State(Limits()))}
    answer["tiers"] = {"e1": link}
    measured = answer["measured"]
    assert isinstance(measured, dict)
    measured["tiers"] |= {"loads": 1200, "restored_tokens": 20_000, "tier_backoffs": 2, "restore_p50_ms": 5.0}
    assert kv.draw([], [answer])[2:] == [
        "scheduler.s  ready  0 lookups and 0 copies open; backed off 2 times from a tier that did not answer",
        "  restored  1,200 times, 20,000 tokens: 0 blocks of L1, 0 of L2;"
        " 0 times computing was cheaper, 0 failed",
        "  stored    0 blocks, 0 before a preemption needed it; 0 stores failed",
        "  dropped   0 blocks, 0 of preempted sequences",
        "  restore   p50 5 ms, p99 0 ms; prediction off by 0 % (p50)",
        "  recompute prediction off by 0 % (p50)",
        "  executor e1 on h: up 8.1 GB/s, 2 GB moved, 1 pending; down not measured, 0 B moved, 0 pending",
    ]
    followed = kv.draw([], [{**answer, "sessions": 1_200}])
    assert followed[-2] == "  sessions  1,200 followed: see `headrace sessions`"


async def test_json_has_everything(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = [store(used()), {"kind": "scheduler", "id": "s", "state": "ready"}, {"kind": "tokenizer"}]

    async def services(target: Target, fleet: str) -> list[dict[str, Any]]:
        return answers

    monkeypatch.setattr(kv, "services_of", services)
    await kv.kv(Target("nats://h", "m"), "f", as_json=True)
    body = json.loads(capsys.readouterr().out)
    assert (body["fleet"], body["kv_offloads"]) == ("f", [answers[0]])
    assert body["schedulers"] == [{"id": "s", "state": "ready", "tiers": None, "measured": {}}]
    await kv.kv(Target("nats://h", "m"), "f", as_json=False)
    assert capsys.readouterr().out.splitlines()[0] == "kv_offload.k  ready"


def test_status_and_metrics_agree() -> None:
    state = used().core.state
    found = {
        (r.name, r.attributes): r.value for r in actor.metric_points(state) if isinstance(r, MetricPoint)
    }
    kind = "headrace.kv_offload."
    assert found[f"{kind}stored_keys", ()] == 3
    assert found[f"{kind}hit_keys", (("tier", "l1"),)] == 2
    assert found[f"{kind}l1.size", (("state", "used"),)] == 4 * MIB
    assert found[f"{kind}l1.size", (("state", "written"),)] == MIB
    assert not any(name.startswith(f"{kind}l2.breaker") for name, _ in found)
    assert dict(actor.load(state)) == {"l1_bytes": 8 * MIB, "l1_used": 4 * MIB, "leased": 3 * MIB, "hits": 2}
    answer = store(used())
    facts = {line.split()[0]: line.split()[-1] for line in every_fact(Fleet("f", "", [answer]), answer)}
    assert (facts["tiers.l1.used_bytes"], facts["keys.moved.stored"]) == (str(4 * MIB), "3")


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (2.5e13, "25 TB"), (5e15, "5e+03 TB")]
)
def test_sizes_are_printed_with_units(count: float, text: str) -> None:
    assert size(count) == text


def test_a_password_is_not_shown() -> None:
    tier_status = build(Settings(l1="off", l2="redis://user:secret@h:6380/0")).status()
    assert tier_status["l2_url"] == "redis://h:6380/0"
    assert build(Settings(l1="off")).status()["l2_url"] == ""
