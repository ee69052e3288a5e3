"""What a case may touch: a fleet with folders of its own, on disks of its own, and limits of its processes.

Everything that is mounted is in a mount namespace of this program (`enter`): it ends with the program, and
no other process sees it. A limit of memory is a cgroup of version 1 or 2, made for one case.
"""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from loadtest import faults
from loadtest.chaos.cells import Target
from loadtest.fleet import MODEL
from services.executor.quantised.gguf import GgufTensors
from shared.config import load
from shared.vocab.files import resolve

INSIDE = "HEADRACE_HOST_FAULTS_INSIDE"  # set once this program has its own mount namespace
CGROUP_1, CGROUP_2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
BLKIO = Path("/sys/fs/cgroup/blkio")
SHM = Path("/dev/shm")
LEAST_BYTES = 128 * 1024  # of a cgroup: below it the kernel cannot even kill
MIB = 1 << 20
EMBEDDING = "token_embd.weight"
SWAPPED = ("blk.3.ffn_down.weight", "blk.4.ffn_down.weight")  # of one shape and type


def enter() -> None:
    """Start this program again in a mount namespace of its own. Needs root. Raises SystemExit."""
    if os.environ.get(INSIDE):
        return
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        raise SystemExit(
            "mounts, cgroups and limits of other processes need root, and `unshare` of util-linux"
        )
    os.environ[INSIDE] = "1"
    argv = ["unshare", "--mount", "--propagation", "private", *sys.orig_argv]
    os.execvp(argv[0], argv)


def run(*argv: str) -> str:
    """What a command prints. Raises CalledProcessError."""
    return subprocess.run(argv, check=True, capture_output=True, text=True).stdout.strip()


@dataclass(slots=True)
class Place:
    """The folders of a case, and its fleet once it runs."""

    folder: Path
    log: Path
    fleet: Target | None = None

    @property
    def models(self) -> Path:
        return self.folder / "models"

    @property
    def served(self) -> Path:
        """What the fleet is given as its model: a file, or a link."""
        return self.models / f"{MODEL}.gguf"

    @property
    def state(self) -> Path:
        """The folder of durable requests."""
        return self.folder / "state"

    @property
    def up(self) -> int:
        assert self.fleet is not None, "it runs"
        return self.fleet.pid

    def pids(self, kind: str) -> list[int]:
        """The processes of a kind, oldest first; `up` is the launcher, `forks` its fork server."""
        if kind == "up":
            return [self.up]
        if kind == "forks":
            return [pid for pid in faults.children(self.up) if "fork_server" in " ".join(words(pid))]
        return faults.pids_of(self.up, kind)

    def lines_with(self, text: str) -> list[str]:
        """The lines of the services' log with this text."""
        return [line for line in self.log.read_text(errors="replace").splitlines() if text in line]


def words(pid: int) -> list[str]:
    """The command line of a process; empty if it has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    return []


# ---- disks --------------------------------------------------------------------------------------


@contextlib.contextmanager
def disk(image: Path, at: Path, size_mib: int) -> Iterator[str]:
    """A file system of its own at a folder, ext4 on a loop device, whose name it yields. An error makes it
    read-only, as most distributions mount it."""
    with image.open("wb") as file:
        file.truncate(size_mib * MIB)
    run("mkfs.ext4", "-q", "-O", "^has_journal", "-m", "0", str(image))
    at.mkdir(parents=True, exist_ok=True)
    mount(image, at)
    try:
        yield device_of(at)
    finally:
        with contextlib.suppress(subprocess.CalledProcessError):
            run("umount", "-l", str(at))
        image.unlink()


def mount(image: Path, at: Path) -> None:
    """Mount a disk's image."""
    run("mount", "-o", "loop,errors=remount-ro", str(image), str(at))


def device_of(at: Path) -> str:
    """The name of the device of a mounted disk."""
    mounts = [line.split()[:2] for line in Path("/proc/self/mounts").read_text().splitlines()]
    return next(name for name, where in reversed(mounts) if where == str(at)).removeprefix("/dev/")


def break_disk(device: str) -> None:
    """Let the kernel find an error of a file system, which makes it read-only under open files."""
    Path(f"/sys/fs/ext4/{device}/trigger_fs_error").write_text("1")


def mend_disk(image: Path, at: Path) -> None:
    """Check and mount it again. Nothing may use it."""
    run("umount", str(at))
    subprocess.run(["fsck.ext4", "-fy", str(image)], capture_output=True, check=False)
    mount(image, at)


def fill(folder: Path, leave_bytes: int = 0) -> Path:
    """A file that takes all room of a folder's file system but `leave_bytes`."""
    file = folder / "filler"
    free = os.statvfs(folder)
    with file.open("wb") as opened:
        size = free.f_bavail * free.f_frsize - leave_bytes
        with contextlib.suppress(OSError):
            os.posix_fallocate(opened.fileno(), 0, max(size, 1))
        with contextlib.suppress(OSError):  # what has come free since
            while not leave_bytes:
                os.write(opened.fileno(), b"\0" * 65_536)
    return file


