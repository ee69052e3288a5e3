"""The command `headrace` parses its command line and calls one command of this folder or of `commands/`.

The modules of a command are imported only when that command runs, so that `--help` and `health` stay fast.
"""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from typing import TYPE_CHECKING, Any, TypeVar

from services.launcher import console
from shared.errors import BadRequest, HeadraceError, SetupError

if TYPE_CHECKING:
    import argparse

    from services.launcher.commands.chat import Conversation
    from services.launcher.session import Target
    from shared.config import Loaded


T = TypeVar("T")

INTERRUPTED = 130
_FLEET = ("nats_url", "fleet", "cache_dir")  # enough to find a fleet
_REQUEST = (*_FLEET, "model", "model_name", "request_timeout_s")
# The settings that each command offers as flags. The environment and a TOML file may set all the others.
_SETTINGS = {
    "run": ("nats_url", "fleet", "cache_dir", "model_name", "request_timeout_s", "keep_alive_s",
            "backend", "device", "dtype"),
    "stop": ("fleet", "cache_dir"), "logs": ("fleet", "cache_dir"),
    "chat": _REQUEST, "request": _REQUEST, "submit": _REQUEST, "result": _FLEET, "attach": _FLEET,
    "status": _FLEET, "top": _FLEET, "kv": _FLEET, "trace": _FLEET,
    "usage": _FLEET, "policy": _FLEET, "record": _FLEET, "shadow": _FLEET,
    "model": _FLEET, "auth": ("nats_url", "fleet"), "doctor": (*_FLEET, "model", "backend"),
}  # fmt: skip
_ALL = "*"  # a verb for which each command of the parser has its setting flags
_EVERY_SETTING = ("up", "serve", "config")


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
        said, complaint, parser = io.StringIO(), io.StringIO(), _parser(args[0] if args else "")
        try:
            with redirect_stdout(said), redirect_stderr(complaint):  # argparse ignores an error of its write
                given = parser.parse_args(args)
        finally:
            print(said.getvalue(), end="", flush=True)  # for --help, which exits
            if wrong := complaint.getvalue().rstrip():
                from services.launcher.commands.completion import proposal

                print(wrong + proposal(wrong, args, parser), file=sys.stderr, flush=True)
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


def _request_id(text: str) -> str:
    """`text`, as argparse takes an argument. Raises ValueError for an empty one."""
    if not text:
        raise ValueError
    return text


def _run(work: Coroutine[Any, Any, T]) -> T:
    import asyncio

    return asyncio.run(work)


