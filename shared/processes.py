"""Helpers of processes: ports, logits processors by name, logs, private files, child processes, memory, and
which `kernels` Python finds.

How many cores this process may use, and how long its threads wait for one.

`usable_cores` is the CPU affinity of this process, limited by the CPU quota of its cgroups. A container with
`--cpus 1.5` sees all cores of its host. With more threads than its quota the kernel stops them for the rest
of each period, and all threads that wait for them.

A Unix socket that one process serves: a file that is made at the start and removed at the end.

https://man7.org/linux/man-pages/man7/unix.7.html. A killed process leaves its file: nothing listens there,
and the next start replaces it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import json
import logging
import math
import mmap
import os
import re
import signal
import site
import socket
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, BinaryIO
from urllib.parse import quote

from shared.errors import SetupError

if TYPE_CHECKING:
    from shared.clock import Clock  # which imports asyncio: `headrace --version` needs none

HTTP = "set `http` to another host:port, or to off"  # of the gateway
_ANY = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}  # a local address for each wildcard address

PROCESSOR_NAME = r"^[A-Za-z0-9_.-]{1,64}$"
_TARGET = re.compile(r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$")

ROOT = "headrace"
RARELY_US = 60_000_000

_PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None  # loaded before any fork

SMAPS = Path("/proc/self/smaps")


def available_bytes(root: Path = Path("/")) -> int:
    """Memory that processes may still take on this machine and in the cgroups of this one: of its container,
    its systemd service. `root` holds /proc and /sys."""
    match = re.search(r"^MemAvailable:\s+(\d+) kB", (root / "proc/meminfo").read_text(), re.M)
    available = int(match[1]) * 1024 if match else 0
    for folder, second in cgroups("memory", root):
        names = ("max", "current") if second else ("limit_in_bytes", "usage_in_bytes")
        with contextlib.suppress(OSError, ValueError):  # no such file, a path of the host, or no limit
            limit, used = (int((folder / f"memory.{name}").read_text()) for name in names)
            stat = (folder / "memory.stat").read_text()  # the kernel takes back the pages of files first
            files = max(map(int, re.findall(r"^(?:total_)?inactive_file (\d+)$", stat, re.M)), default=0)
            available = max(0, min(available, limit - used + files))
    return available


_UNITS = {"MB": 10**6, "GB": 10**9, "MiB": 1 << 20, "GiB": 1 << 30}


def memory_limit(text: str, total_bytes: int) -> int:
    """The bytes that `text` names: a share of all (0.6) or a size (40GiB). Raises ValueError for another
    text."""
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)(MB|GB|MiB|GiB)?", text)
    number = float(match[1]) if match else 0.0
    if match is None or number <= 0 or (match[2] is None and number > 1):
        raise ValueError(
            "a share up to 1, like 0.6, or a size in MB, GB, MiB or GiB, like 40GiB, is expected"
        )
    return int(number * (total_bytes if match[2] is None else _UNITS[match[2]]))


def oom_kills(root: Path = Path("/")) -> int:
    """How many processes the kernel has killed for memory: of the cgroup of this one, or where that has no
    such figure, of the machine; 0 if neither can be read. `root` holds /proc and /sys."""
    names = ("memory.oom_control", "memory.events")
    own = [folder / names[second] for folder, second in cgroups("memory", root)]
    for counters in (*own, root / "proc/vmstat"):
        with contextlib.suppress(OSError):
            if match := re.search(r"^oom_kill (\d+)$", counters.read_text(), re.M):
                return int(match[1])
    return 0


def give_back_memory() -> None:
    """Return to the operating system what only the start or past work needed: freed pieces, of which glibc
    keeps those below 32 MiB, and the pages of libraries. The next use of such a page maps it again, within
    microseconds while the file is in the page cache. Takes 10 to 40 ms."""
    libc = ctypes.CDLL(None)
    with contextlib.suppress(AttributeError):  # another C library
        libc.malloc_trim(0)
    with contextlib.suppress(AttributeError, OSError):  # no Linux
        for start, end in unchanged_libraries(SMAPS.read_text()):
            libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_DONTNEED)


def unchanged_libraries(smaps: str) -> Iterator[tuple[int, int]]:
    """The addresses of the parts of libraries without pages that only this process has: relocated ones, which
    the file has not. Other files are left alone: another thread may unmap one and use its addresses."""
    start = end = changed = 0
    for line in [*smaps.splitlines(), "0-0 r--p 0 0 0"]:
        name, *fields = line.split(maxsplit=5)
        if name in ("Anonymous:", "Swap:"):
            changed += int(fields[0])
        elif not name.endswith(":"):
            if end and not changed:
                yield start, end
            library = len(fields) == 5 and ".so" in fields[4] and "w" not in fields[0]
            start, end = (int(at, 16) for at in name.split("-")) if library else (0, 0)
            changed = 0


def bind(
    host: str,
    port: int,
    service: str = "the gateway",
    mend: str = HTTP,
    *,
    listen: bool = True,
    shared: bool = False,
) -> socket.socket:
    """A bound socket; port 0 is any free one. Raises SetupError if the port is in use or the host is not this
    machine, with the owner `who` and the remedy `mend`.

    Without `listen` the socket only reserves the port: on Linux another process can still bind it and listen,
    but does not get it as any free port. With `shared` several processes of this user may listen on the
    port, and the kernel distributes the connections."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        raise _refused(host, port, error, service, mend) from None
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        bound.bind(address)
        if listen:
            bound.listen(1)  # with SO_REUSEADDR two sockets may be bound, but only one can listen
    except OSError as error:
        bound.close()
        raise _refused(host, port, error, service, mend) from None
    return bound


