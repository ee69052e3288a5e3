"""The cases: each does something to a running fleet, and undoes it."""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from loadtest import faults
from loadtest.chaos.cells import KINDS
from loadtest.fleet import MODEL
from loadtest.host_faults import place as places
from loadtest.host_faults.place import LEAST_BYTES, MIB, SHM, Memory, Place

Facts = dict[str, Any]
Fault = Callable[[Place], Awaitable[Facts]]

LASTS_S = 10.0  # of a fault that is undone
MEETS_S = 30.0  # for a process to meet its limit
SERVICES = (*KINDS, "keeper", "nats-server")


@dataclass(frozen=True, slots=True)
class Case:
    """A fault of the host. `victims`: kinds whose connections it ends by its nature. `refuses`: requests may
    be refused meanwhile, with a text that has one of `causes`. `logged`: a text that the log has then.
    `within_s`: after its end a request is answered."""

    name: str
    fault: Fault
    victims: tuple[str, ...] = ()
    refuses: bool = False
    causes: tuple[str, ...] = ()
    logged: str = ""
    within_s: float = 120.0
    up: tuple[str, ...] = ()  # flags
    executors: int = 1
    given: str = "file"  # the model: file, link, or on a disk of its own: disk
    restarts: bool = False  # the fault needs another `headrace up`


# ---- memory -------------------------------------------------------------------------------------