def _parser(verb: str) -> argparse.ArgumentParser:
    import argparse
    from pathlib import Path

    parser = argparse.ArgumentParser(
        prog="headrace", description="An LLM inference server made of actors over NATS."
    )
    versions = _versions() if verb == "--version" else ""
    parser.add_argument("--version", action="version", version=versions, help="of Headrace, Python and torch")
    verbs = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, text: str, run: Any) -> argparse.ArgumentParser:
        sub = verbs.add_parser(name, help=text, description=text)
        sub.set_defaults(run=run)
        if verb in (name, _ALL) and (name in _EVERY_SETTING or name in _SETTINGS):
            _add_setting_flags(sub, _SETTINGS.get(name), several_models=name == "up")
        return sub

    _add_up(add)
    _add_requests(add, verb)
    pull = add("pull", "fetch a model into the cache", _pull)
    pull.add_argument("name", nargs="?", help="a known model or a Hugging Face id; default: the setting")
    pull.add_argument("--config", type=Path, metavar="FILE", help="TOML file with settings")
    pull.add_argument("--cache-dir", metavar="DIR", help="where models are kept")
    _add_views(add)
    _add_model(add, verb)
    record = add("record", "write the event log of a running scheduler to a file", _record)
    record.add_argument("out", type=Path, help="the file to write; it must not exist")
    record.add_argument("--seconds", type=float, help="how long; default: until Ctrl-C")
    record.add_argument("--scheduler", default="", metavar="ID", help="which scheduler, if there are several")
    replay = add("replay", "recompute a scheduler's event log and compare", _replay)
    replay.add_argument("log", type=Path, help="the file of setting `event_log` or `headrace record`")
    replay.add_argument("--policy", metavar="KIND=NAME,...", help="simulate the log with another policy")
    replay.add_argument("--last", action="store_true", help="from the last snapshot on")
    replay.add_argument("--json", action="store_true", help="the result as JSON")
    shadow = add("shadow", "print live what another policy would have done", _shadow)
    shadow.add_argument(  # `policy` is a setting
        "--policy", dest="other", required=True, metavar="KIND=NAME,...", help="the other policy"
    )
    shadow.add_argument("--scheduler", default="", metavar="ID", help="which scheduler, if there are several")
    shadow.add_argument("--interval", type=float, default=60.0, metavar="SECONDS", help="default 60")
    auth = add("auth", "make credentials for every service and tenant", _auth)
    auth.add_argument("folder", type=Path, help="where to write them, one folder for each user")
    auth.add_argument("--tenant", action="append", default=[], help="one more tenant; may be repeated")
    auth.add_argument(
        "--classes", default="", metavar="LIST", help="classes of these tenants; default standard,batch"
    )
    auth.add_argument("--force", action="store_true", help="make new passwords for every user")
    auth.add_argument("--leaves", action="store_true", help="the nats-server listens for edges on port 7422")
    auth.add_argument("--accounts", action="store_true", help="an account of the nats-server for each tenant")
    auth.add_argument("--limits", default="", metavar="LIST", help="of accounts: connections=9,payload=1MB")
    auth.add_argument("--tls-cert", default="", metavar="FILE", help="the nats-server's certificate")
    auth.add_argument("--tls-key", default="", metavar="FILE", help="its key")
    auth.add_argument("--show", metavar="NAME", help="print the URL of a service, operator or tenant")
    health = add(
        "health",
        "health check of the service in this container; kills the service if it hangs",
        lambda given: _health(given.kind),
    )
    health.add_argument("kind", help="as in `headrace serve KIND`")
    config = add("config", "show every setting, and where its value comes from", _config)
    config.add_argument("action", choices=["show"])
    bench = add("bench", "load on this or any OpenAI server: `headrace bench run --help`", _load_test)
    bench.add_argument("arguments", nargs=argparse.REMAINDER, metavar="run|compare|plot ...")
    evaluate = add("eval", "KL divergence and perplexity: `headrace eval kl --help`", _load_test)
    evaluate.add_argument("arguments", nargs=argparse.REMAINDER, metavar="kl|perplexity ...")
    for name, sub in (("bench", bench), ("eval", evaluate)):
        sub.set_defaults(program=name)
    serve = add("serve", "run one service in the foreground", _serve)
    serve.add_argument(
        "kind", help="gateway, tokenizer, scheduler, executor, kv_offload, detokenizer or keeper"
    )
    completion = add("completion", "print a script that completes command lines in a shell", _completion)
    completion.add_argument("shell", choices=["bash", "zsh"])
    add("version", "print the versions of Headrace, Python and torch", _version)
    return parser