def http_url(host: str, port: int, *, tls: bool = False) -> str:
    """The URL of an address for a client on this machine."""
    host = _ANY.get(host, host)
    return f"http{'s' * tls}://[{host}]:{port}" if ":" in host else f"http{'s' * tls}://{host}:{port}"


def _refused(host: str, port: int, error: OSError, service: str, mend: str) -> SetupError:
    why = error.strerror or str(error)
    return SetupError(f"{service} cannot listen on {host}:{port} ({why}): free the port, or {mend}")


def processor_targets(setting: str) -> Mapping[str, str]:
    """The logits processors that a fleet offers: `name=module:attribute,...` as {name: "module:attribute"}.
    Raises SetupError.

    Tokenizers (names) and executors (code) read the setting `logits_processors`. A request can only use
    processors of this list.
    """
    targets: dict[str, str] = {}
    for entry in filter(None, (part.strip() for part in setting.split(","))):
        name, _, target = (part.strip() for part in entry.partition("="))
        if not re.fullmatch(PROCESSOR_NAME, name) or not _TARGET.fullmatch(target):
            raise SetupError(
                f"logits_processors: {entry!r:.120} is not name=module:attribute; write for example "
                "no_digits=my_package.processors:NoDigits"
            )
        if name in targets:
            raise SetupError(f"logits_processors: {name!r} is listed twice; rename one")
        targets[name] = target
    return targets


def ensure_home() -> None:
    """Set HOME and USER if the user has no home, neither by HOME nor by a passwd entry: libraries need both.
    The home is then in the folder for temporary files. Raises SetupError."""
    try:
        Path.home()
        return
    except RuntimeError:
        home = Path(tempfile.gettempdir()) / f"headrace-home-{os.getuid()}"
    try:
        home.mkdir(mode=0o700, exist_ok=True)
        owner = home.lstat().st_uid
    except OSError as error:
        raise SetupError(f"this user has no home folder, and none can be made ({error}): set HOME") from None
    if owner != os.getuid():
        raise SetupError(f"this user has no home folder, and {home} is another user's: set HOME")
    os.environ["HOME"] = str(home)
    os.environ.setdefault("USER", str(os.getuid()))


def ensure_folder() -> None:
    """Change to / if the working directory was removed: oneMKL, of torch, ends a process without one."""
    try:
        os.getcwd()
    except FileNotFoundError:
        os.chdir("/")


def module_command(module: str, *args: str) -> list[str]:
    """The command that runs a module as a process. It imports nothing from the working directory (-P), where
    a file may have any name. Use it with an environment of `with_import_path`."""
    return [sys.executable, "-P", "-m", module, *args]


def with_import_path(env: Mapping[str, str]) -> dict[str, str]:
    """`env` with a PYTHONPATH of this code, then the existing entries (the user's processors). Empty entries,
    which mean the working directory, are removed."""
    root = str(Path(__file__).resolve().parents[1])
    entries = [entry for entry in env.get("PYTHONPATH", "").split(os.pathsep) if entry]
    if root not in (*entries, *site.getsitepackages(), site.getusersitepackages()):
        entries.insert(0, root)
    return {**env, "PYTHONPATH": os.pathsep.join(entries)}


