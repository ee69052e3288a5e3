"""Finds the server and model of a client command: from flags, then settings, then a running `headrace up`.

`headrace up` leaves a note (`RunState`) with its URL and models; every client command reads it. Beside this
note of the fleet that is ready, each `up` has its own from its start to its end, by which `stop` finds all.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from services.launcher.console import load
from services.launcher.nats_server import is_free
from shared import bodies
from shared.config import DEFAULT_NATS_URL, Loaded
from shared.errors import SetupError, Unavailable
from shared.nats import access, subjects
from shared.nats.interface import Bus, BusFault, NoResponders, RequestTimeout
from shared.nats.subjects import DEFAULT_TENANT

if TYPE_CHECKING:
    import argparse

    from shared.config import Settings
    from shared.nats.bus import NatsBus

CONNECT_TIMEOUT_S = 5.0  # a busy machine takes seconds for the first answer
DECIDE_S = 5.0  # for a scheduler, which may decide upon the result of a step first: milliseconds
STATUS_WAIT_S = 0.5  # a ready service answers in milliseconds, one that starts may need longer
NOT_STORED = "not stored, without JetStream: it ends with the last tokenizer"
READY_POLL_S = 0.1  # between two looks whether a fleet is ready


Facts = dict[str, Any]  # the answer of a service about itself
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Target:
    """A server and the model for requests that name none."""

    nats_url: str
    model: str
    page: str = ""  # URL of the gateway's page, with a key if it needs one; only of an `up` of this user
    links: str = ""  # the setting

    @property
    def tenant(self) -> str:
        """The tenant of the URL's credentials."""
        return access.tenant_of(self.nats_url, DEFAULT_TENANT)


def find_target(loaded: Loaded, *, wait: bool = False) -> Target:
    """The server to connect to, and the model for requests that name none. With `wait`, a fleet that starts
    here has the time of a request to get ready. Raises SetupError for a fleet that is named and has neither a
    note here nor a server at the default address, which may be that of a container engine."""
    from shared.vocab.files import served_names

    settings = loaded.settings
    path, until_s, is_announced = path_for(settings), time.monotonic() + settings.request_timeout_s, False
    while (note := read(path)) is None and wait and not settings.nats_url and time.monotonic() < until_s:
        if all(run.ready for run in runs(path)):
            break
        if not is_announced:
            is_announced = True
            print("the fleet starts: waiting for it", file=sys.stderr, flush=True)
        time.sleep(READY_POLL_S)
    note = note or next((run for run in runs(path) if run.nats_url), None)
    here = note if note is not None and settings.nats_url in ("", note.nats_url) else None
    if note is None and not settings.nats_url and loaded.origins["fleet"] != "default":
        _check_default_server(path)
    named = served_names(settings)[0]
    chosen = loaded.origins["model"] != "default" or loaded.origins["model_name"] != "default"
    return Target(
        settings.nats_url or (here.nats_url if here else DEFAULT_NATS_URL),
        here.models[0] if here and here.models and not chosen else named,
        here.page if here else "",
        settings.links,
    )


def find_fleet(given: argparse.Namespace) -> tuple[Target, str]:
    """The server and the name of the fleet of a command line. Raises SetupError."""
    loaded = load(given)
    return find_target(loaded), loaded.settings.fleet


def _check_default_server(path: Path) -> None:
    """Raises SetupError if nothing is at the default address, or only fleets with other notes than that at
    `path`."""
    others = [note for other in sorted(path.parent.glob("*.json")) if (note := read(other))]
    port = int(DEFAULT_NATS_URL.rpartition(":")[2])
    if not is_free(port) and all(access.shown(note.nats_url) != DEFAULT_NATS_URL for note in others):
        return
    known = f" (fleets here: {', '.join(note.fleet for note in others)})" if others else ""
    raise SetupError(
        f"no fleet {path.stem} runs here{known}: start one with `headrace up --fleet {path.stem}`, or name "
        "its nats-server with --nats-url"
    )


@asynccontextmanager
async def connected(url: str, timeout_s: float = CONNECT_TIMEOUT_S) -> AsyncGenerator[NatsBus]:
    """A connection for the duration of a command, which prints what the credentials do not allow. Raises
    SetupError if no server answers."""
    from shared.nats.bus import NatsBus  # --help needs none

    bus = await NatsBus.connect(url, name="headrace-cli", timeout_s=timeout_s, on_fault=_print_denied)
    try:
        yield bus
    finally:
        await bus.drain()


async def services_of(target: Target, fleet: str) -> list[Facts]:
    """The answers of the services of `fleet`, in pipeline order. Raises Unavailable without any."""
    async with connected(target.nats_url) as bus:
        return await answers_of(bus, fleet)


async def answers_of(bus: Bus, fleet: str) -> list[Facts]:
    """The same, over a connection."""
    from shared.client.client import request_all

    answers = await request_all(bus, subjects.STATUS, STATUS_WAIT_S)
    services = sorted((a for a in answers if a.get("fleet") == fleet), key=_order)
    if not services:
        fleets = ", ".join(sorted({str(a.get("fleet")) for a in answers}))
        raise Unavailable(f"no service of fleet {fleet!r} answers; there are: {fleets or 'none'}")
    return services


