"""By hand: coding agents against `headrace up`, with the settings of docs/guides/agents.md as they are printed.

    python scripts/clients/agents.py [small|long|called] [NAME ...]

Each section of that page becomes files and commands in a HOME of its own, with the page's address replaced by
that of a proxy, which passes requests on and notes their answers. Three runs:

    small    the default model: requests go through as they are. An answer over the context is no fault.
    long     its first layer alone, with a context of 65,536 tokens, in which all requests fit: fast, and its
             text means nothing. Requests go through as they are. In both runs an agent is stopped after two
             minutes: such models write without end.
    called   the same model. The proxy makes answers certain by schemas: the first request with tools gets a call
             that writes a file, the others a short text. The agent must then have written the file.

A failure is any other 4xx or 5xx, a file that is missing, or an agent that does not end. As root on Linux
agents run in a network namespace without a way out.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from gguf import GGUFReader, GGUFValueType, GGUFWriter
from run import LIMIT_S, ROOT, VENVS, up

PAGE = ROOT / "docs" / "guides" / "agents.md"
PRINTED = "127.0.0.1:8000"
KINDS = ("small", "long", "called")
MODEL = "smollm2-135m-instruct"
CONTEXT = 65_536
SMALL_S = 120  # for an agent whose model does what it likes
COMMAND = "echo hello > hello.txt"
# The tool that runs a command, by its name at each agent, with arguments that it takes.
TOOLS: dict[str, dict[str, Any]] = {
    "Bash": {"command": COMMAND, "description": "write hello"},
    "exec_command": {"cmd": COMMAND},
    "shell_command": {"command": COMMAND},
    "run_shell_command": {"command": COMMAND, "is_background": False},
    "bash": {"command": COMMAND, "description": "write hello"},
    "shell": {"command": COMMAND},
}
OVER_CONTEXT = (b"context_length_exceeded", b"prompt is too long", b"exceed context limit")
FAILED = re.compile(rb'event: error|response\.failed|"error": ?\{')  # of a stream with status 200
WITHOUT_TOOLS = {"aider"}


@dataclass
class Agent:
    """A section of the page."""

    name: str
    packages: list[str] = field(default_factory=list)  # `npm:…` or `pip:…`
    files: dict[str, str] = field(default_factory=dict)  # below HOME
    command: str = ""


def agents() -> list[Agent]:
    """The agents of the page."""
    found = []
    for section in PAGE.read_text().split("\n## ")[1:]:
        agent = Agent(section.partition("\n")[0].lower().replace(" ", "-"))
        for title, kind, text in re.findall(
            r"(?:`~/(\S+)`[:;][^\n]*\n\n)?```(\w+)\n(.*?)```", section, re.DOTALL
        ):
            if title:
                agent.files[title] = text
            elif installed := re.match(r"(npm|pip) install (?:-g )?(\S+)\n$", text):
                agent.packages.append(":".join(installed.groups()))
            elif kind == "sh":
                agent.command += text
        found.append(agent)
    return [agent for agent in found if agent.command]


def install(agent: Agent) -> Path:
    """The folder with the commands of an agent's packages."""
    folder = VENVS / agent.name
    binaries = folder / "bin"
    for manager, _, package in (each.partition(":") for each in agent.packages):
        if manager == "pip":
            if not binaries.exists():
                subprocess.run([sys.executable, "-m", "venv", folder], check=True)
            command = [str(binaries / "pip"), "install", "-q", package]
        else:
            command = [
                "npm",
                "install",
                "--silent",
                "--no-audit",
                "--no-fund",
                "-g",
                "--prefix",
                str(folder),
                package,
            ]
        subprocess.run(command, check=True, timeout=LIMIT_S)
    return binaries


