"""The command `headrace` parses its command line and calls one command of this file or of `commands/`.

The module of a command is imported only for that command, so that `--help` and `health` stay fast: its
function in the table adds arguments to a parser, and `run`, which gets them.
"""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from pkgutil import resolve_name
from typing import TYPE_CHECKING

from services.launcher import console
from services.launcher.console import FLEET, load, load_test_module
from shared.errors import BadRequest, HeadraceError, SetupError

if TYPE_CHECKING:
    import argparse

INTERRUPTED = 130
_HERE = ("fleet", "cache_dir")
_REQUEST = (*FLEET, "model", "model_name", "request_timeout_s")
_PROGRAMS = {"bench": "run|compare|plot ...", "eval": "kl|perplexity ..."}  # of loadtest/, with their verbs
_ALL = "*"  # a verb for which each command of the parser has its arguments
# What adds the arguments of a command, and `run`.
COMMANDS = {
    "run": "services.launcher.commands.chat:run_command",
    "chat": "services.launcher.commands.chat:command",
    "submit": "services.launcher.commands.submit:submit_command",
    "result": "services.launcher.commands.submit:result_command",
    "attach": "services.launcher.commands.submit:attach_command",
    "request": "services.launcher.commands.submit:request_command",
    "batch": "services.launcher.commands.batch:command",
    "pull": "services.launcher.commands.pull:command",
    "status": "services.launcher.commands.status:command",
    "logs": "services.launcher.commands.logs:command",
    "top": "services.launcher.commands.status:top_command",
    "kv": "services.launcher.commands.kv:command",
    "sessions": "services.launcher.commands.sessions:command",
    "usage": "services.launcher.commands.status:usage_command",
    "policy": "services.launcher.commands.record:policy_command",
    "trace": "services.launcher.commands.trace:command",
    "doctor": "services.launcher.commands.doctor:command",
    "model": "services.launcher.commands.model:command",
    "adapter": "services.launcher.commands.adapter:command",
    "record": "services.launcher.commands.record:command",
    "shadow": "services.launcher.commands.record:shadow_command",
    "auth": "services.launcher.commands.auth:command",
    "completion": "services.launcher.commands.completion:command",
}
HINTS = {  # the end of a complaint of argparse
    "word": "services.launcher.commands.completion:proposal",
}
# The line of each command in --help, and the settings that it offers as flags; None: all. The environment and
# a TOML file may set the others.
_LINES: dict[str, tuple[str, Sequence[str] | None]] = {
    "up": ("start a nats-server and every service here; Ctrl-C drains", None),
    "run": (
        "answer a prompt, or chat; starts a fleet in the background if none runs",
        (*FLEET, "model_name", "request_timeout_s", "keep_alive_s", "backend", "device", "dtype"),
    ),
    "stop": ("end the fleet of this machine that `up` or `run` has started", _HERE),
    "chat": ("chat with the model", _REQUEST),
    "submit": ("store a request that is answered later, and print its id", _REQUEST),
    "result": ("the answer of a submitted request, or its state", FLEET),
    "attach": ("print the answer of a request while it is made", FLEET),
    "request": ("send a JSON request, print the JSON answer", _REQUEST),
    "batch": ("answer a file of requests in the format of OpenAI's Batch API", ()),
    "pull": ("fetch a model into the cache", ()),
    "status": ("problems, and a line for each service", FLEET),
    "logs": ("the log lines of a service of the fleet that runs here", _HERE),
    "top": ("the table of `status`, live", FLEET),
    "kv": ("what the KV tiers hold, and how much work they save", FLEET),
    "sessions": ("chains of prompts: where their blocks are, when they return", FLEET),
    "usage": ("requests and tokens of each tenant", FLEET),
    "policy": ("the policy of each scheduler; `set` changes it between two steps", FLEET),
    "trace": ("where the time of one request went", FLEET),
    "doctor": ("check this machine and print how to fix problems", (*FLEET, "model", "backend")),
    "model": ("the models of a server: further names, load, unload, sleep and wake", FLEET),
    "adapter": ("the LoRA adapters of a server: add one from a folder, list, remove", FLEET),
    "record": ("write the event log of a running scheduler to a file", FLEET),
    "replay": ("recompute a scheduler's event log and compare", ()),
    "shadow": ("print live what another policy would have done", FLEET),
    "auth": ("make credentials for every service and tenant", ("nats_url", "fleet")),
    "health": ("health check of the service in this container; kills the service if it hangs", ()),
    "config": ("show every setting, and where its value comes from", None),
    "bench": ("load on this or any OpenAI server: `headrace bench run --help`", ()),
    "eval": ("KL divergence and perplexity: `headrace eval kl --help`", ()),
    "serve": ("run one service in the foreground", None),
    "completion": ("print a script that completes command lines in a shell", ()),
    "version": ("print the versions of Headrace, Python and torch", ()),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line. Returns the exit status."""
    if argv is None:  # not called by a test: this process is ours
        _take_signals()
        _take_streams()
    args = sys.argv[1:] if argv is None else list(argv)
    try:
        if args[:1] == ["health"] and len(args) == 2 and not args[1].startswith("-"):
            return _health(args[1])  # runs every few seconds: importing argparse would double its cost
        from shared.processes import ensure_home

        ensure_home()
        printed, complaint, parser = io.StringIO(), io.StringIO(), _parser(args[0] if args else "")
        try:
            with (
                redirect_stdout(printed),
                redirect_stderr(complaint),
            ):  # argparse ignores an error of its write
                given = parser.parse_args(args)
        finally:
            print(printed.getvalue(), end="", flush=True)  # for --help, which exits
            if wrong := complaint.getvalue().rstrip():
                hints = (resolve_name(hint)(wrong, args, parser) for hint in HINTS.values())
                print(wrong + "".join(hints), file=sys.stderr, flush=True)
        status = int(given.run(given) or 0)
        sys.stdout.flush()
        return status
    except HeadraceError as error:
        return console.fail(error)
    except UnicodeError as error:  # of an argument, a file or stdin
        return console.fail(BadRequest(f"the text given is not UTF-8: {error}"))
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output has closed it, as `head` does
        console.silence(sys.stdout)
        return 0
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        console.silence(sys.stdout)
        return console.fail(SetupError(f"there is no room for the output: {error}"))


def _take_signals() -> None:
    """Make SIGINT and SIGTERM interrupt, even if the parent ignored them as shells do for background jobs."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))


def _take_streams() -> None:
    """Open /dev/null for standard streams that the parent closed; print ? for characters a locale lacks."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        stream = getattr(sys, name)
        if stream is not None:
            stream.reconfigure(errors="replace" if number else stream.errors)
        else:  # the lowest free number is the stream's own
            os.set_inheritable(null := os.open(os.devnull, os.O_RDWR), True)
            setattr(sys, name, os.fdopen(null, "w" if number else "r"))


def _parser(verb: str) -> argparse.ArgumentParser:
    import argparse

    parser = argparse.ArgumentParser(
        prog="headrace", description="An LLM inference server made of actors over NATS."
    )
    versions = _versions() if verb == "--version" else ""
    parser.add_argument("--version", action="version", version=versions, help="of Headrace, Python and torch")
    parser.set_defaults(programs=tuple(_PROGRAMS), every_command=lambda: _parser(_ALL))
    verbs = parser.add_subparsers(required=True, metavar="COMMAND")

    for name, (text, settings) in _LINES.items():
        if name not in _OWN and name not in COMMANDS:
            continue
        sub = verbs.add_parser(name, help=text, description=text)
        if verb in (name, _ALL):
            if settings != ():
                console.add_setting_flags(sub, settings, several_models=name == "up")
            if name in _OWN:
                _add_own(name, sub)
            else:
                resolve_name(COMMANDS[name])(sub)
    return parser


def _add_own(name: str, parser: argparse.ArgumentParser) -> None:
    """Add the arguments of a command of this file, and `run`."""
    from pathlib import Path

    add = parser.add_argument
    if name == "up":
        add("--auth", type=Path, metavar="DIR", help="with the credentials of `headrace auth DIR`")
        add("--leaves", default="", metavar="HOST:PORT", help="where edges connect: `up --leaf`")
        add("--join", default="", metavar="URL", help="only executors, for the fleet at this URL")
        several = "of each model: 1 to 64"
        add("--schedulers", type=int, default=1, choices=range(1, 65), metavar="N", help=several)
        add("--until-idle", action="store_true", help="end after `keep_alive_s` without a request")
    elif name == "replay":
        add("log", type=Path, help="the file of setting `event_log` or `headrace record`")
        add("--policy", metavar="KIND=NAME,...", help="simulate the log with another policy")
        add("--last", action="store_true", help="from the last snapshot on")
        add("--json", action="store_true", help="the result as JSON")
    elif name == "health":
        add("kind", help="as in `headrace serve KIND`")
    elif name == "serve":
        add("kind", help="gateway, tokenizer, scheduler, executor, kv_offload, detokenizer or keeper")
    elif name == "config":
        add("action", choices=["show"])
    elif name in _PROGRAMS:
        add("arguments", nargs="...", metavar=_PROGRAMS[name])
    parser.set_defaults(run=_OWN[name], program=name)


def _up(given: argparse.Namespace) -> int:
    from services.launcher.fork_server import started_ahead

    with started_ahead() as forks:
        from services.launcher import session

        given.model, *more = given.model or [None]
        loaded = load(given)
        with session.noted(loaded.settings):
            from services.launcher.up import Flags, up

            flags = Flags(given.leaves, given.join, given.schedulers, given.until_idle)
            must_be_durable = loaded.origins["durable"] != "default"
            return up(loaded.settings, given.auth, more, flags, must_be_durable=must_be_durable, forks=forks)


def _stop(given: argparse.Namespace) -> None:
    from services.launcher import background, session

    def report(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    for note in background.stop(session.path_for(load(given).settings), report):
        print(f"fleet {note.fleet} has ended, it served {', '.join(note.models) or 'nothing yet'}")


def _replay(given: argparse.Namespace) -> int:
    command = load_test_module("simulator")
    if given.policy is not None:
        command.counterfactual(given.log, given.policy, as_json=given.json)
        return 0
    return int(command.replay(given.log, last_only=given.last, as_json=given.json))


def _health(kind: str) -> int:
    from services.launcher.heartbeats import health

    health(kind)
    return 0


def _config(given: argparse.Namespace) -> None:
    from shared.config import PREFIX
    from shared.nats import access

    loaded = load(given)
    shown = {**dict(loaded.settings), "nats_url": access.shown(loaded.settings.nats_url)}
    rows = [(n, str(v), loaded.origins[n]) for n, v in shown.items()]
    widths = [max(len(row[i]) for row in rows) for i in (0, 1)]
    for name, value, origin in rows:
        text = type(loaded.settings).model_fields[name].description
        print(f"{name:<{widths[0]}}  {value:<{widths[1]}}  {origin:<7}  {console.dim(text or '')}")
    for name in loaded.unknown_env:
        print(f"{name} is not a setting: {PREFIX}… takes the names above", file=sys.stderr)


def _load_test(given: argparse.Namespace) -> int:
    return int(load_test_module(given.program).main(given.arguments))


def _serve(given: argparse.Namespace) -> int:
    from services.launcher.serve import serve

    return serve(given.kind, load(given).settings)


def _version(_: argparse.Namespace) -> None:
    print(_versions())


def _versions() -> str:
    from importlib.metadata import PackageNotFoundError, version
    from platform import python_version

    found = {"headrace": "from a source tree that is not installed", "Python": python_version()}
    for package in ("headrace", "torch"):
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return ", ".join(f"{name} {which}" for name, which in found.items())


_OWN: dict[str, Callable[[argparse.Namespace], int | None]] = {
    "up": _up, "stop": _stop, "replay": _replay, "health": lambda given: _health(given.kind),
    "config": _config, "bench": _load_test, "eval": _load_test, "serve": _serve,
    "version": _version,
}  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(main())