def _order(answer: Facts) -> tuple[int, str]:
    from services.launcher.serve import KINDS

    kind = str(answer.get("kind"))
    return (KINDS.index(kind) if kind in KINDS else len(KINDS), f"{kind}.{answer.get('id')}")


async def ask_scheduler(bus: Bus, kind: type[T], subject: str, body: str) -> T | None:
    """The answer of a scheduler; None without one."""
    try:
        reply = await bus.request(subject, body.encode("utf-8", "replace"), timeout_us=int(DECIDE_S * 1e6))
    except (NoResponders, RequestTimeout):
        return None
    return bodies.decode(kind, reply.data)


async def ask_for_change(
    bus: Bus, subject: str, body: bytes, wait_us: int, shows: str, absent: str
) -> bodies.Change:
    """What a tokenizer has changed for the operator. `shows`: the command that shows the state; `absent`: the
    message where no tokenizer answers. Raises the tokenizer's error, Unavailable."""
    try:
        reply = await bus.request(subject, body, timeout_us=wait_us)
    except NoResponders:
        raise Unavailable(absent) from None
    except RequestTimeout:
        raise Unavailable(f"no answer: `{shows}` shows whether it has changed") from None
    answer = bodies.decode(bodies.Change, reply.data)
    if "error" in answer:
        from shared.client.client import error_of  # commands that change nothing start without it

        raise error_of(answer)
    return answer


def _print_denied(fault: BusFault) -> None:
    if fault.kind in ("permission", "refused"):
        print(f"these credentials do not allow this: {fault.detail}", file=sys.stderr, flush=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """The note of a running `headrace up`, so that a second shell finds its server without a flag."""

    pid: int
    fleet: str
    nats_url: str  # with the operator's credentials, if there are any
    monitoring_url: str
    models: list[str]  # names under which they are served
    page: str = ""  # URL of the gateway's page, with the operator's key, if there are any
    logs: str = ""  # the folder of the log files, see commands/logs.py
    ready: bool = True

    def write(self, path: Path) -> None:
        """Replace the note at `path` atomically. Only its owner may read it."""
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(f".{self.pid}")
        draft.touch(0o600)
        draft.write_text(json.dumps(asdict(self), indent=2) + "\n")
        draft.replace(path)


def path_for(settings: Settings) -> Path:
    """The path of this fleet's note: in the user's runtime folder or, if that is not writable, the cache."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    home = Path(runtime) / "headrace" if runtime else None
    if home is None or not os.access(home if home.exists() else home.parent, os.W_OK | os.X_OK):
        home = settings.cache_dir / "run"
    return home / f"{settings.fleet}.json"


def own_note(path: Path) -> Path:
    """Where this process has its own note, as one `up` of the fleet with the note at `path`."""
    return path.with_suffix(f".{os.getpid()}.up")


def runs(path: Path) -> list[RunState]:
    """The notes of all living `up` of the fleet with the note at `path`."""
    found = (read(own) for own in sorted(path.parent.glob(f"{path.stem}.*.up")))
    return [note for note in found if note is not None]


def beside(error: SetupError, settings: Settings, port: int) -> SetupError:
    """The error of an `up` that cannot have `port`, with what to do if a fleet of this user has it."""
    folder, own = path_for(settings).parent, os.getpid()
    notes = (read(path) for path in sorted([*folder.glob("*.json"), *folder.glob("*.up")]))
    for note in notes:
        if note and note.pid != own and port in {urlsplit(url).port for url in (note.page, note.nats_url)}:
            named = "" if note.fleet == "default" else f" --fleet {note.fleet}"
            return SetupError(
                f"{error.message}. The fleet {note.fleet} runs here and has it (process {note.pid}): use it "
                f"with `headrace chat{named}`, end it with `headrace stop{named}`, or start another one "
                "beside it with --fleet NAME --http 127.0.0.1:0"
            )
    return error


@contextmanager
def noted(settings: Settings) -> Generator[None]:
    """Have a note of this process, as an `up` that starts, for `stop`."""
    path = path_for(settings)
    own = own_note(path)
    note = RunState(
        pid=os.getpid(), fleet=settings.fleet, nats_url="", monitoring_url="", models=[], ready=False
    )
    try:
        with suppress(OSError):  # `up` reports it
            note.write(own)
            for old in path.parent.glob(f"{path.stem}.*.up"):
                if read(old) is None:  # it was killed
                    old.unlink(missing_ok=True)
        yield
    finally:
        with suppress(OSError):
            own.unlink(missing_ok=True)


def read(path: Path) -> RunState | None:
    """The note at `path` if its `up` still runs, else None."""
    try:
        note = RunState(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):  # none, or of another version
        return None
    return note if _is_alive(note.pid) else None


def remove(path: Path, pid: int) -> None:
    """Remove the note at `path` if process `pid` wrote it."""
    note = read(path)
    if note is not None and note.pid == pid:
        path.unlink(missing_ok=True)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