def _add_requests(add: Callable[[str, str, Any], argparse.ArgumentParser], verb: str) -> None:
    """The commands that ask a model."""
    from pathlib import Path

    run = add("run", "answer a prompt, or chat; starts a fleet in the background if none runs", _run_model)
    run.add_argument("model", metavar="MODEL", help="a known name, a hub id, a GGUF file or a folder")
    run.add_argument(
        "prompt", nargs="*", default=[], metavar="PROMPT", help="and stdin, if piped; neither: a chat"
    )
    add("stop", "end the fleet of this machine that `up` or `run` has started", _stop)
    chat = add("chat", "chat with the model", _chat)
    chat.add_argument("-q", "--question", help="send one question, print the answer, exit")
    submit = add("submit", "store a request that is answered later, and print its id", _submit)
    submit.add_argument("prompt", nargs="?", help="the question; or a request with --file")
    submit.add_argument("-f", "--file", type=Path, help="read a JSON request from a file, - for stdin")
    submit.add_argument("--id", help="an id of your choice: the same request is stored once under it")
    submit.add_argument("--webhook", metavar="URL", help="gets a signed event when it has ended")
    submit.add_argument(
        "--checkpoints", action="store_true", help="keep its tokens: it goes on after the loss of everything"
    )
    result = add("result", "the answer of a submitted request, or its state", _result)
    result.add_argument("id", type=_request_id, help="the id that `submit` has printed")
    result.add_argument("--wait", action="store_true", help="wait until it has ended")
    result.add_argument("--json", action="store_true", help="everything, as JSON")
    attach = add("attach", "print the answer of a request while it is made", _attach)
    attach.add_argument("id", type=_request_id, help="of a durable request, or of any that runs")
    for sub, longest in ((run, "2048"), (chat, "2048"), (submit, "what fits")):
        sub.add_argument("--max-tokens", type=int, help=f"longest answer, tokens; default: {longest}")
        sub.add_argument("--temperature", type=float, help="0 is greedy; default: the model's")
        sub.add_argument("--seed", type=int, help="makes the answer repeatable")
        sub.add_argument("--system", default="", metavar="TEXT", help="instructions before the conversation")
    request = add("request", "send a JSON request, print the JSON answer", _request)
    request.add_argument("body", nargs="?", help='like {"prompt": "Hello"}; default: from stdin')
    request.add_argument("-f", "--file", type=Path, help="read the request from a file")
    request.add_argument("--stream", action="store_true", help="print each frame as a JSON line")
    _add_batch(add, verb)


def _add_batch(add: Callable[[str, str, Any], argparse.ArgumentParser], verb: str) -> None:
    from pathlib import Path

    batch = add("batch", "answer a file of requests in the format of OpenAI's Batch API", _batch)
    actions = batch.add_subparsers(required=True, metavar="ACTION", dest="action")

    def act(name: str, text: str) -> argparse.ArgumentParser:
        sub = actions.add_parser(name, help=text, description=text)
        if verb in ("batch", _ALL):
            _add_setting_flags(sub, _FLEET)
        return sub

    submit = act("submit", "store a file of requests that a keeper answers, and print the id of the batch")
    submit.add_argument("input", type=Path, metavar="IN.jsonl", help="a line for each request")
    submit.add_argument("--endpoint", metavar="PATH", help="of all lines; default: that of the first one")
    submit.add_argument(
        "--completion-window", default="24h", metavar="TIME", help="m, h or d, up to 7d; default 24h"
    )
    submit.add_argument("--webhook", metavar="URL", help="gets a signed event when the batch has ended")
    status = act("status", "the state of a batch")
    status.add_argument("id", help="the id that `submit` has printed")
    status.add_argument("--json", action="store_true", help="everything, as JSON")
    act("cancel", "cancel a batch; its answers so far are kept").add_argument("id")
    fetch = act("fetch", "write the answers of a batch that has ended to a file")
    fetch.add_argument("id")
    fetch.add_argument("output", type=Path, metavar="OUT.jsonl", help="answers, then errors")
    whole = act("run", "submit, wait and fetch; after a kill the same command goes on")
    whole.add_argument("input", type=Path, metavar="IN.jsonl", help="a line for each request")
    whole.add_argument("output", type=Path, metavar="OUT.jsonl", help="answers, then errors; must not exist")