def one_layer(folder: Path) -> Path:
    """The default model's first layer as a model of a long context."""
    source = Path("~/.cache/headrace/models/SmolLM2-135M-Instruct.Q4_1.gguf").expanduser()
    reader, target = GGUFReader(source), folder / "one-layer.gguf"
    writer = GGUFWriter(target, "llama")
    changed = {"llama.context_length": CONTEXT, "llama.block_count": 1}
    for entry in reader.fields.values():
        if not entry.name.startswith("GGUF.") and entry.name != "general.architecture":
            inner = entry.types[-1] if entry.types[0] == GGUFValueType.ARRAY else None
            value = changed.get(entry.name, entry.contents())
            writer.add_key_value(entry.name, value, entry.types[0], sub_type=inner)
    for tensor in reader.tensors:
        if not re.match(r"blk\.[1-9]", tensor.name):
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


@dataclass
class Answer:
    """What a request got."""

    path: str  # with the method
    status: int
    error: bytes = b""  # the body of an error, or the part of a stream that has one


class Proxy(ThreadingHTTPServer):
    """Passes requests on to `upstream` and notes each answer; with `calling` it makes one call certain."""

    daemon_threads = True

    def __init__(self, upstream: str, *, calling: bool) -> None:
        super().__init__(("127.0.0.1", 0), Passing)
        self.upstream = upstream.removeprefix("http://")
        self.calling = calling
        self.answers: list[Answer] = []
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def faults(self) -> list[str]:
        return [
            f"{each.path}: {each.status} {each.error[:300]!r}"
            for each in self.answers
            if (each.error or each.status >= 400) and not any(words in each.error for words in OVER_CONTEXT)
        ]


def scripted(path: str, body: dict[str, Any]) -> dict[str, Any]:
    """A request with one possible answer: a call of a tool that runs a command, or a text if it was called."""
    tools = {_name(tool): tool for tool in body.get("tools") or ()}
    wanted = next((name for name in TOOLS if name in tools), None)
    called = re.search(r'"(tool_result|function_call_output)"|"role": "tool"', json.dumps(body))
    if called or wanted is None:
        form = {"type": "json_schema", "schema": _only({"done": True})}
        if path.endswith("/messages"):
            return body | {"tool_choice": {"type": "none"}, "output_config": {"format": form}}
        if path.endswith("/responses"):
            return body | {"tool_choice": "none", "text": {"format": {**form, "name": "done"}}}
        form = {"type": "json_schema", "json_schema": {"name": "done", "schema": form["schema"]}}
        return body | {"tool_choice": "none", "response_format": form}
    function = tools[wanted].get("function", tools[wanted])
    arguments = "input_schema" if path.endswith("/messages") else "parameters"
    function[arguments] = _only(TOOLS[wanted])
    choice: dict[str, Any] = {"type": "function", "name": wanted}
    if path.endswith("/messages"):
        choice = {"type": "tool", "name": wanted, "disable_parallel_tool_use": True}
    elif "function" in tools[wanted]:
        choice = {"type": "function", "function": {"name": wanted}}
    return body | {"tool_choice": choice}


def _only(values: dict[str, Any]) -> dict[str, Any]:
    """The schema of an object with these values."""
    fixed = {name: {"const": value} for name, value in values.items()}
    return {"type": "object", "properties": fixed, "required": list(fixed), "additionalProperties": False}


def _name(tool: dict[str, Any]) -> str:
    return str(tool.get("function", tool).get("name"))


