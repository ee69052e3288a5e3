"""`headrace up --join URL` adds the executors and the kv_offload of this machine to a fleet of other hosts.

Before a service starts, the heartbeats of the fleet show whether the fleet can use them: `checked_fleet`
raises SetupError with the reason if not. The executors compare the digest of weights, dtype, KV format and
deterministic mode with that of the fleet (`Joined.digests`) before they load the model.

`placed` divides the GPUs of this machine among the executors of `up`, with `--join` and without: an executor
takes the first GPUs that it sees, as many as it has ranks, so several executors that see all GPUs would share
the first ones and leave the others idle.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path

from services.launcher.console import print_line
from services.launcher.supervisor import ServiceSpec
from shared.actor.membership import MIXED, Peers
from shared.config import Settings
from shared.errors import SetupError
from shared.messages import Heartbeat

JOINING_KINDS = ("executor", "kv_offload")  # the services of a host that joins
FLEET_ANSWER_S = 3.0  # a fleet answers at once; this covers slow links, and schedulers that start again
SHM = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class Joined:
    """The fleet before this host has joined. `digests`: of the executors that serve each model; empty if none
    serves it, or if the fleet accepts all."""

    digests: Mapping[str, str]
    others: frozenset[str]  # its actors, kind.id

    def welcomed(self, peers: Peers, model: str, host_id: str) -> int:
        """The number of executors of this host that a scheduler has welcomed."""
        ready = [f"executor.{actor}" for actor in peers.ready("executor", model)]
        beats = [_beat(peers, source) for source in ready if source not in self.others]
        return sum(beat.host_id == host_id and bool(beat.scheduler) for beat in beats)


def is_fleet_answering(peers: Peers, models: Sequence[str]) -> bool:
    """True once a scheduler of each model has sent a heartbeat, and an executor if the scheduler has one."""
    is_served = {*models} <= {*peers.models("scheduler")}
    return is_served and all(peers.ready("executor", each) for each in models if peers.model_digest(each))


def checked_fleet(peers: Peers, settings: Settings, models: Sequence[str], url: str) -> Joined:
    """The fleet that this host may join, from the heartbeats of its actors. `url` without password. Raises
    SetupError if no fleet answers, or if it has other models or another block size, or another machine with
    this name."""
    sources = peers.sources()
    if not sources:
        raise SetupError(
            f"no service of fleet {settings.fleet!r} answers at {url} within {FLEET_ANSWER_S:g} s: does "
            "`headrace up` or `headrace serve` run there with the same --fleet?"
        )
    served = peers.models("scheduler")
    for model in models:
        if model not in served:
            has = f"serves {', '.join(served)}" if served else "has no scheduler yet"
            raise SetupError(f"fleet {settings.fleet!r} {has}, not {model}: choose --model or --model-name")
        _check_blocks(peers, model, settings.block_tokens)
    beats = [_beat(peers, source) for source in sources]
    _check_name(beats, settings.host_id)
    if not settings.l2 and any("l2" in beat.tiers for beat in beats):
        print_line("the other hosts share KV blocks in an L2; this host has no L2: see --l2")
    return Joined({model: _digest(peers, model) for model in models}, frozenset(sources))


def _check_blocks(peers: Peers, model: str, block_tokens: int) -> None:
    theirs = peers.max_load("executor", "block_tokens", model)
    if theirs not in (0, block_tokens):  # 0: no executor, or one of an older version
        raise SetupError(
            f"the KV blocks of {model} have {theirs} tokens in this fleet, and {block_tokens} here: "
            f"start with --block-tokens {theirs}"
        )


def _check_name(beats: Sequence[Heartbeat], host_id: str) -> None:
    """Raise SetupError if another machine has the name of this one: its executors would be sent to the L1 of
    this one, which they cannot map. On the same machine the segment of L1 is in /dev/shm."""
    for beat in beats:
        if beat.host_id == host_id and beat.arena and not (SHM / beat.arena).exists():
            raise SetupError(
                f"another machine of the fleet is called {host_id!r}, too: give this one a name of its own "
                "with --host-id"
            )


def _digest(peers: Peers, model: str) -> str:
    return "" if peers.max_load("scheduler", MIXED, model) else peers.model_digest(model)


def _beat(peers: Peers, source: str) -> Heartbeat:
    peer = peers.get(source)
    assert peer is not None, source
    return peer.heartbeat


VISIBLE = "CUDA_VISIBLE_DEVICES"
_GPU = re.compile(r"\d+$|GPU-|MIG-")


def seen(environment: Mapping[str, str], devices: Path = Path("/dev")) -> list[str]:
    """The GPUs that a process with this environment sees, as CUDA_VISIBLE_DEVICES names them. CUDA reads no
    further than the first name that none can have, such as -1."""
    if (named := environment.get(VISIBLE)) is not None:
        return list(takewhile(_GPU.match, (name.strip() for name in named.split(","))))
    files = [each for each in devices.glob("nvidia*") if each.name.removeprefix("nvidia").isdecimal()]
    return [str(index) for index in range(len(files))]


def placed(specs: Sequence[ServiceSpec], ranks: int, gpus: Sequence[str]) -> list[ServiceSpec]:
    """The services; of several executors each one sees `ranks` of these GPUs. Executors for which no GPUs are
    left share those of the first ones."""
    groups = len(gpus) // ranks
    executors = [spec.name for spec in specs if spec.kind == "executor"]
    if groups < 2 or len(executors) < 2:
        return list(specs)
    firsts = {name: at % groups * ranks for at, name in enumerate(executors)}
    return [
        replace(spec, env={**spec.env, VISIBLE: ",".join(gpus[first : first + ranks])})
        if (first := firsts.get(spec.name)) is not None
        else spec
        for spec in specs
    ]