def _add_up(add: Callable[[str, str, Any], argparse.ArgumentParser]) -> None:
    from pathlib import Path

    up = add("up", "start a nats-server and every service here; Ctrl-C drains", _up)
    up.add_argument("--auth", type=Path, metavar="DIR", help="with the credentials of `headrace auth DIR`")
    up.add_argument("--leaves", default="", metavar="HOST:PORT", help="where edges connect: `up --leaf`")
    up.add_argument("--join", default="", metavar="URL", help="only executors, for the fleet at this URL")
    up.add_argument(
        "--schedulers", type=int, default=1, choices=range(1, 65), metavar="N", help="of each model: 1 to 64"
    )
    up.add_argument("--until-idle", action="store_true", help="end after `keep_alive_s` without a request")


def _add_model(add: Callable[[str, str, Any], argparse.ArgumentParser], verb: str) -> None:
    model = add("model", "the models of a server: further names, load, unload, sleep and wake", _model)
    actions = model.add_subparsers(required=True, metavar="ACTION", dest="action")

    def act(name: str, text: str) -> argparse.ArgumentParser:
        sub = actions.add_parser(name, help=text, description=text)
        if verb in ("model", _ALL):
            _add_setting_flags(sub, _FLEET)
        return sub

    listed = act("list", "models and aliases, with their states")
    listed.add_argument("--json", action="store_true", help="everything, as JSON")
    alias = act("alias", "let a name stand for one model, or for several with weights")
    alias.add_argument("name", metavar="NAME", help="of no served model")
    alias.add_argument(
        "targets", nargs="*", metavar="MODEL[=WEIGHT]", help="like big=95 new=5; the default weight is 1"
    )
    alias.add_argument("--delete", action="store_true", help="delete the alias")
    for name, text in (
        ("load", "start the executors of a model that was unloaded"),
        ("unload", "drain and end the executors of a model; its name stays"),
        ("sleep", "free the device memory of a model once its requests have ended; a request wakes it"),
        ("wake", "take the device memory back before a request comes"),
    ):
        act(name, text).add_argument("name", metavar="MODEL", help="as in `headrace status`")


def _add_views(add: Callable[[str, str, Any], argparse.ArgumentParser]) -> None:
    """The commands that show what runs and what has run."""
    from pathlib import Path

    status = add("status", "problems, and a line for each service", _status)
    status.add_argument(
        "service",
        nargs="?",
        default="",
        metavar="SERVICE",
        help="show every fact of this kind, id or start of an id",
    )
    status.add_argument("--json", action="store_true", help="everything, as JSON")
    logs = add("logs", "the log lines of a service of the fleet that runs here", _logs)
    logs.add_argument(
        "service", nargs="?", default="", metavar="SERVICE", help="its name or the start of it; default: all"
    )
    logs.add_argument("-f", "--follow", action="store_true", help="print new lines until the fleet ends")
    logs.add_argument(
        "-n", "--lines", type=int, default=100, metavar="N", help="last lines of each service; default 100"
    )
    top = add("top", "the table of `status`, live", _top)
    top.add_argument("--interval", type=float, default=1.0, metavar="SECONDS", help="default 1")
    top.add_argument(
        "--count", type=int, default=0, metavar="N", help="number of updates; default: until q or Ctrl-C"
    )
    kv = add("kv", "what the KV tiers hold, and how much work they save", _kv)
    kv.add_argument("--json", action="store_true", help="everything, as JSON")
    usage = add("usage", "requests and tokens of each tenant", _usage)
    usage.add_argument("--json", action="store_true", help="as JSON")
    policy = add("policy", "the policy of each scheduler; `set` changes it between two steps", _policy)
    policy.add_argument("action", nargs="?", choices=["set"])
    policy.add_argument(
        "change", nargs="?", metavar="KIND=NAME,...", help="kinds that are not named stay as they are"
    )
    policy.add_argument(  # `model` is a setting
        "--model", dest="of_model", default="", metavar="NAME", help="only schedulers of this model"
    )
    trace = add("trace", "where the time of one request went", _trace)
    trace.add_argument("request", help="its id: `request_id` in the frames, `id` in a plain answer")
    trace.add_argument("--json", action="store_true", help="the data, with the steps during the request")
    trace.add_argument(  # `overlap` is the name of a setting
        "--overlap", dest="draw_overlap", action="store_true", help="some of its steps, as rows of A and B"
    )
    trace.add_argument("--perfetto", type=Path, metavar="FILE", help="write a timeline of requests and steps")
    doctor = add("doctor", "check this machine and print how to fix problems", _doctor)
    doctor.add_argument(
        "--context", type=int, metavar="TOKENS", help="print the memory for users with so many"
    )
    doctor.add_argument("--users", type=int, metavar="N", help="print the memory for so many at once")