class Passing(BaseHTTPRequestHandler):
    """One connection of an agent."""

    server: Proxy
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Says nothing: the proxy notes the answers."""

    def pass_on(self) -> None:
        body = self._body()
        path = self.path.partition("?")[0]
        if self.server.calling and path.endswith(("/messages", "/responses", "/chat/completions")):
            body = json.dumps(scripted(path, json.loads(body))).encode()
        headers = {
            k: v
            for k, v in self.headers.items()
            if k.lower() not in ("host", "connection", "content-length", "transfer-encoding")
        }
        if body:
            headers["content-length"] = str(len(body))
        upstream = http.client.HTTPConnection(self.server.upstream, timeout=LIMIT_S)
        upstream.request(self.command, self.path, body or None, headers)
        answer = upstream.getresponse()
        self.send_response(answer.status)
        for key, value in answer.getheaders():
            if key.lower() not in ("connection", "transfer-encoding", "date", "server"):
                self.send_header(key, value)
        self.send_header("connection", "close")
        self.close_connection = True
        self.end_headers()
        noted = Answer(f"{self.command} {path}", answer.status)
        self.server.answers.append(noted)
        with contextlib.suppress(ConnectionError):  # the agent was stopped
            while piece := answer.read1(65_536):
                if answer.status >= 400 or FAILED.search(piece):
                    noted.error += piece
                self.wfile.write(piece)

    do_GET = do_HEAD = do_POST = pass_on

    def _body(self) -> bytes:
        if "chunked" not in self.headers.get("transfer-encoding", ""):
            return self.rfile.read(int(self.headers.get("content-length", 0)))
        body = b""
        while size := int(self.rfile.readline().partition(b";")[0], 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body


def run(agent: Agent, url: str, folder: Path, *, calling: bool) -> tuple[bool, str]:
    """Whether an agent works, and what its requests got."""
    home, work = folder / "home", folder / "work"
    proxy = Proxy(url, calling=calling)
    address = f"127.0.0.1:{proxy.server_address[1]}"
    work.mkdir(parents=True)
    for name, text in agent.files.items():
        path = home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.replace(PRINTED, address))
    env = {
        "HOME": str(home), "PATH": f"{VENVS / agent.name / 'bin'}:{os.environ['PATH']}",
        "LANG": "C.UTF-8", "TERM": "dumb", "TMPDIR": str(folder),
    }  # fmt: skip
    home.mkdir(exist_ok=True)
    shell = ["bash", "-ec", agent.command.replace(PRINTED, address)]
    log = folder / "output"
    with log.open("w") as output:
        process = subprocess.Popen(
            shell, cwd=work, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )  # fmt: skip
        try:
            ended = f"status {process.wait(LIMIT_S if calling else SMALL_S)}"
        except subprocess.TimeoutExpired:
            ended = "stopped"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    proxy.shutdown()
    statuses = " ".join(f"{each.status}{'!' if each.error else ''}" for each in proxy.answers)
    faults = proxy.faults
    if not proxy.answers and ended != "stopped":
        faults.append("no request")
    if calling and ended == "stopped":
        faults.append("no end")
    if calling and agent.name not in WITHOUT_TOOLS:
        written = work / "hello.txt"
        if not written.exists() or written.read_text() != "hello\n":
            faults.append("the call was not run")
    for fault in faults:
        sys.stderr.write(f"--- {agent.name}: {fault}\n")
    if faults:
        sys.stderr.write(log.read_text(errors="replace")[-2000:] + "\n")
    return not faults, f"{ended}; answers: {statuses}"


def offline(arguments: list[str]) -> None:
    """Go on as a process without a network, where that can be had."""
    if os.geteuid() == 0 and shutil.which("unshare") and "--inside" not in arguments:
        inside = 'ip link set lo up && exec "$@"'
        again = [sys.executable, __file__, "--inside", *arguments]
        os.execvp("unshare", ["unshare", "-n", "sh", "-c", inside, "sh", *again])


def main() -> int:
    """Run all agents, or those named; exit status 1 if one fails."""
    arguments = sys.argv[1:]
    kinds = [name for name in KINDS if name in arguments] or KINDS
    wanted = [name for name in arguments if name not in ("--inside", *KINDS)]
    chosen = [agent for agent in agents() if not wanted or agent.name in wanted]
    if "--inside" not in arguments:
        for agent in chosen:
            install(agent)
    offline(arguments)
    failed = 0
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
        folder = Path(temporary)
        more = ("--model", str(one_layer(folder)), "--model-name", MODEL, "--max-context", str(CONTEXT))
        for kind in kinds:
            process, url = up(str(folder), *(() if kind == "small" else more))
            try:
                for agent in chosen:
                    started_s = time.monotonic()
                    works, shown = run(agent, url, folder / kind / agent.name, calling=kind == "called")
                    failed += not works
                    took_s = time.monotonic() - started_s
                    word = "works" if works else "FAILS"
                    print(f"{kind:<7} {agent.name:<12} {word} {took_s:6.1f} s  {shown}", flush=True)
            finally:
                process.terminate()
                process.wait(60)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