@contextlib.contextmanager
def slow_reads(device: str, pids: list[int], reads_per_s: int) -> Iterator[None]:
    """Let processes and their children read so often a second from a loop device: what a network file system
    takes for a round trip. By the blkio cgroup of version 1, or io.max of version 2."""
    number = Path(f"/sys/block/{device}/dev").read_text().strip()
    first = BLKIO.is_dir()
    group = (BLKIO if first else CGROUP_2) / f"headrace-{os.getpid()}"
    group.mkdir()
    limit = group / ("blkio.throttle.read_iops_device" if first else "io.max")
    limit.write_text(f"{number} {reads_per_s}" if first else f"{number} riops={reads_per_s}")
    try:
        for pid in pids:
            (group / "cgroup.procs").write_text(str(pid))
        yield
    finally:
        limit.write_text(f"{number} 0" if first else f"{number} riops=max")
        _leave(group)


def drop_pages(file: Path) -> None:
    """Take a file out of the page cache."""
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


# ---- limits -------------------------------------------------------------------------------------


class Memory:
    """A cgroup with a limit of memory, which processes enter in the middle of their work."""

    def __init__(self, name: str) -> None:
        self.first = (CGROUP_1 / "memory.limit_in_bytes").exists() or CGROUP_1.is_dir()
        self._group = (CGROUP_1 if self.first else CGROUP_2) / f"headrace-{os.getpid()}-{name}"
        self._group.mkdir()
        self._limit = self._group / ("memory.limit_in_bytes" if self.first else "memory.max")

    @property
    def version(self) -> str:
        return "cgroup v1" if self.first else "cgroup v2"

    def admit(self, pid: int) -> None:
        """Put a process into it. What it has stays where it was charged."""
        (self._group / "cgroup.procs").write_text(str(pid))

    def limit(self, size_bytes: int) -> None:
        """Lower or raise the limit; 0: none."""
        none = "-1" if self.first else "max"
        with contextlib.suppress(OSError):  # busy: the kernel is about to kill
            self._limit.write_text(str(size_bytes) if size_bytes else none)

    @property
    def kills(self) -> int:
        """Processes that the kernel killed in it for memory."""
        name = "memory.oom_control" if self.first else "memory.events"
        for line in (self._group / name).read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
        return 0

    def end(self) -> None:
        self.limit(0)
        _leave(self._group)


def _leave(group: Path) -> None:
    """Move what is in a cgroup to its parent, and remove it."""
    until = time.monotonic() + 10
    while time.monotonic() < until:
        for pid in (group / "cgroup.procs").read_text().split():
            with contextlib.suppress(OSError):
                (group.parent / "cgroup.procs").write_text(pid)
        try:
            group.rmdir()
            return
        except OSError:  # a killed process is not quite gone
            time.sleep(0.1)


@contextlib.contextmanager
def no_descriptors(pids: list[int]) -> Iterator[None]:
    """These processes keep what they have open and can open nothing: not even a number that comes free."""
    before = {pid: resource.prlimit(pid, resource.RLIMIT_NOFILE) for pid in pids}
    for pid, (_, hard) in before.items():
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, hard))
    try:
        yield
    finally:
        for pid, limits in before.items():
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)


def little_address_space(pid: int, more_bytes: int) -> None:
    """Let a process map no more than `more_bytes` above what it has."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
    _, hard = resource.prlimit(pid, resource.RLIMIT_AS)
    resource.prlimit(pid, resource.RLIMIT_AS, (pages * resource.getpagesize() + more_bytes, hard))


# ---- model files --------------------------------------------------------------------------------


def write_models(folder: Path) -> tuple[Path, Path, Path]:
    """Three files of one size: the model; the same with the halves of its embedding exchanged, and two
    matrices, which gives other answers; and that one with two tokens of its vocabulary exchanged as well."""
    source = resolve(MODEL, load().settings.cache_dir).path
    first, other, foreign = (folder / f"{name}.gguf" for name in ("first", "other", "foreign"))
    shutil.copyfile(source, first)
    entries, data = GgufTensors(first).entries, bytearray(first.read_bytes())
    rows, a, b = (entries[name] for name in (EMBEDDING, *SWAPPED))
    half = rows.size_bytes // 2
    _exchange(data, rows.start_bytes, rows.start_bytes + half, half)
    _exchange(data, a.start_bytes, b.start_bytes, a.size_bytes)
    other.write_bytes(data)
    the, of_ = (len(word).to_bytes(8, "little") + word for word in ("Ġand".encode(), "Ġfor".encode()))
    at, to_ = data.index(the), data.index(of_)
    data[at : at + len(the)], data[to_ : to_ + len(of_)] = of_, the
    foreign.write_bytes(data)
    return first, other, foreign


def _exchange(data: bytearray, a: int, b: int, size: int) -> None:
    data[a : a + size], data[b : b + size] = data[b : b + size], data[a : a + size]