def _add_setting_flags(
    parser: argparse.ArgumentParser, names: Sequence[str] | None, *, several_models: bool = False
) -> None:
    """Add a flag for each of these settings; None adds all."""
    import argparse
    from pathlib import Path

    from shared.config import PREFIX, Settings, metavar

    group = parser.add_argument_group("settings", "also as variables and in a TOML file, see --config")
    group.add_argument("--config", type=Path, metavar="FILE", help="TOML file with settings")
    for name in names or Settings.model_fields:
        field = Settings.model_fields[name]
        flag, text = f"--{name.replace('_', '-')}", f"{field.description} [{PREFIX}{name.upper()}]"
        text = text.replace("%", "%%")
        if field.annotation is bool:
            group.add_argument(flag, action=argparse.BooleanOptionalAction, default=None, help=text)
        elif name == "model" and several_models:
            text = text.replace("model to serve", "model to serve, may be repeated")
            group.add_argument(flag, dest=name, metavar=metavar(name), action="append", default=[], help=text)
        else:
            group.add_argument(flag, dest=name, metavar=metavar(name), help=text)


def _load(given: argparse.Namespace) -> Loaded:
    from shared.config import Settings, load

    return load(given.config, {name: getattr(given, name, None) for name in Settings.model_fields})


def _up(given: argparse.Namespace) -> int:
    from services.launcher.fork_server import started_ahead

    with started_ahead() as forks:
        from services.launcher import session

        given.model, *more = given.model or [None]
        loaded = _load(given)
        with session.noted(loaded.settings):
            from services.launcher.up import Flags, up

            flags = Flags(given.leaves, given.join, given.schedulers, given.until_idle)
            must_be_durable = loaded.origins["durable"] != "default"
            return up(loaded.settings, given.auth, more, flags, must_be_durable=must_be_durable, forks=forks)


def _run_model(given: argparse.Namespace) -> None:
    from services.launcher.commands.chat import run

    run(_load(given), given.prompt, _conversation(given))


