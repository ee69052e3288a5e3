"""Whether this host may join a fleet: by the heartbeats there, before anything starts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from services.launcher import joining
from services.launcher.joining import checked_fleet, is_fleet_answering
from shared.actor.membership import MIXED, Peers
from shared.config import Settings
from shared.errors import SetupError
from shared.messages import Heartbeat

URL = "nats://hub:4222"
SCHEDULER = Heartbeat(kind="scheduler", actor="s", host_id="hub", state="ready", model="m", model_digest="aa")
EXECUTOR = Heartbeat(
    kind="executor", actor="e", host_id="hub", state="ready", model="m", load=(("block_tokens", 16),),
    scheduler="s",
)  # fmt: skip
TIER = Heartbeat(kind="kv_offload", actor="k", host_id="hub", state="ready", arena="a1", tiers=("l1", "l2"))
HERE = Settings(host_id="here")


def fleet(*beats: Heartbeat) -> Peers:
    peers = Peers()
    for beat in beats:
        peers.update(1, beat, 0)
    return peers


def refusal(peers: Peers, settings: Settings = HERE, *models: str) -> str:
    with pytest.raises(SetupError) as refused:
        checked_fleet(peers, settings, models or ["m"], URL)
    return refused.value.message


def test_host_joins_and_waits_for_the_welcome_of_its_own_executors() -> None:
    peers = fleet(SCHEDULER, EXECUTOR)
    assert is_fleet_answering(peers, ["m"])
    joined = checked_fleet(peers, HERE, ["m"], URL)
    assert joined.digests == {"m": "aa"}
    mine = replace(EXECUTOR, actor="mine", host_id="here", scheduler="")
    for beat, welcomed in (
        (mine, 0),
        (replace(mine, scheduler="s"), 1),
        (replace(mine, state="draining"), 0),
    ):
        peers.update(1, beat, 0)
        assert joined.welcomed(peers, "m", "here") == welcomed
    assert joined.welcomed(peers, "m", "hub") == 0, "it was there before"


def test_host_waits_for_the_executors_that_the_scheduler_has() -> None:
    assert not is_fleet_answering(fleet(SCHEDULER), ["m"]), "their blocks are not known"
    assert is_fleet_answering(fleet(replace(SCHEDULER, model_digest="")), ["m"]), "it has none"


def test_a_fleet_that_accepts_all_executors_names_no_digest() -> None:
    mixed = replace(SCHEDULER, load=((MIXED, 1),))
    assert checked_fleet(fleet(mixed, EXECUTOR), HERE, ["m"], URL).digests == {"m": ""}


def test_host_without_a_fleet_has_nothing_to_join() -> None:
    assert not is_fleet_answering(fleet(), ["m"])
    assert refusal(fleet()).startswith(f"no service of fleet 'default' answers at {URL} within 3 s")


def test_the_models_of_the_fleet_are_named() -> None:
    peers = fleet(SCHEDULER, replace(SCHEDULER, actor="s2", model="n"))
    assert not is_fleet_answering(peers, ["m", "x"])
    assert refusal(peers, HERE, "m", "x").startswith("fleet 'default' serves m, n, not x: ")
    assert "has no scheduler yet, not m" in refusal(fleet(TIER))


def test_blocks_must_have_the_size_of_the_fleet() -> None:
    other = Settings(host_id="here", block_tokens=32)
    assert "have 16 tokens in this fleet, and 32 here" in refusal(fleet(SCHEDULER, EXECUTOR), other)
    assert checked_fleet(fleet(SCHEDULER), other, ["m"], URL), "no executor is there"


def test_two_machines_have_two_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "SHM", tmp_path)
    peers, hub = fleet(SCHEDULER, TIER), Settings(host_id="hub")
    assert "another machine of the fleet is called 'hub', too" in refusal(peers, hub)
    (tmp_path / TIER.arena).touch()
    assert checked_fleet(peers, hub, ["m"], URL), "the same machine"


@pytest.mark.parametrize(("l2", "warned"), [("", True), ("redis://r", False)])
def test_host_without_the_l2_of_the_others_gets_a_warning(
    capsys: pytest.CaptureFixture[str], l2: str, warned: bool
) -> None:
    checked_fleet(fleet(SCHEDULER, TIER), Settings(host_id="here", l2=l2), ["m"], URL)
    assert ("share KV blocks in an L2" in capsys.readouterr().out) == warned