async def out_of_memory(kind: str, place: Place) -> Facts:
    """A process meets the limit of a cgroup in the middle of its work: the kernel kills it."""
    (pid, *_), group = place.pids(kind), Memory(kind)
    try:
        group.admit(pid)
        size, until = 2 * MIB, time.monotonic() + MEETS_S
        while not group.kills and time.monotonic() < until:
            group.limit(size)
            await asyncio.sleep(0.5)
            size = max(size // 2, LEAST_BYTES)
        by = f"{group.version}, oom_kill {group.kills}"
        if not group.kills:  # it takes no memory at all in its work
            faults.kill(pid)
            by += ", SIGKILL as by the kernel: it had met no limit"
        return {"by": by}
    finally:
        group.end()


async def too_little_to_start(place: Place) -> Facts:
    """The executor dies, and what starts in its place gets too little memory, until the limit is raised."""
    group = Memory("forks")
    try:
        for pid in place.pids("forks"):
            group.admit(pid)
        group.limit(64 * MIB)
        faults.kill(place.pids("executor")[0])
        await asyncio.sleep(LASTS_S)
        return {"by": f"{group.version}, oom_kill {group.kills}"}
    finally:
        group.end()


async def no_address_space(kind: str, place: Place) -> Facts:
    """Allocations fail instead: the limit of a process's address space (RLIMIT_AS)."""
    pid = place.pids(kind)[0]
    places.little_address_space(pid, 64 * 1024)
    await asyncio.sleep(LASTS_S)
    alive = bool(places.words(pid))
    if alive:
        places.little_address_space(pid, 1 << 40)
    return {"by": "RLIMIT_AS", "lived": alive}


async def full_shm(place: Place, victim: str = "") -> Facts:
    """/dev/shm has no room, also while kv_offload starts again."""
    files = [path.name for path in SHM.iterdir()]
    filler = places.fill(SHM)
    try:
        if victim:
            faults.kill(place.pids(victim)[0])
        await asyncio.sleep(LASTS_S)
    finally:
        filler.unlink()
    return {"by": "a file on a tmpfs", "in /dev/shm": files}


async def no_descriptors(kind: str, place: Place, victim: str = "") -> Facts:
    """A process may open no further file."""
    with places.no_descriptors(place.pids(kind)):
        if victim:
            faults.kill(place.pids(victim)[0])
        await asyncio.sleep(LASTS_S)
    return {"by": "RLIMIT_NOFILE"}


# ---- the folder of state ------------------------------------------------------------------------


async def full_disk(place: Place) -> Facts:
    """The disk of the folder of state has no room."""
    filler = places.fill(place.state)
    try:
        await asyncio.sleep(2 * LASTS_S)
    finally:
        filler.unlink()
    return {"by": "a file on ext4"}


async def read_only(place: Place) -> Facts:
    """The kernel makes the disk of the folder of state read-only. Only another mount ends it. What was not on
    the disk yet is lost, as with the power: it is put there before."""
    places.run("sync", "-f", str(place.state))
    places.break_disk(places.device_of(place.state))
    await asyncio.sleep(2 * LASTS_S)
    return {"by": "errors=remount-ro of ext4"}


# ---- the model's files --------------------------------------------------------------------------


def _of(place: Place, name: str) -> Path:
    return place.folder / f"{name}.gguf"


def _executor_dies(place: Place) -> None:
    for pid in place.pids("executor"):
        faults.kill(pid)


async def touched(place: Place) -> Facts:
    """Its time changes alone, as after `touch`."""
    os.utime(place.served)
    await asyncio.sleep(LASTS_S)
    return {}


async def mode_changed(place: Place) -> Facts:
    """Its mode and its links change: nothing that concerns a reader."""
    place.served.chmod(0o640)
    os.link(place.served, place.models / "second")
    await asyncio.sleep(LASTS_S)
    return {}


async def copied_over(name: str, place: Place) -> Facts:
    """`cp`: emptied, then written again."""
    await asyncio.to_thread(shutil.copyfile, _of(place, name), place.served)
    await asyncio.sleep(LASTS_S)
    return {}


async def written_in_place(name: str, place: Place) -> Facts:
    """Its bytes change under its readers, piece by piece over seconds, and its size never does."""
    data = _of(place, name).read_bytes()
    with place.served.open("r+b") as file:
        for at in range(0, len(data), 4 * MIB):
            file.seek(at)
            file.write(data[at : at + 4 * MIB])
            file.flush()
            await asyncio.sleep(0.1)
    await asyncio.sleep(LASTS_S)
    return {}


async def renamed_over(name: str, place: Place, *, dies: bool) -> Facts:
    """Another file takes its name, as a download does."""
    draft = place.models / "draft"
    shutil.copyfile(_of(place, name), draft)
    draft.replace(place.served)
    await asyncio.sleep(LASTS_S / 2)
    if dies:
        _executor_dies(place)
    await asyncio.sleep(LASTS_S)
    return {}


async def foreign_vocabulary(place: Place) -> Facts:
    """A model of another vocabulary takes its name, and an executor starts with it; then it is put back."""
    await renamed_over("foreign", place, dies=True)
    await asyncio.sleep(2 * LASTS_S)
    await renamed_over("first", place, dies=True)
    return {}


async def cut_off(left_bytes: int, place: Place) -> Facts:
    """It loses its end, and gets it back."""
    os.truncate(place.served, left_bytes)
    await asyncio.sleep(LASTS_S)
    shutil.copyfile(_of(place, "first"), place.served)
    return {}


async def gone(place: Place, *, dies: bool) -> Facts:
    """Its name is gone, and comes back."""
    aside = place.models / "aside"
    place.served.rename(aside)
    if dies:
        _executor_dies(place)
    await asyncio.sleep(LASTS_S)
    aside.rename(place.served)
    return {}


async def linked_to(target: str, place: Place) -> Facts:
    """The link that is served points elsewhere while an executor starts: to nothing, itself, or a folder;
    then to the model again."""
    before = os.readlink(place.served)
    _link(place.served, target)
    _executor_dies(place)
    await asyncio.sleep(LASTS_S)
    _link(place.served, before)
    return {}


async def linked_to_other(place: Place) -> Facts:
    """The link points to another model; later the executor dies."""
    _link(place.served, str(_of(place, "other")))
    await asyncio.sleep(LASTS_S)
    _executor_dies(place)
    await asyncio.sleep(LASTS_S)
    return {}


def _link(path: Path, target: str) -> None:
    draft = path.with_suffix(".draft")
    draft.symlink_to(target)
    draft.replace(path)


async def slow_disk(place: Place, *, dies: bool) -> Facts:
    """Each read of the model's disk waits as for a network, and the page cache has nothing of the file."""
    device = places.device_of(place.models)
    pids = [*place.pids("executor"), *place.pids("forks")]
    with places.slow_reads(device, pids, 50):
        places.drop_pages(place.served)
        if dies:
            _executor_dies(place)
        await asyncio.sleep(2 * LASTS_S)
    return {"by": "blkio.throttle.read_iops_device, 50 a second, of a loop device"}


_changed = partial(Case, refuses=True, causes=("model", "executor"))
_others = partial(renamed_over, "other")
_links = partial(_changed, given="link")
CASES = (
    *(Case(f"memory: {kind} meets its cgroup", partial(out_of_memory, kind), (kind,)) for kind in SERVICES),
    _changed(
        "memory: too little to start an executor",
        too_little_to_start,
        logged="for memory",
    ),
    *(
        Case(f"memory: {kind} cannot allocate", partial(no_address_space, kind), (kind,))
        for kind in ("gateway", "tokenizer", "scheduler", "executor", "detokenizer")
    ),
    Case("shm: full", full_shm, executors=2),
    Case("shm: full, kv_offload dies", partial(full_shm, victim="kv_offload"), executors=2),
    Case(
        "shm: full, kv_offload with a size dies",
        partial(full_shm, victim="kv_offload"),
        up=("--l1", "64"),
        logged="no KV tiers",
    ),
    *(Case(f"descriptors: {kind} has none", partial(no_descriptors, kind)) for kind in SERVICES),
    Case(
        "descriptors: up has none, a detokenizer dies",
        partial(no_descriptors, "up", victim="detokenizer"),
        logged="did not start",
    ),
    Case("state: full", full_disk),
    Case("state: read-only", read_only, restarts=True),
    Case("model: touched", touched),
    Case("model: mode and links change", mode_changed),
    _changed("model: copied over by itself", partial(copied_over, "first")),
    _changed("model: copied over by another", partial(copied_over, "other")),
    _changed("model: written in place", partial(written_in_place, "other")),
    Case("model: another takes its name", partial(_others, dies=False)),
    _changed("model: another takes its name, the executor dies", partial(_others, dies=True)),
    _changed(
        "model: one of another vocabulary takes its name, the executor dies",
        foreign_vocabulary,
        logged="its tokens are not those of",
    ),
    _changed("model: cut off after its embedding", partial(cut_off, 48 * MIB)),
    _changed("model: cut off within its embedding", partial(cut_off, 4 * MIB)),
    Case("model: gone", partial(gone, dies=False)),
    _changed("model: gone, the executor dies", partial(gone, dies=True)),
    _links("link: to nothing, the executor dies", partial(linked_to, "nothing.gguf")),
    _links("link: to itself, the executor dies", partial(linked_to, f"{MODEL}.gguf")),
    _links("link: to a folder, the executor dies", partial(linked_to, "/tmp")),
    _links("link: to another model", linked_to_other),
    Case("slow disk: pages of the model", partial(slow_disk, dies=False), given="disk"),
    _changed("slow disk: an executor starts", partial(slow_disk, dies=True), given="disk", within_s=240),
)