def _stop(given: argparse.Namespace) -> None:
    from services.launcher import background, session

    def report(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    for note in background.stop(session.path_for(_load(given).settings), report):
        print(f"fleet {note.fleet} has ended, it served {', '.join(note.models) or 'nothing yet'}")


def _chat(given: argparse.Namespace) -> None:
    from services.launcher.commands.chat import ask_once, converse
    from services.launcher.session import find_target

    loaded = _load(given)
    target, timeout_s = find_target(loaded, wait=True), loaded.settings.request_timeout_s
    said = _conversation(given)
    if given.question is not None:
        _run(ask_once(target, given.question, said, timeout_s))
    else:
        converse(target, said, timeout_s)


def _conversation(given: argparse.Namespace) -> Conversation:
    from services.launcher.commands.chat import Conversation

    named = {"max_tokens": given.max_tokens, "temperature": given.temperature, "seed": given.seed}
    said = Conversation({name: value for name, value in named.items() if value is not None})
    said.system = given.system
    return said


def _request(given: argparse.Namespace) -> None:
    from services.launcher.commands.submit import read_body, request
    from services.launcher.session import find_target

    body = read_body(given.body, given.file)
    loaded = _load(given)
    timeout_s = loaded.settings.request_timeout_s
    _run(request(find_target(loaded, wait=True), body, stream=given.stream, timeout_s=timeout_s))


def _batch(given: argparse.Namespace) -> int:
    from services.launcher.commands import batch
    from services.launcher.session import find_target

    target = find_target(_load(given), wait=True)
    if given.action == "submit":
        window = given.completion_window
        print(_run(batch.submit(target, given.input, given.endpoint, window, given.webhook)))
        return 0
    if given.action == "status":
        return _run(batch.status(target, given.id, as_json=given.json))
    if given.action == "cancel":
        _run(batch.cancel(target, given.id))
        return 0
    if given.action == "fetch":
        return 1 if _run(batch.fetch(target, given.id, given.output)) else 0
    return 1 if _run(batch.run(target, given.input, given.output)) else 0


def _submit(given: argparse.Namespace) -> None:
    from services.launcher.commands.submit import read_body, submit
    from services.launcher.session import find_target
    from shared.errors import BadRequest

    if (given.prompt is None) == (given.file is None):
        raise BadRequest("give the question as an argument, or a request with --file")
    said = _conversation(given)
    question = {"role": "user", "content": given.prompt}
    body = {"messages": [*said.messages, question], **said.options}
    if given.file is not None:
        body = read_body(None, given.file)
    if given.id is not None:
        body["request_id"] = given.id
    if given.webhook is not None:
        body["webhook"] = given.webhook
    if given.checkpoints:
        body["durable"] = "tokens"
    _run(submit(find_target(_load(given), wait=True), body))


def _result(given: argparse.Namespace) -> int:
    from services.launcher.commands.submit import result
    from services.launcher.session import find_target

    target = find_target(_load(given))
    return _run(result(target, given.id, wait=given.wait, as_json=given.json))


def _attach(given: argparse.Namespace) -> None:
    from services.launcher.commands.submit import attach
    from services.launcher.session import find_target

    _run(attach(find_target(_load(given)), given.id))


def _pull(given: argparse.Namespace) -> None:
    from services.launcher.commands.pull import pull

    settings = _load(given).settings
    pull(given.name or settings.model, settings.cache_dir, console.print_line)


def _find_fleet(given: argparse.Namespace) -> tuple[Target, str]:
    from services.launcher.session import find_target

    loaded = _load(given)
    return find_target(loaded), loaded.settings.fleet


def _status(given: argparse.Namespace) -> None:
    from services.launcher.commands.status import status

    _run(status(*_find_fleet(given), given.service, as_json=given.json))


def _logs(given: argparse.Namespace) -> None:
    from services.launcher import session
    from services.launcher.commands.logs import logs

    note = session.read(session.path_for(_load(given).settings))
    logs(note, given.service, given.lines, follow=given.follow)


def _top(given: argparse.Namespace) -> None:
    from services.launcher.commands.status import top

    _run(top(*_find_fleet(given), given.interval, given.count))


def _kv(given: argparse.Namespace) -> None:
    from services.launcher.commands.kv import kv

    _run(kv(*_find_fleet(given), as_json=given.json))


def _usage(given: argparse.Namespace) -> None:
    from services.launcher.commands.status import usage

    _run(usage(*_find_fleet(given), as_json=given.json))


def _policy(given: argparse.Namespace) -> int:
    from services.launcher.commands.record import policy

    change = (given.change or "") if given.action else None
    return _run(policy(*_find_fleet(given), change, given.of_model))


def _model(given: argparse.Namespace) -> int:
    from services.launcher.commands import model

    target, fleet = _find_fleet(given)
    if given.action in ("load", "unload"):
        return _run(model.load(target, fleet, given.action, given.name))
    if given.action in ("sleep", "wake"):
        return _run(model.sleep(target, fleet, given.action, given.name))
    if given.action == "list":
        _run(model.list_models(target, as_json=given.json))
    else:
        _run(model.alias(target, given.name, given.targets, delete=given.delete))
    return 0


def _trace(given: argparse.Namespace) -> None:
    from services.launcher.commands.trace import Form, trace
    from services.launcher.session import find_target

    form = Form(as_json=given.json, overlap=given.draw_overlap, perfetto=given.perfetto)
    _run(trace(find_target(_load(given)), given.request, form))


def _record(given: argparse.Namespace) -> None:
    from services.launcher.commands.record import record
    from services.launcher.session import find_target

    target = find_target(_load(given))
    _run(record(target, given.out, given.scheduler, given.seconds))


def _replay(given: argparse.Namespace) -> int:
    command = _load_test_module("simulator")
    if given.policy is not None:
        command.counterfactual(given.log, given.policy, as_json=given.json)
        return 0
    return int(command.replay(given.log, last_only=given.last, as_json=given.json))


def _shadow(given: argparse.Namespace) -> None:
    from services.launcher.commands.record import shadow
    from services.launcher.session import find_target

    compared = _load_test_module("simulator").shadow(given.other)
    _run(shadow(find_target(_load(given)), given.scheduler, given.interval, compared))


def _auth(given: argparse.Namespace) -> None:
    from services.launcher.commands import auth
    from shared.config import DEFAULT_NATS_URL

    settings = _load(given).settings
    if given.show:
        print(auth.url_of(given.folder, given.show, settings.nats_url))
        return
    url, tls = settings.nats_url or DEFAULT_NATS_URL, auth.tls_of(given.tls_cert, given.tls_key)
    classes = auth.classes_of(given.classes)
    plan = auth.Plan(
        url, settings.fleet, tuple(given.tenant), given.force, tls, classes, given.leaves,
        given.accounts or bool(given.limits), given.limits,
    )  # fmt: skip
    auth.generate(given.folder, plan, console.print_line)


def _health(kind: str) -> int:
    from services.launcher.heartbeats import health

    health(kind)
    return 0


def _doctor(given: argparse.Namespace) -> int:
    from services.launcher.commands.doctor import doctor
    from services.launcher.commands.sizing import print_sizing

    if given.context is None and given.users is None:
        return doctor(_load(given))
    return print_sizing(_load(given).settings, given.context or 0, 1 if given.users is None else given.users)


def _config(given: argparse.Namespace) -> None:
    from shared.config import PREFIX
    from shared.nats import access

    loaded = _load(given)
    shown = {**dict(loaded.settings), "nats_url": access.shown(loaded.settings.nats_url)}
    rows = [(n, str(v), loaded.origins[n]) for n, v in shown.items()]
    widths = [max(len(row[i]) for row in rows) for i in (0, 1)]
    for name, value, origin in rows:
        text = type(loaded.settings).model_fields[name].description
        print(f"{name:<{widths[0]}}  {value:<{widths[1]}}  {origin:<7}  {console.dim(text or '')}")
    for name in loaded.unknown_env:
        print(f"{name} is not a setting: {PREFIX}… takes the names above", file=sys.stderr)


def _load_test(given: argparse.Namespace) -> int:
    return int(_load_test_module(given.program).main(given.arguments))


def _load_test_module(program: str) -> Any:
    """The module `command` of a folder of loadtest/, loaded by name: services do not import loadtest."""
    from importlib import import_module

    from shared.errors import SetupError

    try:
        return import_module(f"loadtest.{program}.command")
    except ModuleNotFoundError as error:
        raise SetupError(f"loadtest.{program} is missing ({error}): run it from a source tree") from None


def _serve(given: argparse.Namespace) -> int:
    from services.launcher.serve import serve

    return serve(given.kind, _load(given).settings)


def _completion(given: argparse.Namespace) -> None:
    from services.launcher.commands.completion import script

    programs = {program: _load_test_module(program).parser() for program in ("bench", "eval")}
    print(script(given.shell, _parser(_ALL), programs), end="")


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


if __name__ == "__main__":
    raise SystemExit(main())