def die_with_parent(number: signal.Signals = signal.SIGTERM, parent: int = 0) -> Callable[[], None]:
    """A `preexec_fn`: the child gets signal `number` when the thread that started it ends (Linux only). Start
    children from the main thread. The child also ends if the parent ended during the fork. `parent`: its
    process id, if not this process."""
    parent = parent or os.getpid()

    def arm() -> None:
        if LIBC is not None:
            LIBC.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
            if os.getppid() != parent:
                os.kill(os.getpid(), number)

    return arm


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """For imports of large libraries: without garbage collection, which would look at all their objects again
    and again, 0.4 s of torch's and Numba's import. Later collections do not look at what is there now."""
    collects = gc.isenabled()
    try:
        gc.disable()
        yield
    finally:
        if collects:
            gc.freeze()
            gc.enable()


def open_private(path: Path, buffering: int = -1) -> BinaryIO:
    """A new file that only its owner may read and write, for any umask. Raises OSError."""
    return open(path, "xb", buffering, opener=lambda name, flags: os.open(name, flags, 0o600))


class Rarely:
    """Logs a warning that any client can cause at most once in RARELY_US, with the number of occurrences."""

    def __init__(self, log: logging.Logger, clock: Clock) -> None:
        self._log = log
        self._clock = clock
        self._next_us = 0
        self._kept_back = 0

    def warning(self, text: str, *args: object) -> None:
        """Log the warning, or count it if the last line is recent."""
        now_us = self._clock.now_us()
        if now_us < self._next_us:
            self._kept_back += 1
            return
        more = f"; {self._kept_back} more like it since the last line" if self._kept_back else ""
        self._log.warning(f"{text}{more}", *args)
        self._next_us, self._kept_back = now_us + RARELY_US, 0


def setup(component: str, *, level: str = "info", as_json: bool = False) -> None:
    """Send the log of this process to stderr, one line per event, as text or JSON, with the component's name.
    A second call replaces the first."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonLines(component) if as_json else _Lines(component))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger(ROOT).setLevel(level.upper())


class _Lines(logging.Formatter):
    """`07:31:02.118 scheduler warning: text`, with the traceback below."""

    def __init__(self, component: str) -> None:
        super().__init__()
        self._component = component

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        mark = "" if record.levelno == logging.INFO else f" {record.levelname.lower()}"
        component = f" {self._component}" if self._component else ""
        line = f"{clock}.{int(record.msecs):03d}{component}{mark}: {record.getMessage()}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class _JsonLines(logging.Formatter):
    """One JSON object per line."""

    def __init__(self, component: str) -> None:
        super().__init__()
        self._component = component

    def format(self, record: logging.LogRecord) -> str:
        row: dict[str, object] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "component": self._component,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            row["exception"] = self.formatException(record.exc_info)
        return json.dumps(row, ensure_ascii=False)


_GROUPS = "sys/fs/cgroup"


def usable_cores(root: Path = Path("/")) -> float:
    """The number of cores, above 0, for example 1.5. `root` holds /proc and /sys."""
    return min([float(len(os.sched_getaffinity(0))), *_quotas(root)])


def usable_threads(processes: int = 1) -> int:
    """Threads, at least 1, for each of `processes` processes that compute at the same time."""
    return max(1, math.ceil(usable_cores()) // processes)


def cgroups(controller: str, root: Path = Path("/")) -> Iterator[tuple[Path, bool]]:
    """Where files of the cgroups of this process and their parents may be, each with whether it is of the
    second version. `controller`: cpu or memory."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        fields = line.split(":", 2)
        if len(fields) != 3:
            continue
        _, controllers, path = fields
        if not controllers:
            mounted = [root / _GROUPS, root / _GROUPS / "unified"]
        elif controller in controllers.split(","):
            mounted = [root / _GROUPS / controllers, root / _GROUPS / controller]
        else:
            continue
        inside = PurePosixPath(path.lstrip("/"))
        for mount in mounted:
            yield from ((mount / group, not controllers) for group in (inside, *inside.parents))


class CoreWaits:
    """How much of the time that threads of this process could run they waited for a core, by Linux's
    scheduler statistics."""

    def __init__(self, tasks: Path = Path("/proc/self/task")) -> None:
        self._tasks = tasks
        self._before = self._read()

    def share(self) -> float:
        """The largest share, 0 to 1, of any thread that could run half as long as the busiest one or longer,
        since the last call. 1 where Linux counts no waits."""
        before, self._before = self._before, self._read()
        spent = [
            (ran + waited - sum(before.get(task, (0, 0))), waited - before.get(task, (0, 0))[1])
            for task, (ran, waited) in self._before.items()
        ]
        most = max((could for could, _ in spent), default=0)
        return max((waited / could for could, waited in spent if 2 * could >= most > 0), default=1.0)

    def _read(self) -> dict[str, tuple[int, int]]:
        """By thread: how long it ran and how long it waited for a core, ns."""
        found = {}
        try:
            for task in os.listdir(self._tasks):
                with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
                    ran, waited, _ = (self._tasks / task / "schedstat").read_text().split()
                    found[task] = int(ran), int(waited)
        except (OSError, ValueError):
            return {}
        return found


def _quotas(root: Path) -> Iterator[float]:
    """The quotas, in cores, of the cgroups of this process and their parents."""
    for folder, second in cgroups("cpu", root):
        try:
            cores = _v2(folder) if second else _v1(folder)
        except (OSError, ValueError, ZeroDivisionError):  # no such file, or a path of the host
            continue
        if cores > 0:
            yield cores


def _v2(folder: Path) -> float:
    quota, period = (folder / "cpu.max").read_text().split()
    return 0.0 if quota == "max" else int(quota) / int(period)


def _v1(folder: Path) -> float:
    quota, period = (int((folder / f"cpu.cfs_{what}_us").read_text()) for what in ("quota", "period"))
    return quota / period if period > 0 else 0.0


UNIX_PREFIX = "unix:"  # of a path in the setting `http`


class UnixListener:
    """A listening socket and its file. The umask sets its rights: usually only this user may connect."""

    def __init__(self, path: str) -> None:
        """Raises SetupError if another process listens there, or if it is a file of another kind."""
        self.path = path
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            _make_free(path)
            self.socket.bind(path)
            self.socket.listen()
            self._file = _identity(path)
        except OSError as error:
            self.socket.close()
            raise SetupError(
                f"the gateway cannot listen on {path} ({error.strerror or error}): set `http` to another path"
            ) from None

    def check(self) -> None:
        """Raises SetupError if the file was removed or replaced: then no client finds this process."""
        if _identity(self.path) != self._file:
            raise SetupError(f"the socket {self.path} was removed or replaced")

    def remove(self) -> None:
        """Remove the file, unless another process has replaced it."""
        if _identity(self.path) == self._file:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.path)


def unix_url(path: str, *, tls: bool = False) -> str:
    """The URL of a server on a Unix socket, in the form of requests-unixsocket, aiohttp and others."""
    return f"http{'s' * tls}+unix://{quote(path, safe='')}"


def _identity(path: str) -> tuple[int, int, int] | None:
    """Differs between a file and a later one at the same path, even with the same inode number; chmod keeps
    it."""
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_mtime_ns


def _make_free(path: str) -> None:
    """Remove a socket on which nothing listens. Raises OSError if there is anything else."""
    try:
        is_socket = stat.S_ISSOCK(os.lstat(path).st_mode)
    except FileNotFoundError:
        return
    if not is_socket:
        raise OSError(errno.EEXIST, "there is a file that is no socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)  # a listener with a full queue is one, too
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
        except BlockingIOError:
            pass
    raise OSError(errno.EADDRINUSE, "another process listens there")


def foreign_kernels() -> str:
    """What to do if Python finds the package `kernels` of another distribution instead of Headrace's, since
    PyPI has one of that name; empty if it finds ours. Nothing is imported."""
    found = find_spec("kernels")
    file = Path(found.origin) if found is not None and found.origin else None
    if file is not None and "Headrace" in file.read_text("utf-8", "replace")[:200]:
        return ""
    return (
        f"the package `kernels` at {file or 'no place'} is not Headrace's: another distribution of that name "
        "is installed here, as with transformers[kernels]. Install headrace in a venv of its own"
    )
